//! A small server that speaks as much of Google's XML API and of Azure's blobs as Tidemark asks of them.
//!
//! Owns: objects, conditions, uploads in parts and pages of lists, as their documentation has them. Does not own: signatures (no
//! client is authenticated), faults, other behaviour of the real services.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::TryStreamExt;
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use s3s::Body;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};

/// A key for Google's service that needs no token.
const NOBODY: &str = r#"{"private_key":"","private_key_id":"","client_email":"","disable_oauth":true}"#;

/// Entries of one page, so that every listing has several.
const PAGE_KEYS: usize = 3;
const BUCKET: &str = "bucket";
const MODIFIED: &str = "Tue, 14 Nov 2023 22:13:20 GMT";

/// The service whose protocol the server speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cloud {
    Google,
    Azure,
}

#[derive(Debug, Default)]
struct Held {
    objects: BTreeMap<String, Bytes>,
    /// Parts by upload (Azure: by blob), by number or block id.
    parts: BTreeMap<String, BTreeMap<String, Bytes>>,
    uploads: u64,
    /// Conditional creates that were refused because the key existed.
    refused: u64,
}

/// A running server with one bucket; ends when dropped.
#[derive(Debug)]
pub struct CloudServer {
    cloud: Cloud,
    endpoint: String,
    held: Arc<Mutex<Held>>,
    runtime: Option<Runtime>,
}

impl CloudServer {
    /// Starts a server on threads of its own.
    pub fn start(cloud: Cloud) -> io::Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let socket = std::net::TcpListener::bind("127.0.0.1:0")?;
        socket.set_nonblocking(true)?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(socket)?
        };
        let endpoint = format!("http://{}", listener.local_addr()?);
        let held = Arc::new(Mutex::new(Held::default()));
        runtime.spawn(accept(listener, cloud, Arc::clone(&held)));
        Ok(Self { cloud, endpoint, held, runtime: Some(runtime) })
    }

    /// Returns the environment of a client.
    pub fn env(&self) -> Vec<(String, String)> {
        let variables = match self.cloud {
            // A key is needed, because object_store ignores `GOOGLE_SKIP_SIGNATURE` in puts.
            Cloud::Google => {
                vec![("GOOGLE_BASE_URL", self.endpoint.as_str()), ("GOOGLE_SERVICE_ACCOUNT_KEY", NOBODY)]
            }
            Cloud::Azure => vec![
                ("AZURE_STORAGE_ENDPOINT", self.endpoint.as_str()),
                ("AZURE_STORAGE_ACCOUNT_NAME", "account"),
                ("AZURE_SKIP_SIGNATURE", "true"),
            ],
        };
        variables.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    pub fn url(&self, prefix: &str) -> String {
        let scheme = if self.cloud == Cloud::Google { "gs" } else { "az" };
        format!("{scheme}://{BUCKET}/{prefix}")
    }

    /// Returns two counts: conditional creates whose key existed, and uploads in parts that were begun.
    pub fn met(&self) -> (u64, u64) {
        let held = self.held.lock().expect("no request panics");
        (held.refused, held.uploads)
    }
}

impl Drop for CloudServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn accept(listener: TcpListener, cloud: Cloud, held: Arc<Mutex<Held>>) {
    loop {
        let Ok((connection, _)) = listener.accept().await else { continue };
        let held = Arc::clone(&held);
        tokio::spawn(async move {
            let answer = service_fn(move |request| respond(cloud, Arc::clone(&held), request));
            let _ = http1::Builder::new().serve_connection(TokioIo::new(connection), answer).await;
        });
    }
}

/// A parsed request.
struct Asked {
    method: Method,
    key: String,
    query: BTreeMap<String, String>,
    headers: HeaderMap,
    body: Bytes,
}

impl Asked {
    fn word(&self, name: &str) -> Option<&str> {
        self.query.get(name).map(String::as_str)
    }

    fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

async fn respond(
    cloud: Cloud,
    held: Arc<Mutex<Held>>,
    request: Request<Incoming>,
) -> io::Result<Response<Body>> {
    let (parts, body) = request.into_parts();
    let body: Vec<Bytes> = Body::from(body).map_err(io::Error::other).try_collect().await?;
    let path = unescape(parts.uri.path()).trim_start_matches('/').to_owned();
    let key = path.strip_prefix(BUCKET).map_or("", |rest| rest.trim_start_matches('/')).to_owned();
    let pairs = parts.uri.query().unwrap_or("").split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (unescape(name), unescape(&value.replace('+', " ")))
    });
    let asked = Asked {
        method: parts.method,
        key,
        query: pairs.collect(),
        headers: parts.headers,
        body: body.concat().into(),
    };
    let mut held = held.lock().expect("no request panics");
    Ok(match cloud {
        Cloud::Google => google(&mut held, &asked),
        Cloud::Azure => azure(&mut held, &asked),
    })
}

