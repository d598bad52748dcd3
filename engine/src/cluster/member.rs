//! Following the coordinator: joining, beating, publishing.
//!
//! Owns: the loop of a node that is not the coordinator. Does not own: who the coordinator is ([`Cluster::sit`]), which epoch is
//! followed, when a beat is due and what silence means (`protocol::membership::View`), the coordinator's part (control).

use super::{Away, Cluster, NotIn, Seat, publisher};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::{
    Beat, Beaten, EncodedMembers, Join, Joined, Members, ToCoordinator, WireError,
};
use tidemark_protocol::id::Epoch;
use tidemark_protocol::label::Labels;
use tidemark_protocol::membership::{BEAT_MS, SUSPECT_BEATS};

/// Interval of the check whether a beat is due: a beat is late by this at most.
const BEAT_LOOK: Duration = Duration::from_millis(BEAT_MS / 10);

/// Time after which an unanswered beat counts as missed: in a cluster below thousands of nodes, this node is suspect by then.
const BEAT_DEADLINE: Duration = Duration::from_millis(BEAT_MS * SUSPECT_BEATS);

/// Longest pause before this node asks to join again.
const JOIN_AGAIN: Duration = Duration::from_millis(300);

/// Messages with which a node that joins says its time, all at once. One in some takes long; a file is not to seem closed after the index
/// that lists it.
const TIMES_SAID: usize = 4;

/// Interval at which this node looks for ended processes.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Shortest interval between two publications that nobody waits for, so that the files of a save are published together. Each costs the
/// coordinator a write to etcd. Who asks for a name has its node publish at once.
const TELL_PAUSE: Duration = Duration::from_millis(10);

/// A node's description of itself for joins and beats.
pub struct Presence {
    /// The address at which peers reach the node.
    pub address: String,
    pub labels: Labels,
    /// The daemon's version.
    pub version: String,
    /// Returns Tier-1's used bytes and its size in bytes; called for every beat.
    pub tier1: Box<dyn Fn() -> (u64, u64) + Send + Sync>,
}

impl fmt::Debug for Presence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Presence").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Follows the coordinator, whichever node that is, until dropped.
pub async fn follow(cluster: Arc<Cluster>, presence: Arc<Presence>) {
    cluster.namespace.publications().collect_outgoing();
    let publishing = tokio::spawn(publish_on(Arc::clone(&cluster)));
    let asking = tokio::spawn(super::aside::watch(Arc::clone(&cluster)));
    let _end = (AbortOnDrop(publishing), AbortOnDrop(asking));
    let mut seats = cluster.following.watch_seat();
    loop {
        if !matches!(cluster.following.seat(), Seat::There(_)) {
            // The sender lives as long as the cluster, which this task holds.
            let _ = seats.changed().await;
            continue;
        }
        seats.mark_unchanged();
        tokio::select! {
            () = stay(&cluster, &presence) => {}
            _ = seats.changed() => {}
        }
        tokio::time::sleep(JOIN_AGAIN).await;
    }
}

