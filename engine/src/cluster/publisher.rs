//! Publishing this node's changes to the coordinator, in order and each once.
//!
//! Owns: the next publication, the one that is on its way, whether everything has to be published. Does not own: collecting and numbers
//! (`namespace::outgoing`), the coordinator's use of it.

use super::facts::{state_of, writer_fact};
use super::{ANSWER_DEADLINE, Away, Cluster};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use tidemark_namespace::{FileState, Moment, OutgoingBody, OutgoingNode, Told, WriterId};
use tidemark_protocol::cluster::wire::{
    BATCH_BYTES_MAX, BATCH_ITEMS_MAX, Joined, NameOperation, NodeState, Publication, Published,
    ToCoordinator, WireFate, WriterFact,
};
use tidemark_protocol::id::FileId;

/// Maximum number of processes whose end is still to be published: a node's writers over the last saves.
const WATCHED_MAX: usize = 16_384;

#[derive(Debug, Default)]
pub(super) struct Publisher {
    /// The right to publish: one publication is sent at a time.
    turn: tokio::sync::Mutex<Turn>,
    /// Whether this node knows which of its publications the coordinator has. A publication on its way holds the lock.
    compared: tokio::sync::RwLock<bool>,
    /// Apart from `turn`, because a publication may wait for a coordinator that is gone.
    told: Mutex<ToldMoments>,
    watched: Mutex<BTreeMap<(u32, u64), Watched>>,
}

#[derive(Debug)]
struct Turn {
    /// The publication that has not been answered.
    unanswered: Option<Publication>,
    /// Whether everything has to be published; true for a daemon that starts, because it does not know earlier changes.
    whole: bool,
}

impl Default for Turn {
    fn default() -> Self {
        Self { unanswered: None, whole: true }
    }
}

/// Maximum number of remembered moments: the stored state lags by a few publications, or by those of some seconds if etcd is slow.
const MOMENTS_MAX: usize = 1024;

/// Publications of this node, each with the moment up to which they hold all changes made here.
///
/// A node that takes the coordinator role from etcd's state has to know which of its own changes that state lacks.
#[derive(Debug, Default)]
struct ToldMoments {
    /// The moment before this daemon's first change.
    first: Moment,
    /// Publications, the oldest first, each with the moment up to which all changes are in publications up to it.
    moments: VecDeque<(u64, Moment)>,
}

impl ToldMoments {
    fn new(first: Moment) -> Self {
        Self { first, moments: VecDeque::new() }
    }

    fn note(&mut self, publication: u64, moment: Moment) {
        match self.moments.back_mut() {
            Some(last) if last.0 == publication => last.1 = moment,
            _ => self.moments.push_back((publication, moment)),
        }
        if self.moments.len() > MOMENTS_MAX {
            self.moments.pop_front();
        }
    }

    fn until(&self, publication: u64) -> Moment {
        let told = self.moments.iter().rev().find(|(last, _)| *last <= publication);
        told.map_or(self.first, |(_, moment)| *moment)
    }
}

#[derive(Debug)]
struct Watched {
    writer: WriterId,
    cut: bool,
    told: WireFate,
}

/// Stops publishing until this node knows which of its publications the coordinator has ([`tell_from`]). After a whole publication that
/// makes no names, the coordinator would take names that it does not know for removed, and have them removed here.
pub(super) async fn tell_nothing(cluster: &Cluster) {
    *cluster.publisher.compared.write().await = false;
}

/// Resumes publishing after a join, from the last publication of this life that the coordinator has. `answered` is the last publication
/// that was answered before this node asked to join; the coordinator has every publication that was answered since.
pub(super) async fn tell_from(cluster: &Cluster, joined: &Joined, answered: u64) {
    let mut turn = cluster.publisher.turn.lock().await;
    // A coordinator collects no states.
    let led = cluster.led.swap(false, Ordering::AcqRel);
    turn.whole |= led || joined.states;
    let namespace = &cluster.namespace;
    let last = namespace.publications().last_publication();
    tracing::debug!(last, answered, heard = joined.published, joined.states, "how far this node was heard");
    let has_all_but_last = |heard: u64| heard.max(namespace.publications().last_answered()) + 1 == last;
    // A publication from before this node was the coordinator is not sent again: its answer would count for the last publication.
    let _ = turn.unanswered.take_if(|publication| publication.number != last);
    match joined.published {
        Some(heard) if heard == last => {
            turn.unanswered = None;
            namespace.publications().publication_answered();
        }
        // The unanswered publication is sent again, unchanged. A coordinator's own goes into etcd only, and is not there.
        Some(heard) if heard >= answered && has_all_but_last(heard) && !led => {}
        heard => {
            // Operations that the coordinator lacks come first. States make names only if operations are missing as well.
            (turn.unanswered, turn.whole) = (None, true);
            namespace.publications().publication_unsent();
            if heard.is_none_or(|heard| heard < answered) {
                namespace.publications().lose_operations();
            }
        }
    }
    *cluster.publisher.compared.write().await = true;
}

