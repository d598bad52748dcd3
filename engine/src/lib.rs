//! The engine of a node: Tier-1 memory, the namespace over it, the save and restore flows, Tier-3.
//!
//! save: create → write → seal → replicate → upload → commit → reclaim. restore: locate → fetch → verify → serve.

pub mod chunk;
pub mod cluster;
pub mod flight;
pub mod metrics;
pub mod node;
pub mod replicate;
pub mod restore;
pub mod save;
pub mod settings;
pub mod step_point;
