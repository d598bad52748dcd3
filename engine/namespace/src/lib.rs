//! The namespace: the tree below the mount, its files and handles; the meaning of every file system call.
//!
//! Owns: names, attributes, handles, file states, overwrite rules, COLD opens, reclaim of host copies, writers'
//! identities, extended attributes, the journal. Does not own: the kernel's protocol (the fuse crate), memory
//! (`tier1`), when to seal, upload or fetch (the node loop, which drains [`Namespace::take_dirty`] and looks at
//! [`FileView`]s).
//!
//! Calls are grouped by their user (`parts`). [`Namespace`] itself has the calls of an open or a look-up. Each group is a view of the
//! fields that it needs, such as [`Seals`] or [`PeerCopies`].
//!
//! A single mutex guards everything and is held for map look-ups and an fstat at most. Longer work (a backing file from the pool, a copy,
//! ftruncate, /proc, the journal's write, dropping a backing file) happens outside. If a file's bytes are about to change, the file is
//! marked busy meanwhile. See `engine/design/0004-namespace.md`.

mod alive;
mod aside;
mod attr;
mod attributes;
mod begun;
mod carried;
mod catalog;
mod changes;
mod cold;
mod copies;
mod departing;
mod ends;
mod error;
mod facts;
mod fates;
mod file;
mod follow_links;
mod gate;
mod guarded;
mod handle;
mod heard;
mod hidden;
mod host_room;
mod identities;
mod journal;
mod kept;
mod links;
mod mirror;
mod mirroring;
mod moved;
mod names;
mod node;
mod open;
mod outgoing;
mod overwrite;
mod parts;
mod pidfd;
mod process;
mod quiet;
mod reader;
mod recent;
mod reclaim;
mod record;
mod replay;
mod resize;
mod room;
mod seal;
mod session;
mod snapshot;
mod stale;
mod standing;
mod state;
mod tree;
mod unanswered;
mod view;
mod withdraw;
mod writer;
mod writers;
mod xattr;

pub use alive::{ask_anew, fate_of, is_alive, is_running};
pub use attr::{Attr, Kind, SetAttr, SetTime, Special, Ttl};
pub use begun::{Made, Unwritten};
pub use carried::Adoption;
pub use catalog::{CatalogTree, Moment, NamedNode, Unkept};
pub use cold::{AdoptEntry, AdoptKind, ColdFile, HostCopies};
pub use copies::{CopiesUsage, CopyView, PeerCopies, Present, WithdrawnCopy};
pub use ends::End;
pub use error::FsError;
pub use facts::{object_copy, object_of};
pub use fates::FateOf;
pub use file::ObjectCopy;
pub use follow_links::{Astray, LastLink};
pub use gate::Gate;
pub use handle::{DirEntry, HandleCalls, OpenFile, Statfs};
pub use hidden::{HIDDEN, HiddenDirectory, HiddenNames, is_hidden, path_of_torn, torn_path};
pub use host_room::HostRoom;
pub use kept::{Kept, KeptBy};
pub use mirror::{Mirror, Remote};
pub use names::{NameCalls, RENAME_EXCHANGE, RENAME_NOREPLACE};
pub use open::OpenOutcome;
pub use outgoing::{OutgoingBody, OutgoingNode, Publications, Question, Told};
pub use reclaim::Place;
pub use record::LARGEST_FILE_BYTES;
pub use room::{Refusals, RoomWait};
pub use seal::{JudgeTicket, NotSealable, Reach, SealPin, SealTicket, Seals, StandingBytes, Voided};
pub use session::{Answer, RequestId, SessionCalls};
pub use snapshot::{SnapshotFile, SnapshotHardLink, SnapshotNode, TreeSnapshot};
pub use stale::{LockOracle, Looked};
pub use standing::StandingNodes;
pub use tidemark_protocol::file::FileState;
pub use tidemark_protocol::residency::ReclaimClass;
pub use view::{FileView, NodeViews};
pub use withdraw::{Leads, Listed, Withdrawn};
pub use writer::{Ended, Peers, SessionKey, WriterId};
pub use writers::Writers;
pub use xattr::{XattrCalls, XattrSource};

use ends::Ends;
use fates::Fates;
use guarded::Guarded;
use journal::Journal;
use node::{Body, Node};
use room::Room;
use state::State;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};
use tidemark_protocol::id::Incarnation;
use tidemark_tier1::courtesy::Courtesy;
use tidemark_tier1::{Backing, Tier1};
use tree::Tree;
use writer::WriterCache;

/// The kernel's number for a node, never reused within an incarnation.
pub type NodeId = u64;

/// The root's node, by the FUSE protocol.
pub const ROOT: NodeId = 1;

/// NAME_MAX of Linux.
pub const MAX_NAME_BYTES: usize = 255;
/// PATH_MAX of Linux less its NUL: the longest symlink target.
pub const MAX_TARGET_BYTES: usize = 4095;
/// Most names of one node. An overwrite moves them all under the lock; ext4 allows about as many.
pub const MAX_LINKS: u32 = 65_000;

