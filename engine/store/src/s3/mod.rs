//! Tier-3 in a bucket: `s3://bucket/prefix`, and with the same care `gs://bucket/prefix` and `az://container/prefix`.
//!
//! Owns: [`S3Store`], single requests, their repetition, and the result of a doubtful create. Does not own: the
//! environment (`config`, `cloud`), multipart uploads (`upload`, `unfinished`), HTTP answers (`wire`).
//!
//! `object_store` never repeats a request here. An inner repetition of a conditional put can turn a success into
//! "already exists", and only this layer knows which requests may be sent twice.

mod cloud;
mod config;
mod unfinished;
mod upload;
mod wire;

use super::{
    Cause, Created, Damage, Listing, MAX_LISTED, ObjectHead, Operation, PartSource, Silence, Store,
    StoreError, StoreSettings, UnfinishedUpload, UploadLimits, Uploaded, check_key, silence::Answers,
};
use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use object_store::aws::AmazonS3;
use object_store::client::HttpClient;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
};
use std::collections::BTreeSet;
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use url::Url;
use wire::{SentChecksum, Trouble};

/// Size of the probe's damaged part: not empty, because it is damaged by overwriting it with zeros.
const PROBE_PART_BYTES: usize = 1024;

/// Maximum number of pages of a listing: a page without entries is allowed, an endless chain of them is not.
const MAX_PAGES: usize = MAX_LISTED;

/// The calls that every client has, whatever its cloud.
trait Client: ObjectStore + MultipartStore + PaginatedListStore {}

impl<T: ObjectStore + MultipartStore + PaginatedListStore> Client for T {}

/// The additions for S3 alone.
struct Aws {
    client: Arc<AmazonS3>,
    /// The same client, except that every part it sends is damaged.
    damaging: AmazonS3,
    /// Sends requests whose signature is in the URL; adds no header, because only `host` is signed there.
    plain: HttpClient,
}

/// The destination of a store's requests.
struct Target {
    client: Arc<dyn Client>,
    aws: Option<Aws>,
    /// The remedy if the store refuses a request.
    refused: &'static str,
    /// Whether a listing contains an object whose key is the prefix itself; Azure's client leaves it out.
    lists_exact: bool,
    /// `bucket/prefix` and endpoint, without secrets.
    description: String,
    /// The prefix; ends with `/` unless empty.
    prefix: String,
}

/// Objects in a bucket, below a prefix.
pub struct S3Store {
    client: Arc<dyn Client>,
    aws: Option<Aws>,
    refused: &'static str,
    lists_exact: bool,
    description: String,
    prefix: String,
    settings: StoreSettings,
    answers: Answers,
}

impl fmt::Debug for S3Store {
    /// Leaves the client out, because it knows the credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Store").field("store", &self.description).finish_non_exhaustive()
    }
}

/// A request that did not succeed.
struct Failed {
    trouble: Trouble,
    cause: Cause,
}

impl S3Store {
    /// Builds the client from the URL and the environment, without contacting the network.
    pub fn open(url: &Url, settings: &StoreSettings) -> Result<Self, StoreError> {
        let make = if url.scheme() == "s3" { config::target } else { cloud::target };
        let Target { client, aws, refused, lists_exact, description, prefix } = make(url, settings)?;
        let (settings, answers) = (settings.clone(), Answers::default());
        Ok(Self { client, aws, refused, lists_exact, description, prefix, settings, answers })
    }

    fn path(&self, operation: Operation, key: &str) -> Result<Path, StoreError> {
        let full = format!("{}{key}", self.prefix);
        check_key(operation, &full, &self.description)?;
        Path::parse(&full).map_err(|error| StoreError::Key {
            operation,
            key: key.to_owned(),
            store: self.description.clone(),
            reason: error.to_string(),
        })
    }

    fn deadline(&self, bytes: u64) -> Duration {
        self.settings.request_timeout + Duration::from_secs(bytes / self.settings.least_bytes_per_s.max(1))
    }

