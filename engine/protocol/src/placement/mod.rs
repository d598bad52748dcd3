//! Placement: which node keeps the copies of which other node.
//!
//! ```text
//! ring     a → b → c → d → a          every node has one partner and is one node's partner
//! pair     a ⇄ b    c → d → e → c     the same, in circles of two; an odd node makes one circle of three
//! ```
//!
//! Owns: the choice of partners, which copies move when members come and go, the reasons, and what a placement survives
//! (`survival`). Does not own: which nodes are members (`membership`), the copies and their transfer (the engine).
//!
//! Either scheme is a set of circles, and each node's copies are at the node after it. A circle of one is a node without a
//! partner. The circles alone determine what is lost with some nodes.

mod pair;
mod reason;
mod ring;
mod survival;

pub use reason::{Because, Move, Note};
pub use survival::{DomainSurvival, Loss, Survival, survival};

use crate::id::{Epoch, NodeName};
use crate::label::Labels;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of members that one coordinator serves; a longer list from outside is refused before it is used.
pub const MEMBERS_MAX: usize = 100_000;

/// The label that names a node's failure domain unless the settings name another.
pub const DOMAIN_LABEL: &str = "rack";

/// The scheme by which circles are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheme {
    /// A single circle of all nodes. A join or leave changes one partner.
    #[default]
    Ring,
    /// Circles of two: about half as many pairs of nodes whose loss is fatal as in a ring, at equal memory.
    Pair,
}

impl Scheme {
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Pair => "pair",
        }
    }
}

/// The rule for where a partner is looked for. The label's value names the failure domain; a node without the label is a domain
/// of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// In another domain, wherever possible: the loss of one domain loses nothing.
    Apart(String),
    /// In the same domain, on purpose: copies stay below one switch, and after the loss of a domain its data comes from Tier-3.
    Within(String),
}

impl Default for Scope {
    fn default() -> Self {
        Self::Apart(DOMAIN_LABEL.to_owned())
    }
}

impl Scope {
    /// Returns the label that names failure domains.
    #[must_use]
    pub fn label(&self) -> &str {
        match self {
            Self::Apart(label) | Self::Within(label) => label,
        }
    }
}

/// The settings for placement.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Rules {
    pub scheme: Scheme,
    pub scope: Scope,
}

/// A node to be placed: it has copies and keeps copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub name: NodeName,
    pub labels: Labels,
}

/// Order of placements: by the coordinator's epoch, then by its own count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct PlacementVersion {
    pub epoch: Epoch,
    pub number: u64,
}

/// Every node's partner, as all nodes hold it. Costs about 20 bytes a node as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Placement {
    pub version: PlacementVersion,
    pub rules: Rules,
    /// Circles, each beginning with its smallest name, in the order of these names.
    circles: Vec<Vec<NodeName>>,
}

/// The reason why a placement from outside is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadPlacement {
    #[error("a placement of {found} nodes, and {MEMBERS_MAX} are taken at most; ask its sender")]
    TooMany { found: usize },
    #[error("a placement names node {node} twice; ask its sender for it again")]
    Twice { node: NodeName },
    #[error("a placement has a circle of no nodes; ask its sender for it again")]
    Empty,
}

impl Placement {
    /// Returns the circles. Each node's copies are at the node after it, and the last one's at the first.
    #[must_use]
    pub fn circles(&self) -> &[Vec<NodeName>] {
        &self.circles
    }

    /// Returns how many nodes are placed.
    #[must_use]
    pub fn nodes(&self) -> usize {
        self.circles.iter().map(Vec::len).sum()
    }

    /// Returns the node that keeps the copies of `node`. None without a partner, or if `node` is no member. Costs a walk over all
    /// nodes; a caller that asks for many makes [`Self::partners`] once.
    #[must_use]
    pub fn partner_of(&self, node: &NodeName) -> Option<&NodeName> {
        let (circle, at) = self.find(node)?;
        let partner = &circle[(at + 1) % circle.len()];
        (partner != node).then_some(partner)
    }

    /// Returns the node whose copies `node` keeps; otherwise as [`Self::partner_of`].
    #[must_use]
    pub fn ward_of(&self, node: &NodeName) -> Option<&NodeName> {
        let (circle, at) = self.find(node)?;
        let ward = &circle[(at + circle.len() - 1) % circle.len()];
        (ward != node).then_some(ward)
    }

