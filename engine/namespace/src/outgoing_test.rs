//! What is told of names, what is told again, and what a successor keeps.

use super::super::recent::RECENT_MAX;
use super::super::{Caller, Namespace, NamespaceSettings, SetAttr};
use super::*;
use std::sync::Arc;
use tidemark_protocol::cluster::wire::{FileFacts, NodeKind, NodeState, WireState};
use tidemark_protocol::id::{FileCounter, Generation, Incarnation, SealNumber};
use tidemark_protocol::key::NodeLife;
use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

const ME: Caller = Caller { uid: 0, gid: 0, pid: 0, now_ns: 1, request: 0 };

fn tree() -> (tempfile::TempDir, Arc<Namespace>) {
    tree_of(Incarnation(1))
}

fn settings(life: Incarnation) -> NamespaceSettings {
    NamespaceSettings { journal_bytes: Some(8 << 20), ..NamespaceSettings::new(life) }
}

fn tree_of(life: Incarnation) -> (tempfile::TempDir, Arc<Namespace>) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = MediumChoice::Directory(folder.path().to_path_buf());
    let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
    let tree = Namespace::new(settings(life), tier1).unwrap();
    tree.publications().collect_outgoing();
    (folder, tree)
}

#[test]
fn what_a_successor_removed_itself_does_not_come_back_however_much_it_is() {
    let (_folder, tree) = tree();
    let answered = || {
        let _told = tree.publications().take_outgoing(usize::MAX, usize::MAX, false);
        tree.publications().publication_answered();
    };
    let names: Vec<Vec<u8>> = (0..RECENT_MAX + 2).map(|at| at.to_string().into_bytes()).collect();
    for name in &names {
        tree.names().symlink(&ME, ROOT, name, b"target").unwrap();
    }
    answered();
    let (told, kept) = (
        tree.catalog().moment(),
        names.iter().map(|name| NodeState {
            path: name.clone(),
            attributes: NodeAttributes::default(),
            attributes_ns: 0,
            other_names: None,
            kind: NodeKind::Symlink { target: b"target".to_vec() },
        }),
    );
    for name in &names {
        tree.names().unlink(&ME, ROOT, name).unwrap();
    }
    assert!(tree.mirror().become_catalog(&[(Vec::new(), kept.collect())], told, None));
    assert_eq!(tree.standing().outgoing_in(b"").map(|found| found.len()), Some(0));
    answered();
    tree.names().symlink(&ME, ROOT, b"last", b"target").unwrap();
    let remembered = tree.state.look(|state| state.outgoing.untold.as_ref().unwrap().recent.order.len());
    assert!(remembered <= RECENT_MAX + 2, "{remembered} names stay when all are answered for");
}

#[test]
fn what_a_successor_only_looked_up_does_not_come_back_when_another_node_removed_it() {
    let (_folder, tree) = tree();
    let told = tree.catalog().moment();
    let state = |path: &str, kind| NodeState {
        path: path.as_bytes().to_vec(),
        attributes: NodeAttributes::default(),
        attributes_ns: 0,
        other_names: None,
        kind,
    };
    let link = || NodeKind::Symlink { target: b"target".to_vec() };
    let looked_up = [
        state("link", link()),
        state("empty", NodeKind::Directory),
        state("shared", NodeKind::Directory),
        state("shared/link", link()),
    ];
    for found in &looked_up {
        let at = found.path.iter().rposition(|byte| *byte == b'/');
        let (directory, name) =
            at.map_or((&b""[..], &*found.path), |at| (&found.path[..at], &found.path[at + 1..]));
        let asked = Question::new(tree.catalog().moment().names, false);
        tree.mirror().settle_name(directory, name, Some(found), asked).unwrap();
    }
    let shared = tree.nodes().node_at(b"shared").unwrap();
    tree.create(&ME, shared, b"mine", 0o644, 1).unwrap();
    assert!(tree.mirror().become_catalog(&[(Vec::new(), Vec::new())], told, None));
    let found = |path: &str| tree.nodes().node_at(path.as_bytes()).is_some();
    assert_eq!(["link", "empty", "shared/link"].map(found), [false; 3], "another node removed them");
    assert!(found("shared/mine"), "nobody else knows of it yet");
}

