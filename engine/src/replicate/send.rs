//! The home's loop: which file goes to which partner, and which copies are acknowledged.
//!
//! Owns: the files of this node that have or need copies, what is under way, what is acknowledged, how much lacks a copy. Does not own:
//! a file's way to a partner (`protocol::replication::Sender`), which is next (`queue`), carrying it out (`outgoing`), how fast
//! (`pace`), who the partners are, when a version counts as replicated.
//!
//! Like the node's loop, this loop is level-triggered: callers name the changed files, and the loop reads their present state.

use super::outgoing::Outgoing;
use super::pace::Paced;
use super::queue::{Asked, Push, Queue, WayKey, WayOf};
use crate::metrics::Metrics;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidemark_namespace::{FileState, FileView, Namespace, NodeId, is_hidden};
use tidemark_protocol::file::Seal;
use tidemark_protocol::id::{FileCounter, FileId, Incarnation, SealNumber};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::replication::{
    GAVE_WAY, Holder, Priority, Request, Sender, SenderCommand, SenderEvent, encode,
};
use tidemark_transport::{Address, Link};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, JoinSet};

pub use super::outgoing::Facts;

/// Maximum number of pushes at once. Two fill a link while one of them begins or ends; more would only share it.
pub const PUSHES_MAX: usize = 2;
/// Maximum number of questions at once: half of one connection's credits, so that other calls are answered too.
pub const ASKS_MAX: usize = 32;
/// Interval at which growing files are examined: 8 MiB come every millisecond at most, a batch of them every 20.
const GROWING_LOOK: Duration = Duration::from_millis(20);
/// Interval at which waiting files are examined.
const WAITING_LOOK: Duration = Duration::from_millis(50);
/// Fastest growth of a written file, per millisecond: twice what memory takes. A file that grew faster was announced (ftruncate).
const WRITTEN_BYTES_PER_MS_MAX: u64 = 32 << 20;
/// Maximum number of files without copies that are listed with their reasons.
const BEHIND_MAX: usize = 1000;
/// Longest wait for a holder's answer that it drops a copy.
const DROP_DEADLINE: Duration = Duration::from_secs(5);

/// The parts of a replicator.
pub struct ReplicatorParts {
    pub namespace: Arc<Namespace>,
    pub link: Arc<dyn Link>,
    pub metrics: Arc<Metrics>,
    /// The name of this node.
    pub home: String,
    /// The nodes that keep copies of this node's files; the loop follows changes.
    pub partners: watch::Receiver<Vec<Address>>,
    /// The facts attached to each copy.
    pub facts: Facts,
    /// Whether files are sent while they grow. If not, a partner that gets the same bytes from elsewhere is spared more, and a checkpoint
    /// is at risk for longer.
    pub streams: bool,
    /// Whether copies are spread over the time until the next expected checkpoint, once two have been seen. If not, always at full speed.
    pub paced: bool,
}

impl fmt::Debug for ReplicatorParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicatorParts").field("home", &self.home).finish_non_exhaustive()
    }
}

/// A file that lacks a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Behind {
    pub path: Vec<u8>,
    pub file: FileId,
    /// The partner that lacks the copy.
    pub partner: String,
    pub lacking_bytes: u64,
    /// Time without the copy.
    pub for_ms: u64,
    /// The reason why sending does not go on; none while it does.
    pub why: Option<String>,
}

/// Callers' orders to the loop, and the loop's results for them.
#[derive(Debug, Default)]
struct Board {
    looks: BTreeMap<NodeId, Priority>,
    /// The life of a node's memory, as its connection proved it.
    lives: BTreeMap<String, Incarnation>,
    /// Withdrawn copies, by node, and whether each was evicted for other copies.
    withdrawn: BTreeMap<(String, FileId, SealNumber), bool>,
    released: BTreeSet<(FileId, SealNumber)>,
    /// Whether a checkpoint became complete.
    completed: bool,
    /// Whether a caller has waited since the last complete checkpoint.
    lifted: bool,
    acknowledged: BTreeMap<(FileId, SealNumber), BTreeMap<String, Holder>>,
    behind: Vec<Behind>,
}

