//! `ckptctl status`: is everything all right, and if not, what to do.

use crate::context::{Context, Failure};
use crate::table::{self, Tone};
use crate::text;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::time::Duration;
use tidemark_api::client::ClientError;
use tidemark_api::{KEEPER_FILE_NAME, LOCK_FILE_NAME, STATUS_FILE_NAME, StatusRequest};
use tidemark_protocol::report::{
    CheckpointRef, ExitCode, Loss, NodeState, Problem, ProblemCode, ReplicationStatus, RunStatus, Status,
    exit_code_of,
};

/// A status is a few kilobytes; one that is larger was not written by us.
const STATUS_BYTES_MAX: u64 = 16 << 20;

/// Time after which a silent daemon is examined: the caller hears within two seconds that something is wrong.
const SILENT_AFTER: Duration = Duration::from_millis(1500);
/// A daemon that has much to do, or few processors, may answer until then.
const PATIENCE: Duration = Duration::from_millis(8500);

/// Show how this node is, and what a restart would load
///
/// Lines `status` and `action` appear only where something is wrong. When no daemon answers, the last known status is
/// shown, without what was in its memory if that is gone; a note goes to stderr, and the exit status is 5. A daemon that lives and
/// does not answer is UNKNOWN.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Exit with 0 only where nothing is wrong: else 6 fenced, 4 lost or corrupt, 5 something is away, 1 any other problem
    #[arg(long)]
    exit_code: bool,
}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let away = match ask(context).await {
            Asked::Answer(answer) => match *answer {
                Ok(status) => {
                    context.print(&status, print)?;
                    return Ok(if self.exit_code { exit_code_of(&status.problems) } else { ExitCode::Done });
                }
                Err(error) => error,
            },
            Asked::Hangs(status) => {
                context.print(&*status, print)?;
                return Ok(ExitCode::Unavailable);
            }
        };
        let Some(last_known) = away.is_away().then(|| last_known(&context.state_dir)).flatten() else {
            return Err(away.into());
        };
        let age = text::age(last_known.written_ms, text::now_ms());
        // A note only: without stderr the exit status still tells.
        let _ =
            writeln!(anstream::stderr(), "ckptctl: {}\nckptctl: last known, {age} ago:", text::chain(&away));
        let mut last_known = last_known;
        if is_memory_gone(&context.state_dir) {
            let unclean = unclean_end(&mut last_known);
            last_known.problems.extend(unclean);
        }
        last_known.state = NodeState::Stopped;
        last_known.problems.extend(keeper_says(&context.state_dir));
        context.print(&last_known, print)?;
        Ok(ExitCode::Unavailable)
    }
}

/// Result of asking the daemon.
enum Asked {
    Answer(Box<Result<Status, ClientError>>),
    /// The daemon lives and does not answer: its last known status, with that as its problem.
    Hangs(Box<Status>),
}

/// Asks the daemon. Reports a silent daemon before waiting longer for it; does not wait for a stopped daemon.
async fn ask(context: &Context) -> Asked {
    let mut answer = std::pin::pin!(context.client.get(StatusRequest));
    if let Ok(answer) = tokio::time::timeout(SILENT_AFTER, answer.as_mut()).await {
        return Asked::Answer(Box::new(answer));
    }
    // Without a process of that number it is being started again, which is waited for as ever.
    let Some((known, state)) =
        last_known(&context.state_dir).and_then(|known| state_of(known.pid).map(|state| (known, state)))
    else {
        return Asked::Answer(Box::new(answer.await));
    };
    if !is_stopped(state) {
        // A note only: without stderr the exit status still tells.
        let _ = writeln!(
            anstream::stderr(),
            "ckptctl: the daemon (process {}) has not answered for {} s; waiting {} s more",
            known.pid,
            SILENT_AFTER.as_secs_f32(),
            PATIENCE.as_secs_f32()
        );
        if let Ok(answer) = tokio::time::timeout(PATIENCE, answer).await {
            return Asked::Answer(Box::new(answer));
        }
    }
    Asked::Hangs(Box::new(hanging(known, state, text::now_ms())))
}

/// The state of a process that is a daemon of ours, as a letter; none when there is none.
fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    state_in(&stat)
}

/// Field 3 of a stat line (proc_pid_stat(5)) of a process named ckptd.
fn state_in(stat: &str) -> Option<char> {
    let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
    rest.trim_start().chars().next().filter(|_| name == "ckptd")
}

/// By SIGSTOP, or by a debugger.
fn is_stopped(state: char) -> bool {
    matches!(state, 'T' | 't')
}

