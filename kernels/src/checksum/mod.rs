//! CRC-64/NVME of a buffer and of a stream.
//!
//! Owns: the two entry points and the choice of the back end, made once per process. Does not own: any of the
//! arithmetic (`reference` is its meaning, `backend` chooses the code that computes it).

pub(crate) mod backend;
pub(crate) mod chunks;
mod field;
pub mod reference;
mod table;
#[cfg(target_arch = "x86_64")]
mod vpclmul;

use backend::Backend;

/// The register before the first byte and the value XORed into it after the last: all ones for both.
/// (NVM Express NVM Command Set Specification 1.0d, section 5.2.1.3.4.)
const ALL_ONES: u64 = u64::MAX;

/// Returns the CRC-64/NVME of `bytes`, by the fastest back end of this processor.
///
/// Costs one pass over the bytes, at or near the memory read bandwidth of a core; `benches/seal.rs` measures how near.
/// S3 calls this value CRC64NVME.
#[must_use]
pub fn crc64(bytes: &[u8]) -> u64 {
    Backend::fastest().extend(ALL_ONES, bytes) ^ ALL_ONES
}

/// CRC-64/NVME of bytes that come in pieces. The pieces' boundaries do not change the value.
///
/// Pieces of 64 KiB and more cost what [`crc64`] costs; each piece below 256 bytes costs up to 100 ns more.
#[derive(Clone, Debug)]
pub struct Crc64Digest {
    register: u64,
}

impl Crc64Digest {
    /// Makes a digest of no bytes yet; its value is 0.
    #[must_use]
    pub fn new() -> Self {
        Self { register: ALL_ONES }
    }

    /// Appends `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        self.register = Backend::fastest().extend(self.register, bytes);
    }

    /// Returns the checksum of everything appended so far. More may be appended afterwards.
    #[must_use]
    pub fn finalize(&self) -> u64 {
        self.register ^ ALL_ONES
    }
}

impl Default for Crc64Digest {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Length several times the widest fold, so that every loop of every back end runs.
    const LONGEST_BYTES: usize = 5000;

    /// The check value of the specification: the nine ASCII digits.
    #[test]
    fn every_back_end_gives_the_published_check_value() {
        for backend in Backend::all_here() {
            assert_eq!(
                backend.extend(ALL_ONES, b"123456789") ^ ALL_ONES,
                0xae8b_1486_0a79_9888,
                "{backend:?}"
            );
        }
        assert_eq!(reference::crc64(b"123456789"), 0xae8b_1486_0a79_9888);
    }

    #[test]
    fn nothing_has_the_checksum_zero() {
        assert_eq!(crc64(b""), 0);
        assert_eq!(Crc64Digest::new().finalize(), 0);
    }

    /// Each length near a multiple of a fold's width takes another path through the tails.
    #[test]
    fn every_length_up_to_three_folds_agrees_with_the_reference() {
        let bytes: Vec<u8> = (0u32..800).map(|i| u8::try_from((i * 31 + i / 7) % 256).unwrap()).collect();
        for backend in Backend::all_here() {
            for length in 0..bytes.len() {
                let got = backend.extend(ALL_ONES, &bytes[..length]) ^ ALL_ONES;
                assert_eq!(got, reference::crc64(&bytes[..length]), "{backend:?}, {length} bytes");
            }
        }
    }

    proptest! {
        #[test]
        fn every_back_end_agrees_with_the_reference_at_any_alignment(
            bytes in prop::collection::vec(any::<u8>(), 0..LONGEST_BYTES),
            head in 0usize..64,
            tail in 0usize..64,
        ) {
            let from = head.min(bytes.len());
            let to = bytes.len().saturating_sub(tail).max(from);
            let part = &bytes[from..to];
            for backend in Backend::all_here() {
                let got = backend.extend(ALL_ONES, part) ^ ALL_ONES;
                prop_assert_eq!(got, reference::crc64(part), "{:?}", backend);
            }
        }

        #[test]
        fn pieces_do_not_change_the_value(
            bytes in prop::collection::vec(any::<u8>(), 0..LONGEST_BYTES),
            cuts in prop::collection::vec(0usize..LONGEST_BYTES, 0..6),
        ) {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(bytes.len())).collect();
            cuts.sort_unstable();
            let mut digest = Crc64Digest::new();
            let mut from = 0;
            for to in cuts.into_iter().chain([bytes.len()]) {
                digest.update(&bytes[from..to]);
                from = to;
            }
            prop_assert_eq!(digest.finalize(), reference::crc64(&bytes));
        }

        #[test]
        fn one_flipped_bit_changes_the_value(
            mut bytes in prop::collection::vec(any::<u8>(), 1..LONGEST_BYTES),
            at in any::<prop::sample::Index>(),
            bit in 0u32..8,
        ) {
            let before = crc64(&bytes);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            prop_assert_ne!(crc64(&bytes), before);
        }
    }
}
