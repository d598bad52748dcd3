//! The catalog on a second node: what is acknowledged there survives the coordinator.
//!
//! Owns: who is the deputy (the node that keeps this one's copies, where it is heard), telling it what changed, and who waits for that.
//! Does not own: collecting (`namespace::deputy`), keeping (`cluster::deputy`).

use super::{Catalog, Claim, NODE_DEADLINE, NamedDeputy};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidemark_engine::cluster::{address_of, state_of};
use tidemark_protocol::cluster::members::Standing;
use tidemark_protocol::cluster::wire::{
    BATCH_BYTES_MAX, BATCH_ITEMS_MAX, CatalogNode, CatalogPart, Member, Members, ToNode,
};
use tidemark_protocol::id::NodeName;
use tidemark_protocol::key::NodeLife;
use tokio::sync::Notify;

/// How long an acknowledgement waits for the deputy. One that is slower is about to be found gone, and names wait no longer.
const DEPUTY_WAIT: Duration = Duration::from_millis(500);

/// How long an etcd is waited for that is to store who the deputy is: about as long as a lease lives that it does not renew.
const NAMING_WAIT: Duration = Duration::from_secs(2);

/// Before it is asked again: what is to be stored is not stored again by itself.
const NAME_AGAIN: Duration = Duration::from_millis(250);

/// Before a deputy that did not answer is told anew.
const TELL_AGAIN: Duration = Duration::from_millis(100);

/// How long a partner lives without a break before it takes the place of the deputy that stood in for it. Over a link that loses much it comes
/// and goes within seconds, and each change leaves the catalog on one node until all is told. Who stands in has everything: nothing is urgent.
const BACK_AFTER: Duration = Duration::from_secs(30);

/// The part that says that nobody is to be waited for.
const NOBODY: u64 = u64::MAX;

/// The next part for the deputy.
struct Next {
    part: CatalogPart,
    /// Its number among all parts.
    begun: u64,
    /// With the last part: this node's own operations up to this publication are in it, or in one before.
    publication: u64,
}

/// How far the deputy has been told.
#[derive(Debug)]
pub(super) struct Deputy {
    /// Publications are taken in, and parts collected, one at a time.
    step: tokio::sync::Mutex<()>,
    /// Parts begun.
    begun: AtomicU64,
    /// The last publication of this node itself that was told.
    own: AtomicU64,
    /// The last part up to which it has everything.
    kept: tokio::sync::watch::Sender<u64>,
    /// There may be one by now, although no member has changed.
    due: Notify,
}

impl Default for Deputy {
    fn default() -> Self {
        Self {
            step: tokio::sync::Mutex::default(),
            begun: AtomicU64::new(0),
            own: AtomicU64::new(0),
            kept: tokio::sync::watch::Sender::new(NOBODY),
            due: Notify::new(),
        }
    }
}

impl Deputy {
    pub(super) async fn step(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.step.lock().await
    }

    /// Nothing stands in the way of one any more.
    pub(super) fn is_due(&self) {
        self.due.notify_one();
    }
}

impl Catalog {
    /// Waits, within bounds, until the deputy keeps what has been done until now.
    pub(super) async fn kept_by_deputy(&self) {
        let begun = self.deputy.begun.load(Ordering::Acquire);
        let mut kept = self.deputy.kept.subscribe();
        if *kept.borrow() == NOBODY {
            return;
        }
        // A part that has begun may have been collected before.
        self.cluster.namespace().wake_teller();
        let told = kept.wait_for(|part| *part > begun);
        if tokio::time::timeout(DEPUTY_WAIT, told).await.is_err() {
            tracing::debug!("not waited for the deputy any longer");
        }
    }

