//! From what Tier-3 holds to a tree whose files are cold, when the daemon starts with empty memory.
//!
//! Owns: which version of a checkpoint the tree shows, and what becomes of attempts without a decision. Does not
//! own: reading Tier-3 (`restore::locate`), the markers (`save::commit`).

use crate::node::Shared;
pub(crate) use crate::node::adopt::{Adopter, adopt_loose};
use crate::node::adopt::{
    SYMLINK_MODE, entry, entry_at, file_kind, link_entry, note, placeholder, placeholders,
};
use crate::node::book::{Book, LooseBook, LooseStage, Number, VersionBook, reference};
use crate::node::metric;
use crate::node::removals::Told;
use crate::node::stand_in::{empty_record, stand_in, stand_in_file};
use crate::restore::locate::{
    self, Catalog, CommittedVersion, FormatProblem, LooseFiles, PassedOver, UndecidedAttempt,
    UnreadableLoose, UnreadableVersion,
};
use crate::save::commit::{self, Attempt, CommitError};
use crate::save::loose::LooseStored;
use crate::save::sweep::{self, Decided};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_namespace::{AdoptEntry, AdoptKind, Special};
use tidemark_protocol::checkpoint::{Checkpoint, CheckpointEvent, Found};
use tidemark_protocol::documents::{SpecialKind, TreeDocument, VersionMetric};
use tidemark_protocol::error::error_text;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::key::{Key, Series, VersionId, VersionRef, checkpoint_path};
use tidemark_protocol::lineage::watermark;
use tidemark_protocol::manifest::{Attributes, Manifest, ManifestFile, Prepared};
use tidemark_protocol::marker::Decision;
use tidemark_protocol::path::{CheckpointName, RelPath, RunPath};
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::record::Record;
use tidemark_store::StoreError;

/// A node's knowledge of checkpoints, which limits what it may decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Knows {
    /// Nothing: another node decides, or this one is about to.
    #[default]
    Nothing,
    /// The names, but not the content of Tier-3: nothing is written there.
    Names,
    /// The names, and what is committed in a Tier-3 that takes no writes yet: nothing is written there.
    Committed,
    All,
}

/// State with which the loop starts. If it is empty, nothing is decided with it.
#[derive(Debug, Default)]
pub struct Recovered {
    pub(crate) knows: Knows,
    pub(crate) names: Names,
    pub(crate) books: BTreeMap<CheckpointId, Book>,
    /// The loose files of Tier-3, whether the tree has their names or not: the loop compares.
    pub(crate) loose: BTreeMap<RelPath, LooseBook>,
    pub(crate) loose_numbers: BTreeMap<RelPath, Generation>,
    pub(crate) tree_number: u64,
    pub(crate) removals: Told,
    pub(crate) passed_over: Vec<NotBelieved>,
    pub(crate) pins: BTreeSet<(CheckpointId, Number)>,
    /// Versions that the tree should show and could not be made to: no job removed them.
    pub(crate) unshown: BTreeSet<(CheckpointId, Number)>,
    /// Metrics set on versions after their commit.
    pub(crate) metrics: Vec<VersionMetric>,
    /// Decided versions whose marker or manifest is damaged.
    unreadable: Vec<UnreadableVersion>,
    /// Final decisions, from which the sweep knows which unfinished uploads cannot matter any more.
    decided: Decided,
}

/// A document of Tier-3 that the start passed over.
#[derive(Debug)]
pub(crate) struct NotBelieved {
    pub(crate) what: String,
    pub(crate) key: String,
    /// The place that lacks what it said, where nothing in the tree or in a book stands for that.
    pub(crate) place: Option<Vec<u8>>,
}

/// Why the daemon cannot start on this Tier-3.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    #[error("Tier-3 cannot be read at start")]
    Store(#[from] StoreError),
    #[error("an attempt that an earlier start left undecided cannot be decided")]
    Decide(#[from] CommitError),
}

/// Content of the namespace when Tier-3 is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Names {
    /// Nothing: it is filled with cold files.
    #[default]
    Empty,
    /// Everything: it outlived the daemon, and knows better than Tier-3.
    Kept,
}

