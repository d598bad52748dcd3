//! A tree is written once, in steps that an etcd takes, and never partly.

use super::*;
use tidemark_namespace::{Caller, Namespace, NamespaceSettings, OutgoingBody};
use tidemark_protocol::cluster::kept::Entry;
use tidemark_protocol::id::Incarnation;
use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

/// The first coordinator.
const BY: (Epoch, Incarnation) = (Epoch(3), Incarnation(7));

const ME: Caller = Caller { uid: 0, gid: 0, pid: 0, now_ns: 1, request: 0 };

/// An etcd, as far as a script sees it.
#[derive(Debug, Default)]
struct Etcd {
    keys: BTreeMap<String, (Vec<u8>, u64)>,
    mark: Mark,
    revision: u64,
    steps: usize,
}

impl Etcd {
    fn make(&mut self, step: &Step) {
        assert!(step.changes.len() <= CHANGES_MAX + 1, "{} changes", step.changes.len());
        let bytes: usize = step.changes.iter().map(Change::bytes).sum();
        assert!(bytes <= CHANGES_BYTES_MAX + VALUE_BYTES_MAX + (16 << 10), "{bytes} bytes");
        assert_eq!(step.mark.number, self.mark.number * u64::from(step.mark.epoch == self.mark.epoch) + 1);
        self.revision += 1;
        self.steps += 1;
        for (at, change) in step.changes.iter().enumerate() {
            // As etcd, which refuses two changes of one key.
            let is_put_before = |key: &str| {
                let mut before = step.changes[..at].iter();
                before.any(|change| matches!(change, Change::Put { key: before, .. } if before == key))
            };
            match change {
                Change::Put { key, value } => {
                    assert!(!is_put_before(key), "{key} is put twice");
                    self.keys.insert(key.clone(), (value.clone(), self.revision));
                }
                Change::Delete { from, until } => self.keys.retain(|key, _| !(from..until).contains(&key)),
            }
        }
        self.mark = step.mark;
    }

    /// Makes all steps that are left, and returns their number.
    fn make_all(&mut self, script: &mut Script) -> usize {
        let before = self.steps;
        while let Some(step) = script.next_step() {
            self.make(step);
            script.made();
        }
        self.steps - before
    }

    fn load(&self) -> Option<KeptCatalog> {
        let entries = self.keys.iter().map(|(key, (value, revision))| Entry {
            key: key.clone(),
            value: value.clone(),
            revision: *revision,
        });
        let mut kept = KeptCatalog::read(self.mark, entries).expect("it is what was written");
        kept.ahead_ns = self.mark.ahead_ns;
        self.mark.whole.then_some(kept)
    }
}

/// Makes a namespace on memory of its own, which ends with the folder.
fn namespace(life: u64) -> (Arc<Namespace>, tempfile::TempDir) {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let medium = MediumChoice::Directory(folder.path().to_path_buf());
    let tier1 = Tier1::open(Tier1Settings { size_bytes: 64 << 20, ballast: false, medium }).unwrap();
    let settings =
        NamespaceSettings { journal_bytes: Some(512 << 10), ..NamespaceSettings::new(Incarnation(life)) };
    (Namespace::new(settings, tier1).unwrap(), folder)
}

fn life(at: u64) -> NodeLife {
    NodeLife { node: format!("n{at}").parse().unwrap(), incarnation: Incarnation(at) }
}

/// Takes a part of `most` nodes, and plans its changes as [`Keeper::keep_after`] does; returns true for the last part.
fn take(script: &mut Script, of: &Namespace, most: usize, published: &[(NodeLife, u64)]) -> bool {
    let mut unkept = of.catalog().take_unkept(most, usize::MAX);
    script.take(&mut unkept, |(node, names)| {
        let id = node.node;
        CatalogNode { id, names, state: state_of(of, node) }
    });
    if unkept.all {
        script.finish(&published.iter().cloned().collect());
    } else if !script.is_whole() {
        script.plan();
    }
    unkept.all
}

