//! The members and their places, as the coordinator keeps them.
//!
//! Owns: the list that all nodes see, what is said of each node and since when, which lives are over. Does not own: verdicts
//! (`protocol::membership`), the choice of partners (`protocol::placement`), doing what follows (`members`).

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use tidemark_protocol::cluster::wire::{self, Members, WHY_BYTES_MAX};
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
    /// As it was last told.
    list: Members,
    pub(super) todo: Todo,
}

impl Roll {
    /// A term of the coordinator `own`, which others reach at `address`.
    pub(super) fn begin(epoch: Epoch, own: &Life, terms: Terms, now: Now) -> Self {
        let Terms { rules, patience, stored } = terms;
        let membership = Membership::new(epoch, own.node.clone(), true, stored, patience, now.ms);
        let placed = place(None, &membership.candidates(), &rules, epoch);
        let list = Members { epoch, ..Members::default() };
        Self {
            membership,
            rules,
            placed,
            said: BTreeMap::new(),
            versions: BTreeMap::new(),
            given_up: BTreeSet::new(),
            over: VecDeque::new(),
            list,
            todo: Todo::default(),
        }
    }

    pub(super) fn list(&self) -> &Members {
        &self.list
    }

    pub(super) fn stored(&self) -> MemberList {
        self.membership.list()
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
        let mut relist = false;
        for command in commands {
            match command {
                Command::Admit(admit) => replies.admit = Some(admit),
                Command::Echo { echo, .. } => replies.echo = Some(echo),
                Command::Ask { to, ask } => self.todo.asks.push((to, ask)),
                Command::Tell(change) => {
                    self.tell(&change, now);
                    relist = true;
                }
                Command::Keep => {
                    self.todo.keep = true;
                    relist = true;
                }
                Command::Place => {
                    self.place();
                    relist = true;
                }
                Command::Doubt { by, theirs } => {
                    let ours = self.membership.epoch();
                    tracing::warn!(%by, %theirs, %ours, "a node knows of a higher epoch");
                }
            }
        }
        if is_tick {
            relist |= self.give_up();
        }
        if relist {
            self.relist();
        }
        (result, replies)
    }

    fn tell(&mut self, change: &Change, now: Now) {
        let node = &change.life.node;
        match &change.verdict {
            Verdict::Joined | Verdict::Restarted { .. } | Verdict::Back { .. } => {
                tracing::info!(%node, "{change}");
                self.said.remove(node);
                self.given_up.remove(node);
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
        let Some(listed) = self.list.members.iter().find(|member| member.life == *life) else { return };
        let over = wire::Member {
            gone: true,
            partners: Vec::new(),
            standing: wire::Standing::Over,
            since_ms: 0,
            why: String::new(),
            ..listed.clone()
        };
        self.over.push_back(over);
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
        self.list = Members {
            epoch: self.membership.epoch(),
            number: self.list.number + 1,
            placement: self.placed.placement.version,
            members: self.membership.members().map(listed).chain(self.over.iter().cloned()).collect(),
        };
        self.todo.changed = true;
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
