//! Takes publications into the tree.
//!
//! Owns: their order, times on the coordinator's clock, their effects on leases. Does not own: the tree.

use super::{Catalog, State};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use tidemark_namespace::{Namespace, OutgoingBody};
use tidemark_protocol::cluster::leases::Verdict;
use tidemark_protocol::cluster::wire::{Copies, NameOperation, NodeKind, NodeState, Publication, Published};
use tidemark_protocol::id::{Incarnation, SealNumber};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::path::{split, upwards};
use tidemark_transport::Refusal;

/// Most copies remembered of files whose homes have not published them: a new coordinator receives these while it begins.
const UNCLAIMED_MAX: usize = 1 << 16;

/// The facts about a file that a copy's holder published and the file's home did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum News {
    /// The file exists.
    File,
    /// The file was closed, with these bytes. The home, or the link to it, was lost before it published that.
    Bytes,
}

/// Returns the seal of a file by its published state.
fn seal_of(told: &NodeState) -> Option<SealNumber> {
    match &told.kind {
        NodeKind::File(facts) => facts.sealed(),
        NodeKind::Directory | NodeKind::Symlink { .. } => None,
    }
}

/// Returns the first name on a path that a tree lacks: whoever makes the path makes this name in a directory that is there.
fn first_missing<'a>(tree: &Namespace, path: &'a [u8]) -> Option<&'a [u8]> {
    upwards(path).take_while(|path| tree.nodes().node_at(path).is_none()).last()
}

/// Taking in what nodes publish and report.
#[derive(Clone, Copy)]
pub(super) struct Taking<'a> {
    pub(super) catalog: &'a Catalog,
}

