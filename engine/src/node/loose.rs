//! Files that belong to no checkpoint: what is done about each, and what follows from the end of an upload.
//!
//! Owns: the facts that the rule asks for, and carrying out what it says. Does not own: the moment (`protocol::loose`), the uploads
//! (`save::loose`), which files those are (`ledger`).
//!
//! For such a file, "whole" has no meaning. If its writer was killed, it is sealed as it is, and marked. If it is open or
//! mapped, it is read as it stands, under a number that no seal has.

use crate::node::Shared;
use crate::node::away::{Away, Cause};
use crate::node::book::{LooseBook, LooseStage, Read};
use crate::node::decide::settle_ns;
use crate::node::file_jobs::FileJobs;
use crate::node::flush::Flushes;
use crate::node::gc::Gc;
use crate::node::generations::Generations;
use crate::node::jobs::{self, Done};
use crate::node::ledger::Ledger;
use crate::node::pending::Saves;
use crate::node::rights::Rights;
use crate::node::run::{TICK, retry_pause};
use crate::node::tree::TreeState;
use crate::node::visibility::Visibility;
use crate::node::visibility::unwritten::Beginnings;
use crate::save::loose::{LooseBytes, LooseError, LooseStored, LooseUpload};
use crate::save::upload::UploadError;
use std::sync::Arc;
use std::time::Duration;
use tidemark_namespace::{FileState, FileView, NodeId, ObjectCopy, Reach, is_alive};
use tidemark_protocol::error::error_text;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::loose::{Facts, Left, Next, next};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::{EventLevel, PendingReason};
use tidemark_protocol::residency::loose_class;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Loose files on their way at once. Each is two objects with fsyncs of their own, which a file system's journal groups
/// only when they wait together; more than the store runs at once (`PARALLEL_CALLS`), so that it never idles.
const LOOSE_IN_FLIGHT_MAX: usize = 128;

/// No further loose file is begun while those on their way have this many bytes.
const LOOSE_IN_FLIGHT_BYTES: u64 = 256 << 20;

/// The kernel counts a file's times in ticks of up to 10 ms: a write within the same one does not show.
const TIMES_WITHIN_NS: i64 = 50_000_000;

/// How often a file that changes while it is read is tried again before a flush names it.
pub(crate) const READ_TRIES: u32 = 5;

/// Next step for a loose file.
#[derive(Debug)]
enum Action {
    None,
    /// Examine the file again at `at`. `lacking`: until then Tier-3 lacks some of it.
    Later {
        at: Instant,
        lacking: bool,
    },
    /// Fetch the bytes: only Tier-3 has them, under another name.
    Fetch(NodeId),
    /// Count the file as closed: its writer was killed, but every later writer has closed it.
    Accept(NodeId),
    /// Seal the file as it is: its writer was killed.
    Seal(NodeId),
    Upload(Box<LooseUpload>),
    /// Read the file as it stands: a program may still write it.
    Read(NodeId),
}

/// End of an upload, with the file, seal and generation by which the loop recognises it.
#[derive(Debug)]
pub(crate) struct LooseDone {
    pub(crate) path: RelPath,
    pub(crate) of: (FileId, SealNumber),
    pub(crate) generation: Generation,
    pub(crate) size_bytes: u64,
    pub(crate) left: Left,
    /// How often the upload was tried before.
    pub(crate) tries: u32,
    pub(crate) took: Duration,
    pub(crate) result: Result<LooseStored, LooseError>,
}

/// Whether a program may write the bytes, as far as this node can read them.
pub(crate) fn may_change(view: &FileView) -> bool {
    let unsealed = matches!(view.state, FileState::Open { .. } | FileState::Closed | FileState::Mapped);
    unsealed && view.remote.is_none() && view.host
}

/// Whether a cut file stays as it is. The daemon itself decides what a tracker should hold. On several nodes, the coordinator may know
/// the file as part of a checkpoint.
pub(crate) fn stays_cut(shared: &Shared, ledger: &Ledger, path: &RelPath, view: &FileView) -> bool {
    view.remote.is_some() || shared.cluster.get().is_some() || ledger.rules().is_tracker_name(path)
}

