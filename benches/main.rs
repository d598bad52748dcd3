//! All benches in one executable: its first argument names the one to run.
//!
//! Owns: the table of benches, in the order in which a reader wants their figures. Does not own: the measurement of each (a file of its
//! name beside this one, whose first line asks its question), nor the command line (`harness/stages.rs`).
//!
//! A single executable, because each would link the whole engine again.

mod catalog;
mod cluster_save;
mod coordinator;
mod create;
mod encode;
mod fallback;
mod first_save;
mod mmap;
mod parallel;
mod read;
mod replicate;
mod restore;
mod restore_peer;
mod restore_s3;
mod seal;
mod succession;
mod torch;
mod upload;
mod upload_s3;
mod write;

use std::process::ExitCode;
use tidemark_benches::stages::{self, Stage};

/// A bench by the name of its file.
macro_rules! stage {
    ($name:ident) => {
        Stage {
            name: stringify!($name),
            source: include_str!(concat!(stringify!($name), ".rs")),
            run: $name::run,
        }
    };
}

/// `cargo xtask` reads the names from these lines, before anything is built.
const STAGES: &[Stage] = &[
    stage!(write),
    stage!(first_save),
    stage!(parallel),
    stage!(read),
    stage!(mmap),
    stage!(create),
    stage!(torch),
    stage!(fallback),
    stage!(seal),
    stage!(encode),
    stage!(upload),
    stage!(upload_s3),
    stage!(restore),
    stage!(restore_s3),
    stage!(replicate),
    stage!(restore_peer),
    stage!(catalog),
    stage!(coordinator),
    stage!(succession),
    stage!(cluster_save),
];

fn main() -> anyhow::Result<ExitCode> {
    stages::start(STAGES)
}
