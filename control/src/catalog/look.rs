//! Answers questions about names, after every node that may know more has published.
//!
//! Owns: the order of asking nodes, deciding and answering. Does not own: the decision (`protocol::cluster::leases`), the names.

use super::{Catalog, NODE_DEADLINE};
use std::sync::atomic::Ordering;
use tidemark_engine::cluster::state_of;
use tidemark_namespace::{OutgoingBody, OutgoingNode};
use tidemark_protocol::cluster::leases::Verdict;
use tidemark_protocol::cluster::members::Standing;
use tidemark_protocol::cluster::wire::{Answer, Intent, Leave, Look, Looked, NodeState, ToNode};
use tidemark_protocol::file::FileState;
use tidemark_protocol::id::{FileId, NodeName};
use tidemark_protocol::path::{join, split};
use tidemark_transport::{LinkErrorKind, Refusal};

/// The most nodes asked one after the other for one answer. Each gives a directory back or keeps a promise, and others may take it again
/// meanwhile. More means that many nodes fight for one name.
const ROUNDS_MAX: usize = 16;

impl Catalog {
    /// Answers a question about one name.
    pub(super) async fn look(&self, from: &NodeName, look: &Look) -> Result<Answer<Looked>, Refusal> {
        if self.hears_still() {
            return Ok(Answer::NotYet);
        }
        self.look_at(from, look).await.map(Answer::Known)
    }

    async fn look_at(&self, from: &NodeName, look: &Look) -> Result<Looked, Refusal> {
        self.counters.looks.fetch_add(1, Ordering::Relaxed);
        let Look { directory, name, intent } = look;
        if *intent == Intent::Read {
            let verdict = self.lock().leases.read(from, directory, Some(name), self.now());
            if let Verdict::PublishFirst(holder) = verdict {
                self.recall(&holder, directory, Some(name), false).await?;
            }
            return Ok(self.looked(look, Leave::None).await);
        }
        for _ in 0..ROUNDS_MAX {
            if *intent == Intent::Move {
                let holders = self.lock().leases.holders_below(from, &join(directory, name));
                for (holder, path) in holders {
                    self.recall(&holder, &path, None, true).await?;
                }
            }
            let verdict = self.lock().leases.change(from, directory, name, self.now());
            match verdict {
                Verdict::Busy(holder) | Verdict::PublishFirst(holder) => {
                    self.recall(&holder, directory, Some(name), false).await?;
                }
                Verdict::RecallFirst(holder) => self.recall(&holder, directory, None, true).await?,
                Verdict::Answer | Verdict::Promised => {
                    self.share_other_names(from, look).await?;
                    return Ok(self.looked(look, Leave::Name).await);
                }
                Verdict::Alone => {
                    self.share_other_names(from, look).await?;
                    let entries = self.entries(directory).unwrap_or_default();
                    return Ok(self.looked(look, Leave::Directory { entries }).await);
                }
                Verdict::TooMany => {
                    let why = "too many names are promised to nodes at once; ask again";
                    return Err(Refusal::new(LinkErrorKind::Unavailable, why));
                }
            }
        }
        let why = "other nodes keep changing this name; ask again".to_owned();
        Err(Refusal::new(LinkErrorKind::Unavailable, why))
    }

