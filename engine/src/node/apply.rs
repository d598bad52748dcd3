//! What follows from the end of a job.
//!
//! Owns: the stages that versions and loose files move to, retries, what the namespace is told of copies. Does not
//! own: starting jobs (`run`), deciding about checkpoints (`decide`).

use crate::error::ErrorKind;
use crate::namespace::{ObjectCopy, ReclaimClass, SealTicket};
use crate::node::away::Cause;
use crate::node::book::{Book, LooseStage, Number, Stage};
use crate::node::jobs::Done;
use crate::node::run::{Engine, RETRY_LONGEST, error_text, retry_pause};
use crate::save::commit::{Attempt, CommitError};
use crate::save::loose::LooseError;
use crate::save::seal::SealSums;
use std::sync::Arc;
use std::time::Instant;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::key::VersionRef;
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::report::EventLevel;

impl Engine {
    pub(crate) fn apply(&mut self, done: Done) {
        let now = Instant::now();
        match done {
            Done::Sealed(sealed) => {
                self.seals_in_flight -= 1;
                for (ticket, sums) in sealed {
                    self.sealed(ticket, sums);
                }
            }
            Done::Prepared { id, number, attempt, result } => {
                self.attempts_in_flight -= 1;
                match result {
                    Ok(()) => self.prepared(&id, number, attempt),
                    Err(error) => self.failed(&id, number, attempt, &error, now),
                }
            }
            Done::Decided { id, number, attempt, result } => {
                self.attempts_in_flight -= 1;
                match result {
                    Ok(manifest) => self.committed(&id, number, *manifest),
                    Err(error) => self.failed(&id, number, attempt, &error, now),
                }
            }
            Done::Loose { path, of, generation, size_bytes, tries, result } => {
                self.loose_in_flight -= 1;
                self.loose_in_flight_bytes -= size_bytes;
                let result = result.map(|key| ObjectCopy { key, size_bytes });
                self.loose_done(&path, of, (generation, tries), result, now);
            }
            Done::Fetched { node, result } => {
                self.fetching.remove(&node);
                if let Err(error) = result {
                    tracing::error!(
                        node,
                        error = &error as &dyn std::error::Error,
                        "a cold file was not fetched"
                    );
                }
            }
            Done::Tree { number, result } => self.tree_done(number, result, now),
            Done::Scrubbed(scrubbed) => self.scrubbed(scrubbed),
        }
    }

    fn sealed(&mut self, ticket: SealTicket, sums: std::io::Result<SealSums>) {
        self.sealing.remove(&ticket.node);
        match sums {
            Ok(sums) => match self.shared.namespace.finish_seal(&ticket, sums.crc, sums.chunks) {
                Ok(()) => {
                    self.shared.metrics.seal_files.inc();
                    if let Some(path) = self.shared.namespace.path_of(ticket.node) {
                        self.shared.sizes.learn(&path, ticket.size_bytes);
                    }
                }
                Err(_voided) => {
                    self.shared.metrics.seal_voided_files.inc();
                    self.ledger.seals_later.insert(ticket.node);
                }
            },
            Err(error) => {
                tracing::error!(node = ticket.node, %error, "a closed file could not be read to be sealed");
                self.ledger.seals_later.insert(ticket.node);
            }
        }
    }

    fn prepared(&mut self, id: &CheckpointId, number: Number, attempt: Box<Attempt>) {
        self.tier3_away.ended(&Cause::Version(id.clone(), number));
        self.shared.metrics.prepare_versions.inc();
        let book = self.ledger.books.get_mut(id).expect("an attempt is of a book");
        let version = book.versions.get_mut(&number).expect("an attempt is of a version");
        let commits = version.record.evidence.commits();
        version.stage = Stage::Prepared { attempt };
        self.tree_may_tell_more();
        if commits {
            self.resume(id, number);
        }
    }

    fn committed(&mut self, id: &CheckpointId, number: Number, manifest: Manifest) {
        self.tier3_away.ended(&Cause::Version(id.clone(), number));
        self.shared.metrics.commit_versions.inc();
        let completed_ns = manifest.completed_at_ns;
        #[expect(clippy::cast_precision_loss, reason = "a duration for a histogram")]
        let seconds = (self.shared.now_ns() - completed_ns).max(0) as f64 / 1e9;
        self.shared.metrics.commit_seconds.observe(seconds);
        for file in &manifest.files {
            let object = ObjectCopy { key: file.key.clone(), size_bytes: file.size_bytes };
            self.shared.namespace.note_object(file.file, file.seal, object);
        }
        let (files, bytes) = (manifest.files.len(), manifest.size_bytes());
        let book = self.ledger.books.get_mut(id).expect("an attempt is of a book");
        let version = book.versions.get_mut(&number).expect("an attempt is of a version");
        version.record.evidence = manifest.evidence;
        let epoch = self.shared.drain.epoch;
        version.stage = Stage::Committed { manifest: Arc::new(manifest), epoch };
        book.told_of = None;
        // Provisional attempts that this version overtook are decided against when somebody sweeps.
        for (older, version) in &mut book.versions {
            if *older < number && matches!(version.stage, Stage::Prepared { .. } | Stage::Waiting { .. }) {
                version.stage = Stage::Aborted;
            }
        }
        self.ledger.due.insert(id.clone());
        let what = format!("version {} of {files} files and {bytes} bytes is committed", number.1);
        self.event(EventLevel::Info, "committed", id, what);
        self.classify(&id.run.clone());
    }

