//! The actions of each round, as a sequence that the seed determines.
//!
//! Owns: the plan: what is killed, after how long, aimed or not, and when everything is flushed. Does not own: what
//! the machine is doing at the moment of a kill.

use std::time::Duration;

use tidemark_tests::campaign::dice::Dice;

/// Duration of a round's work before its kill, in milliseconds.
const WORK_MS: std::ops::Range<u64> = 200..1_500;
/// Interval, in rounds, at which the whole node goes down and starts with empty memory. The last round always does
/// that.
const NODE_EVERY: u64 = 8;
const TRAINERS_MOST: u64 = 3;

/// The process that dies in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kill {
    /// Trainers only.
    Nobody,
    /// The serving daemon. The mount, the open files and Tier-1 stay, and it is started again.
    Daemon,
    /// The keeper. The mount goes. After a start with empty memory, committed files are there.
    Keeper,
    /// Keeper and daemon at the same time. The rest is as for the keeper.
    Node,
}

/// A round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Round {
    pub(crate) work: Duration,
    pub(crate) kill: Kill,
    /// Whether the kill waits, a little, until a write, an open and a rename are under way. If not, it comes blindly.
    pub(crate) aimed: bool,
    /// Places whose trainer is killed.
    pub(crate) trainers: Vec<usize>,
    /// Whether the trainers are killed just after the daemon, so that the next daemon must notice. If not, they are killed
    /// just before.
    pub(crate) while_away: bool,
    /// Whether `flush --wait` runs after the promises were compared.
    pub(crate) flush: bool,
}

/// The rounds of one seed, without end.
#[derive(Debug)]
pub(crate) struct Plan {
    dice: Dice,
    seats: u64,
    daemon_kills: bool,
    number: u64,
}

impl Plan {
    pub(crate) fn new(seed: u64, seats: usize, daemon_kills: bool) -> Self {
        Self { dice: Dice::new(seed), seats: seats as u64, daemon_kills, number: 0 }
    }

    pub(crate) fn next_round(&mut self) -> Round {
        self.number += 1;
        // Every number is drawn in every round, so that `daemon_kills` does not shift later draws.
        let work = Duration::from_millis(self.dice.within(WORK_MS));
        let (kind, which) = (self.dice.within(0..10), self.dice.one_in(3));
        let count = self.dice.within(0..TRAINERS_MOST + 1);
        let trainers: Vec<u64> = (0..TRAINERS_MOST).map(|_| self.dice.within(0..self.seats)).collect();
        let (aimed, flush) = (!self.dice.one_in(5), self.dice.one_in(2));
        let while_away = self.dice.one_in(2);
        let kill = match kind {
            _ if self.number.is_multiple_of(NODE_EVERY) && which && self.daemon_kills => Kill::Keeper,
            _ if self.number.is_multiple_of(NODE_EVERY) => Kill::Node,
            0..8 if self.daemon_kills => Kill::Daemon,
            _ => Kill::Nobody,
        };
        let taken = usize::try_from(count).expect("a few");
        let mut trainers: Vec<usize> =
            trainers.into_iter().take(taken).map(|seat| usize::try_from(seat).expect("a few")).collect();
        trainers.sort_unstable();
        trainers.dedup();
        // A flush before the node goes leaves committed files that could be lost.
        let flush = flush || (self.number + 1).is_multiple_of(NODE_EVERY);
        Round { work, kill, aimed, trainers, while_away, flush }
    }

    /// Whether a campaign may end after this round, because the round has checked everything.
    pub(crate) fn is_whole(&self) -> bool {
        self.number > 0 && self.number.is_multiple_of(NODE_EVERY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(seed: u64, daemon_kills: bool) -> Vec<Round> {
        let mut plan = Plan::new(seed, 10, daemon_kills);
        (0..200).map(|_| plan.next_round()).collect()
    }

    #[test]
    fn a_seed_gives_its_rounds_again() {
        assert_eq!(rounds(1, true), rounds(1, true));
        assert_ne!(rounds(1, true), rounds(2, true));
    }

    #[test]
    fn the_daemon_dies_only_when_it_is_switched_on_and_the_rest_stays_the_same() {
        let (without, with) = (rounds(5, false), rounds(5, true));
        let count = |rounds: &[Round], kill| rounds.iter().filter(|round| round.kill == kill).count();
        assert_eq!((count(&without, Kill::Daemon), count(&without, Kill::Keeper)), (0, 0));
        assert_eq!(count(&without, Kill::Node), 25);
        assert!(
            count(&with, Kill::Daemon) > 100
                && count(&with, Kill::Keeper) > 0
                && count(&with, Kill::Node) > 0
        );
        let work = |rounds: &[Round]| rounds.iter().map(|round| round.work).collect::<Vec<_>>();
        assert_eq!(work(&without), work(&with));
    }
}
