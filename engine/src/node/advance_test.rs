//! Tests of `advance`: consequences of others' content in the way of a version.

use super::*;
use crate::node::Node;
use crate::node::book::Book;
use crate::node::ledger::Contents;
use crate::node::recover::Recovered;
use crate::node::run::{Engine, NodeParts};
use crate::node::schedule::{shared_over, tier1};
use tidemark_protocol::format::FORMAT;
use tidemark_protocol::id::{AttemptId, Epoch, Incarnation, Step, Timeline, Version};
use tidemark_protocol::key::{NodeLife, VersionId};
use tidemark_protocol::path::{CheckpointName, RelPath};
use tidemark_protocol::recognise::Rules;
use tidemark_protocol::record::{Evidence, Record};
use tidemark_store::{MemoryStore, Operation, StoreError};

const ONE: Number = (Timeline(0), Version(1));
const TWO: Number = (Timeline(0), Version(2));

fn checkpoint_id() -> CheckpointId {
    let run = RunPath::new(RelPath::new("r").unwrap()).unwrap();
    CheckpointId { run, directory: CheckpointName::new("step1.pt").unwrap() }
}

fn version_id((timeline, version): Number) -> VersionId {
    let CheckpointId { run, directory } = checkpoint_id();
    VersionId { run, directory, timeline, version }
}

/// Returns a version whose first phase has just ended, with or without success.
fn begun(number: Number) -> VersionBook {
    let record = Record {
        format: FORMAT,
        version: version_id(number),
        attempt: AttemptId(number.1.0),
        step: Some(Step(1)),
        framework: "torch_save".into(),
        evidence: Evidence::Told,
        evidence_detail: "a test".into(),
        epoch: Epoch(1),
        completed_at_ns: 1,
        participants: vec![NodeLife { node: "n".parse().unwrap(), incarnation: Incarnation(1) }],
        files: Vec::new(),
        partial: false,
        doubted: false,
    };
    let mut todo = Vec::new();
    let mut checkpoint = Checkpoint::recorded(record.clone(), &mut todo);
    checkpoint.step(CheckpointEvent::TurnCame, &mut todo).unwrap();
    let mut version = VersionBook::new(checkpoint, Contents::new());
    version.attempt = Some(Box::new(Attempt::new(record, Vec::new(), None)));
    version
}

fn no_document(number: Number) -> CommitError {
    let source = StoreError::NoDocument {
        operation: Operation::Create,
        key: "r/step1.pt/attempt.json".into(),
        store: "s3://bucket".into(),
        found: "18 bytes that begin with \"<html>login\"".into(),
    };
    CommitError::Write { what: "the record", version: version_id(number), source }
}

fn goes_on(engine: &mut Engine) {
    let checkpoint = &mut engine.ledger.version_mut(&checkpoint_id(), ONE).checkpoint;
    for event in [CheckpointEvent::PauseOver, CheckpointEvent::TurnCame] {
        checkpoint.step(event, &mut Vec::new()).unwrap();
    }
}

/// Starts a node whose loop decides nothing by itself, so that the test makes each step.
#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_others_is_tried_again_and_then_each_further_version_waits() {
    let (_folder, tier1) = tier1();
    let shared = shared_over(Arc::new(MemoryStore::new()), &tier1, 1);
    let node = Node::start(NodeParts { shared, rules: Rules::builtin(), recovered: Recovered::default() });
    let looked = node.ask(|engine| {
        let (id, now) = (checkpoint_id(), Instant::now());
        let mut book = Book::new(id.clone());
        book.versions.insert(ONE, begun(ONE));
        engine.ledger.books.insert(id.clone(), book);
        for tries in 1..=NO_DOCUMENT_TRIES {
            engine.versions().failed(&id, ONE, &no_document(ONE));
            let is_over = engine.books().version(&id, ONE).checkpoint.is_aborted();
            assert_eq!(is_over, tries == NO_DOCUMENT_TRIES, "a page decides nothing ({tries})");
            let why = engine.tier3_away.longest().map(|(_, why)| why.to_owned());
            assert!(why.is_some_and(|why| why.contains("<html>login")), "status says what came");
            if !is_over {
                goes_on(engine);
            }
        }
        assert!(engine.ledger.books[&id].is_tried(), "it is said for as long as the contents wait");
        assert!(!engine.versions().is_held_up(&id, now), "the next number is taken at once");

        let book = engine.ledger.books.get_mut(&id).expect("it was put there");
        book.versions.insert(TWO, begun(TWO));
        engine.versions().failed(&id, TWO, &CommitError::Taken { key: "k".into() });
        assert!(
            engine.books().version(&id, TWO).checkpoint.is_aborted(),
            "another document is found at once"
        );
        assert!(engine.versions().is_held_up(&id, now), "and the version after it waits");
        engine.versions().nothing_in_the_way(&id);
        assert!(!engine.versions().is_held_up(&id, now) && !engine.tier3_away.is_away());
    });
    looked.await.expect("all of that holds");
    node.stop();
}