/// Reads Tier-3, decides attempts that were left undecided, and puts what is there into the namespace.
///
/// Costs a read of every marker and manifest, and memory for the tree. Nothing is fetched.
///
/// # Errors
/// Fails when Tier-3 is away, or does not take what is to be decided.
pub async fn recover(shared: &Arc<Shared>, names: Names) -> Result<Recovered, RecoverError> {
    let mut recovered = take_up(shared, names, Knows::All).await?;
    // No caller waits for it: the attempts that it aborts are dead, whenever that happens.
    let decided = std::mem::take(&mut recovered.decided);
    tokio::spawn(sweep::sweep(Arc::clone(&shared.drain), decided));
    Ok(recovered)
}

/// Reads a Tier-3 that may not be written to yet, beside names that outlived the daemon: what is committed is known, what was left
/// undecided stays so, and nothing is swept. [`recover`] follows once it may be written to.
///
/// # Errors
/// Fails when Tier-3 is away.
pub async fn look(shared: &Arc<Shared>) -> Result<Recovered, RecoverError> {
    take_up(shared, Names::Kept, Knows::Committed).await
}

async fn take_up(shared: &Arc<Shared>, names: Names, knows: Knows) -> Result<Recovered, RecoverError> {
    let store = &shared.drain.store;
    let mut catalog = locate::read(store).await?;
    let mut passed_over = Vec::new();
    let (tree_number, tree) = locate::newest::<TreeDocument>(store, &Series::Tree, &mut passed_over).await?;
    let loose = locate::loose(store, &mut passed_over).await?;
    let pinned = locate::pins(store, &mut passed_over).await?;
    let mut recovered = Recovered { knows, names, tree_number, ..Recovered::default() };
    let undecided = std::mem::take(&mut catalog.undecided);
    recovered.decided(shared, catalog);
    if knows == Knows::All {
        for attempt in worth_most(undecided) {
            recovered.undecided(shared, attempt).await?;
        }
    }
    recovered.pins = recovered.pinned(&pinned);
    recovered.passed_over.extend(passed_over.iter().map(say));
    let believed = loose.believed.iter().map(|sidecar| (sidecar.file.path.clone(), sidecar.generation));
    recovered.decided.loose = believed.collect();
    recovered.adopt(shared, names, tree.as_ref(), loose);
    Ok(recovered)
}

fn say(passed: &PassedOver) -> NotBelieved {
    let what = format!("{} is passed over: {}", passed.key, error_text(&passed.why));
    tracing::error!(key = %passed.key, why = %error_text(&passed.why), "an object of Tier-3 is not believed");
    let place = match passed.key.parse() {
        Ok(Key::Numbered { .. }) => Some(Vec::new()),
        Ok(Key::LooseSidecar { .. }) if matches!(passed.why, FormatProblem::Nameless(_)) => Some(Vec::new()),
        Ok(Key::Record { version, .. } | Key::Prepared { version, .. }) => {
            Some(checkpoint_path(&version.run, &version.directory))
        }
        // The name of a loose file stands for it, and the book of a version.
        Ok(_) | Err(_) => None,
    };
    NotBelieved { what, key: passed.key.clone(), place }
}

/// Selects one attempt per version. Two coordinators may have used the same version number, but the marker can name only one
/// attempt. Preference: prepared with evidence, then prepared, then the highest epoch. Remains of the other attempts are swept with
/// the version. Only if no attempt is prepared, the version is lost.
fn worth_most(undecided: Vec<UndecidedAttempt>) -> Vec<UndecidedAttempt> {
    let worth = |attempt: &UndecidedAttempt| {
        let whole = locate::is_prepared(attempt);
        (whole && attempt.record.evidence.commits(), whole, attempt.record.epoch)
    };
    let mut best: BTreeMap<VersionId, UndecidedAttempt> = BTreeMap::new();
    for attempt in undecided {
        let version = attempt.record.version.clone();
        if best.get(&version).is_none_or(|known| worth(&attempt) > worth(known)) {
            best.insert(version, attempt);
        }
    }
    best.into_values().collect()
}

impl Recovered {
    /// Returns the state of a coordinator that has its predecessor's names and cannot reach Tier-3. Such a coordinator looks after
    /// names and copies, and writes nothing to Tier-3 before it has read it.
    #[must_use]
    pub fn names_only() -> Self {
        Self { knows: Knows::Names, names: Names::Kept, ..Self::default() }
    }

