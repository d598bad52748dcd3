//! The contract of a Tier-3 store, run over a directory, memory, and S3, Google's and Azure's stores over real HTTP.
//!
//! Owns: the promises of every store. Does not own: errors that only one store can make (its own tests, and suite
//! s3).

use bytes::Bytes;
use futures::future::join_all;
use std::sync::Arc;
use tempfile::TempDir;
use tidemark_protocol::id::Epoch;
use tidemark_store::{
    Created, MemoryStore, Store, StoreError, StoreSettings, UploadLimits, open_with, probe, raise_epoch,
};
use tidemark_tests::cloud::{Cloud, CloudServer};
use tidemark_tests::s3::{S3Options, S3Server};

/// A store, and the values that must live as long as it.
struct Subject {
    store: Arc<dyn Store>,
    _server: Option<S3Server>,
    _cloud: Option<CloudServer>,
    _directory: Option<TempDir>,
}

async fn posix() -> Subject {
    let directory = tempfile::tempdir().expect("tempdir");
    let url = format!("file://{}/tier3", directory.path().display());
    let store = open_with(&url, &StoreSettings::default()).await.expect("open");
    Subject { store, _server: None, _cloud: None, _directory: Some(directory) }
}

async fn memory() -> Subject {
    Subject { store: Arc::new(MemoryStore::new()), _server: None, _cloud: None, _directory: None }
}

async fn s3() -> Subject {
    // Pages of three entries, so that every listing here has several.
    let server = S3Server::start(S3Options { page_keys: 3, ..S3Options::default() }).expect("server");
    let settings =
        StoreSettings { variables: Some(server.env()), least_part_bytes: 1, ..StoreSettings::default() };
    let store = open_with(&server.url("some/prefix"), &settings).await.expect("open");
    Subject { store, _server: Some(server), _cloud: None, _directory: None }
}

async fn cloud(cloud: Cloud) -> Subject {
    let server = CloudServer::start(cloud).expect("server");
    let settings =
        StoreSettings { variables: Some(server.env()), least_part_bytes: 1, ..StoreSettings::default() };
    let store = open_with(&server.url("some/prefix"), &settings).await.expect("open");
    Subject { store, _server: None, _cloud: Some(server), _directory: None }
}

async fn google() -> Subject {
    cloud(Cloud::Google).await
}

async fn azure() -> Subject {
    cloud(Cloud::Azure).await
}

/// The servers did their part in the contract: they refused conditions and assembled parts.
#[tokio::test(flavor = "multi_thread")]
async fn the_clouds_were_asked_for_conditions_and_parts() {
    for kind in [Cloud::Google, Cloud::Azure] {
        let subject = cloud(kind).await;
        probe(&*subject.store).await.expect("probe");
        let limits = UploadLimits { part_bytes: 4, parts_in_flight: 2 };
        let body = Bytes::from_static(b"three parts");
        subject.store.upload("parts", Arc::new(body), &limits).await.expect("upload");
        let (refused, uploads) = subject._cloud.as_ref().expect("a server").met();
        let expected = (8 * (15 + 1), 1);
        assert_eq!(
            (refused, uploads),
            expected,
            "{kind:?}: in eight rounds fifteen lose, and one comes late"
        );
    }
}

/// Makes a test for each check and implementation, so that a failure names both.
macro_rules! contract {
    ($($check:ident),+ $(,)?) => {
        contract!(@store posix, $($check),+);
        contract!(@store memory, $($check),+);
        contract!(@store s3, $($check),+);
        contract!(@store google, $($check),+);
        contract!(@store azure, $($check),+);
    };
    (@store $subject:ident, $($check:ident),+) => {
        mod $subject {
            $(
                #[tokio::test(flavor = "multi_thread")]
                async fn $check() {
                    let subject = super::$subject().await;
                    super::$check(&*subject.store).await;
                }
            )+
        }
    };
}

contract!(
    of_sixteen_creates_of_one_key_one_wins,
    what_was_created_is_read_back_and_never_replaced,
    an_absent_object_is_none_not_an_error,
    empty_objects_are_objects,
    a_larger_object_than_expected_is_refused,
    ranges_are_exact_or_refused,
    listings_are_complete_sorted_and_fold_at_the_delimiter,
    long_and_odd_keys_come_back_as_they_were,
    keys_that_are_no_keys_are_refused,
    uploads_in_parts_keep_every_byte,
    a_source_that_fails_leaves_nothing,
    delete_is_idempotent,
    the_probe_finds_fencing_and_leaves_nothing,
    the_epoch_only_rises,
);

async fn keys(store: &dyn Store, prefix: &str) -> Vec<String> {
    store.list(prefix, false).await.expect("list").keys.into_iter().map(|head| head.key).collect()
}

async fn of_sixteen_creates_of_one_key_one_wins(store: &dyn Store) {
    for round in 0..4 {
        let key = format!("run/race-{round}/_COMMITTED");
        let body = |i| Bytes::from(format!("coordinator {i}"));
        let answers = join_all((0..16).map(|i| store.create(&key, body(i)))).await;
        let winners: Vec<usize> =
            (0..16).filter(|&i| *answers[i].as_ref().expect("create") == Created::Created).collect();
        assert_eq!(winners.len(), 1, "winners of round {round}: {winners:?}");
        assert_eq!(store.get(&key, 100).await.expect("get"), Some(body(winners[0])));
    }
}