fn child(of: &Namespace) -> impl Fn(u64, &[u8]) -> Option<u64> {
    |parent, name| of.standing().child_number(parent, name)
}

fn tree(of: &Namespace) -> Vec<String> {
    let nodes = of.standing().whole_tree().into_iter();
    nodes.map(|node| String::from_utf8(node.path).expect("names of tests are UTF-8")).collect()
}

fn kept_paths(kept: &KeptCatalog) -> Vec<String> {
    let found = kept.directories(i64::MAX).into_iter().flat_map(|(_, found)| found);
    let mut paths: Vec<_> =
        found.map(|state| String::from_utf8(state.path).expect("names of tests are UTF-8")).collect();
    paths.sort();
    paths
}

fn file(tree: &Namespace, parent: u64, name: &str) -> u64 {
    let (attr, open) = tree.create(&ME, parent, name.as_bytes(), 0o644, 1).unwrap();
    tree.handles().flush(open.fh, &ME, false).unwrap();
    tree.handles().release(open.fh).unwrap();
    attr.node
}

#[test]
fn a_tree_is_whole_with_its_last_step_and_so_are_the_publications_in_it() {
    let (catalog, _folder) = namespace(7);
    let run = catalog.names().mkdir(&ME, TREE_ROOT, b"run", 0o755).unwrap().node;
    for number in 0..4 * CHANGES_MAX {
        file(&catalog, run, &format!("f{number:04}"));
    }
    let (mut script, mut etcd) = (Script::anew(BY, 0), Etcd::default());
    etcd.keys.insert("catalog/node/left by another version".to_owned(), (vec![9], 0));
    catalog.catalog().remember_removed(&[], true);
    catalog.catalog().collect_unkept(true);
    let published = [(life(2), 5)];
    assert!(!take(&mut script, &catalog, CHANGES_MAX + 5, &published));
    assert_eq!(etcd.make_all(&mut script), 3, "all of before goes first");
    assert!(etcd.load().is_none(), "half a tree is none");
    assert!(take(&mut script, &catalog, usize::MAX, &published));
    etcd.make(script.next_step().expect("it has more than one"));
    script.made();
    assert!(etcd.load().is_none());
    etcd.make_all(&mut script);
    let kept = etcd.load().expect("all of it is there");
    assert_eq!(kept_paths(&kept), tree(&catalog));
    assert_eq!(kept.published(), &BTreeMap::from(published));
}

#[test]
fn a_successor_writes_only_what_differs_from_what_is_there() {
    let (catalog, _folder) = namespace(7);
    let run = catalog.names().mkdir(&ME, TREE_ROOT, b"run", 0o755).unwrap().node;
    let names: Vec<String> = (0..300).map(|number| format!("f{number:04}")).collect();
    // Links and not files: the memory that a file of the lost node was in is gone, and that differs.
    for name in &names {
        catalog.names().symlink(&ME, run, name.as_bytes(), b"x").unwrap();
    }
    let (mut script, mut etcd) = (Script::anew(BY, 0), Etcd::default());
    catalog.catalog().remember_removed(&[], true);
    catalog.catalog().collect_unkept(true);
    assert!(take(&mut script, &catalog, usize::MAX, &[(life(2), 5)]));
    etcd.make_all(&mut script);
    let before = etcd.keys.clone();

    // Another node recovers the catalog; its own nodes have other numbers.
    let (other, _folder) = namespace(8);
    file(&other, TREE_ROOT, "mine");
    let moment = other.catalog().moment_before();
    let kept = etcd.load().expect("it is whole");
    other.mirror().become_catalog(&kept.directories(i64::MAX), moment, None);
    let mut script = Script::after(kept, (Epoch(4), Incarnation(8)), true, child(&other));
    other.catalog().remember_removed(&[], true);
    other.catalog().collect_unkept(false);
    assert!(take(&mut script, &other, usize::MAX, &[(life(2), 5), (life(8), 1)]));
    assert_eq!(etcd.make_all(&mut script), 2, "who writes now, and what differs");
    assert!(etcd.mark.whole && etcd.mark.epoch == Epoch(4));
    let changed = etcd.keys.iter().filter(|(key, value)| before.get(*key) != Some(value)).count();
    assert!(changed <= 4, "its own file, two lives: {changed} keys changed");
    let after = etcd.load().expect("it is whole");
    assert_eq!(kept_paths(&after), tree(&other));

    // Changes from now on are made to the earlier keys.
    let run = other.nodes().node_at(b"run").unwrap();
    other.names().rename(&ME, (TREE_ROOT, b"run"), (TREE_ROOT, b"moved"), 0).unwrap();
    other.names().unlink(&ME, run, b"f0007").unwrap();
    other.names().rename(&ME, (run, b"f0001"), (run, b"f0002"), 0).unwrap();
    file(&other, run, "new");
    assert!(take(&mut script, &other, usize::MAX, &[]));
    assert_eq!(etcd.make_all(&mut script), 1);
    let after = etcd.load().expect("it stays whole");
    assert_eq!(kept_paths(&after), tree(&other));
    assert_eq!(etcd.keys.keys().filter(|key| key.contains("/node/")).count(), tree(&other).len());
}