    /// Recovers the versions that have a decision.
    fn decided(&mut self, shared: &Shared, catalog: Catalog) {
        for dead in catalog.aborted {
            self.dead(&dead.version, shared);
            self.decided.aborted_remains.extend(dead.has_remains.then_some(dead.version));
        }
        for dead in catalog.retired {
            self.dead(&dead.version, shared);
            self.decided.retired_remains.extend(dead.has_remains.then_some(dead.version));
        }
        for passed in &catalog.passed_over {
            // A decision that cannot be read has used its number: the next version must not ask for the same marker. So
            // has an attempt, which a later start may be able to read and decide.
            if let Ok(
                Key::Committed { version }
                | Key::Retired { version }
                | Key::Manifest { version, .. }
                | Key::Record { version, .. }
                | Key::Prepared { version, .. },
            ) = passed.key.parse()
            {
                self.close(&version, shared);
            }
        }
        self.passed_over.extend(catalog.passed_over.iter().map(say));
        self.unreadable.extend(catalog.unreadable);
        for CommittedVersion { marker, manifest } in catalog.committed {
            self.decided.versions.insert(marker.version.clone());
            let checkpoint = Checkpoint::decided(record_of(&manifest), Decision::Commit);
            let mut version = VersionBook::new(checkpoint, contents_of(&manifest.files, &manifest));
            version.previous = marker.previous;
            version.committed = Some((Arc::new(manifest), marker.epoch));
            self.put(version);
        }
    }

    fn dead(&mut self, version: &VersionId, shared: &Shared) {
        self.decided.versions.insert(version.clone());
        self.close(version, shared);
    }

    /// Recovers a version about which another coordinator decided while it was examined here: the other's decision counts.
    async fn decided_by_another(&mut self, shared: &Shared, version: &VersionId) -> Result<(), RecoverError> {
        let found = locate::read_version(&shared.drain.store, version).await?;
        self.decided(shared, found);
        Ok(())
    }

    fn book(&mut self, version: &VersionId) -> &mut Book {
        let id = CheckpointId { run: version.run.clone(), directory: version.directory.clone() };
        self.books.entry(id.clone()).or_insert_with(|| Book::new(id))
    }

    fn put(&mut self, version: VersionBook) {
        let id = version.record().version.clone();
        self.book(&id).versions.insert((id.timeline, id.version), version);
    }

    /// Keeps the number of a version that is no more.
    fn close(&mut self, version: &VersionId, shared: &Shared) {
        let checkpoint = Checkpoint::decided(empty_record(version, shared), Decision::Abort);
        self.put(VersionBook::new(checkpoint, BTreeMap::new()));
    }

    /// Returns the versions of which the tree lacks a name that the job did not remove.
    fn not_shown(&self, adopter: &Adopter<'_>, wishes: &Wishes<'_>) -> BTreeSet<(CheckpointId, Number)> {
        let mut unshown = BTreeSet::new();
        for book in self.books.values() {
            let Some((number, version)) = wishes.shown(book) else { continue };
            let missing = version.contents.iter().find(|(path, (file, seal))| {
                !wishes.removed.has_file(path, (*file, *seal)) && !adopter.shows(path, *file)
            });
            if let Some((path, _)) = missing {
                let version = book.version_id(*number);
                tracing::error!(%version, %path, "a checkpoint of Tier-3 is not whole in the tree");
                unshown.insert((book.id.clone(), *number));
            }
        }
        unshown
    }

    /// Whether the tree shows the version that a metric is about.
    fn shows(&self, metric: &VersionMetric, wishes: &Wishes<'_>) -> bool {
        let VersionId { run, directory, timeline, version } = metric.version.clone();
        let book = self.books.get(&CheckpointId { run, directory });
        let shown = book.and_then(|book| wishes.shown(book));
        shown.is_some_and(|(number, _)| *number == (timeline, version))
    }

    /// Returns the versions whose pin stands.
    fn pinned(&self, pinned: &BTreeSet<Series>) -> BTreeSet<(CheckpointId, Number)> {
        let versions = self.books.values().flat_map(|book| {
            book.versions.keys().map(|number| (book.id.clone(), *number, book.version_id(*number)))
        });
        let pinned = versions.filter(|(.., version)| pinned.contains(&Series::pins_of(version)));
        pinned.map(|(id, number, _)| (id, number)).collect()
    }

