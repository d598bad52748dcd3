//! Verdicts by example and by property: never too early, never on the word of a former life, and always with the reason.

mod succession;

use super::*;
use proptest::prelude::*;

const EPOCH: Epoch = Epoch(5);

fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

fn life(node: &str, incarnation: u64, start: u64) -> Life {
    Life { node: name(node), incarnation: Incarnation(incarnation), start: StartId(start) }
}

fn join(life: &Life) -> Event {
    Event::Join(Join {
        from: life.clone(),
        epoch: Epoch(0),
        address: "h:1".into(),
        labels: Labels::default(),
    })
}

/// A coordinator embedded in node `a`, with its clock and all nodes' beats.
struct Cluster {
    membership: Membership,
    now_ms: u64,
    lives: BTreeMap<NodeName, Life>,
    numbers: BTreeMap<NodeName, u64>,
    told: Vec<Change>,
    asked: Vec<(NodeName, Ask)>,
}

impl Cluster {
    fn of(nodes: &str) -> Self {
        let membership =
            Membership::new(EPOCH, name("a"), true, MemberList::default(), Patience::default(), 900_000);
        let mut cluster = Self {
            membership,
            now_ms: 900_000,
            lives: BTreeMap::new(),
            numbers: BTreeMap::new(),
            told: vec![],
            asked: vec![],
        };
        for node in nodes.split_whitespace() {
            cluster.step(join(&life(node, 1, 1))).expect("a new node is let in");
            cluster.lives.insert(name(node), life(node, 1, 1));
        }
        cluster.told.clear();
        cluster
    }

    fn step(&mut self, event: Event) -> Result<(), Refusal> {
        let mut todo = vec![];
        let result = self.membership.step(event, self.now_ms, &mut todo);
        for command in todo {
            match command {
                Command::Tell(change) => self.told.push(change),
                Command::Ask { to, ask } => self.asked.push((to, ask)),
                _ => {}
            }
        }
        result
    }

    fn beat(&mut self, node: &str) -> Result<(), Refusal> {
        let from = self.lives[&name(node)].clone();
        self.beat_of(from, EPOCH)
    }

    fn beat_of(&mut self, from: Life, epoch: Epoch) -> Result<(), Refusal> {
        let number = self.numbers.entry(from.node.clone()).or_default();
        *number += 1;
        let number = *number;
        self.step(Event::Beat(Beat { from, epoch, number, tier1_used_bytes: 0, tier1_size_bytes: 0 }))
    }

    /// Ticks for this time, with beats of `beating` at every interval.
    fn pass(&mut self, ms: u64, beating: &str) {
        for _ in 0..ms / TICK_MS {
            self.now_ms += TICK_MS;
            if self.now_ms.is_multiple_of(BEAT_MS) {
                beating.split_whitespace().for_each(|node| self.beat(node).expect("a beat in time"));
            }
            self.step(Event::Tick).expect("a tick");
        }
    }

    /// Answers all open questions.
    fn answer(&mut self, heard: bool) -> usize {
        let asked = std::mem::take(&mut self.asked);
        for (to, ask) in &asked {
            let taken = self.step(answer(&self.lives[to].clone(), ask, heard));
            // The first node that heard it closes the question.
            let is_closed = heard && matches!(taken, Err(Refusal::NoQuestion { .. }));
            assert!(taken.is_ok() || is_closed, "{taken:?}");
        }
        asked.len()
    }

    /// Returns the verdicts since the last call.
    fn told(&mut self) -> Vec<String> {
        std::mem::take(&mut self.told).iter().map(Change::to_string).collect()
    }

    fn standing(&self, node: &str) -> &Standing {
        &self.membership.member(&name(node)).expect("a member").standing
    }
}

fn answer(from: &Life, ask: &Ask, heard: bool) -> Event {
    let (from, question, about) = (from.clone(), ask.question, ask.about.node.clone());
    Event::Heard(Heard { from, epoch: ask.epoch, question, about, heard })
}

