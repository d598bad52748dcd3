//! A store that fails on demand, for tests of its users.
//!
//! Owns: faults as data around any [`Store`]. Does not own: faults on the wire. The S3 server of the test harness
//! makes those, because they pass through the real client.

use super::{
    Created, Damage, Listing, ObjectHead, Operation, PartSource, Silence, Store, StoreError,
    UnfinishedUpload, UploadLimits, Uploaded,
};
use async_trait::async_trait;
use bytes::Bytes;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The effect of a fault on the operation that it meets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The store is away: nothing happens, and the caller gets an error.
    FailBefore,
    /// The operation happens, and the answer is lost: [`StoreError::Doubtful`] for writes, unavailable for reads.
    FailAfter,
    /// The operation happens after a pause.
    Delay(Duration),
    /// The operation happens, and the answer never comes. As in a crash, the caller can only be killed or give
    /// up.
    HangAfter,
}

/// A scripted fault.
#[derive(Debug, Clone)]
pub struct Fault {
    pub operation: Operation,
    /// Text in the keys (for list: prefixes) that the fault meets; empty meets all.
    pub key_contains: String,
    /// Number of the matching call that the fault meets, from 1; `None` meets every one.
    pub nth: Option<u64>,
    pub effect: Effect,
}

#[derive(Debug)]
struct Armed {
    fault: Fault,
    matched: AtomicU64,
    fired: AtomicU64,
}

/// Any store, with faults in front of it.
#[derive(Debug)]
pub struct FaultyStore {
    inner: Arc<dyn Store>,
    faults: Vec<Armed>,
}

impl FaultyStore {
    #[must_use]
    pub fn new(inner: Arc<dyn Store>, faults: Vec<Fault>) -> Self {
        let arm = |fault| Armed { fault, matched: AtomicU64::new(0), fired: AtomicU64::new(0) };
        Self { inner, faults: faults.into_iter().map(arm).collect() }
    }

    /// Returns how often the fault at `index` (in the order given) took effect. A test that scripts a fault
    /// asserts this.
    ///
    /// # Panics
    /// If there is no such fault.
    #[must_use]
    pub fn fired(&self, index: usize) -> u64 {
        self.faults[index].fired.load(Ordering::SeqCst)
    }

    /// Returns the effect of the first fault that meets this call. Every matching fault counts the call.
    fn meet(&self, operation: Operation, key: &str) -> Option<Effect> {
        let mut effect = None;
        for armed in &self.faults {
            if armed.fault.operation != operation || !key.contains(&armed.fault.key_contains) {
                continue;
            }
            let number = armed.matched.fetch_add(1, Ordering::SeqCst) + 1;
            if effect.is_none() && armed.fault.nth.is_none_or(|nth| nth == number) {
                armed.fired.fetch_add(1, Ordering::SeqCst);
                effect = Some(armed.fault.effect);
            }
        }
        effect
    }

    async fn run<T>(
        &self,
        operation: Operation,
        key: &str,
        call: impl Future<Output = Result<T, StoreError>>,
    ) -> Result<T, StoreError> {
        let writes = matches!(operation, Operation::Create | Operation::Upload | Operation::Delete);
        let away = || StoreError::Unavailable {
            operation,
            key: key.to_owned(),
            store: self.describe(),
            attempts: 1,
            source: "scripted fault".into(),
        };
        match self.meet(operation, key) {
            None => call.await,
            Some(Effect::FailBefore) => Err(away()),
            Some(Effect::FailAfter) => {
                call.await?;
                if !writes {
                    return Err(away());
                }
                Err(StoreError::Doubtful {
                    operation,
                    key: key.to_owned(),
                    store: self.describe(),
                    attempts: 1,
                    reason: "scripted fault".to_owned(),
                })
            }
            Some(Effect::Delay(pause)) => {
                tokio::time::sleep(pause).await;
                call.await
            }
            Some(Effect::HangAfter) => {
                call.await?;
                std::future::pending().await
            }
        }
    }
}

#[async_trait]
impl Store for FaultyStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created, StoreError> {
        self.run(Operation::Create, key, self.inner.create(key, body)).await
    }

    async fn get(&self, key: &str, limit_bytes: u64) -> Result<Option<Bytes>, StoreError> {
        self.run(Operation::Get, key, self.inner.get(key, limit_bytes)).await
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.run(Operation::GetRange, key, self.inner.get_range(key, range)).await
    }

    async fn head(&self, key: &str) -> Result<Option<ObjectHead>, StoreError> {
        self.run(Operation::Head, key, self.inner.head(key)).await
    }

    async fn list(&self, prefix: &str, delimiter: bool) -> Result<Listing, StoreError> {
        self.run(Operation::List, prefix, self.inner.list(prefix, delimiter)).await
    }

    async fn upload(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        self.run(Operation::Upload, key, self.inner.upload(key, source, limits)).await
    }

    async fn replace(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        self.run(Operation::Upload, key, self.inner.replace(key, source, limits)).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.run(Operation::Delete, key, self.inner.delete(key)).await
    }

    async fn unfinished_uploads(&self) -> Result<Vec<UnfinishedUpload>, StoreError> {
        self.run(Operation::List, "?uploads", self.inner.unfinished_uploads()).await
    }

    async fn abort_upload(&self, upload: &UnfinishedUpload) -> Result<(), StoreError> {
        self.run(Operation::Delete, &upload.key, self.inner.abort_upload(upload)).await
    }

    async fn send_damaged_part(&self, key: &str) -> Result<Damage, StoreError> {
        self.run(Operation::Probe, key, self.inner.send_damaged_part(key)).await
    }

    fn silence(&self) -> Option<Silence> {
        self.inner.silence()
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

    #[tokio::test]
    async fn a_lost_answer_leaves_the_object_and_is_told_as_doubtful() {
        let memory = Arc::new(MemoryStore::new());
        let fault = |nth, effect| Fault {
            operation: Operation::Create,
            key_contains: "_COMMITTED".to_owned(),
            nth: Some(nth),
            effect,
        };
        let store = FaultyStore::new(
            Arc::clone(&memory) as Arc<dyn Store>,
            vec![fault(1, Effect::FailBefore), fault(2, Effect::FailAfter)],
        );
        store.create("r/other", Bytes::new()).await.expect("not met");
        let away = store.create("r/_COMMITTED", Bytes::from("a")).await.expect_err("first");
        assert!(matches!(away, StoreError::Unavailable { .. }), "{away}");
        assert_eq!(memory.head("r/_COMMITTED").await.expect("head"), None);
        let doubtful = store.create("r/_COMMITTED", Bytes::from("a")).await.expect_err("second");
        assert!(doubtful.is_doubtful(), "{doubtful}");
        assert!(memory.head("r/_COMMITTED").await.expect("head").is_some());
        assert_eq!((store.fired(0), store.fired(1)), (1, 1));
    }
}
