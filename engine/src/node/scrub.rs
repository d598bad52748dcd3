//! Looking at sealed host pages at rest, and healing them from another copy.
//!
//! Owns: which file is next, the pace, checking one file, replacing a bad host copy. Does not own: copies in Tier-3
//! (`verify` reads those).

use crate::namespace::{FileState, FsError, Namespace, NodeId, ObjectCopy, SealPin};
use crate::node::Shared;
use crate::node::answer::text;
use crate::node::book::Book;
use crate::node::flush::covers;
use crate::node::jobs::{Done, RestoreError, fetched};
use crate::node::run::{Engine, error_text};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::report::{BrokenInvariant, EventLevel};

/// After a pass over everything the scrub rests at least this long, so that a nearly empty Tier-1 costs nothing.
const REST: Duration = Duration::from_secs(30);

/// Bad objects remembered. The next `verify` finds the rest again.
const BAD_OBJECTS_MAX: usize = 10_000;

/// Where the scrub is.
#[derive(Debug)]
pub(crate) struct Scrub {
    /// What this pass has yet to look at. By node and not by path: a rename must not make it miss one.
    left: VecDeque<NodeId>,
    running: bool,
    not_before: Instant,
    /// Files whose bad copy could not be replaced while they were open: looked at again once they are closed.
    again: BTreeSet<FileId>,
    /// Files whose host copy is bad and has no other: named in the problems.
    pub(crate) bad: BTreeMap<(FileId, SealNumber), String>,
    /// Objects that the last `verify` found bad and could not write again, by file and key.
    pub(crate) bad_objects: BTreeMap<(FileId, SealNumber, String), BadObject>,
    /// Documents that the last `verify` of their place found bad and could not write again: path and what is wrong.
    pub(crate) unmended: Vec<(String, String)>,
}

/// A sealed file to look at.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) node: NodeId,
    pub(crate) file: FileId,
    pub(crate) seal: SealNumber,
    pub(crate) path: String,
    pub(crate) size_bytes: u64,
    pub(crate) crc: Crc64,
    pub(crate) chunks: Arc<[Crc64]>,
    pub(crate) host: bool,
    pub(crate) object: Option<ObjectCopy>,
    /// Further objects that should hold the same bytes: each version has its own, and one that was found bad is not `object` any more.
    pub(crate) more: Vec<ObjectCopy>,
}

impl Target {
    /// All objects that should hold the bytes.
    pub(crate) fn objects(&self) -> impl Iterator<Item = &ObjectCopy> {
        self.object.iter().chain(&self.more)
    }

    /// Adds an object, unless it is known.
    pub(crate) fn add_object(&mut self, object: ObjectCopy) {
        match &self.object {
            None => self.object = Some(object),
            Some(known) if known.key == object.key => {}
            Some(_) if self.more.iter().any(|known| known.key == object.key) => {}
            Some(_) => self.more.push(object),
        }
    }
}

/// An object of Tier-3 that is bad or missing.
#[derive(Debug)]
pub(crate) struct BadObject {
    pub(crate) path: String,
    pub(crate) object: ObjectCopy,
    pub(crate) what: String,
}

/// A chunk that is not what was sealed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("chunk {chunk} of {path} has checksum {found}, expected {expected}")]
pub(crate) struct BadChunk {
    pub(crate) path: String,
    pub(crate) chunk: u64,
    pub(crate) expected: Crc64,
    pub(crate) found: Crc64,
}

/// What a look at one host copy found.
#[derive(Debug)]
pub(crate) struct Scrubbed {
    pub(crate) file: FileId,
    pub(crate) seal: SealNumber,
    pub(crate) path: String,
    pub(crate) bad: Option<BadChunk>,
    /// What healing it came to; `None` when nothing was bad.
    pub(crate) healed: Option<Result<(), HealError>>,
}

/// Why a bad host copy stays.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HealError {
    #[error("no other copy is good")]
    Restore(#[from] RestoreError),
    #[error("it is open; it is replaced when it is closed")]
    InUse,
    #[error("it changed meanwhile")]
    Changed(#[source] FsError),
}

impl Scrub {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            left: VecDeque::new(),
            running: false,
            not_before: now + REST,
            again: BTreeSet::new(),
            bad: BTreeMap::new(),
            bad_objects: BTreeMap::new(),
            unmended: Vec::new(),
        }
    }

    /// Remembers what a `verify` left as it is. `looked_at`: whether it looked at what has this path.
    fn note_unmended(&mut self, looked_at: impl Fn(&str) -> bool, found: Vec<BrokenInvariant>) {
        self.unmended.retain(|(path, _)| !looked_at(path));
        let room = BAD_OBJECTS_MAX.saturating_sub(self.unmended.len());
        self.unmended.extend(found.into_iter().map(|broken| (broken.path, broken.what)).take(room));
    }

    /// The objects of one file's bytes that were found bad, by key.
    pub(crate) fn bad_objects_of(
        &self,
        file: FileId,
        seal: SealNumber,
    ) -> impl Iterator<Item = (&String, &BadObject)> {
        let all = self.bad_objects.range((file, seal, String::new())..);
        let of = all.take_while(move |((other, at, _), _)| (*other, *at) == (file, seal));
        of.map(|((_, _, key), bad)| (key, bad))
    }
}

