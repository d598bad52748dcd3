//! The promises, and the true state to compare with.
//!
//! Owns: the truth about names, saves, copies and Tier-3, as known to an observer of all machines. Owns also the promises:
//! each is checked when an event could break it. Does not own: the events.
//!
//! A promise does not cover a name that no living node could know, because every witness is lost or was declared gone.

use super::memory::Memory;
use super::store::Object;
use super::tree::{Entry, sum};
use super::world::{World, show};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tidemark_protocol::format::Document;
use tidemark_protocol::id::{Epoch, FileId, Incarnation, NodeName, SealNumber, Step, Timeline};
use tidemark_protocol::key::{Key, Series, VersionId};
use tidemark_protocol::manifest::{Manifest, ValidatedManifest};
use tidemark_protocol::marker::{Decision, Marker};
use tidemark_protocol::record::Record;

/// Longest time that a dead node counts as living, until it is declared gone, also if it is cut off.
const BELIEVED: Duration = Duration::from_secs(45);

/// The file that is known to have a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stands {
    pub(crate) file: FileId,
    /// Lives that know of the file.
    witnesses: BTreeSet<Incarnation>,
    epoch: Option<Epoch>,
    /// Whether the file was made without a coordinator, and is published later.
    in_outage: bool,
}

/// A name.
#[derive(Debug, Default, Clone)]
pub(crate) struct Name {
    pub(crate) stands: Option<Stands>,
    /// Number of changes under way now.
    busy: u32,
    /// Whether a change failed that may have taken effect.
    doubtful: bool,
    changes: u64,
    removed_in: Option<Epoch>,
    removed_by: Option<Incarnation>,
}

/// A job's save into one directory.
#[derive(Debug, Default, Clone)]
pub(crate) struct Saved {
    pub(crate) files: BTreeMap<Vec<u8>, (FileId, Vec<u64>)>,
    /// Whether the close of every rank's file, and of the marker, was called.
    pub(crate) is_whole: bool,
    /// Whether the close of the marker returned.
    pub(crate) is_done: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Truth {
    pub(crate) names: BTreeMap<Vec<u8>, Name>,
    pub(crate) saved: BTreeMap<Vec<u8>, Saved>,
    lives: BTreeMap<Incarnation, NodeName>,
    lost: BTreeMap<Incarnation, Duration>,
    /// Lives declared gone and not yet back. Such a node goes on by itself in directories that it had alone, although other
    /// nodes may have them now.
    given_up: BTreeSet<Incarnation>,
    /// For each life that is back, the end of the time for which it was declared gone.
    given_up_until: BTreeMap<Incarnation, Duration>,
    /// The newest epoch in Tier-3.
    fence: Epoch,
    deciders: BTreeMap<Epoch, Incarnation>,
    decided: BTreeMap<VersionId, Decision>,
    watermark: Option<(Timeline, i64, Option<Step>)>,
    pub(crate) checked: u64,
}

/// The result that a look-up must have, given the state when it began.
#[derive(Debug, Clone)]
pub(crate) struct Expected {
    changes: u64,
    stands: Option<Stands>,
    removed_in: Option<Epoch>,
    began: Duration,
}

impl Truth {
    pub(crate) fn lives(&mut self, memory: &Memory) {
        self.lives.insert(memory.life.incarnation, memory.life.node.clone());
    }

    pub(crate) fn name_of(&self, life: Incarnation) -> Option<NodeName> {
        self.lives.get(&life).cloned()
    }

    pub(crate) fn lost(&mut self, memory: &Memory, now: Duration) {
        self.lost.insert(memory.life.incarnation, now);
    }

    pub(crate) fn given_up(&mut self, life: Incarnation) {
        self.given_up.insert(life);
        for name in self.names.values_mut() {
            // A file that no other node knows of loses against a file made meanwhile.
            if let Some(stands) = &mut name.stands
                && stands.witnesses.iter().all(|witness| *witness == life)
            {
                stands.epoch = None;
            }
            if name.removed_by == Some(life) {
                name.removed_in = None;
            }
        }
    }

