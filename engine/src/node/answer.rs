//! Reports for people: what the loop knows, in the shapes of `protocol::report`.
//!
//! Owns: the requests, and the helpers that several reports share. Does not own: the shapes (protocol), the rows (`inventory`, `show`,
//! `recovery`), facts that only the daemon has (mount, addresses).

use crate::node::book::{Book, Number, VersionBook};
use crate::node::decide::is_covered;
use crate::node::inventory::Inventory;
use crate::node::recover::above;
use crate::node::recovery::Standings;
use crate::node::run::{Engine, Node};
use crate::node::scrub::Target;
use std::collections::BTreeSet;
use tidemark_namespace::{FileView, ObjectCopy};
use tidemark_protocol::checkpoint;
use tidemark_protocol::key::{VersionId, checkpoint_path};
use tidemark_protocol::manifest::ManifestFile;
use tidemark_protocol::recognise::Candidate;
use tidemark_protocol::record::RecordFile;
use tidemark_protocol::report::{
    ApiError, Checkpoint, CheckpointRef, CheckpointState, Commit, Copies, CopyCount, ErrorCode, Problem,
    RunStatus, TierStatus, Untold, path_text,
};

/// Name of the node that answers.
#[derive(Debug, Clone)]
pub struct Identity {
    pub node: String,
}

/// The loop's part of `status`.
#[derive(Debug)]
pub struct Standing {
    pub problems: Vec<Problem>,
    pub tiers: Vec<TierStatus>,
    pub runs: Vec<RunStatus>,
    /// Files whose bytes are in this node's memory and not in Tier-3.
    pub unsaved: CopyCount,
    /// Files among `unsaved` that are not sealed yet.
    pub unsealed: CopyCount,
    /// Changes of the tree that were not written to Tier-3 yet.
    pub untold: Option<Untold>,
}

/// A verify target and the checkpoint it belongs to.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) target: Target,
    pub(crate) checkpoint: Option<Vec<u8>>,
    /// Fault that an earlier check found, if the host copy was dropped for it or no copy is good.
    pub(crate) bad: Option<String>,
    /// Keys of objects that an earlier check found bad.
    pub(crate) suspects: BTreeSet<String>,
}

impl std::ops::Deref for Listed {
    type Target = Target;

    fn deref(&self) -> &Target {
        &self.target
    }
}

/// Returns the error for a checkpoint whose commit cannot be read.
pub(crate) fn unreadable(path: &str, why: &str) -> ApiError {
    let what = format!("Tier-3 does not say any more what was committed of {path}: {why}");
    ApiError::new(
        ErrorCode::NotRecoverable,
        what,
        "restore that object from a copy of Tier-3 and restart the daemon",
    )
}

/// Returns a reference to a version: its names and numbers, without its state.
pub(crate) fn checkpoint_ref(version: &checkpoint::Checkpoint) -> CheckpointRef {
    let VersionId { run, directory, timeline, version: number } = &version.record().version;
    let path = path_text(&checkpoint_path(run, directory));
    CheckpointRef { timeline: *timeline, step: version.record().step, version: *number, path }
}

impl Node {
    /// Returns the rows of `ls`, in order of run, timeline, step and path, the newest version of each first.
    pub async fn list(&self, place: Vec<u8>, all: bool) -> Option<Vec<Checkpoint>> {
        self.ask(move |engine| Inventory { engine }.list(&place, all)).await
    }

    pub async fn standing(&self) -> Option<Standing> {
        self.ask(|engine| Standings { engine }.standing()).await
    }

    /// Takes a person's word that the checkpoint at `path` is whole. `None` inside: there is no checkpoint.
    pub async fn commit(&self, path: Vec<u8>) -> Option<Option<Commit>> {
        self.ask(move |engine| engine.commit_told(&path)).await
    }

    /// Whether the tree has this name, or a checkpoint in the tree has it.
    pub async fn is_in_tree(&self, place: Vec<u8>) -> Option<bool> {
        self.ask(move |engine| engine.by_path().is_in_tree(&place)).await
    }

