//! What the node loop knows of the tree and of every checkpoint in it.
//!
//! Owns: files by scope, the grouping of each scope, the books of checkpoints and loose files. Does not own: how
//! files are grouped and when a checkpoint is complete (protocol), what is done about it (`decide`, `run`).
//!
//! Everything here belongs to the loop alone: no locks, one thing at a time.

use crate::namespace::{FileState, FileView, Namespace, NodeId};
use crate::node::book::{Book, LooseBook};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_protocol::evidence::History;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::{Candidate, CheckpointId, Rules};

/// The files of one scope: a directory whose files decide about each other (see `Rules::scope`).
#[derive(Debug, Default)]
pub(crate) struct Scope {
    pub(crate) files: BTreeMap<RelPath, Arc<FileView>>,
    ids: BTreeSet<CheckpointId>,
    loose: BTreeSet<RelPath>,
    /// Regrouped not before this, so that a directory of 100,000 files being filled is not grouped 100,000 times.
    not_before: Option<Instant>,
}

/// A scope's regrouping may take one part in this many of the loop's time.
const REGROUP_SHARE: u32 = 8;

/// The bytes a path holds: which file, at which seal.
pub(crate) type Contents = BTreeMap<RelPath, (FileId, SealNumber)>;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Ledger {
    rules: Rules,
    paths: HashMap<NodeId, Vec<RelPath>>,
    scopes: BTreeMap<Option<RelPath>, Scope>,
    stale: BTreeSet<Option<RelPath>>,
    pub(crate) books: BTreeMap<CheckpointId, Book>,
    pub(crate) loose: BTreeMap<RelPath, LooseBook>,
    /// Names of loose files that the job removed or renamed, with what was uploaded under them: it may be the only
    /// copy of a file that has another name now, and the name goes on counting when it is used again.
    pub(crate) removed_loose: BTreeMap<RelPath, LooseBook>,
    /// The highest number that Tier-3 held for a path when the daemon started, whether it was believed or not.
    pub(crate) loose_numbers: BTreeMap<RelPath, Generation>,
    /// Books to look at again.
    pub(crate) due: BTreeSet<CheckpointId>,
    pub(crate) loose_due: BTreeSet<RelPath>,
    /// Closed files that nobody hashes yet.
    pub(crate) unsealed: BTreeSet<NodeId>,
    /// Names that are not ours to keep: no key can hold them.
    pub(crate) unnameable: u64,
    /// The last complete version of each run: what the next one of the same session should look like.
    pub(crate) history: BTreeMap<RunPath, History>,
    /// Directories, links or attributes changed since the tree was last written to Tier-3.
    pub(crate) tree_changed: bool,
}

