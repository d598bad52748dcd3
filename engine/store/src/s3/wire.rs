//! The HTTP layer below `object_store`'s client, which sees the actual answers.
//!
//! Owns: [`Answer`] (status and S3 error code of a refusal), the checksum header of a read, and the damage that the probe
//! does to a part. Does not own: signing, URLs, bodies (all `object_store`'s).
//!
//! `object_store` folds several answers into one error (409 and 412 both become `AlreadyExists`) and hides the status.
//! Here each answer that is not a success becomes an error with its status and code inside.

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::StreamExt;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse,
    HttpService, ReqwestConnector,
};
use std::error::Error;

/// Maximum number of bytes of an error's body that are read. S3's error documents have a few hundred; a proxy's error
/// page may have any size.
const ERROR_BODY_BYTES: usize = 16 << 10;

/// Characters of S3's message that are kept for people.
const MESSAGE_CHARS: usize = 300;

const CRC64_HEADER: &str = "x-amz-checksum-crc64nvme";

/// An answer that is not a success.
#[derive(Debug, thiserror::Error)]
#[error("HTTP {status} {code}: {message}")]
pub(super) struct Answer {
    pub(super) status: u16,
    /// S3's own word, such as `NoSuchKey`; empty if the answer had no error document (to HEAD it never has).
    pub(super) code: String,
    message: String,
}

/// The whole object's CRC-64/NVME as the store sent it with a read, in base64.
#[derive(Debug, Clone)]
pub(super) struct SentChecksum(pub(super) String);

/// Makes clients that see their answers.
#[derive(Debug)]
pub(super) struct Connector {
    /// Whether every part of an upload is overwritten with zeros after its checksum was computed.
    pub(super) damage_parts: bool,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let inner = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Wire { inner, damage_parts: self.damage_parts }))
    }
}

#[derive(Debug)]
struct Wire {
    inner: HttpClient,
    damage_parts: bool,
}

#[async_trait]
impl HttpService for Wire {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if self.damage_parts && request.uri().query().is_some_and(|query| query.contains("partNumber=")) {
            let zeros = vec![0; request.body().content_length()];
            *request.body_mut() = HttpRequestBody::from(Bytes::from(zeros));
        }
        let mut response = self.inner.execute(request).await?;
        if response.status().is_success() {
            let sent = response.headers().get(CRC64_HEADER).and_then(|value| value.to_str().ok());
            if let Some(sent) = sent.filter(|value| is_whole_crc64(value)).map(str::to_owned) {
                response.extensions_mut().insert(SentChecksum(sent));
            }
            return Ok(response);
        }
        let status = response.status().as_u16();
        let mut body = Vec::new();
        let mut chunks = response.into_body().bytes_stream();
        while body.len() < ERROR_BODY_BYTES {
            // If the body breaks off, the part that came is used: the status alone decides then.
            let Some(Ok(chunk)) = chunks.next().await else { break };
            body.extend_from_slice(&chunk[..chunk.len().min(ERROR_BODY_BYTES - body.len())]);
        }
        let text = String::from_utf8_lossy(&body);
        let code = element(&text, "Code").to_owned();
        let message = element(&text, "Message").chars().take(MESSAGE_CHARS).collect();
        Err(HttpError::new(HttpErrorKind::Unknown, Answer { status, code, message }))
    }
}

/// Whether the value is a CRC-64 of the whole object: eight bytes. A value with a dash is a checksum of the parts'
/// checksums, and we do not know the parts; moto sends four bytes for an object that came in parts.
fn is_whole_crc64(value: &str) -> bool {
    !value.contains('-') && STANDARD.decode(value).is_ok_and(|sum| sum.len() == size_of::<u64>())
}

/// Returns the text of the first element of that name. Only `Code` and `Message` are ever taken: S3 repeats the access
/// key and the string to sign in other elements.
pub(super) fn element<'a>(document: &'a str, name: &str) -> &'a str {
    let inside = document.split_once(&format!("<{name}>")).and_then(|(_, rest)| rest.split_once("</"));
    inside.map_or("", |(text, _)| text)
}

/// The failure of a request, as far as it matters for repeating.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trouble {
    /// The request never left this machine, or the connection was not made: no effect is possible.
    Unsent,
    /// No answer, a broken one, or one that says "try again": the effect is unknown.
    NoAnswer,
    /// 500 to 599, 429, 408: the effect is unknown.
    Failing,
    /// 409: another request for this key is in progress.
    Conflict,
    /// 412 or 304: the condition did not hold, according to this answer.
    Exists,
    /// 404 for an object or upload.
    Absent,
    /// 404 for the bucket.
    NoBucket,
    /// The bytes did not match their checksum; nothing was stored.
    Damaged,
    /// 401 or 403.
    Denied,
    /// 416.
    Range,
    /// Any other refusal: 301, 400, 405 …
    Malformed,
}

