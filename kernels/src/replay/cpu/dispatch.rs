//! The same loops, compiled for each set of instructions.
//!
//! Owns: detection, and the calls into code for instructions that a processor may lack; unsafe code is allowed here. Does not
//! own: the loops.

use super::super::{Factors, Gradient, State};
use super::gradient::Cursor;
use super::{CpuBackend, block, gradient};

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
}

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn has_avx512() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn has_avx2() -> bool {
    false
}

/// Compiles a call of `$inner` once per back end, as `$name`, which takes the back end first.
macro_rules! for_each_backend {
    ($(#[$doc:meta])* $name:ident $(<$life:lifetime>)? ($($arg:ident: $type:ty),*) $(-> $out:ty)?, $inner:path) => {
        $(#[$doc])*
        ///
        /// # Panics
        /// When the instructions are missing: a wrong choice of back end is an error of this crate.
        pub(super) fn $name $(<$life>)? (backend: CpuBackend, $($arg: $type),*) $(-> $out)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            fn avx512 $(<$life>)? ($($arg: $type),*) $(-> $out)? {
                $inner($($arg),*)
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2 $(<$life>)? ($($arg: $type),*) $(-> $out)? {
                $inner($($arg),*)
            }
            match backend {
                #[cfg(target_arch = "x86_64")]
                CpuBackend::Avx512 => {
                    assert!(has_avx512(), "this processor has no AVX-512: use another back end");
                    // SAFETY: the assertion above found every feature that the function is compiled for.
                    unsafe { avx512($($arg),*) }
                }
                #[cfg(target_arch = "x86_64")]
                CpuBackend::Avx2 => {
                    assert!(has_avx2(), "this processor has no AVX2: use another back end");
                    // SAFETY: the assertion above found the feature that the function is compiled for.
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
    /// Applies a step to a block.
    update(factors: &Factors, of: &mut State<'_>, values: &[f32]),
    block::update
);
for_each_backend!(
    /// Writes the half copy of a block.
    copy(of: &mut State<'_>),
    block::copy
);
for_each_backend!(
    /// Returns a block's part of a gradient in its own memory, or `None` and it is in `scratch`.
    values<'a>(of: &Gradient<'a>, begin: usize, cursor: &mut Cursor, scratch: &mut [f32]) -> Option<&'a [f32]>,
    gradient::values
);
