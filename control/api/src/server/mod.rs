//! Serves a node's commands on a unix socket, and its health on TCP.
//!
//! Owns: the listeners and their life. Does not own: the routes of the paths (`routes`), lines of long work (`stream`), the socket file
//! (`socket`), which connections are kept (`connections`).

mod connections;
mod routes;
mod socket;
mod stream;

use crate::NodeApi;
use axum::Router;
use connections::Limits;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use socket::SocketFile;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use stream::Ending;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;

/// Requests at work on the unix socket at once, including streams. An admin and a few scripts need a dozen; each holds one answer in
/// memory.
pub const REQUESTS_MAX: usize = 64;
/// The same on TCP, counted apart, so that probes and commands cannot starve each other.
pub const HTTP_REQUESTS_MAX: usize = 16;
/// Limits of the unix socket. Commands need a connection each, and every user that may open the socket is trusted: four times
/// [`REQUESTS_MAX`].
const CONNECTIONS: Limits = Limits { connections: 256, header_time: Duration::from_secs(60) };
/// Limits of TCP, to which anybody on the machine may connect. Four times [`HTTP_REQUESTS_MAX`] are few beside the descriptors that files
/// need, also if the daemon may have only 1,024. A scraper that comes every 15 s connects again.
const HTTP_CONNECTIONS: Limits = Limits { connections: 64, header_time: Duration::from_secs(10) };
/// Interval at which the server checks whether the socket was removed.
const SOCKET_LOOK: Duration = Duration::from_secs(1);
/// How long pending answers may take when the server has to end. Streams are ended at once.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Binds and serves until the task is dropped; [`Server::bind`] is for a caller that needs the bound address first
/// or an orderly end.
///
/// # Errors
/// As [`Server::bind`].
pub async fn serve(node: Arc<dyn NodeApi>, uds: PathBuf, http: SocketAddr) -> Result<(), ServeError> {
    Server::bind(&uds, http).await?.run(node, futures::future::pending()).await;
    Ok(())
}

/// A server that is bound and does not answer yet: connections wait in the kernel's queue.
#[derive(Debug)]
pub struct Server {
    unix: UnixListener,
    socket: SocketFile,
    tcp: TcpListener,
    http_addr: SocketAddr,
}

impl Server {
    /// Makes the socket (mode 0600; if its directory is missing, makes it with mode 0700) and binds `http`; port 0 chooses a free port. The
    /// socket of a daemon that is gone is replaced.
    ///
    /// # Errors
    /// When another daemon answers on the socket, or either address is not available.
    pub async fn bind(uds: &Path, http: SocketAddr) -> Result<Self, ServeError> {
        let (unix, socket) = socket::bind(uds)?;
        let tcp = TcpListener::bind(http).await.map_err(|source| ServeError::BindHttp { http, source })?;
        let http_addr = tcp.local_addr().map_err(|source| ServeError::BindHttp { http, source })?;
        Ok(Self { unix, socket, tcp, http_addr })
    }

    /// Returns the TCP address that was bound.
    #[must_use]
    pub const fn http_addr(&self) -> SocketAddr {
        self.http_addr
    }

    /// Answers until `shutdown` resolves. Then streams end with an error that says so, other pending answers have a few seconds, and the
    /// socket file is removed.
    pub async fn run(self, node: Arc<dyn NodeApi>, shutdown: impl Future<Output = ()> + Send + 'static) {
        let (ending, _) = watch::channel(false);
        let commands = routes::commands(Arc::clone(&node), ending.subscribe());
        let health = routes::health(node);
        let Self { unix, mut socket, tcp, http_addr: _ } = self;
        let both = async {
            tokio::join!(
                serve_commands(unix, &mut socket, commands, ending.subscribe()),
                connections::serve(tcp, health, HTTP_CONNECTIONS, ending.subscribe()),
            );
        };
        let deadline = async {
            shutdown.await;
            ending.send_replace(true);
            tokio::time::sleep(SHUTDOWN_GRACE).await;
        };
        tokio::select! {
            () = both => {}
            () = deadline => {
                tracing::warn!(grace_s = SHUTDOWN_GRACE.as_secs(), "answers under way were cut off");
            }
        }
        socket.remove();
    }
}

/// Serves commands until `ending`; if the socket was removed, on a new one. Requests that came by the old one are still answered.
async fn serve_commands(unix: UnixListener, socket: &mut SocketFile, routes: Router, ending: Ending) {
    let serve = |unix| connections::serve(unix, routes.clone(), CONNECTIONS, ending.clone());
    let mut serving = FuturesUnordered::from_iter([serve(unix)]);
    loop {
        tokio::select! {
            ended = serving.next() => {
                if ended.is_none() {
                    return;
                }
            }
            () = tokio::time::sleep(SOCKET_LOOK) => {
                if *ending.borrow() || !socket.is_missing() {
                    continue;
                }
                match socket.make_again() {
                    Ok(unix) => {
                        tracing::warn!("the command socket was removed; it is made again");
                        serving.push(serve(unix));
                    }
                    Err(error) => {
                        tracing::debug!(error = &error as &dyn std::error::Error, "the command socket is not made again");
                    }
                }
            }
        }
    }
}

/// Why a node's server cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(
        "another daemon answers at {}; stop it, or give this one its own --state-dir", socket.display()
    )]
    Live { socket: PathBuf },
    #[error(
        "the socket path {} has {len_bytes} bytes and the kernel takes {max_bytes}; choose a shorter --state-dir",
        socket.display()
    )]
    PathTooLong { socket: PathBuf, len_bytes: usize, max_bytes: usize },
    #[error("{} is there and is not a socket; move it away, or choose another --state-dir", socket.display())]
    NotASocket { socket: PathBuf },
    #[error("{operation} {}; check --state-dir and who may write there", path.display())]
    Socket { operation: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot listen for HTTP on {http}; choose another --http (port 0 takes a free one)")]
    BindHttp { http: SocketAddr, source: io::Error },
}
