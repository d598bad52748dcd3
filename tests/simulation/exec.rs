//! Tasks on one thread, and a simulated clock.
//!
//! Owns: the choice of the next task (by the seed), time, and the tasks of a node that dies or stands still. Does not
//! own: the work of the tasks.
//!
//! Time moves only when no task can go on. Then it jumps to the next moment that a task waits for.

use super::rng::Rng;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

type Work = Pin<Box<dyn Future<Output = ()>>>;

/// Most tasks at a time, far more than a cluster of nine needs. More mean that something spawns without end.
pub(crate) const TASKS_MAX: usize = 20_000;

/// Owner of a task. The world's tasks, for example a request in flight, go on when a node dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Owner {
    World,
    Node(usize),
}

struct Task {
    owner: Owner,
    work: Option<Work>,
    waker: Waker,
}

/// Waker that puts its task among those that can go on.
struct Wakes {
    task: u64,
    queued: AtomicBool,
    ready: Arc<Mutex<Vec<u64>>>,
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        if !self.queued.swap(true, Ordering::Relaxed) {
            self.ready.lock().unwrap_or_else(PoisonError::into_inner).push(self.task);
        }
    }
}

/// All tasks of one world.
pub(crate) struct Exec {
    now: Cell<Duration>,
    tasks: RefCell<BTreeMap<u64, (Task, Arc<Wakes>)>>,
    ready: Arc<Mutex<Vec<u64>>>,
    parked: RefCell<BTreeMap<usize, Vec<u64>>>,
    paused: RefCell<BTreeSet<usize>>,
    timers: RefCell<BTreeMap<(Duration, u64), Waker>>,
    next: Cell<u64>,
    pub(crate) polls: Cell<u64>,
}

impl std::fmt::Debug for Exec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exec").field("now", &self.now).finish_non_exhaustive()
    }
}

impl Exec {
    pub(crate) fn new() -> Self {
        Self {
            now: Cell::new(Duration::ZERO),
            tasks: RefCell::default(),
            ready: Arc::default(),
            parked: RefCell::default(),
            paused: RefCell::default(),
            timers: RefCell::default(),
            next: Cell::new(0),
            polls: Cell::new(0),
        }
    }

    /// Returns the time since the world began, which is every node's monotonic clock. Their wall clocks differ.
    pub(crate) fn now(&self) -> Duration {
        self.now.get()
    }

    fn number(&self) -> u64 {
        self.next.set(self.next.get() + 1);
        self.next.get()
    }

    pub(crate) fn spawn(&self, owner: Owner, work: impl Future<Output = ()> + 'static) {
        let id = self.number();
        let wakes =
            Arc::new(Wakes { task: id, queued: AtomicBool::new(false), ready: Arc::clone(&self.ready) });
        let waker = Waker::from(Arc::clone(&wakes));
        waker.wake_by_ref();
        let task = Task { owner, work: Some(Box::pin(work)), waker };
        let mut tasks = self.tasks.borrow_mut();
        tasks.insert(id, (task, wakes));
        assert!(tasks.len() <= TASKS_MAX, "{} tasks at once: something makes them without end", tasks.len());
    }

    /// Ends all tasks of a node.
    pub(crate) fn kill(&self, node: usize) {
        let mut tasks = self.tasks.borrow_mut();
        let ids: Vec<u64> = tasks
            .iter()
            .filter(|(_, (task, _))| task.owner == Owner::Node(node))
            .map(|(id, _)| *id)
            .collect();
        let dead: Vec<_> = ids.iter().filter_map(|id| tasks.remove(id)).collect();
        drop(tasks);
        self.parked.borrow_mut().remove(&node);
        // Dropping the dead tasks may wake other tasks.
        drop(dead);
    }

    /// Ends all tasks and timers, so that their references to the world are dropped.
    pub(crate) fn end(&self) {
        let all = std::mem::take(&mut *self.tasks.borrow_mut());
        let timers = std::mem::take(&mut *self.timers.borrow_mut());
        drop((all, timers));
    }

    /// Stops all tasks of a node, but keeps them and its memory.
    pub(crate) fn pause(&self, node: usize) {
        self.paused.borrow_mut().insert(node);
    }

