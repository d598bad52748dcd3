//! What do names cost where several nodes share one tree?
//!
//! Owns: creates, look-ups and listings on three real nodes, against a single node. Does not own: bytes (`replicate`), the coordinator of
//! many nodes (`coordinator`).

use anyhow::{Context, ensure};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;
use tidemark_benches::compare::{Compared, Sampled};
use tidemark_benches::nodes::{self, Nodes};
use tidemark_benches::{Bench, Mount};

/// Size of Tier-1. Names matter here, not bytes. A 32nd of it is the journal, which holds all names of all rounds.
const TIER1_BYTES: u64 = 3 << 30;
const SMOKE_TIER1_BYTES: u64 = 512 << 20;
/// Settings under which nothing becomes a checkpoint while names are timed, so that nothing is decided or uploaded.
const CONFIG: &str = "[save]\nsettle_s = 3600.0\n[tier3]\npaced = false\n[replication]\npaced = false\n";
const NODES: [&str; 3] = ["n1", "n2", "n3"];
const FILES_PER_CHECKPOINT: usize = 1000;
const SMOKE_FILES: usize = 60;
/// Writers of each node in the figure of several.
const THREADS: usize = 8;
const ALONE: &str = "one node that is alone, with as many writers";

/// Samples of a kind of operation on names: the rate of each round, and the time of each operation.
#[derive(Debug, Default)]
struct Rounds {
    per_s: Vec<f64>,
    each_s: Vec<f64>,
}

impl Rounds {
    fn add(&mut self, took_s: f64, each_s: Vec<f64>) {
        self.per_s.push(each_s.len() as f64 / took_s);
        self.each_s.extend(each_s);
    }
}

/// Samples of all operations on names.
#[derive(Debug, Default)]
struct Seen {
    create_shared: Rounds,
    create_shared_8_threads: Rounds,
    ranks_seen_s: Vec<f64>,
    create_own: Rounds,
    look: Rounds,
    list: Rounds,
}

pub(crate) fn run(mut bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "catalog starts its own daemons: leave --path out");
    // Names, no bytes.
    bench.options.size_bytes = 0;
    let (files, tier1_bytes) = if bench.options.smoke {
        (SMOKE_FILES, SMOKE_TIER1_BYTES)
    } else {
        (FILES_PER_CHECKPOINT, TIER1_BYTES)
    };
    let (mut ours, mut alone) = (Seen::default(), Seen::default());
    {
        let network = nodes::network(&NODES)?;
        let hosts = NODES.map(|name| network.host(name));
        let nodes = Nodes::start(&hosts, tier1_bytes, CONFIG)?;
        nodes.wait_for_partner(2)?;
        let mounts = [0, 1, 2].map(|node| nodes.mount(node).to_owned());
        let options =
            tidemark_benches::options::Options { tier1_bytes: Some(tier1_bytes), ..bench.options.clone() };
        let one = Mount::start(&options, Some(CONFIG))?;
        let same = [0; 3].map(|_| one.path().to_owned());
        for round in 0..=bench.options.rounds {
            let mut seen = [(&mounts, &mut ours), (&same, &mut alone)];
            if round % 2 == 1 {
                seen.reverse();
            }
            for (mounts, seen) in seen {
                let mut thrown_away = Seen::default();
                let seen = if round == 0 { &mut thrown_away } else { seen };
                checkpoint(mounts, &format!("step_{round}"), files, seen)?;
            }
        }
        one.close()?;
    }
    for (name, ours, alone) in [
        ("create_shared", ours.create_shared, alone.create_shared),
        ("create_shared_8_threads", ours.create_shared_8_threads, alone.create_shared_8_threads),
        ("create_own", ours.create_own, alone.create_own),
        ("look", ours.look, alone.look),
        ("list", ours.list, alone.list),
    ] {
        let rates = Compared::new(Sampled::median(ours.per_s)?, Sampled::median(alone.per_s)?);
        bench.result(&format!("catalog_{name}"), "1/s", ALONE, rates)?;
        let p99 = |each_s| Ok::<_, anyhow::Error>(Sampled::percentile(each_s, 99)?.times(1e6));
        let p99 = Compared::new(p99(ours.each_s)?, p99(alone.each_s)?);
        bench.result(&format!("catalog_{name}_p99"), "us", ALONE, p99)?;
    }
    let seen = Compared::new(Sampled::median(ours.ranks_seen_s)?, Sampled::median(alone.ranks_seen_s)?);
    bench.result("catalog_1000_ranks_seen", "s", ALONE, seen)
}

