//! Carrying out a question or a push.
//!
//! Owns: the question's content, reading and hashing the bytes to send. Does not own: what comes next (`send`), how fast (`pace`).

use super::pace::Paced;
use crate::chunk::bytes::{Source, blocking, chunk_bytes, read_all, sums};
use crate::metrics::Metrics;
use bytes::Bytes;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tidemark_namespace::{FileState, FileView, Namespace, SealPin};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::error::error_text;
use tidemark_protocol::file::Seal;
use tidemark_protocol::id::{ContentHash, FileId, SealNumber};
use tidemark_protocol::replication::{
    Answer, Ask, BulkToken, CopyMeta, Request, SealedCopy, SenderEvent, decode, encode,
};
use tidemark_transport::{Address, Link, Pace, Token};

/// Longest wait for an answer for which the partner hashes no bytes.
const CALL_DEADLINE: Duration = Duration::from_secs(10);
/// Lowest rate at which a partner hashes a file that it is asked to keep: by a core that does other things too.
const VERIFY_BYTES_PER_S: u64 = 200 << 20;

/// Returns the facts that the home attaches to a copy.
pub type Facts = Arc<dyn Fn(&FileView) -> Vec<u8> + Send + Sync>;

/// The means to carry out questions and pushes.
#[derive(Clone)]
pub(super) struct Outgoing {
    pub(super) namespace: Arc<Namespace>,
    pub(super) link: Arc<dyn Link>,
    pub(super) metrics: Arc<Metrics>,
    /// The name of this node.
    pub(super) home: String,
    pub(super) facts: Facts,
    pub(super) pace: Arc<Paced>,
}

impl fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outgoing").field("home", &self.home).finish_non_exhaustive()
    }
}

/// The present bytes of a sealed file, with its seal and its view.
struct Sealed {
    pin: SealPin,
    seal: Seal,
    view: FileView,
}

impl Outgoing {
    /// Asks a partner, and returns its answer.
    pub(super) async fn ask(&self, to: &Address, file: FileId, op: u64, ask: Ask) -> SenderEvent {
        let (request, deadline) = match self.request(file, ask).await {
            Ok(request) => request,
            Err(why) => return SenderEvent::Failed { op, why },
        };
        let body = match encode(&request) {
            Ok(body) => Bytes::from(body),
            Err(error) => return SenderEvent::Failed { op, why: error.to_string() },
        };
        drop(request);
        let answer = match self.link.call(to, body, deadline).await {
            Ok(answer) => answer,
            Err(error) => return SenderEvent::Failed { op, why: error_text(&error) },
        };
        match decode::<Answer>(&answer) {
            Ok(answer) => SenderEvent::Answered { op, answer },
            Err(error) => SenderEvent::Failed { op, why: error_text(&error) },
        }
    }

    async fn request(&self, file: FileId, ask: Ask) -> Result<(Request, Duration), String> {
        let slow = |size_bytes: u64| CALL_DEADLINE + Duration::from_secs(size_bytes / VERIFY_BYTES_PER_S);
        Ok(match ask {
            Ask::Begin { until_bytes, sealed, differs } => {
                (Request::Begin { file, until_bytes, sealed, differs }, slow(until_bytes))
            }
            Ask::Landed { chunks, until_bytes } => {
                (Request::Landed { file, chunks, until_bytes }, CALL_DEADLINE)
            }
            Ask::Keep(seal) => {
                let copy = self.copy(self.sealed(file, seal)?).0;
                let deadline = slow(copy.size_bytes);
                (Request::Keep(copy), deadline)
            }
            Ask::Prove(seal, hash) => {
                let copy = self.copy(self.sealed(file, seal)?).0;
                let deadline = slow(copy.size_bytes);
                (Request::Prove(copy, hash), deadline)
            }
            Ask::Small(seal) => {
                let (copy, pin) = self.copy(self.sealed(file, seal)?);
                let size_bytes = copy.size_bytes;
                // The bytes travel in the question, past the link's own pace: a save may have 100,000 such files.
                self.pace.take(size_bytes).await;
                let read = blocking(move || read_all(&pin.backing, size_bytes)).await;
                let bytes = read.map_err(|error| format!("its own bytes cannot be read: {error}"))?;
                if Crc64(tidemark_kernels::crc64(&bytes)) != copy.crc {
                    return Err("its own bytes are not what was sealed; the scrub will say more".to_owned());
                }
                self.metrics.replica_sent_bytes.inc_by(size_bytes);
                (Request::Small(copy, bytes), CALL_DEADLINE)
            }
        })
    }

