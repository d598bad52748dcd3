//! The catalog in etcd: changes that are acknowledged there survive the coordinator.
//!
//! Owns: collecting the changes, the order in which they are written, and which callers wait for that. Does not own: requests
//! ([`CatalogLog`] makes them), the format (`protocol::cluster::kept`), how a successor uses it (`succeed`).
//!
//! Steps are made one after the other. The number in a step's mark says whether it arrived, so a step whose answer was lost is sent again.
//! A batch shows the tree at one moment, and is kept all or not at all: operations that a node sends again would not fit half of their
//! result.

use super::Catalog;
use std::collections::{BTreeMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidemark_engine::cluster::state_of;
use tidemark_namespace::{Moment, NamedNode, ROOT as TREE_ROOT, Unkept};
use tidemark_protocol::cluster::kept::{
    self, CatalogNode, Change, KeptCatalog, Mark, Process, ProcessFate, ROOT, VALUE_BYTES_MAX, Writer,
};
use tidemark_protocol::cluster::wire::{BATCH_BYTES_MAX, BATCH_ITEMS_MAX};
use tidemark_protocol::id::{Epoch, FileId, Incarnation};
use tidemark_protocol::key::NodeLife;
use tidemark_transport::{LinkErrorKind, Refusal};
use tokio::sync::Notify;

/// The most changes in a step. An etcd takes 128 operations in a transaction with its usual settings, of which the mark is one.
const CHANGES_MAX: usize = 120;

/// The most bytes of changes in a step, its last change apart. With that change, a request stays below the 1.5 MiB that an etcd takes with
/// its usual settings.
const CHANGES_BYTES_MAX: usize = 256 << 10;
const _: () = assert!(CHANGES_BYTES_MAX + VALUE_BYTES_MAX < 1 << 20, "etcd takes 1.5 MiB, and adds to it");

/// How long an acknowledgement waits. A node that is refused after that sends the publication again.
const KEPT_WAIT: Duration = Duration::from_secs(5);

/// The pause before a change that failed is sent again.
const SEND_AGAIN: Duration = Duration::from_millis(100);

/// The number of a part that means that no caller has to wait.
const NOBODY: u64 = u64::MAX;

/// Changes to be made in one step, if the catalog is still in the state of the previous mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    pub mark: Mark,
    pub changes: Vec<Change>,
}

/// Why a step was not made, or may not have been.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// Another coordinator writes to the catalog.
    #[error("another coordinator took over: {0}")]
    Lost(String),
    /// The catalog is in another state, and no coordinator wrote it.
    #[error("the catalog is not as it was left: {0}")]
    Changed(String),
    /// The space of etcd is used up.
    #[error("it is full, and this coordinator's memory alone has them: {0}")]
    Full(String),
    /// No answer came; the step may have been made.
    #[error("it does not answer, and names wait: {0}")]
    Away(String),
}

/// The store of the catalog.
#[async_trait::async_trait]
pub trait CatalogLog: Send + Sync + std::fmt::Debug {
    /// Makes a step. If it is asked for repeatedly, makes it once.
    ///
    /// # Errors
    /// See [`StepError`].
    async fn step(&self, step: &Step) -> Result<(), StepError>;
}

/// Progress of keeping the catalog.
#[derive(Debug)]
pub(super) struct Keeping {
    /// Lock for taking in a publication or collecting a part, one at a time.
    step: tokio::sync::Mutex<()>,
    /// Number of parts begun.
    begun: AtomicU64,
    /// The last publication of this node itself that was collected.
    own: AtomicU64,
    /// The last part up to which everything is kept.
    kept: tokio::sync::watch::Sender<u64>,
    /// Why the last step was not made; `None` if it was made.
    trouble: tokio::sync::watch::Sender<Option<String>>,
    /// Wakes the keeper once the names of Tier-3 are in the tree.
    tier3_heard: Notify,
    /// Whether the mark in etcd is of this coordinator, or etcd is full.
    announced: tokio::sync::watch::Sender<bool>,
}

