//! Placements by example and by property: partners apart wherever possible, few moves, and counts that agree with
//! brute force.

use super::*;
use crate::label::Label;
use proptest::prelude::*;

fn name(text: &str) -> NodeName {
    text.parse().unwrap()
}

/// Parses a node: `a` has no labels, `a@r1` is in rack r1.
fn candidate(text: &str) -> Candidate {
    let (node, rack) = text.split_once('@').map_or((text, None), |(node, rack)| (node, Some(rack)));
    let labels = rack.map(|rack| Label { key: "rack".into(), value: rack.into() });
    Candidate { name: name(node), labels: Labels::of(labels).unwrap() }
}

fn candidates(text: &str) -> Vec<Candidate> {
    text.split_whitespace().map(candidate).collect()
}

fn rules(scheme: Scheme) -> Rules {
    Rules { scheme, scope: Scope::default() }
}

fn within(scheme: Scheme) -> Rules {
    Rules { scheme, scope: Scope::Within("rack".into()) }
}

fn placed(members: &str, rules: &Rules) -> Placed {
    place(None, &candidates(members), rules, Epoch(7))
}

fn then(before: &Placed, members: &str, rules: &Rules) -> Placed {
    place(Some(&before.placement), &candidates(members), rules, Epoch(7))
}

/// Formats a placement as `a>b>c d>e`.
fn shown(placement: &Placement) -> String {
    let circle = |circle: &Vec<NodeName>| circle.iter().map(NodeName::as_str).collect::<Vec<_>>().join(">");
    placement.circles().iter().map(circle).collect::<Vec<_>>().join(" ")
}

fn moved(placed: &Placed) -> Vec<(&str, Because)> {
    placed.moves.iter().map(|moved| (moved.node.as_str(), moved.because)).collect()
}

fn notes(placed: &Placed) -> Vec<String> {
    placed.notes.iter().map(Note::to_string).collect()
}

#[test]
fn without_labels_a_ring_is_the_order_of_the_names_and_pairs_are_neighbours() {
    assert_eq!(shown(&placed("c a d b", &rules(Scheme::Ring)).placement), "a>b>c>d");
    assert_eq!(shown(&placed("c a d b", &rules(Scheme::Pair)).placement), "a>b c>d");
    let odd = placed("a b c d e", &rules(Scheme::Pair));
    assert_eq!(shown(&odd.placement), "a>b>e c>d");
    assert_eq!(odd.placement.partner_of(&name("e")), Some(&name("a")));
    assert_eq!(odd.placement.ward_of(&name("a")), Some(&name("e")));
    assert!(odd.notes.is_empty(), "{:?}", odd.notes);
}

#[test]
fn one_node_has_no_partner_and_two_have_each_other() {
    for scheme in [Scheme::Ring, Scheme::Pair] {
        let none = placed("", &rules(scheme));
        assert_eq!((none.placement.nodes(), none.moves.len()), (0, 0));
        let one = placed("a", &rules(scheme));
        assert_eq!(shown(&one.placement), "a");
        assert_eq!(one.placement.partner_of(&name("a")), None);
        let alone = "node a has no partner: nothing that it saves is replicated; add a node";
        assert_eq!(notes(&one), [alone]);
        let two = then(&one, "a b", &rules(scheme));
        assert_eq!(shown(&two.placement), "a>b");
        assert_eq!(two.placement.partner_of(&name("b")), Some(&name("a")));
        assert_eq!(moved(&two), [("a", Because::Better), ("b", Because::New)]);
        let back = then(&two, "b", &rules(scheme));
        assert_eq!(moved(&back), [("b", Because::PartnerGone)]);
        assert_eq!(back.moves[0].to, None);
    }
}

#[test]
fn racks_are_kept_apart_and_a_rack_with_most_of_the_nodes_is_told_of() {
    let racks = "a@r1 b@r1 c@r2 d@r2";
    assert_eq!(shown(&placed(racks, &rules(Scheme::Ring)).placement), "a>c>b>d");
    assert_eq!(shown(&placed(racks, &rules(Scheme::Pair)).placement), "a>c b>d");
    let most = placed("a@r1 b@r1 c@r1 d@r2", &rules(Scheme::Ring));
    let expected = "has no partner in another rack: its copies are at";
    assert_eq!(notes(&most).len(), 2);
    assert!(notes(&most).iter().all(|note| note.contains(expected)), "{:?}", notes(&most));
    let unlabelled = placed("a@r1 b c@r2", &rules(Scheme::Ring));
    assert_eq!(
        notes(&unlabelled),
        ["node b has no label rack, and counts as a rack of its own; start it with --label rack=NAME"]
    );
}

