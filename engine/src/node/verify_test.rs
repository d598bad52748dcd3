//! Tests of `verify`: what a finding comes to, and which findings count.

use super::*;
use crate::node::book::{Book, Number, VersionBook};
use crate::node::inventory::Inventory;
use crate::node::recover::Recovered;
use crate::node::run::NodeParts;
use crate::node::schedule::{shared_over, tier1};
use crate::node::scrub::{BadChunk, HealError, HostFound, Scrubbed, Target, Unseen};
use crate::restore::Origin;
use bytes::Bytes;
use tidemark_namespace::{Caller, ROOT};
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::format::{Document, FORMAT};
use tidemark_protocol::id::{
    AttemptId, Epoch, FileCounter, FileId, Incarnation, SealNumber, Step, Timeline, Version,
};
use tidemark_protocol::key::{Key, NodeLife, Part, VersionId};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::manifest::{Attributes, Manifest, ManifestFile, Prepared};
use tidemark_protocol::marker::{Decision, Retired};
use tidemark_protocol::path::{CheckpointName, RelPath, RunPath};
use tidemark_protocol::recognise::{CheckpointId, Rules};
use tidemark_protocol::record::{Evidence, Record, RecordFile};
use tidemark_protocol::report::{ExitCode, Verify};
use tidemark_store::{MemoryStore, Store};

const FILE: FileId = FileId { incarnation: Incarnation(1), counter: FileCounter(9) };

/// Makes a file with this finding only.
fn host(found: HostFound) -> Found {
    let target = Target {
        node: 9,
        file: FILE,
        seal: SealNumber(1),
        path: "r/a.pt".into(),
        size_bytes: 5,
        crc: Crc64(1),
        chunks: vec![Crc64(1)].into(),
        host: true,
        object: None,
        more: Vec::new(),
    };
    let host = Scrubbed { file: FILE, seal: SealNumber(1), path: "r/a.pt".into(), found };
    Found { target, bad: None, deep: false, host: Some(host), objects: Vec::new(), peers: Vec::new() }
}

fn added(found: &Found) -> Verify {
    let mut verify = Verify::default();
    add(&mut verify, found);
    verify
}

fn bad_chunk() -> BadChunk {
    BadChunk { path: "r/a.pt".into(), chunk: 0, expected: Crc64(1), found: Crc64(2) }
}

#[test]
fn a_host_copy_that_nobody_looked_at_is_neither_good_nor_lost() {
    let gone = added(&host(HostFound::Unseen(Unseen::Gone)));
    assert_eq!((gone.copies, gone.unchecked.len(), gone.unrecoverable.len()), (0, 1, 0), "{gone:?}");
    assert_eq!(gone.exit_code(), ExitCode::Done, "it may have been saved again meanwhile");
    let unreadable = Unseen::Unreadable(std::io::ErrorKind::OutOfMemory.into());
    let unreadable = added(&host(HostFound::Unseen(unreadable)));
    assert_eq!((unreadable.copies, unreadable.unchecked.len()), (0, 1), "{unreadable:?}");
    assert_eq!(unreadable.exit_code(), ExitCode::Unavailable, "what was asked for was not read");
}

#[test]
fn the_other_copies_of_bad_bytes_are_read_and_not_only_asked_for() {
    let bad = host(HostFound::Bad { bad: bad_chunk(), why: HealError::InUse }).host;
    assert!(reads_all(false, false, bad.as_ref()));
    assert!(reads_all(false, true, None), "no copy could be read before");
    assert!(reads_all(true, false, None));
    let good = host(HostFound::Good).host;
    assert!(!reads_all(false, false, good.as_ref()));
    let healed = host(HostFound::Healed { bad: bad_chunk(), from: Origin::Object }).host;
    assert!(!reads_all(false, false, healed.as_ref()), "its object was read to heal it");
}

