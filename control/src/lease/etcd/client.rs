//! Requests to an etcd, through its HTTP and JSON gateway (`/v3/…`, etcd 3.4 and later).
//!
//! Owns: which endpoint is asked, time-outs, bounds on answers, the shapes of requests and answers. Does not own: what
//! they mean (`mod`). Speaks plain HTTP: an etcd that asks for TLS or a password is not supported yet.

use super::place::EtcdPlace;
use crate::lease::LeaseTimes;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tidemark_engine::error::ErrorKind;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

/// For one request, however many endpoints are tried: the next renewal must come within the term.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_millis(1500);
const _: () = assert!(
    CALL_TIMEOUT.as_millis() < LeaseTimes::etcd().term.as_millis(),
    "a request that is not answered ends within the term"
);
/// What each endpoint has at least, from connecting to the end of its answer; they share the whole evenly. An etcd answers
/// in milliseconds, or after an fsync.
pub(super) const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(500);
/// A member list of [`super::MEMBERS_BYTES_MAX`] in base64, and what is around it.
const ANSWER_BYTES_MAX: usize = 2 << 20;
/// What an error repeats of an etcd's words.
const WORDS_MAX: usize = 200;

/// Why there is no answer, or which one it was.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    #[error("cannot connect to {endpoint}; is etcd running there?")]
    Connect { endpoint: String, source: io::Error },
    #[error("no answer from {endpoint} within {limit_ms} ms; look at its log and its disk")]
    Silent { endpoint: String, limit_ms: u128 },
    #[error("the connection to {endpoint} broke")]
    Broken { endpoint: String, source: hyper::Error },
    #[error("{endpoint} answers with HTTP status {status}: {words:?}; look at its log")]
    Away { endpoint: String, status: u16, words: String },
    #[error(
        "{endpoint} refuses with HTTP status {status}: {words:?}; is it an etcd 3.4 or later, without TLS and passwords?"
    )]
    Refused { endpoint: String, status: u16, words: String },
    #[error("the answer of {endpoint} is no answer of an etcd")]
    Garbled { endpoint: String, source: serde_json::Error },
    #[error("the answer of {endpoint} is longer than {limit} bytes; is it an etcd?")]
    TooLong { endpoint: String, limit: usize },
}

impl EtcdError {
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Connect { .. } | Self::Silent { .. } | Self::Broken { .. } | Self::Away { .. } => {
                ErrorKind::Unavailable
            }
            Self::Refused { .. } => ErrorKind::Invalid,
            Self::Garbled { .. } | Self::TooLong { .. } => ErrorKind::Corrupt,
        }
    }
}

/// A key as etcd keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Found {
    #[serde(deserialize_with = "text_bytes", default)]
    pub(super) value: Vec<u8>,
    #[serde(deserialize_with = "text_number", default)]
    pub(super) create_revision: u64,
    #[serde(deserialize_with = "text_number", default)]
    pub(super) lease: u64,
}

#[derive(Debug, Default, Deserialize)]
struct Header {
    #[serde(deserialize_with = "text_number", default)]
    revision: u64,
}

/// What came of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The comparison held; this is the revision of what was done.
    Done { revision: u64 },
    /// It did not; this is what the key is.
    Differs { found: Option<Found> },
}

/// One etcd, by its endpoints. Holds no connection.
#[derive(Debug)]
pub(super) struct EtcdClient {
    pub(super) place: EtcdPlace,
    /// The endpoint that answered last is asked first.
    preferred: AtomicUsize,
}

impl EtcdClient {
    pub(super) fn new(place: EtcdPlace) -> Self {
        Self { place, preferred: AtomicUsize::new(0) }
    }

    /// A lease of `ttl_s` seconds: its number, and the seconds that etcd gives it.
    pub(super) async fn grant(&self, ttl_s: u64) -> Result<(u64, u64), EtcdError> {
        #[derive(Deserialize)]
        struct Granted {
            #[serde(rename = "ID", deserialize_with = "text_number")]
            id: u64,
            #[serde(rename = "TTL", deserialize_with = "text_number", default)]
            ttl_s: u64,
        }
        let granted: Granted = self.call("/v3/lease/grant", &json!({"TTL": ttl_s.to_string()})).await?;
        Ok((granted.id, granted.ttl_s))
    }

    /// Begins the lease's time anew; the seconds that it has, 0 when it is over.
    pub(super) async fn keep_alive(&self, lease: u64) -> Result<u64, EtcdError> {
        #[derive(Deserialize)]
        struct Kept {
            #[serde(rename = "TTL", deserialize_with = "text_number", default)]
            ttl_s: u64,
        }
        // The gateway makes a stream of it: one question, one answer, in an object of its own.
        #[derive(Deserialize)]
        struct Line {
            result: Kept,
        }
        let line: Line = self.call("/v3/lease/keepalive", &json!({"ID": lease.to_string()})).await?;
        Ok(line.result.ttl_s)
    }

    /// Ends a lease, and the keys that hang on it. One that is over is fine.
    pub(super) async fn revoke(&self, lease: u64) -> Result<(), EtcdError> {
        match self.call::<Value>("/v3/lease/revoke", &json!({"ID": lease.to_string()})).await {
            Err(EtcdError::Refused { status: 404, .. }) => Ok(()),
            other => other.map(drop),
        }
    }

    pub(super) async fn get(&self, key: &str) -> Result<Option<Found>, EtcdError> {
        let range: Range = self.call("/v3/kv/range", &json!({"key": BASE64.encode(key)})).await?;
        Ok(range.kvs.into_iter().next())
    }