#[test]
fn silence_is_counted_while_the_coordinator_runs() {
    let mut cluster = Cluster::of("a b c");
    cluster.pass(600, "b c");
    let last_ms = cluster.membership.silent_ms(&name("b")).expect("a member");
    assert!(last_ms < BEAT_MS, "{last_ms}");
    cluster.pass(300, "c");
    assert_eq!(cluster.membership.silent_ms(&name("b")), Some(last_ms + 300));
    cluster.now_ms += 60_000;
    cluster.step(Event::Tick).expect("a tick");
    let silent_ms = cluster.membership.silent_ms(&name("b")).expect("a member");
    assert_eq!(silent_ms, last_ms + 300 + TICK_MS, "what nobody listened to is nobody's silence");
    assert_eq!(cluster.membership.silent_ms(&name("z")), None);
}

#[test]
fn a_silent_node_is_gone_when_two_neighbours_do_not_hear_it_either() {
    let mut cluster = Cluster::of("a b c d e");
    cluster.pass(3_000, "b c d e");
    assert_eq!(cluster.told(), Vec::<String>::new());
    cluster.pass(SUSPECT_BEATS * BEAT_MS + TICK_MS, "b c e");
    assert_eq!(cluster.told(), ["node d is suspect: 3 beats missed, silent for 450 ms"]);
    let to: Vec<_> = cluster.asked.iter().map(|(to, _)| to.as_str().to_owned()).collect();
    assert_eq!(to, ["e", "b"], "the coordinator's own node is not asked");
    // A single answer is not enough before the time is over; two are.
    let (_, ask) = cluster.asked.remove(0);
    cluster.step(answer(&life("e", 1, 1), &ask, false)).unwrap();
    cluster.pass(100, "b c e");
    assert_eq!(cluster.told(), Vec::<String>::new());
    cluster.answer(false);
    cluster.pass(TICK_MS, "b c e");
    assert_eq!(cluster.told(), ["node d is gone: e and b, of 2 asked, did not hear it within 300 ms"]);
    assert_eq!(cluster.membership.candidates().len(), 5, "it keeps its place for a while");
    assert_eq!(cluster.beat("d"), Err(Refusal::WasGone { node: name("d") }));
    assert_eq!(Refusal::WasGone { node: name("d") }.cure(), Cure::Join);
    cluster.step(join(&life("d", 1, 1))).unwrap();
    let told = cluster.told();
    assert!(told[0].starts_with("node d is back after"), "{told:?}");
}

#[test]
fn one_neighbour_that_answers_is_enough_when_the_time_is_over() {
    let mut cluster = Cluster::of("a b c d");
    cluster.pass(3_000, "b c d");
    cluster.step(Event::Disconnected(life("d", 1, 1))).unwrap();
    assert_eq!(cluster.told(), ["node d is suspect: its connection died"]);
    let (to, ask) = cluster.asked.remove(0);
    cluster.step(answer(&cluster.lives[&to].clone(), &ask, false)).unwrap();
    cluster.pass(ANSWER_MS - TICK_MS, "b c");
    assert_eq!(cluster.told(), Vec::<String>::new());
    cluster.pass(TICK_MS, "b c");
    assert_eq!(cluster.told(), ["node d is gone: b, of 2 asked, did not hear it within 300 ms"]);
}

#[test]
fn a_node_that_a_neighbour_hears_is_cut_off_and_comes_back_with_a_beat() {
    let mut cluster = Cluster::of("a b c d");
    cluster.pass(3_000, "b c d");
    cluster.pass(500, "b c");
    cluster.told();
    assert_eq!(cluster.answer(true), 2);
    assert_eq!(
        cluster.told(),
        ["node d is cut off from the coordinator: b hears it; look at the network between"]
    );
    cluster.pass(5_000, "b c");
    assert!(matches!(cluster.standing("d"), Standing::CutOff { .. }));
    // Neighbours are asked repeatedly, so that a death is noticed; a late answer finds its question closed.
    assert!(cluster.asked.len() >= 4, "{:?}", cluster.asked);
    let (to, ask) = cluster.asked[0].clone();
    let late = cluster.step(answer(&life(to.as_str(), 1, 1), &ask, false));
    assert!(matches!(late, Err(Refusal::NoQuestion { .. })), "{late:?}");
    cluster.beat("d").unwrap();
    assert_eq!(cluster.told(), ["node d is back after 5500 ms, with what it held"]);
    assert_eq!(*cluster.standing("d"), Standing::Alive);
}

