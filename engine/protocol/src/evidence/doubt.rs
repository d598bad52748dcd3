//! A doubt that was recorded, against a verdict that rests on less.
//!
//! Owns: which verdicts give way to it. Does not own: what is doubted (the parent), whether more is known by now than was then (the node).

use super::Verdict;

impl Verdict {
    /// Says again what a record doubted. Tier-3 keeps no writers and no states of files, so that what was read back from there would pass
    /// for undoubted, or for whole once a flush asks.
    #[must_use]
    pub fn in_doubt(self, recorded: &str) -> Self {
        match self {
            Self::Complete { .. } | Self::Settled { undecided: false, .. } => {
                Self::Settled { detail: recorded.to_owned(), undecided: true }
            }
            Self::Settled { .. }
            | Self::Open { .. }
            | Self::ReadIndex { .. }
            | Self::Incomplete { .. }
            | Self::Torn { .. }
            | Self::Broken { .. } => self,
        }
    }
}
