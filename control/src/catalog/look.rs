//! Answers questions about names, after every node that may know more has published.
//!
//! Owns: the order of asking nodes, deciding and answering. Does not own: the decision (`protocol::cluster::leases`), the names.

use super::Catalog;
use std::sync::atomic::Ordering;
use tidemark_engine::cluster::state_of;
use tidemark_namespace::{OutgoingBody, OutgoingNode};
use tidemark_protocol::cluster::leases::{KNOWN, Verdict};
use tidemark_protocol::cluster::moves::Moving;
use tidemark_protocol::cluster::wire::{Answer, Intent, Leave, Look, Looked, NodeKind, NodeState};
use tidemark_protocol::file::FileState;
use tidemark_protocol::id::{FileId, NodeName};
use tidemark_protocol::path::{join, split};
use tidemark_transport::{LinkErrorKind, Refusal};

/// The most nodes asked one after the other for one answer. Each gives a directory back or keeps a promise, and others may take it again
/// meanwhile. More means that many nodes fight for one name.
const ROUNDS_MAX: usize = 16;

/// A move whose node is not answered yet. It ends if the answer is an error, and if nobody waits for it any more.
struct Begun<'a> {
    catalog: &'a Catalog,
    path: &'a [u8],
    /// The move's number; none once its node is answered.
    number: Option<u64>,
}

impl Begun<'_> {
    /// Notes that the node is answered: the move ends once it is published, or its node was asked.
    fn let_go(mut self) {
        if let Some(number) = self.number.take() {
            self.catalog.lock().leases.moves.let_go(self.path, number);
        }
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.catalog.lock().leases.moves.end(self.path, number);
        }
    }
}

/// Questions about names, as a coordinator answers them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lookups<'a> {
    pub(super) catalog: &'a Catalog,
}

