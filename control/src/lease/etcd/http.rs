//! HTTP requests to one endpoint of an etcd, with TLS or without.
//!
//! Owns: the connection, bounds on an answer. Does not own: which endpoint is asked, and for how long (`client`).

use super::error::EtcdError;
use super::place::server_name;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::SendRequest;
use hyper::header::HeaderValue;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

/// The longest answer: a member list of [`super::MEMBERS_BYTES_MAX`] in base64, and the JSON around it.
pub(super) const ANSWER_BYTES_MAX: usize = 2 << 20;

/// A request.
#[derive(Clone)]
pub(super) struct Question {
    pub(super) path: &'static str,
    pub(super) body: Bytes,
    /// The token of the login.
    pub(super) token: Option<HeaderValue>,
    /// The longest answer, in bytes; a longer one is an error.
    pub(super) answer_bytes_max: usize,
    /// How long to wait for a connection that was kept.
    pub(super) patience: Duration,
}

/// A connection to an endpoint. Closed when dropped.
#[derive(Debug)]
pub(super) struct Connection {
    endpoint: String,
    over: &'static str,
    /// The TLS configuration; `None`: plain HTTP.
    tls: Option<Arc<ClientConfig>>,
    sender: SendRequest<Full<Bytes>>,
    task: JoinHandle<Result<(), hyper::Error>>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Connection {
    /// Connects to `endpoint`. Cancel safe.
    pub(super) async fn open(endpoint: &str, tls: Option<Arc<ClientConfig>>) -> Result<Self, EtcdError> {
        let over = if tls.is_some() { "TLS" } else { "plain HTTP" };
        let failed = |source| EtcdError::of_connect(endpoint.to_owned(), over, source);
        let stream = TcpStream::connect(endpoint).await.map_err(failed)?;
        // A request is one write, and waits for no other.
        stream.set_nodelay(true).map_err(failed)?;
        let mut connection = match tls.clone() {
            None => Self::over(endpoint, over, stream).await?,
            Some(config) => {
                let name =
                    server_name(endpoint).expect("a place with TLS has hosts that a certificate can name");
                let stream = TlsConnector::from(config).connect(name, stream).await.map_err(failed)?;
                Self::over(endpoint, over, stream).await?
            }
        };
        connection.tls = tls;
        Ok(connection)
    }

    async fn over(
        endpoint: &str,
        over: &'static str,
        stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    ) -> Result<Self, EtcdError> {
        let endpoint = endpoint.to_owned();
        match hyper::client::conn::http1::handshake(TokioIo::new(stream)).await {
            Ok((sender, connection)) => {
                let task = tokio::spawn(connection);
                Ok(Self { endpoint, over, tls: None, sender, task })
            }
            Err(source) => Err(EtcdError::of_connection(endpoint, over, source)),
        }
    }

    /// Returns whether the connection can be used for a request to `endpoint` with these certificates.
    pub(super) fn is_to(&self, endpoint: &str, tls: Option<&Arc<ClientConfig>>) -> bool {
        let same = match (&self.tls, tls) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        };
        same && self.endpoint == endpoint && !self.sender.is_closed()
    }

    /// Sends a request, and returns the answer if its status is 200. After an error, or if this is dropped before the answer, the
    /// connection cannot be used again.
    pub(super) async fn ask(&mut self, question: Question) -> Result<Bytes, EtcdError> {
        let (endpoint, over) = (self.endpoint.clone(), self.over);
        let broken = |source| EtcdError::of_connection(endpoint.clone(), over, source);
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(question.path)
            .header(header::HOST, &endpoint)
            .header(header::CONTENT_TYPE, "application/json")
            // By this header etcd recognises its gateway. Without it a request without a token counts as one of the user that the common
            // name of etcd's own certificate names.
            .header(header::ACCEPT, "application/json")
            .body(Full::new(question.body))
            .expect("a fixed path, and a host of checked characters, make a request");
        if let Some(token) = question.token {
            request.headers_mut().insert(header::AUTHORIZATION, token);
        }
        let response = self.sender.send_request(request).await.map_err(broken)?;
        let (status, limit) = (response.status(), question.answer_bytes_max);
        let answer = match Limited::new(response.into_body(), limit).collect().await {
            Ok(collected) => collected.to_bytes(),
            Err(error) => match error.downcast::<hyper::Error>() {
                Ok(source) => return Err(broken(*source)),
                Err(_) => return Err(EtcdError::TooLong { endpoint, limit }),
            },
        };
        if status == StatusCode::OK {
            return Ok(answer);
        }
        Err(EtcdError::of_status(endpoint, status.as_u16(), &answer))
    }
}
