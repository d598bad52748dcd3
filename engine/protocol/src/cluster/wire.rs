//! The messages between a node and the coordinator, and their bounds.
//!
//! Owns: the messages and their bytes. Does not own: frames and the identity of the sender (transport), the consequences of a message (the
//! engine's cluster).
//!
//! Messages are encoded with Postcard, because chunk checksums are most of the bytes. The format does not describe itself: [`WIRE_VERSION`]
//! stands before each message, and two builds that differ in it do not communicate.

pub use super::members::{EncodedMembers, Member, Members, MembersChange, Standing};
pub use super::operation::NameOperation;
use crate::checksum::Crc64;
use crate::encoding::Encoding;
use crate::file::FileState;
use crate::id::{Epoch, FileId, Generation, NodeName, SealNumber, StartId};
use crate::key::NodeLife;
use crate::manifest::Prepared;
use crate::membership::{Admit, Ask, Echo};
use crate::record::Record;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Format number, raised with every change of a message.
pub const WIRE_VERSION: u8 = 10;

/// Size of the largest message: the checksums of a file of 8 TiB, or the names of a directory of 100,000 files.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;

/// Operations on names and states of nodes in one publication: some MiB, and some milliseconds of the coordinator's lock.
pub const BATCH_ITEMS_MAX: usize = 4096;

/// Bytes of operations, or of states, in one publication, without its last one. The publication thus stays below a message's limit: the
/// last one may be a file of 8 TiB, whose checksums take ten MiB.
pub const BATCH_BYTES_MAX: usize = MESSAGE_BYTES_MAX / 8;

/// Bytes that a number in a message takes at most. `LENGTH_BYTES` is the same for a length, and `FIXED_BYTES` for all parts of a state or
/// an operation that have no length of their own.
pub const NUMBER_BYTES: usize = 10;
const LENGTH_BYTES: usize = 5;
pub(super) const FIXED_BYTES: usize = 512;

/// Longest version of a build in a join: as `ckptd --version` prints it.
pub const VERSION_BYTES_MAX: usize = 64;

/// Longest reason for a member's standing: a sentence with two names in it.
pub const WHY_BYTES_MAX: usize = 512;

/// A question of a node to the coordinator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToCoordinator {
    Join(Join),
    Publish(Publication),
    /// Asks for the meaning of a name, or for leave to change it.
    Look(Look),
    /// Asks for all names of a directory.
    List {
        path: Vec<u8>,
    },
    /// Asks where the bytes of a file are. While the file is closed and not sealed yet, the coordinator waits, within the call's deadline.
    /// `failed`: nodes that were asked for the bytes in vain.
    Where {
        file: FileId,
        failed: Vec<NodeName>,
    },
    /// The node is alive.
    Beat(Beat),
    /// Asks for the list of members: the node missed a change.
    Members,
    /// Reports copies of other nodes' files that are kept here now, or no longer.
    Copies(Copies),
    /// Asks for the state and the place of a file: the node was notified that a name of the file is gone.
    Find {
        file: FileId,
    },
    /// All that this node knew when it joined has been published.
    Reported,
    /// The node's clock says this; the answer is the coordinator's clock. A node that has joined says it some times at once
    /// before it publishes anything: the quickest message tells how far the clocks are apart, by which its times are read.
    Time {
        now_ns: i64,
    },
}

impl ToCoordinator {
    /// Every [`ToCoordinator::word`].
    pub const WORDS: [&str; 11] =
        ["join", "publish", "look", "list", "where", "beat", "members", "copies", "find", "reported", "time"];

    /// Returns the question in one word, for counters.
    #[must_use]
    pub const fn word(&self) -> &'static str {
        Self::WORDS[self.kind()]
    }

    /// Returns the index of the question's word.
    #[must_use]
    pub const fn kind(&self) -> usize {
        match self {
            Self::Join(_) => 0,
            Self::Publish(_) => 1,
            Self::Look(_) => 2,
            Self::List { .. } => 3,
            Self::Where { .. } => 4,
            Self::Beat(_) => 5,
            Self::Members => 6,
            Self::Copies(_) => 7,
            Self::Find { .. } => 8,
            Self::Reported => 9,
            Self::Time { .. } => 10,
        }
    }
}

