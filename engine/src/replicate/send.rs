//! The home's loop: which file goes to whom, and who has acknowledged what.
//!
//! Owns: the files of this node that have or need copies, what is under way, what is acknowledged, how much lacks a copy. Does not own:
//! one file's way to one partner (`protocol::replication::Sender`), which is next (`queue`), carrying it out (`outgoing`), how fast
//! (`pace`), who the partners are, when a version counts as replicated.
//!
//! Like the node's loop it is level-triggered: it is told which files changed, and looks at what they are.

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

/// Pushes at once. Two fill a link while one of them begins or ends; more would only share it.
pub const PUSHES_MAX: usize = 2;
/// Questions at once: half of what one connection's credits allow, so that others are answered too.
pub const ASKS_MAX: usize = 32;
/// How often a file that grows is looked at: 8 MiB come every millisecond at most, a batch of them every 20.
const GROWING_LOOK: Duration = Duration::from_millis(20);
/// How often what waits is looked at.
const WAITING_LOOK: Duration = Duration::from_millis(50);
/// A file that gained more than this in a millisecond was announced (ftruncate), not written: twice what memory takes.
const WRITTEN_BYTES_PER_MS_MAX: u64 = 32 << 20;
/// Files that lack copies which are listed with their reasons.
const BEHIND_MAX: usize = 1000;
/// How long a holder has to hear that a copy is not wanted.
const DROP_DEADLINE: Duration = Duration::from_secs(5);

/// What a replicator is made of.
pub struct ReplicatorParts {
    pub namespace: Arc<Namespace>,
    pub link: Arc<dyn Link>,
    pub metrics: Arc<Metrics>,
    /// This node's name.
    pub home: String,
    /// Who keeps copies of this node's files; the loop follows it.
    pub partners: watch::Receiver<Vec<Address>>,
    /// What is attached to each copy.
    pub facts: Facts,
    /// Send files while they grow. Without it a partner that gets the same bytes from elsewhere is spared more, and a checkpoint is at
    /// risk for longer.
    pub streams: bool,
    /// Spread over the time until the next checkpoint is expected, at whole speed until two have been seen. Without it always.
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
    /// The partner that lacks it.
    pub partner: String,
    pub lacking_bytes: u64,
    /// For how long.
    pub for_ms: u64,
    /// Why it does not go on; none while it does.
    pub why: Option<String>,
}

/// What others ask the loop, and what it tells them.
#[derive(Debug, Default)]
struct Board {
    looks: BTreeMap<NodeId, Priority>,
    /// The life of a node's memory, as its connection proved it.
    lives: BTreeMap<String, Incarnation>,
    /// And whether it gave way to others.
    withdrawn: BTreeMap<(String, FileId, SealNumber), bool>,
    released: BTreeSet<(FileId, SealNumber)>,
    /// A checkpoint is complete.
    completed: bool,
    /// Somebody waits, and has since then.
    lifted: bool,
    acknowledged: BTreeMap<(FileId, SealNumber), BTreeMap<String, Holder>>,
    behind: Vec<Behind>,
}

/// Told of files, it sees to their copies. Every method may be called from any thread and returns at once.
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
    /// Starts the loop, which ends when the task is aborted or the runtime ends. `own` is this life of this node's memory: files of
    /// others are theirs to copy.
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

    /// A file changed, or should be looked at anew. Out of sight, of another home, or gone: it is let go of, and its copies stay.
    pub fn look_at(&self, view: &FileView, priority: Priority) {
        self.look_at_node(view.node, priority);
    }

    /// The same for a node that may be gone.
    pub fn look_at_node(&self, node: NodeId, priority: Priority) {
        self.board().looks.insert(node, priority);
        self.woken.notify_one();
    }

    /// Who has acknowledged that copy and is believed to have it still.
    #[must_use]
    pub fn holders(&self, file: FileId, seal: SealNumber) -> Vec<String> {
        let board = self.board();
        board.acknowledged.get(&(file, seal)).map_or_else(Vec::new, |by| by.keys().cloned().collect())
    }

    /// Changes with what is acknowledged.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// A connection with that node proved which life of its memory it is: copies of another life are no more.
    pub fn saw_life(&self, node: &str, incarnation: Incarnation) {
        self.board().lives.insert(node.to_owned(), incarnation);
        self.woken.notify_one();
    }

    /// That node holds that copy no longer. It is made again, unless it gave way ([`GAVE_WAY`]) and Tier-3 has the bytes: sent again, it
    /// would take the place of another one.
    pub fn withdrawn_by(&self, node: &str, file: FileId, seal: SealNumber, why: &str) {
        self.board().withdrawn.insert((node.to_owned(), file, seal), why == GAVE_WAY);
        self.woken.notify_one();
    }

    /// Nobody needs the copies of that seal any more: their holders are told, once.
    pub fn release(&self, file: FileId, seal: SealNumber) {
        self.board().released.insert((file, seal));
        self.woken.notify_one();
    }

    /// A checkpoint that this node wrote of is complete: what has no copy yet is to have one in good time before the next.
    pub fn checkpoint_completed(&self) {
        let mut board = self.board();
        (board.completed, board.lifted) = (true, false);
        drop(board);
        self.woken.notify_one();
    }

    /// Somebody waits: no pace until the next checkpoint.
    pub fn lift_pace(&self) {
        self.board().lifted = true;
        self.woken.notify_one();
    }

    /// The bytes per second that all copies together may take now; none is no limit.
    #[must_use]
    pub fn pace_bytes_per_s(&self) -> Option<u64> {
        self.pace.bytes_per_s()
    }

    /// Whether the loop has taken in all that it was told.
    #[cfg(test)]
    pub(super) fn board_is_read(&self) -> bool {
        let board = self.board();
        board.looks.is_empty() && !board.completed && !board.lifted
    }

    /// Files that lack copies and why, at most a thousand; of a moment ago.
    #[must_use]
    pub fn behind(&self) -> Vec<Behind> {
        self.board().behind.clone()
    }
}

