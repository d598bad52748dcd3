//! Uploads that a dead writer left: found page by page, and aborted only when no attempt can need them any more.
//!
//! Owns: a store's listing of uploads, the sweep at a daemon's start. Does not own: the rule itself (engine, `save::sweep`).

use super::start;
use std::time::Duration;
use tidemark_store::StoreError;
use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::s3::{S3Options, S3Server};
use tidemark_tests::{machine, process};

const SWEEP_LIMIT: Duration = Duration::from_secs(30);
const ATTEMPT: &str = "a-1f2e3d4c5b6a7988";

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_uploads_below_the_prefix_are_listed_and_aborted() {
    let (server, store) = start(S3Options { page_keys: 2, ..S3Options::default() }).await;
    let names = ["a", "b & <c>'\".pt", "d/e f+%41.pt", "d/e f+%41.pt", "z"];
    for name in names {
        server.leave_upload(&format!("p/{name}"));
    }
    for other in ["other", "p2/a"] {
        server.leave_upload(other);
    }
    let mut found = store.unfinished_uploads().await.expect("listed");
    found.sort_by(|one, other| one.key.cmp(&other.key));
    assert_eq!(found.iter().map(|upload| upload.key.as_str()).collect::<Vec<_>>(), names);
    for upload in &found {
        store.abort_upload(upload).await.expect("aborted");
        store.abort_upload(upload).await.expect("aborted already");
    }
    assert_eq!(server.unfinished_keys(), ["other", "p2/a"]);
    assert!(store.unfinished_uploads().await.expect("listed").is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_that_may_not_list_uploads_are_told_so() {
    let (_server, store) = start(S3Options { lists_uploads: false, ..S3Options::default() }).await;
    let refused = store.unfinished_uploads().await.expect_err("refused");
    assert!(matches!(refused, StoreError::Refused { .. }), "{refused}");
    assert!(refused.to_string().contains("AccessDenied"), "{refused}");
}

fn daemon(server: &S3Server) -> Daemon {
    let config = Some("[save]\nsettle_s = 0.3\n[tier3]\npaced = false\n".to_owned());
    Daemon::start(DaemonOptions {
        tier1: "128MiB".into(),
        tier3: Some(server.url("p")),
        env: server.env(),
        config,
        ..DaemonOptions::default()
    })
}

#[test]
fn a_start_aborts_the_uploads_of_what_is_decided_and_no_other() {
    if !machine::can_mount() {
        return;
    }
    let server = S3Server::start(S3Options::default()).expect("server");
    let mut daemon = daemon(&server);
    std::fs::create_dir(daemon.mount().join("run")).expect("a directory");
    std::fs::write(daemon.mount().join("run/step1.pt"), vec![7; 70_000]).expect("a checkpoint");
    std::fs::write(daemon.mount().join("run/notes.txt"), "loose").expect("a loose file");
    daemon.flush();
    daemon.stop();
    let dead = [
        // The version is committed, by another attempt.
        format!("p/run/step1.pt/v0.1/{ATTEMPT}/step1.pt"),
        "p/.tidemark/loose/run/notes.txt/g-1".to_owned(),
    ];
    let mut alive = vec![
        // The versions of these are undecided.
        format!("p/run/step1.pt/v0.2/{ATTEMPT}/step1.pt"),
        format!("p/run/step2.pt/v0.1/{ATTEMPT}/step2.pt"),
        "p/.tidemark/loose/run/notes.txt/g-2".to_owned(),
        // Tidemark did not begin this upload.
        "p/run/somebody-elses".to_owned(),
        format!("q/run/step1.pt/v0.1/{ATTEMPT}/step1.pt"),
    ];
    alive.sort();
    for key in dead.iter().chain(&alive) {
        server.leave_upload(key);
    }
    daemon.start_again();
    let swept = process::until(SWEEP_LIMIT, || (server.unfinished_uploads() == alive.len()).then_some(()));
    assert!(swept.is_some(), "{:#?}\n{}", server.unfinished_keys(), daemon.log_tail());
    assert_eq!(server.unfinished_keys(), alive);
    assert_eq!(std::fs::read(daemon.mount().join("run/step1.pt")).expect("it is there"), vec![7; 70_000]);
    daemon.stop();
    assert_eq!(server.unfinished_keys(), alive);
}

#[test]
fn a_start_that_may_not_list_uploads_names_the_lifecycle_rule() {
    if !machine::can_mount() {
        return;
    }
    let server = S3Server::start(S3Options { lists_uploads: false, ..S3Options::default() }).expect("server");
    let mut daemon = daemon(&server);
    let told =
        process::until(SWEEP_LIMIT, || daemon.log().contains("AbortIncompleteMultipartUpload").then_some(()));
    assert!(told.is_some(), "{}", daemon.log_tail());
    daemon.stop();
}
