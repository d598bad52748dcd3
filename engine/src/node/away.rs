//! Writes that Tier-3 does not take, and since when.
//!
//! Owns: the causes, each until the very operation that failed succeeds or is dropped. Does not own: retries (`advance`, `gc`, `generations`),
//! reports for a person (`answer`).
//!
//! A store that is full still takes small objects, and a store that refuses some keys takes others. If any success ended
//! the problem, it would come and go with each marker, and its beginning would be lost.

use crate::node::Shared;
use crate::node::book::{Book, Number};
use crate::node::ledger::Ledger;
use crate::node::recover::Knows;
use crate::node::rights::Rights;
use std::collections::BTreeMap;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;
use tokio::time::Instant;

/// An operation that Tier-3 did not take.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Cause {
    Version(CheckpointId, Number),
    /// Versions of a checkpoint that cannot be written, whatever number they take, because content of others stands there.
    InTheWay(CheckpointId),
    Loose(RelPath),
    /// The tree document.
    Tree,
    /// The retirement of a version.
    Retirement,
    /// Taking the right to write to Tier-3 at all, by a daemon that goes on with the files in memory.
    TakingUp,
}

/// All operations that Tier-3 did not take yet. At most one entry for each version, checkpoint, loose file and the tree.
#[derive(Debug, Default)]
pub(crate) struct Away {
    causes: BTreeMap<Cause, (Instant, String)>,
}

impl Away {
    /// Records a failure of `cause`. For repeated failures, the first time and the last reason count.
    pub(crate) fn failed(&mut self, cause: Cause, now: Instant, why: String) {
        let entry = self.causes.entry(cause).or_insert_with(|| (now, String::new()));
        entry.1 = why;
    }

    /// Clears `cause`, because its operation succeeded or was dropped.
    pub(crate) fn ended(&mut self, cause: &Cause) {
        self.causes.remove(cause);
    }

    /// Drops causes for which nothing waits any more.
    pub(crate) fn retain(&mut self, waits: impl Fn(&Cause) -> bool) {
        self.causes.retain(|cause, _| waits(cause));
    }

    pub(crate) fn is_away(&self) -> bool {
        !self.causes.is_empty()
    }

    /// Returns since when, and why, the cause has lasted that has lasted longest.
    pub(crate) fn longest(&self) -> Option<(Instant, &str)> {
        self.causes.values().min_by_key(|(since, _)| *since).map(|(since, why)| (*since, why.as_str()))
    }

    /// Returns since when Tier-3 refuses writes or gives no answer, and why.
    pub(crate) fn trouble(&self, shared: &Shared) -> Option<(Instant, String)> {
        let failed = self.longest().map(|(since, why)| (since, why.to_owned()));
        // A request that is repeated for minutes has not failed yet.
        failed.or_else(|| shared.drain.store.silence().map(|silence| (silence.since, silence.why)))
    }

    /// Returns why nothing is written to Tier-3, if this node is to decide over it. `None`: writing is allowed.
    pub(crate) fn why_nothing_is_written(&self, shared: &Shared, rights: &Rights) -> Option<String> {
        if rights.may_write() || rights.fenced.is_none() && rights.knows == Knows::Nothing {
            return None;
        }
        let away = || self.trouble(shared).map(|(_, why)| why);
        let unread = || "Tier-3 is being read, and the right to commit there is not certain yet".to_owned();
        Some(rights.fenced.clone().or_else(away).unwrap_or_else(unread))
    }

    /// Drops causes whose version or file was superseded, removed or retired: they do not show that Tier-3 is away.
    pub(crate) fn forget_settled(&mut self, ledger: &Ledger) {
        self.retain(|cause| match cause {
            Cause::Version(id, number) => {
                let version = ledger.books.get(id).and_then(|book| book.versions.get(number));
                version.is_some_and(|version| version.checkpoint.is_alive())
            }
            Cause::InTheWay(id) => ledger.books.get(id).is_some_and(Book::is_tried),
            Cause::Loose(path) => ledger.loose.contains_key(path),
            Cause::Tree | Cause::Retirement | Cause::TakingUp => true,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn loose(name: &str) -> Cause {
        Cause::Loose(RelPath::new(name).unwrap())
    }

    #[test]
    fn it_ends_when_what_failed_succeeds_and_not_before() {
        let (mut away, begun) = (Away::default(), Instant::now());
        away.failed(loose("large"), begun, "full".into());
        away.failed(Cause::Tree, begun + Duration::from_secs(1), "full".into());
        // Small things get through all the while.
        away.ended(&Cause::Tree);
        away.ended(&loose("small"));
        away.failed(loose("large"), begun + Duration::from_secs(9), "still full".into());
        assert_eq!(away.longest(), Some((begun, "still full")));
        away.ended(&loose("large"));
        assert!(!away.is_away());
    }

    #[test]
    fn what_nobody_waits_for_any_more_is_no_cause() {
        let mut away = Away::default();
        away.failed(loose("removed"), Instant::now(), "full".into());
        away.retain(|cause| *cause != loose("removed"));
        assert_eq!(away.longest(), None);
    }
}
