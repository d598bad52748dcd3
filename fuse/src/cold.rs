//! Opens and resizes that may take long, kept off the threads that answer requests.
//!
//! Owns: the worker threads and what waits for them. Does not own: fetching ([`Host`]), what an open gives
//! (the namespace).
//!
//! Three things take long. A file whose bytes are elsewhere must be fetched first. An open for writing or a
//! resize may have to copy frozen bytes, or wait for another program's last close, whose RELEASE must then
//! find a free thread. And what finds no room waits, bounded, for memory that is on its way back. In each case
//! the reply object moves to a worker and is answered there. Fetches have threads of their own, so that a slow
//! tier does not hold up programs that write, and so have calls that ask other nodes or wait for room (`room`). Threads and
//! queues are bounded; what does not fit is refused with EAGAIN rather than left waiting for ever.
//!
//! A call keeps its leave while it changes bytes, not while it waits for them or for their memory.
//!
//! [`Host`]: crate::Host

use crate::convert::answer_bytes;
use crate::errno::errno;
use crate::gate::{self, Call, Leave, Wanted};
use crate::named::Place;
use crate::room::{answer_open_later, when_room};
use crate::shared::Shared;
use fuser::{Errno, ReplyAttr, ReplyEntry, ReplyOpen, ReplyXattr};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use tidemark_namespace::{Attr, Caller, ColdFile, FsError, NodeId, OpenFile, OpenOutcome, SetAttr};

/// Files that are fetched at once. Each fetch is parallel in itself; this is for many small files.
const FETCH_THREADS: usize = 16;

/// Opens for writing and resizes at once: as many as a node has ranks, so that they do not wait for each other.
const CHANGE_THREADS: usize = 8;

/// Calls that wait for what other nodes say of names, or for room: as many as a node has ranks and data loaders at a moment.
const ASK_THREADS: usize = 16;

/// The same with those that are added where all wait, and stay. While nobody coordinates each look-up of what is not there holds a thread for up
/// to 20 s, and a save goes on beside them: 8 ranks with 32 data loaders each. One that sleeps takes some tens of KiB.
const ASK_THREADS_MAX: usize = 256;

/// They change and send names, which takes little; what they copy lies elsewhere. Below 2 MiB no huge page lies under a stack.
const ASK_STACK_BYTES: usize = 1 << 20;

/// What waits for a thread, for each of the two. More than a node has data loaders.
const QUEUE_MAX: usize = 4096;

/// A file fetched and reclaimed again before its open was finished, this often, means that memory is too
/// small for what is being opened.
const ATTEMPTS_MAX: u32 = 4;

/// Something that waits for a worker, with the reply it owes.
#[derive(Debug)]
pub(crate) enum Job {
    /// A look-up before which the names of a file go to a new one.
    LookupAnew { caller: Caller, place: Place, reply: ReplyEntry },
    /// An open that may change bytes.
    Open { caller: Caller, node: NodeId, flags: i32, leave: Leave, reply: ReplyOpen },
    /// An open whose bytes must be fetched.
    OpenCold { cold: ColdFile, caller: Caller, node: NodeId, flags: i32, reply: ReplyOpen },
    /// An open whose bytes must be verified.
    OpenUnverified { caller: Caller, node: NodeId, flags: i32, reply: ReplyOpen },
    /// A setattr that sets a size.
    Resize { caller: Caller, node: NodeId, change: SetAttr, leave: Leave, reply: ReplyAttr },
    /// A computed attribute: whoever knows it may be busy, and may itself wait for a request to be answered.
    GetXattr { node: NodeId, name: Vec<u8>, size: u32, reply: ReplyXattr },
    /// A call on names that other nodes have to be asked about, or one that found no room.
    Names(Call, Counted),
    /// A setattr that sets a size, of a file whose bytes must be fetched or verified.
    ResizeLater {
        /// None where they are here, and nobody has looked at them.
        cold: Option<ColdFile>,
        caller: Caller,
        node: NodeId,
        change: SetAttr,
        /// What leave is to be got for once they are here.
        wanted: Option<Wanted>,
        reply: ReplyAttr,
    },
}

/// The queues to the workers. The threads end when it is dropped.
#[derive(Debug, Clone)]
pub(crate) struct Workers {
    changing: SyncSender<Job>,
    onward: Onward,
    shared: Arc<Shared>,
}