/// A question of the coordinator to a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToNode {
    /// Publish all known changes of names, once no call is at work on `name`; if `release`, also give the directory back.
    Recall { epoch: Epoch, path: Vec<u8>, name: Option<Vec<u8>>, release: bool },
    /// Ask again about what earlier answers allowed: a directory is about to change. Names that were promised are promised no more.
    Forget { epoch: Epoch },
    /// Changes of the list of members.
    Members(MembersChange),
    /// Asks whether this node hears another one; the node answers with its finding.
    Ask(Ask),
    /// Asks a node for its life, because another node was asked whether it lives.
    Knock,
    /// Requests phase 1 of an attempt for the files that are here; the coordinator repeats the request until it is done.
    Prepare(Box<Prepare>),
    /// Copies in Tier-3 of files that are here.
    Objects { epoch: Epoch, objects: Vec<(FileId, SealNumber, Object)> },
    /// Files that have no name any more; at most [`BATCH_ITEMS_MAX`].
    Removed { epoch: Epoch, files: Vec<FileId> },
    /// A checkpoint with files of this node is complete, or (`waited_for`) a caller waits for it: the pace of its copies follows.
    Pace { epoch: Epoch, waited_for: bool },
}

/// An answer that only a coordinator that has heard all nodes can give.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer<T> {
    Known(T),
    /// The coordinator is new, and some nodes have not yet published all they know.
    NotYet,
}

/// A node's description of itself when it joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    pub life: NodeLife,
    pub start: StartId,
    /// The address at which peers reach the node.
    pub address: String,
    pub labels: BTreeMap<String, String>,
    /// The highest epoch that the node has followed.
    pub epoch: Epoch,
    /// The number of the node's last publication; a daemon that takes over goes on counting.
    pub publication: u64,
    /// Directories that the node held alone under the coordinator before; at most [`BATCH_ITEMS_MAX`].
    pub alone: Vec<Vec<u8>>,
    /// The version of its daemon, at most [`VERSION_BYTES_MAX`].
    pub version: String,
}

/// A node's sign of life; the link gives the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    pub start: StartId,
    /// The epoch that the node follows.
    pub epoch: Epoch,
    /// Number of the beat since the daemon's start.
    pub number: u64,
    pub tier1_used_bytes: u64,
    pub tier1_size_bytes: u64,
    /// The node's clock. Beats are the quickest messages, so they say best how far it is from the coordinator's.
    pub now_ns: i64,
}

/// The answer to a beat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beaten {
    pub echo: Echo,
    /// Number of the list of members that every node should have received by now: a node with an older list asks for it.
    pub members_number: u64,
    /// The coordinator's clock: by it a successor reads the times that this coordinator stated.
    pub now_ns: i64,
    /// Number of the last step of this coordinator that etcd has taken; 0 if there is none. By it a successor notices that etcd was put
    /// back to an older state.
    pub kept_step: u64,
}

/// The answer to a node that joined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    pub admit: Admit,
    pub members: EncodedMembers,
    /// The last publication of this life that the coordinator has; none: the coordinator needs everything.
    pub published: Option<u64>,
    /// Whether the coordinator needs the state of every node of the tree: it had declared the node gone, or its daemon started with the
    /// names alone.
    pub states: bool,
    /// Directories that the node goes on holding alone.
    pub alone: Vec<Vec<u8>>,
}

/// The changes on a node, in order, and the state of what changed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publication {
    /// The number of this publication; the first of a life is 1.
    pub number: u64,
    /// The publisher's clock, by which its times are read.
    pub now_ns: i64,
    /// Whether this is part of everything that the node holds, for a coordinator that knows nothing. There may be many parts; the final one
    /// has `last`.
    pub whole: bool,
    pub last: bool,
    /// In a whole publication: whether missing names are created. False if operations say how every name came about.
    pub makes: bool,
    pub operations: Vec<NameOperation>,
    pub states: Vec<NodeState>,
    /// Fates of processes that wrote.
    pub fates: Vec<WriterFact>,
}

/// The result of a publication.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// Publications of this life are missing: the node has to publish everything.
    pub whole_wanted: bool,
    /// Directories that the node made and does not hold alone.
    pub shared: Vec<Vec<u8>>,
}

