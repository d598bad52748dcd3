//! Tier-2: copies of this node's sealed files in other nodes' memory, and of their files here.
//!
//! ```text
//!   home                                             partner
//!   namespace ─ look_at ─► Replicator ── questions ──► Receiver ─ verified ─► namespace::copies
//!                              └──────── bytes, file to file ──────┘
//! ```
//!
//! | file | owns |
//! |---|---|
//! | `send` | the home's loop: which file goes to which partner, and which copies are acknowledged |
//! | `queue` | the order of questions and pushes |
//! | `outgoing` | carrying out a question or a push |
//! | `pace` | the rate |
//! | `receive` | this node's answers, and the files that are coming in |
//! | `here` | the state that the receiver's parts share; whether a copy is good |
//! | `incoming` | a file that is coming in: its memory, its hashes |
//! | `serve` | sealed bytes that other nodes read |
//!
//! `protocol::replication` has the rules. Does not own: who the partners are, which versions are replicated (it follows from the
//! acknowledgements), reading from peers (`restore::peer`). See `engine/design/0017-replication.md`.

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
