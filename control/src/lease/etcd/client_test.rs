//! Servers that are no etcd, or a sick one, on real sockets: every request ends in time, with an error that says what to do.

use super::*;
use crate::lease::etcd::http::ANSWER_BYTES_MAX;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex};
use tidemark_engine::settings::EtcdSettings;
use tidemark_protocol::error::ErrorKind;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Answers each connection with these bytes, once a request has come; then keeps it open.
async fn server(answer: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("its address").to_string();
    let answer = Arc::new(answer);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = Arc::clone(&answer);
            tokio::spawn(async move {
                let mut asked = [0; 4096];
                let _bytes = stream.read(&mut asked).await;
                let _sent = stream.write_all(&answer).await;
                // Until the other side closes.
                let _end = stream.read(&mut asked).await;
            });
        }
    });
    address
}

fn http(status: &str, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn client(endpoints: &[&str]) -> EtcdClient {
    client_of("http", endpoints, &EtcdSettings::default())
}

fn client_of(scheme: &str, endpoints: &[&str], settings: &EtcdSettings) -> EtcdClient {
    let place = format!("{scheme}://{}/p", endpoints.join(",")).parse().expect("a place");
    EtcdClient::new(EtcdAccess::open(place, settings).expect("its files can be used"))
}

/// Starts a server that answers each request by a function of its path, its token and its body.
async fn scripted(answer: impl Fn(&str, Option<&str>, &str) -> Vec<u8> + Send + Sync + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("its address").to_string();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut asked = vec![];
            let (head, length) = loop {
                stream.read_buf(&mut asked).await.expect("a request");
                let text = String::from_utf8_lossy(&asked).into_owned();
                let Some((head, _)) = text.split_once("\r\n\r\n") else { continue };
                let field = |name: &str| {
                    let found = head.lines().find_map(|line| line.strip_prefix(name));
                    found.map(ToOwned::to_owned)
                };
                let length: usize = field("content-length: ").expect("a body").parse().expect("a number");
                assert_eq!(field("accept: ").as_deref(), Some("application/json"), "{head}");
                break ((head.to_owned(), field("authorization: ")), head.len() + 4 + length);
            };
            while asked.len() < length {
                stream.read_buf(&mut asked).await.expect("the rest");
            }
            let (head, token) = head;
            let body = String::from_utf8_lossy(&asked[head.len() + 4..]).into_owned();
            let path = head.split(' ').nth(1).expect("a path");
            stream.write_all(&answer(path, token.as_deref(), &body)).await.expect("the client reads");
        }
    });
    address
}

const AUTHENTICATE: &str = "/v3/auth/authenticate";

fn error(status: &str, words: &str) -> Vec<u8> {
    http(status, &format!(r#"{{"error":"etcdserver: {words}","message":"","code":3}}"#))
}

/// Makes a user with a password in a file.
fn user(password: &str) -> (tempfile::TempDir, EtcdSettings) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("password");
    fs::write(&file, password).expect("written");
    fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("a mode");
    let settings =
        EtcdSettings { user: Some("tide".to_owned()), password_file: Some(file), ..EtcdSettings::default() };
    (folder, settings)
}

/// Returns an address without a listener.
async fn nobody() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    listener.local_addr().expect("its address").to_string()
}

