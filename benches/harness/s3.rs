//! The S3 server of the tests, as a process of its own, and a bare client for it.
//!
//! Owns: starting and ending the server, and uploads of one object as `object_store` makes them. Does not own: the
//! server (`tests/harness/s3`), what is compared.

use crate::daemon::{Bucket, program};
use anyhow::{Context, ensure};
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::ObjectStoreExt;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

/// The server; it ends with this value, since its stdin closes then.
#[derive(Debug)]
pub struct S3 {
    server: Child,
    endpoint: String,
    bucket: String,
    access_key: String,
    secret: String,
}

impl S3 {
    /// Starts it on a free port.
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

    /// For a daemon. Bodies are not hashed for the signature, as over https.
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

    /// The client of `object_store` as it comes, without checksums.
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
        // It ends by itself now; nothing to tell when it had ended before.
        self.server.wait().ok();
    }
}

/// See [`S3::client`].
#[derive(Debug)]
pub struct BareClient {
    store: AmazonS3,
    runtime: tokio::runtime::Runtime,
}

impl BareClient {
    /// Uploads `bytes` in parts, so many at once, and completes the object.
    ///
    /// # Errors
    /// The server's.
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

    /// Removes an object.
    ///
    /// # Errors
    /// The server's.
    pub fn remove(&self, key: &str) -> anyhow::Result<()> {
        Ok(self.runtime.block_on(self.store.delete(&Path::from(key)))?)
    }
}
