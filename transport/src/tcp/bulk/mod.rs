//! The bytes of files, on connections of their own, so that messages never wait behind them.
//!
//! Owns: the modules. `wire` (requests and replies), `halves` (bytes between a socket and a file, which are `encrypted`, `authenticated`,
//! or, without certificates, `plain`), `carry` (pushing and pulling), `serve` (the other end), `pool` (connections that wait for the next
//! transfer).
//!
//! A connection carries pieces of any number of files, one after another. Each piece is requested under a token, and confirmed when it is
//! in the file. Several pieces are on the way at a time.

mod authenticated;
mod carry;
mod encrypted;
mod halves;
mod plain;
mod pool;
mod serve;
mod wire;

pub(crate) use self::carry::{pull, push};
pub(crate) use self::pool::Pool;
pub(crate) use self::serve::serve;
