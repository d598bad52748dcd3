//! Sealed files that no version covers go to Tier-3 under a provisional one: while the daemon ends, and where a checkpoint may stay as it
//! is for ever or for long.
//!
//! Owns: which files those are, and what is said of a version that holds only a part. Does not own: the verdict
//! (protocol), the plan's making (`decide`), the upload (`run`).
//!
//! Tier-1 goes with the daemon, and nothing sealed may be lost with it. A checkpoint that is complete or settled has
//! its version by itself. A file that waits for its settle time gets it early, and its evidence counts when it comes; a directory does
//! where too little time is left: its job may be killed before it has written all, and what is there would pass for whole.
//! A checkpoint that can never be whole as it is gets a version that says so, and a restart takes it up as settled. Cut files are sealed
//! as they are for it: a job must not begin at step 0 because the first save of its run, which was torn, was gone.

use crate::node::Shared;
use crate::node::book::{Book, VersionBook, is_damage};
use crate::node::decide::{self, Action, Plan, is_covered};
use crate::node::ledger::{Contents, Ledger, contents};
use crate::node::run::Engine;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tidemark_namespace::{FileState, FileView};
use tidemark_protocol::evidence::{PARTS, Told, Verdict};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{CheckpointId, Shape};
use tidemark_protocol::record::Evidence;
use tokio::time::Instant;

type Files<'a> = [(&'a RelPath, &'a Arc<FileView>)];

/// Content of a checkpoint that only Tier-1 has, and the next step to save it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Rescue {
    /// Nothing that waiting would bring to Tier-3.
    Done,
    /// A closed file is hashed first.
    Sealing,
    /// A version is on its way. Files that it lacks follow when it has arrived.
    Uploading,
    /// Sealed files that need a version.
    Wanted(Contents),
}

/// Examines a book while the daemon ends.
pub(crate) fn look(shared: &Shared, ledger: &Ledger, book: &Book) -> Rescue {
    let Some(candidate) = &book.candidate else { return Rescue::Done };
    let files: Vec<_> = ledger.files_of(candidate, &book.scope).collect();
    let closed = files.iter().any(|(_, view)| matches!(view.state, FileState::Closed));
    if closed || !decide::left_cut(shared, ledger, &files).is_empty() {
        return Rescue::Sealing;
    }
    let sealed = contents(in_memory(&files)).expect("only sealed files were asked for");
    // Versions follow each other one at a time: files that close in turn must not each upload all that came before.
    let on_its_way = |version: &VersionBook| {
        let checkpoint = &version.checkpoint;
        // A version prepared without evidence is at rest.
        checkpoint.is_alive() && (!checkpoint.is_prepared() || checkpoint.is_proven())
    };
    if book.versions.values().any(on_its_way) {
        return Rescue::Uploading;
    }
    let covered = book.versions.values().any(|version| {
        // An aborted version holds nothing; a failed one would fail again.
        !version.checkpoint.is_aborted() && is_covered(&sealed, &version.contents)
    });
    if sealed.is_empty() || covered { Rescue::Done } else { Rescue::Wanted(sealed) }
}

/// A checkpoint to which a program that lives may add goes to Tier-3 in part when it did not for so long: no save takes that
/// long between two files, and each part is sent again with what follows.
pub(crate) const IDLE_NS: i64 = 300 * 1_000_000_000;

/// Whether nothing happened to a checkpoint for so long.
fn is_quiet(shared: &Shared, ledger: &Ledger, book: &Book, quiet_ns: i64) -> bool {
    let files = book.candidate.iter().flat_map(|candidate| ledger.files_of(candidate, &book.scope));
    let last_ns = files.map(|(_, view)| view.published_ns.max(view.closed_ns)).max();
    last_ns.is_some_and(|last_ns| shared.now_ns().saturating_sub(last_ns) >= quiet_ns)
}