/// The handle of the loop that copies this node's files. Every method may be called from any thread and returns at once.
pub struct Replicator {
    board: Mutex<Board>,
    woken: Notify,
    changes: watch::Sender<u64>,
    pace: Arc<Paced>,
    own: Incarnation,
}

impl fmt::Debug for Replicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replicator").field("own", &self.own).finish_non_exhaustive()
    }
}

impl Replicator {
    /// Starts the loop, which ends when the task is aborted or the runtime ends. `own` is the life of this node's memory: files of
    /// other lives are copied by their own homes.
    #[must_use]
    pub fn start(parts: ReplicatorParts, own: Incarnation) -> (Arc<Self>, JoinHandle<()>) {
        let ReplicatorParts { namespace, link, metrics, home, partners, facts, streams, paced } = parts;
        let pace = Arc::new(Paced::new(Arc::clone(&metrics), paced));
        let replicator = Arc::new(Self {
            board: Mutex::default(),
            woken: Notify::new(),
            changes: watch::Sender::new(0),
            pace: Arc::clone(&pace),
            own,
        });
        let turn = Turn {
            board: Arc::clone(&replicator),
            outgoing: Outgoing { namespace, link, metrics, home, facts, pace },
            partners,
            streams,
            files: BTreeMap::new(),
            unfinished: BTreeSet::new(),
            growing: BTreeSet::new(),
            ended: JoinSet::new(),
            queue: Queue::default(),
            asking: 0,
            pushing: 0,
            ways_made: 0,
        };
        let task = tokio::spawn(turn.run());
        (replicator, task)
    }

    fn board(&self) -> MutexGuard<'_, Board> {
        self.board.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the loop examine a file that changed. A file that is hidden, gone, or of another home is no longer tracked; its copies stay
    /// unless it is gone.
    pub fn look_at(&self, view: &FileView, priority: Priority) {
        self.look_at_node(view.node, priority);
    }

    /// Does as [`Self::look_at`], for a node that may be gone.
    pub fn look_at_node(&self, node: NodeId, priority: Priority) {
        self.board().looks.insert(node, priority);
        self.woken.notify_one();
    }

    /// Returns the nodes that acknowledged a copy and did not withdraw it.
    #[must_use]
    pub fn holders(&self, file: FileId, seal: SealNumber) -> Vec<String> {
        let board = self.board();
        board.acknowledged.get(&(file, seal)).map_or_else(Vec::new, |by| by.keys().cloned().collect())
    }

    /// Notifies of each change of the acknowledged copies.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Records the life of a node's memory, as its connection proved it: copies in another life are lost.
    pub fn saw_life(&self, node: &str, incarnation: Incarnation) {
        self.board().lives.insert(node.to_owned(), incarnation);
        self.woken.notify_one();
    }

    /// Records that a node withdrew a copy. The copy is made again, unless it was evicted ([`GAVE_WAY`]) and Tier-3 has the bytes: a new
    /// one would take another copy's place.
    pub fn withdrawn_by(&self, node: &str, file: FileId, seal: SealNumber, why: &str) {
        self.board().withdrawn.insert((node.to_owned(), file, seal), why == GAVE_WAY);
        self.woken.notify_one();
    }

    /// Releases the copies of a seal that are no longer needed: each holder is notified, once.
    pub fn release(&self, file: FileId, seal: SealNumber) {
        self.board().released.insert((file, seal));
        self.woken.notify_one();
    }

    /// Records that a checkpoint with files of this node is complete: bytes without a copy should have one before the next.
    pub fn checkpoint_completed(&self) {
        let mut board = self.board();
        (board.completed, board.lifted) = (true, false);
        drop(board);
        self.woken.notify_one();
    }

