//! A coordinator that begins after another: which nodes are awaited, for how long, and which nodes
//! are asked.

use super::*;

#[test]
fn a_new_coordinator_waits_for_the_members_of_before() {
    let before = Cluster::of("a b c d").membership.list();
    let text = serde_json::to_string(&before).unwrap();
    let stored: MemberList = serde_json::from_str(&text).unwrap();
    assert_eq!(stored, before);
    let mut cluster = Cluster::of("");
    cluster.membership =
        Membership::new(Epoch(9), name("b"), true, stored, Patience::default(), cluster.now_ms);
    let unreported =
        |cluster: &Cluster| cluster.membership.unreported().map(NodeName::to_string).collect::<Vec<_>>();
    for node in ["b", "c"] {
        cluster.lives.insert(name(node), life(node, 1, 1));
        let old = cluster.beat(node);
        assert_eq!(old, Err(Refusal::OldEpoch { theirs: EPOCH, ours: Epoch(9) }));
        cluster.step(join(&life(node, 1, 1))).unwrap();
    }
    assert_eq!(unreported(&cluster), ["a", "d"]);
    assert!(cluster.told().is_empty(), "they were members before");
    let pass = |cluster: &mut Cluster, ms: u64| {
        for _ in 0..ms / TICK_MS {
            cluster.now_ms += TICK_MS;
            cluster.beat_of(life("c", 1, 1), Epoch(9)).unwrap();
            cluster.step(Event::Tick).unwrap();
        }
        cluster.told()
    };
    // The coordinator asks about the former one as soon as another node can answer.
    let told = pass(&mut cluster, SUSPECT_BEATS * BEAT_MS);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("node a is suspect: it was the coordinator"), "{told:?}");
    cluster.answer(false);
    cluster.pass(TICK_MS, "");
    assert!(matches!(cluster.standing("a"), Standing::Gone { .. }));
    assert_eq!(unreported(&cluster), ["d"]);
    cluster.told();
    let told = pass(&mut cluster, RESTORE_MS - SUSPECT_BEATS * BEAT_MS - TICK_MS);
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].contains("node d is suspect: it was a member"), "{told:?}");
    cluster.answer(false);
    cluster.pass(TICK_MS, "");
    assert!(unreported(&cluster).is_empty());
}

#[test]
fn a_coordinator_of_before_that_nobody_can_be_asked_about_has_the_time_of_every_member() {
    let stored = Cluster::of("a b c").membership.list();
    assert_eq!(stored.coordinator, Some(name("a")));
    let mut cluster = Cluster::of("");
    cluster.membership =
        Membership::new(Epoch(9), name("b"), true, stored, Patience::default(), cluster.now_ms);
    cluster.pass(RESTORE_MS - TICK_MS, "");
    assert_eq!(cluster.told(), [""; 0], "b alone hears nobody, and knows nothing of why");
    cluster.pass(TICK_MS, "");
    let told = cluster.told();
    assert_eq!(told.len(), 3, "{told:?}");
    assert!(told.iter().all(|said| said.contains("has not joined this coordinator")), "{told:?}");
}

#[test]
fn a_coordinator_that_lost_its_memory_is_a_member_at_once_and_another_of_its_name_is_judged_first() {
    let again = |address: &str| {
        let mut cluster = Cluster::of("");
        let before = Cluster::of("a b c").membership.list();
        cluster.membership =
            Membership::new(Epoch(9), name("a"), true, before, Patience::default(), cluster.now_ms);
        let own = Event::Join(Join {
            from: life("a", 2, 2),
            epoch: Epoch(9),
            address: address.into(),
            labels: Labels::default(),
        });
        (cluster, own)
    };
    let replaced =
        "node a is back with empty memory: incarnation 0000000000000001 was replaced by 0000000000000002";
    let (mut cluster, own) = again("h:1");
    cluster.step(own).unwrap();
    assert_eq!(cluster.told(), [replaced]);

    let (mut cluster, own) = again("h:2");
    let refused = cluster.step(own.clone()).unwrap_err();
    assert_eq!(refused.cure(), Cure::Wait, "it may live at its own address");
    for node in ["b", "c"] {
        cluster.lives.insert(name(node), life(node, 1, 1));
        cluster.step(join(&life(node, 1, 1))).unwrap();
    }
    for _ in 0..SUSPECT_BEATS * BEAT_MS / TICK_MS {
        cluster.now_ms += TICK_MS;
        for node in ["b", "c"] {
            cluster.beat_of(life(node, 1, 1), Epoch(9)).unwrap();
        }
        cluster.step(Event::Tick).unwrap();
    }
    cluster.answer(false);
    cluster.now_ms += TICK_MS;
    cluster.step(Event::Tick).unwrap();
    assert!(matches!(cluster.standing("a"), Standing::Gone { .. }));
    cluster.told();
    cluster.step(own).unwrap();
    assert_eq!(cluster.told(), [replaced]);
}
