//! Requests to an etcd, through its HTTP and JSON gateway (`/v3/…`, etcd 3.4 and later).
//!
//! Owns: the choice of the endpoint, time-outs, logging in, the shapes of requests and answers, the connection that waits for the next
//! request. Does not own: the meaning of requests (`mod`, `catalog`), the connection's protocol (`http`), the password and the token
//! (`login`).

use super::access::EtcdAccess;
use super::error::EtcdError;
use super::http::{ANSWER_BYTES_MAX, Connection, Question};
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
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Time limit of one request, however many endpoints are tried, a login included: the next renewal must come within the term.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_millis(1500);
const _: () = assert!(
    CALL_TIMEOUT.as_millis() < LeaseTimes::etcd().term.as_millis(),
    "a request that is not answered ends within the term"
);
/// The least time of each endpoint, from connecting to the end of its answer; the endpoints share the whole time evenly. An etcd answers in
/// milliseconds, or after an fsync.
pub(super) const ATTEMPT_TIMEOUT: Duration = Duration::from_millis(500);
/// The longest token, in bytes: etcd's own tokens have some 20 bytes, a signed one (JWT) some 500.
const TOKEN_BYTES_MAX: usize = 8 << 10;

/// A key as etcd keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Found {
    #[serde(deserialize_with = "text_bytes", default)]
    pub(super) key: Vec<u8>,
    #[serde(deserialize_with = "text_bytes", default)]
    pub(super) value: Vec<u8>,
    #[serde(deserialize_with = "text_number", default)]
    pub(super) create_revision: u64,
    #[serde(deserialize_with = "text_number", default)]
    pub(super) mod_revision: u64,
    #[serde(deserialize_with = "text_number", default)]
    pub(super) lease: u64,
}

#[derive(Debug, Default, Deserialize)]
struct Header {
    #[serde(deserialize_with = "text_number", default)]
    revision: u64,
}

/// The result of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The comparison held; `revision` is that of the change.
    Done { revision: u64 },
    /// The comparison did not hold; `found` is the present key.
    Differs { found: Option<Found> },
}

/// A comparison of a transaction: the revision of a key, 0 where it is absent.
#[derive(Debug, Clone, Copy)]
pub(super) enum Is<'a> {
    Created(&'a str, u64),
    Put(&'a str, u64),
}

impl Is<'_> {
    fn json(self) -> Value {
        match self {
            Self::Created(key, revision) => json!({
                "key": BASE64.encode(key), "target": "CREATE", "result": "EQUAL",
                "create_revision": revision.to_string()}),
            Self::Put(key, revision) => json!({
                "key": BASE64.encode(key), "target": "MOD", "result": "EQUAL", "mod_revision": revision.to_string()}),
        }
    }
}

/// An operation of a transaction whose comparisons hold.
#[derive(Debug, Clone, Copy)]
pub(super) enum Do<'a> {
    /// A key, its value, and the lease on which it hangs, 0 for none.
    Put(&'a str, &'a [u8], u64),
    /// All keys from the first on, and before the second.
    Delete(&'a str, &'a str),
}

impl Do<'_> {
    fn json(self) -> Value {
        match self {
            Self::Put(key, value, lease) => json!({"request_put": {
                "key": BASE64.encode(key), "value": BASE64.encode(value), "lease": lease.to_string()}}),
            Self::Delete(from, until) => json!({"request_delete_range": {
                "key": BASE64.encode(from), "range_end": BASE64.encode(until)}}),
        }
    }
}

/// The result of a transaction of several comparisons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Came {
    /// All held; `revision` is that of the changes.
    Done { revision: u64 },
    /// At least one did not hold; `found` has all their keys, in the same order.
    Differs { found: Vec<Option<Found>> },
}

/// Keys at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) found: Vec<Found>,
    /// Whether there are more keys.
    pub(super) more: bool,
    /// etcd's present revision.
    pub(super) revision: u64,
}

