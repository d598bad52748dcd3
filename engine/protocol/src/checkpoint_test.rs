//! The states of one version, step by step, and under any order of events.

use super::*;
use crate::invariants::nothing_is_committed_without_evidence;
use crate::record::tests::record;
use CheckpointCommand as Do;
use CheckpointEvent as Event;
use proptest::prelude::*;

fn recorded(evidence: Evidence) -> (Checkpoint, Vec<Do>) {
    let mut todo = Vec::new();
    (Checkpoint::recorded(Record { evidence, ..record() }, &mut todo), todo)
}

fn run(evidence: Evidence, events: &[Event]) -> (Checkpoint, Vec<Do>) {
    let (mut version, mut todo) = recorded(evidence);
    for event in events {
        version.step(event.clone(), &mut todo).unwrap();
    }
    (version, todo)
}

fn proven() -> Event {
    Event::Proven { evidence: Evidence::Succeeded, detail: "later".to_owned() }
}

fn otherwise() -> Event {
    Event::DecidedOtherwise { why: "epoch 2 decided to abort".to_owned() }
}

#[test]
fn a_version_is_committed_step_by_step() {
    let events = [Event::TurnCame, Event::Prepared, Event::TurnCame, Event::Committed];
    let (version, todo) = run(Evidence::Index, &events);
    assert_eq!(version.state(), CheckpointState::Committed);
    let ways = [Do::Enqueue, Do::Prepare, Do::Enqueue, Do::Decide, Do::Publish, Do::Release, Do::LookAgain];
    assert_eq!(todo, ways);
}

#[test]
fn quiescence_prepares_and_evidence_commits() {
    let (mut version, mut todo) = run(Evidence::Quiescence, &[Event::TurnCame, Event::Prepared]);
    assert_eq!((version.state(), todo.len()), (CheckpointState::Settled, 2));
    version.step(proven(), &mut todo).unwrap();
    assert_eq!((version.state(), todo.last()), (CheckpointState::Prepared, Some(&Do::Enqueue)));
    assert_eq!(version.evidence(), (Evidence::Succeeded, "later"));
    assert_eq!(version.record().evidence, Evidence::Quiescence, "the record stays as it was written");
}

#[test]
fn evidence_that_comes_while_a_job_runs_counts_at_its_end() {
    let (version, todo) = run(Evidence::Quiescence, &[Event::TurnCame, proven(), Event::Prepared]);
    assert_eq!((version.state(), todo.last()), (CheckpointState::Prepared, Some(&Do::Enqueue)));
}

#[test]
fn a_failure_that_may_pass_is_tried_again_in_the_same_phase() {
    let passes = [Event::Interrupted, Event::PauseOver, Event::TurnCame];
    let (_, todo) = run(Evidence::Index, &[&[Event::TurnCame][..], &passes].concat());
    assert_eq!(todo[2..], [Do::Pause, Do::Enqueue, Do::Prepare]);
    let (_, todo) =
        run(Evidence::Index, &[&[Event::TurnCame, Event::Prepared, Event::TurnCame][..], &passes].concat());
    assert_eq!(todo[4..], [Do::Pause, Do::Enqueue, Do::Decide]);
}

#[test]
fn a_newer_version_takes_the_place_of_what_has_not_begun_and_of_nothing_else() {
    let (version, todo) = run(Evidence::Index, &[Event::Superseded]);
    assert!(version.is_aborted() && todo.contains(&Do::Release));
    let (version, _) = run(Evidence::Index, &[Event::TurnCame, Event::Superseded]);
    assert!(version.is_running(), "what is in flight is never cancelled");
    let queued = [Event::TurnCame, Event::Prepared, Event::Superseded, Event::Overtaken];
    let (version, _) = run(Evidence::Index, &queued);
    assert_eq!(version.state(), CheckpointState::Prepared, "its marker may stand already");
    let (version, _) = run(Evidence::Quiescence, &[Event::TurnCame, Event::Prepared, Event::Superseded]);
    assert_eq!(version.state(), CheckpointState::Settled);
    let (version, _) = run(Evidence::Quiescence, &[Event::TurnCame, Event::Prepared, Event::Overtaken]);
    assert!(version.is_aborted());
}

#[test]
fn a_restart_goes_on_where_tier_3_says() {
    let found = |evidence, whole| Checkpoint::found(Record { evidence, ..record() }, whole);
    assert_eq!(found(Evidence::Index, true).1, Found::Commit);
    let (settled, what) = found(Evidence::Quiescence, true);
    assert_eq!((settled.state(), what), (CheckpointState::Settled, Found::Keep));
    for evidence in [Evidence::Index, Evidence::Quiescence] {
        let (mut version, what) = found(evidence, false);
        assert_eq!(what, Found::Abort);
        version.step(otherwise(), &mut Vec::new()).unwrap();
        assert!(version.is_aborted());
    }
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        4 => Just(Event::TurnCame),
        4 => Just(Event::Prepared),
        2 => Just(Event::Committed),
        1 => Just(otherwise()),
        2 => Just(Event::Interrupted),
        3 => Just(Event::PauseOver),
        1 => Just(Event::Spoiled { why: String::new() }),
        2 => Just(proven()),
        1 => Just(Event::Superseded),
        1 => Just(Event::Overtaken),
    ];
    prop::collection::vec(event, 0..40)
}

proptest! {
    #[test]
    fn any_order_of_events_keeps_the_promises(
        events in events(), quiet: bool, restarts in prop::collection::vec(0_usize..40, 0..3),
    ) {
        let evidence = if quiet { Evidence::Quiescence } else { Evidence::Index };
        let (mut version, mut todo) = recorded(evidence);
        let mut whole = false;
        for (at, event) in events.into_iter().enumerate() {
            let from = todo.len();
            if restarts.contains(&at) && version.is_alive() {
                // A restart knows only what Tier-3 holds: the record as written, and whether the
                // attempt is whole.
                let (again, found) = Checkpoint::found(version.record().clone(), whole);
                prop_assert_eq!(found == Found::Abort, !whole, "what is whole is not given up, and nothing else is kept");
                prop_assert_eq!(found == Found::Commit, whole && !quiet);
                version = again;
            }
            let before = version.clone();
            match version.step(event.clone(), &mut todo) {
                Err(_) => {
                    prop_assert_eq!(&version, &before);
                    continue;
                }
                Ok(()) => whole |= event == Event::Prepared,
            }
            prop_assert_eq!(nothing_is_committed_without_evidence(&version), Ok(()));
            prop_assert_eq!(version.record(), before.record(), "a record is immutable");
            prop_assert!(!before.is_proven() || version.is_proven(), "evidence is not taken back");
            if !before.is_alive() {
                prop_assert_eq!(&version, &before, "a decision stands");
            }
            for command in &todo[from..] {
                match command {
                    Do::Decide => prop_assert!(whole && version.is_proven()),
                    Do::Publish => prop_assert!(version.is_committed()),
                    Do::Release => prop_assert!(!version.is_alive()),
                    Do::Prepare => prop_assert!(version.is_running()),
                    Do::Enqueue | Do::Pause => prop_assert!(version.is_alive() && !version.is_running()),
                    Do::LookAgain => {}
                }
            }
            let moves = version.is_running() || todo.last().is_some_and(|last| matches!(last, Do::Enqueue | Do::Pause));
            let waits = version.state() == CheckpointState::Settled;
            prop_assert!(!version.is_alive() || moves || waits, "alive, and nothing moves it");
        }
    }
}
