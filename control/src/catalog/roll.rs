//! The members and their places, as the coordinator keeps them.
//!
//! Owns: the list that all nodes see, what is said of each node and since when, which lives are over. Does not own: verdicts
//! (`protocol::membership`), the choice of partners (`protocol::placement`), doing what follows (`members`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use tidemark_protocol::cluster::wire::{self, EncodedMembers, Members, WHY_BYTES_MAX, WireError};
use tidemark_protocol::id::{Epoch, NodeName};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership::{
    Admit, Ask, Change, Command, Echo, Event, Life, Member, MemberList, Membership, Patience, Refusal,
    Standing, Verdict,
};
use tidemark_protocol::placement::{Placed, Rules, place};
use tidemark_protocol::report::{self, NodeState};

/// Lives that are over and are still named to all: who uploads what a lost node wrote names it. A cluster of thousands loses some a
/// day; an entry is some 200 bytes.
const OVER_MAX: usize = 256;

/// Nothing is expected from a node that is gone and was not heard for so long. A daemon that only died is back by then, with its
/// memory, the names that it has not told yet, and processes that never noticed.
const RESTART_MS: u64 = 1_000;

/// For each member, between two times that partners are chosen and a list is made: of many changes at once the last counts, and
/// neither the processor nor the network is busy with that. With three nodes nobody notices it.
const LIST_PAUSE_MS: u64 = 1;

/// The longest of these pauses: a node that came is known to all by then.
const LIST_PAUSE_MS_MAX: u64 = 1_000;

/// Up to so many members all are told of suspicion, too, and news do not wait for the last ones to arrive: they are a few hundred bytes.
const SMALL_MAX: usize = 256;

/// What the settings say, and what was stored of the members before.
#[derive(Debug, Clone, Default)]
pub struct Terms {
    pub rules: Rules,
    pub patience: Patience,
    pub stored: MemberList,
}

/// Two clocks at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    /// The coordinator's monotonic one.
    pub(super) ms: u64,
    /// The wall's, for people.
    pub(super) wall_ms: i64,
}

/// What one event came to for whoever sent it.
#[derive(Debug, Default)]
pub(super) struct Replies {
    pub(super) admit: Option<Admit>,
    pub(super) echo: Option<Echo>,
}

/// What is to be done once the roll is let go of.
#[derive(Debug, Default)]
pub(super) struct Todo {
    pub(super) asks: Vec<(NodeName, Ask)>,
    /// Nothing is expected from these any more.
    pub(super) lost: Vec<NodeLife>,
    /// The list is another one.
    pub(super) changed: bool,
    /// What is stored of the members is another.
    pub(super) keep: bool,
    /// Somebody follows a higher epoch.
    pub(super) doubt: bool,
}

/// Why a node stands as it does.
#[derive(Debug, Clone)]
struct Said {
    since_ms: i64,
    why: String,
}

#[derive(Debug)]
pub(super) struct Roll {
    membership: Membership,
    rules: Rules,
    placed: Placed,
    /// Of nodes that are not alive.
    said: BTreeMap<NodeName, Said>,
    /// Builds, as they said at their last join.
    versions: BTreeMap<NodeName, String>,
    given_up: BTreeSet<NodeName>,
    over: VecDeque<wire::Member>,
    /// As it was last made.
    list: Arc<Members>,
    /// The same, for those who join; once somebody has.
    encoded: Option<EncodedMembers>,
    /// When.
    listed_ms: Option<u64>,
    due: Due,
    pub(super) todo: Todo,
}

/// What the list does not show yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Due {
    place: bool,
    list: bool,
}

