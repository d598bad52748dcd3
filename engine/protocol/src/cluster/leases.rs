//! Leases: which node may answer for a directory.
//!
//! Owns: which node may change names in a directory without asking, which nodes ask for each name, and which single names are
//! promised to which node. Does not own: which directories are about to move (`moves`), the names (the catalog), the messages, the time.
//!
//! A directory is at rest, or held by one node, or shared by all. The first node that changes something in it holds it alone and
//! need not ask again. When a second node comes, the first gives the directory back; from then on each node asks for each name. A
//! node that makes a directory holds it. If a directory is recalled, but no other node wants to change it, it is at rest again after
//! [`REST`].

use crate::cluster::moves::{Moves, Moving};
use crate::cluster::wire::NameOperation;
use crate::id::NodeName;
use crate::path::split;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Time for which a name stays promised. A promise usually ends earlier: its node publishes the name, is asked to, or is gone. So it is
/// longer than a node that is cut off is waited for (`[members] cut_off_s`, usually 30 s): until then nobody else can know whether the name
/// exists.
pub const PROMISE: Duration = Duration::from_secs(60);

/// Time for which a node that looked a directory up is remembered. It asks again after half of that (`KNOWN_FOR` of the engine's
/// `cluster::remembered`).
pub const KNOWN: Duration = Duration::from_secs(2);

/// Number of look-ups of directories that are remembered, over all nodes. Beyond it a node asks each time.
pub const KNOWN_MAX: usize = 1 << 18;

/// Records of each kind that are kept before those that are over are looked for. After that, twice as many as were left.
const SWEEP_MIN: usize = 1024;

/// Number of names promised at a time, over all nodes: every rank of a large job makes a few at once. Beyond it a name is refused,
/// and the node asks again.
pub const PROMISES_MAX: usize = 1 << 20;

/// Time for which a directory stays shared if it was recalled for no other node. Within 6 s of a recall its former holder accepts no
/// lease on it (`GIVEN_BACK_FOR` of the engine's `cluster::names`), and the holder's calls would wait for that.
pub const REST: Duration = Duration::from_secs(8);

/// The node or nodes that answer for a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Lease {
    /// The number tells this grant from a later one of the same path: another directory may have the path by then.
    Alone(NodeName, u64),
    Shared,
    /// Shared until this time, and at rest afterwards.
    SharedUntil(Duration),
}

/// The coordinator's next step before an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Answer from the catalog.
    Answer,
    /// First this node has to publish its changes; it keeps the directory.
    PublishFirst(NodeName),
    /// First this node has to publish its changes and give the directory back; then ask again.
    RecallFirst(NodeName),
    /// The asker holds the directory alone from now on.
    Alone,
    /// The name is promised to the asker; several nodes change this directory.
    Promised,
    /// The name is promised to another node, which has to publish first.
    Busy(NodeName),
    /// The directory, or one above it, is about to move or to change: the asker has to ask again.
    Moving(Moving),
    /// Too many names are promised.
    TooMany,
}

/// Promises by their node and directory: the names, each with the promise's number.
pub type Promised = BTreeMap<(NodeName, Vec<u8>), Vec<(Vec<u8>, u64)>>;

/// A promise of one name.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Promise {
    node: NodeName,
    until: Duration,
    /// Tells this promise from a later one of the same name to the same node.
    number: u64,
}

/// All leases of one epoch. Paths are relative to the mount.
#[derive(Debug, Clone, Default)]
pub struct Leases {
    directories: BTreeMap<Vec<u8>, Lease>,
    promises: BTreeMap<(Vec<u8>, Vec<u8>), Promise>,
    /// Directories that are about to move: no node begins anything in them.
    pub moves: Moves,
    /// Number of the last promise.
    last_promise: u64,
    /// Number of the last lease of one node alone.
    last_lease: u64,
    /// Promises that are left before those that are over are removed.
    promises_sweep: usize,
    /// The nodes that looked a directory up, by its path, each with the time until which it may answer for it.
    known: BTreeMap<Vec<u8>, BTreeMap<NodeName, Duration>>,
    /// Records in `known`.
    known_count: usize,
    /// Records in `known` before those that are over are removed.
    known_sweep: usize,
}