    /// Lifts the pace until the next checkpoint, because a caller waits.
    pub fn lift_pace(&self) {
        self.board().lifted = true;
        self.woken.notify_one();
    }

    /// Returns the bytes per second that all copies together may take now; none if there is no limit.
    #[must_use]
    pub fn pace_bytes_per_s(&self) -> Option<u64> {
        self.pace.bytes_per_s()
    }

    /// Whether the loop has taken all orders.
    #[cfg(test)]
    pub(super) fn board_is_read(&self) -> bool {
        let board = self.board();
        board.looks.is_empty() && !board.completed && !board.lifted
    }

    /// Returns files that lack copies, at most a thousand, with the reasons, as of a moment ago.
    #[must_use]
    pub fn behind(&self) -> Vec<Behind> {
        self.board().behind.clone()
    }
}

/// A file and its ways.
#[derive(Debug)]
struct Tracked {
    file: FileId,
    priority: Priority,
    /// Start of the time without a copy.
    since: Duration,
    sealed: Option<Seal>,
    /// Time and size at the last look at a growing file.
    grown: Option<(Duration, u64)>,
    stable_bytes: u64,
    announced: bool,
    ways: BTreeMap<String, Way>,
    /// Partners that need no copy, because Tier-3 has the bytes.
    spared: BTreeSet<String>,
}

#[derive(Debug)]
struct Way {
    /// The way's own number, so that events of an earlier way to the partner are not taken for this one's.
    number: u64,
    address: Address,
    sender: Sender,
}

impl Tracked {
    fn is_finished(&self) -> bool {
        self.sealed.is_some() && self.ways.values().all(|way| way.sender.acknowledged().is_some())
    }
}

/// The job that ended.
enum Ended {
    Ask(WayOf, SenderEvent),
    Push(WayOf, SenderEvent),
    Told,
}

/// The state of the loop.
struct Turn {
    board: Arc<Replicator>,
    outgoing: Outgoing,
    partners: watch::Receiver<Vec<Address>>,
    streams: bool,
    files: BTreeMap<NodeId, Tracked>,
    unfinished: BTreeSet<NodeId>,
    /// Files that are not sealed and were not announced: their size is examined.
    growing: BTreeSet<NodeId>,
    ended: JoinSet<Ended>,
    queue: Queue,
    asking: usize,
    pushing: usize,
    ways_made: u64,
}

impl Turn {
    async fn run(mut self) {
        let mut watched = true;
        loop {
            let look = if self.growing.is_empty() { WAITING_LOOK } else { GROWING_LOOK };
            let board = Arc::clone(&self.board);
            tokio::select! {
                () = board.woken.notified() => {}
                Some(ended) = self.ended.join_next() => match ended {
                    Ok(ended) => self.hear(ended),
                    Err(error) => tracing::error!(%error, "a job of the replication ended badly"),
                },
                changed = self.partners.changed(), if watched => {
                    watched = changed.is_ok();
                    self.follow_partners();
                }
                () = tokio::time::sleep(look), if !self.unfinished.is_empty() => self.tick(),
            }
            self.take_board();
            self.carry_out();
        }
    }

    fn now(&self) -> Duration {
        self.outgoing.pace.now()
    }

    fn take_board(&mut self) {
        let (looks, lives, withdrawn, released, (completed, lifted)) = {
            let mut board = self.board.board();
            let board = &mut *board;
            (
                std::mem::take(&mut board.looks),
                std::mem::take(&mut board.lives),
                std::mem::take(&mut board.withdrawn),
                std::mem::take(&mut board.released),
                (std::mem::take(&mut board.completed), std::mem::take(&mut board.lifted)),
            )
        };
        for (node, priority) in looks {
            self.look(node, priority);
        }
        for (node, life) in lives {
            if self.lose(&node, Priority::Again, |_, _, by| by != Holder(life)) {
                self.outgoing.pace.lift();
            }
        }
        for ((node, file, seal), gave_way) in withdrawn {
            self.lose(&node, Priority::Scrub, |lost, number, _| (lost, number) == (file, seal));
            if gave_way {
                self.spare(node, file, seal);
            }
        }
        for (file, seal) in released {
            self.release(file, seal);
        }
        if completed {
            self.complete();
        }
        if lifted {
            self.outgoing.pace.lift();
        }
    }

