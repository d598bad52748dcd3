//! Removed or truncated bytes that are not free yet.
//!
//! Owns: how long a new file waits for such bytes when they are most of the room, and stopping the readers that still hold them. Does not
//! own: freeing them (`State::release_unreachable`, Tier-1), what else gives way (`reclaim`), which call waits (the adapter).
//!
//! After unlink(2) the kernel's RELEASE and FORGET are on their way, and the seal or the upload may still read the bytes. A program that
//! continues to write at memory speed would find Tier-1 full in that moment. A file that is made smaller while its bytes are read gets
//! another backing file, and leaves the old one as if it had been removed ([`Departures::leaves`]).

use super::State;
use super::file::{File, SealHold};
use super::host_room::HostRoom;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Longest wait. A chunk is hashed within a millisecond, and a part on its way to a disk is written within a few; if other programs use the
/// processors, each waits for its turn. Without the wait the save fails.
const DEPARTURE_WAIT: Duration = Duration::from_secs(2);

/// Longest wait for bytes that only the kernel still has open: a program may keep another file open for ever.
const LINGER_WAIT: Duration = Duration::from_millis(200);

/// Room that a writer finds at once. Tier-1 frees spent files in the background, faster than memory speed. If other programs use the
/// processors, a writer this far ahead still finds room. More room would be returned to the kernel, and to this machine's host, in vain:
/// the writer's next pages would no longer be warm.
const LEAD_BYTES: u64 = 512 << 20;

/// Interval between two checks.
const DEPARTURE_LOOK: Duration = Duration::from_millis(1);

/// Size below which a file is not waited for: its bytes are gone before a writer could fill them.
const DEPARTING_BYTES_MIN: u64 = 1 << 20;

/// Most files remembered; beyond, the oldest is not waited for.
const DEPARTING_MAX: usize = 1024;

/// A file whose bytes are about to be free.
#[derive(Debug)]
pub(super) struct Departing {
    /// Lives until the budget no longer counts the bytes. If other programs use the processors, that is long after the last holder has let
    /// go.
    counted: Weak<()>,
    hold: Weak<SealHold>,
    size_bytes: u64,
    since: Instant,
}

/// All departing files.
#[derive(Debug, Default)]
pub(super) struct Departures {
    /// Oldest first.
    known: Vec<Departing>,
    /// Bytes that went since the last wait. Tier-1 returns them to the kernel in the background, and a writer at memory speed may be
    /// quicker.
    went_bytes: u64,
}

impl Departing {
    /// Returns the departure of a file that drops its memory; none if it is not worth a wait.
    pub(super) fn of(file: &File) -> Option<Self> {
        let backing = file.backing.as_ref()?;
        let counted = backing.counted()?;
        let size_bytes = match file.fate.writers() {
            0 => file.size_bytes,
            // Only the backing file shows how far its writers came.
            _ => backing.stat().ok()?.size_bytes,
        };
        let hold = Weak::clone(&file.hold);
        (size_bytes >= DEPARTING_BYTES_MIN).then(|| Self { counted, hold, size_bytes, since: Instant::now() })
    }
}

impl Departures {
    /// Notes that no name leads to a file's present memory, or soon none will. A new file waits for that memory. If memory is short, jobs
    /// that hash or upload it are stopped.
    pub(super) fn leaves(&mut self, file: &File) {
        if let Some(departing) = Departing::of(file) {
            self.add(departing);
        }
    }

    /// Adds a file. The wait for a known one is not prolonged.
    fn add(&mut self, departing: Departing) {
        if self.known.iter().any(|known| known.counted.ptr_eq(&departing.counted)) {
            return;
        }
        self.forget_gone();
        if self.known.len() >= DEPARTING_MAX {
            self.known.remove(0);
        }
        self.known.push(departing);
    }

    fn forget_gone(&mut self) {
        let went = &mut self.went_bytes;
        self.known.retain(|departing| {
            let stays = departing.counted.strong_count() > 0;
            *went += if stays { 0 } else { departing.size_bytes };
            stays
        });
    }

    /// Returns the bytes that are still worth a wait at `now`.
    fn awaited_bytes(&mut self, now: Instant) -> u64 {
        self.forget_gone();
        let recent =
            self.known.iter().filter(|departing| now.duration_since(departing.since) < DEPARTURE_WAIT);
        recent.map(|departing| departing.size_bytes).sum()
    }

    /// Stops the jobs that hash or upload these bytes.
    fn abandon(&self) {
        self.known.iter().filter_map(|departing| departing.hold.upgrade()).for_each(|hold| hold.abandon());
    }
}

impl<'a> HostRoom<'a> {
    /// Whether a new file should wait for bytes that were just removed. If so, jobs that still read them are stopped. Costs a short lock,
    /// nearly always no more.
    pub fn awaits_departures(&self) -> bool {
        let (bytes, went_bytes) = self
            .state
            .look(|state| (state.departing.awaited_bytes(Instant::now()), state.departing.went_bytes));
        bytes + went_bytes > 0 && self.are_awaited(bytes, went_bytes)
    }

