//! `ckptctl ls`: which checkpoints there are.

use crate::context::{Context, Failure};
use crate::table::{self, Tone};
use crate::text;
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::ListRequest;
use tidemark_protocol::report::{Checkpoint, CheckpointState, ExitCode};

/// List checkpoints, their states and where their copies are
///
/// Exits 0 with an empty list where there is none, and 3 where nothing has that path.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only what is at or below it, or the checkpoint in which it lies
    path: Option<OsString>,
    /// Files that belong to no checkpoint too, and versions that newer ones replaced
    #[arg(short, long)]
    all: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let place = context.place_or_root(self.path.as_deref()).await?;
        let rows = context.client.ask(&ListRequest { place, all: self.all }).await?;
        context.print(&rows, print)?;
        Ok(ExitCode::Done)
    }
}

fn print(rows: &Vec<Checkpoint>, out: &mut dyn Write) -> io::Result<()> {
    if rows.is_empty() {
        return writeln!(out, " no checkpoints here");
    }
    let now_ms = text::now_ms();
    let mut table = table::new([
        "RUN",
        "STEP",
        "VER",
        "PATH",
        "AGE",
        "SIZE",
        "FILES",
        "FRAMEWORK",
        "STATE",
        "EVIDENCE",
        "HOST",
        "PEER",
        "OBJECT",
        "PIN",
    ]);
    let mut names = table::Names::default();
    for row in rows {
        let age = row.closed_ms.map_or_else(|| "-".to_owned(), |closed_ms| text::age(closed_ms, now_ms));
        table.add_row([
            names.cell(row.run.as_deref().unwrap_or("-"), table::RUN_CHARS),
            table::number(text::step(row.step)),
            table::number(format!("{}.{}", row.timeline, row.version)),
            names.cell(&row.path, table::PATH_CHARS),
            table::number(age),
            table::bytes(row.bytes),
            table::number(row.files),
            table::text(row.framework.as_deref().unwrap_or("-")),
            state(row.state),
            table::text(row.evidence.as_deref().unwrap_or("-")),
            table::text(&text::part(row.copies.host, row)),
            table::text(&text::part(row.copies.peer, row)),
            table::text(&text::part(row.copies.object, row)),
            table::text(if row.pinned { "pinned" } else { "-" }),
        ]);
    }
    names.write(&table, out)
}

fn state(state: CheckpointState) -> comfy_table::Cell {
    let tone = match state {
        CheckpointState::Committed | CheckpointState::Replicated => Tone::Good,
        CheckpointState::Torn => Tone::Bad,
        CheckpointState::Open
        | CheckpointState::Settled
        | CheckpointState::Complete
        | CheckpointState::Prepared
        | CheckpointState::Loose
        | CheckpointState::Unknown => Tone::Doubtful,
    };
    table::word(state.word(), tone)
}