#[test]
fn within_a_rack_on_purpose_no_copy_leaves_it() {
    for (scheme, expected) in [(Scheme::Ring, "a>b>c d>e f"), (Scheme::Pair, "a>b>c d>e f")] {
        let placed = placed("a@r1 b@r1 c@r1 d@r2 e@r2 f@r3", &within(scheme));
        assert_eq!(shown(&placed.placement), expected);
        assert_eq!(notes(&placed).len(), 1);
        assert!(notes(&placed)[0].starts_with("node f has no partner in rack r3:"), "{:?}", notes(&placed));
    }
    // A node that moves into another rack leaves its circle.
    let before = placed("a@r1 b@r1 c@r1 d@r2 e@r2", &within(Scheme::Ring));
    let after = then(&before, "a@r1 b@r1 c@r2 d@r2 e@r2", &within(Scheme::Ring));
    assert_eq!(shown(&after.placement), "a>b c>d>e");
    let reasons = moved(&after);
    assert!(
        reasons.contains(&("b", Because::Better)) && reasons.contains(&("c", Because::Better)),
        "{reasons:?}"
    );
}

#[test]
fn a_replacement_takes_the_place_of_the_one_that_left() {
    let ring = placed("a b c d e", &rules(Scheme::Ring));
    let after = then(&ring, "a b d e x", &rules(Scheme::Ring));
    assert_eq!(shown(&after.placement), "a>b>x>d>e");
    assert_eq!(moved(&after), [("b", Because::PartnerGone), ("x", Because::New)]);
    let pair = placed("a b c d", &rules(Scheme::Pair));
    let after = then(&pair, "a b d x", &rules(Scheme::Pair));
    assert_eq!(shown(&after.placement), "a>b d>x");
    assert_eq!(moved(&after), [("d", Because::PartnerGone), ("x", Because::New)]);
}

#[test]
fn a_version_rises_with_each_change_and_with_the_epoch_and_not_otherwise() {
    let first = placed("a b c", &rules(Scheme::Ring));
    assert_eq!(first.placement.version, PlacementVersion { epoch: Epoch(7), number: 1 });
    let same = then(&first, "c b a a", &rules(Scheme::Ring));
    assert_eq!(same.placement, first.placement);
    assert!(same.moves.is_empty());
    let more = then(&same, "a b c d", &rules(Scheme::Ring));
    assert_eq!(more.placement.version, PlacementVersion { epoch: Epoch(7), number: 2 });
    let later = place(Some(&more.placement), &candidates("a b c d"), &rules(Scheme::Ring), Epoch(9));
    assert_eq!(later.placement.version, PlacementVersion { epoch: Epoch(9), number: 1 });
    assert!(later.placement.version > more.placement.version && later.moves.is_empty());
}

#[test]
fn a_placement_from_outside_that_names_a_node_twice_is_refused() {
    let mut placement = placed("a b c d", &rules(Scheme::Pair)).placement;
    assert_eq!(placement.check(), Ok(()));
    let text = serde_json::to_string(&placement).unwrap();
    assert_eq!(serde_json::from_str::<Placement>(&text).unwrap(), placement);
    placement.circles[1][0] = name("a");
    assert_eq!(placement.check(), Err(BadPlacement::Twice { node: name("a") }));
    placement.circles[1].clear();
    assert_eq!(placement.check(), Err(BadPlacement::Empty));
    let many = (0..=MEMBERS_MAX).map(|at| name(&format!("n{at}"))).collect();
    placement.circles = vec![many];
    assert_eq!(placement.check(), Err(BadPlacement::TooMany { found: MEMBERS_MAX + 1 }));
}

