//! The S3 server of the tests, as a process of its own, and a bare client for it.
//!
//! Owns: starting and ending the server, and uploads and reads of one object as `object_store` makes them. Does not own: the server
//! (`tests/harness/s3`), the comparison.

use crate::daemon::{Bucket, program};
use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};

/// The server; it ends with this value, which closes its stdin.
#[derive(Debug)]
pub struct S3 {
    server: Child,
    endpoint: String,
    bucket: String,
    access_key: String,
    secret: String,
}

impl S3 {
    /// Starts the server on a free port.
    ///
    /// # Errors
    /// The program is not built, or prints no ready line.
    pub fn start() -> anyhow::Result<Self> {
        let mut server = Command::new(program("tidemark-s3", "TIDEMARK_S3")?)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start tidemark-s3")?;
        let mut line = String::new();
        BufReader::new(server.stdout.take().context("its stdout")?).read_line(&mut line)?;
        let field = |name: &str| {
            let found = line.split_whitespace().find_map(|field| field.strip_prefix(name)?.strip_prefix('='));
            found.map(str::to_owned).with_context(|| format!("tidemark-s3 named no {name}: {line:?}"))
        };
        Ok(Self {
            endpoint: field("endpoint")?,
            bucket: field("bucket")?,
            access_key: field("access_key")?,
            secret: field("secret")?,
            server,
        })
    }

    /// Returns a bucket for a daemon. Bodies are not hashed for the signature, as over https.
    #[must_use]
    pub fn bucket(&self, prefix: &str) -> Bucket {
        let variables = [
            ("AWS_ENDPOINT_URL", &self.endpoint),
            ("AWS_ACCESS_KEY_ID", &self.access_key),
            ("AWS_SECRET_ACCESS_KEY", &self.secret),
            ("AWS_UNSIGNED_PAYLOAD", &"true".to_owned()),
        ];
        Bucket {
            url: format!("s3://{}/{prefix}", self.bucket),
            variables: variables.into_iter().map(|(name, value)| (name.to_owned(), value.clone())).collect(),
        }
    }

    /// Returns the client of `object_store` with its defaults, without checksums.
    ///
    /// # Errors
    /// The settings do not fit together.
    pub fn client(&self) -> anyhow::Result<BareClient> {
        let store = AmazonS3Builder::new()
            .with_endpoint(&self.endpoint)
            .with_allow_http(true)
            .with_region("us-east-1")
            .with_bucket_name(&self.bucket)
            .with_access_key_id(&self.access_key)
            .with_secret_access_key(&self.secret)
            .with_unsigned_payload(true)
            .build()?;
        let runtime = tokio::runtime::Runtime::new().context("threads for the bare client")?;
        Ok(BareClient { store, runtime })
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        drop(self.server.stdin.take());
        // The server ends by itself now; nothing to report if it had ended before.
        self.server.wait().ok();
    }
}

/// The client of [`S3::client`].
#[derive(Debug)]
pub struct BareClient {
    store: AmazonS3,
    runtime: tokio::runtime::Runtime,
}

impl BareClient {
    /// Uploads `bytes` in parts, `parts_in_flight` at once, and completes the object.
    ///
    /// # Errors
    /// The server's error.
    pub fn upload(
        &self,
        key: &str,
        bytes: &Bytes,
        part_bytes: usize,
        parts_in_flight: usize,
    ) -> anyhow::Result<()> {
        let key = Path::from(key);
        self.runtime.block_on(async {
            let id = self.store.create_multipart(&key).await?;
            let parts = (0..bytes.len().div_ceil(part_bytes)).map(|number| {
                let part = bytes.slice(number * part_bytes..((number + 1) * part_bytes).min(bytes.len()));
                self.store.put_part(&key, &id, number, part.into())
            });
            let parts = stream::iter(parts).buffered(parts_in_flight).try_collect::<Vec<_>>().await?;
            ensure!(!parts.is_empty(), "nothing to upload");
            self.store.complete_multipart(&key, &id, parts).await?;
            Ok(())
        })
    }

    /// Fetches an object into a new file, several ranges at once; writes each at its place as it comes.
    ///
    /// # Errors
    /// The server's error; the file's.
    pub fn download(
        &self,
        key: &str,
        file: &File,
        size_bytes: u64,
        range_bytes: u64,
        ranges_in_flight: usize,
    ) -> anyhow::Result<()> {
        let key = Path::from(key);
        self.runtime.block_on(async {
            let (store, key) = (&self.store, &key);
            let ranges = (0..size_bytes.div_ceil(range_bytes)).map(|number| async move {
                let range = number * range_bytes..((number + 1) * range_bytes).min(size_bytes);
                let offset = range.start;
                let (bytes, file) = (store.get_range(key, range).await?, file.try_clone()?);
                tokio::task::spawn_blocking(move || file.write_all_at(&bytes, offset)).await??;
                Ok(())
            });
            stream::iter(ranges).buffer_unordered(ranges_in_flight).try_collect().await
        })
    }

    /// Returns the key of the single object of this size.
    ///
    /// # Errors
    /// The server's error; there is no such object.
    pub fn key_of(&self, size_bytes: u64) -> anyhow::Result<String> {
        self.runtime.block_on(async {
            let mut objects = self.store.list(None);
            while let Some(object) = objects.try_next().await? {
                if object.size == size_bytes {
                    return Ok(object.location.to_string());
                }
            }
            bail!("the bucket has no object of {size_bytes} bytes")
        })
    }

    /// Removes an object.
    ///
    /// # Errors
    /// The server's error.
    pub fn remove(&self, key: &str) -> anyhow::Result<()> {
        Ok(self.runtime.block_on(self.store.delete(&Path::from(key)))?)
    }
}
