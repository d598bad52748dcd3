//! `ckptctl show`: everything about one checkpoint.

use crate::context::{Context, Failure};
use crate::table;
use crate::text::{self, clean};
use std::ffi::OsString;
use std::io::{self, Write};
use tidemark_api::ShowRequest;
use tidemark_protocol::report::{ExitCode, File, Show};
use tidemark_protocol::size::Shown;

/// Show one checkpoint: why it is complete, what it waits for, where it is
///
/// Exits 4 where it cannot be read whole.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A path, RUN@STEP, @STEP, RUN@latest or latest; exits 2 with a list where it means several
    checkpoint: OsString,
    /// List its files, with checksums and where each copy is
    #[arg(long)]
    files: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &mut Context) -> Result<ExitCode, Failure> {
        let checkpoint = context.selector(&self.checkpoint).await?;
        let show = context.client.ask(&ShowRequest { checkpoint, files: self.files }).await?;
        context.print(&show, print)?;
        Ok(show.exit_code())
    }
}

fn print(show: &Show, out: &mut dyn Write) -> io::Result<()> {
    let checkpoint = &show.checkpoint;
    let step = text::step(checkpoint.step);
    writeln!(out, "      path: {}", clean(&checkpoint.path))?;
    writeln!(
        out,
        "checkpoint: run {}  step {step}  timeline {}  version {}",
        clean(checkpoint.run.as_deref().unwrap_or("-")),
        checkpoint.timeline,
        checkpoint.version
    )?;
    writeln!(out, "     state: {}", checkpoint.state.word())?;
    let (framework, files) = (clean(checkpoint.framework.as_deref().unwrap_or("-")), checkpoint.files);
    writeln!(out, "   content: {files} files, {}, {framework}", Shown(checkpoint.bytes))?;
    if let Some(evidence) = &checkpoint.evidence {
        let detail =
            show.evidence_detail.as_deref().map(|detail| format!(": {}", clean(detail))).unwrap_or_default();
        writeln!(out, "  evidence: {}{detail}", clean(evidence))?;
    }
    if let Some(why) = &show.lost {
        writeln!(out, "      LOST: {}", clean(why))?;
    }
    for what in &show.waits_for {
        writeln!(out, "  waits for: {}", clean(what))?;
    }
    let copies = [
        ("host", checkpoint.copies.host),
        ("peer", checkpoint.copies.peer),
        ("object", checkpoint.copies.object),
    ];
    for (place, there) in copies {
        if there.files > 0 {
            writeln!(out, "      copy: {place:<6}  {}/{files} files, {}", there.files, Shown(there.bytes))?;
        }
    }
    if !show.participants.is_empty() {
        writeln!(out, "     nodes: {}", clean(&show.participants.join(", ")))?;
    }
    for (name, key) in
        [("attempt", &show.attempt), ("marker", &show.marker_key), ("manifest", &show.manifest_key)]
    {
        if let Some(key) = key {
            writeln!(out, "{name:>10}: {}", clean(key))?;
        }
    }
    if let Some(previous) = &show.previous {
        writeln!(out, "  previous: {}", text::reference(Some(previous)))?;
    }
    if checkpoint.pinned {
        writeln!(out, "       pin: pinned")?;
    }
    if let Some(files) = &show.files {
        writeln!(out)?;
        files_table(files, out)?;
    }
    Ok(())
}

fn files_table(files: &[File], out: &mut dyn Write) -> io::Result<()> {
    let mut table = table::new(["PATH", "SIZE", "CRC64NVME", "STATE", "NODE", "HOST", "PEER", "OBJECT"]);
    let mut names = table::Names::default();
    for file in files {
        let held = |files: u64| table::text(if files > 0 { "yes" } else { "-" });
        table.add_row([
            names.cell(&file.path, table::PATH_CHARS),
            table::bytes(file.bytes),
            table::text(&file.crc64nvme.map_or_else(|| "-".to_owned(), |crc| crc.to_string())),
            table::text(&file.state),
            table::text(&file.node),
            held(file.copies.host.files),
            held(file.copies.peer.files),
            held(file.copies.object.files),
        ]);
    }
    names.write(&table, out)
}
