//! The processes that write, make, remove and read, as the node loop asks for them.
//!
//! Owns: handing over what calls noted of these processes. Does not own: identifying them (`writer`, `reader`), how they ended (`ends`),
//! the consequences (the node loop).

use super::NodeId;
use super::begun::Made;
use super::ends::End;
use super::guarded::Guarded;
use super::reader::Readers;
use super::writer::{self, Peers, WriterCache, WriterId};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use tidemark_protocol::id::FileId;

/// Removals that wait for the node loop to ask: it does so many times a second.
const REMOVERS_MAX: usize = 4096;

/// Directories that wait for the node loop to ask: it does so many times a second.
const MADE_MAX: usize = 1024;

/// Acts of processes that the node loop asks about; of very many the latest.
#[derive(Debug, Default)]
pub(super) struct Deeds {
    /// Processes that removed a name of a sealed file.
    removers: VecDeque<(FileId, Arc<WriterId>)>,
    /// Directories that were made.
    made: VecDeque<Made>,
}

impl Deeds {
    pub(super) fn note_remover(&mut self, file: FileId, remover: Arc<WriterId>) {
        if self.removers.len() == REMOVERS_MAX {
            self.removers.pop_front();
        }
        self.removers.push_back((file, remover));
    }

    pub(super) fn note_made(&mut self, made: Made) {
        if self.made.len() == MADE_MAX {
            self.made.pop_front();
        }
        self.made.push_back(made);
    }
}

/// The processes that write, make, remove and read, and how they ended.
#[derive(Debug, Clone, Copy)]
pub struct Writers<'a> {
    pub(super) state: &'a Guarded,
    pub(super) cache: &'a WriterCache,
    pub(super) readers: &'a Readers,
}

impl Writers<'_> {
    /// Returns how often a program without a number in this process's pid namespace opened a file for writing; only rises.
    #[must_use]
    pub fn writers_unseen(&self) -> u64 {
        self.cache.unseen()
    }

    /// Takes the directories that were made since the last call; of very many the latest.
    #[must_use]
    pub fn take_made(&self) -> VecDeque<Made> {
        self.state.look(|state| std::mem::take(&mut state.deeds.made))
    }

    /// Returns the latest files that any thread of these processes opened for reading.
    pub fn opened_by(&self, processes: &BTreeSet<(u32, u64)>) -> BTreeSet<NodeId> {
        self.readers.opened_by(processes)
    }

    /// Returns how a process ended; none while it runs, or if that is not known.
    #[must_use]
    pub fn end(&self, writer: &WriterId) -> Option<End> {
        self.cache.end(writer)
    }

    /// Closes the descriptors of writing processes that have ended, and journals how they ended for the next daemon. Costs one poll of
    /// the remembered processes, and a write of the journal if one has ended.
    pub fn forget_ended_writers(&self) {
        let ended = self.cache.forget_ended(self.state.now_ns());
        if ended.is_empty() {
            return;
        }
        let noted = self.state.change(|state| {
            state.note_ends(&ended);
            Ok(())
        });
        // This daemon knows the ends all the same, and the snapshot that mends the journal has them.
        if let Err(error) = noted {
            tracing::warn!(%error, ends = ended.len(), "the journal did not take how processes ended");
        }
    }

    /// Returns the processes that were launched with a writer and were there at `before_ns`; see [`Peers`].
    #[must_use]
    pub fn peers(&self, writer: &WriterId, before_ns: i64) -> Peers {
        writer::peers(self.cache.proc_root(), writer, before_ns)
    }

    /// Whether the process is still remembered: it lives, or the kernel may still say how it ended.
    #[must_use]
    pub fn is_end_awaited(&self, writer: &WriterId) -> bool {
        self.cache.is_awaited(writer)
    }

    /// Takes the processes that removed names of sealed files since the last call; of very many the latest.
    #[must_use]
    pub fn take_removers(&self) -> VecDeque<(FileId, Arc<WriterId>)> {
        self.state.look(|state| std::mem::take(&mut state.deeds.removers))
    }
}
