//! The connections of one listener: bounded in number, and none kept for a client that sends nothing.
//!
//! Owns: which connection gives way when there are too many, and how long a client may take to send a request. Does not own: requests at
//! work (`routes`) and their answers.
//!
//! Each connection is a descriptor of the daemon, which needs descriptors for files. A client that only connects must not be able to occupy
//! them, and a client that comes later must still be answered. So the longest idle connection makes place for a new one.

use super::stream::Ending;
use axum::Router;
use axum::body::{Body, Bytes};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service as _, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::task::{AbortHandle, JoinSet};

/// Time after which an unread answer no longer protects its connection: its client may never read it.
const ANSWER_TIME: Duration = Duration::from_secs(30);

/// Descriptors that are reserved for connections of a listener. If files have taken all others, `status` can still report that.
const SPARES: usize = 2;
/// The pause after an accept that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A socket that gives connections.
pub(super) trait Accepts {
    type Stream: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static;
    async fn next_stream(&self) -> io::Result<Self::Stream>;
}

impl Accepts for UnixListener {
    type Stream = UnixStream;
    async fn next_stream(&self) -> io::Result<UnixStream> {
        Ok(self.accept().await?.0)
    }
}

impl Accepts for TcpListener {
    type Stream = TcpStream;
    async fn next_stream(&self) -> io::Result<TcpStream> {
        Ok(self.accept().await?.0)
    }
}

/// Reserved descriptors, see [`SPARES`].
#[derive(Debug, Default)]
struct Spares(Vec<File>);

impl Spares {
    /// Opens missing spares, as far as there are descriptors.
    fn fill(&mut self) {
        while self.0.len() < SPARES {
            let Ok(spare) = File::open("/dev/null") else { return };
            self.0.push(spare);
        }
    }

    /// Frees a spare for a connection; returns false if there is none, or if `error` has another cause.
    fn give_up_for(&mut self, error: &io::Error) -> bool {
        let missing = [Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
        error.raw_os_error().is_some_and(|code| missing.contains(&code)) && self.0.pop().is_some()
    }
}

/// The bounds of one listener.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// The most connections open at once.
    pub(super) connections: usize,
    /// Time from the connection, or the answer before, until a request's header is there. A slower connection counts as idle.
    pub(super) header_time: Duration,
}

/// Whether a connection has a request at work, and since when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Standing {
    at_work: bool,
    since: Instant,
}

/// The standing of a connection, as its task reports it.
#[derive(Debug, Clone)]
struct Activity(Arc<Mutex<Standing>>);

/// Marks a request as at work until this is dropped.
#[derive(Debug)]
struct AtWork(Activity);

#[derive(Debug)]
struct Connection {
    activity: Activity,
    abort: AbortHandle,
}

/// A body that holds something until its last byte is gone.
pub(super) struct Holding<H> {
    body: Body,
    _held: H,
}

/// Answers on one listener until `ending`; pending answers are finished then.
pub(super) async fn serve(listener: impl Accepts, routes: Router, limits: Limits, mut ending: Ending) {
    let mut open: BTreeMap<tokio::task::Id, Connection> = BTreeMap::new();
    let mut tasks = JoinSet::new();
    let mut spares = Spares::default();
    loop {
        spares.fill();
        tokio::select! {
            accepted = listener.next_stream() => {
                let stream = match accepted {
                    Ok(stream) => stream,
                    Err(error) if spares.give_up_for(&error) => match listener.next_stream().await {
                        Ok(stream) => stream,
                        Err(_) => continue,
                    },
                    Err(error) => {
                        tracing::debug!(%error, "a connection was not accepted");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                        continue;
                    }
                };
                if open.len() >= limits.connections && !make_place(&mut open) {
                    // Each connection is being answered: this client has to come again.
                    continue;
                }
                let activity = Activity::new();
                let connection = answer(stream, routes.clone(), activity.clone(), limits, ending.clone());
                let abort = tasks.spawn(connection);
                open.insert(abort.id(), Connection { activity, abort });
            }
            Some(ended) = tasks.join_next_with_id(), if !tasks.is_empty() => {
                let id = match &ended {
                    Ok((id, ())) => *id,
                    Err(error) => error.id(),
                };
                open.remove(&id);
            }
            () = ends(&mut ending) => break,
        }
    }
    drop(listener);
    while tasks.join_next().await.is_some() {}
}

/// Waits until the server ends.
async fn ends(ending: &mut Ending) {
    // An error means that the sender is gone, which ends the server too.
    let _ = ending.wait_for(|ending| *ending).await;
}

/// Closes the connection that has been idle for longest; returns false if there is none.
fn make_place(open: &mut BTreeMap<tokio::task::Id, Connection>) -> bool {
    let standings = open.iter().map(|(id, connection)| (*id, connection.activity.now()));
    let Some(idle) = longest_idle(standings, Instant::now()) else { return false };
    if let Some(connection) = open.remove(&idle) {
        connection.abort.abort();
    }
    true
}

/// Returns the connection that gives way: the one that has had no request at work for longest. A request whose answer takes too long does
/// not count.
fn longest_idle<I>(standings: impl Iterator<Item = (I, Standing)>, now: Instant) -> Option<I> {
    let idle = standings.filter(|(_, standing)| {
        !standing.at_work || now.saturating_duration_since(standing.since) > ANSWER_TIME
    });
    idle.min_by_key(|(_, standing)| standing.since).map(|(id, _)| id)
}

async fn answer<S>(stream: S, routes: Router, activity: Activity, limits: Limits, mut ending: Ending)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let routes = TowerToHyperService::new(routes);
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        let at_work = activity.begin();
        let answer = routes.call(request);
        async move { answer.await.map(|response| response.map(|body| Holding::new(body, at_work))) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_time)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = ends(&mut ending) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        // A client that hangs up, or sends no request.
        tracing::debug!(%error, "a connection ended early");
    }
}

impl Activity {
    fn new() -> Self {
        Self(Arc::new(Mutex::new(Standing { at_work: false, since: Instant::now() })))
    }

    fn now(&self) -> Standing {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, at_work: bool) {
        let standing = Standing { at_work, since: Instant::now() };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = standing;
    }

    fn begin(&self) -> AtWork {
        self.set(true);
        AtWork(self.clone())
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl<H> Holding<H> {
    pub(super) fn new(body: Body, held: H) -> Self {
        Self { body, _held: held }
    }
}

impl<H: Unpin> axum::body::HttpBody for Holding<H> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Bytes>, axum::Error>>> {
        std::pin::Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_idle_connection_gives_way_and_none_that_is_being_answered() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let idle = |seconds| Standing { at_work: false, since: at(seconds) };
        let asks = |seconds| Standing { at_work: true, since: at(seconds) };
        let chosen = |standings: &[Standing], now| longest_idle(standings.iter().copied().enumerate(), now);
        assert_eq!(chosen(&[idle(3), idle(1), asks(0), idle(2)], at(4)), Some(1));
        assert_eq!(chosen(&[asks(0), asks(1)], at(30)), None);
        assert_eq!(chosen(&[asks(0), idle(20), asks(25)], at(31)), Some(0), "nobody reads its answer");
        assert_eq!(chosen(&[], at(0)), None);
    }
}
