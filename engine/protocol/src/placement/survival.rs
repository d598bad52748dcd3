//! Survival of a placement: how many ways to lose one, two or three nodes lose data, and the worst of them.
//!
//! Owns: the counts, exact for any number of nodes, and the examples. Does not own: the placement (`mod`).
//!
//! A node's data is lost together with it and its partner. A loss of k nodes is therefore harmless if no two of them are
//! neighbours in a circle. A circle of n has n/(n−k) · C(n−k, k) such choices, and the choices of several circles are
//! multiplied like polynomials. The cost is one step a circle.

use super::{Candidate, Placement};
use crate::id::NodeName;
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of lost nodes that are counted.
const LOST_MAX: usize = 3;

/// All ways to lose a number of nodes at once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loss {
    pub lost: usize,
    /// Number of ways to lose so many; 0 if there are fewer nodes.
    pub combinations: u64,
    /// Number of ways that lose data which is not in Tier-3.
    pub fatal: u64,
    /// The nodes of a way that loses the most; empty if none loses any.
    pub worst: Vec<NodeName>,
    /// Nodes whose data that way loses.
    pub worst_loses: Vec<NodeName>,
}

/// All ways to lose one failure domain whole.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainSurvival {
    /// `rack`, or the label that the settings name.
    pub label: String,
    /// Number of domains, including nodes that share the label's value with no other.
    pub domains: u64,
    pub fatal: u64,
    /// The domain that loses the most nodes' data; none if none loses any.
    pub worst: Option<String>,
    pub worst_loses: u64,
}

/// Survival of a placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Survival {
    /// Losses of one, two and three nodes.
    pub losses: Vec<Loss>,
    /// None if no node has the label.
    pub domains: Option<DomainSurvival>,
}

/// Counts the losses. `members` are needed only for the label that the placement's scope names.
#[must_use]
pub fn survival(placement: &Placement, members: &[Candidate]) -> Survival {
    let sizes: Vec<u64> = placement.circles().iter().map(|circle| circle.len() as u64).collect();
    let harmless = harmless(&sizes);
    let nodes = sizes.iter().sum();
    let few = few_of_each(placement);
    let loss = |lost: usize| {
        let combinations = choose(nodes, lost);
        let worst = worst(&few, lost);
        Loss {
            lost,
            combinations: narrow(combinations),
            fatal: narrow(combinations.saturating_sub(harmless[lost])),
            worst_loses: losing(&worst).into_iter().cloned().collect(),
            worst: worst.into_iter().map(|(node, _)| node.clone()).collect(),
        }
    };
    Survival { losses: (1..=LOST_MAX).map(loss).collect(), domains: domains(placement, members) }
}

/// Returns, for 0 to [`LOST_MAX`] lost nodes, how many choices lose no data.
fn harmless(sizes: &[u64]) -> [u128; LOST_MAX + 1] {
    let mut all: [u128; LOST_MAX + 1] = [1, 0, 0, 0];
    for size in sizes {
        let circle = harmless_in_circle(u128::from(*size));
        let mut product = [0_u128; LOST_MAX + 1];
        for (i, left) in all.iter().enumerate() {
            for (j, right) in circle.iter().enumerate().take(LOST_MAX + 1 - i) {
                product[i + j] = product[i + j].saturating_add(left.saturating_mul(*right));
            }
        }
        all = product;
    }
    all
}

/// Returns the same for one circle.
fn harmless_in_circle(n: u128) -> [u128; LOST_MAX + 1] {
    match n {
        0 | 1 => [1, 0, 0, 0],
        2 => [1, 2, 0, 0],
        3 => [1, 3, 0, 0],
        _ => [1, n, n * (n - 3) / 2, n * (n - 4) * n.saturating_sub(5) / 6],
    }
}

fn choose(n: u64, k: usize) -> u128 {
    let n = u128::from(n);
    match k {
        1 => n,
        2 => n * n.saturating_sub(1) / 2,
        3 => n * n.saturating_sub(1) * n.saturating_sub(2) / 6,
        _ => 0,
    }
}

