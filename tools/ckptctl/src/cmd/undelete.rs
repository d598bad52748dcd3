//! `ckptctl undelete`: bring back what the job removed, and what was torn and hidden.

use crate::context::{Context, Failure};
use crate::text::clean;
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::UndeleteRequest;
use tidemark_protocol::report::{ExitCode, Undelete};

/// Bring a checkpoint back that was removed from the mount, or was torn and hidden
///
/// A removed checkpoint gets its newest committed version, as it was; the bytes come from Tier-3 when they are opened. If only
/// a part was removed, that part comes back. A torn checkpoint comes back from below .tidemark/torn. Refused while something
/// else has the name.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The path that it had, RUN@STEP or @STEP; exits 2 with a list if several hidden checkpoints have that step
    checkpoint: OsString,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let checkpoint = context.selector_of_name(&self.checkpoint).await?;
        let undelete = context.client.ask(&UndeleteRequest { checkpoint }).await?;
        context.print(&undelete, print)?;
        Ok(ExitCode::Done)
    }
}

fn print(undelete: &Undelete, out: &mut dyn Write) -> io::Result<()> {
    let (path, version) = (clean(&undelete.checkpoint.path), undelete.checkpoint.version);
    writeln!(out, "{path} (version {version}) is back: {} files", undelete.files)
}
