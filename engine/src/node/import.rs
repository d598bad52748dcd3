//! `ckptctl import`: checkpoints that others wrote into Tier-3 become committed versions, where they are.
//!
//! Owns: which may be imported under which names, their numbers and stamps, the tree's names. Does not own: what is there and what
//! it holds (`save::foreign`), the record and the marker (`save::commit`).

use crate::node::answer::checkpoint_ref;
use crate::node::book::{Book, Number, VersionBook};
use crate::node::decide::run_of;
use crate::node::recover::{above, contents_of, record_of};
use crate::node::run::{Engine, Node};
use crate::node::stand_in::empty_record;
use crate::save::commit::{self, CommitError};
use crate::save::foreign::{self, ForeignCheckpoint, ForeignFile};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::error::error_text;
use tidemark_protocol::format::FORMAT;
use tidemark_protocol::id::{AttemptId, FileCounter, FileId, Incarnation, SealNumber};
use tidemark_protocol::key::{NodeLife, VersionId, VersionRef};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::lineage;
use tidemark_protocol::manifest::{Attributes, Directory, Manifest, ManifestFile, Prepared};
use tidemark_protocol::marker::Decision;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{CheckpointId, Rules};
use tidemark_protocol::record::{Evidence, Record};
use tidemark_protocol::report::{
    ApiError, ErrorCode, EventLevel, Import, ImportOutcome, ImportRow, Progress, path_text,
};
use tidemark_store::StoreError;

/// Permissions of imported files and directories, since foreign objects record none.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

/// A version whose number is taken for an import that goes on.
struct Reserved {
    version: VersionId,
    previous: Option<VersionRef>,
    completed_at_ns: i64,
}

/// Why one checkpoint stays as it is.
enum Stays {
    Already,
    Refused(String),
}

fn ending() -> ApiError {
    ApiError::new(ErrorCode::Unavailable, "the daemon is ending", "ask again when it runs")
}

fn away(error: &StoreError) -> ApiError {
    if matches!(error, StoreError::Refused { .. }) {
        let action = "put right what is there, then say it again: what was imported stays";
        return ApiError::new(ErrorCode::Failed, error_text(error), action);
    }
    let what = format!("Tier-3 does not answer: {}", error_text(error));
    ApiError::new(ErrorCode::Unavailable, what, "say it again later: what was imported stays")
}

impl Node {
    /// Imports every checkpoint below `from`, a path in Tier-3, as if a job had saved it below `to`. Each one ends either committed
    /// and in the tree, or unchanged.
    ///
    /// # Errors
    /// Fails when nothing below `from` is a checkpoint, when Tier-3 is away, or when the daemon is ending. Checkpoints that were
    /// imported before the error stay.
    pub async fn import(
        &self,
        from: &str,
        to: &RelPath,
        tell: impl Fn(Progress),
    ) -> Result<Import, ApiError> {
        let store = &self.shared().drain.store;
        let rules = self.ask(|engine| engine.ledger.rules().clone()).await.ok_or_else(ending)?;
        let found = foreign::find(store, &rules, from, to).await.map_err(|error| away(&error))?;
        let mut import = Import { from: from.to_owned(), loose: found.loose, ..Import::default() };
        let refused = found.refused.into_iter().map(|(key, why)| ImportRow {
            path: key,
            checkpoint: None,
            files: 1,
            bytes: 0,
            outcome: ImportOutcome::Refused,
            reason: why,
        });
        import.rows.extend(refused);
        if found.checkpoints.is_empty() && import.rows.is_empty() {
            let what = format!(
                "nothing at {from} in {} is recognised as a checkpoint, of {} files",
                store.describe(),
                found.loose
            );
            return Err(ApiError::new(
                ErrorCode::NotFound,
                what,
                "`[[rules]]` says how other checkpoints look",
            ));
        }
        let (done_bytes, done_files) = (AtomicU64::new(0), AtomicU64::new(0));
        let total_bytes = found.checkpoints.iter().map(ForeignCheckpoint::size_bytes).sum();
        let total_files = found.checkpoints.iter().map(|one| one.files.len() as u64).sum();
        for checkpoint in found.checkpoints {
            let path = checkpoint.candidate.id.path().map_or_else(String::new, |path| path.to_string());
            let heard = |bytes| {
                let done_bytes = done_bytes.fetch_add(bytes, Relaxed) + bytes;
                tell(Progress {
                    done_bytes,
                    total_bytes,
                    done_files: done_files.load(Relaxed),
                    total_files,
                    now: Some(path.clone()),
                });
            };
            let (files, bytes) = (checkpoint.files.len() as u64, checkpoint.size_bytes());
            let outcome = self.import_one(from, &rules, checkpoint, heard).await?;
            done_files.fetch_add(files, Relaxed);
            let (outcome, checkpoint, reason) = match outcome {
                Ok((reference, evidence)) => (ImportOutcome::Imported, Some(reference), evidence),
                Err(Stays::Already) => (ImportOutcome::Already, None, "it was imported before".to_owned()),
                Err(Stays::Refused(why)) => (ImportOutcome::Refused, None, why),
            };
            import.rows.push(ImportRow { path, checkpoint, files, bytes, outcome, reason });
        }
        Ok(import)
    }

