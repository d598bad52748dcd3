//! Control connections: requests and answers by number, tells in order.
//!
//! Owns: both ends of a connection that was greeted: the asking end, which its opener holds, and the answering end. A connection carries
//! requests and tells of its opener only; the other node opens its own. Does not own: opening (`dial`).

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::io::{AsyncWrite, AsyncWriteExt, BufWriter, ReadHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};

use super::greeting::{Hello, Welcome};
use super::stream::Stream;
use super::{Node, listen};
use crate::CALLS_IN_FLIGHT_MAX;
use crate::error::{LinkError, Refusal, answer_too_big};
use crate::frame::{Header, Kind, decode_refusal, encode_refusal, read_body, read_header};
use crate::link::{BODY_BYTES_MAX, Peer};
use crate::peers::{Admitted, Side};

/// Messages that wait for one connection's writer. Bodies wait here, so the limit is low.
const WORDS_WAITING_MAX: usize = 16;

/// The bytes of all requests that this node has received and not answered: a few of the longest, or thousands of usual ones. Connections
/// whose next request does not fit wait.
pub(crate) const REQUEST_BYTES_MAX: usize = 64 << 20;

const _: () = assert!(REQUEST_BYTES_MAX >= 2 * BODY_BYTES_MAX, "one peer must not hold up all others");

/// The budget is counted in units, because a semaphore's permits are 32 bits.
const UNIT_BYTES: usize = 1 << 10;

pub(crate) const REQUEST_UNITS: usize = REQUEST_BYTES_MAX / UNIT_BYTES;

/// Time limit from a frame's header to the end of its body. 16 MiB over a bad 10 Mbit/s link fit.
const BODY: Duration = Duration::from_secs(30);

/// Buffer that joins small frames into one packet.
const WRITER_BYTES: usize = 32 << 10;

/// The asking end.
#[derive(Debug, Clone)]
pub(crate) struct Control {
    words: mpsc::Sender<Word>,
    credits: Arc<Semaphore>,
    asked: Arc<Asked>,
}

#[derive(Debug)]
struct Word {
    kind: Kind,
    id: u64,
    body: Bytes,
    /// The credit, returned before the word is written: the peer that reads it may ask again at once.
    credit: Option<OwnedSemaphorePermit>,
    _budget: Option<OwnedSemaphorePermit>,
}

/// Requests without an answer yet. If the caller no longer waits, the entry and its credit stay: the other end is still working on the
/// request.
#[derive(Debug, Default)]
struct Asked {
    next: AtomicU64,
    waiting: Mutex<Waiting>,
}

type Waiting = HashMap<u64, (oneshot::Sender<Result<Bytes, Refusal>>, OwnedSemaphorePermit)>;

impl Asked {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Control {
    /// Takes over a connection that was welcomed.
    pub(crate) fn open(
        mut closed: watch::Receiver<bool>,
        stream: Stream,
        welcome: &Welcome,
        admitted: Admitted,
    ) -> Self {
        let (words, waiting) = mpsc::channel(WORDS_WAITING_MAX);
        let credits = usize::from(welcome.credits).clamp(1, CALLS_IN_FLIGHT_MAX);
        let control = Self { words, credits: Arc::new(Semaphore::new(credits)), asked: Arc::default() };
        let asked = Arc::clone(&control.asked);
        let credits = Arc::clone(&control.credits);
        tokio::spawn(async move {
            let (reading, writing) = tokio::io::split(stream);
            let ended = tokio::select! {
                _ = closed.wait_for(|closed| *closed) => Ok(()),
                () = admitted.replaced() => Ok(()),
                ended = hear_answers(reading, &asked) => ended,
                ended = write(writing, waiting) => ended,
            };
            if let Err(failure) = ended {
                tracing::debug!(peer = %admitted.peer, %failure, "a control connection ended");
            }
            credits.close();
            asked.waiting().clear();
            // Dropped before `closed`, so that a task that waits for closing finds the peer's departure noted.
            drop(admitted);
            drop(closed);
        });
        control
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.words.is_closed()
    }

    /// Asks and waits. If the connection ended before it took the body, returns the body, so that the caller may ask over another
    /// connection. Cancel safe.
    pub(crate) async fn call(&self, body: Bytes) -> Result<Result<Bytes, Lost>, Bytes> {
        let Ok(credit) = Arc::clone(&self.credits).acquire_owned().await else { return Err(body) };
        let Ok(place) = self.words.reserve().await else { return Err(body) };
        let (answer, answered) = oneshot::channel();
        // From 1; no connection lives for 2^64 calls.
        let id = self.asked.next.fetch_add(1, Ordering::Relaxed) + 1;
        self.asked.waiting().insert(id, (answer, credit));
        place.send(Word { kind: Kind::Call, id, body, credit: None, _budget: None });
        if self.words.is_closed() {
            // The connection's task may have cleared the table before this entry was there.
            self.asked.waiting().remove(&id);
        }
        Ok(match answered.await {
            Ok(Ok(body)) => Ok(body),
            Ok(Err(refusal)) => Err(Lost::Refused(refusal)),
            Err(_) => Err(Lost::Gone),
        })
    }