/// Publishes every change that the coordinator has not received. Changes made meanwhile are published later: a job that saves small
/// files always has new ones, and the caller would wait for the job's end.
pub(super) async fn publish(cluster: &Cluster) -> Result<(), Away> {
    if cluster.following.is_coordinator() {
        return Ok(());
    }
    let mut turn = cluster.publisher.turn.lock().await;
    // This node may have become the coordinator meanwhile.
    if cluster.following.is_coordinator() {
        return Ok(());
    }
    if !*cluster.publisher.compared.read().await {
        return Err(Away::New);
    }
    let namespace = &cluster.namespace;
    loop {
        let now = namespace.catalog().moment();
        // Repeats the publication under its number, so that it is taken once. A daemon that takes over has only the operations, and
        // publishes the states with all others.
        let again = |(number, operations)| Publication { number, operations, ..Publication::default() };
        let unanswered =
            turn.unanswered.take().or_else(|| namespace.publications().unanswered_publication().map(again));
        if let Some(publication) = unanswered {
            send(cluster, &mut turn, publication).await?;
            continue;
        }
        if turn.whole || namespace.publications().lost_operations().is_some() {
            publish_whole(cluster, &mut turn).await?;
            continue;
        }
        let fates = cluster.publisher.changed_fates(cluster);
        let told =
            namespace.publications().take_outgoing(BATCH_ITEMS_MAX, BATCH_BYTES_MAX, !fates.is_empty());
        let (nothing, all) = (told.number == 0, told.all);
        let states: Vec<_> = told.states.into_iter().map(|node| cluster.told(node)).collect();
        let publication = Publication {
            number: told.number,
            operations: told.operations,
            states,
            fates,
            ..Publication::default()
        };
        if !nothing {
            send(cluster, &mut turn, publication).await?;
        }
        let wants_whole = turn.whole || namespace.publications().lost_operations().is_some();
        if nothing || all && !wants_whole {
            cluster.publisher.note_told(namespace.publications().last_publication(), now);
            return Ok(());
        }
    }
}

async fn publish_whole(cluster: &Cluster, turn: &mut Turn) -> Result<(), Away> {
    let namespace = &cluster.namespace;
    // Operations come first: they alone report what was removed, renamed or taken over. States report what is here.
    loop {
        let Told { number, operations, .. } =
            namespace.publications().take_operations(BATCH_ITEMS_MAX, BATCH_BYTES_MAX);
        if number == 0 {
            break;
        }
        let publication = Publication { number, whole: true, operations, ..Publication::default() };
        send(cluster, turn, publication).await?;
    }
    // The whole holds all changes collected so far; later changes are published after it.
    let loss = namespace.publications().lost_operations();
    let makes = loss.is_some();
    let nodes = namespace.standing().whole_tree();
    let begun: BTreeSet<_> = namespace.publications().untold_operations().iter().filter_map(made).collect();
    let mut nodes = nodes.into_iter().filter(|node| is_told_whole(cluster, node, &begun));
    let mut last = false;
    while !last {
        let mut states: Vec<NodeState> = Vec::new();
        let mut bytes = 0;
        last = true;
        for node in nodes.by_ref() {
            let state = cluster.told(node);
            bytes += state.bytes_most();
            states.push(state);
            if states.len() >= BATCH_ITEMS_MAX || bytes >= BATCH_BYTES_MAX {
                last = false;
                break;
            }
        }
        let number = namespace.publications().number_publication();
        let publication = Publication { number, whole: true, last, makes, states, ..Publication::default() };
        send(cluster, turn, publication).await?;
    }
    turn.whole = false;
    if let Some(loss) = loss {
        namespace.publications().everything_told(loss);
    }
    Ok(())
}

/// Returns the file that an operation makes. Before the coordinator has the operation, it would take a state of the file for a file
/// whose last name is gone; so the state is published after the operation.
fn made(operation: &NameOperation) -> Option<FileId> {
    match operation {
        NameOperation::File { file, .. } | NameOperation::Taken { file, .. } => Some(*file),
        NameOperation::Directory { .. }
        | NameOperation::Symlink { .. }
        | NameOperation::Linked { .. }
        | NameOperation::Removed { .. }
        | NameOperation::Renamed { .. } => None,
    }
}

