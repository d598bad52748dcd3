//! The file as the readers see it: every read, every step and the time are counted here.
//!
//! Owns: the limits' counters, the window that a reader moves over a range. Does not own: the meaning of the bytes.

use crate::{Bytes, Limits};
use std::fmt;
use std::io;
use std::time::Duration;

/// Bytes that a window reads at once, and so the most between two looks at the clock.
pub(crate) const READS_AT_ONCE: usize = 16 << 10;
/// Steps between two looks at the clock: some ten microseconds of opcodes.
const STEPS_A_LOOK: u64 = 1024;

/// Bytes of a member's name that a reason shows.
const NAME_SHOWN_BYTES: usize = 128;

/// The reason why a reader stopped before it could say "whole".
#[derive(Debug)]
pub(crate) enum Stop {
    Broken(String),
    Unknown(String),
    /// A read reaches beyond its range. The reader decides what that means.
    Early(Early),
}

/// A read that reaches beyond the end of its range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Early {
    pub(crate) at: u64,
    pub(crate) wants_bytes: u64,
    pub(crate) end: u64,
}

impl fmt::Display for Early {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, wants_bytes, end } = self;
        write!(f, "{wants_bytes} bytes must follow byte {at}, and the end is at {end}")
    }
}

impl Stop {
    pub(crate) fn broken(reason: impl Into<String>) -> Self {
        Self::Broken(reason.into())
    }

    pub(crate) fn unknown(reason: impl Into<String>) -> Self {
        Self::Unknown(reason.into())
    }

    /// Adds the member of an archive to the reason.
    pub(crate) fn of_member(self, name: &[u8]) -> Self {
        let shown = String::from_utf8_lossy(name.get(..NAME_SHOWN_BYTES).unwrap_or(name));
        match self {
            Self::Broken(reason) => Self::Broken(format!("in its member {shown:?}, {reason}")),
            Self::Unknown(reason) => Self::Unknown(format!("in its member {shown:?}, {reason}")),
            Self::Early(early) => Self::Early(early),
        }
    }

    /// Makes an early end a contradiction of the format; `what` was being read.
    pub(crate) fn early_is_broken(self, what: &str) -> Self {
        match self {
            Self::Early(early) => Self::Broken(format!("in {what}, {early}")),
            other => other,
        }
    }
}

/// A file under judgement.
pub(crate) struct Source<'a> {
    bytes: &'a dyn Bytes,
    size_bytes: u64,
    limits: &'a Limits,
    clock: &'a dyn Fn() -> Duration,
    begun: Duration,
    read_bytes: u64,
    steps: u64,
}

