//! Reads a loose file that lies in several objects as if it were one.
//!
//! Owns: which ranges of which objects a key stands for (`engine/design/0003-tier3-format.md`). Does not own: verifying the bytes,
//! which every reader does by the file's checksums; first uploads.

use super::locate::{self, FormatProblem};
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tidemark_protocol::documents::LooseSidecar;
use tidemark_protocol::file::Readers;
use tidemark_protocol::key::{Key, PathOrHash};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::loose::LoosePart;
use tidemark_store::{
    Created, Damage, Listing, ObjectHead, Operation, PartSource, Silence, Store, StoreError,
    UnfinishedUpload, UploadLimits, Uploaded,
};

/// Maximum number of files whose parts are remembered: the files read at once. Any other costs one more request.
const REMEMBERED: usize = 256;

/// A store whose readers need not know that a file may lie in several objects.
#[derive(Debug)]
pub struct JoinedStore {
    store: Arc<dyn Store>,
    known: Mutex<BTreeMap<String, Arc<[LoosePart]>>>,
}

impl JoinedStore {
    /// Returns the same store, with the keys of parts readable.
    #[must_use]
    pub fn over(store: Arc<dyn Store>) -> Arc<dyn Store> {
        Arc::new(Self { store, known: Mutex::default() })
    }

    /// Returns the path and the parts that `key` stands for; `None` if an object has the key.
    async fn parts(
        &self,
        operation: Operation,
        key: &str,
    ) -> Result<Option<(PathOrHash, Arc<[LoosePart]>)>, StoreError> {
        // Nearly all keys end here, without being parsed.
        if !key.ends_with(".parts") {
            return Ok(None);
        }
        let Ok(Key::LooseParts { path, generation }) = key.parse() else { return Ok(None) };
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned();
        if let Some(parts) = known {
            return Ok(Some((path, parts)));
        }
        let sidecar_key = Key::LooseSidecar { path: path.clone(), generation }.to_string();
        let sidecar = match locate::document::<LooseSidecar>(&self.store, &sidecar_key).await? {
            Ok(sidecar) => sidecar,
            Err(FormatProblem::Missing) => {
                return Err(StoreError::NotFound { operation, key: sidecar_key, store: self.describe() });
            }
            Err(why) => {
                let reason = format!("it does not say which objects hold the file: {why}");
                let (key, store) = (sidecar_key, self.describe());
                return Err(StoreError::Damaged { operation, key, store, attempts: 1, reason });
            }
        };
        let parts: Arc<[LoosePart]> = sidecar.parts.into();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REMEMBERED {
            known.pop_first();
        }
        known.insert(key.to_owned(), Arc::clone(&parts));
        Ok(Some((path, parts)))
    }
}

/// Returns the ranges of the parts that make `range` of the file; `None` if `range` reaches beyond them.
fn ranges(parts: &[LoosePart], range: &Range<u64>) -> Option<Vec<(LoosePart, Range<u64>)>> {
    let mut ranges = Vec::new();
    let mut begins = 0;
    for part in parts {
        let ends = begins + part.bytes;
        let (from, to) = (range.start.max(begins), range.end.min(ends));
        if from < to {
            ranges.push((*part, from - begins..to - begins));
        }
        begins = ends;
    }
    (range.start <= range.end && range.end <= begins).then_some(ranges)
}

/// A range of another source, which is read in whole chunks.
struct Window {
    source: Arc<dyn PartSource>,
    range: Range<u64>,
}

impl PartSource for Window {
    fn size_bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    fn read_part(&self, range: Range<u64>) -> io::Result<Bytes> {
        let (from, to) = (self.range.start + range.start, self.range.start + range.end);
        let begins = from / CHUNK_BYTES * CHUNK_BYTES;
        let ends = to.next_multiple_of(CHUNK_BYTES).min(self.source.size_bytes());
        let whole = self.source.read_part(begins..ends)?;
        let index = |at: u64| usize::try_from(at - begins).map_err(io::Error::other);
        Ok(whole.slice(index(from)?..index(to)?))
    }

    fn readers(&self) -> Readers {
        self.source.readers()
    }
}

#[async_trait]
impl Store for JoinedStore {
    async fn create(&self, key: &str, body: Bytes) -> Result<Created, StoreError> {
        self.store.create(key, body).await
    }

    async fn get(&self, key: &str, limit_bytes: u64) -> Result<Option<Bytes>, StoreError> {
        self.store.get(key, limit_bytes).await
    }

