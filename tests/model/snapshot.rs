//! Is a snapshot of the tree one moment of it?
//!
//! Owns: names that are exchanged without a pause while snapshots are taken. Does not own: a snapshot in Tier-3.

use super::{folder, tier1};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tidemark_namespace::{Caller, Namespace, NamespaceSettings, RENAME_EXCHANGE};
use tidemark_protocol::id::Incarnation;

/// Several times the names that one hold of the lock covers.
const NAMES: u64 = 2000;
const DIRECTORIES: u64 = 4;
const SNAPSHOTS: usize = 60;
const ROOT: u64 = 1;

fn caller() -> Caller {
    Caller { uid: 0, gid: 0, pid: 0, now_ns: 1, request: 0 }
}

#[test]
fn a_snapshot_is_of_one_moment() {
    let folder = folder();
    let settings =
        NamespaceSettings { journal_bytes: Some(16 << 20), ..NamespaceSettings::new(Incarnation(7)) };
    let namespace = Namespace::new(settings, tier1(folder.path())).unwrap();
    let mut directories = Vec::new();
    for directory in 0..DIRECTORIES {
        let name = format!("d{directory}");
        let made = namespace.names().mkdir(&caller(), ROOT, name.as_bytes(), 0o755).unwrap().node;
        for number in 0..NAMES / DIRECTORIES {
            let (name, target) = (format!("l{number}"), format!("target {directory} {number}"));
            namespace.names().symlink(&caller(), made, name.as_bytes(), target.as_bytes()).unwrap();
            namespace.names().mkdir(&caller(), made, format!("s{number}").as_bytes(), 0o755).unwrap();
        }
        directories.push(made);
    }
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let exchanged = scope.spawn(|| exchange(&namespace, &directories, &ended));
        for _ in 0..SNAPSHOTS {
            let snapshot = namespace.tree_snapshot();
            let paths: BTreeSet<_> = snapshot.symlinks.iter().map(|(node, _)| &node.path).collect();
            let targets: BTreeSet<_> = snapshot.symlinks.iter().map(|(_, target)| target).collect();
            let below: BTreeSet<_> = snapshot.directories.iter().map(|node| &node.path).collect();
            let found = [paths.len(), targets.len(), below.len()];
            // An exchange keeps the number of names, and each link has one name.
            let expected = [NAMES, NAMES, NAMES + DIRECTORIES].map(|count| usize::try_from(count).unwrap());
            assert_eq!(found, expected, "names, targets and directories that are there once");
            assert_eq!(snapshot.hard_links, []);
        }
        ended.store(true, Ordering::Relaxed);
        assert!(exchanged.join().unwrap() > 1000, "it was hardly disturbed");
    });
}

/// Exchanges links and directories with high numbers for those with low ones. Returns the number of exchanges.
fn exchange(namespace: &Arc<Namespace>, directories: &[u64], ended: &AtomicBool) -> u64 {
    let mut done = 0_u64;
    while !ended.load(Ordering::Relaxed) {
        let (one, other) = (done * 7 % (NAMES / DIRECTORIES), done * 13 % (NAMES / DIRECTORIES));
        let kind = if done.is_multiple_of(3) { "s" } else { "l" };
        let (one, other) = (format!("{kind}{one}"), format!("{kind}{other}"));
        let (from, to) = ((directories[0], one.as_bytes()), (directories[3], other.as_bytes()));
        namespace.names().rename(&caller(), from, to, RENAME_EXCHANGE).unwrap();
        done += 1;
    }
    done
}