    async fn import_one(
        &self,
        from: &str,
        rules: &Rules,
        checkpoint: ForeignCheckpoint,
        tell: impl Fn(u64),
    ) -> Result<Result<(tidemark_protocol::report::CheckpointRef, String), Stays>, ApiError> {
        let shared = self.shared();
        let store = &shared.drain.store;
        let checkpoint = Arc::new(checkpoint);
        let (asked, of) = (Arc::clone(&checkpoint), from.to_owned());
        let may =
            self.ask(move |engine| Imports { engine }.may_import(&of, &asked)).await.ok_or_else(ending)?;
        if let Err(stays) = may {
            return Ok(Err(stays));
        }
        let judged = foreign::judge(store, rules, &checkpoint).await.map_err(|error| away(&error))?;
        let (evidence, detail) = match judged {
            Ok(proof) => proof,
            Err(why) => return Ok(Err(Stays::Refused(why))),
        };
        let mut sums = Vec::with_capacity(checkpoint.files.len());
        for file in &checkpoint.files {
            match foreign::sums(store, &file.object, &shared.restorer.fetches, &tell).await {
                Ok(chunks) => sums.push(chunks),
                Err(StoreError::NotFound { .. } | StoreError::Range { .. } | StoreError::Damaged { .. }) => {
                    return Ok(Err(changed(file)));
                }
                Err(error) => return Err(away(&error)),
            }
            // The bytes read must be those listed, and not half of what another program is writing there.
            let now = store.head(&file.object.key).await.map_err(|error| away(&error))?;
            if now.as_ref() != Some(&file.object) {
                return Ok(Err(changed(file)));
            }
        }
        let (asked, of) = (Arc::clone(&checkpoint), from.to_owned());
        let reserved =
            self.ask(move |engine| Imports { engine }.reserve(&of, &asked)).await.ok_or_else(ending)?;
        let reserved = match reserved {
            Ok(reserved) => reserved,
            Err(stays) => return Ok(Err(stays)),
        };
        let detail = format!("{detail}; imported from {from}");
        let (record, prepared) = describe(&checkpoint, &sums, &reserved, (evidence, &detail), self);
        let committed = commit::adopt(&shared.drain, &record, &prepared, reserved.previous).await;
        match committed {
            Ok(manifest) => {
                let id = checkpoint.candidate.id.clone();
                let placed = self
                    .ask(move |engine| Imports { engine }.imported(&id, manifest))
                    .await
                    .ok_or_else(ending)?;
                Ok(Ok((placed, detail)))
            }
            Err(CommitError::Write { source, .. }) => Err(away(&source)),
            Err(error @ (CommitError::Unknown { .. } | CommitError::Fenced { .. })) => {
                let code = if matches!(error, CommitError::Fenced { .. }) {
                    ErrorCode::Fenced
                } else {
                    ErrorCode::Unavailable
                };
                Err(ApiError::new(
                    code,
                    error_text(&error),
                    "start the daemon again: it finds out what stands",
                ))
            }
            Err(error) => Ok(Err(Stays::Refused(error_text(&error)))),
        }
    }
}

