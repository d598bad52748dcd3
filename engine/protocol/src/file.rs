//! The states of one file on one node, from its first open to its seals.
//!
//! Owns: the effect of each event, the rule for closed and cut, the numbers of seals. Does not own: handles, leases and bytes (the
//! engine's namespace and Tier-1, which step this), whether a checkpoint is complete (`evidence`).

use crate::checksum::Crc64;
use crate::id::SealNumber;
use std::sync::Arc;

/// The state of a file's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileState {
    /// `writers` handles may write.
    Open { writers: u32 },
    /// The last writer called close(2).
    Closed,
    /// The kernel closed the file because the writer was killed, or its close was not seen. In a checkpoint the file is torn, unless
    /// something proves its size. Outside checkpoints it is sealed as it is, and marked as cut.
    Cut,
    /// Closed, but a writable mapping still lives, so the bytes may change at any moment. The daemon tests again; never committed.
    Mapped,
    /// The bytes are frozen and have a number and checksums, of the whole and of each chunk.
    Sealed { seal: SealNumber, size_bytes: u64, crc: Crc64, chunks: Arc<[Crc64]> },
}

/// Frozen bytes, with their number and checksums.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    pub number: SealNumber,
    pub size_bytes: u64,
    pub crc: Crc64,
    pub chunks: Arc<[Crc64]>,
}

/// An event for a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileEvent {
    /// A handle that may write was opened. [`FileEvent::Changed`] comes first: a writer changes the bytes.
    WriterOpened,
    /// A handle that may write was released; `cut` unless its close was seen.
    WriterReleased { cut: bool },
    /// The bytes may change from now on: the file was opened for writing, resized, or dropped.
    Changed,
    /// The file was opened with O_TRUNC: no byte of a killed writer is left.
    Emptied,
    /// The file goes on under another identity, whose seals are counted from the first.
    Renumbered,
    /// The lease test of a closed file found whether a mapping is still writable.
    Tested { mapped: bool },
    /// No handle can write any more, and the bytes were hashed.
    Hashed(Seal),
    /// The present bytes are read although a handle may write: they take the next number.
    Numbered,
    /// A rename(2), before or after the close. If the file was cut before it and not opened since, the rename proves only that it came
    /// later.
    Vouched,
    /// The daemon ends and no longer waits for handles and mappings: the present bytes are kept as cut.
    GivenUp,
    /// An index proves the exact size of a cut file, or the file was opened and closed again since: it counts as closed.
    Proven,
}

/// An event that cannot happen in that state: the caller is late, or mistaken. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{event:?} came to a file in state {state:?}")]
pub struct IllegalFileEvent {
    pub state: FileState,
    pub event: FileEvent,
}

/// A file on one node, with its state and its seals.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileFate {
    writers: u32,
    seal: Option<Box<Seal>>,
    /// The last number given to a seal of this file; the present seal's while the file is sealed.
    last_seal: SealNumber,
    /// Whether the close of a writer was not seen.
    cut: bool,
    /// The same, counting only the writers since the file was last opened for writing while no handle could write.
    cut_since_opened: bool,
    mapped: bool,
    vouched: bool,
    /// Whether a rename came after the file was cut, without an open between.
    renamed_cut: bool,
    /// Whether the writers no longer count.
    given_up: bool,
}

impl FileFate {
    /// Makes a file from a record, without open handles. `was_open`: its writers were not seen to close it.
    #[must_use]
    pub fn found(
        seal: Option<Seal>,
        last_seal: SealNumber,
        cut: bool,
        was_open: bool,
        vouched: bool,
    ) -> Self {
        let last_seal = seal.as_ref().map_or(last_seal, |seal| seal.number);
        let cut = cut || was_open;
        Self { seal: seal.map(Box::new), last_seal, cut, cut_since_opened: cut, vouched, ..Self::default() }
    }

    /// Sets whether the file was renamed after it was cut.
    #[must_use]
    pub fn found_renamed_cut(self, renamed_cut: bool) -> Self {
        Self { renamed_cut, ..self }
    }