    fn failed(
        &mut self,
        id: &CheckpointId,
        number: Number,
        mut attempt: Box<Attempt>,
        error: &CommitError,
        now: Instant,
    ) {
        let why = error_text(error);
        let kind = error.kind();
        let longest = self.retry_longest();
        let book = self.ledger.books.get_mut(id).expect("an attempt is of a book");
        let version = book.versions.get_mut(&number).expect("an attempt is of a version");
        let level = match (kind, error) {
            (_, CommitError::Lost { .. } | CommitError::Taken { .. }) => {
                // The number is used by another decision; the contents are not covered, so the next number follows.
                version.stage = Stage::Aborted;
                self.ledger.due.insert(id.clone());
                EventLevel::Warn
            }
            (ErrorKind::Fenced, _) => {
                version.stage = Stage::Waiting { attempt, until: now + RETRY_LONGEST, why: why.clone() };
                self.fenced = Some(why.clone());
                EventLevel::Error
            }
            (ErrorKind::Corrupt, _) => {
                version.stage = Stage::Failed { why: why.clone() };
                EventLevel::Error
            }
            (ErrorKind::Unavailable | ErrorKind::NoSpace | ErrorKind::Invalid | ErrorKind::NotFound, _) => {
                let tries = attempt.count_failure();
                let pause = retry_pause(tries, longest);
                self.tier3_away.failed(Cause::Version(id.clone(), number), now, why.clone());
                version.stage = Stage::Waiting { attempt, until: now + pause, why: why.clone() };
                self.shared.metrics.upload_failures.inc();
                EventLevel::Warn
            }
        };
        match level {
            EventLevel::Error => {
                tracing::error!(checkpoint = %format_args!("{}/{}", id.run, id.directory), %why, "not committed")
            }
            EventLevel::Warn | EventLevel::Info => {
                tracing::warn!(checkpoint = %format_args!("{}/{}", id.run, id.directory), %why, "not committed yet");
            }
        }
        self.event(level, "not_committed", id, why);
    }

    fn loose_done(
        &mut self,
        path: &RelPath,
        of: (FileId, SealNumber),
        (generation, tries): (Generation, u32),
        result: Result<ObjectCopy, LooseError>,
        now: Instant,
    ) {
        let longest = self.retry_longest();
        let here = self.ledger.loose.contains_key(path);
        let books = if here { &mut self.ledger.loose } else { &mut self.ledger.removed_loose };
        let Some(book) = books.get_mut(path) else { return };
        if book.generation != Some(generation) {
            // The name went and came back meanwhile: a later upload has the book.
            return;
        }
        match result {
            Ok(object) => {
                self.tier3_away.ended(&Cause::Loose(path.clone()));
                book.stage = LooseStage::Uploaded { of };
                // The bytes are those of the file that was uploaded, whatever has its name by now.
                self.shared.namespace.note_object(of.0, of.1, object);
                if self.ledger.file(path).is_some_and(|view| view.file == of.0) {
                    self.shared.namespace.set_reclaim(of.0, ReclaimClass::Loose);
                }
                self.tree_may_tell_more();
            }
            Err(error) => {
                let why = error_text(&error);
                let pause = retry_pause(tries, longest);
                tracing::warn!(%path, %why, "a loose file did not reach Tier-3 yet");
                self.tier3_away.failed(Cause::Loose(path.clone()), now, why.clone());
                book.stage = LooseStage::Waiting { until: now + pause, tries: tries + 1, why };
            }
        }
        if here {
            self.ledger.loose_due.insert(path.clone());
        }
    }

    /// The committed version of the run that a new one follows.
    pub(crate) fn previous(&self, id: &CheckpointId) -> Option<VersionRef> {
        self.newest_committed(&id.run).and_then(|book| book.committed_ref()).map(|(_, reference)| reference)
    }

    /// The book with the newest committed version of a run: by timeline, then step, then time of completion.
    pub(crate) fn newest_committed(&self, run: &RunPath) -> Option<&Book> {
        self.ledger
            .books
            .values()
            .filter(|book| book.id.run == *run && book.committed().is_some())
            .max_by_key(|book| {
                let ((timeline, _), version) = book.committed().expect("filtered");
                (*timeline, version.record.step, version.record.completed_at_ns)
            })
    }

    /// Says which host copies of a run may give way, and in which order.
    pub(crate) fn classify(&self, run: &RunPath) {
        let newest = self.newest_committed(run).map(|book| book.id.clone());
        for book in self.ledger.books.values().filter(|book| book.id.run == *run) {
            let Some((_, version)) = book.committed() else { continue };
            let Stage::Committed { manifest, .. } = &version.stage else { continue };
            let class = if Some(&book.id) == newest.as_ref() {
                ReclaimClass::CommittedNewest
            } else {
                ReclaimClass::BelowWatermark
            };
            for file in &manifest.files {
                self.shared.namespace.set_reclaim(file.file, class);
            }
        }
    }
}
