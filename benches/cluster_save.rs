//! What does a training loop over several nodes feel of its saves, how soon are they safe, and what memory do they take?
//!
//! Owns: TierCheck's experiments 1, 2, 3 and 9 in small, with each kind of save: the step with and without saving while replication and
//! upload run; save, `replicated` and `committed`; the shortest interval that costs no more than 3.5 %; memory per tier over many saves.
//! Does not own: the loop itself (python/cluster_save.py).
//!
//! Three nodes, their ranks and their daemons share the processors of one machine: the measured cost of a save is an upper bound.

use anyhow::{Context, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tidemark_benches::compare::{Compared, Sampled};
use tidemark_benches::footprint::anonymous_bytes;
use tidemark_benches::nodes::{self, Nodes};
use tidemark_benches::{Bench, python};
use tidemark_tests::net::Network;
use tidemark_tests::python::{Python, Ranks};

const NODES: [&str; 3] = ["n1", "n2", "n3"];
/// The nodes of each kind's ranks. The first rank of DCP writes its index. As usually in a job, whose first host starts the first daemon,
/// it runs on the coordinator's node.
const KINDS: [(&str, &[usize]); 2] = [("torch_save", &[1]), ("dcp", &[0, 1])];
/// Settings with which a checkpoint is complete as soon as it is sealed. Two committed versions are kept, as in the paper.
const CONFIG: &str = "[save]\nsettle_s = 0.0\n[retention]\nkeep_last = 2\n";
/// The same settings without pacing, which ends before the next save: a single timed save has no next one.
const UNPACED: &str = "[save]\nsettle_s = 0.0\n[retention]\nkeep_last = 2\n[tier3]\npaced = false\n[replication]\npaced = false\n";
/// The state of one rank, in bytes. A step over it takes about as long as its save here.
const USUAL_BYTES: u64 = 256 << 20;
/// Tier-1 in multiples of the state. A node has its own newest version, the one before, one that is being written, and as many copies of a
/// neighbour's.
const TIER1_PER_STATE: u64 = 6;
const BESIDE_BYTES: u64 = 128 << 20;
/// The most that saves may slow down a loop.
const BOUND: f64 = 1.035;
const INTERVALS: &str = "1,2,5,10,20";
const SMOKE_INTERVALS: &str = "1,2";
const SAVES: usize = 100;
const SMOKE_SAVES: usize = 5;
/// Interval at which the memory of a tier is sampled; a save takes longer.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// The largest sample of each tier while a job ran, in bytes.
#[derive(Debug, Default)]
struct Peaks {
    /// Tier-1 of the fullest node.
    tier1_bytes: f64,
    tier3_bytes: u64,
    /// The daemon with the most memory of its own.
    anonymous_bytes: u64,
}

pub(crate) fn run(mut bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "cluster_save starts its own daemons: leave --path out");
    if !bench.options.size_given && !bench.options.smoke {
        bench.options.size_bytes = USUAL_BYTES;
        bench.say(&format!("size: {USUAL_BYTES} bytes of state on each rank; --size for another"))?;
    }
    python::interpreter()?;
    let python = Python::find().context("the same interpreter was found a moment ago")?;
    let network = nodes::network(&NODES)?;
    // A smoke run needs only one kind: the other differs in the calls of the job only.
    let kinds = if bench.options.smoke { &KINDS[1..] } else { &KINDS };
    for &(kind, ranks) in kinds {
        let run = Run { bench: &bench, network: &network, python: &python, kind, ranks };
        run.overhead()?;
        run.latency()?;
        run.memory()?;
    }
    Ok(())
}

/// The measurement of a kind of save.
struct Run<'a> {
    bench: &'a Bench,
    network: &'a Network,
    python: &'a Python,
    kind: &'a str,
    ranks: &'a [usize],
}