impl Leases {
    /// Decides how to answer `from`, which wants to see the entries of a directory.
    #[must_use]
    pub fn read(&self, from: &NodeName, directory: &[u8], name: Option<&[u8]>, now: Duration) -> Verdict {
        match self.directories.get(directory) {
            Some(Lease::Alone(holder, _)) if holder != from => return Verdict::PublishFirst(holder.clone()),
            _ => {}
        }
        // A promised name may exist by now.
        let promised = name.and_then(|name| self.promise(directory, name, now));
        match promised {
            Some(promise) if promise.node != *from => Verdict::PublishFirst(promise.node.clone()),
            _ => Verdict::Answer,
        }
    }

    /// Returns the promises that other nodes have of names in a directory or below it, by their nodes and directories. They have to end before
    /// `by` moves the directory.
    #[must_use]
    pub fn promised_below(&self, by: &NodeName, path: &[u8], now: Duration) -> Promised {
        let mut found = Promised::new();
        for ((directory, name), promise) in self.promises_below(path) {
            if promise.node != *by && promise.until > now {
                let of = found.entry((promise.node.clone(), directory.clone())).or_default();
                of.push((name.clone(), promise.number));
            }
        }
        found
    }

    /// Decides whether `from` may change a name. After [`Verdict::RecallFirst`], [`Verdict::Moving`] and [`Verdict::Busy`] nothing has changed.
    pub fn change(&mut self, from: &NodeName, directory: &[u8], name: &[u8], now: Duration) -> Verdict {
        if let Some(moving) = self.moves.above(from, directory, now) {
            return Verdict::Moving(moving);
        }
        let counts = |lease: &&Lease| !matches!(lease, Lease::SharedUntil(until) if *until <= now);
        match self.directories.get(directory).filter(counts) {
            // A new number: the holder may be giving back what it was granted before.
            Some(Lease::Alone(holder, _)) if holder == from => {
                let lease = self.new_lease(from);
                self.directories.insert(directory.to_vec(), lease);
                return Verdict::Alone;
            }
            Some(Lease::Alone(holder, _)) => return Verdict::RecallFirst(holder.clone()),
            // The asker's own promises are older than the return of the directory by all nodes.
            None if !self.has_promises(directory, from, now) => {
                let lease = self.new_lease(from);
                self.directories.insert(directory.to_vec(), lease);
                return Verdict::Alone;
            }
            None => {
                self.directories.insert(directory.to_vec(), Lease::Shared);
            }
            Some(Lease::Shared | Lease::SharedUntil(_)) => {}
        }
        match self.promise(directory, name, now) {
            Some(promise) if promise.node != *from => return Verdict::Busy(promise.node.clone()),
            _ => {}
        }
        match self.give_promise(from, directory, name, now) {
            Some(_) => Verdict::Promised,
            None => Verdict::TooMany,
        }
    }

    /// Promises a name that nobody else was promised, if several nodes change its directory. For a node that looks for the name, and makes it
    /// if it is missing. Returns the promise's number.
    pub fn promise_if_free(
        &mut self,
        from: &NodeName,
        directory: &[u8],
        name: &[u8],
        now: Duration,
    ) -> Option<u64> {
        let is_shared = match self.directories.get(directory)? {
            Lease::Shared => true,
            Lease::SharedUntil(until) => *until > now,
            Lease::Alone(..) => false,
        };
        let is_free = self.promise(directory, name, now).is_none_or(|promise| promise.node == *from)
            && self.moves.above(from, directory, now).is_none();
        if is_shared && is_free { self.give_promise(from, directory, name, now) } else { None }
    }

    fn give_promise(&mut self, from: &NodeName, directory: &[u8], name: &[u8], now: Duration) -> Option<u64> {
        if self.promises.len() >= self.promises_sweep.max(SWEEP_MIN) {
            self.promises.retain(|_, promise| promise.until > now);
            self.promises_sweep = (2 * self.promises.len()).min(PROMISES_MAX);
            if self.promises.len() >= PROMISES_MAX {
                return None;
            }
        }
        self.last_promise += 1;
        let promise = Promise { node: from.clone(), until: now + PROMISE, number: self.last_promise };
        self.promises.insert((directory.to_vec(), name.to_vec()), promise);
        Some(self.last_promise)
    }

