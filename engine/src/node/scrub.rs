//! Looking at sealed host pages at rest, and healing them from another copy.
//!
//! Owns: which file is next, the pace, checking one file, replacing a bad host copy. Does not own: copies in Tier-3
//! (`verify` reads those).

use crate::node::Shared;
use crate::node::book::Book;
use crate::node::by_path::ByPath;
use crate::node::flush::covers;
use crate::node::jobs::Done;
use crate::node::ledger::Ledger;
use crate::restore::{Origin, RestoreError};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tidemark_namespace::{FileState, FsError, Namespace, NodeId, ObjectCopy, SealPin};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::error::error_text;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::report::{BrokenInvariant, EventLevel, path_text};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// After a pass over everything the scrub rests at least this long, so that a nearly empty Tier-1 costs nothing.
const REST: Duration = Duration::from_secs(30);

/// Pause before a host copy is checked again that could not be read, or not be replaced, for example while Tier-3 is away. Each
/// check reads it whole.
const AGAIN_AFTER: Duration = Duration::from_secs(30);

/// Host copies to check out of their turn. The next pass finds the rest again.
const AGAIN_MAX: usize = 10_000;

/// Bad objects remembered. The next `verify` finds the rest again.
const BAD_OBJECTS_MAX: usize = 10_000;

/// Progress and findings of the scrub.
#[derive(Debug)]
pub(crate) struct Scrub {
    /// Files that this pass has yet to check, by node and not by path: a rename must not make it miss one.
    left: VecDeque<NodeId>,
    running: bool,
    not_before: Instant,
    /// Files to check out of their turn once no program has them open, and not before that moment ([`look_again`]).
    again: BTreeMap<FileId, Instant>,
    /// Files whose host copy is bad and was not replaced: named in the problems.
    pub(crate) bad: BTreeMap<(FileId, SealNumber), String>,
    /// Objects that the last `verify` found bad and could not write again, by file and key.
    pub(crate) bad_objects: BTreeMap<(FileId, SealNumber, String), BadObject>,
    /// Documents that the last `verify` of their place found bad and could not write again: path and what is wrong.
    pub(crate) unmended: Vec<(String, String)>,
}

/// A sealed file to check.
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
    /// Returns all objects that should hold the bytes.
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

/// A check of one host copy.
#[derive(Debug)]
pub(crate) struct Scrubbed {
    pub(crate) file: FileId,
    pub(crate) seal: SealNumber,
    pub(crate) path: String,
    pub(crate) found: HostFound,
}

impl Scrubbed {
    /// Whether other bytes lie there than were sealed, and still do.
    pub(crate) fn is_bad(&self) -> bool {
        matches!(self.found, HostFound::Bad { .. })
    }
}

/// Outcome of the check of one host copy.
#[derive(Debug)]
pub(crate) enum HostFound {
    Good,
    /// Bad, and replaced.
    Healed {
        bad: BadChunk,
        from: Origin,
    },
    /// Bad, and not replaced.
    Bad {
        bad: BadChunk,
        why: HealError,
    },
    /// The bytes were not checked, so there is no verdict on them.
    Unseen(Unseen),
}

/// Why a host copy was not checked.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unseen {
    #[error("it left memory, or was changed, before it was looked at")]
    Gone,
    #[error("it could not be mapped to be looked at")]
    Unreadable(#[source] std::io::Error),
}

/// Returns when a host copy is checked again out of its turn, once no program has it open.
fn look_again(found: &HostFound, now: Instant) -> Option<Instant> {
    match found {
        HostFound::Good | HostFound::Healed { .. } | HostFound::Unseen(Unseen::Gone) => None,
        HostFound::Unseen(Unseen::Unreadable(_)) => Some(now + AGAIN_AFTER),
        HostFound::Bad { why: HealError::InUse, .. } => Some(now),
        // The file was retired, or other bytes took its place.
        HostFound::Bad { why: HealError::Restore(error), .. } if error.is_loss() => None,
        HostFound::Bad { why: HealError::Changed(_), .. } => None,
        HostFound::Bad { why: HealError::Restore(_), .. } => Some(now + AGAIN_AFTER),
    }
}

