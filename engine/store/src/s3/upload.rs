//! Multipart uploads: bounded parts in flight, a checksum with each, nothing left behind.
//!
//! Owns: part sizes, the order of calls, aborting. Does not own: single requests and their repetition (`mod`).

use super::wire::Trouble;
use super::{Client, Failed, S3Store};
use crate::{Operation, PartSource, Store, StoreError, UploadLimits, Uploaded, part_ranges, read_part};
use futures::{StreamExt, TryStreamExt, stream};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::{MultipartId, ObjectStore, PutOptions, PutPayload};
use std::ops::Range;
use std::sync::Arc;

/// Maximum number of parts that S3 accepts in one upload.
const MAX_PARTS: u64 = 10_000;

/// Aborts the upload if it is dropped before completion, also after its caller gave up.
struct Unfinished {
    client: Arc<dyn Client>,
    path: Path,
    id: MultipartId,
    done: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (client, path, id) = (Arc::clone(&self.client), self.path.clone(), std::mem::take(&mut self.id));
        runtime.spawn(async move { abort(client.as_ref(), &path, &id).await });
    }
}

async fn abort(client: &dyn Client, path: &Path, id: &MultipartId) {
    if let Err(error) = client.abort_multipart(path, id).await
        && super::wire::trouble(&error) != Trouble::Absent
    {
        tracing::warn!(key = %path, %error, "an unfinished upload stays; the bucket's lifecycle rule removes it");
    }
}

impl S3Store {
    pub(super) async fn upload_parts(
        &self,
        key: &str,
        path: &Path,
        source: &Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        let size_bytes = source.size_bytes();
        let least = size_bytes.div_ceil(MAX_PARTS);
        let part_bytes = limits.part_bytes.max(self.settings.least_part_bytes).max(least);
        if size_bytes <= part_bytes {
            return self.upload_whole(key, path, source).await;
        }
        // If parts had to grow, fewer are in flight, so that the caller's bound on memory holds.
        let budget = limits.part_bytes.saturating_mul(limits.parts_in_flight as u64);
        let in_flight = usize::try_from(budget / part_bytes).unwrap_or(usize::MAX).max(1);

        let id = self.repeat(Operation::Upload, key, 0, || self.client.create_multipart(path)).await?;
        let mut unfinished =
            Unfinished { client: Arc::clone(&self.client), path: path.clone(), id, done: false };
        let result = self.send_and_complete(key, &unfinished, source, part_bytes, in_flight).await;
        if result.is_err() {
            let id = std::mem::take(&mut unfinished.id);
            // Bounded: if the store is away, the abort must not delay the caller's error.
            let _ =
                tokio::time::timeout(self.settings.request_timeout, abort(self.client.as_ref(), path, &id))
                    .await;
        }
        unfinished.done = true;
        result
    }

    async fn upload_whole(
        &self,
        key: &str,
        path: &Path,
        source: &Arc<dyn PartSource>,
    ) -> Result<Uploaded, StoreError> {
        let size_bytes = source.size_bytes();
        let bytes = read_part(key, source, 0..size_bytes).await?;
        // The same bytes twice are the same object, so after a lost answer the request is simply sent again.
        let put = self
            .repeat(Operation::Upload, key, size_bytes, || {
                self.client.put_opts(path, PutPayload::from(bytes.clone()), PutOptions::default())
            })
            .await?;
        Ok(Uploaded { etag: put.e_tag, size_bytes })
    }

    async fn send_and_complete(
        &self,
        key: &str,
        unfinished: &Unfinished,
        source: &Arc<dyn PartSource>,
        part_bytes: u64,
        in_flight: usize,
    ) -> Result<Uploaded, StoreError> {
        let size_bytes = source.size_bytes();
        let ranges: Vec<(usize, Range<u64>)> = part_ranges(size_bytes, part_bytes).enumerate().collect();
        // In order, so that the part ids come out in order; `buffered` keeps that many on the way.
        let parts: Vec<PartId> = stream::iter(ranges)
            .map(|(index, range)| async move {
                let bytes = read_part(key, source, range).await?;
                let (path, id) = (&unfinished.path, &unfinished.id);
                self.repeat(Operation::Upload, key, bytes.len() as u64, || {
                    self.client.put_part(path, id, index, PutPayload::from(bytes.clone()))
                })
                .await
            })
            .buffered(in_flight)
            .try_collect()
            .await?;
        let etag = self.complete(key, unfinished, parts, size_bytes).await?;
        // A store that checks each part can still lose one, and the object is not read before it is needed.
        match self.head(key).await? {
            Some(there) if there.size_bytes == size_bytes => Ok(Uploaded { etag, size_bytes }),
            there => {
                let found =
                    there.map_or_else(|| "nothing".to_owned(), |there| format!("{} bytes", there.size_bytes));
                let cause = format!("the upload of {size_bytes} bytes was completed, and {found} came of it");
                Err(self.unavailable(Operation::Upload, key, 1, cause.into()))
            }
        }
    }

    /// Completes the upload. If the answer is doubtful, checks whether the object exists.
    async fn complete(
        &self,
        key: &str,
        unfinished: &Unfinished,
        parts: Vec<PartId>,
        size_bytes: u64,
    ) -> Result<Option<String>, StoreError> {
        let (path, id) = (&unfinished.path, &unfinished.id);
        let mut doubt: Option<String> = None;
        let mut done = 0;
        loop {
            done += 1;
            let answer =
                self.attempt(size_bytes, self.client.complete_multipart(path, id, parts.clone())).await;
            let failed: Failed = match answer {
                Ok(put) => return Ok(put.e_tag),
                Err(failed) => failed,
            };
            if !failed.trouble.had_no_effect() {
                let reason = doubt.insert(failed.cause.to_string());
                match self.head_once(path).await {
                    // The key is ours alone and new, so an object of this size is the one that we sent.
                    Ok(Some(meta)) if meta.size == size_bytes => return Ok(meta.e_tag),
                    Ok(Some(meta)) => {
                        return Err(StoreError::Differs {
                            key: key.to_owned(),
                            store: self.description.clone(),
                            there_bytes: meta.size,
                            ours_bytes: size_bytes,
                        });
                    }
                    // The upload is gone without an object: only a new upload can help.
                    Ok(None) if failed.trouble == Trouble::Absent => {
                        return Err(self.unavailable(Operation::Upload, key, done, failed.cause));
                    }
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
                    Some(reason) => self.doubtful(Operation::Upload, key, done, reason),
                    None => self.error(Operation::Upload, key, done, failed),
                });
            }
            self.settings.retry.pause(done).await;
        }
    }
}
