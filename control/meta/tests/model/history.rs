//! Random histories: more nodes, more calls, more faults at once than the search can exhaust.
//!
//! Owns: the choice of actions by a seed. Does not own: what is right (`ghost`). A failure prints its seed; `TIDEMARK_SEED` runs only that
//! one.

use crate::scenarios;
use crate::world::{Action, Bounds, Trouble, World};
use tidemark_meta::rules::{Rule, Rules};

/// Actions in one history; then everything comes to rest.
const STEPS: usize = 400;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }
}

/// Returns the weight of an action in the choice: calls come to an end, and faults stay rare.
fn weight(action: &Action) -> usize {
    match action {
        Action::Deliver(_) | Action::Send(_) => 12,
        Action::Client(..) => 2,
        Action::Heal(_) | Action::ComeBack(_) | Action::Again(_) | Action::Ask | Action::Release => 4,
        Action::DeliverWith(_, Trouble::Lose | Trouble::Repeat) => 1,
        Action::DeliverWith(..) | Action::Node(..) | Action::Replace | Action::Wait | Action::Sweep => 1,
        Action::Verdict(_) => 1,
    }
}

/// Runs one history of up to `steps` actions. Returns the actions taken, and the error found.
fn run(seed: u64, steps: usize, rules: Rules) -> (Vec<Action>, Option<String>) {
    let bounds = Bounds { rules, ..scenarios::everything() };
    let mut world = World::new(&bounds);
    let mut random = Random(seed);
    let mut trace = vec![];
    for _ in 0..steps {
        let actions = world.actions(&bounds);
        if actions.is_empty() {
            break;
        }
        let total: usize = actions.iter().map(weight).sum();
        let mut at = random.below(total);
        let chosen = actions.into_iter().find(|action| {
            let weight = weight(action);
            let hit = at < weight;
            at = at.saturating_sub(weight);
            hit
        });
        let Some(action) = chosen else { break };
        if world.act(&action) {
            trace.push(action);
        }
        if world.bad().is_some() {
            return (trace, world.bad().map(str::to_owned));
        }
    }
    world.come_to_rest();
    (trace, world.bad().map(str::to_owned))
}

#[test]
fn random_histories_keep_one_order() {
    let only: Option<u64> = std::env::var("TIDEMARK_SEED").ok().map(|seed| seed.parse().unwrap());
    let more: u64 =
        std::env::var("TIDEMARK_MODEL_MORE").map_or(1, |more| 1 + 20 * more.parse::<u64>().unwrap());
    let seeds = only.map_or(0..1_000 * more, |seed| seed..seed + 1);
    let mut calls = 0;
    for seed in seeds {
        let (trace, bad) = run(seed, STEPS, Rules::COMPLETE);
        calls += trace.iter().filter(|action| matches!(action, Action::Client(..))).count();
        if let Some(bad) = bad {
            for (number, action) in trace.iter().enumerate() {
                println!("{}. {action:?}", number + 1);
            }
            panic!("seed {seed}: {bad}");
        }
    }
    println!("{calls} calls");
}

#[test]
fn two_nodes_that_wait_for_each_other_are_found() {
    let waits = |bad: &String| bad.contains("waits for ever");
    let found = (0..2_000).find_map(|seed| run(seed, STEPS, Rules::without(Rule::Yield)).1.filter(waits));
    assert!(found.is_some(), "without its rule nothing waits for ever");
}
