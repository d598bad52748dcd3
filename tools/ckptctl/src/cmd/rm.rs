//! `ckptctl rm`: give a checkpoint up.

use crate::context::{Context, Failure};
use crate::progress::Bar;
use crate::text::{because, clean};
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::RemoveRequest;
use tidemark_protocol::report::{ExitCode, Removal};

/// Remove a committed checkpoint, from the mount and from Tier-3
///
/// Refused, with nothing done, while a version of it has to stay: the newest two committed versions of a run, the newest two
/// that the mount shows, what is pinned, what a program has open. A symbolic link is refused, too: what it leads to is not
/// removed by its name. Exits 1 where names or versions stay. There is no way back from it; `rm -r` in the mount has one,
/// `ckptctl undelete`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A path, RUN@STEP, @STEP, RUN@latest or latest; exits 2 with a list where it means several
    checkpoint: OsString,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let checkpoint = context.selector_of_name(&self.checkpoint).await?;
        let mut bar = Bar::new("rm");
        let result = context.client.work(&RemoveRequest { checkpoint }, |progress| bar.show(&progress)).await;
        drop(bar);
        let removal = result?;
        context.print(&removal, print)?;
        Ok(removal.exit_code())
    }
}

fn print(removal: &Removal, out: &mut dyn Write) -> io::Result<()> {
    let path = clean(&removal.path);
    if removal.left == 0 {
        return writeln!(out, "{path} is removed: {} committed versions", removal.versions);
    }
    let why = because(removal.trouble.as_deref());
    writeln!(out, "{} versions of {path} are still in Tier-3{why}", removal.left)
}