/// One file and its ways.
#[derive(Debug)]
struct Tracked {
    file: FileId,
    priority: Priority,
    /// Since when it lacks a copy.
    since: Duration,
    sealed: Option<Seal>,
    /// The last look at one that grows: when, and how large it was.
    grown: Option<(Duration, u64)>,
    stable_bytes: u64,
    announced: bool,
    ways: BTreeMap<String, Way>,
    /// Partners that need no copy, since Tier-3 has the bytes.
    spared: BTreeSet<String>,
}

#[derive(Debug)]
struct Way {
    /// Another number for each, so that what an earlier one began is not taken for this one's.
    number: u64,
    address: Address,
    sender: Sender,
}

impl Tracked {
    fn is_finished(&self) -> bool {
        self.sealed.is_some() && self.ways.values().all(|way| way.sender.acknowledged().is_some())
    }
}

/// What ended.
enum Ended {
    Ask(WayOf, SenderEvent),
    Push(WayOf, SenderEvent),
    Told,
}

/// Everything the loop owns.
struct Turn {
    board: Arc<Replicator>,
    outgoing: Outgoing,
    partners: watch::Receiver<Vec<Address>>,
    streams: bool,
    files: BTreeMap<NodeId, Tracked>,
    unfinished: BTreeSet<NodeId>,
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
            let growing = self.files.values().any(|tracked| tracked.sealed.is_none() && !tracked.announced);
            let look = if growing { GROWING_LOOK } else { WAITING_LOOK };
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

    /// A checkpoint is complete. What is sealed and has no copy yet is counted; what grows is of the next one.
    fn complete(&mut self) {
        // The coordinator may have heard of a seal before this loop.
        let growing = |node: &NodeId| self.files.get(node).is_some_and(|tracked| tracked.sealed.is_none());
        for node in self.unfinished.iter().copied().filter(growing).collect::<Vec<_>>() {
            self.look(node, Priority::Base);
        }
        let files = self.unfinished.iter().filter_map(|node| self.files.get(node));
        let ways = files.filter(|tracked| tracked.sealed.is_some()).flat_map(|tracked| tracked.ways.values());
        let backlog_bytes = ways.map(|way| way.sender.lacking_bytes()).sum();
        self.outgoing.pace.completed(backlog_bytes);
    }

    /// Copies that a node is not believed to have any more, and with which priority they are made again. Whether any is to be.
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
                // One that another partner lacks since it was saved goes on being a save's.
                tracked.priority = if tracked.is_finished() { priority } else { tracked.priority };
                tracked.since = now;
            }
            self.step((id, node.to_owned()), SenderEvent::Forgotten);
            again |= self.files.get(&id).is_some_and(|tracked| !tracked.is_finished());
        }
        again
    }

    /// A partner needs its memory for other copies than one whose bytes Tier-3 has.
    fn spare(&mut self, partner: String, file: FileId, seal: SealNumber) {
        let Some(node) = self.outgoing.namespace.node_of_file(file) else { return };
        let in_tier3 = self.outgoing.namespace.has_object(file, seal);
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

    /// The copies of a file that is gone are given up.
    fn release_gone(&mut self, node: NodeId) {
        let file = FileId { incarnation: self.board.own, counter: FileCounter(node) };
        self.release_before(file, SealNumber(u64::MAX));
    }

    /// The copies of earlier seals are given up. Only once there is one of `seal`: until then a whole save is somewhere.
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

    /// Looks at what a node is now.
    fn look(&mut self, node: NodeId, priority: Priority) {
        let view = self.outgoing.namespace.view(node);
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
            return;
        };
        if view.state == FileState::Cut {
            return; // Nobody knows whether these bytes are a file: what was sent of them goes stale.
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
        self.unfinished.insert(node);
        self.give_ways(node);
        let ways: Vec<String> = self.files[&node].ways.keys().cloned().collect();
        for partner in ways {
            self.step((node, partner), event.clone());
        }
    }

    /// A way to each partner, and none to others.
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

    /// The partners are others: what they lack goes to them, what those before them have stays acknowledged until it is withdrawn.
    fn follow_partners(&mut self) {
        let mut lost = false;
        for node in self.files.keys().copied().collect::<Vec<_>>() {
            // Without a partner nothing was ever copied: what was saved then is still a save's.
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
                let path = self.outgoing.namespace.path_of(node).unwrap_or_default();
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

    /// How far a file that is written is probably at rest: what was there at the look before, unless it was announced.
    fn grew(&mut self, node: NodeId, now: Duration) -> Option<u64> {
        let tracked = self.files.get_mut(&node)?;
        if !self.streams || tracked.sealed.is_some() || tracked.announced {
            return None;
        }
        let present = self.outgoing.namespace.present(node).filter(|present| present.file == tracked.file)?;
        let size_bytes = present.backing.stat().ok()?.size_bytes;
        let (before, was_bytes) =
            tracked.grown.replace((now, size_bytes)).unwrap_or_else(|| (now.saturating_sub(GROWING_LOOK), 0));
        let elapsed_ms = u64::try_from(now.saturating_sub(before).as_millis()).unwrap_or(u64::MAX).max(1);
        if size_bytes.saturating_sub(was_bytes) > WRITTEN_BYTES_PER_MS_MAX.saturating_mul(elapsed_ms) {
            tracked.announced = true;
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

    /// A way, while it is that one.
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
                // What waits is looked at every few milliseconds.
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

    /// Starts what there is room for.
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