/// Where those that change bytes pass on what takes longer than they may.
#[derive(Debug, Clone)]
struct Onward {
    fetching: SyncSender<Job>,
    asking: Askers,
}

/// The threads that ask other nodes, and wait for room. They nearly always only wait, so that one more is made where a call finds none.
#[derive(Debug, Clone)]
struct Askers {
    queue: SyncSender<Job>,
    waiting: Arc<Mutex<Receiver<Job>>>,
    /// Calls that were handed over and have not ended.
    calls: Arc<AtomicUsize>,
    threads: Arc<AtomicUsize>,
}

/// Counts a call until it is dropped with it.
#[derive(Debug)]
pub(crate) struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Askers {
    fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let (queue, waiting) = sync_channel(QUEUE_MAX);
        let waiting = Arc::new(Mutex::new(waiting));
        let askers = Self { queue, waiting, calls: Arc::default(), threads: Arc::new(ASK_THREADS.into()) };
        (0..ASK_THREADS).try_for_each(|number| askers.add(shared, number))?;
        Ok(askers)
    }

    fn add(&self, shared: &Arc<Shared>, number: usize) -> io::Result<()> {
        let (shared, waiting) = (Arc::clone(shared), Arc::clone(&self.waiting));
        std::thread::Builder::new()
            .name(format!("mount-names-{number}"))
            .stack_size(ASK_STACK_BYTES)
            .spawn(move || serve(&shared, &waiting, None))?;
        Ok(())
    }

    /// Counts a call that is about to be handed over, and makes a thread for it where each has one.
    fn count(&self, shared: &Arc<Shared>) -> Counted {
        let calls = self.calls.fetch_add(1, Ordering::AcqRel) + 1;
        let counted = Counted(Arc::clone(&self.calls));
        let one_more = |threads: usize| (threads < calls.min(ASK_THREADS_MAX)).then_some(threads + 1);
        if let Ok(number) = self.threads.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more)
            && let Err(error) = self.add(shared, number)
        {
            self.threads.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!(%error, number, "no thread for one more call on names: it waits until another call ends");
        }
        counted
    }
}

impl Onward {
    /// Hands a call to a thread that may wait. Never blocks.
    fn ask(&self, shared: &Arc<Shared>, call: Call) {
        let counted = self.asking.count(shared);
        put(shared, &self.asking.queue, Job::Names(call, counted));
    }
}

impl Workers {
    pub(crate) fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let fetching = start(FETCH_THREADS, "mount-fetch", shared, None)?;
        let onward = Onward { fetching, asking: Askers::start(shared)? };
        let changing = start(CHANGE_THREADS, "mount-change", shared, Some(&onward))?;
        Ok(Self { changing, onward, shared: Arc::clone(shared) })
    }

    /// Hands the job to a worker. Never blocks.
    pub(crate) fn submit(&self, job: Job) {
        let queue = match &job {
            Job::LookupAnew { .. } | Job::Open { .. } | Job::Resize { .. } | Job::GetXattr { .. } => {
                &self.changing
            }
            Job::Names(..) => &self.onward.asking.queue,
            Job::OpenCold { .. } | Job::OpenUnverified { .. } | Job::ResizeLater { .. } => {
                &self.onward.fetching
            }
        };
        put(&self.shared, queue, job);
    }

    /// Hands a call to a thread that may wait for other nodes, and for room. Never blocks.
    pub(crate) fn ask(&self, call: Call) {
        self.onward.ask(&self.shared, call);
    }
}

fn put(shared: &Shared, queue: &SyncSender<Job>, job: Job) {
    if let Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) = queue.try_send(job) {
        tracing::warn!(waiting = QUEUE_MAX, "too many opens wait for a worker; one is refused");
        match job {
            Job::LookupAnew { reply, .. } => reply.error(Errno::EAGAIN),
            Job::Open { reply, .. } | Job::OpenCold { reply, .. } | Job::OpenUnverified { reply, .. } => {
                reply.error(Errno::EAGAIN);
            }
            Job::Resize { reply, .. } | Job::ResizeLater { reply, .. } => reply.error(Errno::EAGAIN),
            Job::GetXattr { reply, .. } => reply.error(Errno::EAGAIN),
            Job::Names(call, _) => call.refuse(shared),
        }
    }
}

