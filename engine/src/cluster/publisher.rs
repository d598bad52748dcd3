//! Telling the coordinator what changed here, in order, each thing once.
//!
//! Owns: the numbers of publications, the one that is on its way, whether everything has to be told. Does not own: collecting
//! (`namespace::outgoing`), what the coordinator makes of it.

use super::facts::{state_of, writer_fact};
use super::{ANSWER_DEADLINE, Away, Cluster};
use crate::namespace::{FileState, Moment, OutgoingBody, OutgoingNode, WriterId};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use tidemark_protocol::cluster::wire::{
    BATCH_ITEMS_MAX, CHUNKS_MAX, Joined, NameOperation, NodeState, Publication, Published, ToCoordinator,
    WireFate, WriterFact,
};

/// Processes whose end is still to be told: the writers of a node, over the last saves.
const WATCHED_MAX: usize = 16_384;

#[derive(Debug, Default)]
pub(super) struct Publisher {
    /// One publication at a time.
    turn: tokio::sync::Mutex<Turn>,
    /// What was done here until then has been told and answered. Apart, since a publication may wait for a coordinator that is
    /// gone.
    told: Mutex<Moment>,
    watched: Mutex<BTreeMap<(u32, u64), Watched>>,
}

#[derive(Debug, Default)]
struct Turn {
    /// The last that was made.
    number: u64,
    /// It has not been answered.
    unanswered: Option<Publication>,
    whole: bool,
    /// Names of the whole are made where they are not there: some operations are lost, or their coordinator is.
    makes: bool,
    /// Operations that are told before the whole: no more than the namespace keeps, and one publication.
    unheard: VecDeque<NameOperation>,
}

#[derive(Debug)]
struct Watched {
    writer: WriterId,
    cut: bool,
    told: WireFate,
}

/// Everything has to be told to a coordinator that knows nothing of this life.
pub(super) async fn tell_everything(cluster: &Cluster, joined: &Joined) {
    let mut turn = cluster.publisher.turn.lock().await;
    let led = cluster.led.swap(false, Ordering::AcqRel);
    match joined.published.filter(|_| !led) {
        Some(number) if number == turn.number => turn.unanswered = None,
        Some(number) if number + 1 == turn.number && turn.unanswered.is_some() => {}
        Some(_) | None => {
            turn.whole = true;
            turn.makes |= led || !joined.knows;
        }
    }
}

/// The last publication that was made.
pub(super) async fn last(cluster: &Cluster) -> u64 {
    cluster.publisher.turn.lock().await.number
}

/// Sends everything that the coordinator has not heard.
pub(super) async fn publish(cluster: &Cluster) -> Result<(), Away> {
    if cluster.is_coordinator() {
        return Ok(());
    }
    let mut turn = cluster.publisher.turn.lock().await;
    loop {
        let now = cluster.namespace.moment();
        if turn.whole {
            publish_whole(cluster, &mut turn).await?;
            continue;
        }
        let publication = match turn.unanswered.take() {
            Some(publication) => publication,
            None => {
                let told = cluster.namespace.take_outgoing(BATCH_ITEMS_MAX);
                if told.overflowed {
                    (turn.whole, turn.makes) = (true, true);
                    continue;
                }
                let states: Vec<_> = told.states.into_iter().map(|node| cluster.told(node)).collect();
                let fates = cluster.publisher.changed_fates(cluster);
                if told.operations.is_empty() && states.is_empty() && fates.is_empty() {
                    *cluster.publisher.told.lock().unwrap_or_else(PoisonError::into_inner) = now;
                    return Ok(());
                }
                turn.number += 1;
                Publication {
                    number: turn.number,
                    operations: told.operations,
                    states,
                    fates,
                    ..Publication::default()
                }
            }
        };
        send(cluster, &mut turn, publication).await?;
    }
}

async fn publish_whole(cluster: &Cluster, turn: &mut Turn) -> Result<(), Away> {
    // States say what is here; what was removed, renamed or taken over and not heard yet only operations do. They come first.
    tell_operations(cluster, turn).await?;
    // What was collected until now is in the whole; what comes meanwhile is told after it.
    let mut nodes = cluster.namespace.whole_tree().into_iter();
    let mut last = false;
    while !last {
        let mut states: Vec<NodeState> = Vec::new();
        let mut chunks = 0;
        last = true;
        for node in nodes.by_ref().filter(|node| is_told_whole(cluster, node)) {
            let state = cluster.told(node);
            chunks += state.chunks();
            states.push(state);
            if states.len() >= BATCH_ITEMS_MAX || chunks >= CHUNKS_MAX {
                last = false;
                break;
            }
        }
        turn.number += 1;
        let (number, makes) = (turn.number, turn.makes);
        let publication = Publication { number, whole: true, last, makes, states, ..Publication::default() };
        send(cluster, turn, publication).await?;
    }
    (turn.whole, turn.makes) = (false, false);
    Ok(())
}

/// Tells the operations that nobody has answered, as parts of a whole.
async fn tell_operations(cluster: &Cluster, turn: &mut Turn) -> Result<(), Away> {
    if let Some(unanswered) = turn.unanswered.take() {
        unanswered.operations.into_iter().rev().for_each(|operation| turn.unheard.push_front(operation));
    }
    loop {
        let told = cluster.namespace.take_outgoing(usize::MAX);
        if told.overflowed {
            turn.unheard.clear();
            turn.makes = true;
        }
        turn.unheard.extend(told.operations);
        if told.states.is_empty() {
            break;
        }
    }
    while !turn.unheard.is_empty() {
        turn.number += 1;
        let count = turn.unheard.len().min(BATCH_ITEMS_MAX);
        let operations: Vec<_> = turn.unheard.drain(..count).collect();
        let publication =
            Publication { number: turn.number, whole: true, operations, ..Publication::default() };
        send(cluster, turn, publication).await?;
    }
    Ok(())
}

/// Of others' files their homes tell, or those who keep their copies: what this node knows of them may be old.
fn is_told_whole(cluster: &Cluster, node: &OutgoingNode) -> bool {
    match &node.body {
        OutgoingBody::File(view) => view.file.incarnation == cluster.life.incarnation,
        OutgoingBody::Directory | OutgoingBody::Symlink(_) => true,
    }
}

async fn send(cluster: &Cluster, turn: &mut Turn, mut publication: Publication) -> Result<(), Away> {
    publication.now_ns = cluster.namespace.now_ns();
    let message = ToCoordinator::Publish(publication.clone());
    // Until it is answered nobody knows whether it was heard, and whoever waits may stop waiting: it is said again.
    turn.unanswered = Some(publication);
    let published: Published = cluster.ask(&message, ANSWER_DEADLINE).await?;
    turn.unanswered = None;
    turn.whole |= published.whole_wanted;
    turn.makes |= published.whole_wanted;
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
    /// Until when what was done here has been told.
    pub(super) fn told_until(&self) -> Moment {
        *self.told.lock().unwrap_or_else(PoisonError::into_inner)
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
