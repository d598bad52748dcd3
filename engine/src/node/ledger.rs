//! The node loop's knowledge of the tree and of every checkpoint in it.
//!
//! Owns: files by scope, the grouping of each scope, the books of checkpoints and loose files. Does not own: how
//! files are grouped and when a checkpoint is complete (protocol), what is done about it (`decide`, `run`).
//!
//! Everything here belongs to the loop alone: no locks, one thing at a time.

#[path = "carrier.rs"]
mod carrier;
#[path = "unkept.rs"]
mod unkept;

use crate::node::book::{Book, LooseBook, Number, VersionBook};
use crate::node::copies::CopyCounts;
use crate::node::due::Due;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tidemark_namespace::{FileState, FileView, Namespace, NodeId, ROOT, is_hidden};
use tidemark_protocol::evidence::History;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::{Candidate, CheckpointId, Rules};
use tokio::time::Instant;

/// The files of one scope: a directory whose files decide about each other (see `Rules::scope`).
#[derive(Debug, Default)]
pub(crate) struct Scope {
    pub(crate) files: BTreeMap<RelPath, Arc<FileView>>,
    ids: BTreeSet<CheckpointId>,
    loose: BTreeSet<RelPath>,
    /// A checkpoint here is a directory: any file below may belong to it, whatever its name.
    has_directory: bool,
    /// Names whose files changed while it waited to be grouped.
    changed: BTreeSet<RelPath>,
    /// Regrouped not before this, so that a directory of 100,000 files being filled is not grouped 100,000 times.
    not_before: Option<Instant>,
}

/// Files up to which a stale scope is regrouped at once: that costs less than the changes to it, and a question sees it as it is.
const GROUPED_AT_ONCE: usize = 64;

/// Regrouping a larger scope may take one part in this many of the loop's time.
const REGROUP_SHARE: u32 = 8;

/// Number of checkpoints up to which a change to a file of one makes all of its scope due, since they share writers. In a larger
/// scope only the file's own is due; the others follow at the next tick. Grouping a larger scope skips those committed as they
/// stand: a directory of 10,000 checkpoints would examine all of them for each one saved.
const NEIGHBOURS_MAX: usize = 64;

/// The bytes a path holds: which file, at which seal.
pub(crate) type Contents = BTreeMap<RelPath, (FileId, SealNumber)>;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Ledger {
    rules: Rules,
    paths: HashMap<NodeId, Vec<RelPath>>,
    /// Where directories were when they were last examined.
    directories: HashMap<NodeId, Vec<u8>>,
    scopes: BTreeMap<Option<RelPath>, Scope>,
    stale: BTreeSet<Option<RelPath>>,
    pub(crate) books: BTreeMap<CheckpointId, Book>,
    pub(crate) loose: BTreeMap<RelPath, LooseBook>,
    /// Loose files of Tier-3 whose names no loose file has now: the job removed or renamed them, or the tree was not examined since
    /// the start. An entry may be the only copy of a file that has another name. If the name is used again, its numbers continue.
    pub(crate) removed_loose: BTreeMap<RelPath, LooseBook>,
    /// The highest number that Tier-3 held for a path when the daemon started, whether it was believed or not.
    pub(crate) loose_numbers: BTreeMap<RelPath, Generation>,
    /// Books to examine again.
    pub(crate) due: BTreeSet<CheckpointId>,
    /// Books to examine once their scope is grouped.
    put_off: BTreeSet<CheckpointId>,
    pub(crate) loose_due: Due<RelPath>,
    /// Closed files that no job hashes yet, the oldest first.
    pub(crate) unsealed: BTreeSet<NodeId>,
    /// Unsealed files that are mapped or busy. Each tick tries them again, since the lease test is a system call.
    pub(crate) seals_later: BTreeSet<NodeId>,
    /// Unsealed files whose bytes could not be read for hashing, and why. The log says so already.
    pub(crate) unreadable: BTreeMap<NodeId, String>,
    /// Files that were cut and are sealed as they are.
    pub(crate) as_they_are: BTreeSet<NodeId>,
    /// Files whose writers were killed while they had them open.
    pub(crate) cut: BTreeSet<NodeId>,
    /// Names that no key of Tier-3 can hold.
    pub(crate) unkept: unkept::Unkept,
    /// The last complete version of each run: what the next one of the same session should look like.
    pub(crate) history: BTreeMap<RunPath, History>,
    /// Directories, links or attributes changed since the tree was last written to Tier-3.
    pub(crate) tree_changed: bool,
    /// Whether the tree was examined since the start. Before that every name would seem to be gone.
    pub(crate) has_seen_tree: bool,
    pub(crate) copies: CopyCounts,
}