#[test]
fn ten_thousand_nodes_in_racks_are_placed_and_few_old_ones_move() {
    let text = |at: usize| format!("n{at}@r{}", at / 32);
    let members: Vec<Candidate> = (0..10_000).map(|at| candidate(&text(at))).collect();
    for scheme in [Scheme::Ring, Scheme::Pair] {
        let first = place(None, &members, &rules(scheme), Epoch(1));
        assert!(first.notes.is_empty(), "{:?}", first.notes.first());
        // A rack is lost, and another one comes.
        let mut others: Vec<Candidate> = members[64..].to_vec();
        others.extend((10_000..10_032).map(|at| candidate(&text(at))));
        let second = place(Some(&first.placement), &others, &rules(scheme), Epoch(1));
        assert!(second.notes.is_empty(), "{:?}", second.notes.first());
        let old = second.moves.iter().filter(|moved| moved.because != Because::New).count();
        assert!(old <= 4 * (64 + 32), "{old} old nodes moved");
        let survival = survival(&second.placement, &others);
        assert_eq!(survival.domains.unwrap().fatal, 0);
    }
}

#[test]
fn the_survival_table_names_the_worst_loss() {
    let ring = placed("a b c d e f", &rules(Scheme::Ring));
    let table = survival(&ring.placement, &candidates("a b c d e f"));
    let counts: Vec<_> = table.losses.iter().map(|loss| (loss.lost, loss.combinations, loss.fatal)).collect();
    assert_eq!(counts, [(1, 6, 0), (2, 15, 6), (3, 20, 18)]);
    assert_eq!(table.losses[1].worst, [name("a"), name("b")]);
    assert_eq!(table.losses[1].worst_loses, [name("a")]);
    assert_eq!(table.losses[2].worst_loses, [name("a"), name("b")]);
    assert_eq!(table.domains, None);
    let pair = placed("a b c d e f", &rules(Scheme::Pair));
    let table = survival(&pair.placement, &[]);
    assert_eq!(table.losses.iter().map(|loss| loss.fatal).collect::<Vec<_>>(), [0, 3, 12]);
    assert_eq!(table.losses[1].worst_loses, [name("a"), name("b")]);
    let one = survival(&placed("a", &rules(Scheme::Ring)).placement, &[]);
    assert_eq!((one.losses[0].fatal, one.losses[1].combinations), (1, 0));
    assert_eq!(one.losses[0].worst, [name("a")]);
    let members = candidates("a@r1 b@r1 c@r1 d@r2");
    let table = survival(&placed("a@r1 b@r1 c@r1 d@r2", &rules(Scheme::Ring)).placement, &members);
    let domains = table.domains.unwrap();
    assert_eq!((domains.domains, domains.fatal, domains.worst_loses), (2, 1, 2));
    assert_eq!(domains.worst.as_deref(), Some("r1"));
}

fn scheme() -> impl Strategy<Value = Scheme> {
    prop_oneof![Just(Scheme::Ring), Just(Scheme::Pair)]
}

/// Generates nodes by number and rack: of few racks, so that some have most of the nodes; 0 is none.
fn members(most: usize) -> impl Strategy<Value = Vec<Candidate>> {
    prop::collection::btree_map(0..20_usize, 0..4_usize, 0..=most).prop_map(|nodes| {
        let one = |(node, rack): (usize, usize)| match rack {
            0 => candidate(&format!("n{node:02}")),
            rack => candidate(&format!("n{node:02}@r{rack}")),
        };
        nodes.into_iter().map(one).collect()
    })
}

fn rack(members: &[Candidate], node: &NodeName) -> Option<String> {
    let member = members.iter().find(|member| member.name == *node).expect("a placed node is a member");
    member.labels.get("rack").map(str::to_owned)
}

/// Counts nodes whose partner is in their own rack.
fn misplaced(placement: &Placement, members: &[Candidate]) -> usize {
    let is_bad = |(node, partner): &(&NodeName, Option<&NodeName>)| {
        partner.is_some_and(|partner| {
            rack(members, node).is_some() && rack(members, node) == rack(members, partner)
        })
    };
    placement.partners().iter().filter(|(node, partner)| is_bad(&(*node, **partner))).count()
}

