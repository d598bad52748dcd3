//! An explicit-state model that drives this crate's code: every interleaving of a few calls, messages and faults.
//!
//! Owns: the scenarios. Does not own: what is right (`ghost`), the search (`search`).

mod ghost;
mod search;
mod world;

use search::search;
use tidemark_meta::rules::Rules;
use world::{At, Bounds, Dir, Op, Trouble};

const A: At = At(Dir::Root, "a");
const B: At = At(Dir::Root, "b");

#[test]
fn small() {
    for (operations, faults) in [(2, 0), (2, 1), (3, 0)] {
        let bounds = Bounds {
            nodes: 2,
            operations,
            faults,
            ops: vec![Op::Delegate(Dir::Root), Op::Create(A), Op::Write(A), Op::Unlink(A), Op::Rename(A, B), Op::Look(A), Op::Open(A), Op::Close],
            troubles: vec![Trouble::Cut, Trouble::Lose, Trouble::Repeat, Trouble::AnswerLost, Trouble::Delayed, Trouble::Replace],
            prelude: vec![],
            rules: Rules::COMPLETE,
        };
        let searched = search(&bounds, 300_000);
        println!("{operations} {faults}: {} states, all {}, {:?}", searched.states, searched.all, searched.took);
        if let Some((bad, trace)) = &searched.found {
            for (n, action) in trace.iter().enumerate() { println!("  {n} {action:?}"); }
            panic!("{bad}");
        }
    }
}