impl Engine {
    /// Remembers what a `verify` of `place` left as it is.
    pub(crate) fn note_unmended(&mut self, place: &[u8], found: Vec<BrokenInvariant>) {
        let around = self.books_about(place).map(Book::path).filter(|path| !covers(place, path));
        let around: BTreeSet<String> = around.map(|path| text(&path)).collect();
        let looked_at = |path: &str| covers(place, path.as_bytes()) || around.contains(path);
        self.scrub.note_unmended(looked_at, found);
    }

    pub(crate) fn start_scrub(&mut self, now: Instant) {
        let rate = self.shared.settings.verify.scrub_bytes_per_s;
        if self.scrub.running || self.draining {
            return;
        }
        if let Some(target) = self.closed_again() {
            self.scrub.running = true;
            let shared = Arc::clone(&self.shared);
            self.jobs.spawn(async move { Done::Scrubbed(scrub(&shared, target).await) });
            return;
        }
        if rate == 0 || self.scrub.not_before > now {
            return;
        }
        if self.scrub.left.is_empty() {
            let nodes: BTreeSet<_> = self.ledger.files().map(|(_, view)| view.node).collect();
            self.scrub.left.extend(nodes);
            self.scrub.left.extend(self.shared.namespace.copies().iter().map(|copy| copy.node));
        }
        let mut next = None;
        while next.is_none()
            && let Some(node) = self.scrub.left.pop_front()
        {
            let found = self.ledger.node(node).filter(|(_, view)| view.host && view.opens == 0);
            next = found.and_then(|(path, view)| target(path.to_string(), view));
            next = next.or_else(|| self.shared.namespace.copy_at(node).map(copy_target));
        }
        let Some(next) = next else {
            self.scrub.not_before = now + REST;
            return;
        };
        self.scrub.running = true;
        // The time this file may take at the pace; the next one waits for it.
        let pace = Duration::from_millis(next.size_bytes.saturating_mul(1000) / rate);
        self.scrub.not_before = now + if self.scrub.left.is_empty() { pace.max(REST) } else { pace };
        let shared = Arc::clone(&self.shared);
        self.jobs.spawn(async move { Done::Scrubbed(scrub(&shared, next).await) });
    }

    /// A file with a bad copy that was open when it was found, and is not any more.
    fn closed_again(&mut self) -> Option<Target> {
        if self.scrub.again.is_empty() {
            return None;
        }
        let again = &self.scrub.again;
        let mut closed = self.ledger.files().filter(|(_, view)| again.contains(&view.file));
        let (path, view) = closed.find(|(_, view)| {
            // The view tells of closes by writers only; readers are asked for.
            self.shared.namespace.view(view.node).is_none_or(|now| now.opens == 0)
        })?;
        let found = target(path.to_string(), view);
        let file = view.file;
        self.scrub.again.remove(&file);
        found
    }

    pub(crate) fn scrubbed(&mut self, scrubbed: Scrubbed) {
        self.scrub.running = false;
        self.note_scrubbed(&scrubbed);
    }

    /// Says and remembers what a look at a host copy found.
    pub(crate) fn note_scrubbed(&mut self, scrubbed: &Scrubbed) {
        let Some(bad) = &scrubbed.bad else {
            self.scrub.bad.remove(&(scrubbed.file, scrubbed.seal));
            return;
        };
        let path = Some(scrubbed.path.clone());
        match &scrubbed.healed {
            Some(Ok(())) | None => {
                self.scrub.bad.remove(&(scrubbed.file, scrubbed.seal));
                let what = format!("{bad}; the host copy was replaced from Tier-3");
                tracing::warn!(path = %scrubbed.path, %bad, "a host copy was bad and has been replaced");
                self.shared.events.add(self.shared.now_ns(), EventLevel::Warn, "repaired", path, what);
            }
            Some(Err(error)) => {
                if matches!(error, HealError::InUse) {
                    self.scrub.again.insert(scrubbed.file);
                }
                let what = format!("{bad}; {}", error_text(error));
                tracing::error!(path = %scrubbed.path, %bad, why = %error_text(error), "a host copy is bad");
                self.shared.events.add(
                    self.shared.now_ns(),
                    EventLevel::Error,
                    "corrupt",
                    path,
                    what.clone(),
                );
                self.scrub.bad.insert((scrubbed.file, scrubbed.seal), what);
            }
        }
    }
}