impl Default for Keeping {
    fn default() -> Self {
        Self {
            step: tokio::sync::Mutex::default(),
            begun: AtomicU64::new(0),
            own: AtomicU64::new(0),
            kept: tokio::sync::watch::Sender::new(NOBODY),
            trouble: tokio::sync::watch::Sender::default(),
            tier3_heard: Notify::new(),
            announced: tokio::sync::watch::Sender::new(false),
        }
    }
}

impl Keeping {
    pub(super) async fn step(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.step.lock().await
    }

    /// Notes that all earlier changes are kept: callers wait for later ones from now on.
    pub(super) fn begin(&self) {
        self.kept(0);
    }

    /// Wakes the keeper of a catalog that was not known: the names of Tier-3 are in the tree.
    pub(super) fn heard_tier3(&self) {
        self.tier3_heard.notify_one();
    }

    fn kept(&self, part: u64) {
        self.kept.send_replace(part);
    }

    fn trouble(&self, why: Option<String>) {
        self.trouble.send_if_modified(|last| {
            let differs = *last != why;
            if differs {
                match &why {
                    Some(why) => tracing::warn!(%why, "the catalog is not kept in etcd"),
                    None => tracing::info!("the catalog is kept in etcd again"),
                }
                *last = why;
            }
            differs
        });
    }
}

/// A part of the catalog that is not kept yet.
#[derive(Debug)]
struct Part {
    unkept: Unkept,
    published: BTreeMap<NodeLife, u64>,
    /// The part's number among all parts.
    begun: u64,
    /// A moment of this tree: all changes until then are in this part or an earlier one.
    moment: Moment,
}

impl Catalog {
    /// Waits, up to a limit, until everything done so far is kept, and returns whether it is. Returns true at once if no etcd keeps the
    /// catalog, or if etcd is full: names then rest on the coordinator's memory alone, and its problems report that.
    pub(super) async fn is_kept_by_now(&self) -> bool {
        let begun = self.keeping.begun.load(Ordering::Acquire);
        let mut kept = self.keeping.kept.subscribe();
        if *kept.borrow() == NOBODY {
            return true;
        }
        // A part that has already begun may have been collected before the change.
        self.cluster.namespace().catalog().wake_keeper();
        let waited = tokio::time::timeout(KEPT_WAIT, kept.wait_for(|part| *part > begun)).await;
        matches!(waited, Ok(Ok(_)))
    }

    /// Waits until no reader of etcd can take an earlier coordinator for the last one, or until etcd is full.
    pub async fn announced(&self) {
        // The sender lives as long as this does.
        let _ = self.keeping.announced.subscribe().wait_for(|announced| *announced).await;
    }

    /// Returns the last publication of a life that its node may treat as answered.
    pub(super) fn answered_until(&self, life: &NodeLife, state: &super::State) -> Option<u64> {
        let taken = state.published.get(life).copied();
        if *self.keeping.kept.borrow() == NOBODY {
            return taken;
        }
        // If etcd has nothing of a life, nothing of it is answered, though this coordinator has taken some.
        state.kept.get(life).copied().or_else(|| taken.map(|_| 0))
    }

    /// Makes the refusal for a node that gets no answer because etcd is slow.
    pub(super) fn not_kept(&self) -> Refusal {
        let why = self.keeping.trouble.borrow().clone().unwrap_or_else(|| "it has not answered".to_owned());
        Refusal::new(
            LinkErrorKind::Unavailable,
            format!("the cluster's etcd has not taken the change yet: {why}; it is sent again"),
        )
    }

    /// Returns why the catalog is not kept where it should be, or `None` if it is. The receiver sees changes.
    #[must_use]
    pub fn watch_trouble(&self) -> tokio::sync::watch::Receiver<Option<String>> {
        self.keeping.trouble.subscribe()
    }

