//! Programs on three nodes, and the same calls on a plain directory. Each call has the same result, and all trees stay equal.
//!
//! Does not own: daemons of one node that are killed (`survive`), nodes that are lost with their memory (`failover`).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions, Permissions};
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, RenameFlags, Timespec, Timestamps, XattrFlags};
use tidemark_tests::campaign::dice::Dice;
use tidemark_tests::machine;

use crate::site::Cluster;

/// Calls after which all trees are compared.
const BETWEEN_LOOKS: usize = 25;
/// Calls between two kills, each on one of the nodes.
const BETWEEN_KILLS: usize = 24;
/// Calls right after a kill, before there is a coordinator again.
const WITHOUT_COORDINATOR: usize = 6;
/// Depth of nested directories.
const DEPTH_MAX: usize = 4;
/// Bound in seconds below which all set times lie. All other times are later.
const SET_BEFORE_S: u64 = 5000;

/// A kind of call.
#[derive(Debug, Clone, Copy)]
enum Op {
    Write,
    WriteAnew,
    Append,
    Patch,
    Truncate,
    Unlink,
    RemoveDirectory,
    RemoveAll,
    MakeDirectory,
    Symlink,
    Link,
    Rename,
    Exchange,
    RenameAnew,
    Chmod,
    SetXattr,
    RemoveXattr,
    SetTimes,
    List,
    Look,
}

/// Kinds to draw from. A kind's frequency is the number of its entries.
const OPS: [Op; 29] = [
    Op::Write,
    Op::Write,
    Op::Write,
    Op::WriteAnew,
    Op::Append,
    Op::Append,
    Op::Patch,
    Op::Truncate,
    Op::Truncate,
    Op::Unlink,
    Op::RemoveDirectory,
    Op::RemoveAll,
    Op::MakeDirectory,
    Op::MakeDirectory,
    Op::MakeDirectory,
    Op::Symlink,
    Op::Link,
    Op::Rename,
    Op::Rename,
    Op::Rename,
    Op::Exchange,
    Op::RenameAnew,
    Op::Chmod,
    Op::SetXattr,
    Op::RemoveXattr,
    Op::SetTimes,
    Op::List,
    Op::Look,
    Op::Look,
];

/// Kinds that wait for a coordinator: calls that make, move or remove names. A known name, by contrast, is served as it was known.
const ORDERED_OPS: [Op; 8] = [
    Op::WriteAnew,
    Op::MakeDirectory,
    Op::Unlink,
    Op::RemoveDirectory,
    Op::Link,
    Op::Rename,
    Op::Rename,
    Op::RenameAnew,
];

#[derive(Debug)]
struct Call {
    op: Op,
    path: PathBuf,
    other: PathBuf,
    number: u64,
    bytes: Vec<u8>,
}

/// The object of a name. A time counts only if it was set.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Found {
    File { mode: u32, links: u64, set_s: Option<i64>, xattrs: Vec<(String, Vec<u8>)>, bytes: Vec<u8> },
    Directory { mode: u32, xattrs: Vec<(String, Vec<u8>)> },
    Link(PathBuf),
}

/// The result of a call, or its errno.
#[derive(Debug, PartialEq, Eq)]
enum Given {
    Nothing,
    Names(Vec<String>),
    Found(Found),
    Errno(Option<i32>),
}

type Tree = BTreeMap<PathBuf, Found>;

/// Goal: a program on one node sees all changes of other nodes, as in one directory: errors, names, bytes and attributes.
/// Method: random calls, one after the other, each on any of three nodes and on a plain directory.
#[test]
fn all_nodes_together_are_one_directory() {
    for seed in 0..if machine::long() { 20 } else { 1 } {
        let Some(cluster) = Cluster::start_with_lease() else { return };
        Twins::new(&cluster, seed).run(if machine::long() { 1200 } else { 500 }, 0);
    }
}

/// Goal: the nodes stay one directory if any daemon, also the coordinator's, is killed after a call while programs go on. Each kill is
/// proven by the death of the process, each restart by the keeper's report at the end. Right after a kill, only calls that are ordered
/// among all nodes are made.
#[test]
fn all_nodes_together_are_one_directory_whichever_daemon_is_killed() {
    for seed in 20..if machine::long() { 40 } else { 21 } {
        let Some(cluster) = Cluster::start_with_lease() else { return };
        Twins::new(&cluster, seed).run(0, if machine::long() { 30 } else { 9 });
        for (node, at) in cluster.nodes.iter().enumerate() {
            let deaths = at.daemon().log().matches("the daemon died").count();
            assert_eq!(deaths, if machine::long() { 10 } else { 3 }, "daemons of node {node} that died");
        }
    }
}

/// Words of a node's log about its coordinator.
const SEAT_WORDS: [&str; 3] =
    ["this node is the coordinator", "not the coordinator any more", "told to others later"];

struct Twins<'a> {
    cluster: &'a Cluster,
    plain: tempfile::TempDir,
    dice: Dice,
    seed: u64,
    /// Calls so far, for a person who looks for the reason of a difference.
    calls: Vec<String>,
}

