//! Begins after another coordinator, or after an earlier daemon of this node: with the known catalog, and with the publications of all
//! nodes.
//!
//! Owns: this node's tree becoming the catalog of before, which nodes are still to be heard, whether names can be answered for. Does not
//! own: reading etcd (`lease`), what etcd keeps (`protocol::cluster::kept`), what nodes publish (`take`), which nodes are gone (`members`).
//!
//! Names are answered for only after every member has published everything that the last coordinator did not acknowledge, or is gone. If
//! the catalog was not kept, Tier-3 must have been read as well: only then an unknown name is known to be absent (P8).

use super::{Catalog, Terms};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tidemark_engine::cluster::{Cluster, Presence};
use tidemark_namespace::{Moment, Namespace};
use tidemark_protocol::cluster::kept::{KeptCatalog, StepNumber};
use tidemark_protocol::cluster::wire::NameOperation;
use tidemark_protocol::id::{Epoch, NodeName};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership::MemberList;
use tidemark_protocol::path::{split, upwards};

/// Interval at which waiters check which nodes have been heard.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Names that are recalled in one hold of the lock.
const RECALLED_AT_ONCE: usize = 256;

/// The catalog before, as far as a new coordinator knows it.
#[derive(Debug)]
pub enum Before {
    /// The node had the catalog, and its tree still is the catalog. Or the coordinator is fixed and began with empty memory: then its tree
    /// is all that Tier-3 had of the catalog. Etcd's copy adds which files were removed.
    Own(Option<KeptCatalog>),
    /// Etcd kept the catalog; this node's tree has become the same ([`Mirror::become_catalog`](tidemark_namespace::Mirror::become_catalog)).
    Kept(KeptCatalog),
    /// Unknown: there was no coordinator, or etcd does not have all of the catalog.
    Nothing,
}

impl Before {
    /// Chooses for a node whose tree was the catalog of epoch `own`, and of no other since. `stored` is the epoch of the last stored list
    /// of members.
    fn of(own: Option<Epoch>, stored: Epoch, kept: Option<KeptCatalog>) -> Self {
        match kept {
            // The node was the last coordinator itself, perhaps as the daemon before this one: no other tree is newer. If its own list or
            // catalog was not stored, its epoch may be later than theirs.
            kept if own >= Some(kept.as_ref().map_or(stored, |kept| kept.mark.epoch.max(stored))) => {
                Self::Own(kept)
            }
            Some(kept) => Self::Kept(kept),
            None => Self::Nothing,
        }
    }
}

/// The content of etcd when a coordinator begins.
#[derive(Debug, Default)]
pub struct Legacy {
    /// The members that the last coordinator stored.
    pub stored: MemberList,
    /// The catalog, if all of it is there.
    pub kept: Option<KeptCatalog>,
}

impl Legacy {
    /// Drops a catalog that is older than what etcd had before: etcd was put back to an older state. `kept_step` is the last step that etcd
    /// is known to have taken.
    fn without_older(mut self, kept_step: Option<StepNumber>) -> Self {
        let found = self.kept.as_ref().map(|kept| kept.mark.step());
        if let (Some(found), Some(known)) = (found, kept_step)
            && found < known
        {
            tracing::error!(%found, %known, "etcd lost changes that it had taken: its catalog is not used, and names are read from Tier-3 and from the members. Names that were removed since that state may come back");
            self.kept = None;
        }
        self
    }

    /// Begins an epoch after the coordinator that left this: this node's tree becomes that one's catalog, and is published to the other
    /// nodes from then on. `terms.stored` is set here. Takes seconds with a large catalog, and is not to be broken off meanwhile: `settling`
    /// is kept until it is done.
    pub async fn take_up(
        self,
        cluster: &Arc<Cluster>,
        epoch: Epoch,
        presence: Arc<Presence>,
        terms: Terms,
        settling: impl Send + 'static,
    ) -> TakenUp {
        let tree = Arc::clone(cluster.namespace());
        let Self { stored, mut kept } = self.without_older(cluster.said().kept_step());
        if let Some(kept) = &mut kept {
            let of = kept.mark.epoch;
            // By its own tree where it was that coordinator itself.
            let of_own = tree.catalog().catalog_of() == Some(of);
            let further = if of_own { 0 } else { cluster.said().ahead_ns(of).unwrap_or(0) };
            kept.ahead_ns = kept.mark.ahead_ns.saturating_add(further);
            tracing::info!(%epoch, %of, "the catalog of before is in etcd");
        }
        cluster.following.saw_epoch(epoch);
        let before = Before::of(tree.catalog().catalog_of(), stored.epoch, kept);
        let kept_until = match &before {
            Before::Kept(kept) => kept.published().get(&cluster.life).copied(),
            Before::Own(_) | Before::Nothing => None,
        };
        let told = cluster.told_until(kept_until);
        let (cluster, terms) = (Arc::clone(cluster), Terms { stored, ..terms });
        let taken = tokio::task::spawn_blocking(move || {
            let _settling = settling;
            let is_complete = before.become_tree_of(cluster.namespace(), told, kept_until);
            let catalog = Catalog::succeed(cluster, epoch, presence, terms, &before, is_complete);
            TakenUp { catalog, before, is_complete }
        });
        let taken = taken.await.expect("taking a catalog up does not panic");
        if !taken.knows() {
            // Changes of names from now on also apply to Tier-3's names, once they are here.
            tree.adoption().carry_names();
        }
        // From here on this tree is published to other nodes.
        tree.publications().lead_outgoing(false);
        taken
    }
}