impl Run<'_> {
    fn nodes(&self, config: &str) -> anyhow::Result<Nodes> {
        let usual_bytes = self.bench.options.size_bytes * TIER1_PER_STATE + BESIDE_BYTES;
        let hosts = NODES.map(|name| self.network.host(name));
        let tier1_bytes = self.bench.options.tier1_bytes.unwrap_or(usual_bytes);
        let nodes = Nodes::start(&hosts, tier1_bytes, config)?;
        // Each node has a partner from here on.
        for node in 0..NODES.len() {
            nodes.wait_for_partner(node)?;
        }
        Ok(nodes)
    }

    /// Starts the ranks; each saves below the folder that `place` returns for its node.
    fn start(
        &self,
        mode: &str,
        words: &[&str],
        see: Option<&Path>,
        place: impl Fn(usize) -> PathBuf,
    ) -> Ranks {
        let run = format!("{}_{mode}", self.kind);
        let arguments = |node: usize| {
            let folder = place(node).join(&run).display().to_string();
            let mut arguments = vec![folder, self.kind.to_owned(), mode.to_owned()];
            arguments.extend(["--bytes".to_owned(), self.bench.options.size_bytes.to_string()]);
            if let Some(see) = see {
                arguments.extend(["--see".to_owned(), see.join(&run).display().to_string()]);
            }
            arguments.extend(words.iter().map(|word| (*word).to_owned()));
            arguments
        };
        let hosts: Vec<_> =
            self.ranks.iter().map(|node| (self.network.host(NODES[*node]), arguments(*node))).collect();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/cluster_save.py");
        self.python.start_on(&hosts, &script)
    }

    /// Reports the saves that failed as a figure; the others are measured all the same.
    fn say_failed(&self, mode: &str, ranks: &Ranks) -> anyhow::Result<()> {
        let done = said(ranks, "done")?;
        let (saves, failed) = (number(&done[0], "saves")?, number(&done[0], "failed")?);
        if failed > 0.0 {
            self.bench.say(&format!(
                "{}: {failed} of {saves} saves failed ({mode}), the first: {}",
                self.kind, done[0]["why"]
            ))?;
        }
        self.bench.figure(&format!("cluster_save_{}_{mode}_failed", self.kind), "saves", failed)
    }

    /// Measures experiments 1 and 3: the step with and without saves, by the interval between them.
    fn overhead(&self) -> anyhow::Result<()> {
        let (bench, kind) = (self.bench, self.kind);
        let nodes = self.nodes(CONFIG)?;
        let smoke = bench.options.smoke;
        let words = ["--intervals", if smoke { SMOKE_INTERVALS } else { INTERVALS }];
        let steps = ["--steps", if smoke { "3" } else { "20" }];
        let mut ranks = self.start("overhead", &[words, steps].concat(), Some(nodes.mount(0)), |node| {
            nodes.mount(node).to_owned()
        });
        ranks.finish();
        self.say_failed("overhead", &ranks)?;
        let lines = said(&ranks, "every")?;
        let mut shortest = None;
        for line in &lines {
            let (every, with_s, base_s) =
                (number(line, "every")?, number(line, "with_s")?, number(line, "base_s")?);
            bench.say(&format!(
                "{kind}: a save every {every} steps ({:.3} s each): {with_s:.4} s a step, {base_s:.4} s without, {:+.1} %",
                number(line, "save_s")?,
                100.0 * (with_s / base_s - 1.0)
            ))?;
            // If a longer interval exceeds the bound, a shorter one within it was chance.
            shortest = (with_s / base_s <= BOUND).then(|| shortest.unwrap_or(every));
        }
        let first = &lines[0];
        let steps = Compared::new(number(first, "with_s")?, number(first, "base_s")?);
        let name = format!("cluster_save_{kind}_step_with_a_save_each");
        bench.result(&name, "s", "the loop without saves", steps)?;
        match shortest {
            Some(every) => {
                bench.figure(&format!("cluster_save_{kind}_interval_within_bound"), "steps", every)
            }
            None => bench.say(&format!(
                "{kind}: no interval that was tried stays, with all longer ones, within {BOUND} of the loop without saves"
            )),
        }
    }

    /// Measures experiment 2: how long a save takes the job, and how long until it is safe; against the same save into memory.
    fn latency(&self) -> anyhow::Result<()> {
        let (bench, kind) = (self.bench, self.kind);
        let rounds = bench.options.rounds.to_string();
        let words = ["--saves", rounds.as_str()];
        let folder = tempfile::Builder::new()
            .prefix("tidemark-bench-")
            .tempdir_in(&bench.options.baseline)
            .context("make a folder beside the baseline")?;
        let mut plain = self.start("latency", &words, None, |_| folder.path().to_owned());
        plain.finish();
        drop(folder);
        let nodes = self.nodes(UNPACED)?;
        let mut ranks =
            self.start("latency", &words, Some(nodes.mount(0)), |node| nodes.mount(node).to_owned());
        ranks.finish();
        self.say_failed("latency", &ranks)?;
        let (plain, lines) = (said(&plain, "save_s")?, said(&ranks, "save_s")?);
        let of = |lines: &[Value], name: &str| {
            Sampled::median(lines.iter().map(|line| number(line, name)).collect::<anyhow::Result<_>>()?)
        };
        let saves = Compared::new(of(&lines, "save_s")?, of(&plain, "save_s")?);
        let against = format!("the same save to {}", bench.baseline_folder());
        bench.result(&format!("cluster_save_{kind}_save"), "s", &against, saves)?;
        bench.figure(&format!("cluster_save_{kind}_replicated"), "s", of(&lines, "replicated_s")?)?;
        bench.figure(&format!("cluster_save_{kind}_committed"), "s", of(&lines, "committed_s")?)
    }

    /// Measures experiment 9: the peak of each tier over many saves, against its bound.
    fn memory(&self) -> anyhow::Result<()> {
        let (bench, kind) = (self.bench, self.kind);
        let usual = if bench.options.smoke { SMOKE_SAVES } else { SAVES };
        let saves = bench.options.saves.unwrap_or(usual);
        let nodes = self.nodes(CONFIG)?;
        let saves_word = saves.to_string();
        let words = ["--saves", saves_word.as_str()];
        let mut ranks =
            self.start("memory", &words, Some(nodes.mount(0)), |node| nodes.mount(node).to_owned());
        let (mut peaks, mut first_half, mut looked) = (Peaks::default(), None, Instant::now());
        let mut failed = None;
        ranks.wait_until("done", |ranks| {
            if looked.elapsed() >= LOOK_EVERY {
                looked = Instant::now();
                failed = peaks.look(&nodes).err();
            }
            let printed = ranks.printed(0);
            let saved = printed.lines().filter(|line| line.contains("\"saved\"")).count();
            if saved >= saves / 2 && first_half.is_none() {
                first_half = Some(peaks.tier1_bytes);
            }
            (failed.is_some() || printed.contains("\"done\"")).then_some(())
        });
        if let Some(error) = failed {
            return Err(error.context("look at the memory of the nodes"));
        }
        ranks.finish();
        self.say_failed("memory", &ranks)?;
        peaks.look(&nodes)?;
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let budget_bytes = nodes.metric(0, "tidemark_tier1_size_bytes");
        let one_bytes = (bench.options.size_bytes * self.ranks.len() as u64) as f64;
        bench.say(&format!(
            "{kind}: {saves} saves of {:.0} MiB; Tier-1 of the fullest node had {:.0} MiB after half of them",
            mib(one_bytes),
            mib(first_half.unwrap_or_default())
        ))?;
        let tier1 = Compared::new(mib(peaks.tier1_bytes), mib(budget_bytes));
        bench.result(&format!("cluster_save_{kind}_tier1_peak"), "MiB", "Tier-1's budget", tier1)?;
        let tier3 = Compared::new(mib(peaks.tier3_bytes as f64), mib(3.0 * one_bytes));
        let against = "two states that are kept and one on its way";
        bench.result(&format!("cluster_save_{kind}_tier3_peak"), "MiB", against, tier3)?;
        bench.figure(&format!("cluster_save_{kind}_anonymous_peak"), "MiB", mib(peaks.anonymous_bytes as f64))
    }
}

