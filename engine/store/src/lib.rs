//! Tier-3: the one trait through which the engine reads and writes durable objects, and opening a store by its URL.
//!
//! Owns: [`Store`], its promises, [`open`]. Does not own: the meaning of keys (`tidemark_protocol::key` builds them), the content of
//! a marker and the moment of writing it (`save`), the meaning of the bytes: callers check what they read against the checksums that
//! they recorded.
//!
//! `engine/design/0006-store.md` explains why the store is built this way.

mod epoch;
mod error;
mod faulty;
mod later;
mod memory;
mod posix;
mod probe;
mod retry;
mod s3;
mod silence;

pub use epoch::{current_epoch, raise_epoch};
pub use error::{Cause, Operation, StoreError};
pub use faulty::{Effect, Fault, FaultyStore};
pub use later::LaterStore;
pub use memory::MemoryStore;
pub use posix::PosixStore;
pub use probe::{Probe, probe};
pub use retry::RetryPolicy;
pub use s3::S3Store;
pub use silence::Silence;

use async_trait::async_trait;
use bytes::Bytes;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::file::Readers;
use url::Url;

/// A place for durable objects under keys. Keys are relative to the store's URL, parts separated by `/`.
///
/// No key is ever written twice with different bytes. The callers keep to that, and every implementation relies on it if an answer
/// is lost. All calls are bounded in time by the store's settings.
#[async_trait]
pub trait Store: Send + Sync + fmt::Debug {
    /// Creates the object if the key is free; durable when it returns `Ok`.
    ///
    /// [`Created::Created`] means that the key holds exactly these bytes now. If a caller must know *who* won, it puts its identity
    /// into the body; equal bodies are one decision. A lost or doubtful answer is resolved by reading back; if that is not possible
    /// either, the error is [`StoreError::Doubtful`]. Costs one round trip, two if the key was taken.
    async fn create(&self, key: &str, body: Bytes) -> Result<Created, StoreError>;

    /// Returns the whole object, or `None` if there is none. If it has more than `limit_bytes`, it is not read, and the error is
    /// [`StoreError::TooLarge`]. The bytes are checked against the store's own checksum if it keeps one.
    async fn get(&self, key: &str, limit_bytes: u64) -> Result<Option<Bytes>, StoreError>;

    /// Returns exactly the bytes of `range`. A range not inside the object is [`StoreError::Range`], an absent object
    /// [`StoreError::NotFound`]. The bytes are not verified: the caller has the chunks' checksums.
    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError>;

    /// Waits between two tries of a doubtful operation. If the store is a model, time is the model's.
    async fn pause(&self, length: Duration) {
        tokio::time::sleep(length).await;
    }

    /// Returns the size of the object, or `None` if there is none.
    async fn head(&self, key: &str) -> Result<Option<ObjectHead>, StoreError>;

    /// Lists all objects whose key begins with `prefix`, sorted by key. With `delimiter`, those with a further `/` after the prefix
    /// are folded into `prefixes`. A listing is never cut short: beyond [`MAX_LISTED`] the error is [`StoreError::TooMany`].
    async fn list(&self, prefix: &str, delimiter: bool) -> Result<Listing, StoreError>;

    /// Writes a data object in parts, at most `parts_in_flight × part_bytes` of it in memory; durable on `Ok`.
    ///
    /// The key must be new, or hold the same bytes from an earlier try. No part of a failed upload is visible.
    async fn upload(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError>;

    /// Rewrites a data object whose bytes are bad or gone. The key held exactly the bytes of `source`; durable on `Ok`.
    ///
    /// Readers see the former object or the new one, never a part. The caller has to read it back: a lost answer may count as a
    /// success here, because the bad object may have the same size.
    async fn replace(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        self.upload(key, source, limits).await
    }

    /// Removes the object; absent is `Ok`.
    async fn delete(&self, key: &str) -> Result<(), StoreError>;

    /// Lists uploads that were begun below the store's URL and neither finished nor aborted, whoever began them. A store that cleans
    /// up behind its writers has none.
    async fn unfinished_uploads(&self) -> Result<Vec<UnfinishedUpload>, StoreError> {
        Ok(Vec::new())
    }

    /// Aborts such an upload, and drops its parts; absent is `Ok`. The caller knows that its writer is dead.
    async fn abort_upload(&self, _upload: &UnfinishedUpload) -> Result<(), StoreError> {
        Ok(())
    }

    /// Sends one part that differs from its checksum to `key`, for the probe, and returns the outcome.
    async fn send_damaged_part(&self, key: &str) -> Result<Damage, StoreError>;

    /// Returns since when the store gives no answer, if a request ended for that reason, whether it is repeated or not. Costs
    /// nothing. A store without a network is never silent.
    fn silence(&self) -> Option<Silence> {
        None
    }

    /// Returns the URL, without secrets.
    fn describe(&self) -> String;
}

/// The result of [`Store::create`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// The key holds exactly the bytes of this call.
    Created,
    /// The key holds other bytes, and they stay.
    AlreadyExists,
}

