//! The lease in etcd: a key that hangs on an etcd lease, whose create revision is the epoch.
//!
//! Owns: acquiring, renewing and releasing; the member list beside it, which only the holder can write. Does not own: a clock (the caller
//! passes its monotonic time), the loop that calls this, requests (`client`).
//!
//! The key is created only where it is absent, in one transaction, and bound to an etcd lease of the term's length. So etcd deletes it when
//! its holder has not renewed for a term. The epoch is etcd's revision, which rises with every change, so no earlier holder had that
//! number. The holder counts its term from *sending* its last successful renewal. etcd counts from receiving it, which is later: the holder
//! stops first.

mod access;
mod catalog;
mod client;
mod error;
mod http;
mod login;
mod place;
mod tls;

pub use access::{AccessError, EtcdAccess};
pub use catalog::{EtcdCatalog, LoadError};
pub use error::{EtcdError, PasswordError};
pub use place::{EtcdPlace, NotAPlace};
pub use tls::CertificateError;

use super::{LeaseError, LeaseTimes, Turn};
use bytes::Bytes;
use client::{EtcdClient, Found, Outcome};
use serde::{Deserialize, Serialize};
use std::time::{Duration, Instant};
use tidemark_protocol::id::Epoch;

/// The longest member list. An etcd refuses requests over 1.5 MiB, and in base64 this list has 1.4. A list of that length has about 7000
/// members as plain JSON.
pub const MEMBERS_BYTES_MAX: usize = 1 << 20;

/// Interval at which a rival checks whether the key is gone. A check costs etcd one read.
const POLL: Duration = Duration::from_millis(200);

/// The lease's key and the member list's, below the prefix.
const LEASE_KEY: &str = "lease";
const MEMBERS_KEY: &str = "members";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Body {
    holder: String,
    /// Random number, drawn once per [`EtcdLease`], which tells two lives of one holder apart.
    nonce: u64,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    /// The number of the etcd lease.
    lease: u64,
    epoch: Epoch,
    until: Instant,
}

/// A candidate's view of the lease.
#[derive(Debug)]
pub struct EtcdLease {
    client: EtcdClient,
    holder: String,
    nonce: u64,
    times: LeaseTimes,
    held: Option<Held>,
}

impl EtcdLease {
    /// Makes a candidate. `holder` is the name that other nodes see; `nonce` is random and new for each start of the daemon. In etcd
    /// `times.term` is rounded up to a second, and is at least 2 s with etcd's usual settings. The margin is the time that etcd needs to
    /// see that a term is over, and rivals to see that the key is gone.
    #[must_use]
    pub fn new(access: EtcdAccess, holder: String, nonce: u64, times: LeaseTimes) -> Self {
        Self { client: EtcdClient::new(access), holder, nonce, times, held: None }
    }

    /// Returns the epoch of the term, if the holder may act on it at `now`.
    #[must_use]
    pub fn epoch(&self, now: Instant) -> Option<Epoch> {
        self.held.filter(|held| now < held.until).map(|held| held.epoch)
    }

    /// Returns when the term ends, as far as it is renewed; `None` if it is not held.
    #[must_use]
    pub fn until(&self) -> Option<Instant> {
        self.held.map(|held| held.until)
    }

    /// Returns the holder and its epoch; `None` if the lease is free. Costs a read.
    pub async fn holder(&self) -> Result<Option<(String, Epoch)>, LeaseError> {
        let key = self.client.place().key(LEASE_KEY);
        let found = self.client.get(&key).await.map_err(|source| self.failed("reading", source))?;
        found.map(|found| Ok((self.body(&found)?.holder, Epoch(found.create_revision)))).transpose()
    }