impl<'a> Twins<'a> {
    fn new(cluster: &'a Cluster, seed: u64) -> Self {
        let plain = tempfile::tempdir().expect("a directory");
        Self { cluster, plain, dice: Dice::new(seed), seed, calls: Vec::new() }
    }

    /// Makes this many calls, and then this many kills, each after some more calls.
    fn run(&mut self, calls: usize, kills: usize) {
        for number in 1..=calls {
            self.call(&OPS);
            if number % BETWEEN_LOOKS == 0 {
                self.compare();
            }
        }
        for kill in 0..kills {
            (0..BETWEEN_KILLS).for_each(|_| self.call(&OPS));
            self.cluster.nodes[kill % 3].daemon().kill_serving();
            self.calls.push(format!("node {} is killed", kill % 3));
            (0..WITHOUT_COORDINATOR).for_each(|_| self.call(&ORDERED_OPS));
            self.wait_for_coordinator(kill);
        }
        self.compare();
    }

    /// Waits on each node until there is a coordinator, by a create of a name that must be new.
    fn wait_for_coordinator(&self, kill: usize) {
        for node in 0..3 {
            let path = self.cluster.mount(node).join(format!("kill-{kill}-{node}"));
            OpenOptions::new().write(true).create_new(true).open(&path).expect("a new coordinator");
            fs::remove_file(&path).expect("it is there");
        }
    }

    fn call(&mut self, ops: &[Op]) {
        let node = usize::try_from(self.dice.within(0..3)).expect("small");
        let tree = read(self.plain.path());
        let op = ops[usize::try_from(self.dice.within(0..ops.len() as u64)).expect("small")];
        let mut path = self.some(&tree);
        let makes = matches!(op, Op::MakeDirectory | Op::WriteAnew | Op::Symlink);
        if makes || matches!(op, Op::Write) && self.dice.one_in(2) {
            path = self.fresh(&tree);
        }
        let other = if self.dice.one_in(3) { self.some(&tree) } else { self.fresh(&tree) };
        let number = self.dice.within(0..SET_BEFORE_S);
        let size_bytes = usize::try_from(self.dice.within(1..3000)).expect("small");
        let call = Call { op, path, other, number, bytes: self.dice.bytes(size_bytes) };
        let expected = given(call.on(self.plain.path()));
        let found = given(call.on(self.cluster.mount(node)));
        let Call { op, path, other, number, .. } = &call;
        self.calls.push(format!("node {node}: {op:?} {} {} {number}", path.display(), other.display()));
        assert_eq!(found, expected, "{}", self.story());
    }

    fn compare(&self) {
        let expected = read(self.plain.path());
        for node in 0..3 {
            let mount = self.cluster.mount(node);
            let found = read(mount);
            let paths = |trees: [&Tree; 2]| -> Vec<_> {
                let differs = trees[0].iter().filter(|(path, is)| trees[1].get(*path) != Some(is));
                differs.map(|(path, _)| path.clone()).collect()
            };
            let (back, wrong) = (paths([&found, &expected]), paths([&expected, &found]));
            assert!(
                found == expected,
                "on node {node}: {back:?} and not {wrong:?}: {:?} and not {:?}; {}",
                back.first().map(|path| &found[path]),
                wrong.first().map(|path| &expected[path]),
                self.story()
            );
        }
    }

    /// Returns the last calls, and each node's log lines about its coordinator. A node without one goes on by itself for a while.
    fn story(&self) -> String {
        let last = self.calls.len().saturating_sub(2 * BETWEEN_LOOKS);
        let seats = self.cluster.nodes.iter().map(|node| {
            let log = node.daemon().log();
            log.lines()
                .filter(|line| SEAT_WORDS.iter().any(|word| line.contains(word)))
                .collect::<Vec<_>>()
                .join("\n")
        });
        let seats = seats.collect::<Vec<_>>().join("\n\n");
        let calls = self.calls[last..].join("\n");
        format!(
            "seed {}, call {}; the last:\n{calls}\nof each node's coordinator:\n{seats}",
            self.seed,
            self.calls.len()
        )
    }

    /// Draws a name, mostly one that exists.
    fn some(&mut self, tree: &Tree) -> PathBuf {
        if tree.is_empty() || self.dice.one_in(4) {
            return self.fresh(tree);
        }
        let pick = usize::try_from(self.dice.within(0..tree.len() as u64)).expect("small");
        tree.keys().nth(pick).expect("it is below the number of names").clone()
    }

    /// Draws a name that may be free.
    fn fresh(&mut self, tree: &Tree) -> PathBuf {
        let is_parent = |(path, found): &(&PathBuf, &Found)| {
            matches!(found, Found::Directory { .. }) && path.components().count() < DEPTH_MAX
        };
        let mut parents: Vec<_> = tree.iter().filter(is_parent).map(|(path, _)| path.clone()).collect();
        parents.push(PathBuf::new());
        let pick = usize::try_from(self.dice.within(0..parents.len() as u64)).expect("small");
        let letter = ["a", "b", "c", "d"][usize::try_from(self.dice.within(0..4)).expect("small")];
        parents[pick].join(format!("{letter}{}", self.dice.within(0..6)))
    }
}

