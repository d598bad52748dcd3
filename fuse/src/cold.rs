//! Opens and resizes that may take long, kept off the threads that answer requests.
//!
//! Owns: the worker threads and what waits for them. Does not own: fetching ([`Host`]), what an open gives
//! (the namespace).
//!
//! Three things take long. A file whose bytes are elsewhere must be fetched first. An open for writing or a
//! resize may have to copy frozen bytes, or wait for another program's last close, whose RELEASE must then
//! find a free thread. And what finds no room waits, bounded, for memory that is on its way back. In each case
//! the reply object moves to a worker and is answered there. Fetches have threads of their own, so that a slow
//! tier does not hold up programs that write, and so have calls that ask other nodes. Threads and queues are bounded;
//! what does not fit is refused with EAGAIN rather than left waiting for ever.
//!
//! [`Host`]: crate::Host

use crate::convert::answer_bytes;
use crate::errno::errno;
use crate::gate::{self, Call, Leave, Wanted};
use crate::named::Place;
use crate::shared::Shared;
use fuser::{Errno, ReplyAttr, ReplyCreate, ReplyEntry, ReplyOpen, ReplyXattr};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use tidemark_engine::namespace::{Attr, Caller, ColdFile, FsError, NodeId, OpenFile, OpenOutcome, SetAttr};

/// Files that are fetched at once. Each fetch is parallel in itself; this is for many small files.
const FETCH_THREADS: usize = 16;

/// Opens for writing, resizes and creates without room at once: as many as a node has ranks, so that they do not
/// wait for each other.
const CHANGE_THREADS: usize = 8;

/// Calls that wait for what other nodes say of names: as many as a node has ranks and data loaders at a moment.
const ASK_THREADS: usize = 16;

/// The same with those that are added where all wait, and stay. While nobody coordinates each look-up of what is not there holds a thread for up
/// to 20 s, and a save goes on beside them: 8 ranks with 32 data loaders each. One that sleeps takes some tens of KiB.
const ASK_THREADS_MAX: usize = 256;

/// They change and send names, which takes little. Below 2 MiB no huge page lies under a stack.
const ASK_STACK_BYTES: usize = 1 << 20;

/// What waits for a thread, for each of the two. More than a node has data loaders.
const QUEUE_MAX: usize = 4096;

/// A file fetched and reclaimed again before its open was finished, this often, means that memory is too
/// small for what is being opened.
const ATTEMPTS_MAX: u32 = 4;

/// Something that waits for a worker, with the reply it owes.
#[derive(Debug)]
pub(crate) enum Job {
    /// A create that found no room.
    Create {
        caller: Caller,
        parent: NodeId,
        name: Vec<u8>,
        mode: u32,
        flags: i32,
        leave: Leave,
        reply: ReplyCreate,
    },
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
    /// A call on names that other nodes have to be asked about.
    Names(Call, Counted),
    /// A setattr that sets a size, of a file whose bytes must be fetched.
    ResizeCold {
        cold: ColdFile,
        caller: Caller,
        node: NodeId,
        change: SetAttr,
        leave: Leave,
        reply: ReplyAttr,
    },
}

/// The queues to the workers. The threads end when it is dropped.
#[derive(Debug, Clone)]
pub(crate) struct Workers {
    fetching: SyncSender<Job>,
    changing: SyncSender<Job>,
    asking: Askers,
    shared: Arc<Shared>,
}

/// The threads that ask other nodes. They nearly always only wait, so that one more is made where a call finds none.
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

impl Workers {
    pub(crate) fn start(shared: &Arc<Shared>) -> io::Result<Self> {
        let fetching = start(FETCH_THREADS, "mount-fetch", shared, None)?;
        let changing = start(CHANGE_THREADS, "mount-change", shared, Some(&fetching))?;
        let asking = Askers::start(shared)?;
        Ok(Self { fetching, changing, asking, shared: Arc::clone(shared) })
    }

    /// Hands the job to a worker. Never blocks.
    pub(crate) fn submit(&self, job: Job) {
        let queue = match &job {
            Job::Create { .. }
            | Job::LookupAnew { .. }
            | Job::Open { .. }
            | Job::Resize { .. }
            | Job::GetXattr { .. } => &self.changing,
            Job::Names(..) => &self.asking.queue,
            Job::OpenCold { .. } | Job::OpenUnverified { .. } | Job::ResizeCold { .. } => &self.fetching,
        };
        put(&self.shared, queue, job);
    }

    /// Hands a call on names to a thread that may wait for other nodes. Never blocks.
    pub(crate) fn ask(&self, call: Call) {
        let counted = self.asking.count(&self.shared);
        self.submit(Job::Names(call, counted));
    }
}

fn put(shared: &Shared, queue: &SyncSender<Job>, job: Job) {
    if let Err(TrySendError::Full(job) | TrySendError::Disconnected(job)) = queue.try_send(job) {
        tracing::warn!(waiting = QUEUE_MAX, "too many opens wait for a worker; one is refused");
        match job {
            Job::Create { reply, .. } => reply.error(Errno::EAGAIN),
            Job::LookupAnew { reply, .. } => reply.error(Errno::EAGAIN),
            Job::Open { reply, .. } | Job::OpenCold { reply, .. } | Job::OpenUnverified { reply, .. } => {
                reply.error(Errno::EAGAIN);
            }
            Job::Resize { reply, .. } | Job::ResizeCold { reply, .. } => reply.error(Errno::EAGAIN),
            Job::GetXattr { reply, .. } => reply.error(Errno::EAGAIN),
            Job::Names(call, _) => call.refuse(shared),
        }
    }
}

