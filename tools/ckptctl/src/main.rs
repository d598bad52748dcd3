//! `ckptctl`: asks the daemon of this machine, and shows what it answers.
//!
//! Owns: the exit status. Does not own: the commands (`cmd`), what they share (`context`), tables (`table`), the
//! words of the command line (`args`).

mod args;
mod bench_mount;
mod cmd;
mod context;
mod progress;
mod table;
mod text;

use clap::Parser;
use context::{Context, Failure};
use std::io::{self, Write};
use tidemark_protocol::report::ExitCode;

fn main() -> std::process::ExitCode {
    let args = match args::Args::try_parse() {
        Ok(args) => args,
        Err(usage) => {
            // Help and version come here too, and go to stdout. A closed pipe is the reader's choice.
            let _ = usage.print();
            let code = if usage.use_stderr() { ExitCode::Usage } else { ExitCode::Done };
            return code.number().into();
        }
    };
    // A single thread is enough, because the daemon does the work.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let ended = match runtime {
        Ok(runtime) => runtime.block_on(cmd::run(args.command, &mut Context::new(args.common))),
        Err(source) => Err(Failure::Runtime { source }),
    };
    let code = match ended {
        Ok(code) => code,
        Err(failure) => {
            let code = failure.exit_code();
            // The reader of stdout is gone: as with any filter, that is not an error.
            if code != ExitCode::Done {
                // Without stderr there is nowhere left to say it; the exit status still does.
                let _ = writeln!(anstream::stderr(), "ckptctl: {}", text::chain(&failure));
            }
            code
        }
    };
    // Writes the rest of the buffer; a failure here means that the reader is gone.
    let _ = io::stdout().flush();
    code.number().into()
}
