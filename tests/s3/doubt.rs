//! Faults that hide the result of a request.
//!
//! Owns: marker creates, multipart uploads and reads under every effect, met once and met always.

use super::{fault, start};
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_protocol::error::ErrorKind;
use tidemark_store::{Created, Store, StoreError, UploadLimits, probe};
use tidemark_tests::s3::{FaultEffect, S3Operation, S3Options};

const ON_WRITES: [FaultEffect; 7] = [
    FaultEffect::TimeoutBefore,
    FaultEffect::TimeoutAfter,
    FaultEffect::Status500Before,
    FaultEffect::Status500After,
    FaultEffect::PreconditionFailedAfterSuccess,
    FaultEffect::Conflict409,
    FaultEffect::DropConnection,
];

const ON_READS: [FaultEffect; 6] = [
    FaultEffect::TimeoutBefore,
    FaultEffect::Status500Before,
    FaultEffect::WrongChecksumOnRead,
    FaultEffect::SlowBody,
    FaultEffect::DropConnection,
    FaultEffect::Conflict409,
];

const KEY: &str = "run/step/v0.1/_COMMITTED";

/// Limit of a test: six requests of 0.7 s each and more, times two for a loaded machine. Far below any default.
const BOUND: Duration = Duration::from_secs(12);

fn mine() -> Bytes {
    Bytes::from_static(b"{\"decision\":\"commit\",\"by\":\"me\"}")
}