async fn what_was_created_is_read_back_and_never_replaced(store: &dyn Store) {
    let body = Bytes::from_static(b"first");
    assert_eq!(store.create("a/b", body.clone()).await.expect("create"), Created::Created);
    assert_eq!(
        store.create("a/b", Bytes::from_static(b"other")).await.expect("create"),
        Created::AlreadyExists
    );
    assert_eq!(
        store.create("a/b", Bytes::from_static(b"longer one")).await.expect("create"),
        Created::AlreadyExists
    );
    // The same bytes again are the same decision, as a caller that lost its answer repeats it.
    assert_eq!(store.create("a/b", body.clone()).await.expect("create"), Created::Created);
    assert_eq!(store.get("a/b", 5).await.expect("get"), Some(body));
    let head = store.head("a/b").await.expect("head").expect("present");
    assert_eq!((head.key.as_str(), head.size_bytes), ("a/b", 5));
}

async fn an_absent_object_is_none_not_an_error(store: &dyn Store) {
    store.create("there/below", Bytes::new()).await.expect("create");
    for key in ["absent", "there/below/further"] {
        assert_eq!(store.get(key, 10).await.expect("get"), None, "{key}");
        assert_eq!(store.head(key).await.expect("head"), None, "{key}");
        let error = store.get_range(key, 0..1).await.expect_err(key);
        assert!(matches!(error, StoreError::NotFound { .. }), "{error}");
    }
    assert!(keys(store, "absent/").await.is_empty());
}

async fn empty_objects_are_objects(store: &dyn Store) {
    store.create("empty/marker", Bytes::new()).await.expect("create");
    store.upload("empty/data", Arc::new(Bytes::new()), &UploadLimits::default()).await.expect("upload");
    for key in ["empty/marker", "empty/data"] {
        assert_eq!(store.get(key, 0).await.expect("get"), Some(Bytes::new()), "{key}");
        assert_eq!(store.head(key).await.expect("head").expect("present").size_bytes, 0);
        assert_eq!(store.get_range(key, 0..0).await.expect("range"), Bytes::new());
    }
    assert_eq!(keys(store, "empty/").await, ["empty/data", "empty/marker"]);
}

async fn a_larger_object_than_expected_is_refused(store: &dyn Store) {
    store.create("large", Bytes::from(vec![7; 1000])).await.expect("create");
    assert!(store.get("large", 1000).await.expect("get").is_some());
    match store.get("large", 999).await {
        Err(StoreError::TooLarge { size_bytes: 1000, limit_bytes: 999, .. }) => {}
        other => panic!("{other:?}"),
    }
}

async fn ranges_are_exact_or_refused(store: &dyn Store) {
    let body: Vec<u8> = (0..=255).collect();
    store.create("bytes", Bytes::from(body.clone())).await.expect("create");
    for (start, end) in [(0_usize, 256_usize), (0, 1), (255, 256), (100, 200)] {
        let got = store.get_range("bytes", start as u64..end as u64).await.expect("range");
        assert_eq!(got, &body[start..end]);
    }
    for (start, end) in [(0, 257), (200, 300), (256, 257), (300, 301), (300, 300)] {
        let error = store.get_range("bytes", start..end).await.expect_err("outside");
        assert!(matches!(error, StoreError::Range { .. }), "{start}..{end}: {error}");
    }
}

async fn listings_are_complete_sorted_and_fold_at_the_delimiter(store: &dyn Store) {
    let all = [
        "run/.tidemark/epoch",
        "run/a",
        "run/a-b/1",
        "run/a/1",
        "run/b/1/x",
        "run/b/1/y",
        "run/b/2",
        "run/c",
        "runner/x",
        "z",
    ];
    // In a bucket, `run/a` can be an object and a folder. A directory cannot hold both, so only one is made.
    let made: Vec<&str> = all.into_iter().filter(|key| *key != "run/a/1").collect();
    for key in &made {
        store.create(key, Bytes::from_static(b"x")).await.expect("create");
    }
    assert_eq!(keys(store, "").await, made);
    assert_eq!(keys(store, "run/b").await, ["run/b/1/x", "run/b/1/y", "run/b/2"]);
    assert_eq!(keys(store, "run/b/1/x").await, ["run/b/1/x"]);
    assert_eq!(keys(store, "ru").await.len(), 9 - 1);

    let folded = store.list("run/", true).await.expect("list");
    let names: Vec<&str> = folded.keys.iter().map(|head| head.key.as_str()).collect();
    assert_eq!(names, ["run/a", "run/c"]);
    assert_eq!(folded.prefixes, ["run/.tidemark/", "run/a-b/", "run/b/"]);
    assert!(folded.keys.iter().all(|head| head.size_bytes == 1));
    let half = store.list("run/a", true).await.expect("list");
    assert_eq!(half.prefixes, ["run/a-b/"]);
    let top = store.list("", true).await.expect("list");
    assert_eq!(top.prefixes, ["run/", "runner/"]);
    assert_eq!(top.keys.len(), 1);
}

