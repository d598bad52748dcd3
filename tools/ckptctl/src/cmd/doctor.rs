//! `ckptctl doctor`: what this machine can and cannot do for Tidemark.

use crate::context::{Context, Failure};
use crate::table::{self, Tone};
use crate::text::clean;
use std::io::{self, Write};
use tidemark_protocol::report::{CheckVerdict, Doctor, ExitCode};

/// Try what Tidemark needs from this machine, and say how to mend it
///
/// Each check makes a real call; nothing is guessed from versions. Exits 1 when one failed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

impl Args {
    pub(crate) async fn run(self, context: &Context) -> Result<ExitCode, Failure> {
        let doctor = context.client.doctor().await?;
        context.print(&doctor, print)?;
        Ok(doctor.exit_code())
    }
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
