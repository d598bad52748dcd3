//! The commands, one file each: the words it takes, what it asks, how it shows the answer.

mod bench;
mod commit;
mod doctor;
mod events;
mod flush;
mod ls;
mod nodes;
mod show;
mod status;
mod tiers;
mod verify;

use crate::context::{Context, Failure};
use tidemark_protocol::report::ExitCode;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    Status(status::Args),
    Ls(ls::Args),
    Show(show::Args),
    Tiers(tiers::Args),
    Nodes(nodes::Args),
    Verify(verify::Args),
    Flush(flush::Args),
    Commit(commit::Args),
    Events(events::Args),
    Doctor(doctor::Args),
    Bench(bench::Args),
}

/// Does the command, or `status` where there is none.
pub(crate) async fn run(command: Option<Command>, context: &mut Context) -> Result<ExitCode, Failure> {
    match command.unwrap_or(Command::Status(status::Args {})) {
        Command::Status(args) => args.run(context).await,
        Command::Ls(args) => args.run(context).await,
        Command::Show(args) => args.run(context).await,
        Command::Tiers(args) => args.run(context).await,
        Command::Nodes(args) => args.run(context).await,
        Command::Verify(args) => args.run(context).await,
        Command::Flush(args) => args.run(context).await,
        Command::Commit(args) => args.run(context).await,
        Command::Events(args) => args.run(context).await,
        Command::Doctor(args) => args.run(context).await,
        Command::Bench(args) => args.run(context).await,
    }
}
