//! `ckptctl status`: is everything all right, and if not, what to do.

use crate::context::{Context, Failure};
use crate::table::{self, Tone};
use crate::text;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use tidemark_control::api::{KEEPER_FILE_NAME, STATUS_FILE_NAME};
use tidemark_protocol::report::{ExitCode, NodeState, Problem, ReplicationStatus, RunStatus, Status};

/// A status is a few kilobytes; one that is larger was not written by us.
const STATUS_BYTES_MAX: u64 = 16 << 20;

/// Show how this node is, and what a restart would load
///
/// Lines `status` and `action` appear only where something is wrong. When no daemon answers, the last known status is
/// shown, a note goes to stderr, and the exit status is 5.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let away = match context.client.status().await {
            Ok(status) => {
                context.print(&status, print)?;
                return Ok(ExitCode::Done);
            }
            Err(error) => error,
        };
        let Some(last_known) = away.is_away().then(|| last_known(&context.state_dir)).flatten() else {
            return Err(away.into());
        };
        let age = text::age(last_known.written_ms, text::now_ms());
        // A note only: without stderr the exit status still tells.
        let _ =
            writeln!(anstream::stderr(), "ckptctl: {}\nckptctl: last known, {age} ago:", text::chain(&away));
        let mut last_known = last_known;
        last_known.state = NodeState::Stopped;
        last_known.problems = keeper_says(&context.state_dir).into_iter().collect();
        context.print(&last_known, print)?;
        Ok(ExitCode::Unavailable)
    }
}

/// What the daemon wrote before it went away; none where there is nothing that can be read.
fn last_known(state_dir: &Path) -> Option<Status> {
    read(&state_dir.join(STATUS_FILE_NAME))
}

/// What the keeper writes while its daemons die again and again.
#[derive(Debug, serde::Deserialize)]
struct CrashLoop {
    keeper_pid: u32,
    deaths: u64,
    last_death: String,
    next_start_ms: u64,
}

fn keeper_says(state_dir: &Path) -> Option<Problem> {
    let said: CrashLoop = read(&state_dir.join(KEEPER_FILE_NAME))?;
    let CrashLoop { keeper_pid, deaths, last_death, next_start_ms } = said;
    Some(Problem {
        code: "crash_loop".to_owned(),
        what: format!(
            "the daemon dies again and again ({deaths} times, the last: {last_death}); keeper {keeper_pid} keeps the mount \
             and open files, and starts it again every {next_start_ms} ms"
        ),
        action: "read its log; `ckptd upgrade --binary PATH` starts another binary on what is kept"
            .to_owned(),
    })
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    let mut text = Vec::new();
    File::open(path).ok()?.take(STATUS_BYTES_MAX).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

fn print(status: &Status, out: &mut dyn Write) -> io::Result<()> {
    let keeper = status.keeper_pid.map(|pid| format!(", keeper {pid}")).unwrap_or_default();
    let (node, version, pid) = (text::clean(&status.node), text::clean(&status.version), status.pid);
    writeln!(out, "   node: {node}  (ckptd {version}, pid {pid}{keeper})")?;
    writeln!(out, "  state: {}", state(status.state))?;
    for problem in &status.problems {
        let (what, code) = (text::clean(&problem.what), text::clean(&problem.code));
        writeln!(out, " status: {what}  [{code}]")?;
        writeln!(out, " action: {}", text::clean(&problem.action))?;
    }
    writeln!(out, "  mount: {}  ({})", text::clean(&status.mount.path), status.mount.mode.word())?;
    if let Some(replication) = &status.replication {
        writeln!(out, " copies: {}", copies(replication))?;
    }
    writeln!(out)?;
    table::write(&super::tiers::table(&status.tiers), out)?;
    if status.runs.is_empty() {
        writeln!(out, "\n   runs: none yet")?;
    } else {
        writeln!(out)?;
        table::write(&runs(&status.runs), out)?;
    }
    writeln!(out)?;
    match status.problems.len() {
        0 => writeln!(out, "problems: none"),
        count => writeln!(out, "problems: {count}"),
    }
}

/// In capitals and coloured, since it is what the eye looks for.
fn state(state: NodeState) -> String {
    let colour = match state {
        NodeState::Serving => 32,
        NodeState::Starting | NodeState::Draining => 33,
        NodeState::Degraded | NodeState::Stopped | NodeState::Unknown => 31,
    };
    format!("\x1b[{colour}m{}\x1b[0m", state.word().to_uppercase())
}

/// Where this node's files are copied to, and what is not there.
fn copies(replication: &ReplicationStatus) -> String {
    let at = replication
        .partner
        .as_deref()
        .map_or_else(|| "nowhere".to_owned(), |at| format!("at {}", text::clean(at)));
    if replication.lacking_files == 0 {
        return at;
    }
    let bytes = tidemark_protocol::size::Shown(replication.lacking_bytes);
    let since = replication.since_ms.map(|since_ms| format!(" for {}", text::age(since_ms, text::now_ms())));
    let why = replication.why.as_deref().map_or_else(|| "they are on their way".into(), text::clean);
    let (files, plural) = (replication.lacking_files, if replication.lacking_files == 1 { "" } else { "s" });
    format!("{at}, {files} file{plural} ({bytes}) lacking{}: {why}", since.unwrap_or_default())
}

fn runs(runs: &[RunStatus]) -> comfy_table::Table {
    let mut table = table::new(["RUN", "LATEST", "COMMITTED", "RECOVERABLE", "LAG"]);
    for run in runs {
        let recoverable = text::reference(run.recoverable.as_ref());
        let tone = if run.recoverable.is_some() { Tone::Good } else { Tone::Bad };
        table.add_row([
            table::text(&run.run),
            table::text(&text::reference(run.latest.as_ref())),
            table::text(&text::reference(run.watermark.as_ref())),
            table::word(&recoverable, tone),
            table::text(&lag(run)),
        ]);
    }
    table
}

fn lag(run: &RunStatus) -> String {
    if run.lag_versions == 0 {
        return "-".to_owned();
    }
    let versions = if run.lag_versions == 1 { "version" } else { "versions" };
    let bytes = tidemark_protocol::size::Shown(run.lag_bytes);
    let since = std::time::Duration::try_from_secs_f64(run.lag_seconds).unwrap_or_default().as_secs();
    format!("{} {versions}, {bytes}, {}", run.lag_versions, text::duration(since))
}
