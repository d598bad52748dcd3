//! Asking the coordinator about a name.
//!
//! Owns: what is published before a question, the question, bringing this node's tree to the answer, what of it is remembered. Does not own:
//! whether to ask (`names`), what is remembered for how long (`remembered`).

use super::names::{ASK_AGAIN, Access, OUTAGE_WAIT};
use super::{ANSWER_DEADLINE, Away, Cluster};
use tidemark_namespace::{FsError, Question};
use tidemark_protocol::cluster::wire::{Answer, Intent, Leave, Look, Looked, NodeState, ToCoordinator};
use tidemark_transport::{LinkErrorKind, Refusal};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

/// Maximum number of questions about names on their way: each takes one of a connection's 64 calls, which beats need, too.
const ASKS_MAX: usize = 16;

/// Permits for questions to the coordinator.
#[derive(Debug)]
pub(super) struct Turns(Semaphore);

impl Default for Turns {
    fn default() -> Self {
        Self(Semaphore::new(ASKS_MAX))
    }
}

/// Questions of one node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Asking<'a> {
    pub(super) cluster: &'a Cluster,
}

impl<'a> Asking<'a> {
    /// Returns how to ask about a name.
    pub(super) fn intent_of(&self, access: Access<'_>) -> Intent {
        match access {
            // The kernel looks for a name before it makes it, and does not say so.
            Access::Look { parent, name }
                if self.cluster.names.lock().remembered.is_making(parent, name, Instant::now())
                    && !self.cluster.namespace.standing().has_name(parent, name) =>
            {
                Intent::Make
            }
            Access::Look { .. } | Access::List { .. } => Intent::Read,
            Access::Change { .. } => Intent::Change,
            Access::Move { .. } | Access::Attributes { .. } => Intent::Move,
        }
    }

    /// Notes what the answer lets this node do without a question.
    pub(super) fn remember(&self, access: Access<'_>, leave: &Leave, asked_at: Instant) {
        let now = Instant::now();
        let has_name = |parent, name| self.cluster.namespace.standing().has_name(parent, name);
        match (access, leave) {
            (Access::Look { parent, name }, Leave::Known) => {
                if let Some(child) = self.cluster.namespace.standing().child_directory(parent, name) {
                    self.cluster.names.lock().remembered.found(child, asked_at, now);
                }
            }
            (Access::Look { parent, name }, Leave::Name) if !has_name(parent, name) => {
                self.cluster.names.lock().remembered.promised((parent, name.to_vec()), asked_at, now);
            }
            (Access::Change { parent, name, .. }, _) if !has_name(parent, name) => {
                self.cluster.names.lock().remembered.makes(parent, now);
            }
            _ => {}
        }
    }

    /// Asks the coordinator, and brings this node's tree to the answer. Returns what this node may do from now on.
    pub(super) async fn about(
        &self,
        path: &[u8],
        access: Access<'_>,
        intent: Intent,
    ) -> Result<Leave, Asked> {
        if let Some(name) = access.name()
            && intent != Intent::Move
            && !self.cluster.following.is_coordinator()
            && let Some(asked_at) =
                self.cluster.namespace.publications().makes_only_others(access.directory(), name)
        {
            let looked = self.look(path, name, intent).await?;
            // Anything but a missing name may be otherwise once this node's changes are published.
            if looked.directory && looked.found.is_none() && !matches!(looked.leave, Leave::Directory { .. })
            {
                let asked = question(asked_at, &looked.leave);
                let settled = self.cluster.namespace.mirror().settle_name(path, name, None, asked);
                self.settled(settled.map(|()| true), path, access)?;
                return Ok(looked.leave);
            }
        }
        let Some(name) = access.name() else { return self.list(path, access).await };
        // Publishes first, so that the coordinator's answer covers this node's changes so far. Later changes are not in the answer.
        let asked_at = self.cluster.namespace.publications().names_number();
        self.publish_soon().await?;
        let looked = self.look(path, name, intent).await?;
        if !looked.directory {
            return Err(Asked::Gone);
        }
        if self.cluster.following.is_coordinator() {
            return Ok(looked.leave);
        }
        let mirror = self.cluster.namespace.mirror();
        let asked = question(asked_at, &looked.leave);
        let is_one_moment = match &looked.leave {
            Leave::Directory { entries, .. } => mirror.settle_directory(path, entries, asked),
            Leave::None | Leave::Known | Leave::Name => {
                mirror.settle_name(path, name, looked.found.as_ref(), asked).map(|()| true)
            }
        };
        self.settled(is_one_moment, path, access)?;
        Ok(looked.leave)
    }

