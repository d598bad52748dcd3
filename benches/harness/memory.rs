//! Measures memory.
//!
//! Owns: the rate at which one core reads and copies. Does not own: files and buffers (`files`).

use std::hint::black_box;
use std::time::Instant;

/// Size far above a core's share of the last-level cache of today's processors.
pub const BEYOND_CACHE_BYTES: usize = 1 << 30;

/// Returns the bytes per second at which one core reads `bytes` and does next to nothing with them.
#[must_use]
pub fn read_bytes_per_s(bytes: &[u8]) -> f64 {
    let started = Instant::now();
    black_box(read_all(black_box(bytes)));
    rate(bytes.len(), started)
}

/// Returns the bytes per second of memcpy on one core, counted once (it reads and writes each).
///
/// # Panics
/// When the two slices differ in length.
#[must_use]
pub fn copy_bytes_per_s(from: &[u8], to: &mut [u8]) -> f64 {
    let started = Instant::now();
    to.copy_from_slice(black_box(from));
    black_box(&mut *to);
    rate(from.len(), started)
}

/// Returns the bytes per second since `started`.
#[must_use]
pub fn rate(bytes: usize, started: Instant) -> f64 {
    bytes as f64 / started.elapsed().as_secs_f64()
}

/// Reads all bytes with sixteen running words, so that the loads, not the additions, take the time.
fn read_all(bytes: &[u8]) -> u64 {
    let (words, tail) = bytes.as_chunks::<8>();
    let (groups, rest) = words.as_chunks::<16>();
    let mut running = [0_u64; 16];
    for group in groups {
        for (word, next) in running.iter_mut().zip(group) {
            *word ^= u64::from_ne_bytes(*next);
        }
    }
    let last = tail.iter().fold(0, |all, &byte| all ^ u64::from(byte));
    rest.iter().fold(last, |all, word| all ^ u64::from_ne_bytes(*word))
        ^ running.iter().fold(0, |all, word| all ^ word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::buffer;

    #[test]
    fn reading_depends_on_every_byte() {
        let mut bytes = buffer(1000);
        let before = read_all(&bytes);
        for at in 0..bytes.len() {
            bytes[at] ^= 1;
            assert_ne!(read_all(&bytes), before, "byte {at}");
            bytes[at] ^= 1;
        }
    }
}