    /// Takes the lease if it is free. `now` is the time just before this call. Costs a read, and two writes if the lease is free. If the
    /// answer to a try is lost, the next try finds the key, and the lease is ours then.
    pub async fn try_acquire(&mut self, now: Instant) -> Result<Turn, LeaseError> {
        self.held = None;
        let key = self.client.place().key(LEASE_KEY);
        let found = self.client.get(&key).await.map_err(|source| self.failed("reading", source))?;
        if let Some(found) = found {
            return self.look_at(&found, now).await;
        }
        let ttl_s = self.times.term.as_secs_f64().ceil().max(1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a term is seconds, at least one"
        )]
        let (lease, granted_s) =
            self.client.grant(ttl_s as u64).await.map_err(|source| self.failed("granting", source))?;
        let body = Body { holder: self.holder.clone(), nonce: self.nonce };
        let body = serde_json::to_vec(&body)
            .map_err(|error| self.unreadable(&format!("it cannot be written: {error}")))?;
        let put = Some((key.as_str(), body.as_slice(), lease));
        let outcome =
            self.client.put_if(&key, 0, put).await.map_err(|source| self.failed("taking", source))?;
        let found = match outcome {
            Outcome::Done { revision } => return Ok(self.hold(lease, Epoch(revision), granted_s, now)),
            Outcome::Differs { found } => found,
        };
        if let Some(found) = found {
            if found.lease != lease
                && let Err(error) = self.client.revoke(lease).await
            {
                tracing::debug!(%error, "an etcd lease that nothing hangs on ends by itself");
            }
            return self.look_at(&found, now).await;
        }
        // The key was there a moment ago, and is gone again.
        Ok(Turn::Theirs { holder: "nobody".to_owned(), epoch: Epoch(0), wait: Duration::ZERO })
    }

    /// Decides about the key that is there: ours or another's.
    async fn look_at(&mut self, found: &Found, now: Instant) -> Result<Turn, LeaseError> {
        let body = self.body(found)?;
        let epoch = Epoch(found.create_revision);
        if body.holder != self.holder || body.nonce != self.nonce {
            return Ok(Turn::Theirs { holder: body.holder, epoch, wait: POLL });
        }
        // Our own, of a try whose answer was lost or of a term that we let end: restart its time.
        let ttl_s =
            self.client.keep_alive(found.lease).await.map_err(|source| self.failed("renewing", source))?;
        if ttl_s == 0 {
            return Ok(Turn::Theirs { holder: body.holder, epoch, wait: POLL });
        }
        Ok(self.hold(found.lease, epoch, ttl_s, now))
    }

    fn hold(&mut self, lease: u64, epoch: Epoch, ttl_s: u64, sent: Instant) -> Turn {
        self.held = Some(Held { lease, epoch, until: sent + self.term(ttl_s) });
        Turn::Ours(epoch)
    }

    /// Returns the length of the term, which never exceeds etcd's.
    fn term(&self, ttl_s: u64) -> Duration {
        self.times.term.min(Duration::from_secs(ttl_s))
    }

    /// Extends the term, counted from `now`, the time just before this call. Returns [`LeaseError::Lost`] when the key is another's, or
    /// gone. After any other error the old term still runs, and [`Self::epoch`] says for how long; a later successful renewal continues
    /// with the same epoch. Costs two requests.
    pub async fn renew(&mut self, now: Instant) -> Result<Epoch, LeaseError> {
        let Some(held) = self.held else {
            return Err(self.lost(Epoch(0), None));
        };
        let ttl_s =
            self.client.keep_alive(held.lease).await.map_err(|source| self.failed("renewing", source))?;
        // A living etcd lease proves nothing about the key: somebody may have deleted it.
        let key = self.client.place().key(LEASE_KEY);
        let outcome = self.client.put_if(&key, held.epoch.0, None).await;
        match outcome.map_err(|source| self.failed("reading", source))? {
            Outcome::Done { .. } if ttl_s > 0 => {
                self.held = Some(Held { until: now + self.term(ttl_s), ..held });
                Ok(held.epoch)
            }
            Outcome::Done { .. } => Err(self.lose(held, None)),
            Outcome::Differs { found } => Err(self.lose(held, found)),
        }
    }

    /// Ends the term of an earlier start of this holder; returns false if there is none. Only one process at a time has a holder's address,
    /// so the process that has it now knows that the earlier one is over. Costs a read, and a write if there is such a term.
    pub async fn end_earlier_start(&self) -> Result<bool, LeaseError> {
        let key = self.client.place().key(LEASE_KEY);
        let found = self.client.get(&key).await.map_err(|source| self.failed("reading", source))?;
        let Some(found) = found else { return Ok(false) };
        let body = self.body(&found)?;
        if body.holder != self.holder || body.nonce == self.nonce {
            return Ok(false);
        }
        self.client
            .revoke(found.lease)
            .await
            .map_err(|source| self.failed("ending an earlier term", source))?;
        Ok(true)
    }

    /// Releases the lease, so that a rival need not wait. Does nothing if it is not held.
    pub async fn release(&mut self) -> Result<(), LeaseError> {
        let Some(held) = self.held.take() else { return Ok(()) };
        self.client.revoke(held.lease).await.map_err(|source| self.failed("giving up", source))
    }

    /// Stores the member list if the lease is still ours: etcd compares and writes in one step, so a zombie cannot write. Returns
    /// [`LeaseError::Lost`] otherwise. A list is at most [`MEMBERS_BYTES_MAX`].
    pub async fn write_members(&mut self, list: &[u8]) -> Result<(), LeaseError> {
        let (bytes, limit) = (list.len(), MEMBERS_BYTES_MAX);
        if bytes > limit {
            return Err(LeaseError::MembersTooLarge { store: self.client.place().to_string(), bytes, limit });
        }
        let Some(held) = self.held else {
            return Err(self.lost(Epoch(0), None));
        };
        let (key, members) = (self.client.place().key(LEASE_KEY), self.client.place().key(MEMBERS_KEY));
        let outcome = self.client.put_if(&key, held.epoch.0, Some((&members, list, 0))).await;
        match outcome.map_err(|source| self.failed("writing the members", source))? {
            Outcome::Done { .. } => Ok(()),
            Outcome::Differs { found } => Err(self.lose(held, found)),
        }
    }

    /// Returns the member list that was stored last, by any holder; `None` before the first.
    pub async fn read_members(&self) -> Result<Option<Bytes>, LeaseError> {
        let key = self.client.place().key(MEMBERS_KEY);
        let found =
            self.client.get(&key).await.map_err(|source| self.failed("reading the members", source))?;
        Ok(found.map(|found| Bytes::from(found.value)))
    }

    fn body(&self, found: &Found) -> Result<Body, LeaseError> {
        serde_json::from_slice(&found.value).map_err(|error| self.unreadable(&error.to_string()))
    }

    fn lose(&mut self, held: Held, found: Option<Found>) -> LeaseError {
        self.held = None;
        self.lost(held.epoch, found)
    }

    fn lost(&self, ours: Epoch, found: Option<Found>) -> LeaseError {
        let theirs = Epoch(found.as_ref().map_or(0, |found| found.create_revision));
        let holder =
            found.map(|found| self.body(&found).map_or_else(|error| error.to_string(), |body| body.holder));
        let holder = holder.unwrap_or_else(|| "nobody: the term was over".to_owned());
        LeaseError::Lost { store: self.client.place().to_string(), ours, theirs, holder }
    }

    fn failed(&self, operation: &'static str, source: EtcdError) -> LeaseError {
        LeaseError::Etcd { place: self.client.place().to_string(), operation, source: Box::new(source) }
    }

    fn unreadable(&self, reason: &str) -> LeaseError {
        let (store, key) = (self.client.place().to_string(), self.client.place().key(LEASE_KEY));
        LeaseError::Unreadable { store, key, reason: reason.to_owned() }
    }
}
