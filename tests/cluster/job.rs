//! A training job with a rank on each host, killed and started again, and the comparison of its output.
//!
//! Owns: reading the lines of `python/dcp_job.py`. Does not own: where the ranks save, which is any path on their host.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::Deserialize;
use tidemark_tests::net::{Host, Network};
use tidemark_tests::python::{Python, Ranks};

/// The task of a job. In its directory, the job goes on from its last save.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    /// The last step.
    pub(crate) until: u64,
    /// Steps between two saves.
    pub(crate) every: u64,
    /// Width of the model: 3 MB of state at 256, four times that at 512.
    pub(crate) width: u64,
    /// Pause after each step, so that there is a moment in which no rank is inside a step.
    pub(crate) pause_ms: u64,
    /// Whether the job uses names and a tracker as Megatron-LM does.
    pub(crate) tracker: bool,
}

/// A line of the script.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Line {
    pub(crate) event: String,
    pub(crate) rank: usize,
    pub(crate) step: u64,
    /// Hash of the rank's part of the state.
    #[serde(default)]
    pub(crate) hash: String,
    /// Hash of all parameters, whatever the number of ranks.
    #[serde(default)]
    pub(crate) whole: String,
    /// Duration of a save or of a load.
    #[serde(default)]
    pub(crate) seconds: f64,
}

/// A job that runs. Dropping it kills its ranks.
#[derive(Debug)]
pub(crate) struct Job {
    ranks: Ranks,
    world: usize,
}

impl Job {
    /// Starts one rank on each host. The place's path is the folder in which that rank saves and looks for saves.
    pub(crate) fn start(python: &Python, places: &[(&Host, &Path)], plan: Plan) -> Self {
        let pause = format!("{}.{:03}", plan.pause_ms / 1000, plan.pause_ms % 1000);
        let options = [
            ("--until", plan.until.to_string()),
            ("--every", plan.every.to_string()),
            ("--width", plan.width.to_string()),
            ("--pause-s", pause),
        ];
        let arguments = |folder: &Path| {
            let folder = folder.to_str().expect("paths of tests are UTF-8").to_owned();
            let words = options.iter().flat_map(|(name, value)| [(*name).to_owned(), value.clone()]);
            let tracker = plan.tracker.then(|| "--tracker".to_owned());
            [folder].into_iter().chain(words).chain(tracker).collect()
        };
        let hosts: Vec<_> = places.iter().map(|(host, folder)| (*host, arguments(folder))).collect();
        Self { ranks: python.start_on(&hosts, &script()), world: places.len() }
    }

    /// Waits until every rank has printed `event` of a step. Fails if a rank fails, or all end, before that.
    pub(crate) fn wait_for(&mut self, event: &str, step: u64) {
        let world = self.world;
        self.ranks.wait_until(&format!("{event} {step}"), |ranks| {
            let said = |line: &Line| line.event == event && line.step == step;
            (0..world).all(|rank| lines(&ranks.printed(rank)).iter().any(said)).then_some(())
        });
    }

    /// Sends SIGKILL to every rank at once.
    pub(crate) fn kill9(&mut self) {
        self.ranks.kill9();
    }

    /// Waits for the end. Every rank must succeed.
    pub(crate) fn finish(&mut self) {
        self.ranks.finish();
    }

    /// Waits for the end of a job that goes on. Returns a text that says how long after `began` each stage was over.
    pub(crate) fn finish_in_stages(&mut self, began: Instant) -> String {
        let world = self.world;
        let step = self.ranks.wait_until("found", |ranks| {
            let said = |rank| lines(&ranks.printed(rank)).into_iter().find(|line| line.event == "found");
            (0..world)
                .map(said)
                .collect::<Option<Vec<_>>>()
                .and_then(|found| found.first().map(|line| line.step))
        });
        let found = began.elapsed();
        self.wait_for("resumed", step);
        let resumed = began.elapsed();
        self.finish();
        let load_s = self.said("resumed").into_values().map(|line| line.seconds).fold(0.0, f64::max);
        format!(
            "ranks started and step {step} found after {found:.1?}; loaded after {resumed:.1?}, of which dcp.load took the slowest rank {load_s:.2}s; ended after {:.1?}",
            began.elapsed()
        )
    }

    /// Waits for the end, and returns the ranks' output. Every rank must fail.
    pub(crate) fn fail(&mut self) -> String {
        self.ranks.fail()
    }

    /// Returns every line of every rank so far.
    pub(crate) fn lines(&self) -> Vec<Line> {
        (0..self.world).flat_map(|rank| lines(&self.ranks.printed(rank))).collect()
    }

