//! Recovery from a damaged journal gives the namespace of some moment, or a clear refusal, and never a panic.
//!
//! Owns: the damage, very many compactions, and the next daemon's knowledge of the writers. Does not own: the effect of each call on a
//! tree (`main`).

use super::{Op, World, folder, tier1};
use proptest::test_runner::{Config, TestRunner};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use tidemark_namespace::{
    AdoptEntry, AdoptKind, Caller, Ended, Namespace, NamespaceError, NamespaceSettings, ObjectCopy, ROOT,
};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::encoding::{Codec, Encoding};
use tidemark_protocol::id::{FileCounter, FileId, Incarnation, SealNumber};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_tests::machine;
use tidemark_tier1::Tier1;

const NAMES: u64 = 60;

/// A tree that grew by one name at a time, so that the number of names identifies each moment.
struct Journaled {
    tier1: Arc<Tier1>,
    settings: NamespaceSettings,
    file: PathBuf,
    bytes: Vec<u8>,
    /// Offset behind the last record.
    end: usize,
}

impl Journaled {
    fn make() -> (tempfile::TempDir, Self) {
        let folder = folder();
        let tier1 = tier1(folder.path());
        let settings = NamespaceSettings::new(Incarnation(7));
        let namespace = Namespace::new(settings.clone(), Arc::clone(&tier1)).unwrap();
        for number in 1..=NAMES {
            let caller = Caller { uid: 1, gid: 1, pid: 0, now_ns: 1, request: number };
            let (made, open) = namespace.create(&caller, ROOT, name(number).as_bytes(), 0o644, 2).unwrap();
            namespace.session().note_backing_id(open.backing.number(), Some(7)).unwrap();
            namespace.handles().flush(open.fh, &caller, false).unwrap();
            // Every other file is left open.
            if number.is_multiple_of(2) {
                namespace.handles().release(open.fh).unwrap();
            }
            namespace.xattrs().setxattr(made.node, b"user.n", &number.to_le_bytes(), 0, &caller).unwrap();
        }
        drop(namespace);
        let file = PathBuf::from(format!("/proc/self/fd/{}/namespace.0", tier1.journal_dir().as_raw_fd()));
        let bytes = fs::read(&file).unwrap();
        let end = bytes.iter().rposition(|byte| *byte != 0).unwrap() + 1;
        assert!(end > 60 * 50, "{end} bytes of records");
        (folder, Self { tier1, settings, file, bytes, end })
    }

    /// Recovers a namespace from these bytes of a journal.
    fn recover(&self, bytes: &[u8]) -> Result<Arc<Namespace>, NamespaceError> {
        File::options().write(true).open(&self.file).unwrap().write_all_at(bytes, 0).unwrap();
        let (settings, tier1) = (self.settings.clone(), Arc::clone(&self.tier1));
        Namespace::recover(settings, tier1, true, &mut |_| None)
    }

