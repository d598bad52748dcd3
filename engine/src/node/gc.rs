//! Gives up committed versions of Tier-3 that retention lets go of.
//!
//! Owns: what retention is asked about, the pins, which version is given up next (one at a time), and that its names go
//! before its bytes. Does not own: the policy and P7 (`protocol::retention`), the order of the deletes (`save::commit`).
//!
//! A version that the tree shows is given up in two looks: first its names go, as if the job had removed them; its bytes
//! go when nothing in the tree leads to them any more. A daemon that dies in between finds a version without names.

use crate::namespace::{Listed, Use};
use crate::node::answer::checkpoint_ref;
use crate::node::away::Cause;
use crate::node::book::{Book, Number, VersionBook};
use crate::node::jobs;
use crate::node::run::{Engine, error_text, retry_pause};
use crate::save::commit::CommitError;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_protocol::lineage;
use tidemark_protocol::manifest::{Manifest, ManifestFile};
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::report::{ApiError, ErrorCode, EventLevel, GcRow};
use tidemark_protocol::retention::{Committed, Keep, Policy, Retirement, retain};

/// Between two looks at what may go: nobody waits for it, and a look asks the tree about every committed file.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// What the loop keeps for it.
#[derive(Debug)]
pub(crate) struct Gc {
    pub(crate) pins: BTreeSet<(CheckpointId, Number)>,
    /// An administrator removed these: they go as soon as they may, whatever the policy says of removals.
    wishes: BTreeSet<(CheckpointId, Number)>,
    running: Option<(CheckpointId, Number)>,
    next: Instant,
    tries: u32,
    /// Why the last one stayed.
    trouble: Option<String>,
}

impl Gc {
    pub(crate) fn new(pins: BTreeSet<(CheckpointId, Number)>, now: Instant) -> Self {
        Self { pins, wishes: BTreeSet::new(), running: None, next: now + LOOK_EVERY, tries: 0, trouble: None }
    }
}

impl Gc {
    /// Sets or takes away a pin; whether that changed anything.
    ///
    /// # Errors
    /// It is too late: the version is being given up.
    pub(crate) fn pin(&mut self, of: (CheckpointId, Number), pinned: bool) -> Result<bool, ApiError> {
        if pinned && self.running.as_ref() == Some(&of) {
            let what = format!("version {} is being given up", of.1.1);
            return Err(ApiError::new(ErrorCode::NotFound, what, "`ckptctl ls` shows what there is"));
        }
        Ok(if pinned { self.pins.insert(of) } else { self.pins.remove(&of) })
    }

    /// Somebody wants the checkpoint after all.
    pub(crate) fn unwish(&mut self, id: &CheckpointId) {
        self.wishes.retain(|(wished, _)| wished != id);
    }
}

/// What retention says of one committed version.
struct Verdict {
    id: CheckpointId,
    number: Number,
    used: Use,
    keep: Keep,
}

fn listed(manifest: &Manifest) -> Vec<Listed<'_>> {
    let files = manifest.files.iter();
    files
        .map(|ManifestFile { path, file, seal, key, .. }| Listed { path, file: *file, seal: *seal, key })
        .collect()
}

impl Engine {
    /// Looks when it is time, and begins to give up at most one version.
    pub(crate) fn collect(&mut self, now: Instant) {
        let idle = self.fenced.is_none() && !self.draining && self.gc.running.is_none();
        if !idle || now < self.gc.next {
            return;
        }
        self.gc.next = now + LOOK_EVERY;
        let settings = &self.shared.settings.retention;
        if settings.keeps_everything() && self.gc.wishes.is_empty() {
            return;
        }
        for Verdict { id, number, used, keep } in self.verdicts() {
            let Keep::Retired(leave) = keep else { continue };
            if used == Use::None {
                return self.give_up(id, number, leave);
            }
            self.withdraw(&id, number, leave.reason());
        }
    }

    /// Every committed version, in order of run and lineage.
    fn verdicts(&self) -> Vec<Verdict> {
        let mut runs: BTreeMap<&RunPath, Vec<(&Book, Number, &VersionBook)>> = BTreeMap::new();
        for book in self.ledger.books.values() {
            let committed = book.versions.iter().filter(|(_, version)| version.checkpoint.is_committed());
            let run = runs.entry(&book.id.run).or_default();
            run.extend(committed.map(|(number, version)| (book, *number, version)));
        }
        let mut verdicts = Vec::new();
        for (run, mut versions) in runs {
            versions.sort_by(|a, b| lineage::order(a.2.record()).cmp(&lineage::order(b.2.record())));
            let used: Vec<Use> = versions.iter().map(|(_, _, version)| self.use_of(version)).collect();
            let policy = self.shared.settings.retention.policy_of(run);
            let rows = versions
                .iter()
                .zip(&used)
                .map(|((book, number, version), used)| self.committed_row(book, *number, version, *used));
            let rows: Vec<Committed> = rows.collect();
            let now_ns = self.shared.now_ns();
            let usual = retain(&policy, &rows, now_ns);
            let wished = retain(&Policy { honour_removals: true, ..policy }, &rows, now_ns);
            for (((book, number, _), used), (usual, wished)) in
                versions.into_iter().zip(used).zip(usual.into_iter().zip(wished))
            {
                let wish = self.gc.wishes.contains(&(book.id.clone(), number));
                let keep = if wish { wished } else { usual };
                verdicts.push(Verdict { id: book.id.clone(), number, used, keep });
            }
        }
        verdicts
    }

    pub(crate) fn use_of(&self, version: &VersionBook) -> Use {
        version.manifest().map_or(Use::Open, |manifest| self.shared.namespace.use_of(&listed(manifest)))
    }

