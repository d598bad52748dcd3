//! A member's side: the calls that it answers by itself, and those that it publishes.
//!
//! Owns: the queue of calls, the directories and files that the node has alone, handles for writing, pending look-ups. Does not own: bytes,
//! the journal that keeps this across restarts, when messages are sent again.
//!
//! `calls` decides which calls are answered at once, `answers` handles the coordinator's messages, `coming_back` is for the time after a
//! verdict.

mod answers;
mod calls;
mod coming_back;

use crate::key::{Name, Place};
use crate::message::{Done, Found, Stamp, ToCoordinator};
use crate::refusal::Refusal;
use crate::rules::Rules;
use crate::state::Call;
use crate::value::{Entry, Inode};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use tidemark_protocol::id::{FileCounter, FileId, Incarnation};

/// Calls in one publication. Two transactions take them.
pub const CALLS_PER_PUBLICATION: usize = 128;

/// A call or look-up that waits for the coordinator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Identity of a change that this node has answered for before it was published: the life that did so, and the call's number in it.
pub type Origin = (Incarnation, u64);

/// The immediate answer to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The change counts from now on and is published later; `None` if there is nothing to publish.
    Done(Option<Origin>),
    Refused(Refusal),
    /// [`Notice::Answered`] follows.
    Waits(Ticket),
}

/// The immediate answer to a look-up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Look {
    Found(Found),
    /// [`Notice::Looked`] follows.
    Waits(Ticket),
}

/// News for the node from the coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    Answered(Ticket, Result<Done, Refusal>),
    Looked(Ticket, Found),
    /// The node itself answers a waiting call to open a file, after all.
    Opened(Ticket, Option<Origin>),
    /// A change that was answered for was not taken: its bytes belong into the conflicts.
    Conflict {
        origin: Origin,
        call: Call,
        why: Refusal,
    },
    /// A change that was answered for is not published after a verdict, since it removes something.
    Logged {
        origin: Origin,
        call: Call,
    },
    /// The node's life is over. Changes that are answered for from now on are published under the next life, if possible.
    Over,
    /// The metadata is older than what this node knows to be taken: it serves what is here, and refuses the rest.
    WentBack,
}

/// Messages to send, and news for the node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output {
    pub messages: Vec<ToCoordinator>,
    pub notices: Vec<Notice>,
}

/// A call without an answer yet.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Queued {
    pub number: u64,
    pub origin: Origin,
    /// The ticket of the waiting client; `None` if the call was answered for before.
    pub ticket: Option<Ticket>,
    pub call: Call,
}

/// The node's place in the cluster, as far as it knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Standing {
    Joining { replaces: Option<Incarnation>, sent: bool },
    Member,
    Over,
    Stopped,
}

/// A file that this node has alone.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Held {
    /// The inode after all queued calls.
    inode: Inode,
    /// Number of open handles that may write.
    writers: u32,
}

/// A directory that this node has alone.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Directory {
    version: u64,
    /// The names after all queued calls.
    names: BTreeMap<Name, Entry>,
}

/// A look-up under way.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Looking {
    place: Place,
    after: u64,
    sent: bool,
}

/// A member.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Node {
    life: Incarnation,
    rules: Rules,
    standing: Standing,
    stamp: Stamp,
    files_made: u64,
    tickets: u64,
    queue: VecDeque<Queued>,
    /// The queue of the former life, until the present one is admitted.
    returning: Vec<Queued>,
    /// The life that queued these calls.
    former: Option<Incarnation>,
    /// The last call that has an answer.
    answered: u64,
    /// The last call of the pending publication.
    sent: Option<u64>,
    /// Calls that were refused as busy, to be queued again.
    parked: Vec<(Ticket, Call)>,
    directories: BTreeMap<FileId, Arc<Directory>>,
    held: BTreeMap<FileId, Held>,
    /// Files that another node has changed in this life, or asked to change: this node does not answer for them from memory.
    shared: BTreeSet<FileId>,
    /// Files to give back: when their last writer closes or, if true, as soon as the call to open them is answered.
    wanted: BTreeMap<FileId, bool>,
    /// Number of open handles by file on versions to which the node has lost its right.
    stale: BTreeMap<FileId, u32>,
    looking: BTreeMap<Ticket, Looking>,
}

impl Node {
    /// Makes a node in its life `life`, a number that no node had before. `replaces`: the former life of this node, if it knows of one.
    #[must_use]
    pub fn new(life: Incarnation, replaces: Option<Incarnation>, rules: Rules) -> Self {
        Self {
            life,
            rules,
            standing: Standing::Joining { replaces, sent: false },
            stamp: Stamp::default(),
            files_made: 0,
            tickets: 0,
            queue: VecDeque::new(),
            returning: vec![],
            former: None,
            answered: 0,
            sent: None,
            parked: vec![],
            directories: BTreeMap::new(),
            held: BTreeMap::new(),
            shared: BTreeSet::new(),
            wanted: BTreeMap::new(),
            stale: BTreeMap::new(),
            looking: BTreeMap::new(),
        }
    }

    /// Returns the present life, or the last one.
    #[must_use]
    pub fn life(&self) -> Incarnation {
        self.life
    }

