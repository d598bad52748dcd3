//! Counts of the cases that the schedules exercised: a schedule without conflicts proves nothing.
//!
//! Owns: the kinds and their counts. Does not own: detecting a case (`world`, `audit`, `life`).

/// Case that a schedule exercises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seen {
    Schedule,
    Request,
    Start,
    Death,
    /// Lost answers: to a request that happened, to one that never happens, to one that happens later.
    DoubtDone,
    DoubtNotDone,
    DoubtLate,
    Refusal,
    Stall,
    Silence,
    Commit,
    Abort,
    Retirement,
    Delete,
    UploadAborted,
    /// A version for which two starts had an attempt.
    Contested,
    /// A decision that lost against another start's marker.
    Lost,
    /// A decision of a recovery that lost so.
    LostInRecovery,
    FencedStart,
    /// A write by a start whose epoch was not the highest any more.
    ZombieWrite,
}

impl Seen {
    const ALL: [Self; 20] = [
        Self::Schedule,
        Self::Request,
        Self::Start,
        Self::Death,
        Self::DoubtDone,
        Self::DoubtNotDone,
        Self::DoubtLate,
        Self::Refusal,
        Self::Stall,
        Self::Silence,
        Self::Commit,
        Self::Abort,
        Self::Retirement,
        Self::Delete,
        Self::UploadAborted,
        Self::Contested,
        Self::Lost,
        Self::LostInRecovery,
        Self::FencedStart,
        Self::ZombieWrite,
    ];
}

/// Number of times that each case happened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Tally([u64; Seen::ALL.len()]);

impl Tally {
    pub(super) fn count(&mut self, what: Seen) {
        self.0[what as usize] += 1;
    }

    pub(super) fn of(&self, what: Seen) -> u64 {
        self.0[what as usize]
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, count)| *sum += count);
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = (Seen, u64)> {
        Seen::ALL.into_iter().zip(self.0)
    }
}