#[test]
fn a_node_that_dies_while_it_is_cut_off_is_found_and_one_that_stays_away_is_given_up() {
    let mut cluster = Cluster::of("a b c d");
    cluster.pass(500, "b c");
    cluster.answer(true);
    cluster.told();
    cluster.pass(REASK_MS, "b c");
    assert_eq!(cluster.answer(false), 2);
    cluster.pass(TICK_MS, "b c");
    assert!(matches!(cluster.standing("d"), Standing::Gone { proof: Proof::Neighbours { .. }, .. }));
    let mut cluster = Cluster::of("a b c d");
    cluster.pass(500, "b c");
    for _ in 0..40 {
        cluster.answer(true);
        cluster.pass(REASK_MS, "b c");
    }
    assert!(matches!(cluster.standing("d"), Standing::Gone { proof: Proof::CutOffTooLong { .. }, .. }));
    assert!(cluster.told().last().unwrap().starts_with("node d is gone: it was cut off for 300"));
}

#[test]
fn a_neighbour_that_does_not_answer_in_time_is_asked_again_and_nothing_follows_from_its_silence() {
    let mut cluster = Cluster::of("a b c");
    cluster.pass(3_000, "b c");
    cluster.pass(ASK_FOR_MS - 3 * ANSWER_MS, "b");
    cluster.asked.clear();
    cluster.pass(ANSWER_MS + TICK_MS, "b");
    assert!(matches!(cluster.standing("c"), Standing::Suspect(_)), "b was busy, and says nothing");
    cluster.answer(false);
    cluster.pass(TICK_MS, "b");
    assert!(matches!(cluster.standing("c"), Standing::Gone { proof: Proof::Neighbours { .. }, .. }));
    let mut cluster = Cluster::of("a b c");
    cluster.pass(3_000, "b c");
    cluster.pass(ASK_FOR_MS + 4 * ANSWER_MS, "b");
    assert!(matches!(cluster.standing("c"), Standing::Gone { proof: Proof::Silence { .. }, .. }));
}

#[test]
fn with_nobody_to_ask_five_beats_are_waited_for_and_two_alone_are_told_what_cannot_be_known() {
    let mut cluster = Cluster::of("a b");
    cluster.pass(3_000, "b");
    cluster.pass(ALONE_BEATS * BEAT_MS - TICK_MS, "");
    assert_eq!(cluster.told().len(), 1);
    cluster.pass(2 * TICK_MS, "");
    let told = cluster.told();
    assert!(told[0].contains("two nodes alone cannot tell death from a broken network"), "{told:?}");
    // Therefore no time-out removes it, only an operator.
    cluster.pass(10 * Patience::default().for_good_ms, "");
    assert_eq!(cluster.told(), Vec::<String>::new());
    cluster.step(Event::Forget { node: name("b"), by: "admin".into() }).unwrap();
    assert_eq!(
        cluster.told(),
        ["node b is gone for good: admin said so; its copies are made again elsewhere"]
    );
    let stranger = cluster.step(Event::Forget { node: name("b"), by: "admin".into() });
    assert_eq!(stranger, Err(Refusal::Stranger { node: name("b") }));
    // Two of three nodes fall silent at once: the asked node does not answer, which proves nothing.
    let mut cluster = Cluster::of("a b c");
    cluster.pass(3_000, "b c");
    cluster.pass(1_000, "");
    let told = cluster.told();
    assert_eq!(told.iter().filter(|told| told.contains("nobody answers who could have heard it")).count(), 2);
}

