//! Leases and promises: who is alone, who has to be asked first, and when a right ends.

use super::*;

const NOW: Duration = Duration::from_secs(100);

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

/// Has a node give a directory back that it may have alone.
fn give_back(leases: &mut Leases, node: &NodeName, directory: &[u8]) {
    if let Some(lease) = leases.lease_of(node, directory) {
        leases.released(directory, lease);
    }
}

#[test]
fn the_first_is_alone_until_a_second_comes() {
    let (a, b) = (node("a"), node("b"));
    let mut leases = Leases::default();
    assert_eq!(leases.change(&a, b"run", b"x", NOW), Verdict::Alone);
    assert_eq!(leases.change(&a, b"run", b"y", NOW), Verdict::Alone);
    assert_eq!(leases.read(&b, b"run", Some(b"x"), NOW), Verdict::PublishFirst(a.clone()));
    assert_eq!(leases.change(&b, b"run", b"z", NOW), Verdict::RecallFirst(a.clone()));
    give_back(&mut leases, &a, b"run");
    assert_eq!(leases.change(&b, b"run", b"z", NOW), Verdict::Promised);
    assert_eq!(leases.change(&a, b"run", b"w", NOW), Verdict::Promised);
}

#[test]
fn who_looked_a_directory_up_is_found_before_another_changes_it_or_what_is_above_it() {
    let (a, b, c) = (node("a"), node("b"), node("c"));
    let looked = || {
        let mut leases = Leases::default();
        for (node, path) in
            [(&a, &b"run/step"[..]), (&b, b"run/step"), (&b, b"run/step2"), (&c, b"run/step/below")]
        {
            assert_eq!(leases.knows(node, path, NOW), Some(NOW + KNOWN));
        }
        leases
    };
    let all = |nodes: &[&NodeName]| nodes.iter().copied().cloned().collect::<BTreeSet<_>>();
    assert_eq!(looked().take_knowing(&a, b"run/step", NOW), all(&[&b, &c]));
    assert_eq!(looked().take_knowing(&c, b"run", NOW), all(&[&a, &b]));
    assert_eq!(looked().take_knowing(&c, b"run/step2/x", NOW), all(&[]));
    assert_eq!(looked().take_knowing(&c, b"run", NOW + KNOWN), all(&[]), "they ask again by now");
    let mut leases = looked();
    assert!(leases.is_seen(&b, b"run", NOW) && !leases.is_seen(&b, b"run", NOW + KNOWN));
    leases.take_knowing(&a, b"run/step", NOW);
    assert_eq!(
        leases.take_knowing(&c, b"run/step", NOW),
        all(&[&a]),
        "it knows the directory that it changed"
    );
    leases.knows_not(&b, b"run/step2", NOW);
    assert!(leases.is_seen(&a, b"run", NOW), "a later look-up found it");
    leases.knows_not(&b, b"run/step2", NOW + KNOWN);
    assert!(!leases.is_seen(&a, b"run", NOW));
    let mut leases = looked();
    leases.gone(&b);
    assert_eq!(leases.take_knowing(&a, b"", NOW), all(&[&c]));
}

#[test]
fn what_is_over_is_not_kept_and_more_than_the_limit_is_asked_about_each_time() {
    let (a, mut leases) = (node("a"), Leases::default());
    for number in 0..KNOWN_MAX {
        assert!(leases.knows(&a, format!("d{number}").as_bytes(), NOW).is_some());
    }
    assert_eq!(leases.knows(&a, b"one more", NOW), None);
    assert!(leases.knows(&a, b"one more", NOW + KNOWN).is_some(), "old ones make room");
    assert_eq!((leases.known.len(), leases.known_count), (1, 1));
    // Promises of names that were not made end with time, and are not kept for long after that.
    leases.change(&a, b"d", b"x", NOW);
    give_back(&mut leases, &a, b"d");
    let at_once = 100 * usize::try_from(PROMISE.as_secs()).expect("a minute");
    for second in 0..300_u32 {
        let now = NOW + second * Duration::from_secs(1);
        for number in 0..100 {
            leases.change(&a, b"d", format!("{second}-{number}.tmp").as_bytes(), now);
        }
        assert!(leases.promises.len() <= 2 * at_once + SWEEP_MIN, "{}", leases.promises.len());
    }
}

