//! The same loops, compiled for each set of instructions.
//!
//! Owns: the calls into code for instructions that a processor may lack; unsafe code is allowed here. Does not own: the loops.

use super::super::{CpuBackend, Values};
use super::piece::{self, Found, Int8Piece, SparsePiece};

/// Compiles a call of `$inner` once per back end, as `$name`, which takes the back end first.
macro_rules! for_each_backend {
    ($(#[$doc:meta])* $name:ident ($($arg:ident: $type:ty),*) $(-> $out:ty)?, $inner:path) => {
        $(#[$doc])*
        ///
        /// # Panics
        /// When the instructions are missing: a wrong choice of back end is an error of this crate.
        pub(super) fn $name(backend: CpuBackend, $($arg: $type),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            fn avx512($($arg: $type),*) $(-> $out)? {
                $inner($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $type),*) $(-> $out)? {
                $inner($($arg),*)
            }
            match backend {
                #[cfg(target_arch = "x86_64")]
                CpuBackend::Avx512 => {
                    let here = is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("avx512bw")
                        && is_x86_feature_detected!("avx512vl");
                    assert!(here, "this processor has no AVX-512: use another back end");
                    // SAFETY: the assertion above found every feature that the function is compiled for.
                    unsafe { avx512($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                CpuBackend::Avx2 => {
                    let here = is_x86_feature_detected!("avx2");
                    assert!(here, "this processor has no AVX2: use another back end");
                    // SAFETY: the assertion above found every feature that the function is compiled for.
                    unsafe { avx2($($arg),*) }
                }
                #[cfg(not(target_arch = "x86_64"))]
                CpuBackend::Avx512 | CpuBackend::Avx2 => panic!("AVX is an extension of x86-64"),
                CpuBackend::Portable => $inner($($arg),*),
            }
        }
    };
}

for_each_backend!(
    /// Returns whether all values are finite.
    finite(values: Values<'_>) -> bool,
    piece::finite
);
for_each_backend!(
    /// Returns the kept part of a sparse piece.
    sparse(of: SparsePiece<'_>) -> Found,
    piece::sparse
);
for_each_backend!(
    /// Quantises a piece; returns false if a sum is not finite.
    int8(of: Int8Piece<'_>) -> bool,
    piece::int8
);
for_each_backend!(
    /// Adds a piece of INT8 blocks.
    add_int8(values: &[i8], scales: &[f32], block: usize, scale: f32, dense: &mut [f32]),
    piece::add_int8
);