/// Predicts a file's size from its path relative to the mount.
pub type Prediction = Box<dyn Fn(&[u8]) -> Option<u64> + Send + Sync>;

/// Reads CLOCK_REALTIME in nanoseconds; tests count instead.
#[derive(Clone)]
pub struct Clock(pub Arc<dyn Fn() -> i64 + Send + Sync>);

impl Clock {
    /// Returns the system's clock.
    #[must_use]
    pub fn system() -> Self {
        Self(Arc::new(|| {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
            now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
        }))
    }

    fn now_ns(&self) -> i64 {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// Settings from which a namespace is made.
#[derive(Debug, Clone)]
pub struct NamespaceSettings {
    pub incarnation: Incarnation,
    /// Permission bits and owner of the root.
    pub root_mode: u32,
    pub root_uid: u32,
    pub root_gid: u32,
    /// Bytes of each of the journal's two files, preallocated; none: half of what Tier-1 sets aside. 32 MiB each hold
    /// about 70,000 files.
    pub journal_bytes: Option<u64>,
    /// Where processes are looked up; `/proc` except in tests.
    pub proc_root: PathBuf,
    pub clock: Clock,
}

impl NamespaceSettings {
    /// Returns the usual settings for an incarnation.
    #[must_use]
    pub fn new(incarnation: Incarnation) -> Self {
        Self {
            incarnation,
            root_mode: 0o1777,
            root_uid: 0,
            root_gid: 0,
            journal_bytes: None,
            proc_root: PathBuf::from("/proc"),
            clock: Clock::system(),
        }
    }
}

/// Why a namespace could not be made or rebuilt.
#[derive(Debug, thiserror::Error)]
pub enum NamespaceError {
    #[error("journal file {name}: {operation} failed; check the journal's mount and its {bytes} bytes")]
    Journal { name: &'static str, operation: &'static str, bytes: u64, source: std::io::Error },
    #[error(
        "the journal has format version {found}, this build reads {known}; start the daemon that wrote it, or with an empty Tier-1"
    )]
    Version { found: u32, known: u32 },
    #[error(
        "the journal's {what} is not what we write ({found} where at most {most} is possible); its copies in Tier-3 are unharmed, start with an empty Tier-1"
    )]
    Corrupt { what: &'static str, found: u64, most: u64 },
}

impl NamespaceError {
    /// Returns the kind of error, which tells the caller what to do.
    #[must_use]
    pub fn kind(&self) -> tidemark_protocol::error::ErrorKind {
        match self {
            Self::Journal { .. } => tidemark_protocol::error::ErrorKind::Unavailable,
            Self::Version { .. } => tidemark_protocol::error::ErrorKind::Invalid,
            Self::Corrupt { .. } => tidemark_protocol::error::ErrorKind::Corrupt,
        }
    }
}

/// The calling process, as the kernel reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caller {
    pub uid: u32,
    pub gid: u32,
    /// The calling thread's id; 0 when it is in a pid namespace that we do not see.
    pub pid: u32,
    /// CLOCK_REALTIME in nanoseconds, read when the request came.
    pub now_ns: i64,
    /// The kernel's number of the request, so that its successor under the same number is not carried out again.
    pub request: RequestId,
}

/// The tree below the mount. All calls take `&self`, from any thread.
pub struct Namespace {
    state: Guarded,
    tier1: Arc<Tier1>,
    writers: Arc<WriterCache>,
    readers: reader::Readers,
    prediction: RwLock<Option<Prediction>>,
    /// Whether a program holds a lock on an inode; none without a mount.
    locks: RwLock<Option<LockOracle>>,
    xattr_source: RwLock<Option<Arc<dyn XattrSource>>>,
    room_waits: Room,
    /// Fates of other nodes' processes.
    fates: Mutex<Fates>,
    gate: Gate,
    /// How seals give way to programs.
    courtesy: Mutex<Courtesy>,
    /// Held while a snapshot of the tree is taken, so that there is one at a time.
    snapshots: Mutex<()>,
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Namespace").field("state", &self.state).finish_non_exhaustive()
    }
}

impl Namespace {
    /// Makes an empty namespace with a fresh journal.
    ///
    /// # Errors
    /// When the journal's files cannot be made or preallocated.
    pub fn new(settings: NamespaceSettings, tier1: Arc<Tier1>) -> Result<Arc<Self>, NamespaceError> {
        let root = Node::new(
            ROOT,
            settings.root_mode & MODE_BITS,
            settings.root_uid,
            settings.root_gid,
            settings.clock.now_ns(),
            Body::Directory(Box::default()),
        );
        let journal =
            Journal::create(tier1.journal_dir(), journal_bytes(&settings, &tier1), settings.incarnation)?;
        Ok(Self::assemble(settings, tier1, (State::new(Tree::new(root)), Ends::default()), journal))
    }

