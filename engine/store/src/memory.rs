//! Tier-3 in the memory of this process, for tests.
//!
//! Owns: the translation to `object_store`'s in-memory store, whose create-if-absent is atomic, and which serves
//! as the oracle of the store's contract. Does not own: anything durable.

use super::{
    Created, Damage, Listing, MAX_LISTED, ObjectHead, Operation, PartSource, Store, StoreError, UploadLimits,
    Uploaded, check_key, part_ranges, read_part,
};
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::TryStreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

const URL: &str = "memory://";

/// An object store that ends with the process. Clones share their objects, as two clients of one bucket do.
#[derive(Debug, Clone, Default)]
pub struct MemoryStore {
    inner: Arc<InMemory>,
}

impl MemoryStore {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn path(operation: Operation, key: &str) -> Result<Path, StoreError> {
        check_key(operation, key, URL)?;
        Path::parse(key).map_err(|error| StoreError::Key {
            operation,
            key: key.to_owned(),
            store: URL.to_owned(),
            reason: error.to_string(),
        })
    }
}

fn failed(operation: Operation, key: &str, error: Error) -> StoreError {
    StoreError::Unavailable {
        operation,
        key: key.to_owned(),
        store: URL.to_owned(),
        attempts: 1,
        source: Box::new(error),
    }
}

#[async_trait]
impl Store for MemoryStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created, StoreError> {
        let path = Self::path(Operation::Create, key)?;
        let options = PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        match self.inner.put_opts(&path, PutPayload::from(body.clone()), options).await {
            Ok(_) => Ok(Created::Created),
            Err(Error::AlreadyExists { .. }) => match self.get(key, body.len() as u64).await {
                Ok(Some(there)) if there == body => Ok(Created::Created),
                Ok(_) | Err(StoreError::TooLarge { .. }) => Ok(Created::AlreadyExists),
                Err(error) => Err(error),
            },
            Err(error) => Err(failed(Operation::Create, key, error)),
        }
    }

    async fn get(&self, key: &str, limit_bytes: u64) -> Result<Option<Bytes>, StoreError> {
        let path = Self::path(Operation::Get, key)?;
        let found = match self.inner.get(&path).await {
            Ok(found) => found,
            Err(Error::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(failed(Operation::Get, key, error)),
        };
        if found.meta.size > limit_bytes {
            return Err(StoreError::TooLarge {
                key: key.to_owned(),
                store: URL.to_owned(),
                size_bytes: found.meta.size,
                limit_bytes,
            });
        }
        found.bytes().await.map(Some).map_err(|error| failed(Operation::Get, key, error))
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let Some(head) = self.head(key).await? else {
            return Err(StoreError::NotFound {
                operation: Operation::GetRange,
                key: key.to_owned(),
                store: URL.to_owned(),
            });
        };
        if range.start > range.end || range.end > head.size_bytes {
            return Err(StoreError::Range {
                key: key.to_owned(),
                store: URL.to_owned(),
                start: range.start,
                end: range.end,
                reason: format!("the object has {} bytes", head.size_bytes),
            });
        }
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let path = Self::path(Operation::GetRange, key)?;
        self.inner.get_range(&path, range).await.map_err(|error| failed(Operation::GetRange, key, error))
    }

    async fn head(&self, key: &str) -> Result<Option<ObjectHead>, StoreError> {
        let path = Self::path(Operation::Head, key)?;
        match self.inner.head(&path).await {
            Ok(meta) => Ok(Some(ObjectHead { key: key.to_owned(), size_bytes: meta.size, etag: meta.e_tag })),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed(Operation::Head, key, error)),
        }
    }

    async fn list(&self, prefix: &str, delimiter: bool) -> Result<Listing, StoreError> {
        let mut listing = Listing::default();
        let mut prefixes = BTreeSet::new();
        let mut all = self.inner.list(None);
        while let Some(meta) = all.try_next().await.map_err(|error| failed(Operation::List, prefix, error))? {
            let key = meta.location.as_ref();
            let Some(rest) = key.strip_prefix(prefix) else { continue };
            match rest.find('/') {
                Some(at) if delimiter => {
                    prefixes.insert(format!("{prefix}{}", &rest[..=at]));
                }
                _ => listing.keys.push(ObjectHead {
                    key: key.to_owned(),
                    size_bytes: meta.size,
                    etag: meta.e_tag.clone(),
                }),
            }
            if listing.keys.len() + prefixes.len() > MAX_LISTED {
                return Err(StoreError::TooMany {
                    prefix: prefix.to_owned(),
                    store: URL.to_owned(),
                    limit: MAX_LISTED,
                });
            }
        }
        listing.keys.sort_by(|a, b| a.key.cmp(&b.key));
        listing.prefixes = prefixes.into_iter().collect();
        Ok(listing)
    }

    async fn upload(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        let path = Self::path(Operation::Upload, key)?;
        let size_bytes = source.size_bytes();
        let mut body = BytesMut::new();
        for range in part_ranges(size_bytes, limits.part_bytes) {
            body.extend_from_slice(&read_part(key, &source, range).await?);
        }
        let put = self
            .inner
            .put(&path, PutPayload::from(body.freeze()))
            .await
            .map_err(|error| failed(Operation::Upload, key, error))?;
        Ok(Uploaded { etag: put.e_tag, size_bytes })
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let path = Self::path(Operation::Delete, key)?;
        match self.inner.delete(&path).await {
            Ok(()) | Err(Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(failed(Operation::Delete, key, error)),
        }
    }

    async fn send_damaged_part(&self, _key: &str) -> Result<Damage, StoreError> {
        Ok(Damage::Accepted { reason: "memory takes what it is given and has no checksums".to_owned() })
    }

    fn describe(&self) -> String {
        URL.to_owned()
    }
}
