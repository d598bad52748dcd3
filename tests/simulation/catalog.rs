//! The catalog: answers for names, and applies what nodes publish, as control's `catalog::{look, take, whereabouts}` do.
//!
//! Owns: which node to ask first, the effect of a publication on the tree and the leases, which node has which bytes. Does not
//! own: which node may have a lease (protocol), members (`coordinator`).

use super::exec::within;
use super::network::{Answer, From, Refused};
use super::tree::{Entry, join as join_path, split};
use super::world::show;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::cluster::leases::Verdict as LeaseVerdict;
use tidemark_protocol::cluster::wire::{
    self, Copies, FileFacts, Intent, Leave, Look, Looked, NameOperation, NodeKind, NodeState, Publication,
    Published, ToCoordinator, ToNode, Whereabouts, WireState,
};
use tidemark_protocol::id::{FileId, Incarnation, NodeName, SealNumber};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership::Standing;

use super::coordinator::{Catalog, NODE_DEADLINE, State};
/// Most nodes that are asked in turn for one answer.
const ROUNDS_MAX: usize = 16;
const TAKE_BACK_AGAIN: Duration = Duration::from_millis(500);

impl Catalog {
    // Answers.

    pub(crate) async fn answer(self: &Rc<Self>, from: From, message: ToCoordinator) -> Answer {
        if self.is_closed() {
            return Err(Refused::Unavailable("this is not the coordinator any more".to_owned()));
        }
        if !matches!(message, ToCoordinator::Join(_)) && from.life != self.node.memory.life {
            self.check_member(&from)?;
        }
        let bytes = match message {
            ToCoordinator::Join(join) => wire::encode(&self.join(&from, join).await?),
            ToCoordinator::Publish(publication) => {
                let published = self.take(&from.life, &publication);
                self.take_back(&from.life, &publication);
                wire::encode(&published)
            }
            ToCoordinator::Look(look) => wire::encode(&self.look(&from.life.node, &look).await?),
            ToCoordinator::List { path } => wire::encode(&self.list(&from.life.node, &path).await?),
            ToCoordinator::Where { file, .. } => wire::encode(&self.where_is(file)),
            ToCoordinator::Copies(copies) => {
                self.take_copies(&from.life, &copies);
                wire::encode(&())
            }
            ToCoordinator::Beat(_)
            | ToCoordinator::Members
            | ToCoordinator::Find { .. }
            | ToCoordinator::Reported
            | ToCoordinator::Time { .. } => unreachable!("nobody asks that here"),
        };
        if self.is_closed() {
            return Err(Refused::Unavailable("this is not the coordinator any more".to_owned()));
        }
        Ok(bytes.expect("no answer is that large here"))
    }

    async fn look(self: &Rc<Self>, from: &NodeName, look: &Look) -> Result<Looked, Refused> {
        let Look { directory, name, intent } = look;
        let now = || self.node.world.now();
        if *intent == Intent::Read {
            let verdict = self.state.borrow().leases.read(from, directory, Some(name), now());
            if let LeaseVerdict::PublishFirst(holder) = verdict {
                self.recall(&holder, directory, Some(name), false).await?;
            }
            return self.looked(look, Leave::None).await;
        }
        for _ in 0..ROUNDS_MAX {
            if *intent == Intent::Move {
                let holders = self.state.borrow().leases.holders_below(from, &join_path(directory, name));
                for (holder, path) in holders {
                    self.recall(&holder, &path, None, true).await?;
                }
            }
            let verdict = self.state.borrow_mut().leases.change(from, directory, name, now());
            match verdict {
                LeaseVerdict::Busy(holder) | LeaseVerdict::PublishFirst(holder) => {
                    self.recall(&holder, directory, Some(name), false).await?;
                }
                LeaseVerdict::RecallFirst(holder) => self.recall(&holder, directory, None, true).await?,
                LeaseVerdict::Answer | LeaseVerdict::Promised => return self.looked(look, Leave::Name).await,
                LeaseVerdict::Alone => {
                    // A node that has a directory alone answers for names missing in it.
                    if !self.knows_all() {
                        return self.looked(look, Leave::Name).await;
                    }
                    let entries = self.node.memory.tree.borrow().entries(directory).unwrap_or_default();
                    return self.looked(look, Leave::Directory { entries, seen: false }).await;
                }
                LeaseVerdict::Moving(_) => unreachable!("no move is noted here"),
                LeaseVerdict::TooMany => return Err(Refused::Unavailable("too many promises".to_owned())),
            }
        }
        Err(Refused::Unavailable("other nodes keep changing this name".to_owned()))
    }