fn given(result: io::Result<Given>) -> Given {
    result.unwrap_or_else(|error| Given::Errno(error.raw_os_error()))
}

impl Call {
    fn on(&self, root: &Path) -> io::Result<Given> {
        let (path, other) = (root.join(&self.path), root.join(&self.other));
        let is_link = fs::symlink_metadata(&path).is_ok_and(|is| is.is_symlink());
        let open = |options: &mut OpenOptions| options.open(&path);
        match self.op {
            Op::Write => fs::write(&path, &self.bytes)?,
            Op::WriteAnew => open(OpenOptions::new().write(true).create_new(true))?.write_all(&self.bytes)?,
            Op::Append => open(OpenOptions::new().append(true))?.write_all(&self.bytes)?,
            Op::Patch => {
                let mut file = open(OpenOptions::new().read(true).write(true))?;
                file.seek(SeekFrom::Start(self.number % 100))?;
                file.write_all(&self.bytes[..self.bytes.len().min(50)])?;
            }
            Op::Truncate => nix::unistd::truncate(&path, self.number.cast_signed())?,
            Op::Unlink => fs::remove_file(&path)?,
            Op::RemoveDirectory => fs::remove_dir(&path)?,
            Op::RemoveAll if fs::symlink_metadata(&path)?.is_dir() => fs::remove_dir_all(&path)?,
            Op::MakeDirectory => fs::create_dir(&path)?,
            Op::Symlink => symlink(format!("to-{}", self.number), &path)?,
            Op::Link => fs::hard_link(&path, &other)?,
            Op::Rename => fs::rename(&path, &other)?,
            Op::Exchange => rustix::fs::renameat_with(CWD, &path, CWD, &other, RenameFlags::EXCHANGE)?,
            Op::RenameAnew => rustix::fs::renameat_with(CWD, &path, CWD, &other, RenameFlags::NOREPLACE)?,
            // Links lead nowhere, so chmod of a link is left out.
            Op::Chmod if !is_link => {
                let mode = u32::try_from(0o600 | self.number & 0o77).expect("small");
                fs::set_permissions(&path, Permissions::from_mode(mode))?;
            }
            Op::SetXattr if !is_link => {
                let value = &self.bytes[..self.bytes.len().min(20)];
                rustix::fs::setxattr(&path, self.attribute(), value, XattrFlags::empty())?;
            }
            Op::RemoveXattr if !is_link => rustix::fs::removexattr(&path, self.attribute())?,
            Op::SetTimes => {
                let time = Timespec { tv_sec: self.number.cast_signed(), tv_nsec: 7 };
                let times = Timestamps { last_access: time, last_modification: time };
                rustix::fs::utimensat(CWD, &path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Op::RemoveAll | Op::Chmod | Op::SetXattr | Op::RemoveXattr => {}
            Op::List => return Ok(Given::Names(names(&path)?)),
            Op::Look => return Ok(Given::Found(found(&path)?)),
        }
        Ok(Given::Nothing)
    }

    fn attribute(&self) -> String {
        format!("user.k{}", self.number % 3)
    }
}

fn names(directory: &Path) -> io::Result<Vec<String>> {
    let names = fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<io::Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

fn found(path: &Path) -> io::Result<Found> {
    let is = fs::symlink_metadata(path)?;
    if is.is_symlink() {
        return fs::read_link(path).map(Found::Link);
    }
    let (mode, xattrs) = (is.mode(), xattrs(path)?);
    if is.is_dir() {
        return Ok(Found::Directory { mode, xattrs });
    }
    let set_s = Some(is.mtime()).filter(|set_s| *set_s < SET_BEFORE_S.cast_signed());
    Ok(Found::File { mode, links: is.nlink(), set_s, xattrs, bytes: fs::read(path)? })
}

fn xattrs(path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut names = vec![0; 4096];
    let length = rustix::fs::listxattr(path, &mut names)?;
    let names = names[..length].split(|byte| *byte == 0).filter(|name| name.starts_with(b"user.k"));
    let mut all = Vec::new();
    for name in names {
        let mut value = vec![0; 64];
        let length = rustix::fs::getxattr(path, OsStr::from_bytes(name), &mut value)?;
        value.truncate(length);
        all.push((String::from_utf8_lossy(name).into_owned(), value));
    }
    all.sort();
    Ok(all)
}

/// Reads all that is below a directory, without names that vanish meanwhile.
fn read(root: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut left = vec![root.to_owned()];
    while let Some(directory) = left.pop() {
        for name in names(&directory).unwrap_or_default() {
            let path = directory.join(name);
            let Ok(found) = found(&path) else { continue };
            if matches!(found, Found::Directory { .. }) {
                left.push(path.clone());
            }
            tree.insert(path.strip_prefix(root).expect("it is below").to_owned(), found);
        }
    }
    tree
}
