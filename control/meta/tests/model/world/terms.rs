//! The possible events of a scenario.
//!
//! Owns: calls of clients, troubles, actions and bounds as values. Does not own: their effects.

use tidemark_meta::rules::Rules;

/// A client's call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Op {
    Delegate(Dir),
    Create(At),
    Mkdir(At),
    Unlink(At),
    Rmdir(At),
    Rename(At, At),
    Exchange(At, At),
    Link(At, At),
    Open(At),
    Truncate(At),
    Chmod(At),
    /// Closes the file that is open for writing, with new bytes.
    Close,
    /// Creates, opens and closes in one go.
    Write(At),
    Look(At),
}

/// A directory of the scenario: the root, or the directory of that name, wherever it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Dir {
    Root,
    In(&'static str),
}

/// A name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct At(pub(crate) Dir, pub(crate) &'static str);

/// A fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Trouble {
    Cut,
    PowerOff,
    Lose,
    Repeat,
    AnswerLost,
    Delayed,
    Replace,
}

/// A step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    Client(usize, Op),
    Send(usize),
    Again(usize),
    Deliver(usize),
    DeliverWith(usize, Trouble),
    Node(usize, Trouble),
    Heal(usize),
    Verdict(usize),
    ComeBack(usize),
    Replace,
    Release,
    Ask,
    Wait,
    Sweep,
}

/// The scenario's bounds; the same in all states.
#[derive(Debug, Clone)]
pub(crate) struct Bounds {
    pub(crate) nodes: usize,
    pub(crate) operations: u8,
    pub(crate) faults: u8,
    pub(crate) ops: Vec<Op>,
    pub(crate) troubles: Vec<Trouble>,
    /// Calls that are done, and come to rest, before the search begins.
    pub(crate) prelude: Vec<(usize, Op)>,
    /// The actions at the beginning of the search.
    pub(crate) beginning: Vec<Action>,
    /// Clients on a node that may wait at a time.
    pub(crate) clients: usize,
    pub(crate) rules: Rules,
}
