//! Tests of `flush`: which words hold, and how many are kept.

use super::{FlushOutcome, Flushes, Waiter, Waits, covers};
use crate::node::book::Book;
use crate::node::recover::Recovered;
use crate::node::run::{Engine, Node, NodeParts};
use crate::node::schedule::{shared_over, tier1};
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::evidence::Told;
use tidemark_protocol::id::{FileCounter, FileId, Incarnation, SealNumber};
use tidemark_protocol::path::{CheckpointName, RelPath, RunPath};
use tidemark_protocol::recognise::{CheckpointId, Rules};
use tidemark_protocol::report::PendingReason;
use tidemark_store::MemoryStore;
use tokio::sync::oneshot;
use tokio::time::Instant;

fn waiter(place: &str, waits: Waits, began_ns: i64) -> Waiter {
    Waiter {
        place: place.as_bytes().to_vec(),
        until: Instant::now().checked_add(Duration::from_secs(1)),
        told: Told::Flush,
        waits,
        writers_refused: false,
        answer: None,
        began: Instant::now(),
        began_ns,
    }
}

#[test]
fn a_command_that_has_gone_says_nothing_of_what_was_closed_after_it() {
    let of = |waits| Flushes { waiting: vec![waiter("r", waits, 10)], ..Flushes::default() };
    let told = |waits, place: &[u8], closed_ns| of(waits).told(|asked| asked == place, || closed_ns);
    assert_eq!(told(Waits::Nobody, b"r", 10), Told::Flush);
    assert_eq!(told(Waits::Nobody, b"r", 11), Told::No);
    assert_eq!(told(Waits::Caller, b"r", 11), Told::Flush, "it is there still");
    assert_eq!(told(Waits::Nobody, b"q", 10), Told::No);
}

#[test]
fn words_are_kept_one_for_a_place_and_so_many() {
    let mut flushes = Flushes::default();
    flushes.waiting.push(waiter("stays", Waits::Caller, 0));
    for number in 0..2 * super::WORDS_MAX {
        for _ in 0..2 {
            let place = number.to_string();
            flushes.make_room(place.as_bytes());
            flushes.waiting.push(waiter(&place, Waits::Nobody, 0));
        }
    }
    assert_eq!(flushes.waiting.len(), 1 + super::WORDS_MAX);
    assert!(flushes.waiting[1..].iter().all(Waiter::is_word));
    assert_eq!(flushes.waiting[0].place, b"stays");
    assert_eq!(flushes.waiting[1].place, super::WORDS_MAX.to_string().as_bytes(), "the oldest went");
}

#[test]
fn commands_that_nobody_answers_are_kept_so_many_and_the_oldest_is_told_that_nobody_knows() {
    let mut flushes = Flushes::default();
    let mut asked: Vec<_> = (0..=super::WORDS_MAX)
        .map(|_| {
            let (answer, answered) = oneshot::channel();
            flushes.make_room(b"r");
            flushes.waiting.push(Waiter { answer: Some(answer), ..waiter("r", Waits::Nobody, 0) });
            answered
        })
        .collect();
    assert_eq!(flushes.waiting.len(), super::WORDS_MAX);
    assert_eq!(asked[0].try_recv().err(), Some(oneshot::error::TryRecvError::Closed));
    assert_eq!(asked[1].try_recv().err(), Some(oneshot::error::TryRecvError::Empty));
    let told = FlushOutcome::unknown(false);
    assert_eq!((told.pending.len(), told.pending[0].reason), (1, PendingReason::Unknown));
}

#[test]
fn a_place_covers_itself_and_what_is_below_it_only() {
    assert!(covers(b"", b"anything"));
    assert!(covers(b"r/a", b"r/a"));
    assert!(covers(b"r/a", b"r/a/b"));
    assert!(!covers(b"r/a", b"r/ab"));
    assert!(!covers(b"r/a", b"r"));
}

/// Tier-3 is recovered some time after the mount serves. Until then, words and faults are kept, and nothing is decided with them.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_said_and_found_before_tier_3_is_taken_up_is_known_after_it() {
    let (_folder, tier1) = tier1();
    let shared = shared_over(Arc::new(MemoryStore::new()), &tier1, 1);
    let recovered = Recovered::default();
    let node = Node::start(NodeParts { shared, rules: Rules::builtin(), recovered });
    let run = RunPath::new(RelPath::new("r").unwrap()).unwrap();
    let id = CheckpointId { run, directory: CheckpointName::new("step1.pt").unwrap() };
    let of = (FileId { incarnation: Incarnation(1), counter: FileCounter(9) }, SealNumber(1));
    let words = |engine: &mut Engine, id: &CheckpointId| {
        let told_of = engine.ledger.books.get(id).and_then(|book| book.told_of.clone());
        (told_of, engine.flushes.waiting.len(), engine.scrub.bad.clone(), engine.scrub.unmended.clone())
    };
    let (said_of, asked_of) = (id.clone(), id);
    let said = move |engine: &mut Engine| {
        let mut book = Book::new(said_of.clone());
        book.told_of = Some([(RelPath::new("r/step1.pt").unwrap(), of)].into());
        engine.ledger.books.insert(said_of.clone(), book);
        engine.flushes.waiting.push(waiter("r", Waits::Nobody, 10));
        engine.scrub.bad.insert(of, "its host copy is bad".into());
        engine.scrub.unmended.push(("r/step1.pt".into(), "its record is not there".into()));
        let before = words(engine, &said_of);
        // The recovered state does not contain these.
        engine.decide_from_now_on(Recovered::default());
        (before, words(engine, &said_of))
    };
    let (before, after) = node.ask(said).await.unwrap();
    assert!(before.0.is_some(), "{before:?}");
    assert_eq!(before, after);
    let later = node.ask(move |engine| words(engine, &asked_of).0).await.unwrap();
    assert_eq!(later, before.0, "the loop has turned");
    node.stop();
}
