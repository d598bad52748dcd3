//! `ckptctl bench`: how fast is it here, against a place that is known?
//!
//! Owns: the words, waiting for warm memory, the table. Does not own: measuring (`bench_mount`).

use crate::bench_mount::{self, BenchMount, BenchReport};
use crate::context::{Context, Failure};
use crate::table;
use std::io::{self, Write};
use std::path::PathBuf;
use tidemark_protocol::report::{ExitCode, TierState};
use tidemark_protocol::size::{self, Shown};

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
    /// Of the file that each place holds: bytes or K, M, G, T, powers of 1024
    #[arg(long, value_name = "SIZE", default_value = "4GiB", value_parser = size::parse)]
    size: u64,
    /// Begin at once, warm or not
    #[arg(long)]
    no_wait: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let What::Mount(Mount { path, baseline, size, no_wait }) = self.what;
        if !no_wait {
            // A daemon that is away would never become warm.
            context.client.status().await?;
        }
        let client = context.client.clone();
        let runtime = tokio::runtime::Handle::current();
        let measured = tokio::task::spawn_blocking(move || {
            let wait_until_warm = || {
                let status = runtime.block_on(client.status());
                status.is_ok_and(|status| status.tiers.iter().all(|tier| tier.state != TierState::Warming))
            };
            let bench =
                BenchMount { path, baseline, size_bytes: size, no_wait, wait_until_warm: &wait_until_warm };
            bench_mount::run(bench)
        });
        let report =
            measured.await.map_err(anyhow::Error::from).and_then(|report| report).map_err(Failure::Bench)?;
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