    fn find(&self, node: &NodeName) -> Option<(&[NodeName], usize)> {
        let at = |circle: &Vec<NodeName>| circle.iter().position(|name| name == node);
        self.circles.iter().find_map(|circle| Some((circle.as_slice(), at(circle)?)))
    }

    /// Returns every node with the node that keeps its copies.
    #[must_use]
    pub fn partners(&self) -> BTreeMap<&NodeName, Option<&NodeName>> {
        let of = |circle: &'_ Vec<NodeName>, at: usize| (circle.len() > 1).then_some((at + 1) % circle.len());
        let links = self.circles.iter().flat_map(|circle| {
            (0..circle.len()).map(move |at| (&circle[at], of(circle, at).map(|next| &circle[next])))
        });
        links.collect()
    }

    /// Checks a placement that came from another node.
    ///
    /// # Errors
    /// When the placement is too large, or names a node twice.
    pub fn check(&self) -> Result<(), BadPlacement> {
        let found = self.nodes();
        if found > MEMBERS_MAX {
            return Err(BadPlacement::TooMany { found });
        }
        let mut seen = BTreeSet::new();
        for circle in &self.circles {
            if circle.is_empty() {
                return Err(BadPlacement::Empty);
            }
            if let Some(node) = circle.iter().find(|node| !seen.insert(*node)) {
                return Err(BadPlacement::Twice { node: node.clone() });
            }
        }
        Ok(())
    }
}

/// A placement, its changes, and its weaknesses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    pub placement: Placement,
    /// Nodes with another partner than before, by name, new nodes too: their copies are made again there.
    pub moves: Vec<Move>,
    /// Weaknesses of the placement, by node.
    pub notes: Vec<Note>,
}

/// Places `members`, changing little against `previous`.
///
/// As few nodes as possible have a partner in their own domain; among such placements few copies move. For each join or leave, a
/// ring moves the copies of one old node, and pairs those of up to three. If a node had its partner in its own domain and gets a
/// better one, that costs three more moves in a ring and four in pairs. Members that are named twice count once. The version
/// stays the previous one if no circle changed and the epoch is the same. Costs O(n log n); 10,000 nodes take some ten ms.
#[must_use]
pub fn place(previous: Option<&Placement>, members: &[Candidate], rules: &Rules, epoch: Epoch) -> Placed {
    let members: BTreeMap<&NodeName, &Labels> =
        members.iter().map(|member| (&member.name, &member.labels)).collect();
    let names: Vec<&NodeName> = members.keys().copied().collect();
    let label = rules.scope.label();
    let domains: Vec<Option<&str>> = members.values().map(|labels| labels.get(label)).collect();
    let at: BTreeMap<&NodeName, usize> = names.iter().enumerate().map(|(at, name)| (*name, at)).collect();
    let kept: Vec<Vec<usize>> = previous
        .iter()
        .flat_map(|previous| &previous.circles)
        .map(|circle| circle.iter().filter_map(|name| at.get(name).copied()).collect())
        .collect();
    let mut before = vec![None; names.len()];
    for (node, partner) in previous.iter().flat_map(|previous| previous.partners()) {
        if let Some(&node) = at.get(node) {
            before[node] = partner.and_then(|partner| at.get(partner).copied());
        }
    }
    let mut circles = vec![];
    match &rules.scope {
        Scope::Apart(_) => {
            let domains = numbered(&domains);
            circles.extend(arrange(rules.scheme, kept, (0..names.len()).collect(), &domains, &before));
        }
        Scope::Within(_) => {
            let mut groups: BTreeMap<Option<&str>, Vec<usize>> = BTreeMap::new();
            for (node, domain) in domains.iter().enumerate() {
                groups.entry(*domain).or_default().push(node);
            }
            let mut kept_in: BTreeMap<Option<&str>, Vec<Vec<usize>>> = BTreeMap::new();
            for circle in kept {
                let mut parts: BTreeMap<Option<&str>, Vec<usize>> = BTreeMap::new();
                circle.into_iter().for_each(|node| parts.entry(domains[node]).or_default().push(node));
                parts.into_iter().for_each(|(group, part)| kept_in.entry(group).or_default().push(part));
            }
            // Inside a group no nodes need to be apart.
            let apart: Vec<usize> = (0..names.len()).collect();
            for (group, nodes) in groups {
                let kept = kept_in.remove(&group).unwrap_or_default();
                circles.extend(arrange(rules.scheme, kept, nodes, &apart, &before));
            }
        }
    }
    let mut circles: Vec<Vec<NodeName>> = circles
        .into_iter()
        .map(|circle| circle.into_iter().map(|node| names[node].clone()).collect())
        .collect();
    circles.iter_mut().for_each(|circle| canonical(circle));
    circles.sort_unstable();
    let version = match previous {
        Some(previous) if previous.version.epoch != epoch => PlacementVersion { epoch, number: 1 },
        Some(previous) if previous.circles == circles && previous.rules == *rules => previous.version,
        Some(previous) => PlacementVersion { epoch, number: previous.version.number.saturating_add(1) },
        None => PlacementVersion { epoch, number: 1 },
    };
    let placement = Placement { version, rules: rules.clone(), circles };
    let moves = reason::moves(previous, &placement, &members);
    let notes = reason::notes(&placement, &members);
    Placed { placement, moves, notes }
}