fn google(held: &mut Held, asked: &Asked) -> Response<Body> {
    match (asked.method.as_str(), asked.word("uploadId")) {
        ("POST", None) if asked.word("uploads").is_some() => {
            held.uploads += 1;
            let id = format!("upload-{}", held.uploads);
            held.parts.insert(id.clone(), BTreeMap::new());
            document(&format!(
                "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
            ))
        }
        ("PUT", Some(id)) => match held.parts.get_mut(id) {
            Some(parts) => {
                let number: u32 =
                    asked.word("partNumber").and_then(|number| number.parse().ok()).unwrap_or(0);
                parts.insert(format!("{number:05}"), asked.body.clone());
                answer(StatusCode::OK, &asked.body, Bytes::new())
            }
            None => refusal(StatusCode::NOT_FOUND, "NoSuchUpload"),
        },
        ("POST", Some(id)) => match held.parts.remove(id) {
            Some(parts) => {
                let whole: Bytes = parts.into_values().collect::<Vec<_>>().concat().into();
                let tag = etag(&whole);
                held.objects.insert(asked.key.clone(), whole);
                document(&format!(
                    "<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
                ))
            }
            None => refusal(StatusCode::NOT_FOUND, "NoSuchUpload"),
        },
        ("DELETE", Some(id)) => {
            held.parts.remove(id);
            answer(StatusCode::NO_CONTENT, &Bytes::new(), Bytes::new())
        }
        ("PUT", None) => {
            let create = asked.header("x-goog-if-generation-match") == Some("0");
            put(held, asked, create, StatusCode::PRECONDITION_FAILED, "PreconditionFailed")
        }
        ("GET", None) if asked.key.is_empty() => list(held, asked, Cloud::Google),
        _ => read_or_delete(held, asked, "NoSuchKey"),
    }
}

fn azure(held: &mut Held, asked: &Asked) -> Response<Body> {
    match (asked.method.as_str(), asked.word("comp")) {
        ("PUT", Some("block")) => {
            let id = asked.word("blockid").unwrap_or("").to_owned();
            let blocks = held.parts.entry(asked.key.clone()).or_default();
            held.uploads += u64::from(blocks.is_empty());
            blocks.insert(id, asked.body.clone());
            answer(StatusCode::CREATED, &asked.body, Bytes::new())
        }
        ("PUT", Some("blocklist")) => {
            let blocks = held.parts.remove(&asked.key).unwrap_or_default();
            let text = String::from_utf8_lossy(&asked.body).into_owned();
            let mut whole = Vec::new();
            for id in text.split("<Uncommitted>").skip(1).filter_map(|rest| rest.split_once('<')) {
                match blocks.get(id.0) {
                    Some(block) => whole.extend_from_slice(block),
                    None => return refusal(StatusCode::BAD_REQUEST, "InvalidBlockList"),
                }
            }
            let whole = Bytes::from(whole);
            held.objects.insert(asked.key.clone(), whole.clone());
            answer(StatusCode::CREATED, &whole, Bytes::new())
        }
        ("PUT", None) => {
            let create = asked.header("if-none-match") == Some("*");
            put(held, asked, create, StatusCode::CONFLICT, "BlobAlreadyExists")
        }
        ("POST", Some("batch")) => batch(held, asked),
        ("GET", Some("list")) => list(held, asked, Cloud::Azure),
        _ => read_or_delete(held, asked, "BlobNotFound"),
    }
}

/// Deletes several objects in one request. The client deletes in no other way.
fn batch(held: &mut Held, asked: &Asked) -> Response<Body> {
    let text = String::from_utf8_lossy(&asked.body).into_owned();
    let mut answers = String::new();
    let lines = text.lines().filter_map(|line| line.strip_prefix("DELETE /")?.strip_suffix(" HTTP/1.1"));
    for (index, path) in lines.enumerate() {
        let path = unescape(path);
        let key = path.strip_prefix(BUCKET).map_or("", |rest| rest.trim_start_matches('/'));
        let said = if held.objects.remove(key).is_some() { "202 Accepted" } else { "404 Not Found" };
        write!(
            answers,
            "--batch\r\nContent-Type: application/http\r\nContent-ID: {index}\r\n\r\nHTTP/1.1 {said}\r\n\r\n\r\n"
        )
        .expect("a text grows");
    }
    let mut response = Response::new(Body::from(format!("{answers}--batch--\r\n")));
    *response.status_mut() = StatusCode::ACCEPTED;
    let kind = "multipart/mixed; boundary=batch".parse().expect("plain text");
    response.headers_mut().insert("content-type", kind);
    response
}

fn put(held: &mut Held, asked: &Asked, create: bool, taken: StatusCode, code: &str) -> Response<Body> {
    if create && held.objects.contains_key(&asked.key) {
        held.refused += 1;
        return refusal(taken, code);
    }
    held.objects.insert(asked.key.clone(), asked.body.clone());
    answer(StatusCode::CREATED, &asked.body, Bytes::new())
}

