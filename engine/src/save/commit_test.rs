//! The commit protocol against a store that loses answers.
//!
//! Goal: whichever answer is lost, a version is committed as a whole or not at all, and a second coordinator never
//! makes a second decision. Method: real documents, an in-memory store, faults as data.

use crate::metrics::Metrics;
use crate::restore::locate;
use crate::save::again::{AgainError, check_wanted, write_marker_again};
use crate::save::commit::{Attempt, CommitError, abort, decide, read_marker, resume_retirement, retire};
use crate::save::drain::Drain;
use bytes::Bytes;
use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::error::{ErrorKind, error_text};
use tidemark_protocol::format::{Document, FORMAT};
use tidemark_protocol::id::{
    AttemptId, ContentHash, Epoch, FileCounter, FileId, Generation, Incarnation, SealNumber, Step, Timeline,
    Version,
};
use tidemark_protocol::key::{Key, NodeLife, Part, VersionId};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::manifest::{Attributes, Manifest, ManifestFile, Prepared};
use tidemark_protocol::marker::Retired;
use tidemark_protocol::path::{CheckpointName, RelPath, RunPath};
use tidemark_protocol::record::{Evidence, Record, RecordFile};
use tidemark_protocol::retention::{Committed, Keep, Metric, Policy, Retirement, Standing, retain};
use tidemark_store::{
    Effect, Fault, FaultyStore, MemoryStore, Operation, Probe, Store, UploadLimits, raise_epoch,
};

fn life() -> NodeLife {
    NodeLife { node: "n1".parse().unwrap(), incarnation: Incarnation(7) }
}

fn version() -> VersionId {
    VersionId {
        run: RunPath::new(RelPath::new("r").unwrap()).unwrap(),
        directory: CheckpointName::new("step1.pt").unwrap(),
        timeline: Timeline(0),
        version: Version(1),
    }
}

fn record(attempt: u64) -> Record {
    let entry = RecordFile {
        path: RelPath::new("r/step1.pt").unwrap(),
        file: FileId { incarnation: Incarnation(7), counter: FileCounter(1) },
        seal: SealNumber(1),
        size_bytes: 0,
        crc64nvme: Crc64(tidemark_kernels::crc64(&[])),
    };
    Record {
        format: FORMAT,
        version: version(),
        attempt: AttemptId(attempt),
        step: Some(Step(1)),
        framework: "torch_save".into(),
        evidence: Evidence::Told,
        evidence_detail: "a test".into(),
        epoch: Epoch(1),
        completed_at_ns: 1,
        participants: vec![life()],
        files: vec![entry],
        partial: false,
        doubted: false,
    }
}

fn prepared(record: &Record) -> Prepared {
    let entry = &record.files[0];
    let file = ManifestFile {
        path: entry.path.clone(),
        key: Key::data(&record.version, Part::from(record.attempt), &entry.path).unwrap().to_string(),
        size_bytes: entry.size_bytes,
        crc64nvme: entry.crc64nvme,
        chunks: Vec::new(),
        encoding: None,
        etag: None,
        file: entry.file,
        seal: entry.seal,
        attributes: Attributes::default(),
    };
    Prepared {
        format: FORMAT,
        version: record.version.clone(),
        attempt: record.attempt,
        epoch: record.epoch,
        life: life(),
        by: None,
        chunk_bytes: CHUNK_BYTES,
        files: vec![file],
        directories: Vec::new(),
        symlinks: Vec::new(),
        hard_links: Vec::new(),
    }
}

fn drain(store: Arc<dyn Store>, epoch: u64) -> Arc<Drain> {
    let probe = Probe {
        fencing: true,
        fencing_reason: String::new(),
        part_checksums: true,
        part_checksums_reason: String::new(),
    };
    let limits = UploadLimits::default();
    Arc::new(Drain::new(store, life(), Epoch(epoch), limits, &probe, Arc::new(Metrics::new())))
}

async fn commit(drain: &Arc<Drain>, attempt: u64) -> Result<(), CommitError> {
    let record = record(attempt);
    decide(drain, &record, &[prepared(&record)], None).await.map(|_| ())
}

