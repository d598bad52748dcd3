//! The daemon of one node, and the keeper that holds what must outlive it. Wires everything, decides nothing.

mod api;
mod attributes;
mod base;
mod cli;
mod config;
mod descriptors;
mod forward;
mod host;
mod lease;
mod logs;
mod memory;
mod peers;
mod publish;
mod replication;
mod seat;
mod session;
mod state_dir;
mod tier3;
mod up;

pub use cli::{Build, run};
