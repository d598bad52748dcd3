//! Does a real kernel see the behaviour that `fuse/SEMANTICS.md` promises?
//!
//! Owns: the mount suite. Each test quotes the mark of the paragraph that it checks. Does not own: the mount's back end,
//! which is an in-process namespace over a real Tier-1, without a daemon.
//!
//! The suite needs root and `/dev/fuse`. Without them, each test prints so and passes. On a kernel from 6.9 on, tests
//! that do not name FALLBACK insist on passthrough. If TIDEMARK_MOUNT_FALLBACK is set, all but four, which are of
//! passthrough alone, run in FALLBACK.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test's helpers fail by panicking and say on its output what was left out"
)]

mod closing;
mod control;
mod data;
mod direct;
mod ends;
mod fallback;
mod files;
mod names;
mod overwrite;
mod site;