    /// Tells the deputy what changes, until dropped.
    pub async fn tell_deputy(self: Arc<Self>) {
        let mut members = self.cluster.watch_members();
        let mut deputy: Option<Member> = None;
        let mut choice = Choice::default();
        let (mut number, mut knows_all) = (0, false);
        loop {
            let chosen = self.deputy_now(&mut choice, deputy.as_ref());
            if chosen.as_ref().map(|member| &member.life) != deputy.as_ref().map(|member| &member.life) {
                number = 0;
                match &chosen {
                    Some(member) => {
                        tracing::debug!(deputy = %member.life, "this deputy is told the catalog");
                        self.tell_all().await;
                    }
                    None => {
                        self.name_deputy(None).await;
                        self.cluster.namespace().forget_deputy();
                        self.cluster.namespace().lead_outgoing(false);
                        self.deputy.kept.send_replace(NOBODY);
                    }
                }
                deputy = chosen;
            }
            let Some(member) = &deputy else {
                tokio::select! {
                    _ = members.changed() => {}
                    () = self.deputy.due.notified() => {}
                }
                continue;
            };
            let Next { part, begun, publication } = self.next_part(number).await;
            let idle = part.nodes.is_empty() && part.gone.is_empty() && part.fates.is_empty();
            let all = part.all;
            if number > 0 && idle && part.published.is_empty() {
                if self.name_deputy(Some(&member.life)).await {
                    self.kept(begun);
                }
                tokio::select! {
                    () = self.cluster.namespace().untold_changed() => {}
                    _ = members.changed() => {}
                    () = tokio::time::sleep(BACK_AFTER), if choice.back.is_some() => {}
                }
                continue;
            }
            let message = ToNode::Catalog(Box::new(part));
            match self.cluster.ask_node::<bool>(&address_of(member), &message, NODE_DEADLINE).await {
                Ok(true) => {
                    knows_all &= number > 0;
                    number += 1;
                    if all && self.name_deputy(Some(&member.life)).await {
                        self.cluster.namespace().deputy_keeps(publication);
                        self.kept(begun);
                        if !std::mem::replace(&mut knows_all, true) {
                            tracing::info!(deputy = %member.life, "the catalog is kept there, too");
                        }
                    }
                }
                // It was started again, or missed one.
                Ok(false) => {
                    number = 0;
                    self.tell_all().await;
                }
                Err(away) => {
                    tracing::debug!(deputy = %member.life, error = &away as &dyn std::error::Error, "the deputy is told anew");
                    number = 0;
                    self.tell_all().await;
                    tokio::time::sleep(TELL_AGAIN).await;
                }
            }
        }
    }

    fn kept(&self, part: u64) {
        self.deputy.kept.send_if_modified(|kept| {
            let more = *kept == NOBODY || *kept < part;
            if more {
                *kept = part;
            }
            more
        });
    }

    /// None while the names of Tier-3 are awaited: a successor would take a part of the catalog for all of it.
    fn deputy_now(&self, choice: &mut Choice, present: Option<&Member>) -> Option<Member> {
        if self.lock().hearing.knows_nothing() {
            return None;
        }
        let present = present.map(|member| &member.life);
        choice.choose(&self.cluster.members(), &self.cluster.life, present, self.now()).cloned()
    }

    /// Says where the lease is who keeps the catalog: whoever kept an older one is not to begin with it. False where it was not stored in time,
    /// and nothing is certain.
    async fn name_deputy(&self, deputy: Option<&NodeLife>) -> bool {
        {
            let mut state = self.lock();
            if state.deputy.life.as_ref() == deputy && state.deputy.stored {
                return true;
            }
            state.deputy = NamedDeputy { life: deputy.cloned(), stored: false };
        }
        // A coordinator that the settings name has no lease, and no successor. With one, nobody stores the name before the lease is kept or once it
        // is lost, and then nothing is certain.
        if self.claim == Claim::Settings {
            return true;
        }
        let mut written = self.written.subscribe();
        let give_up = tokio::time::Instant::now() + NAMING_WAIT;
        loop {
            self.stored.send_modify(|changes| *changes += 1);
            let change = *self.stored.borrow();
            let again = (tokio::time::Instant::now() + NAME_AGAIN).min(give_up);
            if tokio::time::timeout_at(again, written.wait_for(|last| *last >= change)).await.is_ok() {
                self.lock().deputy.stored = true;
                return true;
            }
            if again == give_up {
                tracing::warn!(
                    deputy = deputy.map(tracing::field::display),
                    "who keeps the catalog was not stored where the lease is"
                );
                return false;
            }
        }
    }