    /// Keeps changes in `log` until dropped; `before` is kept already. `is_complete`: the tree has become all of `before`.
    pub async fn keep(
        self: Arc<Self>,
        log: Arc<dyn CatalogLog>,
        mut before: Option<KeptCatalog>,
        is_complete: bool,
    ) {
        let keeper = Keeper { catalog: &self, log: log.as_ref() };
        loop {
            let why = keeper.keep_after(before.take(), is_complete).await;
            tracing::error!(%why, "the catalog in etcd is written anew");
        }
    }
}

/// Writes the catalog to its store, step by step.
#[derive(Clone, Copy)]
struct Keeper<'a> {
    catalog: &'a Catalog,
    log: &'a dyn CatalogLog,
}

impl Keeper<'_> {
    /// Returns only if all has to be written anew; the text says why.
    async fn keep_after(self, before: Option<KeptCatalog>, is_complete: bool) -> String {
        let namespace = self.catalog.cluster.namespace();
        let own = self.catalog.cluster.life.incarnation;
        let mut script = match before {
            Some(before) => {
                let (tree, by) = (Arc::clone(namespace), (self.catalog.epoch, own));
                let child = move |parent, name: &[u8]| tree.standing().child_number(parent, name);
                // Takes seconds with a large catalog.
                let script =
                    tokio::task::spawn_blocking(move || Script::after(before, by, is_complete, child));
                script.await.expect("comparing a catalog does not panic")
            }
            None => Script::anew(
                (self.catalog.epoch, own),
                self.catalog.cluster.said().last_step(self.catalog.epoch),
            ),
        };
        // The mark comes first: it says which coordinator writes, or that the content is of no use.
        if let Err(why) = self.write(&mut script).await {
            return why;
        }
        self.catalog.keeping.announced.send_replace(true);
        // Otherwise a successor would take a part of the names for all of them.
        while self.catalog.lock().hearing.knows_nothing() {
            self.catalog.keeping.tier3_heard.notified().await;
        }
        // The order matters: a change made in between is collected, and stays here in case it is not kept.
        self.catalog.keeping.kept(if script.is_whole() { 0 } else { NOBODY });
        namespace.publications().lead_outgoing(true);
        namespace.catalog().collect_unkept(!script.is_whole());
        {
            let mut state = self.catalog.lock();
            state.unkept = state.published.keys().cloned().collect();
            state.unkept.insert(self.catalog.cluster.life.clone());
        }
        loop {
            // Everything found until nothing is left shows one moment, that of the last part, and is kept in one step or not at all.
            let (last, begun) = loop {
                let Part { mut unkept, published, begun, moment } = self.next_part().await;
                script.take(&mut unkept, |node| {
                    let (node, names) = node;
                    CatalogNode { id: node.node, names, state: state_of(namespace, node) }
                });
                if unkept.all {
                    break ((unkept, published, moment), begun);
                }
                // No coordinator reads a catalog that is not whole, so its parts need not wait here for each other.
                if !script.is_whole() {
                    script.plan();
                    if let Err(why) = self.write(&mut script).await {
                        return why;
                    }
                }
            };
            let (unkept, published, moment) = last;
            let known = self.catalog.lock().kept.get(&self.catalog.cluster.life).copied();
            if known.is_none_or(|known| known < unkept.publication) {
                // The answer to the step may be lost, and then the number in etcd says whether it was made.
                self.catalog.cluster.note_told(unkept.publication, moment);
            }
            script.finish(&published);
            if let Err(why) = self.write(&mut script).await {
                return why;
            }
            self.catalog.cluster.note_told(unkept.publication, moment);
            namespace.publications().kept_until(unkept.publication, unkept.loss);
            self.catalog.lock().kept.extend(published);
            if *self.catalog.keeping.kept.borrow() == NOBODY {
                tracing::info!("the whole catalog is kept in etcd");
            }
            self.catalog.keeping.kept(begun);
            namespace.catalog().unkept_changed().await;
        }
    }

    /// Makes all planned steps, and sends each until it is made. The error says why all has to be written anew.
    async fn write(self, script: &mut Script) -> Result<(), String> {
        while let Some(step) = script.next_step() {
            match self.log.step(step).await {
                Ok(()) => {
                    self.catalog.keeping.trouble(None);
                    self.catalog.cluster.said().took_step(step.mark.step());
                    script.made();
                }
                Err(StepError::Changed(why)) => return Err(why),
                Err(StepError::Lost(why)) => {
                    // The task that renews the lease ends this one.
                    tracing::warn!(%why, "this coordinator's changes are not kept any more");
                    std::future::pending::<()>().await;
                }
                Err(error) => {
                    if matches!(error, StepError::Full(_)) {
                        self.catalog.keeping.kept(NOBODY);
                        self.catalog.keeping.announced.send_replace(true);
                    }
                    self.catalog.keeping.trouble(Some(error.to_string()));
                    tokio::time::sleep(SEND_AGAIN).await;
                }
            }
        }
        Ok(())
    }

    /// Takes the next part of the catalog that is not kept.
    async fn next_part(self) -> Part {
        let _step = self.catalog.keeping.step().await;
        let begun = self.catalog.keeping.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let moment = self.catalog.cluster.namespace().catalog().moment();
        let unkept = self.catalog.cluster.namespace().catalog().take_unkept(BATCH_ITEMS_MAX, BATCH_BYTES_MAX);
        let mut published = BTreeMap::new();
        // Only with the last part all names of a publication are there.
        if unkept.all {
            let mut state = self.catalog.lock();
            for life in std::mem::take(&mut state.unkept) {
                if let Some(number) = state.published.get(&life) {
                    published.insert(life, *number);
                }
            }
            // The coordinator's own operations count as published, too: its node continues from there if another node coordinates.
            let own = published.remove(&self.catalog.cluster.life);
            if own.is_some()
                || self.catalog.keeping.own.swap(unkept.publication, Ordering::Relaxed) != unkept.publication
            {
                published.insert(self.catalog.cluster.life.clone(), unkept.publication);
            }
        }
        Part { unkept, published, begun, moment }
    }
}

