//! The list that all nodes see, through joins, silence and loss.

use super::*;
use tidemark_protocol::id::{Incarnation, StartId};
use tidemark_protocol::label::Labels;
use tidemark_protocol::membership::{BEAT_MS, Beat, Heard, Join, TICK_MS};

const EPOCH: Epoch = Epoch(3);

fn life(node: &str, incarnation: u64) -> Life {
    Life { node: node.parse().unwrap(), incarnation: Incarnation(incarnation), start: StartId(incarnation) }
}

/// A roll of some nodes, the first of which is the coordinator's.
struct Term {
    roll: Roll,
    ms: u64,
    numbers: BTreeMap<NodeName, u64>,
    lost: Vec<NodeLife>,
}

impl Term {
    fn of(nodes: &[&str], for_good_ms: u64) -> Self {
        let patience = Patience { for_good_ms, ..Patience::default() };
        let terms = Terms { patience, ..Terms::default() };
        let roll = Roll::begin(EPOCH, &life(nodes[0], 1), terms, Now { ms: 0, wall_ms: 0 });
        let mut term = Self { roll, ms: 0, numbers: BTreeMap::new(), lost: Vec::new() };
        for node in nodes {
            term.join(node, 1).expect("a new node is let in");
        }
        term
    }

    fn now(&self) -> Now {
        Now { ms: self.ms, wall_ms: 1_000_000 + i64::try_from(self.ms).unwrap() }
    }

    fn step(&mut self, event: Event) -> Result<(), Refusal> {
        let (result, _) = self.roll.step(event, self.now());
        self.lost.append(&mut self.roll.todo.lost);
        result
    }

    fn join(&mut self, node: &str, incarnation: u64) -> Result<(), Refusal> {
        let (from, labels) = (life(node, incarnation), Labels::default());
        let epoch = Epoch(0);
        self.step(Event::Join(Join { from, epoch, address: format!("{node}:1"), labels }))
    }

    /// Lets `ms` milliseconds pass, in which the `beating` nodes beat and answer every question.
    fn pass(&mut self, ms: u64, beating: &[&str]) {
        for _ in 0..ms / TICK_MS {
            self.ms += TICK_MS;
            if self.ms.is_multiple_of(BEAT_MS) {
                for node in beating {
                    let from = self.roll.member(&node.parse().unwrap()).expect("a member").life.clone();
                    let number = self.numbers.entry(from.node.clone()).or_default();
                    *number += 1;
                    let number = *number;
                    let beat = Beat { from, epoch: EPOCH, number, tier1_used_bytes: 7, tier1_size_bytes: 9 };
                    self.step(Event::Beat(beat)).expect("a beat in time");
                }
            }
            self.step(Event::Tick).expect("a tick");
            for (to, ask) in std::mem::take(&mut self.roll.todo.asks) {
                if !beating.contains(&to.as_str()) {
                    continue;
                }
                let from = self.roll.member(&to).expect("a member").life.clone();
                let about = ask.about.node.clone();
                let heard = Heard { from, epoch: EPOCH, question: ask.question, about, heard: false };
                self.step(Event::Heard(heard)).expect("an open question");
            }
        }
    }

    fn listed(&self, node: &str) -> &wire::Member {
        let mut found = self.roll.list().members.iter();
        found.find(|member| member.life.node.as_str() == node).expect("it is listed")
    }

    fn partner(&self, node: &str) -> &str {
        self.listed(node).partners.first().map_or("nobody", |partner| partner.as_str())
    }
}

#[test]
fn a_node_is_gone_within_a_second_and_given_up_when_its_daemon_could_have_been_back() {
    let mut term = Term::of(&["a", "b", "c", "d"], 60_000);
    term.pass(600, &["b", "c", "d"]);
    assert_eq!((term.listed("b").standing, term.listed("b").since_ms), (wire::Standing::Alive, 0));
    term.pass(800, &["b", "d"]);
    let silent = term.listed("c").clone();
    assert_eq!((silent.standing, silent.gone), (wire::Standing::Gone, false), "{silent:?}");
    assert!(silent.why.contains("did not hear it") && silent.since_ms > 1_000_000, "{silent:?}");
    assert_eq!(term.lost, []);
    assert!(term.roll.expected(&"c".parse().unwrap()).is_some());
    term.pass(300, &["b", "d"]);
    assert!(term.listed("c").gone && term.roll.expected(&"c".parse().unwrap()).is_none());
    assert_eq!(term.lost, [life_of(term.roll.member(&"c".parse().unwrap()).unwrap())]);
    assert_eq!((term.partner("b"), term.partner("c")), ("c", "d"), "its place is kept");
    term.pass(2_000, &["b", "d"]);
    assert_eq!(term.lost.len(), 1, "once");
    // With the memory that it had.
    term.join("c", 1).unwrap();
    assert_eq!((term.listed("c").standing, term.listed("c").gone), (wire::Standing::Alive, false));
    assert_eq!(term.listed("c").why, "");
}