async fn committed(store: &Arc<dyn Store>) -> usize {
    locate::read(store).await.unwrap().committed.len()
}

#[tokio::test]
async fn a_lost_answer_to_the_marker_is_resolved_by_reading_it() {
    for effect in [Effect::FailBefore, Effect::FailAfter] {
        let inner: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let fault =
            Fault { operation: Operation::Create, key_contains: "_COMMITTED".into(), nth: Some(1), effect };
        let faulty = Arc::new(FaultyStore::new(Arc::clone(&inner), vec![fault]));
        let store = Arc::clone(&faulty) as Arc<dyn Store>;
        let drain = drain(store, 1);
        let first = commit(&drain, 5).await;
        assert_eq!(faulty.fired(0), 1, "the fault happened");
        assert_eq!(first.is_ok(), effect == Effect::FailAfter, "nothing happened, or it was found to have");
        commit(&drain, 5).await.unwrap();
        assert_eq!(committed(&inner).await, 1);
    }
}

#[tokio::test]
async fn a_second_decision_about_a_version_is_lost_and_changes_nothing() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let (first, second) = (drain(Arc::clone(&store), 1), drain(Arc::clone(&store), 1));
    commit(&first, 5).await.unwrap();
    commit(&first, 5).await.unwrap();
    assert!(matches!(commit(&second, 6).await, Err(CommitError::Lost { .. })));
    assert!(matches!(abort(&second, &record(6)).await, Err(CommitError::Lost { .. })));
    assert_eq!(committed(&store).await, 1);
}

/// Returns the page with which a proxy that wants a password answers every request.
fn page() -> Bytes {
    Bytes::from_static(b"<html>login</html>")
}

#[tokio::test]
async fn what_is_no_document_decides_nothing_and_is_asked_again() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let drain = drain(Arc::clone(&store), 1);
    let is_asked_again = |error: &CommitError| {
        assert!(error.is_no_document() && error.kind() == ErrorKind::Unavailable, "{error:?}");
        assert!(error_text(error).contains("<html>login"), "{}", error_text(error));
    };
    let key = Key::Record { version: version(), attempt: AttemptId(5) }.to_string();
    store.create(&key, page()).await.unwrap();
    let mut attempt = Attempt::new(record(5), Vec::new(), None);
    is_asked_again(&attempt.prepare(&drain).await.unwrap_err());
    store.delete(&key).await.unwrap();
    attempt.prepare(&drain).await.unwrap();

    let key = Key::Committed { version: version() }.to_string();
    store.create(&key, page()).await.unwrap();
    is_asked_again(&commit(&drain, 5).await.unwrap_err());
    store.delete(&key).await.unwrap();
    commit(&drain, 5).await.unwrap();
    assert_eq!(committed(&store).await, 1);
}

#[tokio::test]
async fn another_document_in_the_place_of_ours_is_found_at_once() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let drain = drain(Arc::clone(&store), 1);
    let key = Key::Record { version: version(), attempt: AttemptId(5) }.to_string();
    let theirs = Record { evidence_detail: "of another".into(), ..record(5) };
    store.create(&key, theirs.encode().unwrap().into()).await.unwrap();
    let taken = Attempt::new(record(5), Vec::new(), None).prepare(&drain).await.unwrap_err();
    assert!(matches!(taken, CommitError::Taken { .. }) && !taken.is_no_document(), "{taken:?}");
}

#[tokio::test]
async fn nothing_is_deleted_where_no_document_says_that_the_version_is_retired() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let drain = drain(Arc::clone(&store), 1);
    commit(&drain, 5).await.unwrap();
    let catalog = locate::read(&store).await.unwrap();
    let found = &catalog.committed[0];
    let data = found.manifest.files[0].key.clone();
    store.create(&data, Bytes::new()).await.unwrap();
    let key = Key::Retired { version: version() }.to_string();
    store.create(&key, page()).await.unwrap();
    let refused = retire(&drain, &found.manifest, &leave(&found.manifest), 9).await.unwrap_err();
    assert!(refused.is_no_document(), "{refused:?}");
    assert!(store.head(&data).await.unwrap().is_some(), "its data stays");
    store.delete(&key).await.unwrap();
    retire(&drain, &found.manifest, &leave(&found.manifest), 10).await.unwrap();
    assert!(store.head(&data).await.unwrap().is_none());
}

