//! Telling the coordinator what changed here, in order, each thing once.
//!
//! Owns: what is sent next, the publication that is on its way, whether everything has to be told. Does not own: collecting and numbers
//! (`namespace::outgoing`), what the coordinator makes of it.

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

/// Processes whose end is still to be told: the writers of a node, over the last saves.
const WATCHED_MAX: usize = 16_384;

#[derive(Debug, Default)]
pub(super) struct Publisher {
    /// One publication at a time.
    turn: tokio::sync::Mutex<Turn>,
    /// Whether it is known how far the coordinator has heard this node. A publication on its way holds it.
    compared: tokio::sync::RwLock<bool>,
    /// Apart, since a publication may wait for a coordinator that is gone.
    told: Mutex<ToldMoments>,
    watched: Mutex<BTreeMap<(u32, u64), Watched>>,
}

#[derive(Debug)]
struct Turn {
    /// It has not been answered.
    unanswered: Option<Publication>,
    /// How everything stands has to be told. So it is for a daemon that begins: what changed before is not known to it.
    whole: bool,
}

impl Default for Turn {
    fn default() -> Self {
        Self { unanswered: None, whole: true }
    }
}

/// Moments that are remembered: what is kept elsewhere is behind by a few publications, or by those of the seconds in which etcd is slow.
const MOMENTS_MAX: usize = 1024;

/// Publications of this node, each with the moment until which they hold all that was done here.
///
/// A node that takes the seat with what etcd keeps has to know which of its own changes are not in there.
#[derive(Debug, Default)]
struct ToldMoments {
    /// Before this daemon did anything.
    first: Moment,
    /// The last publication, and until when everything is in publications up to that, the oldest first.
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

/// This node joins: until it is known how far the coordinator has heard it ([`tell_from`]), nothing is told. A whole that does not make names
/// would have all that the coordinator does not know taken for removed, and removed here.
pub(super) async fn tell_nothing(cluster: &Cluster) {
    *cluster.publisher.compared.write().await = false;
}

/// A coordinator has let this node in, and said how far it knows this life. `answered` is the last publication that was answered before it
/// was asked: whatever was answered since, it has.
pub(super) async fn tell_from(cluster: &Cluster, joined: &Joined, answered: u64) {
    let mut turn = cluster.publisher.turn.lock().await;
    // A coordinator collects no states.
    turn.whole |= cluster.led.swap(false, Ordering::AcqRel) || joined.states;
    let namespace = &cluster.namespace;
    let last = namespace.last_publication();
    tracing::debug!(last, answered, heard = joined.published, joined.states, "how far this node was heard");
    let has_all_but_last = |heard: u64| heard.max(namespace.last_answered()) + 1 == last;
    // A publication of before this node coordinated is not sent again: its answer would count for the last.
    let _ = turn.unanswered.take_if(|publication| publication.number != last);
    match joined.published {
        Some(heard) if heard == last => {
            turn.unanswered = None;
            namespace.publication_answered();
        }
        // It is sent again, as it was.
        Some(heard) if heard >= answered && has_all_but_last(heard) => {}
        heard => {
            // Operations that it does not know come first. States make names only where operations are missing as well.
            (turn.unanswered, turn.whole) = (None, true);
            namespace.publication_unsent();
            if heard.is_none_or(|heard| heard < answered) {
                namespace.lose_operations();
            }
        }
    }
    *cluster.publisher.compared.write().await = true;
}

/// Sends everything that the coordinator has not heard. What comes meanwhile is told later: a job that saves small files always has
/// something new to tell, and whoever asks would wait for its end.
pub(super) async fn publish(cluster: &Cluster) -> Result<(), Away> {
    if cluster.is_coordinator() {
        return Ok(());
    }
    let mut turn = cluster.publisher.turn.lock().await;
    // This node may have become the coordinator meanwhile.
    if cluster.is_coordinator() {
        return Ok(());
    }
    if !*cluster.publisher.compared.read().await {
        return Err(Away::New);
    }
    let namespace = &cluster.namespace;
    loop {
        let now = namespace.moment();
        // The same under the same number: it is taken once. A daemon that takes over has the operations; states it tells with all others.
        let again = |(number, operations)| Publication { number, operations, ..Publication::default() };
        let unanswered = turn.unanswered.take().or_else(|| namespace.unanswered_publication().map(again));
        if let Some(publication) = unanswered {
            send(cluster, &mut turn, publication).await?;
            continue;
        }
        if turn.whole || namespace.lost_operations().is_some() {
            publish_whole(cluster, &mut turn).await?;
            continue;
        }
        let fates = cluster.publisher.changed_fates(cluster);
        let told = namespace.take_outgoing(BATCH_ITEMS_MAX, BATCH_BYTES_MAX, !fates.is_empty());
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
        let wants_whole = turn.whole || namespace.lost_operations().is_some();
        if nothing || all && !wants_whole {
            let mut told = cluster.publisher.told.lock().unwrap_or_else(PoisonError::into_inner);
            told.note(namespace.last_publication(), now);
            return Ok(());
        }
    }
}

async fn publish_whole(cluster: &Cluster, turn: &mut Turn) -> Result<(), Away> {
    let namespace = &cluster.namespace;
    // States say what is here; what was removed, renamed or taken over and not heard yet only operations do. They come first.
    loop {
        let Told { number, operations, .. } = namespace.take_operations(BATCH_ITEMS_MAX, BATCH_BYTES_MAX);
        if number == 0 {
            break;
        }
        let publication = Publication { number, whole: true, operations, ..Publication::default() };
        send(cluster, turn, publication).await?;
    }
    // What was collected until now is in the whole; what comes meanwhile is told after it.
    let loss = namespace.lost_operations();
    let makes = loss.is_some();
    let nodes = namespace.whole_tree();
    let begun: BTreeSet<_> = namespace.untold_operations().iter().filter_map(made).collect();
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
        let number = namespace.number_publication();
        let publication = Publication { number, whole: true, last, makes, states, ..Publication::default() };
        send(cluster, turn, publication).await?;
    }
    turn.whole = false;
    if let Some(loss) = loss {
        namespace.everything_told(loss);
    }
    Ok(())
}

