//! The processes that wrote a file, and how they ended.
//!
//! Owns: these facts. Does not own: their consequences (the parent), finding them out (the daemon).

/// A process that wrote a file.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Writer {
    pub session: String,
    /// Thread group and its start time, which tells apart two processes that had the same process id.
    pub process: (u32, u64),
    /// Whether its environment could be read; if not, the size of the job is not known.
    pub environment_seen: bool,
    pub world_size: Option<u64>,
    pub rank: Option<u64>,
    pub fate: Fate,
    /// Time when the process was seen to have been killed or to have failed, on the clock of `now_ns`.
    pub failed_at_ns: Option<i64>,
}

impl Writer {
    /// Whether the process was killed or failed, and was not seen alive at `quiet_at_ns`.
    pub(super) fn failed_before(&self, quiet_at_ns: i64) -> bool {
        matches!(self.fate, Fate::Killed | Fate::Failed)
            && self.failed_at_ns.is_none_or(|at_ns| at_ns < quiet_at_ns)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fate {
    Alive,
    /// Ended by itself.
    Exited,
    /// Ended by itself, with a status that reports a failure.
    Failed,
    /// Ended by a signal, or with a file open and not with status 0.
    Killed,
    /// Ended, but the kernel has not yet reported how.
    Ended,
    /// Gone, and how it ended was not seen.
    Gone,
}

/// Whether all writers of a file are known to have ended with status 0. A rename after that vouches for the file
/// (`curl URL >part && mv part model.bin`). If a killed program left the file, a rename proves nothing.
#[must_use]
pub fn have_ended_well(fates: impl Iterator<Item = Fate>) -> bool {
    let mut fates = fates.peekable();
    fates.peek().is_some() && fates.all(|fate| fate == Fate::Exited)
}
