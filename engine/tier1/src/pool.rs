//! Ready files: made and given space before they are needed, so that create costs microseconds.
//!
//! Owns: the lists (ready, spent, lingering), and the sizes to keep ready: those predicted lately. Does not own: filling them
//! (`worker`), the budget, the state of a file after its create (`backing`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{FallocateFlags, fallocate, fstat};

use super::ballast::SLICE_BYTES;
use super::lease;
use super::space::{FIRST_PIECE_BYTES, PAGE_BYTES, RUN_AHEAD_MIN_BYTES};

/// Ready files of one length, kept for creates that are predicted to need no more.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stock {
    pub(super) ready_bytes: u64,
    /// Maximum number of files kept. A job's burst of small files is longer now and then; further files are made on the spot.
    pub(super) files: usize,
}

/// Stocks, the shortest first; the last is also for creates of unknown size. A short file does not need 2 MiB, which take longer
/// to make than the file takes to write. A file of one page does not need a longer folio: its first write would clear all of that,
/// and its end would split it.
pub(super) const STOCKS: [Stock; 3] = [
    // For example a `latest`, a log, a configuration.
    Stock { ready_bytes: PAGE_BYTES, files: 32 },
    // For example a random state, a `.metadata`. Making one costs a twentieth of the last.
    Stock { ready_bytes: FIRST_PIECE_BYTES, files: 32 },
    Stock { ready_bytes: RUN_AHEAD_MIN_BYTES, files: 16 },
];
/// Predictions remembered, and so the most large files kept ready: a node saves about one per rank.
pub(super) const PREDICTIONS_KEPT: usize = 8;

/// A file that no create has taken yet. The file is empty; `ready_bytes` from its beginning are allocated beyond its end.
#[derive(Debug)]
pub(super) struct ReadyFile {
    pub(super) number: u64,
    pub(super) ready_bytes: u64,
    pub(super) held_bytes: u64,
    /// Offset before which nothing is left to zero for the writer. Beyond it, the kernel zeroes the rest of a folio on the first
    /// write into it.
    pub(super) zeroed_bytes: u64,
}

/// An unlinked file that no other process has open: its pages go back slice by slice, from its end.
#[derive(Debug)]
pub(super) struct SpentFile {
    write_fd: OwnedFd,
    /// Nothing is allocated at or beyond this offset.
    end: u64,
    /// Offset at and beyond which nothing was written: those pages may never have been touched.
    written: u64,
    held_bytes: u64,
}

/// An unlinked file that another process still has open or mapped.
#[derive(Debug)]
pub(super) struct LingeringFile {
    pub(super) read_fd: OwnedFd,
    pub(super) held_bytes: u64,
}

/// The result of one step of freeing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Freed {
    pub(super) bytes: u64,
    pub(super) touched: bool,
}

#[derive(Debug, Default)]
pub(super) struct Pool {
    /// Ready files of each stock, in the order of [`STOCKS`].
    pub(super) small: [Vec<ReadyFile>; STOCKS.len()],
    pub(super) large: Vec<ReadyFile>,
    pub(super) spent: Vec<SpentFile>,
    pub(super) lingering: Vec<LingeringFile>,
    recent: VecDeque<u64>,
}

impl Pool {
    /// Takes the ready file that fits a file of `predicted_bytes` best: the smallest large one that holds all of it, or one of the
    /// stock for its size.
    pub(super) fn take(&mut self, predicted_bytes: Option<u64>, most_bytes: u64) -> Option<ReadyFile> {
        if let Some(wanted) = predicted_bytes.filter(|bytes| *bytes > SLICE_BYTES) {
            let fits = |file: &ReadyFile| file.ready_bytes >= wanted && file.held_bytes <= most_bytes;
            let best = (0..self.large.len())
                .filter(|&index| fits(&self.large[index]))
                .min_by_key(|&index| self.large[index].ready_bytes);
            if let Some(index) = best {
                return Some(self.large.swap_remove(index));
            }
        }
        let fits = |stock: &Stock| predicted_bytes.is_some_and(|bytes| bytes <= stock.ready_bytes);
        let stock = STOCKS.iter().position(fits).unwrap_or(STOCKS.len() - 1);
        self.small[stock].pop_if(|last| last.held_bytes <= most_bytes)
    }

    /// Keeps a file that was made ready.
    pub(super) fn put(&mut self, file: ReadyFile) {
        match STOCKS.iter().position(|stock| file.ready_bytes <= stock.ready_bytes) {
            Some(stock) => self.small[stock].push(file),
            None => self.large.push(file),
        }
    }

    /// Whether a stock is less than half full, so that more should be made.
    pub(super) fn is_low(&self) -> bool {
        self.small.iter().zip(STOCKS).any(|(ready, stock)| ready.len() < stock.files / 2)
    }

    /// Remembers a prediction; the same sizes are expected to come again.
    pub(super) fn remember(&mut self, predicted_bytes: u64) {
        if predicted_bytes > SLICE_BYTES {
            if self.recent.len() == PREDICTIONS_KEPT {
                self.recent.pop_front();
            }
            self.recent.push_back(predicted_bytes.next_multiple_of(SLICE_BYTES));
        }
    }