    /// Judges how an answer was applied to this node's tree.
    fn settled(
        &self,
        is_one_moment: Result<bool, FsError>,
        path: &[u8],
        access: Access<'_>,
    ) -> Result<(), Asked> {
        match is_one_moment {
            Ok(true) => Ok(()),
            Ok(false) => Err(Asked::OfTwoMoments),
            // An answer to an earlier question arrived later, and took the directory away.
            Err(FsError::NotFound | FsError::NotDirectory)
                if self.cluster.namespace.nodes().path_of(access.directory()).as_deref() != Some(path) =>
            {
                Err(Asked::OfTwoMoments)
            }
            Err(error) => Err(Asked::Here(error)),
        }
    }

    async fn list(&self, path: &[u8], access: Access<'_>) -> Result<Leave, Asked> {
        let asked_at = self.cluster.namespace.publications().names_number();
        self.publish_soon().await?;
        let found: Option<Vec<NodeState>> =
            known(self.ask_soon(&ToCoordinator::List { path: path.to_vec() }).await?)?;
        let found = found.ok_or(Asked::Gone)?;
        // The coordinator's answer is from its very tree, which may have changed since.
        if !self.cluster.following.is_coordinator() {
            let mirror = self.cluster.namespace.mirror();
            let asked = question(asked_at, &Leave::None);
            self.settled(mirror.settle_directory(path, &found, asked), path, access)?;
        }
        Ok(Leave::None)
    }

    async fn look(&self, path: &[u8], name: &[u8], intent: Intent) -> Result<Looked, Asked> {
        let look = Look { directory: path.to_vec(), name: name.to_vec(), intent };
        known(self.ask_soon(&ToCoordinator::Look(look)).await?)
    }

    /// Waits for a turn to ask. The calls that have turns may themselves wait for a silent node.
    pub(super) async fn turn_until(&self, give_up: Instant) -> Result<SemaphorePermit<'a>, Away> {
        let names = &self.cluster.names;
        let turn = async { names.turns.0.acquire().await.map_err(|_| Away::Nobody) };
        let longest = give_up.saturating_duration_since(Instant::now());
        let turn = tokio::time::timeout(longest, self.unless_silent(turn)).await;
        turn.unwrap_or_else(|_| {
            Err(Away::Refused(Refusal::new(
                LinkErrorKind::Unavailable,
                "too many questions about names wait for nodes that do not answer",
            )))
        })
    }

    async fn publish_soon(&self) -> Result<(), Asked> {
        self.unless_silent(self.cluster.publish_unkept()).await.map_err(Asked::Away)
    }

    async fn ask_soon<T: serde::de::DeserializeOwned>(&self, message: &ToCoordinator) -> Result<T, Asked> {
        self.unless_silent(self.cluster.ask(message, ANSWER_DEADLINE)).await.map_err(Asked::Away)
    }

    /// Waits for an answer as long as the coordinator answers anything.
    pub(super) async fn unless_silent<T>(
        &self,
        answer: impl Future<Output = Result<T, Away>>,
    ) -> Result<T, Away> {
        let silence = async {
            tokio::time::sleep(OUTAGE_WAIT).await;
            while self.cluster.following.is_reachable() {
                tokio::time::sleep(ASK_AGAIN).await;
            }
        };
        tokio::select! {
            answer = answer => answer,
            () = silence => Err(Away::Late(OUTAGE_WAIT)),
        }
    }
}

/// The reason for a missing answer.
#[derive(Debug)]
pub(super) enum Asked {
    /// The directory no longer exists.
    Gone,
    /// The answer could not be applied to this node's tree.
    Here(FsError),
    /// Names changed here and elsewhere meanwhile: ask again.
    OfTwoMoments,
    Away(Away),
}

/// Makes the question to which an answer gives this leave. `at`: the number of operations on names before it.
fn question(at: u64, leave: &Leave) -> Question {
    let lets = match leave {
        Leave::Directory { .. } | Leave::Name => true,
        Leave::None | Leave::Known => false,
    };
    Question::new(at, lets)
}

fn known<T>(answer: Answer<T>) -> Result<T, Asked> {
    match answer {
        Answer::Known(answer) => Ok(answer),
        Answer::NotYet => Err(Asked::Away(Away::New)),
    }
}
