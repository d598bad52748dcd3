//! A first start waits for a coordinator that lets this node in.
//!
//! Owns: for how long, what is said meanwhile, when a refusal is the answer. Does not own: joining (the engine's cluster).

use crate::cli::Failure;
use std::time::{Duration, Instant};
use tidemark_engine::cluster::{Cluster, NotIn};

/// Time from which a lasting refusal is the answer. By then an earlier life of this node is declared gone, and a person has finished a
/// replacement.
const REFUSED_FOR: Duration = Duration::from_secs(5);

/// Interval between two log lines about what a start waits for.
const SAY_EVERY: Duration = Duration::from_secs(5);

/// Interval between two checks whether a coordinator has let this node in.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Waits until a coordinator has let this node in, or it is the coordinator itself: a mount that cannot look a name up does not serve.
///
/// # Errors
/// A coordinator refuses this node, and does not for a passing reason.
pub(crate) async fn let_in(cluster: &Cluster) -> Result<(), Failure> {
    let (mut refused, mut said) = (None, Instant::now());
    while !cluster.following.is_in() {
        let not_in = cluster.following.why_not_in();
        let for_good = not_in.as_ref().filter(|not_in| not_in.for_good);
        refused = for_good.map(|_| refused.unwrap_or_else(Instant::now));
        if let (Some(NotIn { why, .. }), Some(since)) = (for_good, refused)
            && since.elapsed() >= REFUSED_FOR
        {
            let error = anyhow::anyhow!("{why}")
                .context("the coordinator does not let this node in; nothing was mounted");
            return Err(Failure::unavailable(error));
        }
        if said.elapsed() >= SAY_EVERY {
            said = Instant::now();
            let why = not_in.map_or_else(|| "none is known yet".to_owned(), |not_in| not_in.why);
            tracing::warn!(%why, "no coordinator has let this node in; nothing is mounted until one does");
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(())
}
