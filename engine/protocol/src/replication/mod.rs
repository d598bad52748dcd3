//! Tier-2: how one file's bytes get to another node's memory, and when they are a copy there.
//!
//! | file | owns |
//! |---|---|
//! | `message` | the messages between two nodes, and their bytes |
//! | `sender` | the home's side: one file to one partner |
//! | `landing` | the partner's side: one file of one home |
//! | `order` | which file goes first, and how fast |
//!
//! A copy exists once the partner has answered [`Answer::Acknowledged`]. The partner does so only for bytes that it has hashed
//! where they lie, chunk by chunk, against the seal. Everything before that is an attempt and may be lost without harm. Does
//! not own: moving bytes, hashing, memory (the engine's `replicate`), the choice of partners (`placement`).
//!
//! Every request may come twice, late, or not at all; a repeated request does no harm.

mod landing;
mod message;
mod order;
mod sender;
#[cfg(test)]
mod tests;

pub use landing::{LANDING_KEPT, Landing, LandingCommand, LandingEvent};
pub use message::{
    Answer, BulkToken, CopyMeta, FACTS_BYTES_MAX, GAVE_WAY, Holder, MESSAGE_BYTES_MAX, MessageError, Need,
    Request, SMALL_BYTES, SealedCopy, XATTRS_BYTES_MAX, decode, encode,
};
pub use order::{MICRO_CHUNK_BYTES, Priority, Rate, Waiting, next_to_send};
pub use sender::{Ask, BATCH_CHUNKS_MAX, Sender, SenderCommand, SenderEvent};
