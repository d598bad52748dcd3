//! A fixed coordinator that begins again, after its daemon was killed or ended in order: the members that it waits for before it answers
//! for names.
//!
//! Does not own: a coordinator that says nothing (`silent`), the fate of changes that it did not get (`failover`).

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::time::Duration;

use rustix::io::Errno;
use tidemark_tests::process;

use crate::site::{Cluster, LIMIT};

/// How long the member that knows the names stays out of reach. An answer that does not wait for it comes sooner.
const OUT_OF_REACH: Duration = Duration::from_secs(2);

/// Repeats a call that ends in EIO, because EIO means that no coordinator answered and nothing is known.
fn known<T>(call: impl Fn() -> io::Result<T>) -> io::Result<T> {
    let is_unknown = |error: &io::Error| error.raw_os_error() == Some(Errno::IO.raw_os_error());
    let said = process::until(LIMIT, || Some(call()).filter(|said| !said.as_ref().is_err_and(is_unknown)));
    said.expect("it is known in the end")
}

/// Goal: a coordinator that begins again does not call names absent that only a member knows. A look-up finds them, and O_EXCL does not
/// recreate them. Method: the member has the directory alone and goes on while it does not reach the coordinator. The coordinator is
/// killed, or ended and started with empty memory, before the member is in reach again.
#[test]
fn a_coordinator_that_begins_again_waits_for_what_its_members_know() {
    for ends_in_order in [false, true] {
        let Some(mut cluster) = Cluster::start() else { return };
        let own = cluster.mount(1).join("own");
        fs::create_dir(&own).unwrap();
        fs::write(own.join("early"), b"early").unwrap();
        assert_eq!(fs::read(cluster.mount(2).join("own/early")).unwrap(), b"early");
        if ends_in_order {
            cluster.nodes[0].daemon_mut().stop_with_status();
        }
        let cut = cluster.nodes[0].host().partition(cluster.nodes[1].host());
        fs::write(own.join("late"), b"late").unwrap();
        fs::write(own.join("taken"), b"taken").unwrap();
        if ends_in_order {
            cluster.nodes[0].daemon_mut().start_again();
        } else {
            let daemon = cluster.nodes[0].daemon();
            let dead = daemon.kill_serving();
            daemon.wait_for_next(dead);
        }
        let late = cluster.mount(2).join("own/late");
        let taken = cluster.mount(0).join("own/taken");
        let (read, made) = std::thread::scope(|scope| {
            let reads = scope.spawn(|| known(|| fs::read(&late)));
            let makes = scope.spawn(|| known(|| File::create_new(&taken).map(drop)));
            // A call that does not wait for the member would have its answer by then.
            process::until(OUT_OF_REACH, || (reads.is_finished() && makes.is_finished()).then_some(()));
            assert!(cut.heal() > 0, "nothing was dropped");
            (reads.join().unwrap(), makes.join().unwrap())
        });
        assert_eq!(read.ok().as_deref(), Some(&b"late"[..]), "ended in order: {ends_in_order}");
        let refused = made.expect_err("it was made anew");
        assert_eq!(refused.kind(), ErrorKind::AlreadyExists, "{refused}");
        assert_eq!(known(|| fs::read(&taken)).unwrap(), b"taken", "ended in order: {ends_in_order}");
    }
}

/// Goal: a coordinator that begins again does not wait for ever for members that are lost.
#[test]
fn a_coordinator_that_begins_again_answers_without_members_that_are_lost() {
    let Some(mut cluster) = Cluster::start() else { return };
    fs::write(cluster.mount(0).join("here"), b"here").unwrap();
    for node in [1, 2] {
        cluster.nodes[node].power_off();
    }
    let daemon = cluster.nodes[0].daemon();
    let dead = daemon.kill_serving();
    daemon.wait_for_next(dead);
    let missing = fs::symlink_metadata(cluster.mount(0).join("missing")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");
    assert_eq!(fs::read(cluster.mount(0).join("here")).unwrap(), b"here");
}