    async fn get_range(&self, key: &str, range: Range<u64>) -> Result<Bytes, StoreError> {
        let Some((path, parts)) = self.parts(Operation::GetRange, key).await? else {
            return self.store.get_range(key, range).await;
        };
        let wanted = ranges(&parts, &range).ok_or_else(|| StoreError::Range {
            key: key.to_owned(),
            store: self.describe(),
            start: range.start,
            end: range.end,
            reason: format!("its {} parts do not reach so far", parts.len()),
        })?;
        let mut bytes = BytesMut::new();
        for (part, range) in wanted {
            let key = Key::Loose { path: path.clone(), generation: part.generation }.to_string();
            bytes.extend_from_slice(&self.store.get_range(&key, range).await?);
        }
        Ok(bytes.freeze())
    }

    async fn pause(&self, length: Duration) {
        self.store.pause(length).await;
    }

    /// Returns the object's head. For a file in several objects, its size counts the bytes up to and with the first object that is too
    /// short.
    async fn head(&self, key: &str) -> Result<Option<ObjectHead>, StoreError> {
        let parts = match self.parts(Operation::Head, key).await {
            Ok(None) => return self.store.head(key).await,
            Ok(Some(parts)) => parts,
            Err(StoreError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let (path, parts) = parts;
        let mut size_bytes = 0;
        for part in parts.iter() {
            let key = Key::Loose { path: path.clone(), generation: part.generation }.to_string();
            let Some(head) = self.store.head(&key).await? else { return Ok(None) };
            size_bytes += head.size_bytes.min(part.bytes);
            if head.size_bytes < part.bytes {
                break;
            }
        }
        Ok(Some(ObjectHead { key: key.to_owned(), size_bytes, etag: None }))
    }

    async fn list(&self, prefix: &str, delimiter: bool) -> Result<Listing, StoreError> {
        self.store.list(prefix, delimiter).await
    }

    async fn upload(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        self.store.upload(key, source, limits).await
    }

    /// Replaces the object. For a file in several objects, replaces each that holds nothing else: if a part is only the beginning of its
    /// object, other generations need the rest.
    async fn replace(
        &self,
        key: &str,
        source: Arc<dyn PartSource>,
        limits: &UploadLimits,
    ) -> Result<Uploaded, StoreError> {
        let Some((path, parts)) = self.parts(Operation::Upload, key).await? else {
            return self.store.replace(key, source, limits).await;
        };
        let (mut begins, mut size_bytes) = (0, 0);
        for part in parts.iter() {
            let key = Key::Loose { path: path.clone(), generation: part.generation }.to_string();
            let found = self.store.head(&key).await?;
            if found.is_none_or(|found| found.size_bytes <= part.bytes) {
                let range = begins..begins + part.bytes;
                let window = Arc::new(Window { source: Arc::clone(&source), range });
                size_bytes += self.store.replace(&key, window, limits).await?.size_bytes;
            }
            begins += part.bytes;
        }
        Ok(Uploaded { etag: None, size_bytes })
    }

    async fn delete(&self, key: &str) -> Result<(), StoreError> {
        self.store.delete(key).await
    }

    async fn unfinished_uploads(&self) -> Result<Vec<UnfinishedUpload>, StoreError> {
        self.store.unfinished_uploads().await
    }

    async fn abort_upload(&self, upload: &UnfinishedUpload) -> Result<(), StoreError> {
        self.store.abort_upload(upload).await
    }

    async fn send_damaged_part(&self, key: &str) -> Result<Damage, StoreError> {
        self.store.send_damaged_part(key).await
    }

    fn silence(&self) -> Option<Silence> {
        self.store.silence()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::id::Generation;

    #[test]
    fn a_range_of_a_file_is_found_in_its_parts() {
        let part = |generation, bytes| LoosePart { generation: Generation(generation), bytes };
        let parts = [part(1, 10), part(4, 5), part(9, 20)];
        let found = |range| {
            let found = ranges(&parts, &range)?;
            Some(found.into_iter().map(|(part, range)| (part.generation.0, range)).collect::<Vec<_>>())
        };
        assert_eq!(found(0..35), Some(vec![(1, 0..10), (4, 0..5), (9, 0..20)]));
        assert_eq!(found(10..15), Some(vec![(4, 0..5)]));
        assert_eq!(found(12..17), Some(vec![(4, 2..5), (9, 0..2)]));
        assert_eq!(found(7..7), Some(Vec::new()));
        assert_eq!(found(30..36), None);
    }
}