/// The state of a node of the tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeState {
    /// A name of the node.
    pub path: Vec<u8>,
    pub attributes: NodeAttributes,
    /// Time when a call last set any of the attributes; later than each time before, however clocks differ. 0: no call has.
    pub attributes_ns: i64,
    /// All other names of the node; `None` if the publisher does not know them.
    pub other_names: Option<Vec<Vec<u8>>>,
    pub kind: NodeKind,
}

/// The kind of a node of the tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeKind {
    Directory,
    Symlink { target: Vec<u8> },
    File(Box<FileFacts>),
}

/// Mode, owner, time and extended attributes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAttributes {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime_ns: i64,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

impl NodeAttributes {
    /// Returns how many bytes of a message the extended attributes take, at most.
    #[must_use]
    pub fn xattr_bytes(&self) -> usize {
        self.xattrs.iter().map(|(name, value)| name.len() + value.len() + 2 * LENGTH_BYTES).sum()
    }
}

/// The home's knowledge of a file. Times are by the publisher's clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFacts {
    pub file: FileId,
    pub size_bytes: u64,
    pub state: WireState,
    /// Number of the last seal, present or not.
    pub seal: SealNumber,
    pub opened_ns: i64,
    pub closed_ns: i64,
    pub published_ns: i64,
    pub vouched: bool,
    pub generation: Generation,
    pub writers: Vec<WriterFact>,
    /// Whether the publisher has the bytes in memory.
    pub host: bool,
    pub object: Option<Object>,
}

/// [`FileState`] with its checksums by value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum WireState {
    Open { writers: u32 },
    Closed,
    Cut,
    Mapped,
    Sealed { crc: Crc64, chunks: Arc<[Crc64]> },
}

/// A copy in Tier-3.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    pub key: String,
    pub size_bytes: u64,
    pub encoding: Option<Encoding>,
}

/// A process that wrote, as its node sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriterFact {
    pub session: String,
    pub process: (u32, u64),
    pub environment_seen: bool,
    pub world_size: Option<u64>,
    pub rank: Option<u64>,
    pub fate: WireFate,
    pub failed_at_ns: Option<i64>,
}

/// The fate of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WireFate {
    Alive,
    Exited,
    Killed,
    Gone,
}

/// A node's reason for asking for a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Intent {
    /// Only to see it.
    Read,
    /// To see it, and to make it if it is missing.
    Make,
    /// To make it, or to change its meaning.
    Change,
    /// To rename a directory, or to remove it.
    Move,
}

/// A question for one name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Look {
    /// The directory, relative to the mount.
    pub directory: Vec<u8>,
    pub name: Vec<u8>,
    pub intent: Intent,
}

/// The meaning of a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Looked {
    pub found: Option<NodeState>,
    /// Whether the directory exists.
    pub directory: bool,
    pub leave: Leave,
}

/// The changes that the asker may make without asking again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Leave {
    /// Nothing.
    None,
    /// Look-ups of this name, which is a directory, for a moment or until [`ToNode::Forget`].
    Known,
    /// A single change of this name, soon.
    Name,
    /// All changes in this directory until it is recalled; `entries` are its present names. `seen`: other nodes may look directories in it
    /// up without asking, so the asker asks before it changes one.
    Directory { entries: Vec<NodeState>, seen: bool },
}

/// The places of a file's bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Whereabouts {
    pub facts: Option<FileFacts>,
    /// Nodes that have the bytes or are fetching them, the best first; none: read Tier-3.
    pub suppliers: Vec<Member>,
}

/// Copies of other nodes' files that a node keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// Whether `kept` is everything that the node keeps; otherwise only the changes.
    pub whole: bool,
    pub kept: Vec<NodeState>,
    pub dropped: Vec<(FileId, SealNumber)>,
}

