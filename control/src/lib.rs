//! The coordinator: its election, and its knowledge of all nodes.
//!
//! Owns: the catalog of all nodes' names, members and copies; the coordinator's lease. Does not own: the commands (`tidemark-api`),
//! decisions over checkpoints (the engine).

pub mod catalog;
pub mod lease;