impl Roll {
    /// A term of the coordinator `own`, which others reach at `address`.
    pub(super) fn begin(epoch: Epoch, own: &Life, terms: Terms, now: Now) -> Self {
        let Terms { rules, patience, stored } = terms;
        let membership = Membership::new(epoch, own.node.clone(), true, stored, patience, now.ms);
        let placed = place(None, &membership.candidates(), &rules, epoch);
        let list = Arc::new(Members { epoch, ..Members::default() });
        Self {
            membership,
            rules,
            placed,
            said: BTreeMap::new(),
            versions: BTreeMap::new(),
            given_up: BTreeSet::new(),
            over: VecDeque::new(),
            list,
            encoded: None,
            listed_ms: None,
            // Those of before are listed, though nothing may become of them that is news.
            due: Due { list: true, ..Due::default() },
            todo: Todo::default(),
        }
    }

    /// As it was last made: a change may be [`LIST_PAUSE_MS`] for each member away from it.
    pub(super) fn list(&self) -> &Arc<Members> {
        &self.list
    }

    /// The same as bytes.
    ///
    /// # Errors
    /// It is larger than a message may be.
    pub(super) fn encoded(&mut self) -> Result<EncodedMembers, WireError> {
        if let Some(encoded) = &self.encoded {
            return Ok(encoded.clone());
        }
        Ok(self.encoded.insert(EncodedMembers::of(&self.list)?).clone())
    }

    /// What a beat of that number is answered with.
    pub(super) fn echo(&self, number: u64) -> Echo {
        self.membership.echo(number)
    }

    pub(super) fn stored(&self) -> MemberList {
        self.membership.list()
    }

    /// Without those of which nothing is expected: names are answered for without them now, and a coordinator that begins again need not wait for
    /// them either.
    pub(super) fn expected_next(&self) -> MemberList {
        let mut list = self.membership.list();
        list.members.retain(|listed| !self.is_given_up(&listed.life.node));
        list
    }

    pub(super) fn member(&self, node: &NodeName) -> Option<&Member> {
        self.membership.member(node)
    }

    /// Nothing is expected from it.
    pub(super) fn is_given_up(&self, node: &NodeName) -> bool {
        self.given_up.contains(node)
    }

    /// A member of which something is expected.
    pub(super) fn expected(&self, node: &NodeName) -> Option<&Member> {
        self.member(node).filter(|_| !self.is_given_up(node))
    }

    pub(super) fn runs(&mut self, node: &NodeName, version: String) {
        self.versions.insert(node.clone(), version);
    }

    /// Takes an event in; what follows is in `todo`.
    pub(super) fn step(&mut self, event: Event, now: Now) -> (Result<(), Refusal>, Replies) {
        let is_tick = event == Event::Tick;
        let mut commands = Vec::new();
        let result = self.membership.step(event, now.ms, &mut commands);
        let mut replies = Replies::default();
        for command in commands {
            match command {
                Command::Admit(admit) => replies.admit = Some(admit),
                Command::Echo { echo, .. } => replies.echo = Some(echo),
                Command::Ask { to, ask } => self.todo.asks.push((to, ask)),
                Command::Tell(change) => {
                    self.tell(&change, now);
                    self.due.list |= self.is_news(&change);
                }
                // At once: what follows from it may not wait for the list.
                Command::Keep => (self.todo.keep, self.due.list) = (true, true),
                Command::Place => (self.due.place, self.due.list) = (true, true),
                Command::Doubt { by, theirs } => {
                    let ours = self.membership.epoch();
                    tracing::warn!(%by, %theirs, %ours, "a node knows of a higher epoch");
                    self.todo.doubt = true;
                }
            }
        }
        if is_tick && self.give_up() {
            self.due.list = true;
        }
        self.refresh(now.ms);
        (result, replies)
    }

    /// Whether all are to hear of it. Suspicion is over within a second, one way or the other: of many nodes, some of which are always
    /// late, only the coordinator says it.
    fn is_news(&self, change: &Change) -> bool {
        let is_passing = match change.verdict {
            Verdict::Suspect(_) => true,
            Verdict::Back { .. } => {
                let life = NodeLife { node: change.life.node.clone(), incarnation: change.life.incarnation };
                let found = self.list.members.binary_search_by(|member| member.place().cmp(&(false, &life)));
                found.is_ok_and(|at| {
                    let listed = &self.list.members[at];
                    listed.standing == wire::Standing::Alive && !listed.gone
                })
            }
            _ => false,
        };
        !is_passing || self.is_small()
    }

