//! The commands, one file each: the words it takes, what it asks, how it shows the answer.

mod bench;
mod certs;
mod commit;
mod doctor;
mod events;
mod export;
mod flush;
mod gc;
mod import;
mod ls;
mod nodes;
mod pin;
mod placement;
mod prefetch;
mod recover;
mod rm;
mod show;
mod status;
mod tiers;
mod undelete;
mod verify;
mod why;

use crate::context::{Context, Failure};
use tidemark_protocol::report::ExitCode;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    Status(status::Args),
    Ls(ls::Args),
    Show(show::Args),
    Why(why::Args),
    Tiers(tiers::Args),
    Nodes(nodes::Args),
    Placement(placement::Args),
    Verify(verify::Args),
    Prefetch(prefetch::Args),
    Flush(flush::Args),
    Commit(commit::Args),
    Pin(pin::Args),
    /// Let retention decide again about the newest committed version of a checkpoint
    Unpin(pin::Args),
    Gc(gc::Args),
    Rm(rm::Args),
    Undelete(undelete::Args),
    Export(export::Args),
    Import(import::Args),
    Recover(recover::Args),
    Events(events::Args),
    Doctor(doctor::Args),
    Certs(certs::Args),
    Bench(bench::Args),
}

/// Does the command, or `status` where there is none.
pub(crate) async fn run(command: Option<Command>, context: &mut Context) -> Result<ExitCode, Failure> {
    match command.unwrap_or_else(|| Command::Status(status::Args::default())) {
        Command::Status(args) => args.run(context).await,
        Command::Ls(args) => args.run(context).await,
        Command::Show(args) => args.run(context).await,
        Command::Why(args) => args.run(context).await,
        Command::Tiers(args) => args.run(context).await,
        Command::Nodes(args) => args.run(context).await,
        Command::Placement(args) => args.run(context).await,
        Command::Verify(args) => args.run(context).await,
        Command::Prefetch(args) => args.run(context).await,
        Command::Flush(args) => args.run(context).await,
        Command::Commit(args) => args.run(context).await,
        Command::Pin(args) => args.run(true, context).await,
        Command::Unpin(args) => args.run(false, context).await,
        Command::Gc(args) => args.run(context).await,
        Command::Rm(args) => args.run(context).await,
        Command::Undelete(args) => args.run(context).await,
        Command::Export(args) => args.run(context).await,
        Command::Import(args) => args.run(context).await,
        Command::Recover(args) => args.run(context).await,
        Command::Events(args) => args.run(context).await,
        Command::Doctor(args) => args.run(context).await,
        Command::Certs(args) => args.run(context),
        Command::Bench(args) => args.run(context).await,
    }
}