    fn previous(&self, run: &RunPath) -> Option<VersionRef> {
        let books = self.books.values().filter(|book| book.id.run == *run);
        watermark(books.flat_map(Book::checkpoints)).map(reference)
    }

    /// Does what the rules say about an attempt without a marker.
    async fn undecided(
        &mut self,
        shared: &Arc<Shared>,
        attempt: UndecidedAttempt,
    ) -> Result<(), RecoverError> {
        let whole = locate::is_prepared(&attempt);
        let UndecidedAttempt { record, prepared } = attempt;
        let version = record.version.clone();
        let previous = self.previous(&version.run);
        let (mut checkpoint, found) = Checkpoint::found(record.clone(), whole);
        let mut book = match found {
            Found::Abort => {
                tracing::warn!(%version, "an attempt was never prepared and its memory is gone: decided against");
                return match commit::abort(&shared.drain, &record).await {
                    Ok(()) => {
                        self.dead(&version, shared);
                        Ok(())
                    }
                    Err(CommitError::Lost { .. }) => self.decided_by_another(shared, &version).await,
                    Err(error) => Err(error.into()),
                };
            }
            Found::Commit => {
                tracing::info!(%version, "an attempt was found prepared: committed now");
                match commit::decide(&shared.drain, &record, &prepared, previous.clone()).await {
                    Ok(manifest) => {
                        let told = checkpoint.step(CheckpointEvent::Committed, &mut Vec::new());
                        debug_assert_eq!(told, Ok(()));
                        let mut book = VersionBook::new(checkpoint, contents_of(&manifest.files, &manifest));
                        book.committed = Some((Arc::new(manifest), shared.drain.epoch()));
                        book
                    }
                    Err(CommitError::Lost { .. }) => {
                        return self.decided_by_another(shared, &version).await;
                    }
                    Err(error) => return Err(error.into()),
                }
            }
            Found::Keep => {
                let Ok(manifest) = Manifest::join(&record, &prepared) else { return Ok(()) };
                let mut book = VersionBook::new(checkpoint, contents_of(&manifest.files, &manifest));
                let Some(prepared) = one_marker(prepared, manifest) else { return Ok(()) };
                book.attempt = Some(Box::new(Attempt::found(record, prepared, previous.clone())));
                book
            }
        };
        book.previous = previous;
        self.put(book);
        Ok(())
    }

    /// Recovers the versions whose marker or manifest is damaged. If the run has nothing else to load, their names come into the
    /// tree and cannot be opened: a job must not take the run for one that never saved. Returns the versions that the tree does not
    /// show.
    ///
    /// Skips versions that the job removed, and those whose bytes outlived the daemon in memory: the next version saves those bytes
    /// again.
    fn take_up_unreadable(
        &mut self,
        adopter: &mut Adopter<'_>,
        names: Names,
        wishes: &Wishes<'_>,
    ) -> Vec<(CheckpointId, Number)> {
        let shared = adopter.shared;
        let loadable: BTreeSet<RunPath> = self
            .books
            .values()
            .filter(|book| wishes.shown(book).is_some_and(|(_, version)| version.checkpoint.is_proven()))
            .map(|book| book.id.run.clone())
            .collect();
        let mut unshown = Vec::new();
        for UnreadableVersion { version, record, why } in std::mem::take(&mut self.unreadable) {
            let number = (version.timeline, version.version);
            let id = CheckpointId { run: version.run.clone(), directory: version.directory.clone() };
            if wishes.removed.version(&id) >= Some(number) {
                continue;
            }
            let record = record.unwrap_or_else(|| stand_in(&version, shared));
            let files: Vec<_> = placeholders(&record).collect();
            let is_placeholder = |entry: &AdoptEntry| match &entry.kind {
                AdoptKind::File { file, .. } => {
                    shared.namespace.hosts().cold_file(*file).is_some_and(|cold| cold.object.is_none())
                }
                _ => false,
            };
            let shows = match names {
                Names::Empty => !loadable.contains(&id.run),
                Names::Kept if files.iter().any(is_placeholder) => true,
                Names::Kept => continue,
            };
            let contents =
                record.files.iter().map(|entry| (entry.path.clone(), (entry.file, entry.seal))).collect();
            if shows {
                record
                    .files
                    .iter()
                    .for_each(|entry| shared.restorer.losses.refuse(entry.file, entry.seal, why.clone()));
            } else {
                unshown.push((id, number));
            }
            if shows && names == Names::Empty {
                for entry in files {
                    adopter.adopt(entry);
                }
            }
            self.put(VersionBook::new(Checkpoint::unreadable(record, why), contents));
        }
        unshown
    }

