//! A cluster and all that surrounds it.
//!
//! Owns: the machines with what outlives a daemon and what dies with a node, time, the log, the counts. Does not own: a node's
//! behaviour (`node`), its faults (`faults`), the promises (`invariants`).

use super::exec::{Exec, Owner, Sleep};
use super::invariants::Truth;
use super::memory::Memory;
use super::network::Network;
use super::node::{Node, Seat};
use super::rng::Rng;
use super::store::{LeaseService, Store};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::id::{Incarnation, NodeName, StartId};

/// Log lines kept for the examination of a failure.
const LOG_LINES: usize = 400;
/// Log lines kept when a single seed is run.
const LOG_LINES_OF_ONE: usize = 200_000;

/// Start of all wall clocks, before each gets its error. Far from 0, so that a clock may be hours behind.
const WALL_NS: i64 = 1_700_000_000_000_000_000;

/// A machine: the state that exists while no daemon runs.
pub(crate) struct Machine {
    pub(crate) name: NodeName,
    /// Error of the machine's wall clock.
    pub(crate) skew_ns: Cell<i64>,
    /// Tier-1 and the journal. Lost with the node, kept when only the daemon dies.
    pub(crate) memory: RefCell<Option<Rc<Memory>>>,
    pub(crate) daemon: RefCell<Option<Rc<Node>>>,
}

pub(crate) struct World {
    pub(crate) seed: u64,
    pub(crate) exec: Rc<Exec>,
    pub(crate) rng: Rng,
    pub(crate) network: Network,
    pub(crate) store: Store,
    pub(crate) lease: LeaseService,
    pub(crate) machines: Vec<Machine>,
    pub(crate) truth: RefCell<Truth>,
    pub(crate) tally: RefCell<BTreeMap<&'static str, u64>>,
    /// Whether faults have ended, and the cluster must come together.
    pub(crate) calm: Cell<bool>,
    log: RefCell<VecDeque<String>>,
    log_lines: Cell<usize>,
}

impl World {
    pub(crate) fn new(seed: u64, nodes: usize) -> Rc<Self> {
        let machine = |index: usize| Machine {
            name: format!("n{index}").parse().expect("it is a name"),
            skew_ns: Cell::new(0),
            memory: RefCell::new(None),
            daemon: RefCell::new(None),
        };
        Rc::new(Self {
            seed,
            exec: Rc::new(Exec::new()),
            rng: Rng::new(seed),
            network: Network::new(),
            store: Store::default(),
            lease: LeaseService::default(),
            machines: (0..nodes).map(machine).collect(),
            truth: RefCell::default(),
            tally: RefCell::default(),
            calm: Cell::new(false),
            log: RefCell::default(),
            log_lines: Cell::new(LOG_LINES),
        })
    }

    pub(crate) fn now(&self) -> Duration {
        self.exec.now()
    }

    pub(crate) fn now_ms(&self) -> u64 {
        u64::try_from(self.now().as_millis()).expect("no world lasts that long")
    }

    /// Returns the wall-clock time of a machine.
    pub(crate) fn wall_ns(&self, machine: usize) -> i64 {
        let since = i64::try_from(self.now().as_nanos()).expect("no world lasts that long");
        WALL_NS + since + self.machines[machine].skew_ns.get()
    }

    pub(crate) fn sleep(&self, how_long: Duration) -> Sleep {
        self.exec.sleep_until(self.now() + how_long)
    }

    pub(crate) fn spawn(&self, owner: Owner, work: impl Future<Output = ()> + 'static) {
        self.exec.spawn(owner, work);
    }

    pub(crate) fn daemon(&self, machine: usize) -> Option<Rc<Node>> {
        self.machines.get(machine)?.daemon.borrow().clone()
    }

    pub(crate) fn daemons(&self) -> Vec<Rc<Node>> {
        self.machines.iter().filter_map(|machine| machine.daemon.borrow().clone()).collect()
    }

    pub(crate) fn index_of(&self, name: &NodeName) -> Option<usize> {
        self.machines.iter().position(|machine| machine.name == *name)
    }

    /// Returns the machine whose memory has this life now.
    pub(crate) fn machine_of(&self, life: Incarnation) -> Option<usize> {
        self.machines.iter().position(|machine| {
            machine.memory.borrow().as_ref().is_some_and(|memory| memory.life.incarnation == life)
        })
    }

    /// Starts a daemon on the machine's memory, or on an empty one if there is none.
    pub(crate) fn start(self: &Rc<Self>, machine: usize) {
        let at = &self.machines[machine];
        assert!(at.daemon.borrow().is_none(), "one daemon to a machine");
        let memory = at
            .memory
            .borrow_mut()
            .get_or_insert_with(|| Rc::new(Memory::new(at.name.clone(), Incarnation(self.rng.next()))))
            .clone();
        memory.taken_up();
        self.truth.borrow_mut().lives(&memory);
        self.note(|| format!("{} starts, memory {:016x}", at.name, memory.life.incarnation.0));
        let node = Node::new(self, machine, memory, StartId(self.rng.next()));
        *at.daemon.borrow_mut() = Some(Rc::clone(&node));
        node.begin();
    }

    /// Kills only the daemon. The machine's memory stays, and the writing processes go on.
    pub(crate) fn kill_daemon(&self, machine: usize) {
        self.exec.resume(machine);
        self.exec.kill(machine);
        let daemon = self.machines[machine].daemon.borrow_mut().take();
        if let Some(daemon) = daemon {
            // Breaks the cycle: the daemon and its coordinator hold each other.
            *daemon.seat.borrow_mut() = Seat::Unknown;
            self.note(|| format!("{}'s daemon dies", self.machines[machine].name));
        }
    }

    /// Takes the machine's power away: kills the daemon and loses the memory.
    pub(crate) fn power_off(&self, machine: usize) {
        self.kill_daemon(machine);
        if let Some(memory) = self.machines[machine].memory.borrow_mut().take() {
            self.note(|| format!("{} is lost with its memory", self.machines[machine].name));
            self.truth.borrow_mut().lost(&memory, self.now());
        }
    }

    /// Ends all daemons and tasks, because daemons and the world hold each other.
    pub(crate) fn end(&self) {
        (0..self.machines.len()).for_each(|machine| self.kill_daemon(machine));
        self.exec.end();
    }

    pub(crate) fn count(&self, what: &'static str) {
        *self.tally.borrow_mut().entry(what).or_insert(0) += 1;
    }

    pub(crate) fn note(&self, line: impl FnOnce() -> String) {
        let mut log = self.log.borrow_mut();
        if log.len() >= self.log_lines.get() {
            log.pop_front();
        }
        log.push_back(format!("{:>12.6} {}", self.now().as_secs_f64(), line()));
    }

    /// Keeps the log of a whole run.
    pub(crate) fn remember_all(&self) {
        self.log_lines.set(LOG_LINES_OF_ONE);
    }

    /// Returns the log.
    pub(crate) fn told(&self) -> String {
        let log = self.log.borrow();
        log.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
    }

    /// Panics with the promise that was broken, and how.
    pub(crate) fn broken(&self, promise: &str, what: &str) -> ! {
        panic!("broken at {:.6} s: {promise}\n  {what}", self.now().as_secs_f64());
    }
}

/// Returns a path as text.
pub(crate) fn show(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}
