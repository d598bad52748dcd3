//! `ckptctl doctor`: checks of this machine for Tidemark.

use crate::context::{Context, Failure};
use crate::table::{self, Tone};
use crate::text::{self, clean};
use std::io::{self, Write};
use std::process::{Command, Stdio};
use tidemark_api::DoctorRequest;
use tidemark_api::client::ClientError;
use tidemark_protocol::report::{Check, CheckVerdict, Doctor, ExitCode, ProblemCode};

/// Try what Tidemark needs from this machine, and say how to mend it
///
/// Each check makes a real call; nothing is guessed from versions. Exits 1 when one failed. If no daemon runs, ckptd checks the machine
/// without one, as this user; a daemon that does not answer is a check that failed. The problems of `ckptctl status` are checks that
/// failed, too.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let doctor = match context.client.get(DoctorRequest).await {
            Err(away @ ClientError::NoDaemon { .. }) => {
                let Some(doctor) = without_daemon() else { return Err(away.into()) };
                let _ = writeln!(
                    anstream::stderr(),
                    "ckptctl: no daemon answers; this is the machine without one"
                );
                doctor
            }
            // The daemon is there, and does not answer: the machine may be well, the node is not.
            Err(silent) if silent.is_away() => {
                let mut doctor = without_daemon().unwrap_or_else(|| Doctor { checks: Vec::new() });
                doctor.checks.push(Check {
                    name: ProblemCode::NoAnswer.word().to_owned(),
                    verdict: CheckVerdict::Fail,
                    what: text::chain(&silent),
                    fix: Some("`ckptctl status` says what the daemon does; look at its log".to_owned()),
                });
                doctor
            }
            asked => asked?,
        };
        context.print(&doctor, print)?;
        Ok(doctor.exit_code())
    }
}

/// Asks the ckptd beside this binary, or else that of the search path, to check this machine; `None` without such a ckptd.
fn without_daemon() -> Option<Doctor> {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join("ckptd")));
    let ckptd = beside.filter(|path| path.is_file()).unwrap_or_else(|| "ckptd".into());
    let output =
        Command::new(ckptd).arg("doctor").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    serde_json::from_slice(&output.stdout).ok()
}

fn print(doctor: &Doctor, out: &mut dyn Write) -> io::Result<()> {
    let mut table = table::new(["CHECK", "VERDICT", "WHAT"]);
    for check in &doctor.checks {
        let tone = match check.verdict {
            CheckVerdict::Ok => Tone::Good,
            CheckVerdict::Warn | CheckVerdict::Skipped | CheckVerdict::Unknown => Tone::Doubtful,
            CheckVerdict::Fail => Tone::Bad,
        };
        table.add_row([
            table::text(&check.name),
            table::word(check.verdict.word(), tone),
            table::text(&check.what),
        ]);
    }
    table::write(&table, out)?;
    for check in &doctor.checks {
        if let (CheckVerdict::Warn | CheckVerdict::Fail, Some(fix)) = (check.verdict, &check.fix) {
            writeln!(out, "\n {}: {}", clean(&check.name), clean(fix))?;
        }
    }
    let count = |verdict| doctor.checks.iter().filter(|check| check.verdict == verdict).count();
    writeln!(out, "\n {} failed, {} warnings", count(CheckVerdict::Fail), count(CheckVerdict::Warn))
}
