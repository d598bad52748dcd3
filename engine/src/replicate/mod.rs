//! Tier-2: this node's sealed files in other nodes' memory, and theirs in ours.
//!
//! ```text
//!   home                                             partner
//!   namespace ─ look_at ─► Replicator ── questions ──► Receiver ─ verified ─► namespace::copies
//!                              └──────── bytes, file to file ──────┘
//! ```
//!
//! | file | owns |
//! |---|---|
//! | `send` | the home's loop: which file goes to whom, and who has acknowledged what |
//! | `queue` | which question or push is next |
//! | `outgoing` | one question or one push, carried out |
//! | `pace` | how fast |
//! | `receive` | what this node answers, and the files that are coming in |
//! | `here` | what these use; whether a copy is good |
//! | `incoming` | one file that is coming in: its memory, its hashes |
//! | `serve` | sealed bytes read by others |
//!
//! The rules are `protocol::replication`'s. Does not own: who the partners are, which versions are replicated (both follow from what is
//! acknowledged), reading from peers (`restore::peer`). See `engine/design/0017-replication.md`.

mod here;
mod incoming;
mod outgoing;
mod pace;
mod queue;
mod receive;
mod send;
mod serve;
#[cfg(test)]
mod tests;

pub use receive::{LANDINGS_MAX, Receiver, ReceiverParts, WithdrawnBy};
pub use send::{ASKS_MAX, Behind, Facts, PUSHES_MAX, Replicator, ReplicatorParts};
pub use serve::PULLS_MAX;
