//! The catalog as the coordinator's deputy keeps it: if the coordinator is lost, its successor begins with this.
//!
//! Owns: taking parts in, making a tree of what is kept, handing it to a successor that is another node. Does not own: who is the deputy
//! and what it is told (the coordinator), what becomes of the tree (`namespace::deputy`).
//!
//! It is kept apart from this node's own tree, which knows better of what is made here and less of all else. As large as the
//! coordinator's tree: some hundred bytes and the checksums for each file.

use super::{ANSWER_DEADLINE, Cluster};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tidemark_protocol::cluster::clocks::Clocks;
use tidemark_protocol::cluster::wire::{
    BATCH_BYTES_MAX, BATCH_ITEMS_MAX, CatalogNode, CatalogPart, NodeKind, NodeState, ProcessFate, ToNode,
};
use tidemark_protocol::id::{Epoch, FileId, Incarnation};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::path::join;
use tidemark_transport::Address;

/// The coordinator's number of the directory that the mount shows.
const ROOT: u64 = crate::namespace::ROOT;

/// Removed files that are remembered, as the catalog itself does.
const REMOVED_MAX: usize = crate::namespace::REMOVED_MAX;

/// How long a node is waited for that may be the deputy: names wait meanwhile, and one that does not answer is lost or cut off.
const FIND_KEPT: Duration = Duration::from_secs(1);

/// How long a node is asked again that lives and takes this one for two nodes: where this one lost power, the connections of its life before
/// end there some seconds later.
const LIFE_BEFORE_ENDS: Duration = Duration::from_secs(6);

/// Between two such questions.
const ASK_AGAIN: Duration = Duration::from_millis(100);

/// What a deputy keeps of one coordinator's catalog.
#[derive(Debug, Default)]
pub struct KeptCatalog {
    epoch: Epoch,
    from: Incarnation,
    /// The next part.
    number: u64,
    /// The parts until now are the whole catalog.
    whole: bool,
    nodes: BTreeMap<u64, CatalogNode>,
    /// The last files that lost their last name since the telling began.
    removed: Vec<FileId>,
    published: BTreeMap<NodeLife, u64>,
    fates: BTreeMap<(Incarnation, u32, u64), ProcessFate>,
    clocks: Clocks,
}

impl KeptCatalog {
    /// Takes a part in. False where parts are missing: the coordinator begins anew.
    fn take(&mut self, from: Incarnation, part: CatalogPart, now_ns: i64) -> bool {
        if part.number == 0 {
            *self = Self { epoch: part.epoch, from, ..Self::default() };
        }
        if (part.epoch, part.number, from) != (self.epoch, self.number, self.from) {
            return false;
        }
        self.number += 1;
        self.clocks.heard(from, part.now_ns, now_ns);
        self.removed.extend(part.removed);
        for id in part.gone {
            self.removed.extend(self.nodes.remove(&id).as_ref().and_then(file_of));
        }
        for node in part.nodes {
            let file = file_of(&node);
            // A file that another node writes anew is another file.
            let before = self.nodes.insert(node.id, node).as_ref().and_then(file_of);
            self.removed.extend(before.filter(|before| Some(*before) != file));
        }
        let surplus = self.removed.len().saturating_sub(REMOVED_MAX);
        self.removed.drain(..surplus);
        self.published.extend(part.published);
        let fates = part.fates.into_iter();
        self.fates.extend(fates.map(|fate| ((fate.home, fate.process.0, fate.process.1), fate)));
        self.whole |= part.all;
        true
    }