/// The time limit and the longest answer of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) within: Duration,
    pub(super) answer_bytes_max: usize,
    /// How long to wait on a connection that was kept; then another one is opened.
    pub(super) patience: Duration,
}

/// The limits of all requests but those for pages. So short that a renewal of the lease has time for a second connection.
const SHORT: Limits =
    Limits { within: CALL_TIMEOUT, answer_bytes_max: ANSWER_BYTES_MAX, patience: Duration::from_millis(300) };

/// An etcd, by its endpoints. Keeps one connection between requests.
#[derive(Debug)]
pub(super) struct EtcdClient {
    access: EtcdAccess,
    /// The endpoint that answered last, which is asked first.
    preferred: AtomicUsize,
    /// The connection of the last answer, while no request uses it.
    idle: Mutex<Option<Connection>>,
}

impl EtcdClient {
    pub(super) fn new(access: EtcdAccess) -> Self {
        Self { access, preferred: AtomicUsize::new(0), idle: Mutex::default() }
    }

    pub(super) fn place(&self) -> &EtcdPlace {
        &self.access.place
    }

    /// Requests a lease of `ttl_s` seconds. Returns its number, and the seconds that etcd grants.
    pub(super) async fn grant(&self, ttl_s: u64) -> Result<(u64, u64), EtcdError> {
        #[derive(Deserialize)]
        struct Granted {
            #[serde(rename = "ID", deserialize_with = "text_number")]
            id: u64,
            #[serde(rename = "TTL", deserialize_with = "text_number", default)]
            ttl_s: u64,
        }
        let granted: Granted =
            self.call("/v3/lease/grant", &json!({"TTL": ttl_s.to_string()}), SHORT).await?;
        Ok((granted.id, granted.ttl_s))
    }

    /// Restarts the lease's time. Returns the seconds that it has, 0 when it is over.
    pub(super) async fn keep_alive(&self, lease: u64) -> Result<u64, EtcdError> {
        #[derive(Deserialize)]
        struct Kept {
            #[serde(rename = "TTL", deserialize_with = "text_number", default)]
            ttl_s: u64,
        }
        // The gateway makes a stream of the call: one question, one answer, in an object of its own.
        #[derive(Deserialize)]
        struct Line {
            result: Kept,
        }
        let line: Line = self.call("/v3/lease/keepalive", &json!({"ID": lease.to_string()}), SHORT).await?;
        Ok(line.result.ttl_s)
    }

    /// Ends a lease, and the keys that hang on it. A lease that is over is no error.
    pub(super) async fn revoke(&self, lease: u64) -> Result<(), EtcdError> {
        match self.call::<Value>("/v3/lease/revoke", &json!({"ID": lease.to_string()}), SHORT).await {
            Err(EtcdError::Refused { status: 404, .. }) => Ok(()),
            other => other.map(drop),
        }
    }

    pub(super) async fn get(&self, key: &str) -> Result<Option<Found>, EtcdError> {
        let range: Range = self.call("/v3/kv/range", &json!({"key": BASE64.encode(key)}), SHORT).await?;
        Ok(range.kvs.into_iter().next())
    }

    /// If `key` was created at `revision` (0: if it is absent), does `put`: a key, its value, and the lease on which it hangs, 0 for none.
    /// All in one step of etcd.
    pub(super) async fn put_if(
        &self,
        key: &str,
        revision: u64,
        put: Option<(&str, &[u8], u64)>,
    ) -> Result<Outcome, EtcdError> {
        let put = put.map(|(key, value, lease)| Do::Put(key, value, lease));
        Ok(match self.transact(&[Is::Created(key, revision)], put).await? {
            Came::Done { revision } => Outcome::Done { revision },
            Came::Differs { found } => Outcome::Differs { found: found.into_iter().next().flatten() },
        })
    }

