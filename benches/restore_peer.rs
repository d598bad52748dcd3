//! How fast does a checkpoint come back when the node that wrote it is lost, and Tier-3 with it?
//!
//! Owns: the read through a fresh node's mount of the one copy that is left in a neighbour's memory, against iperf3 over the same network,
//! against reading the same from memory, and against the same without encryption. Does not own: how soon a loss is noticed, the fresh
//! node's start.

use anyhow::{Context, ensure};
use serde_json::Value;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::time::{Duration, Instant};
use tidemark_benches::compare::{Compared, Sampled};
use tidemark_benches::footprint::cpu_s;
use tidemark_benches::nodes::{self, Nodes};
use tidemark_benches::rivals::iperf3_gb_per_s;
use tidemark_benches::{Bench, files};
use tidemark_tests::net::Network;
use tidemark_tests::process;

/// Settings with which a checkpoint is complete as soon as it is sealed.
const CONFIG: &str = "[save]\nsettle_s = 0.0\n[tier3]\npaced = false\n[replication]\npaced = false\n";
/// The same settings with bytes that are authenticated only.
const OPEN_CONFIG: &str = "[save]\nsettle_s = 0.0\n[tier3]\npaced = false\n[replication]\npaced = false\n\
                           [links]\nencrypt_bulk = false\n";
/// Connections of one transfer in the daemon (`tools/ckptd/src/peers.rs`).
const STREAMS: usize = 2;
/// Size of the file. Two nodes at a time need room for it: 4 GiB needs 14 GiB of memory.
const USUAL_BYTES: u64 = 1 << 30;
const PATH: &str = "run/step1.pt";
/// The least rate, 10 MB/s; below it the copy counts as missing. A node counts as gone after 1.5 s.
const SLOWEST_BYTES_PER_S: u64 = 10_000_000;
const PATIENCE: Duration = Duration::from_secs(60);

/// Samples of the restores, by stage.
#[derive(Debug, Default)]
struct Seen {
    open_s: Vec<f64>,
    first_byte_s: Vec<f64>,
    /// The daemon's fetch, which includes verifying but not locating.
    fetch_s: Vec<f64>,
    cpu_s_per_gb: Vec<f64>,
}

pub(crate) fn run(mut bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "restore_peer starts its own daemons: leave --path out");
    if !bench.options.size_given && !bench.options.smoke {
        bench.options.size_bytes = USUAL_BYTES;
        bench
            .say(&format!("size: {USUAL_BYTES} bytes, as two nodes share this memory; --size for another"))?;
    }
    let network = nodes::network(&["n1", "n2", "n3"])?;
    let size_bytes = bench.options.size_bytes;
    let memory = bench.options.baseline.join("tidemark-bench-restore-peer");
    let (mut seen, mut from_memory) = (Seen::default(), Vec::new());
    let medians = bench.alternate(
        || restore(&bench, &network, CONFIG, &mut seen),
        || {
            files::write_new(&memory, size_bytes)?;
            from_memory.push(files::read(&memory, size_bytes)? / 1e9);
            files::remove(&memory)?;
            iperf3_gb_per_s(network.host("n1"), network.host("n3"), STREAMS)
        },
    )?;
    let against = format!("iperf3 over the same network (streams: {STREAMS})");
    bench.result("restore_peer", "GB/s", &against, medians.clone())?;
    // The first round was discarded.
    let of = |samples: &[f64]| Sampled::median(samples[1..].to_vec());
    let against = format!("a read from {}", bench.baseline_folder());
    let compared = Compared::new(medians.value, of(&from_memory)?);
    bench.result("restore_peer_against_memory", "GB/s", &against, compared)?;
    bench.figure("restore_peer_first_byte", "ms", of(&seen.first_byte_s)?.times(1e3))?;
    bench.figure("restore_peer_open", "ms", of(&seen.open_s)?.times(1e3))?;
    bench.figure("restore_peer_fetch", "ms", of(&seen.fetch_s)?.times(1e3))?;
    bench.figure("restore_peer_cpu", "s/GB", of(&seen.cpu_s_per_gb)?)?;
    let (mut encrypted, mut open) = (Seen::default(), Seen::default());
    let medians = bench.alternate(
        || restore(&bench, &network, CONFIG, &mut encrypted),
        || restore(&bench, &network, OPEN_CONFIG, &mut open),
    )?;
    let against = "the same, authenticated and not encrypted";
    bench.result("restore_peer_encrypted", "GB/s", against, medians)?;
    // Two figures and no ratio: with a small file the clock's ticks may have counted nothing.
    bench.figure("restore_peer_encrypted_cpu", "s/GB", of(&encrypted.cpu_s_per_gb)?)?;
    bench.figure("restore_peer_authenticated_cpu", "s/GB", of(&open.cpu_s_per_gb)?)
}

