//! CRC-64/NVME as a value: text forms, and how checksums of neighbours combine.
//!
//! Owns: the type, its arithmetic, and computing it over a document. Does not own: computing it over data (the kernels crate).

use crate::layout::{CHUNK_BYTES, chunk_count};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;

/// A CRC-64/NVME value (polynomial 0xad93d23594c93659 reflected, init and xorout all ones), as S3 calls it
/// CRC64NVME. Written as 16 hex digits in our JSON; S3 headers carry base64 of the big-endian bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Crc64(pub u64);

impl Crc64 {
    /// Returns the checksum of a document's text, a byte at a time: some hundred MB/s, which is no slower than JSON.
    #[must_use]
    pub fn of(text: &[u8]) -> Self {
        let step = |state: u64, byte: &u8| {
            let [lowest, ..] = state.to_le_bytes();
            TABLE[usize::from(lowest ^ *byte)] ^ (state >> 8)
        };
        Self(!text.iter().fold(u64::MAX, step))
    }

    /// Returns the checksum of `a ++ b`, from that of `a` (self) and that of `b` (`next`, `next_len_bytes` long), without the
    /// bytes. About 64 steps for each set bit of the length.
    #[must_use]
    pub fn combine(self, next: Self, next_len_bytes: u64) -> Self {
        Self(multiply(self.0, x_to_the_bytes(next_len_bytes)) ^ next.0)
    }

    /// Returns the checksum of a whole file of `size_bytes` from its chunks', or `None` if the number of chunks does not fit
    /// that size. The whole costs one step of 64 per chunk.
    #[must_use]
    pub fn combine_all(chunks: &[Self], size_bytes: u64) -> Option<Self> {
        if u64::try_from(chunks.len()).ok()? != chunk_count(size_bytes) {
            return None;
        }
        let Some((last, full)) = chunks.split_last() else { return Some(Self::default()) };
        let whole = full.iter().fold(Self::default(), |sum, chunk| Self(multiply(sum.0, X_CHUNK) ^ chunk.0));
        let full_bytes = (chunk_count(size_bytes) - 1) * CHUNK_BYTES;
        Some(whole.combine(*last, size_bytes - full_bytes))
    }

    /// Returns the form of S3's `x-amz-checksum-crc64nvme`: base64 of the eight bytes, most significant first.
    #[must_use]
    pub fn to_base64(self) -> String {
        STANDARD.encode(self.0.to_be_bytes())
    }

    /// Reads [`Self::to_base64`]; `None` for anything that is not base64 of eight bytes.
    #[must_use]
    pub fn from_base64(text: &str) -> Option<Self> {
        let bytes = STANDARD.decode(text).ok()?;
        Some(Self(u64::from_be_bytes(bytes.try_into().ok()?)))
    }

    /// Reads the 16 hex digits of `Display`.
    #[must_use]
    pub fn from_hex(text: &str) -> Option<Self> {
        if text.len() != 16 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        u64::from_str_radix(text, 16).ok().map(Self)
    }
}

// A CRC is the remainder of a polynomial over GF(2). Appending n bytes multiplies what was there by x^(8n), so
// combining needs one multiplication modulo the polynomial. Values are reflected: bit 63 is the coefficient of
// x^0. The all-ones initial value and the final inversion cancel, because both halves carry them.

/// The polynomial of CRC-64/NVME (NVM Express NVM command set, 64-bit guard), reflected.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
/// The change of the sum for each value of a byte.
static TABLE: [u64; 256] = table();
/// x^0, reflected.
const ONE: u64 = 1 << 63;
/// x^(8 · CHUNK_BYTES): the factor for appending one full chunk.
const X_CHUNK: u64 = x_to_the_bytes(CHUNK_BYTES);

const fn table() -> [u64; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut state = index as u64;
        let mut bit = 0;
        while bit < 8 {
            state = if state & 1 == 1 { (state >> 1) ^ POLYNOMIAL } else { state >> 1 };
            bit += 1;
        }
        table[index] = state;
        index += 1;
    }
    table
}

