//! A page of shared memory for each trainer: its current call and since when, and the auditor's request.
//!
//! Owns: the layout of the page, its mapping (the one place with unsafe code) and the two clocks read around each
//! call. Does not own: the calls. A page is a file, so it outlives the trainer that wrote it.

use std::fs::OpenOptions;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memmap2::MmapRaw;
use serde::Serialize;

use super::now_ns;

const PAGE_BYTES: u64 = 4096;
/// The auditor's request: 0 to go on, `END` to end, otherwise the number of the pause.
const WORD_ASKED: usize = 0;
/// The trainer's current call: its start in nanoseconds, with the act in the lowest bits. A single word holds both, so
/// that no reader sees half of them.
const WORD_DOING: usize = 1;
/// Two words for each act: how often a call of it returned, and the longest duration.
const WORD_FIGURES: usize = 16;
/// Bits for more acts than there are. The rest of the word holds 2^60 ns, which are 36 years.
const ACT_BITS: u32 = 4;
const END: u64 = u64::MAX;

/// Calls that a trainer can be in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Act {
    Open = 1,
    Write = 2,
    /// Stores into a shared mapping.
    Store = 3,
    Rename = 4,
    Unlink = 5,
    Fsync = 6,
    Close = 7,
    Stat = 8,
    Mkdir = 9,
    Truncate = 10,
    Map = 11,
    Read = 12,
}

impl Act {
    pub const ALL: [Self; 12] = [
        Self::Open,
        Self::Write,
        Self::Store,
        Self::Rename,
        Self::Unlink,
        Self::Fsync,
        Self::Close,
        Self::Stat,
        Self::Mkdir,
        Self::Truncate,
        Self::Map,
        Self::Read,
    ];
}

/// A trainer's current call when its page was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Doing {
    pub act: Act,
    pub since_ns: u64,
}

/// How often an act returned, and its longest duration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActFigures {
    pub count: u64,
    pub longest: Duration,
}

/// The auditor's request to a trainer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    GoOn,
    Pause(u64),
    End,
}

/// A mapping of the page, in the trainer or in the auditor.
#[derive(Debug)]
pub struct Page {
    map: MmapRaw,
}

impl Page {
    /// Makes a page, all zero.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(PAGE_BYTES)?;
        Ok(Self { map: MmapRaw::map_raw(&file)? })
    }

    /// Opens the page that the auditor made.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() != PAGE_BYTES {
            return Err(io::Error::other(format!("{} is not a page of a trainer", path.display())));
        }
        Ok(Self { map: MmapRaw::map_raw(&file)? })
    }

    /// Calls `call`, and shows it on the page from before its start until after its end. The figures count successful calls
    /// only: a failed call got no answer, whatever its duration.
    pub fn during<T, E>(&self, act: Act, call: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let began_ns = now_ns();
        self.word(WORD_DOING).store(began_ns << ACT_BITS | u64::from(act as u8), Ordering::SeqCst);
        let result = call();
        self.word(WORD_DOING).store(0, Ordering::SeqCst);
        if result.is_ok() {
            // Only the trainer writes these words, so the two updates need not be one atomic step.
            let (count, longest) = Self::figure_words(act);
            self.word(count).fetch_add(1, Ordering::Relaxed);
            self.word(longest).fetch_max(now_ns() - began_ns, Ordering::Relaxed);
        }
        result
    }

    pub fn doing(&self) -> Option<Doing> {
        let word = self.word(WORD_DOING).load(Ordering::SeqCst);
        let number = word & ((1 << ACT_BITS) - 1);
        let act = Act::ALL.into_iter().find(|act| u64::from(*act as u8) == number)?;
        Some(Doing { act, since_ns: word >> ACT_BITS })
    }

    pub fn figures(&self, act: Act) -> ActFigures {
        let (count, longest) = Self::figure_words(act);
        ActFigures {
            count: self.word(count).load(Ordering::Relaxed),
            longest: Duration::from_nanos(self.word(longest).load(Ordering::Relaxed)),
        }
    }

    pub fn ask(&self, asked: Asked) {
        let word = match asked {
            Asked::GoOn => 0,
            Asked::Pause(number) => number,
            Asked::End => END,
        };
        self.word(WORD_ASKED).store(word, Ordering::SeqCst);
    }

    pub fn asked(&self) -> Asked {
        match self.word(WORD_ASKED).load(Ordering::SeqCst) {
            0 => Asked::GoOn,
            END => Asked::End,
            number => Asked::Pause(number),
        }
    }

    fn figure_words(act: Act) -> (usize, usize) {
        let first = WORD_FIGURES + 2 * usize::from(act as u8);
        (first, first + 1)
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        let words = self.map.as_mut_ptr().cast::<u64>();
        assert!((index + 1) * size_of::<u64>() <= self.map.len(), "word {index} is beyond the page");
        // SAFETY: the mapping is page-aligned, writable, lives as long as `self`, and is long enough (asserted). Both
        // processes access it through atomics only, and no process shortens the file.
        unsafe { AtomicU64::from_ptr(words.wrapping_add(index)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_side_sees_what_is_going_on_and_what_it_took() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page");
        let auditor = Page::create(&path).unwrap();
        let trainer = Page::open(&path).unwrap();
        assert_eq!(auditor.doing(), None);
        let before_ns = now_ns();
        let renamed: io::Result<()> = trainer.during(Act::Rename, || {
            let doing = auditor.doing().unwrap();
            assert_eq!(doing.act, Act::Rename);
            assert!((before_ns..=now_ns()).contains(&doing.since_ns));
            std::thread::sleep(Duration::from_millis(2));
            Ok(())
        });
        renamed.unwrap();
        trainer.during(Act::Read, || Err::<(), _>(io::Error::other("not answered"))).unwrap_err();
        assert_eq!(auditor.doing(), None);
        let figures = auditor.figures(Act::Rename);
        assert!(figures.count == 1 && figures.longest >= Duration::from_millis(2), "{figures:?}");
        assert_eq!(auditor.figures(Act::Read), ActFigures::default());
        for asked in [Asked::Pause(7), Asked::End, Asked::GoOn] {
            auditor.ask(asked);
            assert_eq!(trainer.asked(), asked);
        }
    }
}