/// Seen where a node never stood still: the moment up to which all was told was old, and names that others had given since were gone.
#[test]
fn a_name_that_others_gave_stays_where_a_successor_had_removed_it_before() {
    let state = |path: &[u8]| NodeState {
        path: path.to_vec(),
        attributes: NodeAttributes::default(),
        attributes_ns: 0,
        other_names: None,
        kind: NodeKind::Symlink { target: b"of another".to_vec() },
    };
    let (_folder, tree) = tree();
    let told = tree.catalog().moment();
    for name in [b"x", b"y"] {
        tree.names().symlink(&ME, ROOT, name, b"own").unwrap();
        tree.names().unlink(&ME, ROOT, name).unwrap();
    }
    tree.names().symlink(&ME, ROOT, b"own", b"own").unwrap();
    // The first publication takes four of the five operations.
    let publication = tree.publications().take_outgoing(4, usize::MAX, false).number;
    tree.publications().publication_answered();
    tree.names().unlink(&ME, ROOT, b"own").unwrap();
    let kept = [(Vec::new(), [&b"x"[..], b"own"].map(state).to_vec())];
    assert!(tree.mirror().become_catalog(&kept, told, Some(publication)));
    let found = |path: &[u8]| tree.nodes().node_at(path).is_some();
    assert!(found(b"x"), "the catalog has the removal, and what came after it");
    assert!(!found(b"y"));
    assert!(!found(b"own"), "the catalog lacks the removal");
}

/// What the last coordinator knows of a directory is said of that directory, wherever this node has moved it since.
#[test]
fn a_directory_that_a_successor_moved_itself_keeps_what_is_in_it() {
    const EXCHANGE: u32 = 2;
    let state = |path: &str, kind| NodeState {
        path: path.as_bytes().to_vec(),
        attributes: NodeAttributes::default(),
        attributes_ns: 0,
        other_names: None,
        kind,
    };
    for (flags, then, expected) in
        [(0, None, ["b/x", "b"]), (EXCHANGE, None, ["b/x", "a"]), (0, Some("a"), ["b/x", "a"])]
    {
        let (_folder, tree) = tree();
        for name in ["a", "b"] {
            tree.names().mkdir(&ME, ROOT, name.as_bytes(), 0o755).unwrap();
        }
        let a = tree.nodes().node_at(b"a").unwrap();
        tree.names().symlink(&ME, a, b"x", b"target").unwrap();
        let publication = tree.publications().take_outgoing(usize::MAX, usize::MAX, false).number;
        let told = tree.catalog().moment();
        let kept = [
            (Vec::new(), vec![state("a", NodeKind::Directory), state("b", NodeKind::Directory)]),
            (b"a".to_vec(), vec![state("a/x", NodeKind::Symlink { target: b"target".to_vec() })]),
            (b"b".to_vec(), Vec::new()),
        ];
        tree.names().rename(&ME, (ROOT, b"a"), (ROOT, b"b"), flags).unwrap();
        if let Some(name) = then {
            tree.names().mkdir(&ME, ROOT, name.as_bytes(), 0o755).unwrap();
        }
        assert!(tree.mirror().become_catalog(&kept, told, Some(publication)));
        let found = |path: &str| tree.nodes().node_at(path.as_bytes()).is_some();
        assert!(expected.iter().all(|path| found(path)), "{flags} {then:?}");
        assert!(!found("a/x"), "{flags} {then:?}: it has one name");
    }
}