/// The steps to be made, and the state from which the next ones are planned.
#[derive(Debug)]
struct Script {
    writer: Writer,
    /// The mark of the last step that was planned.
    mark: Mark,
    /// Whether all of the tree has been planned.
    whole: bool,
    /// The life of this node.
    own: Incarnation,
    /// Whether the tree had everything of `before` when it was recovered.
    is_complete: bool,
    numbers: Numbers,
    /// Nodes and fates of the catalog before that the tree has not shown yet.
    before: Option<(BTreeMap<u64, CatalogNode>, BTreeMap<Process, ProcessFate>)>,
    /// Numbers in the catalog of the nodes that exist there.
    there: HashSet<u64>,
    found: Found,
    steps: VecDeque<Step>,
}

/// The changes since the last step was planned. `None`: removed.
#[derive(Debug, Default)]
struct Found {
    nodes: BTreeMap<u64, Option<CatalogNode>>,
    fates: BTreeMap<Process, Option<ProcessFate>>,
    removed: Vec<FileId>,
}

/// The numbers of the tree's nodes in the catalog.
#[derive(Debug)]
struct Numbers {
    /// The nodes that were in the catalog before.
    kept: BTreeMap<u64, u64>,
    /// The distance by which the numbers of all other nodes are higher than in the tree.
    above: u64,
}

impl Numbers {
    fn of(&self, node: u64) -> u64 {
        let known = self.kept.get(&node).copied();
        known.unwrap_or_else(|| if node == TREE_ROOT { ROOT } else { node.saturating_add(self.above) })
    }
}