#[test]
fn a_repair_says_where_the_good_bytes_came_from() {
    for (from, word) in [(Origin::Peer, "peer"), (Origin::Object, "object")] {
        let healed = added(&host(HostFound::Healed { bad: bad_chunk(), from }));
        assert_eq!((healed.repaired.len(), healed.repaired[0].from.as_str()), (1, word), "{healed:?}");
    }
}

#[test]
fn what_has_no_checksum_is_named_with_its_reason_up_to_a_number() {
    let unsealed = |count: usize| -> Vec<Unsealed> {
        let why = why_unsealed(&FileState::Open { writers: 2 }).unwrap();
        let of =
            |number| Unsealed { path: format!("r/{number}"), size_bytes: 1, host: true, why: why.clone() };
        (0..count).map(of).collect()
    };
    assert!(not_checked(b"r", Vec::new()).is_empty());
    let rows = not_checked(b"r", unsealed(UNSEALED_MAX));
    assert_eq!((rows.len(), rows[0].path.as_str()), (UNSEALED_MAX, "r/0"));
    assert!(rows[0].what.contains("2 open writers"), "{}", rows[0].what);
    let rows = not_checked(b"r", unsealed(UNSEALED_MAX + 3));
    assert_eq!((rows.len(), rows[UNSEALED_MAX].path.as_str()), (UNSEALED_MAX + 1, "r"));
    assert!(rows[UNSEALED_MAX].what.starts_with("3 more files"), "{}", rows[UNSEALED_MAX].what);
}

const SEAL: SealNumber = SealNumber(1);
const NUMBER: Number = (Timeline(0), Version(1));

fn checkpoint_id() -> CheckpointId {
    let run = RunPath::new(RelPath::new("r").unwrap()).unwrap();
    CheckpointId { run, directory: CheckpointName::new("step1.pt").unwrap() }
}

fn version_id() -> VersionId {
    let CheckpointId { run, directory } = checkpoint_id();
    VersionId { run, directory, timeline: NUMBER.0, version: NUMBER.1 }
}

/// Makes a committed version of one file that the tree does not show, as the loop knows it.
fn committed() -> VersionBook {
    let path = RelPath::new("r/step1.pt").unwrap();
    let life = NodeLife { node: "n".parse().unwrap(), incarnation: FILE.incarnation };
    let crc64nvme = Crc64(tidemark_kernels::crc64(b"bytes"));
    let entry = RecordFile { path: path.clone(), file: FILE, seal: SEAL, size_bytes: 5, crc64nvme };
    let record = Record {
        format: FORMAT,
        version: version_id(),
        attempt: AttemptId(5),
        step: Some(Step(1)),
        framework: "torch_save".into(),
        evidence: Evidence::Told,
        evidence_detail: "a test".into(),
        epoch: Epoch(1),
        completed_at_ns: 1,
        participants: vec![life.clone()],
        files: vec![entry],
        partial: false,
        doubted: false,
    };
    let file = ManifestFile {
        path: path.clone(),
        key: Key::data(&record.version, Part::from(record.attempt), &path).unwrap().to_string(),
        size_bytes: 5,
        crc64nvme,
        chunks: vec![crc64nvme],
        encoding: None,
        etag: None,
        file: FILE,
        seal: SEAL,
        attributes: Attributes::default(),
    };
    let prepared = Prepared {
        format: FORMAT,
        version: record.version.clone(),
        attempt: record.attempt,
        epoch: record.epoch,
        life,
        by: None,
        chunk_bytes: CHUNK_BYTES,
        files: vec![file],
        directories: Vec::new(),
        symlinks: Vec::new(),
        hard_links: Vec::new(),
    };
    let manifest = Manifest::join(&record, &[prepared]).unwrap();
    let contents = [(path, (FILE, SEAL))].into();
    let mut version = VersionBook::new(Checkpoint::decided(record, Decision::Commit), contents);
    version.committed = Some((Arc::new(manifest), Epoch(1)));
    version
}

