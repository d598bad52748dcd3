//! `ckptctl events`: what happened on this node.

use crate::args::Format;
use crate::context::{Context, Failure};
use crate::text::{self, clean};
use std::io::{self, Write};
use tidemark_api::EventsRequest;
use tidemark_protocol::report::{Event, EventLevel, ExitCode};

/// Show what happened on this node, oldest first
///
/// With -o json: one object a line. A gap in the numbers means that the daemon has forgotten older ones.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Go on as they happen, until interrupted
    #[arg(short, long)]
    follow: bool,
    /// Only events with a greater number. Each daemon counts from 1: of a number that it has not reached, all
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    since: u64,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let mut written = Ok(());
        let request = EventsRequest { since: self.since, follow: self.follow };
        let each = |event| {
            written = print(&event, context.format);
            written.is_ok()
        };
        context.client.events(request, each).await?;
        written?;
        Ok(ExitCode::Done)
    }
}

/// Flushed for each event, so that a pipe sees it when it happens.
fn print(event: &Event, format: Format) -> io::Result<()> {
    let mut out = anstream::stdout().lock();
    match format {
        Format::Json => {
            serde_json::to_writer(&mut out, event)?;
            writeln!(out)?;
        }
        Format::Table => {
            let colour = match event.level {
                EventLevel::Info => "",
                EventLevel::Warn => "\x1b[33m",
                EventLevel::Error => "\x1b[31m",
            };
            let path = event.path.as_deref().map(|path| format!("{}: ", clean(path))).unwrap_or_default();
            let (time, level, kind) = (text::time(event.time_ms), event.level.word(), clean(&event.kind));
            writeln!(out, "{time} {colour}{level:<5}\x1b[0m {kind:<10} {path}{}", clean(&event.what))?;
        }
    }
    out.flush()
}