#[test]
fn more_begun_files_than_are_looked_at_at_once_are_all_told_again() {
    const FILES: usize = NODES_AT_ONCE + 2;
    let (_folder, tree) = tree();
    let create = |file: usize| tree.create(&ME, ROOT, file.to_string().as_bytes(), 0o644, 1).unwrap().1;
    let made: Vec<_> = (0..FILES).map(create).collect();
    let told = || {
        tree.publications().publication_answered();
        tree.publications().take_outgoing(usize::MAX, usize::MAX, false).states.len()
    };
    assert_eq!(told(), FILES);
    tree.publications().tell_begun();
    assert_eq!(told(), 0, "they are empty still");
    for file in &made {
        file.backing.write_at(b"bytes", 0).unwrap();
    }
    tree.publications().tell_begun();
    assert_eq!(told(), FILES);
}

/// A coordinator that loses the role tells its successor what it made, and not what others have put in that place since: the successor may
/// be who did, and would have it undone.
#[test]
fn what_other_nodes_put_in_place_of_ones_own_is_not_undone_by_telling_the_own_again() {
    let other = NodeLife { node: "n9".parse().unwrap(), incarnation: Incarnation(9) };
    let file = |counter| FileId { incarnation: Incarnation(9), counter: FileCounter(counter) };
    let made = |path: &str, counter| NameOperation::File {
        path: path.into(),
        file: file(counter),
        attributes: NodeAttributes::default(),
    };
    let renamed = |from: &str, to: &str, what| NameOperation::Renamed {
        from: from.into(),
        to: to.into(),
        exchange: false,
        what,
    };
    let removed = |path: &str, what| NameOperation::Removed { path: path.into(), what };
    let own = |tree: &Namespace, name: &str| {
        let found = tree.nodes().node_at(name.as_bytes())?;
        tree.state.look(|state| state.tree.node(found).unwrap().file().ok().map(|file| file.id))
    };
    type Makes<'a> = &'a dyn Fn(&Namespace);
    let makes: Makes<'_> = &|tree| drop(tree.create(&ME, ROOT, b"z", 0o644, 1).unwrap());
    let moves: Makes<'_> = &|tree| {
        makes(tree);
        tree.names().rename(&ME, (ROOT, b"z"), (ROOT, b"y"), 0).unwrap();
    };
    let links: Makes<'_> = &|tree| {
        makes(tree);
        let z = tree.nodes().node_at(b"z").unwrap();
        tree.names().link(&ME, z, ROOT, b"y").unwrap();
        tree.names().unlink(&ME, ROOT, b"z").unwrap();
    };
    let takes = |tree: &Namespace| {
        let attributes = NodeAttributes::default();
        let from = own(tree, "z").unwrap();
        vec![NameOperation::Taken { path: b"z".into(), from, file: file(2), attributes }]
    };
    let replaces = |_: &Namespace| vec![made("a", 1), renamed("a", "z", Some(file(1)))];
    let clears = |tree: &Namespace| vec![removed("z", own(tree, "z")), made("z", 1)];
    let nothing = |_: &Namespace| Vec::new();
    type Others<'a> = &'a dyn Fn(&Namespace) -> Vec<NameOperation>;
    let cases: [(Makes<'_>, Others<'_>, bool); 6] = [
        (makes, &nothing, true),
        (makes, &replaces, false),
        (makes, &clears, false),
        (makes, &takes, false),
        (moves, &nothing, true),
        (links, &nothing, true),
    ];
    for (at, (makes, others, is_made)) in cases.into_iter().enumerate() {
        let (_folder, tree) = tree();
        tree.catalog().remember_removed(&[], true);
        tree.publications().lead_outgoing(true);
        makes(&tree);
        let others = others(&tree);
        tree.mirror().follow(&others, &other, 1);
        tree.catalog().forget_removed();
        tree.publications().collect_outgoing();
        tree.publications().publication_unsent();
        let operations = tree.publications().take_operations(usize::MAX, usize::MAX).operations;
        let makes_files = operations.iter().any(|it| matches!(it, NameOperation::File { .. }));
        assert_eq!(makes_files, is_made, "case {at}: {operations:?}");
        // The successor is who did the other part, or hears of both.
        let me = NodeLife { node: "n8".parse().unwrap(), incarnation: Incarnation(1) };
        for own_first in [false, true] {
            let (_folder, successor) = tree_of(Incarnation(2));
            successor.catalog().remember_removed(&[], true);
            let mut publications = [(&others, &other), (&operations, &me)];
            if own_first {
                publications.reverse();
            }
            for (operations, from) in publications {
                successor.mirror().follow(operations, from, 1);
            }
            let has = |tree: &Namespace| ["y", "z"].map(|name| own(tree, name));
            assert_eq!(has(&successor), has(&tree), "case {at}, own first: {own_first}");
        }
    }
}

