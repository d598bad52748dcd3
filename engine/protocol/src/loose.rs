//! The rules for when a loose file, which belongs to no checkpoint, goes to Tier-3, and how much of it.
//!
//! Owns: the moment of an upload, given the facts about the file; the objects that a generation shares with an earlier one; the
//! generations that are retired. Does not own: finding out the facts, the uploads and the deletes (the engine).
//!
//! A log is never "whole": its present bytes are wanted, most of all after a crash. A file that settles is therefore uploaded as
//! soon as it has settled. A file that never settles, because it stays open or is appended to repeatedly, is uploaded at
//! intervals.

use crate::id::Generation;
use crate::retention::Policy;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

const SECOND_NS: i64 = 1_000_000_000;

/// Interval between uploads of a file that keeps changing, in settle times.
const SETTLES: i64 = 12;

/// Longest such interval, so that the loss of the node loses no more than a minute of a log.
const LONGEST_NS: i64 = 60 * SECOND_NS;

/// Reading and uploading a file that keeps changing takes at most one part in this many of the time.
const SHARE: i64 = 4;

/// Maximum number of objects that the bytes of a file may lie in: each costs a request when the file is read, and an object that
/// stays.
pub const PARTS_MAX: usize = 64;

/// The state in which the writers of a loose file had left it when it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Left {
    #[default]
    Closed,
    /// The writers were killed, or ended without closing the file.
    Cut,
    /// A handle could write the file.
    Open,
    /// A word that only a newer daemon knows.
    #[serde(other)]
    Unknown,
}

impl Left {
    #[must_use]
    pub fn is_closed(&self) -> bool {
        *self == Self::Closed
    }
}

/// The first `bytes` bytes of the object of a generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoosePart {
    pub generation: Generation,
    pub bytes: u64,
}

/// Smallest file that shares objects. A smaller one is sent whole each time: describing the shared part would cost about as much.
pub const SHARED_FROM_BYTES: u64 = 16 << 10;

/// Returns the parts of an earlier generation that a new one shares, which begins with the same `prefix_bytes`. The bytes after
/// them go into an object of their own.
///
/// If there are as many parts as allowed, the last half of them is sent again as one object, together with earlier parts that are
/// no larger. The bytes sent again thus double each time, and a byte is sent a few times only, however long a file grows.
#[must_use]
pub fn shared(parts: &[LoosePart], prefix_bytes: u64) -> Vec<LoosePart> {
    let mut shared = Vec::new();
    let mut left = prefix_bytes;
    for part in parts {
        let bytes = part.bytes.min(left);
        if bytes == 0 {
            break;
        }
        shared.push(LoosePart { bytes, ..*part });
        left -= bytes;
    }
    if shared.len() < PARTS_MAX {
        return shared;
    }
    let mut again: u64 = shared.drain(PARTS_MAX / 2..).map(|part| part.bytes).sum();
    while let Some(last) = shared.pop_if(|last| last.bytes <= again) {
        again += last.bytes;
    }
    shared
}

/// A generation of a loose file, as Tier-3 has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    pub generation: Generation,
    pub left: Left,
    /// The generation that this one begins with, byte for byte.
    pub follows: Option<Generation>,
    /// The generations whose objects hold the bytes.
    pub parts: Vec<Generation>,
    pub closed_at_ns: i64,
}

/// The decision on a generation, and the reason in one sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Verdict {
    pub given_up: bool,
    pub reason: String,
}

/// The removal of a name, as Tier-3 has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Removal {
    /// The last generation that the removal covers.
    pub until: Generation,
    /// Whether an administrator removed the file, or the policy lets generations follow removals. Otherwise only generations that
    /// were read while the file was open are retired: mostly of temporary names.
    pub counts: bool,
}

