//! Stores that refuse, or promise less than they should: does the message say what to do?
//!
//! Owns: wrong credentials, missing buckets, read-only access, stores without conditions or checksums.

use super::{settings, start};
use bytes::Bytes;
use std::time::{Duration, Instant};
use tidemark_protocol::error::ErrorKind;
use tidemark_store::{StoreError, StoreSettings, open_with, probe};
use tidemark_tests::s3::{S3Operation, S3Options, S3Server};

#[tokio::test(flavor = "multi_thread")]
async fn a_good_store_fences_refuses_damaged_parts_and_is_left_clean() {
    let (server, store) = start(S3Options::default()).await;
    let found = probe(&*store).await.expect("probe");
    assert!(found.fencing, "{}", found.fencing_reason);
    assert!(found.part_checksums, "{}", found.part_checksums_reason);
    assert!(store.list("", false).await.expect("list").keys.is_empty());
    assert_eq!(server.unfinished_uploads(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_ignores_conditions_has_no_fencing() {
    let (_server, store) = start(S3Options { honours_conditions: false, ..S3Options::default() }).await;
    let found = probe(&*store).await.expect("probe");
    assert!(!found.fencing);
    assert!(found.fencing_reason.contains("won") || found.fencing_reason.contains("replaced"), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_ignores_checksums_is_found_out() {
    // Any store checks signed payloads. With unsigned ones, only the checksum is left.
    let server =
        S3Server::start(S3Options { checks_checksums: false, ..S3Options::default() }).expect("server");
    let mut settings = settings(&server);
    settings.variables.get_or_insert_default().push(("AWS_UNSIGNED_PAYLOAD".into(), "true".into()));
    let store = open_with(&server.url("p"), &settings).await.expect("open");
    let found = probe(&*store).await.expect("probe");
    assert!(!found.part_checksums, "{}", found.part_checksums_reason);
    assert!(found.fencing, "{}", found.fencing_reason);
}

/// Returns the probe's error, and checks that its message has what a person needs.
async fn refused(server: &S3Server, url: &str, variables: Vec<(String, String)>) -> String {
    let settings = StoreSettings { variables: Some(variables), ..settings(server) };
    let store = open_with(url, &settings).await.expect("open");
    let error = probe(&*store).await.expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    let text = error.to_string();
    assert!(text.contains(url.trim_end_matches("/p")), "names the URL: {text}");
    assert!(!text.contains(&server.secret) && !format!("{error:?}").contains(&server.secret), "{text}");
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_credentials_are_refused_at_once_and_named() {
    let server = S3Server::start(S3Options::default()).expect("server");
    for (name, value) in [("AWS_SECRET_ACCESS_KEY", "wrong"), ("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")] {
        let mut variables = server.env();
        variables.retain(|(other, _)| other != name);
        variables.push((name.to_owned(), value.to_owned()));
        let text = refused(&server, &server.url("p"), variables).await;
        assert!(text.contains("AWS_SECRET_ACCESS_KEY"), "{text}");
    }
    assert_eq!(server.faults.requests(S3Operation::PutObject), 2, "a refusal is not tried again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_bucket_is_named_with_what_to_do() {
    let server = S3Server::start(S3Options::default()).expect("server");
    let text = refused(&server, "s3://no-such-bucket/p", server.env()).await;
    assert!(text.contains("NoSuchBucket") && text.contains("create the bucket"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_store_is_refused_as_such() {
    let server = S3Server::start(S3Options { read_only: true, ..S3Options::default() }).expect("server");
    let text = refused(&server, &server.url("p"), server.env()).await;
    assert!(text.contains("AccessDenied") && text.contains("put"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_away_is_unavailable_in_bounded_time() {
    let server = S3Server::start(S3Options::default()).expect("server");
    let (settings, url) = (settings(&server), server.url("p"));
    drop(server);
    let store = open_with(&url, &settings).await.expect("open asks nothing");
    let begun = Instant::now();
    let error = store.create("k", Bytes::new()).await.expect_err("away");
    assert!(matches!(error, StoreError::Unavailable { .. } | StoreError::Doubtful { .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(12));
}