    async fn list(self: &Rc<Self>, from: &NodeName, path: &[u8]) -> Result<Option<Vec<NodeState>>, Refused> {
        let now = self.node.world.now();
        let (verdict, promised) = {
            let state = self.state.borrow();
            (state.leases.read(from, path, None, now), state.leases.promised_in(path, from, now))
        };
        if let LeaseVerdict::PublishFirst(holder) = verdict {
            self.recall(&holder, path, None, false).await?;
        }
        for holder in promised {
            self.recall(&holder, path, None, false).await?;
        }
        if !self.knows_all() {
            return Err(Refused::Unavailable("not every node has told what it has".to_owned()));
        }
        Ok(self.node.memory.tree.borrow().entries(path))
    }

    async fn looked(self: &Rc<Self>, look: &Look, leave: Leave) -> Result<Looked, Refused> {
        let tree = || self.node.memory.tree.borrow();
        let path = join_path(&look.directory, &look.name);
        let mut found = tree().state_of(&path);
        if let Some(home) = found.as_ref().and_then(unsettled_home)
            && home != self.node.memory.life.incarnation
            && let Some(holder) = self.name_of(home)
            && self.recall(&holder, &look.directory, None, false).await.is_ok()
        {
            found = tree().state_of(&path);
        }
        let directory = tree().directory(&look.directory).is_some();
        if (found.is_none() || !directory) && !self.knows_all() {
            return Err(Refused::Unavailable("not every node has told what it has".to_owned()));
        }
        Ok(Looked { found, directory, leave })
    }

    fn name_of(&self, life: Incarnation) -> Option<NodeName> {
        let state = self.state.borrow();
        let mut members = state.membership.members();
        let member = members.find(|member| {
            member.life.incarnation == life && !matches!(member.standing, Standing::Gone { .. })
        })?;
        Some(member.life.node.clone())
    }

    /// Makes a node publish, once it is done with `name`. With `release`, the node also gives the directory back.
    pub(crate) async fn recall(
        self: &Rc<Self>,
        holder: &NodeName,
        path: &[u8],
        name: Option<&[u8]>,
        release: bool,
    ) -> Result<(), Refused> {
        let promise = name.and_then(|name| self.state.borrow().leases.promise_of(holder, path, name));
        let lease = self.state.borrow().leases.lease_of(holder, path).filter(|_| release);
        let done = || {
            let mut state = self.state.borrow_mut();
            if let (Some(name), Some(promise)) = (name, promise) {
                state.leases.published(path, name, promise);
            }
            if let Some(lease) = lease {
                state.leases.released(path, lease);
            }
        };
        let owned = name.map(<[u8]>::to_vec);
        if *holder == self.node.memory.life.node {
            self.node.recalled(path, owned, release).await?;
            done();
            return Ok(());
        }
        let standing = self.state.borrow().membership.member(holder).map(|member| member.standing.clone());
        if matches!(standing, None | Some(Standing::Gone { .. })) {
            self.state.borrow_mut().leases.gone(holder);
            return Ok(());
        }
        let to = self.node.world.index_of(holder).expect("a member is a machine");
        let message = ToNode::Recall { epoch: self.epoch, path: path.to_vec(), name: owned, release };
        match self.node.ask_node::<()>(to, &message, NODE_DEADLINE).await {
            Ok(()) => {
                done();
                Ok(())
            }
            Err(away) => Err(Refused::Unavailable(format!("{holder} does not answer: {away:?}"))),
        }
    }

    // Publications.

