//! An explicit-state model that drives this crate's code: every interleaving of a few calls, messages and faults.
//!
//! Owns: the tests. Does not own: the scenarios (`scenarios`), what is right (`ghost`), the search (`search`).

mod ghost;
mod scenarios;
mod search;
mod world;

use scenarios::Scenario;
use search::{Searched, search};
use tidemark_meta::rules::{Rule, Rules};

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
    found.is_none()
}

#[test]
fn all_rules_keep_one_order() {
    let more = std::env::var("TIDEMARK_MODEL_MORE").map_or(0, |more| more.parse().unwrap());
    let mut good = true;
    for scenario in scenarios::all(more) {
        good &= show(&scenario, &search(&scenario.bounds, 300_000));
    }
    assert!(good);
}

#[test]
fn each_rule_left_out_is_found() {
    use Rule::*;
    let rules = [Fence, Chain, Life, AskDelegate, AskHolder, Confirm, OwnFirst, Recall, NoExpiry, WritersBlock, Tombstones, RebaseCompares, RebaseKeeps, ReadAfterDoubt, CatchUp, NoGuess, RecalledGrant, BusyNames, SharedFiles, NoLoops, EmptyForAll];
    let mut missed = vec![];
    std::panic::set_hook(Box::new(|_| {}));
    for rule in rules {
        let mut any = false;
        for mut scenario in scenarios::all(0) {
            scenario.bounds.rules = Rules::without(rule);
            let searched = search(&scenario.bounds, std::env::var("CAP").map_or(20_000, |x| x.parse().unwrap()));
            if let Some((bad, trace)) = searched.found {
                println!("{rule:?}: {} in {} states, {} steps, {:.2} s, {bad}", scenario.name, searched.states, trace.len(), searched.took.as_secs_f64());
                any = true;
            }
        }
        if !any { println!("{rule:?}: NOTHING"); missed.push(rule); }
    }
    assert!(missed.is_empty(), "{missed:?}");
}
