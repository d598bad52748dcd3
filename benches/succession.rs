//! How long is a cluster of many nodes without a coordinator, and what do their names cost etcd?
//!
//! Owns: the loss of a coordinator that many simulated nodes had joined and published to, the time until another one answers, the memory of
//! etcd and of the new coordinator. Does not own: the simulated nodes ([`Simulated`]), what a coordinator costs that stays (`catalog`).
//!
//! The coordinator is killed, and its keeper with it, as if its machine had lost power. The simulated nodes join the next one once it
//! coordinates, since only a daemon follows etcd. Daemons, etcd and nodes share the processors.

use anyhow::{Context, ensure};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tidemark_benches::Bench;
use tidemark_benches::footprint::anonymous_bytes;
use tidemark_benches::simulated::{self, Simulated};
use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::etcd::Etcd;
use tidemark_tests::process;
use tidemark_transport::Address;

const TIER1: &str = "512MiB";
/// Numbers of simulated nodes. Where a process has descriptors for fewer, the last is left out.
const NODES: [usize; 4] = [128, 1_024, 4_096, 16_384];
const SMOKE_NODES: [usize; 1] = [10];
const JOIN_MAX: Duration = Duration::from_secs(120);
/// Time limit of a succession: a lease's end and the joins of all nodes.
const SUCCESSION_MAX: Duration = Duration::from_secs(60);
/// Time for etcd to have what was published last. If it is not enough, the last look-ups fail.
const KEPT_AFTER: Duration = Duration::from_secs(3);
const LEADS: &str = "this node is the coordinator";
const HEARD: &str = "all nodes have been heard";

pub(crate) fn run(mut bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "succession starts its own daemons: leave --path out");
    // Names, no bytes.
    bench.options.size_bytes = 0;
    let counts = if bench.options.smoke { &SMOKE_NODES[..] } else { &NODES };
    let room = simulated::in_a_process_max();
    for count in counts {
        if *count > room {
            bench.say(&format!("left out: {count} nodes: a process has descriptors for {room}"))?;
            break;
        }
        // On a machine that many nodes overload, the first daemon may lose its role before it is killed.
        if let Err(error) = succession(&bench, *count) {
            ensure!(!bench.options.smoke, "{count} nodes: {error:#}");
            bench.say(&format!("left out: {count} nodes and more: {error:#}"))?;
            break;
        }
    }
    Ok(())
}

fn succession(bench: &Bench, count: usize) -> anyhow::Result<()> {
    let Some(etcd) = Etcd::start() else {
        return bench.say("left out: no etcd is installed (apt-get install etcd-server)");
    };
    let tier3 = tempfile::tempdir().context("a folder for Tier-3")?;
    let mut first = start("first", &etcd, &tier3);
    until("the first daemon does not coordinate", || first.log().contains(LEADS))?;
    let second = start("second", &etcd, &tier3);
    let address = |node: &str, daemon: &Daemon| Address {
        node: node.to_owned(),
        address: daemon.ready().listen.clone(),
    };
    let mut nodes = Simulated::new(address("first", &first), 0)?;
    let (_, why) = nodes.join(count, JOIN_MAX)?;
    ensure!(why.is_none(), "{count} nodes do not join: {}", why.unwrap_or_default());
    nodes.publish(0)?;
    thread::sleep(KEPT_AFTER);

    let lost = Instant::now();
    first.kill9();
    until("the second daemon does not coordinate", || second.log().contains(LEADS))?;
    let leads_s = lost.elapsed().as_secs_f64();
    nodes.follow(address("second", &second))?;
    until("the second daemon has not heard all nodes", || second.log().contains(HEARD))?;
    let heard_s = lost.elapsed().as_secs_f64();
    let looked = nodes.look(0).context("a name is not as it was before")?;
    let answered_s = lost.elapsed().as_secs_f64();

    let name = |what: &str| format!("succession_{count}_nodes_{what}");
    bench.figure(&name("leads"), "s", leads_s)?;
    bench.figure(&name("heard"), "s", heard_s)?;
    bench.figure(&name("all_names_looked_up"), "s", answered_s)?;
    bench.figure(&name("look"), "1/s", looked.len() as f64 / (answered_s - heard_s))?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    bench.figure(&name("etcd_memory"), "MiB", mib(anonymous_bytes(etcd.pid())?))?;
    let pid = second.serving_pid().context("a daemon that is ready serves")?;
    bench.figure(&name("coordinator_memory"), "MiB", mib(anonymous_bytes(pid)?))
}

fn start(name: &str, etcd: &Etcd, tier3: &TempDir) -> Daemon {
    let flags = ["--name", name, "--insecure", "--etcd", &etcd.url("bench")].map(str::to_owned).to_vec();
    let tier3 = Some(format!("file://{}", tier3.path().display()));
    Daemon::start(DaemonOptions { tier1: TIER1.to_owned(), tier3, flags, ..DaemonOptions::default() })
}

fn until(what: &'static str, mut is_so: impl FnMut() -> bool) -> anyhow::Result<()> {
    process::until(SUCCESSION_MAX, || is_so().then_some(())).context(what)
}
