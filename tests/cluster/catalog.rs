//! The catalog in a real etcd: only the holder of the lease takes steps, each once, and the catalog is read as a whole.
//!
//! Does not own: the content of steps (control's unit tests), the lease (`lease`), the change of coordinators (`failover`).

use std::time::{Duration, Instant};
use tidemark_control::catalog::{CatalogLog, Step, StepError};
use tidemark_control::lease::{EtcdAccess, EtcdCatalog, EtcdLease, LeaseTimes, Turn};
use tidemark_engine::settings::EtcdSettings;
use tidemark_protocol::cluster::kept::{Change, Mark, Writer};
use tidemark_protocol::id::{Epoch, FileCounter, FileId, Incarnation};
use tidemark_protocol::key::NodeLife;
use tidemark_tests::etcd::Etcd;

fn access(etcd: &Etcd) -> EtcdAccess {
    let place = etcd.url("ckpt").parse().expect("a place in etcd");
    EtcdAccess::open(place, &EtcdSettings::default()).expect("no files are named")
}

/// Returns a holder of the lease, its epoch, and the catalog in its term.
async fn holder(etcd: &Etcd, name: &str) -> (EtcdLease, Epoch, EtcdCatalog) {
    let mut lease = EtcdLease::new(access(etcd), name.to_owned(), 1, LeaseTimes::etcd());
    let give_up = Instant::now() + Duration::from_secs(20);
    loop {
        match lease.try_acquire(Instant::now()).await {
            Ok(Turn::Ours(epoch)) => return (lease, epoch, EtcdCatalog::new(access(etcd), epoch)),
            Ok(Turn::Theirs { wait, .. }) => tokio::time::sleep(wait).await,
            Err(error) => panic!("{error}"),
        }
        assert!(Instant::now() < give_up, "the lease is not free");
    }
}

fn removed(counter: u64) -> FileId {
    FileId { incarnation: Incarnation(9), counter: FileCounter(counter) }
}

fn step(epoch: Epoch, number: u64, whole: bool, changes: Vec<Change>) -> Step {
    Step { mark: Mark { epoch, number, ahead_ns: 0, whole, lots: 0 }, changes }
}

fn removal(writer: &mut Writer, counter: u64) -> Vec<Change> {
    let mut changes = Vec::new();
    writer.removed(removed(counter), &mut changes);
    changes
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_is_made_once_and_a_request_that_comes_late_undoes_nothing() {
    let Some(etcd) = Etcd::start() else { return };
    let (_lease, epoch, catalog) = holder(&etcd, "n1@a:1").await;
    // A second connection of the same coordinator stands for its late requests.
    let late = EtcdCatalog::new(access(&etcd), epoch);
    assert_eq!(catalog.load().await.expect("etcd answers"), None);
    assert_eq!(late.load().await.expect("etcd answers"), None);
    let mut writer = Writer::default();
    let first = step(epoch, 1, false, removal(&mut writer, 1));
    catalog.step(&first).await.expect("it is ours");
    assert_eq!(catalog.load().await.expect("etcd answers"), None, "it is not whole");
    // The answer to the step was lost, so the step is sent again.
    late.step(&first).await.expect("it was made");
    let second = step(epoch, 2, true, removal(&mut writer, 2));
    catalog.step(&second).await.expect("it is ours");
    let kept = late.load().await.expect("etcd answers").expect("it is whole");
    assert_eq!((kept.mark, kept.removed()), (second.mark, vec![removed(1), removed(2)]));
    let late = EtcdCatalog::new(access(&etcd), epoch);
    let again = late.step(&first).await;
    assert!(matches!(&again, Err(StepError::Changed(why)) if why.contains("change 2 ")), "{again:?}");
    assert_eq!(late.load().await.expect("etcd answers").expect("whole").removed(), [removed(1), removed(2)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_the_lease_no_more_changes_nothing() {
    let Some(etcd) = Etcd::start() else { return };
    let (mut lease, epoch, catalog) = holder(&etcd, "n1@a:1").await;
    catalog.load().await.expect("etcd answers");
    let mut writer = Writer::default();
    catalog.step(&step(epoch, 1, true, removal(&mut writer, 1))).await.expect("it is ours");
    lease.release().await.expect("it is given up");
    let (_other, later, successor) = holder(&etcd, "n2@b:1").await;
    assert!(later > epoch);
    let zombie = catalog.step(&step(epoch, 2, true, removal(&mut writer, 2))).await;
    assert!(matches!(zombie, Err(StepError::Lost(_))), "{zombie:?}");
    let kept = successor.load().await.expect("etcd answers").expect("it is whole");
    assert_eq!((kept.mark.epoch, kept.removed()), (epoch, vec![removed(1)]));
    let mut writer = Writer::after(&kept);
    successor.step(&step(later, 1, true, removal(&mut writer, 3))).await.expect("it is ours");
    assert_eq!(
        successor.load().await.expect("etcd answers").expect("whole").removed(),
        [removed(1), removed(3)]
    );
}

/// Goal: a catalog of several pages is read whole. A catalog whose mark was removed does not count, and may be written
/// again.
#[tokio::test(flavor = "multi_thread")]
async fn many_keys_are_read_in_pages_and_without_the_mark_they_are_nothing() {
    const LIVES: u64 = 40_000;
    let Some(etcd) = Etcd::start() else { return };
    let (mut lease, epoch, catalog) = holder(&etcd, "n1@a:1").await;
    // A page takes longer than a term on a busy machine.
    let renewing = tokio::spawn(async move {
        loop {
            drop(lease.renew(Instant::now()).await);
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    });
    catalog.load().await.expect("etcd answers");
    let writer = Writer::default();
    let mut number = 0;
    for first in (0..LIVES).step_by(120) {
        let mut changes = Vec::new();
        for at in first..(first + 120).min(LIVES) {
            let life =
                NodeLife { node: format!("n{at}").parse().expect("a name"), incarnation: Incarnation(at) };
            writer.published(&life, at, &mut changes);
        }
        number += 1;
        catalog.step(&step(epoch, number, true, changes)).await.expect("it is ours");
    }
    let kept = catalog.load().await.expect("etcd answers").expect("it is whole");
    assert_eq!(kept.published().len() as u64, LIVES);
    assert!(kept.published().iter().all(|(life, number)| life.incarnation.0 == *number));
    etcd.delete("ckpt/catalog");
    let lost = catalog.step(&step(epoch, number + 1, true, Vec::new())).await;
    assert!(matches!(lost, Err(StepError::Changed(_))), "{lost:?}");
    assert_eq!(catalog.load().await.expect("etcd answers"), None);
    catalog.step(&step(epoch, 1, true, vec![Writer::delete_all()])).await.expect("it is ours");
    let kept = catalog.load().await.expect("etcd answers").expect("it is whole");
    assert!(kept.published().is_empty(), "what was there before is gone");
    renewing.abort();
}