    /// Recovers the namespace from its journal. `backing` finds the backing file of a number; a file whose bytes are gone becomes COLD. If
    /// the kernel's session goes on, its handles are recovered. Otherwise files that were open for writing are cut, because no close of
    /// theirs was seen. Sealed files are verified at their first open.
    ///
    /// # Errors
    /// When there is no journal, it is of another version, or it cannot be read. A torn tail is no error.
    pub fn recover(
        settings: NamespaceSettings,
        tier1: Arc<Tier1>,
        session_goes_on: bool,
        backing: &mut dyn FnMut(u64) -> Option<Arc<Backing>>,
    ) -> Result<Arc<Self>, NamespaceError> {
        let size_bytes = journal_bytes(&settings, &tier1);
        let (journal, image) = Journal::open(tier1.journal_dir(), size_bytes, settings.incarnation)?;
        // A peer copy and a file may share one backing file, and a number is found only once.
        let mut found: BTreeMap<u64, Option<Arc<Backing>>> = BTreeMap::new();
        let mut once = |number| found.entry(number).or_insert_with(|| backing(number)).clone();
        let rebuilt = replay::rebuild(image, settings.incarnation, session_goes_on, size_bytes, &mut once)?;
        Ok(Self::assemble(settings, tier1, rebuilt, journal))
    }

    fn assemble(
        settings: NamespaceSettings,
        tier1: Arc<Tier1>,
        (mut state, ends): (State, Ends),
        journal: Journal,
    ) -> Arc<Self> {
        state.note_touched();
        let readers = reader::Readers::new(settings.proc_root.clone());
        let writers = WriterCache::new(settings.proc_root, ends);
        writers.watch_all(&state.tree);
        let writers = Arc::new(writers);
        let namespace = Arc::new(Self {
            state: Guarded::new(settings.incarnation, settings.clock, state, journal, Arc::clone(&writers)),
            tier1,
            writers,
            readers,
            prediction: RwLock::new(None),
            locks: RwLock::new(None),
            xattr_source: RwLock::new(None),
            room_waits: Room::default(),
            fates: Mutex::default(),
            gate: Gate::default(),
            courtesy: Mutex::new(Courtesy::new(SEALS_GIVE_WAY_AT_ONCE, Instant::now())),
            snapshots: Mutex::new(()),
        });
        if namespace.state.commit().is_err() {
            tracing::error!("the journal did not take the first records of the tree");
        }
        namespace
    }

    /// Reports that a program waits for an answer: see [`Tier1::asked`].
    pub fn asked(&self) {
        self.tier1.asked();
    }

    /// Sets the function that predicts a new file's size in bytes from its path.
    pub fn set_prediction(&self, prediction: Prediction) {
        *self.prediction.write().expect(UNPOISONED) = Some(prediction);
    }

    /// Returns nanoseconds since 1970 by this node's clock.
    #[must_use]
    pub fn now_ns(&self) -> i64 {
        self.state.now_ns()
    }

    /// Waits until a change exists that was not taken yet. One task waits at a time. Cancel safe.
    pub async fn dirty(&self) {
        self.state.dirty().await;
    }

    /// Drains the set of changed nodes: files whose state changed or that are gone ([`NodeViews::view`] is then `None`), and directories
    /// renamed or removed. The answer holds all changes before the call; later ones are in the next answer. Entries are at most as many as
    /// there are nodes, plus those removed since the last call.
    #[must_use]
    pub fn take_dirty(&self) -> Vec<NodeId> {
        self.state.look(|state| state.tree.changes.take_dirty())
    }
}

/// Permission bits a directory may carry. Files lose suid and sgid besides, since a write cannot clear them (`file_remove_privs` would ask
/// the daemon on every write). Pipes, sockets and devices, which are not written here, keep all. [`Body::mode_bits`] decides which of these
/// hold.
const MODE_BITS: u32 = 0o3777;
const FILE_MODE_BITS: u32 = 0o1777;
const SPECIAL_MODE_BITS: u32 = 0o7777;

/// How long seals give way to programs at once, and half of the time. A model is opened within that time, and a copy or an upload of bytes
/// just saved hardly waits longer.
const SEALS_GIVE_WAY_AT_ONCE: Duration = Duration::from_millis(50);

/// Bytes of the pages that the journal's mount keeps for itself (its root directory and two inodes).
const JOURNAL_MOUNT_BYTES: u64 = 64 << 10;

fn journal_bytes(settings: &NamespaceSettings, tier1: &Tier1) -> u64 {
    let share = tier1.usage().journal_bytes.saturating_sub(JOURNAL_MOUNT_BYTES);
    settings.journal_bytes.unwrap_or(share / 2)
}

const UNPOISONED: &str = "a thread panicked while it held the namespace: its beliefs are broken";