    /// Records that a node looks a directory up, and need not ask about it again for a moment. To be recorded before the answer is made: a
    /// node that changes the directory after that has this one forget it. Returns the time until which it counts; none if too many are
    /// recorded.
    pub fn knows(&mut self, node: &NodeName, path: &[u8], now: Duration) -> Option<Duration> {
        if self.known_count >= self.known_sweep.max(SWEEP_MIN) {
            self.known.retain(|_, nodes| {
                nodes.retain(|_, until| *until > now);
                !nodes.is_empty()
            });
            self.known_count = self.known.values().map(BTreeMap::len).sum();
            self.known_sweep = (2 * self.known_count).min(KNOWN_MAX);
            if self.known_count >= KNOWN_MAX {
                return None;
            }
        }
        let until = now + KNOWN;
        let before = self.known.entry(path.to_vec()).or_default().insert(node.clone(), until);
        self.known_count += usize::from(before.is_none());
        Some(until)
    }

    /// Takes back [`Leases::knows`], which returned `until`: the path is no directory. A later look-up of the node stays recorded.
    pub fn knows_not(&mut self, node: &NodeName, path: &[u8], until: Duration) {
        if let Some(nodes) = self.known.get_mut(path)
            && nodes.get(node) == Some(&until)
        {
            nodes.remove(node);
            self.known_count -= 1;
            if nodes.is_empty() {
                self.known.remove(path);
            }
        }
    }

    /// Returns the nodes other than `by` that may act by themselves on the directory at `path`, or on one below it: they looked it up a
    /// moment ago, or were promised a name in it. They have to forget that before `by` changes the directory. Removes the records of
    /// look-ups.
    pub fn take_knowing(&mut self, by: &NodeName, path: &[u8], now: Duration) -> BTreeSet<NodeName> {
        let below: Vec<_> = records_below(&self.known, path).map(|(known, _)| known.clone()).collect();
        let promises = self.promises_below(path).map(|(_, promise)| promise);
        let others = promises.filter(|promise| promise.node != *by && promise.until > now);
        let mut knowing: BTreeSet<_> = others.map(|promise| promise.node.clone()).collect();
        for path in below {
            let nodes = self.known.get_mut(&path).expect("it was found a moment ago");
            self.known_count -= nodes.len();
            let own = nodes.remove_entry(by);
            let others = std::mem::take(nodes).into_iter();
            knowing.extend(others.filter(|(_, until)| *until > now).map(|(node, _)| node));
            nodes.extend(own);
            self.known_count += nodes.len();
            if nodes.is_empty() {
                self.known.remove(&path);
            }
        }
        knowing
    }

    /// Whether nodes other than `by` looked up a directory below this one a moment ago.
    #[must_use]
    pub fn is_seen(&self, by: &NodeName, directory: &[u8], now: Duration) -> bool {
        let mut below = records_below(&self.known, directory);
        below.any(|(_, nodes)| nodes.iter().any(|(node, until)| node != by && *until > now))
    }

    fn new_lease(&mut self, node: &NodeName) -> Lease {
        self.last_lease += 1;
        Lease::Alone(node.clone(), self.last_lease)
    }

    /// Returns the number of a node's lease, if it has the directory alone. To be taken before the node is asked to give the directory back;
    /// for [`Leases::released`] and [`Leases::rests`].
    #[must_use]
    pub fn lease_of(&self, node: &NodeName, directory: &[u8]) -> Option<u64> {
        match self.directories.get(directory) {
            Some(Lease::Alone(holder, number)) if holder == node => Some(*number),
            _ => None,
        }
    }

    /// Marks a directory that its holder gave back as shared. The holder may have put another directory in its place since it answered. The
    /// holder has not given that one back, so a later lease stays.
    pub fn released(&mut self, directory: &[u8], lease: u64) {
        if let Some(known) = self.directories.get_mut(directory)
            && matches!(known, Lease::Alone(_, number) if *number == lease)
        {
            *known = Lease::Shared;
        }
    }

    /// Marks a directory that its holder gave back without another node asking for it. The first node that changes something there
    /// after [`REST`] holds it alone. A later lease stays.
    pub fn rests(&mut self, directory: &[u8], lease: Option<u64>, now: Duration) {
        if let Some(known) = self.directories.get_mut(directory)
            && match known {
                Lease::Alone(_, number) => Some(*number) == lease,
                Lease::Shared => false,
                // Applies to a resting directory, too: it was recalled once more.
                Lease::SharedUntil(_) => true,
            }
        {
            *known = Lease::SharedUntil(now + REST);
        }
    }