    /// Where `key` was created at `revision` (0: where it is absent), does `put`: a key, its value, and the lease on which
    /// it hangs, 0 for none. All in one step of etcd.
    pub(super) async fn put_if(
        &self,
        key: &str,
        revision: u64,
        put: Option<(&str, &[u8], u64)>,
    ) -> Result<Outcome, EtcdError> {
        #[derive(Deserialize)]
        struct Answered {
            #[serde(default)]
            header: Header,
            #[serde(default)]
            succeeded: bool,
            #[serde(default)]
            responses: Vec<Response>,
        }
        #[derive(Deserialize)]
        struct Response {
            response_range: Option<Range>,
        }
        let put = put.map(|(key, value, lease)| {
            json!({"request_put": {
                "key": BASE64.encode(key), "value": BASE64.encode(value), "lease": lease.to_string()}})
        });
        let key = BASE64.encode(key);
        let request = json!({
            "compare": [{"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": revision.to_string()}],
            "success": put.into_iter().collect::<Vec<_>>(),
            "failure": [{"request_range": {"key": key}}],
        });
        let answered: Answered = self.call("/v3/kv/txn", &request).await?;
        if answered.succeeded {
            return Ok(Outcome::Done { revision: answered.header.revision });
        }
        let range = answered.responses.into_iter().find_map(|response| response.response_range);
        Ok(Outcome::Differs { found: range.and_then(|range| range.kvs.into_iter().next()) })
    }

    /// Asks one endpoint after the other, until one answers or the time is over.
    async fn call<T: DeserializeOwned>(&self, path: &str, request: &Value) -> Result<T, EtcdError> {
        let body = Bytes::from(request.to_string());
        let give_up = Instant::now() + CALL_TIMEOUT;
        let count = self.place.endpoints.len();
        let first = self.preferred.load(Ordering::Relaxed);
        let mut tried = 0;
        loop {
            let at = (first + tried) % count;
            let endpoint = &self.place.endpoints[at];
            let left = give_up.saturating_duration_since(Instant::now());
            let untried = u32::try_from(count - tried).unwrap_or(u32::MAX);
            let limit = left.min(ATTEMPT_TIMEOUT.max(left / untried));
            let silent = || EtcdError::Silent { endpoint: endpoint.clone(), limit_ms: limit.as_millis() };
            let answer = timeout(limit, attempt(endpoint, path, body.clone())).await;
            let error = match answer.unwrap_or_else(|_| Err(silent())) {
                Ok(answer) => {
                    self.preferred.store(at, Ordering::Relaxed);
                    return serde_json::from_slice(&answer)
                        .map_err(|source| EtcdError::Garbled { endpoint: endpoint.clone(), source });
                }
                Err(error) => error,
            };
            tried += 1;
            if error.kind() != ErrorKind::Unavailable || tried == count || Instant::now() >= give_up {
                return Err(error);
            }
        }
    }
}

/// Ends the connection's task with the request, answered or not.
struct Connection(JoinHandle<Result<(), hyper::Error>>);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn attempt(endpoint: &str, path: &str, body: Bytes) -> Result<Bytes, EtcdError> {
    let endpoint = || endpoint.to_owned();
    let broken = |source| EtcdError::Broken { endpoint: endpoint(), source };
    let stream = TcpStream::connect(endpoint())
        .await
        .map_err(|source| EtcdError::Connect { endpoint: endpoint(), source })?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(broken)?;
    let _connection = Connection(tokio::spawn(connection));
    let request = Request::builder()
        .method(Method::POST)
        .uri(path)
        .header(header::HOST, endpoint())
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(body))
        .expect("a fixed path, and a host of checked characters, make a request");
    let response = sender.send_request(request).await.map_err(broken)?;
    let status = response.status();
    let answer = match Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await {
        Ok(collected) => collected.to_bytes(),
        Err(error) => match error.downcast::<hyper::Error>() {
            Ok(source) => return Err(broken(*source)),
            Err(_) => return Err(EtcdError::TooLong { endpoint: endpoint(), limit: ANSWER_BYTES_MAX }),
        },
    };
    if status == StatusCode::OK {
        return Ok(answer);
    }
    let (status, words) = (status.as_u16(), words(&answer));
    // No leader, too busy, on its way down: another one may do.
    if (500..600).contains(&status) || status == 429 {
        return Err(EtcdError::Away { endpoint: endpoint(), status, words });
    }
    Err(EtcdError::Refused { endpoint: endpoint(), status, words })
}

/// What an etcd says of an error.
fn words(answer: &[u8]) -> String {
    #[derive(Deserialize)]
    struct Said {
        error: String,
    }
    let said = serde_json::Deserializer::from_slice(answer).into_iter::<Said>().next();
    let text = said.and_then(Result::ok).map(|said| said.error);
    let text = text.unwrap_or_else(|| String::from_utf8_lossy(answer).into_owned());
    text.chars().take(WORDS_MAX).collect()
}

#[derive(Debug, Default, Deserialize)]
struct Range {
    #[serde(default)]
    kvs: Vec<Found>,
}

/// JSON of protobuf has 64-bit numbers as text.
fn text_number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Number<'a> {
        Text(std::borrow::Cow<'a, str>),
        Plain(u64),
    }
    match Number::deserialize(deserializer)? {
        Number::Plain(number) => Ok(number),
        Number::Text(text) => text.parse().map_err(D::Error::custom),
    }
}

fn text_bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
    BASE64.decode(text.as_bytes()).map_err(D::Error::custom)
}

#[cfg(test)]
#[path = "client_test.rs"]
mod tests;