    /// Restores the writing handles that outlived the daemon: the file is as open as before.
    pub fn taken_up(&mut self, writers: u32) {
        if writers > 0 {
            // The file was sealed after its writers were dropped, but then the daemon did not end.
            self.seal = None;
        }
        self.writers = writers;
    }

    #[must_use]
    pub fn state(&self) -> FileState {
        match (if self.given_up { 0 } else { self.writers }, &self.seal) {
            (0, Some(seal)) => FileState::Sealed {
                seal: seal.number,
                size_bytes: seal.size_bytes,
                crc: seal.crc,
                chunks: Arc::clone(&seal.chunks),
            },
            (0, None) if self.mapped => FileState::Mapped,
            (0, None) if self.cut => FileState::Cut,
            (0, None) => FileState::Closed,
            (writers, _) => FileState::Open { writers },
        }
    }

    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.given_up
    }

    /// Returns how many handles may write.
    #[must_use]
    pub fn writers(&self) -> u32 {
        self.writers
    }

    #[must_use]
    pub fn seal(&self) -> Option<&Seal> {
        self.seal.as_deref()
    }

    /// Returns the number of the seal if the file is sealed, else the last number given.
    #[must_use]
    pub fn last_seal(&self) -> SealNumber {
        self.last_seal
    }

    #[must_use]
    pub fn is_cut(&self) -> bool {
        self.cut
    }

    /// Whether the file was cut once, and all that opened it for writing since closed it.
    #[must_use]
    pub fn is_closed_again(&self) -> bool {
        self.cut && !self.cut_since_opened && self.writers == 0
    }

    /// Whether a rename vouches for the bytes, so that a cut does not make them torn.
    #[must_use]
    pub fn is_vouched(&self) -> bool {
        self.vouched
    }

    /// Whether a rename came after the file was cut. Such a rename vouches for the bytes only if their writers ended well
    /// (`curl URL >part && mv part model.bin`).
    #[must_use]
    pub fn is_renamed_cut(&self) -> bool {
        self.renamed_cut
    }

    /// Applies one event.
    ///
    /// # Errors
    /// [`IllegalFileEvent`] if the event cannot happen in this state; then nothing has changed.
    pub fn step(&mut self, event: FileEvent) -> Result<(), IllegalFileEvent> {
        let idle = (self.writers == 0 || self.given_up) && self.seal.is_none();
        match event {
            FileEvent::WriterOpened if self.seal.is_none() => {
                self.cut_since_opened &= self.writers > 0;
                self.writers += 1;
                (self.vouched, self.renamed_cut) = (false, false);
            }
            FileEvent::WriterReleased { cut } if self.writers > 0 => {
                self.writers -= 1;
                // A doubt that one writer left is not removed by other writers, nor by a later update.
                self.cut |= cut;
                self.cut_since_opened |= cut;
            }
            FileEvent::Changed => {
                self.seal = None;
                self.mapped = false;
                (self.vouched, self.renamed_cut) = (false, false);
            }
            FileEvent::Emptied if self.seal.is_none() => {
                self.cut = false;
                self.cut_since_opened = false;
            }
            FileEvent::Renumbered if self.seal.is_none() => self.last_seal = SealNumber(0),
            FileEvent::Tested { mapped } if idle => self.mapped = mapped,
            FileEvent::Hashed(seal) if idle && !self.mapped && seal.number == self.last_seal.next() => {
                self.last_seal = seal.number;
                self.seal = Some(Box::new(seal));
            }
            FileEvent::GivenUp if self.seal.is_none() => {
                (self.given_up, self.cut, self.cut_since_opened, self.mapped) = (true, true, true, false);
            }
            // A new name does not make an incomplete file whole.
            FileEvent::Vouched if self.writers == 0 && self.cut_since_opened => self.renamed_cut = true,
            FileEvent::Vouched => self.vouched = true,
            // Bytes that go to Tier-3 while they may still change get a number that no seal has.
            FileEvent::Numbered if self.seal.is_none() => self.last_seal = self.last_seal.next(),
            FileEvent::Proven if self.writers == 0 && self.cut => {
                self.cut = false;
                self.cut_since_opened = false;
            }
            event => return Err(IllegalFileEvent { state: self.state(), event }),
        }
        Ok(())
    }
}