    /// Returns the number of the promise of a name to a node. To be taken before the node is asked to publish; for [`Leases::published`].
    #[must_use]
    pub fn promise_of(&self, node: &NodeName, directory: &[u8], name: &[u8]) -> Option<u64> {
        let promise = self.promises.get(&(directory.to_vec(), name.to_vec()))?;
        (promise.node == *node).then_some(promise.number)
    }

    /// Ends a promise, because its node was asked and has published what it did with the name. The node may have been promised the name
    /// again since it answered; that promise stays, or two nodes would make the name.
    pub fn published(&mut self, directory: &[u8], name: &[u8], promise: u64) {
        let key = (directory.to_vec(), name.to_vec());
        if self.promises.get(&key).is_some_and(|known| known.number == promise) {
            self.promises.remove(&key);
        }
    }

    /// Applies an operation that `from` published to leases. Returns false if the operation made a directory that
    /// another node had before.
    pub fn follow(&mut self, from: &NodeName, operation: &NameOperation) -> bool {
        let mut is_its_own = true;
        match operation {
            NameOperation::Directory { path, .. } => is_its_own = self.made(from, path),
            NameOperation::Symlink { .. }
            | NameOperation::File { .. }
            | NameOperation::Linked { .. }
            | NameOperation::Taken { .. } => {}
            NameOperation::Removed { path, .. } => self.removed(path),
            NameOperation::Renamed { from: old, to, exchange: false, .. } => self.renamed(from, old, to),
            NameOperation::Renamed { from: old, to, exchange: true, .. } => {
                self.removed(old);
                self.removed(to);
            }
        }
        is_its_own
    }

    /// Does the same for a node that joined after the operation: it said where its directories are by now, and goes on having those. Until
    /// [`Leases::vacated`] it may count as having some that are elsewhere.
    pub fn follow_late(&mut self, from: &NodeName, operation: &NameOperation) -> bool {
        let moved = operation.moved_directories();
        let theirs: Vec<_> = moved.flat_map(|path| self.alone_below(from, path)).collect();
        let is_its_own = self.follow(from, operation);
        for (path, lease) in theirs {
            self.directories.entry(path).or_insert(lease);
        }
        is_its_own
    }

    /// Ends what a node has alone at or below these paths where no directory is. `is_directory` tells that of a path.
    pub fn vacated(
        &mut self,
        node: &NodeName,
        paths: &BTreeSet<Vec<u8>>,
        is_directory: impl Fn(&[u8]) -> bool,
    ) {
        let theirs = paths.iter().flat_map(|path| self.alone_below(node, path));
        let gone: Vec<_> = theirs.map(|(path, _)| path).filter(|path| !is_directory(path)).collect();
        for path in gone {
            self.directories.remove(&path);
        }
    }

    /// Ends the promise of a name to a node that published it, and that is in the catalog by now. A name that is missing again keeps its
    /// promise: it may be a later one.
    pub fn published_at(&mut self, from: &NodeName, path: &[u8]) {
        let (directory, name) = split(path);
        if let Some(promise) = self.promise_of(from, directory, name) {
            self.published(directory, name, promise);
        }
    }

    /// Gives a directory to the node that made it. Returns false if another node had it before.
    pub fn made(&mut self, from: &NodeName, directory: &[u8]) -> bool {
        if !self.directories.contains_key(directory) {
            let lease = self.new_lease(from);
            self.directories.insert(directory.to_vec(), lease);
        }
        self.lease_of(from, directory).is_some()
    }

    /// Returns the nodes other than `but` that were promised names in a directory.
    #[must_use]
    pub fn promised_in(&self, directory: &[u8], but: &NodeName, now: Duration) -> BTreeSet<NodeName> {
        let here = self.promises_in(directory);
        let others = here.filter(|promise| promise.node != *but && promise.until > now);
        others.map(|promise| promise.node.clone()).collect()
    }

    /// Moves the leases of a directory that `by` renamed after all other nodes had left it. `by` knows the directory by its inode
    /// and keeps what it holds there, so the leases must stand under the new path, too.
    pub fn renamed(&mut self, by: &NodeName, from: &[u8], to: &[u8]) {
        self.removed(to);
        let moved = self.below(from).into_iter().filter_map(|path| {
            let lease = self.directories.get(&path)?.clone();
            let stays = !matches!(&lease, Lease::Alone(holder, _) if holder != by);
            stays.then(|| ([to, &path[from.len()..]].concat(), lease))
        });
        let moved: Vec<_> = moved.collect();
        self.removed(from);
        self.directories.extend(moved);
    }