impl Engine {
    /// Remembers what a look at an object came to. `bad`: what is wrong with it.
    pub(crate) fn note_object_checked(&mut self, target: &Target, object: &ObjectCopy, bad: Option<&str>) {
        let of = (target.file, target.seal, object.key.clone());
        let Some(what) = bad else {
            self.scrub.bad_objects.remove(&of);
            return;
        };
        let path = target.path.clone();
        let known = self.scrub.bad_objects.contains_key(&of);
        if known || self.scrub.bad_objects.len() < BAD_OBJECTS_MAX {
            let found = BadObject { path: path.clone(), object: object.clone(), what: what.to_owned() };
            self.scrub.bad_objects.insert(of, found);
        }
        if !known {
            tracing::error!(%path, what, "an object of Tier-3 is bad, and was not written again");
            let what = what.to_owned();
            self.shared.events.add(self.shared.now_ns(), EventLevel::Error, "corrupt", Some(path), what);
        }
    }
}

/// What there is to check of a file; `None` when it is not sealed.
pub(crate) fn target(path: String, view: &crate::namespace::FileView) -> Option<Target> {
    let FileState::Sealed { seal, size_bytes, crc, chunks } = &view.state else { return None };
    Some(Target {
        node: view.node,
        file: view.file,
        seal: *seal,
        path,
        size_bytes: *size_bytes,
        crc: *crc,
        chunks: Arc::clone(chunks),
        host: view.host,
        object: view.object.clone(),
        more: Vec::new(),
    })
}

/// What there is to check of another node's file that is kept here.
fn copy_target(copy: crate::namespace::CopyView) -> Target {
    Target {
        node: copy.node,
        file: copy.own,
        seal: copy.sealed.number,
        path: format!("{} (a copy for {})", String::from_utf8_lossy(&copy.meta.path), copy.meta.home),
        size_bytes: copy.sealed.size_bytes,
        crc: copy.sealed.crc,
        chunks: copy.sealed.chunks,
        host: true,
        object: copy.object,
        more: Vec::new(),
    }
}

/// Checks one host copy and heals it. A file that changed meanwhile was not bad.
pub(crate) async fn scrub(shared: &Arc<Shared>, target: Target) -> Scrubbed {
    let (file, seal, path) = (target.file, target.seal, target.path.clone());
    let good = Scrubbed { file, seal, path: path.clone(), bad: None, healed: None };
    let Some(pin) = shared.namespace.pin_seal(target.file, target.seal) else { return good };
    // One thread: the pace, and not this look, decides how soon all is looked at.
    let checked = check(shared, &target, pin, 1).await;
    let bad = match checked {
        Ok(()) => {
            shared.namespace.verified(target.file, target.seal);
            return good;
        }
        Err(error @ Mismatch::Unreadable { .. }) => {
            tracing::error!(why = %error_text(&error), "a host copy was not looked at");
            return good;
        }
        Err(Mismatch::Bad(bad)) => bad,
    };
    shared.metrics.verify_mismatches.get_or_create(&[("copy", "host")]).inc();
    let healed = heal(shared, &target).await;
    if healed.is_ok() {
        shared.metrics.scrub_repaired_files.inc();
    }
    Scrubbed { file, seal, path, bad: Some(bad), healed: Some(healed) }
}

async fn check(shared: &Arc<Shared>, target: &Target, pin: SealPin, threads: usize) -> Result<(), Mismatch> {
    let (chunks, path) = (Arc::clone(&target.chunks), target.path.clone());
    shared.metrics.scrub_bytes.inc_by(target.size_bytes);
    tokio::task::spawn_blocking(move || check_pinned(&path, &chunks, &pin, threads))
        .await
        .expect("hashing a mapping does not panic")
}

fn check_pinned(path: &str, chunks: &[Crc64], pin: &SealPin, threads: usize) -> Result<(), Mismatch> {
    let mapping =
        pin.backing.map().map_err(|source| Mismatch::Unreadable { path: path.to_owned(), source })?;
    let sums = crate::save::seal::hash(&mapping, threads);
    let bad =
        |chunk, expected, found| Mismatch::Bad(BadChunk { path: path.to_owned(), chunk, expected, found });
    let mut pairs = (0..).zip(sums.chunks.iter().zip(chunks.iter()));
    if let Some((chunk, (&found, &expected))) = pairs.find(|(_, (found, expected))| found != expected) {
        return Err(bad(chunk, expected, found));
    }
    // Cut off or grown at the border of a chunk: all that there is agrees.
    if sums.chunks.len() != chunks.len() || mapping.len() as u64 != pin.size_bytes {
        let chunk = sums.chunks.len().min(chunks.len());
        let of = |sums: &[Crc64]| sums.get(chunk).copied().unwrap_or(Crc64(0));
        return Err(bad(chunk as u64, of(chunks), of(&sums.chunks)));
    }
    Ok(())
}