    pub(super) fn is_small(&self) -> bool {
        self.membership.members().len() <= SMALL_MAX
    }

    /// Makes the list anew when it is another one and the last is old enough. Otherwise the next tick after that does.
    fn refresh(&mut self, now_ms: u64) {
        let members = self.membership.members().len() as u64;
        let pause_ms = members.saturating_mul(LIST_PAUSE_MS).min(LIST_PAUSE_MS_MAX);
        let is_time = self.listed_ms.is_none_or(|listed_ms| now_ms.saturating_sub(listed_ms) >= pause_ms);
        if !self.due.list || !is_time {
            return;
        }
        let due = std::mem::take(&mut self.due);
        if due.place {
            self.place();
        }
        self.relist();
        self.listed_ms = Some(now_ms);
        self.todo.changed = true;
    }

    fn tell(&mut self, change: &Change, now: Now) {
        let node = &change.life.node;
        match &change.verdict {
            Verdict::Joined | Verdict::Restarted { .. } | Verdict::Back { .. } => {
                tracing::info!(%node, "{change}");
                self.said.remove(node);
                self.given_up.remove(node);
                // One that was given up for good and came back with its memory is not over.
                let incarnation = change.life.incarnation;
                self.over.retain(|over| over.life.incarnation != incarnation || over.life.node != *node);
            }
            Verdict::Replaced { was } => {
                tracing::info!(%node, "{change}");
                self.said.remove(node);
                let old = NodeLife { node: node.clone(), incarnation: *was };
                self.end(&old);
            }
            Verdict::Suspect(_) | Verdict::CutOff { .. } | Verdict::Gone(_) => {
                tracing::warn!(%node, "{change}");
                let mut why = change.to_string();
                why.truncate(why.floor_char_boundary(WHY_BYTES_MAX));
                self.said.insert(node.clone(), Said { since_ms: now.wall_ms, why });
            }
            Verdict::ForGood(_) => {
                tracing::warn!(%node, "{change}");
                self.said.remove(node);
                self.versions.remove(node);
                let old = NodeLife { node: node.clone(), incarnation: change.life.incarnation };
                self.end(&old);
            }
        }
    }

    /// That life is over.
    fn end(&mut self, life: &NodeLife) {
        if !self.given_up.remove(&life.node) {
            self.todo.lost.push(life.clone());
        }
        self.over.retain(|over| over.life != *life);
        let listed = self.list.members.iter().find(|member| member.life == *life);
        self.over.push_back(wire::Member {
            life: life.clone(),
            // One that came and went between two lists has a name all the same.
            address: listed.map_or_else(String::new, |listed| listed.address.clone()),
            labels: listed.map_or_else(BTreeMap::new, |listed| listed.labels.clone()),
            gone: true,
            partners: Vec::new(),
            standing: wire::Standing::Over,
            since_ms: 0,
            why: String::new(),
        });
        if self.over.len() > OVER_MAX {
            self.over.pop_front();
        }
    }

    /// Of those that are gone and have been silent for long enough nothing is expected any more.
    fn give_up(&mut self) -> bool {
        let is_lost = |member: &&Member| {
            let node = &member.life.node;
            matches!(member.standing, Standing::Gone { .. })
                && !self.given_up.contains(node)
                && self.membership.silent_ms(node).is_some_and(|silent_ms| silent_ms >= RESTART_MS)
        };
        let lives: Vec<NodeLife> = self.membership.members().filter(is_lost).map(life_of).collect();
        for life in &lives {
            self.given_up.insert(life.node.clone());
        }
        let found = !lives.is_empty();
        self.todo.lost.extend(lives);
        found
    }