    fn alone_below(&self, node: &NodeName, path: &[u8]) -> Vec<(Vec<u8>, Lease)> {
        let below = records_below(&self.directories, path);
        let alone = below.filter(|(_, lease)| matches!(lease, Lease::Alone(holder, _) if holder == node));
        alone.map(|(path, lease)| (path.clone(), lease.clone())).collect()
    }

    /// Ends the leases and promises of a removed directory and of all below it.
    pub fn removed(&mut self, directory: &[u8]) {
        self.moves.done(directory);
        for path in self.below(directory) {
            self.directories.remove(&path);
        }
        let below: Vec<_> = self.promises_below(directory).map(|(name, _)| name.clone()).collect();
        for name in below {
            self.promises.remove(&name);
        }
    }

    /// Returns the nodes other than `from` that hold a directory at or below this one. The coordinator recalls these directories before it
    /// lets `from` rename this one.
    #[must_use]
    pub fn holders_below(&self, from: &NodeName, directory: &[u8]) -> Vec<(NodeName, Vec<u8>)> {
        let below = self.below(directory).into_iter();
        below
            .filter_map(|path| match &self.directories[&path] {
                Lease::Alone(holder, _) if holder != from => Some((holder.clone(), path)),
                Lease::Alone(..) | Lease::Shared | Lease::SharedUntil(_) => None,
            })
            .collect()
    }

    /// Returns the nodes other than `but` that may know of unpublished names at or below `directory`.
    #[must_use]
    pub fn knowing_below(&self, but: &NodeName, directory: &[u8], now: Duration) -> BTreeSet<NodeName> {
        let holders = self.holders_below(but, directory).into_iter().map(|(holder, _)| holder);
        let promises = self.promises_below(directory).map(|(_, promise)| promise);
        let promised = promises.filter(|promise| promise.until > now && promise.node != *but);
        holders.chain(promised.map(|promise| promise.node.clone())).collect()
    }

    /// Ends the leases and promises of a node that is gone: what it held alone is at rest again.
    pub fn gone(&mut self, node: &NodeName) {
        self.directories.retain(|_, lease| !matches!(lease, Lease::Alone(holder, _) if holder == node));
        self.promises.retain(|_, promise| promise.node != *node);
        self.moves.gone(node);
        self.known.retain(|_, nodes| {
            self.known_count -= usize::from(nodes.remove(node).is_some());
            !nodes.is_empty()
        });
    }

    fn below(&self, directory: &[u8]) -> Vec<Vec<u8>> {
        records_below(&self.directories, directory).map(|(path, _)| path.clone()).collect()
    }

    /// Returns the promises of names in a directory and in all below it.
    fn promises_below<'a>(
        &'a self,
        directory: &'a [u8],
    ) -> impl Iterator<Item = (&'a (Vec<u8>, Vec<u8>), &'a Promise)> {
        let near = self.promises.range((directory.to_vec(), Vec::new())..);
        let near = near.take_while(move |((path, _), _)| path.starts_with(directory));
        near.filter(move |((path, _), _)| is_below(path, directory))
    }

    fn promise(&self, directory: &[u8], name: &[u8], now: Duration) -> Option<&Promise> {
        let promise = self.promises.get(&(directory.to_vec(), name.to_vec()))?;
        (promise.until > now).then_some(promise)
    }

    fn has_promises(&self, directory: &[u8], but: &NodeName, now: Duration) -> bool {
        self.promises_in(directory).any(|promise| promise.node != *but && promise.until > now)
    }

    fn promises_in(&self, directory: &[u8]) -> impl Iterator<Item = &Promise> {
        let from = self.promises.range((directory.to_vec(), Vec::new())..);
        from.take_while(move |((path, _), _)| path == directory).map(|(_, promise)| promise)
    }
}

/// Returns the records of a directory and of all below it.
fn records_below<'a, V>(
    records: &'a BTreeMap<Vec<u8>, V>,
    directory: &'a [u8],
) -> impl Iterator<Item = (&'a Vec<u8>, &'a V)> {
    let near = records.range(directory.to_vec()..).take_while(move |(path, _)| path.starts_with(directory));
    near.filter(move |(path, _)| is_below(path, directory))
}

/// Whether a path is that directory or lies below it.
fn is_below(path: &[u8], directory: &[u8]) -> bool {
    directory.is_empty()
        || path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

#[cfg(test)]
#[path = "leases_test.rs"]
mod tests;