    /// A part for another node, its times on this node's clock: the nodes after one; first of all what is no node.
    fn part(&self, number: u64, after: Option<u64>, now_ns: i64) -> CatalogPart {
        let mut part = CatalogPart { epoch: self.epoch, number, now_ns, ..CatalogPart::default() };
        let Some(after) = after else {
            part.fates = self.fates(now_ns);
            part.published = self.published.iter().map(|(life, number)| (life.clone(), *number)).collect();
            part.removed = self.removed();
            part.all = self.nodes.is_empty();
            return part;
        };
        let read = |at| self.clocks.read(self.from, at, now_ns);
        let mut bytes = 0;
        let mut left = self.nodes.range((Bound::Excluded(after), Bound::Unbounded)).peekable();
        let nodes = &mut part.nodes;
        while nodes.len() < BATCH_ITEMS_MAX
            && bytes < BATCH_BYTES_MAX
            && let Some((_, node)) = left.next()
        {
            bytes += node.state.bytes_most();
            nodes.push(CatalogNode { state: node.state.clone().with_times(read), ..node.clone() });
        }
        part.all = left.peek().is_none();
        part
    }

    /// The last publications of each life that are in it.
    #[must_use]
    pub fn published(&self) -> &BTreeMap<NodeLife, u64> {
        &self.published
    }

    /// Files that have no name any more, the last of very many last. One that was brought back has.
    #[must_use]
    pub fn removed(&self) -> Vec<FileId> {
        let named: BTreeSet<FileId> = self.nodes.values().filter_map(file_of).collect();
        self.removed.iter().filter(|file| !named.contains(file)).copied().collect()
    }

    /// What became of processes, on this node's clock.
    #[must_use]
    pub fn fates(&self, now_ns: i64) -> Vec<ProcessFate> {
        let read = |at| self.clocks.read(self.from, at, now_ns);
        let told = self
            .fates
            .values()
            .map(|fate| ProcessFate { failed_at_ns: fate.failed_at_ns.map(read), ..*fate });
        told.collect()
    }

    /// The tree, its times on this node's clock: directories with what is in them, parents first.
    #[must_use]
    pub fn directories(&self, now_ns: i64) -> Vec<(Vec<u8>, Vec<NodeState>)> {
        let mut children: BTreeMap<u64, Vec<(&[u8], &CatalogNode)>> = BTreeMap::new();
        for node in self.nodes.values() {
            for (parent, name) in &node.names {
                children.entry(*parent).or_default().push((name, node));
            }
        }
        let mut directories = Vec::new();
        let mut todo = vec![(ROOT, Vec::new())];
        // Each directory has one name, so that each is met once; what hangs on nothing is met never.
        while let Some((id, path)) = todo.pop() {
            let mut found = Vec::new();
            for (name, node) in children.remove(&id).unwrap_or_default() {
                let below = join(&path, name);
                if matches!(node.state.kind, NodeKind::Directory) {
                    todo.push((node.id, below.clone()));
                }
                let state = NodeState { path: below, ..node.state.clone() };
                found.push(state.with_times(|at| self.clocks.read(self.from, at, now_ns)));
            }
            directories.push((path, found));
        }
        directories
    }
}

fn file_of(node: &CatalogNode) -> Option<FileId> {
    match &node.state.kind {
        NodeKind::File(facts) => Some(facts.file),
        NodeKind::Directory | NodeKind::Symlink { .. } => None,
    }
}

/// What this node keeps, if it is the deputy.
#[derive(Debug, Default)]
pub(super) struct Deputy(Mutex<KeptCatalog>);

impl Cluster {
    /// Takes a part of the catalog in. False: begin anew.
    pub(super) fn keep_catalog(&self, from: Incarnation, part: CatalogPart) -> bool {
        let mut kept = self.deputy.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.take(from, part, self.namespace.now_ns())
    }

    /// Whether this node keeps the whole catalog of the last coordinator that it knows of.
    #[must_use]
    pub fn is_deputy(&self) -> bool {
        let kept = self.deputy.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.whole && kept.epoch == self.epoch()
    }

    /// What this node keeps of the catalog of that epoch; none where that is not all.
    pub(super) fn give_kept(&self, of: Epoch, after: Option<u64>) -> Option<CatalogPart> {
        let kept = self.deputy.0.lock().unwrap_or_else(PoisonError::into_inner);
        (kept.whole && kept.epoch == of).then(|| kept.part(0, after, self.namespace.now_ns()))
    }

