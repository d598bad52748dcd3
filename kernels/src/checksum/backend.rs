//! The code that computes the checksum on this processor.
//!
//! Owns: detection, once per process, and the dispatch. Does not own: the loops.
//!
//! `crc-fast` has loops for AVX-512, for 128-bit PCLMULQDQ and for ARM. Processors with 256-bit carry-less
//! multiplication and no AVX-512 (AMD Zen 3; Intel's client parts since Alder Lake) get its 128-bit loop, which cannot
//! follow their memory; `vpclmul` is for these processors.

use super::table;
use crc_fast::{CrcAlgorithm, Digest};
use std::sync::OnceLock;

/// A way of computing CRC-64/NVME. All ways give the same values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// The loop of this crate over 256-bit VPCLMULQDQ.
    Vpclmul256,
    /// The `crc-fast` crate: AVX-512, PCLMULQDQ, ARM's PMULL, or tables, whichever it finds.
    CrcFast,
    /// A table lookup per byte: any processor.
    Table,
}

impl Backend {
    /// Returns the fastest back end of this processor; the answer never changes within a process.
    #[must_use]
    pub fn fastest() -> Self {
        static FASTEST: OnceLock<Backend> = OnceLock::new();
        *FASTEST.get_or_init(|| {
            if Self::has_vpclmul() && !Self::has_avx512_vpclmul() { Self::Vpclmul256 } else { Self::CrcFast }
        })
    }

    /// Lists every back end that this processor can run: for tests and benches.
    #[must_use]
    pub fn all_here() -> Vec<Self> {
        let mut all = vec![Self::CrcFast, Self::Table];
        if Self::has_vpclmul() {
            all.push(Self::Vpclmul256);
        }
        all
    }

    /// Appends `bytes` to a raw register: the caller does the initial and the final inversion.
    ///
    /// # Panics
    /// When this processor lacks the back end's instructions, which [`Backend::all_here`] never lists.
    #[must_use]
    pub fn extend(self, register: u64, bytes: &[u8]) -> u64 {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Vpclmul256 => super::vpclmul::extend(register, bytes),
            #[cfg(not(target_arch = "x86_64"))]
            Self::Vpclmul256 => panic!("VPCLMULQDQ is an x86-64 instruction"),
            Self::CrcFast => {
                let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, register);
                digest.update(bytes);
                digest.get_state()
            }
            Self::Table => table::extend(register, bytes),
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn has_vpclmul() -> bool {
        super::vpclmul::is_available()
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn has_vpclmul() -> bool {
        false
    }

    /// Returns whether the processor has everything that `crc-fast` requires for its 512-bit loop.
    #[cfg(target_arch = "x86_64")]
    fn has_avx512_vpclmul() -> bool {
        is_x86_feature_detected!("avx512vl") && is_x86_feature_detected!("vpclmulqdq")
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn has_avx512_vpclmul() -> bool {
        false
    }
}
