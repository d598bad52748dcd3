//! The daemon of one node, and the keeper that holds what must outlive it. Wires everything, decides nothing.

mod alone;
mod api;
mod attributes;
mod base;
mod cli;
mod config;
mod descriptors;
mod doctor;
mod drain;
mod ends;
mod engine;
mod forward;
mod host;
mod keeping;
mod known;
mod last_end;
mod lease;
mod let_in;
mod logs;
mod memory;
mod peers;
mod places;
mod process;
mod publish;
mod replication;
mod seat;
mod session;
mod state_dir;
mod taking_up;
mod tier3;
mod told;
mod troubles;
mod up;

pub use cli::{Build, run};
