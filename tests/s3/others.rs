//! Independent servers: the probe's result for them, and whether a save is whole there.
//!
//! Owns: moto, which takes parts that differ from their checksum; `s3s-fs`, whose concurrent creates have several winners.
//! Does not own: scripted faults.

use super::save::{self, Content, PREFIX, Sealer, fresh};
use super::{S3Options, settings_of};
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_engine::restore::locate;
use tidemark_engine::save::commit::CommitError;
use tidemark_engine::save::upload::UploadError;
use tidemark_protocol::error::ErrorKind;
use tidemark_store::{Effect, Fault, FaultyStore, Operation, Probe, Store, UploadLimits, open_with, probe};
use tidemark_tests::moto::Moto;
use tidemark_tests::s3::{Faults, Served, env};
use tidemark_tests::{audit, machine};

/// Limit of a request. Python needs long for 8 MiB, and longer beside other work.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Limit of an object that is read. Documents are smaller.
const OBJECT_BYTES_MAX: u64 = 16 << 20;
/// How long a read-back is held, which is enough time to replace the object that it reads.
const HELD: Duration = Duration::from_secs(3);
/// Number of probes of a store whose checks are two steps. The long form measures a rate.
const PROBES: usize = 5;
const PROBES_LONG: usize = 200;

async fn client(moto: &Moto) -> Arc<dyn Store> {
    fresh(&moto.url(PREFIX), moto.env(), TIMEOUT).await
}

/// Returns every object, read with a client of its own.
async fn objects(store: &Arc<dyn Store>) -> audit::Objects {
    let mut objects = audit::Objects::new();
    for head in store.list("", false).await.expect("listed").keys {
        let body = store.get(&head.key, OBJECT_BYTES_MAX).await.expect("read").expect("it was listed");
        objects.insert(head.key, body);
    }
    objects
}

fn counted(operation: Operation, key: &str, effect: Effect) -> Fault {
    Fault { operation, key_contains: key.to_owned(), nth: None, effect }
}

#[tokio::test(flavor = "multi_thread")]
async fn moto_fences_and_takes_damaged_parts_so_a_save_there_is_read_back() {
    let Some(moto) = Moto::start() else { return };
    let store = client(&moto).await;
    let mut found = probe(&*store).await.expect("probe");
    // Its threads look for a key and make it in two steps: now and then two creates win, and the probe says so.
    for _ in 0..2 {
        if !found.fencing {
            found = probe(&*store).await.expect("probe");
        }
    }
    assert!(found.fencing, "{}", found.fencing_reason);
    assert!(!found.part_checksums, "{}", found.part_checksums_reason);
    assert!(objects(&store).await.is_empty(), "the probe leaves nothing");

    let sealer = Sealer::new();
    let names = [save::LARGE, save::SMALL];
    let reads = names.map(|name| counted(Operation::GetRange, name, Effect::Delay(Duration::ZERO)));
    let counting = Arc::new(FaultyStore::new(store, reads.to_vec()));
    let drain = save::drain(Arc::clone(&counting) as Arc<dyn Store>, found.part_checksums);
    let mut attempt = sealer.attempt(Content::Whole, 1, 1);
    attempt.prepare(&drain).await.expect("prepared");
    assert_eq!([counting.fired(0), counting.fired(1)], [2, 1], "each chunk is read back once");
    attempt.commit(&drain).await.expect("committed");

    let reader = client(&moto).await;
    let version = save::version_id(1).to_string();
    let audited = audit::markers(&objects(&reader).await).expect("everything verifies");
    assert!(audited.unreadable.is_empty());
    assert_eq!(audited.committed, [(version, sealer.files(Content::Whole))].into());
    let catalog = locate::read(&reader).await.expect("located");
    assert_eq!((catalog.committed.len(), catalog.passed_over.len()), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_moto_holds_otherwise_than_it_was_sent_is_not_prepared() {
    let Some(moto) = Moto::start() else { return };
    let held = counted(Operation::GetRange, save::SMALL, Effect::Delay(HELD));
    let holding = Arc::new(FaultyStore::new(client(&moto).await, vec![held]));
    let sealer = Sealer::new();
    let drain = save::drain(Arc::clone(&holding) as Arc<dyn Store>, false);
    let mut attempt = sealer.attempt(Content::Light, 1, 1);
    let behind = client(&moto).await;
    let damage = async {
        let begun = Instant::now();
        while holding.fired(0) == 0 {
            assert!(begun.elapsed() < TIMEOUT, "nothing is read back");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let key = locate_small(&behind).await;
        let mut bytes = behind.get(&key, OBJECT_BYTES_MAX).await.expect("read").expect("uploaded").to_vec();
        bytes[1] ^= 1;
        let replaced = behind.upload(&key, Arc::new(Bytes::from(bytes)), &UploadLimits::default()).await;
        replaced.expect("replaced");
    };
    let (first, ()) = tokio::join!(attempt.prepare(&drain), damage);
    let error = first.expect_err("the store has other bytes");
    assert!(matches!(error, CommitError::Upload(UploadError::ReadBack { chunk: 0, .. })), "{error:?}");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "it is tried again: {error}");
    assert!(!attempt.is_prepared());

    let drain = save::drain(client(&moto).await, false);
    attempt.prepare(&drain).await.expect("prepared");
    attempt.commit(&drain).await.expect("committed");
    let audited = audit::markers(&objects(&behind).await).expect("everything verifies");
    assert_eq!(audited.committed.into_values().collect::<Vec<_>>(), [sealer.files(Content::Light)]);
}

async fn locate_small(store: &Arc<dyn Store>) -> String {
    let listing = store.list("r/", false).await.expect("listed");
    let mut keys = listing.keys.into_iter().map(|head| head.key);
    keys.find(|key| key.ends_with(save::SMALL)).expect("it was uploaded")
}

#[tokio::test(flavor = "multi_thread")]
async fn creates_that_have_several_winners_are_found_by_the_probe() {
    let root = tempfile::tempdir().expect("a directory");
    let options = S3Options::default();
    std::fs::create_dir(root.path().join(&options.bucket)).expect("its bucket");
    let backend = s3s_fs::FileSystem::new(root.path()).expect("s3s-fs");
    let served = Served::start(backend, &options, Arc::new(Faults::default())).expect("served");
    let variables = env(&served.endpoint, &options.access_key, &options.secret);
    let store =
        open_with(&format!("s3://{}/p", options.bucket), &settings_of(variables)).await.expect("open");
    let probes = if machine::long() { PROBES_LONG } else { PROBES };
    let mut fooled = 0;
    for _ in 0..probes {
        let Probe { fencing, fencing_reason, part_checksums, .. } = probe(&*store).await.expect("probe");
        assert!(!part_checksums, "it answers 500 to a damaged part, which is no refusal");
        let reasons = ["won", "more than one", "replaced"];
        assert!(fencing || reasons.iter().any(|reason| fencing_reason.contains(reason)), "{fencing_reason}");
        fooled += usize::from(fencing);
    }
    show(fooled, probes);
    assert_eq!(fooled, 0, "of {probes}");
}

#[expect(clippy::print_stdout, reason = "the rate is what a person runs the long form for")]
fn show(fooled: usize, probes: usize) {
    println!("{fooled} of {probes} probes were fooled");
}
