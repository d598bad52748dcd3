//! Rank 0 writes DeepSpeed's `latest` without a barrier, so it can name a step that lacks a rank's file.
//!
//! Owns: a rank that is late with its file, the kill in that moment, the checkpoint that the resumed job finds.

use std::fs;
use std::path::Path;
use std::time::Duration;

use tidemark_tests::{machine, process};

use super::{assert_same, deepspeed, resumed, start};
use crate::environment;

/// Step with which rank 1 is late. The two steps before it are whole.
const LATE: u64 = 3;
const STEPS: u64 = 4;
const DROPPED_LIMIT: Duration = Duration::from_secs(20);

#[test]
fn deepspeed_resumes_where_latest_named_a_step_that_lacks_a_rank() {
    let Some(python) = environment() else { return };
    let daemon = crate::daemon("1GiB");
    let outside = daemon.scratch("outside");
    let well = deepspeed("deepspeed-slow-rank", &["1"]);
    let late = deepspeed("deepspeed-slow-rank", &["1", "3"]);
    let (truth, _) = start(&well, &python, &daemon.scratch("plain"), &outside, STEPS).ends();

    // For comparison, the same kill in a plain directory needs a repair by hand.
    if machine::long() {
        let place = daemon.scratch("comparison");
        let run = place.join(late.name);
        start(&late, &python, &place, &outside, STEPS).killed_when("torn", || is_torn(&run));
        let why = start(&well, &python, &place, &outside, STEPS).fails();
        assert!(why.contains("global_step3"), "it is about the step that is torn: {why}");
    }

    let run = daemon.mount().join(late.name);
    let life = start(&late, &python, daemon.mount(), &outside, STEPS);
    let (found, killed) = life.killed_when("torn", || is_torn(&run));
    assert_same(&late, 0, &found, &truth);
    assert_eq!((killed.saved, killed.begun), (Some(LATE - 1), Some(LATE)));

    let mut life = start(&well, &python, daemon.mount(), &outside, STEPS);
    assert_eq!(resumed(&mut life, &daemon, late.name), LATE - 1);
    let torn = daemon.mount().join(".tidemark/torn").join(late.name).join("global_step3");
    let (found, _) = life.ends();
    assert_same(&well, 0, &found, &truth);
    assert!(found.iter().all(|rank| rank.contains_key(&STEPS)));
    // Once the step is saved again and whole, the torn files are no longer of use.
    daemon.flush();
    process::until(DROPPED_LIMIT, || (!torn.exists()).then_some(())).expect("it is dropped");
    assert_eq!(fs::read_to_string(run.join("latest")).expect("a tracker"), format!("global_step{STEPS}"));
}

/// Whether the tracker names the step, and rank 1's file of it is missing.
fn is_torn(run: &Path) -> bool {
    let step = run.join(format!("global_step{LATE}"));
    fs::read_to_string(run.join("latest")).is_ok_and(|latest| latest.trim() == format!("global_step{LATE}"))
        && step.join("zero_pp_rank_0_mp_rank_00_optim_states.pt").exists()
        && !step.join("zero_pp_rank_1_mp_rank_00_optim_states.pt").exists()
}