/// The users besides the daemon's who may read an object, if the store is a directory. No other user may write an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Readers {
    /// The file's group.
    pub gid: u32,
    /// Whether the members of the group may read.
    pub group: bool,
    /// Whether all users outside the group may read.
    pub others: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use FileEvent::{
        Changed, Emptied, GivenUp, Hashed, Numbered, Proven, Renumbered, Tested, Vouched, WriterOpened,
    };
    use proptest::prelude::*;

    const CLOSE: FileEvent = FileEvent::WriterReleased { cut: false };
    const CUT: FileEvent = FileEvent::WriterReleased { cut: true };

    fn run(events: &[FileEvent]) -> FileFate {
        let mut file = FileFate::default();
        for event in events {
            file.step(event.clone()).unwrap();
        }
        file
    }

    fn hashed(number: u64) -> FileEvent {
        Hashed(Seal { number: SealNumber(number), size_bytes: 0, crc: Crc64(0), chunks: Arc::new([]) })
    }

    #[test]
    fn a_file_is_cut_when_any_of_its_writers_was() {
        assert_eq!(run(&[WriterOpened, WriterOpened, CUT, CLOSE]).state(), FileState::Cut);
        let updated = [WriterOpened, CUT, Changed, WriterOpened, CLOSE];
        assert_eq!(run(&updated).state(), FileState::Cut, "an update does not mend what was cut");
        let emptied = [WriterOpened, CUT, Changed, Emptied, WriterOpened, CLOSE];
        assert_eq!(run(&emptied).state(), FileState::Closed);
        assert_eq!(run(&[WriterOpened, CUT, Proven]).state(), FileState::Closed);
        assert!(run(&[WriterOpened, Vouched, CUT]).is_vouched(), "rename came first");
    }

    #[test]
    fn a_rename_vouches_for_nothing_that_was_cut_before_it() {
        let renamed = run(&[WriterOpened, CUT, Vouched]);
        assert!(!renamed.is_vouched(), "it was half when it got another name");
        assert!(renamed.is_renamed_cut(), "how its writer ended says the rest");
        let written_on = run(&[WriterOpened, CUT, Vouched, Changed, WriterOpened]);
        assert!(!written_on.is_renamed_cut(), "these are other bytes");
        assert!(!run(&[WriterOpened, GivenUp, CLOSE, Vouched]).is_vouched(), "the close came too late");
        assert!(run(&[WriterOpened, Vouched, CUT, Vouched]).is_vouched(), "the first one came in time");
        let resumed = [WriterOpened, CUT, Changed, WriterOpened, CLOSE, Vouched];
        assert!(run(&resumed).is_vouched(), "whoever went on with it closed it");
        let emptied = [WriterOpened, CUT, Changed, Emptied, WriterOpened, Vouched, CUT];
        assert!(run(&emptied).is_vouched(), "begun anew");
    }

    #[test]
    fn a_cut_file_that_is_opened_and_closed_again_says_so() {
        let again = |last: &[FileEvent]| {
            run(&[&[WriterOpened, CUT, Changed, WriterOpened], last].concat()).is_closed_again()
        };
        assert!(again(&[CLOSE]));
        assert!(!again(&[]), "it is open");
        assert!(!again(&[CUT]));
        assert!(!again(&[WriterOpened, CUT, CLOSE]), "what one writer left in doubt the others do not mend");
        assert!(!again(&[WriterOpened, CLOSE, WriterOpened, CUT, CLOSE]));
        assert!(!run(&[WriterOpened, CUT]).is_closed_again());
        assert!(!run(&[WriterOpened, CLOSE]).is_closed_again(), "it was never cut");
        assert!(!FileFate::found(None, SealNumber(1), true, false, false).is_closed_again());
    }

    #[test]
    fn what_is_read_while_it_may_change_has_a_number_that_no_seal_has() {
        let mut file = run(&[WriterOpened, Numbered, CUT]);
        assert_eq!(file.last_seal(), SealNumber(1));
        assert!(file.step(hashed(1)).is_err());
        file.step(hashed(2)).unwrap();
        assert!(file.is_cut(), "sealed as it is, it stays marked");
        assert!(file.step(Numbered).is_err(), "its bytes have a number");
    }

    #[test]
    fn what_is_given_up_is_cut_whoever_has_it_open() {
        let mut file = run(&[WriterOpened, GivenUp]);
        assert_eq!(file.state(), FileState::Cut);
        assert!(!file.is_closed_again());
        file.step(hashed(1)).unwrap();
        file.step(CLOSE).unwrap();
        assert!(matches!(file.state(), FileState::Sealed { .. }) && file.is_cut(), "the close came too late");
        assert_eq!(run(&[WriterOpened, CLOSE, Tested { mapped: true }, GivenUp]).state(), FileState::Cut);
        assert!(file.step(GivenUp).is_err(), "its bytes have a number");
        file.taken_up(1);
        assert_eq!(file.seal(), None, "the daemon did not end, and it is written on");
    }

    #[test]
    fn a_sealed_file_that_is_written_again_gets_the_next_seal() {
        let mut file = run(&[WriterOpened, CLOSE, Tested { mapped: true }]);
        assert_eq!(file.state(), FileState::Mapped);
        assert!(file.step(hashed(1)).is_err(), "its bytes may change at any moment");
        file.step(Tested { mapped: false }).unwrap();
        file.step(hashed(1)).unwrap();
        assert!(file.step(WriterOpened).is_err(), "nobody said that what was sealed changes");
        for event in [Changed, WriterOpened, CLOSE] {
            file.step(event).unwrap();
        }
        assert!(file.step(hashed(1)).is_err(), "the hash of bytes that were changed since");
        file.step(hashed(2)).unwrap();
        assert!(matches!(file.state(), FileState::Sealed { seal: SealNumber(2), .. }));
    }

    #[test]
    fn a_file_found_open_is_cut_and_a_found_seal_stands() {
        let seal = Seal { number: SealNumber(3), size_bytes: 0, crc: Crc64(0), chunks: Arc::new([]) };
        let open = FileFate::found(None, SealNumber(3), false, true, false);
        assert_eq!((open.state(), open.last_seal()), (FileState::Cut, SealNumber(3)));
        let sealed = FileFate::found(Some(seal), SealNumber(3), false, false, false);
        assert!(matches!(sealed.state(), FileState::Sealed { seal: SealNumber(3), .. }));
    }

    fn events() -> impl Strategy<Value = Vec<FileEvent>> {
        let one = prop_oneof![
            3 => Just(WriterOpened),
            3 => any::<bool>().prop_map(|cut| FileEvent::WriterReleased { cut }),
            2 => Just(Changed),
            1 => Just(Emptied),
            1 => Just(Renumbered),
            1 => any::<bool>().prop_map(|mapped| Tested { mapped }),
            3 => (1_u64..4).prop_map(hashed),
            1 => Just(Numbered),
            1 => Just(Vouched),
            1 => Just(Proven),
        ];
        prop::collection::vec(one, 0..60)
    }

    proptest! {
        #[test]
        fn nothing_is_sealed_that_may_still_change(events in events()) {
            let mut file = FileFate::default();
            let (mut open, mut in_doubt, mut seals) = (0_u32, false, SealNumber(0));
            for event in events {
                let before = file.clone();
                if file.step(event.clone()).is_err() {
                    prop_assert_eq!(&file, &before);
                    continue;
                }
                match event {
                    WriterOpened => open += 1,
                    FileEvent::WriterReleased { cut } => {
                        open -= 1;
                        in_doubt |= cut;
                    }
                    Emptied | Proven => in_doubt = false,
                    Renumbered => seals = SealNumber(0),
                    Numbered => seals = seals.next(),
                    _ => {}
                }
                match file.state() {
                    FileState::Open { writers } => prop_assert_eq!(writers, open),
                    FileState::Sealed { seal, .. } => {
                        prop_assert_eq!((open, file.is_cut()), (0, in_doubt));
                        prop_assert!(seal > seals || before.seal() == file.seal(), "a number is used once");
                        seals = seal;
                    }
                    FileState::Cut => prop_assert!(in_doubt && open == 0),
                    FileState::Closed => prop_assert!(!in_doubt && open == 0),
                    FileState::Mapped => prop_assert!(open == 0),
                }
            }
        }
    }
}
