//! Retires committed versions in Tier-3 that retention lets go of.
//!
//! Owns: the pins, which version is retired next (one at a time), and that its names go before its bytes. Does not own: which
//! versions retention lets go of (`verdicts`), the order of the deletes (`save::commit`).
//!
//! A version that the tree shows is retired in two passes. The first removes its names, as if the job had removed them. A later one
//! deletes its bytes, once nothing in the tree leads to them any more. If the daemon dies in between, the next one finds a version
//! without names, and does not know who removed them.

use crate::node::Shared;
use crate::node::away::{Away, Cause};
use crate::node::book::{BookLookup, Number};
use crate::node::flush::Flushes;
use crate::node::jobs::{self, Done};
use crate::node::ledger::Ledger;
use crate::node::metric::SaidLater;
use crate::node::rights::Rights;
use crate::node::run::retry_pause;
use crate::node::verdicts::Retention;
use crate::node::visibility::Visibility;
use crate::save::commit::CommitError;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tidemark_namespace::Listed;
use tidemark_protocol::error::error_text;
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::report::{ApiError, ErrorCode, EventLevel};
use tidemark_protocol::retention::{Keep, Retirement, Standing};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Interval between two passes of retention while nothing happens that may let a version go.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Rest after a pass, as a multiple of its duration. A pass asks the tree about every committed file, and the loop has other work. If
/// a person waits, there is no rest.
const REST_TIMES: u32 = 20;

/// State of the loop for retiring versions.
#[derive(Debug)]
pub(crate) struct Gc {
    pub(crate) pins: BTreeSet<(CheckpointId, Number)>,
    /// Versions that the tree does not show, although they were not removed.
    unshown: BTreeSet<(CheckpointId, Number)>,
    /// Versions that an administrator removed: they are retired as soon as they may be, whatever the policy says of removals.
    wishes: BTreeSet<(CheckpointId, Number)>,
    /// Why retention took the names of a version out of the tree. At most one entry for each committed version, until it is retired or
    /// shown again.
    withdrawn: BTreeMap<(CheckpointId, Number), String>,
    /// Versions whose retirement may stand in Tier-3, so that it cannot be undone.
    begun: BTreeSet<(CheckpointId, Number)>,
    /// Versions whose retirement failed, and is paused.
    waiting: BTreeMap<(CheckpointId, Number), Waiting>,
    /// Versions that are read without the tree, each for as long as the reader keeps its `Arc`.
    held: Vec<((CheckpointId, Number), Weak<()>)>,
    running: bool,
    /// Whether the running retirement is the first try of its version: no earlier one can have reached Tier-3.
    first_try: bool,
    next: Instant,
    rest_until: Instant,
}

#[derive(Debug)]
struct Waiting {
    until: Instant,
    tries: u32,
    why: String,
}

impl Gc {
    pub(crate) fn new(
        pins: BTreeSet<(CheckpointId, Number)>,
        unshown: BTreeSet<(CheckpointId, Number)>,
        now: Instant,
    ) -> Self {
        Self {
            pins,
            unshown,
            wishes: BTreeSet::new(),
            withdrawn: BTreeMap::new(),
            begun: BTreeSet::new(),
            waiting: BTreeMap::new(),
            held: Vec::new(),
            running: false,
            first_try: false,
            next: now + LOOK_EVERY,
            rest_until: now,
        }
    }

    /// Makes the next pass due as soon as the rest is over: something happened that may let a version go.
    pub(crate) fn has_news(&mut self) {
        self.next = self.next.min(self.rest_until);
    }

    /// Records that a retirement is about to be written.
    fn begin(&mut self, of: (CheckpointId, Number)) {
        self.running = true;
        self.first_try = self.begun.insert(of);
    }

    fn failed(&mut self, of: (CheckpointId, Number), why: String, longest: Duration, now: Instant) {
        let tries = self.waiting.get(&of).map_or(0, |waiting| waiting.tries);
        let waiting =
            Waiting { until: now + retry_pause(tries, longest), tries: tries.saturating_add(1), why };
        self.waiting.insert(of, waiting);
    }

    /// Records that the daemon itself took the version's names out of the tree.
    pub(crate) fn keep_unshown(&mut self, id: CheckpointId, number: Number) {
        self.unshown.insert((id, number));
    }