/// Saves at a node, loses it, and reads at another one that was never there before; returns GB/s from the open to the last byte.
fn restore(bench: &Bench, network: &Network, config: &str, seen: &mut Seen) -> anyhow::Result<f64> {
    let size_bytes = bench.options.size_bytes;
    let (first, lost, fresh) = (network.host("n1"), network.host("n2"), network.host("n3"));
    let mut nodes = Nodes::start(&[first, lost], nodes::tier1_for_one_file(&bench.options), config)?;
    nodes.wait_for_partner(1)?;
    nodes.take_tier3_away()?;
    let path = nodes.mount(1).join(PATH);
    fs::create_dir(path.parent().context("it is in a directory")?).context("make the run's directory")?;
    files::write(&path, size_bytes)?;
    let limit = PATIENCE + Duration::from_secs(size_bytes / SLOWEST_BYTES_PER_S);
    wait_for(&nodes, limit, "it is replicated", |row| row["state"] == "replicated")?;

    let killed = nodes.node_mut(1).power_off();
    ensure!(killed.len() >= 2, "keeper and daemon were to be killed: {killed:?}");
    wait_for(&nodes, limit, "its writer is gone", |row| row["copies"]["host"]["files"] == 0)?;
    let at = nodes.add(fresh)?;
    // The node has joined when it knows a name of another node.
    let run = nodes.mount(at).join("run");
    process::until(PATIENCE, || run.is_dir().then_some(())).context("the fresh node knows no names")?;

    let pids = [nodes.pid(0)?, nodes.pid(at)?];
    let cpu = || Ok::<_, anyhow::Error>(cpu_s(pids[0])? + cpu_s(pids[1])?);
    let before_s = cpu()?;
    let read = read(&nodes.mount(at).join(PATH), size_bytes)?;
    let spent_s = cpu()? - before_s;
    let peer_bytes = nodes.metric(at, "tidemark_fetch_peer_bytes_total");
    ensure!(peer_bytes >= size_bytes as f64, "{peer_bytes} of {size_bytes} bytes came from another node");
    ensure!(
        nodes.metric(at, "tidemark_fetch_bytes_total") == 0.0,
        "Tier-3 was read, which was to be out of reach"
    );
    let gigabytes = size_bytes as f64 / 1e9;
    seen.open_s.push(read.open_s);
    seen.first_byte_s.push(read.first_byte_s);
    seen.fetch_s.push(nodes.metric(at, "tidemark_fetch_seconds_sum"));
    seen.cpu_s_per_gb.push(spent_s / gigabytes);
    Ok(gigabytes / read.all_s)
}

/// Waits until the coordinator's listing of the checkpoint is so.
fn wait_for(nodes: &Nodes, limit: Duration, what: &str, so: impl Fn(&Value) -> bool) -> anyhow::Result<()> {
    let listed = || nodes.daemon(0).checkpoint(PATH);
    let found = process::until(limit, || listed().filter(&so).map(drop));
    found.with_context(|| format!("not so after {limit:?}: {what}; {:#?}", listed()))
}

/// Times of a read to the end, in seconds since before the open.
#[derive(Debug)]
struct Timed {
    open_s: f64,
    first_byte_s: f64,
    all_s: f64,
}

fn read(path: &Path, size_bytes: u64) -> anyhow::Result<Timed> {
    let mut block = vec![0; files::BLOCK_BYTES];
    let started = Instant::now();
    let mut file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let open_s = started.elapsed().as_secs_f64();
    let mut total_bytes = file.read(&mut block).context("read the first bytes")?;
    let first_byte_s = started.elapsed().as_secs_f64();
    loop {
        match file.read(&mut block).context("read on")? {
            0 => break,
            got => total_bytes += got,
        }
    }
    let all_s = started.elapsed().as_secs_f64();
    ensure!(total_bytes as u64 == size_bytes, "{total_bytes} bytes came back, written were {size_bytes}");
    Ok(Timed { open_s, first_byte_s, all_s })
}
