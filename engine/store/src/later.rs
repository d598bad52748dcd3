//! A store that is opened at its first use, and tried again until it opens: for nodes that must not wait for it.
//!
//! Owns: the opening, and holding writes back until a caller has the right to them. Does not own: the store, which caller has that
//! right.

use super::{
    Created, Damage, Listing, ObjectHead, Operation, PartSource, Silence, Store, StoreError,
    UnfinishedUpload, UploadLimits, Uploaded,
};
use async_trait::async_trait;
use bytes::Bytes;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::OnceCell;

/// See the module's head.
#[derive(Debug)]
pub struct LaterStore {
    url: String,
    store: OnceCell<Arc<dyn Store>>,
    /// The reason why nothing is written; none if writes go through.
    held: Mutex<Option<String>>,
}

impl LaterStore {
    /// Makes the store of a URL. A malformed URL is refused at once; a store that is only away is not noticed here.
    ///
    /// # Errors
    /// [`StoreError::Url`].
    pub async fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
        let later = Self { url: url.to_owned(), store: OnceCell::new(), held: Mutex::default() };
        match later.opened().await {
            Err(error @ StoreError::Url { .. }) => Err(error),
            Ok(_) | Err(_) => Ok(Arc::new(later)),
        }
    }

    /// Makes the store of a URL, without contacting it. Reads go through. A write fails with [`StoreError::Unavailable`] for the
    /// reason `why` until [`Self::let_writes_through`].
    #[must_use]
    pub fn held(url: &str, why: &str) -> Arc<Self> {
        let held = Mutex::new(Some(why.to_owned()));
        Arc::new(Self { url: url.to_owned(), store: OnceCell::new(), held })
    }

    /// Returns the store itself, for a caller that makes sure of the right to write there.
    ///
    /// # Errors
    /// When the store cannot be opened now.
    pub async fn opened(&self) -> Result<&Arc<dyn Store>, StoreError> {
        self.store.get_or_try_init(|| super::open(&self.url)).await
    }

    /// Changes the reason that held writes report from now on.
    pub fn say_why(&self, why: &str) {
        if let Some(held) = self.holding().as_mut() {
            why.clone_into(held);
        }
    }

    /// Lets writes through: the right to write is certain.
    pub fn let_writes_through(&self) {
        *self.holding() = None;
    }

    fn holding(&self) -> MutexGuard<'_, Option<String>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn writable(&self, operation: Operation, key: &str) -> Result<&Arc<dyn Store>, StoreError> {
        let held = self.holding().clone();
        match held {
            None => self.opened().await,
            Some(why) => Err(StoreError::Unavailable {
                operation,
                key: key.to_owned(),
                store: self.describe(),
                attempts: 1,
                source: why.into(),
            }),
        }
    }
}

#[async_trait]
impl Store for LaterStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created, StoreError> {
        self.writable(Operation::Create, key).await?.create(key, body).await
    }

    async fn get(&self, key: &str, limit_bytes: u64) -> Result<Option<Bytes>, StoreError> {
        self.opened().await?.get(key, limit_bytes).await
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        self.opened().await?.get_range(key, range).await
    }

    async fn head(&self, key: &str) -> Result<Option<ObjectHead>, StoreError> {
        self.opened().await?.head(key).await
    }

    async fn list(&self, prefix: &str, delimiter: bool) -> Result<Listing, StoreError> {
        self.opened().await?.list(prefix, delimiter).await
    }

    async fn upload(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        self.writable(Operation::Upload, key).await?.upload(key, source, limits).await
    }

    async fn replace(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        self.writable(Operation::Upload, key).await?.replace(key, source, limits).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.writable(Operation::Delete, key).await?.delete(key).await
    }

    async fn unfinished_uploads(&self) -> Result<Vec<UnfinishedUpload>, StoreError> {
        self.opened().await?.unfinished_uploads().await
    }

    async fn abort_upload(&self, upload: &UnfinishedUpload) -> Result<(), StoreError> {
        self.writable(Operation::Delete, &upload.key).await?.abort_upload(upload).await
    }

    async fn send_damaged_part(&self, key: &str) -> Result<Damage, StoreError> {
        self.writable(Operation::Probe, key).await?.send_damaged_part(key).await
    }

    fn silence(&self) -> Option<Silence> {
        self.store.get().and_then(|store| store.silence())
    }

    fn describe(&self) -> String {
        self.store.get().map_or_else(|| super::without_secrets(&self.url), |store| store.describe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn reads_go_through_and_writes_are_held_back_until_they_are_let_through() {
        let folder = tempfile::tempdir().expect("tempdir");
        let later = LaterStore::held(&format!("file://{}", folder.path().display()), "not yet");
        let direct = later.opened().await.expect("it is there");
        direct.create("k", Bytes::from_static(b"1")).await.expect("who has the right writes");
        assert_eq!(later.get("k", 8).await.expect("read").as_deref(), Some(&b"1"[..]));
        assert_eq!(later.list("", true).await.expect("listed").keys.len(), 1);
        later.say_why("it is full");
        let source: Arc<dyn PartSource> = Arc::new(Bytes::from_static(b"2"));
        let limits = UploadLimits::default();
        let refusals = [
            later.create("l", Bytes::new()).await.map(drop),
            later.upload("l", Arc::clone(&source), &limits).await.map(drop),
            later.replace("k", Arc::clone(&source), &limits).await.map(drop),
            later.delete("k").await,
            later.send_damaged_part("l").await.map(drop),
        ];
        for refused in refusals {
            let error = refused.expect_err("nothing is written");
            assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
            assert!(error.to_string().contains("it is full"), "{error}");
        }
        assert_eq!(later.get("k", 8).await.expect("read").as_deref(), Some(&b"1"[..]));
        later.let_writes_through();
        later.say_why("too late");
        later.create("l", Bytes::new()).await.expect("it is let through");
        later.delete("k").await.expect("it is let through");
    }
}
