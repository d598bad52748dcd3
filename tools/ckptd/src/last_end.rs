//! Costs of the previous daemon's end: its memory is gone, and its last known status says what was only there.
//!
//! Owns: reading that status, and how long its losses are reported. Does not own: the file (`state_dir`), what is lost with memory
//! (`protocol::report`).

use tidemark_engine::node::Shared;
use tidemark_protocol::report::{
    CheckpointRef, EventLevel, Loss, NodeState, Problem, ProblemCode, RunStatus, Status,
};

const ACTION: &str = "`ckptctl recover --plan` says what each job loads; SIGTERM ends a daemon without loss";

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct LastEnd {
    what: Option<String>,
    /// The runs that lost a checkpoint, as they were.
    runs: Vec<RunStatus>,
    /// Whether files were lost that belong to no run.
    files: bool,
    /// Files that only other nodes had, and their runs, as they were. The other nodes may have ended, too.
    copied: Option<String>,
    copied_runs: Vec<RunStatus>,
    /// Set if the end was not in order, whatever it cost.
    unclean: Option<String>,
}

impl LastEnd {
    /// Reads the costs for a start with empty memory. `last`: the last status that the previous daemon wrote.
    pub(crate) fn of(last: Option<Status>) -> Self {
        let Some(mut last) = last else { return Self::default() };
        if last.state == NodeState::Stopped {
            return Self::default();
        }
        let is_ahead = |run: &RunStatus| run.recoverable.is_some() && run.recoverable != run.durable;
        let ahead: Vec<_> = last.runs.iter().filter(|run| is_ahead(run)).cloned().collect();
        let Loss { gone, copied } = last.lose_memory();
        // A job would still load a checkpoint that was copied.
        let (copied_runs, runs): (Vec<_>, Vec<_>) = ahead
            .into_iter()
            .partition(|run| last.runs.iter().any(|now| now.run == run.run && is_ahead(now)));
        let pid = last.pid;
        let said = |what: &[String]| {
            let what = what.join("; ");
            (!what.is_empty()).then(|| {
                format!("the daemon before this one (pid {pid}) ended before all was in Tier-3: {what}")
            })
        };
        let unclean = said(&[gone.clone(), copied.clone()].concat()).unwrap_or_else(|| {
            format!(
                "the daemon before this one (pid {pid}) ended without its drain; all that it had said was in Tier-3, and what was \
                 saved in the moment before may be lost"
            )
        });
        let (what, files) = (said(&gone), runs.len() < gone.len());
        Self { what, runs, files, copied: said(&copied), copied_runs, unclean: Some(unclean) }
    }

    /// Says in the log and among the events that the end was not in order.
    pub(crate) fn tell(&self, shared: &Shared) {
        let Some(what) = &self.unclean else { return };
        tracing::warn!(%what, "the last end was not clean");
        shared.events.add((shared.clock.0)(), EventLevel::Warn, "unclean_end", None, what.clone());
    }

    /// Whether what is still to be said depends on where runs stand.
    pub(crate) fn asks_about_runs(&self) -> bool {
        !self.runs.is_empty() || !self.copied_runs.is_empty()
    }

    /// Returns the losses to report. A lost checkpoint counts until its run has committed another, and lost files count until the next
    /// start. Files of other nodes count until each of their runs has them again, or newer ones. `all_told`: those nodes had time to
    /// publish them.
    pub(crate) fn problems(&self, now: &[RunStatus], all_told: bool) -> Vec<Problem> {
        let of = |run: &RunStatus| now.iter().find(|now| now.run == run.run);
        let went_on = |run: &RunStatus| {
            of(run).is_some_and(|now| now.watermark.is_some() && now.watermark != run.watermark)
        };
        let is_back = |run: &RunStatus| {
            of(run).is_some_and(|now| place(now.recoverable.as_ref()) >= place(run.recoverable.as_ref()))
        };
        let is_gone = if self.runs.is_empty() { self.files } else { !self.runs.iter().all(went_on) };
        let is_missing = all_told && !self.copied_runs.iter().all(|run| went_on(run) || is_back(run));
        let gone = self.what.iter().filter(|_| is_gone);
        let missing = self.copied.iter().filter(|_| is_missing);
        gone.chain(missing).map(|what| Problem::new(ProblemCode::UncleanEnd, what, ACTION)).collect()
    }
}

