//! The tree around the checkpoints, as Tier-3 keeps it: directories, links, and where the tree differs from what manifests and
//! sidecars say.
//!
//! Owns: when the tree document is written, and whether names wait for it. Does not own: the document's content (`tree_now`), writing it
//! (`save::loose`), reading it (`recover`).
//!
//! The document is made by comparing: what the tree holds at one moment against what Tier-3 holds by itself. So it does not
//! matter how a difference came about, or whether the daemon that is asked saw it happen.

use crate::node::Shared;
use crate::node::away::Cause;
use crate::node::jobs::Done;
use crate::node::ledger::Ledger;
use crate::node::recover::Knows;
use crate::node::removals::Told;
use crate::node::run::Engine;
use crate::node::tree_now::TreeNow;
use crate::save::loose::{self, LooseError};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::documents::TreeDocument;
use tidemark_protocol::error::error_text;
use tidemark_protocol::id::FileId;
use tidemark_protocol::report::Untold;
use tokio::time::Instant;

/// Shortest interval between two writes of the tree, unless a caller waits: its document is as large as the tree has directories.
const WRITE_EVERY: Duration = Duration::from_secs(10);

/// Making the document may take one part in this many of the loop's time, even while a caller waits. Each document takes a pass over
/// the tree, and each of 100,000 files being saved changes it.
const MAKE_SHARE: u32 = 8;

/// When the tree was written, and whether it is being written.
#[derive(Debug)]
pub(crate) struct TreeState {
    /// The highest number present in Tier-3.
    number: u64,
    running: bool,
    written: Option<Instant>,
    retry_at: Option<Instant>,
    not_before: Option<Instant>,
    /// Hash of the last written document without its epoch: an equal document is not written again.
    last: Option<blake3::Hash>,
    /// Moment whose tree is in Tier-3.
    clean_at: Option<Instant>,
    /// Moment whose tree was compared with what is published to Tier-3.
    compared_at: Option<Instant>,
    /// The removals that Tier-3 has.
    pub(crate) told: Told,
    /// The removals in the document that is being written.
    telling: Told,
    /// How the document that was made last differs from what is published to Tier-3.
    pub(crate) untold: Option<Untold>,
    /// When the tree that is being written was examined.
    looked_at: Option<Instant>,
    /// Whether something is left out of it until Tier-3 has more: removals of what is the only copy of a file that lives on, directories
    /// of checkpoints that are not there yet.
    withheld: bool,
    /// Files whose bytes have to be in Tier-3 before more can be published.
    waits_for: BTreeSet<FileId>,
}

impl TreeState {
    pub(crate) fn new(number: u64, told: Told) -> Self {
        Self {
            number,
            told,
            running: false,
            written: None,
            retry_at: None,
            not_before: None,
            last: None,
            clean_at: None,
            compared_at: None,
            telling: Told::default(),
            untold: None,
            looked_at: None,
            withheld: false,
            waits_for: BTreeSet::new(),
        }
    }

    /// Whether the tree as it was at `since` is not in Tier-3.
    pub(crate) fn is_pending(&self, since: Instant) -> bool {
        self.clean_at.is_none_or(|clean| clean < since)
    }

    /// Whether waiting may bring it there, or show that it is there. `writes`: this daemon may still write; `looks`: it may look.
    pub(crate) fn may_come(&self, since: Instant, writes: bool, looks: bool) -> bool {
        self.is_pending(since) && (writes || looks && self.compared_at.is_none_or(|at| at < since))
    }

    /// Returns the number of the newest document in Tier-3, unless another one is on its way.
    pub(crate) fn in_tier3(&self) -> Option<u64> {
        (self.number > 0 && !self.running).then_some(self.number)
    }

    /// Records that the bytes of a file reached Tier-3, so that something need not be withheld any more.
    pub(crate) fn may_tell_more(&mut self, ledger: &mut Ledger, file: FileId) {
        if self.waits_for.contains(&file) {
            self.tells_more(ledger);
        } else if self.withheld {
            // The document on its way says all that this file could add: a flush does not wait for another one.
            ledger.tree_changed = true;
            self.clean_at = None;
        }
    }

    /// Looks again at everything that was withheld until something reached Tier-3.
    pub(crate) fn looks_at_withheld(&mut self, ledger: &mut Ledger) {
        if self.withheld {
            self.tells_more(ledger);
        }
    }

    /// Makes the tree due for writing: Tier-3 may differ from what the tree shows, and the last document does not say so.
    pub(crate) fn tells_more(&mut self, ledger: &mut Ledger) {
        ledger.tree_changed = true;
        // The document that is on its way does not say so either.
        (self.clean_at, self.looked_at) = (None, None);
    }

    /// Makes the content of the last document, which Tier-3 lost, go there as the next one.
    pub(crate) fn write_again(&mut self, ledger: &mut Ledger) {
        self.last = None;
        self.tells_more(ledger);
    }
}