/// `cold`: where to put what turns out to need a fetch; the workers that fetch need none.
fn start(
    threads: usize,
    name: &str,
    shared: &Arc<Shared>,
    cold: Option<&SyncSender<Job>>,
) -> io::Result<SyncSender<Job>> {
    let (queue, waiting) = sync_channel(QUEUE_MAX);
    let waiting = Arc::new(Mutex::new(waiting));
    for number in 0..threads {
        let (shared, waiting, cold) = (Arc::clone(shared), Arc::clone(&waiting), cold.cloned());
        std::thread::Builder::new()
            .name(format!("{name}-{number}"))
            .spawn(move || serve(&shared, &waiting, cold.as_ref()))?;
    }
    Ok(queue)
}

fn serve(shared: &Shared, waiting: &Mutex<Receiver<Job>>, cold: Option<&SyncSender<Job>>) {
    loop {
        // The lock is held while waiting for the next job, not while doing it.
        let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(job) = next else { return };
        do_job(shared, job, cold);
    }
}

fn do_job(shared: &Shared, job: Job, cold_queue: Option<&SyncSender<Job>>) {
    match job {
        Job::Create { caller, parent, name, mode, flags, leave: _leave, reply } => {
            shared.namespace.wait_for_departures();
            shared.answer_create(
                caller.request,
                when_room(shared, || shared.namespace.create(&caller, parent, &name, mode, flags)),
                reply,
            );
        }
        Job::LookupAnew { caller, place: (parent, name), reply } => {
            let found = when_room(shared, || shared.namespace.lookup_anew(&caller, parent, &name));
            shared.answer_entry(0, found, reply);
        }
        Job::Open { caller, node, flags, leave, reply } => {
            match open_to_write(shared, &caller, node, flags) {
                Ok(OpenOutcome::Ready(file)) => {
                    // Whoever opens it elsewhere from now on is to wait for what is written here.
                    leave.announced();
                    shared.answer_open(caller.request, &file, reply);
                }
                Ok(OpenOutcome::Unverified) => {
                    let queue = cold_queue.expect("only the fetching workers have no queue to pass on to");
                    put(shared, queue, Job::OpenUnverified { caller, node, flags, reply });
                }
                Ok(OpenOutcome::Cold(cold)) => {
                    let queue = cold_queue.expect("only the fetching workers have no queue to pass on to");
                    put(shared, queue, Job::OpenCold { cold, caller, node, flags, reply });
                }
                Err(error) => shared.refuse_open(caller.request, error, reply),
            }
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
            shared.namespace.wait_for_departures();
            let changed = make_sure(shared, node)
                .and_then(|()| when_room(shared, || shared.namespace.setattr(&caller, node, &change)));
            if matches!(changed, Err(FsError::Stale)) {
                shared.forget_names(node);
            }
            match (changed, cold_queue) {
                (Err(FsError::Busy), Some(queue)) => match shared.namespace.cold(node) {
                    Some(cold) => {
                        put(shared, queue, Job::ResizeCold { cold, caller, node, change, leave, reply });
                    }
                    None => reply.error(errno(FsError::Busy)),
                },
                (result, _) => shared.answer_attr(result, reply),
            }
        }
        Job::GetXattr { node, name, size, reply } => match shared.namespace.getxattr(node, &name) {
            Ok(value) => answer_bytes(&value, size, reply),
            Err(error) => reply.error(errno(error)),
        },
        Job::Names(call, _counted) => call.go(shared),
        Job::ResizeCold { cold, caller, node, change, leave: _leave, reply } => {
            shared.answer_attr(fetch_and_resize(shared, cold, &caller, node, &change), reply);
        }
    }
}

/// Makes a call again while it finds no room and room may still come: see `RoomWait`.
fn when_room<R>(shared: &Shared, call: impl Fn() -> Result<R, FsError>) -> Result<R, FsError> {
    let mut wait = shared.namespace.room_wait();
    loop {
        match call() {
            Err(FsError::NoSpace) if wait.again() => {}
            result => return result,
        }
    }
}

fn open_when_room(
    shared: &Shared,
    caller: &Caller,
    node: NodeId,
    flags: i32,
) -> Result<OpenOutcome, FsError> {
    when_room(shared, || shared.namespace.open(caller, node, flags))
}

/// An open that may change bytes. Where it is sent back to the names, the kernel has forgotten them by then.
fn open_to_write(shared: &Shared, caller: &Caller, node: NodeId, flags: i32) -> Result<OpenOutcome, FsError> {
    shared.namespace.wait_for_departures();
    let opened = open_when_room(shared, caller, node, flags);
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
        return open_when_room(shared, caller, node, flags);
    }
    let leave = gate::enter(shared, &Wanted::Write { node })?;
    let opened = open_to_write(shared, caller, node, flags)?;
    if matches!(opened, OpenOutcome::Ready(_)) {
        leave.announced();
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

fn fetch_and_resize(
    shared: &Shared,
    mut cold: ColdFile,
    caller: &Caller,
    node: NodeId,
    change: &SetAttr,
) -> Result<Attr, FsError> {
    for _ in 0..ATTEMPTS_MAX {
        fetch(shared, cold)?;
        match when_room(shared, || shared.namespace.setattr(caller, node, change)) {
            Err(FsError::Busy) => match shared.namespace.cold(node) {
                Some(again) => cold = again,
                None => return Err(FsError::Busy),
            },
            result => return result,
        }
    }
    Err(reclaimed(node))
}

fn reclaimed(node: NodeId) -> FsError {
    tracing::warn!(node, attempts = ATTEMPTS_MAX, "a file was reclaimed again each time it was restored");
    FsError::NoSpace
}