fn read_or_delete(held: &mut Held, asked: &Asked, absent: &str) -> Response<Body> {
    let Some(object) = held.objects.get(&asked.key).cloned() else {
        return refusal(StatusCode::NOT_FOUND, absent);
    };
    if asked.method == Method::DELETE {
        held.objects.remove(&asked.key);
        return answer(StatusCode::ACCEPTED, &object, Bytes::new());
    }
    let range = asked.header("range").or_else(|| asked.header("x-ms-range")).and_then(|range| {
        let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((from.parse::<usize>().ok()?, to.parse::<usize>().ok()?))
    });
    match range {
        Some((from, _)) if from >= object.len() => refusal(StatusCode::RANGE_NOT_SATISFIABLE, "InvalidRange"),
        Some((from, to)) => {
            let end = object.len().min(to + 1);
            let mut part = answer(StatusCode::PARTIAL_CONTENT, &object, object.slice(from..end));
            let said = format!("bytes {from}-{}/{}", end - 1, object.len());
            part.headers_mut().insert("content-range", said.parse().expect("plain text"));
            part
        }
        None if asked.method == Method::HEAD => {
            let mut head = answer(StatusCode::OK, &object, Bytes::new());
            head.headers_mut().insert("content-length", object.len().into());
            head
        }
        None => answer(StatusCode::OK, &object, object.clone()),
    }
}

/// Lists a page: keys and folded prefixes in order, and where the next page begins.
fn list(held: &Held, asked: &Asked, cloud: Cloud) -> Response<Body> {
    let prefix = asked.word("prefix").unwrap_or("");
    let after = asked.word("continuation-token").or_else(|| asked.word("marker")).unwrap_or("");
    let folded = asked.word("delimiter").is_some();
    let mut entries: BTreeMap<String, Option<&Bytes>> = BTreeMap::new();
    for (key, object) in held.objects.iter().filter(|(key, _)| key.starts_with(prefix)) {
        match key[prefix.len()..].find('/') {
            Some(at) if folded => entries.insert(key[..=prefix.len() + at].to_owned(), None),
            _ => entries.insert(key.clone(), Some(object)),
        };
    }
    let mut page = entries.into_iter().filter(|(key, _)| key.as_str() > after);
    let (mut keys, mut prefixes, mut last) = (String::new(), String::new(), String::new());
    for (key, object) in page.by_ref().take(PAGE_KEYS) {
        let name = escape_xml(&key);
        let written = match (object, cloud) {
            (Some(object), Cloud::Google) => write!(
                keys,
                "<Contents><Key>{name}</Key><Size>{}</Size><LastModified>2023-11-14T22:13:20.000Z</LastModified>\
                 <ETag>{}</ETag></Contents>",
                object.len(),
                etag(object)
            ),
            (Some(object), Cloud::Azure) => write!(
                keys,
                "<Blob><Name>{name}</Name><Properties><Last-Modified>{MODIFIED}</Last-Modified><Etag>{}</Etag>\
                 <Content-Length>{}</Content-Length><Content-Type>x</Content-Type></Properties></Blob>",
                etag(object),
                object.len()
            ),
            (None, Cloud::Google) => {
                write!(prefixes, "<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>")
            }
            (None, Cloud::Azure) => write!(prefixes, "<BlobPrefix><Name>{name}</Name></BlobPrefix>"),
        };
        written.expect("a text grows");
        last = key;
    }
    let next = if page.next().is_some() { escape_xml(&last) } else { String::new() };
    document(&match cloud {
        Cloud::Google if next.is_empty() => format!("<ListBucketResult>{keys}{prefixes}</ListBucketResult>"),
        Cloud::Google => format!(
            "<ListBucketResult>{keys}{prefixes}<NextContinuationToken>{next}</NextContinuationToken></ListBucketResult>"
        ),
        Cloud::Azure => format!(
            "<EnumerationResults><Blobs>{prefixes}{keys}</Blobs><NextMarker>{next}</NextMarker></EnumerationResults>"
        ),
    })
}

fn etag(object: &Bytes) -> String {
    format!("\"{}\"", &STANDARD.encode(blake3::hash(object).as_bytes())[..16])
}

fn answer(status: StatusCode, object: &Bytes, body: Bytes) -> Response<Body> {
    let mut response = Response::new(Body::from(body));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert("etag", etag(object).parse().expect("base64 is plain text"));
    headers.insert("last-modified", MODIFIED.parse().expect("plain text"));
    response
}

fn document(text: &str) -> Response<Body> {
    Response::new(Body::from(format!("<?xml version=\"1.0\" encoding=\"utf-8\"?>{text}")))
}

fn refusal(status: StatusCode, code: &str) -> Response<Body> {
    let mut response = document(&format!("<Error><Code>{code}</Code><Message>no</Message></Error>"));
    *response.status_mut() = status;
    response
}

fn escape_xml(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn unescape(text: &str) -> String {
    let bytes = text.as_bytes();
    let (mut found, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let hex = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                found.push(byte);
                at += 3;
            }
            None => {
                found.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&found).into_owned()
}