    fn take(&self, from: &NodeLife, publication: &Publication) -> Published {
        let now_ns = self.node.now_ns();
        let mut state = self.state.borrow_mut();
        state.clocks.heard(from.incarnation, publication.now_ns, now_ns);
        let last = state.published.get(from).copied();
        match last {
            Some(last) if publication.number <= last => return Published::default(),
            Some(last) if publication.number == last + 1 => {}
            _ if publication.whole => {}
            None if publication.number == 1 => {}
            _ => return Published { whole_wanted: true, shared: Vec::new() },
        }
        let mut tree = self.node.memory.tree.borrow_mut();
        let home = from.incarnation;
        let mut shared = Vec::new();
        for operation in &publication.operations {
            self.node
                .world
                .note(|| format!("{} hears from {}: {}", self.node.name(), from.node, spoken(operation)));
            tree.follow(operation, home);
            state.note(from, operation, &mut shared);
        }
        for told in &publication.states {
            let told = state.on_our_clock(told, from, now_ns);
            // If the file's home has published it, this node's view of it counts for less.
            if let Some(file) = file_of(&told).map(|facts| facts.file)
                && file.incarnation != home
                && state.has_told.contains(&file.incarnation)
                && !tree.paths.contains_key(&file)
            {
                continue;
            }
            // The home knows its file's present path better than a node with an older copy.
            if publication.whole
                && !state.has_told.contains(&home)
                && let Some(facts) = file_of(&told).filter(|facts| facts.file.incarnation == home)
                && tree.paths.get(&facts.file).is_some_and(|path| *path != told.path)
            {
                tree.settle_name(&told.path, Some(&told), u64::MAX);
            }
            let other = file_of(&told).and_then(|facts| match tree.names.get(&told.path) {
                Some(Entry::File(other)) if *other != facts.file && facts.file.incarnation == home => {
                    Some(*other)
                }
                _ => None,
            });
            // A node's own file replaces another node's file at the same name, if that one is older or its home has not published
            // it.
            if let (Some(other), true) = (other, publication.whole) {
                let published = |facts: Option<&FileFacts>| facts.map(|facts| facts.published_ns);
                let newer = published(file_of(&told)) > published(tree.facts_of(other).as_ref());
                if newer || !state.has_told.contains(&other.incarnation) {
                    tree.settle_name(&told.path, Some(&told), u64::MAX);
                }
            }
            take_if_free(&mut tree, &told, home);
            state.keep_promise(from, &told.path);
        }
        if publication.whole {
            let own = publication.states.iter().filter(|told| home_of(told) == Some(home));
            let files = own.filter_map(|told| file_of(told).map(|facts| facts.file));
            state.telling.entry(home).or_default().extend(files);
            if publication.last {
                let all = state.telling.remove(&home).unwrap_or_default();
                // Files that the publishing node no longer has may still be in the tree, because other nodes reported them.
                let gone: Vec<_> = tree
                    .paths
                    .iter()
                    .filter(|(file, _)| file.incarnation == home && !all.contains(file))
                    .map(|(_, path)| path.clone())
                    .collect();
                for path in gone {
                    tree.settle_name(&path, None, u64::MAX);
                }
                state.told_names.insert(home);
                state.has_told.insert(home);
            }
        } else if last.is_none() {
            // If this is the publishing node's first publication, it has everything.
            state.told_names.insert(home);
        }
        state.published.insert(from.clone(), publication.number);
        drop((state, tree));
        self.shown(from.incarnation);
        Published { whole_wanted: false, shared }
    }