#[test]
fn what_is_gone_from_the_tree_since_goes_from_the_keys() {
    let (catalog, _folder) = namespace(7);
    let run = catalog.names().mkdir(&ME, TREE_ROOT, b"run", 0o755).unwrap().node;
    for number in 0..3 * CHANGES_MAX {
        file(&catalog, run, &format!("f{number:04}"));
    }
    let (mut script, mut etcd) = (Script::anew(BY, 0), Etcd::default());
    catalog.catalog().remember_removed(&[], true);
    catalog.catalog().collect_unkept(true);
    assert!(take(&mut script, &catalog, usize::MAX, &[(life(2), 5)]));
    etcd.make_all(&mut script);
    // The coordinator is back as another daemon with the same tree; meanwhile names went.
    for number in 0..2 * CHANGES_MAX {
        catalog.names().unlink(&ME, run, format!("f{number:04}").as_bytes()).unwrap();
    }
    let mut script =
        Script::after(etcd.load().expect("whole"), (Epoch(4), Incarnation(7)), true, child(&catalog));
    catalog.catalog().collect_unkept(false);
    assert!(take(&mut script, &catalog, usize::MAX, &[(life(2), 6)]));
    etcd.make_all(&mut script);
    let kept = etcd.load().expect("whole");
    assert_eq!((kept_paths(&kept), kept.published()), (tree(&catalog), &BTreeMap::from([(life(2), 6)])));
    assert_eq!(kept.removed().len(), 2 * CHANGES_MAX, "who was away does not bring them back");
}

#[test]
fn the_times_of_a_file_are_read_by_the_clock_of_whoever_reads_them() {
    const AHEAD_NS: i64 = 3_600_000_000_000;
    let (catalog, _folder) = namespace(7);
    file(&catalog, TREE_ROOT, "f");
    let opened = |tree: &Namespace| match tree.standing().outgoing_at(b"f").expect("it is there").body {
        OutgoingBody::File(view) => view.opened_ns,
        other => panic!("{other:?}"),
    };
    let (mut script, mut etcd) = (Script::anew(BY, 0), Etcd::default());
    catalog.catalog().remember_removed(&[], true);
    catalog.catalog().collect_unkept(true);
    assert!(take(&mut script, &catalog, usize::MAX, &[]));
    etcd.make_all(&mut script);
    // The next coordinator's clock is an hour ahead, and its successor's is the first one's.
    let (other, _folder) = namespace(8);
    let mut kept = etcd.load().expect("whole");
    kept.ahead_ns = AHEAD_NS;
    other.mirror().become_catalog(&kept.directories(i64::MAX), other.catalog().moment_before(), None);
    assert_eq!(opened(&other), opened(&catalog) + AHEAD_NS);
    let mut script = Script::after(kept, (Epoch(4), Incarnation(8)), true, child(&other));
    other.names().rename(&ME, (TREE_ROOT, b"f"), (TREE_ROOT, b"g"), 0).unwrap();
    other.names().rename(&ME, (TREE_ROOT, b"g"), (TREE_ROOT, b"f"), 0).unwrap();
    other.names().mkdir(&ME, TREE_ROOT, b"new", 0o755).unwrap();
    other.catalog().remember_removed(&[], true);
    other.catalog().collect_unkept(false);
    assert!(take(&mut script, &other, usize::MAX, &[]));
    etcd.make_all(&mut script);
    let (last, _folder) = namespace(9);
    let mut kept = etcd.load().expect("whole");
    assert_eq!(kept.mark.ahead_ns, AHEAD_NS);
    kept.ahead_ns = kept.mark.ahead_ns - AHEAD_NS;
    last.mirror().become_catalog(&kept.directories(i64::MAX), last.catalog().moment_before(), None);
    assert_eq!(opened(&last), opened(&catalog));
}

