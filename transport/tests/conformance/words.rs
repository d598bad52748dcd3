//! Calls, tells, and who may speak.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tidemark_transport::{Address, BODY_BYTES_MAX, LinkError, LinkErrorKind, Mismatch};

use crate::world::{AMPLE, Kind, World, eventually};

pub(crate) async fn a_call_is_answered_by_whom_it_was_for(kind: Kind) {
    let world = World::new(kind);
    let (a, b, c) = (world.join_as("blue", "a", 7, 9).await, world.join("b").await, world.join("c").await);
    let said = a.link.call(&b.address, "who are we".into(), AMPLE).await.expect("an answer");
    assert_eq!(said, "a (0000000000000007, start 0000000000000009)");
    let back = b.link.call(&a.address, "hello a".into(), AMPLE).await.expect("an answer");
    assert_eq!(back, "hello a");
    assert_eq!(b.service.heard(), ["who are we"]);
    assert!(c.service.heard().is_empty());
}

pub(crate) async fn many_calls_at_once_get_their_own_answers(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    // More than there are credits, and answered in another order than asked.
    let calls = (0..300_u64).map(|number| {
        let (link, to) = (a.link.clone(), b.address.clone());
        tokio::spawn(async move {
            let body = Bytes::from(format!("sleep {}", (number * 7) % 11));
            (link.call(&to, body.clone(), AMPLE).await.expect("an answer"), body)
        })
    });
    for call in calls.collect::<Vec<_>>() {
        let (answer, asked) = call.await.expect("no panic");
        assert_eq!(answer, asked);
    }
}

pub(crate) async fn tells_come_in_the_order_they_were_said(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let said: Vec<String> = (0..500).map(|number| format!("word {number}")).collect();
    for word in &said {
        a.link.tell(&b.address, word.clone().into()).await.expect("said");
    }
    eventually("all words", || b.service.heard().len() >= said.len()).await;
    assert_eq!(b.service.heard(), said);
}

pub(crate) async fn a_call_comes_after_the_tells_before_it(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    for round in 0..50 {
        a.link.tell(&b.address, format!("tell {round}").into()).await.expect("said");
        a.link.call(&b.address, format!("call {round}").into(), AMPLE).await.expect("an answer");
        let heard = b.service.heard();
        assert_eq!(heard[heard.len() - 2..], [format!("tell {round}"), format!("call {round}")]);
    }
}