    pub(crate) fn is_back(&mut self, life: Incarnation, now: Duration) {
        if self.given_up.remove(&life) {
            self.given_up_until.insert(life, now);
        }
    }

    /// Whether a life was declared gone at any time since `since`.
    fn was_given_up(&self, life: Incarnation, since: Duration) -> bool {
        self.given_up.contains(&life) || self.given_up_until.get(&life).is_some_and(|until| *until >= since)
    }

    // Names.

    pub(crate) fn changing(&mut self, path: &[u8]) {
        let name = self.names.entry(path.to_vec()).or_default();
        name.busy += 1;
        name.changes += 1;
    }

    pub(crate) fn changed(
        &mut self,
        by: Incarnation,
        path: &[u8],
        now: Option<(FileId, bool)>,
        epoch: Option<Epoch>,
    ) {
        let epoch = epoch.filter(|_| !self.given_up.contains(&by));
        let name = self.names.entry(path.to_vec()).or_default();
        name.busy -= 1;
        name.changes += 1;
        name.removed_in = if now.is_none() { epoch } else { None };
        name.removed_by = Some(by);
        name.stands = now.map(|(file, in_outage)| Stands {
            file,
            witnesses: BTreeSet::from([file.incarnation]),
            epoch,
            in_outage,
        });
    }

    /// Records that a change failed. Unless `is_known`, it may have taken effect.
    pub(crate) fn unchanged(&mut self, path: &[u8], is_known: bool) {
        let name = self.names.entry(path.to_vec()).or_default();
        name.busy -= 1;
        name.changes += 1;
        name.doubtful |= !is_known;
    }

    pub(crate) fn expected(&self, path: &[u8], began: Duration) -> Option<Expected> {
        let name = self.names.get(path).filter(|name| name.busy == 0 && !name.doubtful)?;
        Some(Expected {
            changes: name.changes,
            stands: name.stands.clone(),
            removed_in: name.removed_in,
            began,
        })
    }

    /// Records that the coordinator applied a publication: the coordinator is now a witness of its names.
    pub(crate) fn published(
        &mut self,
        home: Incarnation,
        coordinator: &Memory,
        is_anothers: impl Fn(&[u8]) -> bool,
    ) {
        let tree = coordinator.tree.borrow();
        for (path, name) in &mut self.names {
            if let Some(stands) = &mut name.stands
                && stands.file.incarnation == home
                && tree.names.get(path) == Some(&Entry::File(stands.file))
            {
                stands.witnesses.insert(coordinator.life.incarnation);
                // A node that has the directory alone answers there by its own knowledge, until it has given the directory
                // back.
                stands.in_outage &= is_anothers(path);
            }
        }
    }

    /// Whether a node that can be asked knows of the file.
    fn is_known(&self, world: &World, path: &[u8], stands: &Stands, since: Duration) -> bool {
        let Some(coordinator) = coordinator(world) else { return false };
        let copies = world.machines.iter().filter_map(|machine| {
            let memory = machine.memory.borrow().clone()?;
            let copies = memory.copies.borrow();
            let has =
                copies.values().any(|copy| copy.sealed.file == stands.file && copy.sealed.meta.path == path);
            has.then_some(memory.life.incarnation)
        });
        let mut witnesses = stands.witnesses.iter().copied().chain(copies);
        witnesses.any(|life| {
            world.machine_of(life).is_some() && !coordinator.is_gone(life) && !self.was_given_up(life, since)
        })
    }

