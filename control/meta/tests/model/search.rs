//! The search: breadth first, over all states that differ.
//!
//! Owns: the visited set and the trace to what was found. Does not own: states and actions (`world`).
//!
//! States are distinguished by 64-bit hashes. With a million states the chance that two share one is some 10^-8.

use crate::world::{Action, Bounds, World};
use std::collections::{HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// The result of a search.
#[derive(Debug)]
pub(crate) struct Searched {
    pub(crate) states: usize,
    pub(crate) all: bool,
    pub(crate) took: Duration,
    /// The error that was found, and the actions that lead there.
    pub(crate) found: Option<(String, Vec<Action>)>,
}

/// Visits states until one is bad, all are visited, or `states_max` are.
pub(crate) fn search(bounds: &Bounds, states_max: usize) -> Searched {
    let began = Instant::now();
    let first = World::new(bounds);
    let mut seen = HashSet::from([first.fingerprint()]);
    let mut parents: Vec<(usize, Option<Action>)> = vec![(0, None)];
    let mut queue = VecDeque::from([(0, first)]);
    let mut found = None;
    let mut all = true;
    'search: while let Some((at, world)) = queue.pop_front() {
        for action in world.actions(bounds) {
            let mut next = world.clone();
            let acted = catch_unwind(AssertUnwindSafe(|| next.act(&action)));
            let bad = match &acted {
                Ok(false) => continue,
                Ok(true) => next.bad().map(str::to_owned),
                Err(_) => Some("the code under test broke its own belief".to_owned()),
            };
            if bad.is_none() && !seen.insert(next.fingerprint()) {
                continue;
            }
            parents.push((at, Some(action)));
            if let Some(bad) = bad {
                found = Some((bad, trace(&parents)));
                break 'search;
            }
            queue.push_back((parents.len() - 1, next));
        }
        if seen.len() >= states_max {
            all = queue.is_empty();
            break;
        }
    }
    Searched { states: seen.len(), all, took: began.elapsed(), found }
}

fn trace(parents: &[(usize, Option<Action>)]) -> Vec<Action> {
    let mut actions = vec![];
    let mut at = parents.len() - 1;
    while let (parent, Some(action)) = &parents[at] {
        actions.push(action.clone());
        at = *parent;
    }
    actions.reverse();
    actions
}
