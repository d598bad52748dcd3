//! Ranges of a file: cut into pieces to move, and joined again when they have landed.
//!
//! Owns: the arithmetic. Does not own: the moving.

use std::ops::Range;

/// Bytes that are asked for, paced, checked and confirmed at a time. At 1 GB/s a piece takes a millisecond, so a pace
/// is held closely and little is sent twice after a cut. A piece's header and confirmation are a ten-thousandth of it.
pub(crate) const PIECE_BYTES: u64 = 1 << 20;

/// Cuts ranges into pieces of at most `piece_bytes`, in order. Empty and reversed ranges give no piece.
pub(crate) fn pieces(
    ranges: &[Range<u64>],
    piece_bytes: u64,
) -> impl Iterator<Item = Range<u64>> + Send + use<> {
    let ranges: Vec<_> = ranges.to_vec();
    ranges.into_iter().flat_map(move |range| {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let piece = at..range.end.min(at.saturating_add(piece_bytes));
            at = piece.end;
            (piece.start < piece.end).then_some(piece)
        })
    })
}

/// Ranges that have landed, sorted and joined.
#[derive(Debug, Default)]
pub(crate) struct Landed(Vec<Range<u64>>);

impl Landed {
    /// Adds a piece, which may overlap or repeat others. Costs a search, and a move when out of order.
    pub(crate) fn add(&mut self, piece: Range<u64>) {
        if piece.start >= piece.end {
            return;
        }
        let first = self.0.partition_point(|range| range.end < piece.start);
        let after = self.0.partition_point(|range| range.start <= piece.end);
        let joined = self.0[first..after]
            .iter()
            .fold(piece, |joined, range| joined.start.min(range.start)..joined.end.max(range.end));
        self.0.splice(first..after, [joined]);
    }

    pub(crate) fn into_ranges(self) -> Vec<Range<u64>> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_ranges_and_nothing_else() {
        let cut: Vec<_> = pieces(&[0..10, 20..20, 30..34], 4).collect();
        assert_eq!(cut, [0..4, 4..8, 8..10, 30..34]);
        let odd = [u64::MAX - 1..u64::MAX, Range { start: 5, end: 3 }];
        assert!(pieces(&odd, 4).eq([u64::MAX - 1..u64::MAX; 1]));
    }

    #[test]
    fn what_landed_is_joined_in_any_order() {
        let mut landed = Landed::default();
        for piece in [4..8, 20..24, 0..4, 12..16, 8..12, 4..8, 30..30] {
            landed.add(piece);
        }
        assert_eq!(landed.into_ranges(), [0..16, 20..24]);
    }
}
