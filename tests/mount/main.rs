//! Does a real kernel see what `fuse/SEMANTICS.md` says?
//!
//! Owns: the mount suite. Each test quotes the mark of the paragraph it holds the code to. Does not own: what is
//! behind the mount: an in-process namespace over a real Tier-1, without a daemon.
//!
//! Needs root and `/dev/fuse`; without them each test says so and passes. On a kernel from 6.9 on, tests that do not name
//! FALLBACK insist on passthrough, unless TIDEMARK_MOUNT_FALLBACK is set: then all but four, which are of
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
