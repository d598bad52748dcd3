//! How people and programs talk to a node, and who may coordinate.
//!
//! ```text
//! ckptctl ─ client ── unix socket, HTTP/1.1 + JSON ── server ─ NodeApi ─ the daemon
//! Prometheus, probes ── TCP, read-only ──────────────┘
//! ```
//!
//! Owns: paths, requests, the framing of long answers, bounds on what is taken in; the coordinator's lease. Does not
//! own: what is answered (the daemon implements [`api::NodeApi`]), the shape of answers
//! (`tidemark_protocol::report`), drawing them (`ckptctl`), what a coordinator decides (the engine).

pub mod api;
pub mod catalog;
pub mod client;
pub mod lease;
pub mod server;
