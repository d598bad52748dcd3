//! Sealing: freezing a closed file's bytes while nobody can write them.
//!
//! Owns: tickets, the lease test's outcome, holds on a seal's bytes, the number of bytes that may still change. Does not own:
//! hashing (the node loop).

use super::file::SealHold;
use super::guarded::Guarded;
use super::tree::Tree;
use super::{FsError, NodeId, ROOT, State, UNPOISONED};
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tidemark_content::Judgement;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::file::{FileEvent, FileState, Readers, Seal};
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_tier1::courtesy::Courtesy;
use tidemark_tier1::{Backing, Tier1};

/// Leave to hash a closed file. While it lives, an overwrite leaves these bytes alone; a write-open voids it.
#[derive(Debug)]
pub struct SealTicket {
    pub node: NodeId,
    pub file: FileId,
    pub seal: SealNumber,
    pub backing: Arc<Backing>,
    pub size_bytes: u64,
    changes: u64,
    hold: Arc<SealHold>,
}

/// Bytes to judge; see [`Seals::begin_judging`].
#[derive(Debug)]
pub struct JudgeTicket {
    pub node: NodeId,
    pub backing: Arc<Backing>,
    pub size_bytes: u64,
    changes: u64,
}

/// The bytes of a seal, kept as they are while this lives, whatever happens to the file.
#[derive(Debug)]
pub struct SealPin {
    pub backing: Arc<Backing>,
    pub size_bytes: u64,
    /// Users besides the owner who could read the file when it was pinned.
    pub readers: Readers,
    hold: Arc<SealHold>,
}

impl SealTicket {
    /// Whether the file was removed and its memory is needed, so that hashing it is useless.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.hold.is_abandoned()
    }
}

impl SealPin {
    /// Resolves when the file was removed and its memory is needed: whoever uploads it should stop and drop this.
    pub async fn abandoned(&self) {
        self.hold.abandoned().await;
    }
}

/// Read permission of the group and of others in a file's mode, and leave to pass through a directory in its mode.
const GROUP_READS: u32 = 0o040;
const OTHERS_READ: u32 = 0o004;
const GROUP_PASSES: u32 = 0o010;
const OTHERS_PASS: u32 = 0o001;

/// Returns which users besides its owner can read a file by its first name. Decides as the kernel does: by the modes of the file and of
/// all directories above it.
fn readers(tree: &Tree, node: NodeId) -> Readers {
    let Some(file) = tree.nodes.get(&node) else { return Readers::default() };
    let (mut group, mut others) = (file.mode & GROUP_READS != 0, file.mode & OTHERS_READ != 0);
    let mut at = node;
    while at != ROOT {
        let Some(directory) = tree.parent(at).and_then(|parent| Some((parent, tree.nodes.get(&parent)?)))
        else {
            // The file has no name, or is below a directory that was removed.
            return Readers::default();
        };
        at = directory.0;
        let (mode, gid) = (directory.1.mode, directory.1.gid);
        others &= mode & OTHERS_PASS != 0;
        group &= mode & if gid == file.gid { GROUP_PASSES } else { OTHERS_PASS } != 0;
    }
    Readers { gid: file.gid, group, others }
}

impl SealPin {
    /// Pins bytes in a backing file that no file of the tree has, so that nothing changes them.
    #[must_use]
    pub fn of_landing(backing: Arc<Backing>, size_bytes: u64) -> Self {
        Self { backing, size_bytes, readers: Readers::default(), hold: Arc::default() }
    }
}

/// The bytes of a file that a program may still write, as far as the file reached at one moment. The reader of the bytes checks whether
/// they change meanwhile.
#[derive(Debug, Clone)]
pub struct StandingBytes {
    pub file: FileId,
    /// Number that no seal has.
    pub number: SealNumber,
    pub backing: Arc<Backing>,
    pub reach: Reach,
    /// Users besides the owner who could read the file then.
    pub readers: Readers,
}

