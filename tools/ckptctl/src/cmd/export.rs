//! `ckptctl export`: a checkpoint as ordinary files, outside of the mount.

use crate::context::{Context, Failure};
use crate::progress::Bar;
use crate::text::{self, clean};
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use tidemark_api::ExportRequest;
use tidemark_protocol::report::{ExitCode, Export};
use tidemark_protocol::selector::VersionNumber;
use tidemark_protocol::size::Shown;

/// Write a committed checkpoint into a new directory outside of the mount
///
/// Every byte is verified, from this node's memory or else from Tier-3. The daemon writes: DIRECTORY is a path of its machine,
/// and appears, whole and synced, when everything is there. Names, hard links, modes, times and user attributes are as they were saved.
/// Versions do not record symbolic links and empty directories: those of the mount come along where it shows this version.
/// Exits 1 where DIRECTORY is there already, 3 where no such version is committed, 4 where no copy of a file verifies, and 5 where
/// Tier-3 is away.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A path, RUN@STEP, @STEP, RUN@latest or latest; exits 2 with a list where it means several
    checkpoint: OsString,
    /// A name that is free, in a directory that is there
    directory: PathBuf,
    /// An older version of the checkpoint, as `ckptctl ls --all` shows it; without it the newest that is committed
    #[arg(long, value_name = "TIMELINE.VERSION")]
    version: Option<VersionNumber>,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let checkpoint = context.selector(&self.checkpoint).await?;
        let absolute = std::path::absolute(&self.directory).ok();
        let directory = absolute.and_then(|directory| directory.into_os_string().into_string().ok());
        let directory = directory.ok_or(Failure::Directory { directory: self.directory })?;
        let request = ExportRequest { checkpoint, version: self.version, directory };
        let mut bar = Bar::new("export");
        let result = context.client.work(&request, |progress| bar.show(&progress)).await;
        drop(bar);
        context.print(&result?, print)?;
        Ok(ExitCode::Done)
    }
}

fn print(export: &Export, out: &mut dyn Write) -> io::Result<()> {
    for what in &export.left_out {
        writeln!(out, "left out: {}", clean(what))?;
    }
    writeln!(
        out,
        "{}: {} files, {}, {} of them from memory  ({})",
        clean(&export.directory),
        export.files,
        Shown(export.bytes),
        export.host_files,
        text::reference(Some(&export.checkpoint))
    )
}
