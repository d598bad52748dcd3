//! Encoded chunks in a bucket: read back if the store checks nothing, never prepared when damaged, found by a later start.
//!
//! Owns: saves of runs with a codec, on the server with scripted faults. Does not own: the codecs, whole daemons (suite
//! durability).

use super::save::{self, Content, Sealer};
use super::{fault, settings, start};
use std::sync::Arc;
use tidemark_engine::flight::Flight;
use tidemark_engine::metrics::Metrics;
use tidemark_engine::restore::fetch::{FetchPlan, fetch};
use tidemark_engine::restore::locate;
use tidemark_engine::save::commit::{self, CommitError};
use tidemark_engine::save::drain::Drain;
use tidemark_engine::save::upload::UploadError;
use tidemark_engine::settings::{CodecChoice, CompressionSettings};
use tidemark_protocol::encoding::{Codec, ObjectLayout};
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::manifest::ManifestFile;
use tidemark_store::{Store, open_with};
use tidemark_tests::s3::{FaultEffect, S3Operation, S3Options, S3Server};

const ROOM_BYTES: u64 = 64 << 20;
const FETCHES: usize = 2;

/// Returns a drain as [`save::drain`] does, for a store that checks no parts. Encodes all runs.
fn drain(store: &Arc<dyn Store>, codec: CodecChoice) -> Arc<Drain> {
    let plain = Arc::into_inner(save::drain(Arc::clone(store), false)).expect("nobody else has it");
    Arc::new(plain.with_compression(CompressionSettings { codec, ..CompressionSettings::default() }))
}

/// Fetches a file and returns its decoded bytes.
async fn fetched(store: &Arc<dyn Store>, file: &ManifestFile) -> Vec<u8> {
    let folder = save::folder();
    let backing = save::tier1(&folder, ROOM_BYTES).create(Some(file.size_bytes)).expect("room");
    let plan = FetchPlan {
        path: file.path.to_string(),
        key: file.key.clone(),
        size_bytes: file.size_bytes,
        chunks: file.chunks.clone().into(),
        layout: ObjectLayout::new(file.size_bytes, file.encoding.as_ref()),
    };
    let metrics = Arc::new(Metrics::new());
    fetch(Arc::clone(store), plan, Arc::clone(&backing), Flight::new(FETCHES), metrics)
        .await
        .expect("fetched");
    backing.map().expect("mapped").to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_prepared_encoded_is_committed_by_a_later_start_and_comes_back() {
    for (choice, codec) in [(CodecChoice::Zstd, Codec::Zstd), (CodecChoice::Planes, Codec::Planes)] {
        let (server, store) = start(S3Options { checks_checksums: false, ..S3Options::default() }).await;
        let sealer = Sealer::new();
        let mut attempt = sealer.attempt(Content::Whole, 1, 1);
        attempt.prepare(&drain(&store, choice)).await.expect("prepared");
        // The engine dies here. A start whose settings name no codec goes on.
        let found = locate::read(&store).await.expect("located").undecided.pop().expect("undecided");
        assert!(locate::is_prepared(&found), "{:?}", found.prepared);
        let next = drain(&store, CodecChoice::None);
        commit::decide(&next, &found.record, &found.prepared, None).await.expect("committed");
        let catalog = locate::read(&store).await.expect("located");
        assert!(catalog.passed_over.is_empty(), "{:?}", catalog.passed_over);
        let manifest = &catalog.committed[0].manifest;
        for file in &manifest.files {
            let large = file.path.to_string().ends_with(save::LARGE);
            assert_eq!(file.encoding.as_ref().map(|encoding| encoding.codec), large.then_some(codec));
            let head = store.head(&file.key).await.expect("asked").expect("there");
            assert_eq!(
                head.size_bytes < file.size_bytes,
                large,
                "{} bytes of {}",
                head.size_bytes,
                file.path
            );
            assert!(fetched(&store, file).await == sealer.files(Content::Whole)[&file.path.to_string()]);
        }
        drop(server);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_encoded_object_that_was_damaged_on_its_way_in_is_not_prepared() {
    let server =
        S3Server::start(S3Options { checks_checksums: false, ..S3Options::default() }).expect("server");
    let mut settings = settings(&server);
    // The payload is unsigned, because a signature over the body would reveal the damage first.
    settings.variables.get_or_insert_default().push(("AWS_UNSIGNED_PAYLOAD".into(), "true".into()));
    let store = open_with(&server.url("p"), &settings).await.expect("open");
    let damaged = fault(S3Operation::PutObject, Some(1), FaultEffect::DamagedOnWrite);
    let number =
        server.faults.add(tidemark_tests::s3::Fault { key_contains: save::LARGE.to_owned(), ..damaged });
    let sealer = Sealer::new();
    let mut attempt = sealer.attempt(Content::Whole, 1, 1);
    let drain = drain(&store, CodecChoice::Zstd);
    let error = attempt.prepare(&drain).await.expect_err("the store has other bytes");
    assert!(
        matches!(
            error,
            CommitError::Upload(UploadError::ReadBackEncoded { .. } | UploadError::ReadBack { .. })
        ),
        "{error:?}"
    );
    assert_eq!(error.kind(), ErrorKind::Unavailable, "it is tried again");
    assert_eq!(server.faults.fired(number), 1);
    attempt.prepare(&drain).await.expect("the second try arrives whole");
    attempt.commit(&drain).await.expect("committed");
}