/// The journal has what is told, also after a part of it was replaced.
#[test]
fn a_daemon_that_takes_over_tells_the_same() {
    let (_folder, tree) = tree();
    let other = NodeLife { node: "n9".parse().unwrap(), incarnation: Incarnation(9) };
    for name in ["x", "z"] {
        drop(tree.create(&ME, ROOT, name.as_bytes(), 0o644, 1).unwrap());
    }
    let found = tree.nodes().node_at(b"x").unwrap();
    let x = tree.state.look(|state| state.tree.node(found).unwrap().file().unwrap().id);
    let removed = NameOperation::Removed { path: b"x".into(), what: Some(x) };
    tree.mirror().follow(std::slice::from_ref(&removed), &other, 1);
    tree.publications().publication_unsent();
    let told = tree.publications().untold_operations();
    assert_eq!((told.len(), &told[0]), (2, &removed));
    let tier1 = Arc::clone(&tree.tier1);
    drop(tree);
    let settings = settings(Incarnation(1));
    let next = Namespace::recover(settings, tier1, false, &mut |_| None).unwrap();
    assert_eq!(next.publications().untold_operations(), told);
}

/// A node that was away found a name free that another node gives to something meanwhile: that stays, although it is older.
#[test]
fn what_was_put_in_place_while_a_node_was_away_stays() {
    let life = |node: &str, life| NodeLife { node: node.parse().unwrap(), incarnation: Incarnation(life) };
    let (away, here) = (life("n8", 8), life("n9", 9));
    let file = |life, counter| FileId { incarnation: Incarnation(life), counter: FileCounter(counter) };
    let attributes = NodeAttributes::default;
    let made = |path: &str, file| NameOperation::File { path: path.into(), file, attributes: attributes() };
    let moved = |what| NameOperation::Renamed { from: b"a".into(), to: b"z".into(), exchange: false, what };
    let linked = |target: &str| NameOperation::Symlink {
        path: b"z".into(),
        target: target.into(),
        attributes: attributes(),
    };
    let directory = |path: &str| NameOperation::Directory { path: path.into(), attributes: attributes() };
    // The moved file is one that the away node had made, or one of the node that moves it.
    for (old, then) in [(made("a", file(8, 1)), Some(file(8, 1))), (made("a", file(9, 1)), Some(file(9, 1)))]
    {
        for new in [made("z", file(8, 2)), linked("target")] {
            let (_folder, tree) = tree();
            tree.catalog().remember_removed(&[], true);
            tree.mirror().follow(std::slice::from_ref(&old), &away, 1);
            tree.catalog().gives_up(&away);
            tree.mirror().follow(&[moved(then)], &here, 1);
            let there = tree.nodes().node_at(b"z");
            assert!(there.is_some());
            tree.mirror().follow(std::slice::from_ref(&new), &away, 2);
            assert_eq!(tree.nodes().node_at(b"z"), there, "{old:?} and then {new:?}");
        }
    }
    // The away node's own older file gives way to its newer one, although the rename in between met another node's link.
    let (_folder, tree) = tree();
    tree.catalog().remember_removed(&[], true);
    tree.mirror().follow(&[made("a", file(8, 1))], &away, 1);
    tree.catalog().gives_up(&away);
    tree.mirror().follow(&[directory("d"), linked("target")], &here, 1);
    let saves = [moved(Some(file(8, 1))), made("a", file(8, 2)), made("free", file(8, 3)), directory("d")];
    tree.mirror().follow(&saves, &away, 2);
    let found = |path: &str| {
        let node = tree.nodes().node_at(path.as_bytes())?;
        tree.state.look(|state| state.tree.node(node).unwrap().file_id())
    };
    assert_eq!(["a", "free", "z"].map(found), [Some(file(8, 2)), Some(file(8, 3)), None]);
    assert!(tree.nodes().node_at(b"d").is_some(), "two nodes that make the same directory share it");
}

