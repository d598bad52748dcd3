//! Whether this node reaches a node that the coordinator does not.
//!
//! Owns: the try, within the time that the question gives. Does not own: the verdict (the coordinator's), the answer's form
//! (`protocol::membership`).

use super::{Cluster, address_of};
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::ToNode;
use tidemark_protocol::membership::{ANSWER_MS, Ask, Heard, Life};
use tidemark_transport::{LinkErrorKind, Refusal};

/// Share of the question's time that the try may take: the answer needs the rest to get back.
const TRY_PART: (u64, u64) = (2, 3);

/// Tries to reach the node that is asked about. A later start on the same memory counts too: the daemon was restarted, and the
/// node's bytes are there.
pub(super) async fn look(cluster: &Arc<Cluster>, ask: Ask) -> Result<Heard, Refusal> {
    let member = cluster
        .following
        .member_of(ask.about.incarnation)
        .filter(|member| member.life.node == ask.about.node);
    // A node whose address is not known here cannot be tried, and a try that was not made is no evidence.
    let member = member.ok_or_else(|| {
        let why = format!("node {} is not known here; ask another one", ask.about.node);
        Refusal::new(LinkErrorKind::Unavailable, why)
    })?;
    let within_ms = ask.within_ms.min(ANSWER_MS) * TRY_PART.0 / TRY_PART.1;
    let address = address_of(&member);
    let knock = cluster.ask_node::<Life>(&address, &ToNode::Knock, Duration::from_millis(within_ms));
    let heard = match knock.await {
        Ok(life) => life.node == ask.about.node && life.incarnation == ask.about.incarnation,
        Err(away) => {
            tracing::debug!(node = %ask.about.node, error = &away as &dyn std::error::Error, "not heard here either");
            false
        }
    };
    cluster
        .following
        .view()
        .answer(&ask, heard)
        .map_err(|why| Refusal::new(LinkErrorKind::Fenced, why.to_string()))
}
