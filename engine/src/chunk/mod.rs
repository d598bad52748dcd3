//! A file's bytes, chunk by chunk, as they lie in memory and as they lie in Tier-3.
//!
//! Owns: reading and hashing them, landing them in a backing file, decoding a chunk. Does not own: which bytes, their destination, the
//! consequences of a wrong chunk. Save, restore and replication all use it.

pub(crate) mod bytes;
pub(crate) mod decode;
mod hash;

pub(crate) use hash::hash_while;
pub use hash::{SealSums, hash};