/// An object as a listing shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectHead {
    pub key: String,
    pub size_bytes: u64,
    /// The store's own version of the bytes, if it has one.
    pub etag: Option<String>,
}

/// A complete listing, sorted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    pub keys: Vec<ObjectHead>,
    /// Common prefixes, each ending with `/`.
    pub prefixes: Vec<String>,
}

/// Bounds on an upload: how much of it may be in memory and on the way at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UploadLimits {
    pub part_bytes: u64,
    pub parts_in_flight: usize,
}

impl Default for UploadLimits {
    fn default() -> Self {
        // 8 MiB is the manifest's checksum chunk and above S3's least part; eight of them hide the round trip.
        Self { part_bytes: 8 << 20, parts_in_flight: 8 }
    }
}

/// The object that an upload left in the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uploaded {
    pub etag: Option<String>,
    pub size_bytes: u64,
}

/// An upload that was begun and not finished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnfinishedUpload {
    pub key: String,
    pub upload_id: String,
}

/// The treatment of a part that did not match its checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Damage {
    /// Refused, as it should be.
    Refused,
    /// Accepted, or never checked; `reason` says why.
    Accepted { reason: String },
}

/// The bytes of an upload. Reads block (they may copy from a mapping), so they run on the blocking pool.
pub trait PartSource: Send + Sync {
    /// Returns the size, which is fixed for the whole upload.
    fn size_bytes(&self) -> u64;
    /// Returns exactly the bytes of `range`, which lies inside the size. Called again if a part is sent again.
    fn read_part(&self, range: Range<u64>) -> io::Result<Bytes>;
    /// Returns the users besides the daemon's who may read the object: at most those who may read the file.
    fn readers(&self) -> Readers {
        Readers::default()
    }
}

/// Bytes in memory, for these readers.
impl PartSource for (Bytes, Readers) {
    fn size_bytes(&self) -> u64 {
        self.0.size_bytes()
    }

    fn read_part(&self, range: Range<u64>) -> io::Result<Bytes> {
        self.0.read_part(range)
    }

    fn readers(&self) -> Readers {
        self.1
    }
}

impl PartSource for Bytes {
    fn size_bytes(&self) -> u64 {
        self.len() as u64
    }

    fn read_part(&self, range: Range<u64>) -> io::Result<Bytes> {
        let outside = || io::Error::new(io::ErrorKind::UnexpectedEof, format!("{range:?} of {}", self.len()));
        let start = usize::try_from(range.start).map_err(|_| outside())?;
        let end = usize::try_from(range.end).map_err(|_| outside())?;
        if start > end || end > self.len() {
            return Err(outside());
        }
        Ok(self.slice(start..end))
    }
}

/// Maximum number of entries of a listing: some 50 MB of keys. The engine lists single runs and versions.
pub const MAX_LISTED: usize = 262_144;

/// Longest key, in bytes. S3 allows 1024; every back end keeps to that, so that a prefix can be copied between them.
pub const MAX_KEY_BYTES: usize = 1024;

/// Settings for opening a store. The defaults suit a real object store; tests make the times short.
#[derive(Clone)]
pub struct StoreSettings {
    /// Shortest time limit of a request, whatever its size.
    pub request_timeout: Duration,
    /// A request of n bytes may take `request_timeout` + n / this. A store below this speed is as good as away.
    pub least_bytes_per_s: u64,
    pub connect_timeout: Duration,
    pub retry: RetryPolicy,
    /// S3's smallest part size, except for the last part; smaller settings are raised to it.
    pub least_part_bytes: u64,
    /// The variables in which credentials and endpoint are looked up. `None`: the environment of this process.
    pub variables: Option<Vec<(String, String)>>,
}

impl Default for StoreSettings {
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(20),
            least_bytes_per_s: 1 << 20,
            connect_timeout: Duration::from_secs(5),
            retry: RetryPolicy::default(),
            least_part_bytes: 5 << 20,
            variables: None,
        }
    }
}

impl fmt::Debug for StoreSettings {
    /// Shows only the names of the variables: their values hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Option<Vec<&str>> =
            self.variables.as_ref().map(|v| v.iter().map(|(name, _)| name.as_str()).collect());
        f.debug_struct("StoreSettings")
            .field("request_timeout", &self.request_timeout)
            .field("least_bytes_per_s", &self.least_bytes_per_s)
            .field("connect_timeout", &self.connect_timeout)
            .field("retry", &self.retry)
            .field("least_part_bytes", &self.least_part_bytes)
            .field("variables", &names)
            .finish()
    }
}

/// Opens `file:///path`, `s3://bucket/prefix`, `gs://bucket/prefix` or `az://container/prefix` with the environment of this process.
pub async fn open(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    open_with(url, &StoreSettings::default()).await
}