#[test]
fn who_looks_to_make_a_name_is_promised_it_only_where_nobody_is_in_the_way() {
    let (a, b) = (node("a"), node("b"));
    let mut leases = Leases::default();
    assert_eq!(leases.promise_if_free(&a, b"d", b"x", NOW), None, "at rest");
    assert_eq!(leases.change(&a, b"d", b"y", NOW), Verdict::Alone);
    assert_eq!(leases.promise_if_free(&b, b"d", b"x", NOW), None, "another node's");
    give_back(&mut leases, &a, b"d");
    let promise = leases.promise_if_free(&b, b"d", b"x", NOW).unwrap();
    assert_eq!(leases.promise_of(&b, b"d", b"x"), Some(promise));
    assert_eq!(leases.promise_if_free(&a, b"d", b"x", NOW), None, "promised to another");
    assert_eq!(leases.change(&a, b"d", b"x", NOW), Verdict::Busy(b.clone()));
    assert_eq!(leases.take_knowing(&a, b"d", NOW), BTreeSet::from([b.clone()]), "it would make it there");
    assert_eq!(leases.take_knowing(&b, b"d", NOW), BTreeSet::new());
}

#[test]
fn what_is_taken_back_for_no_other_node_is_somebodys_alone_again() {
    let (a, b) = (node("a"), node("b"));
    let mut leases = Leases::default();
    assert_eq!(leases.change(&a, b"run", b"x", NOW), Verdict::Alone);
    let lease = leases.lease_of(&a, b"run");
    leases.rests(b"run", lease, NOW);
    assert_eq!(leases.read(&b, b"run", Some(b"x"), NOW), Verdict::Answer);
    // The holder would not believe yet that it has it alone.
    assert_eq!(leases.change(&a, b"run", b"y", NOW), Verdict::Promised);
    let mut again = leases.clone();
    assert_eq!(leases.change(&a, b"run", b"z", NOW + REST), Verdict::Alone);
    assert_eq!(leases.change(&b, b"run", b"z", NOW + REST), Verdict::RecallFirst(a.clone()));
    // Recalled twice: the second time counts.
    let later = NOW + Duration::from_secs(1);
    let lease = again.lease_of(&a, b"run");
    again.rests(b"run", lease, later);
    assert_eq!(again.change(&a, b"run", b"z", NOW + REST), Verdict::Promised);
    assert_eq!(again.change(&a, b"run", b"z", later + REST), Verdict::Alone);
}

#[test]
fn what_several_change_stays_everybodys_whoever_takes_it_back() {
    let (a, b) = (node("a"), node("b"));
    let mut leases = Leases::default();
    for directory in [&b"one"[..], b"two", b"three"] {
        assert!(leases.made(&a, directory));
    }
    // Another came for it before.
    give_back(&mut leases, &a, b"one");
    let lease = leases.lease_of(&a, b"one");
    leases.rests(b"one", lease, NOW);
    assert_eq!(leases.change(&a, b"one", b"x", NOW + 2 * PROMISE), Verdict::Promised);
    // Another is at work there when it would be at rest.
    let lease = leases.lease_of(&a, b"two");
    leases.rests(b"two", lease, NOW);
    assert_eq!(leases.change(&b, b"two", b"x", NOW), Verdict::Promised);
    assert_eq!(leases.change(&a, b"two", b"x", NOW + REST), Verdict::Busy(b.clone()));
    assert_eq!(leases.change(&a, b"two", b"y", NOW + 2 * PROMISE), Verdict::Promised);
    // A directory that another has by now is not taken from it.
    leases.gone(&a);
    assert_eq!(leases.change(&b, b"three", b"x", NOW), Verdict::Alone);
    let lease = leases.lease_of(&a, b"three");
    leases.rests(b"three", lease, NOW);
    assert_eq!(leases.change(&b, b"three", b"x", NOW), Verdict::Alone);
}