fn changed(file: &ForeignFile) -> Stays {
    Stays::Refused(format!("{} changed while it was read", file.object.key))
}

/// Makes the record and the prepared marker of an import. The files get a random incarnation that no daemon has, so that no file of
/// this node has their numbers.
fn describe(
    checkpoint: &ForeignCheckpoint,
    sums: &[Vec<Crc64>],
    reserved: &Reserved,
    (evidence, detail): (Evidence, &str),
    node: &Node,
) -> (Record, Prepared) {
    let drain = &node.shared().drain;
    let random = || getrandom::u64().expect("the kernel has random numbers");
    let life = NodeLife { node: drain.life.node.clone(), incarnation: Incarnation(random()) };
    let attributes = |mode| Attributes { mode, mtime_ns: reserved.completed_at_ns, ..Attributes::default() };
    let files: Vec<ManifestFile> = (1..)
        .zip(checkpoint.files.iter().zip(sums))
        .map(|(counter, (file, chunks))| ManifestFile {
            path: file.path.clone(),
            key: file.object.key.clone(),
            size_bytes: file.object.size_bytes,
            crc64nvme: Crc64::combine_all(chunks, file.object.size_bytes).expect("each chunk was hashed"),
            chunks: chunks.clone(),
            encoding: None,
            etag: file.object.etag.clone(),
            file: FileId { incarnation: life.incarnation, counter: FileCounter(counter) },
            seal: SealNumber(1),
            attributes: attributes(FILE_MODE),
        })
        .collect();
    let directories = foreign::directories(checkpoint).into_iter();
    let prepared = Prepared {
        format: FORMAT,
        version: reserved.version.clone(),
        attempt: AttemptId(random()),
        epoch: drain.epoch(),
        life: life.clone(),
        by: None,
        chunk_bytes: CHUNK_BYTES,
        files,
        directories: directories
            .map(|path| Directory { path, attributes: attributes(DIRECTORY_MODE) })
            .collect(),
        symlinks: Vec::new(),
        hard_links: Vec::new(),
    };
    let record = Record {
        format: FORMAT,
        version: reserved.version.clone(),
        attempt: prepared.attempt,
        step: checkpoint.candidate.step,
        framework: checkpoint.candidate.framework.clone(),
        evidence,
        evidence_detail: detail.to_owned(),
        epoch: drain.epoch(),
        completed_at_ns: reserved.completed_at_ns,
        participants: vec![life],
        files: prepared.files.iter().map(ManifestFile::entry).collect(),
        partial: false,
        doubted: false,
    };
    (record, prepared)
}

/// Names and numbers of imports.
struct Imports<'a> {
    engine: &'a mut Engine,
}

