//! How fast is a saved file in a neighbour's memory too, and what does that cost?
//!
//! Owns: a file written at one node to `replicated`, against iperf3 over the same network in as many streams; the time from its close to
//! that, against the least possible; processor seconds of both daemons against scp and rsync; rate and processor seconds without
//! encryption. Does not own: reading from the neighbour (`restore_peer`), a link without any protection (transport's example `links`).
//!
//! Tier-3 is unreachable, so that nothing is uploaded meanwhile. Files without another copy are not evicted for the next round, so each
//! sample has two daemons of its own, with warm memory.

use anyhow::{Context, ensure};
use std::fs::{self, File};
use std::time::{Duration, Instant};
use tidemark_benches::compare::{Compared, Sampled};
use tidemark_benches::footprint::cpu_s;
use tidemark_benches::nodes::{self, Nodes, wait_for_state};
use tidemark_benches::rivals::{Copier, iperf3_gb_per_s};
use tidemark_benches::{Bench, files};
use tidemark_tests::net::{Host, Network};

/// Settings with which a checkpoint is complete as soon as it is sealed: the copy is timed, not a pause in which a save might continue.
const CONFIG: &str = "[save]\nsettle_s = 0.0\n[tier3]\npaced = false\n[replication]\npaced = false\n";
/// The same settings with bytes that are authenticated only.
const OPEN_CONFIG: &str = "[save]\nsettle_s = 0.0\n[tier3]\npaced = false\n[replication]\npaced = false\n\
                           [links]\nencrypt_bulk = false\n";
/// Connections of one transfer in the daemon (`tools/ckptd/src/peers.rs`).
const STREAMS: usize = 2;
/// The narrow network of the target: slower than one processor sends, so that only the network decides.
const NARROW_BITS_PER_S: u64 = 8_000_000_000;
/// Size of the file. Two nodes need room for it, besides the writer's own: 4 GiB needs 16 GiB of memory.
const USUAL_BYTES: u64 = 1 << 30;
/// The least rate, 10 MB/s; below it the copy counts as missing.
const SLOWEST_BYTES_PER_S: u64 = 10_000_000;
const REPLICATED_MIN: Duration = Duration::from_secs(60);
/// Copies of scp and rsync: their processor seconds vary less than rates do.
const RIVAL_ROUNDS_MAX: usize = 3;

/// Samples besides the rate, one for each round.
#[derive(Debug, Default)]
struct Seen {
    write_s: Vec<f64>,
    lag_s: Vec<f64>,
    cpu_s_per_gb: Vec<f64>,
}

pub(crate) fn run(mut bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "replicate starts its own daemons: leave --path out");
    if !bench.options.size_given && !bench.options.smoke {
        bench.options.size_bytes = USUAL_BYTES;
        bench
            .say(&format!("size: {USUAL_BYTES} bytes, as two nodes share this memory; --size for another"))?;
    }
    let network = nodes::network(&["n1", "n2"])?;
    let open = measure(&bench, &network, "replicate", STREAMS)?;
    {
        let _narrow = network.host("n1").bandwidth(NARROW_BITS_PER_S);
        measure(&bench, &network, "replicate_8gbit", 1)?;
    }
    let cpu = Sampled::median(open.cpu_s_per_gb)?;
    bench.figure("replicate_cpu", "s/GB", cpu.clone())?;
    against_open(&bench, &network)?;
    against_copiers(&bench, &network, &cpu)
}

/// Measures the rate and the lag, in the present network.
fn measure(bench: &Bench, network: &Network, name: &str, streams: usize) -> anyhow::Result<Seen> {
    let size_bytes = bench.options.size_bytes;
    let (from, to) = (network.host("n1"), network.host("n2"));
    let mut seen = Seen::default();
    let medians = bench.alternate(
        || replicate(bench, (from, to), CONFIG, &mut seen),
        || iperf3_gb_per_s(from, to, streams),
    )?;
    let transfer_s = size_bytes as f64 / 1e9 / medians.baseline.number;
    let against = format!("iperf3 over the same network (streams: {streams})");
    bench.result(name, "GB/s", &against, medians)?;
    // The first round was discarded.
    for samples in [&mut seen.write_s, &mut seen.lag_s, &mut seen.cpu_s_per_gb] {
        samples.remove(0);
    }
    let write_s = Sampled::median(seen.write_s.clone())?.number;
    let least_s = (transfer_s - write_s).max(0.0);
    bench.say(&format!("{name}: written in {write_s:.3} s, iperf3 would take {transfer_s:.3} s"))?;
    let (lag_name, lag) = (format!("{name}_lag"), Sampled::median(seen.lag_s.clone())?);
    if least_s > 0.0 {
        let against = "what iperf3 would take for the file, less what writing it took";
        bench.result(&lag_name, "s", against, Compared::new(lag, least_s))?;
    } else {
        bench.figure(&lag_name, "s", lag)?;
    }
    let above = seen.lag_s.iter().map(|lag_s| 100.0 * (lag_s - least_s) / transfer_s).collect();
    bench.figure(&format!("{name}_lag_above_least"), "% of the transfer", Sampled::median(above)?)?;
    Ok(seen)
}

