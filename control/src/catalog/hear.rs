//! Makes every node publish its pending changes.
//!
//! Owns: asking all nodes, in one round for all callers of a moment. Does not own: how long a caller waits for a node that does not answer.

use super::Catalog;
use super::members::ASKS_MAX;
use futures::StreamExt;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tidemark_engine::cluster::address_of;
use tidemark_protocol::cluster::members::Standing;
use tidemark_protocol::cluster::wire::{Member, ToNode};
use tokio::time::Instant;

/// The time that a node has for publishing everything. If it needs longer, it continues, and the caller asks again.
const HEAR_DEADLINE: Duration = Duration::from_secs(1);

/// Pause per member between two rounds. Every node of a job may wait for a flush, and one round serves all of them. A call costs some 30 µs
/// of a processor.
const HEAR_PAUSE: Duration = Duration::from_millis(1);

/// The longest of these pauses: a caller that waits for a flush hardly notices it.
const HEAR_PAUSE_MAX: Duration = Duration::from_secs(1);

/// The last round.
#[derive(Debug)]
pub(super) struct Heard {
    began: Instant,
    ended: Instant,
    unheard: Vec<String>,
}

impl Catalog {
    /// Makes all members publish their pending changes, in a round that begins after this call did. Returns a sentence for each node that
    /// did not.
    pub(super) async fn hear_members(&self) -> Vec<String> {
        let wanted = Instant::now();
        let mut last = self.last_heard.lock().await;
        let members = self.cluster.following.members();
        if let Some(last) = &*last {
            if last.began >= wanted {
                return last.unheard.clone();
            }
            let pause = HEAR_PAUSE.saturating_mul(u32::try_from(members.members.len()).unwrap_or(u32::MAX));
            tokio::time::sleep(pause.min(HEAR_PAUSE_MAX).saturating_sub(last.ended.elapsed())).await;
        }
        let began = Instant::now();
        let others = members.members.iter().filter(|member| !member.gone && member.life != self.cluster.life);
        let told: Vec<_> = others.map(|member| self.hear(member)).collect();
        let told: Vec<_> = futures::stream::iter(told).buffer_unordered(ASKS_MAX).collect().await;
        let unheard: Vec<String> = told.into_iter().flatten().collect();
        *last = Some(Heard { began, ended: Instant::now(), unheard: unheard.clone() });
        unheard
    }

    /// Returns why a node did not publish, or `None` if it did.
    async fn hear(&self, member: &Member) -> Option<String> {
        let (node, standing) = (&member.life.node, member.standing.word());
        let unheard = |why: String| {
            Some(format!(
                "node {node} ({standing}) was not heard, and may have what nobody else knows of: {why}"
            ))
        };
        if member.standing != Standing::Alive {
            // A call without an answer occupies one of the connection's 64 credits, even after its caller stopped waiting.
            return unheard(member.why.clone());
        }
        self.counters.recalls.fetch_add(1, Ordering::Relaxed);
        let message = ToNode::Recall { epoch: self.epoch, path: Vec::new(), name: None, release: false };
        let told = self.cluster.ask_node::<()>(&address_of(member), &message, HEAR_DEADLINE).await;
        let away = told.err()?;
        unheard(std::error::Error::source(&away).map_or_else(|| away.to_string(), ToString::to_string))
    }
}