    fn sealed(&self, file: FileId, seal: SealNumber) -> Result<Sealed, String> {
        let found = || {
            let view = self.namespace.nodes().view(self.namespace.nodes().node_of_file(file)?)?;
            let FileState::Sealed { seal: number, size_bytes, crc, chunks } = &view.state else {
                return None;
            };
            let sealed =
                Seal { number: *number, size_bytes: *size_bytes, crc: *crc, chunks: Arc::clone(chunks) };
            let pin = self.namespace.seals().pin_seal(file, seal).filter(|_| *number == seal)?;
            Some(Sealed { pin, seal: sealed, view })
        };
        found().ok_or_else(|| "it changed, or its bytes are not here any more".to_owned())
    }

    fn copy(&self, Sealed { pin, seal, view }: Sealed) -> (SealedCopy, SealPin) {
        let facts = (self.facts)(&view);
        let meta = CopyMeta {
            path: view.paths.first().cloned().unwrap_or_default(),
            mode: view.mode,
            uid: view.uid,
            gid: view.gid,
            mtime_ns: view.mtime_ns,
            xattrs: view.xattrs,
            home: self.home.clone(),
            published_at_ns: view.published_ns,
            facts,
        };
        (SealedCopy::new(view.file, &seal, meta), pin)
    }

    /// Computes BLAKE3 of the sealed bytes.
    pub(super) async fn hash(&self, file: FileId, seal: SealNumber, op: u64) -> SenderEvent {
        let sealed = match self.sealed(file, seal) {
            Ok(sealed) => sealed,
            Err(why) => return SenderEvent::Failed { op, why },
        };
        match blocking(move || sealed.pin.backing.map().map(|mapping| ContentHash::of(&mapping))).await {
            Ok(hash) => SenderEvent::Hashed { op, hash },
            Err(error) => SenderEvent::Failed { op, why: format!("its own bytes cannot be read: {error}") },
        }
    }

    /// Sends chunks of a sealed or a growing file.
    pub(super) async fn push(
        &self,
        to: &Address,
        file: FileId,
        seal: Option<SealNumber>,
        (op, token, chunks): (u64, BulkToken, Vec<u64>),
    ) -> SenderEvent {
        match self.pushed(to, file, seal, token, &chunks).await {
            Ok(sums) => SenderEvent::Pushed { op, sums },
            Err(why) => SenderEvent::Failed { op, why },
        }
    }

    async fn pushed(
        &self,
        to: &Address,
        file: FileId,
        seal: Option<SealNumber>,
        token: BulkToken,
        chunks: &[u64],
    ) -> Result<Vec<(u64, Crc64)>, String> {
        let unreadable = |error: std::io::Error| format!("its own bytes cannot be read: {error}");
        let (backing, hold, size_bytes, known) = match seal {
            Some(seal) => {
                let sealed = self.sealed(file, seal)?;
                let sum =
                    |chunk: &u64| Some((*chunk, *sealed.seal.chunks.get(usize::try_from(*chunk).ok()?)?));
                let known: Option<Vec<_>> = chunks.iter().map(sum).collect();
                let size_bytes = sealed.seal.size_bytes;
                (Arc::clone(&sealed.pin.backing), Some(sealed.pin), size_bytes, known)
            }
            None => {
                let node = self.namespace.nodes().node_of_file(file);
                let present =
                    node.and_then(|node| self.namespace.nodes().present(node)).filter(|now| now.file == file);
                let backing = present.ok_or("it is gone")?.backing;
                let size_bytes = backing.stat().map_err(unreadable)?.size_bytes;
                (backing, None, size_bytes, None)
            }
        };
        let ranges: Vec<_> = chunks.iter().map(|chunk| chunk_bytes(*chunk, size_bytes)).collect();
        let sent_bytes = ranges.iter().map(|range| range.end - range.start).sum();
        let sums = match known {
            Some(known) => known,
            // These bytes may change while they are sent; the seal shows later which did.
            None => {
                let (backing, chunks) = (Arc::clone(&backing), chunks.to_vec());
                blocking(move || sums(&backing, &chunks, size_bytes)).await.map_err(unreadable)?
            }
        };
        let source = Arc::new(Source::open(&backing, (Arc::clone(&backing), hold)).map_err(unreadable)?);
        self.metrics.replica_sent_bytes.inc_by(sent_bytes);
        let pushed = self.link.push(to, Token::from_bytes(token.0), source, &ranges, &*self.pace).await;
        pushed.map(|()| sums).map_err(|error| error_text(&error))
    }
}