    /// Whether the tree does not show the version, although it was not removed.
    pub(crate) fn is_unshown(&self, id: &CheckpointId, number: Number) -> bool {
        self.unshown.contains(&(id.clone(), number))
    }

    pub(crate) fn is_shown_again(&mut self, id: &CheckpointId) {
        self.unshown.retain(|(of, _)| of != id);
    }

    /// Sets or removes a pin. Returns whether that changed anything.
    ///
    /// # Errors
    /// Fails if it is too late: the version is being retired.
    pub(crate) fn pin(&mut self, of: (CheckpointId, Number), pinned: bool) -> Result<bool, ApiError> {
        if pinned {
            self.check_stays(&of)?;
        }
        Ok(if pinned { self.pins.insert(of) } else { self.pins.remove(&of) })
    }

    /// Whether a version's retirement was begun: it may stand in Tier-3, and its bytes may be gone.
    pub(crate) fn is_begun(&self, id: &CheckpointId, number: Number) -> bool {
        !self.begun.is_empty() && self.begun.contains(&(id.clone(), number))
    }

    /// # Errors
    /// Fails if the version's retirement was begun.
    pub(crate) fn check_stays(&self, of: &(CheckpointId, Number)) -> Result<(), ApiError> {
        if !self.begun.contains(of) {
            return Ok(());
        }
        let what = format!("version {} is being given up", of.1.1);
        Err(ApiError::new(ErrorCode::NotFound, what, "`ckptctl ls` shows what there is"))
    }

    /// Keeps a version while the returned value lives.
    pub(crate) fn hold(&mut self, of: (CheckpointId, Number)) -> Arc<()> {
        let hold = Arc::new(());
        self.held.retain(|(_, held)| held.strong_count() > 0);
        self.held.push((of, Arc::downgrade(&hold)));
        hold
    }

    /// Whether a person asked to retire the version.
    pub(crate) fn is_wished(&self, of: &(CheckpointId, Number)) -> bool {
        self.wishes.contains(of)
    }

    pub(crate) fn is_held(&self, of: &(CheckpointId, Number)) -> bool {
        self.held.iter().any(|(held, end)| held == of && end.strong_count() > 0)
    }

    /// Drops an administrator's removal of a checkpoint, because it is wanted after all.
    pub(crate) fn unwish(&mut self, id: &CheckpointId) {
        self.wishes.retain(|(wished, _)| wished != id);
    }

    /// Forgets why retention removed the names of a version, because they are back.
    pub(crate) fn end_withdrawal(&mut self, of: &(CheckpointId, Number)) {
        self.withdrawn.remove(of);
    }

    /// Does the same for versions that are found in the tree, however they came back.
    fn end_withdrawals(&mut self, verdicts: &[Verdict]) {
        let shown = verdicts.iter().filter(|verdict| verdict.shown);
        let shown: BTreeSet<_> = shown.map(|verdict| (&verdict.id, verdict.number)).collect();
        self.withdrawn.retain(|(id, number), _| !shown.contains(&(id, *number)));
    }

    /// Returns whether the tree shows a version, and if not, why. `names`: a name of the tree means these bytes; `superseded`: a newer
    /// version of the checkpoint is committed.
    pub(crate) fn standing(&self, of: &(CheckpointId, Number), names: bool, superseded: bool) -> Standing {
        // Names that a newer version also holds count as that version's.
        if names && !superseded {
            return Standing::Shown;
        }
        match self.withdrawn.get(of) {
            Some(reason) => Standing::Withdrawn { reason: reason.clone() },
            None if superseded => Standing::Replaced,
            None => Standing::Gone,
        }
    }

    /// Makes a pass due at once and ends all pauses, because a person waits.
    pub(crate) fn collect_afresh(&mut self) {
        self.waiting.clear();
        self.next = Instant::now();
    }
}

/// Retention's verdict on a committed version.
pub(crate) struct Verdict {
    pub(crate) id: CheckpointId,
    pub(crate) number: Number,
    /// Whether the tree shows it, so that its names must go first.
    pub(crate) shown: bool,
    pub(crate) keep: Keep,
}