#[tokio::test]
async fn an_endpoint_that_is_away_is_passed_over_and_the_one_that_answered_is_asked_first() {
    let (dead, silent) = (nobody().await, server(vec![]).await);
    let no_leader = server(http("503 Service Unavailable", r#"{"error":"no leader"}"#)).await;
    let good = server(http("200 OK", r#"{"header":{},"ID":"7","TTL":"2"}"#)).await;
    let client = client(&[&dead, &silent, &no_leader, &good]);
    let began = Instant::now();
    assert_eq!(client.grant(2).await.expect("granted"), (7, 2));
    assert!(began.elapsed() >= ATTEMPT_TIMEOUT, "the silent one was waited for");
    let began = Instant::now();
    assert_eq!(client.grant(2).await.expect("granted"), (7, 2));
    assert!(began.elapsed() < ATTEMPT_TIMEOUT, "{:?}", began.elapsed());
}

#[tokio::test]
async fn a_request_that_nobody_answers_ends_in_time() {
    let silent = server(vec![]).await;
    let client = client(&[&silent, &silent, &silent, &silent, &silent, &silent]);
    let began = Instant::now();
    let error = client.get("k").await.expect_err("nobody answers");
    assert!(matches!(error, EtcdError::Silent { .. }), "{error}");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(began.elapsed() < CALL_TIMEOUT + ATTEMPT_TIMEOUT, "{:?}", began.elapsed());
}

#[tokio::test]
async fn what_is_no_etcd_is_told_apart_from_one_that_is_away() {
    let kind = async |answer: Vec<u8>| {
        let address = server(answer).await;
        client(&[&address]).get("k").await.expect_err("no answer of an etcd").kind()
    };
    assert_eq!(kind(http("200 OK", "<html>hello</html>")).await, ErrorKind::Corrupt);
    assert_eq!(kind(http("200 OK", r#"{"kvs":[{"value":"%%%"}]}"#)).await, ErrorKind::Corrupt);
    assert_eq!(kind(http("200 OK", r#"{"kvs":[{"create_revision":"-1"}]}"#)).await, ErrorKind::Corrupt);
    assert_eq!(kind(http("401 Unauthorized", r#"{"error":"user name is empty"}"#)).await, ErrorKind::Invalid);
    assert_eq!(kind(b"SSH-2.0-OpenSSH\r\n".to_vec()).await, ErrorKind::Unavailable);
    let long = http("200 OK", &"x".repeat(ANSWER_BYTES_MAX + 1));
    let address = server(long).await;
    let error = client(&[&address]).get("k").await.expect_err("too long");
    assert!(matches!(error, EtcdError::TooLong { .. }), "{error}");
}

/// Goal: one login serves all requests until etcd says that its token is over; then there is one more, and one more try.
#[tokio::test]
async fn a_token_is_fetched_once_and_again_when_etcd_does_not_know_it_any_more() {
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let seen = Arc::clone(&asked);
    let valid = Arc::new(AtomicUsize::new(1));
    let now = Arc::clone(&valid);
    let etcd = scripted(move |path, token, body| {
        seen.lock().expect("no panic").push(format!(
            "{} {}",
            path.rsplit('/').next().unwrap(),
            token.unwrap_or("-")
        ));
        let valid = format!("t.{}", now.load(Ordering::Relaxed));
        match (path, token) {
            (AUTHENTICATE, _) => {
                assert_eq!(body, r#"{"name":"tide","password":"secret"}"#);
                http("200 OK", &format!(r#"{{"header":{{}},"token":"{valid}"}}"#))
            }
            (_, Some(token)) if token == valid => http("200 OK", "{}"),
            (_, Some(_)) => error("401 Unauthorized", "invalid auth token"),
            (_, None) => error("400 Bad Request", "user name is empty"),
        }
    })
    .await;
    let (_folder, settings) = user("secret\n");
    let client = client_of("http", &[&etcd], &settings);
    for _ in 0..2 {
        assert_eq!(client.get("k").await.expect("an answer"), None);
    }
    valid.store(2, Ordering::Relaxed);
    client.get("k").await.expect("an answer with the second token");
    let requests = ["authenticate -", "range t.1", "range t.1", "range t.1", "authenticate -", "range t.2"];
    assert_eq!(*asked.lock().expect("no panic"), requests);
    // Clones share the login, as the look at the start and the candidate do.
    EtcdClient::new(client.access.clone()).get("k").await.expect("an answer");
    assert_eq!(asked.lock().expect("no panic").last().map(String::as_str), Some("range t.2"));
    let shown = format!("{client:?}");
    assert!(!shown.contains("secret") && !shown.contains("t.2"), "{shown}");
}

/// Goal: an etcd that refuses each token is not asked without end, and a wrong password is sent once.
#[tokio::test]
async fn refused_tokens_and_passwords_end_a_request_and_make_no_storm() {
    let count = |answer: fn(&str) -> Vec<u8>| async move {
        let logins = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&logins);
        let etcd = scripted(move |path, _, _| {
            counted.fetch_add(usize::from(path == AUTHENTICATE), Ordering::Relaxed);
            answer(path)
        });
        (etcd.await, logins)
    };
    let (_folder, settings) = user("hunter2");
    let (etcd, logins) = count(|path| match path {
        AUTHENTICATE => http("200 OK", r#"{"token":"t"}"#),
        _ => error("401 Unauthorized", "invalid auth token"),
    })
    .await;
    let client = client_of("http", &[&etcd], &settings);
    let refused = client.get("k").await.expect_err("no token counts");
    assert!(matches!(refused, EtcdError::TokenOver { .. }), "{refused}");
    assert_eq!(logins.load(Ordering::Relaxed), 2, "the first, and one more");

    let (etcd, logins) =
        count(|_| error("400 Bad Request", "authentication failed, invalid user ID or password")).await;
    let client = client_of("http", &[&etcd], &settings);
    for _ in 0..5 {
        let refused = client.get("k").await.expect_err("a wrong password");
        assert_eq!(refused.kind(), ErrorKind::Invalid);
        let (shown, file) = (refused.to_string(), settings.password_file.as_ref().expect("a file"));
        for words in [&etcd, "\"tide\"", "invalid user ID or password", &*file.to_string_lossy()] {
            assert!(shown.contains(words), "{shown}");
        }
        assert!(!format!("{shown} {refused:?}").contains("hunter2"), "{refused:?}");
    }
    assert_eq!(logins.load(Ordering::Relaxed), 1, "the same password is not sent again at once");
    fs::write(settings.password_file.as_ref().expect("a file"), "another").expect("written");
    client.get("k").await.expect_err("wrong, too");
    assert_eq!(logins.load(Ordering::Relaxed), 2, "another password is");
}

/// Goal: each refusal says what to do; an etcd without authentication takes a node that has a user.
#[tokio::test]
async fn an_etcd_with_and_without_authentication_is_told_apart() {
    let (_folder, settings) = user("secret");
    let off = scripted(|path, token, _| match (path, token) {
        (AUTHENTICATE, _) => error("412 Precondition Failed", "authentication is not enabled"),
        (_, None) => http("200 OK", "{}"),
        (_, Some(_)) => error("401 Unauthorized", "invalid auth token"),
    })
    .await;
    client_of("http", &[&off], &settings).get("k").await.expect("etcd asks for no user");

    for (status, words, advice) in [
        ("400 Bad Request", "user name is empty", "[etcd] user and password_file"),
        ("403 Forbidden", "permission denied", "readwrite on the prefix"),
        (
            "400 Bad Request",
            "CommonName of client sending a request",
            "no client certificate that has a common name",
        ),
        ("404 Not Found", "nothing here", "etcd 3.4 or later"),
    ] {
        let (status_text, said) = (status.to_owned(), words.to_owned());
        let etcd = scripted(move |_, _, _| error(&status_text, &said)).await;
        let refused = client(&[&etcd]).get("k").await.expect_err(words);
        assert!(matches!(refused, EtcdError::Refused { .. }), "{refused}");
        let shown = refused.to_string();
        assert!(shown.contains(advice) && shown.contains(words) && shown.contains(&etcd), "{shown}");
    }
    let echo = scripted(|_, _, body| http("400 Bad Request", body)).await;
    let echoed =
        client_of("http", &[&echo], &settings).get("k").await.expect_err("it repeats what it was sent");
    assert!(!format!("{echoed} {echoed:?}").contains("secret"), "{echoed:?}");
    for token in ["\"\"", "\"a\\nb\"", "5", &format!("\"{}\"", "x".repeat(TOKEN_BYTES_MAX + 1))] {
        let answer = http("200 OK", &format!(r#"{{"token":{token}}}"#));
        let etcd = scripted(move |_, _, _| answer.clone()).await;
        let refused = client_of("http", &[&etcd], &settings).get("k").await.expect_err("no token");
        assert_eq!(refused.kind(), ErrorKind::Corrupt, "{refused}");
    }
}

/// Goal: a server without TLS, and one that speaks only TLS, are told apart from an etcd that is away.
#[tokio::test]
async fn tls_and_its_absence_are_named() {
    let folder = tempfile::tempdir().expect("a folder");
    tidemark_transport::certs::init(folder.path(), "blue").expect("an authority");
    let settings = EtcdSettings { ca: Some(folder.path().join("ca.pem")), ..EtcdSettings::default() };
    let plain = server(http("400 Bad Request", "an answer in plain HTTP")).await;
    let refused = client_of("https", &[&plain], &settings).get("k").await.expect_err("no TLS there");
    assert!(refused.to_string().contains("Without TLS write http://"), "{refused}");
    let closes = server(b"".to_vec()).await;
    let silent = client_of("https", &[&closes], &settings).get("k").await.expect_err("no TLS there");
    assert!(matches!(silent, EtcdError::Silent { .. }), "{silent}");
}
