//! The way back: **locate → fetch → verify → serve**.
//!
//! `locate` reads what Tier-3 holds when the daemon starts; `fetch` brings one file in, has each chunk decoded
//! where it is encoded (`decode`), and verifies it before it lands; the namespace serves what has landed.
//! `peer` asks other nodes' memory first, and `coming` is what they may wait for here.
//! `export` writes a version out beside all of that.

pub mod coming;
pub(crate) mod decode;
pub mod export;
pub mod fetch;
pub mod joined;
pub mod locate;
pub mod peer;
