//! Content of tree documents, of small trees.

use super::*;
use crate::node::book::LooseBook;
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::id::{AttemptId, Epoch, FileCounter, Generation, Incarnation, Timeline, Version};
use tidemark_protocol::marker::Decision;
use tidemark_protocol::path::{CheckpointName, RunPath};
use tidemark_protocol::record::{Evidence, Record};

fn path(text: &str) -> RelPath {
    RelPath::new(text).unwrap()
}

fn of(file: u64, seal: u64) -> (FileId, SealNumber) {
    (FileId { incarnation: Incarnation(1), counter: FileCounter(file) }, SealNumber(seal))
}

/// Files by path, and further names of them.
fn tree(files: &[(&str, (FileId, SealNumber))], links: &[(&str, &str)]) -> TreeSnapshot {
    let file = |(path, (file, seal)): &(&str, (FileId, SealNumber))| SnapshotFile {
        node: SnapshotNode { path: path.as_bytes().to_vec(), mode: 0o644, ..SnapshotNode::default() },
        file: *file,
        seal: *seal,
        generation: Generation(1),
        size_bytes: 1,
    };
    let link = |(path, to): &(&str, &str)| tidemark_namespace::SnapshotHardLink {
        path: path.as_bytes().to_vec(),
        to: to.as_bytes().to_vec(),
    };
    TreeSnapshot {
        files: files.iter().map(file).collect(),
        hard_links: links.iter().map(link).collect(),
        ..TreeSnapshot::default()
    }
}