    fn place(&mut self) {
        let epoch = self.membership.epoch();
        let placed = place(Some(&self.placed.placement), &self.membership.candidates(), &self.rules, epoch);
        for moved in &placed.moves {
            tracing::debug!(node = %moved.node, "{moved}");
        }
        tracing::info!(nodes = placed.placement.nodes(), moves = placed.moves.len(), "placed anew");
        self.placed = placed;
    }

    fn relist(&mut self) {
        let partners = self.placed.placement.partners();
        let listed = |member: &Member| {
            let node = &member.life.node;
            let said = self.said.get(node);
            wire::Member {
                life: life_of(member),
                address: member.address.clone(),
                labels: member.labels.clone().into(),
                gone: self.given_up.contains(node),
                partners: partners.get(node).copied().flatten().cloned().into_iter().collect(),
                standing: standing_of(member),
                since_ms: said.map_or(0, |said| said.since_ms),
                why: said.map_or_else(String::new, |said| said.why.clone()),
            }
        };
        let mut members: Vec<_> =
            self.membership.members().map(listed).chain(self.over.iter().cloned()).collect();
        members.sort_by(|one, other| one.place().cmp(&other.place()));
        self.encoded = None;
        self.list = Arc::new(Members {
            epoch: self.membership.epoch(),
            number: self.list.number + 1,
            placement: self.placed.placement.version,
            members,
        });
    }

    /// A row for each member. What only a node itself knows of it is what its last beat said.
    pub(super) fn nodes(&self, own: &NodeName) -> Vec<report::Node> {
        let partners = self.placed.placement.partners();
        let row = |member: &Member| {
            let node = &member.life.node;
            let is_own = node == own;
            let said = self.said.get(node);
            let silent_ms = self.membership.silent_ms(node).unwrap_or(0);
            let (used, size) =
                member.beat.as_ref().map_or((0, 0), |beat| (beat.tier1_used_bytes, beat.tier1_size_bytes));
            report::Node {
                name: node.to_string(),
                incarnation: member.life.incarnation,
                start: member.life.start,
                state: match member.standing {
                    Standing::Alive => NodeState::Serving,
                    Standing::Awaited => NodeState::Starting,
                    Standing::Suspect(_) | Standing::CutOff { .. } | Standing::Gone { .. } => {
                        NodeState::Unknown
                    }
                },
                listen: member.address.clone(),
                version: self.versions.get(node).cloned().unwrap_or_default(),
                epoch: member.beat.as_ref().map_or_else(|| self.membership.epoch(), |beat| beat.epoch).0,
                coordinator: is_own,
                this: is_own,
                tier1_used_bytes: used,
                tier1_size_bytes: size,
                standing: standing_of(member).word().to_owned(),
                since_ms: said.map(|said| said.since_ms),
                why: said.map(|said| said.why.clone()),
                heard_ago_seconds: (!is_own)
                    .then(|| std::time::Duration::from_millis(silent_ms).as_secs_f64()),
                labels: member.labels.clone().into(),
                partner: partners.get(node).copied().flatten().map(NodeName::to_string),
            }
        };
        self.membership.members().map(row).collect()
    }

    pub(super) fn placement(&self) -> report::Placement {
        let Placed { placement, notes, .. } = &self.placed;
        report::Placement::of(placement, &self.membership.candidates(), notes)
    }
}

fn life_of(member: &Member) -> NodeLife {
    NodeLife { node: member.life.node.clone(), incarnation: member.life.incarnation }
}

fn standing_of(member: &Member) -> wire::Standing {
    match member.standing {
        Standing::Awaited => wire::Standing::Awaited,
        Standing::Alive => wire::Standing::Alive,
        Standing::Suspect(_) => wire::Standing::Suspect,
        Standing::CutOff { .. } => wire::Standing::CutOff,
        Standing::Gone { .. } => wire::Standing::Gone,
    }
}

#[cfg(test)]
#[path = "roll_test.rs"]
mod tests;