#[test]
fn of_two_that_want_one_name_the_second_waits_for_the_first() {
    let (a, b) = (node("a"), node("b"));
    let mut leases = Leases::default();
    assert_eq!(leases.change(&a, b"d", b"first", NOW), Verdict::Alone);
    give_back(&mut leases, &a, b"d");
    assert_eq!(leases.change(&a, b"d", b"x", NOW), Verdict::Promised);
    assert_eq!(leases.change(&b, b"d", b"x", NOW), Verdict::Busy(a.clone()));
    assert_eq!(leases.read(&b, b"d", Some(b"x"), NOW), Verdict::PublishFirst(a.clone()));
    let asked = leases.promise_of(&a, b"d", b"x").unwrap();
    // It answers, and before its answer arrives it asks for the name again.
    assert_eq!(leases.change(&a, b"d", b"x", NOW), Verdict::Promised);
    leases.published(b"d", b"x", asked);
    assert_eq!(leases.change(&b, b"d", b"x", NOW), Verdict::Busy(a.clone()), "the later promise stands");
    leases.published_at(&b, b"d/x");
    let asked = leases.promise_of(&a, b"d", b"x").unwrap();
    leases.published(b"d", b"x", asked);
    assert_eq!(leases.change(&b, b"d", b"x", NOW), Verdict::Promised);
    // A promise ends even if its node publishes nothing.
    assert_eq!(leases.change(&a, b"d", b"x", NOW + PROMISE), Verdict::Promised);
}

#[test]
fn what_a_node_held_is_free_when_it_is_gone() {
    let (a, b) = (node("a"), node("b"));
    let mut leases = Leases::default();
    assert_eq!(leases.change(&a, b"run", b"x", NOW), Verdict::Alone);
    leases.made(&a, b"run/step");
    assert_eq!(leases.change(&b, b"run/step", b"f", NOW), Verdict::RecallFirst(a.clone()));
    leases.gone(&a);
    assert_eq!(leases.change(&b, b"run/step", b"f", NOW), Verdict::Alone);
}

#[test]
fn who_renames_a_directory_goes_on_having_it_alone() {
    let (a, b) = (node("a"), node("b"));
    let mut leases = Leases::default();
    for directory in [&b"run/.new"[..], b"run/.new/below", b"run/.newer"] {
        assert!(leases.made(&a, directory));
    }
    leases.renamed(&a, b"run/.new", b"run/last");
    assert_eq!(leases.change(&b, b"run/last", b"x", NOW), Verdict::RecallFirst(a.clone()));
    assert_eq!(leases.change(&b, b"run/last/below", b"x", NOW), Verdict::RecallFirst(a.clone()));
    assert_eq!(leases.change(&b, b"run/.newer", b"x", NOW), Verdict::RecallFirst(a.clone()));
    // The old name is a new directory.
    assert_eq!(leases.change(&b, b"run/.new", b"x", NOW), Verdict::Alone);
    // Node a did not wait for what b holds: b is asked again.
    leases.renamed(&a, b"run/.new", b"run/other");
    assert_eq!(leases.change(&a, b"run/other", b"x", NOW), Verdict::Alone);
}