/// Where a checkpoint stands in its run.
fn place(found: Option<&CheckpointRef>) -> impl Ord + use<> {
    found.map(|found| (found.timeline, found.step, found.version))
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

    fn status(runs: &[RunStatus], files: u64, more: serde_json::Value) -> Option<Status> {
        let mut text = serde_json::json!({
            "version": "1", "pid": 7, "keeper_pid": null, "start": "0000000000000001", "node": "n",
            "incarnation": "0000000000000002", "state": "serving", "listen": "", "http": "", "problems": [],
            "mount": {"path": "/m", "mode": "passthrough", "reason": "", "requests": {}}, "tiers": [],
            "runs": runs, "unsaved": {"files": files, "bytes": 0}, "written_ms": 0
        });
        text.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Some(serde_json::from_value(text).unwrap())
    }

    #[test]
    fn what_was_in_memory_only_is_said_until_the_run_commits_again() {
        let of = |runs: &[RunStatus], files| LastEnd::of(status(runs, files, serde_json::json!({})));
        assert_eq!(LastEnd::of(None).problems(&[], true), []);
        assert_eq!(of(&[run(1, 1)], 0).problems(&[], true), [], "all was durable");
        let lost = of(&[run(2, 1)], 1);
        let said = lost.problems(&[run(1, 1)], false);
        assert_eq!((said.len(), said[0].code.as_str()), (1, "unclean_end"), "step 2 is gone");
        assert!(said[0].what.contains("step 2 was in its memory only"), "{said:?}");
        assert_eq!(lost.problems(&[run(3, 3)], true), [], "the job went on");
        let files = of(&[run(1, 1)], 2).problems(&[run(3, 3)], true);
        assert!(files[0].what.contains("2 files"), "a log is gone: {files:?}");
    }

    #[test]
    fn names_that_tier_3_was_not_told_are_said_until_the_next_start() {
        let of = |untold: serde_json::Value| {
            LastEnd::of(status(&[run(1, 1)], 0, serde_json::json!({ "untold": untold })))
        };
        assert_eq!(of(serde_json::Value::Null).problems(&[run(1, 1)], true), []);
        let last = of(serde_json::json!({"removals": 2}));
        let said = last.problems(&[run(1, 1)], true);
        assert!(said.len() == 1 && said[0].what.contains("2 removals"), "{said:?}");
        assert_eq!(last.problems(&[run(3, 3)], true).len(), 1, "a later save tells nothing of it");
        assert!(last.unclean.expect("it is an event").contains("not told to Tier-3"));
    }

    #[test]
    fn names_that_tier_3_cannot_hold_are_said_with_what_they_are() {
        let problem =
            serde_json::json!([{"code": "unnameable", "what": "4 names are too long", "action": "a"}]);
        let last = LastEnd::of(status(&[run(1, 1)], 0, serde_json::json!({ "problems": problem })));
        let said = last.problems(&[run(3, 3)], true);
        assert!(said.len() == 1 && said[0].what.ends_with("4 names are too long"), "{said:?}");
        assert!(!last.unclean.expect("it is an event").contains("all that it had said was in Tier-3"));
    }

    #[test]
    fn what_only_other_nodes_had_is_said_until_it_is_there_again() {
        let all_copied = |unsealed: u64| {
            serde_json::json!({
                "replication": {"partner": "n2", "lacking_files": 0, "lacking_bytes": 0, "since_ms": null, "why": null},
                "unsealed": {"files": unsealed, "bytes": 0}
            })
        };
        let copied = LastEnd::of(status(&[run(2, 1)], 3, all_copied(0)));
        assert_eq!(copied.problems(&[run(1, 1)], false), [], "the other node had no time to say what it has");
        let said = copied.problems(&[run(1, 1)], true);
        assert!(said.len() == 1 && said[0].what.contains("step 2 is at node n2 only"), "{said:?}");
        assert_eq!(copied.problems(&[], true).len(), 1, "the run is not known any more");
        assert_eq!(copied.problems(&[run(2, 1)], true), [], "the other node has it");
        assert_eq!(copied.problems(&[run(3, 1)], true), [], "the job went on from there");
        assert_eq!(copied.problems(&[run(1, 3)], true), [], "the job went on from step 1");
        let unclean = copied.unclean.expect("it is an event");
        assert!(unclean.contains("3 files") && unclean.contains("copied to node n2"), "{unclean}");
        let open = LastEnd::of(status(&[run(1, 1)], 1, all_copied(1))).problems(&[run(1, 1)], true);
        assert!(open[0].what.contains("1 files"), "what is open has no copy: {open:?}");
    }
}