/// Why a bad host copy stays.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HealError {
    #[error("it was not replaced")]
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
            again: BTreeMap::new(),
            bad: BTreeMap::new(),
            bad_objects: BTreeMap::new(),
            unmended: Vec::new(),
        }
    }

    /// Remembers what a `verify` of `place` left as it is.
    pub(crate) fn note_unmended(&mut self, by_path: ByPath<'_>, place: &[u8], found: Vec<BrokenInvariant>) {
        let around = by_path.books_about(place).map(Book::path).filter(|path| !covers(place, path));
        let around: BTreeSet<String> = around.map(|path| path_text(&path)).collect();
        let place = path_text(place);
        let looked_at = |path: &str| covers(place.as_bytes(), path.as_bytes()) || around.contains(path);
        self.unmended.retain(|(path, _)| !looked_at(path));
        let room = BAD_OBJECTS_MAX.saturating_sub(self.unmended.len());
        self.unmended.extend(found.into_iter().map(|broken| (broken.path, broken.what)).take(room));
    }

    /// Returns the objects of one file's bytes that were found bad, by key.
    pub(crate) fn bad_objects_of(
        &self,
        file: FileId,
        seal: SealNumber,
    ) -> impl Iterator<Item = (&String, &BadObject)> {
        let all = self.bad_objects.range((file, seal, String::new())..);
        let of = all.take_while(move |((other, at, _), _)| (*other, *at) == (file, seal));
        of.map(|((_, _, key), bad)| (key, bad))
    }

    pub(crate) fn scrubbed(&mut self, shared: &Shared, scrubbed: &Scrubbed, now: Instant) {
        self.running = false;
        self.note_scrubbed(shared, scrubbed, now);
    }

    /// Reports and remembers the outcome of a check of a host copy.
    pub(crate) fn note_scrubbed(&mut self, shared: &Shared, scrubbed: &Scrubbed, now: Instant) {
        let of = (scrubbed.file, scrubbed.seal);
        // Taken out first, so that one that is known has its place.
        self.again.remove(&scrubbed.file);
        if let Some(at) = look_again(&scrubbed.found, now)
            && self.again.len() < AGAIN_MAX
        {
            self.again.insert(scrubbed.file, at);
        }
        let path = Some(scrubbed.path.clone());
        match &scrubbed.found {
            HostFound::Good => {
                self.bad.remove(&of);
            }
            HostFound::Healed { bad, from } => {
                self.bad.remove(&of);
                let what = format!("{bad}; the host copy was replaced from {}", from.place());
                tracing::warn!(path = %scrubbed.path, %bad, "a host copy was bad and has been replaced");
                shared.events.add(shared.now_ns(), EventLevel::Warn, "repaired", path, what);
            }
            // The file lost its last name, or was written to, during the check: these bytes belong to no file.
            HostFound::Bad { .. } if !shared.is_held(of) && !shared.is_open_or_copy(scrubbed.file) => {
                self.again.remove(&scrubbed.file);
                self.bad.remove(&of);
            }
            HostFound::Bad { bad, why } => {
                let why = error_text(why);
                let what = format!("{bad}; {why}");
                let known = self.bad.insert(of, what.clone());
                // Repeated checks find the same: report each finding once.
                if known.as_ref() != Some(&what) {
                    tracing::error!(path = %scrubbed.path, %bad, %why, "a host copy is bad");
                    let at_ns = shared.now_ns();
                    shared.events.add(at_ns, EventLevel::Error, "corrupt", path, what);
                }
            }
            // The known state stays.
            HostFound::Unseen(_) => {}
        }
    }

    /// Remembers the outcome of a check of an object. `bad`: what is wrong with it.
    pub(crate) fn note_object_checked(
        &mut self,
        shared: &Shared,
        target: &Target,
        object: &ObjectCopy,
        bad: Option<&str>,
    ) {
        let of = (target.file, target.seal, object.key.clone());
        let Some(what) = bad else {
            self.bad_objects.remove(&of);
            return;
        };
        let path = target.path.clone();
        let known = self.bad_objects.contains_key(&of);
        if known || self.bad_objects.len() < BAD_OBJECTS_MAX {
            let found = BadObject { path: path.clone(), object: object.clone(), what: what.to_owned() };
            self.bad_objects.insert(of, found);
        }
        if !known {
            tracing::error!(%path, what, "an object of Tier-3 is bad, and was not written again");
            let what = what.to_owned();
            shared.events.add(shared.now_ns(), EventLevel::Error, "corrupt", Some(path), what);
        }
    }

    pub(crate) fn start(
        &mut self,
        shared: &Arc<Shared>,
        ledger: &Ledger,
        jobs: &mut JoinSet<Done>,
        draining: bool,
        now: Instant,
    ) {
        let rate = shared.settings.verify.scrub_bytes_per_s;
        if self.running || draining {
            return;
        }
        if let Some(target) = self.closed_again(shared, ledger, now) {
            self.running = true;
            let shared = Arc::clone(shared);
            jobs.spawn(async move { Done::Scrubbed(scrub(&shared, target).await) });
            return;
        }
        if rate == 0 || self.not_before > now {
            return;
        }
        if self.left.is_empty() {
            let nodes: BTreeSet<_> = ledger.files().map(|(_, view)| view.node).collect();
            self.left.extend(nodes);
            self.left.extend(shared.namespace.peer_copies().all().iter().map(|copy| copy.node));
        }
        let mut next = None;
        while next.is_none()
            && let Some(node) = self.left.pop_front()
        {
            let found = ledger.node(node).filter(|(_, view)| view.host && view.opens == 0);
            next = found.and_then(|(path, view)| target(path.to_string(), view));
            next = next.or_else(|| shared.namespace.peer_copies().copy_at(node).map(copy_target));
        }
        let Some(next) = next else {
            self.not_before = now + REST;
            return;
        };
        self.running = true;
        // The time this file may take at the pace; the next one waits for it.
        let pace = Duration::from_millis(next.size_bytes.saturating_mul(1000) / rate);
        self.not_before = now + if self.left.is_empty() { pace.max(REST) } else { pace };
        let shared = Arc::clone(shared);
        jobs.spawn(async move { Done::Scrubbed(scrub(&shared, next).await) });
    }

    /// Returns a file to check out of its turn, now that no program has it open. The file stays due until it was checked.
    pub(crate) fn closed_again(&mut self, shared: &Shared, ledger: &Ledger, now: Instant) -> Option<Target> {
        let namespace = Arc::clone(&shared.namespace);
        self.again.retain(|file, _| namespace.nodes().node_of_file(*file).is_some());
        let due = self.again.iter().filter(|(_, not_before)| **not_before <= now);
        let mut due = due.map(|(file, _)| *file);
        due.find_map(|file| {
            // The ledger's view knows of closes by writers only; readers are asked for.
            let view = namespace.nodes().view_of(file).filter(|view| view.opens == 0)?;
            let (path, view) = ledger.node(view.node)?;
            target(path.to_string(), view)
        })
    }
}