/// Decides which generations of one path are retired, oldest first; the verdicts are in the same order. `needed`: generations
/// whose bytes files in the tree have in Tier-3.
///
/// The newest two stay, as for checkpoints, and so does the newest generation that its writers closed: later ones may be half an
/// overwrite. Two kinds are retired whatever the policy: a generation whose bytes are all in a later one, and a generation that
/// was read while a handle could write it.
#[must_use]
pub fn retain(
    policy: &Policy,
    held: &[Held],
    removal: Option<Removal>,
    needed: &BTreeSet<Generation>,
    now_ns: i64,
) -> Vec<Verdict> {
    let closed = held.iter().rev().find(|held| held.left.is_closed()).map(|held| held.generation);
    let followed: BTreeSet<_> = held.iter().filter_map(|held| held.follows).collect();
    let limited = policy.keep_last.is_some() || policy.keep_every_ns.is_some() || policy.ttl_ns.is_some();
    let mut periods = BTreeSet::new();
    let mut verdicts: Vec<Verdict> = held
        .iter()
        .enumerate()
        .map(|(index, one)| {
            let kept = |reason: &str| Verdict { given_up: false, reason: reason.to_owned() };
            let gone = |reason: String| Verdict { given_up: true, reason };
            let from_end = (held.len() - index) as u64;
            let period = policy.keep_every_ns.filter(|period| *period > 0);
            let is_first = period.is_some_and(|period| periods.insert(one.closed_at_ns.div_euclid(period)));
            let age_ns = now_ns.saturating_sub(one.closed_at_ns);
            if needed.contains(&one.generation) {
                return kept("a file in the tree has its bytes there, or a program has it open");
            }
            if let Some(Removal { counts, .. }) = removal.filter(|removal| one.generation <= removal.until) {
                if counts {
                    return gone("the file was removed".to_owned());
                }
                if one.left == Left::Open {
                    return gone("it was read while it was open, and the file was removed".to_owned());
                }
            }
            match () {
                () if from_end == 1 => kept("it is the newest"),
                () if from_end == 2 => kept("it is the one before the newest"),
                () if closed == Some(one.generation) => kept("it is the newest that its writers closed"),
                () if followed.contains(&one.generation) => {
                    gone("a later one begins with all of it".to_owned())
                }
                () if one.left == Left::Open => {
                    gone("it was read while it was open, and again later".to_owned())
                }
                () if !limited => kept("everything is kept"),
                () if policy.keep_last.is_some_and(|last| from_end <= last) => kept("it is one of the last"),
                () if is_first => kept("it is the first of its period"),
                () if policy.ttl_ns.is_some_and(|ttl_ns| age_ns < ttl_ns) => {
                    kept("it is younger than the time to live")
                }
                () => gone(format!("{from_end} from the newest, and no rule keeps it")),
            }
        })
        .collect();
    // Generations that stay keep the objects of others that they share, and the sidecars of those objects.
    for index in (0..held.len()).rev().filter(|index| verdicts[*index].given_up).collect::<Vec<_>>() {
        let own = held[index].generation;
        let mut needs = held.iter().zip(&verdicts).filter(|(_, verdict)| !verdict.given_up);
        if let Some((by, _)) = needs.find(|(held, _)| held.parts.contains(&own)) {
            verdicts[index] =
                Verdict { given_up: false, reason: format!("generation {} shares its bytes", by.generation) };
        }
    }
    verdicts
}

/// Returns the generation to restore: the newest. The exception is a newest generation that was left open or cut and does not go
/// on from a closed one: then it is the newest closed one, if any.
#[must_use]
pub fn wanted(held: &[Held]) -> Option<Generation> {
    let newest = held.last()?;
    let mut goes_on = newest;
    loop {
        if goes_on.left.is_closed() {
            return Some(newest.generation);
        }
        let before = goes_on.follows.and_then(|follows| held.iter().rfind(|held| held.generation == follows));
        match before {
            Some(before) if before.generation < goes_on.generation => goes_on = before,
            Some(_) | None => break,
        }
    }
    let closed = held.iter().rfind(|held| held.left.is_closed());
    Some(closed.unwrap_or(newest).generation)
}

/// The facts about a loose file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Whether no handle can change the bytes now.
    pub at_rest: bool,
    /// Whether Tier-3 may lack some of the bytes.
    pub lacking: bool,
    /// Time since the last writer released the file.
    pub quiet_ns: i64,
    /// Time since Tier-3 is known to lack some of the bytes, or since they were last read while a handle could write them.
    pub lacking_ns: i64,
    /// Duration of the last upload.
    pub took_ns: i64,
    /// Whether the file has a temporary name and a program that wrote it lives: it is about to be renamed or removed.
    pub in_flight: bool,
    /// Whether a caller waits for the file, or the daemon ends.
    pub waited_for: bool,
    pub settle_ns: i64,
}

/// The next step for a loose file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    Nothing,
    /// Ask again after this time.
    Again {
        in_ns: i64,
    },
    Upload,
}