/// Whether this node publishes a node's state in a whole. Other nodes' files are published by their homes, or by the keepers of their
/// copies, because this node's knowledge of them may be old.
fn is_told_whole(cluster: &Cluster, node: &OutgoingNode, begun: &BTreeSet<FileId>) -> bool {
    match &node.body {
        OutgoingBody::File(view) => {
            view.file.incarnation == cluster.life.incarnation && !begun.contains(&view.file)
        }
        OutgoingBody::Directory | OutgoingBody::Symlink(_) => true,
    }
}

async fn send(cluster: &Cluster, turn: &mut Turn, mut publication: Publication) -> Result<(), Away> {
    publication.now_ns = cluster.namespace.now_ns();
    let message = ToCoordinator::Publish(publication.clone());
    // The caller may stop waiting, and then it is unknown whether the coordinator has the publication: it is sent again.
    turn.unanswered = Some(publication);
    let compared = cluster.publisher.compared.read().await;
    if !*compared {
        return Err(Away::New);
    }
    let published: Published = cluster.ask(&message, ANSWER_DEADLINE).await?;
    drop(compared);
    turn.unanswered = None;
    if published.whole_wanted {
        turn.whole = true;
        cluster.namespace.publications().publication_unsent();
        cluster.namespace.publications().lose_operations();
    } else {
        cluster.namespace.publications().publication_answered();
    }
    for path in published.shared {
        if let Some(node) = cluster.namespace.nodes().node_at(&path) {
            cluster.names.forget(node);
        }
    }
    Ok(())
}

impl Cluster {
    fn told(&self, node: OutgoingNode) -> NodeState {
        if let OutgoingBody::File(view) = &node.body
            && view.remote.is_none()
        {
            let cut = matches!(view.state, FileState::Cut);
            self.publisher.watch(self, &view.writers, cut);
        }
        state_of(&self.namespace, node)
    }
}

impl Publisher {
    /// Makes the publisher of a daemon that has published nothing yet.
    pub(super) fn new(told: Moment) -> Self {
        Self { told: Mutex::new(ToldMoments::new(told)), ..Self::default() }
    }

    /// Returns the moment up to which all changes here are in publications up to this one.
    pub(super) fn told_until(&self, publication: u64) -> Moment {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).until(publication)
    }

    pub(super) fn note_told(&self, publication: u64, moment: Moment) {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).note(publication, moment);
    }

    /// Watches these processes, so that their ends are published.
    fn watch(&self, cluster: &Cluster, writers: &[WriterId], cut: bool) {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        for writer in writers.iter().filter(|writer| writer.home.is_none()) {
            let key = (writer.tgid, writer.start_time_ticks);
            if watched.len() >= WATCHED_MAX && !watched.contains_key(&key) {
                watched.pop_first();
            }
            let told = writer_fact(&cluster.namespace, writer, cut).fate;
            watched.insert(key, Watched { writer: writer.clone(), cut, told });
        }
    }

    /// Returns the processes whose fate differs from the published one. Reads /proc for each watched process.
    fn changed_fates(&self, cluster: &Cluster) -> Vec<WriterFact> {
        // The node that waits for this publication concludes from it how the processes ended.
        cluster.namespace.writers().forget_ended_writers();
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = Vec::new();
        watched.retain(|_, process| {
            let fact = writer_fact(&cluster.namespace, &process.writer, process.cut);
            if fact.fate != process.told {
                process.told = fact.fate;
                changed.push(fact);
            }
            // The way a process ended may be known a moment after its end.
            process.told == WireFate::Alive
                || process.told == WireFate::Gone
                    && cluster.namespace.writers().is_end_awaited(&process.writer)
        });
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_kept_was_done_after_the_last_publication_that_it_has() {
        let moment = |names| Moment { names, ..Moment::default() };
        let mut told = ToldMoments::new(moment(1));
        assert_eq!(told.until(9), moment(1), "nothing has been told");
        told.note(3, moment(30));
        told.note(3, moment(33));
        told.note(5, moment(50));
        assert_eq!((told.until(2), told.until(3), told.until(4)), (moment(1), moment(33), moment(33)));
        assert_eq!((told.until(5), told.until(9)), (moment(50), moment(50)));
        (0..2 * MOMENTS_MAX as u64).for_each(|at| told.note(10 + at, moment(100 + at)));
        assert_eq!(told.moments.len(), MOMENTS_MAX);
        assert_eq!(told.until(11), moment(1), "forgotten: what this daemon made stays");
    }
}