    /// Everything is to be told. Until it has been, nobody waits for the deputy, and it is none.
    async fn tell_all(&self) {
        self.name_deputy(None).await;
        self.deputy.kept.send_replace(NOBODY);
        // In this order: what is done in between is told, and kept in case it is not.
        self.cluster.namespace().lead_outgoing(true);
        self.cluster.namespace().tell_deputy();
        let mut state = self.lock();
        state.untold = state.published.keys().cloned().collect();
        state.untold.insert(self.cluster.life.clone());
    }

    /// Takes the next part of the catalog that the deputy has not been told.
    async fn next_part(&self, number: u64) -> Next {
        let _step = self.deputy.step().await;
        let begun = self.deputy.begun.fetch_add(1, Ordering::AcqRel) + 1;
        let namespace = self.cluster.namespace();
        let told = namespace.take_untold(BATCH_ITEMS_MAX, BATCH_BYTES_MAX);
        let published = {
            let mut state = self.lock();
            // Only with the last part are all names of a publication told.
            let lives: BTreeSet<NodeLife> =
                if told.all { std::mem::take(&mut state.untold) } else { BTreeSet::new() };
            // This node's own operations count as published, too: it goes on from there where another coordinates.
            let is_news = self.deputy.own.swap(told.publication, Ordering::Relaxed) != told.publication;
            let own = (told.all && (is_news || lives.contains(&self.cluster.life)))
                .then(|| (self.cluster.life.clone(), told.publication));
            let last =
                lives.into_iter().filter_map(|life| Some((life.clone(), *state.published.get(&life)?)));
            last.chain(own).collect::<Vec<_>>()
        };
        let nodes = told.nodes.into_iter().map(|(node, names)| {
            let id = node.node;
            CatalogNode { id, names, state: state_of(namespace, node) }
        });
        let part = CatalogPart {
            epoch: self.epoch,
            number,
            now_ns: namespace.now_ns(),
            nodes: nodes.collect(),
            gone: told.gone,
            removed: if number == 0 { namespace.removed_before() } else { Vec::new() },
            published,
            fates: told.fates,
            all: told.all,
        };
        Next { part, begun, publication: told.publication }
    }
}

/// The rule that chooses the deputy, and what it remembers.
#[derive(Debug, Default)]
struct Choice {
    /// A partner that lives while another is the deputy, and since when.
    back: Option<(NodeLife, Duration)>,
}

