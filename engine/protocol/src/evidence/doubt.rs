//! A recorded doubt, against a verdict that rests on less.
//!
//! Owns: which verdicts yield to the doubt. Does not own: what is doubted (the parent), whether more is known by now (the node).

use super::Verdict;

impl Verdict {
    /// Applies a record's doubt again. Tier-3 keeps no writers and no file states: without this, content read back from there would count
    /// as undoubted, or as whole once a flush asks.
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