impl Taking<'_> {
    /// Takes in a publication. A publication that was taken before is answered and not taken again.
    pub(super) async fn take(self, from: &NodeLife, publication: &Publication) -> Result<Published, Refusal> {
        let published = {
            // The names and the numbers of publications that are kept must belong together.
            let _step = self.catalog.keeping.step().await;
            self.take_now(from, publication)
        };
        if self.catalog.is_kept_by_now().await { Ok(published) } else { Err(self.catalog.not_kept()) }
    }

    fn take_now(self, from: &NodeLife, publication: &Publication) -> Published {
        let namespace = self.catalog.cluster.namespace();
        let now_ns = namespace.now_ns();
        {
            let mut state = self.catalog.lock();
            state.clocks.heard(from.incarnation, publication.now_ns, now_ns);
            let last = state.published.get(from).copied();
            match last {
                Some(last) if publication.number <= last => {
                    let same = publication.number == last;
                    return state.answers.get(from).filter(|_| same).cloned().unwrap_or_default();
                }
                Some(last) if publication.number == last + 1 => {}
                // Nothing can be missing in a publication of everything.
                _ if publication.whole => {}
                None if publication.number == 1 => {}
                _ => return Published { whole_wanted: true, shared: Vec::new() },
            }
        }
        self.catalog.counters.publications.fetch_add(1, Ordering::Relaxed);
        tracing::trace!(%from, ?publication, "a publication");
        // A coordinator that just began receives its own publication: this tree has everything that was done here.
        if *from != self.catalog.cluster.life {
            self.take_into_tree(from, publication, now_ns);
        }
        let published = self.take_into_leases(from, publication);
        // After that: a coordinator that is killed in between takes the last part again, and then must still know which names belong to
        // other nodes.
        if publication.whole && publication.last {
            namespace.catalog().told_all(from);
            self.catalog.lock().hearing.told_all(from);
        }
        published
    }

    fn take_into_tree(self, from: &NodeLife, publication: &Publication, now_ns: i64) {
        let namespace = self.catalog.cluster.namespace();
        namespace.mirror().follow(&publication.operations, from, publication.number);
        let told: Vec<_> = self.by_our_clock(from.incarnation, now_ns, |read| {
            publication.states.iter().map(|told| told.clone().with_times(&mut *read)).collect()
        });
        let states: Vec<_> = if publication.whole {
            told.into_iter().filter_map(|told| self.under_a_name_of_its_own(told, from)).collect()
        } else {
            told
        };
        let made = states.iter().filter(|_| publication.makes).flat_map(NodeState::paths);
        let made: Vec<_> = made.filter_map(|path| first_missing(namespace, path)).collect();
        let nameless = namespace.mirror().take_states(&states, from.incarnation, publication.makes);
        self.catalog.recalls().after_made(&from.node, &made);
        if publication.whole {
            // Between the parts of a full publication no other publication of the node is on its way: a file without a name here was
            // removed.
            tracing::debug!(%from, files = ?nameless, "files of a node that have no name any more");
            namespace.catalog().tell_removed_again(&nameless);
        }
        self.forget_unclaimed(&states);
        let mut fates: Vec<_> = publication
            .fates
            .iter()
            .chain(states.iter().flat_map(|told| match &told.kind {
                NodeKind::File(facts) if facts.file.incarnation == from.incarnation => {
                    facts.writers.as_slice()
                }
                _ => &[],
            }))
            .cloned()
            .collect();
        self.by_our_clock(from.incarnation, now_ns, |read| {
            for fact in &mut fates {
                fact.failed_at_ns = fact.failed_at_ns.map(&mut *read);
            }
        });
        namespace.catalog().take_fates(&fates, from.incarnation);
        self.tell_unknown_objects(from, &states);
    }

    /// Converts times of a life. All are read in one hold of the lock, so by one estimate: a beat may change it.
    fn by_our_clock<T>(
        self,
        of: Incarnation,
        now_ns: i64,
        convert: impl FnOnce(&mut dyn FnMut(i64) -> i64) -> T,
    ) -> T {
        let clocks = &mut self.catalog.lock().clocks;
        convert(&mut |at| clocks.read(of, at, now_ns))
    }

    fn take_into_leases(self, from: &NodeLife, publication: &Publication) -> Published {
        let namespace = self.catalog.cluster.namespace();
        let paths = |operation: &NameOperation| {
            let path = operation.path().to_vec();
            namespace.nodes().other_names(&path).into_iter().chain([path]).collect::<Vec<_>>()
        };
        let changed: Vec<_> = publication.operations.iter().flat_map(paths).collect();
        // States end no promise: how a file stands is published while a later call works on its name. Who asks for a file that was begun anew
        // has its node asked.
        let told = publication.operations.iter().flat_map(NameOperation::paths);
        let there: Vec<_> = told.filter(|path| namespace.nodes().node_at(path).is_some()).collect();
        let mut shared = Vec::new();
        let now = self.catalog.now();
        let mut state = self.catalog.lock();
        for operation in &publication.operations {
            state.hearing.note(&from.node, operation);
        }
        for path in changed {
            // The change was made in an outage in a directory that another node has alone, or on a file with a name there. That node has to
            // look again. Not waited for: it may be publishing itself.
            let directory = split(&path).0.to_vec();
            if let Verdict::PublishFirst(holder) = state.leases.read(&from.node, &directory, None, now) {
                state.outbox.recalls.insert((holder, directory));
                self.catalog.woken.notify_one();
            }
        }
        for operation in &publication.operations {
            // A node that moves or removes a directory evicts the others from it before. If that did not happen, the others still have it alone.
            for path in operation.moved_directories() {
                let holders = state.leases.holders_below(&from.node, path);
                if !holders.is_empty() {
                    state.outbox.recalls.extend(holders);
                    self.catalog.woken.notify_one();
                }
            }
            // Where the node could ask before, these nodes have forgotten it already.
            if matches!(operation, NameOperation::Removed { .. } | NameOperation::Renamed { .. }) {
                for path in operation.paths() {
                    let knowing = state.leases.take_knowing(&from.node, path, now);
                    state.outbox.forgets.extend(knowing);
                }
                if !state.outbox.forgets.is_empty() {
                    self.catalog.woken.notify_one();
                }
            }
            let State { leases, catching_up, .. } = &mut *state;
            let is_its_own = match catching_up.get_mut(from) {
                Some(moved) => {
                    moved.extend(operation.moved_directories().map(<[u8]>::to_vec));
                    leases.follow_late(&from.node, operation)
                }
                None => leases.follow(&from.node, operation),
            };
            if !is_its_own {
                shared.push(operation.path().to_vec());
            }
        }
        for path in there {
            state.leases.published_at(&from.node, path);
        }
        namespace.catalog().took_publication(from, publication.number);
        state.published.insert(from.clone(), publication.number);
        state.unkept.insert(from.clone());
        let published = Published { whole_wanted: false, shared };
        state.answers.insert(from.clone(), published.clone());
        published
    }

    /// Returns the state under the first of its names that does not belong to another node by now; `None` if all do.
    fn under_a_name_of_its_own(self, told: NodeState, from: &NodeLife) -> Option<NodeState> {
        if !self.is_others(&told.path, &told.kind, from) {
            return Some(told);
        }
        let own = |path: &&Vec<u8>| !self.is_others(path, &told.kind, from);
        let path = told.other_names.iter().flatten().find(own)?.clone();
        Some(NodeState { path, ..told })
    }

    /// Returns whether the name belongs to another node by now. A node that publishes everything was away, or publishes to a coordinator
    /// that knows nothing.
    fn is_others(self, path: &[u8], kind: &NodeKind, from: &NodeLife) -> bool {
        let Some(here) = self.catalog.cluster.namespace().standing().outgoing_at(path) else { return false };
        let made_while_away = || self.catalog.cluster.namespace().catalog().made_while_away(from);
        let made_since = || made_while_away().is_some_and(|made| made.contains(&here.node));
        let others = match (&here.body, kind) {
            (OutgoingBody::File(view), NodeKind::File(facts)) if facts.file == view.file => false,
            (OutgoingBody::File(view), _) => view.file.incarnation != from.incarnation,
            (OutgoingBody::Symlink(here), NodeKind::Symlink { target }) if here == target => false,
            (OutgoingBody::Directory, NodeKind::Directory) => false,
            (OutgoingBody::Symlink(_) | OutgoingBody::Directory, _) => made_since(),
        };
        if others {
            let path = String::from_utf8_lossy(path);
            tracing::warn!(%path, %from, "two nodes have something of this name; the one that was away gives way");
        }
        others
    }

    /// Notifies a node of those of its bytes that Tier-3 has, too, where the node does not say so itself. The node may have missed the
    /// notice, or may have received the bytes since.
    fn tell_unknown_objects(self, to: &NodeLife, has: &[NodeState]) {
        let namespace = self.catalog.cluster.namespace();
        let unknown = has.iter().filter_map(|told| {
            let NodeKind::File(facts) = &told.kind else { return None };
            let lacks = facts.host && facts.object.is_none();
            let OutgoingBody::File(view) =
                lacks.then(|| namespace.standing().outgoing_anywhere(facts.file))??.body
            else {
                return None;
            };
            let object = view.object.filter(|_| view.last_seal == facts.seal)?;
            Some((facts.file, facts.seal, object))
        });
        let unknown: Vec<_> = unknown.collect();
        if !unknown.is_empty() {
            self.catalog.cluster.tell_objects_to(to, unknown);
        }
    }

    /// Returns whether the name leads elsewhere by now: the holder of a copy knows the file's name from the time of the copy.
    fn is_anothers(self, told: &NodeState) -> bool {
        self.catalog.cluster.namespace().standing().outgoing_at(&told.path).is_some()
    }

    /// Notes copies that a node keeps for others.
    pub(super) fn take_copies(self, from: &NodeLife, copies: &Copies) {
        self.catalog.cluster.holders.take(&from.node, copies);
        self.tell_unknown_objects(from, &copies.kept);
        {
            let mut state = self.catalog.lock();
            for (file, seal) in &copies.dropped {
                if state.unclaimed.get(file).is_some_and(|(_, kept)| seal_of(kept) == Some(*seal)) {
                    state.unclaimed.remove(file);
                }
            }
        }
        let namespace = self.catalog.cluster.namespace();
        // The names of these files were removed while this node could not be notified.
        let files = copies.kept.iter().filter_map(|told| match &told.kind {
            NodeKind::File(facts) => Some(facts.file),
            NodeKind::Directory | NodeKind::Symlink { .. } => None,
        });
        let is_nameless = |file: &_| {
            namespace.catalog().was_removed(*file) && namespace.standing().outgoing_anywhere(*file).is_none()
        };
        namespace.catalog().tell_removed_again(&files.filter(is_nameless).collect::<Vec<_>>());
        // Holders of copies know what a lost node wrote.
        for told in &copies.kept {
            let NodeKind::File(facts) = &told.kind else { continue };
            let home = facts.file.incarnation;
            let Some(news) = self.news_in(told).filter(|_| home != self.catalog.cluster.life.incarnation)
            else {
                continue;
            };
            if self.catalog.cluster.following.member_of(home).is_some_and(|member| !member.gone) {
                // The home will publish the file itself, or be gone.
                let mut state = self.catalog.lock();
                let counts = state.hearing.is_open() || news == News::Bytes;
                let known = state.unclaimed.get(&facts.file).and_then(|(_, kept)| seal_of(kept));
                if counts && known < facts.sealed() && state.unclaimed.len() < UNCLAIMED_MAX {
                    state.unclaimed.insert(facts.file, (news, told.clone()));
                }
            } else {
                self.take_news(news, told, home);
            }
        }
    }

    /// Takes the news of a copy's holder of a file of the life `home`, which is gone. A node that has the directory alone in which a name is
    /// made for it has to look again.
    fn take_news(self, news: News, told: &NodeState, home: Incarnation) {
        let makes = news == News::File;
        let namespace = self.catalog.cluster.namespace();
        let made = told.paths().filter(|_| makes).filter_map(|path| first_missing(namespace, path));
        let made: Vec<_> = made.collect();
        // The holder tells the home's times.
        let told = self.by_our_clock(home, namespace.now_ns(), |read| told.clone().with_times(read));
        namespace.mirror().take_states(std::slice::from_ref(&told), home, makes);
        self.catalog.recalls().after_made(&self.catalog.cluster.life.node, &made);
    }

    /// Returns the news in a copy holder's state of the file; `None` if all is known.
    fn news_in(self, told: &NodeState) -> Option<News> {
        let NodeKind::File(facts) = &told.kind else { return None };
        match self.catalog.cluster.namespace().standing().outgoing_anywhere(facts.file) {
            None => (!self.is_anothers(told)).then_some(News::File),
            Some(node) => match &node.body {
                OutgoingBody::File(view) if facts.sealed() > Some(view.last_seal) => Some(News::Bytes),
                OutgoingBody::File(_) | OutgoingBody::Directory | OutgoingBody::Symlink(_) => None,
            },
        }
    }

    /// Forgets the states from copy holders of files that their home has now published itself.
    fn forget_unclaimed(self, states: &[NodeState]) {
        let mut state = self.catalog.lock();
        for told in states {
            if let NodeKind::File(facts) = &told.kind
                && state.unclaimed.get(&facts.file).is_some_and(|(_, kept)| seal_of(kept) <= facts.sealed())
            {
                state.unclaimed.remove(&facts.file);
            }
        }
    }

    /// Uses the states from copy holders for the files of a life that will publish nothing more.
    pub(super) fn claim_for(self, life: &NodeLife) {
        let claimed = {
            let mut state = self.catalog.lock();
            let (theirs, mut others): (BTreeMap<_, _>, BTreeMap<_, _>) = std::mem::take(&mut state.unclaimed)
                .into_iter()
                .partition(|(file, _)| file.incarnation == life.incarnation);
            // Once all nodes have been heard, the living ones have published which files exist.
            let hears = state.hearing.is_open();
            others.retain(|_, (news, _)| hears || *news == News::Bytes);
            state.unclaimed = others;
            theirs
        };
        for (_, told) in claimed.values() {
            if let Some(news) = self.news_in(told) {
                self.take_news(news, told, life.incarnation);
            }
        }
    }
}
