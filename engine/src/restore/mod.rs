//! The way back: **locate → fetch → verify → serve**.
//!
//! `locate` reads what Tier-3 holds when the daemon starts; `fetch` brings one file in, has each chunk decoded
//! where it is encoded (`decode`), and verifies it before it lands; the namespace serves what has landed.
//! `restorer` decides between other nodes' memory (`peer`) and Tier-3; `coming` is what others may wait for here, and `losses` what no
//! copy is good of.
//! `export` writes a version out beside all of that.

pub mod coming;
pub mod export;
pub mod fetch;
pub mod joined;
pub mod locate;
pub mod losses;
pub mod peer;
mod restorer;

pub(crate) use restorer::Origin;
pub use restorer::{RestoreError, Restorer};
