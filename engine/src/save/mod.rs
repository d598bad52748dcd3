//! The way of a checkpoint from closed files to a commit marker.
//!
//! create → write → **seal → upload → commit → reclaim**. The first two happen in the namespace and in Tier-1.

pub mod again;
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
pub mod reclaim;
pub mod seal;
pub mod share;
pub(crate) mod small;
pub mod sweep;
pub mod upload;
