//! Pushing and pulling: pieces of one transfer over one or several connections.
//!
//! Owns: which pieces are on the way, which have landed, and what a failure leaves. Does not own: a connection's bytes (`halves`) nor when
//! a piece may go (the caller's pace).

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::{Either, select, try_join_all};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::halves::{Failure, split};
use super::pool::Connection;
use super::serve::PIECE;
use super::wire::{REPLY_BYTES, Reply, Request};
use crate::error::{LinkError, TokenRefusal};
use crate::link::{Address, BytesSink, BytesSource, Pace, Unpaced, local};
use crate::range::{Landed, PIECE_BYTES, pieces};
use crate::tcp::greeting::Purpose;
use crate::tcp::{BULK_STREAMS_MAX, Node, dial};
use crate::token::{Direction, Token};

/// Pieces of one connection that are on the way: 16 MiB, which 10 Gbit/s carry in a round trip of 13 ms.
const ON_THE_WAY_MAX: usize = 16;

/// How long to keep reading replies after sending failed.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Pauses in milliseconds before a connection that was closed amid its greeting is opened again. Their sum exceeds the time for which an
/// unproven connection keeps a newcomer from the other end (`strangers`).
const AGAIN_AFTER_MS: [u64; 6] = [10, 20, 40, 80, 160, 320];

/// Pushes ranges of a file. See [`Link::push`](crate::Link::push).
pub(crate) async fn push(
    node: &Arc<Node>,
    to: &Address,
    token: Token,
    from: &Arc<dyn BytesSource>,
    ranges: &[Range<u64>],
    pace: &dyn Pace,
) -> Result<(), LinkError> {
    transfer(node, Transfer::new(to, token, Ours::Source(from.as_ref()), ranges, pace)).await
}

/// Pulls ranges into a file. See [`Link::pull`](crate::Link::pull).
pub(crate) async fn pull(
    node: &Arc<Node>,
    from: &Address,
    token: Token,
    into: &Arc<dyn BytesSink>,
    ranges: &[Range<u64>],
) -> Result<(), LinkError> {
    transfer(node, Transfer::new(from, token, Ours::Sink(into.as_ref()), ranges, &Unpaced)).await
}

/// The local file.
#[derive(Clone, Copy)]
enum Ours<'a> {
    Source(&'a dyn BytesSource),
    Sink(&'a dyn BytesSink),
}

impl Ours<'_> {
    /// Returns the direction as the other end sees it.
    fn direction(self) -> Direction {
        match self {
            Self::Source(_) => Direction::Receive,
            Self::Sink(_) => Direction::Send,
        }
    }
}

/// A push or a pull.
struct Transfer<'a> {
    with: &'a Address,
    token: Token,
    ours: Ours<'a>,
    pace: &'a dyn Pace,
    streams_max: usize,
    left: Mutex<Left<'a>>,
    landed: Mutex<Landed>,
}

struct Left<'a> {
    returned: Vec<Range<u64>>,
    rest: Box<dyn Iterator<Item = Range<u64>> + Send + 'a>,
}

/// Why a connection of a transfer stopped.
enum Stop {
    Dial(LinkError),
    Connection(io::Error),
    File { doing: &'static str, range: Range<u64>, source: io::Error },
    Token { range: Range<u64>, why: TokenRefusal },
}

impl<'a> Transfer<'a> {
    fn new(
        with: &'a Address,
        token: Token,
        ours: Ours<'a>,
        ranges: &[Range<u64>],
        pace: &'a dyn Pace,
    ) -> Self {
        // A stream for less than some pieces would cost more than it saves.
        let count = pieces(ranges, PIECE_BYTES).take(BULK_STREAMS_MAX * ON_THE_WAY_MAX).count();
        let rest = Box::new(pieces(ranges, PIECE_BYTES));
        Self {
            with,
            token,
            ours,
            pace,
            streams_max: count.div_ceil(ON_THE_WAY_MAX),
            left: Mutex::new(Left { returned: vec![], rest }),
            landed: Mutex::default(),
        }
    }

    fn next(&self) -> Option<Range<u64>> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        left.returned.pop().or_else(|| left.rest.next())
    }

    fn give_back(&self, pieces: impl IntoIterator<Item = Range<u64>>) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).returned.extend(pieces);
    }

    fn land(&self, piece: Range<u64>) {
        self.landed.lock().unwrap_or_else(PoisonError::into_inner).add(piece);
    }

    fn error(self, stop: Stop) -> LinkError {
        let node = self.with.node.clone();
        let landed = self.landed.into_inner().unwrap_or_else(PoisonError::into_inner).into_ranges();
        match stop {
            Stop::Dial(error) if landed.is_empty() => error,
            Stop::Dial(error) => LinkError::Cut { node, landed, reason: error.to_string() },
            Stop::Connection(error) => LinkError::Cut { node, landed, reason: error.to_string() },
            Stop::File { doing, range, source } => local(doing, &range, source),
            Stop::Token { range, why } => LinkError::Token { node, range, why },
        }
    }
}

async fn transfer(node: &Arc<Node>, transfer: Transfer<'_>) -> Result<(), LinkError> {
    let streams = transfer.streams_max.min(node.settings.bulk_streams.clamp(1, BULK_STREAMS_MAX));
    let mut closed = node.closed.subscribe();
    let carried = tokio::select! {
        _ = closed.wait_for(|closed| *closed) => return Err(LinkError::Closed),
        carried = try_join_all((0..streams).map(|_| stream(node, &transfer))) => carried,
    };
    carried.map(drop).map_err(|stop| transfer.error(stop))
}

