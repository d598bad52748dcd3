//! Steps of a restore: **locate → fetch → verify → serve**.
//!
//! `locate` reads what Tier-3 holds when the daemon starts. `fetch` brings a file in: each chunk is decoded if it is encoded
//! (`decode`), and verified before it lands. The namespace serves the landed bytes. `restorer` decides between other nodes'
//! memory (`peer`) and Tier-3. `coming` knows the bytes for which other nodes may wait here, and `losses` the files of which no
//! copy is good. `export` writes a version out, apart from these steps.

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
