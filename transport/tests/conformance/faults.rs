//! A faulty link has the effects of its faults, and no others.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tidemark_transport::faulty::{Fault, Faulty, Operation, What, When};
use tidemark_transport::{BytesSink, BytesSource, Grant, Link, LinkError, Unpaced};

use crate::world::{AMPLE, Bucket, Kind, Node, World, eventually, in_time, pattern};

const SIZE: u64 = (3 << 20) + 99;

fn fault(on: Operation, when: When, what: What) -> Fault {
    Fault { with: None, on, when, what }
}

/// Makes node a with a link that can be made faulty, and node b.
async fn pair() -> (Faulty, Node, Node) {
    let world = World::new(Kind::Loopback);
    let (a, b) = (world.join("a").await, world.join("b").await);
    (Faulty::new(Arc::clone(&a.link), vec![]), a, b)
}

#[tokio::test]
async fn a_call_fails_when_its_turn_comes_and_with_that_node_only() {
    in_time(async {
        let (link, a, b) = pair().await;
        let with_b = Fault { with: Some("b".into()), ..fault(Operation::Call, When::Nth(2), What::Fail) };
        link.set(vec![with_b]);
        for expected in [true, false, true] {
            assert!(link.call(&a.address, "self".into(), AMPLE).await.is_ok());
            let answer = link.call(&b.address, "hello".into(), AMPLE).await;
            assert_eq!(answer.is_ok(), expected, "{answer:?}");
        }
        assert_eq!(b.service.heard().len(), 2);
    })
    .await;
}

#[tokio::test]
async fn a_lost_call_is_not_heard_and_a_lost_answer_is() {
    in_time(async {
        let (link, _a, b) = pair().await;
        let short = Duration::from_millis(50);
        link.set(vec![
            fault(Operation::Call, When::Nth(1), What::Lose),
            fault(Operation::Call, When::Nth(2), What::LoseAnswer),
        ]);
        for heard in [0, 1] {
            let begun = Instant::now();
            let error = link.call(&b.address, "hello".into(), short).await.expect_err("lost");
            assert!(matches!(error, LinkError::Deadline { .. }), "{error}");
            assert!(begun.elapsed() >= short);
            assert_eq!(b.service.heard().len(), heard);
        }
        link.call(&b.address, "hello".into(), AMPLE).await.expect("no more faults");
    })
    .await;
}

#[tokio::test]
async fn words_are_delayed_doubled_and_lost() {
    in_time(async {
        let (link, _a, b) = pair().await;
        link.set(vec![
            fault(Operation::Call, When::Nth(1), What::Delay { delay_ms: 60 }),
            fault(Operation::Call, When::Nth(2), What::Duplicate),
            fault(Operation::Tell, When::Nth(1), What::Lose),
            fault(Operation::Tell, When::From(3), What::Duplicate),
        ]);
        let begun = Instant::now();
        link.call(&b.address, "late".into(), AMPLE).await.expect("an answer");
        assert!(begun.elapsed() >= Duration::from_millis(60));
        link.call(&b.address, "twice".into(), AMPLE).await.expect("an answer");
        for word in ["lost", "once", "double"] {
            link.tell(&b.address, word.into()).await.expect("said");
        }
        let expected = ["late", "twice", "twice", "once", "double", "double"];
        eventually("all words", || b.service.heard().len() >= expected.len()).await;
        assert_eq!(b.service.heard(), expected);
        link.set(vec![fault(Operation::Call, When::Always, What::Delay { delay_ms: 5000 })]);
        let error = link.call(&b.address, "never".into(), Duration::from_millis(50)).await.expect_err("late");
        assert!(matches!(error, LinkError::Deadline { .. }), "{error}");
    })
    .await;
}

#[tokio::test]
async fn bytes_are_cut_where_the_fault_says_and_can_go_on() {
    in_time(async {
        let (link, a, b) = pair().await;
        link.set(vec![
            fault(Operation::Push, When::Nth(1), What::CutAfter { bytes: 1_500_000 }),
            fault(Operation::Pull, When::Nth(1), What::CutAfter { bytes: 10 }),
        ]);
        let (from, into) = (Bucket::filled(SIZE, 1), Bucket::new(SIZE));
        let source = || Arc::clone(&from) as Arc<dyn BytesSource>;
        let sink = || Arc::clone(&into) as Arc<dyn BytesSink>;
        let token = b.link.grant("a", Grant::Receive { into: sink(), limit_bytes: SIZE });
        let error =
            link.push(&b.address, token, source(), &[0..9, 9..SIZE], &Unpaced).await.expect_err("cut");
        let LinkError::Cut { landed, .. } = error else { panic!("{error}") };
        assert!(landed.iter().eq(&[0..1_500_000_u64; 1]), "{landed:?}");
        assert_eq!(into.landed_bytes(), 1_500_000);
        link.push(&b.address, token, source(), &[1_500_000..SIZE; 1], &Unpaced).await.expect("the rest");
        assert!(into.read(0..SIZE) == pattern(0..SIZE, 1));
        let token = a.link.grant("a", Grant::Send { from: source(), size_bytes: SIZE });
        let error = link.pull(&a.address, token, &[5..SIZE; 1], sink()).await.expect_err("cut");
        assert!(
            matches!(&error, LinkError::Cut { landed, .. } if landed.iter().eq(&[5..15_u64; 1])),
            "{error}"
        );
    })
    .await;
}

#[tokio::test]
async fn one_byte_arrives_changed() {
    in_time(async {
        let (link, a, b) = pair().await;
        let flip = What::Flip { offset: 2_000_000, mask: 0x10 };
        link.set(vec![
            fault(Operation::Push, When::Always, flip),
            fault(Operation::Pull, When::Always, flip),
        ]);
        let from = Bucket::filled(SIZE, 1);
        let mut expected = pattern(0..SIZE, 1);
        expected[2_000_000] ^= 0x10;

        let pushed = Bucket::new(0);
        let sink = Arc::clone(&pushed) as Arc<dyn BytesSink>;
        let token = b.link.grant("a", Grant::Receive { into: sink, limit_bytes: SIZE });
        let source = Arc::clone(&from) as Arc<dyn BytesSource>;
        link.push(&b.address, token, source, &[0..SIZE; 1], &Unpaced).await.expect("pushed");
        assert!(pushed.read(0..SIZE) == expected);

        let pulled = Bucket::new(0);
        let source = Arc::clone(&from) as Arc<dyn BytesSource>;
        let token = a.link.grant("a", Grant::Send { from: source, size_bytes: SIZE });
        let sink = Arc::clone(&pulled) as Arc<dyn BytesSink>;
        link.pull(&a.address, token, &[0..SIZE; 1], sink).await.expect("pulled");
        assert!(pulled.read(0..SIZE) == expected);
        assert_eq!(pulled.landed_bytes(), SIZE);
        assert!(from.read(0..SIZE) == pattern(0..SIZE, 1), "the source stays as it is");
    })
    .await;
}
