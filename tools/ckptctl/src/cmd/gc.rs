//! `ckptctl gc`: what retention lets go of.

use crate::context::{Context, Failure};
use crate::progress::Bar;
use crate::table::{self, Tone};
use crate::text;
use std::io::{self, Write};
use tidemark_api::GcRequest;
use tidemark_protocol::report::{ExitCode, Gc};
use tidemark_protocol::size::Shown;

/// Give up what the retention settings let go of, and say of every committed version why it stays or goes
///
/// The daemon does the same by itself every few seconds; this returns when nothing is left to do. The newest two committed
/// versions of a run always stay, and so do the newest two that the mount shows, pinned ones and those that a program has
/// open. Exits 5 when Tier-3 did not take it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only say what would go
    #[arg(short = 'n', long)]
    dry_run: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let mut bar = Bar::new("gc");
        let request = GcRequest { dry_run: self.dry_run };
        let result = context.client.work(&request, |progress| bar.show(&progress)).await;
        drop(bar);
        let gc = result?;
        context.print(&gc, print)?;
        Ok(gc.exit_code())
    }
}

fn print(gc: &Gc, out: &mut dyn Write) -> io::Result<()> {
    if gc.rows.is_empty() {
        return writeln!(out, " nothing is committed");
    }
    let mut table = table::new(["RUN", "STEP", "VER", "PATH", "SIZE", "", "REASON"]);
    let mut names = table::Names::default();
    for row in &gc.rows {
        let verdict = if row.given_up {
            table::word(if gc.dry_run { "would go" } else { "goes" }, Tone::Doubtful)
        } else {
            table::word("stays", Tone::Good)
        };
        let checkpoint = &row.checkpoint;
        table.add_row([
            names.cell(&row.run, table::RUN_CHARS),
            table::number(text::step(checkpoint.step)),
            table::number(format!("{}.{}", checkpoint.timeline, checkpoint.version)),
            names.cell(&checkpoint.path, table::PATH_CHARS),
            table::bytes(row.bytes),
            verdict,
            table::text(&row.reason),
        ]);
    }
    names.write(&table, out)?;
    let going = gc.rows.iter().filter(|row| row.given_up);
    let (count, bytes) = going.fold((0_u64, 0_u64), |sum, row| (sum.0 + 1, sum.1 + row.bytes));
    match (gc.dry_run, gc.left) {
        (true, _) => writeln!(out, "{count} versions, {}, would be given up", Shown(bytes)),
        (false, 0) => writeln!(out, "{count} versions, {}, were given up", Shown(bytes)),
        (false, left) => {
            let why = text::because(gc.trouble.as_deref());
            writeln!(out, "{left} of {count} versions are still there{why}")
        }
    }
}
