//! Path of one start's requests to the shared memory: each is held up until the schedule lets it happen.
//!
//! Owns: requests as data, their effects on the memory, unfinished multipart uploads. Does not own: when a request
//! happens and which answer its caller gets (`world`), what may happen (`audit`).

use super::world::World;
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use futures::FutureExt;
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::key::Key;
use tidemark_store::{
    Created, Damage, Listing, MemoryStore, ObjectHead, Operation, PartSource, Store, StoreError,
    UnfinishedUpload, UploadLimits, Uploaded, part_ranges,
};

/// A request to the store.
#[derive(Debug, Clone)]
pub(super) enum Call {
    Create {
        key: String,
        body: Bytes,
    },
    Get {
        key: String,
        limit_bytes: u64,
    },
    GetRange {
        key: String,
        range: Range<u64>,
    },
    Head {
        key: String,
    },
    List {
        prefix: String,
        delimiter: bool,
    },
    /// Begins an upload in parts.
    Begin {
        key: String,
    },
    /// Completes an upload, which creates its object.
    Complete {
        upload: String,
        body: Bytes,
    },
    Delete {
        key: String,
    },
    Uploads,
    AbortUpload(UnfinishedUpload),
    /// Does nothing: the caller lets time pass.
    Rest,
}

/// Answer to a request.
#[derive(Debug)]
pub(super) enum Answer {
    Created(Created),
    Bytes(Option<Bytes>),
    Head(Option<ObjectHead>),
    Listing(Listing),
    Upload(String),
    Uploads(Vec<UnfinishedUpload>),
    Done,
}

impl Call {
    pub(super) fn operation(&self) -> Operation {
        match self {
            Self::Create { .. } => Operation::Create,
            Self::Get { .. } => Operation::Get,
            Self::GetRange { .. } => Operation::GetRange,
            Self::Head { .. } => Operation::Head,
            Self::List { .. } | Self::Uploads | Self::Rest => Operation::List,
            Self::Begin { .. } | Self::Complete { .. } => Operation::Upload,
            Self::Delete { .. } | Self::AbortUpload(_) => Operation::Delete,
        }
    }

    /// Whether the request commits, aborts or retires a version.
    pub(super) fn decides(&self) -> bool {
        let Self::Create { key, .. } = self else { return false };
        matches!(key.parse(), Ok(Key::Committed { .. } | Key::Retired { .. }))
    }

    pub(super) fn writes(&self) -> bool {
        matches!(self.operation(), Operation::Create | Operation::Upload | Operation::Delete)
    }

    /// Returns the key, or what stands for it.
    pub(super) fn key(&self) -> &str {
        match self {
            Self::Create { key, .. }
            | Self::Get { key, .. }
            | Self::GetRange { key, .. }
            | Self::Head { key }
            | Self::Begin { key }
            | Self::Delete { key } => key,
            Self::List { prefix, .. } => prefix,
            Self::Complete { upload, .. } => upload,
            Self::Uploads => "?uploads",
            Self::AbortUpload(upload) => &upload.upload_id,
            Self::Rest => "",
        }
    }

    pub(super) fn unavailable(&self) -> StoreError {
        StoreError::Unavailable {
            operation: self.operation(),
            key: self.key().to_owned(),
            store: "schedule".to_owned(),
            attempts: 1,
            source: "the schedule says so".into(),
        }
    }

    pub(super) fn doubtful(&self) -> StoreError {
        StoreError::Doubtful {
            operation: self.operation(),
            key: self.key().to_owned(),
            store: "schedule".to_owned(),
            attempts: 1,
            reason: "the schedule says so".to_owned(),
        }
    }
}

/// Memory that all starts share, and the uploads in it that are not objects yet.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    pub(super) memory: MemoryStore,
    /// By upload id: the key, and the start that began it.
    pub(super) uploads: BTreeMap<String, (String, u64)>,
    uploads_begun: u64,
}

/// Returns the answer of memory, which comes at once.
fn now<T>(call: impl Future<Output = T>) -> T {
    call.now_or_never().expect("memory answers at once")
}

impl Bucket {
    pub(super) fn get(&self, key: &str) -> Option<Bytes> {
        now(self.memory.get(key, u64::MAX)).expect("memory does not fail")
    }

    pub(super) fn list(&self, prefix: &str) -> Vec<String> {
        let listing = now(self.memory.list(prefix, false)).expect("memory does not fail");
        listing.keys.into_iter().map(|head| head.key).collect()
    }

    /// Returns the key that a request writes or deletes when it happens.
    pub(super) fn target(&self, call: &Call) -> Option<String> {
        match call {
            Call::Create { key, .. } | Call::Delete { key } => Some(key.clone()),
            Call::Complete { upload, .. } => self.uploads.get(upload).map(|(key, _)| key.clone()),
            _ => None,
        }
    }

