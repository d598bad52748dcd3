//! Talks to the daemon of this machine over its unix socket.
//!
//! Owns: connections (one for each command), time-outs, bounds on answers, errors that say what to do. Does not own:
//! showing anything.

use crate::command::{Ask, Get, Work};
use crate::{EventsRequest, KEEPALIVE, KEEPER_FILE_NAME, LOCK_NAME, SOCKET_NAME, path};
use bytes::{Bytes, BytesMut};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::{Method, Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::{Serialize, de::DeserializeOwned};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tidemark_protocol::report::{ApiError, Event, ExitCode, Progress, StreamLine};
use tokio::net::UnixStream;
use tokio::time::timeout;

/// Time limit of a connect. A listening daemon accepts in microseconds; its queue may be full for a moment.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait for a restarted daemon. A daemon that died is back in some tens of milliseconds, and answers
/// commands when it has read Tier-3's markers.
const RESTART_PATIENCE: Duration = Duration::from_secs(10);
const RESTART_POLL: Duration = Duration::from_millis(20);
/// Time limit from the request to the first byte of the answer, and between the bytes of an answer. Doctor runs its
/// checks within it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest silence of a stream. A stream sends a line at least every [`KEEPALIVE`]; if five are missing, the daemon
/// is gone.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(KEEPALIVE.as_secs() * 5);
/// The longest answer. `show --files` of 100,000 files is about 50 MB.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// A daemon, by its socket. Holds no connection.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// Returns a client of the daemon with this state directory.
    #[must_use]
    pub fn of_state_dir(state_dir: &Path) -> Self {
        Self { socket: state_dir.join(SOCKET_NAME) }
    }

    /// Asks for an answer without arguments.
    pub async fn get<C: Get>(&self, _command: C) -> Result<C::Answer, ClientError> {
        let response = self.send(Method::GET, C::PATH, Bytes::new()).await?;
        self.read(response).await
    }

    /// Asks for an answer in one piece.
    pub async fn ask<C: Ask>(&self, request: &C) -> Result<C::Answer, ClientError> {
        let response = self.send(Method::POST, C::PATH, body_of(request)).await?;
        self.read(response).await
    }

    /// Has work done. The node's method says what dropping the future ends: the work, or only the waiting for it.
    pub async fn work<C: Work>(
        &self,
        request: &C,
        mut progress: impl FnMut(Progress),
    ) -> Result<C::Answer, ClientError> {
        let mut lines = self.stream(C::PATH, request).await?;
        loop {
            match lines.next::<C::Answer>().await? {
                StreamLine::Progress(now) => progress(now),
                StreamLine::Result(result) => return Ok(result),
                StreamLine::Error(error) => return Err(ClientError::Answer(error)),
            }
        }
    }

    /// Calls `each` with every event until there are no more, or `each` returns false.
    pub async fn events(
        &self,
        request: EventsRequest,
        mut each: impl FnMut(Event) -> bool,
    ) -> Result<(), ClientError> {
        let mut lines = self.stream(path::EVENTS, &request).await?;
        loop {
            match lines.next::<Option<Event>>().await? {
                StreamLine::Result(Some(event)) => {
                    if !each(event) {
                        return Ok(());
                    }
                }
                StreamLine::Result(None) => return Ok(()),
                StreamLine::Error(error) => return Err(ClientError::Answer(error)),
                StreamLine::Progress(_) => {}
            }
        }
    }

    /// Returns the Prometheus text.
    pub async fn metrics_text(&self) -> Result<String, ClientError> {
        let response = self.send(Method::GET, path::METRICS, Bytes::new()).await?;
        let body = self.whole(response).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Returns whether the mount serves; the text is the daemon's reason when not.
    pub async fn healthy(&self) -> Result<Result<(), String>, ClientError> {
        let response = self.send(Method::GET, path::HEALTHZ, Bytes::new()).await?;
        let healthy = response.status() == StatusCode::OK;
        let body = self.whole(response).await?;
        Ok(if healthy { Ok(()) } else { Err(String::from_utf8_lossy(&body).trim().to_owned()) })
    }

    async fn stream<Q: Serialize>(&self, path: &str, request: &Q) -> Result<Lines<'_>, ClientError> {
        let response = self.send(Method::POST, path, body_of(request)).await?;
        if response.status().is_success() {
            Ok(Lines { client: self, body: response.into_body(), buffer: BytesMut::new(), searched: 0 })
        } else {
            Err(self.refusal(response).await)
        }
    }

    async fn read<T: DeserializeOwned>(&self, response: Response<Incoming>) -> Result<T, ClientError> {
        if !response.status().is_success() {
            return Err(self.refusal(response).await);
        }
        let body = self.whole(response).await?;
        serde_json::from_slice(&body).map_err(|source| self.garbled(source))
    }

    /// Returns the error in an answer with an error status.
    async fn refusal(&self, response: Response<Incoming>) -> ClientError {
        let status = response.status();
        match self.whole(response).await {
            Ok(body) => match serde_json::from_slice(&body) {
                Ok(error) => ClientError::Answer(error),
                Err(_) => ClientError::Refused { socket: self.socket.clone(), status: status.as_u16() },
            },
            Err(error) => error,
        }
    }

    async fn whole(&self, response: Response<Incoming>) -> Result<Bytes, ClientError> {
        let mut body = response.into_body();
        let mut whole = BytesMut::new();
        while let Some(data) = self.frame(&mut body, ANSWER_TIMEOUT).await? {
            if whole.len() + data.len() > ANSWER_BYTES_MAX {
                return Err(self.too_large());
            }
            whole.extend_from_slice(&data);
        }
        Ok(whole.freeze())
    }

    /// Returns the next bytes of a body; `None` at its end.
    async fn frame(&self, body: &mut Incoming, limit: Duration) -> Result<Option<Bytes>, ClientError> {
        loop {
            match timeout(limit, body.frame()).await {
                Err(_) => return Err(self.silent(limit)),
                Ok(None) => return Ok(None),
                Ok(Some(Err(source))) => return Err(self.broken(source)),
                // Trailers carry no data of the protocol.
                Ok(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, ClientError> {
        let stream = self.connect().await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|source| self.broken(source))?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "node")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .expect("a fixed path and fixed headers make a request");
        // The connection's task ends when the sender and the body are dropped; they report its errors.
        tokio::spawn(connection);
        timeout(ANSWER_TIMEOUT, sender.send_request(request))
            .await
            .map_err(|_| self.silent(ANSWER_TIMEOUT))?
            .map_err(|source| self.broken(source))
    }

    /// Connects. If the daemon was killed, waits until its keeper has restarted it.
    async fn connect(&self) -> Result<UnixStream, ClientError> {
        let give_up = tokio::time::Instant::now() + RESTART_PATIENCE;
        loop {
            let connected = timeout(CONNECT_TIMEOUT, UnixStream::connect(&self.socket)).await;
            let source = match connected.map_err(|_| self.silent(CONNECT_TIMEOUT))? {
                Ok(stream) => return Ok(stream),
                Err(source) => source,
            };
            if source.kind() == io::ErrorKind::PermissionDenied {
                return Err(ClientError::Denied { socket: self.socket.clone(), source });
            }
            if !self.is_restarting() || tokio::time::Instant::now() >= give_up {
                return Err(ClientError::NoDaemon { socket: self.socket.clone(), source });
            }
            tokio::time::sleep(RESTART_POLL).await;
        }
    }

    /// Returns whether a process holds the state directory's lock, and no keeper reports that its daemons die again and
    /// again.
    fn is_restarting(&self) -> bool {
        let Some(state_dir) = self.socket.parent() else { return false };
        let Ok(lock) = std::fs::File::open(state_dir.join(LOCK_NAME)) else { return false };
        let held = lock.try_lock_shared().is_err();
        held && !state_dir.join(KEEPER_FILE_NAME).exists()
    }

    fn broken(&self, source: hyper::Error) -> ClientError {
        ClientError::Broken { socket: self.socket.clone(), source }
    }

    fn silent(&self, limit: Duration) -> ClientError {
        ClientError::Silent { socket: self.socket.clone(), limit_s: limit.as_secs() }
    }

    fn garbled(&self, source: serde_json::Error) -> ClientError {
        ClientError::Garbled { socket: self.socket.clone(), source }
    }

    fn too_large(&self) -> ClientError {
        ClientError::TooLarge { socket: self.socket.clone(), max_bytes: ANSWER_BYTES_MAX }
    }
}

fn body_of<Q: Serialize>(request: &Q) -> Bytes {
    serde_json::to_vec(request)
        .expect("requests have text keys and no map that can fail to be written")
        .into()
}

/// The lines of a streamed answer.
struct Lines<'a> {
    client: &'a Client,
    body: Incoming,
    buffer: BytesMut,
    /// Number of bytes of the buffer that are known to have no line end.
    searched: usize,
}

impl Lines<'_> {
    async fn next<T: DeserializeOwned>(&mut self) -> Result<StreamLine<T>, ClientError> {
        loop {
            if let Some(end) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') {
                let line = self.buffer.split_to(self.searched + end + 1);
                self.searched = 0;
                if line.len() > 1 {
                    return serde_json::from_slice(&line).map_err(|source| self.client.garbled(source));
                }
                continue;
            }
            self.searched = self.buffer.len();
            let data = self.client.frame(&mut self.body, SILENCE_TIMEOUT).await?;
            let data = data.ok_or_else(|| ClientError::CutOff { socket: self.client.socket.clone() })?;
            if self.buffer.len() + data.len() > ANSWER_BYTES_MAX {
                return Err(self.client.too_large());
            }
            self.buffer.extend_from_slice(&data);
        }
    }
}