impl Lookups<'_> {
    /// Answers a question about one name.
    pub(super) async fn look(&self, from: &NodeName, look: &Look) -> Result<Answer<Looked>, Refusal> {
        if self.catalog.hears_still() {
            return Ok(Answer::NotYet);
        }
        let looked = self.look_at(from, look).await?;
        self.are_own_kept(from, &join(&look.directory, &look.name), false).await?;
        Ok(Answer::Known(looked))
    }

    /// Waits until etcd has this node's own changes of what is at `path`, or in it: no other node is shown what could be lost with this one.
    /// Changes by other nodes need no wait: their nodes send them again until etcd has them.
    async fn are_own_kept(&self, from: &NodeName, path: &[u8], is_listed: bool) -> Result<(), Refusal> {
        let cluster = &self.catalog.cluster;
        let may_be_lost = || cluster.namespace().publications().may_change(path, is_listed);
        if *from == cluster.life.node || !may_be_lost() || self.catalog.is_kept_by_now().await {
            return Ok(());
        }
        Err(self.catalog.not_kept())
    }

    async fn look_at(&self, from: &NodeName, look: &Look) -> Result<Looked, Refusal> {
        self.catalog.counters.looks.fetch_add(1, Ordering::Relaxed);
        let Look { directory, name, intent } = look;
        if matches!(intent, Intent::Read | Intent::Make) {
            return self.look_only(from, look).await;
        }
        let path = join(directory, name);
        if *intent != Intent::Move {
            return self.let_change(from, look, &path).await;
        }
        let mut rounds = 0;
        let number = loop {
            let begun = self.catalog.lock().leases.moves.begin(from, &path, self.catalog.now());
            match begun {
                Ok(number) => break number,
                Err(_) if rounds == ROUNDS_MAX => return Err(keep_changing()),
                Err(moving) => self.wait_for_move(&moving).await?,
            }
            rounds += 1;
        };
        let begun = Begun { catalog: self.catalog, path: &path, number: Some(number) };
        self.take_others_out(from, &path).await?;
        let looked = self.let_change(from, look, &path).await?;
        begun.let_go();
        Ok(looked)
    }

    /// Lets a node change a name, once no other node is in the way.
    async fn let_change(&self, from: &NodeName, look: &Look, path: &[u8]) -> Result<Looked, Refusal> {
        let Look { directory, name, .. } = look;
        for _ in 0..ROUNDS_MAX {
            let verdict = {
                let mut state = self.catalog.lock();
                // Nobody gets leave in a directory that is gone: the lease would be of the next one of its name. A removal ends the leases after
                // it changed the tree, so one that comes now ends this lease as well.
                if !self.is_directory(directory) {
                    return Ok(Looked { found: None, directory: false, leave: Leave::None });
                }
                state.leases.change(from, directory, name, self.catalog.now())
            };
            match verdict {
                Verdict::Busy(holder) | Verdict::PublishFirst(holder) => {
                    self.catalog.recalls().of(&holder, directory, Some(name), false).await?;
                }
                Verdict::RecallFirst(holder) => {
                    self.catalog.recalls().of(&holder, directory, None, true).await?
                }
                Verdict::Moving(moving) => self.wait_for_move(&moving).await?,
                Verdict::Answer | Verdict::Promised => {
                    self.share_other_names(from, look).await?;
                    self.forget_directory(from, path).await;
                    return Ok(self.looked(look, Leave::Name).await);
                }
                Verdict::Alone => {
                    self.share_other_names(from, look).await?;
                    self.forget_directory(from, path).await;
                    let entries = self.entries(directory).unwrap_or_default();
                    let seen = self.catalog.lock().leases.is_seen(from, directory, self.catalog.now());
                    return Ok(self.looked(look, Leave::Directory { entries, seen }).await);
                }
                Verdict::TooMany => {
                    let why = "too many names are promised to nodes at once; ask again";
                    return Err(Refusal::new(LinkErrorKind::Unavailable, why));
                }
            }
        }
        Err(keep_changing())
    }

    /// Waits until a directory has moved. A node whose move is not let yet waits for the asker, perhaps, which has to come again.
    async fn wait_for_move(&self, moving: &Moving) -> Result<(), Refusal> {
        let (directory, name) = split(&moving.path);
        if !moving.is_let {
            let path = String::from_utf8_lossy(&moving.path);
            let why = format!("{} is about to move {path:?}; ask again", moving.node);
            return Err(Refusal::new(LinkErrorKind::Unavailable, why));
        }
        self.catalog.recalls().of(&moving.node, directory, Some(name), false).await?;
        self.catalog.lock().leases.moves.end(&moving.path, moving.number);
        Ok(())
    }

    /// Has all other nodes publish what they do in a directory and below it, and give those directories back. They begin nothing there
    /// meanwhile ([`Moves`](tidemark_protocol::cluster::moves::Moves)).
    async fn take_others_out(&self, from: &NodeName, path: &[u8]) -> Result<(), Refusal> {
        for _ in 0..ROUNDS_MAX {
            let (holders, promised) = {
                let (state, now) = (self.catalog.lock(), self.catalog.now());
                (state.leases.holders_below(from, path), state.leases.promised_below(from, path, now))
            };
            if holders.is_empty() && promised.is_empty() {
                return Ok(());
            }
            let held =
                holders.iter().map(|(holder, held)| self.catalog.recalls().of(holder, held, None, true));
            let promises = promised.iter().map(|(of, names)| self.recall_promises(of, names));
            futures::future::try_join(
                futures::future::try_join_all(held),
                futures::future::try_join_all(promises),
            )
            .await?;
        }
        // The others made directories below again and again, and had them alone.
        Err(keep_changing())
    }

    /// Has a node publish all that it does in a shared directory, and ends its promises there. `of`: the node and the directory.
    async fn recall_promises(
        &self,
        (holder, directory): &(NodeName, Vec<u8>),
        promises: &[(Vec<u8>, u64)],
    ) -> Result<(), Refusal> {
        if self.catalog.recalls().ask(holder, directory, None, true).await? {
            let leases = &mut self.catalog.lock().leases;
            promises.iter().for_each(|(name, promise)| leases.published(directory, name, *promise));
        }
        Ok(())
    }

    /// Answers a node that only looks. If it finds a directory, it need not ask about it again for a moment. If it finds nothing, and wants to
    /// make the name, it is promised the name, unless another node is in the way.
    async fn look_only(&self, from: &NodeName, look: &Look) -> Result<Looked, Refusal> {
        let Look { directory, name, intent } = look;
        let path = join(directory, name);
        // Recorded first: a node that changes the directory from now on has this one forget it, and one that was let to change it before
        // publishes first.
        let (verdict, recorded, promise) = {
            let (mut state, now) = (self.catalog.lock(), self.catalog.now());
            let recorded = state.leases.knows(from, &path, now);
            let makes = *intent == Intent::Make;
            let promise = makes.then(|| state.leases.promise_if_free(from, directory, name, now)).flatten();
            (state.leases.read(from, directory, Some(name), now), recorded, promise)
        };
        if let Verdict::PublishFirst(holder) = verdict {
            self.catalog.recalls().of(&holder, directory, Some(name), false).await?;
        }
        let looked = self.looked(look, Leave::None).await;
        let is_directory =
            looked.found.as_ref().is_some_and(|found| matches!(found.kind, NodeKind::Directory));
        let mut state = self.catalog.lock();
        if let Some(until) = recorded.filter(|_| !is_directory) {
            state.leases.knows_not(from, &path, until);
        }
        let leave = match (is_directory, recorded, promise) {
            (true, Some(_), _) => Leave::Known,
            (false, _, Some(_)) if looked.found.is_none() && looked.directory => Leave::Name,
            _ => Leave::None,
        };
        if let Some(promise) = promise.filter(|_| leave != Leave::Name) {
            state.leases.published(directory, name, promise);
        }
        Ok(Looked { leave, ..looked })
    }

    /// Has all other nodes that looked this directory up ask about it again. A node that does not answer asks by itself after
    /// [`KNOWN`].
    async fn forget_directory(&self, by: &NodeName, path: &[u8]) {
        let knowing = self.catalog.lock().leases.take_knowing(by, path, self.catalog.now());
        if !knowing.is_empty() && !self.catalog.cluster.forget_answers(&knowing).await {
            tokio::time::sleep(KNOWN).await;
        }
    }

    /// Evicts other nodes from the directories of the file's other names: a change under one name changes all of them.
    async fn share_other_names(&self, from: &NodeName, look: &Look) -> Result<(), Refusal> {
        let path = join(&look.directory, &look.name);
        for other in self.catalog.cluster.namespace().nodes().other_names(&path) {
            let directory = split(&other).0;
            let verdict = self.catalog.lock().leases.read(from, directory, None, self.catalog.now());
            if let Verdict::PublishFirst(holder) = verdict {
                self.catalog.recalls().of(&holder, directory, None, true).await?;
            }
        }
        Ok(())
    }

    /// Lists a whole directory; `None` if the path is not a directory.
    pub(super) async fn list(
        &self,
        from: &NodeName,
        directory: &[u8],
    ) -> Result<Answer<Option<Vec<NodeState>>>, Refusal> {
        if self.catalog.hears_still() {
            return Ok(Answer::NotYet);
        }
        self.catalog.counters.lists.fetch_add(1, Ordering::Relaxed);
        let now = self.catalog.now();
        let (verdict, promised) = {
            let state = self.catalog.lock();
            (state.leases.read(from, directory, None, now), state.leases.promised_in(directory, from, now))
        };
        if let Verdict::PublishFirst(holder) = verdict {
            self.catalog.recalls().of(&holder, directory, None, false).await?;
        }
        let recalls = promised.iter().map(|holder| self.catalog.recalls().of(holder, directory, None, false));
        futures::future::try_join_all(recalls).await?;
        let entries = self.entries(directory);
        self.are_own_kept(from, directory, true).await?;
        Ok(Answer::Known(entries))
    }

    /// Finds a file by its identity, wherever it is.
    pub(super) fn find(&self, file: FileId) -> Answer<Option<NodeState>> {
        if self.catalog.hears_still() {
            return Answer::NotYet;
        }
        let namespace = self.catalog.cluster.namespace();
        // Torn files are hidden, and a user may want them back.
        Answer::Known(namespace.standing().outgoing_anywhere(file).map(|node| state_of(namespace, node)))
    }

    fn entries(&self, directory: &[u8]) -> Option<Vec<NodeState>> {
        let namespace = self.catalog.cluster.namespace();
        let nodes = namespace.standing().outgoing_in(directory)?;
        Some(nodes.into_iter().map(|node| state_of(namespace, node)).collect())
    }

    async fn looked(&self, look: &Look, leave: Leave) -> Looked {
        let namespace = self.catalog.cluster.namespace();
        let path = join(&look.directory, &look.name);
        let mut found = namespace.standing().outgoing_at(&path);
        // The home of an unsealed file may have newer facts: close(2) may have returned there before this question.
        if let Some(home) = found.as_ref().and_then(unsettled_home)
            && let Some(member) = self.catalog.cluster.following.member_of(home)
            && !member.gone
            && self.catalog.recalls().of(&member.life.node, &look.directory, None, false).await.is_ok()
        {
            found = namespace.standing().outgoing_at(&path);
        }
        let directory = self.is_directory(&look.directory);
        Looked { found: found.map(|node| state_of(namespace, node)), directory, leave }
    }

    pub(super) fn is_directory(&self, path: &[u8]) -> bool {
        let found = || self.catalog.cluster.namespace().standing().outgoing_at(path);
        path.is_empty() || found().is_some_and(|node| matches!(node.body, OutgoingBody::Directory))
    }
}

fn keep_changing() -> Refusal {
    Refusal::new(LinkErrorKind::Unavailable, "other nodes keep changing this name; ask again")
}

/// Returns the home of a file that is not sealed and lives on another node.
fn unsettled_home(node: &OutgoingNode) -> Option<tidemark_protocol::id::Incarnation> {
    let OutgoingBody::File(view) = &node.body else { return None };
    let remote = view.remote.as_ref()?;
    (!matches!(view.state, FileState::Sealed { .. })).then_some(remote.home)
}
