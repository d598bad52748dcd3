//! Tier-3: how long its answers take, when it is away, and what may be committed there.
//!
//! Owns: the delay of each request, requests that arrive although nobody waits any more, the judge of markers. Does not own: objects (the
//! store in memory), what is saved (`saves`).

use super::calls::split;
use super::wire::Wire;
use async_trait::async_trait;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::format::Document;
use tidemark_protocol::key::{Key, VersionId};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::manifest::ValidatedManifest;
use tidemark_protocol::marker::{Decision, Marker};
use tidemark_store::{
    Created, Damage, Listing, MemoryStore, ObjectHead, Operation, PartSource, Store, StoreError,
    UploadLimits, Uploaded,
};
use tidemark_transport::Peer;

/// The name of Tier-3's place in the network.
pub(super) const PLACE: &str = "tier3";

/// How long a request waits for its answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// The largest document that is read.
const DOCUMENT_BYTES_MAX: u64 = 1 << 20;

/// The files of a save, by name, as the job wrote them.
pub(super) type Files = BTreeMap<String, Vec<u8>>;

/// See the module's head.
pub(super) struct Tier3 {
    wire: Arc<Wire>,
    objects: MemoryStore,
    /// How much longer than usual each way takes.
    slower: Mutex<Duration>,
    /// Saves whose every file was closed, by each path that they have or had, with their last path.
    saved: Mutex<BTreeMap<String, (String, Files)>>,
    /// The last paths of the committed versions that are right.
    committed: Mutex<BTreeMap<VersionId, String>>,
    wrong: Mutex<Vec<String>>,
}

impl fmt::Debug for Tier3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tier3")
    }
}

impl Tier3 {
    pub(super) fn new(wire: Arc<Wire>) -> Arc<Self> {
        Arc::new(Self {
            wire,
            objects: MemoryStore::new(),
            slower: Mutex::default(),
            saved: Mutex::default(),
            committed: Mutex::default(),
            wrong: Mutex::default(),
        })
    }

    /// Notes a save that may be committed from now on. It was written at `place`, and is renamed to `path` if that is another.
    pub(super) fn saves(&self, place: &str, path: &str, files: &Files) {
        let mut saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        for at in [place, path] {
            saved.insert(at.to_owned(), (path.to_owned(), files.clone()));
        }
    }

    /// Makes each way to it and back take longer.
    pub(super) fn takes_longer(&self, by: Duration) {
        *self.slower.lock().unwrap_or_else(PoisonError::into_inner) = by;
    }

    /// Returns the paths of the committed saves.
    pub(super) fn committed(&self) -> Vec<String> {
        self.committed.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// Asserts that all markers were right.
    pub(super) fn assert_right(&self) {
        let wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(wrong.is_empty(), "what is committed is not what was saved: {wrong:#?}");
    }

    /// Notes a decision. What is wrong with it is noted as well, since whoever asked may be dead by now.
    async fn decided(&self, version: VersionId, body: &[u8]) {
        let marker = Marker::parse(body).expect("the product wrote it");
        if marker.decision == Decision::Abort {
            return;
        }
        match self.judge(&version, &marker).await {
            Ok(path) => {
                self.committed.lock().unwrap_or_else(PoisonError::into_inner).insert(version, path);
            }
            Err(wrong) => self.wrong.lock().unwrap_or_else(PoisonError::into_inner).push(wrong),
        }
    }

    /// Judges a commit: it was saved, and is all there. Returns its last path.
    async fn judge(&self, version: &VersionId, marker: &Marker) -> Result<String, String> {
        let (Some(key), Some(hash)) = (&marker.manifest, &marker.manifest_hash) else {
            return Err(format!("{version} is committed without a manifest"));
        };
        let manifest = self.objects.get(key, DOCUMENT_BYTES_MAX).await.map_err(|error| error.to_string())?;
        let manifest = manifest.ok_or_else(|| format!("{key} is not there"))?;
        let manifest =
            ValidatedManifest::parse(&manifest, hash).map_err(|error| format!("{key}: {error}"))?;
        let manifest = manifest.into_manifest();
        let first = manifest.files.first().ok_or_else(|| format!("{version} has no file"))?;
        let path = split(&first.path.to_string()).0.to_owned();
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner).get(&path).cloned();
        let (last, saved) =
            saved.ok_or_else(|| format!("{path} is committed, and not every file of it was closed"))?;
        let saved: Files = saved.into_iter().map(|(name, bytes)| (format!("{path}/{name}"), bytes)).collect();
        let names: Vec<_> = manifest.files.iter().map(|file| file.path.to_string()).collect();
        if !names.iter().eq(saved.keys()) {
            return Err(format!("{path} is committed with {names:?}, and has {:?}", saved.keys()));
        }
        for file in &manifest.files {
            let wanted = &saved[&file.path.to_string()];
            let there = self.objects.get(&file.key, u64::MAX).await.map_err(|error| error.to_string())?;
            if there.is_none_or(|there| there[..] != wanted[..]) {
                return Err(format!("the object of {} has not the bytes that were written", file.path));
            }
            let chunks = wanted.chunks(usize::try_from(CHUNK_BYTES).expect("a chunk fits into memory"));
            let sums = chunks.map(|chunk| Crc64(tidemark_kernels::crc64(chunk)));
            if !sums.eq(file.chunks.iter().copied()) {
                return Err(format!("the checksums of {} are not right", file.path));
            }
        }
        Ok(last)
    }

