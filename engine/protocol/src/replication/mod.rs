//! Tier-2: how one file's bytes come to another node's memory, and when that is a copy.
//!
//! | file | owns |
//! |---|---|
//! | `message` | what two nodes say to each other, and the bytes it travels as |
//! | `sender` | the home's side: one file to one partner |
//! | `landing` | the partner's side: one file of one home |
//! | `order` | who goes first, and how fast |
//!
//! A copy exists once the partner has said [`Answer::Acknowledged`], which it says only of bytes that it has hashed where
//! they lie, chunk by chunk, against the seal. Everything before that is an attempt and may be lost without harm. Does not own:
//! moving bytes, hashing, memory (the engine's `replicate`), who the partners are (`placement`).
//!
//! Every request may come twice, late, or not at all; none of them makes anything worse the second time.

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