    /// If all of `compare` holds, does all of `success`, in one step of etcd.
    pub(super) async fn transact<'a>(
        &self,
        compare: &[Is<'_>],
        success: impl IntoIterator<Item = Do<'a>>,
    ) -> Result<Came, EtcdError> {
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
        let keys = compare.iter().map(|(Is::Created(key, _) | Is::Put(key, _))| key);
        let request = json!({
            "compare": compare.iter().map(|is| is.json()).collect::<Vec<_>>(),
            "success": success.into_iter().map(Do::json).collect::<Vec<_>>(),
            "failure": keys.map(|key| json!({"request_range": {"key": BASE64.encode(key)}})).collect::<Vec<_>>(),
        });
        let answered: Answered = self.call("/v3/kv/txn", &request, SHORT).await?;
        if answered.succeeded {
            return Ok(Came::Done { revision: answered.header.revision });
        }
        let ranges = answered.responses.into_iter().map(|response| response.response_range);
        Ok(Came::Differs {
            found: ranges.map(|range| range.and_then(|range| range.kvs.into_iter().next())).collect(),
        })
    }

    /// Reads the first `most` keys from `from` on and before `until`, as of `revision` (0: now).
    pub(super) async fn page(
        &self,
        (from, until): (&[u8], &str),
        most: usize,
        revision: u64,
        limits: Limits,
    ) -> Result<Page, EtcdError> {
        let request = json!({
            "key": BASE64.encode(from), "range_end": BASE64.encode(until),
            "limit": most.to_string(), "revision": revision.to_string()});
        let range: Range = self.call("/v3/kv/range", &request, limits).await?;
        Ok(Page { found: range.kvs, more: range.more, revision: range.header.revision })
    }

    /// Sends a request with this node's token. If etcd does not know the token any more, logs in and sends once more.
    async fn call<T: DeserializeOwned>(
        &self,
        path: &'static str,
        request: &Value,
        limits: Limits,
    ) -> Result<T, EtcdError> {
        let Limits { within, answer_bytes_max, patience } = limits;
        let give_up = Instant::now() + within;
        let body = Bytes::from(request.to_string());
        let question = |token| Question { path, body: body.clone(), token, answer_bytes_max, patience };
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

    /// Returns this node's token, and logs in if it has none; `None` if etcd does not use tokens.
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
                let Limits { answer_bytes_max, patience, .. } = SHORT;
                let path = "/v3/auth/authenticate";
                let question = Question { path, body, token: None, answer_bytes_max, patience };
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
            let attempt = self.ask_endpoint(endpoint, question.clone());
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

impl EtcdClient {
    /// Asks on the waiting connection, or on a new one. Cancel safe.
    async fn ask_endpoint(&self, endpoint: &str, question: Question) -> Result<Bytes, EtcdError> {
        let tls = match &self.access.tls {
            Some(tls) => Some(tls.config().await),
            None => None,
        };
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).take();
        let idle = idle.filter(|idle| idle.is_to(endpoint, tls.as_ref()));
        if let Some(mut connection) = idle {
            // An etcd that was restarted has closed the connection; a broken network gives no notice. If the request was taken all the
            // same, it does nothing a second time.
            match timeout(question.patience, connection.ask(question.clone())).await {
                Ok(Err(EtcdError::Broken { .. })) | Err(_) => {}
                Ok(answered) => return self.leave(connection, answered),
            }
        }
        let mut connection = Connection::open(endpoint, tls).await?;
        let answered = connection.ask(question).await;
        self.leave(connection, answered)
    }

    /// Keeps the connection for the next request, if this one was answered.
    fn leave(&self, connection: Connection, answered: Result<Bytes, EtcdError>) -> Result<Bytes, EtcdError> {
        if answered.is_ok() {
            *self.idle.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection);
        }
        answered
    }
}

fn parsed<T: DeserializeOwned>((endpoint, answer): (String, Bytes)) -> Result<T, EtcdError> {
    serde_json::from_slice(&answer).map_err(|source| EtcdError::Garbled { endpoint, source })
}

#[derive(Debug, Default, Deserialize)]
struct Range {
    #[serde(default)]
    header: Header,
    #[serde(default)]
    kvs: Vec<Found>,
    #[serde(default)]
    more: bool,
}

/// Reads a 64-bit number, which JSON of protobuf has as text.
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
