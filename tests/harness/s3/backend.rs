//! The bucket behind the S3 server: an index in memory, bodies in files.
//!
//! Owns: the meaning of each operation, create-if-absent with one winner, checksums. Does not own: HTTP, signatures
//! (`s3s`), faults.

use super::S3Options;
use crc_fast::{CrcAlgorithm, Digest};
use futures::StreamExt;
use s3s::checksum::ChecksumHasher;
use s3s::crypto::Checksum as _;
use s3s::dto::{
    AbortMultipartUploadInput, AbortMultipartUploadOutput, CommonPrefix, CompleteMultipartUploadInput,
    CompleteMultipartUploadOutput, CreateMultipartUploadInput, CreateMultipartUploadOutput,
    DeleteObjectInput, DeleteObjectOutput, DeleteObjectsInput, DeleteObjectsOutput, DeletedObject, ETag,
    ETagCondition, GetObjectInput, GetObjectOutput, HeadObjectInput, HeadObjectOutput,
    ListMultipartUploadsInput, ListMultipartUploadsOutput, ListObjectsV2Input, ListObjectsV2Output,
    MultipartUpload, Object, PutObjectInput, PutObjectOutput, StreamingBlob, Timestamp, UploadPartInput,
    UploadPartOutput,
};
use s3s::{S3, S3Request, S3Response, S3Result, s3_error};
use std::collections::BTreeMap;
use std::io::{self, SeekFrom};
use std::ops::{Bound, Deref};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;
use tokio::fs::File;
use tokio::io::{AsyncReadExt, AsyncSeekExt, AsyncWriteExt};

/// Bodies are read and written in blocks of this size.
const BLOCK_BYTES: usize = 256 << 10;

#[derive(Debug, Clone)]
struct Stored {
    file: PathBuf,
    size_bytes: u64,
    etag: String,
    crc64: u64,
    modified: SystemTime,
    /// Position in the order in which the bucket's objects came.
    number: u64,
}

/// How far a listing is behind, passed as an extension of the request.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Staleness {
    /// Number of the newest objects below the prefix that are not listed yet.
    pub(super) hidden: usize,
    /// Whether deleted objects are still listed.
    pub(super) deleted: bool,
}

#[derive(Debug)]
struct Upload {
    key: String,
    parts: BTreeMap<i32, Stored>,
    begun: SystemTime,
}

#[derive(Debug, Default)]
struct Index {
    objects: BTreeMap<String, Stored>,
    /// Deleted objects, for listings that are behind the deletion. Their bodies are gone.
    deleted: BTreeMap<String, Stored>,
    uploads: BTreeMap<String, Upload>,
}

/// A handle to the bucket; clones share it.
#[derive(Debug, Clone)]
pub(super) struct Backend(Arc<Bucket>);

impl Deref for Backend {
    type Target = Bucket;

    fn deref(&self) -> &Bucket {
        &self.0
    }
}

/// A bucket.
#[derive(Debug)]
pub(super) struct Bucket {
    options: S3Options,
    directory: PathBuf,
    counter: AtomicU64,
    index: Mutex<Index>,
    /// Encryption that the writer of each key requested.
    encryption: Mutex<BTreeMap<String, String>>,
}

/// The checksums a client may send with a body.
#[derive(Debug, Default)]
struct Sent {
    crc32: Option<String>,
    crc32c: Option<String>,
    crc64nvme: Option<String>,
    sha1: Option<String>,
    sha256: Option<String>,
}

impl Backend {
    pub(super) fn new(options: S3Options, directory: PathBuf) -> Self {
        Self(Arc::new(Bucket {
            options,
            directory,
            counter: AtomicU64::new(0),
            index: Mutex::default(),
            encryption: Mutex::default(),
        }))
    }
}