impl Ledger {
    pub(crate) fn new(rules: Rules) -> Self {
        Self {
            rules,
            paths: HashMap::new(),
            directories: HashMap::new(),
            scopes: BTreeMap::new(),
            stale: BTreeSet::new(),
            books: BTreeMap::new(),
            loose: BTreeMap::new(),
            removed_loose: BTreeMap::new(),
            loose_numbers: BTreeMap::new(),
            due: BTreeSet::new(),
            put_off: BTreeSet::new(),
            loose_due: Due::new(),
            unsealed: BTreeSet::new(),
            cut: BTreeSet::new(),
            seals_later: BTreeSet::new(),
            unreadable: BTreeMap::new(),
            as_they_are: BTreeSet::new(),
            unkept: unkept::Unkept::default(),
            history: BTreeMap::new(),
            tree_changed: false,
            has_seen_tree: false,
            copies: CopyCounts::default(),
        }
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.rules
    }

    /// Looks again at nodes that changed; a directory stands for everything below it.
    pub(crate) fn refresh(&mut self, namespace: &Namespace, dirty: &[NodeId]) {
        self.has_seen_tree = true;
        for &node in dirty {
            if let Some(view) = namespace.nodes().view(node) {
                self.put(view);
                continue;
            }
            self.tree_changed = true;
            self.remove(node);
            // A directory. (A removed one had no files left, or they are dirty.)
            match namespace.nodes().path_of(node) {
                Some(path) if node != ROOT && self.directories.get(&node) == Some(&path) => {
                    self.look_at_directory(path);
                }
                Some(path) => {
                    // The directory's files may have other paths now.
                    for view in namespace.nodes().views_below(&path) {
                        self.put(view);
                    }
                    self.directories.insert(node, path);
                }
                None => {
                    self.directories.remove(&node);
                }
            }
        }
    }

    /// Queues the checkpoints of a directory that changed in place, since its role for them may have changed. Skips large scopes:
    /// each create in the directory changes its time, and examining all files each time would cost too much.
    fn look_at_directory(&mut self, path: Vec<u8>) {
        let scope = RelPath::new(path).ok().and_then(|path| self.scopes.get(&Some(path)));
        if let Some(scope) = scope.filter(|scope| scope.ids.len() <= NEIGHBOURS_MAX) {
            self.due.extend(scope.ids.iter().cloned());
        }
    }

    /// Returns the known names of a file.
    pub(crate) fn paths_of(&self, node: NodeId) -> &[RelPath] {
        self.paths.get(&node).map_or(&[], Vec::as_slice)
    }

    fn put(&mut self, view: FileView) {
        let mut paths = Vec::with_capacity(view.paths.len());
        let seen = view.paths.iter().filter(|path| !is_hidden(path));
        if seen.clone().next().is_none() {
            self.tree_changed = true;
            return self.remove(view.node);
        }
        let mut has_unkept = false;
        for bytes in seen {
            match RelPath::new(bytes.clone()) {
                Ok(path) => paths.push(path),
                Err(_) => has_unkept = true,
            }
        }
        self.seals_later.remove(&view.node);
        self.unreadable.remove(&view.node);
        if view.is_left_cut() {
            self.cut.insert(view.node);
        } else {
            self.cut.remove(&view.node);
            self.as_they_are.remove(&view.node);
        }
        match view.state {
            // Files of other nodes are sealed there.
            FileState::Closed | FileState::Mapped if view.remote.is_none() => self.unsealed.insert(view.node),
            FileState::Open { .. }
            | FileState::Cut
            | FileState::Sealed { .. }
            | FileState::Closed
            | FileState::Mapped => self.unsealed.remove(&view.node),
        };
        let node = view.node;
        let before = self.paths.remove(&node).unwrap_or_default();
        // File contents are in their own objects; the tree has links, and directories, whose times their names move.
        self.tree_changed |= before != paths || paths.len() > 1;
        for path in before.iter().filter(|path| !paths.contains(path)) {
            self.drop_name(path, node);
        }
        let view = Arc::new(view);
        self.set_unkept(node, has_unkept.then(|| Arc::clone(&view)));
        for path in &paths {
            self.hold_name(path, &view);
        }
        self.paths.insert(node, paths);
    }

