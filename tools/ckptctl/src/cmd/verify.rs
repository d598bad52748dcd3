//! `ckptctl verify`: are the bytes what they were?

use crate::context::{Context, Failure};
use crate::progress::Bar;
use crate::text::clean;
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::VerifyRequest;
use tidemark_protocol::report::{ExitCode, Verify};
use tidemark_protocol::size::Shown;

/// Read copies again, compare them with their checksums, and repair bad ones
///
/// A bad host copy is replaced from another node or Tier-3; a bad or missing object is written again from memory,
/// another node or another object.
/// Exits 0 when every file ends with a good copy, repaired ones included; 4 when one has none, or when Tier-3 does not
/// say of a committed checkpoint what it must; 5 when something did not answer; 1 when an object is bad and could not be
/// written again; 3 when there is no file at that path. A file that is still written has no checksum: it is listed as unchecked.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A path, RUN@STEP, @STEP, RUN@latest or latest; exits 2 with a list where it means several. Default: everything
    checkpoint: Option<OsString>,
    /// Read the copies in Tier-3 too, which costs their transfer
    #[arg(long)]
    deep: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let checkpoint = match &self.checkpoint {
            Some(text) => Some(context.selector(text).await?),
            None => None,
        };
        let request = VerifyRequest { checkpoint, deep: self.deep };
        let mut bar = Bar::new("verify");
        let result = context.client.work(&request, |progress| bar.show(&progress)).await;
        drop(bar);
        let verify = result?;
        context.print(&verify, print)?;
        Ok(verify.exit_code())
    }
}

fn print(verify: &Verify, out: &mut dyn Write) -> io::Result<()> {
    for repair in &verify.repaired {
        let (copy, path, what, from) =
            (clean(&repair.copy), clean(&repair.path), clean(&repair.what), clean(&repair.from));
        writeln!(out, "repaired  {path}: the {copy} copy was bad ({what}); made again from {from}")?;
    }
    for file in &verify.unchecked {
        writeln!(out, "unchecked {}: {}", clean(&file.path), clean(&file.what))?;
    }
    for file in &verify.unrecoverable {
        writeln!(out, "LOST      {}: {}", clean(&file.path), clean(&file.what))?;
    }
    for broken in &verify.broken {
        let (path, invariant, what) = (clean(&broken.path), clean(&broken.invariant), clean(&broken.what));
        writeln!(out, "BROKEN    {path}: not so that {}: {what}", invariant.replace('_', " "))?;
    }
    let end = match verify.exit_code() {
        ExitCode::Done if verify.is_empty() => "nothing to verify",
        ExitCode::Done if verify.unchecked.is_empty() => "ok",
        ExitCode::Done | ExitCode::Unavailable => "NOT ALL",
        _ => "BAD",
    };
    writeln!(
        out,
        "{end}: {} checkpoints, {} files, {} copies, {} read; {} repaired, {} unchecked, {} without a good copy",
        verify.checkpoints,
        verify.files,
        verify.copies,
        Shown(verify.bytes),
        verify.repaired.len(),
        verify.unchecked.len(),
        verify.unrecoverable.len()
    )
}
