//! Following the coordinator: joining, beating, publishing.
//!
//! Owns: the loop of a node that does not decide. Does not own: who the coordinator is ([`Cluster::sit`] says), which epoch is
//! followed, when a beat is due and what silence means (`protocol::membership::View`), what the coordinator makes of it (control).

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

/// How often it is looked whether a beat is due: they are late by this at most.
const BEAT_LOOK: Duration = Duration::from_millis(BEAT_MS / 10);

/// A beat that is not answered within this is missed: a node of less than thousands is suspect by then.
const BEAT_DEADLINE: Duration = Duration::from_millis(BEAT_MS * SUSPECT_BEATS);

/// The longest pause before the coordinator is asked to let us join again.
const JOIN_AGAIN: Duration = Duration::from_millis(300);

/// How often the ends of processes are looked for.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What a node says of itself.
pub struct Presence {
    /// Where peers reach it.
    pub address: String,
    pub labels: Labels,
    /// Of its daemon.
    pub version: String,
    /// The bytes of Tier-1 that are in use, and its size; asked at every beat.
    pub tier1: Box<dyn Fn() -> (u64, u64) + Send + Sync>,
}

impl fmt::Debug for Presence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Presence").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Follows whoever is the coordinator, until dropped.
pub async fn follow(cluster: Arc<Cluster>, presence: Arc<Presence>) {
    cluster.namespace.collect_outgoing();
    let publishing = tokio::spawn(publish_on(Arc::clone(&cluster)));
    let asking = tokio::spawn(super::aside::watch(Arc::clone(&cluster)));
    let _end = (AbortOnDrop(publishing), AbortOnDrop(asking));
    let mut seats = cluster.seat_changed.subscribe();
    loop {
        if !matches!(cluster.seat(), Seat::There(_)) {
            // The sender lives as long as the cluster, which we hold.
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

/// Joins and beats; returns when the coordinator does not know us any more, or another one decides.
async fn stay(cluster: &Cluster, presence: &Presence) {
    publisher::tell_nothing(cluster).await;
    let answered = cluster.namespace.last_answered();
    let join = Join {
        life: cluster.life.clone(),
        start: cluster.start,
        address: presence.address.clone(),
        labels: presence.labels.clone().into(),
        epoch: cluster.epoch(),
        publication: cluster.namespace.last_publication(),
        alone: cluster.names.alone(&cluster.namespace),
        version: presence.version.clone(),
    };
    let joined: Joined = match cluster.ask(&ToCoordinator::Join(join), super::ANSWER_DEADLINE).await {
        Ok(joined) => joined,
        Err(error) => {
            // With its causes, which say what to do: another version, a foreign certificate, a name that is taken.
            let not_in = NotIn::of(&error);
            if cluster.tried_to_join(Some(not_in.clone())) {
                tracing::warn!(error = not_in.why, "not a member yet");
            }
            return;
        }
    };
    let now_ms = cluster.now_ms();
    if let Err(refusal) = cluster.view().admitted(&joined.admit, now_ms) {
        tracing::warn!(%refusal, "a coordinator that let this node in is not followed");
        return;
    }
    let epoch = joined.admit.epoch;
    let Some(members) = understood(&joined.members) else { return };
    tracing::info!(%epoch, members = members.members.len(), "joined");
    // The coordinator has begun anew with us.
    cluster.names.keep_alone(&cluster.namespace, &joined.alone);
    cluster.joined.fetch_add(1, std::sync::atomic::Ordering::AcqRel);
    cluster.tried_to_join(None);
    cluster.namespace.let_known_objects_give_way();
    cluster.copies_changed();
    cluster.take_members(members);
    let told = async {
        // A publication that waits for an answer of before is waited for, and beats go on meanwhile.
        cluster.namespace.collect_outgoing();
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

/// Beats, until another coordinator decides or this one does not know us.
async fn beat_on(cluster: &Cluster, presence: &Presence, epoch: Epoch) {
    loop {
        tokio::time::sleep(BEAT_LOOK).await;
        if cluster.epoch() != epoch {
            return;
        }
        let (used_bytes, size_bytes) = (presence.tier1)();
        let now_ms = cluster.now_ms();
        let due = cluster.view().beat(used_bytes, size_bytes, now_ms);
        let Some(due) = due else { continue };
        let beat = Beat {
            start: due.from.start,
            epoch: due.epoch,
            number: due.number,
            tier1_used_bytes: due.tier1_used_bytes,
            tier1_size_bytes: due.tier1_size_bytes,
        };
        match cluster.ask::<Beaten>(&ToCoordinator::Beat(beat), BEAT_DEADLINE).await {
            Ok(beaten) => {
                let now_ms = cluster.now_ms();
                if let Err(refusal) = cluster.view().echoed(&beaten.echo, now_ms) {
                    tracing::warn!(%refusal, "joining again");
                    return;
                }
                cluster.names.outage_over();
                cluster.heard_clock(epoch, beaten.now_ns);
                take_newer_members(cluster, beaten.members_number).await;
            }
            // It does not know us: a new one, or we were declared gone.
            Err(Away::Refused(refusal)) => {
                tracing::warn!(%refusal, "joining again");
                cluster.view().rejoin();
                return;
            }
            Err(away) => {
                tracing::debug!(error = &away as &dyn std::error::Error, "a beat was not answered")
            }
        }
    }
}

/// A new coordinator answers nobody before it has heard all.
async fn report(cluster: &Cluster) -> Result<(), Away> {
    cluster.publish().await?;
    cluster.ask(&ToCoordinator::Reported, super::ANSWER_DEADLINE).await
}

fn understood(members: &EncodedMembers) -> Option<Arc<Members>> {
    let warn = |error: &WireError| tracing::warn!(%error, "the members are not understood");
    members.decode().inspect_err(warn).ok().map(Arc::new)
}

/// Asks for the members where the list here is an older one: its change was told while nobody could be reached.
pub(super) async fn take_newer_members(cluster: &Cluster, number: u64) {
    let known = cluster.members.borrow().number;
    if known >= number {
        return;
    }
    match cluster.ask::<EncodedMembers>(&ToCoordinator::Members, BEAT_DEADLINE).await {
        Ok(members) => {
            if let Some(members) = understood(&members) {
                cluster.take_members(members);
            }
        }
        // The next beat's answer says it again.
        Err(away) => {
            tracing::debug!(error = &away as &dyn std::error::Error, "the members are asked for again")
        }
    }
}

/// Publishes what changes, soon after it does.
async fn publish_on(cluster: Arc<Cluster>) {
    loop {
        tokio::select! {
            () = cluster.namespace.outgoing_changed() => {}
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
        if !matches!(cluster.seat(), Seat::There(_)) {
            continue;
        }
        if let Err(away) = cluster.publish().await {
            tracing::debug!(error = &away as &dyn std::error::Error, "published later");
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}