/// Returns how many nodes are in the largest rack.
fn largest(members: &[Candidate]) -> usize {
    let mut sizes: BTreeMap<&str, usize> = BTreeMap::new();
    members.iter().filter_map(|member| member.labels.get("rack")).for_each(|rack| {
        *sizes.entry(rack).or_default() += 1;
    });
    sizes.into_values().max().unwrap_or(0)
}

/// Returns, by trying all, the fewest misplaced nodes that pairs can have, with one circle of three for an odd
/// number.
fn fewest(racks: &[Option<String>], three_left: bool) -> usize {
    let Some((first, rest)) = racks.split_first() else { return 0 };
    let same = |a: &Option<String>, b: &Option<String>| usize::from(a.is_some() && a == b);
    let without = |out: &[usize]| -> Vec<Option<String>> {
        rest.iter().enumerate().filter(|(at, _)| !out.contains(at)).map(|(_, rack)| rack.clone()).collect()
    };
    let mut best = usize::MAX;
    for i in 0..rest.len() {
        if rest.len() != 2 || !three_left {
            best = best.min((2 * same(first, &rest[i])).saturating_add(fewest(&without(&[i]), three_left)));
        }
        for j in (i + 1..rest.len()).filter(|_| three_left) {
            let bad = same(first, &rest[i]) + same(&rest[i], &rest[j]) + same(&rest[j], first);
            best = best.min(bad.saturating_add(fewest(&without(&[i, j]), false)));
        }
    }
    if rest.is_empty() { 0 } else { best }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn every_member_has_one_partner_and_is_one_nodes_partner(
        before in members(12), after in members(12), was in scheme(), scheme in scheme(), inside: bool, was_inside: bool,
    ) {
        let make = |scheme, inside| if inside { within(scheme) } else { rules(scheme) };
        let first = place(None, &before, &make(was, was_inside), Epoch(1));
        let second = place(Some(&first.placement), &after, &make(scheme, inside), Epoch(1));
        prop_assert_eq!(second.placement.check(), Ok(()));
        let partners = second.placement.partners();
        prop_assert!(partners.keys().copied().eq(after.iter().map(|member| &member.name)));
        let kept: BTreeSet<_> = partners.values().flatten().collect();
        prop_assert_eq!(kept.len(), partners.values().flatten().count());
        for circle in second.placement.circles() {
            if inside {
                prop_assert!(circle.iter().all(|node| rack(&after, node) == rack(&after, &circle[0])));
            }
            if scheme == Scheme::Pair {
                prop_assert!(circle.len() <= 3);
            }
        }
        let groups: BTreeSet<_> = after.iter().map(|member| member.labels.get("rack")).collect();
        let threes = second.placement.circles().iter().filter(|circle| circle.len() == 3).count();
        match (scheme, inside) {
            (Scheme::Ring, false) => prop_assert!(second.placement.circles().len() <= 1),
            (Scheme::Ring, true) => prop_assert_eq!(second.placement.circles().len(), groups.len()),
            (Scheme::Pair, false) => prop_assert_eq!(threes, usize::from(after.len() % 2 == 1 && after.len() > 1)),
            (Scheme::Pair, true) => prop_assert!(threes <= groups.len()),
        }
        // The moves are exactly the differences, and a second call changes nothing.
        let old = first.placement.partners();
        let moved: BTreeSet<_> = second.moves.iter().map(|moved| &moved.node).collect();
        for (node, partner) in &partners {
            prop_assert_eq!(moved.contains(*node), old.get(*node) != Some(partner));
        }
        let again = place(Some(&second.placement), &after, &make(scheme, inside), Epoch(1));
        prop_assert_eq!(again.placement, second.placement);
    }

    #[test]
    fn no_ring_has_fewer_nodes_with_their_partner_in_their_own_rack(before in members(12), after in members(12)) {
        let first = place(None, &before, &rules(Scheme::Ring), Epoch(1));
        let second = place(Some(&first.placement), &after, &rules(Scheme::Ring), Epoch(1));
        for (placed, members) in [(&first, &before), (&second, &after)] {
            let least = (2 * largest(members)).saturating_sub(members.len());
            let least = if members.len() == 1 { 0 } else { least };
            prop_assert_eq!(misplaced(&placed.placement, members), least);
            let told = placed.notes.iter().filter(|note| matches!(note, Note::SameDomain { .. })).count();
            prop_assert_eq!(told, least);
        }
    }

    #[test]
    fn no_pairs_have_fewer_nodes_with_their_partner_in_their_own_rack(before in members(9), after in members(9)) {
        let first = place(None, &before, &rules(Scheme::Pair), Epoch(1));
        let second = place(Some(&first.placement), &after, &rules(Scheme::Pair), Epoch(1));
        for (placed, members) in [(&first, &before), (&second, &after)] {
            let racks: Vec<_> = members.iter().map(|member| member.labels.get("rack").map(str::to_owned)).collect();
            let least = fewest(&racks, racks.len() % 2 == 1);
            prop_assert_eq!(misplaced(&placed.placement, members), least);
        }
    }

    #[test]
    fn one_join_or_leave_moves_few_old_copies(
        before in members(14), who in 0..20_usize, to in 0..4_usize, scheme in scheme(), labelled: bool,
    ) {
        let plain = |members: Vec<Candidate>| -> Vec<Candidate> {
            if labelled { return members }
            members.into_iter().map(|member| Candidate { labels: Labels::default(), ..member }).collect()
        };
        let before = plain(before);
        let first = place(None, &before, &rules(scheme), Epoch(1));
        let mut after = before.clone();
        let one = candidate(&format!("n{who:02}@r{to}"));
        after.retain(|member| member.name != one.name);
        if after.len() == before.len() {
            after.extend(plain(vec![one]));
        }
        let second = place(Some(&first.placement), &after, &rules(scheme), Epoch(1));
        let old = second.moves.iter().filter(|moved| moved.because != Because::New).count();
        let most = match (scheme, labelled) {
            (Scheme::Ring, false) => 1,
            (Scheme::Pair, false) => 3,
            // Adds an exchange, if a join or leave made two nodes of one rack neighbours.
            (Scheme::Ring, true) => 1 + 3,
            (Scheme::Pair, true) => 3 + 4,
        };
        prop_assert!(old <= most, "{} moved: {:?}", old, second.moves);
    }

    #[test]
    fn survival_agrees_with_losing_every_combination(nodes in members(9), scheme in scheme(), inside: bool) {
        let rules = if inside { within(scheme) } else { rules(scheme) };
        let placement = place(None, &nodes, &rules, Epoch(1)).placement;
        let table = survival(&placement, &nodes);
        let partners = placement.partners();
        let losing = |lost: &[&NodeName]| {
            lost.iter().filter(|node| partners[**node].is_none_or(|partner| lost.contains(&partner))).count()
        };
        for loss in &table.losses {
            let (mut combinations, mut fatal, mut most) = (0, 0, 0);
            for choice in 0_u32..1 << nodes.len() {
                let lost: Vec<_> =
                    nodes.iter().enumerate().filter(|(at, _)| choice >> at & 1 == 1).map(|(_, node)| &node.name).collect();
                if lost.len() == loss.lost {
                    let data = losing(&lost);
                    combinations += 1;
                    fatal += u64::from(data > 0);
                    most = most.max(data);
                }
            }
            prop_assert_eq!((loss.combinations, loss.fatal), (combinations, fatal));
            prop_assert_eq!(loss.worst_loses.len(), most);
            prop_assert_eq!(losing(&loss.worst.iter().collect::<Vec<_>>()), most);
        }
        if let Some(domains) = &table.domains {
            let mut racks: BTreeMap<String, Vec<&NodeName>> = BTreeMap::new();
            for node in &nodes {
                let rack = node.labels.get("rack").map_or_else(|| format!("-{}", node.name), str::to_owned);
                racks.entry(rack).or_default().push(&node.name);
            }
            let lost: Vec<usize> = racks.values().map(|rack| losing(rack)).collect();
            prop_assert_eq!(domains.domains, racks.len() as u64);
            prop_assert_eq!(domains.fatal, lost.iter().filter(|lost| **lost > 0).count() as u64);
            prop_assert_eq!(domains.worst_loses, lost.into_iter().max().unwrap_or(0) as u64);
        }
    }
}