/// Why a host copy is not believed.
#[derive(Debug, thiserror::Error)]
enum Mismatch {
    #[error(transparent)]
    Bad(BadChunk),
    /// That is no word about its bytes.
    #[error("{path} could not be mapped to be checked")]
    Unreadable { path: String, source: std::io::Error },
}

/// Bytes that lay in Tier-1 while no daemon looked after them, and are not what was sealed.
#[derive(Debug)]
pub struct BadAtOpen {
    target: Target,
    bad: BadChunk,
}

/// Why an open cannot be answered with what lies in Tier-1.
#[derive(Debug)]
pub enum NotVerified {
    /// The bytes are others: [`heal_at_open`] decides what an open is told.
    Bad(Box<BadAtOpen>),
    /// They could not be looked at, or are gone.
    Unreadable(FsError),
}

/// Looks at bytes that lay in Tier-1 while no daemon looked after them, before the first open is answered. Costs one pass
/// over the file with `threads`.
///
/// # Errors
/// [`NotVerified`].
pub fn verify_at_open(namespace: &Namespace, node: NodeId, threads: usize) -> Result<(), NotVerified> {
    let Some(view) = namespace.view_of_node(node) else {
        return Err(NotVerified::Unreadable(FsError::Stale));
    };
    let path = crate::node::jobs::path_text(namespace, node);
    let Some(target) = target(path, &view) else { return Ok(()) };
    let Some(pin) = namespace.pin_seal(target.file, target.seal) else { return Ok(()) };
    match check_pinned(&target.path, &target.chunks, &pin, threads) {
        Ok(()) => {
            namespace.verified(target.file, target.seal);
            Ok(())
        }
        Err(Mismatch::Bad(bad)) => Err(NotVerified::Bad(Box::new(BadAtOpen { target, bad }))),
        Err(Mismatch::Unreadable { path, source }) => {
            tracing::error!(%path, error = %source, "a host copy could not be mapped to be checked; its open is refused");
            // A full Tier-1 is no damage.
            Err(NotVerified::Unreadable(FsError::from(source)))
        }
    }
}

/// Replaces what was found bad at an open from Tier-3.
///
/// # Errors
/// [`FsError::Io`] when there is no good copy, or when others have the bad one open; [`FsError::NoSpace`] where there is no room
/// for a good one now.
pub async fn heal_at_open(shared: &Arc<Shared>, bad: BadAtOpen) -> Result<(), FsError> {
    let BadAtOpen { target, bad } = bad;
    shared.metrics.verify_mismatches.get_or_create(&[("copy", "host")]).inc();
    let path = target.path.clone();
    let event = |level, kind, what| shared.events.add(shared.now_ns(), level, kind, Some(path.clone()), what);
    match heal(shared, &target).await {
        Ok(()) => {
            shared.metrics.scrub_repaired_files.inc();
            tracing::warn!(%path, %bad, "a host copy was bad at its first open and has been replaced");
            event(EventLevel::Warn, "repaired", format!("{bad}; the host copy was replaced from Tier-3"));
            Ok(())
        }
        Err(HealError::Restore(error)) if error.is_full() => {
            tracing::warn!(%path, %bad, why = %error_text(&error), "a host copy is bad at its first open, and is not replaced yet");
            Err(FsError::NoSpace)
        }
        Err(error) => {
            let why = error_text(&error);
            tracing::error!(%path, %bad, %why, "a host copy is bad at its first open");
            event(EventLevel::Error, "corrupt", format!("{bad}; {why}"));
            Err(FsError::Io)
        }
    }
}

/// Replaces a bad host copy with the copy in Tier-3, verified on the way.
pub(crate) async fn heal(shared: &Arc<Shared>, target: &Target) -> Result<(), HealError> {
    let cold = crate::namespace::ColdFile {
        node: target.node,
        file: target.file,
        seal: target.seal,
        size_bytes: target.size_bytes,
        checksums: Some((target.crc, Arc::clone(&target.chunks))),
        object: target.object.clone(),
    };
    let backing = match fetched(shared, &target.path, &cold).await {
        Ok(backing) => backing,
        Err(error @ RestoreError::NoCopy { .. }) => {
            // What is known to be wrong is never served, even when nothing is left to serve instead.
            return match shared.namespace.lose_host(target.node, target.file, target.seal) {
                Err(FsError::Busy) => Err(HealError::InUse),
                Ok(()) | Err(_) => Err(error.into()),
            };
        }
        Err(error) => return Err(error.into()),
    };
    match shared.namespace.replace_bad_host(target.node, target.file, target.seal, backing) {
        Ok(()) => Ok(()),
        Err(FsError::Busy) => Err(HealError::InUse),
        Err(error) => Err(HealError::Changed(error)),
    }
}