/// `onward`: for those that change bytes; the others pass nothing on.
fn start(
    threads: usize,
    name: &str,
    shared: &Arc<Shared>,
    onward: Option<&Onward>,
) -> io::Result<SyncSender<Job>> {
    let (queue, waiting) = sync_channel(QUEUE_MAX);
    let waiting = Arc::new(Mutex::new(waiting));
    for number in 0..threads {
        let (shared, waiting, onward) = (Arc::clone(shared), Arc::clone(&waiting), onward.cloned());
        std::thread::Builder::new()
            .name(format!("{name}-{number}"))
            .spawn(move || serve(&shared, &waiting, onward.as_ref()))?;
    }
    Ok(queue)
}

fn serve(shared: &Arc<Shared>, waiting: &Mutex<Receiver<Job>>, onward: Option<&Onward>) {
    loop {
        // The lock is held while waiting for the next job, not while doing it.
        let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = next else { return };
        do_job(shared, job, onward);
    }
}

fn do_job(shared: &Arc<Shared>, job: Job, onward: Option<&Onward>) {
    let onward = || onward.expect("its queue is that of the threads that pass on");
    match job {
        Job::LookupAnew { caller, place, reply } => look_up_anew(shared, onward(), caller, place, reply),
        Job::Open { caller, node, flags, leave, reply } => {
            open(shared, onward(), (caller, node, flags), leave, reply);
        }
        Job::OpenCold { cold, caller, node, flags, reply } => {
            match fetch_and_open(shared, cold, &caller, node, flags) {
                Ok(file) => shared.answer_open(caller.request, &file, reply),
                Err(error) => shared.refuse_open(caller.request, error, reply),
            }
        }
        Job::OpenUnverified { caller, node, flags, reply } => {
            match verify_and_open(shared, &caller, node, flags) {
                Ok(file) => shared.answer_open(caller.request, &file, reply),
                Err(error) => shared.refuse_open(caller.request, error, reply),
            }
        }
        Job::Resize { caller, node, change, leave, reply } => {
            resize(shared, onward(), (caller, node, change), leave, reply);
        }
        Job::GetXattr { node, name, size, reply } => match shared.namespace.getxattr(node, &name) {
            Ok(value) => answer_bytes(&value, size, reply),
            Err(error) => reply.error(errno(error)),
        },
        Job::Names(call, _counted) => call.go(shared),
        Job::ResizeLater { cold, caller, node, change, wanted, reply } => {
            shared.answer_attr(fetch_and_resize(shared, cold, wanted, &caller, node, &change), reply);
        }
    }
}

fn look_up_anew(shared: &Arc<Shared>, onward: &Onward, caller: Caller, place: Place, reply: ReplyEntry) {
    let look = move |shared: &Shared| shared.namespace.lookup_anew(&caller, place.0, &place.1);
    match look(shared) {
        Err(FsError::NoSpace) => {
            let later = Call::short_of_room(Leave::default(), move |shared, leave| {
                let found = leave.and_then(|leave| when_room(shared, leave, || look(shared)));
                shared.answer_entry(0, found.map(|(found, _leave)| found), reply);
            });
            onward.ask(shared, later);
        }
        found => shared.answer_entry(0, found, reply),
    }
}

/// An open that may change bytes.
fn open(
    shared: &Arc<Shared>,
    onward: &Onward,
    (caller, node, flags): (Caller, NodeId, i32),
    leave: Leave,
    reply: ReplyOpen,
) {
    let opened = shared.unless_departing(|| {
        shared.namespace.wait_for_departures();
        open_to_write(shared, &caller, node, flags)
    });
    match opened {
        Err(FsError::NoSpace) => {
            let fetching = onward.fetching.clone();
            let later = Call::short_of_room(leave, move |shared, leave| {
                let open = || open_to_write(shared, &caller, node, flags);
                let opened = leave.and_then(|leave| when_room(shared, leave, open));
                answer_opened(shared, &fetching, (caller, node, flags), opened, reply);
            });
            onward.ask(shared, later);
        }
        Ok(OpenOutcome::Ready(file)) if file.awaits_bytes > 0 => {
            leave.announced();
            onward.ask(shared, answer_open_later(caller.request, file, reply));
        }
        opened => {
            let opened = opened.map(|opened| (opened, leave));
            answer_opened(shared, &onward.fetching, (caller, node, flags), opened, reply);
        }
    }
}

