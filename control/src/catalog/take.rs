//! Taking publications into the tree.
//!
//! Owns: their order, times on our clock, what they mean for leases. Does not own: the tree.

use super::Catalog;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use tidemark_engine::namespace::OutgoingBody;
use tidemark_protocol::cluster::leases::Verdict;
use tidemark_protocol::cluster::wire::{Copies, NameOperation, NodeKind, NodeState, Publication, Published};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::path::split;
use tidemark_transport::Refusal;

/// Copies remembered of files that nobody has told of yet: what a new coordinator hears while it begins.
const UNCLAIMED_MAX: usize = 1 << 16;

impl Catalog {
    /// Takes a publication in. One that was taken before is answered and not taken again.
    pub(super) async fn take(
        &self,
        from: &NodeLife,
        publication: &Publication,
    ) -> Result<Published, Refusal> {
        let published = {
            // What the deputy is told of names and of numbers of publications must belong together.
            let _step = self.deputy.step().await;
            self.take_now(from, publication)
        };
        self.kept_by_deputy().await;
        Ok(published)
    }

    fn take_now(&self, from: &NodeLife, publication: &Publication) -> Published {
        let namespace = self.cluster.namespace();
        let now_ns = namespace.now_ns();
        {
            let mut state = self.lock();
            state.clocks.heard(from.incarnation, publication.now_ns, now_ns);
            let last = state.published.get(from).copied();
            match last {
                Some(last) if publication.number <= last => return Published::default(),
                Some(last) if publication.number == last + 1 => {}
                // Nothing is missing when everything comes.
                _ if publication.whole => {}
                None if publication.number == 1 => {}
                _ => return Published { whole_wanted: true, shared: Vec::new() },
            }
        }
        self.counters.publications.fetch_add(1, Ordering::Relaxed);
        tracing::trace!(%from, ?publication, "a publication");
        // A coordinator that just began hears itself: this tree has all that was done here.
        if *from != self.cluster.life {
            self.take_into_tree(from, publication, now_ns);
        }
        self.take_into_leases(from, publication)
    }

    fn take_into_tree(&self, from: &NodeLife, publication: &Publication, now_ns: i64) {
        let namespace = self.cluster.namespace();
        namespace.follow(&publication.operations, from, publication.number);
        let clocks = self.lock().clocks.clone();
        let read = |at| clocks.read(from.incarnation, at, now_ns);
        let told = publication.states.iter().map(|told| told.clone().with_times(read));
        let states: Vec<_> = if publication.whole {
            told.filter_map(|told| self.under_a_name_of_its_own(told, from)).collect()
        } else {
            told.collect()
        };
        let nameless = namespace.take_states(&states, from.incarnation, publication.makes);
        if publication.whole {
            // Between the parts of a whole nothing of a node is on its way: what has no name here was taken from it.
            tracing::debug!(%from, files = ?nameless, "files of a node that have no name any more");
            namespace.tell_removed_again(&nameless);
        }
        let fates: Vec<_> = publication
            .fates
            .iter()
            .chain(states.iter().flat_map(|told| match &told.kind {
                NodeKind::File(facts) if facts.file.incarnation == from.incarnation => {
                    facts.writers.as_slice()
                }
                _ => &[],
            }))
            .map(|fact| {
                let mut fact = fact.clone();
                fact.failed_at_ns = fact.failed_at_ns.map(read);
                fact
            })
            .collect();
        namespace.take_fates(&fates, from.incarnation);
        self.tell_unknown_objects(from, &states);
    }

    fn take_into_leases(&self, from: &NodeLife, publication: &Publication) -> Published {
        let namespace = self.cluster.namespace();
        let paths = |operation: &NameOperation| {
            let path = operation.path().to_vec();
            namespace.other_names(&path).into_iter().chain([path]).collect::<Vec<_>>()
        };
        let changed: Vec<_> = publication.operations.iter().flat_map(paths).collect();
        let mut shared = Vec::new();
        let now = self.now();
        let mut state = self.lock();
        for operation in &publication.operations {
            state.hearing.note(&from.node, operation);
        }
        for path in changed {
            // Made in an outage in a directory that another node has alone, or done to a file that has a name there, too: that one is to
            // look again. Not waited for: it may be publishing itself.
            let directory = split(&path).0.to_vec();
            if let Verdict::PublishFirst(holder) = state.leases.read(&from.node, &directory, None, now) {
                state.outbox.recalls.push((holder, directory));
                self.woken.notify_one();
            }
        }
        for operation in &publication.operations {
            if !state.leases.follow(&from.node, operation) {
                shared.push(operation.path().to_vec());
            }
        }
        // A file that was begun anew under a name that was promised.
        for told in &publication.states {
            state.leases.published_at(&from.node, &told.path);
        }
        namespace.took_publication(from, publication.number);
        state.published.insert(from.clone(), publication.number);
        state.untold.insert(from.clone());
        Published { whole_wanted: false, shared }
    }