#[test]
fn a_node_that_is_surely_gone_is_given_up_in_time_and_the_list_and_the_placement_follow() {
    let mut cluster = Cluster::of("a b c");
    cluster.pass(500, "b");
    cluster.answer(false);
    cluster.pass(Patience::default().for_good_ms, "b");
    assert!(cluster.membership.member(&name("c")).is_some());
    cluster.now_ms += TICK_MS;
    let mut todo = vec![];
    cluster.membership.step(Event::Tick, cluster.now_ms, &mut todo).unwrap();
    assert!(matches!(
        todo.as_slice(),
        [Command::Keep, Command::Tell(Change { verdict: Verdict::ForGood(_), .. }), Command::Place]
    ));
    assert_eq!(cluster.membership.list().members.len(), 2);
    assert_eq!(cluster.beat("c"), Err(Refusal::Stranger { node: name("c") }));
}

#[test]
fn a_coordinator_that_overslept_blames_nobody_and_still_finds_who_died_meanwhile() {
    let mut cluster = Cluster::of("a b c d");
    cluster.pass(3_000, "b c d");
    cluster.now_ms += 120_000;
    cluster.step(Event::Tick).unwrap();
    assert_eq!(cluster.told(), Vec::<String>::new());
    cluster.pass(600, "b c");
    assert_eq!(cluster.answer(false), 2, "about d alone");
    cluster.pass(TICK_MS, "b c");
    let told = cluster.told();
    assert!(told.len() == 2 && told.iter().all(|told| told.starts_with("node d")), "{told:?}");
    // The message that wakes the coordinator counts, whatever it is.
    cluster.now_ms += 60_000;
    cluster.beat("b").unwrap();
    cluster.step(Event::Tick).unwrap();
    assert_eq!(cluster.told(), Vec::<String>::new());
}

#[test]
fn patience_does_not_run_out_while_the_coordinator_sleeps() {
    let mut cluster = Cluster::of("a b c d e");
    cluster.pass(500, "b c e");
    cluster.answer(true);
    cluster.pass(500, "b c");
    cluster.answer(false);
    cluster.pass(TICK_MS, "b c");
    assert!(matches!(cluster.standing("d"), Standing::CutOff { .. }));
    assert!(matches!(cluster.standing("e"), Standing::Gone { .. }));
    cluster.told();
    cluster.now_ms += 3_600_000;
    cluster.step(Event::Tick).unwrap();
    cluster.pass(600, "b c");
    assert_eq!(cluster.told(), Vec::<String>::new());
    assert!(matches!(cluster.standing("d"), Standing::CutOff { .. }));
}

#[test]
fn a_second_live_node_of_one_name_is_refused_and_one_after_its_death_replaces_it() {
    let mut cluster = Cluster::of("a b c d");
    cluster.pass(3_000, "b c d");
    let second = life("d", 2, 9);
    let refused = cluster.step(join(&second)).unwrap_err();
    assert_eq!(refused.cure(), Cure::Wait);
    assert!(refused.to_string().contains("another node d lives at h:1"), "{refused}");
    assert_eq!(cluster.beat_of(second.clone(), EPOCH), Err(Refusal::Stranger { node: name("d") }));
    cluster.pass(500, "b c");
    assert!(cluster.step(join(&second)).is_err(), "suspect is not gone");
    cluster.answer(false);
    cluster.pass(TICK_MS, "b c");
    cluster.told();
    cluster.step(join(&second)).unwrap();
    assert_eq!(
        cluster.told(),
        ["node d is back with empty memory: incarnation 0000000000000001 was replaced by 0000000000000002"]
    );
    // The former life is refused for good.
    let replaced = Refusal::Replaced { node: name("d"), incarnation: 1 };
    assert_eq!(cluster.beat("d"), Err(replaced.clone()));
    assert_eq!(cluster.step(join(&life("d", 1, 1))), Err(replaced.clone()));
    assert_eq!(cluster.step(Event::Leave(life("d", 1, 1))), Err(replaced.clone()));
    assert_eq!(replaced.cure(), Cure::Stop);
    cluster.step(Event::Disconnected(life("d", 1, 1))).unwrap();
    assert_eq!(*cluster.standing("d"), Standing::Alive, "the death of an old connection says nothing");
    assert!(cluster.told().is_empty());
    cluster.step(Event::Leave(second)).unwrap();
    assert_eq!(cluster.told(), ["node d left"]);
}