    /// Checks the result of a look-up on a node.
    pub(crate) fn looked(
        &mut self,
        world: &World,
        by: Incarnation,
        path: &[u8],
        before: &Expected,
        found: Option<FileId>,
    ) {
        let Some(now) = self.expected(path, before.began).filter(|now| now.changes == before.changes) else {
            return;
        };
        let epoch = coordinator(world).map(|catalog| catalog.epoch);
        let is_others = now.stands.as_ref().is_none_or(|stands| stands.file.incarnation != by);
        if self.was_given_up(by, before.began) && is_others {
            world.count("look-up at a node that was declared gone, which is not judged");
            return;
        }
        self.checked += 1;
        let name = show(path);
        match (&now.stands, found) {
            (Some(stands), None) if !stands.in_outage && self.is_known(world, path, stands, before.began) => {
                world.broken(
                    "a name that the cluster holds is never answered ENOENT (P8)",
                    &format!("{name} is {}, known to {:x?}", stands.file, stands.witnesses),
                )
            }
            (Some(stands), Some(found))
                if found != stands.file
                    && stands.epoch.is_some()
                    && stands.epoch == epoch
                    && !stands.in_outage
                    && self.is_known(world, path, stands, before.began) =>
            {
                world.broken(
                    "who opens after a close sees what was closed",
                    &format!("{name} is {}, and {found} was found", stands.file),
                )
            }
            (None, Some(found))
                if before.removed_in.is_some()
                    && before.removed_in == epoch
                    && world.machine_of(found.incarnation).is_some() =>
            {
                world.broken(
                    "what was removed is not found again",
                    &format!("{name} was removed in epoch {epoch:?}, and {found} was found"),
                );
            }
            _ => {}
        }
    }

    /// Checks an acknowledged exclusive create: no other process may have created the name.
    pub(crate) fn won(&mut self, world: &World, path: &[u8], file: FileId, began: Duration) {
        // A node that was declared gone goes on without asking in a directory that it had alone. Another node may have it now.
        if self.was_given_up(file.incarnation, began) {
            world.count("exclusive create at a node that was declared gone, which is not judged");
            return;
        }
        self.checked += 1;
        let before = self.names.get(path).and_then(|name| name.stands.as_ref());
        if let Some(before) = before
            && !before.in_outage
            && self.is_known(world, path, before, began)
        {
            world.broken(
                "of all that create a name exclusively one is told that it did",
                &format!("{} is {}, and {file} was told too", show(path), before.file),
            );
        }
    }

    // Copies.

    pub(crate) fn acknowledged(&self, world: &World, file: FileId, seal: SealNumber, by: Incarnation) {
        let Some(home) = world.machine_of(file.incarnation) else { return };
        let own = world.machines[home].memory.borrow().clone().and_then(|memory| memory.bytes_of(file, seal));
        let Some(holder) = world.machine_of(by) else { return };
        let copy =
            world.machines[holder].memory.borrow().clone().and_then(|memory| memory.bytes_of(file, seal));
        if let Some((_, own)) = own
            && copy.as_ref().is_none_or(|(_, copy)| *copy != own)
        {
            world.broken(
                "an acknowledged copy has the bytes that were sealed",
                &format!(
                    "{file} seal {seal} at {}: {own:x?} here, {copy:x?} there",
                    world.machines[holder].name
                ),
            );
        }
    }

    /// Checks the coordinator's claim that each of these files is in two places, so that it survives the loss of any one node.
    pub(crate) fn replicated(
        &mut self,
        world: &World,
        files: &[(FileId, SealNumber)],
        believed: impl Fn(FileId, SealNumber) -> Vec<usize>,
    ) {
        self.checked += 1;
        world.count("checkpoint said to be replicated");
        for (file, seal) in files {
            let has = |machine: &usize| {
                let memory = world.machines[*machine].memory.borrow().clone();
                memory.is_some_and(|memory| memory.bytes_of(*file, *seal).is_some())
            };
            let places = (0..world.machines.len()).filter(has).count();
            let recently = |at: &Duration| world.now() - *at < BELIEVED;
            let believed = believed(*file, *seal);
            let died = self.lost.iter().any(|(life, at)| {
                recently(at)
                    && self.lives.get(life).is_some_and(|name| {
                        world.index_of(name).is_some_and(|machine| believed.contains(&machine))
                    })
            });
            if places < 2 && !died {
                world.broken(
                    "what is replicated survives the loss of any one node (P3)",
                    &format!("{file} seal {seal} is in {places} places, believed in {believed:?}"),
                );
            }
        }
    }

