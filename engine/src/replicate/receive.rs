//! Answering other nodes' requests about copies.
//!
//! Owns: requests, the set of files that are coming in. Does not own: such a file (`incoming`), reading by other nodes (`serve`), the
//! copies that are kept (`namespace::copies`).

use super::here::Here;
use super::incoming::Incoming;
use super::serve::Pulls;
use crate::chunk::bytes::{blocking, sums, write_all};
use crate::metrics::Metrics;
use crate::restore::coming::Coming;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tidemark_namespace::{Namespace, WithdrawnCopy};
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::id::{ContentHash, FileId, SealNumber};
use tidemark_protocol::replication::{Answer, Holder, LandingEvent, Request, SealedCopy, decode, encode};
use tidemark_tier1::Tier1;
use tidemark_transport::{Address, Link, LinkErrorKind, Peer, Refusal};
use tokio::time::Instant;

/// Maximum number of files that come in at once, from all homes: each has memory and a descriptor.
pub const LANDINGS_MAX: usize = 1024;

/// Interval at which what is old is looked for.
const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// Longest wait for a home's answer to a withdrawal.
const WITHDRAW_DEADLINE: Duration = Duration::from_secs(5);

/// Called with the node that no longer holds a copy, the copy, and the reason.
pub type WithdrawnBy = Box<dyn Fn(&str, FileId, SealNumber, &str) + Send + Sync>;

/// The parts of a receiver.
#[derive(Debug)]
pub struct ReceiverParts {
    pub namespace: Arc<Namespace>,
    pub tier1: Arc<Tier1>,
    pub metrics: Arc<Metrics>,
    /// The life of this node's memory.
    pub holder: Holder,
    /// Bytes that are being brought here, and for which other nodes may ask already.
    pub coming: Arc<Coming>,
    /// Number of threads that verify a file.
    pub verify_threads: usize,
}

type Site = Arc<tokio::sync::Mutex<Incoming>>;

/// The receiver of other nodes' requests about copies. The node's service calls it; every method may be called from any task.
pub struct Receiver {
    here: Arc<Here>,
    /// Files coming in, by home and file. A home writes only into its own files.
    incoming: Mutex<BTreeMap<(String, FileId), Site>>,
    pulls: Pulls,
    withdrawn_by: OnceLock<WithdrawnBy>,
}

impl std::fmt::Debug for Receiver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Receiver").field("here", &self.here).finish_non_exhaustive()
    }
}

impl Receiver {
    #[must_use]
    pub fn new(parts: ReceiverParts) -> Arc<Self> {
        let ReceiverParts { namespace, tier1, metrics, holder, coming, verify_threads } = parts;
        let (link, began) = (OnceLock::new(), Instant::now());
        Arc::new(Self {
            here: Arc::new(Here { namespace, tier1, metrics, holder, coming, verify_threads, link, began }),
            incoming: Mutex::default(),
            pulls: Pulls::default(),
            withdrawn_by: OnceLock::new(),
        })
    }

    /// Sets the link over which requests come. The link is made with the service that calls this receiver, and so comes later; until then
    /// requests are refused.
    ///
    /// # Panics
    /// If it is called twice.
    pub fn use_link(&self, link: Arc<dyn Link>) {
        assert!(self.here.link.set(link).is_ok(), "a node has one link");
    }

    /// Sets the function that is called when another node no longer holds a copy of this node's file.
    ///
    /// # Panics
    /// If it is called twice.
    pub fn tell_withdrawn_by(&self, told: WithdrawnBy) {
        assert!(self.withdrawn_by.set(told).is_ok(), "one loop is told");
    }

    /// Answers a request. The cost depends on it: keeping a file hashes the chunks that were not hashed on their way.
    ///
    /// # Errors
    /// A [`Refusal`] of an invalid request.
    pub async fn answer(&self, from: &Peer, body: Bytes) -> Result<Bytes, Refusal> {
        if self.here.link.get().is_none() {
            return Err(Refusal::new(LinkErrorKind::Unavailable, "this node is not ready; try again"));
        }
        let refused = |error| Refusal::new(LinkErrorKind::Invalid, format!("replication: {error}"));
        let request: Request = decode(&body).map_err(refused)?;
        drop(body);
        request.check().map_err(refused)?;
        let answer = self.answered(from, request).await;
        encode(&answer).map(Bytes::from).map_err(refused)
    }

