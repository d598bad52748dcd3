//! `ckptctl bench`: how fast is it here, against a place that is known?
//!
//! Owns: the words, waiting for warm memory, the table. Does not own: measuring (`bench_mount`).

use crate::bench_mount::{self, BenchMount, BenchReport};
use crate::context::{Context, Failure, is_on_mount};
use crate::table;
use anyhow::Context as _;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use tidemark_api::StatusRequest;
use tidemark_protocol::report::{ExitCode, TierState};
use tidemark_protocol::size::{self, Shown};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Measure this machine
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    Mount(Mount),
}

/// Write, read, map and save in both places in turn, and compare the medians
///
/// Waits until Tier-1's memory is warm: pages that are touched for the first time are slow on a virtual machine. Warm the
/// baseline's memory too, or the ratios flatter the mount.
#[derive(Debug, clap::Args)]
struct Mount {
    /// A folder on the mount
    #[arg(long, value_name = "DIR")]
    path: PathBuf,
    /// A folder to compare with, such as /dev/shm
    #[arg(long, value_name = "DIR")]
    baseline: PathBuf,
    /// Size of the file in each place: bytes or K, M, G, T, powers of 1024
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = size::parse)]
    size: u64,
    /// Begin at once, warm or not
    #[arg(long)]
    no_wait: bool,
}

/// Signals that end a command in order.
struct Interrupt([Signal; 3]);

impl Interrupt {
    fn watch() -> io::Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Self([interrupt?, terminate?, hangup?]))
    }

    async fn comes(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.0;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let What::Mount(Mount { path, baseline, size, no_wait }) = self.what;
        // A daemon that is away would never become warm, and says neither its mount nor its budget.
        let status = context.client.get(StatusRequest).await?;
        let bench = |error: io::Error| Failure::Bench(anyhow::Error::from(error));
        let mount = Path::new(&status.mount.path);
        let on_mount = is_on_mount(&path, mount)
            .with_context(|| format!("look at {}", path.display()))
            .map_err(Failure::Bench)?;
        if !on_mount {
            return Err(Failure::NotOnMount { path, mount: mount.to_owned() });
        }
        let tier1 = status.tiers.iter().find(|tier| tier.name == "tier1");
        bench_mount::check_size(size, tier1.and_then(|tier| tier.size_bytes), &baseline)
            .map_err(Failure::Bench)?;
        let mut interrupt = Interrupt::watch().map_err(bench)?;
        let places = bench_mount::Places::of(&path, &baseline);
        let (path_of, baseline_of) = (path.clone(), baseline.clone());
        let client = context.client.clone();
        let runtime = tokio::runtime::Handle::current();
        let measured = tokio::task::spawn_blocking(move || {
            let wait_until_warm = || {
                let status = runtime.block_on(client.get(StatusRequest));
                status.is_ok_and(|status| status.tiers.iter().all(|tier| tier.state != TierState::Warming))
            };
            let bench =
                BenchMount { path, baseline, size_bytes: size, no_wait, wait_until_warm: &wait_until_warm };
            bench_mount::run(bench)
        });
        let report = tokio::select! {
            report = measured => report.map_err(anyhow::Error::from).and_then(|report| report),
            () = interrupt.comes() => {
                let removed = places.remove();
                let ended = anyhow::anyhow!("interrupted, and nothing is left in {} and {}", path_of.display(), baseline_of.display());
                Err(removed.err().unwrap_or(ended))
            }
        };
        let report = report.map_err(Failure::Bench)?;
        context.print(&report, print)?;
        Ok(ExitCode::Done)
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a measured speed, rounded to be read"
)]
fn speed(bytes_per_s: f64) -> String {
    format!("{}/s", Shown(bytes_per_s as u64))
}

fn print(report: &BenchReport, out: &mut dyn Write) -> io::Result<()> {
    let mut table = table::new(["FIGURE", "MOUNT", "BASELINE", "RATIO"]);
    for figure in &report.figures {
        table.add_row([
            table::text(figure.name),
            table::number(speed(figure.mount_bytes_per_s)),
            table::number(speed(figure.baseline_bytes_per_s)),
            table::number(format!("{:.2}", figure.ratio)),
        ]);
    }
    table::write(&table, out)?;
    writeln!(out, " memcpy: {}", speed(report.memcpy_bytes_per_s))
}