impl Script {
    /// Begins a catalog of which nothing is in etcd, or nothing of use. `last`: the number of this coordinator's last step, 0 before the first.
    fn anew((epoch, own): (Epoch, Incarnation), last: u64) -> Self {
        let mut script = Self {
            writer: Writer::default(),
            mark: Mark { epoch, number: last, ..Mark::default() },
            whole: false,
            own,
            is_complete: true,
            numbers: Numbers { kept: BTreeMap::new(), above: 0 },
            before: None,
            there: HashSet::new(),
            found: Found::default(),
            steps: VecDeque::new(),
        };
        script.push(0, vec![Writer::delete_all()]);
        script
    }

    /// Begins after a catalog that is in etcd as `before` has it. `child` returns the number of a name in a directory of the present tree.
    /// If the tree is not `is_complete`, entries that it lacks stay in the catalog.
    fn after(
        before: KeptCatalog,
        (epoch, own): (Epoch, Incarnation),
        is_complete: bool,
        child: impl Fn(u64, &[u8]) -> Option<u64>,
    ) -> Self {
        let kept = before.numbers_in(TREE_ROOT, child);
        let lots = before.lots().to_vec();
        let mut script = Self {
            writer: Writer::after(&before),
            mark: Mark { epoch, number: 0, ahead_ns: before.ahead_ns, whole: true, lots: before.mark.lots },
            whole: true,
            own,
            is_complete,
            numbers: Numbers { kept, above: before.last_id() },
            there: before.ids().collect(),
            before: Some(before.into_parts()),
            found: Found::default(),
            steps: VecDeque::new(),
        };
        if lots.is_empty() {
            // Lots that the last coordinator wrote down and did not finish do not count.
            script.push(0, vec![kept::take_all_down()]);
        } else {
            script.push(script.mark.lots, Vec::new());
            script.make_lots(script.mark.lots, lots);
        }
        script
    }

    fn is_whole(&self) -> bool {
        self.whole
    }

    /// Adds a part. `node` returns a node with its numbers in the tree, on this node's clock.
    fn take(&mut self, unkept: &mut Unkept, node: impl Fn(NamedNode) -> CatalogNode) {
        let ahead_ns = self.mark.ahead_ns;
        let catalogs = |at: i64| at.saturating_sub(ahead_ns);
        for told in unkept.nodes.drain(..) {
            let CatalogNode { id, names, state } = node(told);
            let names = names.into_iter().map(|(parent, name)| (self.numbers.of(parent), name)).collect();
            let node = CatalogNode { id: self.numbers.of(id), names, state: state.with_times(catalogs) };
            let before = self.before.as_mut().and_then(|(nodes, _)| nodes.remove(&node.id));
            if before.as_ref() != Some(&node) {
                self.found.nodes.insert(node.id, Some(node));
            }
        }
        for gone in unkept.gone.drain(..) {
            let id = self.numbers.of(gone);
            self.numbers.kept.remove(&gone);
            if let Some((nodes, _)) = &mut self.before {
                nodes.remove(&id);
            }
            self.found.nodes.insert(id, None);
        }
        for fate in unkept.fates.drain(..) {
            let fate = ProcessFate { failed_at_ns: fate.failed_at_ns.map(catalogs), ..fate };
            let before = self.before.as_mut().and_then(|(_, fates)| fates.remove(&fate.of()));
            if before != Some(fate) {
                self.found.fates.insert(fate.of(), Some(fate));
            }
        }
        self.found.fates.extend(unkept.forgotten.drain(..).map(|process| (process, None)));
        self.found.removed.append(&mut unkept.removed);
    }

    /// Plans the changes found so far.
    fn plan(&mut self) {
        let changes = self.changes();
        self.push_all(changes, &BTreeMap::new());
    }