/// The file that an operation makes. Where the coordinator has not heard that, a state of the file would be taken for one of a file whose
/// last name is gone: it is told after the operation.
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

/// Of others' files their homes tell, or those who keep their copies: what this node knows of them may be old.
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
    // Until it is answered nobody knows whether it was heard, and whoever waits may stop waiting: it is said again.
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
        cluster.namespace.publication_unsent();
        cluster.namespace.lose_operations();
    } else {
        cluster.namespace.publication_answered();
    }
    for path in published.shared {
        if let Some(node) = cluster.namespace.node_at(&path) {
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
    /// For a daemon that has told nothing yet.
    pub(super) fn new(told: Moment) -> Self {
        Self { told: Mutex::new(ToldMoments::new(told)), ..Self::default() }
    }

    /// Until when what was done here is in publications up to this one.
    pub(super) fn told_until(&self, publication: u64) -> Moment {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).until(publication)
    }

    /// The ends of these processes are to be told.
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

    /// Processes that have ended since they were told of. Reads /proc for each that had not.
    fn changed_fates(&self, cluster: &Cluster) -> Vec<WriterFact> {
        // Who waits for this publication concludes from it how they ended.
        cluster.namespace.forget_ended_writers();
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let mut changed = Vec::new();
        watched.retain(|_, process| {
            let fact = writer_fact(&cluster.namespace, &process.writer, process.cut);
            if fact.fate != process.told {
                process.told = fact.fate;
                changed.push(fact);
            }
            // How one ended may be known a moment after it has.
            process.told == WireFate::Alive
                || process.told == WireFate::Gone && cluster.namespace.is_end_awaited(&process.writer)
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