    /// Brings the name of a loose file into the tree whose last content is unknown. An open fails, since older bytes would be taken
    /// for the newest. False: the bytes outlived the daemon in memory, and go to Tier-3 once more.
    fn take_up_unreadable_loose(
        &mut self,
        adopter: &mut Adopter<'_>,
        names: Names,
        file: &UnreadableLoose,
    ) -> bool {
        let shared = adopter.shared;
        let UnreadableLoose { path, generation, why, older } = file;
        let of = (stand_in_file(&format!("{path} {generation}")), SealNumber(1));
        let attributes = older.as_ref().map_or_else(
            || Attributes { mode: 0o644, ..Attributes::default() },
            |older| older.file.attributes.clone(),
        );
        let stands = || shared.namespace.hosts().cold_file(of.0).is_some_and(|cold| cold.object.is_none());
        if names == Names::Kept && !stands() {
            return false;
        }
        shared.restorer.losses.refuse(of.0, of.1, why.clone());
        let unshown = names == Names::Empty && !adopter.adopt(placeholder(path, of, &attributes));
        let used = self.loose_numbers.get(path).copied().unwrap_or(*generation).max(*generation);
        let book = LooseBook {
            stage: LooseStage::Uploaded { of },
            generation: Some(used),
            of: Some(of),
            attributes,
            unshown,
            ..LooseBook::default()
        };
        self.loose.insert(path.clone(), book);
        true
    }

