//! `ckptctl pin` and `ckptctl unpin`: what retention must not touch.

use crate::context::{Context, Failure};
use crate::text::clean;
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::PinRequest;
use tidemark_protocol::report::{ExitCode, Pin};

/// Keep the newest committed version of a checkpoint, whatever retention says
///
/// The pin is an object in Tier-3: it holds for whoever uses that prefix, until `ckptctl unpin`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A path, RUN@STEP, @STEP, RUN@latest or latest; exits 2 with a list where it means several
    checkpoint: OsString,
}

impl Args {
    pub(crate) async fn run(self, pinned: bool, context: &mut Context) -> Result<ExitCode, Failure> {
        let checkpoint = context.selector(&self.checkpoint).await?;
        let by = format!("uid {} on {}", rustix::process::getuid().as_raw(), host_name());
        let pin = context.client.ask(&PinRequest { checkpoint, pinned, by }).await?;
        context.print(&pin, print)?;
        Ok(ExitCode::Done)
    }
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn print(pin: &Pin, out: &mut dyn Write) -> io::Result<()> {
    let (path, version) = (clean(&pin.checkpoint.path), pin.checkpoint.version);
    let before = if pin.already { "was, and " } else { "" };
    let now = if pin.pinned { "is pinned" } else { "is not pinned" };
    writeln!(out, "{path} (version {version}) {before}{now}")
}