/// Lists a manifest's files under all their names.
pub(crate) fn listed(manifest: &Manifest) -> Vec<Listed<'_>> {
    let named = manifest.files.iter().flat_map(|entry| {
        let links = manifest.hard_links.iter().filter(|link| link.to == entry.path).map(|link| &link.path);
        let names = std::iter::once(&entry.path).chain(links);
        names.map(|path| Listed { path, file: entry.file, seal: entry.seal, key: &entry.key })
    });
    named.collect()
}

/// The parts of the loop that retiring versions reads and changes.
pub(crate) struct Retiring<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
    pub(crate) gc: &'a mut Gc,
    pub(crate) said_later: &'a mut SaidLater,
    pub(crate) jobs: &'a mut JoinSet<Done>,
    pub(crate) tier3_away: &'a mut Away,
    pub(crate) rights: &'a mut Rights,
    pub(crate) visibility: &'a Visibility,
    pub(crate) flushes: &'a Flushes,
}

impl Retiring<'_> {
    /// Runs a pass of retention if it is due. Removes the names of versions that may go, and begins to retire at most one version.
    pub(crate) fn collect(&mut self, now: Instant) {
        let idle = self.rights.may_write() && !self.rights.draining && !self.gc.running;
        if !idle || now < self.gc.next {
            return;
        }
        self.gc.next = now + LOOK_EVERY;
        let settings = &self.shared.settings.retention;
        if settings.keeps_everything() && self.gc.wishes.is_empty() {
            return;
        }
        let began = Instant::now();
        let verdicts = self.retention().verdicts(None);
        self.gc.rest_until = now + began.elapsed() * REST_TIMES;
        self.gc.next = self.gc.next.max(self.gc.rest_until);
        self.gc.end_withdrawals(&verdicts);
        for Verdict { id, number, shown, keep } in verdicts {
            let Keep::Retired(leave) = keep else { continue };
            let of = (id, number);
            if self.gc.waiting.get(&of).is_some_and(|waiting| waiting.until > now) {
                continue;
            }
            if !shown {
                return self.give_up(of.0, number, leave);
            }
            self.withdraw(of, leave.reason(), now);
        }
    }

    /// Removes the names of a version that retention lets go of from the tree.
    fn withdraw(&mut self, of: (CheckpointId, Number), reason: &str, now: Instant) {
        let (id, number) = &of;
        let Some(manifest) = self.books().version(id, *number).manifest().map(Arc::clone) else { return };
        let directories: Vec<_> =
            manifest.directories.iter().map(|directory| directory.path.clone()).collect();
        // Recorded even if this fails, because some names may be gone then.
        self.gc.withdrawn.insert(of.clone(), reason.to_owned());
        let why = match self.shared.withdraw(&listed(&manifest), &directories) {
            Ok(0) => {
                self.gc.end_withdrawal(&of);
                "its names could not be taken out of the tree".to_owned()
            }
            Ok(names) => {
                let what = format!("version {} left the tree, {names} names: {reason}", number.1);
                self.gc.has_news();
                return self.shared.event_of(EventLevel::Info, "removed", id, what);
            }
            Err(error) => format!("its names stay: {error}"),
        };
        tracing::error!(run = %id.run, checkpoint = %id.directory, %why, "a version is not given up");
        let longest = self.flushes.retry_longest();
        self.gc.failed(of, why, longest, now);
    }

    fn give_up(&mut self, id: CheckpointId, number: Number, leave: Retirement) {
        let Some(manifest) = self.books().version(&id, number).manifest().map(Arc::clone) else { return };
        self.gc.begin((id.clone(), number));
        self.jobs.spawn(jobs::retire(Arc::clone(self.shared), id, number, manifest, leave));
    }

    /// Applies the result of a retirement. Returns whether the version was given up: then it is forgotten.
    #[must_use]
    pub(crate) fn retired(
        &mut self,
        id: &CheckpointId,
        number: Number,
        leave: &Retirement,
        result: Result<(), CommitError>,
        now: Instant,
    ) -> bool {
        self.gc.running = false;
        // The next retirement may begin soon: a new policy may let go of hundreds of versions.
        self.gc.has_news();
        let of = (id.clone(), number);
        match result {
            Ok(()) => {
                self.gc.waiting.remove(&of);
                self.gc.wishes.remove(&of);
                self.gc.end_withdrawal(&of);
                self.gc.begun.remove(&of);
                self.said_later.forget(&of);
                self.tier3_away.ended(&Cause::Retirement);
                self.shared.metrics.retire_versions.inc();
                let what = format!("version {} was given up: {}", number.1, leave.reason());
                self.shared.event_of(EventLevel::Info, "retired", id, what);
                true
            }
            Err(error) => {
                let why = error_text(&error);
                tracing::warn!(run = %id.run, checkpoint = %id.directory, %why, "a version is not given up yet");
                if matches!(error.kind(), tidemark_protocol::error::ErrorKind::Fenced) {
                    self.rights.fenced = Some(why.clone());
                }
                // No retirement document was written: the version stands, with all its bytes.
                if self.gc.first_try && matches!(error, CommitError::NotRetired { .. }) {
                    self.gc.begun.remove(&of);
                }
                self.tier3_away.failed(Cause::Retirement, now, why.clone());
                let longest = self.flushes.retry_longest();
                self.gc.failed(of, why, longest, now);
                false
            }
        }
    }

    /// Makes a pass due now, for a person who waits. Returns how many of the `wanted` versions are still to be retired, and the reason if
    /// nothing more happens by itself soon. Without `wanted`, counts all versions that retention lets go of.
    pub(crate) fn collect_now(
        &mut self,
        wanted: Option<&(CheckpointId, Vec<Number>)>,
    ) -> (u64, Option<String>) {
        self.gc.next = Instant::now();
        let mut left = 0;
        let mut stuck = self.tier3_away.why_nothing_is_written(self.shared, self.rights);
        for Verdict { id, number, keep, .. } in self.retention().verdicts(wanted.map(|(of, _)| &of.run)) {
            let is_wanted = wanted.is_none_or(|(of, numbers)| *of == id && numbers.contains(&number));
            match keep {
                Keep::Retired(_) if is_wanted => {
                    left += 1;
                    stuck = stuck.or_else(|| Some(self.gc.waiting.get(&(id, number))?.why.clone()));
                }
                // The version was opened or pinned meanwhile.
                Keep::Kept { reason } if is_wanted && wanted.is_some() => {
                    left += 1;
                    stuck = stuck.or(Some(reason));
                }
                Keep::Retired(_) | Keep::Kept { .. } => {}
            }
        }
        (left, stuck.filter(|_| left > 0))
    }

    /// Removes a checkpoint for an administrator: its committed versions are retired as soon as they may be. Returns their numbers.
    ///
    /// The error says which version may not be retired, and why. Nothing was changed then.
    pub(crate) fn remove(&mut self, id: &CheckpointId) -> Result<Vec<Number>, String> {
        let book = &self.ledger.books[id];
        let committed = book.versions.iter().filter(|(_, version)| version.checkpoint.is_committed());
        let numbers: Vec<Number> = committed.map(|(number, _)| *number).collect();
        let wishes: BTreeSet<_> = numbers.iter().map(|number| (id.clone(), *number)).collect();
        let added: Vec<_> = wishes.difference(&self.gc.wishes).cloned().collect();
        self.gc.wishes.extend(wishes);
        let kept =
            self.retention().verdicts(Some(&id.run)).into_iter().find_map(|verdict| match verdict.keep {
                Keep::Kept { reason } if verdict.id == *id => {
                    Some(format!("version {} stays: {reason}", verdict.number.1))
                }
                Keep::Kept { .. } | Keep::Retired(_) => None,
            });
        if let Some(kept) = kept {
            for wish in added {
                self.gc.wishes.remove(&wish);
            }
            return Err(kept);
        }
        self.gc.collect_afresh();
        Ok(numbers)
    }

    fn books(&self) -> BookLookup<'_> {
        BookLookup { ledger: self.ledger }
    }

    fn retention(&self) -> Retention<'_> {
        let Self { shared, ledger, gc, visibility, said_later, .. } = self;
        Retention { shared, ledger, gc, visibility, said_later }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::recover::Recovered;
    use crate::node::run::{Engine, Node, NodeParts};
    use crate::node::schedule::{shared_over, tier1};
    use crate::restore::locate::FormatProblem;
    use tidemark_protocol::id::{Timeline, Version};
    use tidemark_protocol::key::VersionId;
    use tidemark_protocol::path::{CheckpointName, RelPath, RunPath};
    use tidemark_protocol::recognise::Rules;
    use tidemark_protocol::retention::{Committed, Metric, Policy, Standing, retain};
    use tidemark_store::MemoryStore;

    fn of(version: u64) -> (CheckpointId, Number) {
        let run = RunPath::new(RelPath::new("run").unwrap()).unwrap();
        let directory = CheckpointName::new("step1.pt").unwrap();
        (CheckpointId { run, directory }, (Timeline(0), Version(version)))
    }

    fn found(version: u64, shown: bool) -> Verdict {
        let (id, number) = of(version);
        Verdict { id, number, shown, keep: Keep::Kept { reason: String::new() } }
    }

    fn version_id() -> VersionId {
        let (CheckpointId { run, directory }, (timeline, version)) = of(1);
        VersionId { run, directory, timeline, version }
    }

    /// Returns the leave to retire version 1: two newer ones are committed, and only the last is to be kept.
    fn leave() -> Retirement {
        let at = |completed_at_ns| Committed {
            version: version_id(),
            step: None,
            completed_at_ns,
            verified: true,
            pinned: false,
            held: false,
            standing: Standing::Shown,
            wished: false,
            metric: Metric::Unsaid,
        };
        let policy = Policy { keep_last: Some(1), ..Policy::default() };
        match retain(&policy, &[at(1), at(2), at(3)], 4).swap_remove(0) {
            Keep::Retired(leave) => leave,
            Keep::Kept { reason } => panic!("{reason}"),
        }
    }

    /// Whether the retirement counts as begun after a try that ended with `error`.
    fn is_begun_after(engine: &mut Engine, error: CommitError) -> bool {
        let (id, number) = of(1);
        engine.gc.begin((id.clone(), number));
        let _ = engine.retiring().retired(&id, number, &leave(), Err(error), Instant::now());
        engine.gc.is_begun(&id, number)
    }

    /// Reads a proxy's page in place of the retirement, before and after a try that may have reached Tier-3.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_version_that_no_document_gives_up_stands_unless_an_earlier_try_may_have_given_it_up() {
        let (_folder, tier1) = tier1();
        let shared = shared_over(Arc::new(MemoryStore::new()), &tier1, 1);
        let recovered = Recovered::default();
        let node = Node::start(NodeParts { shared, rules: Rules::builtin(), recovered });
        let tries = |engine: &mut Engine| {
            let page = || {
                let source = Box::new(FormatProblem::Missing);
                CommitError::NotRetired { version: version_id(), source }
            };
            let unknown = CommitError::Unknown { version: version_id(), tries: 1 };
            [page(), page(), unknown, page()].map(|error| is_begun_after(engine, error))
        };
        assert_eq!(node.ask(tries).await.unwrap(), [false, false, true, true]);
        node.stop();
    }

    #[test]
    fn names_that_retention_took_are_not_said_to_be_removed_until_they_were_back() {
        let mut gc = Gc::new(BTreeSet::new(), BTreeSet::new(), Instant::now());
        assert_eq!(gc.standing(&of(1), true, false), Standing::Shown);
        assert_eq!(gc.standing(&of(1), false, false), Standing::Gone, "nobody knows who took them");
        assert_eq!(gc.standing(&of(1), true, true), Standing::Replaced, "they are the newer version's");
        let reason = || "3 from the newest, and no rule keeps it".to_owned();
        let withdrawn = || Standing::Withdrawn { reason: reason() };
        gc.withdrawn.insert(of(1), reason());
        gc.end_withdrawals(&[found(1, false), found(2, true)]);
        assert_eq!(gc.standing(&of(1), false, false), withdrawn());
        assert_eq!(gc.standing(&of(1), false, true), withdrawn(), "and then the name was saved again");
        assert_eq!(gc.standing(&of(2), false, false), Standing::Gone, "another version");
        // However the names came back, the job may be the next to remove them.
        gc.end_withdrawals(&[found(1, true)]);
        assert_eq!(gc.standing(&of(1), false, false), Standing::Gone);
        gc.withdrawn.insert(of(1), reason());
        gc.end_withdrawal(&of(1));
        assert_eq!(gc.standing(&of(1), false, false), Standing::Gone);
    }
}
