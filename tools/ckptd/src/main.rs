//! The daemon of one node. Wires everything, decides nothing.

mod api;
mod attributes;
mod cli;
mod descriptors;
mod host;
mod logs;
mod memory;
mod state_dir;
mod up;

fn main() -> std::process::ExitCode {
    cli::run()
}