#[test]
fn a_daemon_that_is_started_again_takes_its_place_once_its_connection_has_died() {
    let mut cluster = Cluster::of("a b c");
    cluster.pass(3_000, "b c");
    let again = life("c", 1, 2);
    assert!(
        matches!(cluster.step(join(&again)), Err(Refusal::SecondLive { .. })),
        "a delayed join of another start"
    );
    cluster.step(Event::Disconnected(life("c", 1, 1))).unwrap();
    cluster.told();
    cluster.step(join(&again)).unwrap();
    assert_eq!(cluster.told(), ["the daemon of node c was started again, its memory is as it was"]);
    let old = Refusal::OldStart { node: name("c"), start: 1 };
    assert_eq!(cluster.beat("c"), Err(old.clone()));
    assert_eq!(cluster.step(join(&life("c", 1, 1))), Err(old));
    cluster.step(join(&again)).unwrap();
    assert!(cluster.told().is_empty(), "a repeated join changes nothing");
    // Beats of the new life count from 1 again.
    cluster.numbers.clear();
    cluster.beat_of(again, EPOCH).unwrap();
}

#[test]
fn a_message_of_another_epoch_counts_for_nothing() {
    let mut cluster = Cluster::of("a b c");
    cluster.pass(3_000, "b c");
    let b = life("b", 1, 1);
    let old = cluster.beat_of(b.clone(), Epoch(4));
    assert_eq!(old, Err(Refusal::OldEpoch { theirs: Epoch(4), ours: EPOCH }));
    let mut todo = vec![];
    let newer = Join { from: b.clone(), epoch: Epoch(6), address: "h:1".into(), labels: Labels::default() };
    let refused = cluster.membership.step(Event::Join(newer), cluster.now_ms, &mut todo);
    assert_eq!(refused, Err(Refusal::Superseded { theirs: Epoch(6), ours: EPOCH }));
    assert_eq!(todo, [Command::Doubt { by: name("b"), theirs: Epoch(6) }]);
    // Beats of an old epoch do not keep a node alive.
    for _ in 0..12 {
        cluster.now_ms += TICK_MS;
        assert!(cluster.beat_of(b.clone(), Epoch(4)).is_err());
        cluster.step(Event::Tick).unwrap();
    }
    assert!(!matches!(cluster.standing("b"), Standing::Alive));
    let doubled =
        Beat { from: life("c", 1, 1), epoch: EPOCH, number: 1, tier1_used_bytes: 0, tier1_size_bytes: 0 };
    assert!(matches!(cluster.step(Event::Beat(doubled)), Err(Refusal::OldBeat { .. })));
}

#[test]
fn messages_fit_a_datagram_and_beats_a_few_hundred_bytes() {
    let long = "n".repeat(crate::id::MAX_NODE_NAME_BYTES);
    let from = Life { node: name(&long), incarnation: Incarnation(u64::MAX), start: StartId(u64::MAX) };
    let most = u64::MAX;
    let bytes = |text: serde_json::Result<String>| text.unwrap().len();
    let beat = Beat {
        from: from.clone(),
        epoch: Epoch(most),
        number: most,
        tier1_used_bytes: most,
        tier1_size_bytes: most,
    };
    assert!(bytes(serde_json::to_string(&beat)) <= 320);
    let ask = Ask { epoch: Epoch(most), question: most, about: from.clone(), within_ms: most };
    assert!(bytes(serde_json::to_string(&ask)) <= 320);
    let about = from.node.clone();
    let heard = Heard { from: from.clone(), epoch: Epoch(most), question: most, about, heard: false };
    assert!(bytes(serde_json::to_string(&heard)) <= MESSAGE_BYTES_MAX);
    let coordinator = from.node.clone();
    let admit = Admit { epoch: Epoch(most), to: from.clone(), coordinator, interval_ms: most };
    assert!(bytes(serde_json::to_string(&admit)) <= MESSAGE_BYTES_MAX);
    let refusal = Refusal::second(&from.node, Incarnation(most), &"x".repeat(ADDRESS_BYTES_MAX));
    assert!(bytes(serde_json::to_string(&refusal)) <= MESSAGE_BYTES_MAX);
    let word = |at: usize| format!("{at:0>width$}", width = crate::label::LABEL_BYTES_MAX);
    let labels: BTreeMap<_, _> = (0..crate::label::LABELS_MAX).map(|at| (word(at), word(at))).collect();
    let labels = Labels::try_from(labels).unwrap();
    let join = Join { from, epoch: Epoch(most), address: "x".repeat(ADDRESS_BYTES_MAX), labels };
    let text = serde_json::to_string(&join).unwrap();
    assert!(text.len() <= JOIN_BYTES_MAX, "{}", text.len());
    assert_eq!(serde_json::from_str::<Join>(&text).unwrap(), join);
    let mut cluster = Cluster::of("a");
    let far = Join { address: "x".repeat(ADDRESS_BYTES_MAX + 1), ..join };
    assert!(matches!(cluster.step(Event::Join(far)), Err(Refusal::Address { .. })));
}

