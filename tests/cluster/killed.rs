//! Daemons of a cluster are killed while programs go on: what each call did is so on every node.
//!
//! Does not own: daemons of one node that are killed (`survive`), nodes that are lost with their memory (`failover`).

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::site::{Cluster, noise};

/// Kills that take one of the three daemons in turn, the coordinator's first.
const KILLS: usize = 9;
/// Calls between two kills, each on one of the nodes.
const CALLS: usize = 24;
const SEED: u64 = 20;

/// What a name is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Found {
    File(Vec<u8>),
    Directory,
    Link(PathBuf),
}

type Tree = BTreeMap<PathBuf, Found>;

/// Numbers below a bound, the same in every run.
struct Draw(u64);

impl Draw {
    fn below(&mut self, bound: usize) -> usize {
        // Knuth's MMIX constants; the high bits are the better ones.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }

    fn of<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        (!all.is_empty()).then(|| &all[self.below(all.len())])
    }
}

/// Goal: names and bytes that were changed, one call after the other on any of three nodes, are so on all of them, whichever daemon is
/// killed right after a call, the coordinator's included; what was removed or renamed does not come back. Method: a plain map follows
/// each call; a kill is not waited for. Each kill is shown by the death of the process, each restart by the keeper's word in the end.
#[test]
fn what_was_done_is_so_on_all_nodes_whichever_daemon_is_killed() {
    let Some(cluster) = Cluster::start_with_lease() else { return };
    let mounts = [0, 1, 2].map(|node| cluster.mount(node).to_owned());
    let (mut draw, mut tree) = (Draw(SEED), Tree::new());
    for (node, mount) in mounts.iter().enumerate() {
        make_directory(mount, &mut tree, Path::new(&format!("own-{node}")));
    }
    make_directory(&mounts[0], &mut tree, Path::new("shared"));
    for kill in 0..KILLS {
        for call in 0..CALLS {
            change(&mounts[draw.below(3)], &mut tree, &mut draw, kill * CALLS + call);
        }
        cluster.nodes[kill % 3].daemon().kill_serving();
        // The next calls come before the next daemon does.
        if kill % 2 == 0 {
            change(&mounts[(kill + 1) % 3], &mut tree, &mut draw, KILLS * CALLS + kill);
        }
    }
    for (node, mount) in mounts.iter().enumerate() {
        let found = read(mount);
        let name = |(path, found): (&PathBuf, &Found)| (path.clone(), found.clone());
        let back: Vec<_> = found.iter().filter(|(path, _)| !tree.contains_key(*path)).map(name).collect();
        let wrong: Vec<_> = tree.iter().filter(|(path, is)| found.get(*path) != Some(is)).map(name).collect();
        let paths = |all: Vec<(PathBuf, Found)>| all.into_iter().map(|(path, _)| path).collect::<Vec<_>>();
        assert!(
            back.is_empty() && wrong.is_empty(),
            "on node {node}: back {:?}, gone or other {:?}",
            paths(back),
            paths(wrong)
        );
        let deaths = cluster.nodes[node].daemon().log().matches("the daemon died").count();
        assert_eq!(deaths, KILLS / 3, "daemons of node {node} that died");
    }
}

fn make_directory(mount: &Path, tree: &mut Tree, path: &Path) {
    fs::create_dir(mount.join(path)).unwrap_or_else(|error| panic!("mkdir {}: {error}", path.display()));
    tree.insert(path.to_owned(), Found::Directory);
}

/// One change of the tree, on one node.
fn change(mount: &Path, tree: &mut Tree, draw: &mut Draw, number: usize) {
    let of = |wanted: fn(&Found) -> bool, tree: &Tree| -> Vec<PathBuf> {
        tree.iter().filter(|(_, found)| wanted(found)).map(|(path, _)| path.clone()).collect()
    };
    let directories = of(|found| *found == Found::Directory, tree);
    let files = of(|found| matches!(found, Found::File(_)), tree);
    let parent = draw.of(&directories).expect("some directories are never removed").clone();
    let fresh = parent.join(format!("f{number}"));
    let bytes = [format!("{number} ").as_bytes(), &noise(7, draw.below(20_000))].concat();
    let done = match (draw.below(12), draw.of(&files)) {
        (0 | 1, Some(file)) => {
            tree.insert(file.clone(), Found::File(bytes.clone()));
            fs::write(mount.join(file), &bytes)
        }
        (2, Some(file)) => {
            let Some(Found::File(all)) = tree.get_mut(file) else { unreachable!("it was picked as a file") };
            all.extend_from_slice(&bytes);
            OpenOptions::new().append(true).open(mount.join(file)).and_then(|mut open| open.write_all(&bytes))
        }
        (3 | 4, Some(file)) => {
            tree.remove(file);
            fs::remove_file(mount.join(file))
        }
        (5, Some(file)) => {
            let found = tree.remove(file).expect("it was picked");
            tree.insert(fresh.clone(), found);
            fs::rename(mount.join(file), mount.join(&fresh))
        }
        (9, _) if parent.components().count() > 1 => {
            let below: Vec<_> = tree.keys().filter(|path| path.starts_with(&parent)).cloned().collect();
            // Not into itself.
            let to = parent.with_file_name(format!("d{number}"));
            for path in below {
                let found = tree.remove(&path).expect("it was listed");
                let rest = path.strip_prefix(&parent).expect("it is below");
                let moved = if rest.as_os_str().is_empty() { to.clone() } else { to.join(rest) };
                tree.insert(moved, found);
            }
            fs::rename(mount.join(&parent), mount.join(&to))
        }
        (6, _) if parent.components().count() > 1 => {
            // With all that is in it.
            tree.retain(|path, _| !path.starts_with(&parent));
            fs::remove_dir_all(mount.join(&parent))
        }
        (6 | 7, _) => {
            tree.insert(fresh.clone(), Found::Directory);
            fs::create_dir(mount.join(&fresh))
        }
        (8, _) => {
            let target = PathBuf::from(format!("t{number}"));
            tree.insert(fresh.clone(), Found::Link(target.clone()));
            symlink(target, mount.join(&fresh))
        }
        _ => {
            tree.insert(fresh.clone(), Found::File(bytes.clone()));
            fs::write(mount.join(&fresh), &bytes)
        }
    };
    done.unwrap_or_else(|error| panic!("call {number} at {}: {error}", mount.display()));
}

/// All that is below a mount.
fn read(mount: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut left = vec![mount.to_owned()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(&directory).expect("a directory is listed") {
            let path = entry.expect("an entry").path();
            let kind = fs::symlink_metadata(&path).expect("a listed name is there").file_type();
            let found = if kind.is_dir() {
                left.push(path.clone());
                Found::Directory
            } else if kind.is_symlink() {
                Found::Link(fs::read_link(&path).expect("a link is read"))
            } else {
                Found::File(fs::read(&path).expect("a file is read"))
            };
            tree.insert(path.strip_prefix(mount).expect("it is below").to_owned(), found);
        }
    }
    tree
}
