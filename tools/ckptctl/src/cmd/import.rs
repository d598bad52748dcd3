//! `ckptctl import`: checkpoints that others wrote into Tier-3.

use crate::context::{Context, Failure};
use crate::progress::Bar;
use crate::table::{self, Tone};
use crate::text::clean;
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::ImportRequest;
use tidemark_protocol::report::{ExitCode, Import, ImportOutcome};

/// Adopt checkpoints that are in Tier-3 and that Tidemark did not write
///
/// Everything below PATH that is recognised as a checkpoint becomes a committed version, and is on the mount below --as. No byte is
/// copied: every byte is read once and hashed, and verified at each read from then on. Tidemark never changes or deletes the
/// imported files: `rm` and retention only forget them. Exits 1 if a checkpoint was refused, and says why: it lacks files that its
/// index lists, or its name or run is in use. Running the command again imports the rest.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A directory or file below the daemon's Tier-3 URL, relative to it or with it
    path: String,
    /// Where it is on the mount: a run, or a checkpoint in one. Without it: the last part of PATH, in the mount's root
    #[arg(long = "as", value_name = "RUN/NAME")]
    name: Option<OsString>,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let to = match &self.name {
            Some(name) => Some(context.name(name).await?),
            None => None,
        };
        let request = ImportRequest { from: self.path, to };
        let mut bar = Bar::new("import");
        let result = context.client.work(&request, |progress| bar.show(&progress)).await;
        drop(bar);
        let import = result?;
        context.print(&import, print)?;
        Ok(import.exit_code())
    }
}

fn print(import: &Import, out: &mut dyn Write) -> io::Result<()> {
    let mut table = table::new(["PATH", "FILES", "SIZE", "", "REASON"]);
    let mut names = table::Names::default();
    for row in &import.rows {
        let tone = match row.outcome {
            ImportOutcome::Imported | ImportOutcome::Already => Tone::Good,
            ImportOutcome::Refused | ImportOutcome::Unknown => Tone::Bad,
        };
        table.add_row([
            names.cell(&row.path, table::PATH_CHARS),
            table::number(row.files),
            table::bytes(row.bytes),
            table::word(row.outcome.word(), tone),
            table::text(&row.reason),
        ]);
    }
    names.write(&table, out)?;
    let count = |outcome| import.rows.iter().filter(|row| row.outcome == outcome).count();
    let (imported, refused) = (count(ImportOutcome::Imported), count(ImportOutcome::Refused));
    writeln!(
        out,
        "{imported} imported from {}, {refused} refused, {} there before; {} files belong to no checkpoint",
        clean(&import.from),
        count(ImportOutcome::Already),
        import.loose
    )
}