#[test]
fn the_interval_grows_when_the_beats_would_be_too_many() {
    assert_eq!(interval_ms(0), BEAT_MS);
    assert_eq!(interval_ms(1_500), BEAT_MS);
    assert_eq!(interval_ms(1_501), 151);
    assert_eq!(interval_ms(10_000), 1_000);
}

#[test]
fn who_is_told_to_beat_more_rarely_is_awaited_for_longer() {
    let mut cluster = Cluster::of("a b");
    for number in 0..1_998 {
        cluster.step(join(&life(&format!("n{number}"), 1, 1))).expect("a new node is let in");
    }
    cluster.pass(BEAT_MS, "b");
    assert_eq!(interval_ms(2_000), 200);
    cluster.pass(550, "");
    assert_eq!(*cluster.standing("b"), Standing::Alive, "three beats of 200 ms are not over");
    cluster.pass(100, "");
    assert!(matches!(cluster.standing("b"), Standing::Suspect(_)));
    // After a shrink, the node may not have heard of the shorter interval yet.
    cluster.beat("b").expect("it is back");
    for number in 0..1_998 {
        cluster.step(Event::Leave(life(&format!("n{number}"), 1, 1))).expect("it leaves");
    }
    cluster.beat("b").expect("as it was told before");
    let silent = cluster.now_ms;
    cluster.pass(550, "");
    assert_eq!(*cluster.standing("b"), Standing::Alive, "{} ms", cluster.now_ms - silent);
    cluster.pass(100, "");
    assert!(matches!(cluster.standing("b"), Standing::Suspect(_)));
}

#[test]
fn the_interval_follows_the_number_of_nodes() {
    let me = life("b", 1, 1);
    let mut view = View::new(me.clone(), Epoch(1));
    let admit = Admit { epoch: Epoch(1), to: me, coordinator: name("a"), interval_ms: BEAT_MS };
    view.admitted(&admit, 0).unwrap();
    let echo = |number, interval_ms| Echo { epoch: Epoch(1), coordinator: name("a"), number, interval_ms };
    view.beat(0, 0, 0).expect("the first is due at once");
    view.echoed(&echo(1, 1_000), 1).unwrap();
    view.beat(0, 0, BEAT_MS).expect("due as it was told before");
    assert_eq!(view.beat(0, 0, BEAT_MS + 999), None);
    view.echoed(&echo(2, BEAT_MS), BEAT_MS + 1).unwrap();
    view.beat(0, 0, BEAT_MS + 1_000).expect("due");
    view.beat(0, 0, 2 * BEAT_MS + 1_000).expect("due as it was told last");
}