    /// Whether departing `bytes` are more than is available without them, or room is short: less than departs or went since the last wait,
    /// at most [`LEAD_BYTES`]. If so, stops the jobs that read them.
    fn are_awaited(&self, bytes: u64, went_bytes: u64) -> bool {
        let usage = self.tier1.usage();
        let are_awaited =
            bytes > usage.available_bytes || usage.room_bytes() < LEAD_BYTES.min(bytes + went_bytes);
        if are_awaited && bytes > 0 {
            self.abandon_departed();
        }
        are_awaited
    }

    /// Blocks until the bytes just removed are free, or are not worth the wait any more; two seconds at most.
    pub fn wait_for_departures(&self) {
        let until = Instant::now() + DEPARTURE_WAIT;
        let mut linger_until = Instant::now() + LINGER_WAIT;
        loop {
            let (lingers, now) = (self.tier1.let_go(), Instant::now());
            let bytes = self.state.look(|state| state.departing.awaited_bytes(now));
            let are_awaited = bytes > 0 && self.are_awaited(bytes, 0);
            if are_awaited {
                linger_until = now + LINGER_WAIT;
            }
            let is_short = self.tier1.usage().room_bytes() < LEAD_BYTES;
            let waits = are_awaited || lingers && is_short && now < linger_until;
            if !waits || now >= until {
                break;
            }
            std::thread::sleep(DEPARTURE_LOOK);
        }
        self.state.look(|state| state.departing.went_bytes = 0);
        self.tier1.free_spent(LEAD_BYTES);
    }

    /// Stops the jobs that read bytes which no name leads to and no program has open: the memory is needed.
    pub fn abandon_departed(&self) {
        self.state.look(|state: &mut State| state.departing.abandon());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Caller, Namespace, NamespaceSettings, ROOT, SetAttr};
    use futures::FutureExt;
    use tidemark_protocol::id::{FileCounter, FileId, Generation, Incarnation};
    use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

    #[test]
    fn what_was_removed_is_awaited_until_it_is_free_but_not_for_ever() {
        let directory = tempfile::tempdir().unwrap();
        let medium = MediumChoice::Directory(directory.path().join("tier1"));
        let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
        let id = FileId { incarnation: Incarnation(1), counter: FileCounter(1) };
        let mut file = File::new(id, Generation(1), Some(tier1.create(None).unwrap()), 0);
        file.size_bytes = DEPARTING_BYTES_MIN - 1;
        assert!(Departing::of(&file).is_none(), "too small for a wait");
        file.size_bytes = 3 << 20;
        let reads = file.hold();
        let mut departures = Departures::default();
        departures.add(Departing::of(&file).unwrap());
        departures.add(Departing::of(&file).unwrap());
        let now = Instant::now();
        assert_eq!(departures.awaited_bytes(now), 3 << 20, "a file counts once");
        assert_eq!(departures.awaited_bytes(now + DEPARTURE_WAIT), 0, "somebody keeps it for longer");
        assert!(!reads.is_abandoned() && reads.abandoned().now_or_never().is_none());
        departures.abandon();
        assert!(reads.is_abandoned() && reads.abandoned().now_or_never().is_some());
        drop(file);
        assert_eq!(departures.awaited_bytes(now), 0, "its bytes are free");
        assert_eq!(departures.went_bytes, 3 << 20, "and the kernel may not have them yet");
    }

    /// The moment under test: truncate(2) between the close and the end of the seal.
    #[test]
    fn what_a_file_had_beyond_its_new_size_is_awaited_where_the_old_bytes_are_being_hashed() {
        let directory = tempfile::tempdir().unwrap();
        let medium = MediumChoice::Directory(directory.path().join("tier1"));
        let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
        let settings =
            NamespaceSettings { journal_bytes: Some(1 << 20), ..NamespaceSettings::new(Incarnation(1)) };
        let namespace = Namespace::new(settings, tier1).unwrap();
        let caller = Caller { uid: 0, gid: 0, pid: 0, now_ns: 1, request: 0 };
        let flags = (rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CREATE).bits().cast_signed();
        let (made, open) = namespace.create(&caller, ROOT, b"f", 0o644, flags).unwrap();
        open.backing.set_len(3 << 20).unwrap();
        namespace.handles().flush(open.fh, &caller, false).unwrap();
        namespace.handles().release(open.fh).unwrap();
        drop(open);
        let awaited_bytes = || namespace.state.look(|state| state.departing.awaited_bytes(Instant::now()));
        let resize = |size_bytes| {
            let size = SetAttr { size: Some(size_bytes), ..SetAttr::default() };
            namespace.setattr(&caller, made.node, &size).unwrap().size_bytes
        };
        let ticket = namespace.seals().begin_seal(made.node).unwrap();
        assert_eq!((resize(4 << 20), awaited_bytes()), (4 << 20, 0), "it has all that it had");
        drop(ticket);
        let ticket = namespace.seals().begin_seal(made.node).unwrap();
        assert_eq!((resize(1 << 20), awaited_bytes()), (1 << 20, 4 << 20));
        namespace.room().abandon_departed();
        assert!(ticket.is_abandoned());
        drop(ticket);
        assert_eq!(awaited_bytes(), 0);
        assert_eq!((resize(1 << 10), awaited_bytes()), (1 << 10, 0), "cut where it is, nothing departs");
    }
}