/// Goal: wherever a coordinator is lost while it writes, its successor reads the tree of before or of after, with the matching
/// publications.
#[test]
fn what_was_done_at_once_is_kept_all_or_not_at_all() {
    const FILES: usize = 3 * CHANGES_MAX;
    let (catalog, _folder) = namespace(7);
    let run = catalog.names().mkdir(&ME, TREE_ROOT, b"run", 0o755).unwrap().node;
    let name = |number: usize| format!("f{number:04}").into_bytes();
    for number in 0..FILES {
        catalog.names().symlink(&ME, run, &name(number), b"x").unwrap();
    }
    let (mut script, mut etcd) = (Script::anew(BY, 0), Etcd::default());
    catalog.catalog().remember_removed(&[], true);
    catalog.catalog().collect_unkept(true);
    assert!(take(&mut script, &catalog, usize::MAX, &[(life(2), 5)]));
    etcd.make_all(&mut script);
    let before = tree(&catalog);
    // `mkdir moved; mv run/* moved/; rmdir run`: the new directory has the highest number.
    let moved = catalog.names().mkdir(&ME, TREE_ROOT, b"moved", 0o755).unwrap().node;
    for number in 0..FILES {
        catalog.names().rename(&ME, (run, &name(number)), (moved, &name(number)), 0).unwrap();
    }
    catalog.names().rmdir(&ME, TREE_ROOT, b"run").unwrap();
    assert!(take(&mut script, &catalog, usize::MAX, &[(life(2), 6)]));
    let after = tree(&catalog);
    let mut seen = BTreeMap::new();
    while let Some(step) = script.next_step() {
        etcd.make(step);
        script.made();
        let kept = etcd.load().expect("it stays whole");
        let published = kept.published()[&life(2)];
        assert_eq!(kept_paths(&kept), if published == 5 { before.clone() } else { after.clone() });
        *seen.entry(published).or_insert(0) += 1;
        // The successor makes the changes that were written down, and writes the differences.
        let (other, _folder) = namespace(8);
        assert!(other.mirror().become_catalog(
            &kept.directories(i64::MAX),
            other.catalog().moment_before(),
            None
        ));
        let found = tree(&other);
        let mut next = Script::after(kept, (Epoch(4), Incarnation(8)), true, child(&other));
        other.catalog().remember_removed(&[], true);
        other.catalog().collect_unkept(false);
        assert!(take(&mut next, &other, usize::MAX, &[]));
        let mut copy = Etcd { keys: etcd.keys.clone(), ..etcd };
        copy.make_all(&mut next);
        assert_eq!(kept_paths(&copy.load().expect("whole")), found);
        assert!(!copy.keys.keys().any(|key| key.contains("/lot/")), "{:?}", copy.keys.keys());
    }
    assert!(seen[&5] >= 2 && seen[&6] >= 2, "{seen:?}");
}
