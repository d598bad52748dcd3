//! Damage, lack of room, absence and contradiction: does Tidemark report them, serve only right bytes, and lose
//! nothing sealed?
//!
//! Owns: damage done to real daemons from outside, in memory and in Tier-3, the limits of names and sizes, refusals
//! at start, and the ends of a daemon. Does not own: death at a step of the commit (suite crash), frameworks, the
//! calls of the mount.

#![expect(clippy::unwrap_used, reason = "a broken belief of a test is its failure")]

mod away;
mod bytes;
mod coordinators;
mod documents;
mod doors;
mod encoded;
mod ending;
mod export;
mod import;
mod indices;
mod keeping;
mod limits;
mod loose;
mod lost;
mod memory;
mod prefetch;
mod questions;
mod recovery;
mod refusals;
mod removed;
mod replaced;
mod saves;
mod scavenge;
mod shield;
mod site;
mod spill;
mod trackers;
mod visibility;
mod wishes;