    /// Returns the stamp of each message.
    #[must_use]
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }

    /// Iterates over calls without an answer, in their order.
    pub fn queue(&self) -> impl Iterator<Item = &Queued> {
        self.queue.iter()
    }

    /// Iterates over the queue of a life that is over, until the next one is admitted.
    pub fn returning(&self) -> impl Iterator<Item = &Queued> {
        self.returning.iter()
    }

    /// Returns whether this node knows that its life is over.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.standing == Standing::Over
    }

    /// Returns whether the node is a member, as far as it knows.
    #[must_use]
    pub fn is_member(&self) -> bool {
        self.standing == Standing::Member
    }

    /// Returns whether the node has a directory alone.
    #[must_use]
    pub fn has_alone(&self, directory: FileId) -> bool {
        self.directories.contains_key(&directory)
    }

    /// Returns the number of handles of a file that may write.
    #[must_use]
    pub fn writers(&self, id: FileId) -> u32 {
        self.held.get(&id).map_or(0, |held| held.writers) + self.stale.get(&id).copied().unwrap_or(0)
    }

    /// Returns whether messages are due that were not sent.
    #[must_use]
    pub fn has_to_send(&self) -> bool {
        match self.standing {
            Standing::Joining { sent, .. } => !sent,
            Standing::Member => {
                self.sent.is_none() && !self.queue.is_empty()
                    || self.looking.values().any(|looking| !looking.sent)
            }
            Standing::Over | Standing::Stopped => false,
        }
    }

    /// Returns whether an answer is awaited.
    #[must_use]
    pub fn awaits(&self) -> bool {
        matches!(self.standing, Standing::Joining { sent: true, .. })
            || self.sent.is_some()
            || self.looking.values().any(|looking| looking.sent)
            || !self.parked.is_empty()
    }

    /// Returns whether a call was refused as busy and is to be tried again.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Makes an identity for a new file, without asking another node.
    pub fn new_id(&mut self) -> FileId {
        self.files_made += 1;
        FileId { incarnation: self.life, counter: FileCounter(self.files_made) }
    }

    /// Returns the messages that are due: a publication of queued calls if none is pending, look-ups that were not sent, a join.
    pub fn send(&mut self) -> Vec<ToCoordinator> {
        let mut messages = vec![];
        match &mut self.standing {
            Standing::Joining { sent: true, .. } => {}
            Standing::Joining { replaces, sent } => {
                *sent = true;
                messages.push(ToCoordinator::Join { life: self.life, replaces: *replaces });
            }
            Standing::Member => {
                let life = self.life;
                if self.sent.is_none()
                    && let Some(first) = self.queue.front().map(|queued| queued.number)
                {
                    let calls: Vec<_> = self.queue.iter().take(CALLS_PER_PUBLICATION).collect();
                    self.sent = calls.last().map(|queued| queued.number);
                    let calls = calls.into_iter().map(|queued| queued.call.clone()).collect();
                    messages.push(ToCoordinator::Publish { life, first, calls });
                }
                for (ticket, looking) in self.looking.iter_mut().filter(|(_, looking)| !looking.sent) {
                    looking.sent = true;
                    let (number, after, place) = (ticket.0, looking.after, looking.place.clone());
                    messages.push(ToCoordinator::Look { life, number, after, place });
                }
            }
            Standing::Over | Standing::Stopped => {}
        }
        messages
    }

    /// Marks everything without an answer to be sent again: an answer may have been lost.
    pub fn again(&mut self) {
        self.sent = None;
        if let Standing::Joining { sent, .. } = &mut self.standing {
            *sent = false;
        }
        for looking in self.looking.values_mut() {
            looking.sent = false;
        }
        for (ticket, call) in std::mem::take(&mut self.parked) {
            // A call that waits for another call of this node stays until that one has its answer.
            let waits = call.inode().is_some_and(|id| {
                matches!(call, Call::Take { .. }) && (self.held.contains_key(&id) || self.is_take_queued(id))
            });
            if waits {
                self.parked.push((ticket, call));
            } else {
                self.push(Some(ticket), call);
            }
        }
    }

    fn last_number(&self) -> u64 {
        self.queue.back().map_or(self.answered, |queued| queued.number)
    }

    fn push(&mut self, ticket: Option<Ticket>, call: Call) -> Origin {
        let number = self.last_number() + 1;
        let origin = (self.life, number);
        self.queue.push_back(Queued { number, origin, ticket, call });
        origin
    }

    fn ticket(&mut self) -> Ticket {
        self.tickets += 1;
        Ticket(self.tickets)
    }

    /// Returns whether a pending call may change the name.
    fn is_busy(&self, place: &Place) -> bool {
        let mut waiting = self.queue.iter().filter(|queued| queued.ticket.is_some());
        self.rules.has(crate::rules::Rule::BusyNames)
            && (waiting.any(|queued| queued.call.places().any(|busy| busy == place))
                || self.parked.iter().any(|(_, call)| call.places().any(|busy| busy == place)))
    }

    /// Returns whether a pending call may change the inode.
    fn is_inode_busy(&self, id: FileId) -> bool {
        let mut waiting = self.queue.iter().filter(|queued| queued.ticket.is_some());
        waiting.any(|queued| queued.call.inode() == Some(id))
            || self.parked.iter().any(|(_, call)| call.inode() == Some(id))
    }

    /// Returns whether a client's call to open the file is pending.
    fn is_take_queued(&self, id: FileId) -> bool {
        let takes = |call: &Call| matches!(call, Call::Take { id: taken, .. } if *taken == id);
        self.queue.iter().any(|queued| queued.ticket.is_some() && takes(&queued.call))
    }

    /// Returns a file that this node may answer for and change without asking.
    fn own(&self, id: FileId) -> Option<&Held> {
        let shared = self.shared.contains(&id) && self.rules.has(crate::rules::Rule::SharedFiles);
        self.held.get(&id).filter(|_| !shared && !self.is_inode_busy(id))
    }
}