    /// Checks that recovery gives the tree as it was at some moment.
    fn check(&self, damaged: &[u8]) {
        match self.recover(damaged) {
            Ok(namespace) => {
                let names: BTreeSet<_> =
                    namespace.names().readdir(ROOT, 0).unwrap().into_iter().map(|entry| entry.name).collect();
                let expected: BTreeSet<_> =
                    (1..=names.len() as u64).map(|number| name(number).into_bytes()).collect();
                assert_eq!(names, expected, "the first names and no others");
            }
            Err(NamespaceError::Corrupt { .. } | NamespaceError::Version { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

fn name(number: u64) -> String {
    format!("name-{number:04}")
}

#[test]
fn a_journal_cut_off_at_any_byte_replays_to_an_earlier_moment() {
    let (_folder, journaled) = Journaled::make();
    let mut most = 0;
    // The cuts are at every byte of some records, and at every seventh of the rest.
    let cuts = (64..600).chain((600..journaled.end).step_by(7));
    for cut in cuts {
        let mut damaged = journaled.bytes.clone();
        damaged[cut..].fill(0);
        journaled.check(&damaged);
        let Ok(namespace) = journaled.recover(&damaged) else {
            assert_eq!(most, 0, "only the very first change has the root");
            continue;
        };
        let names = namespace.names().readdir(ROOT, 0).unwrap().len();
        assert!(names >= most, "more bytes tell of more: {names} names at {cut}, {most} before");
        most = names;
    }
    assert_eq!(
        journaled.recover(&journaled.bytes).unwrap().names().readdir(ROOT, 0).unwrap().len() as u64,
        NAMES
    );
    assert!(most as u64 >= NAMES - 1);
}

#[test]
fn a_flipped_bit_anywhere_is_a_shorter_journal_or_a_refusal() {
    let (_folder, journaled) = Journaled::make();
    let mut runner = TestRunner::new(Config { cases: 400, failure_persistence: None, ..Config::default() });
    runner
        .run(&(0..journaled.end, 0..8_u8), |(at, bit)| {
            let mut damaged = journaled.bytes.clone();
            damaged[at] ^= 1 << bit;
            journaled.check(&damaged);
            Ok(())
        })
        .unwrap();
}

#[test]
fn a_journal_of_a_newer_version_is_refused_with_both_numbers() {
    let (_folder, journaled) = Journaled::make();
    let mut newer = journaled.bytes.clone();
    let written = u32::from_le_bytes(newer[8..12].try_into().unwrap());
    // A format beyond all known ones, since journals are written in several formats.
    let beyond = 1000;
    newer[8..12].copy_from_slice(&u32::to_le_bytes(beyond));
    let sum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &newer[..32]);
    newer[32..40].copy_from_slice(&sum.to_le_bytes());
    match journaled.recover(&newer) {
        Err(NamespaceError::Version { found, known }) => {
            assert_eq!(found, beyond);
            assert!((written..beyond).contains(&known), "{known}");
        }
        other => panic!("{:?}", other.map(|_| "it was read")),
    }
}

#[test]
fn a_journal_that_is_compacted_again_and_again_replays_to_the_same_tree() {
    let folder = folder();
    let mut world = World::new(tier1(folder.path()));
    world.apply(&Op::Mkdir { dir: 0, name: 0 });
    world.apply(&Op::Mkdir { dir: 0, name: 1 });
    for round in 0..4000_usize {
        world.apply(&Op::Create { dir: round % 3, name: round / 7, exclusive: true, truncate: false });
        world.apply(&Op::Close { handle: 0, cut: false });
        let (dir, to_dir) = (round % 2, round % 3);
        world.apply(&Op::Rename { dir, name: round / 5, to_dir, to_name: round / 11, flags: 0 });
        world.apply(&Op::Unlink { dir: round % 3, name: round / 13 });
        if round % 50 == 49 {
            world.compare();
            world.apply(&Op::Crash);
            world.compare();
        }
    }
}

#[test]
fn where_the_chunks_of_an_encoded_object_lie_is_replayed() {
    // The chunks need more than one record.
    const CHUNKS: u32 = 9000;
    let folder = folder();
    let tier1 = tier1(folder.path());
    let settings = NamespaceSettings::new(Incarnation(7));
    let file = FileId { incarnation: Incarnation(3), counter: FileCounter(1) };
    let size_bytes = u64::from(CHUNKS) * CHUNK_BYTES;
    let object = |codec, first: u32| {
        let encoding = Encoding { codec, lengths: (first..first + CHUNKS).collect() };
        ObjectCopy { key: "k".into(), size_bytes, encoding: Some(Arc::new(encoding)) }
    };
    let adopted = AdoptEntry {
        path: b"f".to_vec(),
        kind: AdoptKind::File {
            file,
            seal: SealNumber(1),
            size_bytes,
            crc: Crc64(0),
            chunks: vec![Crc64(5); CHUNKS as usize].into(),
            object: Some(object(Codec::Planes, 1)),
        },
        mode: 0o644,
        uid: 1,
        gid: 1,
        mtime_ns: 1,
        xattrs: Vec::new(),
    };
    let mut namespace = Namespace::new(settings.clone(), Arc::clone(&tier1)).unwrap();
    let node = namespace.adoption().adopt(&adopted).unwrap();
    let mut expected = object(Codec::Planes, 1);
    for round in 0..3 {
        if round == 1 {
            // Another version's copy of the same bytes takes its place.
            expected = object(Codec::Zstd, 7);
            assert!(namespace.hosts().note_object(file, SealNumber(1), expected.clone()));
        }
        drop(namespace);
        namespace = Namespace::recover(settings.clone(), Arc::clone(&tier1), true, &mut |_| None).unwrap();
        let found = namespace.nodes().view(node).unwrap().object;
        assert!(found.as_ref() == Some(&expected), "round {round}: another copy, or none");
    }
}

#[test]
fn what_changes_add_to_a_snapshot_is_bounded_over_daemons_too() {
    const CHANGE_BYTES: u64 = 1100;
    let folder = folder();
    let tier1 = tier1(folder.path());
    let settings = NamespaceSettings::new(Incarnation(7));
    let caller = Caller { uid: 1, gid: 1, pid: 0, now_ns: 1, request: 0 };
    let first = Namespace::new(settings.clone(), Arc::clone(&tier1)).unwrap();
    let path = |index: u32| format!("/proc/self/fd/{}/namespace.{index}", tier1.journal_dir().as_raw_fd());
    // The changes take a little more than half of the size that triggers a snapshot, which is 2 MiB, or half of a small journal.
    let changes = (fs::metadata(path(0)).unwrap().len() / 2).min(2 << 20) * 6 / 10 / CHANGE_BYTES;
    let change = |namespace: &Namespace| {
        for number in 0..changes {
            let mut value = vec![0; 1 << 10];
            value[..8].copy_from_slice(&number.to_le_bytes());
            namespace.xattrs().setxattr(ROOT, b"user.n", &value, 0, &caller).unwrap();
        }
    };
    let complete = |index: u32| {
        let bytes = fs::read(path(index)).unwrap();
        u32::from_le_bytes(bytes[12..16].try_into().unwrap())
    };
    change(&first);
    drop(first);
    assert_eq!((complete(0), complete(1)), (1, 0), "so much needs no snapshot yet");
    let next = Namespace::recover(settings, Arc::clone(&tier1), true, &mut |_| None).unwrap();
    change(&next);
    assert_eq!(complete(1), 1, "as much again, by another daemon, does");
    assert_eq!(next.xattrs().getxattr(ROOT, b"user.n").unwrap()[..8], (changes - 1).to_le_bytes());
}

#[test]
fn what_one_writer_left_cut_is_cut_after_a_takeover_too() {
    let folder = folder();
    let mut world = World::new(tier1(folder.path()));
    let create = Op::Create { dir: 0, name: 1, exclusive: false, truncate: false };
    let (cut, whole) = (Op::Close { handle: 0, cut: true }, Op::Close { handle: 0, cut: false });
    for op in [create.clone(), create, cut, Op::TakeOver, whole] {
        world.apply(&op);
        world.compare();
    }
}

/// `cp -al` links a file that is still being written, and `mv` renames a file that a killed program left. A takeover does not change
/// what either proves.
#[test]
fn only_a_rename_before_the_cut_vouches_for_a_file_and_the_next_daemon_knows_which_it_was() {
    let folder = folder();
    let tier1 = tier1(folder.path());
    let settings = NamespaceSettings::new(Incarnation(7));
    let caller = Caller { uid: 1, gid: 1, pid: 0, now_ns: 1, request: 0 };
    let first = Namespace::new(settings.clone(), Arc::clone(&tier1)).unwrap();
    let create = |name: &[u8]| first.create(&caller, ROOT, name, 0o644, 2).unwrap();
    let rename = |from: &[u8], to: &[u8]| first.names().rename(&caller, (ROOT, from), (ROOT, to), 0).unwrap();
    let (_, early) = create(b"early.tmp");
    rename(b"early.tmp", b"early");
    let (linked, being_written) = create(b"linked");
    first.names().link(&caller, linked.node, ROOT, b"backup").unwrap();
    let (_, killed) = create(b"killed");
    for open in [&early, &being_written, &killed] {
        first.handles().flush(open.fh, &caller, true).unwrap();
        first.handles().release(open.fh).unwrap();
    }
    first.names().link(&caller, linked.node, ROOT, b"later").unwrap();
    rename(b"killed", b"late");
    let says = |namespace: &Namespace| {
        [b"early".as_slice(), b"linked", b"late"].map(|name| {
            let view = namespace.nodes().view(namespace.nodes().node_at(name).unwrap()).unwrap();
            (view.cut, view.renamed, view.renamed_cut)
        })
    };
    let all = [(true, true, false), (true, false, false), (true, false, true)];
    assert_eq!(says(&first), all);
    drop(first);
    let next = Namespace::recover(settings, tier1, true, &mut |_| None).unwrap();
    assert_eq!(says(&next), all, "after a takeover");
}

/// The kernel reports the end of a process only once, and only to the daemon that watched the process.
#[test]
fn how_a_writer_ended_is_known_to_the_daemons_after_the_one_that_saw_it() {
    if machine::kernel_release() < (6, 15) {
        return machine::left_out("the kernel does not say how a process ended");
    }
    let ways = [(b"well", "exit 0"), (b"fail", "exit 3"), (b"kill", "kill -9 $$"), (b"gone", "exit 0")];
    let folder = folder();
    let tier1 = tier1(folder.path());
    let mut settings = NamespaceSettings::new(Incarnation(7));
    settings.journal_bytes = Some(256 << 10);
    let header = |index: u32, at: usize| {
        let path = format!("/proc/self/fd/{}/namespace.{index}", tier1.journal_dir().as_raw_fd());
        u32::from_le_bytes(fs::read(path).unwrap()[at..at + 4].try_into().unwrap())
    };
    let caller = |pid| Caller { uid: 1, gid: 1, pid, now_ns: 1, request: 0 };
    let first = Namespace::new(settings.clone(), Arc::clone(&tier1)).unwrap();
    for (name, end) in ways {
        let mut shell = Command::new("sh")
            .args(["-c", &format!("read line; {end}")])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let (_, open) = first.create(&caller(shell.id()), ROOT, name, 0o644, 2).unwrap();
        first.handles().flush(open.fh, &caller(shell.id()), true).unwrap();
        first.handles().release(open.fh).unwrap();
        drop(shell.stdin.take());
        shell.wait().unwrap();
    }
    let writer = |name: &[u8]| {
        let view = first.nodes().view(first.nodes().node_at(name).unwrap()).unwrap();
        view.writers.first().expect("it was seen").clone()
    };
    let writers = ways.map(|(name, _)| writer(name));
    let ends = |namespace: &Namespace| [0, 1, 2, 3].map(|at: usize| namespace.writers().end(&writers[at]));
    let format = header(0, 8);
    first.writers().forget_ended_writers();
    let seen = ends(&first);
    let how = [Ended::Well, Ended::Failed, Ended::Killed, Ended::Well];
    assert_eq!(seen.map(|end| end.map(|end| end.how)), how.map(Some));
    assert_eq!(header(0, 8), format, "the daemon of before reads it still");
    drop(first);

    let recover = || Namespace::recover(settings.clone(), Arc::clone(&tier1), true, &mut |_| None).unwrap();
    let next = recover();
    assert_eq!(ends(&next), seen, "by the daemon that took over");
    let gone = next.nodes().node_at(b"gone").unwrap();
    next.names().unlink(&caller(0), ROOT, b"gone").unwrap();
    next.forget(gone, 1);
    // Enough changes for a snapshot, which replaces the first daemon's records.
    for number in 0..1000_u64 {
        if header(1, 12) == 1 {
            break;
        }
        let value = [&number.to_le_bytes()[..], &[0; 1016]].concat();
        next.xattrs().setxattr(ROOT, b"user.n", &value, 0, &caller(0)).unwrap();
    }
    assert_eq!(header(1, 12), 1, "a snapshot is complete");
    drop(next);
    let last = recover();
    let left = [seen[0], seen[1], seen[2], None];
    assert_eq!(ends(&last), left, "after a snapshot, of those whose files are there");
}
