//! Bulk connections that wait for the next transfer, so that a small file does not pay for opening one.
//!
//! Owns: how many connections wait and for how long, and how many are opened at a time. Time is an argument.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;

use super::halves::{Receiving, Sending};
use crate::link::Address;
use crate::tcp::BULK_STREAMS_MAX;
use crate::tcp::strangers::UNPROVEN_PER_ORIGIN_MAX;

/// How long a connection waits. Shorter than the other end's patience (`serve`), so that this end closes it.
const WAITS: Duration = Duration::from_secs(10);

/// Connections that wait for one address: as many as one transfer uses.
const WAITING_MAX: usize = BULK_STREAMS_MAX;

/// Connections to one address that are opened at a time. A restore may want a hundred at once. A handshake takes milliseconds, and the
/// other end closes unproven connections of one address beyond its share.
const OPENED_AT_ONCE_MAX: usize = 8;

const _: () = assert!(
    3 * (OPENED_AT_ONCE_MAX + 1) <= UNPROVEN_PER_ORIGIN_MAX,
    "three nodes on one machine, with their control connections"
);

/// A bulk connection at the end that opened it.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) receiving: Receiving,
    pub(crate) sending: Sending,
}

/// The connections that wait.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    of: HashMap<Address, Vec<(Instant, Connection)>>,
    opening: HashMap<Address, Arc<Semaphore>>,
    closed: bool,
}

impl Pool {
    pub(crate) fn take(&self, to: &Address) -> Option<Connection> {
        let mut pool = self.waiting();
        let waiting = pool.of.get_mut(to)?;
        while let Some((_, connection)) = waiting.pop() {
            if connection.receiving.is_quiet() {
                return Some(connection);
            }
        }
        None
    }

    pub(crate) fn put(&self, to: &Address, connection: Connection, now: Instant) {
        let mut pool = self.waiting();
        if pool.closed {
            return;
        }
        let waiting = pool.of.entry(to.clone()).or_default();
        if waiting.len() < WAITING_MAX {
            waiting.push((now, connection));
        }
    }

    /// Returns the permits to open a connection to an address.
    pub(crate) fn opening(&self, to: &Address) -> Arc<Semaphore> {
        let permits = || Arc::new(Semaphore::new(OPENED_AT_ONCE_MAX));
        Arc::clone(self.waiting().opening.entry(to.clone()).or_insert_with(permits))
    }

    pub(crate) fn sweep(&self, now: Instant) {
        let mut pool = self.waiting();
        pool.opening.retain(|_, permits| Arc::strong_count(permits) > 1);
        pool.of.retain(|_, waiting| {
            waiting.retain(|(since, connection)| {
                now.saturating_duration_since(*since) < WAITS && connection.receiving.is_quiet()
            });
            !waiting.is_empty()
        });
    }

    /// Closes all waiting connections, and each that is returned later.
    pub(crate) fn close(&self) {
        *self.waiting() = Waiting { closed: true, ..Waiting::default() };
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