impl Bucket {
    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, bucket: &str, writes: bool) -> S3Result<()> {
        if bucket != self.options.bucket {
            return Err(s3_error!(NoSuchBucket, "The specified bucket does not exist"));
        }
        if writes && self.options.read_only {
            return Err(s3_error!(AccessDenied, "these credentials may not write"));
        }
        Ok(())
    }

    fn note_encryption(
        &self,
        key: &str,
        with: Option<s3s::dto::ServerSideEncryption>,
        key_id: Option<String>,
    ) {
        let Some(with) = with else { return };
        let said = format!("{} {}", with.as_str(), key_id.unwrap_or_default());
        self.encryption.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned(), said);
    }

    pub(super) fn encryption_of(&self, key: &str) -> Option<String> {
        self.encryption.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    fn new_file(&self) -> PathBuf {
        self.directory.join(format!("{:08}", self.counter.fetch_add(1, Ordering::Relaxed)))
    }

    /// Streams a body into a file and checks what was sent with it.
    async fn receive(&self, body: Option<StreamingBlob>, sent: &Sent) -> S3Result<Stored> {
        let path = self.new_file();
        let mut file = File::create(&path).await.map_err(internal)?;
        let mut hasher = ChecksumHasher {
            crc32: sent.crc32.as_ref().map(|_| s3s::crypto::Crc32::new()),
            crc32c: sent.crc32c.as_ref().map(|_| s3s::crypto::Crc32c::new()),
            sha1: sent.sha1.as_ref().map(|_| s3s::crypto::Sha1::new()),
            sha256: sent.sha256.as_ref().map(|_| s3s::crypto::Sha256::new()),
            crc64nvme: sent.crc64nvme.as_ref().map(|_| s3s::crypto::Crc64Nvme::new()),
        };
        let mut crc64 = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut strong = blake3::Hasher::new();
        let mut size_bytes = 0;
        let mut blocks = body;
        while let Some(block) = match &mut blocks {
            Some(stream) => stream.next().await,
            None => None,
        } {
            // The signature's own body hash is checked inside this stream.
            let block =
                block.map_err(|_| s3_error!(BadDigest, "the body broke off or differs from its hash"))?;
            hasher.update(&block);
            crc64.update(&block);
            strong.update(&block);
            size_bytes += block.len() as u64;
            file.write_all(&block).await.map_err(internal)?;
        }
        file.flush().await.map_err(internal)?;
        let ours = hasher.finalize();
        let pairs = [
            (&sent.crc32, &ours.checksum_crc32),
            (&sent.crc32c, &ours.checksum_crc32c),
            (&sent.sha1, &ours.checksum_sha1),
            (&sent.sha256, &ours.checksum_sha256),
            (&sent.crc64nvme, &ours.checksum_crc64nvme),
        ];
        if self.options.checks_checksums && pairs.iter().any(|(sent, ours)| sent != ours) {
            return Err(s3_error!(BadDigest, "the checksum sent with the body does not match it"));
        }
        Ok(Stored {
            file: path,
            size_bytes,
            etag: strong.finalize().to_hex()[..32].to_owned(),
            crc64: crc64.finalize(),
            modified: SystemTime::now(),
            number: self.counter.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Gives the body its name. A single lock covers lookup and insertion, so that exactly one of several concurrent
    /// creates wins.
    fn place(&self, key: String, stored: Stored, condition: Option<&ETagCondition>) -> S3Result<()> {
        let mut index = self.index();
        let conditional = condition.is_some_and(ETagCondition::is_any) && self.options.honours_conditions;
        if conditional && index.objects.contains_key(&key) {
            return Err(s3_error!(PreconditionFailed, "the key is taken"));
        }
        if let Some(old) = index.objects.insert(key, stored) {
            // Readers that hold the file open go on reading it.
            let _ = std::fs::remove_file(old.file);
        }
        Ok(())
    }

    fn find(&self, key: &str) -> S3Result<Stored> {
        let found = self.index().objects.get(key).cloned();
        found.ok_or_else(|| s3_error!(NoSuchKey, "The specified key does not exist."))
    }

    fn remove(&self, key: &str) {
        let mut index = self.index();
        if let Some(old) = index.objects.remove(key) {
            let _ = std::fs::remove_file(&old.file);
            index.deleted.insert(key.to_owned(), old);
        }
    }

    /// Returns the objects below a prefix, as a listing that is behind by `stale` sees them.
    fn seen(&self, prefix: &str, stale: Staleness) -> BTreeMap<String, Stored> {
        let index = self.index();
        let below = |objects: &BTreeMap<String, Stored>| {
            let objects = objects.iter().filter(|(key, _)| key.starts_with(prefix));
            objects.map(|(key, stored)| (key.clone(), stored.clone())).collect::<BTreeMap<_, _>>()
        };
        let mut seen = below(&index.objects);
        let mut numbers: Vec<u64> = seen.values().map(|stored| stored.number).collect();
        numbers.sort_unstable();
        let from = numbers.iter().rev().take(stale.hidden).min().copied().unwrap_or(u64::MAX);
        seen.retain(|_, stored| stored.number < from);
        if stale.deleted {
            let mut gone = below(&index.deleted);
            gone.append(&mut seen);
            seen = gone;
        }
        seen
    }
}

fn internal(error: io::Error) -> s3s::S3Error {
    s3_error!(error, InternalError)
}

fn base64_of(crc64: u64) -> String {
    base64::Engine::encode(&base64::engine::general_purpose::STANDARD, crc64.to_be_bytes())
}

fn etag(text: &str) -> Option<ETag> {
    Some(ETag::Strong(text.to_owned()))
}

fn length(bytes: u64) -> S3Result<i64> {
    i64::try_from(bytes).map_err(|error| s3_error!(error, InternalError))
}

#[async_trait::async_trait]
impl S3 for Backend {
    async fn put_object(&self, req: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        let input = req.input;
        self.check(&input.bucket, true)?;
        self.note_encryption(&input.key, input.server_side_encryption, input.ssekms_key_id);
        let sent = Sent {
            crc32: input.checksum_crc32,
            crc32c: input.checksum_crc32c,
            crc64nvme: input.checksum_crc64nvme,
            sha1: input.checksum_sha1,
            sha256: input.checksum_sha256,
        };
        let stored = self.receive(input.body, &sent).await?;
        let tag = stored.etag.clone();
        self.place(input.key, stored, input.if_none_match.as_ref())?;
        Ok(S3Response::new(PutObjectOutput { e_tag: etag(&tag), ..PutObjectOutput::default() }))
    }

    async fn get_object(&self, req: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
        let input = req.input;
        self.check(&input.bucket, false)?;
        let stored = self.find(&input.key)?;
        let range = match &input.range {
            Some(range) => range.check(stored.size_bytes).map_err(|error| s3_error!(error, InvalidRange))?,
            None => 0..stored.size_bytes,
        };
        let mut file = File::open(&stored.file).await.map_err(internal)?;
        file.seek(SeekFrom::Start(range.start)).await.map_err(internal)?;
        let left = range.end - range.start;
        let blocks = futures::stream::try_unfold((file, left), |(mut file, left)| async move {
            if left == 0 {
                return Ok::<_, io::Error>(None);
            }
            let len = usize::try_from(left).unwrap_or(BLOCK_BYTES).min(BLOCK_BYTES);
            let mut block = vec![0; len];
            file.read_exact(&mut block).await?;
            Ok(Some((bytes::Bytes::from(block), (file, left - len as u64))))
        });
        let whole = input.range.is_none() && input.checksum_mode.is_some();
        let content_range = (input.range.is_some())
            .then(|| format!("bytes {}-{}/{}", range.start, range.end.saturating_sub(1), stored.size_bytes));
        Ok(S3Response::new(GetObjectOutput {
            body: Some(StreamingBlob::wrap(Box::pin(blocks))),
            content_length: Some(length(left)?),
            content_range,
            e_tag: etag(&stored.etag),
            last_modified: Some(Timestamp::from(stored.modified)),
            checksum_crc64nvme: whole.then(|| base64_of(stored.crc64)),
            ..GetObjectOutput::default()
        }))
    }

    async fn head_object(&self, req: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
        self.check(&req.input.bucket, false)?;
        let stored = self.find(&req.input.key)?;
        Ok(S3Response::new(HeadObjectOutput {
            content_length: Some(length(stored.size_bytes)?),
            e_tag: etag(&stored.etag),
            last_modified: Some(Timestamp::from(stored.modified)),
            ..HeadObjectOutput::default()
        }))
    }

    async fn list_objects_v2(
        &self,
        req: S3Request<ListObjectsV2Input>,
    ) -> S3Result<S3Response<ListObjectsV2Output>> {
        let input = req.input;
        self.check(&input.bucket, false)?;
        let prefix = input.prefix.clone().unwrap_or_default();
        let delimiter = input.delimiter.clone().filter(|text| !text.is_empty());
        let asked = usize::try_from(input.max_keys.unwrap_or(1000)).unwrap_or(0);
        let page = asked.min(self.options.page_keys);
        let after = input.continuation_token.clone().or_else(|| input.start_after.clone());

        let mut contents = Vec::new();
        let mut prefixes: Vec<String> = Vec::new();
        let mut last = None;
        let mut truncated = false;
        let stale = req.extensions.get::<Staleness>().copied().unwrap_or_default();
        let seen = self.seen(&prefix, stale);
        let from = after.clone().map_or(Bound::Unbounded, Bound::Excluded);
        for (key, stored) in seen.range((from, Bound::Unbounded)) {
            let Some(rest) = key.strip_prefix(&prefix) else { continue };
            let folded = delimiter.as_ref().and_then(|text| rest.find(text).map(|at| at + text.len()));
            let folded = folded.map(|end| format!("{prefix}{}", &rest[..end]));
            // The token of a page that ended with a folded prefix is that prefix.
            if folded.is_some() && (folded == after || folded.as_ref() == prefixes.last()) {
                continue;
            }
            if contents.len() + prefixes.len() == page {
                truncated = true;
                break;
            }
            last = Some(folded.clone().unwrap_or_else(|| key.clone()));
            match folded {
                Some(folded) => prefixes.push(folded),
                None => contents.push(Object {
                    key: Some(key.clone()),
                    size: Some(length(stored.size_bytes)?),
                    e_tag: etag(&stored.etag),
                    last_modified: Some(Timestamp::from(stored.modified)),
                    ..Object::default()
                }),
            }
        }
        let fold = |text| CommonPrefix { prefix: Some(text) };
        Ok(S3Response::new(ListObjectsV2Output {
            name: Some(input.bucket),
            prefix: Some(prefix),
            delimiter,
            key_count: i32::try_from(contents.len() + prefixes.len()).ok(),
            max_keys: i32::try_from(page).ok(),
            is_truncated: Some(truncated),
            next_continuation_token: last.filter(|_| truncated),
            contents: Some(contents),
            common_prefixes: Some(prefixes.into_iter().map(fold).collect()),
            ..ListObjectsV2Output::default()
        }))
    }

    async fn delete_object(
        &self,
        req: S3Request<DeleteObjectInput>,
    ) -> S3Result<S3Response<DeleteObjectOutput>> {
        self.check(&req.input.bucket, true)?;
        self.remove(&req.input.key);
        Ok(S3Response::new(DeleteObjectOutput::default()))
    }

    async fn delete_objects(
        &self,
        req: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        self.check(&req.input.bucket, true)?;
        let mut deleted = Vec::new();
        for object in req.input.delete.objects {
            self.remove(&object.key);
            deleted.push(DeletedObject { key: Some(object.key), ..DeletedObject::default() });
        }
        Ok(S3Response::new(DeleteObjectsOutput { deleted: Some(deleted), ..DeleteObjectsOutput::default() }))
    }

    async fn create_multipart_upload(
        &self,
        req: S3Request<CreateMultipartUploadInput>,
    ) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
        let input = req.input;
        self.check(&input.bucket, true)?;
        self.note_encryption(&input.key, input.server_side_encryption, input.ssekms_key_id);
        let id = self.begin_upload(input.key.clone());
        Ok(S3Response::new(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            ..CreateMultipartUploadOutput::default()
        }))
    }

    async fn upload_part(&self, req: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
        let input = req.input;
        self.check(&input.bucket, true)?;
        let sent = Sent {
            crc32: input.checksum_crc32,
            crc32c: input.checksum_crc32c,
            crc64nvme: input.checksum_crc64nvme.clone(),
            sha1: input.checksum_sha1,
            sha256: input.checksum_sha256.clone(),
        };
        let stored = self.receive(input.body, &sent).await?;
        let tag = stored.etag.clone();
        let mut index = self.index();
        let upload = index.uploads.get_mut(&input.upload_id).filter(|upload| upload.key == input.key);
        let upload = upload.ok_or_else(|| s3_error!(NoSuchUpload, "The upload does not exist"))?;
        upload.parts.insert(input.part_number, stored);
        Ok(S3Response::new(UploadPartOutput {
            e_tag: etag(&tag),
            checksum_crc64nvme: input.checksum_crc64nvme,
            checksum_sha256: input.checksum_sha256,
            ..UploadPartOutput::default()
        }))
    }

    async fn complete_multipart_upload(
        &self,
        req: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = req.input;
        self.check(&input.bucket, true)?;
        let listed = input.multipart_upload.and_then(|upload| upload.parts).unwrap_or_default();
        if listed.is_empty() {
            return Err(s3_error!(MalformedXML, "no parts"));
        }
        let mut chosen = Vec::new();
        {
            let index = self.index();
            let upload = index.uploads.get(&input.upload_id).filter(|upload| upload.key == input.key);
            let upload = upload.ok_or_else(|| s3_error!(NoSuchUpload, "The upload does not exist"))?;
            for part in &listed {
                let stored = part.part_number.and_then(|number| upload.parts.get(&number));
                let stored = stored.ok_or_else(|| s3_error!(InvalidPart, "a listed part is missing"))?;
                let named = part.e_tag.as_ref().map(ETag::value);
                let sum = base64_of(stored.crc64);
                let differs = part.checksum_crc64nvme.as_ref().is_some_and(|it| *it != sum);
                if named != Some(&stored.etag) || self.options.checks_checksums && differs {
                    return Err(s3_error!(InvalidPart, "a listed part is not the one that was sent"));
                }
                chosen.push(stored.clone());
            }
        }
        let kept = chosen.len() - usize::from(self.options.loses_parts);
        let whole = self.join(&chosen[..kept]).await.map_err(internal)?;
        let tag = format!("{}-{}", whole.etag, chosen.len());
        self.place(input.key.clone(), Stored { etag: tag.clone(), ..whole }, input.if_none_match.as_ref())?;
        self.index().uploads.remove(&input.upload_id);
        for part in chosen {
            let _ = std::fs::remove_file(part.file);
        }
        Ok(S3Response::new(CompleteMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: etag(&tag),
            ..CompleteMultipartUploadOutput::default()
        }))
    }

    async fn abort_multipart_upload(
        &self,
        req: S3Request<AbortMultipartUploadInput>,
    ) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
        self.check(&req.input.bucket, true)?;
        let upload = self.index().uploads.remove(&req.input.upload_id);
        let upload = upload.ok_or_else(|| s3_error!(NoSuchUpload, "The upload does not exist"))?;
        for part in upload.parts.into_values() {
            let _ = std::fs::remove_file(part.file);
        }
        Ok(S3Response::new(AbortMultipartUploadOutput::default()))
    }

    async fn list_multipart_uploads(
        &self,
        req: S3Request<ListMultipartUploadsInput>,
    ) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
        let input = req.input;
        self.check(&input.bucket, false)?;
        if !self.options.lists_uploads {
            return Err(s3_error!(AccessDenied, "these credentials may not list uploads"));
        }
        let prefix = input.prefix.unwrap_or_default();
        let after = (input.key_marker.unwrap_or_default(), input.upload_id_marker.unwrap_or_default());
        let index = self.index();
        let mut found: Vec<_> = index
            .uploads
            .iter()
            .map(|(id, upload)| ((upload.key.clone(), id.clone()), upload.begun))
            .filter(|(at, _)| at.0.starts_with(&prefix) && *at > after)
            .collect();
        found.sort();
        let is_truncated = found.len() > self.options.page_keys;
        found.truncate(self.options.page_keys);
        let last = found.last().filter(|_| is_truncated).map(|(at, _)| at.clone());
        let uploads = found.into_iter().map(|((key, id), begun)| MultipartUpload {
            key: Some(key),
            upload_id: Some(id),
            initiated: Some(Timestamp::from(begun)),
            ..MultipartUpload::default()
        });
        Ok(S3Response::new(ListMultipartUploadsOutput {
            bucket: Some(input.bucket),
            is_truncated: Some(is_truncated),
            next_key_marker: last.as_ref().map(|(key, _)| key.clone()),
            next_upload_id_marker: last.map(|(_, id)| id),
            uploads: Some(uploads.collect()),
            ..ListMultipartUploadsOutput::default()
        }))
    }
}