/// How far a file reaches and when the kernel last saw it written or its time set. The kernel does not see every change through a
/// mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reach {
    pub size_bytes: u64,
    pub written_ns: i64,
}

/// Why a file cannot be sealed now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotSealable {
    #[error("it is open for writing; it is sealed after the last close")]
    Open,
    #[error("it was cut: its writer was killed; an index that proves its size may accept it")]
    Cut,
    #[error("a writable mapping of it still lives; try again when the process unmaps it")]
    Mapped,
    #[error("it is sealed already")]
    Sealed,
    #[error("another call is changing its bytes; try again")]
    Busy,
    #[error("it is gone, COLD or no file")]
    Gone,
    #[error("its backing file cannot be examined; see the daemon's log")]
    Unreadable,
}

/// The bytes changed while they were hashed; the checksums are of nothing that exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the file was opened for writing, changed or removed meanwhile; begin again when it is closed")]
pub struct Voided;

/// Freezing the bytes of closed files, and reading what is frozen.
#[derive(Debug, Clone, Copy)]
pub struct Seals<'a> {
    pub(super) state: &'a Guarded,
    pub(super) tier1: &'a Arc<Tier1>,
    pub(super) courtesy: &'a Mutex<Courtesy>,
}

impl Seals<'_> {
    /// Begins to seal a closed file that no program writes and of which the lease test finds no writable mapping.
    ///
    /// # Errors
    /// Why not; [`NotSealable::Mapped`] also makes that its state, until the next attempt.
    pub fn begin_seal(&self, node: NodeId) -> Result<SealTicket, NotSealable> {
        self.begin(node, false)
    }

    /// Does the same for a file that belongs to no checkpoint: a file that was cut is sealed as it is, and stays marked.
    ///
    /// # Errors
    /// As [`Seals::begin_seal`], without [`NotSealable::Cut`].
    pub fn begin_seal_as_it_is(&self, node: NodeId) -> Result<SealTicket, NotSealable> {
        self.begin(node, true)
    }

    fn begin(&self, node: NodeId, as_it_is: bool) -> Result<SealTicket, NotSealable> {
        let (backing, changes, given_up) = self.state.look(|state| {
            let file = state.tree.node(node).and_then(|node| node.file()).map_err(|_| NotSealable::Gone)?;
            if file.busy {
                return Err(NotSealable::Busy);
            }
            match file.fate.state() {
                FileState::Open { .. } => return Err(NotSealable::Open),
                FileState::Sealed { .. } => return Err(NotSealable::Sealed),
                FileState::Cut if !as_it_is => return Err(NotSealable::Cut),
                FileState::Closed | FileState::Mapped | FileState::Cut => {}
            }
            let backing = file.backing.clone().ok_or(NotSealable::Gone)?;
            Ok((backing, file.changes, file.fate.is_given_up()))
        })?;
        // Without the lock: the test takes and gives back a lease, and a write-open in between is seen below.
        let unreadable = |error| {
            tracing::error!(node, %error, "the lease test failed");
            NotSealable::Unreadable
        };
        let mapped = !given_up && backing.writable_elsewhere().map_err(unreadable)?;
        let changed = self.state.change(|state| {
            let file = state.tree.file_mut(node)?;
            // Not "open": the call in progress may fail, and then nothing marks the file again.
            if file.busy {
                return Ok(Err(NotSealable::Busy));
            }
            let was = file.fate.state();
            if file.changes != changes || file.fate.step(FileEvent::Tested { mapped }).is_err() {
                return Ok(Err(NotSealable::Open));
            }
            if mapped {
                if was != FileState::Mapped {
                    state.tree.mark(node);
                }
                return Ok(Err(NotSealable::Mapped));
            }
            let hold = file.hold();
            let (id, seal, size_bytes) = (file.id, file.fate.last_seal().next(), backing.stat()?.size_bytes);
            Ok(Ok(SealTicket { node, file: id, seal, backing, size_bytes, changes, hold }))
        });
        changed.unwrap_or(Err(NotSealable::Gone))
    }

    /// Treats a file as cut, because the daemon ends and no longer waits for programs that have it open or mapped. Returns whether it is.
    pub fn give_up(&self, node: NodeId) -> bool {
        self.step_fate(node, FileEvent::GivenUp)
    }

    /// Gives the present bytes of a file a number of their own, although a program may write them. Returns none if the file is sealed,
    /// another call is changing it, or the bytes are not here. The journal has the number when this returns.
    pub fn number_standing(&self, node: NodeId) -> Option<StandingBytes> {
        let numbered = self.state.change(|state| {
            let target = state.tree.node(node)?;
            let file = target.file()?;
            if file.busy || file.fate.seal().is_some() || file.remote.is_some() {
                return Err(FsError::Busy);
            }
            let backing = file.backing.clone().ok_or(FsError::Stale)?;
            let reach = reach_of(&backing)?;
            let file = state.tree.file_mut(node)?;
            file.fate.step(FileEvent::Numbered).map_err(|_| FsError::Stale)?;
            let (id, number) = (file.id, file.fate.last_seal());
            state.tree.touched.node(node);
            let readers = readers(&state.tree, node);
            Ok(StandingBytes { file: id, number, backing, reach, readers })
        });
        numbered.ok()
    }

    /// Returns how far the bytes of a file of this node reach now; none if they are not here.
    pub fn reach(&self, node: NodeId) -> Option<Reach> {
        let backing = self.state.look(|state| state.tree.node(node).ok()?.file().ok()?.backing.clone())?;
        reach_of(&backing).ok()
    }

    /// Whether a file's bytes are verified before they are served: they were sealed before this daemon started and not verified since, or
    /// they were found bad ([`HostCopies::doubt_host`](super::HostCopies::doubt_host)).
    pub fn is_unverified(&self, node: NodeId) -> bool {
        let unverified = |state: &mut State| Ok::<_, FsError>(state.tree.node(node)?.file()?.unverified);
        self.state.look(unverified).unwrap_or(false)
    }

    /// Notes that the bytes of this seal were verified and are good.
    pub fn verified(&self, file: FileId, seal: SealNumber) {
        self.state.look(|state| {
            let node = state.node_of(file, self.state.incarnation);
            if let Some(Ok(file)) = node.map(|node| state.tree.file_mut(node))
                && file.fate.seal().is_some_and(|now| now.number == seal)
            {
                file.unverified = false;
            }
        });
    }

    /// Returns the bytes of a file without writers, to judge their content. The bytes may change meanwhile.
    pub fn begin_judging(&self, node: NodeId) -> Option<JudgeTicket> {
        self.state.look(|state| {
            let file = state.tree.node(node).and_then(|node| node.file()).ok()?;
            let backing = file.backing.clone().filter(|_| file.fate.writers() == 0)?;
            let size_bytes = backing.stat().ok()?.size_bytes;
            Some(JudgeTicket { node, backing, size_bytes, changes: file.changes })
        })
    }

    /// Keeps the judgement of the bytes, unless they have changed since, or may change.
    pub fn end_judging(&self, ticket: &JudgeTicket, content: Option<Judgement>) {
        // If the file has changed or is gone, no caller waits for the answer.
        let _ = self.state.change(|state| {
            let file = state.tree.file_mut(ticket.node)?;
            if file.changes == ticket.changes && file.fate.writers() == 0 {
                file.judged = Some(content.map(Box::new));
                state.tree.mark(ticket.node);
            }
            Ok(())
        });
    }

    /// Keeps the judgement of this seal's bytes, for as long as they are the file's.
    pub fn note_content(&self, file: FileId, seal: SealNumber, content: Option<Judgement>) {
        self.state.look(|state| {
            let node = state.node_of(file, self.state.incarnation);
            if let Some(Ok(file)) = node.map(|node| state.tree.file_mut(node))
                && file.fate.seal().is_some_and(|now| now.number == seal)
            {
                file.judged = Some(content.map(Box::new));
            }
        });
    }

    /// Freezes the ticket's bytes under their checksums: of the whole, and of each chunk in order. The space made
    /// ready beyond their end is given back.
    ///
    /// # Errors
    /// [`Voided`] when the file was opened for writing, truncated or removed since the ticket was given, or when
    /// the journal did not take the seal.
    pub fn finish_seal(&self, ticket: &SealTicket, crc: Crc64, chunks: Arc<[Crc64]>) -> Result<(), Voided> {
        let expected = tidemark_protocol::layout::chunk_count(ticket.size_bytes);
        assert!(chunks.len() as u64 == expected, "{} chunk checksums for {expected} chunks", chunks.len());
        let sealed = self.state.change(|state| {
            let target = state.tree.node(ticket.node)?;
            let file = target.file()?;
            let same = file.changes == ticket.changes && file.id == ticket.file;
            if !same || file.busy || target.link_count() == 0 {
                return Err(FsError::Stale);
            }
            let file = state.tree.file_mut(ticket.node)?;
            let seal = Seal { number: ticket.seal, size_bytes: ticket.size_bytes, crc, chunks };
            file.fate.step(FileEvent::Hashed(seal)).map_err(|_| FsError::Stale)?;
            file.size_bytes = ticket.size_bytes;
            state.tree.touched.node(ticket.node);
            state.tree.touched.chunks.push(ticket.node);
            state.tree.mark(ticket.node);
            Ok(())
        });
        sealed.map_err(|_| Voided)?;
        // A writer that came meanwhile keeps the space made ready for it, and the trim is refused.
        if let Err(error) = ticket.backing.trim() {
            tracing::debug!(node = ticket.node, %error, "the space beyond a sealed file's end stays with it");
        }
        Ok(())
    }

    /// Returns the bytes of a seal, to read and upload. Until the pin is dropped an overwrite copies instead of changing them, and they
    /// are not reclaimed. Returns none if the file has another seal by now, or the bytes are not here.
    pub fn pin_seal(&self, file: FileId, seal: SealNumber) -> Option<SealPin> {
        self.state.look(|state| {
            let node = state.node_of(file, self.state.incarnation)?;
            let file = state.tree.file_mut(node).ok()?;
            let frozen = file.fate.seal().filter(|frozen| frozen.number == seal && !file.busy)?;
            let size_bytes = frozen.size_bytes;
            let backing = Arc::clone(file.backing.as_ref()?);
            let hold = file.hold();
            Some(SealPin { backing, size_bytes, readers: readers(&state.tree, node), hold })
        })
    }

    /// Counts a cut file as closed: an index proved its exact size, or all who wrote it since closed it. Returns false if it is not cut
    /// any more.
    pub fn accept_cut(&self, node: NodeId) -> bool {
        self.step_fate(node, FileEvent::Proven)
    }

    /// Applies an event to a file's state. Returns false if the event comes too late, or the file is gone.
    fn step_fate(&self, node: NodeId, event: FileEvent) -> bool {
        let stepped = self.state.change(|state| {
            state.tree.file_mut(node)?.fate.step(event).map_err(|_| FsError::Invalid)?;
            state.tree.touched.node(node);
            state.tree.mark(node);
            Ok(())
        });
        stepped.is_ok()
    }

    /// Whether seals wait now, so that programs which ask for something have the processors. Costs a short lock.
    pub fn give_way(&self) -> bool {
        let mut courtesy = self.courtesy.lock().expect(UNPOISONED);
        courtesy.gives_way(self.tier1.asked_so_far(), Instant::now())
    }
}

fn reach_of(backing: &Backing) -> io::Result<Reach> {
    let stat = backing.stat()?;
    // Its mtime is the same each time after a program has set the file's.
    Ok(Reach { size_bytes: stat.size_bytes, written_ns: stat.ctime_ns })
}