    /// Lets a daemon use it.
    pub(super) fn at(self: &Arc<Self>, peer: &Peer) -> Arc<dyn Store> {
        Arc::new(Client { tier3: Arc::clone(self), peer: peer.clone() })
    }
}

/// A daemon's client.
#[derive(Debug)]
struct Client {
    tier3: Arc<Tier3>,
    peer: Peer,
}

impl Client {
    /// Carries a request there, out, and its answer back. A request that has begun is carried out although its sender dies.
    async fn ask<T: Send + 'static>(
        &self,
        (operation, key): (Operation, &str),
        request: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        // A daemon that was killed asks for nothing.
        if !self.tier3.wire.runs(&self.peer) {
            return std::future::pending().await;
        }
        let (wire, node) = (Arc::clone(&self.tier3.wire), self.peer.node.clone());
        let slower = *self.tier3.slower.lock().unwrap_or_else(PoisonError::into_inner);
        let exchange = tokio::spawn(async move {
            tokio::time::sleep(wire.delay() + slower).await;
            if !wire.reaches(&node, PLACE) {
                return std::future::pending().await;
            }
            let answer = request.await;
            tokio::time::sleep(wire.delay() + slower).await;
            if !wire.reaches(PLACE, &node) {
                return std::future::pending().await;
            }
            answer
        });
        let abort = exchange.abort_handle();
        match tokio::time::timeout(PATIENCE, exchange).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Ok(Err(_)) | Err(_) => {
                abort.abort();
                let (key, store) = (key.to_owned(), self.describe());
                Err(match operation {
                    Operation::Create | Operation::Upload | Operation::Delete => StoreError::Doubtful {
                        operation,
                        key,
                        store,
                        attempts: 1,
                        reason: "no answer".to_owned(),
                    },
                    _ => StoreError::Unavailable {
                        operation,
                        key,
                        store,
                        attempts: 1,
                        source: "no answer".into(),
                    },
                })
            }
        }
    }

    fn objects(&self) -> MemoryStore {
        self.tier3.objects.clone()
    }
}

#[async_trait]
impl Store for Client {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created, StoreError> {
        let (tier3, owned) = (Arc::clone(&self.tier3), key.to_owned());
        self.ask((Operation::Create, key), async move {
            let created = tier3.objects.create(&owned, body.clone()).await?;
            if let (Created::Created, Ok(Key::Committed { version })) = (created, owned.parse()) {
                tier3.decided(version, &body).await;
            }
            Ok(created)
        })
        .await
    }

    async fn get(&self, key: &str, limit_bytes: u64) -> Result<Option<Bytes>, StoreError> {
        let (objects, owned) = (self.objects(), key.to_owned());
        self.ask((Operation::Get, key), async move { objects.get(&owned, limit_bytes).await }).await
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let (objects, owned) = (self.objects(), key.to_owned());
        self.ask((Operation::GetRange, key), async move { objects.get_range(&owned, range).await }).await
    }

    async fn head(&self, key: &str) -> Result<Option<ObjectHead>, StoreError> {
        let (objects, owned) = (self.objects(), key.to_owned());
        self.ask((Operation::Head, key), async move { objects.head(&owned).await }).await
    }

    async fn list(&self, prefix: &str, delimiter: bool) -> Result<Listing, StoreError> {
        let (objects, owned) = (self.objects(), prefix.to_owned());
        self.ask((Operation::List, prefix), async move { objects.list(&owned, delimiter).await }).await
    }

    async fn upload(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        let (objects, owned, limits) = (self.objects(), key.to_owned(), *limits);
        self.ask((Operation::Upload, key), async move { objects.upload(&owned, source, &limits).await }).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let (objects, owned) = (self.objects(), key.to_owned());
        self.ask((Operation::Delete, key), async move { objects.delete(&owned).await }).await
    }

    async fn send_damaged_part(&self, key: &str) -> Result<Damage, StoreError> {
        let (objects, owned) = (self.objects(), key.to_owned());
        self.ask((Operation::Probe, key), async move { objects.send_damaged_part(&owned).await }).await
    }

    fn describe(&self) -> String {
        "simulated://tier3".to_owned()
    }
}