#[test]
fn nodes_that_fall_silent_together_are_given_up_late_and_the_other_one_of_two_soon() {
    // The coordinator's own network may have failed.
    let mut term = Term::of(&["a", "b", "c"], 60_000);
    term.pass(600, &["b", "c"]);
    term.pass(UNWITNESSED_MS - 500, &[]);
    assert_eq!(["b", "c"].map(|node| term.listed(node).standing), [wire::Standing::Gone; 2]);
    assert_eq!((term.listed("b").gone, term.lost.len()), (false, 0));
    term.pass(1_000, &[]);
    assert_eq!((term.listed("b").gone, term.lost.len()), (true, 2));
    let mut term = Term::of(&["a", "b"], 60_000);
    term.pass(600, &["b"]);
    term.pass(RESTART_MS + 300, &[]);
    assert_eq!((term.listed("b").gone, term.lost.len()), (true, 1));
}

#[test]
fn of_a_daemon_that_is_back_in_time_nobody_loses_anything() {
    let mut term = Term::of(&["a", "b", "c"], 60_000);
    term.pass(600, &["b", "c"]);
    term.step(Event::Disconnected(life("c", 1))).unwrap();
    assert_eq!(term.listed("c").standing, wire::Standing::Suspect);
    term.pass(100, &["b"]);
    assert_eq!(term.listed("c").standing, wire::Standing::Gone, "its neighbour does not hear it either");
    let from = Life { start: StartId(9), ..life("c", 1) };
    let join = Join { from, epoch: Epoch(0), address: "c:1".into(), labels: Labels::default() };
    term.step(Event::Join(join)).unwrap();
    term.pass(3_000, &["b", "c"]);
    assert_eq!((term.listed("c").standing, term.listed("c").gone), (wire::Standing::Alive, false));
    assert_eq!(term.lost, []);
}

#[test]
fn the_place_of_a_node_that_is_gone_for_good_is_given_away_and_its_life_keeps_its_name() {
    let mut term = Term::of(&["a", "b", "c", "d"], 2_000);
    let before = term.roll.list().placement;
    term.pass(600, &["b", "c", "d"]);
    term.pass(4_000, &["b", "d"]);
    assert_eq!(term.partner("b"), "d", "its neighbour's copies are made again");
    assert!(term.roll.list().placement > before);
    let over = term.roll.list().members.last().expect("somebody");
    assert_eq!((over.life.node.as_str(), over.standing, over.gone), ("c", wire::Standing::Over, true));
    assert_eq!(term.lost.len(), 1);
    assert!(!term.roll.nodes(&"a".parse().unwrap()).iter().any(|row| row.name == "c"), "no row for people");
    assert_eq!(term.roll.placement().nodes.len(), 3);
    // The name is free for another memory, which is placed where there is room.
    term.join("c", 2).unwrap();
    let lives = term.roll.list().members.iter().filter(|member| member.life.node.as_str() == "c");
    assert_eq!(
        lives.map(|member| (member.life.incarnation.0, member.gone)).collect::<Vec<_>>(),
        [(2, false), (1, true)]
    );
}

#[test]
fn of_a_memory_that_was_replaced_nothing_is_expected() {
    let mut term = Term::of(&["a", "b", "c"], 60_000);
    term.pass(600, &["b", "c"]);
    assert!(matches!(term.join("c", 2), Err(Refusal::SecondLive { .. })), "two of one name");
    term.step(Event::Disconnected(life("c", 1))).unwrap();
    term.pass(100, &["b"]);
    term.join("c", 2).unwrap();
    term.pass(TICK_MS, &[]);
    assert_eq!(term.lost, [NodeLife { node: "c".parse().unwrap(), incarnation: Incarnation(1) }]);
    assert_eq!(term.listed("c").life.incarnation, Incarnation(2));
    let row = term.roll.nodes(&"a".parse().unwrap()).into_iter().find(|row| row.name == "b").unwrap();
    assert_eq!((row.tier1_used_bytes, row.standing.as_str()), (7, "alive"));
    assert_eq!(row.partner.as_deref(), Some("c"));
}

#[test]
fn only_so_many_lives_that_are_over_are_named() {
    let mut term = Term::of(&["a", "b"], 60_000);
    for incarnation in 2..OVER_MAX as u64 + 10 {
        term.step(Event::Disconnected(life("b", incarnation - 1))).unwrap();
        term.pass(1_000, &[]);
        term.join("b", incarnation).unwrap();
    }
    assert_eq!(term.roll.list().members.len(), 2 + OVER_MAX);
}