    fn committed_row(&self, book: &Book, number: Number, version: &VersionBook, used: Use) -> Committed {
        let record = version.record();
        let wished = self.gc.wishes.contains(&(book.id.clone(), number));
        Committed {
            version: record.version.clone(),
            step: record.step,
            completed_at_ns: record.completed_at_ns,
            // Nothing is known against it: it was read back, or its checksums were refused, when it was written.
            verified: true,
            pinned: self.gc.pins.contains(&(book.id.clone(), number)),
            held: used == Use::Open,
            removed: used == Use::None || wished,
        }
    }

    /// Takes the names of a version that may go out of the tree.
    fn withdraw(&mut self, id: &CheckpointId, number: Number, reason: &str) {
        let Some(manifest) = self.version(id, number).manifest().map(Arc::clone) else { return };
        let mut files = listed(&manifest);
        for link in &manifest.hard_links {
            files.extend(
                listed(&manifest)
                    .into_iter()
                    .filter(|file| *file.path == link.to)
                    .map(|file| Listed { path: &link.path, ..file }),
            );
        }
        let directories: Vec<_> =
            manifest.directories.iter().map(|directory| directory.path.clone()).collect();
        match self.shared.namespace.withdraw(&files, &directories) {
            Ok(()) => {
                let what = format!("version {} left the tree: {reason}", number.1);
                self.event(EventLevel::Info, "removed", id, what);
            }
            Err(error) => {
                tracing::error!(run = %id.run, checkpoint = %id.directory, %error, "a version's names stay");
            }
        }
    }

    fn give_up(&mut self, id: CheckpointId, number: Number, leave: Retirement) {
        let Some(manifest) = self.version(&id, number).manifest().map(Arc::clone) else { return };
        self.gc.running = Some((id.clone(), number));
        self.jobs.spawn(jobs::retire(Arc::clone(&self.shared), id, number, manifest, leave));
    }

    /// A retirement ended.
    pub(crate) fn retired(
        &mut self,
        id: &CheckpointId,
        number: Number,
        leave: &Retirement,
        result: Result<(), CommitError>,
        now: Instant,
    ) {
        self.gc.running = None;
        // The next one at once: a policy that was just set may let go of hundreds.
        self.gc.next = now;
        match result {
            Ok(()) => {
                self.gc.tries = 0;
                self.gc.trouble = None;
                self.gc.wishes.remove(&(id.clone(), number));
                self.tier3_away.ended(&Cause::Retirement);
                self.shared.metrics.retire_versions.inc();
                let what = format!("version {} was given up: {}", number.1, leave.reason());
                self.event(EventLevel::Info, "retired", id, what);
                self.forget_version(id, number, leave.reason());
            }
            Err(error) => {
                let why = error_text(&error);
                tracing::warn!(run = %id.run, checkpoint = %id.directory, %why, "a version is not given up yet");
                if matches!(error.kind(), crate::error::ErrorKind::Fenced) {
                    self.fenced = Some(why.clone());
                }
                self.tier3_away.failed(Cause::Retirement, now, why.clone());
                self.gc.trouble = Some(why);
                self.gc.next = now + retry_pause(self.gc.tries, self.retry_longest());
                self.gc.tries = self.gc.tries.saturating_add(1);
            }
        }
    }

    /// What retention says of every committed version, for people.
    pub(crate) fn gc_rows(&self) -> Vec<GcRow> {
        let row = |verdict: Verdict| {
            let version = self.version(&verdict.id, verdict.number);
            let (given_up, reason) = match &verdict.keep {
                Keep::Kept { reason } => (false, reason.clone()),
                Keep::Retired(leave) => (true, leave.reason().to_owned()),
            };
            GcRow {
                run: verdict.id.run.to_string(),
                checkpoint: checkpoint_ref(&version.checkpoint),
                bytes: version.record().size_bytes(),
                given_up,
                reason,
            }
        };
        self.verdicts().into_iter().map(row).collect()
    }

    /// Somebody waits: what failed before is tried again at once.
    pub(crate) fn collect_afresh(&mut self) {
        self.gc.trouble = None;
        self.gc.tries = 0;
        self.gc.next = Instant::now();
    }

    /// Looks now. What keeps a version that is to go from going, if anything does.
    pub(crate) fn collect_now(&mut self) -> Result<(), String> {
        if let Some(why) = &self.fenced {
            return Err(why.clone());
        }
        if let Some(why) = &self.gc.trouble {
            return Err(why.clone());
        }
        self.gc.next = Instant::now();
        Ok(())
    }

    /// An administrator removes a checkpoint: its names now, its committed versions as soon as they may.
    ///
    /// The error says which version may not go, and why: then nothing was done.
    pub(crate) fn remove(&mut self, id: &CheckpointId) -> Result<Vec<Number>, String> {
        let book = &self.ledger.books[id];
        let committed = book.versions.iter().filter(|(_, version)| version.checkpoint.is_committed());
        let numbers: Vec<Number> = committed.map(|(number, _)| *number).collect();
        let wishes: BTreeSet<_> = numbers.iter().map(|number| (id.clone(), *number)).collect();
        let added: Vec<_> = wishes.difference(&self.gc.wishes).cloned().collect();
        self.gc.wishes.extend(wishes);
        let kept = self.verdicts().into_iter().find_map(|verdict| match verdict.keep {
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
        self.collect_afresh();
        Ok(numbers)
    }

    /// Which of these versions are still there.
    pub(crate) fn still_committed(&self, id: &CheckpointId, numbers: &[Number]) -> usize {
        let book = self.ledger.books.get(id);
        let stands = |number: &&Number| {
            book.and_then(|book| book.versions.get(number))
                .is_some_and(|version| version.checkpoint.is_committed())
        };
        numbers.iter().filter(stands).count()
    }
}