impl Engine {
    pub(crate) fn write_tree(&mut self, now: Instant) {
        let urgent = !self.flushes.is_empty() || self.rights.draining;
        let wanted = self.ledger.tree_changed;
        let early =
            self.tree.written.is_some_and(|written| now.saturating_duration_since(written) < WRITE_EVERY);
        let held = [self.tree.retry_at, self.tree.not_before].iter().flatten().any(|at| *at > now);
        // Where another daemon decides, the tree is only compared, for callers that wait.
        let rests = (early || self.rights.fenced.is_some()) && !urgent;
        if self.tree.running || self.rights.knows != Knows::All || !wanted || held || rests {
            return;
        }
        let begun = Instant::now();
        self.ledger.tree_changed = false;
        let mut snapshot = self.shared.namespace.tree_snapshot();
        // The snapshot may show changes that came after this turn began.
        self.shielding().hear_who_changed_names();
        self.shared.had_not_heard(&mut self.ledger, |_, _| false);
        self.ledger.regroup(now);
        self.ledger.name_by_carrier(&mut snapshot);
        self.ledger.unkept.look_at(&snapshot);
        let (document, left_out) = TreeNow { engine: self }.tree_document(&snapshot, now);
        self.tree.withheld = left_out.withheld;
        self.tree.waits_for = left_out.waits_for;
        // A removal that is being decided is examined again, and no other event may lead to its checkpoint.
        let is_undecided = !left_out.undecided.is_empty();
        // A flush does not wait for directories that are being filled: for their checkpoints it does.
        self.ledger.tree_changed |= is_undecided || left_out.stale;
        self.ledger.due.extend(left_out.undecided);
        let mut unstamped = document.clone();
        unstamped.epoch = tidemark_protocol::id::Epoch(0);
        let text = serde_json::to_vec(&unstamped).expect("plain data is written as JSON");
        let hash = blake3::hash(&text);
        self.tree.not_before = Some(now + begun.elapsed() * MAKE_SHARE);
        let looked_at = (!is_undecided).then_some(now);
        self.tree.compared_at = Some(now);
        if self.tree.last == Some(hash) {
            self.tree.clean_at = looked_at;
            self.tree.untold = None;
            return;
        }
        let telling = Told::of(&document);
        self.tree.untold = Some(Untold { removals: telling.removals_beyond(&self.tree.told) });
        if self.rights.fenced.is_some() {
            return;
        }
        self.tree.looked_at = looked_at;
        self.tree.last = Some(hash);
        self.tree.running = true;
        self.tree.telling = telling;
        let number = self.tree.number + 1;
        let shared = Arc::clone(&self.shared);
        self.jobs.spawn(run(shared, number, document));
    }

    pub(crate) fn tree_done(&mut self, number: u64, result: Result<(), LooseError>, now: Instant) {
        self.tree.running = false;
        self.tree.written = Some(now);
        match result {
            Ok(()) => {
                self.tree.number = number;
                self.tree.clean_at = self.tree.looked_at;
                self.tree.untold = None;
                let told = std::mem::take(&mut self.tree.telling);
                let before = std::mem::replace(&mut self.tree.told, told);
                self.sifting().removals_stand(&before.loose);
                self.tier3_away.ended(&Cause::Tree);
            }
            Err(error) => {
                if error.uses_number() {
                    // Numbers only rise; the next try takes the next.
                    self.tree.number = number;
                }
                let why = error_text(&error);
                tracing::warn!(%why, "the tree did not reach Tier-3 yet");
                self.tier3_away.failed(Cause::Tree, now, why);
                self.ledger.tree_changed = true;
                self.tree.last = None;
                self.tree.retry_at = Some(now + Duration::from_secs(1));
            }
        }
    }
}

async fn run(shared: Arc<Shared>, number: u64, document: TreeDocument) -> Done {
    let result = loose::write_tree(&shared.drain, number, &document).await;
    Done::Tree { number, result }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_were_not_told_stay_pending_where_another_daemon_decides_and_are_not_waited_for() {
        let (before, asked) = (Instant::now(), Instant::now() + Duration::from_secs(1));
        let mut state = TreeState::new(1, Told::default());
        state.clean_at = Some(before);
        assert!(state.is_pending(asked) && state.may_come(asked, true, true));
        assert!(state.may_come(asked, false, true), "it may be there already: it is looked at first");
        assert!(!state.may_come(asked, false, false));
        state.compared_at = Some(asked);
        assert!(state.is_pending(asked) && !state.may_come(asked, false, true), "it differs");
        assert!(state.may_come(asked, true, true), "it is written");
        state.clean_at = Some(asked);
        assert!(!state.is_pending(asked) && !state.may_come(asked, true, true));
    }
}