/// Makes a retirement of the version, with the hash of that manifest.
fn retirement(manifest: &Manifest) -> Retired {
    Retired {
        format: FORMAT,
        version: manifest.version.clone(),
        attempt: manifest.attempt,
        manifest_hash: manifest.encode_named().unwrap().1,
        epoch: Epoch(1),
        reason: "a test".into(),
        retired_at_ns: 1,
    }
}

/// Starts a daemon on the store; returns what it reads, and the sweep that would follow.
#[tokio::test]
async fn a_start_believes_no_retirement_that_is_no_document_of_the_version() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let drain = drain(Arc::clone(&store), 1);
    commit(&drain, 5).await.unwrap();
    let manifest = locate::read(&store).await.unwrap().committed.remove(0).manifest;
    let data = manifest.files[0].key.clone();
    store.create(&data, Bytes::new()).await.unwrap();
    let key = Key::Retired { version: version() }.to_string();
    let ours = retirement(&manifest);
    let elsewhere = VersionId { version: Version(9), ..version() };
    let of_another = Retired { version: elsewhere, ..ours.clone() }.encode().unwrap();
    for body in [page(), Bytes::new(), Bytes::from_static(b"{}"), of_another.into()] {
        store.create(&key, body.clone()).await.unwrap();
        let catalog = locate::read(&store).await.unwrap();
        assert_eq!((catalog.committed.len(), catalog.retired.len()), (1, 0), "{body:?}");
        let passed: Vec<_> = catalog.passed_over.iter().map(|passed| passed.key.as_str()).collect();
        assert_eq!(passed, [key.as_str()], "it is said");
        let one = locate::read_version(&store, &version()).await.unwrap();
        assert_eq!((one.committed.len(), one.retired.len(), one.passed_over.len()), (1, 0, 1), "{body:?}");
        let resumed = resume_retirement(&drain, &version()).await.unwrap_err();
        assert!(matches!(resumed, CommitError::NotRetired { .. }), "{resumed:?}");
        let retired = retire(&drain, &manifest, &leave(&manifest), 9).await.unwrap_err();
        assert!(matches!(retired, CommitError::NotRetired { .. }), "{retired:?}");
        assert!(store.head(&data).await.unwrap().is_some(), "its data stays");
        store.delete(&key).await.unwrap();
    }
    // A document of this version that retires another manifest: only the marker can tell.
    let of_other = Retired { manifest_hash: ContentHash([7; 32]), ..ours.clone() }.encode().unwrap();
    store.create(&key, of_other.into()).await.unwrap();
    let resumed = resume_retirement(&drain, &version()).await.unwrap_err();
    assert!(matches!(resumed, CommitError::NotRetired { .. }), "{resumed:?}");
    assert!(store.head(&data).await.unwrap().is_some(), "its data stays");
    store.delete(&key).await.unwrap();

    store.create(&key, ours.encode().unwrap().into()).await.unwrap();
    let catalog = locate::read(&store).await.unwrap();
    assert_eq!((catalog.committed.len(), catalog.retired.len(), catalog.passed_over.len()), (0, 1, 0));
    resume_retirement(&drain, &version()).await.unwrap();
    assert!(store.head(&data).await.unwrap().is_none());
}

/// The marker is gone as well, so nothing shows that the version was never committed.
#[tokio::test]
async fn a_version_without_marker_is_not_decided_anew_where_something_stands_for_its_retirement() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let drain = drain(Arc::clone(&store), 1);
    let mut attempt = Attempt::new(record(5), Vec::new(), None);
    attempt.prepare(&drain).await.unwrap();
    assert_eq!(locate::read(&store).await.unwrap().undecided.len(), 1);
    store.create(&Key::Retired { version: version() }.to_string(), page()).await.unwrap();
    let catalog = locate::read(&store).await.unwrap();
    assert_eq!((catalog.undecided.len(), catalog.retired.len(), catalog.aborted.len()), (0, 0, 0));
    assert_eq!((catalog.unreadable.len(), catalog.passed_over.len()), (1, 1));
    assert!(catalog.unreadable[0].record.is_some(), "which files it had");
}

