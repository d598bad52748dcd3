//! Serves a node's commands on a unix socket, and its health on TCP.
//!
//! Owns: the listeners and their life. Does not own: what each path does (`routes`), lines of long work (`stream`),
//! the socket file (`socket`).

mod routes;
mod socket;
mod stream;

use crate::api::NodeApi;
use futures::FutureExt;
use socket::SocketFile;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::watch;

/// Requests at work on the unix socket at once, those that stream included. An admin and a few scripts need a
/// dozen; each holds one answer in memory.
pub const REQUESTS_MAX: usize = 64;
/// The same on TCP, counted apart, so that probes and commands cannot starve each other.
pub const HTTP_REQUESTS_MAX: usize = 16;
/// How long answers under way may take when the server is told to end. Streams are ended at once.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(5);

/// Binds and serves until the task is dropped; [`Server::bind`] is for a caller that needs the bound address first
/// or an orderly end.
///
/// # Errors
/// As [`Server::bind`] and [`Server::run`].
pub async fn serve(node: Arc<dyn NodeApi>, uds: PathBuf, http: SocketAddr) -> Result<(), ServeError> {
    Server::bind(&uds, http).await?.run(node, futures::future::pending()).await
}

/// Bound and not yet answering: connections wait in the kernel's queue.
#[derive(Debug)]
pub struct Server {
    unix: UnixListener,
    socket: SocketFile,
    tcp: TcpListener,
    http_addr: SocketAddr,
}

impl Server {
    /// Makes the socket (mode 0600, its directory 0700 where it must be made) and binds `http`; port 0 takes a free
    /// one. The socket of a daemon that is gone is replaced.
    ///
    /// # Errors
    /// When another daemon answers on the socket, or either address cannot be had.
    pub async fn bind(uds: &Path, http: SocketAddr) -> Result<Self, ServeError> {
        let (unix, socket) = socket::bind(uds)?;
        let tcp = TcpListener::bind(http).await.map_err(|source| ServeError::BindHttp { http, source })?;
        let http_addr = tcp.local_addr().map_err(|source| ServeError::BindHttp { http, source })?;
        Ok(Self { unix, socket, tcp, http_addr })
    }

    /// The TCP address that was bound.
    #[must_use]
    pub const fn http_addr(&self) -> SocketAddr {
        self.http_addr
    }

    /// Answers until `shutdown` resolves: then streams end with an error that says so, other answers under way have
    /// a few seconds, and the socket file is removed.
    ///
    /// # Errors
    /// When a listener fails for good.
    pub async fn run(
        self,
        node: Arc<dyn NodeApi>,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), ServeError> {
        let (ending, _) = watch::channel(false);
        let commands = routes::commands(Arc::clone(&node), ending.subscribe());
        let health = routes::health(node);
        let ended = |mut ending: watch::Receiver<bool>| async move {
            // An error means that the sender is gone, which ends the server too.
            let _ = ending.wait_for(|ending| *ending).await;
        };
        let unix = axum::serve(self.unix, commands)
            .with_graceful_shutdown(ended(ending.subscribe()))
            .into_future()
            .map(|end| end.map_err(|source| ServeError::Accept { source }));
        let tcp = axum::serve(self.tcp, health)
            .with_graceful_shutdown(ended(ending.subscribe()))
            .into_future()
            .map(|end| end.map_err(|source| ServeError::Accept { source }));
        let both = async { tokio::try_join!(unix, tcp).map(|_| ()) };
        let deadline = async {
            shutdown.await;
            ending.send_replace(true);
            tokio::time::sleep(SHUTDOWN_GRACE).await;
        };
        let end = tokio::select! {
            end = both => end,
            () = deadline => {
                tracing::warn!(grace_s = SHUTDOWN_GRACE.as_secs(), "answers under way were cut off");
                Ok(())
            }
        };
        self.socket.remove();
        end
    }
}

/// Why a node cannot be talked to.
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
    #[error("a listener failed")]
    Accept { source: io::Error },
}
