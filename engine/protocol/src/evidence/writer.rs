//! The processes that wrote a file, and how they ended.
//!
//! Owns: those facts. Does not own: what follows from them (the parent), how they are found out (the daemon).

/// A process that wrote.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Writer {
    pub session: String,
    /// Thread group and its start time, so that a process id that is used again is another process.
    pub process: (u32, u64),
    /// Its environment could be read; without it nothing is known about the size of the job.
    pub environment_seen: bool,
    pub world_size: Option<u64>,
    pub rank: Option<u64>,
    pub fate: Fate,
    /// When it was seen to have been killed or to have failed, on the clock of `now_ns`.
    pub failed_at_ns: Option<i64>,
}

impl Writer {
    /// It was killed or failed, and was not seen to live at `quiet_at_ns`.
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
    /// Ended by itself, with a status that says that something failed.
    Failed,
    /// Ended by a signal, or with a file open and not with status 0.
    Killed,
    /// Ended, and the kernel has not said how yet.
    Ended,
    /// Gone, nobody saw how.
    Gone,
}

/// All who wrote a file are known to have ended with status 0: who renames it then says that it is whole (`curl URL >part && mv part
/// model.bin`). Of what a killed program left a rename says nothing.
#[must_use]
pub fn have_ended_well(fates: impl Iterator<Item = Fate>) -> bool {
    let mut fates = fates.peekable();
    fates.peek().is_some() && fates.all(|fate| fate == Fate::Exited)
}