    fn remove(&mut self, node: NodeId) {
        self.unsealed.remove(&node);
        self.cut.remove(&node);
        self.as_they_are.remove(&node);
        self.seals_later.remove(&node);
        self.unreadable.remove(&node);
        self.set_unkept(node, None);
        for path in self.paths.remove(&node).unwrap_or_default() {
            self.drop_name(&path, node);
        }
    }

    /// Records that the tree holds `view` at `path`. The scope becomes stale only if the name may move others from one checkpoint
    /// to another.
    fn hold_name(&mut self, path: &RelPath, view: &Arc<FileView>) {
        let key = self.rules.scope(path);
        let stale = self.stale.contains(&key);
        let scope = self.scopes.entry(key.clone()).or_default();
        self.copies.add(view);
        if let Some(before) = scope.files.insert(path.clone(), Arc::clone(view)) {
            self.copies.take(&before);
            // Attributes that a file shows when its bytes leave go with them; later ones are in the tree document.
            self.tree_changed |= has_other_attributes(&before, view);
            if stale {
                scope.changed.insert(path.clone());
            }
            if scope.loose.contains(path) {
                self.loose_due.insert(path.clone());
            } else if !stale {
                let near = scope.ids.len() <= NEIGHBOURS_MAX;
                let books = &self.books;
                let holds = |id: &&CheckpointId| near || books.get(id).is_some_and(|book| book.holds(path));
                self.due.extend(scope.ids.iter().filter(holds).cloned());
            }
        } else if !stale && !scope.has_directory && self.rules.is_plain(path) {
            scope.loose.insert(path.clone());
            self.add_loose(path);
        } else {
            self.stale.insert(key);
        }
    }

    /// Records that `node` no longer has the name `path`.
    fn drop_name(&mut self, path: &RelPath, node: NodeId) {
        let key = self.rules.scope(path);
        let Some(scope) = self.scopes.get_mut(&key) else { return };
        // Another node may have taken the name since.
        if scope.files.get(path).is_none_or(|view| view.node != node) {
            return;
        }
        if let Some(view) = scope.files.remove(path) {
            self.copies.take(&view);
        }
        if self.stale.contains(&key) || !scope.loose.contains(path) || !self.rules.is_plain(path) {
            self.stale.insert(key);
            return;
        }
        scope.loose.remove(path);
        if scope.files.is_empty() && scope.ids.is_empty() {
            self.scopes.remove(&key);
        }
        self.drop_loose(path);
    }

    fn add_loose(&mut self, path: &RelPath) {
        // A name that is used again goes on counting, and an upload that still runs for it goes on too.
        let removed = self.removed_loose.remove(path).unwrap_or_default();
        let book = self.loose.entry(path.clone()).or_insert(removed);
        book.unshown = false;
        book.generation = book.generation.max(self.loose_numbers.get(path).copied());
        self.loose_due.insert(path.clone());
    }

    fn drop_loose(&mut self, path: &RelPath) {
        if let Some(book) = self.loose.remove(path).filter(|book| book.generation.is_some()) {
            self.removed_loose.insert(path.clone(), book);
        }
        self.loose_due.remove(path);
    }

    /// Makes every loose file due, because a caller waits for all of them.
    pub(crate) fn loose_all_due(&mut self) {
        for path in self.loose.keys() {
            self.loose_due.insert(path.clone());
        }
    }

    /// Retries files whose seal was refused for a reason that passes.
    pub(crate) fn seals_again(&mut self) {
        self.unsealed.append(&mut self.seals_later);
    }

    /// Groups again what changed; books and loose files that may have to act become due.
    ///
    /// Costs a pass over the files of each scope that changed, and holds back scopes that are costly to group.
    pub(crate) fn regroup(&mut self, now: Instant) {
        let ready: Vec<_> = self
            .stale
            .iter()
            .filter(|scope| self.held_until(scope).is_none_or(|not_before| not_before <= now))
            .cloned()
            .collect();
        for scope in ready {
            self.stale.remove(&scope);
            self.regroup_scope(scope);
        }
        self.due.append(&mut self.put_off);
    }