    /// Whether a path names anything, including files that only `undelete` brings back.
    pub async fn is_meant(&self, place: Vec<u8>) -> Option<bool> {
        self.ask(move |engine| engine.sessions().is_meant(&place)).await
    }

    /// Whether there is anything at or below this path: in the tree, or, if the job removed it, in Tier-3 alone.
    pub async fn is_known(&self, place: Vec<u8>) -> Option<bool> {
        self.ask(move |engine| engine.by_path().is_known(&place)).await
    }
}

/// Returns the verify target of a file that the tree does not show.
pub(super) fn stored_target(file: &ManifestFile, object: ObjectCopy) -> Target {
    Target {
        // No node of the tree has this number. It is not used, because there is no host copy.
        node: 0,
        file: file.file,
        seal: file.seal,
        path: file.path.to_string(),
        size_bytes: file.size_bytes,
        crc: file.crc64nvme,
        chunks: file.chunks.clone().into(),
        host: false,
        object: Some(object),
        more: Vec::new(),
    }
}

/// Returns the `ls` row of a checkpoint that no version stands for.
pub(crate) fn unfinished_row<'a>(
    candidate: &Candidate,
    (timeline, version): Number,
    path: &[u8],
    state: CheckpointState,
    files: impl Iterator<Item = &'a FileView> + Clone,
    size_now: impl Fn(&FileView) -> u64,
) -> Checkpoint {
    let mut seen = BTreeSet::new();
    let (mut all, mut host) = (CopyCount::default(), CopyCount::default());
    for view in files.clone() {
        // Every name counts as a file, but the bytes of one file count once, however many names it has.
        let bytes = if seen.insert(view.file) { size_now(view) } else { 0 };
        all = CopyCount { files: all.files + 1, bytes: all.bytes + bytes };
        if view.host {
            host = CopyCount { files: host.files + 1, bytes: host.bytes + bytes };
        }
    }
    Checkpoint {
        run: Some(candidate.id.run.to_string()),
        timeline,
        step: candidate.step,
        version,
        path: path_text(path),
        bytes: all.bytes,
        files: all.files,
        framework: Some(candidate.framework.clone()),
        state,
        evidence: None,
        copies: Copies { host, ..Copies::default() },
        pinned: false,
        closed_ms: files.map(|view| view.closed_ns / 1_000_000).max(),
    }
}

/// Whether a file holds the bytes that a version lists. A file that was updated in place is the same file with other bytes.
pub(super) fn is_of(entry: &RecordFile, view: &FileView) -> bool {
    view.file == entry.file && view.sealed() == Some(entry.seal)
}

/// Whether a version without a decision holds nothing that a newer one of the same checkpoint does not.
pub(crate) fn is_part_of_newer(book: &Book, number: Number, version: &VersionBook) -> bool {
    let newer = above(book, Some(number));
    !version.checkpoint.is_committed()
        && newer.iter().any(|(_, newer)| is_covered(&version.contents, &newer.contents))
}

impl Engine {
    fn commit_told(&mut self, path: &[u8]) -> Option<Commit> {
        let id = self.by_path().find_at(path)?.id.clone();
        let book = &self.ledger.books[&id];
        // Bytes that are still being written cannot be declared whole.
        let present = self.ledger.present(book);
        // The word is about the tree's content now, not about a newer or an older version.
        let covering = |book: &Book| {
            present.as_ref().and_then(|present| book.covering(&self.shared, present)).map(|(n, _)| *n)
        };
        let already = match covering(book) {
            Some(number) => book.versions[&number].checkpoint.is_proven(),
            None => book.candidate.is_none() && book.committed().is_some(),
        };
        if !already {
            let book = self.ledger.books.get_mut(&id).expect("it was found");
            book.told_of.clone_from(&present);
            self.ledger.due.insert(id.clone());
            self.look_at(&id);
        }
        let book = &self.ledger.books[&id];
        let row = Inventory { engine: self }.standing_row(book)?;
        let checkpoint =
            CheckpointRef { timeline: row.timeline, step: row.step, version: row.version, path: row.path };
        Some(Commit { checkpoint, state: row.state, already })
    }
}
