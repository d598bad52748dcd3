//! `ckptctl flush`: bring what is written to Tier-3 now.

use crate::context::{Context, Failure};
use crate::progress::Bar;
use crate::text::{self, clean};
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::FlushRequest;
use tidemark_protocol::report::{ExitCode, Flush};
use tidemark_protocol::size::Shown;

/// Upload every closed file below PATH now, without waiting for it to settle
///
/// A file in a checkpoint stands for all of that checkpoint. If the checkpoint's framework leaves a marker, index or count, the flush
/// waits for that. Any other checkpoint is made complete by this command, as far as it is closed. Without --wait: lists what is not
/// committed yet, and exits 0. With --wait: exits 0 when all are committed or there was nothing to do. Exits 1 with a list when
/// something is still open, mapped, torn or incomplete, has a name too long for Tier-3, or is bad in Tier-3 and could not be written
/// again. Exits 1, too, when another daemon took Tier-3 over, and 5 when Tier-3 was away at the time-out.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Default: the whole mount
    path: Option<OsString>,
    /// Return when all is committed
    #[arg(short, long)]
    wait: bool,
    /// Seconds to wait; without it, until done
    #[arg(long, value_name = "S", requires = "wait")]
    timeout: Option<u64>,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let place = context.place_or_root(self.path.as_deref()).await?;
        let request = FlushRequest { place, wait: self.wait, timeout_s: self.timeout };
        let mut bar = Bar::new("flush");
        let result = context.client.work(&request, |progress| bar.show(&progress)).await;
        drop(bar);
        let flush = result?;
        context.print(&flush, print)?;
        Ok(flush.exit_code())
    }
}

fn print(flush: &Flush, out: &mut dyn Write) -> io::Result<()> {
    for checkpoint in &flush.committed {
        writeln!(out, "committed {}  ({})", clean(&checkpoint.path), text::reference(Some(checkpoint)))?;
    }
    for pending in &flush.pending {
        writeln!(out, "{:<9} {}: {}", pending.reason.word(), clean(&pending.path), clean(&pending.what))?;
    }
    let (files, bytes) = (flush.uploaded_files, Shown(flush.uploaded_bytes));
    match (flush.waited, flush.pending.len()) {
        (false, 0) => writeln!(out, "nothing is left to do: {files} files, {bytes} uploaded"),
        (false, left) => {
            writeln!(out, "{left} not committed yet; `ckptctl flush --wait` stays until they are")
        }
        (true, 0) => writeln!(out, "all committed: {files} files, {bytes} uploaded"),
        (true, left) => {
            let why = match (flush.timed_out, flush.tier3_away) {
                (true, true) => " at the time-out; Tier-3 does not answer",
                (true, false) => " at the time-out",
                (false, _) => "",
            };
            writeln!(out, "{left} not committed{why}: {files} files, {bytes} uploaded")
        }
    }
}
