//! `ckptctl commit`: a person's word that a checkpoint is whole.

use crate::context::{Context, Failure};
use crate::text::clean;
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::CommitRequest;
use tidemark_protocol::report::{Commit, ExitCode};

/// Say that the checkpoint at PATH is whole, so that it can be committed
///
/// For checkpoints that leave no marker, index or count. Refused while a file of it is open, mapped or torn. The commit
/// itself follows when its bytes are in Tier-3: `ckptctl flush --wait PATH` waits for it.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The checkpoint's directory or file
    path: OsString,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let place = context.place(&self.path).await?;
        let commit = context.client.ask(&CommitRequest { place }).await?;
        context.print(&commit, print)?;
        Ok(ExitCode::Done)
    }
}

fn print(commit: &Commit, out: &mut dyn Write) -> io::Result<()> {
    let (path, state) = (clean(&commit.checkpoint.path), commit.state.word());
    let before = if commit.already { "was complete before, and " } else { "" };
    writeln!(out, "{path} (version {}) {before}is {state}", commit.checkpoint.version)
}