/// Makes circles over `nodes`. `kept` is the rest of the former circles, in their order; `domains` has a number for each node;
/// `before` has each node's former partner if it is still here.
fn arrange(
    scheme: Scheme,
    kept: Vec<Vec<usize>>,
    nodes: Vec<usize>,
    domains: &[usize],
    before: &[Option<usize>],
) -> Vec<Vec<usize>> {
    let placed: BTreeSet<usize> = kept.iter().flatten().copied().collect();
    let new: Vec<usize> = nodes.into_iter().filter(|node| !placed.contains(node)).collect();
    let circles = match scheme {
        Scheme::Ring => vec![ring::arrange(kept, new, domains, before)],
        Scheme::Pair => pair::arrange(kept, new, domains),
    };
    circles.into_iter().filter(|circle| !circle.is_empty()).collect()
}

/// Numbers the domains; a node that names none has one of its own.
fn numbered(domains: &[Option<&str>]) -> Vec<usize> {
    let mut known = BTreeMap::new();
    let mut count = 0;
    let mut number = |domain: &Option<&str>| {
        let mut fresh = || {
            count += 1;
            count - 1
        };
        match *domain {
            Some(domain) => *known.entry(domain.to_owned()).or_insert_with(fresh),
            None => fresh(),
        }
    };
    domains.iter().map(&mut number).collect()
}

/// Rotates the smallest name to the front, so that one circle has one form.
fn canonical(circle: &mut [NodeName]) {
    let smallest = circle.iter().enumerate().min_by_key(|(_, name)| *name).map_or(0, |(at, _)| at);
    circle.rotate_left(smallest);
}

/// Nodes sorted into their domains, to be taken one after another from the largest domain that fits.
#[derive(Debug)]
struct ByDomain {
    /// (number of nodes left, domain): the largest last.
    sizes: BTreeSet<(usize, usize)>,
    /// Nodes of each domain in reverse order, so that the first is popped.
    nodes: BTreeMap<usize, Vec<usize>>,
}

impl ByDomain {
    fn of(nodes: &[usize], domains: &[usize]) -> Self {
        let mut sorted: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for node in nodes.iter().rev() {
            sorted.entry(domains[*node]).or_default().push(*node);
        }
        // If domains are of equal size, the first is taken first.
        let sizes = sorted.iter().map(|(domain, nodes)| (nodes.len(), usize::MAX - domain)).collect();
        Self { sizes, nodes: sorted }
    }

    /// Takes a node of the largest domain that is not `unlike`.
    fn take(&mut self, unlike: Option<usize>) -> Option<usize> {
        let fits = |(_, domain): &&(usize, usize)| Some(usize::MAX - domain) != unlike;
        let (size, domain) = *self.sizes.iter().rev().find(fits)?;
        self.sizes.remove(&(size, domain));
        if size > 1 {
            self.sizes.insert((size - 1, domain));
        }
        self.nodes.get_mut(&(usize::MAX - domain)).and_then(Vec::pop)
    }

    fn is_empty(&self) -> bool {
        self.sizes.is_empty()
    }
}

#[cfg(test)]
mod tests;