#[tokio::test]
async fn an_aborted_version_is_never_committed() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let drain = drain(Arc::clone(&store), 1);
    abort(&drain, &record(5)).await.unwrap();
    assert!(matches!(commit(&drain, 5).await, Err(CommitError::Lost { .. })));
    let catalog = locate::read(&store).await.unwrap();
    assert_eq!((catalog.committed.len(), catalog.aborted.len()), (0, 1));
}

/// Returns leave to retire a version: two newer ones are committed, and only the last is to be kept.
fn leave(manifest: &Manifest) -> Retirement {
    let at = |completed_at_ns| Committed {
        version: manifest.version.clone(),
        step: manifest.step,
        completed_at_ns,
        verified: true,
        pinned: false,
        held: false,
        standing: Standing::Shown,
        wished: false,
        metric: Metric::Unsaid,
    };
    let policy = Policy { keep_last: Some(1), ..Policy::default() };
    match retain(&policy, &[at(1), at(2), at(3)], 4).swap_remove(0) {
        Keep::Retired(leave) => leave,
        Keep::Kept { reason } => panic!("{reason}"),
    }
}

#[tokio::test]
async fn a_stale_coordinator_neither_commits_nor_aborts_nor_retires() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let old = drain(Arc::clone(&store), 1);
    raise_epoch(store.as_ref(), Epoch(1)).await.unwrap();
    raise_epoch(store.as_ref(), Epoch(2)).await.unwrap();
    assert!(matches!(commit(&old, 5).await, Err(CommitError::Fenced { .. })));
    assert!(matches!(abort(&old, &record(5)).await, Err(CommitError::Fenced { .. })));
    let new = drain(Arc::clone(&store), 2);
    commit(&new, 6).await.unwrap();
    let catalog = locate::read(&store).await.unwrap();
    let found = &catalog.committed[0];
    let refused = retire(&old, &found.manifest, &leave(&found.manifest), 9).await;
    assert!(matches!(refused, Err(CommitError::Fenced { .. })));
    assert_eq!(committed(&store).await, 1);
}

#[tokio::test]
async fn a_retired_version_is_passed_over_before_anything_of_it_is_deleted() {
    let inner: Arc<dyn Store> = Arc::new(MemoryStore::new());
    commit(&drain(Arc::clone(&inner), 1), 5).await.unwrap();
    let catalog = locate::read(&inner).await.unwrap();
    let found = &catalog.committed[0];
    let data = found.manifest.files[0].key.clone();
    inner.create(&data, Bytes::new()).await.unwrap();
    // The first delete fails: the retirement stands, and doing it again finishes it.
    let fault = Fault {
        operation: Operation::Delete,
        key_contains: "step1.pt".into(),
        nth: Some(1),
        effect: Effect::FailBefore,
    };
    let faulty = Arc::new(FaultyStore::new(Arc::clone(&inner), vec![fault]));
    let drain = drain(Arc::clone(&faulty) as Arc<dyn Store>, 1);
    assert!(retire(&drain, &found.manifest, &leave(&found.manifest), 9).await.is_err());
    assert_eq!(faulty.fired(0), 1, "the fault happened");
    let between = locate::read(&inner).await.unwrap();
    assert_eq!((between.committed.len(), between.retired.len()), (0, 1));
    assert!(inner.head(&data).await.unwrap().is_some(), "its data outlives the retirement");
    retire(&drain, &found.manifest, &leave(&found.manifest), 10).await.unwrap();
    assert!(inner.head(&data).await.unwrap().is_none());
    let left = inner.list(&format!("{}/", found.manifest.version), false).await.unwrap();
    let left: Vec<_> = left.keys.iter().map(|head| head.key.rsplit('/').next().unwrap()).collect();
    assert_eq!(left, ["_COMMITTED", "_RETIRED"], "its number stays used");
    let boundary = inner.list(".tidemark/boundary-r/", true).await.unwrap();
    assert!(!boundary.keys.is_empty(), "the boundary names it");
}

