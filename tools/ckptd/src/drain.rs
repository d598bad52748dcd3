//! The drain before a daemon ends: local saves reach Tier-3, and the coordinator hears of all changes of names.
//!
//! Owns: the rule of a node that decides, that of a member, and which of them holds. Does not own: when a daemon ends (`up`), uploading and
//! committing (the engine), which node becomes the coordinator (`seat`).
//!
//! A node may lose or take over the coordinator role while it drains. The work begun until then is void: the drain begins anew, by the
//! other rule and within the same limits.

use crate::api::Daemon;
use std::time::Duration;
use tidemark_engine::cluster::Away;
use tidemark_engine::node::Shared;
use tidemark_engine::settings::Settings;
use tidemark_namespace::FileState;
use tidemark_protocol::report::path_text;
use tokio::sync::watch;
use tokio::time::Instant;

/// Limit for states: an answer takes milliseconds where there is one.
const STATES_TOLD_WITHIN: Duration = Duration::from_secs(1);

/// Interval between two tries to notify the coordinator of the last changes.
const TELL_AGAIN: Duration = Duration::from_millis(100);

/// Names in the log among those that the coordinator does not know: enough to see which job it was.
const UNTOLD_SHOWN: usize = 8;

/// How long the loop of a node that decides has to say at its limit what is not durable.
const SAID_WITHIN: Duration = Duration::from_secs(2);

/// Until when a daemon drains.
#[derive(Debug, Clone, Copy)]
struct Limits {
    /// Programs that save are waited for, and may make files, until then.
    grace_until: Instant,
    give_up: Instant,
}

impl Limits {
    fn begin(settings: &Settings, now: Instant) -> Self {
        let timeout = Duration::from_secs(settings.shutdown.drain_timeout_s);
        let grace = Duration::from_secs(settings.shutdown.grace_s);
        Self { grace_until: now + grace.min(timeout), give_up: now + timeout }
    }
}

/// Returns whether all is durable; `None` if the drain is not over. `ended`: the result of a drain by one rule, `None` if the role changed
/// before. `is_stale`: the role changed since the drain began, so that a failure of that drain counts for nothing.
fn outcome(ended: Option<bool>, is_stale: bool, is_late: bool) -> Option<bool> {
    match ended {
        Some(true) => Some(true),
        Some(false) if !is_stale => Some(false),
        Some(false) | None => is_late.then_some(false),
    }
}

/// Drains by the rule of the role that this node has, whenever that changes. True when everything is durable.
pub(crate) async fn drain(daemon: &Daemon, settings: &Settings) -> bool {
    let shared = daemon.node.shared();
    let limits = Limits::begin(settings, Instant::now());
    let mut seat = shared.cluster.get().map(|cluster| cluster.following.watch_seat());
    loop {
        if let Some(seat) = &mut seat {
            seat.mark_unchanged();
        }
        let decides = shared.decides();
        let ended = tokio::select! {
            durable = drain_all(daemon, limits), if decides => Some(durable),
            durable = drain_member(shared, limits.give_up), if !decides => Some(durable),
            () = changed(seat.as_mut()) => None,
        };
        // The seat's change is visible before the lost role's work is dropped.
        let is_stale = seat.as_ref().is_some_and(|seat| seat.has_changed().unwrap_or(false));
        if let Some(durable) = outcome(ended, is_stale, Instant::now() >= limits.give_up) {
            return durable;
        }
        tracing::info!(
            decides = shared.decides(),
            "the coordinator changed while this node drains: it begins anew"
        );
    }
}

/// Resolves when another node coordinates, or none; never for a node that is alone.
async fn changed(seat: Option<&mut watch::Receiver<u64>>) {
    // The sender lives as long as the cluster.
    let lasts = match seat {
        Some(seat) => seat.changed().await.is_ok(),
        None => false,
    };
    if !lasts {
        std::future::pending().await
    }
}

