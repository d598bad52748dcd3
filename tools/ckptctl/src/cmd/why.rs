//! `ckptctl why`: what was concluded about a path, and from which facts.

use crate::context::{Context, Failure};
use crate::table::{self, bytes, number, text};
use crate::text::clean;
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::WhyRequest;
use tidemark_protocol::report::{ExitCode, Why};

/// Say what was concluded about a path, and from which facts
///
/// Why a checkpoint counts as whole, incomplete or torn, why it is visible or hidden, who wrote it and how they ended.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A checkpoint, or a file
    path: OsString,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let place = context.place(&self.path).await?;
        let why = context.client.ask(&WhyRequest { place }).await?;
        context.print(&why, print)?;
        Ok(ExitCode::Done)
    }
}

fn print(why: &Why, out: &mut dyn Write) -> io::Result<()> {
    let sight = if why.in_sight { "in sight" } else { "out of sight" };
    writeln!(out, "    path: {}", clean(&why.path))?;
    writeln!(out, "   state: {}, {sight}", why.state.word())?;
    writeln!(out, " because: {}", clean(&why.verdict))?;
    if let Some(reason) = &why.sight {
        writeln!(out, "{:>8}: {}", if why.in_sight { "stays" } else { "went" }, clean(reason))?;
    }
    let instead = if why.fallback { "something whole could be loaded" } else { "nothing whole is there" };
    writeln!(out, " instead: {instead}")?;
    if !why.writers.is_empty() {
        writeln!(out)?;
        let mut table = table::new(["PROCESS", "RANK", "FILES", "END", "SESSION"]);
        for writer in &why.writers {
            let rank = match (writer.rank, writer.world_size) {
                (Some(rank), Some(size)) => format!("{rank} of {size}"),
                (Some(rank), None) => rank.to_string(),
                (None, _) => "-".to_owned(),
            };
            table.add_row([
                number(writer.process),
                text(&rank),
                number(writer.files),
                text(&writer.end),
                text(&writer.session),
            ]);
        }
        table::write(&table, out)?;
    }
    if !why.files.is_empty() {
        writeln!(out)?;
        let mut table = table::new(["FILE", "BYTES", "STATE", "RENAMED", "COMMITTED"]);
        let word = |yes: bool| if yes { "yes" } else { "no" };
        for file in &why.files {
            table.add_row([
                text(&file.path),
                bytes(file.bytes),
                text(&file.state),
                text(word(file.renamed)),
                text(word(file.committed)),
            ]);
        }
        table::write(&table, out)?;
    }
    if why.files_left_out > 0 {
        writeln!(out, "and {} more files", why.files_left_out)?;
    }
    Ok(())
}