    fn adopt(&mut self, shared: &Shared, names: Names, tree: Option<&TreeDocument>, loose: LooseFiles) {
        let LooseFiles { believed: mut sidecars, unreadable: unreadable_loose, numbers } = loose;
        self.loose_numbers = numbers;
        let wishes = Wishes::of(tree);
        let mut adopter = Adopter::new(shared);
        let unshown = self.take_up_unreadable(&mut adopter, names, &wishes);
        let mut directories = Vec::new();
        for book in self.books.values() {
            let Some((number, version)) = wishes.shown(book) else { continue };
            if let Some((newer, _)) = above(book, Some(*number)).last() {
                let (newer, shown) = (book.version_id(**newer), book.version_id(*number));
                tracing::warn!(%newer, %shown, "the newer version was never committed: the tree shows the committed one");
            }
            let Some(manifest) = manifest_of(version) else { continue };
            if names == Names::Kept {
                manifest.files.iter().for_each(|file| note(shared, file));
                continue;
            }
            let above = adopt_files(&mut adopter, &manifest, &wishes);
            // A directory whose files are all gone is gone too, unless the tree names it.
            directories.extend(manifest.directories.iter().filter(|dir| above.contains(&dir.path)).cloned());
        }
        // Their objects may be gone, and the removal would be taken for one of a new file of that name.
        for (path, generation) in &wishes.removed.loose {
            let used = self.loose_numbers.entry(path.clone()).or_insert(*generation);
            *used = (*used).max(*generation);
        }
        for file in unreadable_loose {
            let was_removed = wishes.removed.has_loose(&file.path, file.generation);
            if was_removed || !self.take_up_unreadable_loose(&mut adopter, names, &file) {
                sidecars.extend(file.older);
            }
        }
        for sidecar in sidecars {
            let path = sidecar.file.path.clone();
            let of = (sidecar.file.file, sidecar.file.seal);
            let used = self.loose_numbers.get(&path).copied().unwrap_or(sidecar.generation);
            let generation = Some(used.max(sidecar.generation));
            let attributes = sidecar.file.attributes.clone();
            let was_removed = wishes.removed.has_loose(&path, sidecar.generation);
            let mut unshown = false;
            match names {
                // Whether it was removed since, the tree says.
                Names::Kept => note(shared, &sidecar.file),
                Names::Empty if was_removed => {}
                Names::Empty => unshown = !adopter.adopt(wishes.entry(&sidecar.file)),
            }
            shared.namespace.hosts().set_reclaim(of.0, tidemark_namespace::ReclaimClass::Loose);
            let book = LooseBook {
                stage: LooseStage::Uploaded { of },
                described: Some(sidecar.generation),
                generation,
                of: Some(of),
                closed: sidecar.left.is_closed().then_some(sidecar.generation),
                stored: LooseStored::of(&sidecar).compared(),
                attributes,
                unshown,
                ..LooseBook::default()
            };
            self.loose.insert(path, book);
        }
        if let (Some(tree), Names::Empty) = (tree, names) {
            for link in &tree.symlinks {
                let (uid, gid, mtime_ns) = (link.uid, link.gid, link.mtime_ns);
                let attributes =
                    Attributes { mode: SYMLINK_MODE, uid, gid, mtime_ns, ..Attributes::default() };
                let kind = AdoptKind::Symlink { target: link.target.0.clone() };
                adopter.adopt(entry(&link.path, kind, &attributes));
            }
            for file in &tree.specials {
                let special = match file.kind {
                    SpecialKind::Pipe => Special::Pipe,
                    SpecialKind::Socket => Special::Socket,
                    SpecialKind::CharacterDevice => Special::CharacterDevice(file.device),
                    SpecialKind::BlockDevice => Special::BlockDevice(file.device),
                };
                adopter.adopt(entry(&file.path, AdoptKind::Special(special), &file.attributes));
            }
            // After what they are further names of.
            for link in &tree.hard_links {
                adopter.adopt(link_entry(&link.path, &link.to));
            }
            directories.extend(tree.directories.iter().cloned());
        }
        if names == Names::Empty {
            self.unshown = self.not_shown(&adopter, &wishes);
        }
        self.unshown.extend(unshown);
        // Last, so that what was made inside them has not moved their times.
        for directory in directories {
            adopter.adopt_directory(&directory);
        }
        if let (Some(root), Names::Empty) = (tree.and_then(|tree| tree.root.as_ref()), names) {
            adopter.adopt(entry_at(Vec::new(), AdoptKind::Directory, root));
        }
        adopter.end();
        self.metrics = tree.map_or_else(Vec::new, |tree| tree.metrics.clone());
        if names == Names::Empty {
            self.metrics.iter().filter(|metric| self.shows(metric, &wishes)).for_each(|metric| {
                metric::show(shared, &metric.path, &metric.value.0);
            });
        }
        self.removals = wishes.removed;
    }
}

/// Returns the manifest of a version in Tier-3. `None`: a job has it now.
pub(crate) fn manifest_of(version: &VersionBook) -> Option<Cow<'_, Manifest>> {
    match (version.manifest(), &version.attempt) {
        (Some(manifest), _) => Some(Cow::Borrowed(manifest.as_ref())),
        (None, Some(attempt)) => attempt.manifest().ok().map(Cow::Owned),
        (None, None) => None,
    }
}

/// Returns the version of a checkpoint that the tree shows after a restart with empty memory, unless a tree document says
/// otherwise. `removed`: the job removed all versions up to and including that one.
///
/// Prefers the newest committed version. A newer one that only settled may not be whole, and in a tree it could mix the files of
/// two saves (P1, P5). Such a version stays listed, and its bytes stay.
pub(crate) fn shown(book: &Book, removed: Option<Number>) -> Option<(&Number, &VersionBook)> {
    let newer = above(book, removed);
    let committed = newer.iter().rfind(|(_, version)| version.checkpoint.is_committed());
    committed.or_else(|| newer.last()).copied()
}

/// Returns the versions with higher numbers that stand or may come to stand, in order.
pub(crate) fn above(book: &Book, number: Option<Number>) -> Vec<(&Number, &VersionBook)> {
    let stands = |version: &VersionBook| version.checkpoint.is_alive() || version.checkpoint.is_committed();
    let newer =
        book.versions.iter().filter(|(of, version)| number.is_none_or(|n| **of > n) && stands(version));
    newer.collect()
}