/// Phase 1 for one participant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prepare {
    pub epoch: Epoch,
    /// The record as JSON: it has one form wherever it is.
    pub record: String,
    /// The participant: the node itself, or a lost one whose copies are here.
    pub life: NodeLife,
    pub by: Option<NodeLife>,
    /// The record's files that are requested, by their index in it.
    pub files: Vec<u32>,
    /// Hard links in the checkpoint: path and first path.
    pub hard_links: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The state of phase 1.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Preparing {
    Working {
        bytes_left: u64,
    },
    /// JSON, as for the record.
    Done {
        prepared: String,
    },
    Failed {
        why: String,
    },
    /// The node does not have these bytes.
    NotHere {
        path: Vec<u8>,
    },
    /// The place of the node's marker holds other bytes than the node would write there. The attempt cannot be finished.
    Taken {
        key: String,
    },
}

/// Why a message is not understood.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    #[error(
        "a message of {bytes} bytes; at most {MESSAGE_BYTES_MAX} are taken: the other side is no node of ours"
    )]
    TooLarge { bytes: usize },
    #[error(
        "a message of version {found}; this build speaks {WIRE_VERSION}: run the same version on all nodes"
    )]
    Version { found: u8 },
    #[error("an empty message")]
    Empty,
    #[error("a message that is not understood: {source}")]
    Malformed { source: postcard::Error },
}

/// Encodes a message.
///
/// # Errors
/// [`WireError::TooLarge`] if no peer would accept it.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, WireError> {
    let bytes =
        postcard::to_extend(message, vec![WIRE_VERSION]).map_err(|source| WireError::Malformed { source })?;
    if bytes.len() > MESSAGE_BYTES_MAX { Err(WireError::TooLarge { bytes: bytes.len() }) } else { Ok(bytes) }
}

/// Decodes a message. Never allocates more than a small multiple of `bytes`.
///
/// # Errors
/// See [`WireError`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(WireError::TooLarge { bytes: bytes.len() });
    }
    match bytes.split_first() {
        None => Err(WireError::Empty),
        Some((&WIRE_VERSION, body)) => {
            postcard::from_bytes(body).map_err(|source| WireError::Malformed { source })
        }
        Some((&found, _)) => Err(WireError::Version { found }),
    }
}

impl NodeState {
    /// Returns the paths that are known.
    pub fn paths(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&self.path).chain(self.other_names.iter().flatten()).map(Vec::as_slice)
    }

    /// Returns how many bytes of a message the state takes, at most.
    #[must_use]
    pub fn bytes_most(&self) -> usize {
        let others: usize = self.other_names.iter().flatten().map(|path| path.len() + LENGTH_BYTES).sum();
        let of_kind = match &self.kind {
            NodeKind::File(facts) => match &facts.state {
                WireState::Sealed { chunks, .. } => chunks.len() * NUMBER_BYTES,
                WireState::Open { .. } | WireState::Closed | WireState::Cut | WireState::Mapped => 0,
            },
            NodeKind::Symlink { target } => target.len(),
            NodeKind::Directory => 0,
        };
        FIXED_BYTES + self.path.len() + others + self.attributes.xattr_bytes() + of_kind
    }

    /// Returns the state with its times, which are by another node's clock, converted by `read`.
    #[must_use]
    pub fn with_times(mut self, mut read: impl FnMut(i64) -> i64) -> Self {
        if let NodeKind::File(facts) = &mut self.kind {
            facts.opened_ns = read(facts.opened_ns);
            facts.closed_ns = read(facts.closed_ns);
            facts.published_ns = read(facts.published_ns);
        }
        self
    }
}

impl FileFacts {
    /// Returns the number of the present seal; none if the file is not sealed.
    #[must_use]
    pub fn sealed(&self) -> Option<SealNumber> {
        matches!(self.state, WireState::Sealed { .. }).then_some(self.seal)
    }

    /// Returns the state in the form that the rules use.
    #[must_use]
    pub fn file_state(&self) -> FileState {
        match &self.state {
            WireState::Open { writers } => FileState::Open { writers: *writers },
            WireState::Closed => FileState::Closed,
            WireState::Cut => FileState::Cut,
            WireState::Mapped => FileState::Mapped,
            WireState::Sealed { crc, chunks } => FileState::Sealed {
                seal: self.seal,
                size_bytes: self.size_bytes,
                crc: *crc,
                chunks: Arc::clone(chunks),
            },
        }
    }
}

