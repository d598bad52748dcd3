//! Errors of an etcd, and the advice for each.
//!
//! Owns: their words, the advice for etcd's known answers. Does not own: when a request is sent again (`client`).

use std::error::Error as _;
use std::io;
use std::path::PathBuf;
use tidemark_protocol::error::ErrorKind;

/// The most characters of an etcd's words that an error repeats.
const WORDS_MAX: usize = 200;

/// How etcd says that its quota is used up.
const NO_SPACE: &str = "database space exceeded";

/// How etcd begins its refusal of a client certificate that has a common name.
const COMMON_NAME: &str = "CommonName of client";

/// Why a request has no usable answer.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    #[error("cannot connect to {endpoint} over {over}; is an etcd running there that speaks {over}?")]
    Connect { endpoint: String, over: &'static str, source: io::Error },
    #[error("no TLS connection to {endpoint}: {error}; {advice}")]
    Tls { endpoint: String, advice: &'static str, error: rustls::Error },
    #[error("no answer from {endpoint} within {limit_ms} ms; look at its log and its disk")]
    Silent { endpoint: String, limit_ms: u128 },
    #[error("the connection to {endpoint} over {over} broke; does it speak {over}?")]
    Broken { endpoint: String, over: &'static str, source: hyper::Error },
    #[error("{endpoint} answers with HTTP status {status}: {words:?}; look at its log")]
    Away { endpoint: String, status: u16, words: String },
    #[error("{endpoint} refuses with HTTP status {status}: {words:?}; {advice}")]
    Refused { endpoint: String, status: u16, words: String, advice: &'static str },
    #[error(
        "{endpoint} refuses this node's token with HTTP status {status}: {words:?}; the next request fetches another"
    )]
    TokenOver { endpoint: String, status: u16, words: String },
    #[error(
        "{endpoint} refuses the password of user {user:?}: {words:?}; write the one that etcd has for this user into {}", .file.display()
    )]
    WrongPassword { endpoint: String, user: String, file: PathBuf, words: String },
    #[error(transparent)]
    Password(#[from] PasswordError),
    #[error("the answer of {endpoint} is no answer of an etcd")]
    Garbled { endpoint: String, source: serde_json::Error },
    #[error("the answer of {endpoint} is longer than {limit} bytes; is it an etcd?")]
    TooLong { endpoint: String, limit: usize },
}

impl EtcdError {
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Connect { .. }
            | Self::Tls { .. }
            | Self::Silent { .. }
            | Self::Broken { .. }
            | Self::Away { .. }
            | Self::TokenOver { .. } => ErrorKind::Unavailable,
            Self::Refused { .. } | Self::WrongPassword { .. } | Self::Password(_) => ErrorKind::Invalid,
            Self::Garbled { .. } | Self::TooLong { .. } => ErrorKind::Corrupt,
        }
    }

    /// Returns whether etcd refuses all writes because its space is used up.
    pub(super) fn is_full(&self) -> bool {
        matches!(self, Self::Away { words, .. } | Self::Refused { words, .. } if words.contains(NO_SPACE))
    }

    /// Returns whether another member of the etcd may answer.
    pub(super) fn is_of_one_endpoint(&self) -> bool {
        self.kind() == ErrorKind::Unavailable && !matches!(self, Self::TokenOver { .. })
    }

    /// Drops words that are not etcd's own: another server that answers a login may repeat the password that was sent.
    pub(super) fn of_login(mut self) -> Self {
        if let Self::Away { words, .. } | Self::Refused { words, .. } | Self::TokenOver { words, .. } =
            &mut self
            && !["etcdserver: ", COMMON_NAME].iter().any(|own| words.starts_with(own))
        {
            "left out, since they answer a login".clone_into(words);
        }
        self
    }

    /// Returns the error for an answer with another status than 200.
    pub(super) fn of_status(endpoint: String, status: u16, answer: &[u8]) -> Self {
        let words = words(answer);
        // No leader, too busy, on its way down: another member may do.
        if (500..600).contains(&status) || status == 429 {
            return Self::Away { endpoint, status, words };
        }
        // A token lasts five minutes without use, and no longer than its member or its user's password. A user's name is empty
        // where authentication was switched on after this node had asked for a token.
        let over = ["invalid auth token", "revision of auth store is old", "user name is empty"];
        if status == 401 || over.iter().any(|over| words.contains(over)) {
            return Self::TokenOver { endpoint, status, words };
        }
        let advice = advice(&words);
        Self::Refused { endpoint, status, words, advice }
    }

    /// Returns the error for a connection that could not be opened.
    pub(super) fn of_connect(endpoint: String, over: &'static str, source: io::Error) -> Self {
        match tls_error(&source) {
            Some(error) => Self::Tls { endpoint, advice: tls_advice(&error), error },
            None => Self::Connect { endpoint, over, source },
        }
    }

    /// Returns the error for a connection that ended before the answer. In TLS 1.3 an objection to this node's certificate arrives
    /// here.
    pub(super) fn of_connection(endpoint: String, over: &'static str, source: hyper::Error) -> Self {
        let inner = source.source().and_then(|inner| inner.downcast_ref::<io::Error>());
        match inner.and_then(tls_error) {
            Some(error) => Self::Tls { endpoint, advice: tls_advice(&error), error },
            None => Self::Broken { endpoint, over, source },
        }
    }
}

/// Why a password cannot be read. Names the file, never its content.
#[derive(Debug, thiserror::Error)]
pub enum PasswordError {
    #[error("the password of etcd in {} cannot be read", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the password of etcd cannot be used: {} {what}", .path.display())]
    Content { path: PathBuf, what: String },
}

/// Returns the advice for an answer of etcd, by its words.
fn advice(words: &str) -> &'static str {
    const KNOWN: [(&str, &str); 3] = [
        (
            COMMON_NAME,
            "with authentication etcd takes no client certificate that has a common name: make one without",
        ),
        ("permission denied", "give the role of this node's user in etcd readwrite on the prefix"),
        ("authentication is not enabled", "enable it in etcd, or remove [etcd] user and password_file"),
    ];
    let known = KNOWN.into_iter().find(|(part, _)| words.contains(part));
    known.map_or("is it an etcd 3.4 or later?", |(_, advice)| advice)
}

fn tls_error(error: &io::Error) -> Option<rustls::Error> {
    error.get_ref()?.downcast_ref::<rustls::Error>().cloned()
}

fn tls_advice(error: &rustls::Error) -> &'static str {
    use rustls::{CertificateError, Error};
    match error {
        // The signature is bad if another authority has the same name, such as a recreated one.
        Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => {
            "name the authority that signed etcd's certificate as [etcd] ca"
        }
        Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "name the host as etcd's certificate does, or give etcd a certificate for this host",
        Error::InvalidCertificate(_) => "look at etcd's certificate, and at this machine's clock",
        Error::InvalidMessage(_) => "is it an etcd with TLS? Without TLS write http://",
        Error::AlertReceived(_) => {
            "etcd refused this node's certificate, or the lack of one: give [etcd] cert and key that its client authority signed"
        }
        _ => "look at the log of etcd",
    }
}

/// Returns etcd's words about an error.
fn words(answer: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Said {
        error: String,
    }
    let said = serde_json::Deserializer::from_slice(answer).into_iter::<Said>().next();
    let text = said.and_then(Result::ok).map(|said| said.error);
    let text = text.unwrap_or_else(|| String::from_utf8_lossy(answer).into_owned());
    text.trim_end().chars().take(WORDS_MAX).collect()
}
