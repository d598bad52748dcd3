//! An explicit-state model that drives this crate's code: every interleaving of a few calls, messages and faults.
//!
//! Owns: the tests. Does not own: the scenarios (`scenarios`), what is right (`ghost`), the search (`search`).

#![expect(clippy::unwrap_used, clippy::print_stdout, reason = "helpers of tests")]

mod ghost;
mod history;
mod scenarios;
mod search;
mod succession;
mod world;

use scenarios::Scenario;
use search::{Searched, search};
use tidemark_meta::rules::{Rule, Rules};

/// Limit of a search. Every scenario has far fewer states; a search that reaches it was not exhausted, which is an
/// error of the scenario.
const STATES_MAX: usize = 250_000;

fn show(scenario: &Scenario, searched: &Searched) -> bool {
    let Searched { states, all, took, found } = searched;
    let how = if *all { "all" } else { "cut short" };
    println!("{}: {states} states ({how}), {:.1} s", scenario.name, took.as_secs_f64());
    if let Some((bad, trace)) = found {
        println!("   {bad}");
        for (number, action) in trace.iter().enumerate() {
            println!("   {}. {action:?}", number + 1);
        }
    }
    found.is_none() && *all
}

#[test]
fn all_rules_keep_one_order() {
    let more: u8 = std::env::var("TIDEMARK_MODEL_MORE").map_or(0, |more| more.parse().unwrap());
    let states_max = if more == 0 { STATES_MAX } else { 6 * STATES_MAX };
    let mut good = true;
    for scenario in scenarios::all(more) {
        good &= show(&scenario, &search(&scenario.bounds, states_max));
    }
    assert!(good);
}

/// Each rule, and the scenario in which its absence is found.
const FOUND_IN: &[(Rule, &str)] = &[
    (Rule::Fence, "replaced, delegated"),
    (Rule::Chain, "lost and repeated"),
    (Rule::Life, "gone, names"),
    (Rule::AskDelegate, "names"),
    (Rule::AskHolder, "bytes"),
    (Rule::Confirm, "replaced"),
    (Rule::OwnFirst, "bytes"),
    (Rule::Recall, "names"),
    (Rule::NoExpiry, "power-off"),
    (Rule::WritersBlock, "open files"),
    (Rule::Tombstones, "gone, a name since made and removed"),
    (Rule::RebaseCompares, "gone, bytes since closed"),
    (Rule::RebaseKeeps, "gone, look-ups"),
    (Rule::ReadAfterDoubt, "doubt"),
    (Rule::CatchUp, "replaced"),
    (Rule::NoGuess, "power-off"),
    (Rule::RecalledGrant, "names"),
    (Rule::BusyNames, "two clients"),
    (Rule::SharedFiles, "links"),
    (Rule::NoLoops, "directories"),
    (Rule::EmptyForAll, "directories"),
];

#[test]
fn each_rule_left_out_is_found() {
    // The search looks for a failed assertion here; it needs no backtrace.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = vec![];
    for (rule, name) in FOUND_IN {
        let mut scenarios = scenarios::all(0).into_iter();
        let mut scenario = scenarios.find(|scenario| scenario.name == *name).unwrap();
        scenario.bounds.rules = Rules::without(*rule);
        let searched = search(&scenario.bounds, STATES_MAX);
        match searched.found {
            Some((bad, trace)) => {
                let (states, steps) = (searched.states, trace.len());
                println!("without {rule:?}: {bad} ({name}: {states} states, {steps} steps)");
            }
            None => {
                println!("without {rule:?}: nothing ({name}: {} states)", searched.states);
                missed.push(rule);
            }
        }
    }
    std::panic::set_hook(hook);
    assert!(missed.is_empty(), "{missed:?}");
}