#[test]
fn of_many_that_come_at_once_few_lists_are_made() {
    let mut term = Term::of(&["a"], 60_000);
    let first = term.roll.list().number;
    let names: Vec<String> = (0..300).map(|number| format!("n{number}")).collect();
    for (number, name) in names.iter().enumerate() {
        // Ten in each millisecond.
        term.ms = number as u64 / 10;
        term.join(name, 1).unwrap();
    }
    let lists = term.roll.list().number - first;
    assert!(lists <= 5, "{lists} lists");
    // The last are listed when the pause is over, without any further event.
    term.pass(300 + TICK_MS, &[]);
    assert_eq!(term.roll.list().members.len(), 301);
    assert_eq!(term.roll.placement().nodes.len(), 301);
    let number = term.roll.list().number;
    term.pass(TICK_MS, &[]);
    assert_eq!(term.roll.list().number, number, "nothing changed");
}

#[test]
fn of_many_nodes_a_suspicion_that_passes_is_not_told() {
    let names: Vec<String> = (0..300).map(|number| format!("n{number}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut term = Term::of(&names, 60_000);
    let others: Vec<&str> = names[1..].to_vec();
    term.pass(900, &others);
    assert_eq!(term.roll.list().members.len(), 300);
    let number = term.roll.list().number;
    // The other nodes still answer that they hear it.
    term.step(Event::Disconnected(life("n7", 1))).unwrap();
    let asked = std::mem::take(&mut term.roll.todo.asks);
    assert_eq!(asked.len(), 2);
    let row = |term: &Term| term.roll.nodes(&"n0".parse().unwrap()).into_iter().find(|row| row.name == "n7");
    assert_eq!(row(&term).unwrap().standing, "suspect");
    term.pass(BEAT_MS, &others);
    assert_eq!(row(&term).unwrap().standing, "alive");
    term.pass(900, &others);
    assert_eq!(term.roll.list().number, number, "nobody was told");
    // All nodes learn that it is gone.
    let left: Vec<&str> = others.iter().copied().filter(|name| *name != "n7").collect();
    term.pass(3_000, &left);
    assert!(term.listed("n7").gone && term.roll.list().number > number);
}

#[test]
fn a_new_term_lists_the_members_of_before_although_all_come_back_as_they_were() {
    let before = Term::of(&["a", "b", "c"], 60_000);
    let terms = Terms { stored: before.roll.stored(), ..Terms::default() };
    let roll = Roll::begin(Epoch(4), &life("b", 1), terms, Now { ms: 0, wall_ms: 0 });
    let mut term = Term { roll, ms: 0, numbers: BTreeMap::new(), lost: Vec::new() };
    for node in ["b", "a", "c"] {
        term.join(node, 1).unwrap();
    }
    term.pass(TICK_MS, &[]);
    assert_eq!(term.roll.list().members.len(), 3);
    assert_ne!(term.partner("a"), "nobody");
}

/// Where no lease keeps the list, the next coordinator awaits the members that are still expected, and only for a
/// limited time.
#[test]
fn a_coordinator_that_begins_again_awaits_those_that_were_expected_within_bounds() {
    let names = |list: &MemberList| {
        list.members.iter().map(|listed| listed.life.node.to_string()).collect::<Vec<_>>()
    };
    let mut before = Term::of(&["a", "b", "c", "d"], 60_000);
    before.pass(600, &["b", "c", "d"]);
    before.pass(2_000, &["b", "c"]);
    assert_eq!(names(&before.roll.stored()), ["a", "b", "c", "d"]);
    assert_eq!(names(&before.roll.expected_next()), ["a", "b", "c"], "it was given up");
    let terms = Terms { stored: before.roll.expected_next(), ..Terms::default() };
    let roll = Roll::begin(Epoch(4), &life("a", 1), terms, Now { ms: 0, wall_ms: 0 });
    let mut term = Term { roll, ms: 0, numbers: BTreeMap::new(), lost: Vec::new() };
    term.join("a", 1).unwrap();
    term.pass(2_500, &[]);
    assert_eq!((term.lost.len(), names(&term.roll.expected_next()).len()), (0, 3), "they are awaited");
    // No node comes, and none is there to be asked.
    term.pass(UNWITNESSED_MS - 3_000, &[]);
    assert_eq!(term.lost.len(), 0);
    term.pass(1_000, &[]);
    assert_eq!(term.lost.len(), 2);
    assert_eq!(names(&term.roll.expected_next()), ["a"]);
}

#[test]
fn a_life_that_was_given_up_for_good_and_comes_back_is_listed_once() {
    let mut term = Term::of(&["a", "b", "c", "d"], 2_000);
    term.pass(600, &["b", "c", "d"]);
    term.pass(4_000, &["b", "d"]);
    term.join("c", 1).unwrap();
    term.pass(TICK_MS, &["b", "d"]);
    let lives = || term.roll.list().members.iter().filter(|member| member.life.node.as_str() == "c");
    assert_eq!(lives().map(|member| member.standing).collect::<Vec<_>>(), [wire::Standing::Alive]);
}
