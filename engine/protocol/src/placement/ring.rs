//! A single circle of all nodes, with neighbours in different domains wherever possible.
//!
//! Owns: where new nodes are inserted, and which nodes move elsewhere. Does not own: circles of two (`pair`).
//!
//! The repair finds the best circle. Let domain D have d of n nodes, two of them neighbours. Then at most 2d − 1 edges
//! touch D. With d ≤ n/2 that is less than n, so the ends of some edge are both outside D. There, one of the two
//! neighbours fits in: one bad edge less, none more. With d > n/2 the same goes on until every edge touches D. Then 2d −
//! n edges are inside D, and no circle can have fewer.

use super::ByDomain;
use std::collections::BTreeMap;

/// Makes the circle over the rest of the former ones, joined in their order, and `new`.
pub(super) fn arrange(
    kept: Vec<Vec<usize>>,
    new: Vec<usize>,
    domains: &[usize],
    before: &[Option<usize>],
) -> Vec<usize> {
    let order: Vec<usize> = kept.into_iter().flatten().collect();
    let mut new = ByDomain::of(&new, domains);
    let order = if order.is_empty() { block(&mut new, domains) } else { order };
    let Some(&first) = order.first() else { return vec![] };
    let mut circle = Circle::of(&order, domains, before);
    // A new node does the most good between two nodes of one domain.
    for &node in &order {
        if circle.is_bad(node)
            && let Some(taken) = new.take(Some(domains[node]))
        {
            circle.insert(taken, node);
        }
    }
    // Inserts the rest in one place, since that changes one partner only.
    if !new.is_empty() {
        let block = block(&mut new, domains);
        let (head, tail) = (block[0], block[block.len() - 1]);
        let fits =
            |node: &usize| domains[*node] != domains[head] && domains[circle.next[*node]] != domains[tail];
        // If a partner changes anyhow, no further copy moves.
        let changed: Vec<usize> = order.iter().copied().filter(|node| circle.is_changed(*node)).collect();
        let place = changed.iter().copied().find(fits).or_else(|| order.iter().copied().rev().find(fits));
        let mut place = place.or_else(|| changed.first().copied()).unwrap_or(order[order.len() - 1]);
        for node in block {
            circle.insert(node, place);
            place = node;
        }
    }
    circle.repair(first);
    circle.list(first)
}

/// Takes all nodes, without two neighbours of one domain while another domain is left.
fn block(new: &mut ByDomain, domains: &[usize]) -> Vec<usize> {
    let mut block = vec![];
    let mut last = None;
    while let Some(node) = new.take(last).or_else(|| new.take(None)) {
        last = Some(domains[node]);
        block.push(node);
    }
    block
}

struct Circle<'a> {
    next: Vec<usize>,
    previous: Vec<usize>,
    domains: &'a [usize],
    before: &'a [Option<usize>],
}

impl<'a> Circle<'a> {
    fn of(order: &[usize], domains: &'a [usize], before: &'a [Option<usize>]) -> Self {
        let (mut next, mut previous) = (vec![0; domains.len()], vec![0; domains.len()]);
        for (at, node) in order.iter().enumerate() {
            let after = order[(at + 1) % order.len()];
            next[*node] = after;
            previous[after] = *node;
        }
        Self { next, previous, domains, before }
    }

    /// Whether the node's partner is in its own domain.
    fn is_bad(&self, node: usize) -> bool {
        let next = self.next[node];
        node != next && self.domains[node] == self.domains[next]
    }

    /// Whether the node has another partner than before.
    fn is_changed(&self, node: usize) -> bool {
        self.before[node] != Some(self.next[node])
    }

    fn insert(&mut self, node: usize, after: usize) {
        let next = self.next[after];
        (self.next[after], self.previous[node]) = (node, after);
        (self.next[node], self.previous[next]) = (next, node);
    }

    fn remove(&mut self, node: usize) {
        let (previous, next) = (self.previous[node], self.next[node]);
        (self.next[previous], self.previous[next]) = (next, previous);
    }

    fn list(&self, first: usize) -> Vec<usize> {
        let mut all = vec![first];
        while let Some(&last) = all.last()
            && self.next[last] != first
        {
            all.push(self.next[last]);
        }
        all
    }

    /// Moves one of two neighbours of one domain to a place where neither neighbour is of that domain, as long as there
    /// is such a place.
    fn repair(&mut self, first: usize) {
        let order = self.list(first);
        let mut bad: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for node in order.iter().copied().filter(|node| self.is_bad(*node)) {
            bad.entry(self.domains[node]).or_default().push(node);
        }
        // Orders places by their benefit: first two bad edges mended at once, then no further partner changed, then the
        // others.
        let mut places: Vec<usize> = bad.values().flatten().copied().collect();
        places.extend(order.iter().copied().filter(|node| self.is_changed(*node)));
        places.extend(&order);
        for (domain, nodes) in bad {
            // While nodes of one domain are moved, no place becomes free of it. Places that were skipped stay skipped: at
            // most two for each node of the domain.
            let mut free = places.iter().copied();
            for node in nodes {
                while self.is_bad(node) {
                    let taken = if self.is_better_taken(node) { node } else { self.next[node] };
                    let fits = |place: &usize| {
                        self.domains[*place] != domain && self.domains[self.next[*place]] != domain
                    };
                    let Some(place) = free.find(fits) else { break };
                    self.remove(taken);
                    self.insert(taken, place);
                }
            }
        }
    }

    /// Whether, of a node and its partner in one domain, the node itself should move: its own partner changes anyhow and
    /// the other's does not.
    fn is_better_taken(&self, node: usize) -> bool {
        self.is_changed(node) && !self.is_changed(self.next[node])
    }
}