/// Returns `a · b` modulo the polynomial.
const fn multiply(a: u64, b: u64) -> u64 {
    let mut product = 0;
    let mut shifted = b;
    let mut index = 0;
    while index < 64 {
        if a & (ONE >> index) != 0 {
            product ^= shifted;
        }
        shifted = if shifted & 1 == 1 { (shifted >> 1) ^ POLYNOMIAL } else { shifted >> 1 };
        index += 1;
    }
    product
}

/// Returns x^(8 · bytes) modulo the polynomial, by squaring.
const fn x_to_the_bytes(bytes: u64) -> u64 {
    let mut square = ONE >> 8;
    let mut power = ONE;
    let mut rest = bytes;
    while rest != 0 {
        if rest & 1 == 1 {
            power = multiply(power, square);
        }
        square = multiply(square, square);
        rest >>= 1;
    }
    power
}

impl fmt::Debug for Crc64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Crc64 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl Serialize for Crc64 {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        // Between nodes a seal's list of chunks is long, and no person reads it.
        if !serializer.is_human_readable() {
            return serializer.serialize_bytes(&self.0.to_le_bytes());
        }
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Crc64 {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if !deserializer.is_human_readable() {
            let bytes = <&[u8]>::deserialize(deserializer)?;
            let bytes = bytes.try_into();
            return bytes
                .map(|bytes| Self(u64::from_le_bytes(bytes)))
                .map_err(|_| serde::de::Error::custom("a CRC-64 has 8 bytes"));
        }
        let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
        Self::from_hex(&text)
            .ok_or_else(|| serde::de::Error::custom(format!("a CRC-64 is 16 hex digits, not {text:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Computes the checksum by its definition, one bit at a time.
    fn crc(bytes: &[u8]) -> Crc64 {
        let mut state = u64::MAX;
        for byte in bytes {
            state ^= u64::from(*byte);
            for _ in 0..8 {
                state = if state & 1 == 1 { (state >> 1) ^ POLYNOMIAL } else { state >> 1 };
            }
        }
        Crc64(!state)
    }

    #[test]
    fn the_check_value_of_the_catalogue_holds() {
        assert_eq!(crc(b"123456789"), Crc64(0xae8b_1486_0a79_9888));
        assert_eq!(crc(b""), Crc64::default());
        assert_eq!(Crc64::of(b"123456789"), crc(b"123456789"));
    }

    #[test]
    fn whole_files_combine_from_their_chunks() {
        let size = CHUNK_BYTES + 5;
        let bytes: Vec<u8> = (0..size).map(|i| u8::try_from(i % 251).unwrap()).collect();
        let split = usize::try_from(CHUNK_BYTES).unwrap();
        let chunks = [crc(&bytes[..split]), crc(&bytes[split..])];
        assert_eq!(Crc64::combine_all(&chunks, size), Some(crc(&bytes)));
        assert_eq!(Crc64::combine_all(&chunks, CHUNK_BYTES), None);
        assert_eq!(Crc64::combine_all(&[], 0), Some(Crc64::default()));
    }

    proptest! {
        #[test]
        fn combining_equals_checksumming_the_concatenation(a: Vec<u8>, b: Vec<u8>) {
            let whole: Vec<u8> = a.iter().chain(&b).copied().collect();
            prop_assert_eq!(crc(&a).combine(crc(&b), b.len() as u64), crc(&whole));
            prop_assert_eq!(Crc64::of(&whole), crc(&whole));
        }

        #[test]
        fn text_forms_round_trip(value: u64) {
            let crc = Crc64(value);
            prop_assert_eq!(Crc64::from_base64(&crc.to_base64()), Some(crc));
            prop_assert_eq!(Crc64::from_hex(&crc.to_string()), Some(crc));
        }
    }
}