impl Bucket {
    async fn join(&self, parts: &[Stored]) -> io::Result<Stored> {
        let path = self.new_file();
        let mut whole = File::create(&path).await?;
        let mut crc64 = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut strong = blake3::Hasher::new();
        let mut size_bytes = 0;
        let mut block = vec![0; BLOCK_BYTES];
        for part in parts {
            let mut file = File::open(&part.file).await?;
            loop {
                let len = file.read(&mut block).await?;
                if len == 0 {
                    break;
                }
                crc64.update(&block[..len]);
                strong.update(&block[..len]);
                whole.write_all(&block[..len]).await?;
                size_bytes += len as u64;
            }
        }
        whole.flush().await?;
        Ok(Stored {
            file: path,
            size_bytes,
            etag: strong.finalize().to_hex()[..32].to_owned(),
            crc64: crc64.finalize(),
            modified: SystemTime::now(),
            number: self.counter.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Returns each key with the file that holds its body.
    pub(super) fn files(&self) -> Vec<(String, PathBuf)> {
        self.index().objects.iter().map(|(key, stored)| (key.clone(), stored.file.clone())).collect()
    }

    pub(super) fn unfinished_uploads(&self) -> Vec<String> {
        let mut keys: Vec<_> = self.index().uploads.values().map(|upload| upload.key.clone()).collect();
        keys.sort();
        keys
    }

    pub(super) fn begin_upload(&self, key: String) -> String {
        let id = format!("upload-{}", self.counter.fetch_add(1, Ordering::Relaxed));
        let upload = Upload { key, parts: BTreeMap::new(), begun: SystemTime::now() };
        self.index().uploads.insert(id.clone(), upload);
        id
    }
}
