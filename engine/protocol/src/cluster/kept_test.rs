//! The catalog through the keys of an etcd and back.

use super::*;
use crate::cluster::wire::{FileFacts, NodeAttributes, WireState};
use crate::id::{FileCounter, Generation, SealNumber};
use proptest::prelude::*;

/// The keys of an etcd: each value, and the revision at which it was put.
#[derive(Debug, Default)]
struct Keys {
    revision: u64,
    entries: BTreeMap<String, (Vec<u8>, u64)>,
}

impl Keys {
    /// Carries out a transaction. Like etcd it refuses two changes of one key.
    fn transact(&mut self, changes: &[Change]) {
        self.revision += 1;
        for (at, change) in changes.iter().enumerate() {
            let same = changes[..at].iter().any(|before| match (before, change) {
                (Change::Put { key: one, .. }, Change::Put { key: other, .. }) => one == other,
                (Change::Delete { from, until }, Change::Put { key, .. })
                | (Change::Put { key, .. }, Change::Delete { from, until }) => (from..until).contains(&key),
                (Change::Delete { .. }, Change::Delete { .. }) => false,
            });
            assert!(!same, "{change:?} touches a key that another one touches");
            match change {
                Change::Put { key, value } => {
                    assert!(key.as_str() > ALL && key.as_str() < ALL_END, "{key}");
                    self.entries.insert(key.clone(), (value.clone(), self.revision));
                }
                Change::Delete { from, until } => {
                    self.entries.retain(|key, _| !(from..until).contains(&key));
                }
            }
        }
    }

    fn read(&self) -> KeptCatalog {
        self.read_with(0)
    }

    fn read_with(&self, lots: u32) -> KeptCatalog {
        let entries = self.entries.iter().map(|(key, (value, revision))| Entry {
            key: key.clone(),
            value: value.clone(),
            revision: *revision,
        });
        KeptCatalog::read(Mark { lots, ..Mark::default() }, entries).expect("it is what was written")
    }

    fn write(&mut self, write: impl FnOnce(&mut Vec<Change>)) {
        let mut changes = Vec::new();
        write(&mut changes);
        self.transact(&changes);
    }
}

fn node(id: u64, parent: u64, name: &str, kind: NodeKind) -> CatalogNode {
    let state = NodeState {
        path: Vec::new(),
        attributes: NodeAttributes::default(),
        attributes_ns: 0,
        other_names: None,
        kind,
    };
    CatalogNode { id, names: vec![(parent, name.as_bytes().to_vec())], state }
}

fn link(id: u64, parent: u64, name: &str) -> CatalogNode {
    node(id, parent, name, NodeKind::Symlink { target: b"x".to_vec() })
}

fn file_id(counter: u64) -> FileId {
    FileId { incarnation: Incarnation(9), counter: FileCounter(counter) }
}

fn file(id: u64, parent: u64, name: &str, chunks: usize) -> CatalogNode {
    let facts = FileFacts {
        file: file_id(id),
        size_bytes: 5,
        state: WireState::Sealed {
            crc: crate::checksum::Crc64(7),
            chunks: vec![crate::checksum::Crc64(u64::MAX); chunks].into(),
        },
        seal: SealNumber(1),
        opened_ns: 10,
        closed_ns: 20,
        published_ns: 30,
        vouched: true,
        generation: Generation(4),
        writers: Vec::new(),
        host: true,
        object: None,
    };
    node(id, parent, name, NodeKind::File(Box::new(facts)))
}

fn paths(kept: &KeptCatalog) -> Vec<String> {
    let directories = kept.directories(i64::MAX);
    let states = directories.iter().flat_map(|(_, found)| found);
    let mut paths: Vec<_> = states
        .map(|state| String::from_utf8(state.path.clone()).expect("names of tests are UTF-8"))
        .collect();
    paths.sort();
    paths
}

#[test]
fn what_changed_last_counts_and_a_directory_takes_along_what_is_in_it() {
    let (mut keys, mut writer) = (Keys::default(), Writer::default());
    keys.write(|to| {
        writer.node(node(2, ROOT, "run", NodeKind::Directory), to);
        writer.node(link(3, 2, "latest"), to);
        writer.node(link(4, 2, "old"), to);
    });
    assert_eq!(paths(&keys.read()), ["run", "run/latest", "run/old"]);
    keys.write(|to| {
        writer.node(node(2, ROOT, "moved", NodeKind::Directory), to);
        writer.gone(4, to);
    });
    assert_eq!(paths(&keys.read()), ["moved", "moved/latest"]);
}

#[test]
fn of_two_nodes_with_one_name_the_later_one_has_it() {
    let (mut keys, mut writer) = (Keys::default(), Writer::default());
    keys.write(|to| writer.node(link(3, ROOT, "new"), to));
    keys.write(|to| writer.node(file(2, ROOT, "name", 1), to));
    // Renamed over the other, whose removal is in a later transaction.
    keys.write(|to| writer.node(link(3, ROOT, "name"), to));
    let kept = keys.read();
    let directories = kept.directories(i64::MAX);
    let [(_, found)] = directories.as_slice() else { panic!("{directories:?}") };
    assert!(matches!(found.as_slice(), [NodeState { kind: NodeKind::Symlink { .. }, .. }]), "{found:?}");
}