    // Tier-3.

    /// Checks an object that was created in Tier-3.
    pub(crate) fn created(&mut self, world: &World, key: &str, epoch: Epoch, by: Incarnation) {
        self.checked += 1;
        match key.parse::<Key>() {
            Ok(Key::Numbered { series: Series::Epoch, number }) => {
                self.fence = self.fence.max(Epoch(number));
                self.decides(world, epoch, by);
            }
            Ok(Key::Committed { version }) => self.marked(world, key, &version, epoch, by),
            Ok(Key::Record { .. }) => {
                self.decides(world, epoch, by);
                if epoch < self.fence {
                    world.count("record of an older epoch after the fence");
                }
            }
            Ok(_) => {}
            Err(_) => world.broken("only our keys are written", key),
        }
    }

    fn decides(&mut self, world: &World, epoch: Epoch, by: Incarnation) {
        let known = *self.deciders.entry(epoch).or_insert(by);
        if known != by {
            world.broken(
                "one epoch has one decider",
                &format!("epoch {epoch} is decided by {:016x} and {:016x}", known.0, by.0),
            );
        }
    }

    fn marked(&mut self, world: &World, key: &str, version: &VersionId, epoch: Epoch, by: Incarnation) {
        self.decides(world, epoch, by);
        let objects = world.store.objects.borrow();
        let Some(Object::Document(bytes)) = objects.get(key) else { unreachable!("it was just written") };
        let marker = Marker::parse(bytes).expect("a marker was written");
        self.decided.insert(version.clone(), marker.decision);
        if epoch < self.fence {
            world.count("decision of an older epoch after the fence");
        }
        if marker.decision == Decision::Abort {
            world.count("version decided against");
            return;
        }
        world.count("version committed");
        let manifest = marker.manifest.as_ref().and_then(|key| objects.get(key));
        let (Some(Object::Document(bytes)), Some(hash)) = (manifest, marker.manifest_hash) else {
            not_whole(world, &format!("{version} has no manifest"))
        };
        let manifest = match ValidatedManifest::parse(bytes, &hash) {
            Ok(manifest) => manifest.into_manifest(),
            Err(error) => not_whole(world, &error.to_string()),
        };
        let record = Key::Record { version: version.clone(), attempt: marker.attempt }.to_string();
        let Some(Object::Document(record)) = objects.get(&record) else {
            not_whole(world, &format!("{record} is missing"))
        };
        let record = Record::parse(record).expect("a record was written");
        if let Err(flaw) = tidemark_protocol::invariants::a_manifest_holds_exactly_the_files_of_its_record(
            &manifest, &record,
        ) {
            not_whole(world, &flaw.to_string());
        }
        self.bytes_are_there(world, &manifest);
        self.is_what_was_saved(world, version, &manifest);
    }

    fn bytes_are_there(&self, world: &World, manifest: &Manifest) {
        let objects = world.store.objects.borrow();
        for file in &manifest.files {
            let whole = match objects.get(&file.key) {
                Some(Object::Data { chunks, size_bytes }) => {
                    let sums = chunks.iter().map(|content| sum(*content));
                    *size_bytes == file.size_bytes && sums.eq(file.chunks.iter().copied())
                }
                _ => false,
            };
            if !whole {
                world.broken(
                    "every byte of what is committed is in Tier-3 (P4)",
                    &format!("{} is not as it was sealed", file.key),
                );
            }
        }
    }