    /// Plans the last changes, with the publications that they complete: all of them are made, or none is.
    fn finish(&mut self, published: &BTreeMap<NodeLife, u64>) {
        // Nodes that the tree has not shown are gone. The fates of this node's own processes stay: a coordinator does not publish them.
        let (nodes, fates) = self.before.take().unwrap_or_default();
        if self.is_complete {
            self.found.nodes.extend(nodes.into_keys().map(|id| (id, None)));
        }
        let others = fates.into_keys().filter(|(home, ..)| *home != self.own);
        self.found.fates.extend(others.map(|process| (process, None)));
        let changes = self.changes();
        self.whole = true;
        self.push_all(changes, published);
    }

    fn changes(&mut self) -> Vec<Change> {
        let Found { nodes, fates, removed } = std::mem::take(&mut self.found);
        let mut changes = Vec::new();
        for (id, node) in nodes {
            match node {
                Some(node) => {
                    self.there.insert(id);
                    self.writer.node(node, &mut changes);
                }
                // A node whose names do not count was never written.
                None if self.there.remove(&id) => self.writer.gone(id, &mut changes),
                None => {}
            }
        }
        for (process, fate) in fates {
            match fate {
                Some(fate) => self.writer.fate(&fate, &mut changes),
                None => self.writer.forget_fate(process, &mut changes),
            }
        }
        for file in removed {
            self.writer.removed(file, &mut changes);
        }
        changes
    }

    fn push_all(&mut self, mut changes: Vec<Change>, published: &BTreeMap<NodeLife, u64>) {
        for (life, number) in published {
            self.writer.published(life, *number, &mut changes);
        }
        let mut lots = lots_of(changes);
        let was_whole = self.mark.whole;
        if lots.len() <= 1 {
            self.mark.whole |= self.whole;
            if let Some(lot) = lots.pop() {
                self.push(0, lot);
            } else if !was_whole && self.whole {
                self.push(0, Vec::new());
            }
            return;
        }
        if !was_whole {
            let last = lots.pop().unwrap_or_default();
            for lot in lots {
                self.push(0, lot);
            }
            self.mark.whole |= self.whole;
            self.push(0, last);
            return;
        }
        let lots: Vec<_> = (0..).zip(lots).collect();
        let count = u32::try_from(lots.len()).unwrap_or(u32::MAX);
        for (at, lot) in &lots {
            // With the last lot all of them count.
            let all = if at + 1 == count { count } else { 0 };
            self.push(all, vec![kept::write_down(*at, lot)]);
        }
        self.make_lots(count, lots);
    }

    /// Makes the changes of the lots.
    fn make_lots(&mut self, count: u32, lots: Vec<(u32, Vec<Change>)>) {
        for (at, mut lot) in lots {
            lot.push(kept::take_down(at));
            self.push(if at + 1 == count { 0 } else { count }, lot);
        }
    }

    fn push(&mut self, lots: u32, changes: Vec<Change>) {
        self.mark.number += 1;
        self.mark.lots = lots;
        self.steps.push_back(Step { mark: self.mark, changes });
    }

    /// Returns the step that is to be made, or made again; `None` if nothing is left.
    fn next_step(&self) -> Option<&Step> {
        self.steps.front()
    }

    fn made(&mut self) {
        self.steps.pop_front();
    }
}

/// Splits changes into lots that an etcd takes.
fn lots_of(changes: Vec<Change>) -> Vec<Vec<Change>> {
    let mut lots: Vec<Vec<Change>> = Vec::new();
    let mut bytes = 0;
    for change in changes {
        let is_full = |lot: &Vec<Change>| lot.len() >= CHANGES_MAX || bytes >= CHANGES_BYTES_MAX;
        if lots.last().is_none_or(is_full) {
            lots.push(Vec::new());
            bytes = 0;
        }
        bytes += change.bytes();
        lots.last_mut().expect("one was pushed").push(change);
    }
    lots
}

#[cfg(test)]
#[path = "keep_test.rs"]
mod tests;
