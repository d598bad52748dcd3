//! A real HTTP S3 server for tests: signed requests, conditional puts, checked checksums, scripted faults.
//!
//! Owns: the server's life, and what an auditor sees of its bucket. Does not own: the bucket (`backend`), the script
//! (`fault`), what a fault looks like on the wire (`wire`).

mod backend;
mod fault;
mod wire;

pub use fault::{Fault, FaultEffect, Faults, S3Operation};

use backend::Backend;
use bytes::Bytes;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use s3s::S3;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};

/// Options of the server.
#[derive(Clone)]
pub struct S3Options {
    pub address: SocketAddr,
    pub bucket: String,
    pub access_key: String,
    pub secret: String,
    /// Entries of one page of a listing; small in tests of long listings.
    pub page_keys: usize,
    /// `false`: `If-None-Match` is ignored, as some stores do.
    pub honours_conditions: bool,
    /// `false`: checksums sent with a body are ignored, as some stores do.
    pub checks_checksums: bool,
    /// `false`: listing unfinished uploads is refused with 403, as by credentials that may only read and write objects.
    pub lists_uploads: bool,
    /// `true`: every write is refused with 403.
    pub read_only: bool,
    /// `true`: when an upload is completed, its last part is lost, and the answer reports success.
    pub loses_parts: bool,
}

impl Default for S3Options {
    fn default() -> Self {
        Self {
            address: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            bucket: "tidemark".to_owned(),
            access_key: "AKIATIDEMARKTEST".to_owned(),
            secret: "a-secret-of-the-test-harness".to_owned(),
            page_keys: 1000,
            honours_conditions: true,
            checks_checksums: true,
            lists_uploads: true,
            read_only: false,
            loses_parts: false,
        }
    }
}

impl fmt::Debug for S3Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Options").field("bucket", &self.bucket).finish_non_exhaustive()
    }
}

/// A running server with one bucket. Dropping it ends the server and removes its bodies.
#[derive(Debug)]
pub struct S3Server {
    pub endpoint: String,
    pub bucket: String,
    pub access_key: String,
    pub secret: String,
    /// Scripted faults, and the count of requests.
    pub faults: Arc<Faults>,
    backend: Backend,
    _served: Served,
    _bodies: TempDir,
}

/// Any implementation of S3 over HTTP; ends when dropped.
#[derive(Debug)]
pub struct Served {
    pub endpoint: String,
    runtime: Option<Runtime>,
}

impl S3Server {
    /// Starts a server on threads of its own, so that synchronous tests and child processes can use it.
    pub fn start(options: S3Options) -> io::Result<Self> {
        let bodies = tempfile::tempdir()?;
        let backend = Backend::new(options.clone(), bodies.path().to_owned());
        let faults = Arc::new(Faults::default());
        let served = Served::start(backend.clone(), &options, Arc::clone(&faults))?;
        Ok(Self {
            endpoint: served.endpoint.clone(),
            bucket: options.bucket,
            access_key: options.access_key,
            secret: options.secret,
            faults,
            backend,
            _served: served,
            _bodies: bodies,
        })
    }

    /// Returns the environment of a client, for a child process or for `StoreSettings::variables`.
    pub fn env(&self) -> Vec<(String, String)> {
        env(&self.endpoint, &self.access_key, &self.secret)
    }

    /// Returns `s3://bucket/prefix`.
    pub fn url(&self, prefix: &str) -> String {
        format!("s3://{}/{prefix}", self.bucket)
    }

    /// Returns the encryption that the writer of `key`, which includes the prefix, requested: the algorithm and the key's id.
    pub fn encryption_of(&self, key: &str) -> Option<String> {
        self.backend.encryption_of(key)
    }

    /// Returns every object of the bucket below `prefix/`, as stored, by the rest of its key. Makes no request.
    pub fn objects(&self, prefix: &str) -> io::Result<BTreeMap<String, Bytes>> {
        'again: loop {
            let mut found = BTreeMap::new();
            for (key, file) in self.backend.files() {
                let Some(key) = key.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('/')) else {
                    continue;
                };
                match std::fs::read(file) {
                    Ok(body) => found.insert(key.to_owned(), Bytes::from(body)),
                    // Another request deleted the object meanwhile.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue 'again,
                    Err(error) => return Err(error),
                };
            }
            return Ok(found);
        }
    }

    /// Returns the number of multipart uploads neither completed nor aborted.
    pub fn unfinished_uploads(&self) -> usize {
        self.backend.unfinished_uploads().len()
    }

    /// Returns the keys of multipart uploads neither completed nor aborted, sorted.
    pub fn unfinished_keys(&self) -> Vec<String> {
        self.backend.unfinished_uploads()
    }

    /// Begins a multipart upload and leaves it, as a writer that dies. `key` is the bucket's, with the prefix.
    pub fn leave_upload(&self, key: &str) {
        self.backend.begin_upload(key.to_owned());
    }
}

impl Served {
    /// Serves `backend` at the address and with the credentials of `options`.
    pub fn start(backend: impl S3, options: &S3Options, faults: Arc<Faults>) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        // The standard library binds, because the caller may be inside a runtime, where it must not block on another.
        let socket = std::net::TcpListener::bind(options.address)?;
        socket.set_nonblocking(true)?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(socket)?
        };
        let endpoint = format!("http://{}", listener.local_addr()?);
        let mut builder = S3ServiceBuilder::new(backend);
        builder.set_auth(SimpleAuth::from_single(options.access_key.clone(), options.secret.clone()));
        runtime.spawn(accept(listener, builder.build(), faults));
        Ok(Self { endpoint, runtime: Some(runtime) })
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // A request that a fault holds for ever must not delay the test's end.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Returns the environment of a client of the server at `endpoint`.
pub fn env(endpoint: &str, access_key: &str, secret: &str) -> Vec<(String, String)> {
    [
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", access_key),
        ("AWS_SECRET_ACCESS_KEY", secret),
        ("AWS_REGION", "us-east-1"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}

async fn accept(listener: TcpListener, service: S3Service, faults: Arc<Faults>) {
    loop {
        let Ok((connection, _)) = listener.accept().await else { continue };
        let (service, faults) = (service.clone(), Arc::clone(&faults));
        tokio::spawn(async move {
            let answer =
                service_fn(move |request| wire::respond(service.clone(), Arc::clone(&faults), request));
            // An error is a client that went away, or a connection that a fault drops.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(connection), answer).await;
        });
    }
}