    /// Sends a request that moves about `bytes`, within its time limit.
    async fn attempt<T>(
        &self,
        bytes: u64,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Failed> {
        let (deadline, sent) = (self.deadline(bytes), Instant::now());
        match tokio::time::timeout(deadline, request).await {
            Ok(Ok(value)) => {
                self.answers.came(Instant::now());
                Ok(value)
            }
            Ok(Err(error)) => {
                let trouble = wire::trouble(&error);
                if trouble.is_answer() {
                    self.answers.came(Instant::now());
                }
                Err(Failed { trouble, cause: Box::new(error) })
            }
            Err(_) => {
                let failed = no_answer(deadline);
                let why = format!("{}: {}", self.description, failed.cause);
                self.answers.given_up(sent, Instant::now(), why);
                Err(failed)
            }
        }
    }

    /// Repeats a request that is harmless when sent twice, until it succeeds, is refused, or the attempts are used up.
    async fn repeat<T, F, R>(
        &self,
        operation: Operation,
        key: &str,
        bytes: u64,
        make: F,
    ) -> Result<T, StoreError>
    where
        F: Fn() -> R + Send + Sync,
        R: Future<Output = object_store::Result<T>> + Send,
    {
        self.repeat_attempts(operation, key, || self.attempt(bytes, make())).await
    }

    async fn repeat_attempts<T, F, R>(
        &self,
        operation: Operation,
        key: &str,
        make: F,
    ) -> Result<T, StoreError>
    where
        F: Fn() -> R + Send + Sync,
        R: Future<Output = Result<T, Failed>> + Send,
    {
        let mut done = 0;
        loop {
            done += 1;
            match make().await {
                Ok(value) => return Ok(value),
                Err(failed) if failed.trouble.is_transient() && self.settings.retry.may_repeat(done) => {
                    tracing::debug!(%operation, key, done, trouble = ?failed.trouble, "will be tried again");
                    self.settings.retry.pause(done).await;
                }
                Err(failed) => return Err(self.error(operation, key, done, failed)),
            }
        }
    }

    /// Makes the final error of a request that had no doubtful effect, or whose effect does not matter.
    fn error(&self, operation: Operation, key: &str, attempts: u32, failed: Failed) -> StoreError {
        let (key, store) = (key.to_owned(), self.description.clone());
        let reason = failed.cause.to_string();
        let action = match failed.trouble {
            Trouble::Unsent | Trouble::NoAnswer | Trouble::Failing | Trouble::Conflict | Trouble::Exists => {
                return StoreError::Unavailable { operation, key, store, attempts, source: failed.cause };
            }
            Trouble::Absent => return StoreError::NotFound { operation, key, store },
            Trouble::Damaged => return StoreError::Damaged { operation, key, store, attempts, reason },
            Trouble::NoBucket if self.aws.is_none() => "create the bucket or container, or correct the URL",
            Trouble::NoBucket => "create the bucket, or correct the URL or AWS_ENDPOINT_URL",
            Trouble::Denied => self.refused,
            Trouble::Range | Trouble::Malformed if self.aws.is_none() => "check the URL and the endpoint",
            Trouble::Range | Trouble::Malformed => "check the URL, AWS_REGION and AWS_ENDPOINT_URL",
        };
        StoreError::Refused { operation, key, store, reason, action: action.to_owned() }
    }

    fn unavailable(&self, operation: Operation, key: &str, attempts: u32, source: Cause) -> StoreError {
        let (key, store) = (key.to_owned(), self.description.clone());
        StoreError::Unavailable { operation, key, store, attempts, source }
    }

    fn doubtful(&self, operation: Operation, key: &str, attempts: u32, reason: String) -> StoreError {
        let (key, store) = (key.to_owned(), self.description.clone());
        StoreError::Doubtful { operation, key, store, attempts, reason }
    }

    async fn head_once(&self, path: &Path) -> Result<Option<ObjectMeta>, Failed> {
        match self.attempt(0, self.client.head(path)).await {
            Ok(meta) => Ok(Some(meta)),
            Err(failed) if failed.trouble == Trouble::Absent => Ok(None),
            Err(failed) => Err(failed),
        }
    }

    /// Reads a whole object once. `Err(size)` inside: the object is larger than the limit and was not read.
    async fn get_once(&self, path: &Path, limit_bytes: u64) -> Result<Option<Result<Bytes, u64>>, Failed> {
        let found = match self.attempt(0, self.client.get(path)).await {
            Ok(found) => found,
            Err(failed) if failed.trouble == Trouble::Absent => return Ok(None),
            Err(failed) => return Err(failed),
        };
        let size_bytes = found.meta.size;
        if size_bytes > limit_bytes {
            return Ok(Some(Err(size_bytes)));
        }
        let sent = found.extensions.get::<SentChecksum>().cloned();
        let bytes = self.attempt(size_bytes, found.bytes()).await?;
        if let Some(SentChecksum(sent)) = sent {
            let ours = STANDARD.encode(tidemark_kernels::crc64(&bytes).to_be_bytes());
            if ours != sent {
                let cause =
                    format!("{} bytes came with CRC-64/NVME {ours}, the store has {sent}", bytes.len());
                return Err(Failed { trouble: Trouble::Damaged, cause: cause.into() });
            }
        }
        Ok(Some(Ok(bytes)))
    }
}

fn no_answer(deadline: Duration) -> Failed {
    Failed { trouble: Trouble::NoAnswer, cause: format!("no answer within {deadline:?}").into() }
}

#[async_trait]
impl Store for S3Store {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created, StoreError> {
        let path = self.path(Operation::Create, key)?;
        let options = || PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let size_bytes = body.len() as u64;
        // The reason why an earlier attempt may have taken effect, or may still do so.
        let mut doubt: Option<String> = None;
        let mut done = 0;
        loop {
            done += 1;
            let put = self.client.put_opts(&path, PutPayload::from(body.clone()), options());
            let Err(failed) = self.attempt(size_bytes, put).await else { return Ok(Created::Created) };
            if !failed.trouble.had_no_effect() {
                let reason = doubt.insert(failed.cause.to_string());
                match self.get_once(&path, size_bytes).await {
                    Ok(Some(Ok(there))) if there == body => return Ok(Created::Created),
                    Ok(Some(_)) => return Ok(Created::AlreadyExists),
                    Ok(None) => {}
                    Err(looked) => {
                        reason.push_str("; then: ");
                        reason.push_str(&looked.cause.to_string());
                    }
                }
            }
            let goes_on = failed.trouble.is_transient() || failed.trouble == Trouble::Exists;
            if !goes_on || !self.settings.retry.may_repeat(done) {
                return Err(match doubt {
                    Some(reason) => self.doubtful(Operation::Create, key, done, reason),
                    None => self.error(Operation::Create, key, done, failed),
                });
            }
            self.settings.retry.pause(done).await;
        }
    }

