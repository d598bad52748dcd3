//! The scenarios: which calls, which faults, from which beginning.
//!
//! Owns: the list, with the size that each is exhausted at. Does not own: the search.

use crate::world::{Action, At, Bounds, Dir, Op, Trouble};
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
    Scenario {
        name,
        bounds: Bounds {
            nodes,
            operations,
            faults,
            ops,
            troubles,
            prelude,
            beginning: vec![],
            clients: 1,
            rules,
        },
    }
}

/// Lists all scenarios. `more`: operations that are added to each, for a search that may take long.
pub(crate) fn all(more: u8) -> Vec<Scenario> {
    use Op::*;
    use Trouble::*;
    let net = [Lose, Repeat];
    let made = [(0, Create(A))];
    let own = [(0, Delegate(ROOT)), (0, Create(A))];
    let at_own = [(0, Delegate(ROOT))];
    let d_to_e = Rename(At(ROOT, "d"), At(E, "d"));
    let e_to_d = Rename(At(ROOT, "e"), At(D, "e"));
    let directories = [(0, Mkdir(At(ROOT, "d"))), (0, Mkdir(At(ROOT, "e")))];
    let mut all = vec![
        scenario("names", (2, 3, 0), &[], &[Delegate(ROOT), Create(A), Unlink(A), Look(A)], &[]),
        scenario("lost and repeated", (2, 2, 1), &[], &[Delegate(ROOT), Create(A), Unlink(A), Look(A)], &net),
        scenario("doubt", (2, 2, 1), &[], &[Delegate(ROOT), Create(A), Unlink(A)], &[AnswerLost, Delayed]),
        scenario(
            "renames",
            (2, 2, 0),
            &own,
            &[Rename(A, B), Exchange(A, B), Create(B), Unlink(A), Look(B)],
            &[],
        ),
        scenario("bytes", (2, 2, 0), &made, &[Open(A), Truncate(A), Unlink(A), Look(A)], &[]),
        scenario("open files", (2, 2, 0), &made, &[Open(A)], &[]),
        scenario("links", (2, 2, 0), &own, &[Link(A, B), Unlink(A), Open(B), Look(A), Chmod(A)], &[]),
        scenario("two clients", (2, 2, 0), &own, &[Link(A, B), Create(B), Look(B)], &[]),
        scenario(
            "directories",
            (2, 2, 0),
            &directories,
            &[d_to_e, e_to_d, Create(DX), Rmdir(At(ROOT, "d")), Look(DX)],
            &[],
        ),
        scenario("moves", (2, 3, 0), &directories, &[d_to_e, e_to_d, Rmdir(At(ROOT, "d"))], &[]),
        scenario("links and attributes", (2, 3, 0), &own, &[Link(A, B), Unlink(A), Chmod(A)], &[]),
        scenario("gone, names", (2, 2, 1), &at_own, &[Create(A)], &[Cut]),
        scenario("gone, look-ups", (2, 1, 1), &own, &[Unlink(A), Look(A)], &[Cut]),
        scenario("gone, a name since made and removed", (2, 2, 1), &at_own, &[Create(A), Unlink(A)], &[]),
        scenario("gone, bytes since closed", (2, 1, 1), &own, &[Open(A)], &[]),
        scenario("power-off", (2, 2, 1), &at_own, &[Create(B), Look(B)], &[PowerOff]),
        scenario("replaced", (2, 2, 1), &[], &[Create(A), Look(A)], &[Replace]),
        scenario("replaced, delegated", (2, 2, 1), &at_own, &[Create(B)], &[Replace]),
        scenario("three nodes", (3, 3, 0), &[], &[Delegate(ROOT), Create(A), Look(A)], &[]),
        scenario("three nodes, one declared gone", (3, 1, 1), &at_own, &[Create(A), Look(A)], &[Cut]),
        scenario(
            "doubt and another coordinator",
            (2, 2, 2),
            &[],
            &[Create(A), Look(A)],
            &[AnswerLost, Delayed, Replace],
        ),
    ];
    for scenario in &mut all {
        scenario.bounds.operations += more;
        let cut = Action::Node(0, Cut);
        scenario.bounds.beginning = match scenario.name {
            "gone, a name since made and removed" => {
                vec![cut, Action::Client(0, Create(A)), Action::Verdict(0)]
            }
            "gone, bytes since closed" => {
                vec![Action::Client(0, Open(A)), cut, Action::Client(0, Close), Action::Verdict(0)]
            }
            _ => vec![],
        };
        scenario.bounds.clients = 1 + usize::from(scenario.name == "two clients");
    }
    all
}

/// Returns the bounds of a scenario with every call and every fault, from which histories are drawn.
pub(crate) fn everything() -> Bounds {
    use Op::*;
    use Trouble::*;
    let mut ops = vec![
        Delegate(ROOT),
        Delegate(D),
        Mkdir(At(D, "sub")),
        Rmdir(At(D, "sub")),
        Rmdir(At(ROOT, "e")),
        Mkdir(At(ROOT, "e")),
    ];
    ops.extend([
        Rename(At(ROOT, "e"), At(D, "sub")),
        Rename(At(D, "sub"), At(ROOT, "e")),
        Rename(At(ROOT, "d"), At(E, "sub")),
    ]);
    ops.extend([Exchange(A, DX), Rename(A, DX), Rename(DX, B), Rename(A, B), Link(A, B), Link(B, DX)]);
    for at in [A, B, DX] {
        ops.extend([
            Create(at),
            Write(at),
            Unlink(at),
            Open(at),
            Truncate(at),
            Chmod(at),
            Look(at),
            Look(at),
            Close,
        ]);
    }
    let troubles = vec![Cut, PowerOff, Lose, Repeat, AnswerLost, Delayed, Replace];
    let prelude = vec![(0, Mkdir(At(ROOT, "d"))), (1, Mkdir(At(ROOT, "e"))), (2, Create(A))];
    Bounds {
        nodes: 4,
        operations: 60,
        faults: 8,
        ops,
        troubles,
        prelude,
        beginning: vec![],
        clients: 2,
        rules: Rules::COMPLETE,
    }
}
