//! The states of one file on one node, from its first open to its seals.
//!
//! Owns: which event leads where, and what must be done for it; the rule for closed and cut. Does not own: handles,
//! leases and bytes (the engine's namespace and Tier-1), whether a checkpoint is complete (`evidence`).

use crate::checksum::Crc64;
use crate::id::SealNumber;
use std::sync::Arc;

/// Where a file's bytes stand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileState {
    /// That many handles may write.
    Open { writers: u32 },
    /// The last writer called close(2).
    Closed,
    /// The kernel closed it because the writer was killed. Torn, unless something proves its size: see [`FileFate`].
    Cut,
    /// Closed, but a mapping may still be stored to. Tried again when asked; never committed.
    Mapped,
    /// Frozen, with checksums.
    Sealed(Seal),
}

/// A frozen state of a file's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    pub number: SealNumber,
    pub size_bytes: u64,
    pub crc64nvme: Crc64,
    pub chunks: Arc<[Crc64]>,
}

/// What happened to a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileEvent {
    /// A handle that may write was opened.
    WriterOpened,
    /// A handle that may write was released; `cut` when its task was being killed.
    WriterReleased { cut: bool },
    /// The read lease could not be taken: a mapping is still writable.
    MappingFound,
    /// Nobody can write any more, and the bytes were hashed.
    Hashed { size_bytes: u64, crc64nvme: Crc64, chunks: Arc<[Crc64]> },
    /// rename(2) or fsync(2) by the writer, before or after its close.
    Vouched,
}

/// What has to be done. The executor does it in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileCommand {
    /// Try the read lease, hash, and answer `Hashed` or `MappingFound`.
    BeginSeal,
    /// A write-open came while sealing: what is being hashed is void.
    VoidSeal,
    /// A sealed file is written again: withdraw `complete`, and keep the old bytes wherever a record, a peer or Tier-3
    /// names that seal.
    WithdrawSeal { seal: SealNumber },
}

/// An event that cannot happen in that state: a broken belief of the caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{event:?} came to a file in state {state:?}")]
pub struct Illegal {
    pub state: FileState,
    pub event: FileEvent,
}

/// One file on one node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileFate {
    state: FileState,
    seals: SealNumber,
    /// One of the writers of this opening was killed.
    any_cut: bool,
    vouched: bool,
    sealing: bool,
}

impl Default for FileFate {
    fn default() -> Self {
        Self::new()
    }
}

impl FileFate {
    /// A file that was just created, before its creator's handle is counted.
    #[must_use]
    pub fn new() -> Self {
        let state = FileState::Open { writers: 0 };
        Self { state, seals: SealNumber(0), any_cut: false, vouched: false, sealing: false }
    }

    /// A file as a record or a manifest describes it.
    #[must_use]
    pub fn restored(seal: Seal) -> Self {
        let seals = seal.number;
        Self { state: FileState::Sealed(seal), seals, any_cut: false, vouched: true, sealing: false }
    }

    #[must_use]
    pub fn state(&self) -> &FileState {
        &self.state
    }

    /// Whether rename or fsync vouches for the bytes, so that a cut does not make them torn.
    #[must_use]
    pub fn is_vouched(&self) -> bool {
        self.vouched
    }

    /// Whether a killed writer leaves these bytes in doubt. An index that proves the exact size still clears it.
    #[must_use]
    pub fn is_torn(&self) -> bool {
        self.any_cut && !self.vouched
    }