    fn held_until(&self, scope: &Option<RelPath>) -> Option<Instant> {
        self.scopes.get(scope).and_then(|entry| entry.not_before)
    }

    /// Whether a scope waits to be grouped: what is known of its checkpoints may lack files that are there.
    pub(crate) fn is_stale_scope(&self, scope: &Option<RelPath>) -> bool {
        self.stale.contains(scope)
    }

    /// Directories with the name of a checkpoint that wait to be grouped, and of which Tier-3 has no version.
    pub(crate) fn stale_checkpoints(&self) -> impl Iterator<Item = &RelPath> {
        let is_saved = |id: &CheckpointId| self.books.get(id).is_some_and(Book::is_prepared);
        let named =
            move |scope: &&RelPath| self.rules.named_by_directory(scope).is_some_and(|id| !is_saved(&id));
        self.stale.iter().flatten().filter(named)
    }

    /// Whether any scope that may hold checkpoints of a run waits to be grouped.
    pub(crate) fn has_stale_scope_in(&self, run: &RunPath) -> bool {
        let Some(run) = run.path() else { return !self.stale.is_empty() };
        let may_hold = |scope: &RelPath| scope == run || scope.is_below(run) || run.is_below(scope);
        self.stale.iter().any(|scope| scope.as_ref().is_none_or(may_hold))
    }

    /// Whether an older checkpoint of the run lies in a scope that waits to be grouped: what that one has is what a newer one is
    /// held against. Costs a pass over the checkpoints of such scopes.
    pub(crate) fn is_stale_before(&self, candidate: &Candidate) -> bool {
        let Some(step) = candidate.step else { return false };
        let ids = self.stale.iter().filter_map(|scope| self.scopes.get(scope)).flat_map(|scope| &scope.ids);
        let found = |id| self.books.get(id).and_then(|book| book.candidate.as_ref());
        ids.filter_map(found)
            .any(|found| found.id.run == candidate.id.run && found.step.is_some_and(|other| other < step))
    }

    /// Postpones a book until its scope and the scopes of older checkpoints are grouped; false where none of them waits. A verdict
    /// on a known part must not pass for one on the whole, nor be compared with a part of the previous checkpoint.
    pub(crate) fn puts_off(&mut self, id: &CheckpointId) -> bool {
        let is_stale = self.books.get(id).is_some_and(|book| self.is_stale_scope(&book.scope));
        let candidate = self.books.get(id).and_then(|book| book.candidate.as_ref());
        let puts_off = is_stale || candidate.is_some_and(|candidate| self.is_stale_before(candidate));
        if puts_off {
            self.put_off.insert(id.clone());
        }
        puts_off
    }

    /// Whether some scope waits to be grouped.
    pub(crate) fn is_stale(&self) -> bool {
        !self.stale.is_empty()
    }