    /// Passes a tell to the connection's writer, or returns it when the connection has ended. Cancel safe.
    pub(crate) async fn tell(&self, body: Bytes) -> Result<(), Bytes> {
        let word = Word { kind: Kind::Tell, id: 0, body, credit: None, _budget: None };
        self.words.send(word).await.map_err(|unsent| unsent.0.body)
    }
}

/// Why a request that the connection took has no answer.
pub(crate) enum Lost {
    Refused(Refusal),
    Gone,
}

impl Lost {
    pub(crate) fn into_error(self, node: &str) -> LinkError {
        match self {
            Self::Refused(refusal) => LinkError::Refused { node: node.to_owned(), refusal },
            Self::Gone => LinkError::Lost { node: node.to_owned() },
        }
    }
}

async fn hear_answers(mut from: ReadHalf<Stream>, asked: &Asked) -> io::Result<()> {
    while let Some(header) = read_header(&mut from).await? {
        let answer = match header.kind {
            Kind::Answer => Ok(in_time(&mut from, header).await?),
            Kind::Refusal => Err(decode_refusal(&in_time(&mut from, header).await?)),
            Kind::Call | Kind::Tell => return Err(unexpected(header)),
        };
        let Some((waiting, credit)) = asked.waiting().remove(&header.id) else {
            return Err(unexpected(header));
        };
        drop(credit);
        // The caller may no longer wait.
        let _ = waiting.send(answer);
    }
    Ok(())
}

async fn in_time(from: &mut ReadHalf<Stream>, header: Header) -> io::Result<Bytes> {
    tokio::time::timeout(BODY, read_body(from, header.body_bytes))
        .await
        .unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

fn unexpected(header: Header) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("a frame that nobody asked for: {header:?}"))
}

async fn write(to: impl AsyncWrite + Unpin, mut words: mpsc::Receiver<Word>) -> io::Result<()> {
    let mut to = BufWriter::with_capacity(WRITER_BYTES, to);
    while let Some(Word { kind, id, body, credit, _budget }) = words.recv().await {
        drop(credit);
        to.write_all(&Header::encode(kind, id, body.len())).await?;
        to.write_all(&body).await?;
        if words.is_empty() {
            to.flush().await?;
        }
    }
    Ok(())
}

/// Serves one connection, as the answering end, until it ends.
pub(crate) async fn answer(node: &Arc<Node>, mut stream: Stream, hello: Hello) -> io::Result<()> {
    let peer = listen::peer(&hello);
    let admitted = match node.peers.admit(&peer, Side::Theirs) {
        Ok(admitted) => admitted,
        Err(why) => {
            tracing::warn!(%peer, %why, "a control connection was refused");
            return listen::sorry(stream, why).await;
        }
    };
    listen::welcome(node, &mut stream, true).await?;
    node.service.saw_epoch(&peer, hello.epoch);
    let (answers, waiting) = mpsc::channel(CALLS_IN_FLIGHT_MAX);
    let (reading, writing) = tokio::io::split(stream);
    tokio::select! {
        () = admitted.replaced() => Ok(()),
        ended = hear_words(reading, node, &peer, answers) => ended,
        ended = write(writing, waiting) => ended,
    }
}

async fn hear_words(
    mut from: ReadHalf<Stream>,
    node: &Arc<Node>,
    peer: &Peer,
    answers: mpsc::Sender<Word>,
) -> io::Result<()> {
    let credits = Arc::new(Semaphore::new(CALLS_IN_FLIGHT_MAX));
    while let Some(header) = read_header(&mut from).await? {
        let units = u32::try_from(header.body_bytes.div_ceil(UNIT_BYTES)).expect("bodies are limited");
        let budget = Arc::clone(&node.request_units).acquire_many_owned(units).await;
        let budget = budget.map_err(|_| io::ErrorKind::BrokenPipe)?;
        match header.kind {
            Kind::Tell => {
                let body = in_time(&mut from, header).await?;
                node.service.tell(peer.clone(), body);
            }
            Kind::Call => {
                let credit = Arc::clone(&credits).try_acquire_owned().map_err(|_| {
                    io::Error::new(
                        io::ErrorKind::InvalidData,
                        format!("more than {CALLS_IN_FLIGHT_MAX} requests at a time"),
                    )
                })?;
                let body = in_time(&mut from, header).await?;
                let (service, peer, answers) = (Arc::clone(&node.service), peer.clone(), answers.clone());
                tokio::spawn(async move {
                    let (kind, body) = match service.call(peer, body).await {
                        Ok(body) if body.len() <= BODY_BYTES_MAX => (Kind::Answer, body),
                        Ok(body) => (Kind::Refusal, encode_refusal(&answer_too_big(body.len()))),
                        Err(refusal) => (Kind::Refusal, encode_refusal(&refusal)),
                    };
                    let word =
                        Word { kind, id: header.id, body, credit: Some(credit), _budget: Some(budget) };
                    // The connection may have ended meanwhile; then no peer waits.
                    let _ = answers.send(word).await;
                });
            }
            Kind::Answer | Kind::Refusal => return Err(unexpected(header)),
        }
    }
    Ok(())
}