/// Carries pieces over one connection until none is left.
async fn stream(node: &Arc<Node>, transfer: &Transfer<'_>) -> Result<(), Stop> {
    // The other end may have closed a connection that waited; using it shows that, and costs one more try.
    if let Some(mut waited) = node.pool.take(transfer.with) {
        let on_the_way = Mutex::default();
        match over(&mut waited, transfer, &on_the_way).await {
            Ok(()) => {
                node.pool.put(transfer.with, waited, Instant::now());
                return Ok(());
            }
            Err(Stop::Connection(_)) => {
                transfer.give_back(on_the_way.into_inner().unwrap_or_else(PoisonError::into_inner));
            }
            Err(stop) => return Err(stop),
        }
    }
    let mut fresh = open(node, transfer.with).await?;
    over(&mut fresh, transfer, &Mutex::default()).await?;
    node.pool.put(transfer.with, fresh, Instant::now());
    Ok(())
}

/// Opens a connection.
async fn open(node: &Arc<Node>, to: &Address) -> Result<Connection, Stop> {
    let purpose = if node.settings.encrypt_bulk { Purpose::Bulk } else { Purpose::OpenBulk };
    let permits = node.pool.opening(to);
    let _permit = permits.acquire().await.expect("these permits are never taken back");
    let mut pauses = AGAIN_AFTER_MS.into_iter();
    let (stream, welcome) = loop {
        match dial::dial(node, to, purpose).await {
            Ok(opened) => break opened,
            Err(error) => {
                let pause = pauses.next().filter(|_| was_closed(&error));
                let Some(pause) = pause else { return Err(Stop::Dial(error)) };
                sleep(Duration::from_millis(pause)).await;
            }
        }
    };
    let (receiving, sending) = split(stream, welcome.encrypts).map_err(Stop::Connection)?;
    Ok(Connection { receiving, sending })
}

/// Returns whether the other end, or something before it, accepted the connection and closed it without a greeting.
fn was_closed(error: &LinkError) -> bool {
    let LinkError::Unreachable { source, .. } = error else { return false };
    matches!(
        source.kind(),
        io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::UnexpectedEof
    )
}

/// Sends requests and reads replies side by side, so that the connection is never empty.
async fn over(
    connection: &mut Connection,
    transfer: &Transfer<'_>,
    on_the_way: &Mutex<VecDeque<Range<u64>>>,
) -> Result<(), Stop> {
    let Connection { receiving, sending } = connection;
    let way = || on_the_way.lock().unwrap_or_else(PoisonError::into_inner);
    let (asked, mut heard) = mpsc::channel::<Range<u64>>(ON_THE_WAY_MAX);
    let asking = async move {
        while let Ok(place) = asked.reserve().await {
            let Some(range) = transfer.next() else { return Ok(()) };
            way().push_back(range.clone());
            transfer.pace.take(range.end - range.start).await;
            let direction = transfer.ours.direction();
            let request = Request { direction, token: transfer.token, range: range.clone() }.encode();
            // Entered before it is sent: the answer may be there at once.
            place.send(range.clone());
            let sent = async {
                match transfer.ours {
                    Ours::Source(from) => {
                        sending.header(&request, true).await?;
                        sending.piece(from, &range).await
                    }
                    Ours::Sink(_) => Ok(sending.header(&request, false).await?),
                }
            };
            in_time(sent).await.map_err(|failure| stop(failure, &range))?;
        }
        Ok(())
    };
    let hearing = async {
        while let Some(range) = heard.recv().await {
            let moved = async {
                let reply = receiving.header::<REPLY_BYTES>().await?;
                let reply =
                    Reply::decode(&reply.ok_or(io::ErrorKind::UnexpectedEof).map_err(io::Error::from)?)?;
                if reply.range != range {
                    let what = format!("a reply for {:?} where {range:?} was due", reply.range);
                    return Err(Failure::Connection(io::Error::new(io::ErrorKind::InvalidData, what)));
                }
                if let (Ok(()), Ours::Sink(into)) = (reply.said, transfer.ours) {
                    into.landing(range.clone());
                    receiving.piece(into, &range).await?;
                    into.landed(range.clone());
                }
                Ok(reply.said)
            };
            let said = in_time(moved).await.map_err(|failure| stop(failure, &range))?;
            said.map_err(|why| Stop::Token { range: range.clone(), why })?;
            way().pop_front();
            transfer.land(range);
        }
        Ok(())
    };
    let (asking, hearing) = (pin!(asking), pin!(hearing));
    match select(asking, hearing).await {
        Either::Left((Err(stop), hearing)) => {
            // Confirmations that came before the end may not have been read yet; their pieces need not be sent again.
            match timeout(LAST_WORDS, hearing).await {
                // The other end's reason says more than the fact that it closed the connection.
                Ok(Err(refused @ Stop::Token { .. })) => Err(refused),
                _ => Err(stop),
            }
        }
        Either::Left((Ok(()), hearing)) => hearing.await,
        // The hearing side ends after the asking side, so it ends first only by failing.
        Either::Right((heard, _)) => heard,
    }
}

/// Bounds the time of one piece at the asking end, too.
async fn in_time<T>(moved: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    timeout(PIECE, moved).await.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut).into()))
}

fn stop(failure: Failure, range: &Range<u64>) -> Stop {
    match failure {
        Failure::Connection(error) => Stop::Connection(error),
        Failure::File { doing, source, .. } => Stop::File { doing, range: range.clone(), source },
    }
}