    /// The state under the first of its names that is not another node's by now; none where all are.
    fn under_a_name_of_its_own(&self, told: NodeState, from: &NodeLife) -> Option<NodeState> {
        if !self.is_others(&told.path, &told.kind, from) {
            return Some(told);
        }
        let own = |path: &&Vec<u8>| !self.is_others(path, &told.kind, from);
        let path = told.other_names.iter().flatten().find(own)?.clone();
        Some(NodeState { path, ..told })
    }

    /// Whether the name is another node's file by now: who tells everything was away, or tells a coordinator that knows nothing.
    fn is_others(&self, path: &[u8], kind: &NodeKind, from: &NodeLife) -> bool {
        let Some(here) = self.cluster.namespace().outgoing_at(path) else { return false };
        let OutgoingBody::File(view) = &here.body else { return false };
        let same = matches!(kind, NodeKind::File(facts) if facts.file == view.file);
        let others = !same && view.file.incarnation != from.incarnation;
        if others {
            let path = String::from_utf8_lossy(path);
            tracing::warn!(%path, %from, kept = %view.file, "two nodes have something of this name; the one that was away gives way");
        }
        others
    }

    /// Tells a node which of the bytes that it has Tier-3 has, too, where it does not say so itself: it may have missed the word when
    /// they got there, or have got them since.
    fn tell_unknown_objects(&self, to: &NodeLife, has: &[NodeState]) {
        let namespace = self.cluster.namespace();
        let unknown = has.iter().filter_map(|told| {
            let NodeKind::File(facts) = &told.kind else { return None };
            let lacks = facts.host && facts.object.is_none();
            let OutgoingBody::File(view) = lacks.then(|| namespace.outgoing_anywhere(facts.file))??.body
            else {
                return None;
            };
            let object = view.object.filter(|_| view.last_seal == facts.seal)?;
            Some((facts.file, facts.seal, object))
        });
        let unknown: Vec<_> = unknown.collect();
        if !unknown.is_empty() {
            self.cluster.tell_objects_to(to, unknown);
        }
    }

    /// Whether the name means something else by now: who keeps a copy knows what the file was called when it was made.
    fn is_anothers(&self, told: &NodeState) -> bool {
        self.cluster.namespace().outgoing_at(&told.path).is_some()
    }

    /// Notes copies that a node keeps for others.
    pub(super) fn take_copies(&self, from: &NodeLife, copies: &Copies) {
        self.cluster.take_copies(&from.node, copies);
        self.tell_unknown_objects(from, &copies.kept);
        let namespace = self.cluster.namespace();
        // Their names were taken away while this node could not be told.
        let files = copies.kept.iter().filter_map(|told| match &told.kind {
            NodeKind::File(facts) => Some(facts.file),
            NodeKind::Directory | NodeKind::Symlink { .. } => None,
        });
        let is_nameless =
            |file: &_| namespace.was_removed(*file) && namespace.outgoing_anywhere(*file).is_none();
        namespace.tell_removed_again(&files.filter(is_nameless).collect::<Vec<_>>());
        // Holders of copies know what a lost node wrote.
        for told in &copies.kept {
            let NodeKind::File(facts) = &told.kind else { continue };
            let home = facts.file.incarnation;
            let known = namespace.outgoing_anywhere(facts.file).is_some();
            if home == self.cluster.life.incarnation || known || self.is_anothers(told) {
                continue;
            }
            if self.cluster.member_of(home).is_some_and(|member| !member.gone) {
                // It will say so itself, or be gone.
                let mut state = self.lock();
                if state.hearing.is_open() && state.unclaimed.len() < UNCLAIMED_MAX {
                    state.unclaimed.insert(facts.file, told.clone());
                }
            } else {
                namespace.take_states(std::slice::from_ref(told), home, true);
            }
        }
    }

    /// A node will say nothing any more: what others said of its files counts.
    pub(super) fn claim_for(&self, life: &NodeLife) {
        let claimed = {
            let mut state = self.lock();
            let (theirs, others): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut state.unclaimed)
                .into_iter()
                .partition(|(file, _)| file.incarnation == life.incarnation);
            // Once all have been heard, whoever lives has said it.
            state.unclaimed = if state.hearing.is_open() { others } else { BTreeMap::new() };
            theirs
        };
        let namespace = self.cluster.namespace();
        let unknown = claimed
            .into_iter()
            .filter(|(file, told)| namespace.outgoing_anywhere(*file).is_none() && !self.is_anothers(told));
        let states: Vec<_> = unknown.map(|(_, told)| told).collect();
        namespace.take_states(&states, life.incarnation, true);
    }
}
