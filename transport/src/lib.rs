//! Links between nodes: requests, one-way messages, and the bytes of files, over TCP or inside one process.
//!
//! Owns: connections, who may speak on them, and moving bytes from one file into another. Does not own: the meaning of the bytes. Bodies
//! are bytes, files are descriptors and ranges, and nothing here knows what a checkpoint is. `design/0001-links.md` has the reasons and the
//! figures.
//!
//! [`Link`] is the interface that a node calls, [`Service`] the one that it implements. Implementations of links: [`Tcp`], [`Loopback`] in
//! one process, and [`Faulty`] around any other.

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

/// The credits of one connection: requests of a peer that are not answered yet. Enough to hide a round trip of milliseconds for small
/// calls. The bytes of their bodies have a budget of their own.
pub const CALLS_IN_FLIGHT_MAX: usize = 64;

/// How long a tell looks for a connection, because it has no deadline of its own.
const TELL_CONNECTS: std::time::Duration = std::time::Duration::from_secs(1);
