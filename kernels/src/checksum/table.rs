//! A byte at a time, from a table: for the bytes that the wide loops leave.
//!
//! Owns: extending a register by few bytes. Does not own: long buffers (a table does about 300 MB/s).

use super::field::POLYNOMIAL;

/// The effect of eight shifts on each value of the register's lowest byte.
static AFTER_BYTE: [u64; 256] = after_byte();

/// Appends `bytes` to a register, without its initial or final inversion.
pub(super) fn extend(register: u64, bytes: &[u8]) -> u64 {
    bytes.iter().fold(register, |register, &byte| {
        let [lowest, ..] = register.to_le_bytes();
        AFTER_BYTE[usize::from(lowest ^ byte)] ^ (register >> 8)
    })
}

const fn after_byte() -> [u64; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut register = index as u64;
        let mut bit = 0;
        while bit < 8 {
            let carried = register & 1 == 1;
            register >>= 1;
            if carried {
                register ^= POLYNOMIAL;
            }
            bit += 1;
        }
        table[index] = register;
        index += 1;
    }
    table
}