    /// The catalog of the last coordinator from the node that was its deputy, for a successor that was not. `epochs` are the successor's and
    /// the last. None where it does not answer in time, or does not have all of it.
    pub async fn fetch_kept_catalog(
        &self,
        deputy: &NodeLife,
        address: &Address,
        epochs: (Epoch, Epoch),
    ) -> Option<KeptCatalog> {
        let (mut kept, mut after, mut deadline) = (KeptCatalog::default(), None, FIND_KEPT);
        let begun = Instant::now();
        for number in 0.. {
            let message = ToNode::Kept { epoch: epochs.0, of: epochs.1, after };
            let asked = loop {
                match self.ask_node::<Option<CatalogPart>>(address, &message, deadline).await {
                    Err(error) if error.is_for_two_lives() && begun.elapsed() < LIFE_BEFORE_ENDS => {
                        tokio::time::sleep(ASK_AGAIN).await;
                    }
                    asked => break asked,
                }
            };
            let mut part = match asked {
                Ok(Some(part)) => part,
                Ok(None) => {
                    tracing::warn!(%deputy, "it does not keep the whole catalog of the last coordinator");
                    return None;
                }
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(%deputy, error, "the catalog that it keeps was not fetched");
                    return None;
                }
            };
            let all = part.all;
            (after, deadline) = (Some(part.nodes.last().map_or(0, |node| node.id)), ANSWER_DEADLINE);
            part.number = number;
            if !kept.take(deputy.incarnation, part, self.namespace.now_ns()) {
                return None;
            }
            if all {
                break;
            }
        }
        Some(kept)
    }

    /// The catalog of the coordinator of that epoch, where this node is its deputy. It is not kept any more.
    #[must_use]
    pub fn take_kept_catalog(&self, of: Epoch) -> Option<KeptCatalog> {
        let mut kept = self.deputy.0.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = std::mem::take(&mut *kept);
        (kept.whole && kept.epoch == of).then_some(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::state_of;
    use crate::namespace::{Caller, Namespace, NamespaceSettings, OutgoingBody};
    use crate::tier1::{MediumChoice, Tier1, Tier1Settings};
    use std::sync::Arc;
    use tidemark_protocol::cluster::wire::{FileFacts, NodeAttributes, WireState};
    use tidemark_protocol::id::{FileCounter, Generation, SealNumber};

    const COORDINATOR: Incarnation = Incarnation(7);

    fn node(id: u64, parent: u64, name: &str, kind: NodeKind) -> CatalogNode {
        let state = NodeState {
            path: Vec::new(),
            attributes: NodeAttributes::default(),
            attributes_ns: 0,
            other_names: None,
            kind,
        };
        CatalogNode { id, names: vec![(parent, name.as_bytes().to_vec())], state }
    }

    fn link(id: u64, parent: u64, name: &str) -> CatalogNode {
        node(id, parent, name, NodeKind::Symlink { target: b"x".to_vec() })
    }

    fn part(number: u64, nodes: Vec<CatalogNode>, gone: Vec<u64>) -> CatalogPart {
        CatalogPart { epoch: Epoch(3), number, nodes, gone, all: true, ..CatalogPart::default() }
    }

    fn paths(kept: &KeptCatalog) -> Vec<String> {
        let directories = kept.directories(0);
        let states = directories.iter().flat_map(|(_, found)| found);
        let mut paths: Vec<_> = states
            .map(|state| String::from_utf8(state.path.clone()).expect("names of tests are UTF-8"))
            .collect();
        paths.sort();
        paths
    }

    #[test]
    fn what_changed_last_counts_and_a_directory_takes_along_what_is_in_it() {
        let mut kept = KeptCatalog::default();
        let first = vec![node(2, ROOT, "run", NodeKind::Directory), link(3, 2, "latest"), link(4, 2, "old")];
        assert!(kept.take(COORDINATOR, part(0, first, Vec::new()), 0));
        assert_eq!(paths(&kept), ["run", "run/latest", "run/old"]);
        assert!(kept.take(
            COORDINATOR,
            part(1, vec![node(2, ROOT, "moved", NodeKind::Directory)], vec![4]),
            0
        ));
        assert_eq!(paths(&kept), ["moved", "moved/latest"]);
    }

    #[test]
    fn a_file_without_a_name_is_remembered_and_a_directory_is_not() {
        let mut kept = KeptCatalog::default();
        let file = FileId { incarnation: Incarnation(9), counter: FileCounter(4) };
        let facts = FileFacts {
            file,
            size_bytes: 0,
            state: WireState::Closed,
            seal: SealNumber(0),
            opened_ns: 0,
            closed_ns: 0,
            published_ns: 0,
            vouched: false,
            generation: Generation(4),
            writers: Vec::new(),
            host: true,
            object: None,
        };
        let nodes =
            vec![node(2, ROOT, "run", NodeKind::Directory), node(3, 2, "f", NodeKind::File(Box::new(facts)))];
        assert!(kept.take(COORDINATOR, part(0, nodes.clone(), Vec::new()), 0));
        let again = CatalogNode { id: 5, names: vec![(ROOT, b"g".to_vec())], ..nodes[1].clone() };
        assert!(kept.take(COORDINATOR, part(1, Vec::new(), vec![2, 3]), 0));
        assert_eq!(kept.removed(), [file]);
        assert!(kept.take(COORDINATOR, part(2, vec![again], Vec::new()), 0));
        assert_eq!(kept.removed(), [], "it was brought back");
    }

    #[test]
    fn where_a_part_is_missing_nothing_is_taken_until_it_begins_anew() {
        let mut kept = KeptCatalog::default();
        assert!(!kept.take(COORDINATOR, part(1, Vec::new(), Vec::new()), 0), "the first is 0");
        assert!(kept.take(COORDINATOR, part(0, vec![link(3, ROOT, "a")], Vec::new()), 0));
        assert!(!kept.take(COORDINATOR, part(2, vec![link(4, ROOT, "b")], Vec::new()), 0));
        assert!(!kept.take(Incarnation(8), part(1, vec![link(4, ROOT, "b")], Vec::new()), 0), "another's");
        assert_eq!(paths(&kept), ["a"]);
        assert!(kept.take(Incarnation(8), part(0, vec![link(4, ROOT, "b")], Vec::new()), 0));
        assert_eq!(paths(&kept), ["b"]);
    }

    #[test]
    fn what_is_handed_to_another_node_is_what_was_kept() {
        const DEPUTY: Incarnation = Incarnation(8);
        let life = NodeLife { node: "n2".parse().unwrap(), incarnation: DEPUTY };
        let mut kept = KeptCatalog::default();
        let count = 2 * BATCH_ITEMS_MAX as u64;
        let mut nodes = vec![node(2, ROOT, "run", NodeKind::Directory)];
        nodes.extend((0..count).map(|at| link(3 + at, 2, &format!("l{at}"))));
        let fate = ProcessFate {
            home: DEPUTY,
            process: (5, 6),
            fate: tidemark_protocol::cluster::wire::WireFate::Killed,
            failed_at_ns: Some(9),
        };
        // Before the telling began; the successor of the successor has to know of it, too.
        let removed = vec![FileId { incarnation: DEPUTY, counter: FileCounter(4) }];
        let told =
            CatalogPart { published: vec![(life, 4)], fates: vec![fate], removed, ..part(0, nodes, vec![]) };
        assert!(kept.take(COORDINATOR, told, 0));

        let (mut fetched, mut after) = (KeptCatalog::default(), None);
        for number in 0.. {
            let given = kept.part(number, after, 0);
            let (all, last) = (given.all, given.nodes.last().map_or(0, |node| node.id));
            assert!(given.nodes.len() <= BATCH_ITEMS_MAX);
            assert!(fetched.take(DEPUTY, given, 0));
            if all {
                break;
            }
            after = Some(last);
        }
        assert!(fetched.whole && fetched.epoch == kept.epoch);
        assert_eq!(paths(&fetched).len() as u64, count + 1);
        assert_eq!(paths(&fetched), paths(&kept));
        assert_eq!((fetched.published(), fetched.removed()), (kept.published(), kept.removed()));
        assert_eq!(fetched.fates(0), kept.fates(0));
    }

    #[test]
    fn a_loop_of_directories_that_hangs_on_nothing_is_not_followed() {
        let mut kept = KeptCatalog::default();
        let nodes = vec![node(2, 3, "a", NodeKind::Directory), node(3, 2, "b", NodeKind::Directory)];
        assert!(kept.take(COORDINATOR, part(0, nodes, Vec::new()), 0));
        assert!(paths(&kept).is_empty());
    }

    /// A namespace on memory of its own, which ends with the folder.
    fn namespace(life: u64) -> (Arc<Namespace>, tempfile::TempDir) {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let medium = MediumChoice::Directory(folder.path().to_path_buf());
        let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
        let settings =
            NamespaceSettings { journal_bytes: Some(512 << 10), ..NamespaceSettings::new(Incarnation(life)) };
        (Namespace::new(settings, tier1).unwrap(), folder)
    }

    fn told(from: &Namespace, number: u64) -> CatalogPart {
        let told = from.take_untold(usize::MAX, usize::MAX);
        let nodes = told.nodes.into_iter().map(|(node, names)| {
            let id = node.node;
            CatalogNode { id, names, state: state_of(from, node) }
        });
        CatalogPart { nodes: nodes.collect(), gone: told.gone, ..part(number, Vec::new(), Vec::new()) }
    }

    fn tree(of: &Namespace) -> Vec<String> {
        let nodes = of.whole_tree().into_iter();
        nodes.map(|node| String::from_utf8(node.path).expect("names of tests are UTF-8")).collect()
    }

    #[test]
    fn the_deputy_s_tree_becomes_the_catalog_and_keeps_what_only_it_knows() {
        const ME: Caller = Caller { uid: 0, gid: 0, pid: 0, now_ns: 1, request: 0 };
        let ((catalog, _one), (mine, _other)) = (namespace(7), namespace(8));
        let file = |tree: &Namespace, parent, name: &str| {
            let (attr, open) = tree.create(&ME, parent, name.as_bytes(), 0o644, 1).unwrap();
            tree.flush(open.fh, &ME, false).unwrap();
            tree.release(open.fh).unwrap();
            attr.node
        };
        catalog.tell_deputy();
        let run = catalog.mkdir(&ME, ROOT, b"run", 0o755).unwrap().node;
        file(&catalog, run, "kept");
        file(&catalog, run, "removed");
        let mut kept = KeptCatalog::default();
        assert!(kept.take(COORDINATOR, told(&catalog, 0), 0));
        // The deputy has seen the directory, and one name that nobody has any more.
        mine.collect_outgoing();
        let entries = &kept.directories(0);
        for (path, found) in entries {
            mine.settle_directory(path, found, 0).unwrap();
        }
        let here = mine.node_at(b"run").unwrap();
        let until = mine.moment();
        file(&mine, here, "mine");
        catalog.unlink(&ME, run, b"removed").unwrap();
        catalog.rename(&ME, (ROOT, b"run"), (ROOT, b"moved"), 0).unwrap();
        file(&catalog, run, "later");
        assert!(kept.take(COORDINATOR, told(&catalog, 1), 0));

        mine.become_catalog(&kept.directories(0), until);
        // The directory that was moved takes along what is told of it; what was made here since stays where it was made.
        assert_eq!(tree(&mine), ["moved", "moved/kept", "moved/later", "run", "run/mine"]);
        let view = mine.outgoing_at(b"moved/kept").unwrap();
        let OutgoingBody::File(view) = view.body else { panic!("a file") };
        assert_eq!(view.remote.map(|remote| remote.home), Some(COORDINATOR));
    }
}
