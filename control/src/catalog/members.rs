//! The members: their joins, beats and losses.
//!
//! Owns: taking in joins, beats and answers, and their consequences: asking neighbours, notifying all members, ending the rights of a lost
//! node. Does not own: the state and its rules (`roll`, `protocol`).

use super::roll::{Now, Replies, Todo};
use super::{Catalog, State, Taking};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::{
    BATCH_ITEMS_MAX, Beat, Beaten, Join, Joined, Members, MembersChange, ToNode, VERSION_BYTES_MAX,
};
use tidemark_protocol::id::NodeName;
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::label::Labels;
use tidemark_protocol::membership::{self, ANSWER_MS, Ask, Cure, Event, Heard, Life, Standing, TICK_MS};
use tidemark_transport::{Address, LinkErrorKind, Refusal};
use tokio::time::Instant;

/// The most questions to neighbours on their way at once. If more nodes fall silent than that, this node is the one that is cut off.
pub(super) const ASKS_MAX: usize = 256;

/// The most recalls on their way for which no node waits. A node that falls silent holds each up for 5 s.
const RECALLS_MAX: usize = 1024;

/// Bytes per second that news of members may take of the coordinator's network and processor: a tenth of 10 Gbit/s. If ten thousand nodes
/// come at once, the news of them grow in size, not in number.
const TELL_BYTES_PER_S: u64 = 128 << 20;

/// Additional time per member for a message to all: all members are notified at once and share the network. The whole list of ten thousand
/// members is 7 GB for all of them, and a minute at [`TELL_BYTES_PER_S`].
const TELL_PER_MEMBER: Duration = Duration::from_millis(6);

/// The time within which a reachable member has received news, beyond the time that the bytes take.
const TELL_TAKES: Duration = Duration::from_millis(100);

/// The news of members that are on their way.
#[derive(Debug, Default)]
pub(super) struct Told {
    /// The present list.
    list: Arc<Members>,
    /// Lives that changed since the list that was sent last. A node that joined meanwhile knows some of the changes, and receives them
    /// again.
    touched: BTreeSet<NodeLife>,
    /// Number of the list that was sent last.
    number: u64,
    /// Number of the list before that.
    before: u64,
    /// When all members should have received the last list.
    heard_at: Option<Instant>,
}

impl Told {
    /// Begins with `list`: every node that follows this epoch got that list, or a later one, when it joined.
    pub(super) fn new(list: Arc<Members>) -> Self {
        Self { number: list.number, before: list.number, list, ..Self::default() }
    }

    fn changed(&mut self, list: &Arc<Members>) {
        let change = list.since(&self.list);
        self.touched.extend(change.members.into_iter().map(|member| member.life).chain(change.dropped));
        self.list = Arc::clone(list);
    }

    /// Returns the list and the changes that all members are to receive now. Returns `None` if nothing is new, or if the last news are
    /// still on their way to many.
    fn news(&mut self, is_small: bool) -> Option<(Arc<Members>, MembersChange)> {
        if self.list.number == self.number || !(is_small || self.is_heard()) {
            return None;
        }
        let change = self.list.touched(self.number, std::mem::take(&mut self.touched));
        (self.before, self.number) = (self.number, self.list.number);
        self.heard_at = Some(Instant::now() + TELL_TAKES);
        Some((Arc::clone(&self.list), change))
    }

    /// Returns the number of the list that all members should have by now: a member with an older one missed it. The news on their way do
    /// not count, so that thousands do not ask for them at once.
    fn heard(&self) -> u64 {
        if self.is_heard() { self.number } else { self.before }
    }

    fn is_heard(&self) -> bool {
        self.heard_at.is_none_or(|at| Instant::now() >= at)
    }

    /// Notes that so many bytes of the last news are on their way to all.
    fn tell(&mut self, bytes: u64) {
        let takes = Duration::from_millis(bytes.saturating_mul(1000) / TELL_BYTES_PER_S) + TELL_TAKES;
        self.heard_at = Some(Instant::now() + takes);
    }
}

/// Messages that wait for the loop.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    asks: Vec<(NodeName, Ask)>,
    /// Directories to be given back by their holders, although no node has asked for them.
    pub(super) recalls: BTreeSet<(NodeName, Vec<u8>)>,
    /// Recalls that were sent and are not answered.
    recalling: BTreeSet<(NodeName, Vec<u8>)>,
    /// Nodes that have to ask again about what earlier answers allowed.
    pub(super) forgets: BTreeSet<NodeName>,
}

