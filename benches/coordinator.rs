//! What do many nodes cost the coordinator?
//!
//! Owns: the memory and the processor time of a coordinator that many simulated nodes join, beat to and publish to. Does not own: the
//! simulated nodes ([`Simulated`]), its loss (`succession`).
//!
//! The simulated nodes are connections of this process over loopback TCP to a real daemon: the coordinator's whole work is measured, the
//! cost of a node on its own machine is not. Both ends share the processors, and each simulated node has its own two connections with the
//! coordinator, as real nodes have.

use anyhow::{Context, ensure};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};
use tidemark_benches::Bench;
use tidemark_benches::compare::Sampled;
use tidemark_benches::crowd::{Counts, Crowd};
use tidemark_benches::footprint::{anonymous_bytes, cpu_s};
use tidemark_benches::simulated::{self, Simulated};
use tidemark_protocol::membership::interval_ms;
use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_transport::Address;

/// Size of Tier-1, whose 32nd is the journal of names.
const TIER1: &str = "512MiB";
/// Nothing becomes a checkpoint here.
const CONFIG: &str = "[save]\nsettle_s = 3600.0\n";
/// Numbers of simulated nodes, one after the other. The last is the size of a large cluster. Where a daemon has descriptors for fewer, the
/// last is that number.
const SIMULATED: [usize; 4] = [128, 1_024, 4_096, 16_384];
const SMOKE_SIMULATED: [usize; 2] = [10, 30];
const BEATS_FOR: Duration = Duration::from_secs(10);
const SMOKE_BEATS_FOR: Duration = Duration::from_secs(1);
/// Time for joining after which larger numbers are not tried.
const JOIN_MAX: Duration = Duration::from_secs(120);

pub(crate) fn run(mut bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "coordinator starts its own daemon: leave --path out");
    // Names, no bytes.
    bench.options.size_bytes = 0;
    let smoke = bench.options.smoke;
    let (counts, beats_for) =
        if smoke { (&SMOKE_SIMULATED[..], SMOKE_BEATS_FOR) } else { (&SIMULATED[..], BEATS_FOR) };
    let (room, room_here) = (simulated::joined_max(), simulated::in_a_process_max());
    let flags = ["--name", "coordinator", "--insecure"].map(str::to_owned).to_vec();
    let options = DaemonOptions {
        tier1: TIER1.to_owned(),
        config: Some(CONFIG.to_owned()),
        flags,
        ..DaemonOptions::default()
    };
    let daemon = Daemon::start(options);
    let pid = daemon.serving_pid().context("a daemon that is ready serves")?;
    let listen = daemon.ready().listen.clone();
    let coordinator = Address { node: "coordinator".to_owned(), address: listen };
    let mut nodes = Simulated::new(coordinator.clone(), 0)?;
    // Nodes for which this process has no room run in another process.
    let mut crowd: Option<Crowd> = None;
    let mut before = 0;
    let empty_bytes = anonymous_bytes(pid)?;
    for &count in counts {
        let count = count.min(room);
        if count == before {
            break;
        }
        let (first, before_s, started) = (nodes.count(), cpu_s(pid)?, Instant::now());
        let here = count.min(room_here);
        let (joins, mut why) = nodes.join(here - first, JOIN_MAX)?;
        if why.is_none() && count > here {
            let (started, said) = Crowd::start(&coordinator, here, count - here, JOIN_MAX)?;
            (crowd, why) = (Some(started), said);
        }
        let (took_s, spent_s) = (started.elapsed().as_secs_f64(), cpu_s(pid)? - before_s);
        if let Some(why) = why {
            bench.say(&format!(
                "left out: {count} nodes and more: in {took_s:.0} s the coordinator took {spent_s:.0} s of a core and {} MiB, and then: \
                 {why}",
                anonymous_bytes(pid)?.saturating_sub(empty_bytes) >> 20,
            ))?;
            break;
        }
        let name = |what: &str| format!("coordinator_{count}_nodes_{what}");
        let more = (count - before) as f64;
        before = count;
        bench.figure(&name("joined"), "1/s", more / took_s)?;
        bench.figure(&name("join_p99"), "ms", Sampled::percentile(joins, 99)?.times(1e3))?;
        bench.figure(&name("join_cpu"), "ms of a core for each", spent_s * 1e3 / more)?;

        let (before_s, started) = (cpu_s(pid)?, Instant::now());
        let mut counts = |nodes: &Simulated| {
            let others = crowd.as_mut().map_or(Ok(Counts::default()), Crowd::counts)?;
            Ok::<_, anyhow::Error>(Counts::of(&nodes.counted).and(others))
        };
        let until = counts(&nodes)?;
        nodes.counted.beat_us.store(0, Ordering::Relaxed);
        thread::sleep(beats_for);
        let (took_s, spent_s) = (started.elapsed().as_secs_f64(), cpu_s(pid)? - before_s);
        let now = counts(&nodes)?;
        let beats = now.beats - until.beats;
        bench.say(&format!(
            "{count} nodes: {:.0} of {:.0} beats/s were answered, {} failed; the coordinator said {} words, {} MB, so far",
            beats as f64 / took_s,
            count as f64 * 1000.0 / interval_ms(count) as f64,
            now.failed - until.failed,
            now.heard,
            now.heard_bytes / 1_000_000,
        ))?;
        bench.figure(&name("beat_cpu"), "cores", spent_s / took_s)?;
        bench.figure(&name("beat_cpu_each"), "us of a core", spent_s * 1e6 / beats.max(1) as f64)?;
        bench.figure(
            &name("beat_longest"),
            "ms",
            nodes.counted.beat_us.load(Ordering::Relaxed) as f64 / 1e3,
        )?;

        let (before_s, started) = (cpu_s(pid)?, Instant::now());
        let done = nodes.publish(first).and_then(|published| {
            let (took_s, spent_s) = (started.elapsed().as_secs_f64(), cpu_s(pid)? - before_s);
            let started = Instant::now();
            let looked = nodes.look(first)?;
            Ok((published, took_s, spent_s, looked, started.elapsed().as_secs_f64()))
        });
        let (published, publish_s, spent_s, looked, look_s) = match done {
            Ok(done) => done,
            Err(error) => {
                bench.say(&format!(
                    "left out: what {count} nodes publish and look for, and more nodes: {error:#}"
                ))?;
                break;
            }
        };
        bench.figure(&name("publish"), "1/s", published.len() as f64 / publish_s)?;
        bench.figure(
            &name("publish_cpu"),
            "us of a core for each",
            spent_s * 1e6 / published.len() as f64,
        )?;
        bench.figure(&name("publish_p99"), "ms", Sampled::percentile(published, 99)?.times(1e3))?;
        bench.figure(&name("look"), "1/s", looked.len() as f64 / look_s)?;
        bench.figure(&name("look_p99"), "ms", Sampled::percentile(looked, 99)?.times(1e3))?;
        let grown_bytes = anonymous_bytes(pid)?.saturating_sub(empty_bytes);
        bench.figure(&name("memory"), "MiB", grown_bytes as f64 / f64::from(1 << 20))?;
    }
    Ok(())
}
