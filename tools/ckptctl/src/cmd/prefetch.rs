//! `ckptctl prefetch`: bring a checkpoint into memory before a job opens it.

use crate::context::{Context, Failure};
use crate::progress::Bar;
use crate::text::clean;
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::PrefetchRequest;
use tidemark_protocol::report::{ExitCode, Prefetch};
use tidemark_protocol::size::Shown;

/// Fetch the files of a checkpoint that are not here, so that it opens at once
///
/// Other committed checkpoints give way to it, what is not committed never does, and what it has fetched stays for ten
/// minutes. Exits 0 when all of it is here, 1 when there is no room for some of it or some could not be fetched, and 3
/// when there is no file at that path.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A path, RUN@STEP, @STEP, RUN@latest or latest; exits 2 with a list where it means several
    checkpoint: OsString,
    /// Return at once; what comes of it is in the daemon's log and in `ckptctl show`
    #[arg(long)]
    no_wait: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let checkpoint = context.selector(&self.checkpoint).await?;
        let request = PrefetchRequest { checkpoint, wait: !self.no_wait };
        let mut bar = Bar::new("prefetch");
        let result = context.client.work(&request, |progress| bar.show(&progress)).await;
        drop(bar);
        let prefetch = result?;
        context.print(&prefetch, print)?;
        Ok(prefetch.exit_code())
    }
}

fn print(prefetch: &Prefetch, out: &mut dyn Write) -> io::Result<()> {
    for (word, files) in [("no room", &prefetch.no_room), ("FAILED", &prefetch.failed)] {
        for file in files {
            writeln!(
                out,
                "{word:<8} {} ({}): {}",
                clean(&file.path),
                Shown(file.size_bytes),
                clean(&file.what)
            )?;
        }
    }
    if !prefetch.waited {
        let (files, bytes) = (prefetch.total_files, Shown(prefetch.total_bytes));
        return writeln!(out, "under way: {files} files, {bytes}, less what is here");
    }
    writeln!(
        out,
        "{} files fetched, {}; {} were here, {}; {} not fetched",
        prefetch.fetched_files,
        Shown(prefetch.fetched_bytes),
        prefetch.here_files,
        Shown(prefetch.here_bytes),
        prefetch.no_room.len() + prefetch.failed.len()
    )
}
