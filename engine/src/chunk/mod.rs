//! A file's bytes, chunk by chunk, as they lie in memory and as they lie in Tier-3.
//!
//! Owns: reading and hashing them, landing them in a backing file, decoding one chunk. Does not own: which bytes, where they go, what a
//! wrong one means. Save, restore and replication all stand on it.

pub(crate) mod bytes;
pub(crate) mod decode;
mod hash;

pub(crate) use hash::hash_while;
pub use hash::{SealSums, hash};