    /// Evicts other nodes from the directories of the file's other names: a change under one name changes all of them.
    async fn share_other_names(&self, from: &NodeName, look: &Look) -> Result<(), Refusal> {
        let path = join(&look.directory, &look.name);
        for other in self.cluster.namespace().nodes().other_names(&path) {
            let directory = split(&other).0;
            let verdict = self.lock().leases.read(from, directory, None, self.now());
            if let Verdict::PublishFirst(holder) = verdict {
                self.recall(&holder, directory, None, true).await?;
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
        if self.hears_still() {
            return Ok(Answer::NotYet);
        }
        self.counters.lists.fetch_add(1, Ordering::Relaxed);
        let now = self.now();
        let (verdict, promised) = {
            let state = self.lock();
            (state.leases.read(from, directory, None, now), state.leases.promised_in(directory, from, now))
        };
        if let Verdict::PublishFirst(holder) = verdict {
            self.recall(&holder, directory, None, false).await?;
        }
        for holder in promised {
            self.recall(&holder, directory, None, false).await?;
        }
        Ok(Answer::Known(self.entries(directory)))
    }

    /// Finds a file by its identity, wherever it is.
    pub(super) fn find(&self, file: FileId) -> Answer<Option<NodeState>> {
        if self.hears_still() {
            return Answer::NotYet;
        }
        let namespace = self.cluster.namespace();
        // Torn files are hidden, and a user may want them back.
        Answer::Known(namespace.standing().outgoing_anywhere(file).map(|node| state_of(namespace, node)))
    }

    fn entries(&self, directory: &[u8]) -> Option<Vec<NodeState>> {
        let namespace = self.cluster.namespace();
        let nodes = namespace.standing().outgoing_in(directory)?;
        Some(nodes.into_iter().map(|node| state_of(namespace, node)).collect())
    }

    async fn looked(&self, look: &Look, leave: Leave) -> Looked {
        let namespace = self.cluster.namespace();
        let path = join(&look.directory, &look.name);
        let mut found = namespace.standing().outgoing_at(&path);
        // The home of an unsealed file may have newer facts: close(2) may have returned there before this question.
        if let Some(home) = found.as_ref().and_then(unsettled_home)
            && let Some(member) = self.cluster.member_of(home)
            && !member.gone
            && self.recall(&member.life.node, &look.directory, None, false).await.is_ok()
        {
            found = namespace.standing().outgoing_at(&path);
        }
        let directory = look.directory.is_empty()
            || namespace
                .standing()
                .outgoing_at(&look.directory)
                .is_some_and(|node| matches!(node.body, OutgoingBody::Directory));
        Looked { found: found.map(|node| state_of(namespace, node)), directory, leave }
    }

    fn is_cut_off(&self, node: &NodeName) -> bool {
        let members = self.cluster.members();
        let mut cut_off = members.members.iter().filter(|member| member.standing == Standing::CutOff);
        cut_off.any(|member| member.life.node == *node && !member.gone)
    }

    /// Asks a node to publish its changes, once it is done with `name`, and if `release` to give a directory back.
    pub(super) async fn recall(
        &self,
        holder: &NodeName,
        path: &[u8],
        name: Option<&[u8]>,
        release: bool,
    ) -> Result<(), Refusal> {
        if !self.ask_back(holder, path, name, release).await? {
            return Ok(());
        }
        let mut state = self.lock();
        if let Some(name) = name {
            state.leases.published(holder, path, name);
        }
        if release {
            state.leases.released(holder, path);
        }
        Ok(())
    }

    /// Asks a node to give back a directory that no other node wants to change: the node may have it alone again later.
    pub(super) async fn recall_for_none(&self, holder: &NodeName, path: &[u8]) -> Result<(), Refusal> {
        if self.ask_back(holder, path, None, true).await? {
            let now = self.now();
            self.lock().leases.rests(holder, path, now);
        }
        Ok(())
    }

    /// Asks the holder, and returns whether it did so; false if it is gone and holds nothing any more.
    async fn ask_back(
        &self,
        holder: &NodeName,
        path: &[u8],
        name: Option<&[u8]>,
        release: bool,
    ) -> Result<bool, Refusal> {
        self.counters.recalls.fetch_add(1, Ordering::Relaxed);
        let owned = name.map(<[u8]>::to_vec);
        if *holder == self.cluster.life.node {
            self.cluster.give_back(path, owned, release).await?;
            return Ok(true);
        }
        let Some(address) = self.address(holder) else {
            // Gone: the directories that it held are free again.
            self.lock().leases.gone(holder);
            return Ok(false);
        };
        if self.is_cut_off(holder) {
            // The caller has to ask again all the same; until then it holds up no other node.
            let what =
                format!("{holder} has {:?} and is cut off; it is asked again", String::from_utf8_lossy(path));
            return Err(Refusal::new(LinkErrorKind::Unavailable, what));
        }
        let message = ToNode::Recall { epoch: self.epoch, path: path.to_vec(), name: owned, release };
        match self.cluster.ask_node::<()>(&address, &message, NODE_DEADLINE).await {
            Ok(()) => Ok(true),
            Err(away) => {
                let path = String::from_utf8_lossy(path);
                Err(Refusal::new(
                    LinkErrorKind::Unavailable,
                    format!("{holder} has {path:?} and does not answer: {away}; it is asked again"),
                ))
            }
        }
    }
}

/// Returns the home of a file that is not sealed and lives on another node.
fn unsettled_home(node: &OutgoingNode) -> Option<tidemark_protocol::id::Incarnation> {
    let OutgoingBody::File(view) = &node.body else { return None };
    let remote = view.remote.as_ref()?;
    (!matches!(view.state, FileState::Sealed { .. })).then_some(remote.home)
}