/// Whether the file has a temporary name, and is open, or a program that wrote it lives. While the daemon ends (`ends`), programs
/// that closed it are not waited for: this memory ends, too.
pub(crate) fn is_in_flight(
    shared: &Shared,
    ledger: &Ledger,
    path: &RelPath,
    view: &FileView,
    ends: bool,
) -> bool {
    let lives = || view.writers.iter().any(|writer| is_alive(&shared.namespace, writer));
    ledger.rules().is_temporary(path)
        && match view.state {
            FileState::Open { .. } | FileState::Mapped => true,
            FileState::Closed | FileState::Cut | FileState::Sealed { .. } => !ends && lives(),
        }
}

/// Loose files whose bytes are fetched at once for their upload. Each takes memory, and a turn at the node that has the bytes.
const FETCHES_AT_ONCE: usize = 32;

/// Pause before a failed fetch is tried again.
const FETCH_AGAIN: Duration = Duration::from_secs(1);

fn look(
    shared: &Shared,
    ledger: &Ledger,
    path: &RelPath,
    now: Instant,
    (waits, ends): (Option<Instant>, bool),
    is_ahead: impl FnOnce() -> bool,
) -> Action {
    let (Some(book), Some(view)) = (ledger.loose.get(path), ledger.file(path)) else { return Action::None };
    match &book.stage {
        // The end of the upload makes it due again.
        LooseStage::Uploading => return Action::None,
        LooseStage::Waiting { until, .. } if *until > now => {
            return Action::Later { at: *until, lacking: true };
        }
        LooseStage::Idle | LooseStage::Waiting { .. } | LooseStage::Uploaded { .. } => {}
    }
    let sealed = view.sealed().map(|seal| (view.file, seal));
    let asked = book.is_asked_for(view.node, waits);
    let lacking = match &view.state {
        FileState::Sealed { .. } => book.uploaded() != sealed,
        FileState::Cut => !stays_cut(shared, ledger, path, view),
        // The seal makes the file due again in a moment, unless something prevents the seal.
        FileState::Closed if book.lacking.is_none() => return Action::None,
        FileState::Open { .. } | FileState::Closed | FileState::Mapped => {
            asked || book.lacks_what_stands(view.node, || shared.namespace.seals().reach(view.node))
        }
    };
    let at_rest = matches!(view.state, FileState::Sealed { .. } | FileState::Cut);
    if at_rest && !lacking {
        return Action::None;
    }
    if view.state == FileState::Cut && view.closed_again {
        return Action::Accept(view.node);
    }
    // Bytes that cannot be read to be sealed cannot be uploaded either.
    if !at_rest && (!may_change(view) || ledger.unreadable.contains_key(&view.node)) {
        return Action::None;
    }
    // Gone, or renamed, and not noticed yet: its sidecar would come after a tree document that does not know of it.
    if shared.namespace.nodes().node_at(path.as_bytes()) != Some(view.node) {
        return Action::None;
    }
    // Only one name of a file carries its bytes; the others are hard links in the tree document.
    if ledger.is_further(path, view.node) {
        return Action::None;
    }
    let since = |then: Instant| now.saturating_duration_since(then).as_nanos();
    let read = book.read.filter(|_| !at_rest).map(|read| read.at);
    let facts = Facts {
        at_rest,
        lacking,
        quiet_ns: shared.now_ns().saturating_sub(view.closed_ns),
        lacking_ns: read.or(book.lacking).map_or(0, |then| i64::try_from(since(then)).unwrap_or(i64::MAX)),
        in_flight: is_in_flight(shared, ledger, path, view, ends)
            || ledger.is_left_by_torn(path)
            || is_ahead(),
        took_ns: i64::try_from(book.took.as_nanos()).unwrap_or(i64::MAX),
        // A closed file is sealed in a moment, and then goes.
        waited_for: if at_rest { waits.is_some() } else { asked && view.state != FileState::Closed },
        settle_ns: settle_ns(shared),
    };
    match next(&facts) {
        Next::Nothing => Action::None,
        Next::Again { in_ns } => {
            Action::Later { at: now + Duration::from_nanos(in_ns.unsigned_abs()), lacking }
        }
        Next::Upload => upload(shared, book, path, view, now),
    }
}