    fn is_what_was_saved(&self, world: &World, version: &VersionId, manifest: &Manifest) {
        let directory = tidemark_protocol::key::checkpoint_path(&version.run, &version.directory);
        let Some(saved) = self.saved.get(&directory) else {
            world.broken("only what a job saved is committed", &show(&directory));
        };
        let torn = |what: String| world.broken("nothing torn is committed (P1)", &what);
        if !saved.is_whole {
            torn(format!("{version} is committed, and not every rank had closed"));
        }
        let names: BTreeSet<_> = manifest.files.iter().map(|file| file.path.as_bytes().to_vec()).collect();
        if names != saved.files.keys().cloned().collect() {
            torn(format!("{version} has other files than were saved"));
        }
        for file in &manifest.files {
            let (_, content) = &saved.files[file.path.as_bytes()];
            if !content.iter().map(|content| sum(*content)).eq(file.chunks.iter().copied()) {
                torn(format!("{} has other bytes than were saved", file.path));
            }
        }
    }

    /// Checks the newest committed version that a coordinator knows, which must never move back.
    pub(crate) fn watermark(&mut self, world: &World, newest: &Record) {
        self.checked += 1;
        let now = (newest.version.timeline, newest.completed_at_ns, newest.step);
        if epoch_of(world) == Some(newest.epoch) || self.watermark.is_none_or(|before| before <= now) {
            if self.watermark.is_some_and(|before| before > now) {
                world
                    .broken("the watermark never moves back", &format!("{:?}, then {now:?}", self.watermark));
            }
            self.watermark = Some(now);
        }
    }

    pub(crate) fn committed(&self) -> usize {
        self.decided.values().filter(|decision| **decision == Decision::Commit).count()
    }
}

fn epoch_of(world: &World) -> Option<Epoch> {
    coordinator(world).map(|catalog| catalog.epoch)
}

/// Returns the coordinator that has the lease now.
pub(crate) fn coordinator(world: &World) -> Option<std::rc::Rc<super::coordinator::Catalog>> {
    let holder = world.lease.holder(world.now())?;
    match world.daemon(holder.machine)?.seat.borrow().clone() {
        super::node::Seat::Here(catalog) if catalog.epoch == holder.epoch && !catalog.is_closed() => {
            Some(catalog)
        }
        _ => None,
    }
}

fn not_whole(world: &World, what: &str) -> ! {
    world.broken("what is committed is whole, and all of it is in Tier-3 (P1, P4)", what)
}

/// Checks that every save that is not lost is committed, and that every sealed file has its copy at the partner.
///
/// # Errors
/// Describes the first thing that is not yet so.
pub(crate) fn is_together(world: &World) -> Result<(), String> {
    let catalog = coordinator(world).ok_or("nobody coordinates")?;
    if !catalog.knows_all() {
        return Err(format!("not every node has told what it has: {}", catalog.silent()));
    }
    let committed = catalog.committed();
    let truth = world.truth.borrow();
    for (directory, saved) in truth.saved.iter().filter(|(_, saved)| saved.is_done) {
        let is_there = |(path, (file, content)): (&Vec<u8>, &(FileId, Vec<u64>))| {
            let stands = truth.names.get(path).and_then(|name| name.stands.as_ref());
            let known = stands.is_some_and(|stands| {
                stands.file == *file && truth.is_known(world, path, stands, world.now())
            });
            let somewhere = world.machines.iter().any(|machine| {
                let memory = machine.memory.borrow();
                memory.as_ref().is_some_and(|memory| has(memory, *file, content))
            });
            // Copies alone do not show when the file was written, because the clock of their times is gone.
            let home = world.machine_of(file.incarnation).is_some();
            known && somewhere && home
        };
        if !committed.contains(directory) && saved.files.iter().all(is_there) {
            return Err(format!("{} is complete and not committed", show(directory)));
        }
    }
    for node in world.daemons() {
        if let Some(why) = node.lacks_copies() {
            return Err(why);
        }
    }
    Ok(())
}

fn has(memory: &Memory, file: FileId, content: &[u64]) -> bool {
    let own = memory.tree.borrow().own(file).is_some_and(|own| own.chunks == content);
    own || memory.copies.borrow().iter().any(|((other, _), copy)| *other == file && copy.chunks == content)
}
