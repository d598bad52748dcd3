//! An HTTP request to an etcd on a connection of its own, with TLS or without.
//!
//! Owns: the connection, bounds on the answer. Does not own: which endpoint is asked, and for how long (`client`).

use super::error::EtcdError;
use super::place::server_name;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::header::HeaderValue;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

/// A member list of [`super::MEMBERS_BYTES_MAX`] in base64, and what is around it.
pub(super) const ANSWER_BYTES_MAX: usize = 2 << 20;

/// A request.
#[derive(Clone)]
pub(super) struct Question {
    pub(super) path: &'static str,
    pub(super) body: Bytes,
    /// The token of a login.
    pub(super) token: Option<HeaderValue>,
}

/// Ends the connection's task with the request, answered or not.
struct Connection(JoinHandle<Result<(), hyper::Error>>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Asks `endpoint`; returns its answer where that is 200. Cancel safe: the connection is closed.
pub(super) async fn ask(
    endpoint: &str,
    tls: Option<Arc<ClientConfig>>,
    question: Question,
) -> Result<Bytes, EtcdError> {
    let over = if tls.is_some() { "TLS" } else { "plain HTTP" };
    let failed = |source| EtcdError::of_connect(endpoint.to_owned(), over, source);
    let stream = TcpStream::connect(endpoint).await.map_err(failed)?;
    match tls {
        None => exchange(endpoint, over, stream, question).await,
        Some(config) => {
            let name = server_name(endpoint).expect("a place with TLS has hosts that a certificate can name");
            let stream = TlsConnector::from(config).connect(name, stream).await.map_err(failed)?;
            exchange(endpoint, over, stream, question).await
        }
    }
}

async fn exchange(
    endpoint: &str,
    over: &'static str,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    question: Question,
) -> Result<Bytes, EtcdError> {
    let broken = |source| EtcdError::of_connection(endpoint.to_owned(), over, source);
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let _connection = Connection(tokio::spawn(connection));
    let mut request = Request::builder()
        .method(Method::POST)
        .uri(question.path)
        .header(header::HOST, endpoint)
        .header(header::CONTENT_TYPE, "application/json")
        // By this header etcd sees that its gateway asks. Without it a request that has no token counts as one of the user that the
        // common name of etcd's own certificate names.
        .header(header::ACCEPT, "application/json")
        .body(Full::new(question.body))
        .expect("a fixed path, and a host of checked characters, make a request");
    if let Some(token) = question.token {
        request.headers_mut().insert(header::AUTHORIZATION, token);
    }
    let response = sender.send_request(request).await.map_err(broken)?;
    let status = response.status();
    let answer = match Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await {
        Ok(collected) => collected.to_bytes(),
        Err(error) => match error.downcast::<hyper::Error>() {
            Ok(source) => return Err(broken(*source)),
            Err(_) => {
                return Err(EtcdError::TooLong { endpoint: endpoint.to_owned(), limit: ANSWER_BYTES_MAX });
            }
        },
    };
    if status == StatusCode::OK {
        return Ok(answer);
    }
    Err(EtcdError::of_status(endpoint.to_owned(), status.as_u16(), &answer))
}
