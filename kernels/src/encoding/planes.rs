//! Elements of two or four bytes as planes, exponents apart from mantissas, and back.
//!
//! Owns: the place of each byte of an element. Does not own: the further encoding of a plane, or bytes after the last element.
//!
//! BF16 and FP32 have the sign in the highest bit, then eight bits of exponent, which no byte holds whole. Rotated left by one bit they
//! have the exponent in the highest byte and the sign in the lowest bit:
//!
//! ```text
//! FP32   s eeeeeee | e mmmmmmm | mmmmmmmm | mmmmmmmm   ──►   eeeeeeee | mmmmmmmm | mmmmmmmm | mmmmmmm s
//! plane                                                          3          2          1          0
//! ```

/// Number of bytes of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// BF16; FP16 too, whose exponent has five bits and shares its byte.
    Two,
    /// FP32.
    Four,
}

impl Width {
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }
}

/// Fills `planes` with the planes of `elements`, least significant first.
///
/// Panics when the two differ in length, or are no whole number of elements.
pub fn split(width: Width, elements: &[u8], planes: &mut [u8]) {
    check(width, elements, planes);
    let each = elements.len() / width.bytes();
    match width {
        Width::Two => {
            let (low, high) = planes.split_at_mut(each);
            for ((element, low), high) in elements.as_chunks::<2>().0.iter().zip(low).zip(high) {
                [*low, *high] = u16::from_le_bytes(*element).rotate_left(1).to_le_bytes();
            }
        }
        Width::Four => {
            let (lower, upper) = planes.split_at_mut(2 * each);
            let (a, b) = lower.split_at_mut(each);
            let (c, d) = upper.split_at_mut(each);
            let outputs = a.iter_mut().zip(b).zip(c.iter_mut().zip(d));
            for (element, ((a, b), (c, d))) in elements.as_chunks::<4>().0.iter().zip(outputs) {
                [*a, *b, *c, *d] = u32::from_le_bytes(*element).rotate_left(1).to_le_bytes();
            }
        }
    }
}

/// Restores the elements that [`split`] took apart.
///
/// Panics when the two differ in length, or are no whole number of elements.
pub fn join(width: Width, planes: &[u8], elements: &mut [u8]) {
    check(width, elements, planes);
    let each = elements.len() / width.bytes();
    match width {
        Width::Two => {
            let (low, high) = planes.split_at(each);
            for ((element, low), high) in elements.as_chunks_mut::<2>().0.iter_mut().zip(low).zip(high) {
                *element = u16::from_le_bytes([*low, *high]).rotate_right(1).to_le_bytes();
            }
        }
        Width::Four => {
            let (lower, upper) = planes.split_at(2 * each);
            let (a, b) = lower.split_at(each);
            let (c, d) = upper.split_at(each);
            let inputs = a.iter().zip(b).zip(c.iter().zip(d));
            for (element, ((a, b), (c, d))) in elements.as_chunks_mut::<4>().0.iter_mut().zip(inputs) {
                *element = u32::from_le_bytes([*a, *b, *c, *d]).rotate_right(1).to_le_bytes();
            }
        }
    }
}

fn check(width: Width, elements: &[u8], planes: &[u8]) {
    assert_eq!(elements.len(), planes.len(), "planes hold the bytes of the elements, each once");
    assert!(elements.len().is_multiple_of(width.bytes()), "whole elements");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponents_lie_together_and_signs_at_the_other_end() {
        let values = [1.0_f32, -1.5, 3.0e-5, 0.0];
        let elements: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let mut planes = vec![0; elements.len()];
        split(Width::Four, &elements, &mut planes);
        let exponents: Vec<u8> =
            values.iter().map(|value| u8::try_from(value.to_bits() >> 23 & 0xff).unwrap()).collect();
        assert_eq!(planes[12..], exponents);
        assert_eq!(planes[..4].iter().map(|byte| byte & 1).collect::<Vec<_>>(), [0, 1, 0, 0]);

        // BF16 is the upper half of FP32.
        let halves: Vec<u8> = elements.chunks(4).flat_map(|element| [element[2], element[3]]).collect();
        let mut planes = vec![0; halves.len()];
        split(Width::Two, &halves, &mut planes);
        assert_eq!(planes[4..], exponents);
        assert_eq!(planes[..4].iter().map(|byte| byte & 1).collect::<Vec<_>>(), [0, 1, 0, 0]);
    }
}
