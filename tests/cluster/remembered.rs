//! Calls that a node answers without a question for a moment: other nodes' changes show at the next look-up all the same.
//!
//! Owns: directories that others look up all the time while one node changes them; names that several nodes make and remove in one
//! directory. Does not own: directories that one node has alone (`tree`).

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crate::site::{Cluster, names};

/// Rounds of each node. Each round changes a directory six times.
const ROUNDS: usize = 12;
const NAMES: usize = 150;

/// Goal: a node that need not ask about a directory asks again when another node moves it, changes its attributes, removes it or makes it
/// anew. Others look it up all the time, so that each has been answered a moment ago. The one that changes it has the directory above alone
/// in one half of the rounds, and shares it in the other.
#[test]
fn a_directory_that_others_look_up_changes_for_them_at_once() {
    let Some(cluster) = Cluster::start() else { return };
    let mounts = [0, 1, 2].map(|node| cluster.mount(node).to_owned());
    for (actor, by) in mounts.iter().enumerate() {
        for is_shared in [false, true] {
            let top = format!("top-{actor}-{is_shared}");
            fs::create_dir(by.join(&top)).unwrap();
            if is_shared {
                for mount in &mounts {
                    fs::write(mount.join(&top).join(mount.file_name().unwrap()), b"shared").unwrap();
                }
            }
            while_others_look(&mounts, &top, |others| {
                for round in 0..ROUNDS {
                    change(by, others, &top, round);
                }
            });
        }
    }
}

/// Calls `act` while each mount looks up the names of `top` that `change` uses. Every mount has looked before it begins.
fn while_others_look(mounts: &[PathBuf; 3], top: &str, act: impl FnOnce(&[PathBuf])) {
    let (done, looks) = (AtomicBool::new(false), [(); 3].map(|()| AtomicUsize::new(0)));
    thread::scope(|scope| {
        for (mount, looked) in mounts.iter().zip(&looks) {
            let (one, other) = (mount.join(top).join("dir"), mount.join(top).join("moved"));
            let done = &done;
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let _ = (one.metadata(), other.metadata(), one.join("below").metadata());
                    looked.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while looks.iter().any(|looked| looked.load(Ordering::Relaxed) == 0) {
            thread::yield_now();
        }
        // The other threads end also where this one fails.
        let acted = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| act(mounts)));
        done.store(true, Ordering::Relaxed);
        if let Err(failure) = acted {
            std::panic::resume_unwind(failure);
        }
    });
    let looks = looks.map(|looked| looked.load(Ordering::Relaxed));
    assert!(looks.iter().all(|looks| *looks > ROUNDS), "others looked {looks:?} times");
}

fn change(by: &Path, mounts: &[PathBuf], top: &str, round: usize) {
    let at = |mount: &Path, name: &str| mount.join(top).join(name);
    let is_there = |name: &str| mounts.iter().map(|mount| at(mount, name).is_dir()).collect::<Vec<_>>();
    let all = vec![true; mounts.len()];
    let none = vec![false; mounts.len()];
    fs::create_dir(at(by, "dir")).expect("nothing stands in the way");
    assert_eq!(is_there("dir"), all, "round {round}: made");
    fs::create_dir(at(by, "dir/below")).expect("nothing stands in the way");
    for mode in [0o700, 0o755] {
        fs::set_permissions(at(by, "dir"), Permissions::from_mode(mode)).expect("nothing stands in the way");
        let modes = mounts
            .iter()
            .map(|mount| at(mount, "dir").metadata().expect("it is there").permissions().mode() & 0o777);
        assert_eq!(modes.collect::<Vec<_>>(), vec![mode; mounts.len()], "round {round}");
    }
    fs::rename(at(by, "dir"), at(by, "moved")).expect("nothing stands in the way");
    assert_eq!((is_there("dir"), is_there("moved")), (none.clone(), all.clone()), "round {round}: moved");
    assert_eq!(is_there("moved/below"), all, "round {round}: what is below moved with it");
    fs::remove_dir(at(by, "moved/below")).expect("nothing stands in the way");
    assert_eq!(is_there("moved/below"), none, "round {round}: removed below");
    fs::remove_dir(at(by, "moved")).expect("nothing stands in the way");
    assert_eq!(is_there("moved"), none, "round {round}: removed");
}

/// Goal: in a directory in which all nodes make files, each file is seen elsewhere at once, a removal too, and of two nodes that make one
/// name after both saw that it is missing, one wins.
#[test]
fn what_several_nodes_make_in_one_directory_is_seen_by_each_at_once() {
    let Some(cluster) = Cluster::start() else { return };
    let mounts = [0, 1, 2].map(|node| cluster.mount(node).join("run"));
    fs::create_dir(&mounts[0]).unwrap();
    for mount in &mounts {
        fs::write(mount.join(mount.parent().unwrap().file_name().unwrap()), b"shared").unwrap();
    }
    let before = names(&mounts[0]);
    for number in 0..NAMES {
        let name = format!("f{number}");
        let [by, other, third] = [0, 1, 2].map(|node| mounts[(number + node) % 3].join(&name));
        // Each that looks now, and is making files here, is promised the name.
        assert!(!other.exists() && !third.exists() && !by.exists());
        fs::write(&by, name.as_bytes()).unwrap();
        assert_eq!(fs::read(&other).unwrap(), name.as_bytes(), "{name}");
        let again = OpenOptions::new().write(true).create_new(true).open(&third);
        assert_eq!(again.map_err(|error| error.kind()).unwrap_err(), ErrorKind::AlreadyExists, "{name}");
        if number % 2 == 0 {
            fs::remove_file(&third).unwrap();
            assert!(!by.exists() && !other.exists(), "{name} was removed");
        }
    }
    let made = (0..NAMES).filter(|number| number % 2 == 1).map(|number| format!("f{number}"));
    let all: BTreeSet<String> = made.chain(before).collect();
    for mount in &mounts {
        assert_eq!(names(mount), all, "at {}", mount.display());
    }
    one_of_three_wins(&mounts);
}

fn one_of_three_wins(mounts: &[PathBuf; 3]) {
    for number in 0..NAMES {
        let barrier = std::sync::Barrier::new(mounts.len());
        let won = thread::scope(|scope| {
            let racers: Vec<_> = mounts
                .iter()
                .map(|mount| {
                    let (path, barrier) = (mount.join(format!("race{number}")), &barrier);
                    scope.spawn(move || {
                        let missing = !path.exists();
                        barrier.wait();
                        let made = OpenOptions::new().write(true).create_new(true).open(&path);
                        assert!(missing, "{}", path.display());
                        made.is_ok()
                    })
                })
                .collect();
            racers
                .into_iter()
                .map(|racer| racer.join().expect("the name was missing"))
                .filter(|won| *won)
                .count()
        });
        assert_eq!(won, 1, "race{number}");
    }
}