/// A request is repeated for a long time before its caller gets a failure, so silence is reported earlier.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_gives_no_answer_is_told_before_the_last_attempt_and_until_it_gives_one() {
    let (server, store) = start(S3Options::default()).await;
    server.faults.add(fault(S3Operation::HeadObject, None, FaultEffect::TimeoutBefore));
    assert_eq!(store.silence(), None);
    let asking = Arc::clone(&store);
    let asked = tokio::spawn(async move { asking.head(KEY).await });
    let silence = loop {
        if let Some(silence) = store.silence() {
            break silence;
        }
        assert!(!asked.is_finished(), "it failed, and nothing said before that there is no answer");
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    assert!(!asked.is_finished(), "it is tried again");
    assert!(silence.why.contains("no answer within"), "{silence:?}");
    asked.await.expect("it does not panic").expect_err("no attempt was answered");
    assert!(store.get(KEY, 1024).await.expect("reads are answered").is_none());
    assert_eq!(store.silence(), None);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_doubtful_answer_to_a_marker_is_resolved_by_reading() {
    for effect in ON_WRITES {
        let (server, store) = start(S3Options::default()).await;
        let number = server.faults.add(fault(S3Operation::PutObject, Some(1), effect));
        let begun = Instant::now();
        let created = store.create(KEY, mine()).await.unwrap_or_else(|error| panic!("{effect:?}: {error}"));
        assert_eq!(created, Created::Created, "{effect:?}: our own success must not be taken for a rival's");
        assert_eq!(server.faults.fired(number), 1, "{effect:?}");
        assert!(begun.elapsed() < BOUND, "{effect:?} took {:?}", begun.elapsed());
        assert_eq!(store.get(KEY, 1000).await.expect("get"), Some(mine()), "{effect:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_doubtful_answer_never_hides_that_another_decided_first() {
    for effect in ON_WRITES {
        let (server, store) = start(S3Options::default()).await;
        store.create(KEY, Bytes::from_static(b"abort")).await.expect("rival");
        let number = server.faults.add(fault(S3Operation::PutObject, Some(1), effect));
        let created = store.create(KEY, mine()).await.unwrap_or_else(|error| panic!("{effect:?}: {error}"));
        assert_eq!(created, Created::AlreadyExists, "{effect:?}");
        assert_eq!(server.faults.fired(number), 1, "{effect:?}");
        assert_eq!(store.get(KEY, 1000).await.expect("get").as_deref(), Some(&b"abort"[..]), "{effect:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn doubt_that_reading_cannot_resolve_reaches_the_caller_in_bounded_time() {
    for effect in [FaultEffect::TimeoutAfter, FaultEffect::Status500After, FaultEffect::DropConnection] {
        let (server, store) = start(S3Options::default()).await;
        server.faults.add(fault(S3Operation::PutObject, None, effect));
        server.faults.add(fault(S3Operation::GetObject, None, FaultEffect::Status500Before));
        let begun = Instant::now();
        let error = store.create(KEY, mine()).await.expect_err("nobody can know");
        assert!(matches!(error, StoreError::Doubtful { .. }), "{effect:?}: {error}");
        assert!(begun.elapsed() < BOUND, "{effect:?} took {:?}", begun.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_marker_that_was_never_written_is_never_reported_as_written() {
    for effect in [FaultEffect::TimeoutBefore, FaultEffect::Status500Before, FaultEffect::Conflict409] {
        let (server, store) = start(S3Options::default()).await;
        let number = server.faults.add(fault(S3Operation::PutObject, None, effect));
        let error = store.create(KEY, mine()).await.expect_err("never written");
        assert!(matches!(error, StoreError::Doubtful { .. }), "{effect:?}: {error}");
        assert_eq!(server.faults.fired(number), 3, "{effect:?}: every attempt met it");
        assert_eq!(store.head(KEY).await.expect("head"), None, "{effect:?}");
    }
}

async fn upload(store: &Arc<dyn Store>) -> (Bytes, Result<(), StoreError>) {
    let body: Bytes = (0..=250_u8).cycle().take(25_000).collect();
    let limits = UploadLimits { part_bytes: 10_000, parts_in_flight: 2 };
    let result = store.upload("run/data", Arc::new(body.clone()), &limits).await;
    (body, result.map(|_| ()))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_survives_one_fault_in_any_of_its_requests() {
    let requests =
        [S3Operation::CreateMultipartUpload, S3Operation::UploadPart, S3Operation::CompleteMultipartUpload];
    for operation in requests {
        for effect in ON_WRITES {
            if effect == FaultEffect::PreconditionFailedAfterSuccess
                && operation != S3Operation::CompleteMultipartUpload
            {
                // No store answers 412 to a request without a condition.
                continue;
            }
            let (server, store) = start(S3Options::default()).await;
            let number = server.faults.add(fault(operation, Some(1), effect));
            let (body, result) = upload(&store).await;
            result.unwrap_or_else(|error| panic!("{operation:?} {effect:?}: {error}"));
            assert_eq!(server.faults.fired(number), 1, "{operation:?} {effect:?}");
            let there = store.get("run/data", 1 << 20).await.expect("get");
            assert_eq!(there, Some(body), "{operation:?} {effect:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_upload_is_aborted_and_nothing_of_it_is_visible() {
    for operation in [S3Operation::UploadPart, S3Operation::CompleteMultipartUpload] {
        let (server, store) = start(S3Options::default()).await;
        let number = server.faults.add(fault(operation, None, FaultEffect::Status500Before));
        let begun = Instant::now();
        let error = upload(&store).await.1.expect_err("the store is failing");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{operation:?}: {error}");
        assert!(begun.elapsed() < BOUND);
        assert!(server.faults.fired(number) >= 3, "{operation:?}");
        assert_eq!(server.unfinished_uploads(), 0, "{operation:?}");
        assert_eq!(store.head("run/data").await.expect("head"), None, "{operation:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_that_is_given_up_is_aborted() {
    let (server, store) = start(S3Options::default()).await;
    let number = server.faults.add(fault(S3Operation::UploadPart, Some(2), FaultEffect::TimeoutBefore));
    tokio::time::timeout(Duration::from_millis(300), upload(&store)).await.expect_err("held by the fault");
    assert_eq!(server.faults.fired(number), 1);
    let begun = Instant::now();
    while server.unfinished_uploads() > 0 {
        assert!(begun.elapsed() < BOUND, "the upload stays");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(server.faults.requests(S3Operation::AbortMultipartUpload), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_survives_one_fault_and_never_returns_damaged_bytes() {
    for effect in ON_READS {
        let (server, store) = start(S3Options::default()).await;
        store.create(KEY, mine()).await.expect("create");
        let number = server.faults.add(fault(S3Operation::GetObject, Some(1), effect));
        let there = store.get(KEY, 1000).await.unwrap_or_else(|error| panic!("{effect:?}: {error}"));
        assert_eq!(there, Some(mine()), "{effect:?}");
        assert_eq!(server.faults.fired(number), 1, "{effect:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_that_fails_every_time_is_an_error_in_bounded_time_and_never_absent() {
    for effect in ON_READS {
        let (server, store) = start(S3Options::default()).await;
        store.create(KEY, mine()).await.expect("create");
        let number = server.faults.add(fault(S3Operation::GetObject, None, effect));
        let begun = Instant::now();
        let error = store.get(KEY, 1000).await.expect_err("every read fails");
        let expected = match effect {
            FaultEffect::WrongChecksumOnRead => ErrorKind::Corrupt,
            _ => ErrorKind::Unavailable,
        };
        assert_eq!(error.kind(), expected, "{effect:?}: {error}");
        assert_eq!(server.faults.fired(number), 3, "{effect:?}");
        assert!(begun.elapsed() < BOUND, "{effect:?} took {:?}", begun.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_range_that_comes_slowly_is_bounded_and_asked_for_again() {
    let (server, store) = start(S3Options::default()).await;
    store.create("data", Bytes::from(vec![3; 5000])).await.expect("create");
    let number = server.faults.add(fault(S3Operation::GetObject, Some(1), FaultEffect::SlowBody));
    assert_eq!(store.get_range("data", 1000..3000).await.expect("range"), vec![3; 2000]);
    assert_eq!(server.faults.fired(number), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn listing_and_deleting_survive_one_fault() {
    let (server, store) = start(S3Options { page_keys: 2, ..S3Options::default() }).await;
    for i in 0..5 {
        store.create(&format!("l/{i}"), Bytes::new()).await.expect("create");
    }
    let list = server.faults.add(fault(S3Operation::ListObjects, Some(2), FaultEffect::Status500Before));
    assert_eq!(store.list("l/", false).await.expect("list").keys.len(), 5);
    let delete = server.faults.add(fault(S3Operation::DeleteObject, Some(1), FaultEffect::DropConnection));
    store.delete("l/0").await.expect("delete");
    assert_eq!((server.faults.fired(list), server.faults.fired(delete)), (1, 1));
    assert_eq!(store.list("l/", false).await.expect("list").keys.len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_survives_one_fault_in_any_of_its_requests() {
    let requests = [
        (S3Operation::PutObject, 1),
        (S3Operation::GetObject, 1),
        (S3Operation::ListObjects, 1),
        (S3Operation::CreateMultipartUpload, 1),
        (S3Operation::UploadPart, 1),
        (S3Operation::UploadPart, 2),
        (S3Operation::AbortMultipartUpload, 1),
        (S3Operation::DeleteObject, 1),
    ];
    for (operation, nth) in requests {
        for effect in [FaultEffect::Status500After, FaultEffect::DropConnection] {
            let (server, store) = start(S3Options::default()).await;
            let number = server.faults.add(fault(operation, Some(nth), effect));
            let found =
                probe(&*store).await.unwrap_or_else(|error| panic!("{operation:?} {effect:?}: {error}"));
            assert_eq!(server.faults.fired(number), 1, "{operation:?} {effect:?}");
            assert!(found.fencing && found.part_checksums, "{operation:?} {effect:?}: {found:?}");
            assert!(store.list("", false).await.expect("list").keys.is_empty(), "{operation:?} {effect:?}");
        }
    }
}

/// Each part was checked on arrival, but the object is short, which no checksum of a part reveals.
#[tokio::test(flavor = "multi_thread")]
async fn an_upload_of_which_the_store_lost_a_part_is_not_taken_for_one() {
    let (_server, store) = start(S3Options { loses_parts: true, ..S3Options::default() }).await;
    let limits = UploadLimits { part_bytes: 5 << 20, parts_in_flight: 2 };
    let body = Bytes::from(vec![7_u8; (11 << 20) + 3]);
    let error = store.upload("run/step/data", Arc::new(body), &limits).await.expect_err("a part is lost");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "sending it again is what helps: {error}");
    let text = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(text.contains("11534339 bytes") && text.contains("10485760 bytes"), "both sizes: {text}");
}
