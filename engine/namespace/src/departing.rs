//! Bytes that a program removed, or cut off, and that are not free yet.
//!
//! Owns: what a new file waits for when they are most of the room there is, and telling those who still read them that nobody wants
//! them. Does not own: freeing them (`State::release_unreachable`, Tier-1), what else gives way (`reclaim`), who waits (the adapter).
//!
//! After unlink(2) the kernel's RELEASE and FORGET are on their way, and the seal or the upload may still read the bytes. A program
//! that goes on writing at memory speed would meet a full Tier-1 in that moment. A file that is made smaller while they are read gets
//! other memory, and leaves the old one as if it had been removed ([`Departures::leaves`]).

use super::State;
use super::file::{File, SealHold};
use super::host_room::HostRoom;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// The longest wait. A chunk is hashed within a millisecond, and a part that is on its way to a disk is written within some; where
/// other programs have the processors, each of them waits for its turn. Without the wait the save fails.
const DEPARTURE_WAIT: Duration = Duration::from_secs(2);

/// The longest wait for what nobody but the kernel has open any more; a program may have another file open for ever.
const LINGER_WAIT: Duration = Duration::from_millis(200);

/// Room that a writer finds at once. Tier-1's spent files give way in the background, at more than the speed of memory; a writer that is
/// ahead of that for so much meets no wall, where other programs have the processors. More would be given back to the kernel, and
/// this machine's host, for nothing: what is written next was warm.
const LEAD_BYTES: u64 = 512 << 20;

/// Between two looks.
const DEPARTURE_LOOK: Duration = Duration::from_millis(1);

/// Smaller files are not waited for: a writer does not fill what they leave before they are gone.
const DEPARTING_BYTES_MIN: u64 = 1 << 20;

/// Files remembered; beyond, the oldest is not waited for.
const DEPARTING_MAX: usize = 1024;

/// One file that is about to be free.
#[derive(Debug)]
pub(super) struct Departing {
    /// Lives until the budget counts the bytes as nobody's. Where other programs have the processors, that is long after the last
    /// holder has let go.
    counted: Weak<()>,
    hold: Weak<SealHold>,
    size_bytes: u64,
    since: Instant,
}

/// All of them.
#[derive(Debug, Default)]
pub(super) struct Departures {
    /// The oldest first.
    known: Vec<Departing>,
    /// Bytes of those that went since somebody waited: Tier-1 gives them back to the kernel in the background, and a writer at memory
    /// speed may be quicker.
    went_bytes: u64,
}

impl Departing {
    /// The departure of a file that gives its memory up; none where that is not worth a wait.
    pub(super) fn of(file: &File) -> Option<Self> {
        let backing = file.backing.as_ref()?;
        let counted = backing.counted()?;
        let size_bytes = match file.fate.writers() {
            0 => file.size_bytes,
            // Only the backing file knows how far its writers came.
            _ => backing.stat().ok()?.size_bytes,
        };
        let hold = Weak::clone(&file.hold);
        (size_bytes >= DEPARTING_BYTES_MIN).then(|| Self { counted, hold, size_bytes, since: Instant::now() })
    }
}

impl Departures {
    /// No name leads to what a file has in memory now, or is about to: a file that begins waits for that memory, and who hashes or
    /// uploads it is told to stop where memory is short.
    pub(super) fn leaves(&mut self, file: &File) {
        if let Some(departing) = Departing::of(file) {
            self.add(departing);
        }
    }

    /// Adds a file. One that is known already is not waited for longer.
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

    /// Bytes that are still worth a wait at `now`.
    fn awaited_bytes(&mut self, now: Instant) -> u64 {
        self.forget_gone();
        let recent =
            self.known.iter().filter(|departing| now.duration_since(departing.since) < DEPARTURE_WAIT);
        recent.map(|departing| departing.size_bytes).sum()
    }

    /// Who hashes or uploads them stops.
    fn abandon(&self) {
        self.known.iter().filter_map(|departing| departing.hold.upgrade()).for_each(|hold| hold.abandon());
    }
}

impl<'a> HostRoom<'a> {
    /// Whether a file that begins now should wait for what was just removed. Who still reads those bytes is told to stop. Costs a short
    /// lock, nearly always no more.
    pub fn awaits_departures(&self) -> bool {
        let (bytes, went_bytes) = self
            .state
            .look(|state| (state.departing.awaited_bytes(Instant::now()), state.departing.went_bytes));
        bytes + went_bytes > 0 && self.are_awaited(bytes, went_bytes)
    }

    /// Whether `bytes` that are on their way, and those that went since somebody waited, are more than is available without them, or
    /// stand in the way of a writer.
    fn are_awaited(&self, bytes: u64, went_bytes: u64) -> bool {
        let usage = self.tier1.usage();
        let are_awaited =
            bytes > usage.available_bytes || usage.room_bytes() < LEAD_BYTES.min(bytes + went_bytes);
        if are_awaited && bytes > 0 {
            self.abandon_departed();
        }
        are_awaited
    }

    /// Blocks until what was just removed is free, or is not worth the wait any more; two seconds at most.
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

    /// Tells those who read bytes that no name leads to, and nobody has open, to stop: the memory is needed.
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

    /// The moment: truncate(2) comes between the close and the end of the seal.
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
