//! Changes of names, published to other nodes and received from them, over the end of a daemon.
//!
//! Does not own: which node is notified when (`engine::cluster`), several daemons (the `cluster` suite).

use super::{folder, tier1};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidemark_engine::cluster::state_of;
use tidemark_namespace::{Caller, Namespace, NamespaceSettings, OutgoingBody, Question, ROOT};
use tidemark_protocol::cluster::wire::{NameOperation, NodeAttributes, NodeKind, NodeState};
use tidemark_protocol::id::{Epoch, FileCounter, FileId, Incarnation};
use tidemark_protocol::key::NodeLife;
use tidemark_tier1::Tier1;

const ME: Caller = Caller { uid: 1, gid: 1, pid: 0, now_ns: 1, request: 0 };
/// Size of the journal, so small that it is rewritten after some hundred changes.
const JOURNAL_BYTES: u64 = 256 << 10;

struct Node {
    _folder: tempfile::TempDir,
    tier1: Arc<Tier1>,
    settings: NamespaceSettings,
    namespace: Arc<Namespace>,
}

impl Node {
    fn new() -> Self {
        let folder = folder();
        let tier1 = tier1(folder.path());
        let settings = NamespaceSettings {
            journal_bytes: Some(JOURNAL_BYTES),
            ..NamespaceSettings::new(Incarnation(7))
        };
        let namespace = Namespace::new(settings.clone(), Arc::clone(&tier1)).unwrap();
        Self { _folder: folder, tier1, settings, namespace }
    }

    /// Ends the daemon without a report, and lets another take over.
    fn take_over(&mut self) {
        let (settings, tier1) = (self.settings.clone(), Arc::clone(&self.tier1));
        self.namespace = Namespace::recover(settings, tier1, true, &mut |_| None).unwrap();
    }

    /// Makes changes that are not published, until the journal was rewritten some times.
    fn fill_the_journal(&self) {
        for number in 0..2000_u64 {
            let value = number.to_le_bytes().repeat(64);
            self.namespace.xattrs().setxattr(ROOT, b"user.n", &value, 0, &ME).unwrap();
        }
    }

    fn names(&self) -> Vec<Vec<u8>> {
        self.namespace.names().readdir(ROOT, 0).unwrap().into_iter().map(|entry| entry.name).collect()
    }
}

fn removed(path: &str) -> NameOperation {
    NameOperation::Removed { path: path.as_bytes().to_vec(), what: None }
}

/// Goal: a publication in flight when its daemon was killed is sent again unchanged. Later changes follow under the next
/// number, however often the journal was rewritten. Answered publications are not sent again.
#[test]
fn what_is_told_of_names_outlives_the_daemon() {
    let mut node = Node::new();
    node.namespace.publications().collect_outgoing();
    for name in ["a", "b"] {
        node.namespace.names().mkdir(&ME, ROOT, name.as_bytes(), 0o755).unwrap();
    }
    let first = node.namespace.publications().take_outgoing(9, usize::MAX, false);
    assert_eq!((first.number, first.operations.len()), (1, 2));
    node.namespace.publications().publication_answered();
    node.namespace.names().rmdir(&ME, ROOT, b"a").unwrap();
    let second = node.namespace.publications().take_outgoing(9, usize::MAX, false);
    assert_eq!((second.number, &second.operations), (2, &vec![removed("a")]));
    node.namespace.names().rmdir(&ME, ROOT, b"b").unwrap();
    for filled in [false, true] {
        if filled {
            node.fill_the_journal();
        }
        node.take_over();
        assert_eq!(
            node.namespace.publications().unanswered_publication(),
            Some((2, vec![removed("a")])),
            "filled: {filled}"
        );
        assert_eq!(node.namespace.publications().lost_operations(), None);
    }
    node.namespace.publications().publication_answered();
    let third = node.namespace.publications().take_outgoing(9, usize::MAX, false);
    assert_eq!((third.number, third.operations), (3, vec![removed("b")]));
    node.take_over();
    // The second publication was answered, the third was not.
    assert_eq!(node.namespace.publications().unanswered_publication(), Some((3, vec![removed("b")])));
    assert_eq!(
        (node.namespace.publications().last_answered(), node.namespace.publications().last_publication()),
        (2, 3)
    );
}

