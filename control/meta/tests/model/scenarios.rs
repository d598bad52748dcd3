//! The scenarios: which calls, which faults, from which beginning.
//!
//! Owns: the list, with the size that each is exhausted at. Does not own: the search.

use crate::world::{At, Bounds, Dir, Op, Trouble};
use tidemark_meta::rules::Rules;

const ROOT: Dir = Dir::Root;
const D: Dir = Dir::In("d");
const E: Dir = Dir::In("e");
const A: At = At(ROOT, "a");
const B: At = At(ROOT, "b");
const DX: At = At(D, "x");

/// Named bounds.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) bounds: Bounds,
}

fn scenario(
    name: &'static str,
    (nodes, operations, faults): (usize, u8, u8),
    prelude: &[(usize, Op)],
    ops: &[Op],
    troubles: &[Trouble],
) -> Scenario {
    let (ops, troubles, prelude) = (ops.to_vec(), troubles.to_vec(), prelude.to_vec());
    let rules = Rules::COMPLETE;
    Scenario { name, bounds: Bounds { nodes, operations, faults, ops, troubles, prelude, rules } }
}

/// All scenarios. `more`: operations that are added to each, for a search that may take long.
pub(crate) fn all(more: u8) -> Vec<Scenario> {
    use Op::*;
    use Trouble::*;
    let net = [Lose, Repeat];
    let made = [(0, Create(A))];
    let own = [(0, Delegate(ROOT)), (0, Create(A))];
    let directories = [(0, Mkdir(At(ROOT, "d"))), (0, Mkdir(At(ROOT, "e")))];
    let mut all = vec![
        scenario("names", (2, 3, 0), &[], &[Delegate(ROOT), Create(A), Unlink(A), Look(A)], &[]),
        scenario("names, messages lost and repeated", (2, 2, 1), &[], &[Delegate(ROOT), Create(A), Unlink(A), Look(A)], &net),
        scenario("names, doubtful answers", (2, 2, 1), &[], &[Delegate(ROOT), Create(A), Unlink(A)], &[AnswerLost, Delayed]),
        scenario("renames", (2, 2, 0), &own, &[Rename(A, B), Exchange(A, B), Create(B), Unlink(A), Look(B)], &[]),
        scenario("bytes", (2, 3, 0), &made, &[Open(A), Truncate(A), Unlink(A), Look(A)], &[]),
        scenario("links", (2, 3, 0), &own, &[Link(A, B), Unlink(A), Open(B), Look(A), Chmod(A)], &[]),
        scenario("directories", (2, 2, 0), &directories, &[Rename(At(ROOT, "d"), At(E, "d")), Rename(At(ROOT, "e"), At(D, "e")), Create(DX), Rmdir(At(ROOT, "d")), Look(DX)], &[]),
        scenario("a node is declared gone", (2, 3, 1), &own, &[Create(A), Unlink(A), Look(A)], &[Cut]),
        scenario("a writer is declared gone", (2, 3, 1), &own, &[Open(A), Look(A)], &[Cut]),
        scenario("power-off", (2, 2, 1), &own, &[Create(B), Unlink(A), Look(B)], &[PowerOff]),
        scenario("another coordinator", (2, 2, 1), &own, &[Create(B), Unlink(A), Look(A)], &[Replace]),
        scenario("three nodes", (3, 2, 0), &[], &[Delegate(ROOT), Create(A), Look(A)], &[]),
    ];
    for scenario in &mut all {
        scenario.bounds.operations += more;
    }
    all
}
