//! Opens and resizes that may take long, kept off the threads that answer requests.
//!
//! Owns: the worker threads and the calls that wait for them. Does not own: fetching ([`Host`]), the result of an open (the namespace).
//!
//! Three kinds of calls take long. If a file's bytes are elsewhere, they must be fetched first. An open for writing or a resize may have to
//! copy frozen bytes. Or it waits for another program's last close, whose RELEASE must then find a free thread. A call without room waits,
//! up to a limit, for memory that is being freed. In each case the reply object moves to a worker and is answered there. Fetches have
//! threads of their own, so that a slow tier does not hold up programs that write. So have calls that ask other nodes or wait for room
//! (`room`). Threads and queues are bounded; a call that does not fit is refused with EAGAIN rather than left waiting for ever.
//!
//! A call keeps its leave while it changes bytes, not while it waits for bytes or for memory.
//!
//! [`Host`]: crate::Host

use crate::convert::answer_bytes;
use crate::errno::errno;
use crate::gate::{self, Call};
use crate::named::Place;
use crate::room::{answer_open_later, when_room};
use crate::shared::Shared;
use fuser::{Errno, ReplyAttr, ReplyEntry, ReplyOpen, ReplyXattr};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use tidemark_engine::cluster::{Leave, Wanted};
use tidemark_namespace::{Attr, Caller, ColdFile, FsError, NodeId, OpenFile, OpenOutcome, SetAttr};

/// Files that are fetched at once. Each fetch is parallel in itself; this is for many small files.
const FETCH_THREADS: usize = 16;

/// Opens for writing and resizes at once: as many as a node has ranks, so that they do not wait for each other.
const CHANGE_THREADS: usize = 8;

/// Threads for calls that wait for other nodes' answers about names, or for room: as many as a node has ranks and data loaders at a moment.
const ASK_THREADS: usize = 16;

/// The same including threads that are added when all wait, and then stay. While there is no coordinator, each look-up of a missing name
/// holds a thread for up to 20 s, and a save continues beside them: 8 ranks with 32 data loaders each. A sleeping thread takes some tens of
/// KiB.
const ASK_THREADS_MAX: usize = 256;

/// Stack of these threads. Changing and sending names takes little; copied bytes lie elsewhere. Below 2 MiB no huge page lies under a
/// stack.
const ASK_STACK_BYTES: usize = 1 << 20;

/// The most jobs that wait for a thread, for each of the queues. More than a node has data loaders.
const QUEUE_MAX: usize = 4096;

/// The most attempts of an open. If a file is fetched and reclaimed again before its open is finished, this often, memory is too small for
/// the open.
const ATTEMPTS_MAX: u32 = 4;