/// Opens a store. A missing directory is made; an object store is not yet contacted ([`probe`] does that).
pub async fn open_with(url: &str, settings: &StoreSettings) -> Result<Arc<dyn Store>, StoreError> {
    let parsed = Url::parse(url).map_err(|error| StoreError::Url {
        url: without_secrets(url),
        reason: format!(
            "{error}; write file:///path, s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
        ),
    })?;
    let refused = |reason: &str| StoreError::Url { url: without_secrets(url), reason: reason.to_owned() };
    if !parsed.username().is_empty() || parsed.password().is_some() {
        return Err(refused("it holds a user or password; give credentials through the environment"));
    }
    match parsed.scheme() {
        "file" => {
            let root = parsed
                .to_file_path()
                .map_err(|()| refused("a file URL names an absolute path: file:///path"))?;
            Ok(Arc::new(PosixStore::open(&root).await?))
        }
        "s3" | "gs" | "az" => Ok(Arc::new(S3Store::open(&parsed, settings)?)),
        other => Err(refused(&format!(
            "the scheme {other:?} is not supported; use file://, s3://, gs:// or az://"
        ))),
    }
}

/// Returns the URL without everything between `//` and `@` of its authority.
pub fn without_secrets(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (authority, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    match authority.rsplit_once('@') {
        Some((_, host)) => format!("{scheme}://…@{host}{path}"),
        None => url.to_owned(),
    }
}

/// Refuses keys that no back end can hold: empty keys and parts, `.` and `..`, NUL, and more than [`MAX_KEY_BYTES`].
pub fn check_key(operation: Operation, key: &str, store: &str) -> Result<(), StoreError> {
    let refuse = |reason: String| {
        Err(StoreError::Key { operation, key: key.to_owned(), store: store.to_owned(), reason })
    };
    if key.len() > MAX_KEY_BYTES {
        return refuse(format!("it has {} bytes, at most {MAX_KEY_BYTES} fit", key.len()));
    }
    if key.contains('\0') {
        return refuse("it holds a NUL byte".to_owned());
    }
    for part in key.split('/') {
        if part.is_empty() || part == "." || part == ".." {
            return refuse(format!("its part {part:?} is empty or means a directory"));
        }
    }
    Ok(())
}

/// Returns the ranges of an upload, in order; one empty range for an empty object.
pub fn part_ranges(size_bytes: u64, part_bytes: u64) -> impl Iterator<Item = Range<u64>> {
    let part_bytes = part_bytes.max(1);
    let parts = size_bytes.div_ceil(part_bytes).max(1);
    (0..parts).map(move |i| {
        let start = i * part_bytes;
        start..size_bytes.min(start.saturating_add(part_bytes))
    })
}

/// Reads one part on the blocking pool, and refuses a source that gives more or less than requested.
pub(crate) async fn read_part(
    key: &str,
    source: &Arc<dyn PartSource>,
    range: Range<u64>,
) -> Result<Bytes, StoreError> {
    let source = Arc::clone(source);
    let wanted = range.end - range.start;
    let failed = |source: io::Error| StoreError::Source { key: key.to_owned(), source };
    let bytes = tokio::task::spawn_blocking(move || source.read_part(range))
        .await
        .map_err(|error| failed(io::Error::other(error)))?
        .map_err(failed)?;
    if bytes.len() as u64 != wanted {
        return Err(failed(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            format!("{} bytes came, {wanted} were asked for", bytes.len()),
        )));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_object_once_and_an_empty_one_has_one_empty_part() {
        let parts = |size, part| part_ranges(size, part).collect::<Vec<_>>();
        assert_eq!(parts(0, 8), vec![0..0]);
        assert_eq!(parts(8, 8), vec![0..8]);
        assert_eq!(parts(17, 8), vec![0..8, 8..16, 16..17]);
    }

    #[test]
    fn secrets_stay_out_of_urls_and_settings() {
        assert_eq!(without_secrets("http://user:pass@host:1/x"), "http://…@host:1/x");
        assert_eq!(without_secrets("s3://bucket/a@b"), "s3://bucket/a@b");
        let settings = StoreSettings {
            variables: Some(vec![("AWS_SECRET_ACCESS_KEY".into(), "hunter2".into())]),
            ..StoreSettings::default()
        };
        assert!(!format!("{settings:?}").contains("hunter2"));
    }

    #[tokio::test]
    async fn a_url_that_is_no_store_is_refused_with_what_to_write() {
        for url in ["", "gopher://x", "s3://", "s3://key:secret@bucket/p", "file://host/path", "/plain/path"]
        {
            let error = open(url).await.expect_err(url);
            assert!(matches!(error, StoreError::Url { .. }), "{url}: {error}");
            assert!(!error.to_string().contains("secret"), "{error}");
        }
    }
}