/// Builds the status shown for a daemon that lives and does not answer.
fn hanging(mut known: Status, state: char, now_ms: i64) -> Status {
    let age = text::age(known.written_ms, now_ms);
    let why = match state {
        'T' => "it was stopped by a signal (SIGSTOP)",
        't' => "a debugger has stopped it",
        'D' => "it waits in the kernel, for a device or for memory",
        'R' => "it runs, or waits for a processor",
        _ => "all of it waits for something",
    };
    let what = format!(
        "the daemon (process {}) does not answer; {why}; what follows was known {age} ago",
        known.pid
    );
    let action = if is_stopped(state) {
        format!("kill -CONT {}, or end the debugger; saves and opens wait until then", known.pid)
    } else {
        "look at its log and at the load of this machine; its keeper replaces it after 30 s in which requests wait and nothing \
         explains its silence"
            .to_owned()
    };
    known.state = NodeState::Unknown;
    known.problems.insert(0, Problem::new(ProblemCode::NoAnswer, what, action));
    known
}

/// Reads the last status that the daemon wrote; `None` if there is none that can be read.
fn last_known(state_dir: &Path) -> Option<Status> {
    read(&state_dir.join(STATUS_FILE_NAME))
}

/// Whether no process keeps the daemon's memory: the lock goes to the keeper with it, and is free when both are gone.
fn is_memory_gone(state_dir: &Path) -> bool {
    let Ok(lock) = File::open(state_dir.join(LOCK_FILE_NAME)) else { return false };
    // Closed at the end of this function, and with that given back.
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockShared).is_ok()
}

/// Takes what was in memory only out of the status, and says what that was, and what only other nodes have now.
fn unclean_end(last_known: &mut Status) -> Option<Problem> {
    let Loss { gone, copied } = last_known.lose_memory();
    let cost = [gone, copied].concat();
    let what = format!("the daemon ended before all was in Tier-3: {}", cost.join("; "));
    let action = "start it again; `ckptctl recover --plan` then says what each job loads";
    (!cost.is_empty()).then(|| Problem::new(ProblemCode::UncleanEnd, what, action))
}

/// State that the keeper writes while its daemons die again and again.
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
    Some(Problem::new(
        ProblemCode::CrashLoop,
        format!(
            "the daemon dies again and again ({deaths} times, the last: {last_death}); keeper {keeper_pid} keeps the mount \
             and open files, and starts it again every {next_start_ms} ms"
        ),
        "read its log; `ckptd upgrade --binary PATH` starts another binary on what is kept",
    ))
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
        runs(&status.runs, out)?;
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

fn runs(runs: &[RunStatus], out: &mut dyn Write) -> io::Result<()> {
    let mut table = table::new(["RUN", "LATEST", "COMMITTED", "RECOVERABLE", "LAG"]);
    let mut names = table::Names::default();
    for run in runs {
        let tone = if run.recoverable.is_some() { Tone::Good } else { Tone::Bad };
        // Where there is no step it is a path.
        let mut reference =
            |found: Option<&CheckpointRef>| names.cell(&text::reference(found), table::RUN_CHARS);
        let (latest, watermark) = (reference(run.latest.as_ref()), reference(run.watermark.as_ref()));
        let recoverable = table::toned(reference(run.recoverable.as_ref()), tone);
        table.add_row([
            names.cell(&run.run, table::RUN_CHARS),
            latest,
            watermark,
            recoverable,
            table::text(&lag(run)),
        ]);
    }
    names.write(&table, out)
}

fn lag(run: &RunStatus) -> String {
    if run.lag_versions == 0 {
        return "-".to_owned();
    }
    let versions = if run.lag_versions == 1 { "version" } else { "versions" };
    let bytes = tidemark_protocol::size::Shown(run.lag_bytes);
    let since = Duration::try_from_secs_f64(run.lag_seconds).unwrap_or_default().as_secs();
    format!("{} {versions}, {bytes}, {}", run.lag_versions, text::duration(since))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_named_ckptd_is_a_daemon() {
        assert_eq!(state_in("7 (ckptd) T 1 7 7 0"), Some('T'));
        for other in ["", "7", "7 (ckptd", "7 (ckptd) ", "7 (python3) S 1", "7 (x) (ckptd) S 1"] {
            assert_eq!(state_in(other), None, "{other}");
        }
        assert!(is_stopped('T') && is_stopped('t') && !is_stopped('S') && !is_stopped('R'));
    }
}