/// Makes a node that knows the version, over a Tier-3 that has none of its bytes.
fn node(store: &Arc<dyn Store>, tier1: &Arc<tidemark_tier1::Tier1>) -> Node {
    let mut book = Book::new(checkpoint_id());
    book.versions.insert(NUMBER, committed());
    let mut recovered = Recovered::default();
    recovered.books.insert(checkpoint_id(), book);
    // Another life than wrote it.
    let shared = shared_over(Arc::clone(store), tier1, FILE.incarnation.0 + 1);
    Node::start(NodeParts { shared, rules: Rules::builtin(), recovered })
}

/// Returns the one file that there is to verify.
async fn listed(node: &Node) -> Listed {
    let mut listed = node.ask(|engine| Inventory { engine }.targets_and_stored(b"")).await.unwrap();
    assert_eq!(listed.len(), 1, "{listed:?}");
    listed.remove(0)
}

async fn look(node: &Node, listed: &Listed) -> Found {
    let target = listed.target.clone();
    let objects = Objects { node }.check_objects(&target, &listed.suspects, true, None).await;
    Found { target, bad: None, deep: true, host: None, objects, peers: Vec::new() }
}

/// Returns what a `verify` says of `found`, and whether the loop remembers anything.
async fn told(node: &Node, found: Found) -> (Option<Verify>, bool) {
    let (found, remembers) = node
        .ask(move |engine| {
            let found = take_in(engine, found);
            let is_lost = engine.shared.restorer.losses.why(FILE, SEAL).is_some();
            let is_bad = !engine.scrub.bad_objects.is_empty() || !engine.scrub.unmended.is_empty();
            (found, is_lost || is_bad)
        })
        .await
        .unwrap();
    (found.as_ref().map(added), remembers)
}

/// Retires the version between the listing, or the look, and the report.
#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_are_missing_because_their_version_was_retired_are_no_finding_and_are_forgotten() {
    let (_folder, tier1) = tier1();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let node = node(&store, &tier1);
    let listed = listed(&node).await;
    let (first, second) = (look(&node, &listed).await, look(&node, &listed).await);
    let (verify, remembers) = told(&node, first).await;
    let verify = verify.expect("it stands, and its bytes are missing");
    assert_eq!((verify.unrecoverable.len(), verify.bad_objects, remembers), (1, 1, true), "{verify:?}");

    let retire = |engine: &mut Engine| {
        engine.scrub.unmended.push(("r/step1.pt".into(), "its record is not there".into()));
        engine.versions().forget_version(&checkpoint_id(), NUMBER, "a test");
    };
    node.ask(retire).await.unwrap();
    let (verify, remembers) = told(&node, second).await;
    assert!(verify.is_none() && !remembers, "it was given up after the look: {verify:?}");
    let third = look(&node, &listed).await;
    assert!(matches!(third.objects[0].1, ObjectFound::GivenUp), "it was given up before the look");
    assert!(told(&node, third).await.0.is_none());
    assert!(node.ask(|engine| Inventory { engine }.targets_and_stored(b"").is_empty()).await.unwrap());
    node.stop();
}

/// Another coordinator retires the version: this one learns of that from Tier-3 only.
#[tokio::test(flavor = "multi_thread")]
async fn bytes_of_which_tier_3_says_that_they_were_given_up_are_no_finding_and_are_not_written_again() {
    let (_folder, tier1) = tier1();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let node = node(&store, &tier1);
    let listed = listed(&node).await;
    store.create(&Key::Retired { version: version_id() }.to_string(), retirement()).await.unwrap();
    let found = look(&node, &listed).await;
    let (verify, remembers) = told(&node, found).await;
    assert!(verify.is_none() && !remembers, "{verify:?}");
    let key = &listed.target.object.as_ref().unwrap().key;
    assert_eq!(store.head(key).await.unwrap(), None);
    node.stop();
}

/// Returns the document that retires the version.
fn retirement() -> Bytes {
    let version = committed();
    let manifest = version.manifest().unwrap();
    let retired = Retired {
        format: FORMAT,
        version: version_id(),
        attempt: manifest.attempt,
        manifest_hash: manifest.encode_named().unwrap().1,
        epoch: Epoch(1),
        reason: "a test".into(),
        retired_at_ns: 1,
    };
    retired.encode().unwrap().into()
}

