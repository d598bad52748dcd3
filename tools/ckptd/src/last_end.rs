//! What the end of the daemon before this one may have cost: its memory is gone, and its last known status says what was only there.
//!
//! Owns: reading that status, and for how long it is said. Does not own: the file (`state_dir`), what is lost with memory
//! (`protocol::report`).

use tidemark_engine::node::Shared;
use tidemark_protocol::report::{
    CheckpointRef, EventLevel, NodeState, Problem, ProblemCode, RunStatus, Status,
};

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct LastEnd {
    what: Option<String>,
    /// The runs that lost a checkpoint, and their watermarks then.
    runs: Vec<(String, Option<CheckpointRef>)>,
    /// Files were lost that belong to no run.
    files: bool,
    /// The end was not in order, whatever it cost.
    unclean: Option<String>,
}

impl LastEnd {
    /// Of a start with empty memory. `last`: what the daemon before it wrote last.
    pub(crate) fn of(last: Option<Status>) -> Self {
        let Some(mut last) = last else { return Self::default() };
        if last.state == NodeState::Stopped {
            return Self::default();
        }
        let before = last.runs.clone();
        let gone = last.lose_memory();
        let pid = last.pid;
        if gone.is_empty() {
            let unclean = format!(
                "the daemon before this one (pid {pid}) ended without its drain; all that it had said was in Tier-3, and what was \
                 saved in the moment before may be lost"
            );
            return Self { unclean: Some(unclean), ..Self::default() };
        }
        let lost = before.iter().filter(|run| run.recoverable.is_some() && run.recoverable != run.durable);
        let runs = lost.map(|run| (run.run.clone(), run.watermark.clone())).collect();
        let what = format!(
            "the daemon before this one (pid {pid}) ended before all was in Tier-3: {}",
            gone.join("; ")
        );
        Self { what: Some(what.clone()), runs, files: last.unsaved.files > 0, unclean: Some(what) }
    }

    /// Says in the log and among the events that the end was not in order.
    pub(crate) fn tell(&self, shared: &Shared) {
        let Some(what) = &self.unclean else { return };
        tracing::warn!(%what, "the last end was not clean");
        shared.events.add((shared.clock.0)(), EventLevel::Warn, "unclean_end", None, what.clone());
    }

    /// The problem, until every run that lost a checkpoint has committed another. Lost files are said until the next start.
    pub(crate) fn problem(&self, now: &[RunStatus]) -> Option<Problem> {
        let what = self.what.as_ref()?;
        let went_on = |(run, watermark): &(String, Option<CheckpointRef>)| {
            now.iter().any(|now| now.run == *run && now.watermark.is_some() && now.watermark != *watermark)
        };
        let over =
            !self.runs.is_empty() && self.runs.iter().all(went_on) || self.runs.is_empty() && !self.files;
        let action = "`ckptctl recover --plan` says what each job loads; SIGTERM ends a daemon without loss";
        (!over).then(|| Problem::new(ProblemCode::UncleanEnd, what, action))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::id::{Step, Timeline, Version};

    fn step(step: u64) -> Option<CheckpointRef> {
        let (timeline, version) = (Timeline(0), Version(1));
        Some(CheckpointRef { timeline, step: Some(Step(step)), version, path: format!("run/step{step}.pt") })
    }

    fn run(recoverable: u64, watermark: u64) -> RunStatus {
        RunStatus {
            run: "run".into(),
            latest: step(recoverable),
            watermark: step(watermark),
            recoverable: step(recoverable),
            durable: step(watermark),
            lag_versions: 0,
            lag_bytes: 0,
            lag_seconds: 0.0,
        }
    }

    #[test]
    fn what_was_in_memory_only_is_said_until_the_run_commits_again() {
        let status = |runs: Vec<RunStatus>, files: u64| -> Option<Status> {
            let text = serde_json::json!({
                "version": "1", "pid": 7, "keeper_pid": null, "start": "0000000000000001", "node": "n",
                "incarnation": "0000000000000002", "state": "serving", "listen": "", "http": "", "problems": [],
                "mount": {"path": "/m", "mode": "passthrough", "reason": "", "requests": {}}, "tiers": [],
                "runs": runs, "unsaved": {"files": files, "bytes": 0}, "written_ms": 0
            });
            Some(serde_json::from_value(text).unwrap())
        };
        assert_eq!(LastEnd::of(None).problem(&[]), None);
        assert_eq!(LastEnd::of(status(vec![run(1, 1)], 0)).problem(&[]), None, "all was durable");
        let lost = LastEnd::of(status(vec![run(2, 1)], 1));
        let problem = lost.problem(&[run(1, 1)]).expect("step 2 is gone");
        assert_eq!(problem.code, "unclean_end");
        assert!(problem.what.contains("step 2 was in its memory only"), "{problem:?}");
        assert_eq!(lost.problem(&[run(3, 3)]), None, "the job went on");
        let files = LastEnd::of(status(vec![run(1, 1)], 2));
        assert!(files.problem(&[run(3, 3)]).expect("a log is gone").what.contains("2 files"));
    }
}