    fn regroup_scope(&mut self, key: Option<RelPath>) {
        let Some(scope) = self.scopes.get_mut(&key) else { return };
        let begun = Instant::now();
        let grouping = self.rules.group(scope.files.keys());
        scope.has_directory = grouping.candidates.iter().any(Candidate::is_directory);
        let ids: BTreeSet<_> = grouping.candidates.iter().map(|candidate| candidate.id.clone()).collect();
        let ids_before = std::mem::replace(&mut scope.ids, ids);
        let (changed, few) = (std::mem::take(&mut scope.changed), scope.ids.len() <= NEIGHBOURS_MAX);
        let mut left = BTreeSet::new();
        for candidate in grouping.candidates {
            let id = candidate.id.clone();
            let book = self.books.entry(id.clone()).or_insert_with(|| Book::new(id.clone()));
            if book.committed().is_some() {
                left.extend(carrier::leftovers(&self.rules, &candidate).cloned());
            }
            let is_same = book.scope == key && book.candidate.as_ref() == Some(&candidate);
            let rests = is_same && !few && book.is_at_rest() && !changed.iter().any(|path| book.holds(path));
            book.set_candidate(Some(candidate), key.clone());
            if !rests {
                self.due.insert(id);
            }
        }
        for gone in ids_before.difference(&scope.ids) {
            // A committed version without names is one that the job removed: the tree says so.
            self.tree_changed = true;
            if let Some(book) = self.books.get_mut(gone) {
                book.set_candidate(None, key.clone());
                self.due.insert(gone.clone());
            }
        }
        let before = std::mem::take(&mut scope.loose);
        let mut loose = grouping.loose;
        // A name says only that it may be one for a while (`notes.tmp`).
        loose.extend(grouping.temporaries);
        // Nothing is in flight of a save that is committed.
        loose.append(&mut left);
        for path in before.difference(&loose) {
            self.drop_loose(path);
            self.look_at_other_names(path);
        }
        // The others are examined when something happens to them.
        for path in loose.difference(&before) {
            self.add_loose(path);
            self.look_at_other_names(path);
        }
        let Some(scope) = self.scopes.get_mut(&key) else { return };
        scope.loose = loose;
        let is_held = scope.files.len() > GROUPED_AT_ONCE;
        scope.not_before = is_held.then(|| begun + begun.elapsed() * REGROUP_SHARE);
        if scope.files.is_empty() {
            self.scopes.remove(&key);
        }
    }

    /// Returns the file that the tree has at `path`.
    pub(crate) fn file(&self, path: &RelPath) -> Option<&Arc<FileView>> {
        self.scopes.get(&self.rules.scope(path))?.files.get(path)
    }

    /// Returns a file by its node, with its first name.
    pub(crate) fn node(&self, node: NodeId) -> Option<(&RelPath, &Arc<FileView>)> {
        let path = self.paths.get(&node)?.first()?;
        Some((path, self.file(path).filter(|view| view.node == node)?))
    }

    /// Returns the files of a candidate, in order of path. Skips a file that is gone since it was grouped: its scope is stale.
    pub(crate) fn files_of<'a>(
        &'a self,
        candidate: &'a Candidate,
        scope: &Option<RelPath>,
    ) -> impl Iterator<Item = (&'a RelPath, &'a Arc<FileView>)> {
        let entry = self.scopes.get(scope);
        candidate.files.keys().filter_map(move |path| entry?.files.get_key_value(path))
    }

    /// Returns the files in the tree that make a checkpoint, without those that lie apart.
    pub(crate) fn parts_of<'a>(
        &'a self,
        book: &'a Book,
    ) -> impl Iterator<Item = (&'a RelPath, &'a Arc<FileView>)> {
        let files = book.candidate.iter().flat_map(move |candidate| self.files_of(candidate, &book.scope));
        files.filter(move |(path, _)| !book.apart.contains(*path))
    }

    /// Returns the sealed contents of a checkpoint in the tree. `None`: a part of it is not sealed, or it is not there.
    pub(crate) fn present(&self, book: &Book) -> Option<Contents> {
        book.candidate.as_ref()?;
        contents(self.parts_of(book))
    }

    /// Returns all files, in order of scope and path.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&RelPath, &Arc<FileView>)> {
        self.scopes.values().flat_map(|scope| scope.files.iter())
    }

    /// Returns how long the loop may sleep before some held-back scope is due.
    pub(crate) fn next_regroup(&self, now: Instant) -> Option<Duration> {
        self.stale
            .iter()
            .map(|scope| self.held_until(scope).unwrap_or(now).saturating_duration_since(now))
            .min()
    }

    pub(crate) fn version_mut(&mut self, id: &CheckpointId, number: Number) -> &mut VersionBook {
        let book = self.books.get_mut(id).expect("a version is of a book, and books stay");
        book.versions.get_mut(&number).expect("a version stays in its book")
    }

    pub(crate) fn seal_as_they_are(&mut self, nodes: &[NodeId]) {
        self.as_they_are.extend(nodes);
        self.unsealed.extend(nodes);
    }
}

/// Whether a sealed file shows something else than before, with the same bytes.
fn has_other_attributes(before: &FileView, now: &FileView) -> bool {
    let of = |view: &FileView| (view.file, view.sealed());
    let small = |view: &FileView| (view.mode, view.uid, view.gid, view.mtime_ns);
    now.sealed().is_some()
        && of(before) == of(now)
        && (small(before) != small(now) || before.xattrs != now.xattrs)
}

