//! The nodes that have the bytes of a file.
//!
//! Owns: the answer, and waiting for a file that is being sealed. Does not own: the copies, the choice of Tier-3's reader (`protocol`).

use super::{Catalog, NODE_DEADLINE};
use std::time::Duration;
use tidemark_engine::cluster::state_of;
use tidemark_namespace::OutgoingBody;
use tidemark_protocol::cluster::wire::{FileFacts, Member, NodeKind, Whereabouts};
use tidemark_protocol::file::FileState;
use tidemark_protocol::id::{FileId, NodeName, SealNumber};
use tidemark_transport::Refusal;
use tokio::time::Instant;

/// Interval between two looks at a file that is not sealed yet.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// The nodes from which a file's bytes can be had.
#[derive(Clone, Copy)]
pub(super) struct Locator<'a> {
    pub(super) catalog: &'a Catalog,
}

impl Locator<'_> {
    /// Returns suppliers of a file's bytes for a node that could not get them from `failed`.
    pub(super) async fn of(
        self,
        asker: &NodeName,
        file: FileId,
        failed: &[NodeName],
    ) -> Result<Whereabouts, Refusal> {
        let until = Instant::now() + NODE_DEADLINE;
        loop {
            let namespace = self.catalog.cluster.namespace();
            // A holder may not have published its copy yet.
            let may_be_heard = self.catalog.hears_still() && Instant::now() < until;
            let Some(node) = namespace.standing().outgoing_file(file) else {
                if may_be_heard {
                    tokio::time::sleep(LOOK_AGAIN).await;
                    continue;
                }
                return Ok(Whereabouts { facts: None, suppliers: Vec::new() });
            };
            let sealed = match &node.body {
                OutgoingBody::File(view) => matches!(view.state, FileState::Sealed { .. }),
                OutgoingBody::Directory | OutgoingBody::Symlink(_) => true,
            };
            let home =
                self.catalog.cluster.following.member_of(file.incarnation).filter(|member| !member.gone);
            if !sealed
                && let Some(home) = &home
                && Instant::now() < until
            {
                // A refusal does not end the loop: the home is asked again.
                if let Err(refusal) = self.catalog.recalls().of(&home.life.node, &[], None, false).await {
                    tracing::debug!(%refusal, %file, "the node of a file that is not sealed does not answer");
                }
                tokio::time::sleep(LOOK_AGAIN).await;
                continue;
            }
            let here = matches!(&node.body, OutgoingBody::File(view) if view.host);
            let NodeKind::File(facts) = state_of(namespace, node).kind else {
                return Ok(Whereabouts { facts: None, suppliers: Vec::new() });
            };
            let mut suppliers = self.in_memory(&facts, here);
            suppliers.retain(|member| member.life.node != *asker && !failed.contains(&member.life.node));
            if suppliers.is_empty() && facts.object.is_some() {
                suppliers.extend(self.reader(asker, (facts.file, facts.seal), failed));
            }
            if may_be_heard && suppliers.is_empty() && facts.object.is_none() {
                tokio::time::sleep(LOOK_AGAIN).await;
                continue;
            }
            return Ok(Whereabouts { facts: Some(*facts), suppliers });
        }
    }

    /// Returns the nodes that already have a file's bytes in memory.
    fn in_memory(self, facts: &FileFacts, here: bool) -> Vec<Member> {
        let members = self.catalog.cluster.following.members();
        let alive = |name: &str| {
            members.members.iter().find(|member| !member.gone && member.life.node.as_str() == name).cloned()
        };
        let mut suppliers = Vec::new();
        let home = members.members.iter().find(|member| member.life.incarnation == facts.file.incarnation);
        suppliers.extend(home.filter(|member| !member.gone && facts.host).cloned());
        let holders = self.catalog.cluster.holders.of(facts.file, facts.seal);
        suppliers.extend(holders.iter().filter_map(|holder| alive(holder.as_str())));
        if here {
            suppliers.extend(alive(self.catalog.cluster.life.node.as_str()));
        }
        suppliers.dedup_by(|one, other| one.life == other.life);
        suppliers
    }

    /// Returns the node that reads the bytes from Tier-3 for `asker`, or `None` if `asker` does so itself.
    fn reader(self, asker: &NodeName, bytes: (FileId, SealNumber), failed: &[NodeName]) -> Option<Member> {
        let reader = self.catalog.lock().readers.ask(bytes, asker, failed).cloned()?;
        let members = self.catalog.cluster.following.members();
        members.members.iter().find(|member| !member.gone && member.life.node == reader).cloned()
    }
}