/// A node that joins has its directories alone at their present paths, and tells of what brought them there after that.
#[test]
fn who_tells_late_of_what_it_moved_keeps_what_it_was_granted_at_the_present_paths() {
    let (a, b) = (node("a"), node("b"));
    let renamed = |from: &str, to: &str, exchange| NameOperation::Renamed {
        from: from.into(),
        to: to.into(),
        exchange,
        what: None,
    };
    let removed = |path: &str| NameOperation::Removed { path: path.into(), what: None };
    for operations in [
        vec![renamed("last", "old", false), renamed("new", "last", false)],
        vec![removed("last"), renamed("new", "last", false)],
        vec![renamed("new", "last", true)],
    ] {
        let mut leases = Leases::default();
        let granted = [&b"last"[..], b"last/below", b"old"];
        assert!(granted.iter().all(|path| leases.made(&a, path)));
        assert!(leases.made(&b, b"last/of b"));
        operations.iter().for_each(|operation| assert!(leases.follow_late(&a, operation)));
        for path in granted {
            assert_eq!(leases.change(&b, path, b"x", NOW), Verdict::RecallFirst(a.clone()), "{operations:?}");
        }
        assert_eq!(leases.lease_of(&b, b"last/of b"), None, "it was taken out of what was there before");
        let moved = BTreeSet::from([b"last".to_vec(), b"new".to_vec()]);
        leases.vacated(&a, &moved, |path| path == b"last");
        assert_eq!(
            ["last", "last/below", "old"].map(|path| leases.lease_of(&a, path.as_bytes()).is_some()),
            [true, false, true]
        );
    }
}

#[test]
fn who_gives_a_directory_back_keeps_the_one_that_took_its_place() {
    let (a, b) = (node("a"), node("b"));
    let mut leases = Leases::default();
    assert!(leases.made(&a, b"run") && leases.made(&a, b"new"));
    let asked = leases.lease_of(&a, b"run").unwrap();
    // It answers, and before its answer arrives another directory has the path.
    leases.renamed(&a, b"new", b"run");
    leases.released(b"run", asked);
    assert_eq!(leases.change(&b, b"run", b"x", NOW), Verdict::RecallFirst(a.clone()));
    let asked = leases.lease_of(&a, b"run").unwrap();
    leases.removed(b"run");
    assert!(leases.made(&a, b"run"));
    leases.released(b"run", asked);
    leases.rests(b"run", Some(asked), NOW);
    assert_eq!(leases.change(&b, b"run", b"x", NOW), Verdict::RecallFirst(a.clone()));
    // It asks again while its answer is on the way.
    let asked = leases.lease_of(&a, b"run").unwrap();
    assert_eq!(leases.change(&a, b"run", b"y", NOW), Verdict::Alone);
    leases.released(b"run", asked);
    assert_eq!(leases.change(&b, b"run", b"x", NOW), Verdict::RecallFirst(a.clone()));
}

#[test]
fn who_may_know_more_of_a_directory_holds_it_or_was_promised_a_name_there() {
    let (a, b, c) = (node("a"), node("b"), node("c"));
    let mut leases = Leases::default();
    assert!(leases.made(&a, b"run/step/part"));
    assert!(leases.made(&c, b"run/other"));
    leases.change(&a, b"run/step", b"x", NOW);
    give_back(&mut leases, &a, b"run/step");
    leases.change(&b, b"run/step", b"y", NOW);
    let knowing = leases.knowing_below(&c, b"run/step", NOW);
    assert_eq!(knowing, BTreeSet::from([a.clone(), b.clone()]));
    leases.published_at(&b, b"run/step/y");
    assert_eq!(leases.knowing_below(&c, b"run/step", NOW), BTreeSet::from([a.clone()]));
    assert_eq!(leases.knowing_below(&a, b"run/step", NOW), BTreeSet::new());
}

#[test]
fn a_directory_that_moves_takes_everybody_out_of_it() {
    let (a, b) = (node("a"), node("b"));
    let mut leases = Leases::default();
    leases.made(&a, b"run/step");
    leases.made(&b, b"run/step/deep");
    leases.made(&b, b"run/step2");
    assert_eq!(leases.holders_below(&a, b"run/step"), vec![(b.clone(), b"run/step/deep".to_vec())]);
    leases.removed(b"run/step");
    assert_eq!(leases.holders_below(&a, b"run"), vec![(b, b"run/step2".to_vec())]);
}