/// The keeper of a copy reports such a file once its node is lost, under the name that it had when it was copied.
#[test]
fn what_a_member_ended_without_an_answer_is_not_made_again_once_it_leads() {
    const WRITE_AND_TRUNCATE: i32 = 0o1001;
    let other = NodeLife { node: "n2".parse().unwrap(), incarnation: Incarnation(2) };
    let file = |number| FileId { incarnation: other.incarnation, counter: FileCounter(number) };
    let made = |number: u64| NameOperation::File {
        path: number.to_string().into_bytes(),
        file: file(number),
        attributes: NodeAttributes::default(),
    };
    for (is_answered, is_all) in [(false, true), (true, true), (false, false)] {
        let (_folder, tree) = tree();
        tree.mirror().follow(&(1..7).map(made).collect::<Vec<_>>(), &other, 1);
        tree.names().unlink(&ME, ROOT, b"1").unwrap();
        tree.names().rename(&ME, (ROOT, b"2"), (ROOT, b"3"), 0).unwrap();
        let taken = tree.nodes().node_at(b"6").unwrap();
        tree.open(&ME, taken, WRITE_AND_TRUNCATE).unwrap();
        if is_answered {
            let _told = tree.publications().take_outgoing(usize::MAX, usize::MAX, false);
            tree.publications().publication_answered();
            tree.names().rename(&ME, (ROOT, b"4"), (ROOT, b"moved"), 0).unwrap();
        }
        // Another node's removal says nothing of the file's other names, which are not known here.
        let removed = NameOperation::Removed { path: b"5".to_vec(), what: Some(file(5)) };
        tree.mirror().follow(&[removed], &other, 2);
        tree.catalog().remember_removed(&[], is_all);
        let remembered = [1, 3, 6, 2, 4, 5].map(|number| tree.catalog().was_removed(file(number)));
        let ended = !is_answered && is_all;
        assert_eq!(remembered, [ended, ended, ended, false, false, false], "{is_answered} {is_all}");
        // A daemon that takes over knows it from the operations, in which the file that a rename replaced is not.
        let next =
            Namespace::recover(settings(Incarnation(1)), Arc::clone(&tree.tier1), false, &mut |_| None);
        let next = next.unwrap();
        next.publications().collect_outgoing();
        next.catalog().remember_removed(&[], is_all);
        let remembered = [1, 3, 6, 2, 4, 5].map(|number| next.catalog().was_removed(file(number)));
        assert_eq!(remembered, [ended, false, ended, false, false, false], "{is_answered} {is_all}, later");
    }
}

/// The last removals before a coordinator's daemon is killed may not be in etcd, and the keeper of a copy has the files.
#[test]
fn files_that_lost_their_name_are_known_by_the_tree() {
    let (_folder, tree) = tree();
    let other = NodeLife { node: "n2".parse().unwrap(), incarnation: Incarnation(2) };
    let file = |number| FileId { incarnation: other.incarnation, counter: FileCounter(number) };
    let made =
        ["kept", "removed", "moved", "covered"].iter().zip(1..).map(|(path, number)| NameOperation::File {
            path: path.as_bytes().to_vec(),
            file: file(number),
            attributes: NodeAttributes::default(),
        });
    tree.mirror().follow(&made.collect::<Vec<_>>(), &other, 1);
    let removed = NameOperation::Removed { path: b"removed".to_vec(), what: Some(file(2)) };
    tree.mirror().follow(&[removed], &other, 2);
    tree.names().rename(&ME, (ROOT, b"moved"), (ROOT, b"covered"), 0).unwrap();
    let next = Namespace::recover(settings(Incarnation(1)), Arc::clone(&tree.tier1), false, &mut |_| None);
    let files: Vec<_> = (1..=4).map(file).collect();
    for tree in [tree, next.unwrap()] {
        assert_eq!(tree.catalog().nameless(&files), [2, 4].map(file));
    }
}

