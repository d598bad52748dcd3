//! Links between nodes: requests, one-way words, and the bytes of files, over TCP or inside one process.
//!
//! It owns connections, who may speak on them, and moving bytes from one file into another. It does not own what the
//! bytes mean: bodies are bytes, files are descriptors and ranges, and nothing here knows what a checkpoint is.
//! `design/0001-links.md` has the reasons and the figures.
//!
//! [`Link`] is what a node calls, [`Service`] what it answers with. Implementations: [`Tcp`], [`Loopback`] in one process,
//! and [`Faulty`] around any other.

pub mod certs;
mod copy;
pub mod datagram;
mod error;
pub mod faulty;
pub mod frame;
mod link;
mod loopback;
mod names;
mod peers;
mod range;
pub mod tcp;
mod token;

pub use error::{LinkError, LinkErrorKind, Mismatch, Refusal, TokenRefusal};
pub use faulty::Faulty;
pub use link::{
    Address, BODY_BYTES_MAX, BytesSink, BytesSource, Grant, Identity, Link, Pace, Peer, Service, Unpaced,
};
pub use loopback::{Loopback, Network};
pub use tcp::Tcp;
pub use token::{TOKEN_BYTES, TOKEN_ORPHANED_MS, TOKENS_MAX, Token};

/// The credits of one connection: requests that a peer has asked and that are not answered. Enough to hide a round trip
/// of milliseconds for small calls; the bytes of their bodies have a budget of their own.
pub const CALLS_IN_FLIGHT_MAX: usize = 64;

/// A tell has no deadline of its own; this is how long it looks for a connection.
const TELL_CONNECTS: std::time::Duration = std::time::Duration::from_secs(1);
