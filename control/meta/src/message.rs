//! The messages between nodes and the coordinator.
//!
//! Owns: the messages. Does not own: their bytes and their way, which are the links' business. A link may lose, repeat and
//! reorder messages.

use crate::key::{Name, Place};
use crate::refusal::Refusal;
use crate::state::Call;
use crate::value::{Entry, Inode, Target};
use tidemark_protocol::id::{Epoch, FileId, Incarnation};

/// The sender's knowledge of the order of changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Stamp {
    /// The era; none if the sender has heard of none.
    pub era: Option<u64>,
    /// The epoch of the coordinator that speaks, or that a node follows.
    pub epoch: Epoch,
    /// Transactions in this era, as far as the sender has heard.
    pub tick: u64,
}

/// A call or look-up that waits for another node's publication. The numbers are the asking node's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Asker {
    Call { life: Incarnation, number: u64 },
    Look { life: Incarnation, number: u64 },
}

/// A message from a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ToCoordinator {
    /// `replaces`: the node's former life, which ends with this; `None`: the node knows of none.
    Join { life: Incarnation, replaces: Option<Incarnation> },
    /// Calls in their order; the numbers begin at `first`, which is the first call without an answer.
    Publish { life: Incarnation, first: u64, calls: Vec<Call> },
    /// A name, looked up after the node's own calls up to `after` were taken.
    Look { life: Incarnation, number: u64, after: u64, place: Place },
    /// The answer to [`ToNode::Publish`]: the node's calls up to `last` are all that it knew then.
    Known { life: Incarnation, asker: Asker, file: Option<FileId>, last: u64 },
}

/// The outcome of a call that was taken.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Outcome {
    Refused(Refusal),
    Done(Done),
}

/// The names and inodes that a call has touched, as they stand now.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Done {
    pub entries: Vec<(Place, Entry)>,
    pub inodes: Vec<(FileId, Option<Inode>)>,
    /// All names of a directory, if the caller has it alone now.
    pub grant: Option<Grant>,
}

/// A directory that one node has alone.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Grant {
    pub directory: FileId,
    /// The version of the directory's inode with this grant.
    pub version: u64,
    /// Tombstones included. A directory of 100,000 names makes a message of some megabytes.
    pub names: Vec<(Name, Entry)>,
}

/// The result of a look-up.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Found {
    Absent,
    Present(Target, Inode),
    Refused(Refusal),
}

/// A message from the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ToNode {
    /// The sender is the coordinator.
    Lead,
    /// `before`: the last call taken of the former life.
    Joined {
        life: Incarnation,
        before: Option<(Incarnation, u64)>,
    },
    /// Another life of the node is the present one, or was declared gone.
    NotJoined {
        life: Incarnation,
        present: Incarnation,
    },
    /// The life is over.
    Over {
        life: Incarnation,
    },
    /// Calls up to `number` were taken; `outcomes` begin with `first`.
    Taken {
        life: Incarnation,
        first: u64,
        number: u64,
        outcomes: Vec<Outcome>,
    },
    Looked {
        life: Incarnation,
        number: u64,
        found: Found,
    },
    /// Publish everything that is known. With `file`, also stop answering for this file from memory.
    Publish {
        life: Incarnation,
        asker: Asker,
        file: Option<FileId>,
    },
    /// Give a file or a directory back; `force`: also a file that is open for writing.
    GiveBack {
        life: Incarnation,
        id: FileId,
        version: u64,
        force: bool,
    },
}