pub(crate) async fn a_deadline_ends_a_call_and_not_the_connection(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    a.link.call(&b.address, "first".into(), AMPLE).await.expect("connected");
    let begun = Instant::now();
    let deadline = Duration::from_millis(50);
    let late = a.link.call(&b.address, "sleep 400".into(), deadline).await.expect_err("too late");
    assert!(matches!(&late, LinkError::Deadline { node, .. } if node == "b"), "{late}");
    assert_eq!(late.kind(), LinkErrorKind::Unavailable);
    assert!((deadline..Duration::from_millis(390)).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    assert_eq!(a.link.call(&b.address, "next".into(), AMPLE).await.expect("still there"), "next");
    let events = b.service.events();
    assert_eq!(events.iter().filter(|event| event.starts_with('+')).count(), 1, "{events:?}");
}

pub(crate) async fn a_refusal_carries_its_kind_and_reason(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let error = a.link.call(&b.address, "refuse epoch 3 is over".into(), AMPLE).await.expect_err("refused");
    assert_eq!(error.kind(), LinkErrorKind::Fenced);
    assert_eq!(error.to_string(), "b refused: epoch 3 is over");
}

pub(crate) async fn the_longest_bodies_pass_and_longer_ones_are_refused_here(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let longest = Bytes::from(vec![5; BODY_BYTES_MAX]);
    assert_eq!(a.link.call(&b.address, longest.clone(), AMPLE).await.expect("it fits"), longest);
    let longer = Bytes::from(vec![5; BODY_BYTES_MAX + 1]);
    for refused in [
        a.link.call(&b.address, longer.clone(), AMPLE).await.map(drop),
        a.link.tell(&b.address, longer).await,
    ] {
        let error = refused.expect_err("too long");
        assert!(matches!(error, LinkError::TooBig { bytes, .. } if bytes == BODY_BYTES_MAX + 1), "{error}");
    }
    assert_eq!(b.service.heard().len(), 1);
}

pub(crate) async fn an_answer_that_is_too_long_is_refused(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let fits = a.link.call(&b.address, "grow 0".into(), AMPLE).await.expect("it fits");
    assert_eq!(fits.len(), BODY_BYTES_MAX);
    let error = a.link.call(&b.address, "grow 1".into(), AMPLE).await.expect_err("too long");
    assert_eq!(error.kind(), LinkErrorKind::Invalid);
    assert!(matches!(error, LinkError::Refused { .. }), "{error}");
}

pub(crate) async fn nobody_at_the_address_is_unreachable(kind: Kind) {
    let world = World::new(kind);
    let a = world.join("a").await;
    let nobody = Address { node: "b".into(), address: world.nowhere() };
    let error = a.link.call(&nobody, "hello".into(), Duration::from_millis(300)).await.expect_err("nobody");
    assert!(matches!(&error, LinkError::Unreachable { node, .. } if node == "b"), "{error}");
    let error = a.link.tell(&nobody, "hello".into()).await.expect_err("nobody");
    assert!(matches!(error, LinkError::Unreachable { .. }), "{error}");
    assert!(a.service.events().is_empty());
}

pub(crate) async fn a_call_waits_for_a_node_that_starts_late(kind: Kind) {
    let world = World::new(kind);
    let a = world.join("a").await;
    let late = Address { node: "b".into(), address: world.nowhere() };
    let call = a.link.call(&late, "hello".into(), AMPLE);
    let start = async {
        tokio::time::sleep(Duration::from_millis(150)).await;
        world.join_at("blue", "b", (1, 1), &late.address).await
    };
    let (answer, _b) = tokio::join!(call, start);
    assert_eq!(answer.expect("it came"), "hello");
}

pub(crate) async fn another_node_at_the_address_is_refused(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    let mistaken = Address { node: "c".into(), address: b.address.address.clone() };
    let error = a.link.call(&mistaken, "hello".into(), AMPLE).await.expect_err("b is not c");
    let LinkError::Handshake { why: Mismatch::OtherNode { wanted, found }, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!((wanted.as_str(), found.as_str()), ("c", "b"));
    assert!(b.service.heard().is_empty());
    assert_eq!(error.kind(), LinkErrorKind::Invalid);
}

pub(crate) async fn another_cluster_is_refused(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join_as("red", "b", 1, 1).await);
    for (from, to) in [(&a, &b), (&b, &a)] {
        let begun = Instant::now();
        let error = from.link.call(&to.address, "hello".into(), AMPLE).await.expect_err("another cluster");
        let LinkError::Handshake { why, .. } = &error else { panic!("{error}") };
        if world.proves_names() {
            // The node's certificate is of an unknown authority: none of its claims count.
            assert!(matches!(why, Mismatch::Certificate(_)), "{why}");
        } else {
            assert!(matches!(why, Mismatch::OtherCluster { .. }), "{why}");
        }
        assert!(begun.elapsed() < AMPLE / 2, "it was tried again and again");
        assert!(to.service.heard().is_empty() && to.service.events().is_empty());
    }
}

pub(crate) async fn of_two_nodes_with_one_name_the_first_stays(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join_as("blue", "b", 1, 1).await);
    let twin = world.join_as("blue", "b", 2, 2).await;
    b.link.call(&a.address, "I am b".into(), AMPLE).await.expect("the first");
    let from = twin.link.call(&a.address, "so am I".into(), AMPLE).await.expect_err("the second");
    let to = a.link.call(&twin.address, "are you b".into(), AMPLE).await.expect_err("the second");
    for error in [from, to] {
        let LinkError::Handshake { why: Mismatch::TwoNodes { node, live, refused }, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((node.as_str(), *live, *refused), ("b", 1, 2));
        assert_eq!(error.kind(), LinkErrorKind::Fenced);
    }
    b.link.call(&a.address, "still here".into(), AMPLE).await.expect("the first stays");
    // When the first is gone, the name is free.
    b.link.close().await;
    let gone = || a.service.events().iter().any(|event| event == "-b/1");
    eventually("the first is gone", gone).await;
    twin.link.call(&a.address, "I am b now".into(), AMPLE).await.expect("the name is free");
}

pub(crate) async fn a_restarted_daemon_takes_the_place_of_its_earlier_run(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join_as("blue", "b", 5, 1).await);
    b.link.call(&a.address, "first run".into(), AMPLE).await.expect("an answer");
    let again = world.join_as("blue", "b", 5, 2).await;
    again.link.call(&a.address, "second run".into(), AMPLE).await.expect("an answer");
    let events: Vec<_> = a.service.events().into_iter().filter(|event| !event.contains("in")).collect();
    assert_eq!(events, ["+b/1", "-b/1", "+b/2"]);
    assert_eq!(a.link.call(&again.address, "still you".into(), AMPLE).await.expect("an answer"), "still you");
}

pub(crate) async fn coming_and_leaving_are_told_once_each(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join_as("blue", "a", 1, 1).await, world.join_as("blue", "b", 2, 2).await);
    for _ in 0..3 {
        a.link.call(&b.address, "one way".into(), AMPLE).await.expect("an answer");
        b.link.call(&a.address, "and back".into(), AMPLE).await.expect("an answer");
    }
    a.link.close().await;
    let gone = || b.service.events().iter().any(|event| event == "-a/1");
    eventually("a is gone", gone).await;
    for (service, other) in [(&b.service, "a/1"), (&a.service, "b/2")] {
        let events: Vec<_> = service.events().into_iter().filter(|event| !event.contains("in")).collect();
        assert_eq!(events, [format!("+{other}"), format!("-{other}")]);
    }
}

pub(crate) async fn epochs_are_told_both_ways(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    a.service.epoch.store(3, Ordering::Relaxed);
    b.service.epoch.store(4, Ordering::Relaxed);
    a.link.call(&b.address, "hello".into(), AMPLE).await.expect("an answer");
    assert!(a.service.events().contains(&"b in 4".to_owned()), "{:?}", a.service.events());
    assert!(b.service.events().contains(&"a in 3".to_owned()), "{:?}", b.service.events());
}

pub(crate) async fn a_node_may_call_itself(kind: Kind) {
    let world = World::new(kind);
    let a = world.join("a").await;
    assert_eq!(a.link.call(&a.address, "hello me".into(), AMPLE).await.expect("an answer"), "hello me");
}

pub(crate) async fn a_closed_link_says_so(kind: Kind) {
    let world = World::new(kind);
    let (a, b) = (world.join("a").await, world.join("b").await);
    a.link.call(&b.address, "hello".into(), AMPLE).await.expect("an answer");
    a.link.close().await;
    let error = a.link.call(&b.address, "hello".into(), AMPLE).await.expect_err("closed");
    assert!(matches!(error, LinkError::Closed), "{error}");
    assert_eq!(b.service.heard().len(), 1);
}
