//! What is told of names, what is told again, and what a successor keeps.

use super::super::{Caller, Namespace, NamespaceSettings};
use super::*;
use std::sync::Arc;
use tidemark_protocol::cluster::wire::{NodeKind, NodeState};
use tidemark_protocol::id::Incarnation;
use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

const ME: Caller = Caller { uid: 0, gid: 0, pid: 0, now_ns: 1, request: 0 };

fn tree() -> (tempfile::TempDir, Arc<Namespace>) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = MediumChoice::Directory(folder.path().to_path_buf());
    let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
    let settings =
        NamespaceSettings { journal_bytes: Some(8 << 20), ..NamespaceSettings::new(Incarnation(1)) };
    let tree = Namespace::new(settings, tier1).unwrap();
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
        let asked = Question { at: tree.catalog().moment().names, lets: false };
        tree.mirror().settle_name(directory, name, Some(found), asked).unwrap();
    }
    let shared = tree.nodes().node_at(b"shared").unwrap();
    tree.create(&ME, shared, b"mine", 0o644, 1).unwrap();
    assert!(tree.mirror().become_catalog(&[(Vec::new(), Vec::new())], told, None));
    let found = |path: &str| tree.nodes().node_at(path.as_bytes()).is_some();
    assert_eq!(["link", "empty", "shared/link"].map(found), [false; 3], "another node removed them");
    assert!(found("shared/mine"), "nobody else knows of it yet");
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
