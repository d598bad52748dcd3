//! Random numbers that follow from a seed, so that a campaign can be run again.
//!
//! Owns: the generator (splitmix64). Does not own: the decisions made with it.

use std::ops::Range;

/// A sequence that its seed determines.
#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number of the range, which must not be empty.
    pub fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.roll() % (range.end - range.start)
    }

    pub fn one_in(&mut self, chances: u64) -> bool {
        self.roll().is_multiple_of(chances)
    }

    /// Returns bytes that no other call returns and that do not compress.
    pub fn bytes(&mut self, size_bytes: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(size_bytes + 8);
        while bytes.len() < size_bytes {
            bytes.extend_from_slice(&self.roll().to_le_bytes());
        }
        bytes.truncate(size_bytes);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_again_and_another_one_does_not() {
        let throw = |seed| Dice::new(seed).bytes(1001);
        assert_eq!(throw(1), throw(1));
        assert_ne!(throw(1), throw(2));
        assert_eq!(throw(1).len(), 1001);
        let mut dice = Dice::new(3);
        assert!((0..1000).all(|_| (5..9).contains(&dice.within(5..9))));
        assert!((100..400).contains(&(0..1000).filter(|_| dice.one_in(4)).count()));
    }
}