/// Why there is no answer, or which error the answer is.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error(
        "no daemon answers at {}: is `ckptd up` running? use --state-dir if it has another one", socket.display()
    )]
    NoDaemon { socket: PathBuf, source: io::Error },
    #[error("{} may not be opened by this user; run ckptctl as the daemon's user (root)", socket.display())]
    Denied { socket: PathBuf, source: io::Error },
    #[error(
        "the daemon at {} has been silent for {limit_s} s; look at its log, and try again", socket.display()
    )]
    Silent { socket: PathBuf, limit_s: u64 },
    #[error("the connection to the daemon at {} broke; run the command again", socket.display())]
    Broken { socket: PathBuf, source: hyper::Error },
    #[error("the daemon at {} ended before the answer did; run the command again", socket.display())]
    CutOff { socket: PathBuf },
    #[error(
        "the answer of the daemon at {} cannot be read; use a ckptctl of the daemon's version", socket.display()
    )]
    Garbled { socket: PathBuf, source: serde_json::Error },
    #[error("the daemon at {} refused with HTTP status {status} and no reason", socket.display())]
    Refused { socket: PathBuf, status: u16 },
    #[error(
        "the answer of the daemon at {} is larger than {max_bytes} bytes; ask for less", socket.display()
    )]
    TooLarge { socket: PathBuf, max_bytes: usize },
    #[error(transparent)]
    Answer(ApiError),
}

impl ClientError {
    /// Returns the exit code of a command that fails with this error.
    #[must_use]
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Self::NoDaemon { .. } | Self::Silent { .. } | Self::Broken { .. } | Self::CutOff { .. } => {
                ExitCode::Unavailable
            }
            Self::Denied { .. } | Self::Garbled { .. } | Self::Refused { .. } | Self::TooLarge { .. } => {
                ExitCode::Failed
            }
            Self::Answer(error) => error.code.into(),
        }
    }

    /// Returns whether no daemon answered, so that the files it left behind are the best source.
    #[must_use]
    pub fn is_away(&self) -> bool {
        self.exit_code() == ExitCode::Unavailable && !matches!(self, Self::Answer(_))
    }
}