/// A coordinator whose node's tree has become the catalog of before.
#[derive(Debug)]
pub struct TakenUp {
    pub catalog: Arc<Catalog>,
    pub before: Before,
    /// Whether the tree has become all of it.
    pub is_complete: bool,
}

impl TakenUp {
    /// Whether the names are known without Tier-3.
    #[must_use]
    pub fn knows(&self) -> bool {
        !matches!(self.before, Before::Nothing)
    }
}

impl Before {
    /// Makes a tree this catalog, as far as it is not. `told`: the moment up to which the catalog has this node's changes, and `publication`
    /// the last one in which they are. Returns false if a part could not be made.
    fn become_tree_of(&self, tree: &Namespace, told: Moment, publication: Option<u64>) -> bool {
        let now_ns = tree.now_ns();
        match self {
            Self::Own(Some(kept)) => tree.catalog().take_process_fates(&kept.fates(now_ns)),
            Self::Kept(kept) => {
                tree.catalog().take_process_fates(&kept.fates(now_ns));
                return tree.mirror().become_catalog(&kept.directories(now_ns), told, publication);
            }
            Self::Own(None) | Self::Nothing => {}
        }
        true
    }

    /// Returns the part that etcd keeps.
    #[must_use]
    pub fn into_kept(self) -> Option<KeptCatalog> {
        match self {
            Self::Own(kept) => kept,
            Self::Kept(kept) => Some(kept),
            Self::Nothing => None,
        }
    }
}

impl fmt::Display for Before {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Own(_) => "own",
            Self::Kept(_) => "kept in etcd",
            Self::Nothing => "unknown",
        })
    }
}

/// The nodes and names for which a new coordinator waits.
#[derive(Debug, Default)]
pub(super) struct Hearing {
    nodes: BTreeSet<NodeLife>,
    tier3: bool,
    /// Whether the names are this node's own. The other nodes have to publish how their files stand.
    own: bool,
    /// Nodes that have published that.
    told: BTreeSet<NodeLife>,
    /// Directories in which nodes changed something without a coordinator, or just before it was lost, until all nodes are heard. A node
    /// that had such a directory alone may have missed the change.
    changed: BTreeMap<Vec<u8>, BTreeSet<NodeName>>,
    /// Directories that nodes moved or removed meanwhile: what another node has alone at such a path, or below it, is elsewhere.
    moved: BTreeMap<Vec<u8>, BTreeSet<NodeName>>,
}

impl Catalog {
    /// Makes the coordinator of an epoch that follows another. `terms` hold the former members, and `before` the known catalog of the last
    /// coordinator. `is_complete`: this node's tree has become all of it. A tree that has not is not taken for the catalog later. Asks the tree
    /// about each file of a catalog that was this node's own.
    #[must_use]
    pub fn succeed(
        cluster: Arc<Cluster>,
        epoch: Epoch,
        presence: Arc<Presence>,
        terms: Terms,
        before: &Before,
        is_complete: bool,
    ) -> Arc<Self> {
        let hearing = Hearing::of(&terms.stored, &cluster.life.node, before);
        let nodes = hearing.nodes.len();
        tracing::info!(%epoch, nodes, %before, "this node is the coordinator, and hears the others");
        let namespace = cluster.namespace();
        let mut published = match before {
            Before::Own(_) => namespace.catalog().heard_publications(),
            Before::Kept(kept) => kept.published().clone(),
            Before::Nothing => BTreeMap::new(),
        };
        published.remove(&cluster.life);
        let removed = match before {
            Before::Own(Some(kept)) | Before::Kept(kept) => kept.removed(),
            Before::Own(None) | Before::Nothing => Vec::new(),
        };
        let has_all = is_complete && !matches!(before, Before::Nothing);
        namespace.catalog().remember_removed(&removed, has_all);
        if let Before::Own(Some(kept)) = before {
            // The tree is later than etcd: files that only etcd names were removed just before this node's daemon ended, whoever did it.
            let nameless = namespace.catalog().nameless(&kept.files().collect::<Vec<_>>());
            namespace.catalog().tell_removed_again(&nameless);
        }
        let catalog = Self::start(cluster, epoch, presence, terms, (published, hearing, is_complete));
        if let Before::Own(Some(kept)) | Before::Kept(kept) = before {
            catalog.lock().kept = kept.published().clone();
            catalog.keeping.begin();
        }
        catalog
    }