/// Returns the interval between two uploads of a file that does not come to rest. A configured settle time beyond a minute counts
/// in full.
#[must_use]
pub fn interval_ns(settle_ns: i64) -> i64 {
    settle_ns.saturating_mul(SETTLES).clamp(SECOND_NS, LONGEST_NS).max(settle_ns)
}

/// Decides when a loose file is uploaded.
#[must_use]
pub fn next(facts: &Facts) -> Next {
    let interval_ns = interval_ns(facts.settle_ns).max(facts.took_ns.saturating_mul(SHARE));
    let left_ns = interval_ns.saturating_sub(facts.lacking_ns);
    match (facts.lacking, facts.at_rest) {
        (false, true) => Next::Nothing,
        // Sent now, the file would be sent twice. No event announces the end of the program.
        (true, _) if facts.in_flight => Next::Again { in_ns: facts.settle_ns.max(SECOND_NS) },
        // No event announces that a program writes.
        (false, false) => Next::Again { in_ns: left_ns.max(SECOND_NS) },
        (true, _) if facts.waited_for => Next::Upload,
        (true, at_rest) => {
            let settles_ns = facts.settle_ns.saturating_sub(facts.quiet_ns);
            let in_ns = if at_rest { settles_ns.min(left_ns) } else { left_ns };
            if in_ns <= 0 { Next::Upload } else { Next::Again { in_ns } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOG: Facts = Facts {
        at_rest: false,
        lacking: true,
        quiet_ns: 0,
        lacking_ns: 0,
        took_ns: 0,
        in_flight: false,
        waited_for: false,
        settle_ns: 5 * SECOND_NS,
    };

    #[test]
    fn a_closed_file_goes_when_it_has_settled_and_one_that_never_does_within_a_minute() {
        let closed = Facts { at_rest: true, quiet_ns: 4 * SECOND_NS, ..LOG };
        assert_eq!(next(&closed), Next::Again { in_ns: SECOND_NS });
        assert_eq!(next(&Facts { quiet_ns: 5 * SECOND_NS, ..closed }), Next::Upload);
        assert_eq!(next(&Facts { lacking: false, ..closed }), Next::Nothing);
        assert_eq!(next(&Facts { waited_for: true, ..closed }), Next::Upload);
        assert_eq!(next(&LOG), Next::Again { in_ns: 60 * SECOND_NS });
        let minute = 60 * SECOND_NS;
        assert_eq!(next(&Facts { lacking_ns: minute, ..LOG }), Next::Upload);
        assert_eq!(next(&Facts { lacking_ns: minute, quiet_ns: 1, ..closed }), Next::Upload);
        assert_eq!(next(&Facts { waited_for: true, ..LOG }), Next::Upload);
        let in_flight = Facts { in_flight: true, quiet_ns: minute, lacking_ns: minute, ..closed };
        assert_eq!(next(&in_flight), Next::Again { in_ns: 5 * SECOND_NS });
        assert_eq!(next(&Facts { waited_for: true, ..in_flight }), Next::Again { in_ns: 5 * SECOND_NS });
        assert_eq!((interval_ns(0), interval_ns(SECOND_NS)), (SECOND_NS, 12 * SECOND_NS));
        assert_eq!(interval_ns(3600 * SECOND_NS), 3600 * SECOND_NS, "as it was asked for");
    }

    #[test]
    fn a_file_that_takes_long_goes_less_often() {
        let large = Facts { took_ns: 30 * SECOND_NS, lacking_ns: 60 * SECOND_NS, ..LOG };
        assert_eq!(next(&large), Next::Again { in_ns: 60 * SECOND_NS });
    }

    fn held(generation: u64, left: Left, follows: Option<u64>, parts: &[u64]) -> Held {
        Held {
            generation: Generation(generation),
            left,
            follows: follows.map(Generation),
            parts: parts.iter().copied().map(Generation).collect(),
            closed_at_ns: i64::try_from(generation).unwrap() * SECOND_NS,
        }
    }

    fn gone(policy: &Policy, held: &[Held], removed: Option<u64>) -> Vec<u64> {
        let removal = removed.map(|until| Removal { until: Generation(until), counts: true });
        let verdicts = retain(policy, held, removal, &BTreeSet::new(), 100 * SECOND_NS);
        let all = held.iter().zip(verdicts);
        all.filter(|(_, verdict)| verdict.given_up).map(|(held, _)| held.generation.0).collect()
    }

    #[test]
    fn a_log_keeps_what_its_newest_generations_need() {
        let whole = |generation| held(generation, Left::Closed, generation.checked_sub(1), &[generation]);
        let log: Vec<_> = (1..=6).map(whole).collect();
        assert_eq!(gone(&Policy::default(), &log, None), [1, 2, 3, 4]);
        let parts = |generation| held(generation, Left::Open, generation.checked_sub(1), &[1, generation]);
        let mut shared: Vec<_> = (1..=6).map(parts).collect();
        shared[0].left = Left::Closed;
        assert_eq!(gone(&Policy::default(), &shared, None), [2, 3, 4], "1 has the bytes of 5 and 6");
        assert_eq!(gone(&Policy::default(), &shared, Some(6)), [1, 2, 3, 4, 5, 6]);
        assert_eq!(gone(&Policy::default(), &shared, Some(4)), [2, 3, 4], "the name was used again");
        let needed = BTreeSet::from([Generation(2)]);
        let removal = Removal { until: Generation(6), counts: true };
        let verdicts = retain(&Policy::default(), &shared, Some(removal), &needed, 0);
        let stays: Vec<_> = verdicts.iter().map(|verdict| !verdict.given_up).collect();
        assert_eq!(
            stays,
            [true, true, false, false, false, false],
            "a renamed file has its bytes in 2, and in 1"
        );
    }

    #[test]
    fn what_was_written_over_stays_as_the_policy_says_and_the_last_whole_one_always() {
        let over = |generation| held(generation, Left::Closed, None, &[generation]);
        let mut file: Vec<_> = (1..=6).map(over).collect();
        assert_eq!(gone(&Policy::default(), &file, None), [0; 0]);
        let last = Policy { keep_last: Some(3), ..Policy::default() };
        assert_eq!(gone(&last, &file, None), [1, 2, 3]);
        let young = Policy { ttl_ns: Some(97 * SECOND_NS), ..Policy::default() };
        assert_eq!(gone(&young, &file, None), [1, 2, 3]);
        let daily = Policy { keep_every_ns: Some(3 * SECOND_NS), ..Policy::default() };
        assert_eq!(gone(&daily, &file, None), [2, 4]);
        for cut in &mut file[2..] {
            cut.left = Left::Cut;
        }
        assert_eq!(gone(&Policy { keep_last: Some(1), ..last }, &file, None), [1, 3, 4]);
    }

    #[test]
    fn of_a_temporary_name_nothing_stays_that_was_only_read_while_it_was_open() {
        let files = [held(1, Left::Open, None, &[1]), held(2, Left::Open, Some(1), &[1, 2])];
        let removal = Removal { until: Generation(2), counts: false };
        let verdicts = |files: &[Held]| {
            let verdicts = retain(&Policy::default(), files, Some(removal), &BTreeSet::new(), 0);
            verdicts.iter().map(|verdict| verdict.given_up).collect::<Vec<_>>()
        };
        assert_eq!(verdicts(&files), [true, true]);
        let closed = [held(1, Left::Closed, None, &[1]), held(2, Left::Open, Some(1), &[1, 2])];
        assert_eq!(verdicts(&closed), [false, true]);
    }

    #[test]
    fn what_is_wanted_back_is_the_newest_that_was_not_broken_off_over_a_whole_one() {
        let of = |held: &[Held]| wanted(held).map(|generation| generation.0);
        let whole = held(3, Left::Closed, None, &[3]);
        assert_eq!(of(&[whole.clone(), held(4, Left::Closed, None, &[4])]), Some(4));
        assert_eq!(of(&[whole.clone(), held(4, Left::Cut, None, &[4])]), Some(3), "an overwrite was cut");
        let log = [whole, held(4, Left::Open, Some(3), &[3, 4]), held(5, Left::Cut, Some(4), &[3, 4, 5])];
        assert_eq!(of(&log), Some(5), "it was appended to");
        assert_eq!(of(&[held(1, Left::Cut, None, &[1])]), Some(1));
        assert_eq!(of(&[held(2, Left::Cut, Some(2), &[2])]), Some(2), "what says so of itself ends, too");
        assert_eq!(of(&[]), None);
    }

    fn appended(sizes: impl Iterator<Item = u64>) -> (Vec<LoosePart>, u64, u64) {
        let (mut parts, mut size_bytes, mut sent_bytes) = (Vec::<LoosePart>::new(), 0, 0);
        for (number, more) in (1..).zip(sizes) {
            parts = shared(&parts, size_bytes);
            size_bytes += more;
            let bytes = size_bytes - parts.iter().map(|part| part.bytes).sum::<u64>();
            sent_bytes += bytes;
            parts.push(LoosePart { generation: Generation(number), bytes });
        }
        (parts, size_bytes, sent_bytes)
    }

    #[test]
    fn a_file_that_grows_for_ever_has_few_parts_and_sends_each_byte_a_few_times() {
        // A day of a log that gets a KiB each minute, after eight MiB.
        let (parts, size_bytes, sent_bytes) = appended(std::iter::once(8 << 20).chain([1024; 1440]));
        assert_eq!(parts.iter().map(|part| part.bytes).sum::<u64>(), size_bytes);
        assert!(parts.len() <= PARTS_MAX && parts[0].bytes == 8 << 20, "the large one stays");
        assert!(sent_bytes < 2 * size_bytes, "{sent_bytes} of {size_bytes}");
        let (_, size_bytes, sent_bytes) = appended(std::iter::repeat_n(100, 100_000));
        assert!(sent_bytes < 8 * size_bytes, "{sent_bytes} of {size_bytes}");
    }

    #[test]
    fn what_changed_in_the_middle_shares_what_comes_before() {
        let part = |generation, bytes| LoosePart { generation: Generation(generation), bytes };
        let parts = [part(1, 10), part(4, 10), part(5, 10)];
        assert_eq!(shared(&parts, 15), [part(1, 10), part(4, 5)]);
        assert_eq!(shared(&parts, 30), parts);
        assert_eq!(shared(&parts, 0), []);
    }

    proptest! {
        #[test]
        fn what_stays_has_its_bytes_and_the_newest_two_stay(
            files in prop::collection::vec((0..3_u8, any::<bool>(), 0..4_usize), 1..20),
            keep_last in prop::option::of(1..5_u64),
        ) {
            let mut all: Vec<Held> = Vec::new();
            for (number, (left, follows, shares)) in (1..).zip(files) {
                let left = [Left::Closed, Left::Cut, Left::Open][usize::from(left)];
                let before = all.last().filter(|_| shares > 0);
                let mut parts: Vec<_> = before.map_or_else(Vec::new, |held| {
                    held.parts.iter().take(shares).map(|generation| generation.0).collect()
                });
                parts.push(number);
                all.push(held(number, left, follows.then_some(number - 1), &parts));
            }
            let gone = gone(&Policy { keep_last, ..Policy::default() }, &all, None);
            let stays = |held: &&Held| !gone.contains(&held.generation.0);
            prop_assert!(all.iter().rev().take(2).all(|held| stays(&held)));
            for held in all.iter().filter(stays) {
                prop_assert!(held.parts.iter().all(|part| !gone.contains(&part.0)));
            }
            let whole = all.iter().rev().find(|held| held.left == Left::Closed);
            prop_assert!(whole.is_none_or(|held| stays(&held)));
        }

        #[test]
        fn whatever_changes_goes_in_time_and_what_is_there_does_not(
            at_rest: bool, lacking: bool, waited_for: bool,
            quiet_ns in 0..200 * SECOND_NS, lacking_ns in 0..200 * SECOND_NS, settle_ns in 0..100 * SECOND_NS,
        ) {
            let in_flight = false;
            let facts =
                Facts { at_rest, lacking, quiet_ns, lacking_ns, took_ns: 0, in_flight, waited_for, settle_ns };
            let next = next(&facts);
            prop_assert_eq!(next == Next::Nothing, at_rest && !lacking);
            prop_assert!(lacking || next != Next::Upload);
            if lacking && lacking_ns >= LONGEST_NS.max(settle_ns) {
                prop_assert_eq!(next, Next::Upload);
            }
            if let Next::Again { in_ns } = next {
                prop_assert!(!(lacking && waited_for));
                prop_assert!(in_ns <= LONGEST_NS.max(settle_ns).max(SECOND_NS));
                prop_assert!(in_ns > 0, "a look that finds nothing is not repeated at once");
            }
        }
    }
}
