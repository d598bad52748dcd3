//! Who has which bytes.
//!
//! Owns: the answer, and waiting for a file that is being sealed. Does not own: the copies.

use super::{Catalog, NODE_DEADLINE};
use std::time::{Duration, Instant};
use tidemark_engine::cluster::state_of;
use tidemark_engine::namespace::OutgoingBody;
use tidemark_protocol::cluster::wire::{FileFacts, NodeKind, Whereabouts};
use tidemark_protocol::file::FileState;
use tidemark_protocol::id::FileId;
use tidemark_transport::Refusal;

/// Between two looks at a file that is not sealed yet.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

impl Catalog {
    pub(super) async fn where_is(&self, file: FileId) -> Result<Whereabouts, Refusal> {
        let until = Instant::now() + NODE_DEADLINE;
        loop {
            let namespace = self.cluster.namespace();
            let Some(node) = namespace.outgoing_file(file) else {
                return Ok(Whereabouts { facts: None, suppliers: Vec::new() });
            };
            let sealed = match &node.body {
                OutgoingBody::File(view) => matches!(view.state, FileState::Sealed { .. }),
                OutgoingBody::Directory | OutgoingBody::Symlink(_) => true,
            };
            let home = self.cluster.member_of(file.incarnation).filter(|member| !member.gone);
            if !sealed
                && let Some(home) = &home
                && Instant::now() < until
            {
                // A refusal is no reason to give up: it is asked again.
                if let Err(refusal) = self.recall(&home.life.node, &[], None, false).await {
                    tracing::debug!(%refusal, %file, "the node of a file that is not sealed does not answer");
                }
                tokio::time::sleep(LOOK_AGAIN).await;
                continue;
            }
            let here = matches!(&node.body, OutgoingBody::File(view) if view.host);
            let NodeKind::File(facts) = state_of(namespace, node).kind else {
                return Ok(Whereabouts { facts: None, suppliers: Vec::new() });
            };
            return Ok(self.suppliers(*facts, here));
        }
    }

    fn suppliers(&self, facts: FileFacts, here: bool) -> Whereabouts {
        let members = self.cluster.members();
        let alive = |name: &str| {
            members.members.iter().find(|member| !member.gone && member.life.node.as_str() == name).cloned()
        };
        let mut suppliers = Vec::new();
        let home = members.members.iter().find(|member| member.life.incarnation == facts.file.incarnation);
        suppliers.extend(home.filter(|member| !member.gone).cloned());
        let holders = self.cluster.holders(facts.file, facts.seal);
        suppliers.extend(holders.iter().filter_map(|holder| alive(holder.as_str())));
        if here {
            suppliers.extend(alive(self.cluster.life.node.as_str()));
        }
        suppliers.dedup_by(|one, other| one.life == other.life);
        Whereabouts { facts: Some(facts), suppliers }
    }
}