/// A job that waits for a worker, with its pending reply.
#[derive(Debug)]
pub(crate) enum Job {
    /// A look-up before which a worker has to move the names of a file to a new node.
    LookupAnew { caller: Caller, place: Place, reply: ReplyEntry },
    /// An open that may change bytes.
    Open { caller: Caller, node: NodeId, flags: i32, leave: Leave, reply: ReplyOpen },
    /// An open whose bytes must be fetched.
    OpenCold { cold: ColdFile, caller: Caller, node: NodeId, flags: i32, reply: ReplyOpen },
    /// An open whose bytes must be verified.
    OpenUnverified { caller: Caller, node: NodeId, flags: i32, reply: ReplyOpen },
    /// A setattr that sets a size.
    Resize { caller: Caller, node: NodeId, change: SetAttr, leave: Leave, reply: ReplyAttr },
    /// A computed attribute: its provider may be busy, and may itself wait for a request to be answered.
    GetXattr { node: NodeId, name: Vec<u8>, size: u32, reply: ReplyXattr },
    /// A call on names that other nodes have to be asked about, or one without room.
    Names(Call, Counted),
    /// A setattr that sets a size, of a file whose bytes must be fetched or verified.
    ResizeLater {
        /// `None` if the bytes are here, but unverified.
        cold: Option<ColdFile>,
        caller: Caller,
        node: NodeId,
        change: SetAttr,
        /// The leave to get once the bytes are here.
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

/// The queues to which the threads that change bytes pass calls that take longer than they may.
#[derive(Debug, Clone)]
struct Onward {
    fetching: SyncSender<Job>,
    asking: Askers,
}

/// The threads that ask other nodes, and wait for room. Nearly always all of them only wait, so that another is started where a call
/// finds none free.
#[derive(Debug, Clone)]
struct Askers {
    queue: SyncSender<Job>,
    waiting: Arc<Mutex<Receiver<Job>>>,
    /// Calls that were queued and have not ended.
    calls: Arc<AtomicUsize>,
    threads: Arc<AtomicUsize>,
}

/// Counts a call; dropping it ends the count.
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

    /// Counts a call that is about to be queued, and starts a thread for it if all threads are busy.
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

/// Starts the threads of one queue. `onward`: for the threads that change bytes; the others pass no calls on.
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
        Job::GetXattr { node, name, size, reply } => match shared.namespace.xattrs().getxattr(node, &name) {
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

/// Carries out an open that may change bytes.
fn open(
    shared: &Arc<Shared>,
    onward: &Onward,
    (caller, node, flags): (Caller, NodeId, i32),
    leave: Leave,
    reply: ReplyOpen,
) {
    let opened = shared.unless_departing(|| {
        shared.namespace.room().wait_for_departures();
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
            // If another node opens the file from now on, that node must wait for the bytes that are written here.
            leave.announced();
            shared.namespace.room().wait_for_expected(&file);
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

/// The outcome of setting a size.
enum Resized {
    Done(Attr),
    /// The bytes have to be fetched first.
    Cold(ColdFile),
    /// The bytes have to be verified first.
    Unverified,
}

impl Resized {
    /// Returns the attributes if the size was set; otherwise the file to fetch before the next try, or `None` where its bytes must be
    /// verified.
    fn done(self) -> Result<Attr, Option<ColdFile>> {
        match self {
            Self::Done(attr) => Ok(attr),
            Self::Cold(cold) => Err(Some(cold)),
            Self::Unverified => Err(None),
        }
    }
}

/// Returns whether a change keeps some of a file's bytes. Emptying a file keeps none, so their state does not matter.
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
        shared.namespace.room().wait_for_departures();
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

/// Sets a size once. If the namespace sends the kernel back to the names, the kernel has forgotten them when this returns.
fn try_resize(shared: &Shared, caller: &Caller, node: NodeId, change: &SetAttr) -> Result<Resized, FsError> {
    if keeps_bytes(change) && shared.namespace.seals().is_unverified(node) {
        return Ok(Resized::Unverified);
    }
    match shared.namespace.setattr(caller, node, change) {
        Err(FsError::Busy) => shared.namespace.hosts().cold(node).map(Resized::Cold).ok_or(FsError::Busy),
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

/// Opens a file whose bytes the caller may change. If the namespace sends the kernel back to the names, the kernel has forgotten them when
/// this returns.
fn open_to_write(shared: &Shared, caller: &Caller, node: NodeId, flags: i32) -> Result<OpenOutcome, FsError> {
    let opened = shared.namespace.open(caller, node, flags);
    if matches!(opened, Err(FsError::Stale)) {
        shared.forget_names(node);
    }
    opened
}

/// Opens a file whose bytes were fetched without leave, since that takes long. If the open may change bytes, gets leave first, and
/// announces the open to other nodes before it is answered. The fetched bytes may be old by then.
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
    shared.namespace.room().wait_for_departures();
    let leave = gate::enter(shared, Wanted::Write { node })?;
    let (opened, leave) = when_room(shared, leave, || open_to_write(shared, caller, node, flags))?;
    if let OpenOutcome::Ready(file) = &opened {
        leave.announced();
        shared.namespace.room().wait_for_expected(file);
    }
    Ok(opened)
}

/// Fetches the bytes of a file. If the file changed meanwhile, the caller opens it again: the file may be here, or its names lead
/// elsewhere.
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

/// Verifies bytes that lay in Tier-1 while no daemon ran, before any program reads them.
fn make_sure(shared: &Shared, node: NodeId) -> Result<(), FsError> {
    if shared.namespace.seals().is_unverified(node) { shared.host.verify(node) } else { Ok(()) }
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

/// Fetches and verifies the bytes without leave, as for an open, and then sets the size.
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