    /// Sets the pace when a checkpoint is complete. Counts sealed files without a copy; growing files belong to the next checkpoint.
    fn complete(&mut self) {
        // The coordinator may know a seal before this loop does.
        let growing = |node: &NodeId| self.files.get(node).is_some_and(|tracked| tracked.sealed.is_none());
        for node in self.unfinished.iter().copied().filter(growing).collect::<Vec<_>>() {
            self.look(node, Priority::Base);
        }
        let files = self.unfinished.iter().filter_map(|node| self.files.get(node));
        let ways = files.filter(|tracked| tracked.sealed.is_some()).flat_map(|tracked| tracked.ways.values());
        let backlog_bytes = ways.map(|way| way.sender.lacking_bytes()).sum();
        self.outgoing.pace.completed(backlog_bytes);
    }

    /// Removes lost copies from a node's acknowledged ones, and has them made again with `priority`. Returns whether any has to be.
    fn lose(
        &mut self,
        node: &str,
        priority: Priority,
        is_lost: impl Fn(FileId, SealNumber, Holder) -> bool,
    ) -> bool {
        let mut lost = BTreeSet::new();
        self.board.board().acknowledged.retain(|(file, seal), by| {
            if by.get(node).is_some_and(|holder| is_lost(*file, *seal, *holder)) {
                by.remove(node);
                lost.insert((*file, *seal));
            }
            !by.is_empty()
        });
        if lost.is_empty() {
            return false;
        }
        self.outgoing.metrics.replica_withdrawn_files.inc_by(lost.len() as u64);
        self.board.changes.send_modify(|count| *count += 1);
        let is_hit = |tracked: &Tracked| {
            tracked.sealed.as_ref().is_some_and(|seal| lost.contains(&(tracked.file, seal.number)))
        };
        let hit: Vec<_> =
            self.files.iter().filter(|(_, tracked)| is_hit(tracked)).map(|(id, _)| *id).collect();
        let (now, mut again) = (self.now(), false);
        for id in hit {
            if let Some(tracked) = self.files.get_mut(&id) {
                // A file that another partner still lacks since the save keeps the save's priority.
                tracked.priority = if tracked.is_finished() { priority } else { tracked.priority };
                tracked.since = now;
            }
            self.step((id, node.to_owned()), SenderEvent::Forgotten);
            again |= self.files.get(&id).is_some_and(|tracked| !tracked.is_finished());
        }
        again
    }

    /// Spares a partner a copy whose bytes Tier-3 has: the partner needs its memory for other copies.
    fn spare(&mut self, partner: String, file: FileId, seal: SealNumber) {
        let Some(node) = self.outgoing.namespace.nodes().node_of_file(file) else { return };
        let in_tier3 = self.outgoing.namespace.hosts().has_object(file, seal);
        let Some(tracked) = self.files.get_mut(&node).filter(|tracked| tracked.file == file) else { return };
        if !in_tier3 || tracked.sealed.as_ref().is_none_or(|sealed| sealed.number != seal) {
            return;
        }
        tracked.ways.remove(&partner);
        tracked.spared.insert(partner);
        if tracked.is_finished() {
            self.unfinished.remove(&node);
        }
    }

    /// Releases the copies of a file that is gone.
    fn release_gone(&mut self, node: NodeId) {
        let file = FileId { incarnation: self.board.own, counter: FileCounter(node) };
        self.release_before(file, SealNumber(u64::MAX));
    }