    /// Takes one event; duplicates of reports are absorbed.
    ///
    /// # Errors
    /// [`Illegal`] for an event that cannot happen here; nothing has changed then.
    pub fn step(&mut self, event: FileEvent, todo: &mut Vec<FileCommand>) -> Result<(), Illegal> {
        match (&mut self.state, event) {
            (FileState::Open { writers }, FileEvent::WriterOpened) => *writers += 1,
            (state, FileEvent::WriterOpened) => {
                if let FileState::Sealed(seal) = state {
                    todo.push(FileCommand::WithdrawSeal { seal: seal.number });
                }
                if self.sealing {
                    todo.push(FileCommand::VoidSeal);
                }
                // A cut file that is opened again is still in doubt: an update need not rewrite all of it.
                *state = FileState::Open { writers: 1 };
                self.sealing = false;
                self.vouched = false;
            }
            (FileState::Open { writers }, FileEvent::WriterReleased { cut }) if *writers > 0 => {
                *writers -= 1;
                self.any_cut |= cut;
                if *writers == 0 {
                    self.state = if self.any_cut { FileState::Cut } else { FileState::Closed };
                    self.sealing = true;
                    todo.push(FileCommand::BeginSeal);
                }
            }
            (FileState::Closed | FileState::Cut | FileState::Mapped, FileEvent::MappingFound) => {
                self.state = FileState::Mapped;
                self.sealing = false;
            }
            (
                FileState::Closed | FileState::Cut | FileState::Mapped,
                FileEvent::Hashed { size_bytes, crc64nvme, chunks },
            ) => {
                self.seals = self.seals.next();
                self.sealing = false;
                let number = self.seals;
                self.state = FileState::Sealed(Seal { number, size_bytes, crc64nvme, chunks });
            }
            // The hash of bytes that are being written again, or were reported already.
            (FileState::Open { .. } | FileState::Sealed(_), FileEvent::Hashed { .. }) => {}
            (FileState::Open { .. } | FileState::Sealed(_), FileEvent::MappingFound) => {}
            (_, FileEvent::Vouched) => self.vouched = true,
            (state, event @ FileEvent::WriterReleased { .. }) => {
                return Err(Illegal { state: state.clone(), event });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(events: &[FileEvent]) -> (FileFate, Vec<FileCommand>) {
        let mut file = FileFate::new();
        let mut todo = Vec::new();
        for event in events {
            file.step(event.clone(), &mut todo).unwrap();
        }
        (file, todo)
    }

    fn hashed() -> FileEvent {
        FileEvent::Hashed { size_bytes: 0, crc64nvme: Crc64(0), chunks: Arc::new([]) }
    }

    #[test]
    fn a_file_is_cut_when_any_of_its_writers_was() {
        use FileEvent::{Vouched, WriterOpened, WriterReleased};
        let released = |cut| WriterReleased { cut };
        let (file, _) = run(&[WriterOpened, WriterOpened, released(true), released(false)]);
        assert_eq!(*file.state(), FileState::Cut);
        assert!(file.is_torn());
        let (file, _) = run(&[WriterOpened, Vouched, released(true)]);
        assert!(!file.is_torn(), "fsync came first");
        let (file, _) = run(&[WriterOpened, released(true), WriterOpened, released(false)]);
        assert!(file.is_torn(), "an update does not mend what was cut");
    }

    #[test]
    fn a_sealed_file_that_is_written_again_gets_the_next_seal() {
        use FileEvent::{MappingFound, WriterOpened, WriterReleased};
        let close = WriterReleased { cut: false };
        let (file, todo) = run(&[WriterOpened, close.clone(), MappingFound, hashed(), WriterOpened]);
        assert_eq!(*file.state(), FileState::Open { writers: 1 });
        let withdrawn = FileCommand::WithdrawSeal { seal: SealNumber(1) };
        assert_eq!(todo, [FileCommand::BeginSeal, withdrawn]);
        let (file, _) = run(&[WriterOpened, close.clone(), hashed(), WriterOpened, close, hashed()]);
        assert!(matches!(file.state(), FileState::Sealed(seal) if seal.number == SealNumber(2)));
    }

    #[test]
    fn a_hash_taken_across_a_write_open_seals_nothing() {
        use FileEvent::{WriterOpened, WriterReleased};
        let (file, todo) = run(&[WriterOpened, WriterReleased { cut: false }, WriterOpened, hashed()]);
        assert_eq!(*file.state(), FileState::Open { writers: 1 });
        assert_eq!(todo, [FileCommand::BeginSeal, FileCommand::VoidSeal]);
    }

    fn events() -> impl Strategy<Value = Vec<FileEvent>> {
        prop::collection::vec(
            prop_oneof![
                Just(FileEvent::WriterOpened),
                any::<bool>().prop_map(|cut| FileEvent::WriterReleased { cut }),
                Just(FileEvent::MappingFound),
                Just(hashed()),
                Just(FileEvent::Vouched),
            ],
            0..40,
        )
    }

    proptest! {
        #[test]
        fn nothing_is_sealed_while_a_writer_is_open(events in events()) {
            let mut file = FileFate::new();
            let (mut open, mut seals) = (0_u32, SealNumber(0));
            for event in events {
                let before = file.clone();
                match file.step(event.clone(), &mut Vec::new()) {
                    Err(_) => prop_assert_eq!(&file, &before),
                    Ok(()) => match event {
                        FileEvent::WriterOpened => open += 1,
                        FileEvent::WriterReleased { .. } => open -= 1,
                        _ => {}
                    },
                }
                if let FileState::Sealed(seal) = file.state() {
                    prop_assert_eq!(open, 0);
                    prop_assert!(seal.number >= seals);
                    seals = seal.number;
                }
                if let FileState::Open { writers } = file.state() {
                    prop_assert_eq!(*writers, open);
                }
            }
        }
    }
}