fn answer_opened(
    shared: &Shared,
    fetching: &SyncSender<Job>,
    (caller, node, flags): (Caller, NodeId, i32),
    opened: Result<(OpenOutcome, Leave), FsError>,
    reply: ReplyOpen,
) {
    match opened {
        Ok((OpenOutcome::Ready(file), leave)) => {
            // Whoever opens it elsewhere from now on is to wait for what is written here.
            leave.announced();
            shared.namespace.wait_for_expected(&file);
            shared.answer_open(caller.request, &file, reply);
        }
        Ok((OpenOutcome::Unverified, _)) => {
            put(shared, fetching, Job::OpenUnverified { caller, node, flags, reply });
        }
        Ok((OpenOutcome::Cold(cold), _)) => {
            put(shared, fetching, Job::OpenCold { cold, caller, node, flags, reply });
        }
        Err(error) => shared.refuse_open(caller.request, error, reply),
    }
}

/// What came of a new size.
enum Resized {
    Done(Attr),
    /// The bytes have to be fetched first.
    Cold(ColdFile),
    /// The bytes have to be verified first.
    Unverified,
}

impl Resized {
    /// What is to be fetched before it is tried again; the size where it was set.
    fn done(self) -> Result<Attr, Option<ColdFile>> {
        match self {
            Self::Done(attr) => Ok(attr),
            Self::Cold(cold) => Err(Some(cold)),
            Self::Unverified => Err(None),
        }
    }
}

/// Whether a change keeps bytes that a file has. To empty it takes none of them, whatever they are.
fn keeps_bytes(change: &SetAttr) -> bool {
    change.size.is_some_and(|size_bytes| size_bytes > 0)
}

fn resize(
    shared: &Arc<Shared>,
    onward: &Onward,
    (caller, node, change): (Caller, NodeId, SetAttr),
    leave: Leave,
    reply: ReplyAttr,
) {
    let resized = shared.unless_departing(|| {
        shared.namespace.wait_for_departures();
        try_resize(shared, &caller, node, &change)
    });
    match resized {
        Err(FsError::NoSpace) => {
            let fetching = onward.fetching.clone();
            let later = Call::short_of_room(leave, move |shared, leave| {
                let again = || try_resize(shared, &caller, node, &change);
                let resized = leave.and_then(|leave| when_room(shared, leave, again));
                answer_resized(shared, &fetching, (caller, node, change), resized, reply);
            });
            onward.ask(shared, later);
        }
        resized => {
            let resized = resized.map(|resized| (resized, leave));
            answer_resized(shared, &onward.fetching, (caller, node, change), resized, reply);
        }
    }
}

/// Sets a size once. Where it is sent back to the names, the kernel has forgotten them by then.
fn try_resize(shared: &Shared, caller: &Caller, node: NodeId, change: &SetAttr) -> Result<Resized, FsError> {
    if keeps_bytes(change) && shared.namespace.is_unverified(node) {
        return Ok(Resized::Unverified);
    }
    match shared.namespace.setattr(caller, node, change) {
        Err(FsError::Busy) => shared.namespace.cold(node).map(Resized::Cold).ok_or(FsError::Busy),
        Err(FsError::Stale) => {
            shared.forget_names(node);
            Err(FsError::Stale)
        }
        changed => changed.map(Resized::Done),
    }
}

fn answer_resized(
    shared: &Shared,
    fetching: &SyncSender<Job>,
    (caller, node, change): (Caller, NodeId, SetAttr),
    resized: Result<(Resized, Leave), FsError>,
    reply: ReplyAttr,
) {
    match resized.map(|(resized, leave)| (resized.done(), leave)) {
        Ok((Ok(attr), _leave)) => shared.answer_attr(Ok(attr), reply),
        Ok((Err(cold), leave)) => {
            let wanted = leave.give_back();
            put(shared, fetching, Job::ResizeLater { cold, caller, node, change, wanted, reply });
        }
        Err(error) => shared.answer_attr(Err(error), reply),
    }
}

/// An open that may change bytes. Where it is sent back to the names, the kernel has forgotten them by then.
fn open_to_write(shared: &Shared, caller: &Caller, node: NodeId, flags: i32) -> Result<OpenOutcome, FsError> {
    let opened = shared.namespace.open(caller, node, flags);
    if matches!(opened, Err(FsError::Stale)) {
        shared.forget_names(node);
    }
    opened
}