    /// Returns whether a node or Tier-3 is still to be heard.
    pub(super) fn hears_still(&self) -> bool {
        self.lock().hearing.is_open()
    }

    /// Waits until every member has been heard, or is gone.
    pub async fn nodes_heard(&self) {
        while !self.lock().hearing.nodes.is_empty() {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Notes that a node has published everything that it knows.
    pub(super) fn heard(&self, life: &NodeLife) {
        let lookups = self.lookups();
        let mut state = self.lock();
        if let Some(moved) = state.catching_up.remove(life) {
            // The directories that the node moved away are not its any more.
            state.leases.vacated(&life.node, &moved, |path| lookups.is_directory(path));
        }
        drop(state);
        self.end_of_hearing(|hearing| hearing.heard(life));
    }

    /// Notes that the names of Tier-3 are in the tree.
    pub fn heard_tier3(&self) {
        if self.lock().hearing.knows_nothing() {
            self.cluster.namespace().catalog().has_catalog_of(self.epoch);
        }
        let mut is_first = false;
        self.end_of_hearing(|hearing| {
            is_first = std::mem::take(&mut hearing.tier3);
            if is_first {
                hearing.say();
            }
        });
        if is_first {
            self.keeping.heard_tier3();
        }
    }

    /// Notes what was heard. Once all is, recalls what this node had changed by then: no catalog has that, and its calls asked nobody.
    fn end_of_hearing(&self, note: impl FnOnce(&mut Hearing)) {
        let ended = {
            let hearing = &mut self.lock().hearing;
            let was_open = hearing.is_open();
            note(hearing);
            was_open && !hearing.is_open()
        };
        if !ended {
            return;
        }
        match self.cluster.namespace().publications().changed_since_taken_up() {
            Some(changed) => {
                let changed: Vec<_> = changed.iter().map(Vec::as_slice).collect();
                changed.chunks(RECALLED_AT_ONCE).for_each(|some| self.recalls().after_own(some));
            }
            None => self.recalls().after_own(&[b""]),
        }
    }
}

impl Hearing {
    /// Begins for a coordinator on node `own` after one that stored these members.
    fn of(stored: &MemberList, own: &NodeName, before: &Before) -> Self {
        let lives = stored
            .members
            .iter()
            .map(|listed| NodeLife { node: listed.life.node.clone(), incarnation: listed.life.incarnation });
        Self {
            nodes: lives.filter(|life| life.node != *own).collect(),
            tier3: matches!(before, Before::Nothing),
            own: matches!(before, Before::Own(_)),
            ..Self::default()
        }
    }

    /// Returns whether this node's tree was the catalog before.
    pub(super) fn is_own(&self) -> bool {
        self.own
    }

    /// Returns whether a node or Tier-3 is still to be heard.
    pub(super) fn is_open(&self) -> bool {
        self.tier3 || !self.nodes.is_empty()
    }

    /// Returns whether the catalog is unknown until the names of Tier-3 are in the tree.
    pub(super) fn knows_nothing(&self) -> bool {
        self.tier3
    }

    /// Returns whether a life is still to be heard.
    pub(super) fn hears(&self, life: &NodeLife) -> bool {
        self.nodes.contains(life)
    }

    /// Returns whether a joining node has to publish the state of all its files, whatever it published before. It is asked with each join until
    /// it has: the answer to a join may be lost.
    pub(super) fn asks_states(&self, life: &NodeLife) -> bool {
        self.own && !self.told.contains(life)
    }

    /// Notes that a node has published the state of all its files.
    pub(super) fn told_all(&mut self, life: &NodeLife) {
        if self.own {
            self.told.insert(life.clone());
        }
    }

    /// Notes that a life was heard, or never will be.
    pub(super) fn heard(&mut self, life: &NodeLife) {
        if self.nodes.remove(life) {
            self.say();
        }
    }

    /// Notes that a node changed a name before all were heard.
    pub(super) fn note(&mut self, node: &NodeName, operation: &NameOperation) {
        for path in operation.paths() {
            self.note_in(node, split(path).0);
        }
        if self.is_open() {
            for path in operation.moved_directories() {
                self.moved.entry(path.to_vec()).or_default().insert(node.clone());
            }
        }
    }

    /// Notes that a node changed something in a directory before all were heard.
    pub(super) fn note_in(&mut self, node: &NodeName, directory: &[u8]) {
        if self.is_open() {
            self.changed.entry(directory.to_vec()).or_default().insert(node.clone());
        }
    }

    /// Returns whether a node that had a directory alone may have missed something there.
    pub(super) fn missed(&self, node: &NodeName, directory: &[u8]) -> bool {
        let by_others = |nodes: Option<&BTreeSet<NodeName>>| {
            nodes.is_some_and(|nodes| nodes.iter().any(|other| other != node))
        };
        by_others(self.changed.get(directory)) || upwards(directory).any(|at| by_others(self.moved.get(at)))
    }

    fn say(&mut self) {
        if self.nodes.is_empty() && !self.tier3 {
            (self.changed, self.moved) = (BTreeMap::new(), BTreeMap::new());
            tracing::info!("all nodes have been heard: names are answered for");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemark_protocol::cluster::kept::Mark;
    use tidemark_protocol::id::{Incarnation, StartId};
    use tidemark_protocol::label::Labels;
    use tidemark_protocol::membership::{Life, Listed};

    #[test]
    fn who_begins_again_waits_for_all_that_it_knew_but_itself_and_alone_for_nobody() {
        let listed = |at: u64| {
            let node = format!("n{at}").parse().unwrap();
            let life = Life { node, incarnation: Incarnation(at), start: StartId(at) };
            Listed { life, address: String::new(), labels: Labels::default() }
        };
        let own: NodeName = "n1".parse().unwrap();
        let hearing = |nodes: &[u64]| {
            let members = nodes.iter().map(|at| listed(*at)).collect();
            Hearing::of(&MemberList { members, ..MemberList::default() }, &own, &Before::Own(None))
        };
        assert!(!hearing(&[]).is_open() && !hearing(&[1]).is_open());
        let mut all = hearing(&[1, 2, 3]);
        for at in [2, 3] {
            assert!(all.is_open(), "node {at} has said nothing");
            let life = listed(at).life;
            all.heard(&NodeLife { node: life.node, incarnation: life.incarnation });
        }
        assert!(!all.is_open());
    }

    #[test]
    fn a_node_has_missed_what_another_changed_in_its_directory_and_where_that_was_moved_away() {
        let [a, b]: [NodeName; 2] = ["a", "b"].map(|node| node.parse().unwrap());
        let mut hearing = Hearing { tier3: true, ..Hearing::default() };
        let (from, to) = (b"run/x".to_vec(), b"done/x".to_vec());
        hearing.note(&a, &NameOperation::Renamed { from, to, exchange: false, what: None });
        let missed = |node, path: &str| hearing.missed(node, path.as_bytes());
        assert!(["run", "run/x", "run/x/below/it", "done", "done/x"].iter().all(|path| missed(&b, path)));
        assert!(["", "run/xy", "run/y", "done/y"].iter().all(|path| !missed(&b, path)));
        assert!(!missed(&a, "run/x"), "it did that itself");
        let mut heard = hearing;
        heard.tier3 = false;
        heard.say();
        assert!(!heard.missed(&b, b"run"));
    }

    #[test]
    fn a_catalog_that_lacks_a_step_that_etcd_had_taken_is_not_used() {
        let uses = |kept: (u64, u64), known: Option<(u64, u64)>| {
            let (epoch, number) = (Epoch(kept.0), kept.1);
            let mut found = KeptCatalog::default();
            found.mark = Mark { epoch, number, ..Mark::default() };
            let legacy = Legacy { kept: Some(found), ..Legacy::default() };
            let known = known.map(|(epoch, number)| StepNumber { epoch: Epoch(epoch), number });
            legacy.without_older(known).kept.is_some()
        };
        assert!(uses((3, 7), None) && uses((3, 7), Some((3, 7))) && uses((3, 8), Some((3, 7))));
        assert!(uses((4, 1), Some((3, 7))), "a later coordinator wrote");
        assert!(!uses((3, 6), Some((3, 7))) && !uses((3, 9), Some((4, 1))));
    }

    #[test]
    fn who_was_the_coordinator_last_has_the_newest_tree_also_where_its_members_were_not_stored() {
        let before = |own: Option<u64>, kept: Option<KeptCatalog>| {
            Before::of(own.map(Epoch), Epoch(5), kept).to_string()
        };
        let kept = || Some(KeptCatalog::default());
        assert_eq!([before(Some(5), None), before(Some(7), None), before(Some(7), kept())], ["own"; 3]);
        assert_eq!([before(Some(4), kept()), before(None, kept())], ["kept in etcd"; 2]);
        assert_eq!([before(Some(4), None), before(None, None)], ["unknown"; 2]);
    }
}