impl Ledger {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            rules,
            paths: HashMap::new(),
            scopes: BTreeMap::new(),
            stale: BTreeSet::new(),
            books: BTreeMap::new(),
            loose: BTreeMap::new(),
            removed_loose: BTreeMap::new(),
            loose_numbers: BTreeMap::new(),
            due: BTreeSet::new(),
            loose_due: BTreeSet::new(),
            unsealed: BTreeSet::new(),
            unnameable: 0,
            history: BTreeMap::new(),
            tree_changed: false,
        }
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Looks again at nodes that changed; a directory stands for everything below it.
    pub(crate) fn refresh(&mut self, namespace: &Namespace, dirty: &[NodeId]) {
        self.tree_changed |= !dirty.is_empty();
        for &node in dirty {
            if let Some(view) = namespace.view(node) {
                self.put(view);
                continue;
            }
            self.remove(node);
            // A directory: its files may have other paths now. (A removed one had no files left, or they are dirty.)
            if let Some(path) = namespace.path_of(node) {
                for view in namespace.views_below(&path) {
                    self.put(view);
                }
            }
        }
    }

    fn put(&mut self, view: FileView) {
        self.remove(view.node);
        let mut paths = Vec::with_capacity(view.paths.len());
        for bytes in &view.paths {
            match RelPath::new(bytes.clone()) {
                Ok(path) => paths.push(path),
                Err(_) => self.unnameable += 1,
            }
        }
        match view.state {
            FileState::Closed | FileState::Mapped => self.unsealed.insert(view.node),
            FileState::Open { .. } | FileState::Cut | FileState::Sealed { .. } => {
                self.unsealed.remove(&view.node)
            }
        };
        let node = view.node;
        let view = Arc::new(view);
        for path in &paths {
            let scope = self.rules.scope(path);
            self.scopes.entry(scope.clone()).or_default().files.insert(path.clone(), Arc::clone(&view));
            self.stale.insert(scope);
        }
        self.paths.insert(node, paths);
    }

    fn remove(&mut self, node: NodeId) {
        self.unsealed.remove(&node);
        for path in self.paths.remove(&node).unwrap_or_default() {
            let scope = self.rules.scope(&path);
            let Some(entry) = self.scopes.get_mut(&scope) else { continue };
            // Another node may have taken the name since.
            if entry.files.get(&path).is_some_and(|view| view.node == node) {
                entry.files.remove(&path);
            }
            self.stale.insert(scope);
        }
    }

    /// Groups again what changed; books and loose files that may have to act become due.
    ///
    /// Costs a pass over the files of each scope that changed, and holds back scopes that are costly to group.
    pub(crate) fn regroup(&mut self, now: Instant) {
        let ready: Vec<_> = self
            .stale
            .iter()
            .filter(|scope| {
                let held = self.scopes.get(*scope).and_then(|entry| entry.not_before);
                held.is_none_or(|not_before| not_before <= now)
            })
            .cloned()
            .collect();
        for scope in ready {
            self.stale.remove(&scope);
            self.regroup_scope(scope);
        }
    }

    /// Whether some scope waits to be grouped.
    pub(crate) fn is_stale(&self) -> bool {
        !self.stale.is_empty()
    }

    fn regroup_scope(&mut self, key: Option<RelPath>) {
        let Some(scope) = self.scopes.get_mut(&key) else { return };
        let begun = Instant::now();
        let grouping = self.rules.group(scope.files.keys());
        let mut ids = BTreeSet::new();
        for candidate in grouping.candidates {
            let id = candidate.id.clone();
            ids.insert(id.clone());
            let book = self.books.entry(id.clone()).or_insert_with(|| Book::new(id.clone()));
            book.set_candidate(Some(candidate), key.clone());
            self.due.insert(id);
        }
        for gone in scope.ids.difference(&ids) {
            if let Some(book) = self.books.get_mut(gone) {
                book.set_candidate(None, key.clone());
                self.due.insert(gone.clone());
            }
        }
        for path in scope.loose.difference(&grouping.loose) {
            if let Some(book) = self.loose.remove(path).filter(|book| book.generation.is_some()) {
                self.removed_loose.insert(path.clone(), book);
            }
            self.loose_due.remove(path);
        }
        for path in &grouping.loose {
            // A name that is used again goes on counting, and an upload that still runs for it goes on too.
            let removed = self.removed_loose.remove(path).unwrap_or_default();
            let book = self.loose.entry(path.clone()).or_insert(removed);
            book.generation = book.generation.max(self.loose_numbers.get(path).copied());
            self.loose_due.insert(path.clone());
        }
        scope.ids = ids;
        scope.loose = grouping.loose;
        scope.not_before = Some(begun + begun.elapsed() * REGROUP_SHARE);
        if scope.files.is_empty() {
            self.scopes.remove(&key);
        }
    }

    /// What the tree holds at `path`.
    pub(crate) fn file(&self, path: &RelPath) -> Option<&Arc<FileView>> {
        self.scopes.get(&self.rules.scope(path))?.files.get(path)
    }

    /// The files of a candidate, in order of path. A file that is gone since it was grouped is left out, and its
    /// scope is stale.
    pub(crate) fn files_of<'a>(
        &'a self,
        candidate: &'a Candidate,
        scope: &Option<RelPath>,
    ) -> impl Iterator<Item = (&'a RelPath, &'a Arc<FileView>)> {
        let entry = self.scopes.get(scope);
        candidate.files.keys().filter_map(move |path| entry?.files.get_key_value(path))
    }

    /// All files, in order of scope and path.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&RelPath, &Arc<FileView>)> {
        self.scopes.values().flat_map(|scope| scope.files.iter())
    }

    /// How long the loop may sleep before some held-back scope is due.
    pub(crate) fn next_regroup(&self, now: Instant) -> Option<Duration> {
        self.stale
            .iter()
            .map(|scope| {
                let held = self.scopes.get(scope).and_then(|entry| entry.not_before);
                held.map_or(Duration::ZERO, |not_before| not_before.saturating_duration_since(now))
            })
            .min()
    }
}

/// The sealed contents of some files; `None` while one of them is not sealed.
pub(crate) fn contents<'a>(
    files: impl Iterator<Item = (&'a RelPath, &'a Arc<FileView>)>,
) -> Option<Contents> {
    files
        .map(|(path, view)| match view.state {
            FileState::Sealed { seal, .. } => Some((path.clone(), (view.file, seal))),
            _ => None,
        })
        .collect()
}