    async fn get(&self, key: &str, limit_bytes: u64) -> Result<Option<Bytes>, StoreError> {
        let path = self.path(Operation::Get, key)?;
        match self.repeat_attempts(Operation::Get, key, || self.get_once(&path, limit_bytes)).await? {
            None => Ok(None),
            Some(Ok(bytes)) => Ok(Some(bytes)),
            Some(Err(size_bytes)) => Err(StoreError::TooLarge {
                key: key.to_owned(),
                store: self.description.clone(),
                size_bytes,
                limit_bytes,
            }),
        }
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let path = self.path(Operation::GetRange, key)?;
        let outside = |reason: String| StoreError::Range {
            key: key.to_owned(),
            store: self.description.clone(),
            start: range.start,
            end: range.end,
            reason,
        };
        if range.start >= range.end {
            // HTTP has no empty range, so only its place is checked.
            return match self.head(key).await? {
                Some(head) if range.start == range.end && range.end <= head.size_bytes => Ok(Bytes::new()),
                Some(head) => Err(outside(format!("the object has {} bytes", head.size_bytes))),
                None => Err(StoreError::NotFound {
                    operation: Operation::GetRange,
                    key: key.to_owned(),
                    store: self.description.clone(),
                }),
            };
        }
        let wanted = range.end - range.start;
        // `None`: the range begins at or after the end, which is an answer and no failure.
        let read = || async {
            let options =
                GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
            let found = match self.attempt(0, self.client.get_opts(&path, options)).await {
                Err(failed) if failed.trouble == Trouble::Range => return Ok(None),
                found => found?,
            };
            // A store may answer with more than was asked for; that is refused rather than held.
            if found.range.end.saturating_sub(found.range.start) > wanted {
                let cause = format!("bytes {:?} came instead", found.range);
                return Err(Failed { trouble: Trouble::Malformed, cause: cause.into() });
            }
            let size_bytes = found.meta.size;
            Ok(Some((self.attempt(wanted, found.bytes()).await?, size_bytes)))
        };
        match self.repeat_attempts(Operation::GetRange, key, read).await? {
            Some((bytes, _)) if bytes.len() as u64 == wanted => Ok(bytes),
            Some((_, size_bytes)) => Err(outside(format!("the object has {size_bytes} bytes"))),
            None => Err(outside("it begins at or after the end of the object".to_owned())),
        }
    }

    async fn head(&self, key: &str) -> Result<Option<ObjectHead>, StoreError> {
        let path = self.path(Operation::Head, key)?;
        let meta = self.repeat_attempts(Operation::Head, key, || self.head_once(&path)).await?;
        Ok(meta.map(|meta| ObjectHead { key: key.to_owned(), size_bytes: meta.size, etag: meta.e_tag }))
    }

