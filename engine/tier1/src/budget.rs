//! The budget: one sum with one addend per user of Tier-1 memory, and the rest that may still be promised.
//!
//! Owns: the numbers and the rule that their sum never passes the size. Pure: no file, no clock, no lock. Does not own:
//! where the bytes lie, which memory gives way when the sum is full (`space`).

/// A user of the budget's memory. The journal is the fifth user; its share is fixed at the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum User {
    /// Backing files that can be opened: written bytes and the space made ready ahead of their writers.
    Files,
    /// Unlinked files that a mapping or a descriptor of another process still keeps alive.
    Lingering,
    /// Ready files that no create has taken yet, and spent files on their way back to the ballast.
    Pool,
    /// Touched memory that no file uses.
    Ballast,
}

/// `journal + files + lingering + pool + ballast <= size`, checked by every change.
#[derive(Debug, Clone)]
pub(super) struct Budget {
    size_bytes: u64,
    journal_bytes: u64,
    files_bytes: u64,
    lingering_bytes: u64,
    pool_bytes: u64,
    ballast_bytes: u64,
    /// Predicted or announced growth of open files that they do not hold yet. A promise is no memory, so not in the sum.
    promised_bytes: u64,
    /// Bytes that files and lingering files have released since the start. Only rises: two equal readings mean that
    /// nothing moved.
    released_bytes: u64,
}

impl Budget {
    pub(super) fn new(size_bytes: u64, journal_bytes: u64) -> Self {
        assert!(journal_bytes <= size_bytes, "the journal's share is cut out of the size");
        Self {
            size_bytes,
            journal_bytes,
            files_bytes: 0,
            lingering_bytes: 0,
            pool_bytes: 0,
            ballast_bytes: 0,
            promised_bytes: 0,
            released_bytes: 0,
        }
    }

    pub(super) fn size(&self) -> u64 {
        self.size_bytes
    }

    pub(super) fn journal(&self) -> u64 {
        self.journal_bytes
    }

    pub(super) fn promised(&self) -> u64 {
        self.promised_bytes
    }

    pub(super) fn released(&self) -> u64 {
        self.released_bytes
    }

    pub(super) fn held(&self, user: User) -> u64 {
        match user {
            User::Files => self.files_bytes,
            User::Lingering => self.lingering_bytes,
            User::Pool => self.pool_bytes,
            User::Ballast => self.ballast_bytes,
        }
    }

    fn held_mut(&mut self, user: User) -> &mut u64 {
        match user {
            User::Files => &mut self.files_bytes,
            User::Lingering => &mut self.lingering_bytes,
            User::Pool => &mut self.pool_bytes,
            User::Ballast => &mut self.ballast_bytes,
        }
    }

    pub(super) fn sum(&self) -> u64 {
        self.journal_bytes + self.files_bytes + self.lingering_bytes + self.pool_bytes + self.ballast_bytes
    }

    /// Returns the memory of the budget that no user holds.
    pub(super) fn free(&self) -> u64 {
        self.size_bytes - self.sum()
    }

    /// Returns how much may still be promised: pool and ballast give way to files, so they do not count.
    pub(super) fn available(&self) -> u64 {
        (self.size_bytes - self.journal_bytes - self.files_bytes - self.lingering_bytes)
            .saturating_sub(self.promised_bytes)
    }

    /// Returns how much of the promises does not fit on the files' own tmpfs yet. The tmpfs also holds the pool's files,
    /// and does not know that they would give way.
    pub(super) fn promised_beyond_wall(&self) -> u64 {
        let held = self.journal_bytes + self.files_bytes + self.lingering_bytes + self.pool_bytes;
        self.promised_bytes.saturating_sub(self.size_bytes - held)
    }

    /// Takes `bytes` out of the free memory for `user`; false, without a change, if there is less.
    #[must_use]
    pub(super) fn take(&mut self, user: User, bytes: u64) -> bool {
        if bytes > self.free() {
            return false;
        }
        *self.held_mut(user) += bytes;
        self.check();
        true
    }

    /// Takes up to `bytes` of the free memory, and returns how much.
    #[must_use]
    pub(super) fn take_up_to(&mut self, user: User, bytes: u64) -> u64 {
        let granted = bytes.min(self.free());
        *self.held_mut(user) += granted;
        self.check();
        granted
    }

    pub(super) fn give_back(&mut self, user: User, bytes: u64) {
        let held = self.held_mut(user);
        assert!(*held >= bytes, "{user:?} gives back {bytes} bytes but holds {held}");
        *held -= bytes;
        if matches!(user, User::Files | User::Lingering) {
            self.released_bytes += bytes;
        }
    }

    pub(super) fn shift(&mut self, from: User, to: User, bytes: u64) {
        self.give_back(from, bytes);
        *self.held_mut(to) += bytes;
        self.check();
    }

    /// Promises growth to an open file; false if it does not fit beside all that is held and promised.
    #[must_use]
    pub(super) fn promise(&mut self, bytes: u64) -> bool {
        if bytes > self.available() {
            return false;
        }
        self.promised_bytes += bytes;
        true
    }

    /// Ends a promise that was kept (the file holds the bytes now) or is no longer wanted.
    pub(super) fn withdraw(&mut self, bytes: u64) {
        assert!(self.promised_bytes >= bytes, "{bytes} bytes withdrawn, {} promised", self.promised_bytes);
        self.promised_bytes -= bytes;
    }

    fn check(&self) {
        assert!(self.sum() <= self.size_bytes, "Tier-1 budget passed: {self:?}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Budget, User};

    #[test]
    fn a_promise_is_refused_when_another_file_already_has_it() {
        let mut budget = Budget::new(100, 10);
        assert!(budget.take(User::Ballast, 90), "the ballast may hold all that is free");
        assert!(budget.promise(60), "and gives way to files");
        assert!(!budget.promise(31));
        assert_eq!(budget.promised_beyond_wall(), 0, "the ballast lies on a tmpfs of its own");
        budget.shift(User::Ballast, User::Pool, 50);
        assert_eq!(budget.promised_beyond_wall(), 20, "the pool's files are in the way");
        budget.shift(User::Pool, User::Files, 50);
        budget.shift(User::Ballast, User::Files, 10);
        budget.withdraw(60);
        assert_eq!(budget.available(), 30);
    }

    #[test]
    #[should_panic(expected = "gives back")]
    fn giving_back_more_than_is_held_is_a_broken_belief() {
        Budget::new(100, 0).give_back(User::Pool, 1);
    }

    fn user() -> impl Strategy<Value = User> {
        prop_oneof![Just(User::Files), Just(User::Lingering), Just(User::Pool), Just(User::Ballast)]
    }

    proptest! {
        #[test]
        fn the_sum_never_passes_the_size_and_free_is_the_rest(
            steps in prop::collection::vec((0_u8..5, user(), user(), 0_u64..2000), 0..200)
        ) {
            let mut budget = Budget::new(5000, 300);
            for (what, one, other, bytes) in steps {
                match what {
                    0 => { let _ = budget.take(one, bytes); }
                    1 => { let _ = budget.take_up_to(one, bytes); }
                    2 => { let held = budget.held(one); budget.give_back(one, bytes.min(held)); }
                    3 => { let held = budget.held(one); budget.shift(one, other, bytes.min(held)); }
                    _ => { if budget.promise(bytes) { prop_assert!(budget.promised() <= 4700); } }
                }
                prop_assert_eq!(budget.sum() + budget.free(), 5000);
                prop_assert!(budget.available() <= 4700);
            }
        }
    }
}