/// Seen where a node that had been cut off became the coordinator.
#[test]
fn a_file_that_others_put_where_a_successor_took_another_away_keeps_its_name() {
    let other = NodeLife { node: "n2".parse().unwrap(), incarnation: Incarnation(2) };
    let file = |number| FileId { incarnation: other.incarnation, counter: FileCounter(number) };
    let facts = |file| FileFacts {
        file,
        size_bytes: 0,
        state: WireState::Closed,
        seal: SealNumber(1),
        opened_ns: 1,
        closed_ns: 1,
        published_ns: 1,
        vouched: false,
        generation: Generation(1),
        writers: Vec::new(),
        host: true,
        object: None,
    };
    let state = |(path, number): &(&str, u64)| NodeState {
        path: path.as_bytes().to_vec(),
        attributes: NodeAttributes::default(),
        attributes_ns: 0,
        other_names: None,
        kind: NodeKind::File(Box::new(facts(file(*number)))),
    };
    let before = [("moved", 1), ("removed", 2), ("gone", 3), ("over", 4), ("covered", 5)];
    for told in [false, true] {
        let (_folder, tree) = tree();
        let made = before.map(|(path, number)| NameOperation::File {
            path: path.into(),
            file: file(number),
            attributes: NodeAttributes::default(),
        });
        tree.mirror().follow(&made, &other, 1);
        let began = tree.catalog().moment();
        let names = tree.names();
        if told {
            names.symlink(&ME, ROOT, b"told", b"target").unwrap();
        }
        let publication =
            told.then(|| tree.publications().take_outgoing(usize::MAX, usize::MAX, false).number);
        told.then(|| tree.publications().publication_answered());
        names.rename(&ME, (ROOT, b"moved"), (ROOT, b"new"), 0).unwrap();
        names.unlink(&ME, ROOT, b"removed").unwrap();
        names.unlink(&ME, ROOT, b"gone").unwrap();
        names.rename(&ME, (ROOT, b"over"), (ROOT, b"covered"), 0).unwrap();
        names.unlink(&ME, ROOT, b"covered").unwrap();
        // Meanwhile others removed two of the files, and made new ones under their names.
        let kept = [("moved", 11), ("removed", 12), ("gone", 3), ("over", 4), ("covered", 5)];
        let kept = [(Vec::new(), kept.iter().map(state).collect())];
        assert!(tree.mirror().become_catalog(&kept, began, publication));
        let found = |path: &str| {
            let node = tree.nodes().node_at(path.as_bytes())?;
            tree.state.look(|state| state.tree.node(node).unwrap().file_id())
        };
        let names = ["moved", "removed", "new", "gone", "over", "covered"].map(found);
        let [new, removed, moved] = [11, 12, 1].map(|number| Some(file(number)));
        assert_eq!(names, [new, removed, moved, None, None, None], "something was told before: {told}");
    }
}

#[test]
fn what_a_successor_changed_and_its_catalog_lacks_is_known_by_the_present_paths() {
    let (_folder, tree) = tree();
    for path in ["a", "b"] {
        tree.names().mkdir(&ME, ROOT, path.as_bytes(), 0o755).unwrap();
    }
    let publication = tree.publications().take_outgoing(usize::MAX, usize::MAX, false).number;
    tree.publications().publication_answered();
    let below = |path: &str| tree.nodes().node_at(path.as_bytes()).unwrap();
    tree.names().symlink(&ME, below("a"), b"new", b"target").unwrap();
    tree.names().rename(&ME, (ROOT, b"a"), (below("b"), b"x"), 0).unwrap();
    let told = tree.catalog().moment_before();
    let directory = |name: &[u8]| NodeState {
        path: name.to_vec(),
        attributes: NodeAttributes::default(),
        attributes_ns: 0,
        other_names: None,
        kind: NodeKind::Directory,
    };
    let kept = [(Vec::new(), [&b"a"[..], b"b"].map(directory).to_vec())];
    assert!(tree.mirror().become_catalog(&kept, told, Some(publication)));
    let changed = || {
        let mut changed = tree.publications().changed_since_taken_up()?;
        changed.sort();
        Some(changed)
    };
    assert_eq!(changed(), Some(["a", "b/x", "b/x/new"].map(Vec::from).to_vec()));
    // More than is remembered while nobody is told.
    tree.publications().lead_outgoing(false);
    for number in 0..RECENT_MAX + 16 {
        tree.names().symlink(&ME, ROOT, number.to_string().as_bytes(), b"target").unwrap();
    }
    assert_eq!(changed(), None);
}