impl Outbox {
    /// Takes the messages, but for recalls beyond [`RECALLS_MAX`]. The recalls among them count as on their way. `hears`: other nodes are not
    /// answered yet. Then recalls wait: who gave a directory back could not ask for it again, and nobody else can ask either.
    fn take(&mut self, hears: bool) -> Self {
        let room = if hears { 0 } else { RECALLS_MAX.saturating_sub(self.recalling.len()) };
        let later = self.recalls.iter().nth(room).cloned();
        let later = later.map_or_else(BTreeSet::new, |first| self.recalls.split_off(&first));
        self.recalling.extend(self.recalls.iter().cloned());
        Self {
            recalls: std::mem::replace(&mut self.recalls, later),
            asks: std::mem::take(&mut self.asks),
            forgets: std::mem::take(&mut self.forgets),
            recalling: BTreeSet::new(),
        }
    }

    /// Whether a directory is to be given back by a node, or is being so.
    fn recalls_from(&self, node: &NodeName, directory: &[u8]) -> bool {
        let recall = (node.clone(), directory.to_vec());
        self.recalls.contains(&recall) || self.recalling.contains(&recall)
    }
}

impl Catalog {
    fn clocks(&self) -> Now {
        Now {
            ms: u64::try_from(self.now().as_millis()).unwrap_or(u64::MAX),
            wall_ms: self.cluster.namespace().now_ns() / 1_000_000,
        }
    }

    /// Takes in an event, and carries out its local consequences; messages to other nodes are left to the loop.
    fn step(&self, event: Event) -> (Result<(), membership::Refusal>, Replies) {
        let now = self.clocks();
        let mut state = self.lock();
        let (result, replies) = state.roll.step(event, now);
        let Todo { asks, lost, changed, keep, doubt } = std::mem::take(&mut state.roll.todo);
        // A former life of the coordinator's own name held nothing here.
        for life in lost.iter().filter(|life| life.node != self.cluster.life.node) {
            state.leases.gone(&life.node);
            state.readers.gone(&life.node);
        }
        let wakes = !asks.is_empty() || changed;
        state.outbox.asks.extend(asks);
        let list = changed.then(|| Arc::clone(state.roll.list()));
        if let Some(list) = &list {
            state.told.changed(list);
        }
        drop(state);
        for life in &lost {
            tracing::warn!(node = %life.node, "nothing is expected from it any more: what it held is free, and its processes count as ended");
            // First: once the life counts as heard, an unknown file counts as absent.
            Taking { catalog: self }.claim_for(life);
            self.cluster.namespace().catalog().gives_up(life);
            self.heard(life);
            self.cluster.namespace().catalog().end_fates(life.incarnation, self.cluster.namespace().now_ns());
        }
        if let Some(list) = list {
            self.cluster.following.take_members(list);
        }
        if keep {
            self.stored.send_modify(|changes| *changes += 1);
        }
        if doubt {
            self.doubted.notify_one();
        }
        if wakes {
            self.woken.notify_one();
        }
        (result, replies)
    }

    /// Makes this node the first member. If the former list has a node of its name at another address, does so once that one is known to be
    /// gone.
    pub(super) fn begin(&self) {
        let presence = &self.presence;
        let join = membership::Join {
            from: self.cluster.own_life(),
            epoch: self.epoch,
            address: presence.address.clone(),
            labels: presence.labels.clone(),
        };
        self.lock().roll.runs(&self.cluster.life.node, presence.version.clone());
        if let (Err(refusal), _) = self.step(Event::Join(join)) {
            tracing::error!(%refusal, "the coordinator's own node is no member yet");
        }
    }

    /// Returns whether a former member with this node's name is known to be gone.
    fn follows_one_of_its_name(&self) -> bool {
        let (state, own) = (self.lock(), &self.cluster.life);
        let before = state.roll.member(&own.node).filter(|member| member.life.incarnation != own.incarnation);
        before.is_some_and(|member| matches!(member.standing, Standing::Gone { .. }))
    }

    pub(super) fn check_member(&self, from: &NodeLife) -> Result<(), Refusal> {
        let state = self.lock();
        let stands = |member: &&membership::Member| {
            matches!(member.standing, Standing::Alive | Standing::Suspect(_) | Standing::CutOff { .. })
                && member.life.incarnation == from.incarnation
        };
        match state.roll.member(&from.node).filter(stands) {
            Some(_) => Ok(()),
            None => Err(Refusal::new(
                LinkErrorKind::Fenced,
                format!("{from} is no member of epoch {}: join first", self.epoch),
            )),
        }
    }