#[test]
fn lots_count_once_the_mark_says_that_all_are_there_and_then_until_they_are_made() {
    let (mut keys, mut writer) = (Keys::default(), Writer::default());
    keys.write(|to| {
        writer.node(node(2, ROOT, "a", NodeKind::Directory), to);
        writer.node(link(3, 2, "below"), to);
    });
    // `mkdir b; mv a/below b; rmdir a`.
    let (mut first, mut second) = (Vec::new(), Vec::new());
    writer.node(link(3, 4, "below"), &mut first);
    writer.node(node(4, ROOT, "b", NodeKind::Directory), &mut second);
    writer.gone(2, &mut second);
    keys.transact(&[write_down(0, &first)]);
    keys.transact(&[write_down(1, &second)]);
    assert_eq!(paths(&keys.read_with(0)), ["a", "a/below"]);
    let kept = keys.read_with(2);
    assert_eq!(paths(&kept), ["b", "b/below"]);
    assert_eq!(kept.lots(), [(0, first.clone()), (1, second.clone())]);
    keys.transact(&[first, vec![take_down(0)]].concat());
    let kept = keys.read_with(2);
    assert_eq!((paths(&kept), kept.lots().len()), (vec!["b".to_owned(), "b/below".to_owned()], 1));
    keys.transact(&[second, vec![take_down(1)]].concat());
    assert_eq!(paths(&keys.read_with(0)), ["b", "b/below"]);
    keys.transact(&[write_down(0, &[]), write_down(1, &[])]);
    keys.transact(&[take_all_down()]);
    assert_eq!(keys.entries.len(), 2);
}

#[test]
fn a_file_without_a_name_is_remembered_and_the_oldest_of_very_many_is_not() {
    let (mut keys, mut writer) = (Keys::default(), Writer::default());
    keys.write(|to| writer.removed(file_id(1), to));
    keys.write(|to| writer.removed(file_id(2), to));
    assert_eq!(keys.read().removed(), [file_id(1), file_id(2)]);
    keys.write(|to| writer.node(file(1, ROOT, "back", 1), to));
    assert_eq!(keys.read().removed(), [file_id(2)], "it was brought back");
    let mut writer = Writer::after(&keys.read());
    for counter in 0..REMOVED_MAX as u64 - 1 {
        keys.write(|to| writer.removed(file_id(100 + counter), to));
    }
    let removed = keys.read().removed();
    assert_eq!((removed.len(), removed[0]), (REMOVED_MAX, file_id(2)));
    keys.write(|to| writer.removed(file_id(5), to));
    let removed = keys.read().removed();
    assert_eq!(
        (removed.len(), removed[0], removed[REMOVED_MAX - 1]),
        (REMOVED_MAX, file_id(100), file_id(5))
    );
}

#[test]
fn a_long_value_lies_in_pieces_of_which_none_is_left_behind() {
    const CHUNKS: usize = 4 * VALUE_BYTES_MAX / 10;
    let (mut keys, mut writer) = (Keys::default(), Writer::default());
    let pieces = |keys: &Keys| keys.entries.keys().filter(|key| key.contains("/piece/")).count();
    keys.write(|to| writer.node(file(2, ROOT, "large", CHUNKS), to));
    let first = pieces(&keys);
    assert!(first >= 4, "{first}");
    assert!(keys.entries.values().all(|(value, _)| value.len() <= VALUE_BYTES_MAX));
    // Another coordinator goes on, and half of its write is lost.
    let mut writer = Writer::after(&keys.read());
    let mut changes = Vec::new();
    writer.node(file(2, ROOT, "renamed", CHUNKS), &mut changes);
    keys.transact(&changes[..2]);
    assert_eq!(paths(&keys.read()), ["large"]);
    let mut writer = Writer::after(&keys.read());
    keys.write(|to| writer.node(file(2, ROOT, "again", CHUNKS), to));
    assert_eq!((paths(&keys.read()), pieces(&keys)), (vec!["again".to_owned()], first));
    assert_eq!(keys.read().nodes[&2].0, file(2, ROOT, "again", CHUNKS));
    keys.write(|to| writer.node(file(2, ROOT, "short", 1), to));
    assert_eq!((paths(&keys.read()), pieces(&keys)), (vec!["short".to_owned()], 0));
    keys.write(|to| writer.node(file(2, ROOT, "large", CHUNKS), to));
    keys.write(|to| writer.gone(2, to));
    assert!(keys.entries.is_empty(), "{:?}", keys.entries.keys());
}