    /// Takes directories back after an outage. A node may have made something in a directory that another node has alone. The
    /// other node does not know of it, and gives the directory back. The answer comes first, because two nodes may have done so
    /// to each other.
    fn take_back(self: &Rc<Self>, from: &NodeLife, publication: &Publication) {
        let now = self.node.world.now();
        let changed = publication.operations.iter().flat_map(|operation| match operation {
            NameOperation::Renamed { from, to, .. } => vec![from, to],
            NameOperation::Directory { path, .. }
            | NameOperation::Symlink { path, .. }
            | NameOperation::File { path, .. }
            | NameOperation::Linked { path, .. }
            | NameOperation::Taken { path, .. }
            | NameOperation::Removed { path, .. } => vec![path],
        });
        let told = publication.states.iter().filter(|_| publication.whole).map(|told| &told.path);
        let directories: BTreeSet<_> = changed.chain(told).map(|path| split(path).0.to_vec()).collect();
        for directory in directories {
            let verdict = self.state.borrow().leases.read(&from.node, &directory, None, now);
            let LeaseVerdict::PublishFirst(holder) = verdict else { continue };
            self.node.world.count("directory taken back from who did not know what others made there");
            let home = from.incarnation;
            self.run(|catalog| async move {
                while !catalog.is_closed() && catalog.recall(&holder, &directory, None, true).await.is_err() {
                    catalog.node.world.sleep(TAKE_BACK_AGAIN).await;
                }
                catalog.shown(home);
            });
        }
    }

    /// Records that a node's changes are published. All nodes see them, except in directories that another node has alone.
    fn shown(&self, home: Incarnation) {
        let now = self.node.world.now();
        let state = self.state.borrow();
        let is_another = |path: &[u8]| {
            let nobody = "nobody".parse().expect("it is a name");
            let verdict = state.leases.read(&nobody, split(path).0, None, now);
            matches!(verdict, LeaseVerdict::PublishFirst(holder) if self.lives_as(&state, &holder) != Some(home))
        };
        self.node.world.truth.borrow_mut().published(home, &self.node.memory, is_another);
    }

    fn lives_as(&self, state: &State, node: &NodeName) -> Option<Incarnation> {
        state.membership.member(node).map(|member| member.life.incarnation)
    }

    pub(crate) fn take_copies(&self, from: &NodeLife, copies: &Copies) {
        let mut state = self.state.borrow_mut();
        if copies.whole {
            for names in state.holders.values_mut() {
                names.remove(&from.node);
            }
            state.told_copies.insert(from.incarnation);
        }
        for told in &copies.kept {
            let Some(facts) = file_of(told) else { continue };
            state.holders.entry((facts.file, facts.seal)).or_default().insert(from.node.clone());
            state.kept.insert(facts.file, told.clone());
        }
        for key in &copies.dropped {
            if let Some(names) = state.holders.get_mut(key) {
                names.remove(&from.node);
            }
        }
        drop(state);
        for told in &copies.kept {
            if let Some(home) = home_of(told)
                && self.is_gone(home)
                && !self.node.memory.tree.borrow().is_dropped(told)
            {
                take_if_free(&mut self.node.memory.tree.borrow_mut(), told, home);
            }
        }
    }

    pub(crate) fn take_own_copies(&self) {
        let kept = self.node.copies_told();
        self.take_copies(&self.node.memory.life, &Copies { whole: true, kept, dropped: Vec::new() });
    }

    /// Returns the living nodes that have the sealed bytes: the file's home, then the nodes that reported a copy.
    pub(crate) fn suppliers(&self, file: FileId, seal: SealNumber) -> Vec<NodeName> {
        let home = self.name_of(file.incarnation);
        let state = self.state.borrow();
        let alive = |name: &&NodeName| {
            state
                .membership
                .member(name)
                .is_some_and(|member| !matches!(member.standing, Standing::Gone { .. }))
        };
        let holders = state.holders.get(&(file, seal)).into_iter().flatten().filter(alive).cloned();
        home.into_iter().chain(holders).collect()
    }

    /// Whether a living member other than the file's home keeps a copy.
    pub(crate) fn is_copied(&self, file: FileId, seal: SealNumber) -> bool {
        let home = self.name_of(file.incarnation);
        self.suppliers(file, seal).iter().any(|name| Some(name) != home.as_ref())
    }

    fn where_is(&self, file: FileId) -> Whereabouts {
        let facts = self.node.memory.tree.borrow().facts_of(file);
        let members = self.members();
        let suppliers = facts.as_ref().map(|facts| self.suppliers(file, facts.seal)).unwrap_or_default();
        let suppliers = members.members.into_iter().filter(|member| suppliers.contains(&member.life.node));
        Whereabouts { facts, suppliers: suppliers.collect() }
    }