#[test]
fn what_could_be_lost_with_the_coordinator_is_known_by_name() {
    let (_folder, tree) = tree();
    tree.names().mkdir(&ME, ROOT, b"old", 0o755).unwrap();
    let old = tree.nodes().node_at(b"old").unwrap();
    tree.names().symlink(&ME, old, b"gone", b"target").unwrap();
    tree.catalog().remember_removed(&[], true);
    tree.publications().lead_outgoing(true);
    tree.catalog().collect_unkept(true);
    let keep = || {
        let part = tree.catalog().take_unkept(usize::MAX, usize::MAX);
        assert!(part.all);
        move |tree: &Namespace| tree.publications().kept_until(part.publication, part.loss)
    };
    keep()(&tree);
    let may = |path: &[u8], is_listed| tree.publications().may_change(path, is_listed);
    assert!(!may(b"old", true), "all is kept");

    tree.names().mkdir(&ME, ROOT, b"new", 0o755).unwrap();
    tree.names().unlink(&ME, old, b"gone").unwrap();
    let is_kept = keep();
    let cases: [(&[u8], bool, bool); 8] = [
        (b"new", false, true),
        (b"new/below", false, true),
        (b"newer", false, false),
        (b"", true, true),
        (b"old/gone", false, true),
        (b"old/other", false, false),
        (b"old", false, false),
        (b"old", true, true),
    ];
    for (path, is_listed, expected) in cases {
        let path_text = String::from_utf8_lossy(path);
        assert_eq!(may(path, is_listed), expected, "on its way: {path_text}, listed: {is_listed}");
    }
    is_kept(&tree);
    assert!(cases.iter().all(|(path, is_listed, _)| !may(path, *is_listed)), "all is kept again");
}

/// Attributes are told as states: the operations that the catalog has say nothing of them.
#[test]
fn attributes_that_a_successor_set_untold_stay() {
    let (_folder, tree) = tree();
    for name in [b"old", b"new"] {
        tree.names().mkdir(&ME, ROOT, name, 0o755).unwrap();
    }
    let publication = tree.publications().take_outgoing(usize::MAX, usize::MAX, false).number;
    tree.publications().publication_answered();
    let mode = |name: &[u8]| tree.getattr(tree.nodes().node_at(name).unwrap()).unwrap().mode & 0o777;
    let set = |name: &[u8], mode: u32| {
        let node = tree.nodes().node_at(name).unwrap();
        let set = SetAttr { mode: Some(mode), ..SetAttr::default() };
        tree.setattr(&ME, node, &set).unwrap();
    };
    set(b"old", 0o750);
    let told = tree.catalog().moment();
    set(b"new", 0o700);
    let state = |name: &[u8]| NodeState {
        path: name.to_vec(),
        attributes: NodeAttributes { mode: 0o711, ..NodeAttributes::default() },
        attributes_ns: 0,
        other_names: None,
        kind: NodeKind::Directory,
    };
    let kept = [(Vec::new(), [&b"old"[..], b"new"].map(state).to_vec())];
    assert!(tree.mirror().become_catalog(&kept, told, Some(publication)));
    assert_eq!([mode(b"old"), mode(b"new")], [0o711, 0o700]);
}