/// The rule of a node that decides: what is closed is committed as far as it can be, and the log names the rest.
async fn drain_all(daemon: &Daemon, limits: Limits) -> bool {
    let now = Instant::now();
    let [timeout, grace] =
        [limits.give_up, limits.grace_until].map(|until| until.saturating_duration_since(now));
    let namespace = &daemon.node.shared().namespace;
    let closing = async {
        tokio::time::sleep_until(limits.grace_until).await;
        tracing::info!("ending: new files are refused from now on");
        namespace.gate().close_to_new_files();
        std::future::pending::<()>().await;
    };
    let outcome = tokio::select! {
        outcome = daemon.node.drain(timeout, grace) => outcome,
        () = closing => None,
        // A node that does not know its catalog yet says nothing.
        () = tokio::time::sleep_until(limits.give_up + SAID_WITHIN) => None,
    };
    let Some(outcome) = outcome else { return false };
    for left in &outcome.pending {
        tracing::warn!(path = %left.path, reason = left.reason.word(), what = %left.what, "not durable at the end");
    }
    outcome.pending.is_empty()
}

/// Drains by the rule of a member: waits until every file sealed here is in Tier-3, as far as the coordinator commits it. The coordinator
/// must then know all changes of names. Returns true when all of that is so.
async fn drain_member(shared: &Shared, give_up: Instant) -> bool {
    shared.lift_pace_of_copies();
    let mut refused = false;
    loop {
        let own = shared.namespace.nodes().views_below(b"").into_iter().filter(|view| view.remote.is_none());
        let left = own.filter(|view| match view.state {
            FileState::Sealed { .. } => view.object.is_none() && view.host,
            FileState::Open { .. } | FileState::Closed | FileState::Cut | FileState::Mapped => true,
        });
        let left = left.count();
        if left == 0 && refused {
            return tell_the_last(shared, give_up).await;
        }
        if left == 0 {
            // Once more, without a close that no drain would wait for.
            shared.namespace.gate().refuse_writers();
            refused = true;
            continue;
        }
        if Instant::now() >= give_up {
            tracing::warn!(files = left, "not in Tier-3 at the end; other nodes may have copies");
            return false;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Publishes the last changes of programs here to the coordinator. In a directory that this node has alone, programs did not wait for that,
/// and their changes end with this node's memory. Returns true when all are published.
async fn tell_the_last(shared: &Shared, give_up: Instant) -> bool {
    let (Some(cluster), namespace) = (shared.cluster.get(), &shared.namespace) else { return true };
    // States besides are published once: of files in Tier-3 they add little, and the coordinator may have ended before.
    let once = give_up.min(Instant::now() + STATES_TOLD_WITHIN);
    let told = tokio::time::timeout_at(once, cluster.publish()).await;
    if let Err(error) = told.unwrap_or(Err(Away::Late(STATES_TOLD_WITHIN))) {
        tracing::info!(
            error = &error as &dyn std::error::Error,
            "the coordinator may not know which attributes were set last"
        );
    }
    while namespace.publications().has_untold() {
        let began = Instant::now();
        let told = tokio::time::timeout_at(give_up, cluster.publish()).await;
        let Err(away) = told.unwrap_or_else(|_| Err(Away::Late(began.elapsed()))) else { return true };
        if Instant::now() >= give_up {
            let operations = namespace.publications().untold_operations();
            let first = operations.iter().take(UNTOLD_SHOWN).map(|operation| path_text(operation.path()));
            tracing::warn!(
                error = &away as &dyn std::error::Error,
                operations = operations.len(),
                first = ?first.collect::<Vec<_>>(),
                "not told to the coordinator at the end, and lost with this node's memory: what was done to names or attributes last"
            );
            return false;
        }
        tokio::time::sleep(TELL_AGAIN).await;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drain_that_failed_for_a_change_of_roles_begins_anew_while_there_is_time() {
        for is_late in [false, true] {
            for is_stale in [false, true] {
                assert_eq!(
                    outcome(Some(true), is_stale, is_late),
                    Some(true),
                    "all is durable, whoever decides"
                );
            }
            assert_eq!(outcome(Some(false), false, is_late), Some(false));
        }
        for (ended, is_stale) in [(Some(false), true), (None, true), (None, false)] {
            assert_eq!(outcome(ended, is_stale, false), None);
            assert_eq!(outcome(ended, is_stale, true), Some(false));
        }
    }
}