async fn long_and_odd_keys_come_back_as_they_were(store: &dyn Store) {
    let long = format!("run/{}/{}", "p".repeat(300), "ü".repeat(250));
    let odd = ["run/%41 b+c=d&e", "run/a~+", "run/a~-", "run/with space/x", "run/…é", "run/a:b@c'(d)!$,;"];
    for key in odd.iter().copied().chain([long.as_str()]) {
        store.create(key, Bytes::from(key.to_owned())).await.expect(key);
        let there = store.get(key, 2000).await.expect("get");
        assert_eq!(there.as_deref(), Some(key.as_bytes()), "{key}");
        assert_eq!(keys(store, key).await, [key], "{key}");
    }
    assert_eq!(keys(store, "run/").await.len(), odd.len() + 1);
    assert_eq!(store.list("run/", true).await.expect("list").prefixes.len(), 2);
    assert_eq!(keys(store, &long[..200]).await, [long.as_str()]);
}

async fn keys_that_are_no_keys_are_refused(store: &dyn Store) {
    let long = "x".repeat(1025);
    for key in ["", "/", "a//b", "/a", "a/", ".", "a/../b", "a/./b", "a\0b", long.as_str()] {
        let error = store.create(key, Bytes::new()).await.expect_err(key);
        assert!(matches!(error, StoreError::Key { .. }), "{key:?}: {error}");
    }
}

async fn uploads_in_parts_keep_every_byte(store: &dyn Store) {
    let mut body = vec![0_u8; 3 * 100_000 - 17];
    getrandom::fill(&mut body).expect("random");
    let body = Bytes::from(body);
    for (key, part_bytes, parts_in_flight) in
        [("parts/three", 100_000, 2), ("parts/one", 1 << 20, 8), ("parts/many", 7_000, 4)]
    {
        let limits = UploadLimits { part_bytes, parts_in_flight };
        let uploaded = store.upload(key, Arc::new(body.clone()), &limits).await.expect("upload");
        assert_eq!(uploaded.size_bytes, body.len() as u64);
        assert_eq!(store.get(key, 1 << 20).await.expect("get"), Some(body.clone()), "{key}");
        // A second try of the same bytes, as after a crash, succeeds.
        store.upload(key, Arc::new(body.clone()), &limits).await.expect("again");
    }
    assert_eq!(keys(store, "parts/").await, ["parts/many", "parts/one", "parts/three"]);
}

/// A source that gives two parts and then an error.
struct Breaks;

impl tidemark_store::PartSource for Breaks {
    fn size_bytes(&self) -> u64 {
        40
    }

    fn read_part(&self, range: std::ops::Range<u64>) -> std::io::Result<Bytes> {
        if range.start >= 20 {
            return Err(std::io::Error::other("the page is bad"));
        }
        Ok(Bytes::from(vec![1; 10]))
    }
}

async fn a_source_that_fails_leaves_nothing(store: &dyn Store) {
    let limits = UploadLimits { part_bytes: 10, parts_in_flight: 2 };
    let error = store.upload("broken", Arc::new(Breaks), &limits).await.expect_err("source");
    assert!(matches!(error, StoreError::Source { .. }), "{error}");
    assert_eq!(store.head("broken").await.expect("head"), None);
    assert!(keys(store, "").await.is_empty());
}

async fn delete_is_idempotent(store: &dyn Store) {
    store.create("d/x", Bytes::from_static(b"1")).await.expect("create");
    store.create("d/y", Bytes::from_static(b"2")).await.expect("create");
    store.delete("d/x").await.expect("delete");
    store.delete("d/x").await.expect("again");
    store.delete("never/was").await.expect("absent");
    assert_eq!(keys(store, "").await, ["d/y"]);
    // The deleted name is free again.
    assert_eq!(store.create("d/x", Bytes::from_static(b"3")).await.expect("create"), Created::Created);
}

async fn the_probe_finds_fencing_and_leaves_nothing(store: &dyn Store) {
    let found = probe(store).await.expect("probe");
    assert!(found.fencing, "{}", found.fencing_reason);
    let url = store.describe();
    let checks = ["file://", "s3://"].iter().any(|scheme| url.starts_with(scheme));
    assert_eq!(found.part_checksums, checks, "{url}: {}", found.part_checksums_reason);
    assert!(keys(store, "").await.is_empty());
}

async fn the_epoch_only_rises(store: &dyn Store) {
    assert_eq!(raise_epoch(store, Epoch(2)).await.expect("raise"), Epoch(2));
    let raced = join_all((3..11).map(|n| raise_epoch(store, Epoch(n)))).await;
    assert_eq!(raced.into_iter().map(|epoch| epoch.expect("raise")).max(), Some(Epoch(10)));
    assert_eq!(raise_epoch(store, Epoch(5)).await.expect("older"), Epoch(10));
}