    /// Returns the lines of one event, by step and rank.
    ///
    /// # Panics
    /// When there is none, because a comparison of nothing with nothing must not pass.
    pub(crate) fn said(&self, event: &str) -> BTreeMap<(u64, usize), Line> {
        let said = self.lines().into_iter().filter(|line| line.event == event);
        let said: BTreeMap<_, _> = said.map(|line| ((line.step, line.rank), line)).collect();
        assert!(!said.is_empty(), "no rank said {event}");
        said
    }

    /// Returns the one step from which all ranks went on, or 0 if they found nothing. Panics if they differ.
    pub(crate) fn found(&self) -> u64 {
        let found: Vec<u64> = self.said("found").into_values().map(|line| line.step).collect();
        assert_eq!(found, vec![found[0]; self.world], "the ranks found different steps");
        found[0]
    }

    /// Asserts that the loaded state, and each step from there on, is bit for bit that of another job at the same step.
    pub(crate) fn assert_goes_on_as(&self, other: &Self) {
        let known = other.said("step");
        let mine = self.said("step").into_iter().chain(self.said("resumed"));
        for (at, line) in mine {
            let expected = known.get(&at).unwrap_or_else(|| panic!("the other job never was at {at:?}"));
            assert_eq!((&line.hash, &line.whole), (&expected.hash, &expected.whole), "{} {at:?}", line.event);
        }
    }
}

/// Parses a rank's output. The last line may be incomplete while the rank runs, or after it was killed.
fn lines(printed: &str) -> Vec<Line> {
    let whole = printed.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    whole.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}"))).collect()
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("cluster/python/dcp_job.py")
}

const PLAN: Plan = Plan { until: 9, every: 2, width: 256, pause_ms: 0, tracker: false };

/// Goal: the job itself is a fit measure: a killed and resumed job is bit for bit the unbroken one. Method: the job runs
/// without Tidemark, in a plain directory that both hosts see.
#[test]
fn a_job_over_two_hosts_that_was_killed_goes_on_bit_for_bit() {
    let Some(python) = Python::find() else { return };
    let Some(network) = Network::make(&["n1", "n2"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let places = |name: &str| folder.path().join(name);
    let on = |name: &str, plan| {
        let place = places(name);
        let hosts: Vec<_> = network.hosts().iter().map(|host| (host, place.as_path())).collect();
        Job::start(&python, &hosts, plan)
    };
    let mut unbroken = on("unbroken", PLAN);
    unbroken.finish();
    assert_eq!(unbroken.found(), 0);

    let mut killed = on("killed", Plan { until: 1000, pause_ms: 500, ..PLAN });
    killed.wait_for("saved", 4);
    assert_eq!(network.hosts().iter().map(|host| host.processes().len()).collect::<Vec<_>>(), [1, 1]);
    killed.kill9();
    let last = killed.said("step").into_keys().map(|(step, _)| step).max().unwrap();
    assert!((4..PLAN.until).contains(&last), "killed at {last}, where nothing is left to go on for");

    let mut resumed = on("killed", PLAN);
    resumed.finish();
    assert!(resumed.found() >= 4, "what was saved was not found: {}", resumed.found());
    resumed.assert_goes_on_as(&unbroken);
    assert_eq!(resumed.said("step").into_keys().next_back(), Some((PLAN.until, 1)));

    // The comparison can fail, because ranks differ, and so do steps.
    let steps = unbroken.said("step");
    let distinct: BTreeSet<_> = steps.values().map(|line| &line.hash).collect();
    assert_eq!(distinct.len(), steps.len());
    // If the ranks see different saves, the job says so and does not go on.
    let nothing = places("nothing");
    let seen = places("killed");
    let apart = [(network.host("n1"), seen.as_path()), (network.host("n2"), nothing.as_path())];
    let said = Job::start(&python, &apart, PLAN).fail();
    assert!(said.contains("the ranks found different steps"), "{said}");
}

/// A partition between two ranks stops the job, which the cluster's tests rely on.
#[test]
fn a_job_whose_hosts_are_cut_off_from_each_other_stands_still() {
    let Some(python) = Python::find() else { return };
    let Some(network) = Network::make(&["n1", "n2"]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let hosts: Vec<_> = network.hosts().iter().map(|host| (host, folder.path())).collect();
    let mut job = Job::start(&python, &hosts, Plan { until: 1000, every: 1000, pause_ms: 10, ..PLAN });
    job.wait_for("step", 2);
    let cut = network.host("n1").partition(network.host("n2"));
    let steps = || job.said("step").into_keys().next_back();
    // The step that was under way may end; a second is as long as many steps.
    let stands = (0..20).any(|_| {
        let before = steps();
        std::thread::sleep(Duration::from_secs(1));
        steps() == before
    });
    assert!(stands, "it goes on while its hosts are cut off: {:?}", steps());
    let before = steps();
    assert!(cut.heal() > 0, "nothing was dropped");
    let (step, _) = before.unwrap();
    job.wait_for("step", step + 5);
    job.kill9();
}
