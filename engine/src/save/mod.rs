//! Steps of a checkpoint from closed files to a commit marker.
//!
//! create → write → seal → **upload → commit** → reclaim. The namespace and Tier-1 do the first two; the node loop has files hashed and
//! evicts copies.

pub mod again;
pub(crate) mod coders;
pub mod commit;
#[cfg(test)]
mod commit_test;
pub(crate) mod content;
pub mod drain;
pub mod encode;
pub mod foreign;
pub mod generations;
pub mod loose;
pub mod pace;
pub mod predict;
pub(crate) mod reading;
pub mod share;
pub(crate) mod small;
pub mod sweep;
pub mod upload;