/// An open whose bytes were brought in without leave, since that takes long: one that may change them has leave from here on, and is
/// told before it is answered. What was fetched may be old by then.
fn open_with_leave(
    shared: &Shared,
    caller: &Caller,
    node: NodeId,
    flags: i32,
) -> Result<OpenOutcome, FsError> {
    if flags & libc::O_ACCMODE == libc::O_RDONLY {
        let open = || shared.namespace.open(caller, node, flags);
        return when_room(shared, Leave::default(), open).map(|(opened, _leave)| opened);
    }
    shared.namespace.wait_for_departures();
    let leave = gate::enter(shared, Wanted::Write { node })?;
    let (opened, leave) = when_room(shared, leave, || open_to_write(shared, caller, node, flags))?;
    if let OpenOutcome::Ready(file) = &opened {
        leave.announced();
        shared.namespace.wait_for_expected(file);
    }
    Ok(opened)
}

/// Brings a file's bytes in. One that changed meanwhile is looked at again: it may be here, or its names lead elsewhere.
fn fetch(shared: &Shared, cold: ColdFile) -> Result<(), FsError> {
    match shared.host.fetch(cold) {
        Err(FsError::Stale) => Ok(()),
        fetched => fetched,
    }
}

fn fetch_and_open(
    shared: &Shared,
    mut cold: ColdFile,
    caller: &Caller,
    node: NodeId,
    flags: i32,
) -> Result<OpenFile, FsError> {
    for _ in 0..ATTEMPTS_MAX {
        fetch(shared, cold)?;
        match open_with_leave(shared, caller, node, flags)? {
            OpenOutcome::Ready(file) => return Ok(file),
            OpenOutcome::Cold(again) => cold = again,
            // Fetched by a daemon that died since.
            OpenOutcome::Unverified => return verify_and_open(shared, caller, node, flags),
        }
    }
    Err(reclaimed(node))
}

/// Bytes that lay in Tier-1 while no daemon looked after them are looked at before anybody gets to see them.
fn make_sure(shared: &Shared, node: NodeId) -> Result<(), FsError> {
    if shared.namespace.is_unverified(node) { shared.host.verify(node) } else { Ok(()) }
}

fn verify_and_open(shared: &Shared, caller: &Caller, node: NodeId, flags: i32) -> Result<OpenFile, FsError> {
    for _ in 0..ATTEMPTS_MAX {
        make_sure(shared, node)?;
        match open_with_leave(shared, caller, node, flags)? {
            OpenOutcome::Ready(file) => return Ok(file),
            OpenOutcome::Unverified => {}
            OpenOutcome::Cold(cold) => fetch(shared, cold)?,
        }
    }
    Err(reclaimed(node))
}

/// The bytes are brought in and verified without leave, as those of an open are.
fn fetch_and_resize(
    shared: &Shared,
    mut cold: Option<ColdFile>,
    mut wanted: Option<Wanted>,
    caller: &Caller,
    node: NodeId,
    change: &SetAttr,
) -> Result<Attr, FsError> {
    for _ in 0..ATTEMPTS_MAX {
        cold.map_or(Ok(()), |cold| fetch(shared, cold))?;
        make_sure(shared, node)?;
        let leave = gate::enter_again(shared, wanted)?;
        let (resized, leave) = when_room(shared, leave, || try_resize(shared, caller, node, change))?;
        match resized.done() {
            Ok(attr) => return Ok(attr),
            Err(again) => (cold, wanted) = (again, leave.give_back()),
        }
    }
    Err(reclaimed(node))
}

fn reclaimed(node: NodeId) -> FsError {
    tracing::warn!(node, attempts = ATTEMPTS_MAX, "a file was reclaimed again each time it was restored");
    FsError::NoSpace
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_size_that_keeps_bytes_needs_them_verified() {
        let size = |size| SetAttr { size, ..SetAttr::default() };
        assert!(keeps_bytes(&size(Some(1))));
        assert!(!keeps_bytes(&size(Some(0))));
        assert!(!keeps_bytes(&size(None)));
        assert_eq!(Resized::Unverified.done().err(), Some(None), "it is verified, and not fetched");
    }
}