    /// Notifies every node of objects in Tier-3.
    pub(crate) fn tell_objects(self: &Rc<Self>, objects: &[(FileId, SealNumber, wire::Object)]) {
        self.node.in_tier3(objects);
        for to in 0..self.node.world.machines.len() {
            if to == self.node.machine {
                continue;
            }
            let (node, message) =
                (Rc::clone(&self.node), ToNode::Objects { epoch: self.epoch, objects: objects.to_vec() });
            self.node.run(|_| async move {
                let asked = node.ask_node::<()>(to, &message, NODE_DEADLINE);
                let _told = within(&node.world.exec, NODE_DEADLINE, asked).await;
            });
        }
    }
}

impl State {
    fn note(&mut self, from: &NodeLife, operation: &NameOperation, shared: &mut Vec<Vec<u8>>) {
        match operation {
            NameOperation::Directory { path, .. } => {
                if !self.leases.made(&from.node, path) {
                    shared.push(path.clone());
                }
                self.keep_promise(from, path);
            }
            NameOperation::Symlink { path, .. }
            | NameOperation::File { path, .. }
            | NameOperation::Linked { path, .. }
            | NameOperation::Taken { path, .. } => self.keep_promise(from, path),
            NameOperation::Removed { path, .. } => {
                self.leases.removed(path);
                self.keep_promise(from, path);
            }
            NameOperation::Renamed { from: old, to, .. } => {
                self.leases.renamed(&from.node, old, to);
                self.keep_promise(from, old);
                self.keep_promise(from, to);
            }
        }
    }

    fn keep_promise(&mut self, from: &NodeLife, path: &[u8]) {
        self.leases.published_at(&from.node, path);
    }

    fn on_our_clock(&mut self, told: &NodeState, from: &NodeLife, now_ns: i64) -> NodeState {
        let mut told = told.clone();
        if let NodeKind::File(facts) = &mut told.kind {
            let mut read = |at| self.clocks.read(from.incarnation, at, now_ns);
            facts.opened_ns = read(facts.opened_ns);
            facts.closed_ns = read(facts.closed_ns);
            facts.published_ns = read(facts.published_ns);
        }
        told
    }
}

/// Applies a state, unless another file has its name, because only operations take a name from a file.
pub(crate) fn take_if_free(tree: &mut super::tree::Tree, told: &NodeState, home: Incarnation) {
    let Some(facts) = file_of(told) else { return tree.take_state(told, home) };
    let taken = match tree.names.get(&told.path) {
        Some(Entry::File(other)) => *other != facts.file,
        Some(Entry::Directory(_)) => true,
        None => false,
    };
    if !taken || tree.paths.contains_key(&facts.file) {
        tree.take_state(told, home);
    }
}

fn spoken(operation: &NameOperation) -> String {
    match operation {
        NameOperation::Directory { path, .. } => format!("mkdir {}", show(path)),
        NameOperation::File { path, file, .. } => format!("file {} {file}", show(path)),
        NameOperation::Removed { path, .. } => format!("removed {}", show(path)),
        NameOperation::Renamed { from, to, .. } => format!("renamed {} {}", show(from), show(to)),
        NameOperation::Symlink { path, .. }
        | NameOperation::Linked { path, .. }
        | NameOperation::Taken { path, .. } => show(path),
    }
}

pub(crate) fn file_of(told: &NodeState) -> Option<&FileFacts> {
    match &told.kind {
        NodeKind::File(facts) => Some(facts),
        NodeKind::Directory | NodeKind::Symlink { .. } => None,
    }
}

pub(crate) fn home_of(told: &NodeState) -> Option<Incarnation> {
    file_of(told).map(|facts| facts.file.incarnation)
}

/// Returns the life of the file's home, unless the file is sealed.
fn unsettled_home(found: &NodeState) -> Option<Incarnation> {
    let facts = file_of(found)?;
    (!matches!(facts.state, WireState::Sealed { .. })).then_some(facts.file.incarnation)
}