#[test]
fn a_node_follows_epochs_upwards_only_and_knows_when_nobody_hears_it() {
    let me = life("b", 1, 1);
    let mut view = View::new(me.clone(), Epoch(3));
    assert_eq!(view.beat(0, 0, 10), None);
    let admit = |epoch, coordinator: &str| Admit {
        epoch: Epoch(epoch),
        to: me.clone(),
        coordinator: name(coordinator),
        interval_ms: BEAT_MS,
    };
    let old = view.admitted(&admit(2, "z"), 10);
    assert_eq!(old, Err(Refusal::OldEpoch { theirs: Epoch(2), ours: Epoch(3) }));
    view.admitted(&admit(5, "a"), 10).unwrap();
    assert!(matches!(view.admitted(&admit(5, "c"), 10), Err(Refusal::TwoCoordinators { .. })));
    let beat = view.beat(1, 2, 10).expect("the first beat is due at once");
    assert_eq!((beat.epoch, beat.number), (Epoch(5), 1));
    assert_eq!(view.beat(1, 2, 100), None);
    assert_eq!(view.beat(1, 2, 1_000).expect("due").number, 2);
    assert_eq!(view.beat(1, 2, 1_001), None, "what was missed is not caught up with");
    let echo = |number| Echo { epoch: Epoch(5), coordinator: name("a"), number, interval_ms: BEAT_MS };
    view.echoed(&echo(1), 1_000).unwrap();
    assert_eq!(view.coordinator(1_100), Coordinator::Heard { name: name("a"), ago_ms: 100 });
    assert_eq!(view.coordinator(1_450), Coordinator::Silent { name: name("a"), for_ms: 450 });
    view.heard(1_400);
    assert_eq!(view.coordinator(1_450), Coordinator::Heard { name: name("a"), ago_ms: 50 }, "by any answer");
    let ask = |epoch| Ask { epoch: Epoch(epoch), question: 1, about: life("c", 1, 1), within_ms: ANSWER_MS };
    assert!(view.answer(&ask(4), true).is_err());
    assert!(view.answer(&ask(5), true).unwrap().heard);
    // A newer coordinator asks: the old one is refused from now on, and the node has to join.
    view.answer(&ask(6), true).unwrap();
    assert_eq!((view.epoch(), view.coordinator(1_500)), (Epoch(6), Coordinator::Unknown));
    assert_eq!(view.beat(1, 2, 2_000), None);
    assert!(view.echoed(&echo(2), 2_000).is_err());
    assert!(view.follow(Epoch(5)).is_err() && view.follow(Epoch(6)).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Beats of five nodes: every other one may be lost, and each may be late by 100 ms. The coordinator sleeps now and then, up
    /// to an hour, and misses all messages meanwhile. If two beats in a row are lost, a suspicion is justified.
    #[test]
    fn who_beats_in_time_is_never_suspect_however_the_coordinator_sleeps(
        lost in prop::collection::vec(any::<bool>(), 64), late in prop::collection::vec(0_u64..100, 64),
        sleeps in prop::collection::vec((20_usize..200, 1_u64..3_600_000), 0..5),
    ) {
        let mut cluster = Cluster::of("a b c d e");
        let nodes = ["b", "c", "d", "e"];
        let mut due: BTreeMap<&str, (u64, usize, bool)> =
            nodes.iter().map(|node| (*node, (cluster.now_ms, 0, true))).collect();
        let mut arriving: Vec<(u64, &str)> = vec![];
        let mut sleeps = sleeps.into_iter();
        let mut next_sleep = sleeps.next();
        for tick in 0..800_usize {
            let mut to_ms = cluster.now_ms + TICK_MS;
            let all_heard = due.values().all(|(.., heard)| *heard);
            let is_sleep = all_heard && next_sleep.is_some_and(|(every, _)| tick % every == every - 1);
            if is_sleep && let Some((_, ms)) = next_sleep {
                to_ms += ms;
                next_sleep = sleeps.next();
            }
            for (at, (node, (due_ms, count, heard))) in due.iter_mut().enumerate() {
                while *due_ms <= to_ms {
                    let is_lost = *heard && lost[(*count + 17 * at) % 64];
                    let arrives_ms = *due_ms + late[(*count + 31 * at) % 64];
                    // Sent during a sleep: messages that do not fit the queue are lost.
                    let is_missed = is_sleep && arrives_ms < to_ms;
                    *heard = !is_lost && !is_missed;
                    if *heard {
                        arriving.push((arrives_ms, *node));
                    }
                    (*due_ms, *count) = (*due_ms + BEAT_MS, *count + 1);
                }
            }
            arriving.sort_unstable();
            let later = arriving.split_off(arriving.partition_point(|(at, _)| *at <= to_ms));
            for (at, node) in std::mem::replace(&mut arriving, later) {
                cluster.now_ms = cluster.now_ms.max(at);
                cluster.beat(node).expect("a beat in time");
            }
            cluster.now_ms = to_ms;
            cluster.step(Event::Tick).expect("a tick");
            prop_assert!(cluster.told.is_empty(), "{:?}", cluster.told());
        }
    }

    /// Whatever is lost on the way to the coordinator: a node that a neighbour hears is not gone.
    #[test]
    fn who_is_heard_by_a_neighbour_is_never_gone(lost in prop::collection::vec(any::<bool>(), 30..200)) {
        let mut cluster = Cluster::of("a b c d");
        for lost in lost {
            cluster.pass(BEAT_MS, "b c");
            if !lost {
                cluster.beat("d").expect("a member's beat");
            }
            cluster.answer(true);
            let is_gone = matches!(cluster.standing("d"), Standing::Gone { .. });
            prop_assert!(!is_gone);
        }
    }

    /// Any events in any order, of any life of three names and any epoch.
    #[test]
    fn zombies_are_refused_and_every_gone_has_its_proof(
        events in prop::collection::vec((0_u8..7, 0_usize..3, 1_u64..4, 1_u64..4, 4_u64..7, 0_u64..400), 0..300),
    ) {
        let mut cluster = Cluster::of("a b c");
        let names = ["a", "b", "c"];
        let mut over: Vec<Life> = vec![];
        for (kind, who, incarnation, start, epoch, wait_ms) in events {
            let life = life(names[who], incarnation, start);
            cluster.now_ms += wait_ms;
            let before = cluster.membership.member(&life.node).cloned();
            let result = match kind {
                0 | 1 => cluster.step(join(&life)),
                2 => cluster.beat_of(life.clone(), Epoch(epoch)),
                3 => cluster.step(Event::Disconnected(life.clone())).and_then(|()| Err(Refusal::WasGone { node: life.node.clone() })),
                4 => match cluster.asked.pop() {
                    Some((_, ask)) => cluster.step(answer(&life, &ask, epoch == 5)),
                    None => Err(Refusal::WasGone { node: life.node.clone() }),
                },
                _ => { cluster.step(Event::Tick).expect("a tick"); Err(Refusal::WasGone { node: life.node.clone() }) }
            };
            if result.is_ok() {
                prop_assert!(!over.contains(&life), "{:?} was taken for alive", life);
                prop_assert!(kind != 2 || epoch == EPOCH.0);
            }
            let after = cluster.membership.member(&life.node).cloned();
            if let (Some(before), Some(after)) = (before, after) && before.life != after.life {
                // A life is replaced only if it was not alive.
                let is_restart = before.life.incarnation == after.life.incarnation;
                let was_gone = matches!(before.standing, Standing::Gone { .. });
                prop_assert!(is_restart || was_gone, "{:?}", before);
                over.push(before.life);
            }
            for member in cluster.membership.members() {
                prop_assert!(!over.contains(&member.life), "{:?} is over", member.life);
            }
            for change in std::mem::take(&mut cluster.told) {
                prop_assert!(!change.to_string().is_empty());
                let is_bad = matches!(change.verdict, Verdict::Gone(_) | Verdict::Suspect(_));
                prop_assert!(change.life.node != name("a") || !is_bad, "the coordinator judged itself");
                match &change.verdict {
                    Verdict::Gone(Proof::Neighbours { unheard, .. }) => prop_assert!(!unheard.is_empty()),
                    Verdict::Gone(Proof::Silence { beats, .. }) => prop_assert!(*beats >= ALONE_BEATS),
                    _ => {}
                }
            }
        }
    }
}
