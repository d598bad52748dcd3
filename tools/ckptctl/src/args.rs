//! The words of the command line that all commands share.

use crate::cmd;
use clap::{Parser, ValueEnum};
use std::path::PathBuf;

/// Where the daemon is unless told otherwise.
const STATE_DIR: &str = "/run/tidemark";

const EXIT_CODES: &str = "\
Exit status: 0 done, 1 failed, 2 usage, 3 not found, 4 not recoverable or corrupt, 5 unavailable, 6 fenced.

CHECKPOINT is a path on the mount, RUN@STEP, @STEP, RUN@latest, or latest where there is one run; one that means
several is refused, with a list. Relative paths start at the working directory when it is on the mount, else at the
mount's root. A path that another working directory has is refused: write it with the mount's own path.";

/// Shows which checkpoints are safe, and where they are.
#[derive(Debug, Parser)]
#[command(name = "ckptctl", version, max_term_width = 110, after_help = EXIT_CODES)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) common: Common,
    /// Without one: status.
    #[command(subcommand)]
    pub(crate) command: Option<cmd::Command>,
}

#[derive(Debug, clap::Args)]
pub(crate) struct Common {
    /// The state directory of the daemon to ask.
    #[arg(long, global = true, value_name = "DIR", default_value = STATE_DIR, env = "TIDEMARK_STATE_DIR")]
    pub(crate) state_dir: PathBuf,
    /// Tables for people, or JSON for programs: sizes in bytes, fields are only ever added.
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    pub(crate) output: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Table,
    Json,
}
