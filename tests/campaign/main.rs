//! Is every promise kept when processes are killed at any moment, over and over, under load? Real daemons and trainers
//! are killed by SIGKILL. An auditor outside records each promise only after its call has returned.
//!
//! Owns: the question over time. Does not own: the single step (the suite `crash`). `cargo xtask soak` runs the same for
//! as long as the caller likes.

#![expect(clippy::cast_precision_loss, reason = "figures for people")]

mod claims;
mod compare;
mod crew;
mod plan;
mod report;
mod rounds;
mod site;
mod watch;

use std::env;
use std::time::Duration;

use tidemark_tests::machine;

use crate::rounds::Settings;

/// Whether the serving daemon and its keeper are also killed alone, which needs a mount that survives its daemon.
const DAEMON_KILLS: bool = true;
/// Variable with the duration in seconds, set by `cargo xtask soak`.
const SECONDS_ENV: &str = "TIDEMARK_CAMPAIGN_SECONDS";
/// Variable with the seed. Without it, a seed is drawn and shown.
const SEED_ENV: &str = "TIDEMARK_CAMPAIGN_SEED";
/// Variable with the path of a JSON file for the figures.
const REPORT_ENV: &str = "TIDEMARK_CAMPAIGN_REPORT";
/// Default duration: enough rounds for every sort of kill, short enough for every run of CI.
const SHORT: Duration = Duration::from_secs(45);
const LONG: Duration = Duration::from_secs(240);

#[test]
fn every_promise_is_kept_whatever_is_killed() {
    if !machine::can_mount() {
        return;
    }
    let time = match env::var(SECONDS_ENV) {
        Ok(seconds) => Duration::from_secs(seconds.parse().expect("a number of seconds")),
        Err(_) if machine::long() => LONG,
        Err(_) => SHORT,
    };
    let seed = match env::var(SEED_ENV) {
        Ok(seed) => seed.parse().expect("a number"),
        Err(_) => drawn(),
    };
    println!(
        "campaign: seed {seed}; to run it again: cargo xtask soak --seed {seed} --minutes {}",
        minutes(time)
    );
    let report = rounds::run(&Settings { time, seed, daemon_kills: DAEMON_KILLS });
    print!("{}", report.table());
    let json = serde_json::to_string_pretty(&report).expect("figures are JSON");
    if let Some(path) = env::var_os(REPORT_ENV) {
        std::fs::write(&path, &json).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
    let problems = report.problems();
    assert!(problems.is_empty(), "seed {seed}:\n  {}\n{json}", problems.join("\n  "));
}

fn drawn() -> u64 {
    let mut bytes = [0; 4];
    getrandom::fill(&mut bytes).expect("the kernel gives random bytes");
    u32::from_le_bytes(bytes).into()
}

fn minutes(time: Duration) -> u64 {
    time.as_secs().div_ceil(60)
}
