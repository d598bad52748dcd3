//! A store that is opened when it is first needed, and again until it opens: for nodes that must not wait for it.
//!
//! Owns: the opening. Does not own: the store.

use super::{
    Created, Damage, Listing, ObjectHead, PartSource, Silence, Store, StoreError, UnfinishedUpload,
    UploadLimits, Uploaded,
};
use async_trait::async_trait;
use bytes::Bytes;
use std::ops::Range;
use std::sync::Arc;
use tokio::sync::OnceCell;

/// See the module's head.
#[derive(Debug)]
pub struct LaterStore {
    url: String,
    store: OnceCell<Arc<dyn Store>>,
}

impl LaterStore {
    /// The store of a URL. One that cannot be understood is refused at once; what is only away is not noticed here.
    ///
    /// # Errors
    /// [`StoreError::Url`].
    pub async fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
        let later = Self { url: url.to_owned(), store: OnceCell::new() };
        match later.opened().await {
            Err(error @ StoreError::Url { .. }) => Err(error),
            Ok(_) | Err(_) => Ok(Arc::new(later)),
        }
    }

    async fn opened(&self) -> Result<&Arc<dyn Store>, StoreError> {
        self.store.get_or_try_init(|| super::open(&self.url)).await
    }
}

#[async_trait]
impl Store for LaterStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created, StoreError> {
        self.opened().await?.create(key, body).await
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
        self.opened().await?.upload(key, source, limits).await
    }

    async fn replace(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        self.opened().await?.replace(key, source, limits).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.opened().await?.delete(key).await
    }

    async fn unfinished_uploads(&self) -> Result<Vec<UnfinishedUpload>, StoreError> {
        self.opened().await?.unfinished_uploads().await
    }

    async fn abort_upload(&self, upload: &UnfinishedUpload) -> Result<(), StoreError> {
        self.opened().await?.abort_upload(upload).await
    }

    async fn send_damaged_part(&self, key: &str) -> Result<Damage, StoreError> {
        self.opened().await?.send_damaged_part(key).await
    }

    fn silence(&self) -> Option<Silence> {
        self.store.get().and_then(|store| store.silence())
    }

    fn describe(&self) -> String {
        self.store.get().map_or_else(|| super::without_secrets(&self.url), |store| store.describe())
    }
}
