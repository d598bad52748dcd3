//! What is no etcd, or a sick one, on real sockets: every request ends in time, with what to do.

use super::*;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Answers each connection with these bytes, once something has been asked; then keeps it open.
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
                // Until the other side has enough of it.
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
    EtcdClient::new(format!("etcd://{}/p", endpoints.join(",")).parse().expect("a place"))
}

/// An address where nobody listens.
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