impl From<&FileState> for WireState {
    fn from(state: &FileState) -> Self {
        match state {
            FileState::Open { writers } => Self::Open { writers: *writers },
            FileState::Closed => Self::Closed,
            FileState::Cut => Self::Cut,
            FileState::Mapped => Self::Mapped,
            FileState::Sealed { crc, chunks, .. } => Self::Sealed { crc: *crc, chunks: Arc::clone(chunks) },
        }
    }
}

impl Prepare {
    /// Parses the record in it.
    ///
    /// # Errors
    /// If it is not a record.
    pub fn record(&self) -> Result<Record, crate::format::FormatError> {
        crate::format::Document::parse(self.record.as_bytes())
    }
}

/// Parses a participant's prepared marker from the wire.
///
/// # Errors
/// If it is not one.
pub fn prepared(text: &str) -> Result<Prepared, crate::format::FormatError> {
    crate::format::Document::parse(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Incarnation;
    use proptest::prelude::*;

    fn facts() -> FileFacts {
        FileFacts {
            file: FileId { incarnation: Incarnation(7), counter: crate::id::FileCounter(9) },
            size_bytes: 1 << 33,
            state: WireState::Sealed { crc: Crc64(1), chunks: vec![Crc64(3); 1024].into() },
            seal: SealNumber(2),
            opened_ns: 1,
            closed_ns: 2,
            published_ns: 3,
            vouched: true,
            generation: Generation(4),
            writers: Vec::new(),
            host: true,
            object: Some(Object { key: "k".to_owned(), size_bytes: 1, encoding: None }),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let state = NodeState {
            path: b"run/step".to_vec(),
            attributes: NodeAttributes {
                xattrs: vec![(b"user.a".to_vec(), vec![0, 255])],
                ..Default::default()
            },
            attributes_ns: 5,
            other_names: Some(vec![b"run/other".to_vec()]),
            kind: NodeKind::File(Box::new(facts())),
        };
        let message = ToCoordinator::Publish(Publication {
            number: 1,
            operations: vec![NameOperation::Removed { path: b"x".to_vec(), what: Some(facts().file) }],
            states: vec![state],
            ..Publication::default()
        });
        let bytes = encode(&message).unwrap();
        assert_eq!(decode::<ToCoordinator>(&bytes).unwrap(), message);
    }

    #[test]
    fn members_and_questions_about_them_are_read_as_they_were_written() {
        let life = NodeLife { node: "n1".parse().unwrap(), incarnation: Incarnation(7) };
        let member = Member {
            life: life.clone(),
            address: "10.0.0.1:7070".to_owned(),
            labels: BTreeMap::from([("rack".to_owned(), "r1".to_owned())]),
            gone: false,
            partners: vec!["n2".parse().unwrap()],
            standing: Standing::CutOff,
            since_ms: 9,
            why: "n2 hears it".to_owned(),
        };
        let members = Members { epoch: Epoch(3), number: 2, members: vec![member], ..Members::default() };
        let message = ToNode::Members(members.since(&Members::default()));
        assert_eq!(decode::<ToNode>(&encode(&message).unwrap()).unwrap(), message);
        let about =
            crate::membership::Life { node: life.node, incarnation: life.incarnation, start: StartId(1) };
        let ask = ToNode::Ask(Ask { epoch: Epoch(3), question: 4, about, within_ms: 300 });
        assert_eq!(decode::<ToNode>(&encode(&ask).unwrap()).unwrap(), ask);
    }

    #[test]
    fn another_version_is_said_and_not_guessed() {
        let mut bytes = encode(&ToCoordinator::List { path: Vec::new() }).unwrap();
        bytes[0] = WIRE_VERSION + 1;
        assert!(
            matches!(decode::<ToCoordinator>(&bytes), Err(WireError::Version { found }) if found == WIRE_VERSION + 1)
        );
        assert!(matches!(decode::<ToCoordinator>(&[]), Err(WireError::Empty)));
    }

    proptest! {
        #[test]
        fn garbage_is_refused_and_never_panics(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = vec![WIRE_VERSION];
            bytes.extend(body);
            let _ = decode::<ToCoordinator>(&bytes);
            let _ = decode::<ToNode>(&bytes);
            let _ = decode::<Looked>(&bytes);
            let _ = decode::<Whereabouts>(&bytes);
        }
    }
}
