//! The way back: **locate → fetch → verify → serve**.
//!
//! `locate` reads what Tier-3 holds when the daemon starts; `fetch` brings one file in and verifies each chunk before
//! it lands; the namespace serves what has landed. `export` writes a version out beside all of that.

pub mod export;
pub mod fetch;
pub mod locate;