/// Measures the names of one checkpoint: three writers create them in one directory and each in its own; the third looks them up and lists
/// them.
fn checkpoint(mounts: &[PathBuf; 3], step: &str, files: usize, seen: &mut Seen) -> anyhow::Result<()> {
    let shared = |mount: &Path| mount.join("shared").join(step);
    let own = |mount: &Path, writer: usize| mount.join("own").join(step).join(format!("rank{writer}"));
    for (writer, mount) in mounts.iter().enumerate() {
        fs::create_dir_all(shared(mount)).context("make the shared directory")?;
        fs::create_dir_all(own(mount, writer)).context("make an own directory")?;
    }
    let each = files / mounts.len();
    let (took_s, each_s) = at_once(mounts, 1, |writer, mount| create(&shared(mount), writer, each))
        .context("in one directory")?;
    seen.create_shared.add(took_s, each_s);
    // The names of other writers than those above.
    let by_threads = |writer, mount: &Path| create(&shared(mount), writer + mounts.len(), each / THREADS);
    let (took_s, each_s) = at_once(mounts, THREADS, by_threads).context("in one directory, by threads")?;
    let by_threads = each_s.len();
    seen.create_shared_8_threads.add(took_s, each_s);
    let (took_s, each_s) = at_once(mounts, 1, |writer, mount| create(&own(mount, writer), writer, each))
        .context("in own directories")?;
    seen.create_own.add(took_s, each_s);
    seen.ranks_seen_s.push(ranks(mounts, step, files)?);

    // The last node reads names that the first one made.
    let reader = &mounts[mounts.len() - 1];
    let started = Instant::now();
    let looked: Vec<f64> = (0..each)
        .map(|number| {
            let started = Instant::now();
            let path = own(reader, 0).join(name(0, number));
            fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?;
            Ok(started.elapsed().as_secs_f64())
        })
        .collect::<anyhow::Result<_>>()?;
    seen.look.add(started.elapsed().as_secs_f64(), looked);
    let started = Instant::now();
    let listed = fs::read_dir(shared(reader)).context("list")?.count();
    let took_s = started.elapsed().as_secs_f64();
    let made = each * mounts.len() + by_threads;
    ensure!(listed == made, "{listed} of {made} names are listed");
    // A listing counts as one operation, whatever its number of names.
    seen.list.add(took_s, vec![took_s]);
    Ok(())
}

/// Has many ranks, spread over the nodes, make two files each in one directory, as ranks of DCP do. Returns the seconds until every node
/// lists all of them.
fn ranks(mounts: &[PathBuf; 3], step: &str, ranks: usize) -> anyhow::Result<f64> {
    let folder = |mount: &Path| mount.join("ranks").join(step);
    for mount in mounts {
        fs::create_dir_all(folder(mount)).context("make the ranks' directory")?;
    }
    let each = ranks / mounts.len();
    let started = Instant::now();
    at_once(mounts, each, |rank, mount| create(&folder(mount), rank, 2)).context("as ranks")?;
    for mount in mounts {
        let (listed, made) = (fs::read_dir(folder(mount)).context("list")?.count(), 2 * each * mounts.len());
        ensure!(listed == made, "{listed} of {made} names are listed at {}", mount.display());
    }
    Ok(started.elapsed().as_secs_f64())
}

fn name(writer: usize, number: usize) -> String {
    format!("__{writer}_{number}.distcp")
}

/// Creates and closes empty files; returns the seconds of each.
fn create(folder: &Path, writer: usize, files: usize) -> anyhow::Result<Vec<f64>> {
    let one = |number| {
        let path = folder.join(name(writer, number));
        let started = Instant::now();
        drop(File::create(&path).with_context(|| format!("create {}", path.display()))?);
        Ok(started.elapsed().as_secs_f64())
    };
    (0..files).map(one).collect()
}

/// Runs `threads` writers on each mount at the same time; each gets a number of its own. Returns the time until the last is done, and the
/// seconds of each operation.
fn at_once(
    mounts: &[PathBuf; 3],
    threads: usize,
    write: impl Fn(usize, &Path) -> anyhow::Result<Vec<f64>> + Sync,
) -> anyhow::Result<(f64, Vec<f64>)> {
    let started = Instant::now();
    let write = &write;
    let done: Vec<anyhow::Result<Vec<f64>>> = thread::scope(|scope| {
        let writers: Vec<_> = (0..threads * mounts.len())
            .map(|number| scope.spawn(move || write(number, &mounts[number % mounts.len()])))
            .collect();
        writers.into_iter().map(|writer| writer.join().expect("a writer does not panic")).collect()
    });
    let took_s = started.elapsed().as_secs_f64();
    let each: Vec<Vec<f64>> = done.into_iter().collect::<anyhow::Result<_>>()?;
    Ok((took_s, each.concat()))
}
