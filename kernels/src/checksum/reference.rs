//! The definition of CRC-64/NVME, one bit at a time.
//!
//! Owns: the meaning; every back end must agree with it bit for bit. Does not own: speed (this runs at some
//! 100 MB/s and is called by tests only).

use super::ALL_ONES;
use super::field::POLYNOMIAL;

/// Returns the CRC-64/NVME of `bytes`: the remainder of the message, as a polynomial over GF(2) whose first byte's
/// lowest bit is the highest power, after division by the 64th-degree polynomial 0xad93d23594c93659. The register
/// starts as all ones and is inverted at the end. (NVM Express NVM Command Set Specification 1.0d, section 5.2.1.3.4;
/// the S3 header `x-amz-checksum-crc64nvme` carries this value in big-endian bytes.)
#[must_use]
pub fn crc64(bytes: &[u8]) -> u64 {
    let mut register = ALL_ONES;
    for &byte in bytes {
        register ^= u64::from(byte);
        for _ in 0..8 {
            let carried = register & 1 == 1;
            register >>= 1;
            if carried {
                register ^= POLYNOMIAL;
            }
        }
    }
    register ^ ALL_ONES
}
