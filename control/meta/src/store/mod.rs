//! The store that the metadata needs: elect, append if still elected, load at a revision, follow.
//!
//! Owns: requests and answers as values, and the trait. Does not own: a connection, a clock, or the meaning of the values.
//!
//! A store keeps its keys under one ever-rising revision. The coordinator's election is the revision at which [`Key::Coordinator`] was last
//! put. The create revision would not do: a put over an existing key keeps it, so a coordinator that was replaced by a compare and a put
//! would not be fenced.

mod memory;

pub use memory::{Backup, Fault, Memory};

use crate::key::Key;
use crate::value::{Change, Role, Value};
use std::fmt;

/// A point in the store's history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A condition of a transaction.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Compare {
    /// The key has this value; `None`: it is absent.
    Is(Key, Option<Value>),
    /// The coordinator's election is this one.
    Elected(Revision),
}

/// Changes that are made together, if all compares hold.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Transaction {
    pub compares: Vec<Compare>,
    pub changes: Vec<Change>,
}

/// A request to a store.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Request {
    /// Puts `role` if the present election is `over`; `None`: if no node is elected.
    Elect {
        over: Option<Revision>,
        role: Role,
    },
    Append(Transaction),
    /// Reads keys, linearizably.
    Read(Vec<Key>),
    /// Reads a page of all keys in their order, after `after`, at `at`; `None`: at the present revision.
    Load {
        at: Option<Revision>,
        after: Option<Key>,
        limit: usize,
    },
    /// Reads changes after a revision, oldest first, whole transactions only.
    Follow {
        after: Revision,
        limit: usize,
    },
}

/// A key's value, and the revision that put it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Stored {
    pub value: Value,
    pub revision: Revision,
}

/// An answer of a store.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Response {
    /// The request was taken at this revision; for [`Request::Elect`] that is the election.
    Taken(Revision),
    /// A compare did not hold, and nothing was changed.
    Refused,
    /// No answer came. The request may have been taken, or may be taken later.
    Unknown,
    /// The values of a [`Request::Read`], one for each key.
    Values(Vec<Option<Stored>>),
    Page {
        at: Revision,
        entries: Vec<(Key, Value)>,
        more: bool,
    },
    /// Everything up to `to`.
    Changes {
        to: Revision,
        changes: Vec<Change>,
    },
    /// The requested history is not kept any more.
    Compacted,
}

/// A fenced, ordered store. A network adapter performs a [`Request`] when it can, and passes the [`Response`] to the coordinator as an
/// event; this trait is the same for stores in this process.
pub trait Store {
    /// Performs one request.
    fn serve(&mut self, request: &Request) -> Response;
}