impl Trouble {
    /// Whether the same request, harmless when sent twice, may succeed later.
    pub(super) fn is_transient(self) -> bool {
        matches!(self, Self::Unsent | Self::NoAnswer | Self::Failing | Self::Conflict | Self::Damaged)
    }

    /// Whether the store answered.
    pub(super) fn is_answer(self) -> bool {
        !matches!(self, Self::Unsent | Self::NoAnswer)
    }

    /// Whether this answer proves that the request changed nothing.
    pub(super) fn had_no_effect(self) -> bool {
        match self {
            Self::Unsent | Self::Damaged | Self::Denied | Self::Malformed | Self::NoBucket | Self::Range => {
                true
            }
            Self::NoAnswer | Self::Failing | Self::Conflict | Self::Exists | Self::Absent => false,
        }
    }
}

/// Sorts a client error by the answer found inside it.
pub(super) fn trouble(error: &object_store::Error) -> Trouble {
    let mut at: Option<&(dyn Error + 'static)> = Some(error);
    let mut kind = None;
    while let Some(source) = at {
        if let Some(answer) = source.downcast_ref::<Answer>() {
            return sort(answer);
        }
        if let Some(http) = source.downcast_ref::<HttpError>() {
            kind = Some(http.kind());
        }
        at = source.source();
    }
    match (kind, error) {
        // `Request` does not prove that nothing was sent: hyper also uses it for a connection closed in mid-answer.
        (Some(HttpErrorKind::Connect), _) => Trouble::Unsent,
        (Some(_), _) => Trouble::NoAnswer,
        (None, object_store::Error::NotFound { .. }) => Trouble::Absent,
        (None, object_store::Error::Precondition { .. } | object_store::Error::NotModified { .. }) => {
            Trouble::Exists
        }
        (
            None,
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. },
        ) => Trouble::Denied,
        // An answer of 200 whose body is an error, or is no answer at all, ends here.
        (None, _) => Trouble::NoAnswer,
    }
}

fn sort(answer: &Answer) -> Trouble {
    match (answer.status, answer.code.as_str()) {
        (_, "NoSuchBucket" | "ContainerNotFound") => Trouble::NoBucket,
        (
            400,
            "BadDigest" | "InvalidDigest" | "XAmzContentSHA256Mismatch" | "XAmzContentChecksumMismatch",
        ) => Trouble::Damaged,
        (400, "RequestTimeout") | (408 | 429 | 500..=599, _) => Trouble::Failing,
        (409, _) => Trouble::Conflict,
        (412 | 304, _) => Trouble::Exists,
        (404, _) => Trouble::Absent,
        (401 | 403, _) | (400, "ExpiredToken" | "InvalidToken" | "AuthorizationHeaderMalformed") => {
            Trouble::Denied
        }
        (416, _) => Trouble::Range,
        _ => Trouble::Malformed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(status: u16, code: &str) -> Trouble {
        sort(&Answer { status, code: code.to_owned(), message: String::new() })
    }

    #[test]
    fn only_answers_that_prove_it_count_as_without_effect() {
        assert!(answer(403, "AccessDenied").had_no_effect());
        assert!(answer(400, "BadDigest").had_no_effect());
        for (status, code) in [(500, "InternalError"), (503, "SlowDown"), (409, ""), (412, ""), (408, "")] {
            assert!(!answer(status, code).had_no_effect(), "{status} {code}");
        }
        assert_eq!(answer(400, "RequestTimeout"), Trouble::Failing);
        assert_eq!(answer(301, "PermanentRedirect"), Trouble::Malformed);
        assert_eq!(answer(404, "NoSuchBucket"), Trouble::NoBucket);
    }

    #[test]
    fn only_a_checksum_of_the_whole_object_is_compared() {
        assert!(is_whole_crc64("rosUhgp5mIg="));
        for other in ["MMUgVA==", "rosUhgp5mIg=-2", "", "no base64"] {
            assert!(!is_whole_crc64(other), "{other}");
        }
    }

    #[test]
    fn of_an_error_document_only_code_and_message_are_kept() {
        let document = "<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message>\
                        <AWSAccessKeyId>AKIA</AWSAccessKeyId></Error>";
        assert_eq!(
            (element(document, "Code"), element(document, "Message")),
            ("SignatureDoesNotMatch", "no")
        );
        assert_eq!(element("<html>", "Code"), "");
    }
}