/// Contents of a version, and whether it is committed, settled, or a settled part.
type OfVersion<'a> = (&'a [(&'a str, (FileId, SealNumber))], &'a str);

/// Makes a checkpoint with these versions.
fn book(versions: &[OfVersion<'_>]) -> Book {
    let run = RunPath::new(path("r")).unwrap();
    let id = CheckpointId { run: run.clone(), directory: CheckpointName::new("c").unwrap() };
    let mut book = Book::new(id.clone());
    for ((contents, kind), version) in versions.iter().zip(1..) {
        let record = Record {
            format: FORMAT,
            version: VersionId {
                run: run.clone(),
                directory: id.directory.clone(),
                timeline: Timeline(0),
                version: Version(version),
            },
            attempt: AttemptId(1),
            step: None,
            framework: String::new(),
            evidence: Evidence::Quiescence,
            evidence_detail: String::new(),
            epoch: Epoch(1),
            completed_at_ns: 0,
            participants: Vec::new(),
            files: Vec::new(),
            partial: *kind == "part",
            doubted: false,
        };
        let checkpoint = match *kind {
            "committed" => Checkpoint::decided(record, Decision::Commit),
            _ => Checkpoint::found(record, true).0,
        };
        let contents = contents.iter().map(|(name, of)| (path(name), *of)).collect();
        book.versions.insert((Timeline(0), Version(version)), VersionBook::new(checkpoint, contents));
    }
    book
}

#[test]
fn a_version_that_settled_is_shown_again_only_where_the_tree_shows_it_and_it_is_whole() {
    let (old, new) = ([("r/c/a", of(1, 1)), ("r/c/b", of(2, 1))], [("r/c/a", of(3, 1)), ("r/c/b", of(2, 1))]);
    let shows = |kind, files: &[(&str, (FileId, SealNumber))]| {
        let (book, snapshot) = (book(&[(&old, "committed"), (&new, kind)]), tree(files, &[]));
        let here = Here::of(&snapshot, std::iter::once(&book));
        let shown = &here.shown[&book.id];
        (shown.number.1.0, shown.otherwise)
    };
    assert_eq!(shows("settled", &new), (2, true));
    assert_eq!(shows("settled", &new[..1]), (2, true), "less a name that the job removed");
    assert_eq!(shows("settled", &[("r/c/a", of(3, 2)), new[1]]), (1, false), "saved over once more");
    assert_eq!(shows("settled", &old), (1, false));
    assert_eq!(shows("settled", &[]), (1, false), "all of it is removed");
    assert_eq!(shows("part", &new), (1, false), "a restart hides what is only a part");
    assert_eq!(shows("committed", &old), (2, false), "what is committed goes first");
}

#[test]
fn a_name_of_a_checkpoint_is_removed_once_nothing_of_it_is_needed() {
    let held = [("r/c/a", of(1, 1)), ("r/c/b", of(2, 1))];
    let removed = |files: &[(&str, (FileId, SealNumber))], loose: bool| {
        let (book, snapshot) = (book(&[(&held, "committed")]), tree(files, &[]));
        let here = Here::of(&snapshot, std::iter::once(&book));
        here.removed(&book, &here.shown[&book.id], |_, _| loose)
    };
    let b = RemovedFile { path: path("r/c/b"), file: of(2, 1).0, seal: of(2, 1).1 };
    assert_eq!(removed(&held, false), Removed::Nothing);
    assert_eq!(removed(&held[..1], false), Removed::Files(vec![b.clone()]));
    assert_eq!(removed(&[], false), Removed::All((Timeline(0), Version(1))));
    let other = [held[0], ("r/c/b", of(9, 1))];
    assert_eq!(removed(&other, false), Removed::Later(of(9, 1).0), "its new bytes are on their way");
    assert_eq!(removed(&other, true), Removed::Files(vec![b]), "they are there");
}

#[test]
fn a_loose_file_of_tier3_is_kept_where_its_path_shows_it_or_will() {
    let snapshot = tree(&[("kept", of(1, 1)), ("renamed", of(2, 1))], &[("further", "renamed")]);
    let here = Here::of(&snapshot, std::iter::empty());
    let keeps = |at: &str, held| here.keeps_loose(&path(at), Some(held));
    assert!(keeps("kept", of(1, 1)));
    assert!(keeps("kept", of(7, 1)), "the new bytes follow under this path");
    assert!(!keeps("gone", of(1, 1)));
    assert!(keeps("further", of(2, 1)), "as good as the link");
    assert!(!keeps("further", of(7, 1)), "nothing follows under this path: it is a link");
    assert!(!keeps("further", of(2, 9)), "other bytes of the same file");
}

#[test]
fn attributes_are_listed_where_they_differ_for_the_same_bytes() {
    let snapshot = tree(&[("a", of(1, 2))], &[]);
    let here = Here::of(&snapshot, std::iter::empty());
    let known = |mode| Attributes { mode, ..Attributes::default() };
    assert_eq!(here.differs(of(1, 2), &known(0o644)), None);
    assert_eq!(here.differs(of(1, 1), &known(0o600)), None, "of bytes that nobody will see");
    assert_eq!(here.differs(of(4, 1), &known(0o600)), None, "of a file that is gone");
    let (_, listed) = here.differs(of(1, 2), &known(0o600)).unwrap();
    assert_eq!((listed.file, listed.seal, listed.attributes.mode), (of(1, 2).0, of(1, 2).1, 0o644));
}

#[test]
fn a_directory_is_told_with_a_name_in_it_that_is_told_and_not_before() {
    let files = [("l/keep", of(1, 1)), ("c-2/y.tmp", of(2, 1)), ("c-3/z.tmp", of(3, 1))];
    let links = [("c-1/deep/x.tmp", "l/keep"), ("c-3/more.tmp", "c-3/z.tmp")];
    let snapshot = tree(&files, &links);
    let begun: BTreeSet<_> = ["c-1", "c-1/deep", "c-2", "c-3", "c-4"].map(path).into();
    let has = |loose: &BTreeMap<RelPath, LooseBook>, directory: &str| {
        let unsaved = Unsaved::of(std::iter::empty(), std::iter::empty(), begun.clone(), loose, &snapshot);
        unsaved.has(&path(directory))
    };
    let mut loose = BTreeMap::from([(path("c-2/y.tmp"), LooseBook::default())]);
    assert!(!has(&loose, "c-1") && !has(&loose, "c-1/deep"), "above a further name of a file");
    assert!(has(&loose, "c-2"), "its file is not in Tier-3");
    assert!(has(&loose, "c-3"), "nor is this, by whichever name");
    assert!(has(&loose, "c-4"), "empty");
    assert!(!has(&loose, "l"));
    let there = LooseBook { stage: LooseStage::Uploaded { of: of(2, 1) }, ..LooseBook::default() };
    loose.insert(path("c-2/y.tmp"), there);
    assert!(!has(&loose, "c-2"));
}
