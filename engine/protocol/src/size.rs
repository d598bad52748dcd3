//! Sizes as people write and read them.
//!
//! Owns: the one grammar of SIZE for every flag and setting, and the one way sizes are shown in tables.

use std::fmt;

/// The letters of the powers of 1024, largest first, each with its power of two.
const UNITS: [(char, u32); 4] = [('T', 40), ('G', 30), ('M', 20), ('K', 10)];

/// Why a text is not a size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error(
        "{text:?} is not a size; write bytes, or a number with K, M, G or T (powers of 1024), such as 4GiB"
    )]
    Malformed { text: String },
    #[error("{text:?} is more than 2^64 - 1 bytes")]
    TooLarge { text: String },
}

/// Parses bytes from `4096`, `512K`, `4G` or `4GiB`. Letters may be in either case; with a unit, a decimal point is
/// allowed (`1.5G`), and the result is rounded down to bytes. A bare `B` after the unit (`GB`) is refused, because it
/// often means powers of 1000.
///
/// # Errors
/// When the text is anything else, or the size does not fit 64 bits.
pub fn parse(text: &str) -> Result<u64, SizeError> {
    let malformed = || SizeError::Malformed { text: text.to_owned() };
    let too_large = || SizeError::TooLarge { text: text.to_owned() };
    let digits_end = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits_end);
    let unit = match unit.strip_suffix("iB").or_else(|| unit.strip_suffix("ib")) {
        Some("") => return Err(malformed()),
        Some(letter) => letter,
        None => unit,
    };
    let mut letters = unit.chars();
    let multiplier = match (letters.next().map(|c| c.to_ascii_uppercase()), letters.next()) {
        (None, _) => 1_u64,
        (Some(letter), None) => {
            let (_, power) = UNITS.iter().find(|(unit, _)| *unit == letter).ok_or_else(malformed)?;
            1 << power
        }
        (Some(_), Some(_)) => return Err(malformed()),
    };
    let (whole, fraction) = match number.split_once('.') {
        Some((_, fraction)) if fraction.is_empty() || fraction.contains('.') || multiplier == 1 => {
            return Err(malformed());
        }
        Some((whole, fraction)) => (whole, fraction),
        None => (number, ""),
    };
    if whole.is_empty() {
        return Err(malformed());
    }
    let whole: u64 = whole.parse().map_err(|_| too_large())?;
    let mut bytes = u128::from(whole) * u128::from(multiplier);
    // 12 digits resolve one byte of a tebibyte; more would only overflow.
    let (mut scale, mut parts) = (1_u128, 0_u128);
    for digit in fraction.bytes().take(12) {
        scale *= 10;
        parts = parts * 10 + u128::from(digit - b'0');
    }
    bytes += parts * u128::from(multiplier) / scale;
    u64::try_from(bytes).map_err(|_| too_large())
}

/// A size as tables show it: `412 B`, `2.0 MiB`, `411.9 GiB`. Rounded, so never for machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shown(pub u64);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The largest unit of which there is at least one whole, counted in tenths and rounded half up.
        for (unit, power) in UNITS {
            let one = 1_u64 << power;
            if self.0 >= one {
                let tenths = (u128::from(self.0) * 10 + u128::from(one / 2)) / u128::from(one);
                return f.pad(&format!("{}.{} {unit}iB", tenths / 10, tenths % 10));
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512K", 512 << 10),
            ("512k", 512 << 10),
            ("4GiB", 4 << 30),
            ("4Gib", 4 << 30),
            ("1.5G", 3 << 29),
            ("0.5KiB", 512),
            ("2T", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(parse(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn anything_else_is_refused() {
        for text in [
            "", "G", "iB", "4GB", "4B", "-1", "+1", "4 G", "1.5", "1.G", ".5G", "1.2.3G", "4GiBiB", "0x10",
            "1e3", "4X",
        ] {
            assert_eq!(parse(text), Err(SizeError::Malformed { text: text.into() }), "{text}");
        }
        for text in ["18446744073709551616", "16777216T", "99999999999999999999999G"] {
            assert_eq!(parse(text), Err(SizeError::TooLarge { text: text.into() }), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_the_largest_whole_unit() {
        for (bytes, shown) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (3 << 29, "1.5 GiB"),
            (442_300_000_000, "411.9 GiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(Shown(bytes).to_string(), shown);
        }
        assert_eq!(format!("{:>8}", Shown(1)), "     1 B");
    }

    proptest! {
        #[test]
        fn whole_units_survive_the_round_trip(bytes in any::<u64>()) {
            prop_assert_eq!(parse(&bytes.to_string()), Ok(bytes));
        }

        #[test]
        fn no_text_panics(text in "\\PC{0,24}") {
            let _ = parse(&text);
        }
    }
}