/// A proxy that wants a password answers with a page: that retires nothing.
#[tokio::test(flavor = "multi_thread")]
async fn bytes_are_a_finding_where_no_document_says_that_they_were_given_up() {
    let (_folder, tier1) = tier1();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let node = node(&store, &tier1);
    let listed = listed(&node).await;
    let page = Bytes::from_static(b"<html>login</html>");
    store.create(&Key::Retired { version: version_id() }.to_string(), page).await.unwrap();
    let found = look(&node, &listed).await;
    let (verify, remembers) = told(&node, found).await;
    let verify = verify.expect("the version stands, and its bytes are missing");
    assert_eq!((verify.unrecoverable.len(), verify.bad_objects, remembers), (1, 1, true), "{verify:?}");
    node.stop();
}

/// Returns a node whose tree shows one file by the object of the version, and the file's bytes. The node knows the version by its
/// name only.
fn showing(store: &Arc<dyn Store>, tier1: &Arc<tidemark_tier1::Tier1>) -> (Node, (FileId, SealNumber)) {
    const O_RDWR: i32 = 2;
    let shared = shared_over(Arc::clone(store), tier1, FILE.incarnation.0 + 1);
    let namespace = &shared.namespace;
    let caller = Caller { uid: 0, gid: 0, pid: 0, now_ns: 0, request: 0 };
    let (_, open) = namespace.create(&caller, ROOT, b"step1.pt", 0o644, O_RDWR).unwrap();
    assert_eq!(open.backing.write_at(b"bytes", 0).unwrap(), 5);
    namespace.handles().flush(open.fh, &caller, false).unwrap();
    namespace.handles().release(open.fh).unwrap();
    let ticket = namespace.seals().begin_seal(open.node).unwrap();
    let sums = crate::chunk::hash(b"bytes", 1);
    namespace.seals().finish_seal(&ticket, sums.crc, sums.chunks).unwrap();
    let version = committed();
    let object = ObjectCopy::of(&version.manifest().unwrap().files[0]);
    assert!(namespace.hosts().note_object(ticket.file, ticket.seal, object));
    let node = Node::start(NodeParts { shared, rules: Rules::builtin(), recovered: Recovered::default() });
    (node, (ticket.file, ticket.seal))
}

/// Two coordinators: the other one retired what this one's tree shows. The objects were gone before the check.
#[tokio::test(flavor = "multi_thread")]
async fn bytes_that_the_tree_shows_are_missed_though_another_coordinator_gave_them_up() {
    let (_folder, tier1) = tier1();
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let (node, (file, seal)) = showing(&store, &tier1);
    store.create(&Key::Retired { version: version_id() }.to_string(), retirement()).await.unwrap();
    let first = listed(&node).await;
    let key = first.target.object.as_ref().unwrap().key.clone();
    let mut found = look(&node, &first).await;
    let path = first.target.path.clone();
    found.host = Some(Scrubbed { file, seal, path, found: HostFound::Good });
    let (verify, remembers) = told(&node, found).await;
    let verify = verify.expect("the tree shows it");
    assert_eq!((verify.bad_objects, verify.unchecked.len(), remembers), (1, 1, true), "{verify:?}");
    assert!(verify.unchecked[0].what.contains("given up by another coordinator"), "{verify:?}");
    assert!(
        !node.shared().namespace.hosts().has_object(file, seal),
        "the host copy is the only one, and stays"
    );

    // No name leads to the object any more, and the host copy was not checked.
    let second = listed(&node).await;
    let (verify, _) = told(&node, look(&node, &second).await).await;
    let verify = verify.expect("the tree shows it");
    assert_eq!((verify.bad_objects, verify.unrecoverable.len()), (1, 1), "{verify:?}");
    assert!(node.shared().restorer.losses.why(file, seal).is_some(), "it is lost");
    assert_eq!(store.head(&key).await.unwrap(), None, "it is not written again");
    node.stop();
}