impl Peaks {
    fn look(&mut self, nodes: &Nodes) -> anyhow::Result<()> {
        for node in 0..NODES.len() {
            self.tier1_bytes = self.tier1_bytes.max(nodes.metric(node, "tidemark_tier1_used_bytes"));
            self.anonymous_bytes = self.anonymous_bytes.max(anonymous_bytes(nodes.pid(node)?)?);
        }
        self.tier3_bytes = self.tier3_bytes.max(bytes_below(&nodes.tier3()));
        Ok(())
    }
}

/// Returns the bytes of all files below a folder; files that are removed meanwhile do not count.
fn bytes_below(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let of = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => bytes_below(&entry.path()),
        Ok(meta) => meta.len(),
        Err(_) => 0,
    };
    entries.map(of).sum()
}

/// Returns the lines of the first rank that have this field.
fn said(ranks: &Ranks, field: &str) -> anyhow::Result<Vec<Value>> {
    let printed = ranks.printed(0);
    let lines = printed.lines().map(|line| serde_json::from_str::<Value>(line).context("a line is no JSON"));
    let lines: Vec<Value> = lines.collect::<anyhow::Result<_>>()?;
    let lines: Vec<Value> = lines.into_iter().filter(|line| line.get(field).is_some()).collect();
    ensure!(!lines.is_empty(), "the first rank never said {field}: {printed:?}");
    Ok(lines)
}

fn number(line: &Value, field: &str) -> anyhow::Result<f64> {
    line.get(field).and_then(Value::as_f64).with_context(|| format!("{field} is no number in {line}"))
}