    /// Releases the copies of earlier seals. Called only once `seal` has a copy, so that some node always has a whole save.
    fn release_before(&mut self, file: FileId, seal: SealNumber) {
        let earlier = (file, SealNumber(0))..(file, seal);
        let known: Vec<_> = self.board.board().acknowledged.range(earlier).map(|(key, _)| key.1).collect();
        for seal in known {
            self.release(file, seal);
        }
    }

    fn release(&mut self, file: FileId, seal: SealNumber) {
        let holders = self.board.board().acknowledged.remove(&(file, seal)).unwrap_or_default();
        for address in self.partners.borrow().iter().filter(|address| holders.contains_key(&address.node)) {
            let Ok(body) = encode(&Request::Drop { file, seal }) else { continue };
            let (link, address) = (Arc::clone(&self.outgoing.link), address.clone());
            self.ended.spawn(async move {
                if let Err(error) = link.call(&address, body.into(), DROP_DEADLINE).await {
                    tracing::warn!(%error, %file, %seal, "a copy that nobody needs stays where it is");
                }
                Ended::Told
            });
        }
        if !holders.is_empty() {
            self.board.changes.send_modify(|count| *count += 1);
        }
    }

    /// Examines a node's present state.
    fn look(&mut self, node: NodeId, priority: Priority) {
        let view = self.outgoing.namespace.nodes().view(node);
        if view.is_none() {
            self.release_gone(node);
        }
        let view = view.filter(|view| {
            let ours = view.file.incarnation == self.board.own;
            ours && view.host && !view.paths.iter().all(|path| is_hidden(path))
        });
        let Some(view) = view else {
            self.files.remove(&node);
            self.unfinished.remove(&node);
            self.growing.remove(&node);
            return;
        };
        if view.state == FileState::Cut {
            return; // These bytes may not be a whole file; the chunks already sent become stale.
        }
        let now = self.now();
        if self.files.get(&node).is_some_and(|tracked| tracked.file != view.file) {
            self.files.remove(&node);
        }
        let tracked = self.files.entry(node).or_insert_with(|| Tracked {
            file: view.file,
            priority,
            since: now,
            sealed: None,
            grown: None,
            stable_bytes: 0,
            announced: false,
            ways: BTreeMap::new(),
            spared: BTreeSet::new(),
        });
        let before = tracked.sealed.as_ref().map(|seal| seal.number);
        let event = match &view.state {
            FileState::Sealed { seal, size_bytes, crc, chunks } => {
                let seal =
                    Seal { number: *seal, size_bytes: *size_bytes, crc: *crc, chunks: Arc::clone(chunks) };
                tracked.sealed = Some(seal.clone());
                SenderEvent::Sealed(seal)
            }
            _ => {
                tracked.sealed = None;
                SenderEvent::Changed
            }
        };
        if tracked.sealed.as_ref().map(|seal| seal.number) != before || view.object.is_none() {
            tracked.spared.clear();
        }
        if tracked.sealed.as_ref().map(|seal| seal.number) != before {
            (tracked.since, tracked.grown, tracked.stable_bytes, tracked.announced) = (now, None, 0, false);
            if tracked.priority != priority {
                tracked.priority = priority;
                self.queue.turns(node, priority);
            }
        }
        self.growing.remove(&node);
        self.growing.extend((tracked.sealed.is_none() && !tracked.announced).then_some(node));
        self.unfinished.insert(node);
        self.give_ways(node);
        let ways: Vec<String> = self.files[&node].ways.keys().cloned().collect();
        for partner in ways {
            self.step((node, partner), event.clone());
        }
    }

    /// Gives a file a way to each partner, and none to other nodes.
    fn give_ways(&mut self, node: NodeId) {
        let partners = self.partners.borrow().clone();
        let Some(tracked) = self.files.get_mut(&node) else { return };
        tracked.ways.retain(|name, way| partners.iter().any(|to| to.node == *name && *to == way.address));
        for address in partners.into_iter().filter(|address| !tracked.spared.contains(&address.node)) {
            tracked.ways.entry(address.node.clone()).or_insert_with(|| {
                self.ways_made += 1;
                Way { number: self.ways_made, address, sender: Sender::new(tracked.file) }
            });
        }
    }