    async fn answered(&self, from: &Peer, request: Request) -> Answer {
        match request {
            Request::Begin { file, until_bytes, sealed, differs } => {
                self.land(from, file, LandingEvent::Begin { until_bytes, sealed, differs }).await
            }
            Request::Landed { file, chunks, until_bytes } => {
                self.land(from, file, LandingEvent::Landed { chunks, until_bytes }).await
            }
            Request::Keep(copy) => self.land(from, copy.file, LandingEvent::Keep(Box::new(copy))).await,
            Request::Small(copy, bytes) => self.small(copy, bytes).await,
            Request::Prove(copy, hash) => self.prove(copy, hash).await,
            Request::Drop { file, seal } => self.drop_for(from, file, seal).await,
            Request::Withdrawn { file, seal, why } => {
                if let Some(told) = self.withdrawn_by.get() {
                    told(&from.node, file, seal, &why);
                }
                Answer::Noted
            }
            Request::Pull { file, seal } => self.pulls.grant(&self.here, from, file, seal).await,
            Request::Suspect { file, seal } => self.suspect(file, seal).await,
            Request::Pulled { token, .. } => self.pulls.end(&self.here, from, token),
        }
    }

    async fn land(&self, from: &Peer, file: FileId, event: LandingEvent) -> Answer {
        let key = (from.node.clone(), file);
        let site = {
            let mut incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
            let now = self.here.now();
            if !incoming.contains_key(&key) {
                // A file whose request is being answered is locked, and not stale.
                incoming.retain(|_, site| {
                    site.try_lock().map_or(true, |site| !site.is_empty() && !site.is_stale(now))
                });
            }
            if incoming.len() >= LANDINGS_MAX && !incoming.contains_key(&key) {
                return Answer::NoRoom { wanted_bytes: 0, free_bytes: 0 };
            }
            let fresh = || Arc::new(tokio::sync::Mutex::new(Incoming::new(file, &self.here)));
            Arc::clone(incoming.entry(key.clone()).or_insert_with(fresh))
        };
        let mut locked = site.lock().await;
        let answer = locked.answer(&self.here, &from.node, event).await;
        if locked.is_empty() {
            let mut incoming = self.incoming.lock().unwrap_or_else(PoisonError::into_inner);
            if incoming.get(&key).is_some_and(|known| Arc::ptr_eq(known, &site)) {
                incoming.remove(&key);
            }
        }
        answer
    }

    async fn small(&self, copy: SealedCopy, bytes: Vec<u8>) -> Answer {
        let (file, seal) = (copy.file, copy.seal);
        let acknowledged = Answer::Acknowledged { file, seal, by: self.here.holder };
        if self.here.good_copy(file, seal).await == Some((copy.size_bytes, copy.crc)) {
            return acknowledged;
        }
        let here = Arc::clone(&self.here);
        let kept = blocking(move || {
            let size_bytes = copy.size_bytes;
            let backing = match here.namespace.room().backing_for(Some(size_bytes)) {
                Err(error) if error.kind() == ErrorKind::NoSpace => {
                    let free_bytes = here.tier1.usage().available_bytes;
                    return Err(Answer::NoRoom { wanted_bytes: size_bytes, free_bytes });
                }
                made => {
                    made.map_err(|error| tracing::error!(%error, "no memory can be made for a peer's copy"))
                }
            };
            let kept = backing.and_then(|backing| {
                let whole = write_all(&backing, &bytes).and_then(|()| sums(&backing, &[0], size_bytes));
                let lying =
                    whole.map_err(|error| tracing::error!(%error, "a peer's copy cannot be written"))?;
                if !lying.iter().map(|(_, sum)| sum).eq(&copy.chunks) {
                    here.metrics.verify_mismatches.get_or_create(&[("copy", "peer")]).inc();
                    return Err(());
                }
                here.namespace.peer_copies().keep_copy(&copy, backing).map_err(|error| {
                    tracing::error!(%error, file = %copy.file, "a verified copy cannot be kept");
                })
            });
            if kept.is_ok() {
                here.metrics.replica_received_bytes.inc_by(size_bytes);
            }
            kept.map_err(|()| Answer::Unknown)
        });
        kept.await.map_or_else(|answer| answer, |_| acknowledged)
    }