impl Imports<'_> {
    /// Whether a checkpoint may become a version under its name. The target run must hold imports only: beside checkpoints that
    /// were saved here, the import would be the newest, whatever its step, and the job would load it.
    fn may_import(&self, from: &str, checkpoint: &ForeignCheckpoint) -> Result<(), Stays> {
        let refused = |why: String| Err(Stays::Refused(why));
        let id = &checkpoint.candidate.id;
        if let Some(why) =
            self.engine.tier3_away.why_nothing_is_written(&self.engine.shared, &self.engine.rights)
        {
            return refused(why);
        }
        if !self.engine.rights.may_write() {
            return refused("Tier-3 has not been read by this coordinator yet; try again".to_owned());
        }
        // Our objects would lie among the others', or where one of those is a file.
        let (ours, theirs) = (format!("{}/{}/", id.run, id.directory), format!("{from}/"));
        if ours.starts_with(&theirs) || theirs.starts_with(&ours) {
            return refused(format!(
                "its own objects would lie at {ours}, among those of {from}; give another name with --as"
            ));
        }
        if let Some(book) = self.engine.ledger.books.get(id) {
            let same = |(_, version): &(&Number, &VersionBook)| {
                version.manifest().is_some_and(|manifest| is_of(manifest, checkpoint))
            };
            let standing = above(book, None);
            if standing.iter().any(same) {
                return Err(Stays::Already);
            }
            if !standing.is_empty() || book.candidate.is_some() {
                return refused("there is a checkpoint of that name; give another with --as".to_owned());
            }
        }
        if let Some(file) = checkpoint
            .files
            .iter()
            .find(|file| self.engine.shared.namespace.nodes().node_at(file.path.as_bytes()).is_some())
        {
            return refused(format!("{} is in the tree; give another name with --as", file.path));
        }
        let run: Vec<&Book> =
            self.engine.ledger.books.values().filter(|book| book.id.run == id.run).collect();
        let own = |book: &&&Book| {
            book.candidate.is_some() && above(book, None).is_empty()
                || above(book, None)
                    .iter()
                    .any(|(_, version)| !version.manifest().is_some_and(|manifest| manifest.is_foreign()))
        };
        if let Some(other) = run.iter().find(own) {
            let path = path_text(&other.path());
            return refused(format!(
                "{path} was saved in the same run, and would be older; give another name with --as"
            ));
        }
        match self.engine.books().watermark(&id.run).map(Checkpoint::record) {
            Some(newest) if newest.step > checkpoint.candidate.step => {
                let step = |step: Option<tidemark_protocol::id::Step>| {
                    step.map_or_else(|| "none".to_owned(), |step| step.to_string())
                };
                let (newest, this) = (step(newest.step), step(checkpoint.candidate.step));
                refused(format!(
                    "step {newest} of the run was imported before, and step {this} would be newer than it"
                ))
            }
            _ => Ok(()),
        }
    }

    /// Reserves the next number under the import's name. No other version gets it, whatever becomes of this one.
    fn reserve(&mut self, from: &str, checkpoint: &ForeignCheckpoint) -> Result<Reserved, Stays> {
        self.may_import(from, checkpoint)?;
        let id = &checkpoint.candidate.id;
        let book = self.engine.ledger.books.entry(id.clone()).or_insert_with(|| Book::new(id.clone()));
        let number = book.next_number();
        let version = book.version_id(number);
        // Dead until it is committed, as what is left of it would be.
        let record = empty_record(&version, &self.engine.shared);
        let stub = VersionBook::new(
            Checkpoint::decided(record, Decision::Abort),
            crate::node::ledger::Contents::new(),
        );
        book.versions.insert(number, stub);
        let now_ns = self.engine.shared.now_ns();
        let completed_at_ns = lineage::stamp(&version, now_ns, now_ns, run_of(&self.engine.ledger, &id.run));
        Ok(Reserved { version, previous: self.engine.books().previous(&id.run), completed_at_ns })
    }

    /// Records a committed import in its book and puts its names into the tree.
    fn imported(
        &mut self,
        id: &CheckpointId,
        manifest: Manifest,
    ) -> tidemark_protocol::report::CheckpointRef {
        let number = (manifest.version.timeline, manifest.version.version);
        let checkpoint = Checkpoint::decided(record_of(&manifest), Decision::Commit);
        let reference = checkpoint_ref(&checkpoint);
        let mut version = VersionBook::new(checkpoint, contents_of(&manifest.files, &manifest));
        version.previous = self.engine.books().previous(&id.run);
        version.committed = Some((Arc::new(manifest), self.engine.shared.drain.epoch()));
        let book = self.engine.ledger.books.get_mut(id).expect("its number was reserved");
        book.versions.insert(number, version);
        let (names, back) = self.engine.shielding().put_back(id, number);
        let what = format!("version {} was imported, {back} of {names} files are in the tree", number.1);
        self.engine.shared.event_of(
            if back == names { EventLevel::Info } else { EventLevel::Warn },
            "imported",
            id,
            what,
        );
        if back < names {
            // Names that could not be shown are not names that the job removed.
            self.engine.gc.keep_unshown(id.clone(), number);
        }
        reference
    }
}

/// Whether a version is this very import, of an earlier time.
fn is_of(manifest: &Manifest, checkpoint: &ForeignCheckpoint) -> bool {
    let listed = manifest.files.iter().map(|file| (&file.path, file.key.as_str()));
    listed.eq(checkpoint.files.iter().map(|file| (&file.path, file.object.key.as_str())))
}