fn upload(shared: &Shared, book: &LooseBook, path: &RelPath, view: &FileView, now: Instant) -> Action {
    let FileState::Sealed { seal, chunks, .. } = &view.state else {
        let cut = view.state == FileState::Cut;
        return if cut { Action::Seal(view.node) } else { Action::Read(view.node) };
    };
    let Some(pin) = shared.namespace.seals().pin_seal(view.file, *seal) else {
        // Renamed while it was cold: the new name needs bytes of its own in Tier-3.
        let again = Action::Later { at: now + TICK, lacking: true };
        return if view.host { again } else { Action::Fetch(view.node) };
    };
    let bytes = LooseBytes::Sealed { chunks: Arc::clone(chunks), pin: Arc::new(pin) };
    let left = if view.cut { Left::Cut } else { Left::Closed };
    Action::Upload(Box::new(upload_of(book, path, view, (*seal, bytes, left))))
}

fn upload_of(
    book: &LooseBook,
    path: &RelPath,
    view: &FileView,
    (seal, bytes, left): (SealNumber, LooseBytes, Left),
) -> LooseUpload {
    LooseUpload {
        path: path.clone(),
        generation: book.generation.map_or(Generation(1), Generation::next),
        file: view.file,
        seal,
        bytes,
        left,
        attributes: view.attributes(),
        session: view.writers.first().map(|writer| writer.session.0.clone()),
        closed_at_ns: view.closed_ns,
        earlier: book.stored.clone(),
    }
}

impl LooseBook {
    /// Returns the file and seal that Tier-3 has, unless another upload was begun since.
    pub(crate) fn uploaded(&self) -> Option<(FileId, SealNumber)> {
        match &self.stage {
            LooseStage::Uploaded { of } => Some(*of),
            LooseStage::Idle | LooseStage::Uploading | LooseStage::Waiting { .. } => None,
        }
    }

    /// Returns the last read of bytes that a program might have been writing, if Tier-3 has those bytes.
    fn arrived(&self, node: NodeId) -> Option<Read> {
        self.read.filter(|read| read.arrived && read.node == node)
    }

    /// Whether Tier-3 lacks content of the moment `waits`, when a caller asked. Changes that do not show count, such as
    /// those of a mapping.
    pub(crate) fn is_asked_for(&self, node: NodeId, waits: Option<Instant>) -> bool {
        waits.is_some_and(|waits| self.arrived(node).is_none_or(|read| read.at < waits))
    }

    /// Whether Tier-3 may lack some of the bytes that a program may write.
    pub(crate) fn lacks_what_stands(&self, node: NodeId, reach: impl FnOnce() -> Option<Reach>) -> bool {
        self.arrived(node).is_none_or(|read| read.reach.is_none() || read.reach != reach())
    }
}

/// Why Tier-3 lacks some of a loose file.
pub(crate) struct Lack {
    pub(crate) reason: PendingReason,
    pub(crate) what: String,
    /// Whether waiting may bring it to Tier-3.
    pub(crate) comes: bool,
}

/// Uploads of loose files on their way.
#[derive(Debug, Default)]
pub(crate) struct UploadsInFlight {
    files: usize,
    bytes: u64,
}

/// The parts of the loop that uploads of loose files read and change.
pub(crate) struct LooseUploads<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a mut Ledger,
    pub(crate) in_flight: &'a mut UploadsInFlight,
    pub(crate) jobs: &'a mut JoinSet<Done>,
    pub(crate) file_jobs: &'a mut FileJobs,
    pub(crate) generations: &'a mut Generations,
    pub(crate) tree: &'a mut TreeState,
    pub(crate) tier3_away: &'a mut Away,
    pub(crate) visibility: &'a Visibility,
    pub(crate) gc: &'a Gc,
    pub(crate) flushes: &'a Flushes,
    pub(crate) rights: &'a Rights,
}