#[test]
fn lives_and_processes_are_read_as_they_were_written() {
    let (mut keys, writer) = (Keys::default(), Writer::default());
    let life = NodeLife { node: "n2".parse().unwrap(), incarnation: Incarnation(8) };
    let fate =
        ProcessFate { home: Incarnation(8), process: (5, 6), fate: WireFate::Killed, failed_at_ns: Some(9) };
    keys.write(|to| {
        writer.published(&life, 4, to);
        writer.fate(&fate, to);
    });
    let mut kept = keys.read();
    assert_eq!(kept.published(), &BTreeMap::from([(life, 4)]));
    kept.ahead_ns = 100;
    assert_eq!(kept.fates(1000), [ProcessFate { failed_at_ns: Some(109), ..fate }]);
    assert_eq!(kept.fates(50), [ProcessFate { failed_at_ns: Some(50), ..fate }], "it has happened");
    keys.write(|to| writer.forget_fate(fate.of(), to));
    assert_eq!(keys.read().fates(0), []);
}

#[test]
fn a_loop_of_directories_that_hangs_on_nothing_is_not_followed() {
    let (mut keys, mut writer) = (Keys::default(), Writer::default());
    keys.write(|to| {
        writer.node(node(2, 3, "a", NodeKind::Directory), to);
        writer.node(node(3, 2, "b", NodeKind::Directory), to);
        writer.node(node(4, 4, "itself", NodeKind::Directory), to);
    });
    assert!(paths(&keys.read()).is_empty());
}

#[test]
fn nodes_are_found_again_in_a_tree_under_their_names_and_each_once() {
    let (mut keys, mut writer) = (Keys::default(), Writer::default());
    let mut two = file(4, 2, "one", 1);
    two.names.push((2, b"two".to_vec()));
    keys.write(|to| {
        writer.node(node(2, ROOT, "run", NodeKind::Directory), to);
        writer.node(node(3, ROOT, "gone", NodeKind::Directory), to);
        writer.node(two, to);
        writer.node(link(5, 3, "below"), to);
    });
    // In that tree `run` is 20, and `two` is another file than `one`.
    let tree = BTreeMap::from([((10, "run"), 20), ((20, "one"), 40), ((20, "two"), 41)]);
    let child = |parent, name: &[u8]| {
        let name = std::str::from_utf8(name).expect("names of tests are UTF-8");
        tree.get(&(parent, name)).copied()
    };
    let kept = keys.read();
    assert_eq!(kept.numbers_in(10, child), BTreeMap::from([(10, ROOT), (20, 2), (40, 4)]));
    assert_eq!(kept.last_id(), 5);
}

/// The bytes of today. If this fails, raise [`FORMAT`]: the content of existing etcds would be misread.
#[test]
fn the_format_is_what_it_was() {
    let (mut changes, mut writer) = (Vec::new(), Writer::default());
    let mut told = file(2, ROOT, "f", 1);
    told.state.attributes.xattrs = vec![(b"user.a".to_vec(), b"b".to_vec())];
    writer.node(told, &mut changes);
    writer.removed(file_id(3), &mut changes);
    let life = NodeLife { node: "n2".parse().unwrap(), incarnation: Incarnation(8) };
    writer.published(&life, 4, &mut changes);
    let mark = Mark { epoch: Epoch(300), number: 2, ahead_ns: -1, whole: true, lots: 5 };
    let lot = write_down(1, &changes[..1]);
    changes.push(lot);
    let mut text = format!("{}\n", hex(&mark_bytes(&mark)));
    for change in &changes {
        let Change::Put { key, value } = change else { panic!("{change:?}") };
        text.push_str(&format!("{key} {}\n", hex(value)));
    }
    assert_eq!(text, include_str!("kept_format.txt"));
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn another_version_is_said_and_not_guessed() {
    let mut mark = mark_bytes(&Mark::default());
    mark[0] = FORMAT + 1;
    assert_eq!(read_mark(&mark), Err(KeptError::Format { found: FORMAT + 1 }));
    assert!(matches!(read_mark(&[]), Err(KeptError::Malformed { .. })));
    let entry = Entry { key: format!("{ALL}later/1"), value: vec![FORMAT + 1], revision: 1 };
    assert_eq!(
        KeptCatalog::read(Mark::default(), [entry]),
        Ok(KeptCatalog::default()),
        "a kind of key of later"
    );
}

proptest! {
    #[test]
    fn garbage_is_refused_and_never_panics(
        values in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..60), 5),
    ) {
        for (kind, value) in ["node/0000000000000002", "lot/00000000", "life/a/1", "fate/1", "removed/1"].iter().zip(&values) {
            for first in [None, Some(FORMAT)] {
                let value = first.into_iter().chain(value.iter().copied()).collect();
                let entry = Entry { key: format!("{ALL}{kind}"), value, revision: 1 };
                if let Ok(kept) = KeptCatalog::read(Mark { lots: 1, ..Mark::default() }, [entry]) {
                    let _ = (kept.directories(0), kept.removed(), kept.numbers_in(1, |_, _| Some(1)));
                    let _ = Writer::after(&kept);
                }
            }
            let _ = read_mark(value);
        }
    }
}
