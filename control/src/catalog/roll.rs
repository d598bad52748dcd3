//! The members and their places, as the coordinator keeps them.
//!
//! Owns: the list that all nodes see, the reason and time of each node's standing, which lives are over. Does not own: verdicts
//! (`protocol::membership`), the choice of partners (`protocol::placement`), carrying out the consequences (`members`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use tidemark_protocol::cluster::wire::{self, EncodedMembers, Members, WHY_BYTES_MAX, WireError};
use tidemark_protocol::id::{Epoch, NodeName};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership::{
    Admit, Ask, Change, Command, Echo, Event, Life, Member, MemberList, Membership, Patience, Proof, Refusal,
    Standing, Verdict,
};
use tidemark_protocol::placement::{Placed, Rules, place};
use tidemark_protocol::report::{self, NodeState};

/// Most lives that are over and stay in the list of all: the node that uploads files of a lost node names that life. A cluster of thousands
/// loses some a day; an entry is some 200 bytes.
const OVER_MAX: usize = 256;

/// Silence after which a node that is gone is no longer expected. A daemon that only died is back by then, with its memory, its unpublished
/// names, and processes that never noticed.
const RESTART_MS: u64 = 1_000;

/// The same where other nodes are members and none of them could be asked. Then the coordinator's own network may be the one that failed:
/// a switch or a bond that fails over is back by then. Names wait meanwhile, and no save is taken for a dead program's.
const UNWITNESSED_MS: u64 = 10_000;

/// Pause per member between two choices of partners and lists. If many changes come at once, the last one counts, so that neither the
/// processor nor the network is busy with them. With three nodes the pause is not noticeable.
const LIST_PAUSE_MS: u64 = 1;

/// The longest of these pauses: a new node is known to all by then.
const LIST_PAUSE_MS_MAX: u64 = 1_000;

/// The most members of a small cluster. In it all members receive suspicions, too, and news do not wait until earlier ones have arrived:
/// they are a few hundred bytes.
const SMALL_MAX: usize = 256;

/// The settings, and the members that were stored before.
#[derive(Debug, Clone, Default)]
pub struct Terms {
    pub rules: Rules,
    pub patience: Patience,
    pub stored: MemberList,
}

/// Two clocks at one moment.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    /// The coordinator's monotonic clock.
    pub(super) ms: u64,
    /// The wall clock, for people.
    pub(super) wall_ms: i64,
}

/// The results of an event for its sender.
#[derive(Debug, Default)]
pub(super) struct Replies {
    pub(super) admit: Option<Admit>,
    pub(super) echo: Option<Echo>,
}

/// The consequences to carry out once the roll is unlocked.
#[derive(Debug, Default)]
pub(super) struct Todo {
    pub(super) asks: Vec<(NodeName, Ask)>,
    /// Lives that are no longer expected.
    pub(super) lost: Vec<NodeLife>,
    /// Whether the list changed.
    pub(super) changed: bool,
    /// Whether the stored members changed.
    pub(super) keep: bool,
    /// Whether a node follows a higher epoch.
    pub(super) doubt: bool,
}

/// The reason of a node's standing.
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
    /// The reasons for nodes that are not alive.
    said: BTreeMap<NodeName, Said>,
    /// The builds that the nodes named at their last join.
    versions: BTreeMap<NodeName, String>,
    given_up: BTreeSet<NodeName>,
    over: VecDeque<wire::Member>,
    /// The list as it was last made.
    list: Arc<Members>,
    /// The list as bytes for joining nodes, once a node has joined.
    encoded: Option<EncodedMembers>,
    /// When the list was made.
    listed_ms: Option<u64>,
    due: Due,
    pub(super) todo: Todo,
}

/// Changes that the list does not show yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Due {
    place: bool,
    list: bool,
}

impl Roll {
    /// Begins a term of the coordinator `own`.
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
            // Former members are listed although no verdict about them may follow.
            due: Due { list: true, ..Due::default() },
            todo: Todo::default(),
        }
    }

    /// Returns the list as it was last made: a change may be missing for [`LIST_PAUSE_MS`] per member.
    pub(super) fn list(&self) -> &Arc<Members> {
        &self.list
    }

    /// Returns the list as bytes.
    ///
    /// # Errors
    /// If the list is larger than a message may be.
    pub(super) fn encoded(&mut self) -> Result<EncodedMembers, WireError> {
        if let Some(encoded) = &self.encoded {
            return Ok(encoded.clone());
        }
        Ok(self.encoded.insert(EncodedMembers::of(&self.list)?).clone())
    }

    /// Returns the answer to the beat of that number.
    pub(super) fn echo(&self, number: u64) -> Echo {
        self.membership.echo(number)
    }

    pub(super) fn stored(&self) -> MemberList {
        self.membership.list()
    }

    /// Returns the members without those that are no longer expected: names are answered without these now, and a coordinator that begins
    /// again need not wait for them either.
    pub(super) fn expected_next(&self) -> MemberList {
        let mut list = self.membership.list();
        list.members.retain(|listed| !self.is_given_up(&listed.life.node));
        list
    }

    pub(super) fn member(&self, node: &NodeName) -> Option<&Member> {
        self.membership.member(node)
    }

    /// Returns whether the node is no longer expected.
    pub(super) fn is_given_up(&self, node: &NodeName) -> bool {
        self.given_up.contains(node)
    }

    /// Returns a member that is still expected.
    pub(super) fn expected(&self, node: &NodeName) -> Option<&Member> {
        self.member(node).filter(|_| !self.is_given_up(node))
    }

    pub(super) fn runs(&mut self, node: &NodeName, version: String) {
        self.versions.insert(node.clone(), version);
    }

    /// Takes in an event, and puts its consequences into `todo`.
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
                // At once: its consequences may not wait for the list.
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

    /// Returns whether all members are to learn of the change. A suspicion is over within a second, one way or the other. In a large
    /// cluster some nodes are always late, so only the coordinator shows it.
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

    /// Makes a new list if it changed and the last one is old enough. Otherwise the next tick after that does.
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
                // A life that was retired for good and came back with its memory is not over.
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

    /// Ends a life.
    fn end(&mut self, life: &NodeLife) {
        if !self.given_up.remove(&life.node) {
            self.todo.lost.push(life.clone());
        }
        self.over.retain(|over| over.life != *life);
        let listed = self.list.members.iter().find(|member| member.life == *life);
        self.over.push_back(wire::Member {
            life: life.clone(),
            // A node that came and went between two lists is listed all the same.
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

    /// Marks nodes that are gone and have been silent for long enough as no longer expected. Returns whether there were any.
    fn give_up(&mut self) -> bool {
        let is_lost = |member: &&Member| {
            let Standing::Gone { proof, .. } = &member.standing else { return false };
            let (node, patience_ms) = (&member.life.node, patience_ms(proof));
            !self.given_up.contains(node)
                && self.membership.silent_ms(node).is_some_and(|silent_ms| silent_ms >= patience_ms)
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

    /// Returns a row for each member. Facts that only the node itself knows come from its last beat.
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

/// Returns the silence after which a node that is gone is no longer expected.
fn patience_ms(proof: &Proof) -> u64 {
    match proof {
        Proof::Neighbours { .. } | Proof::CutOffTooLong { .. } | Proof::Silence { two_alone: true, .. } => {
            RESTART_MS
        }
        Proof::Silence { two_alone: false, .. } => UNWITNESSED_MS,
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