fn narrow(count: u128) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// A node, and the node that keeps its copies.
type Link<'a> = (&'a NodeName, Option<&'a NodeName>);

/// Returns the lost nodes whose data is lost: their partner is lost too, or they have none.
fn losing<'a>(lost: &[Link<'a>]) -> Vec<&'a NodeName> {
    let is_lost = |node: &NodeName| lost.iter().any(|(other, _)| *other == node);
    lost.iter().filter(|(_, partner)| partner.is_none_or(is_lost)).map(|(node, _)| *node).collect()
}

/// Returns enough nodes to find the worst loss among. The worst loss is one whole circle of its size, and then
/// neighbours in a longer circle. No loss of [`LOST_MAX`] can contain more of a kind.
fn few_of_each(placement: &Placement) -> Vec<Link<'_>> {
    let mut few = vec![];
    for (least, most, circles) in [(1, 1, LOST_MAX), (2, 2, 2), (3, 3, 1), (4, usize::MAX, 1)] {
        let fits = |circle: &&Vec<NodeName>| (least..=most).contains(&circle.len());
        for circle in placement.circles().iter().filter(fits).take(circles) {
            let partner = |at: usize| (circle.len() > 1).then(|| &circle[(at + 1) % circle.len()]);
            few.extend(circle.iter().enumerate().take(LOST_MAX).map(|(at, node)| (node, partner(at))));
        }
    }
    few
}

/// Returns the first choice of `lost` nodes among `few` that loses the most; empty if none loses any.
fn worst<'a>(few: &[Link<'a>], lost: usize) -> Vec<Link<'a>> {
    let mut best: (usize, Vec<Link<'a>>) = (0, vec![]);
    let mut stack: Vec<(usize, Vec<Link<'a>>)> = vec![(0, vec![])];
    while let Some((from, chosen)) = stack.pop() {
        if chosen.len() < lost {
            for at in (from..few.len()).rev() {
                let mut more = chosen.clone();
                more.push(few[at]);
                stack.push((at + 1, more));
            }
            continue;
        }
        let count = losing(&chosen).len();
        if count > best.0 {
            best = (count, chosen);
        }
    }
    best.1
}

fn domains(placement: &Placement, members: &[Candidate]) -> Option<DomainSurvival> {
    let label = placement.rules.scope.label();
    let domain: BTreeMap<&NodeName, &str> =
        members.iter().filter_map(|member| Some((&member.name, member.labels.get(label)?))).collect();
    if domain.is_empty() {
        return None;
    }
    let mut losing: BTreeMap<&str, u64> = BTreeMap::new();
    let mut own = 0;
    let mut own_fatal: BTreeSet<&NodeName> = BTreeSet::new();
    for (node, partner) in placement.partners() {
        let mine = domain.get(node);
        let lost = partner.is_none_or(|partner| mine.is_some() && domain.get(partner) == mine);
        match mine {
            Some(mine) => *losing.entry(mine).or_default() += u64::from(lost),
            None => {
                own += 1;
                if lost {
                    own_fatal.insert(node);
                }
            }
        }
    }
    let worst = losing.iter().max_by_key(|(name, lost)| (**lost, std::cmp::Reverse(**name)));
    let worst = worst.filter(|(_, lost)| **lost > 0).map(|(name, lost)| ((*name).to_owned(), *lost));
    let worst = worst.or_else(|| own_fatal.first().map(|node| (node.to_string(), 1)));
    let fatal = losing.values().filter(|lost| **lost > 0).count() + own_fatal.len();
    Some(DomainSurvival {
        label: label.to_owned(),
        domains: losing.len() as u64 + own,
        fatal: fatal as u64,
        worst_loses: worst.as_ref().map_or(0, |(_, lost)| *lost),
        worst: worst.map(|(name, _)| name),
    })
}