#[tokio::test]
async fn an_object_is_written_again_only_while_what_it_belongs_to_stands() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let drain = drain(Arc::clone(&store), 1);
    let data = |version: &VersionId| {
        Key::data(version, Part::from(AttemptId(5)), &RelPath::new("r/step1.pt").unwrap())
            .unwrap()
            .to_string()
    };
    let given_up = |result| matches!(result, Err(AgainError::GivenUp { .. }));
    commit(&drain, 5).await.unwrap();
    check_wanted(&drain, &data(&version())).await.unwrap();
    let marker = read_marker(&drain, &version()).await.unwrap().unwrap();
    let key = Key::Committed { version: version() }.to_string();
    let decided = write_marker_again(&drain, &marker).await;
    assert!(matches!(decided, Err(AgainError::Decided { .. })), "{decided:?}");
    for damaged in [None, Some(Bytes::new())] {
        store.delete(&key).await.unwrap();
        if let Some(damaged) = damaged {
            store.create(&key, damaged).await.unwrap();
        }
        write_marker_again(&drain, &marker).await.unwrap();
        assert_eq!(read_marker(&drain, &version()).await.unwrap().as_ref(), Some(&marker));
    }
    store.create(&Key::Retired { version: version() }.to_string(), Bytes::new()).await.unwrap();
    assert!(given_up(check_wanted(&drain, &data(&version())).await), "retired");
    store.delete(&key).await.unwrap();
    assert!(given_up(write_marker_again(&drain, &marker).await), "retired");
    let aborted = VersionId { version: Version(2), ..version() };
    abort(&drain, &Record { version: aborted.clone(), ..record(5) }).await.unwrap();
    assert!(given_up(check_wanted(&drain, &data(&aborted)).await), "decided against");

    let (loose, sidecar) = Key::loose(&RelPath::new("r/log").unwrap(), Generation(3));
    let nameless = check_wanted(&drain, &loose.to_string()).await;
    assert!(matches!(nameless, Err(AgainError::NoSidecar { .. })), "{nameless:?}");
    store.create(&sidecar.to_string(), Bytes::new()).await.unwrap();
    check_wanted(&drain, &loose.to_string()).await.unwrap();

    let foreign = check_wanted(&drain, "others/model.bin").await;
    assert!(matches!(foreign, Err(AgainError::Foreign { .. })), "{foreign:?}");
    let next = VersionId { version: Version(3), ..version() };
    check_wanted(&drain, &data(&next)).await.unwrap();
    raise_epoch(store.as_ref(), Epoch(2)).await.unwrap();
    let fenced = check_wanted(&drain, &data(&next)).await;
    assert!(matches!(fenced, Err(AgainError::Unknown { .. })), "{fenced:?}");
}

#[tokio::test]
async fn a_manifest_that_is_damaged_is_passed_over_and_said() {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let drain = drain(Arc::clone(&store), 1);
    commit(&drain, 5).await.unwrap();
    let manifest = {
        let catalog = locate::read(&store).await.unwrap();
        catalog.committed[0].marker.manifest.clone().unwrap()
    };
    let mut bytes = store.get(&manifest, 1 << 20).await.unwrap().unwrap().to_vec();
    bytes[40] ^= 1;
    store.delete(&manifest).await.unwrap();
    store.create(&manifest, bytes.into()).await.unwrap();
    let catalog = locate::read(&store).await.unwrap();
    assert!(catalog.committed.is_empty());
    assert_eq!(catalog.passed_over.len(), 1);
    assert_eq!(catalog.passed_over[0].key, manifest);
}

#[test]
fn the_documents_of_this_test_are_valid() {
    record(5).encode().unwrap();
    prepared(&record(5)).encode().unwrap();
}