    pub(super) fn join(&self, from: &NodeLife, join: Join) -> Result<Joined, Refusal> {
        let invalid = |why: String| Refusal::new(LinkErrorKind::Invalid, why);
        let Join { life, start, address, labels, epoch, version, publication, mut alone } = join;
        if life != *from {
            return Err(invalid(format!("{from} may not speak for {life}")));
        }
        if version.len() > VERSION_BYTES_MAX {
            let found = version.len();
            return Err(invalid(format!(
                "a version of {found} bytes, and at most {VERSION_BYTES_MAX} are taken"
            )));
        }
        let labels = Labels::try_from(labels).map_err(|error| invalid(error.to_string()))?;
        let node = from.node.clone();
        let was_given_up = self.lock().roll.is_given_up(&node);
        let life = Life { node: node.clone(), incarnation: from.incarnation, start };
        let (result, replies) =
            self.step(Event::Join(membership::Join { from: life.clone(), epoch, address, labels }));
        result.map_err(refused)?;
        let admit = replies.admit.ok_or_else(|| invalid(format!("{from} was not let in; join again")))?;
        let mut state = self.lock();
        state.roll.runs(&node, version);
        // A daemon that takes over continues the numbers of the one before; a daemon that counts anew has lost its unpublished changes.
        if state.published.get(from).is_some_and(|last| *last > publication) {
            state.published.remove(from);
            state.answers.remove(from);
            state.kept.remove(from);
            self.cluster.namespace().catalog().forget_publications(from);
        }
        // Leases and promises stay: the life may have used them for names that it has not published yet. Those of an earlier life ended with it.
        state.readers.gone(&node);
        let State { hearing, leases, outbox, .. } = &mut *state;
        // A member of the former coordinator has had its directories without a break; no other node was answered since.
        let is_from_before = hearing.hears(from);
        alone.truncate(BATCH_ITEMS_MAX);
        if is_from_before && !self.cluster.namespace().publications().knows_changes_since_taken_up() {
            // This node may have changed something in each of them.
            alone.clear();
        }
        alone.retain(|path| {
            if is_from_before {
                !hearing.missed(&node, path) && leases.made(&node, path)
            } else {
                // Others know of names there that this node does not.
                leases.lease_of(&node, path).is_some() && !outbox.recalls_from(&node, path)
            }
        });
        let members = state.roll.encoded().map_err(|error| invalid(error.to_string()))?;
        let published = self.answered_until(from, &state);
        // A node that was no longer expected has to publish its present state. The answer to an earlier join may be lost.
        let was_away = self.cluster.namespace().catalog().made_while_away(from).is_some();
        let states = state.hearing.asks_states(from) || was_given_up || was_away;
        self.cluster.namespace().catalog().is_back(from);
        state.catching_up.entry(from.clone()).or_default();
        Ok(Joined { admit, members, published, states, alone })
    }

    /// Answers a beat that came at `arrived_ns`.
    pub(super) fn beat(&self, from: &NodeLife, beat: Beat, arrived_ns: i64) -> Result<Beaten, Refusal> {
        let Beat { start, epoch, number, tier1_used_bytes, tier1_size_bytes, now_ns: theirs_ns } = beat;
        let life = Life { node: from.node.clone(), incarnation: from.incarnation, start };
        let beat = membership::Beat { from: life, epoch, number, tier1_used_bytes, tier1_size_bytes };
        let (result, replies) = self.step(Event::Beat(beat));
        match result {
            Ok(()) => {}
            // Late or doubled: the node counts as heard all the same.
            Err(refusal) if refusal.cure() == Cure::Nothing => {}
            Err(refusal) => return Err(refused(refusal)),
        }
        let mut state = self.lock();
        let echo = replies.echo.unwrap_or_else(|| state.roll.echo(number));
        state.clocks.heard(from.incarnation, theirs_ns, arrived_ns);
        let (members_number, now_ns) = (state.told.heard(), self.cluster.namespace().now_ns());
        Ok(Beaten { echo, members_number, now_ns, kept_step: self.cluster.said().last_step(self.epoch) })
    }

    /// Notes that the last connection with that daemon is gone.
    pub(super) fn lost_connection(&self, life: Life) {
        // This event cannot be refused: it is ignored for a node that is no member.
        let _ = self.step(Event::Disconnected(life));
    }

    /// Returns the address of a member that is still expected.
    pub(super) fn address(&self, node: &NodeName) -> Option<Address> {
        let state = self.lock();
        let member = state.roll.expected(node)?;
        Some(Address { node: node.to_string(), address: member.address.clone() })
    }