    /// Applies a request to the memory.
    pub(super) fn happen(&mut self, start: u64, call: Call) -> Result<Answer, StoreError> {
        let memory = &self.memory;
        match call {
            Call::Create { key, body } => now(memory.create(&key, body)).map(Answer::Created),
            Call::Get { key, limit_bytes } => now(memory.get(&key, limit_bytes)).map(Answer::Bytes),
            Call::GetRange { key, range } => now(memory.get_range(&key, range)).map(Some).map(Answer::Bytes),
            Call::Head { key } => now(memory.head(&key)).map(Answer::Head),
            Call::List { prefix, delimiter } => now(memory.list(&prefix, delimiter)).map(Answer::Listing),
            Call::Begin { key } => {
                self.uploads_begun += 1;
                let id = format!("upload-{}", self.uploads_begun);
                self.uploads.insert(id.clone(), (key, start));
                Ok(Answer::Upload(id))
            }
            Call::Complete { ref upload, ref body } => {
                // If the upload was aborted meanwhile, or completed before by the same request, the store knows no such upload.
                let Some((key, _)) = self.uploads.remove(upload) else { return Err(call.unavailable()) };
                // An upload overwrites the object. The bytes are always the same, which `audit` checks.
                now(memory.delete(&key)).and_then(|()| now(memory.create(&key, body.clone())))?;
                now(memory.head(&key)).map(Answer::Head)
            }
            Call::Delete { key } => now(memory.delete(&key)).map(|()| Answer::Done),
            Call::Uploads => {
                let found = self.uploads.iter().map(|(id, (key, _))| {
                    let (key, upload_id) = (key.clone(), id.clone());
                    UnfinishedUpload { key, upload_id }
                });
                Ok(Answer::Uploads(found.collect()))
            }
            Call::AbortUpload(upload) => {
                self.uploads.remove(&upload.upload_id);
                Ok(Answer::Done)
            }
            Call::Rest => Ok(Answer::Done),
        }
    }
}

/// Tier-3 as one start of a daemon sees it.
#[derive(Debug)]
pub(super) struct Wire {
    pub(super) world: Arc<World>,
    /// Number of the start, used as its epoch and its incarnation: no two starts have the same.
    pub(super) start: u64,
}

impl Wire {
    /// Sends a request and waits for its answer; for ever if this start died.
    pub(super) async fn ask(&self, call: Call) -> Result<Answer, StoreError> {
        match self.world.wait(self.start, call).await {
            Ok(answer) => answer,
            Err(_) => std::future::pending().await,
        }
    }
}

/// Unwraps the answer that belongs to the request. Panics on any other.
macro_rules! expect {
    ($answer:expr, $variant:ident) => {
        match $answer? {
            Answer::$variant(value) => Ok(value),
            other => panic!("{other:?} is no answer to this"),
        }
    };
}

#[async_trait]
impl Store for Wire {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created, StoreError> {
        expect!(self.ask(Call::Create { key: key.to_owned(), body }).await, Created)
    }

    async fn get(&self, key: &str, limit_bytes: u64) -> Result<Option<Bytes>, StoreError> {
        expect!(self.ask(Call::Get { key: key.to_owned(), limit_bytes }).await, Bytes)
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let found: Result<_, StoreError> =
            expect!(self.ask(Call::GetRange { key: key.to_owned(), range }).await, Bytes);
        found.map(|bytes| bytes.expect("a range that is there"))
    }

    /// Yields to the other starts without waiting: a schedule that is replayed from its seed must not depend on a clock.
    async fn pause(&self, _length: Duration) {
        tokio::task::yield_now().await;
    }

    async fn head(&self, key: &str) -> Result<Option<ObjectHead>, StoreError> {
        expect!(self.ask(Call::Head { key: key.to_owned() }).await, Head)
    }

    async fn list(&self, prefix: &str, delimiter: bool) -> Result<Listing, StoreError> {
        expect!(self.ask(Call::List { prefix: prefix.to_owned(), delimiter }).await, Listing)
    }

    /// Uploads as an object store does: begins, then completes. Aborts the upload if that fails; leaves it if the caller dies.
    async fn upload(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        let mut body = BytesMut::new();
        // Read here and not on the blocking pool: a second thread would make a schedule depend on the machine.
        for range in part_ranges(source.size_bytes(), limits.part_bytes) {
            let part = source.read_part(range);
            body.extend_from_slice(
                &part.map_err(|source| StoreError::Source { key: key.to_owned(), source })?,
            );
        }
        let begun: Result<_, StoreError> =
            expect!(self.ask(Call::Begin { key: key.to_owned() }).await, Upload);
        let upload_id = begun?;
        match self.ask(Call::Complete { upload: upload_id.clone(), body: body.freeze() }).await {
            Ok(Answer::Head(Some(head))) => Ok(Uploaded { etag: head.etag, size_bytes: head.size_bytes }),
            Ok(other) => panic!("{other:?} is no answer to this"),
            Err(error) => {
                // The result of the abort does not matter to the caller.
                let _ = self.abort_upload(&UnfinishedUpload { key: key.to_owned(), upload_id }).await;
                Err(error)
            }
        }
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.ask(Call::Delete { key: key.to_owned() }).await.map(|_| ())
    }

    async fn unfinished_uploads(&self) -> Result<Vec<UnfinishedUpload>, StoreError> {
        expect!(self.ask(Call::Uploads).await, Uploads)
    }

    async fn abort_upload(&self, upload: &UnfinishedUpload) -> Result<(), StoreError> {
        self.ask(Call::AbortUpload(upload.clone())).await.map(|_| ())
    }

    async fn send_damaged_part(&self, _key: &str) -> Result<Damage, StoreError> {
        Ok(Damage::Refused)
    }

    fn describe(&self) -> String {
        "schedule".to_owned()
    }
}