    /// Handles a change of partners. Queues the files that the new ones lack; former partners' copies stay acknowledged until withdrawn.
    fn follow_partners(&mut self) {
        let mut lost = false;
        for node in self.files.keys().copied().collect::<Vec<_>>() {
            // A file saved while there was no partner was never copied, and keeps the save's priority.
            let had_all = |tracked: &&mut Tracked| tracked.is_finished() && !tracked.ways.is_empty();
            if let Some(tracked) = self.files.get_mut(&node).filter(had_all) {
                tracked.priority = Priority::Again;
            }
            self.look(node, Priority::Base);
            let is_lost = |tracked: &Tracked| tracked.priority == Priority::Again && !tracked.is_finished();
            lost |= self.files.get(&node).is_some_and(is_lost);
        }
        if lost {
            self.outgoing.pace.lift();
        }
    }

    fn tick(&mut self) {
        let now = self.now();
        let nodes: Vec<NodeId> = self.unfinished.iter().copied().collect();
        let mut behind = Vec::new();
        for node in nodes {
            let grew = self.grew(node, now);
            let Some(tracked) = self.files.get(&node) else { continue };
            let ways: Vec<String> = tracked.ways.keys().cloned().collect();
            if behind.len() < BEHIND_MAX && tracked.sealed.is_some() {
                let path = self.outgoing.namespace.nodes().path_of(node).unwrap_or_default();
                behind.extend(
                    tracked.ways.iter().filter(|(_, way)| way.sender.acknowledged().is_none()).map(
                        |(partner, way)| Behind {
                            path: path.clone(),
                            file: tracked.file,
                            partner: partner.clone(),
                            lacking_bytes: way.sender.lacking_bytes(),
                            for_ms: u64::try_from(now.saturating_sub(tracked.since).as_millis())
                                .unwrap_or(u64::MAX),
                            why: way.sender.waits_for().map(str::to_owned),
                        },
                    ),
                );
            }
            for partner in ways {
                let event = grew.map_or(SenderEvent::Tick, |stable_bytes| SenderEvent::Grew { stable_bytes });
                self.step((node, partner), event);
            }
        }
        self.board.board().behind = behind;
    }

    /// Returns how many bytes of a growing file are probably final: its size at the last look, in whole chunks; none if it is not streamed.
    fn grew(&mut self, node: NodeId, now: Duration) -> Option<u64> {
        let tracked = self.files.get_mut(&node)?;
        if !self.streams || tracked.sealed.is_some() || tracked.announced {
            return None;
        }
        let present =
            self.outgoing.namespace.nodes().present(node).filter(|present| present.file == tracked.file)?;
        let size_bytes = present.backing.stat().ok()?.size_bytes;
        let (before, was_bytes) =
            tracked.grown.replace((now, size_bytes)).unwrap_or_else(|| (now.saturating_sub(GROWING_LOOK), 0));
        let elapsed_ms = u64::try_from(now.saturating_sub(before).as_millis()).unwrap_or(u64::MAX).max(1);
        if size_bytes.saturating_sub(was_bytes) > WRITTEN_BYTES_PER_MS_MAX.saturating_mul(elapsed_ms) {
            tracked.announced = true;
            self.growing.remove(&node);
            return None;
        }
        tracked.stable_bytes = was_bytes.min(size_bytes) / CHUNK_BYTES * CHUNK_BYTES;
        Some(tracked.stable_bytes)
    }

    fn hear(&mut self, ended: Ended) {
        let ((key, number), event) = match ended {
            Ended::Ask(of, event) => {
                self.asking -= 1;
                (of, event)
            }
            Ended::Push(of, event) => {
                self.pushing -= 1;
                (of, event)
            }
            Ended::Told => return,
        };
        if self.way((&key, number)).is_some() {
            self.step(key, event);
        }
    }