    /// Advances time, and sends questions and news, until dropped.
    pub async fn watch(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(Duration::from_millis(TICK_MS)) => {}
                () = self.woken.notified() => {}
            }
            // A tick is never refused.
            let _ = self.step(Event::Tick);
            if self.follows_one_of_its_name() {
                self.begin();
            }
            let Outbox { asks, recalls, forgets, .. } = {
                let mut state = self.lock();
                let hears = state.hearing.is_open();
                state.outbox.take(hears)
            };
            if !forgets.is_empty() {
                let cluster = Arc::clone(&self.cluster);
                // A node that does not answer asks by itself after a moment.
                tokio::spawn(async move { cluster.forget_answers(&forgets).await });
            }
            for (holder, directory) in recalls {
                let catalog = Arc::clone(&self);
                tokio::spawn(async move {
                    let result = catalog.recalls().for_none(&holder, &directory).await;
                    let (outbox, recall) = (&mut catalog.lock().outbox, (holder, directory));
                    outbox.recalling.remove(&recall);
                    if let Err(refusal) = result {
                        tracing::debug!(%refusal, "a directory with names that its holder does not know is not given back yet");
                        // Again with the next tick, until the directory is given back, or its holder is gone.
                        outbox.recalls.insert(recall);
                    }
                });
            }
            for (to, ask) in asks {
                self.ask(&to, ask);
            }
            let news = {
                let mut state = self.lock();
                let is_small = state.roll.is_small();
                state.told.news(is_small)
            };
            if let Some((members, change)) = news {
                let bytes = self.tell_members(&members, change);
                self.lock().told.tell(bytes);
            }
        }
    }

    /// Asks a neighbour whether it hears a node. Without an answer nothing follows.
    fn ask(self: &Arc<Self>, to: &NodeName, ask: Ask) {
        let Some(address) = self.address(to) else { return };
        let Ok(permit) = Arc::clone(&self.asking).try_acquire_owned() else {
            tracing::warn!(%to, about = %ask.about.node, "not asked: {ASKS_MAX} questions are on their way");
            return;
        };
        let catalog = Arc::clone(self);
        tokio::spawn(async move {
            let _permit = permit;
            let (about, message) = (ask.about.node.clone(), ToNode::Ask(ask));
            let deadline = Duration::from_millis(ANSWER_MS);
            match catalog.cluster.ask_node::<Heard>(&address, &message, deadline).await {
                Ok(heard) if heard.from.node.as_str() == address.node => {
                    let (heard_it, by) = (heard.heard, heard.from.node.clone());
                    let (result, _) = catalog.step(Event::Heard(heard));
                    tracing::debug!(%about, %by, heard_it, ?result, "a neighbour answered");
                }
                Ok(heard) => {
                    tracing::warn!(node = %address.node, claims = %heard.from.node, "an answer in another's name")
                }
                Err(away) => {
                    tracing::debug!(%about, node = %address.node, error = &away as &dyn std::error::Error, "a neighbour did not answer")
                }
            }
        });
    }

    /// Sends all members the changes of the list, and returns the number of bytes. A member that misses them learns that from the answer to
    /// a later beat.
    fn tell_members(&self, members: &Members, change: MembersChange) -> u64 {
        let message = ToNode::Members(change);
        let deadline =
            super::NODE_DEADLINE + TELL_PER_MEMBER * u32::try_from(members.members.len()).unwrap_or(u32::MAX);
        self.cluster.tell_others(members, &message, deadline, "the members")
    }
}

fn refused(refusal: membership::Refusal) -> Refusal {
    let kind = match (&refusal, refusal.cure()) {
        (membership::Refusal::Superseded { .. }, _) | (_, Cure::Join) => LinkErrorKind::Fenced,
        (membership::Refusal::Full { .. }, _) => LinkErrorKind::NoSpace,
        (_, Cure::Wait) => LinkErrorKind::Unavailable,
        (_, Cure::Stop | Cure::Nothing | Cure::Person) => LinkErrorKind::Invalid,
    };
    Refusal::new(kind, refusal.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recalls_wait_while_nobody_is_answered_and_for_room() {
        let node: NodeName = "n1".parse().unwrap();
        let recall = |number: usize| (node.clone(), number.to_string().into_bytes());
        let mut outbox = Outbox { recalls: (0..=RECALLS_MAX).map(recall).collect(), ..Outbox::default() };
        assert!(outbox.take(true).recalls.is_empty());
        assert!(outbox.recalls_from(&node, b"0"));
        assert_eq!(outbox.take(false).recalls.len(), RECALLS_MAX);
        assert_eq!((outbox.take(false).recalls.len(), outbox.recalls.len()), (0, 1));
        assert!((0..=RECALLS_MAX).all(|number| outbox.recalls_from(&node, &recall(number).1)));
        outbox.recalling.pop_first();
        assert_eq!((outbox.take(false).recalls.len(), outbox.recalls.len()), (1, 0));
    }
}
