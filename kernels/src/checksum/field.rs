//! The polynomial and the powers of x that folding needs, computed by the compiler.
//!
//! Owns: arithmetic modulo the polynomial, reflected: bit 63 of a value is x⁰ and bit 0 is x⁶³. Does not own:
//! any loop over a message.

/// CRC-64/NVME's polynomial 0xad93d23594c93659 with its bits reversed; x⁶⁴ is implied.
pub(super) const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;

/// Returns xⁿ modulo the polynomial. Costs n steps, so it is for constants.
pub(super) const fn power_of_x(n: u32) -> u64 {
    let mut value = 1 << 63;
    let mut step = 0;
    while step < n {
        let carried = value & 1 == 1;
        value >>= 1;
        if carried {
            value ^= POLYNOMIAL;
        }
        step += 1;
    }
    value
}

/// Returns the two multipliers that move a block of 128 bits `distance_bytes` further from the message's end: the first
/// for its first eight bytes, the second for its last.
///
/// A block (F, L) is F·x⁶⁴ + L, and moving it over d bits multiplies it by xᵈ, so F takes x^(d+64) and L takes
/// xᵈ. The carry-less product of two reflected 64-bit values has 127 bits and comes out one place low, which
/// is a factor x too much; hence the minus one in both.
pub(super) const fn fold_over(distance_bytes: u32) -> [u64; 2] {
    let bits = distance_bytes * 8;
    [power_of_x(bits + 64 - 1), power_of_x(bits - 1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_64th_power_is_the_polynomial_itself() {
        assert_eq!(power_of_x(0), 1 << 63);
        assert_eq!(power_of_x(63), 1);
        assert_eq!(power_of_x(64), POLYNOMIAL);
        assert_eq!(POLYNOMIAL.reverse_bits(), 0xad93_d235_94c9_3659);
    }
}