    /// Takes a file of this node's tree as the copy, if it has the same bytes.
    async fn prove(&self, copy: SealedCopy, hash: ContentHash) -> Answer {
        let (here, acknowledged) = (
            Arc::clone(&self.here),
            Answer::Acknowledged { file: copy.file, seal: copy.seal, by: self.here.holder },
        );
        let proven = blocking(move || {
            let alike = here.namespace.peer_copies().sealed_alike(copy.file, copy.size_bytes, copy.crc)?;
            let pin = here.namespace.seals().pin_seal(alike.0, alike.1)?;
            let mapping = pin.backing.map().ok()?;
            (ContentHash::of(&mapping) == hash).then_some(())?;
            here.namespace.peer_copies().keep_copy_of(&copy, alike).ok()?;
            here.metrics.replica_spared_bytes.inc_by(copy.size_bytes);
            Some(())
        });
        if proven.await.is_some() { acknowledged } else { Answer::Differs }
    }

    /// Verifies a copy of which another node received bad bytes. A bad copy is withdrawn, and its home is notified soon.
    async fn suspect(&self, file: FileId, seal: SealNumber) -> Answer {
        let namespace = &self.here.namespace;
        let (Some(pin), Some(copy)) =
            (namespace.peer_copies().pin_copy(file, seal), namespace.peer_copies().copy(file, seal))
        else {
            return Answer::NotHere;
        };
        if self.here.is_good(pin, copy.sealed).await {
            return Answer::Noted;
        }
        self.here.metrics.verify_mismatches.get_or_create(&[("copy", "peer")]).inc();
        namespace.peer_copies().lose_copy(file, seal, "another node had bad bytes from it, and it is bad");
        Answer::NotHere
    }

    /// Drops a copy, if the caller is the file's home.
    async fn drop_for(&self, from: &Peer, file: FileId, seal: SealNumber) -> Answer {
        let here = Arc::clone(&self.here);
        let home = from.node.clone();
        blocking(move || {
            if here.namespace.peer_copies().copy(file, seal).is_some_and(|copy| copy.meta.home == home) {
                here.namespace.peer_copies().drop_copy(file, seal);
            }
        })
        .await;
        Answer::Noted
    }

    /// Notifies homes of copies that are gone; notices that fail are tried again at the next call. `address_of` finds a node. To be called
    /// every second or so, and after a reclaim. Not cancel-safe: notices that are under way when it is dropped are not sent again.
    pub async fn tell_withdrawn(&self, address_of: impl Fn(&str) -> Option<Address>) {
        let mut left = Vec::new();
        for withdrawn in self.here.namespace.peer_copies().take_withdrawn_copies() {
            let WithdrawnCopy { file, seal, home, why } = &withdrawn;
            let request = Request::Withdrawn { file: *file, seal: *seal, why: (*why).to_owned() };
            let (Some(address), Ok(body)) = (address_of(home), encode(&request)) else {
                left.push(withdrawn);
                continue;
            };
            if let Err(error) = self.here.link().call(&address, body.into(), WITHDRAW_DEADLINE).await {
                tracing::warn!(%error, %file, %seal, home, "a home does not know that its copy is gone");
                left.push(withdrawn);
            }
        }
        if !left.is_empty() {
            self.here.namespace.peer_copies().give_back_withdrawn(left);
        }
    }

    /// Looks after what is old, until dropped: notifies homes, and forgets. `address_of` finds a node.
    pub async fn keep_house(self: Arc<Self>, address_of: impl Fn(&str) -> Option<Address>) {
        loop {
            tokio::time::sleep(HOUSEKEEPING).await;
            self.tell_withdrawn(&address_of).await;
            self.sweep();
        }
    }

    /// Forgets files that were left half received, and lent bytes that no node reads any more. To be called now and then.
    pub fn sweep(&self) {
        let now = self.here.now();
        self.incoming
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|_, site| site.try_lock().map_or(true, |site| !site.is_empty() && !site.is_stale(now)));
        if self.here.link.get().is_some() {
            self.pulls.sweep(&self.here, now);
        }
    }
}
