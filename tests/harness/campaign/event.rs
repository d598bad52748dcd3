//! Events from a trainer to the auditor, one JSON object a line: names it is about to change, and answers it received.
//!
//! Owns: the words. Only `is` and `moved` are promises; a trainer writes them after the system call returned. A
//! trainer writes `will` before the first call that may change a name. If the trainer dies, the auditor thus knows
//! which names may be half changed.

use serde::{Deserialize, Serialize};

/// The content of a name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holds {
    Absent,
    /// A file of exactly these bytes.
    Whole(Bytes),
    /// A file that begins with these bytes and may go on.
    Begins(Bytes),
}

/// Bytes, by their number and their BLAKE3 sum.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bytes {
    pub size_bytes: u64,
    pub blake3: String,
}

impl Bytes {
    pub fn of(bytes: &[u8]) -> Self {
        Self { size_bytes: bytes.len() as u64, blake3: blake3::hash(bytes).to_string() }
    }
}

/// The call whose return made a promise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    Close,
    Fsync,
    Rename,
    Unlink,
    /// A state that no event promised. The auditor found it after the name's writer had ended, and it must not change.
    Found,
}

/// An event, with paths relative to the mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// From now on the name may also hold `to`. Without `to`, the name may hold anything.
    Will {
        path: String,
        to: Option<Holds>,
    },
    Is {
        path: String,
        holds: Holds,
        by: By,
    },
    /// A rename begins: until its end, all names below `from` are still there or all of them are below `to`.
    WillMove {
        from: String,
        to: String,
    },
    Moved {
        from: String,
        to: String,
    },
    /// The trainer has no file open, and makes no call until its page says so.
    Paused {
        number: u64,
    },
    /// A system call failed. While a daemon or its keeper lives, no call may fail.
    Failed {
        act: String,
        path: String,
        what: String,
        at_ns: u64,
    },
}

impl Event {
    /// Returns the event as a line of JSON.
    pub fn line(&self) -> String {
        let mut line = serde_json::to_string(self).expect("words and numbers are JSON");
        line.push('\n');
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_one_line_and_comes_back() {
        let event = Event::Is { path: "a\nb".into(), holds: Holds::Begins(Bytes::of(b"abc")), by: By::Fsync };
        let line = event.line();
        assert_eq!(line.matches('\n').count(), 1);
        assert_eq!(serde_json::from_str::<Event>(&line).unwrap(), event);
    }
}
