//! The rules of Tidemark: plain data and pure functions.
//!
//! Architecture invariant: no I/O, no clock, no threads, no runtime. Time is an argument, and every decision
//! returns its reason. The proof is this crate's `Cargo.toml`.

pub mod checkpoint;
pub mod checksum;
pub mod cluster;
pub mod documents;
pub mod encoding;
pub mod error;
pub mod escape;
pub mod evidence;
pub mod file;
pub mod format;
pub mod id;
pub mod invariants;
pub mod key;
pub mod label;
pub mod layout;
pub mod lineage;
pub mod loose;
pub mod manifest;
pub mod marker;
pub mod membership;
pub mod path;
pub mod placement;
pub mod recognise;
pub mod record;
pub mod recovery;
pub mod removal;
pub mod replication;
pub mod report;
pub mod residency;
pub mod retention;
pub mod selector;
pub mod shield;
pub mod size;
pub mod visibility;
