//! Asking the coordinator about files of this node that lost their names to other nodes' files.
//!
//! Owns: when to ask. Does not own: putting files aside (`namespace::aside`).

use super::{ANSWER_DEADLINE, Away, Cluster, Seat};
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::{Answer, NodeState, ToCoordinator};

/// Interval between two questions. Such renames are rare, and other nodes can read the file meanwhile.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Asks about files that were put aside, until dropped.
pub(super) async fn watch(cluster: Arc<Cluster>) {
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        // On the coordinator itself, the question would go to this very tree, where the file lies aside.
        if !matches!(cluster.following.seat(), Seat::There(_)) {
            continue;
        }
        if let Err(away) = look(&cluster).await {
            tracing::debug!(
                error = &away as &dyn std::error::Error,
                "what was put aside is asked about later"
            );
        }
    }
}

async fn look(cluster: &Cluster) -> Result<(), Away> {
    let files = cluster.namespace.mirror().put_aside();
    if files.is_empty() {
        return Ok(());
    }
    // Publishes first, so that the coordinator does not call a file unknown that was made here just now.
    cluster.publish().await?;
    for file in files {
        let answer: Answer<Option<NodeState>> =
            cluster.ask(&ToCoordinator::Find { file }, ANSWER_DEADLINE).await?;
        let Answer::Known(found) = answer else { return Err(Away::New) };
        let known_at = found.as_ref().map(|state| String::from_utf8_lossy(&state.path).into_owned());
        match cluster.namespace.mirror().end_aside(file, found.as_ref()) {
            Ok(()) => tracing::debug!(%file, ?known_at, "no longer aside"),
            Err(error) => tracing::warn!(%file, ?known_at, %error, "a file stays aside"),
        }
    }
    Ok(())
}