impl Choice {
    /// The first node that keeps this one's copies and is heard; where none is, any that is: a partner that is lost keeps its place for a while,
    /// and the next loss may come before. `present` stays while it is heard, until a partner has been there for [`BACK_AFTER`].
    fn choose<'a>(
        &mut self,
        members: &'a Members,
        own: &NodeLife,
        present: Option<&NodeLife>,
        now: Duration,
    ) -> Option<&'a Member> {
        // A suspect is heard again within a second, or counts as lost then. Another node would have to be told everything.
        let is_heard = |member: &&Member| {
            let heard = matches!(member.standing, Standing::Alive | Standing::Suspect);
            heard && !member.gone && member.life != *own
        };
        let heard = || members.members.iter().filter(is_heard);
        let partners = &members.members.iter().find(|member| member.life == *own)?.partners;
        let of = |name: &NodeName| heard().find(|member| member.life.node == *name);
        let partner = partners.iter().find_map(of);
        let stays = heard().find(|member| Some(&member.life) == present);
        let (Some(stays), Some(partner)) = (stays, partner) else {
            self.back = None;
            return stays.or(partner).or_else(|| heard().next());
        };
        if partners.contains(&stays.life.node) || partner.standing != Standing::Alive {
            self.back = None;
            return Some(stays);
        }
        let life = &partner.life;
        let (_, since) =
            self.back.take().filter(|(back, _)| back == life).unwrap_or_else(|| (life.clone(), now));
        if now.saturating_sub(since) >= BACK_AFTER {
            return Some(partner);
        }
        self.back = Some((life.clone(), since));
        Some(stays)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Standing::{Alive, Awaited, CutOff, Gone, Over, Suspect};
    use tidemark_protocol::id::Incarnation;

    fn life(at: u64) -> NodeLife {
        NodeLife { node: format!("n{at}").parse().unwrap(), incarnation: Incarnation(at) }
    }

    /// Nodes 1, which coordinates, 2, 3, which keeps its copies, and 4.
    fn members(others: [Standing; 3]) -> Members {
        let member = |(at, standing): (u64, Standing)| Member {
            life: life(at),
            address: String::new(),
            labels: std::collections::BTreeMap::new(),
            gone: matches!(standing, Gone | Over),
            partners: vec![life(3).node],
            standing,
            since_ms: 0,
            why: String::new(),
        };
        let [second, third, fourth] = others;
        let members = [(1, Alive), (2, second), (3, third), (4, fourth)].map(member).to_vec();
        Members { members, ..Members::default() }
    }

    #[test]
    fn the_deputy_is_a_node_that_is_heard_and_a_partner_before_others() {
        let deputy = |second: Standing, third: Standing| {
            let members = members([second, third, Over]);
            let chosen = Choice::default().choose(&members, &life(1), None, Duration::ZERO);
            chosen.map(|member| member.life.incarnation.0)
        };
        assert_eq!([deputy(Alive, Alive), deputy(Alive, Suspect)], [Some(3); 2]);
        for lost in [Awaited, CutOff, Gone, Over] {
            assert_eq!([deputy(Alive, lost), deputy(Suspect, lost)], [Some(2); 2], "{lost:?}");
            assert_eq!(deputy(lost, lost), None, "{lost:?}");
        }
    }

    #[test]
    fn a_deputy_stays_while_it_is_heard_until_a_partner_is_there_for_long() {
        let mut choice = Choice::default();
        let mut present = None;
        let mut deputy = |others: [Standing; 3], at: u64| {
            let members = members(others);
            let now = Duration::from_secs(at);
            present =
                choice.choose(&members, &life(1), present.as_ref(), now).map(|member| member.life.clone());
            present.as_ref().map(|life| life.incarnation.0)
        };
        let long = BACK_AFTER.as_secs();
        assert_eq!(deputy([Gone, Alive, Alive], 0), Some(3));
        assert_eq!(deputy([Gone, Suspect, Alive], 1), Some(3));
        assert_eq!(deputy([Gone, CutOff, Alive], 2), Some(4));
        // Neither a partner that comes and goes nor a node that is named before it takes its place.
        for at in 3..3 * long {
            let partner = match at % 10 {
                0 => Suspect,
                5 => CutOff,
                _ => Alive,
            };
            let stands_in = if at % 10 == 3 { Suspect } else { Alive };
            assert_eq!(deputy([Alive, partner, stands_in], at), Some(4), "{at}");
        }
        let at = 3 * long;
        assert_eq!(deputy([Alive, Suspect, Alive], at), Some(4));
        assert_eq!(deputy([Alive, Alive, Alive], at + 1), Some(4));
        assert_eq!(deputy([Alive, Alive, Alive], at + long), Some(4));
        assert_eq!(deputy([Alive, Alive, Alive], at + 1 + long), Some(3));
        // The node that stands in is lost: a partner that is heard takes its place at once.
        assert_eq!(deputy([Alive, CutOff, Alive], at + 100), Some(2));
        assert_eq!(deputy([CutOff, Alive, Alive], at + 101), Some(3));
    }
}
