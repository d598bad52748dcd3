//! A question to neighbours about a node that the coordinator does not hear.
//!
//! Owns: who was asked, who answered, and what that proves. Does not own: when it is asked (`mod`), the messages (`wire`).

use super::{ANSWER_MS, Proof};
use crate::id::NodeName;

/// An open question about a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inquiry {
    pub(super) question: u64,
    pub(super) asked: Vec<NodeName>,
    pub(super) unheard: Vec<NodeName>,
    pub(super) until_ms: u64,
    /// When the first of these questions was asked.
    pub(super) began_ms: u64,
}

impl Inquiry {
    /// Makes the inquiry where nobody can be asked.
    pub(super) fn of_nobody(now_ms: u64) -> Self {
        Self { question: 0, asked: vec![], unheard: vec![], until_ms: now_ms, began_ms: now_ms }
    }

    /// Returns the proof that neighbours did not hear the node: either all of them, or those that answered in time.
    pub(super) fn proof(&self, now_ms: u64) -> Option<Proof> {
        let all = self.unheard.len() == self.asked.len();
        let proven = !self.unheard.is_empty() && (all || now_ms >= self.until_ms);
        proven.then(|| Proof::Neighbours {
            asked: self.asked.len(),
            unheard: self.unheard.clone(),
            within_ms: ANSWER_MS,
        })
    }
}