impl Shared {
    /// Whether a program has this file open, or it is a copy kept for another node. Costs a pass over the copies.
    fn is_open_or_copy(&self, file: FileId) -> bool {
        let namespace = &self.namespace;
        let view = namespace.nodes().node_of_file(file).and_then(|node| namespace.nodes().view_of_node(node));
        view.is_some_and(|view| view.opens > 0)
            || namespace.peer_copies().all().iter().any(|copy| copy.own == file)
    }
}

/// Returns what there is to check of a file. `None`: it is not sealed.
pub(crate) fn target(path: String, view: &tidemark_namespace::FileView) -> Option<Target> {
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

/// Returns what there is to check of another node's file that is kept here.
fn copy_target(copy: tidemark_namespace::CopyView) -> Target {
    Target {
        node: copy.node,
        file: copy.own,
        seal: copy.sealed.number,
        path: format!("{} (a copy for {})", path_text(&copy.meta.path), copy.meta.home),
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
    Scrubbed { file, seal, path, found: look_and_heal(shared, &target).await }
}

async fn look_and_heal(shared: &Arc<Shared>, target: &Target) -> HostFound {
    let Some(pin) = shared.namespace.seals().pin_seal(target.file, target.seal) else {
        return HostFound::Unseen(Unseen::Gone);
    };
    // Uses one thread: the pace, and not this check, decides how soon all is checked.
    let bad = match check(shared, target, pin, 1).await {
        Ok(()) => {
            shared.metrics.scrub_bytes.inc_by(target.size_bytes);
            shared.namespace.seals().verified(target.file, target.seal);
            return HostFound::Good;
        }
        Err(Mismatch::Unreadable(source)) => {
            tracing::error!(path = %target.path, error = %source, "a host copy was not looked at");
            return HostFound::Unseen(Unseen::Unreadable(source));
        }
        Err(Mismatch::Gone) => return HostFound::Unseen(Unseen::Gone),
        Err(Mismatch::Bad(bad)) => bad,
    };
    shared.metrics.scrub_bytes.inc_by(target.size_bytes);
    shared.metrics.verify_mismatches.get_or_create(&[("copy", "host")]).inc();
    match heal(shared, target).await {
        Ok(from) => {
            shared.metrics.scrub_repaired_files.inc();
            HostFound::Healed { bad, from }
        }
        Err(HealError::Changed(FsError::Stale)) => HostFound::Unseen(Unseen::Gone),
        Err(why) => HostFound::Bad { bad, why },
    }
}

async fn check(shared: &Shared, target: &Target, pin: SealPin, threads: usize) -> Result<(), Mismatch> {
    let (namespace, target) = (Arc::clone(&shared.namespace), target.clone());
    tokio::task::spawn_blocking(move || check_or_doubt(&namespace, &target, &pin, threads))
        .await
        .expect("hashing a mapping does not panic")
}

/// Checks every byte. Once some are found bad, no open is answered with them, however long it takes to replace them.
fn check_or_doubt(
    namespace: &Namespace,
    target: &Target,
    pin: &SealPin,
    threads: usize,
) -> Result<(), Mismatch> {
    let checked = check_pinned(&target.path, &target.chunks, pin, threads);
    if let Err(Mismatch::Bad(_)) = &checked
        && !namespace.hosts().doubt_host(target.node, target.file, target.seal, pin.backing.number())
    {
        return Err(Mismatch::Gone);
    }
    checked
}

fn check_pinned(path: &str, chunks: &[Crc64], pin: &SealPin, threads: usize) -> Result<(), Mismatch> {
    let mapping = pin.backing.map().map_err(Mismatch::Unreadable)?;
    let sums = crate::chunk::hash(&mapping, threads);
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
#[derive(Debug)]
enum Mismatch {
    Bad(BadChunk),
    /// The copy could not be mapped, which says nothing about its bytes.
    Unreadable(std::io::Error),
    /// The copy was bad, and is not the file's any more. The file's present copy was not checked.
    Gone,
}

/// Bytes in Tier-1 that must not answer an open: they are not what was sealed.
#[derive(Debug)]
pub struct BadAtOpen {
    target: Target,
    bad: BadChunk,
}

/// Why an open cannot be answered with what lies in Tier-1.
#[derive(Debug)]
pub enum NotVerified {
    /// The bytes differ from the sealed ones: [`heal_at_open`] decides what the open returns.
    Bad(Box<BadAtOpen>),
    /// The bytes could not be read, or are gone.
    Unreadable(FsError),
}

/// Verifies bytes before an open is answered, if they lay in Tier-1 while no daemon looked after them, or if they were found bad.
/// Costs one pass over the file with `threads`.
///
/// # Errors
/// [`NotVerified`].
pub fn verify_at_open(namespace: &Namespace, node: NodeId, threads: usize) -> Result<(), NotVerified> {
    let Some(view) = namespace.nodes().view_of_node(node) else {
        return Err(NotVerified::Unreadable(FsError::Stale));
    };
    let path = crate::node::jobs::path_text(namespace, node);
    let Some(target) = target(path, &view) else { return Ok(()) };
    let Some(pin) = namespace.seals().pin_seal(target.file, target.seal) else { return Ok(()) };
    match check_or_doubt(namespace, &target, &pin, threads) {
        Ok(()) => {
            namespace.seals().verified(target.file, target.seal);
            Ok(())
        }
        Err(Mismatch::Bad(bad)) => Err(NotVerified::Bad(Box::new(BadAtOpen { target, bad }))),
        // The open finds what the file has now, and whether that is to be verified.
        Err(Mismatch::Gone) => Ok(()),
        Err(Mismatch::Unreadable(source)) => {
            let path = &target.path;
            tracing::error!(%path, error = %source, "a host copy could not be mapped to be checked; its open is refused");
            // A full Tier-1 is no damage.
            Err(NotVerified::Unreadable(FsError::from(source)))
        }
    }
}

/// Replaces what was found bad at an open from another copy.
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
        Ok(from) => {
            shared.metrics.scrub_repaired_files.inc();
            tracing::warn!(%path, %bad, "a host copy was bad at its first open and has been replaced");
            let what = format!("{bad}; the host copy was replaced from {}", from.place());
            event(EventLevel::Warn, "repaired", what);
            Ok(())
        }
        // Another look replaced it, or gave it up: the open finds what the file has now.
        Err(HealError::Changed(FsError::Stale)) => Ok(()),
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

/// Replaces a bad host copy with another copy, verified on the way; gives where that came from.
async fn heal(shared: &Arc<Shared>, target: &Target) -> Result<Origin, HealError> {
    // Another look replaced it, or gave it up.
    if !shared.namespace.seals().is_unverified(target.node) {
        return Err(HealError::Changed(FsError::Stale));
    }
    // Nothing could take its place: nothing is fetched for it.
    if shared.namespace.nodes().view_of_node(target.node).is_some_and(|view| view.opens > 0) {
        return Err(HealError::InUse);
    }
    let cold = tidemark_namespace::ColdFile {
        node: target.node,
        file: target.file,
        seal: target.seal,
        size_bytes: target.size_bytes,
        checksums: Some((target.crc, Arc::clone(&target.chunks))),
        object: target.object.clone(),
    };
    let (backing, from) = match shared.restorer.fetched(&target.path, &cold).await {
        Ok(fetched) => fetched,
        Err(error) => return Err(not_replaced(&shared.namespace, target, error)),
    };
    match shared.namespace.hosts().replace_bad_host(target.node, target.file, target.seal, backing) {
        Ok(()) => Ok(from),
        // An open replaced it meanwhile.
        Err(FsError::Busy) if !shared.namespace.seals().is_unverified(target.node) => Ok(from),
        Err(FsError::Busy) => Err(HealError::InUse),
        Err(error) => Err(HealError::Changed(error)),
    }
}

/// Gives up a bad host copy that no other can replace, so that the next open asks the others again. A copy for another node goes
/// whatever the reason is: that node counts on it, and makes another. Every other one stays in doubt.
fn not_replaced(namespace: &Namespace, target: &Target, error: RestoreError) -> HealError {
    let goes = error.is_loss() || namespace.peer_copies().copy_at(target.node).is_some();
    if !goes {
        return error.into();
    }
    match namespace.hosts().lose_host(target.node, target.file, target.seal) {
        Err(FsError::Busy) if namespace.seals().is_unverified(target.node) => HealError::InUse,
        // Another look replaced it meanwhile.
        Err(FsError::Busy | FsError::Stale) => HealError::Changed(FsError::Stale),
        Ok(()) | Err(_) => error.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::{AGAIN_AFTER, BadChunk, HealError, HostFound, Unseen, look_again};
    use tidemark_namespace::FsError;

    use crate::restore::fetch::FetchError;
    use crate::restore::{Origin, RestoreError};
    use tidemark_protocol::checksum::Crc64;
    use tokio::time::Instant;

    fn bad() -> BadChunk {
        BadChunk { path: "r/a".into(), chunk: 1, expected: Crc64(1), found: Crc64(2) }
    }

    #[test]
    fn a_copy_that_was_not_looked_at_is_looked_at_again_and_what_is_good_is_not() {
        let now = Instant::now();
        let unreadable = HostFound::Unseen(Unseen::Unreadable(std::io::ErrorKind::OutOfMemory.into()));
        assert_eq!(look_again(&unreadable, now), Some(now + AGAIN_AFTER));
        let open = HostFound::Bad { bad: bad(), why: HealError::InUse };
        assert_eq!(look_again(&open, now), Some(now), "as soon as it is closed");
        let healed = HostFound::Healed { bad: bad(), from: Origin::Object };
        for done in [HostFound::Good, healed, HostFound::Unseen(Unseen::Gone)] {
            assert_eq!(look_again(&done, now), None, "{done:?}");
        }
    }

    #[test]
    fn a_bad_copy_that_could_not_be_replaced_is_tried_again_unless_it_was_given_up() {
        let now = Instant::now();
        let bad_for = |why| HostFound::Bad { bad: bad(), why };
        let source = std::io::ErrorKind::TimedOut.into();
        let away = RestoreError::Fetch(FetchError::Write { path: "r/a".into(), chunk: 1, source });
        assert_eq!(look_again(&bad_for(away.into()), now), Some(now + AGAIN_AFTER));
        let lost = RestoreError::NoCopy { path: "r/a".into() };
        assert_eq!(look_again(&bad_for(lost.into()), now), None);
        let corrupt = FetchError::Corrupt {
            path: "r/a".into(),
            key: "k".into(),
            chunk: 1,
            expected: Crc64(1),
            found: Crc64(2),
        };
        assert_eq!(look_again(&bad_for(RestoreError::Fetch(corrupt).into()), now), None);
        assert_eq!(look_again(&bad_for(HealError::Changed(FsError::Stale)), now), None);
    }
}