/// Returns the provisional version that a book needs now. `None`: it needs none, or has to wait. `verdict`, `apart`: the present
/// conclusions, which the book does not have yet. `why`: the reason for the version. `is_of_a_trainer`: whether the job that wrote
/// it comes back and takes the newest; costs a pass over the run.
pub(crate) fn plan(
    shared: &Shared,
    ledger: &Ledger,
    book: &Book,
    (verdict, apart): (Option<&Verdict>, &BTreeSet<RelPath>),
    why: &str,
    is_of_a_trainer: impl FnOnce() -> bool,
) -> Option<Box<Plan>> {
    let Rescue::Wanted(sealed) = look(shared, ledger, book) else { return None };
    let candidate = book.candidate.as_ref()?;
    let files: Vec<_> = ledger.files_of(candidate, &book.scope).collect();
    // At most time is missing: the same version is committed when that has passed. Or it is kept as it is.
    let is_whole = |verdict: &Verdict| {
        let time_lacks =
            matches!(verdict, Verdict::Open { again_at_ns: Some(_), .. } | Verdict::Complete { .. });
        time_lacks || verdict.kept_from().is_some()
    };
    let whole = files.len() == sealed.len() && verdict.is_some_and(is_whole);
    let damaged = verdict.is_some_and(is_damage);
    // Copies that people make stay visible after a restart, as before, and so does a whole checkpoint with something beside it.
    let is_part = || apart.is_empty() && candidate.framework != PARTS && is_of_a_trainer();
    let partial = !whole && (damaged || is_part());
    let unsaid = match apart.first() {
        Some(path) => format!("{path} lies beside what is whole, and nobody closed it"),
        None => "nothing was known of it yet".to_owned(),
    };
    let text = verdict.map_or(unsaid, decide::verdict_text);
    let detail = format!("uploaded {why}: {text}");
    let files: Vec<_> = in_memory(&files).collect();
    match decide::start(shared, ledger, book, &files, &sealed, (Evidence::Quiescence, detail)) {
        Action::Start(mut plan) => {
            plan.record.partial = partial;
            plan.record.doubted = !partial && (!whole || verdict.is_some_and(Verdict::is_doubt));
            Some(plan)
        }
        _ => None,
    }
}

/// Returns the sealed files whose bytes are in Tier-1. Bytes that only Tier-3 has cannot be lost with the daemon.
fn in_memory<'a>(files: &'a Files<'a>) -> impl Iterator<Item = (&'a RelPath, &'a Arc<FileView>)> {
    files.iter().copied().filter(|(_, view)| view.sealed().is_some() && view.host)
}

/// The decision whether a checkpoint that is not whole goes to Tier-3 in part.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PartialSaves<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> PartialSaves<'a> {
    /// Whether a checkpoint that can never be complete may stay in sight for ever.
    pub(crate) fn stays_torn(self, id: &CheckpointId) -> bool {
        let book = &self.engine.ledger.books[id];
        let settle_ns = decide::settle_ns(&self.engine.shared);
        self.engine.visibility.may_last(id)
            && book.is_torn()
            && is_quiet(&self.engine.shared, &self.engine.ledger, book, settle_ns)
    }

    /// Returns why a checkpoint goes to Tier-3 in part, although more may come, or never will. `None`: it does not.
    pub(crate) fn why_in_part(
        self,
        id: &CheckpointId,
        verdict: Option<&Verdict>,
        told: Told,
    ) -> Option<&'static str> {
        let book = &self.engine.ledger.books[id];
        if self.engine.rights.draining {
            let waits = self.engine.saves().waits_for_saving(book) || self.settles_in_time(book, verdict);
            return (!waits).then_some("because the daemon ended");
        }
        if self.stays_torn(id) {
            return Some("because it stays in sight");
        }
        let more_may_come = matches!(
            verdict,
            Some(Verdict::Incomplete { kept_at_ns: None, .. } | Verdict::Open { again_at_ns: None, .. })
        );
        let quiet_ns = if told == Told::Flush { decide::settle_ns(&self.engine.shared) } else { IDLE_NS };
        (more_may_come && is_quiet(&self.engine.shared, &self.engine.ledger, book, quiet_ns))
            .then_some("because nothing was added to it for long")
    }

    /// Whether it is known before the daemon has ended if a directory becomes whole, and as much time is left after that as until then.
    fn settles_in_time(self, book: &Book, verdict: Option<&Verdict>) -> bool {
        let now_ns = self.engine.shared.now_ns();
        let is_directory = book.candidate.as_ref().is_some_and(|candidate| candidate.shape == Shape::Tree);
        let Some(Verdict::Open { again_at_ns: Some(at_ns), .. }) = verdict else { return false };
        let waits = Duration::from_nanos(at_ns.saturating_sub(now_ns).max(0).unsigned_abs());
        let left = self.engine.flushes.end_is_due().map(|at| at.saturating_duration_since(Instant::now()));
        is_directory
            && decide::is_waiting_for_time(book, verdict, now_ns)
            && left.is_none_or(|left| waits <= left / 2)
    }
}

/// Marks the files that killed writers left in a visible checkpoint, so that they are sealed as they are.
pub(crate) fn seal_what_was_cut(shared: &Shared, ledger: &mut Ledger, id: &CheckpointId) {
    let book = &ledger.books[id];
    let Some(candidate) = &book.candidate else { return };
    let files: Vec<_> = ledger.files_of(candidate, &book.scope).collect();
    let cut = decide::left_cut(shared, ledger, &files);
    ledger.seal_as_they_are(&cut);
}