/// Goal: a coordinator that is killed in the middle of a publication carries out no operation twice when the publication comes again, and
/// knows how far each life is. A second create, below, would give the file its old name back.
#[test]
fn what_others_told_is_carried_out_once() {
    let mut node = Node::new();
    let life = NodeLife { node: "n2".parse().unwrap(), incarnation: Incarnation(8) };
    let file = FileId { incarnation: life.incarnation, counter: FileCounter(5) };
    let path = |name: &str| name.as_bytes().to_vec();
    let attributes = NodeAttributes { mode: 0o644, ..NodeAttributes::default() };
    let directory = NameOperation::Directory { path: path("d"), attributes: attributes.clone() };
    let moved = NameOperation::Renamed { from: path("d"), to: path("e"), exchange: false, what: None };
    let made = NameOperation::File { path: path("f"), file, attributes };
    let renamed =
        NameOperation::Renamed { from: path("f"), to: path("g"), exchange: false, what: Some(file) };
    let operations = [directory, moved, made, renamed];
    node.namespace.catalog().becomes_catalog_of(Some(Epoch(3)), &BTreeMap::from([(life.clone(), 6)]), false);
    node.namespace.mirror().follow(&operations, &life, 7);
    let names = node.names();
    assert_eq!(names, [b"e", b"g"]);
    node.take_over();
    assert_eq!(node.namespace.catalog().catalog_of(), Some(Epoch(3)));
    assert_eq!(
        node.namespace.catalog().heard_publications(),
        BTreeMap::from([(life.clone(), 6)]),
        "its states are missing"
    );
    node.namespace.mirror().follow(&operations, &life, 7);
    assert_eq!(node.names(), names);
    node.namespace.catalog().took_publication(&life, 7);
    node.fill_the_journal();
    node.take_over();
    assert_eq!(node.namespace.catalog().heard_publications(), BTreeMap::from([(life, 7)]));
    node.namespace.catalog().is_catalog_no_more();
    node.take_over();
    assert_eq!(
        (node.namespace.catalog().catalog_of(), node.namespace.catalog().heard_publications()),
        (None, BTreeMap::new())
    );
}

/// Goal: a coordinator makes names while only its own node keeps its tree. No operations record these names, so they count as kept
/// elsewhere only once the whole tree is. If the coordinator loses its role before that, it knows that it must publish everything, also
/// after the end of its daemon.
#[test]
fn what_was_made_while_nobody_kept_the_tree_is_told_with_all_of_it() {
    let mut node = Node::new();
    node.namespace.publications().collect_outgoing();
    node.namespace.publications().lead_outgoing(false);
    node.namespace.names().mkdir(&ME, ROOT, b"before", 0o755).unwrap();
    assert!(node.namespace.publications().untold_operations().is_empty());
    for taken_over in [false, true] {
        if taken_over {
            node.take_over();
        }
        assert!(
            node.namespace.publications().has_untold()
                && node.namespace.publications().lost_operations().is_some(),
            "{taken_over}"
        );
        assert!(node.namespace.standing().whole_tree().iter().any(|told| told.path == b"before"));
    }
    // The order of `Keeper::keep_after`.
    node.namespace.publications().lead_outgoing(true);
    node.namespace.names().mkdir(&ME, ROOT, b"between", 0o755).unwrap();
    node.namespace.catalog().remember_removed(&[], true);
    node.namespace.catalog().collect_unkept(true);
    node.namespace.names().mkdir(&ME, ROOT, b"after", 0o755).unwrap();
    let part = node.namespace.catalog().take_unkept(1, usize::MAX);
    assert!(!part.all && node.namespace.publications().lost_operations().is_some(), "it has a part");
    let rest = node.namespace.catalog().take_unkept(usize::MAX, usize::MAX);
    let told: Vec<_> = part.nodes.iter().chain(&rest.nodes).flat_map(|(_, names)| names).collect();
    let name = |name: &[u8]| (ROOT, name.to_vec());
    assert_eq!(told, [&name(b"before"), &name(b"between"), &name(b"after")]);
    assert!(rest.all);
    node.namespace.publications().kept_until(rest.publication, rest.loss);
    assert!(!node.namespace.publications().has_untold());
}

/// Goal: the record of a name made while a life counts as lost survives the coordinator's daemon, however often the journal was
/// rewritten. Once the life has published everything, or another tree is the catalog, no such record is left.
#[test]
fn what_was_made_while_a_life_was_away_outlives_the_daemon() {
    let mut node = Node::new();
    let life = NodeLife { node: "n2".parse().unwrap(), incarnation: Incarnation(8) };
    let attributes = NodeAttributes { mode: 0o777, ..NodeAttributes::default() };
    let late = |name: &str| NameOperation::Symlink {
        path: name.as_bytes().to_vec(),
        target: b"late".to_vec(),
        attributes: attributes.clone(),
    };
    let target = |node: &Node, name: &str| {
        let found = node.namespace.standing().outgoing_at(name.as_bytes()).expect("it has a name");
        match found.body {
            OutgoingBody::Symlink(target) => target,
            other => panic!("{other:?}"),
        }
    };
    node.namespace.catalog().becomes_catalog_of(Some(Epoch(3)), &BTreeMap::from([(life.clone(), 6)]), true);
    node.namespace.catalog().gives_up(&life);
    node.namespace.names().symlink(&ME, ROOT, b"made", b"stays").unwrap();
    let made = node.namespace.catalog().made_while_away(&life).expect("it is away");
    for filled in [false, true] {
        if filled {
            node.fill_the_journal();
        }
        node.take_over();
        assert_eq!(node.namespace.catalog().made_while_away(&life), Some(made.clone()), "filled: {filled}");
    }
    // The next coordinator is the same node, and that life has published nothing to it: the life counts as lost since then.
    node.namespace.catalog().becomes_catalog_of(Some(Epoch(4)), &BTreeMap::from([(life.clone(), 6)]), true);
    node.namespace.catalog().gives_up(&life);
    node.take_over();
    node.namespace.catalog().is_back(&life);
    node.namespace.names().symlink(&ME, ROOT, b"after", b"old").unwrap();
    node.take_over();
    node.namespace.mirror().follow(&[late("made"), late("after")], &life, 7);
    assert_eq!([target(&node, "made"), target(&node, "after")], [b"stays".to_vec(), b"late".to_vec()]);
    node.namespace.catalog().told_all(&life);
    node.take_over();
    assert_eq!(node.namespace.catalog().made_while_away(&life), None);
    node.namespace.catalog().gives_up(&life);
    node.namespace.catalog().becomes_catalog_of(Some(Epoch(5)), &BTreeMap::new(), false);
    node.take_over();
    assert_eq!(node.namespace.catalog().made_while_away(&life), None, "another tree was the catalog");
}