/// Returns the sealed contents of some files. `None`: one of them is not sealed.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node::book::LooseStage;
    use proptest::prelude::*;
    use tidemark_namespace::ReclaimClass;
    use tidemark_protocol::checksum::Crc64;
    use tidemark_protocol::id::{FileCounter, Incarnation};

    pub(super) fn view(node: NodeId, paths: &[&str]) -> FileView {
        FileView {
            node,
            file: FileId { incarnation: Incarnation(1), counter: FileCounter(node) },
            ino: node,
            paths: paths.iter().map(|path| path.as_bytes().to_vec()).collect(),
            size_bytes: 0,
            mode: 0,
            uid: 0,
            gid: 0,
            mtime_ns: 0,
            xattrs: Vec::new(),
            generation: Generation(node),
            state: FileState::Closed,
            writers: Vec::new(),
            links: 1,
            opens: 0,
            host: true,
            object: None,
            content: None,
            judged: true,
            reclaim: ReclaimClass::Never,
            opened_ns: 0,
            closed_ns: 0,
            published_ns: 0,
            renamed: false,
            renamed_cut: false,
            cut: false,
            closed_again: false,
            last_seal: SealNumber(0),
            remote: None,
        }
    }

    /// Groups everything, however long ago it was grouped last.
    pub(super) fn regroup_all(ledger: &mut Ledger) {
        for scope in std::mem::take(&mut ledger.stale) {
            ledger.regroup_scope(scope);
        }
    }

    fn due(ledger: &mut Ledger) -> Vec<String> {
        std::iter::from_fn(|| ledger.loose_due.pop()).map(|path| path.to_string()).collect()
    }

    #[test]
    fn a_checkpoint_waits_for_what_is_not_grouped_yet_of_an_older_one_of_its_run() {
        let mut ledger = Ledger::new(Rules::builtin());
        let steps = ["run/checkpoint_1", "run/checkpoint_2", "run/checkpoint_3", "other/checkpoint_9"];
        let files = ["model.safetensors", "random_states_0.pkl", "custom_checkpoint_0.pkl"];
        let put = |ledger: &mut Ledger, step: usize, file: usize| {
            let node = u64::try_from(step * 10 + file).unwrap();
            ledger.put(view(node, &[&format!("{}/{}", steps[step], files[file])]));
        };
        for step in 0..steps.len() {
            put(&mut ledger, step, 0);
            put(&mut ledger, step, 1);
        }
        regroup_all(&mut ledger);
        let put_off = |ledger: &mut Ledger| {
            let ids: Vec<_> = ledger.books.keys().cloned().collect();
            let off: Vec<_> = ids.into_iter().filter(|id| ledger.puts_off(id)).collect();
            off.iter().map(|id| String::from_utf8(ledger.books[id].path()).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(put_off(&mut ledger), [] as [&str; 0]);
        put(&mut ledger, 1, 2);
        assert!(ledger.is_stale(), "a further file changes what there is");
        assert_eq!(
            put_off(&mut ledger),
            ["run/checkpoint_2", "run/checkpoint_3"],
            "its own, and a newer one"
        );
        ledger.due.clear();
        let later = Instant::now() + Duration::from_secs(60);
        ledger.regroup(later);
        let due: Vec<_> = ledger.due.iter().map(|id| id.directory.to_string()).collect();
        assert_eq!(due, ["checkpoint_2", "checkpoint_3"]);
        assert_eq!(put_off(&mut ledger), [] as [&str; 0]);
    }

    #[test]
    fn only_the_loose_file_that_something_happened_to_is_due() {
        let mut ledger = Ledger::new(Rules::builtin());
        for node in 0..1000 {
            ledger.put(view(node, &[&format!("many/f{node:04}")]));
        }
        assert!(!ledger.is_stale(), "plain names group nothing");
        assert_eq!(due(&mut ledger).len(), 1000);
        ledger.tree_changed = false;
        ledger.put(view(7, &["many/f0007"]));
        assert_eq!(due(&mut ledger), ["many/f0007"]);
        assert!(!ledger.tree_changed, "no name came or went");
        let chunks = Arc::from([]);
        let sealed = FileState::Sealed { seal: SealNumber(1), size_bytes: 0, crc: Crc64(0), chunks };
        ledger.put(FileView { state: sealed.clone(), ..view(7, &["many/f0007"]) });
        assert!(!ledger.tree_changed, "its bytes leave with what it shows");
        ledger.put(FileView { state: sealed, mode: 0o600, ..view(7, &["many/f0007"]) });
        assert!(ledger.tree_changed, "its bytes may be in Tier-3 already");
        due(&mut ledger);
        ledger.put(view(1000, &["many/step5.pt"]));
        assert!(ledger.is_stale() && ledger.tree_changed);
        regroup_all(&mut ledger);
        assert_eq!(due(&mut ledger), [""; 0], "a checkpoint beside them is nothing to loose files");
        ledger.put(view(7, &["many/new"]));
        assert_eq!(due(&mut ledger), ["many/new"]);
        assert!(!ledger.is_stale());
    }

    #[test]
    fn a_name_that_is_used_again_goes_on_counting() {
        let mut ledger = Ledger::new(Rules::builtin());
        ledger.put(view(1, &["d/a"]));
        let path = RelPath::new("d/a").unwrap();
        let book = ledger.loose.get_mut(&path).unwrap();
        book.generation = Some(Generation(4));
        book.stage = LooseStage::Uploading;
        ledger.remove(1);
        assert_eq!(ledger.removed_loose[&path].generation, Some(Generation(4)));
        assert!(ledger.loose.is_empty() && ledger.scopes.is_empty());
        ledger.put(view(2, &["d/a"]));
        assert_eq!(ledger.loose[&path].generation, Some(Generation(4)));
        let stage = &ledger.loose[&path].stage;
        assert!(matches!(stage, LooseStage::Uploading), "the upload that was begun ends in the same book");
        assert!(ledger.removed_loose.is_empty());
    }

    /// `None` removes the node. Names of checkpoints of every shape, of none, and of files that are being written.
    fn change() -> impl Strategy<Value = (NodeId, Option<&'static str>)> {
        const NAMES: [&str; 12] = [
            "r/a",
            "r/b",
            "r/c.txt",
            "r/step1.pt",
            "r/s_rank0.pt",
            "r/x.tmp",
            "r/__0_0.distcp",
            "r/step-1/n",
            "r/step-1/__0_0.distcp",
            "r/step-1/sub/m",
            "a",
            "q/config.json",
        ];
        (0..8_u64, prop::option::weighted(0.8, prop::sample::select(NAMES.to_vec())))
    }

    proptest! {
        #[test]
        fn what_came_and_went_one_by_one_is_grouped_as_if_all_had_come_at_once(
            changes in prop::collection::vec((change(), any::<bool>()), 1..40),
        ) {
            let mut ledger = Ledger::new(Rules::builtin());
            let mut tree: BTreeMap<&str, NodeId> = BTreeMap::new();
            for ((node, name), regroup) in changes {
                // A node has one name here, and a name one node: taking it, as rename does, ends the other's.
                tree.retain(|_, holder| *holder != node);
                let ended = name.and_then(|name| tree.insert(name, node));
                match name {
                    Some(name) => ledger.put(view(node, &[name])),
                    None => ledger.remove(node),
                }
                if let Some(ended) = ended {
                    ledger.remove(ended);
                }
                if regroup {
                    regroup_all(&mut ledger);
                }
            }
            regroup_all(&mut ledger);
            let paths: Vec<_> = tree.keys().map(|name| RelPath::new(*name).unwrap()).collect();
            let whole = ledger.rules.group(&paths);
            let loose = &whole.loose | &whole.temporaries;
            prop_assert_eq!(ledger.loose.keys().cloned().collect::<BTreeSet<_>>(), loose);
            let found: Vec<_> = ledger.books.values().filter_map(|book| book.candidate.clone()).collect();
            prop_assert_eq!(found, whole.candidates);
            let held: BTreeMap<_, _> = ledger.files().map(|(path, view)| (path.to_string(), view.node)).collect();
            prop_assert_eq!(ledger.copies.host_files, tree.len() as u64);
            prop_assert_eq!(held, tree.iter().map(|(name, node)| ((*name).to_owned(), *node)).collect());
        }
    }
}