    /// Returns a way, if it still has that number.
    fn way(&self, (key, number): (&WayKey, u64)) -> Option<(&Tracked, &Way)> {
        let tracked = self.files.get(&key.0)?;
        let way = tracked.ways.get(&key.1).filter(|way| way.number == number)?;
        Some((tracked, way))
    }

    fn step(&mut self, key: WayKey, event: SenderEvent) {
        let now = self.now();
        let Some(tracked) = self.files.get_mut(&key.0) else { return };
        let Some(way) = tracked.ways.get_mut(&key.1) else { return };
        let (mut todo, mut acknowledged) = (Vec::new(), None);
        way.sender.step(event, now, &mut todo);
        let (file, of) = (tracked.file, (key.clone(), way.number));
        for command in todo {
            match command {
                SenderCommand::Call { .. } | SenderCommand::Hash { .. } => {
                    self.queue.ask(tracked.priority, Asked { of: of.clone(), file, command });
                }
                SenderCommand::Push { op, token, chunks } => {
                    self.queue.push(Push { of: of.clone(), file, op, token, chunks });
                }
                SenderCommand::Acknowledged { seal, by } => {
                    acknowledged = Some(seal);
                    let mut board = self.board.board();
                    board.acknowledged.entry((file, seal)).or_default().insert(key.1.clone(), by);
                    drop(board);
                    self.outgoing.metrics.replica_acknowledged_files.inc();
                    self.board.changes.send_modify(|count| *count += 1);
                }
                // Waiting files are examined every few milliseconds anyway.
                SenderCommand::Wake { .. } => {}
            }
        }
        if let Some(seal) = acknowledged {
            self.release_before(file, seal);
        }
        let finished = self.files.get(&key.0).is_none_or(Tracked::is_finished);
        if finished {
            self.unfinished.remove(&key.0);
            if self.unfinished.is_empty() {
                self.board.board().behind.clear();
            }
        } else {
            self.unfinished.insert(key.0);
        }
    }

    /// Starts questions and pushes, up to their limits.
    fn carry_out(&mut self) {
        while self.asking < ASKS_MAX {
            let Some(Asked { of, file, command }) = self.queue.next_ask() else { break };
            let Some((tracked, way)) = self.way((&of.0, of.1)) else { continue };
            let (outgoing, address) = (self.outgoing.clone(), way.address.clone());
            let seal = tracked.sealed.as_ref().map(|seal| seal.number);
            self.asking += 1;
            self.ended.spawn(async move {
                let event = match command {
                    SenderCommand::Call { op, ask } => outgoing.ask(&address, file, op, ask).await,
                    SenderCommand::Hash { op } => outgoing.hash(file, seal.unwrap_or_default(), op).await,
                    other => unreachable!("{other:?} is no question"),
                };
                Ended::Ask(of, event)
            });
        }
        while self.pushing < PUSHES_MAX {
            let files = &self.files;
            let rank = |((node, partner), number): &WayOf| {
                let tracked = files.get(node)?;
                let way = tracked.ways.get(partner).filter(|way| way.number == *number);
                way.map(|_| (tracked.priority, tracked.sealed.is_some(), tracked.since))
            };
            let Some(push) = self.queue.next_push(rank) else { break };
            let Push { of, file, op, token, chunks } = push;
            let Some((tracked, way)) = self.way((&of.0, of.1)) else { continue };
            let (outgoing, address) = (self.outgoing.clone(), way.address.clone());
            let seal = tracked.sealed.as_ref().map(|seal| seal.number);
            self.pushing += 1;
            self.ended.spawn(async move {
                let event = outgoing.push(&address, file, seal, (op, token, chunks)).await;
                Ended::Push(of, event)
            });
        }
    }
}