    /// Returns the next large size that should be ready and is not; `room_bytes` bounds all large files together.
    pub(super) fn missing_large(&self, room_bytes: u64) -> Option<u64> {
        let mut have: Vec<u64> = self.large.iter().map(|file| file.ready_bytes).collect();
        let held: u64 = self.large.iter().map(|file| file.held_bytes).sum();
        for &wanted in self.recent.iter().rev() {
            if let Some(index) = have.iter().position(|&ready| ready == wanted) {
                have.swap_remove(index);
            } else if held + wanted <= room_bytes {
                return Some(wanted);
            }
        }
        None
    }

    /// Returns a large ready file that is not zeroed to its end. The small ones lie in short folios, and are soon made.
    pub(super) fn not_zeroed(&mut self) -> Option<&mut ReadyFile> {
        self.large.iter_mut().find(|file| file.zeroed_bytes < file.ready_bytes)
    }

    /// Takes a large ready file of a size that was not predicted lately.
    pub(super) fn take_unwanted(&mut self) -> Option<ReadyFile> {
        let recent = &self.recent;
        let index = self.large.iter().position(|file| !recent.contains(&file.ready_bytes))?;
        Some(self.large.swap_remove(index))
    }

    /// Takes any ready file, large ones first: they give the most room for one step.
    pub(super) fn take_any(&mut self) -> Option<ReadyFile> {
        self.large.pop().or_else(|| self.small.iter_mut().rev().find_map(Vec::pop))
    }
}

impl SpentFile {
    pub(super) fn new(write_fd: OwnedFd, end: u64, written: u64, held_bytes: u64) -> Self {
        Self { write_fd, end: end.next_multiple_of(SLICE_BYTES), written, held_bytes }
    }

    pub(super) fn held(&self) -> u64 {
        self.held_bytes
    }

    /// Frees the last slice that holds anything, or everything at once if the file is mostly holes.
    pub(super) fn give_slice(&mut self) -> io::Result<Freed> {
        let before = self.held_bytes;
        let sparse = self.end > 2 * self.held_bytes + SLICES_WALKED_BYTES;
        while self.held_bytes == before && self.end > 0 {
            let at = if sparse { 0 } else { self.end - SLICE_BYTES };
            let punch = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE;
            fallocate(&self.write_fd, punch, at, self.end - at)?;
            self.end = at;
            // Never more than the budget counts for this file.
            self.held_bytes = before.min(fstat(&self.write_fd)?.st_blocks.cast_unsigned() * 512);
        }
        // Bytes that are still counted once nothing can be punched (a page beyond `end`) go with the last close.
        let left = if self.end == 0 { 0 } else { self.held_bytes };
        self.held_bytes = left;
        Ok(Freed { bytes: before - left, touched: !sparse && self.end + SLICE_BYTES <= self.written })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.end == 0 || self.held_bytes == 0
    }
}

/// Length of holes that are walked slice by slice before a file counts as sparse.
const SLICES_WALKED_BYTES: u64 = 32 * SLICE_BYTES;

impl LingeringFile {
    /// Returns true once no other process has the file open or mapped.
    pub(super) fn is_gone(&self) -> bool {
        // If the question cannot be asked, the bytes stay counted: the budget must not be passed on a guess.
        !lease::open_elsewhere(self.read_fd.as_fd()).unwrap_or(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(number: u64, ready_bytes: u64) -> ReadyFile {
        ReadyFile { number, ready_bytes, held_bytes: ready_bytes, zeroed_bytes: 0 }
    }

    #[test]
    fn a_create_takes_the_shortest_ready_file_that_holds_it() {
        let mut pool = Pool::default();
        assert!(pool.is_low());
        for (number, bytes) in [(1, 4 << 10), (2, 64 << 10), (3, 2 << 20), (4, 6 << 20), (5, 8 << 20)] {
            pool.put(ready(number, bytes));
        }
        let mut taken = |predicted_bytes| {
            let file = pool.take(predicted_bytes, u64::MAX)?;
            let number = file.number;
            pool.put(file);
            Some(number)
        };
        for (predicted_bytes, number) in [
            (Some(0), 1),
            (Some(4096), 1),
            (Some(4097), 2),
            (Some(64 << 10), 2),
            (Some((64 << 10) + 1), 3),
            (None, 3),
            (Some((2 << 20) + 1), 4),
            (Some(7 << 20), 5),
            // No ready file is long enough: the file begins with a slice, and run-ahead does the rest.
            (Some(9 << 20), 3),
        ] {
            assert_eq!(taken(predicted_bytes), Some(number), "for {predicted_bytes:?}");
        }
        assert!(pool.take(Some(1), 4095).is_none(), "it would hold more than there is");
        let order: Vec<u64> = std::iter::from_fn(|| pool.take_any()).map(|file| file.held_bytes).collect();
        assert_eq!(order.len(), 5);
        assert_eq!(order[2..], [2 << 20, 64 << 10, 4 << 10], "what gives the most room goes first");
    }
}
