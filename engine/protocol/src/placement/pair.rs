//! Circles of two, and one of three if the number is odd; partners are in different domains wherever possible.
//!
//! Owns: which nodes are paired, and which pairs are parted for that. Does not own: one circle of all (`ring`).
//!
//! With an even number the result has as few pairs inside one domain as possible, for the reason that `ring` gives.
//! While two nodes of a domain D are paired and D has at most half of the nodes, some pair without D exists to
//! exchange with.

use super::ByDomain;
use std::collections::BTreeMap;

/// Makes the circles over the rest of the former ones and `new`.
pub(super) fn arrange(kept: Vec<Vec<usize>>, new: Vec<usize>, domains: &[usize]) -> Vec<Vec<usize>> {
    let mut pairs = Pairs { pairs: vec![], three: None, domains };
    let mut single = new;
    for circle in kept {
        match circle.as_slice() {
            [a, b, c] if pairs.three.is_none() => pairs.three = Some([*a, *b, *c]),
            _ => {
                for part in circle.chunks(2) {
                    match part {
                        [a, b] => pairs.pairs.push([*a, *b]),
                        _ => single.extend(part),
                    }
                }
            }
        }
    }
    single.sort_unstable();
    pairs.marry(&single);
    pairs.exchange();
    pairs.finish()
}

struct Pairs<'a> {
    pairs: Vec<[usize; 2]>,
    /// a → b → c → a.
    three: Option<[usize; 3]>,
    domains: &'a [usize],
}

impl Pairs<'_> {
    fn is_bad(&self, [a, b]: [usize; 2]) -> bool {
        self.domains[a] == self.domains[b]
    }

    /// Returns how many of the three have their partner in their own domain.
    fn bad_of_three(&self, [a, b, c]: [usize; 3]) -> usize {
        [[a, b], [b, c], [c, a]].into_iter().filter(|edge| self.is_bad(*edge)).count()
    }

    fn has(&self, pair: [usize; 2], domain: usize) -> bool {
        pair.iter().any(|node| self.domains[*node] == domain)
    }

    /// Gives a partner to each node without one.
    fn marry(&mut self, single: &[usize]) {
        let mut single = ByDomain::of(single, self.domains);
        let mut left = vec![];
        while let Some(a) = single.take(None) {
            match single.take(Some(self.domains[a])) {
                Some(b) => self.pairs.push([a, b]),
                None => left.push(a),
            }
        }
        // The nodes left are of one domain. Two of them part a pair without that domain; pairs inside one domain are
        // parted first.
        let mut pairs = std::mem::take(&mut self.pairs);
        pairs.sort_by_key(|pair| !self.is_bad(*pair));
        self.pairs = pairs;
        let odd = if left.len() % 2 == 1 { left.pop() } else { None };
        let parted = self.pairs.len();
        let mut at = 0;
        for two in left.chunks_exact(2) {
            let domain = self.domains[two[0]];
            while at < parted && self.has(self.pairs[at], domain) {
                at += 1;
            }
            if at < parted {
                let [c, d] = self.pairs[at];
                self.pairs[at] = [two[0], c];
                self.pairs.push([two[1], d]);
            } else {
                self.pairs.push([two[0], two[1]]);
            }
        }
        if let Some(odd) = odd {
            self.marry_odd(odd);
        }
    }

    /// Joins the last node to the circle of three, which becomes two pairs, or makes a circle of three.
    fn marry_odd(&mut self, odd: usize) {
        if let Some([a, b, c]) = self.three.take() {
            // Chooses the node of the three that pairs with it, so that the fewest pairs lie in one domain.
            let choices = [(a, [b, c]), (b, [c, a]), (c, [a, b])];
            let bad = |(out, rest): &(usize, [usize; 2])| {
                usize::from(self.is_bad([odd, *out])) + usize::from(self.is_bad(*rest))
            };
            if let Some((out, rest)) = choices.into_iter().min_by_key(bad) {
                self.pairs.push([odd, out]);
                self.pairs.push(rest);
            }
            return;
        }
        // Prefers a pair whose two domains differ from this node's and from each other; a bad pair if that gains more.
        let good = |[a, b]: &[usize; 2]| self.bad_of_three([*a, *b, odd]) == 0;
        let at = self.pairs.iter().position(good);
        let gained = |at: &usize| {
            let [a, b] = self.pairs[*at];
            2 * usize::from(self.is_bad([a, b])) + 3 - self.bad_of_three([a, b, odd])
        };
        match at.or_else(|| (0..self.pairs.len()).max_by_key(gained)) {
            Some(at) => {
                let [a, b] = self.pairs.swap_remove(at);
                self.three = Some([a, b, odd]);
            }
            None => self.pairs.push([odd, odd]),
        }
    }

    /// Parts pairs within one domain by an exchange with a pair that has none of it.
    fn exchange(&mut self) {
        let mut bad: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (at, pair) in self.pairs.iter().enumerate().filter(|(_, pair)| self.is_bad(**pair)) {
            if pair[0] != pair[1] {
                bad.entry(self.domains[pair[0]]).or_default().push(at);
            }
        }
        // Pairs that are bad themselves are mended by the same exchange.
        let others: Vec<usize> = bad.values().flatten().copied().chain(0..self.pairs.len()).collect();
        for (domain, pairs) in bad {
            let mut others = others.iter().copied();
            for at in pairs.into_iter().filter(|at| self.is_bad(self.pairs[*at])).collect::<Vec<_>>() {
                if let Some(other) = others.find(|other| !self.has(self.pairs[*other], domain)) {
                    let ([a, b], [c, d]) = (self.pairs[at], self.pairs[other]);
                    (self.pairs[at], self.pairs[other]) = ([a, c], [b, d]);
                } else {
                    self.exchange_with_three(at);
                }
            }
        }
        while self.mend_three() {}
    }

    /// Exchanges a node of a pair with one of the three if fewer partners then lie in one domain.
    fn exchange_with_three(&mut self, at: usize) -> bool {
        let Some(three) = self.three else { return false };
        let pair = self.pairs[at];
        let now = 2 * usize::from(self.is_bad(pair)) + self.bad_of_three(three);
        for (mine, theirs) in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
            let (mut pair, mut three) = (pair, three);
            std::mem::swap(&mut pair[mine], &mut three[theirs]);
            if 2 * usize::from(self.is_bad(pair)) + self.bad_of_three(three) < now {
                self.pairs[at] = pair;
                self.three = Some(three);
                return true;
            }
        }
        false
    }

    /// Returns true if one of the three got a better partner. At most three times in a row.
    fn mend_three(&mut self) -> bool {
        let bad = self.three.is_some_and(|three| self.bad_of_three(three) > 0);
        bad && (0..self.pairs.len()).any(|at| self.exchange_with_three(at))
    }

    fn finish(self) -> Vec<Vec<usize>> {
        let one = |[a, b]: [usize; 2]| if a == b { vec![a] } else { vec![a, b] };
        self.pairs.into_iter().map(one).chain(self.three.map(|three| three.to_vec())).collect()
    }
}