/// Joins and beats. Returns when the coordinator no longer knows this node, or another node is the coordinator.
async fn stay(cluster: &Cluster, presence: &Presence) {
    publisher::tell_nothing(cluster).await;
    // The coordinator may be a new one, and know nothing of what earlier answers allowed.
    cluster.names.forget_answers();
    let answered = cluster.namespace.publications().last_answered();
    let join = Join {
        life: cluster.life.clone(),
        start: cluster.start,
        address: presence.address.clone(),
        labels: presence.labels.clone().into(),
        epoch: cluster.following.epoch(),
        publication: cluster.namespace.publications().last_publication(),
        alone: cluster.names.alone(&cluster.namespace),
        version: presence.version.clone(),
    };
    let joined: Joined = match cluster.ask(&ToCoordinator::Join(join), super::ANSWER_DEADLINE).await {
        Ok(joined) => joined,
        Err(error) => {
            // The error's causes say what to do: another version, a foreign certificate, a name that is taken.
            let not_in = NotIn::of(&error);
            if cluster.following.tried_to_join(Some(not_in.clone())) {
                tracing::warn!(error = not_in.why, "not a member yet");
            }
            return;
        }
    };
    let now_ms = cluster.following.now_ms();
    if let Err(refusal) = cluster.following.view().admitted(&joined.admit, now_ms) {
        tracing::warn!(%refusal, "a coordinator that let this node in is not followed");
        return;
    }
    let epoch = joined.admit.epoch;
    let Some(members) = understood(&joined.members) else { return };
    tracing::info!(%epoch, members = members.members.len(), "joined");
    // Only the directories that it granted now stay held.
    cluster.names.keep_alone(&cluster.namespace, &joined.alone);
    cluster.following.has_joined();
    cluster.namespace.hosts().let_known_objects_give_way();
    cluster.holders.copies_changed();
    cluster.following.take_members(members);
    let told = async {
        // An earlier publication may still wait for its answer; beats go on while this waits for it.
        cluster.namespace.publications().collect_outgoing();
        say_time(cluster, epoch).await;
        publisher::tell_from(cluster, &joined, answered).await;
        while let Err(away) = report(cluster).await {
            tracing::debug!(error = &away as &dyn std::error::Error, "what is known here is told later");
            tokio::time::sleep(JOIN_AGAIN).await;
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        () = told => {}
        () = beat_on(cluster, presence, epoch) => {}
    }
}

/// Says this node's time, and hears the coordinator's. Returns after the quickest of [`TIMES_SAID`] messages, which tells the most. A
/// failure does no harm: times are then read by other messages.
async fn say_time(cluster: &Cluster, epoch: Epoch) {
    let time = ToCoordinator::Time { now_ns: cluster.namespace.now_ns() };
    let said = (0..TIMES_SAID).map(|_| Box::pin(cluster.ask::<i64>(&time, BEAT_DEADLINE)));
    match futures::future::select_ok(said).await {
        Ok((theirs_ns, _)) => cluster.said.take_time(epoch, theirs_ns, cluster.namespace.now_ns()),
        Err(error) => tracing::debug!(%error, "the coordinator does not take the time"),
    }
}

/// Beats, until another node is the coordinator or this coordinator does not know the node.
async fn beat_on(cluster: &Cluster, presence: &Presence, epoch: Epoch) {
    loop {
        tokio::time::sleep(BEAT_LOOK).await;
        if cluster.following.epoch() != epoch {
            return;
        }
        let (used_bytes, size_bytes) = (presence.tier1)();
        let now_ms = cluster.following.now_ms();
        let due = cluster.following.view().beat(used_bytes, size_bytes, now_ms);
        let Some(due) = due else { continue };
        let beat = Beat {
            start: due.from.start,
            epoch: due.epoch,
            number: due.number,
            tier1_used_bytes: due.tier1_used_bytes,
            tier1_size_bytes: due.tier1_size_bytes,
            now_ns: cluster.namespace.now_ns(),
        };
        match cluster.ask::<Beaten>(&ToCoordinator::Beat(beat), BEAT_DEADLINE).await {
            Ok(beaten) => {
                let now_ms = cluster.following.now_ms();
                if let Err(refusal) = cluster.following.view().echoed(&beaten.echo, now_ms) {
                    tracing::warn!(%refusal, "joining again");
                    return;
                }
                cluster.names.outage_over();
                cluster.said.take(epoch, &beaten, cluster.namespace.now_ns());
                take_newer_members(cluster, beaten.members_number).await;
            }
            // The coordinator does not know this node: the coordinator is new, or it declared this node gone.
            Err(Away::Refused(refusal)) => {
                tracing::warn!(%refusal, "joining again");
                cluster.following.view().rejoin();
                return;
            }
            Err(away) => {
                tracing::debug!(error = &away as &dyn std::error::Error, "a beat was not answered")
            }
        }
    }
}

/// Publishes everything, and then reports that. A new coordinator answers no node before all have reported.
async fn report(cluster: &Cluster) -> Result<(), Away> {
    cluster.publish().await?;
    cluster.ask(&ToCoordinator::Reported, super::ANSWER_DEADLINE).await
}

fn understood(members: &EncodedMembers) -> Option<Arc<Members>> {
    let warn = |error: &WireError| tracing::warn!(%error, "the members are not understood");
    members.decode().inspect_err(warn).ok().map(Arc::new)
}

/// Asks for the members if the list here is older: a change was sent while this node could not be reached.
pub(super) async fn take_newer_members(cluster: &Cluster, number: u64) {
    let known = cluster.following.members().number;
    if known >= number {
        return;
    }
    match cluster.ask::<EncodedMembers>(&ToCoordinator::Members, BEAT_DEADLINE).await {
        Ok(members) => {
            if let Some(members) = understood(&members) {
                cluster.following.take_members(members);
            }
        }
        // The next beat's answer gives the number again.
        Err(away) => {
            tracing::debug!(error = &away as &dyn std::error::Error, "the members are asked for again")
        }
    }
}

/// Publishes each change soon after it happens.
async fn publish_on(cluster: Arc<Cluster>) {
    loop {
        tokio::select! {
            () = cluster.namespace.publications().outgoing_changed() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        if !matches!(cluster.following.seat(), Seat::There(_)) {
            continue;
        }
        if let Err(away) = cluster.publish().await {
            tracing::debug!(error = &away as &dyn std::error::Error, "published later");
            tokio::time::sleep(LOOK_EVERY).await;
        }
        tokio::time::sleep(TELL_PAUSE).await;
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