impl LooseUploads<'_> {
    /// Starts the next step of the loose files that are due, as far as there is room.
    pub(crate) fn start(&mut self, now: Instant) {
        self.ledger.loose_due.ripen(now);
        let waits = self.flushes.last_began();
        while self.rights.may_write()
            && self.in_flight.files < LOOSE_IN_FLIGHT_MAX
            && self.in_flight.bytes < LOOSE_IN_FLIGHT_BYTES
        {
            let Some(path) = self.ledger.loose_due.pop() else { return };
            let is_ahead = || {
                self.beginnings().why_beginning_waits(&path, now).is_some()
                    || self.saves().why_tracker_waits(&path).is_some()
            };
            match look(self.shared, self.ledger, &path, now, (waits, self.rights.draining), is_ahead) {
                Action::None => {}
                Action::Later { at, lacking } => {
                    let book = self.ledger.loose.get_mut(&path).expect("it was looked at");
                    book.lacking = lacking.then(|| book.lacking.unwrap_or(now));
                    self.ledger.loose_due.insert_at(path, at);
                }
                // The end of the fetch makes the path due as well.
                Action::Fetch(node) if self.file_jobs.fetches() < FETCHES_AT_ONCE => {
                    self.file_jobs.fetch(self.shared, self.jobs, node);
                    self.ledger.loose_due.insert_at(path, now + FETCH_AGAIN);
                }
                Action::Fetch(_) => self.ledger.loose_due.insert_at(path, now + TICK),
                Action::Accept(node) => {
                    self.shared.namespace.seals().accept_cut(node);
                }
                Action::Seal(node) => self.seal_as_it_is(&path, node),
                Action::Upload(upload) => self.start_upload(*upload, None, now),
                Action::Read(node) => self.read_as_it_stands(path, node, now),
            }
        }
    }

    /// Seals a cut file as it is. No program that could close it lives: its bytes are final, unless it is opened again.
    fn seal_as_it_is(&mut self, path: &RelPath, node: NodeId) {
        // The log says it once: a refused try, as of one that is mapped, comes back here.
        if self.ledger.as_they_are.insert(node) {
            let mut what = "its writer ended without closing it: it goes to Tier-3 as it is".to_owned();
            if let Some(closed) = self.ledger.loose.get(path).and_then(|book| book.closed) {
                what += &format!(", beside generation {closed}, which its writers closed");
            }
            self.shared.events.add(
                self.shared.now_ns(),
                EventLevel::Info,
                "cut",
                Some(path.to_string()),
                what,
            );
        }
        self.ledger.unsealed.insert(node);
    }

    fn read_as_it_stands(&mut self, path: RelPath, node: NodeId, now: Instant) {
        let standing = self.shared.namespace.seals().number_standing(node);
        let view = self.shared.namespace.nodes().view(node);
        let (Some(standing), Some(view)) = (standing, view) else {
            // The file was sealed, or a call changes it right now.
            self.ledger.loose_due.insert_at(path, now + TICK);
            return;
        };
        let book = self.ledger.loose.get_mut(&path).expect("it was looked at");
        let shows = self.shared.now_ns().saturating_sub(standing.reach.written_ns) > TIMES_WITHIN_NS;
        let reach = shows.then_some(standing.reach);
        let read = Read { at: now, node, reach, arrived: false };
        let size_bytes = standing.reach.size_bytes;
        let bytes = LooseBytes::Standing { backing: standing.backing, size_bytes, readers: standing.readers };
        let mut upload = upload_of(book, &path, &view, (standing.number, bytes, Left::Open));
        upload.file = standing.file;
        self.start_upload(upload, Some(read), now);
    }

    fn start_upload(&mut self, upload: LooseUpload, read: Option<Read>, now: Instant) {
        let book = self.ledger.loose.get_mut(&upload.path).expect("it was looked at");
        let tries = match &book.stage {
            LooseStage::Waiting { tries, .. } => *tries,
            _ => 0,
        };
        book.stage = LooseStage::Uploading;
        // Used, whatever becomes of it: no key is ever written twice.
        book.generation = Some(upload.generation);
        book.of = Some((upload.file, upload.seal));
        book.attributes = upload.attributes.clone();
        book.lacking = None;
        book.read = read;
        self.in_flight.files += 1;
        self.in_flight.bytes += upload.bytes.size_bytes();
        self.jobs.spawn(jobs::upload_loose(Arc::clone(self.shared), upload, tries, now));
    }

    pub(crate) fn done(&mut self, done: LooseDone, now: Instant) {
        let LooseDone { path, of, generation, size_bytes, left, tries, took, result } = done;
        self.in_flight.files -= 1;
        self.in_flight.bytes -= size_bytes;
        let longest = self.flushes.retry_longest();
        let here = self.ledger.loose.contains_key(&path);
        let books = if here { &mut self.ledger.loose } else { &mut self.ledger.removed_loose };
        let Some(book) = books.get_mut(&path) else { return };
        if book.generation != Some(generation) {
            // The name went and came back meanwhile: a later upload has the book.
            return;
        }
        match result {
            Ok(stored) => {
                self.tier3_away.ended(&Cause::Loose(path.clone()));
                book.stage = LooseStage::Uploaded { of };
                book.described = Some(generation);
                book.took = took;
                if left.is_closed() {
                    book.closed = Some(generation);
                }
                if let Some(read) = &mut book.read {
                    read.arrived = true;
                }
                let object = ObjectCopy { key: stored.key.clone(), size_bytes, encoding: None };
                book.stored = stored.compared();
                let sent = book.attributes.clone();
                // Bytes that a program might write have no seal of which they could be a copy.
                if left != Left::Open {
                    self.note_object(&path, of, object);
                }
                self.generations.collects(&path, generation);
                let shows = self.shared.namespace.nodes().view_of(of.0).map(|view| view.attributes());
                if shows.is_some_and(|shows| shows != sent) {
                    self.tree.tells_more(self.ledger);
                }
                self.tree.may_tell_more(self.ledger, of.0);
            }
            Err(error) => {
                let why = error_text(&error);
                let pause = retry_pause(tries, longest);
                let changed = matches!(
                    error,
                    LooseError::Upload(UploadError::Changed { .. } | UploadError::Read { .. })
                );
                if changed {
                    tracing::debug!(%path, %why, "a file that is being written is read again");
                } else if matches!(error, LooseError::Upload(UploadError::Removed { .. })) {
                    tracing::warn!(%path, %why, "a loose file did not reach Tier-3 yet");
                } else {
                    tracing::warn!(%path, %why, "a loose file did not reach Tier-3 yet");
                    self.tier3_away.failed(Cause::Loose(path.clone()), now, why.clone());
                }
                book.stage = LooseStage::Waiting { until: now + pause, tries: tries + 1, why };
            }
        }
        if here {
            self.ledger.loose_due.insert(path);
        }
    }

    fn note_object(&self, path: &RelPath, of: (FileId, SealNumber), object: ObjectCopy) {
        // The bytes are those of the file that was uploaded, whatever has its name by now.
        if let Some(cluster) = self.shared.cluster.get() {
            cluster.tell_objects(vec![(of.0, of.1, object.clone())]);
        }
        self.shared.namespace.hosts().note_object(of.0, of.1, object);
        if let Some(view) = self.ledger.file(path).filter(|view| view.file == of.0) {
            let known = self.shared.namespace.nodes().view(view.node).map(|view| view.reclaim);
            self.shared.namespace.hosts().set_reclaim(of.0, loose_class(known.unwrap_or_default()));
        }
    }

    fn beginnings(&self) -> Beginnings<'_> {
        let Self { shared, ledger, visibility, flushes, rights, .. } = self;
        Beginnings { shared, ledger, visibility, flushes, rights }
    }

    fn saves(&self) -> Saves<'_> {
        let Self { shared, ledger, gc, visibility, rights, .. } = self;
        Saves { shared, ledger, gc, visibility, rights }
    }
}