    pub(crate) fn resume(&self, node: usize) {
        self.paused.borrow_mut().remove(&node);
        let parked = self.parked.borrow_mut().remove(&node).unwrap_or_default();
        self.ready.lock().unwrap_or_else(PoisonError::into_inner).extend(parked);
    }

    /// Runs a ready task, or else lets time pass. Returns false if neither is possible before `until`.
    pub(crate) fn step(&self, rng: &Rng, until: Duration) -> bool {
        let chosen = {
            let mut ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner);
            let count = ready.len();
            (count > 0).then(|| ready.swap_remove(rng.below_usize(count)))
        };
        match chosen {
            Some(id) => {
                self.poll(id);
                true
            }
            None => self.pass(until),
        }
    }

    fn poll(&self, id: u64) {
        let (mut work, waker) = {
            let mut tasks = self.tasks.borrow_mut();
            let Some((task, wakes)) = tasks.get_mut(&id) else { return };
            if let Owner::Node(node) = task.owner
                && self.paused.borrow().contains(&node)
            {
                self.parked.borrow_mut().entry(node).or_default().push(id);
                return;
            }
            wakes.queued.store(false, Ordering::Relaxed);
            let Some(work) = task.work.take() else { return };
            (work, task.waker.clone())
        };
        self.polls.set(self.polls.get() + 1);
        match work.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(()) => {
                self.tasks.borrow_mut().remove(&id);
            }
            Poll::Pending => {
                if let Some((task, _)) = self.tasks.borrow_mut().get_mut(&id) {
                    task.work = Some(work);
                }
            }
        }
    }

    fn pass(&self, until: Duration) -> bool {
        let Some((at, waker)) = self.timers.borrow_mut().pop_first() else { return false };
        if at.0 > until {
            self.timers.borrow_mut().insert(at, waker);
            self.now.set(until);
            return false;
        }
        self.now.set(at.0.max(self.now.get()));
        waker.wake();
        true
    }

    pub(crate) fn sleep_until(self: &Rc<Self>, at: Duration) -> Sleep {
        Sleep { exec: Rc::clone(self), at, set: None }
    }
}

/// Future that resolves at a moment.
pub(crate) struct Sleep {
    exec: Rc<Exec>,
    at: Duration,
    set: Option<(Duration, u64)>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.exec.now() >= self.at {
            return Poll::Ready(());
        }
        if self.set.is_none() {
            let key = (self.at, self.exec.number());
            self.exec.timers.borrow_mut().insert(key, context.waker().clone());
            self.set = Some(key);
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(key) = self.set {
            self.exec.timers.borrow_mut().remove(&key);
        }
    }
}

/// Runs `work` for at most `most`. Returns `None` if the time ends first.
pub(crate) async fn within<T>(exec: &Rc<Exec>, most: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut sleep = exec.sleep_until(exec.now() + most);
    let mut work = std::pin::pin!(work);
    std::future::poll_fn(move |context| {
        if let Poll::Ready(done) = work.as_mut().poll(context) {
            return Poll::Ready(Some(done));
        }
        Pin::new(&mut sleep).poll(context).map(|()| None)
    })
    .await
}

/// Signal that wakes all tasks that wait for a change.
#[derive(Debug, Default)]
pub(crate) struct Signal(RefCell<Vec<Waker>>);

impl Signal {
    pub(crate) fn tell(&self) {
        for waker in std::mem::take(&mut *self.0.borrow_mut()) {
            waker.wake();
        }
    }

    /// Waits until `is_so` returns a value; checks it at each [`Signal::tell`].
    pub(crate) async fn until<T>(&self, mut is_so: impl FnMut() -> Option<T>) -> T {
        std::future::poll_fn(|context| match is_so() {
            Some(value) => Poll::Ready(value),
            None => {
                self.0.borrow_mut().push(context.waker().clone());
                Poll::Pending
            }
        })
        .await
    }
}

/// A lock that one task holds at a time.
#[derive(Debug, Default)]
pub(crate) struct Turn {
    taken: Cell<bool>,
    left: Signal,
}

/// Guard that holds the lock until dropped.
#[derive(Debug)]
pub(crate) struct Held<'a>(&'a Turn);

impl Turn {
    pub(crate) async fn take(&self) -> Held<'_> {
        self.left.until(|| (!self.taken.replace(true)).then_some(())).await;
        Held(self)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.taken.set(false);
        self.0.left.tell();
    }
}
