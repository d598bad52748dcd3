//! The tree around the checkpoints, as Tier-3 keeps it: directories, links, and what was removed.
//!
//! Owns: when the tree document is written and what is in it. Does not own: writing it (`save::loose`), reading it
//! (`recover`).

use crate::node::Shared;
use crate::node::jobs::Done;
use crate::node::run::{Engine, error_text};
use crate::save::loose::{self, LooseError};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_protocol::documents::{RemovedLoose, TreeDocument};
use tidemark_protocol::format::FORMAT;
use tidemark_protocol::manifest::{Attributes, Base64, Directory, HardLink, Symlink};
use tidemark_protocol::path::{RawText, RelPath};

/// The tree is written at most this often unless somebody waits: its document is as large as the tree has directories.
const WRITE_EVERY: Duration = Duration::from_secs(10);

/// When the tree was written, and whether it is being written.
#[derive(Debug)]
pub(crate) struct TreeState {
    /// The highest number present in Tier-3.
    number: u64,
    running: bool,
    written: Option<Instant>,
    retry_at: Option<Instant>,
    /// What the last written document said, without its epoch: an equal one is not written again.
    last: Option<blake3::Hash>,
    /// The tree of this moment is in Tier-3.
    clean_at: Option<Instant>,
    /// When the tree that is being written was looked at.
    looked_at: Option<Instant>,
}

impl TreeState {
    pub(crate) fn new(number: u64) -> Self {
        Self {
            number,
            running: false,
            written: None,
            retry_at: None,
            last: None,
            clean_at: None,
            looked_at: None,
        }
    }
}

impl Engine {
    /// Whether the tree as it was at `since` is not in Tier-3 yet.
    pub(crate) fn tree_is_pending(&self, since: Instant) -> bool {
        self.fenced.is_none() && self.tree.clean_at.is_none_or(|clean| clean < since)
    }

    pub(crate) fn write_tree(&mut self, now: Instant) {
        let urgent = !self.flushes.is_empty() || self.draining;
        let wanted = self.ledger.tree_changed;
        let early =
            self.tree.written.is_some_and(|written| now.saturating_duration_since(written) < WRITE_EVERY);
        let held = self.tree.retry_at.is_some_and(|at| at > now);
        if self.tree.running || self.fenced.is_some() || !wanted || held || (early && !urgent) {
            return;
        }
        self.ledger.tree_changed = false;
        let document = self.tree_document();
        let mut unstamped = document.clone();
        unstamped.epoch = tidemark_protocol::id::Epoch(0);
        let text = serde_json::to_vec(&unstamped).expect("plain data is written as JSON");
        let hash = blake3::hash(&text);
        if self.tree.last == Some(hash) {
            self.tree.clean_at = Some(now);
            return;
        }
        self.tree.looked_at = Some(now);
        self.tree.last = Some(hash);
        self.tree.running = true;
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
                self.tier3_away = None;
            }
            Err(error) => {
                if matches!(error, LooseError::Taken { .. }) {
                    // Numbers only rise; the next try takes the next.
                    self.tree.number = number;
                }
                let why = error_text(&error);
                tracing::warn!(%why, "the tree did not reach Tier-3 yet");
                self.tier3_away.get_or_insert((now, why));
                self.ledger.tree_changed = true;
                self.tree.last = None;
                self.tree.retry_at = Some(now + Duration::from_secs(1));
            }
        }
    }

    fn tree_document(&self) -> TreeDocument {
        let snapshot = self.shared.namespace.tree_snapshot();
        let attributes = |node: &crate::namespace::SnapshotNode| Attributes {
            mode: node.mode,
            uid: node.uid,
            gid: node.gid,
            mtime_ns: node.mtime_ns,
            xattrs: node
                .xattrs
                .iter()
                .map(|(name, value)| (RawText(name.clone()), Base64(value.clone())))
                .collect(),
        };
        let path = |bytes: &[u8]| RelPath::new(bytes.to_vec()).ok();
        let directories = snapshot
            .directories
            .iter()
            .filter_map(|node| Some(Directory { path: path(&node.path)?, attributes: attributes(node) }));
        let symlinks = snapshot.symlinks.iter().filter_map(|(node, target)| {
            Some(Symlink {
                path: path(&node.path)?,
                target: RawText(target.clone()),
                uid: node.uid,
                gid: node.gid,
                mtime_ns: node.mtime_ns,
            })
        });
        let hard_links = snapshot
            .hard_links
            .iter()
            .filter_map(|link| Some(HardLink { path: path(&link.path)?, to: path(&link.to)? }));
        let mut removed_versions = Vec::new();
        for book in self.ledger.books.values() {
            let Some((number, _)) = book.committed() else { continue };
            // Gone from the tree altogether: the job removed it. Its bytes stay until retention gives them up.
            if book.candidate.is_none() {
                removed_versions.push(book.version_id(*number));
            }
        }
        let here: BTreeSet<_> = self.ledger.loose.keys().collect();
        let removed_loose = self.ledger.removed_loose.iter().filter(|(path, _)| !here.contains(path));
        TreeDocument {
            format: FORMAT,
            epoch: self.shared.drain.epoch,
            directories: directories.collect(),
            symlinks: symlinks.collect(),
            hard_links: hard_links.collect(),
            removed_versions,
            removed_loose: removed_loose
                .map(|(path, generation)| RemovedLoose { path: path.clone(), generation: *generation })
                .collect(),
        }
    }
}

async fn run(shared: Arc<Shared>, number: u64, document: TreeDocument) -> Done {
    let result = loose::write_tree(&shared.drain, number, &document).await;
    Done::Tree { number, result }
}