/// Contents of the tree document: what the job removed from the tree, and what the tree showed otherwise than manifests and
/// sidecars say.
#[derive(Debug, Default)]
pub(crate) struct Wishes<'a> {
    removed: Told,
    /// Versions that the tree showed although they are not the newest committed ones.
    shown: BTreeMap<(&'a RunPath, &'a CheckpointName), Number>,
    attributes: BTreeMap<(FileId, SealNumber), &'a Attributes>,
}

impl<'a> Wishes<'a> {
    fn of(tree: Option<&'a TreeDocument>) -> Self {
        let Some(tree) = tree else { return Self::default() };
        let number = |of: &'a VersionId| ((&of.run, &of.directory), (of.timeline, of.version));
        let attributes = tree.attributes.iter().map(|of| ((of.file, of.seal), &of.attributes));
        Self {
            removed: Told::of(tree),
            shown: tree.shown_versions.iter().map(number).collect(),
            attributes: attributes.collect(),
        }
    }

    /// Returns the version that the tree shows, of those that the job did not remove: the one that it showed before, unless a newer
    /// one is committed, or that one is not in Tier-3.
    fn shown<'b>(&self, book: &'b Book) -> Option<(&'b Number, &'b VersionBook)> {
        let of = (&book.id.run, &book.id.directory);
        let default = shown(book, self.removed.version(&book.id))?;
        let newer = above(book, Some(*default.0));
        let showed = self.shown.get(&of);
        newer.into_iter().find(|(number, _)| Some(*number) == showed).or(Some(default))
    }

    /// Returns the entry of a file with the attributes that the tree showed last.
    fn entry(&self, file: &ManifestFile) -> AdoptEntry {
        let attributes = self.attributes.get(&(file.file, file.seal)).copied();
        entry(&file.path, file_kind(file), attributes.unwrap_or(&file.attributes))
    }

    fn keeps(&self, path: &RelPath, file: &ManifestFile) -> bool {
        !self.removed.has_file(path, (file.file, file.seal))
    }
}

/// Adopts the files of a version under the names that the job left; gives the directories above them.
pub(crate) fn adopt_files(
    adopter: &mut Adopter<'_>,
    manifest: &Manifest,
    wishes: &Wishes<'_>,
) -> BTreeSet<RelPath> {
    let mut above = BTreeSet::new();
    for file in &manifest.files {
        let links = manifest.hard_links.iter().filter(|link| link.to == file.path).map(|link| &link.path);
        let mut names = std::iter::once(&file.path).chain(links).filter(|path| wishes.keeps(path, file));
        let Some(first) = names.next() else { continue };
        adopter.adopt(AdoptEntry { path: first.as_bytes().to_vec(), ..wishes.entry(file) });
        above.extend(std::iter::successors(first.parent(), RelPath::parent));
        for link in names {
            adopter.adopt(link_entry(link, first));
            above.extend(std::iter::successors(link.parent(), RelPath::parent));
        }
    }
    above
}

/// Returns the prepared marker of a joined attempt: its own if there is one, else an equivalent one.
fn one_marker(prepared: Vec<Prepared>, manifest: Manifest) -> Option<Prepared> {
    let mut first = prepared.into_iter().next()?;
    first.files = manifest.files;
    first.directories = manifest.directories;
    first.symlinks = manifest.symlinks;
    first.hard_links = manifest.hard_links;
    Some(first)
}

pub(crate) fn contents_of(files: &[ManifestFile], manifest: &Manifest) -> crate::node::ledger::Contents {
    let mut contents: crate::node::ledger::Contents =
        files.iter().map(|file| (file.path.clone(), (file.file, file.seal))).collect();
    for link in &manifest.hard_links {
        if let Some(seal) = contents.get(&link.to).copied() {
            contents.insert(link.path.clone(), seal);
        }
    }
    contents
}

pub(crate) fn record_of(manifest: &Manifest) -> Record {
    Record {
        format: manifest.format,
        version: manifest.version.clone(),
        attempt: manifest.attempt,
        step: manifest.step,
        framework: manifest.framework.clone(),
        evidence: manifest.evidence,
        evidence_detail: manifest.evidence_detail.clone(),
        epoch: manifest.epoch,
        completed_at_ns: manifest.completed_at_ns,
        participants: manifest.participants.clone(),
        files: manifest.files.iter().map(ManifestFile::entry).collect(),
        partial: false,
        doubted: false,
    }
}
