//! `ckptctl recover`: which checkpoint a job comes back to.

use crate::context::{Context, Failure};
use crate::table::{self, Tone};
use crate::text;
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::RecoverRequest;
use tidemark_protocol::recovery::Standpoint;
use tidemark_protocol::report::{ExitCode, Recovery};

/// Show which checkpoint each run would resume from, and why newer ones were skipped
///
/// The choice is the newest version that is proven whole, can be read, and is in the tree. The mount agrees by itself: a
/// checkpoint that is torn, or cannot be read whole any more, is hidden. A checkpoint that the job removed or saved over has
/// no row. If the job removed a part, the row says how much is left. Exits 4 if a run has checkpoints and none of them can
/// be loaded, unless the job removed a part of each.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only what is at or below it, or the checkpoint in which it lies
    path: Option<OsString>,
    /// Print the choice, and change nothing
    #[arg(long, required = true)]
    plan: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        debug_assert!(self.plan, "the command line requires it");
        let place = context.place_or_root(self.path.as_deref()).await?;
        let recovery = context.client.ask(&RecoverRequest { place }).await?;
        context.print(&recovery, print)?;
        Ok(recovery.exit_code())
    }
}

fn print(recovery: &Recovery, out: &mut dyn Write) -> io::Result<()> {
    if recovery.runs.is_empty() {
        return writeln!(out, " no checkpoints here");
    }
    let mut table = table::new(["RUN", "STEP", "VER", "PATH", "", "HOST", "PEER", "OBJECT", "REASON"]);
    let mut names = table::Names::default();
    for run in &recovery.runs {
        for row in &run.versions {
            let checkpoint = &row.checkpoint;
            let standpoint = match row.standpoint {
                Standpoint::Chosen => table::word("chosen", Tone::Good),
                Standpoint::PassedOver => table::word("passed over", Tone::Bad),
                Standpoint::Older => table::word("older", Tone::Doubtful),
            };
            table.add_row([
                names.cell(&run.run, table::RUN_CHARS),
                table::number(text::step(checkpoint.step)),
                table::number(format!("{}.{}", checkpoint.timeline, checkpoint.version)),
                names.cell(&checkpoint.path, table::PATH_CHARS),
                standpoint,
                table::text(&text::part(checkpoint.copies.host, checkpoint)),
                table::text(&text::part(checkpoint.copies.peer, checkpoint)),
                table::text(&text::part(checkpoint.copies.object, checkpoint)),
                table::text(&row.reason),
            ]);
        }
    }
    names.write(&table, out)?;
    let removed: u64 = recovery.runs.iter().map(|run| run.removed).sum();
    if removed > 0 {
        writeln!(out, " {removed} more in Tier-3 that were removed; `ckptctl ls --all` lists them")?;
    }
    let mut none = recovery.runs.iter().filter(|run| run.chosen.is_none());
    none.try_for_each(|run| {
        let what = if run.is_lost() {
            "can be loaded"
        } else {
            "is whole: its job, or a person, removed a part of each"
        };
        writeln!(out, "{}: NONE of its checkpoints {what}", text::clean(&run.run))
    })
}