    async fn list(&self, prefix: &str, delimiter: bool) -> Result<Listing, StoreError> {
        let full = format!("{}{prefix}", self.prefix);
        let mut listing = Listing::default();
        let mut prefixes = BTreeSet::new();
        if !self.lists_exact && !prefix.is_empty() && !prefix.ends_with('/') {
            listing.keys.extend(self.head(prefix).await?);
        }
        let mut page_token: Option<String> = None;
        for _ in 0..MAX_PAGES {
            let options = || PaginatedListOptions {
                delimiter: delimiter.then(|| "/".into()),
                page_token: page_token.clone(),
                ..PaginatedListOptions::default()
            };
            let page = self
                .repeat(Operation::List, prefix, 0, || {
                    self.client.list_paginated(Some(full.as_str()).filter(|f| !f.is_empty()), options())
                })
                .await?;
            let ours = |path: &Path| path.as_ref().strip_prefix(&self.prefix).map(str::to_owned);
            for meta in page.result.objects {
                let Some(key) = ours(&meta.location) else { continue };
                listing.keys.push(ObjectHead { key, size_bytes: meta.size, etag: meta.e_tag });
            }
            prefixes.extend(page.result.common_prefixes.iter().filter_map(ours).map(|text| text + "/"));
            if listing.keys.len() + prefixes.len() > MAX_LISTED {
                break;
            }
            page_token = page.page_token;
            if page_token.is_none() {
                listing.keys.sort_by(|a, b| a.key.cmp(&b.key));
                listing.prefixes = prefixes.into_iter().collect();
                return Ok(listing);
            }
        }
        Err(StoreError::TooMany {
            prefix: prefix.to_owned(),
            store: self.description.clone(),
            limit: MAX_LISTED,
        })
    }

    async fn upload(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        let path = self.path(Operation::Upload, key)?;
        self.upload_parts(key, &path, &source, limits).await
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        let path = self.path(Operation::Delete, key)?;
        match self.repeat(Operation::Delete, key, 0, || self.client.delete(&path)).await {
            Err(StoreError::NotFound { .. }) => Ok(()),
            result => result,
        }
    }

    async fn unfinished_uploads(&self) -> Result<Vec<UnfinishedUpload>, StoreError> {
        match &self.aws {
            Some(aws) => self.list_unfinished(aws).await,
            // Azure drops blocks that were never put into a blob by itself; Google needs a lifecycle rule for that.
            None => Ok(Vec::new()),
        }
    }

    async fn abort_upload(&self, upload: &UnfinishedUpload) -> Result<(), StoreError> {
        self.abort_unfinished(upload).await
    }

    async fn send_damaged_part(&self, key: &str) -> Result<Damage, StoreError> {
        let path = self.path(Operation::Probe, key)?;
        let Some(aws) = &self.aws else {
            let reason = "no checksum is sent with a part to this kind of store".to_owned();
            return Ok(Damage::Accepted { reason });
        };
        let id = self.repeat(Operation::Probe, key, 0, || self.client.create_multipart(&path)).await?;
        let part = || PutPayload::from(vec![b'x'; PROBE_PART_BYTES]);
        // A good part first: a store that refuses every part has not proved that it checks.
        let good =
            self.repeat(Operation::Probe, key, 0, || self.client.put_part(&path, &id, 0, part())).await;
        // Finds out whether the part was refused. Not `repeat`, which would send it again after a refusal for the
        // checksum.
        let refused = self
            .repeat_attempts(Operation::Probe, key, || async {
                match self.attempt(0, aws.damaging.put_part(&path, &id, 1, part())).await {
                    Ok(_) => Ok(false),
                    Err(Failed {
                        trouble: Trouble::Damaged | Trouble::Malformed | Trouble::Denied, ..
                    }) => Ok(true),
                    Err(failed) => Err(failed),
                }
            })
            .await;
        let aborted = self.repeat(Operation::Probe, key, 0, || self.client.abort_multipart(&path, &id)).await;
        good?;
        match aborted {
            // An answer was lost, and the upload was gone when the request was repeated.
            Ok(()) | Err(StoreError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
        match refused {
            Ok(true) => Ok(Damage::Refused),
            Ok(false) => {
                Ok(Damage::Accepted { reason: "a part that differs from its checksum was taken".to_owned() })
            }
            // The good part was accepted, and this one failed each time: nothing proves that the checksum was the
            // reason.
            Err(StoreError::Unavailable { source, .. }) => Ok(Damage::Accepted {
                reason: format!("a damaged part was answered with a failure: {source}"),
            }),
            Err(error) => Err(error),
        }
    }

    fn silence(&self) -> Option<Silence> {
        self.answers.silence(Instant::now())
    }

    fn describe(&self) -> String {
        self.description.clone()
    }
}
