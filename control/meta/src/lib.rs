//! A single order of changes for a tree over several nodes.
//!
//! Owns: the metadata of the tree, who may change it, and in which order changes count. Does not own: bytes, connections, clocks,
//! detection; all of these reach it as calls, messages and events.
//!
//! A [`store`] keeps the order. The [`coordinator`] is its single writer: it forms transactions of the [`node`]s' calls, by the rules of
//! [`state`]. Note 0023 has the reasons, and what is left out.

pub mod coordinator;
pub mod key;
pub mod message;
pub mod node;
pub mod refusal;
pub mod rules;
pub mod state;
pub mod store;
pub mod value;