/// Goal: a node still has an old link, and another node has made a new link of that name. If the node reports its link's state, the new
/// link stays. No record shows any more that the node lost the name, because the node has published everything.
#[test]
fn how_a_link_of_before_stands_wins_no_name_back() {
    let node = Node::new();
    node.namespace.names().symlink(&ME, ROOT, b"link", b"stays").unwrap();
    let stands = |target: &[u8], mtime_ns| NodeState {
        path: b"link".to_vec(),
        attributes_ns: 0,
        other_names: None,
        attributes: NodeAttributes { mode: 0o777, mtime_ns, ..NodeAttributes::default() },
        kind: NodeKind::Symlink { target: target.to_vec() },
    };
    for (target, mtime_ns) in [(b"late".as_slice(), 5), (b"stays".as_slice(), 6)] {
        node.namespace.mirror().take_states(&[stands(target, mtime_ns)], Incarnation(8), false);
        let found = node.namespace.standing().outgoing_at(b"link").expect("it has a name");
        assert!(matches!(&found.body, OutgoingBody::Symlink(target) if target == b"stays"), "{found:?}");
    }
}

/// Goal: answers arrive late. One that was made before this node was let change a name, or a whole directory, does not bring back what was
/// there; one to a later question counts.
#[test]
fn an_answer_from_before_this_node_was_let_change_a_name_says_nothing_of_it() {
    let node = Node::new();
    let tree = &node.namespace;
    tree.publications().collect_outgoing();
    let link = |target: &[u8]| NodeState {
        path: b"link".to_vec(),
        attributes_ns: 0,
        other_names: None,
        attributes: NodeAttributes::default(),
        kind: NodeKind::Symlink { target: target.to_vec() },
    };
    let shows = |target: &[u8]| {
        let found = tree.standing().outgoing_at(b"link");
        found.is_some_and(|found| matches!(found.body, OutgoingBody::Symlink(there) if there == target))
    };
    for is_whole in [false, true] {
        let before = Question::new(tree.publications().names_number(), false);
        let lets = Question { lets: true, ..before };
        if is_whole {
            tree.mirror().settle_directory(b"", &[link(b"now")], lets).unwrap();
        } else {
            tree.mirror().settle_name(b"", b"link", Some(&link(b"now")), lets).unwrap();
        }
        tree.mirror().settle_name(b"", b"link", Some(&link(b"before")), before).unwrap();
        assert!(shows(b"now"), "whole: {is_whole}");
        tree.mirror().settle_directory(b"", &[], before).unwrap();
        assert!(shows(b"now"), "whole: {is_whole}");
        let since = Question::new(tree.publications().names_number(), false);
        tree.mirror().settle_name(b"", b"link", Some(&link(b"since")), since).unwrap();
        assert!(shows(b"since"), "whole: {is_whole}");
    }
}

/// Goal: a file that lost its last name here while a program had it open has a name again once the coordinator says which: another node had
/// renamed it. Its other names were settled, too, when one could not be.
#[test]
fn a_file_that_is_open_without_a_name_gets_the_name_that_it_has_elsewhere() {
    let node = Node::new();
    let tree = &node.namespace;
    let (attr, open) = tree.create(&ME, ROOT, b"x", 0o644, 1).unwrap();
    let mut told = state_of(tree, tree.standing().outgoing_at(b"x").unwrap());
    let life = NodeLife { node: "n2".parse().unwrap(), incarnation: Incarnation(8) };
    let file = tree.nodes().view(attr.node).unwrap().file;
    tree.mirror().follow(&[NameOperation::Removed { path: b"x".to_vec(), what: Some(file) }], &life, 1);
    assert_eq!(node.names(), [] as [Vec<u8>; 0]);
    told.path = b"y".to_vec();
    let asked_at = tree.publications().names_number();
    tree.mirror().settle_name(b"", b"y", Some(&told), Question::new(asked_at, false)).unwrap();
    assert_eq!((node.names(), tree.nodes().path_of(attr.node)), (vec![b"y".to_vec()], Some(b"y".to_vec())));
    assert_eq!(tree.getattr(attr.node).unwrap().nlink, 1);
    tree.handles().release(open.fh).unwrap();
    assert_eq!(node.names(), [b"y"]);
}