/// Measures the rate, and the processor seconds of both daemons, against the same without encryption.
fn against_open(bench: &Bench, network: &Network) -> anyhow::Result<()> {
    let hosts = (network.host("n1"), network.host("n2"));
    let (mut encrypted, mut open) = (Seen::default(), Seen::default());
    let medians = bench.alternate(
        || replicate(bench, hosts, CONFIG, &mut encrypted),
        || replicate(bench, hosts, OPEN_CONFIG, &mut open),
    )?;
    let against = "the same, authenticated and not encrypted";
    bench.result("replicate_encrypted", "GB/s", against, medians)?;
    // The first round was discarded.
    let of = |seen: &Seen| Sampled::median(seen.cpu_s_per_gb[1..].to_vec());
    // Two figures and no ratio: with a small file the clock's ticks may have counted nothing.
    bench.figure("replicate_encrypted_cpu", "s/GB", of(&encrypted)?)?;
    bench.figure("replicate_authenticated_cpu", "s/GB", of(&open)?)
}

/// Writes a file at one of two fresh nodes; returns GB/s from its open to `replicated`.
fn replicate(
    bench: &Bench,
    (from, to): (&Host, &Host),
    config: &str,
    seen: &mut Seen,
) -> anyhow::Result<f64> {
    let size_bytes = bench.options.size_bytes;
    let nodes = Nodes::start(&[from, to], nodes::tier1_for_one_file(&bench.options), config)?;
    nodes.wait_for_partner(0)?;
    let run = nodes.mount(0).join("run");
    fs::create_dir(&run).context("make the run's directory")?;
    nodes.take_tier3_away()?;
    let pids = [nodes.pid(0)?, nodes.pid(1)?];
    let cpu = || Ok::<_, anyhow::Error>(cpu_s(pids[0])? + cpu_s(pids[1])?);
    let path = run.join("step1.pt");
    let limit = REPLICATED_MIN + Duration::from_secs(size_bytes / SLOWEST_BYTES_PER_S);
    let (cpu_before_s, started) = (cpu()?, Instant::now());
    files::write(&path, size_bytes)?;
    let closed = Instant::now();
    let replicated = wait_for_state(&File::open(&path)?, &["replicated"], limit)?;
    let spent_s = cpu()? - cpu_before_s;
    let received_bytes = nodes.metric(1, "tidemark_replica_received_bytes_total");
    ensure!(
        received_bytes >= size_bytes as f64,
        "{received_bytes} of {size_bytes} bytes were kept at the other node"
    );
    let gigabytes = size_bytes as f64 / 1e9;
    seen.write_s.push((closed - started).as_secs_f64());
    seen.lag_s.push((replicated - closed).as_secs_f64());
    seen.cpu_s_per_gb.push(spent_s / gigabytes);
    Ok(gigabytes / (replicated - started).as_secs_f64())
}

/// Measures processor seconds of both ends for each GB, against scp and rsync from memory to memory.
fn against_copiers(bench: &Bench, network: &Network, cpu: &Sampled) -> anyhow::Result<()> {
    let size_bytes = bench.options.size_bytes;
    let (from, to) = (network.host("n1"), network.host("n2"));
    let folder = tempfile::Builder::new()
        .prefix("tidemark-bench-")
        .tempdir_in(&bench.options.baseline)
        .context("make a folder beside the baseline")?;
    let (source, target) = (folder.path().join("source"), folder.path().join("target"));
    files::write_new(&source, size_bytes)?;
    for (name, copier) in [
        ("scp", Copier::scp(from, to, &source, &target)?),
        ("rsync", Copier::rsync(from, to, &source, &target)?),
    ] {
        match copier {
            Err(missing) => bench.say(&format!("left out: {missing}"))?,
            Ok(copier) => {
                let rounds = bench.options.rounds.min(RIVAL_ROUNDS_MAX);
                let (rates, costs) = copy(copier, rounds, size_bytes)?;
                bench.say(&format!("{name}: {:.3} GB/s", rates.number))?;
                let against = format!("{name} from memory to memory, both ends");
                let compared = Compared::new(cpu.clone(), costs);
                bench.result(&format!("replicate_cpu_against_{name}"), "s/GB", &against, compared)?;
            }
        }
    }
    Ok(())
}

/// Returns GB/s and processor seconds for each GB of some copies, after a discarded first copy.
fn copy(mut copier: Copier, rounds: usize, size_bytes: u64) -> anyhow::Result<(Sampled, Sampled)> {
    copier.copy(size_bytes)?;
    let (mut rates, mut costs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        files::warm(size_bytes)?;
        let copied = copier.copy(size_bytes)?;
        rates.push(copied.gb_per_s);
        costs.push(copied.cpu_s_per_gb);
    }
    Ok((Sampled::median(rates)?, Sampled::median(costs)?))
}