impl<'a> Source<'a> {
    pub(crate) fn new(
        bytes: &'a dyn Bytes,
        size_bytes: u64,
        limits: &'a Limits,
        clock: &'a dyn Fn() -> Duration,
    ) -> Self {
        Self { bytes, size_bytes, limits, clock, begun: clock(), read_bytes: 0, steps: 0 }
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Returns how many bytes may still be read.
    fn left_bytes(&self) -> u64 {
        self.limits.read_bytes.saturating_sub(self.read_bytes)
    }

    /// Fills `into`; a read beyond the file is an early end.
    pub(crate) fn read(&mut self, at: u64, into: &mut [u8]) -> Result<(), Stop> {
        self.count(at, into.len() as u64)?;
        if into.len() >= READS_AT_ONCE {
            self.look_at_the_clock()?;
        }
        self.fetch(at, into)
    }

    /// Fills `into` without a look at the clock, for a search of a bounded length: its result must not depend on the speed of the
    /// machine.
    pub(crate) fn read_untimed(&mut self, at: u64, into: &mut [u8]) -> Result<(), Stop> {
        self.count(at, into.len() as u64)?;
        self.fetch(at, into)
    }

    fn count(&mut self, at: u64, wants_bytes: u64) -> Result<(), Stop> {
        if at.checked_add(wants_bytes).is_none_or(|end| end > self.size_bytes) {
            return Err(Stop::Early(Early { at, wants_bytes, end: self.size_bytes }));
        }
        if wants_bytes > self.left_bytes() {
            return Err(Stop::Unknown(format!(
                "more than {} bytes would have to be read",
                self.limits.read_bytes
            )));
        }
        self.read_bytes += wants_bytes;
        Ok(())
    }

    fn fetch(&self, at: u64, into: &mut [u8]) -> Result<(), Stop> {
        self.bytes.read_at(at, into).map_err(|error| {
            Stop::Unknown(format!("byte {at} of {} cannot be read: {error}", self.size_bytes))
        })
    }

    /// Reads a fixed number of bytes.
    pub(crate) fn array<const N: usize>(&mut self, at: u64) -> Result<[u8; N], Stop> {
        let mut array = [0; N];
        self.read(at, &mut array)?;
        Ok(array)
    }

    /// Counts one opcode, entry, header or tensor.
    pub(crate) fn step(&mut self) -> Result<(), Stop> {
        self.steps += 1;
        if self.steps > self.limits.steps {
            return Err(Stop::Unknown(format!("it has more than {} parts to look at", self.limits.steps)));
        }
        if self.steps.is_multiple_of(STEPS_A_LOOK) { self.look_at_the_clock() } else { Ok(()) }
    }

    fn look_at_the_clock(&self) -> Result<(), Stop> {
        let used = (self.clock)().saturating_sub(self.begun);
        if used <= self.limits.cpu {
            return Ok(());
        }
        let limit = self.limits.cpu.as_millis();
        Err(Stop::Unknown(format!("reading it took {} ms, more than {limit} ms", used.as_millis())))
    }
}

/// A reader's place in a range of the file. Skipped bytes are not read.
pub(crate) struct Window<'s, 'a> {
    source: &'s mut Source<'a>,
    at: u64,
    end: u64,
    /// The bytes read last, up to `filled`; `buffer_at` is their offset.
    buffer: Box<[u8; READS_AT_ONCE]>,
    buffer_at: u64,
    filled: usize,
    /// The reason why [`io::Read`] failed.
    stopped: Option<Stop>,
}

impl<'s, 'a> Window<'s, 'a> {
    /// Makes a window over the bytes from `at` to `end`, which lie in the file.
    pub(crate) fn new(source: &'s mut Source<'a>, at: u64, end: u64) -> Self {
        let end = end.min(source.size_bytes());
        let buffer = Box::new([0; READS_AT_ONCE]);
        Self { source, at, end, buffer, buffer_at: at, filled: 0, stopped: None }
    }

    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    /// Gives access to the rest of the file.
    pub(crate) fn source(&mut self) -> &mut Source<'a> {
        self.source
    }

    pub(crate) fn step(&mut self) -> Result<(), Stop> {
        self.source.step()
    }

    /// Returns why the [`io::Read`] of this window failed, if it did.
    pub(crate) fn take_stop(&mut self) -> Option<Stop> {
        self.stopped.take()
    }

    /// Checks that this many bytes follow.
    pub(crate) fn expect(&self, wants_bytes: u64) -> Result<(), Stop> {
        if wants_bytes > self.end.saturating_sub(self.at) {
            return Err(Stop::Early(Early { at: self.at, wants_bytes, end: self.end }));
        }
        Ok(())
    }

    pub(crate) fn skip(&mut self, count: u64) -> Result<(), Stop> {
        self.expect(count)?;
        self.at += count;
        Ok(())
    }

    pub(crate) fn fill(&mut self, into: &mut [u8]) -> Result<(), Stop> {
        self.expect(into.len() as u64)?;
        let mut into = into;
        while !into.is_empty() {
            let ready = self.ready()?;
            let count = ready.len().min(into.len());
            let (now, later) = into.split_at_mut(count);
            now.copy_from_slice(&ready[..count]);
            self.at += count as u64;
            into = later;
        }
        Ok(())
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Stop> {
        let mut array = [0; N];
        self.fill(&mut array)?;
        Ok(array)
    }

    pub(crate) fn byte(&mut self) -> Result<u8, Stop> {
        self.array::<1>().map(|[byte]| byte)
    }

    /// Returns the bytes at hand, at least one unless the range is at its end.
    fn ready(&mut self) -> Result<&[u8], Stop> {
        let held = self.at.checked_sub(self.buffer_at).and_then(|offset| usize::try_from(offset).ok());
        let held = held.filter(|offset| *offset < self.filled);
        let offset = match held {
            Some(offset) => offset,
            None => {
                let left = usize::try_from(self.end - self.at).unwrap_or(usize::MAX);
                self.filled = 0;
                let count = left.min(READS_AT_ONCE);
                self.source.read(self.at, &mut self.buffer[..count])?;
                (self.buffer_at, self.filled) = (self.at, count);
                0
            }
        };
        Ok(&self.buffer[offset..self.filled])
    }
}

impl io::Read for Window<'_, '_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.ready() {
            Ok(ready) => {
                let count = ready.len().min(into.len());
                into[..count].copy_from_slice(&ready[..count]);
                self.at += count as u64;
                Ok(count)
            }
            Err(stop) => {
                self.stopped = Some(stop);
                Err(io::ErrorKind::Other.into())
            }
        }
    }
}
