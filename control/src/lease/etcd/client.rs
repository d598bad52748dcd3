//! Requests to an etcd, through its HTTP and JSON gateway (`/v3/…`, etcd 3.4 and later).
//!
//! Owns: which endpoint is asked, time-outs, logging in, the shapes of requests and answers. Does not own: what they mean (`mod`),
//! connections (`http`), the password and the token (`login`).

use super::access::EtcdAccess;
use super::error::EtcdError;
use super::http::{self, Question};
use super::login::{Login, Session};
use super::place::EtcdPlace;
use crate::lease::LeaseTimes;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use hyper::header::HeaderValue;
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// For one request, however many endpoints are tried, a login included: the next renewal must come within the term.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_millis(1500);
const _: () = assert!(
    CALL_TIMEOUT.as_millis() < LeaseTimes::etcd().term.as_millis(),
    "a request that is not answered ends within the term"
);
/// What each endpoint has at least, from connecting to the end of its answer; they share the whole evenly. An etcd answers
/// in milliseconds, or after an fsync.
pub(super) const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(500);
/// The longest token: one of etcd's own has some 20 bytes, a signed one (JWT) some 500.
const TOKEN_BYTES_MAX: usize = 8 << 10;

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
    access: EtcdAccess,
    /// The endpoint that answered last is asked first.
    preferred: AtomicUsize,
}

impl EtcdClient {
    pub(super) fn new(access: EtcdAccess) -> Self {
        Self { access, preferred: AtomicUsize::new(0) }
    }

    pub(super) fn place(&self) -> &EtcdPlace {
        &self.access.place
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

    /// Asks with this node's token, and once more with another where etcd does not know that one any more.
    async fn call<T: DeserializeOwned>(&self, path: &'static str, request: &Value) -> Result<T, EtcdError> {
        let give_up = Instant::now() + CALL_TIMEOUT;
        let body = Bytes::from(request.to_string());
        let question = |token| Question { path, body: body.clone(), token };
        let Some(login) = &self.access.login else {
            return match self.ask(question(None), give_up).await {
                Err(EtcdError::TokenOver { endpoint, status, words }) => {
                    let advice = "etcd wants to know who asks: give this node [etcd] user and password_file";
                    Err(EtcdError::Refused { endpoint, status, words, advice })
                }
                answered => answered.and_then(parsed),
            };
        };
        let token = self.token(login, give_up).await?;
        let answered = match self.ask(question(token), give_up).await {
            Err(EtcdError::TokenOver { .. }) => {
                login.end_session();
                let token = self.token(login, give_up).await?;
                self.ask(question(token), give_up).await
            }
            answered => answered,
        };
        answered.and_then(parsed)
    }

    /// Returns this node's token, for which it logs in where it has none; none where etcd asks for none.
    async fn token(&self, login: &Login, give_up: Instant) -> Result<Option<HeaderValue>, EtcdError> {
        #[derive(Deserialize)]
        struct Authenticated {
            #[serde(deserialize_with = "token")]
            token: HeaderValue,
        }
        let session = match login.session() {
            Some(session) => session,
            None => {
                let password = login.password().await?;
                let request = json!({"name": login.user, "password": password.reveal()});
                let body = Bytes::from(request.to_string());
                let question = Question { path: "/v3/auth/authenticate", body, token: None };
                let session = match self.ask(question, give_up).await.and_then(parsed::<Authenticated>) {
                    Ok(Authenticated { token }) => Session::Token(token),
                    Err(EtcdError::Refused { words, .. })
                        if words.contains("authentication is not enabled") =>
                    {
                        Session::Open
                    }
                    Err(EtcdError::Refused { endpoint, words, .. })
                        if words.starts_with("etcdserver: authentication failed") =>
                    {
                        return Err(login.refuse(password, endpoint, words));
                    }
                    Err(error) => return Err(error.of_login()),
                };
                login.begin_session(session.clone());
                session
            }
        };
        Ok(match session {
            Session::Open => None,
            Session::Token(token) => Some(token),
        })
    }

    /// Asks one endpoint after the other, until one answers or the time is over. Returns the endpoint, too.
    async fn ask(&self, question: Question, give_up: Instant) -> Result<(String, Bytes), EtcdError> {
        let endpoints = &self.access.place.endpoints;
        let count = endpoints.len();
        let first = self.preferred.load(Ordering::Relaxed);
        let mut tried = 0;
        loop {
            let at = (first + tried) % count;
            let endpoint = &endpoints[at];
            let left = give_up.saturating_duration_since(Instant::now());
            let untried = u32::try_from(count - tried).unwrap_or(u32::MAX);
            let limit = left.min(ATTEMPT_TIMEOUT.max(left / untried));
            let silent = || EtcdError::Silent { endpoint: endpoint.clone(), limit_ms: limit.as_millis() };
            let attempt = async {
                let tls = match &self.access.tls {
                    Some(tls) => Some(tls.config().await),
                    None => None,
                };
                http::ask(endpoint, tls, question.clone()).await
            };
            let answer = timeout(limit, attempt).await.unwrap_or_else(|_| Err(silent()));
            tried += 1;
            match answer {
                Err(error) if error.is_of_one_endpoint() => {
                    if tried == count || Instant::now() >= give_up {
                        return Err(error);
                    }
                }
                answered => {
                    if matches!(answered, Ok(_) | Err(EtcdError::TokenOver { .. })) {
                        self.preferred.store(at, Ordering::Relaxed);
                    }
                    return answered.map(|answer| (endpoint.clone(), answer));
                }
            }
        }
    }
}

fn parsed<T: DeserializeOwned>((endpoint, answer): (String, Bytes)) -> Result<T, EtcdError> {
    serde_json::from_slice(&answer).map_err(|source| EtcdError::Garbled { endpoint, source })
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

fn token<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HeaderValue, D::Error> {
    let text = std::borrow::Cow::<str>::deserialize(deserializer)?;
    // A serde_json error repeats no part of the answer here: the token is a secret.
    if text.is_empty() || text.len() > TOKEN_BYTES_MAX {
        return Err(D::Error::custom(format!("a token of {} bytes", text.len())));
    }
    let mut token =
        HeaderValue::from_str(&text).map_err(|_| D::Error::custom("a token that HTTP cannot carry"))?;
    token.set_sensitive(true);
    Ok(token)
}

#[cfg(test)]
#[path = "client_test.rs"]
mod tests;
