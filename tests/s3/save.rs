//! A checkpoint in Tier-1 as the loop hands it to the commit, repeatedly, and reads of it from Tier-3.
//!
//! Owns: sealed files, attempts made of them, drains and readers of one server. Does not own: faults meanwhile
//! (`matrix`), the verdict (`audit`).

use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tidemark_engine::chunk::{self, SealSums};
use tidemark_engine::metrics::Metrics;
use tidemark_engine::save::commit::{Attempt, AttemptFile};
use tidemark_engine::save::drain::Drain;
use tidemark_engine::save::loose::{LooseBytes, LooseUpload};
use tidemark_namespace::{Caller, Namespace, NamespaceSettings, SealPin};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::format::FORMAT;
use tidemark_protocol::id::{AttemptId, Epoch, Generation, Incarnation, Step, Timeline, Version};
use tidemark_protocol::key::{NodeLife, VersionId};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::loose::Left;
use tidemark_protocol::manifest::Attributes;
use tidemark_protocol::path::{CheckpointName, RelPath, RunPath};
use tidemark_protocol::record::{Evidence, Record, RecordFile};
use tidemark_store::{Probe, RetryPolicy, Store, StoreSettings, UploadLimits, open_with};
use tidemark_tests::audit::Files;
use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

pub(super) const LARGE: &str = "model.bin";
pub(super) const SMALL: &str = "meta.json";
pub(super) const LOOSE: &str = "notes.txt";

/// Prefix of all objects in the bucket.
pub(super) const PREFIX: &str = "p";

const INCARNATION: Incarnation = Incarnation(7);
const READ_WRITE: i32 = 2;

#[derive(Debug)]
struct Sealed {
    entry: RecordFile,
    bytes: Bytes,
    chunks: Arc<[Crc64]>,
    pin: Arc<SealPin>,
}

/// Sealed files that stay in Tier-1 for as long as this value lives. Every test makes its attempts of them.
#[derive(Debug)]
pub(super) struct Sealer {
    sealed: BTreeMap<&'static str, Sealed>,
    _namespace: Arc<Namespace>,
    _folder: TempDir,
}

/// Sealed files of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    /// A file of two parts, the second of one byte, and a small file.
    Whole,
    /// The small file.
    Light,
}

pub(super) fn tier1(folder: &TempDir, size_bytes: u64) -> Arc<Tier1> {
    let medium = MediumChoice::Directory(folder.path().to_path_buf());
    Tier1::open(Tier1Settings { size_bytes, ballast: false, medium }).expect("Tier-1")
}

pub(super) fn folder() -> TempDir {
    tempfile::Builder::new().prefix("tidemark-s3-").tempdir_in("/dev/shm").expect("a folder in memory")
}

pub(super) fn life() -> NodeLife {
    NodeLife { node: "n1".parse().expect("a name"), incarnation: INCARNATION }
}

impl Sealer {
    pub(super) fn new() -> Self {
        let folder = folder();
        let tier1 = tier1(&folder, 64 << 20);
        let namespace = Namespace::new(NamespaceSettings::new(INCARNATION), tier1).expect("a namespace");
        let large = usize::try_from(CHUNK_BYTES).expect("a chunk fits") + 1;
        let pattern = |len: usize| (0..=250_u8).cycle().take(len).collect::<Bytes>();
        let contents = [(LARGE, pattern(large)), (SMALL, pattern(3000)), (LOOSE, pattern(700))];
        let root = namespace.nodes().node_at(b"").expect("the root");
        let mut sealed = BTreeMap::new();
        for (name, bytes) in contents {
            let caller = Caller { uid: 1, gid: 1, pid: 0, now_ns: 1, request: 0 };
            let (_, open) =
                namespace.create(&caller, root, name.as_bytes(), 0o644, READ_WRITE).expect("a file");
            assert_eq!(open.backing.write_at(&bytes, 0).expect("written"), bytes.len());
            namespace.handles().flush(open.fh, &caller, false).expect("flushed");
            namespace.handles().release(open.fh).expect("closed");
            let node = namespace.nodes().node_at(name.as_bytes()).expect("its node");
            let ticket = namespace.seals().begin_seal(node).expect("closed files are sealed");
            let SealSums { crc, chunks } = chunk::hash(&bytes, 1);
            namespace.seals().finish_seal(&ticket, crc, Arc::clone(&chunks)).expect("nobody writes it");
            let pin = namespace.seals().pin_seal(ticket.file, ticket.seal).expect("it is sealed");
            let entry = RecordFile {
                path: path_of(name),
                file: ticket.file,
                seal: ticket.seal,
                size_bytes: ticket.size_bytes,
                crc64nvme: crc,
            };
            sealed.insert(name, Sealed { entry, bytes, chunks, pin: Arc::new(pin) });
        }
        Self { sealed, _namespace: namespace, _folder: folder }
    }

    fn of(&self, content: Content) -> impl Iterator<Item = &Sealed> {
        let names: &[&str] = match content {
            Content::Whole => &[LARGE, SMALL],
            Content::Light => &[SMALL],
        };
        names.iter().map(|name| &self.sealed[name])
    }

    /// Returns the expected content of a version's files.
    pub(super) fn files(&self, content: Content) -> Files {
        self.of(content).map(|file| (file.entry.path.to_string(), file.bytes.clone())).collect()
    }

    /// Returns the expected content of the loose file.
    pub(super) fn loose_files(&self) -> Files {
        let file = &self.sealed[LOOSE];
        [(file.entry.path.to_string(), file.bytes.clone())].into()
    }

    pub(super) fn attempt(&self, content: Content, version: u64, attempt: u64) -> Attempt {
        let record = Record {
            format: FORMAT,
            version: version_id(version),
            attempt: AttemptId(attempt),
            step: Some(Step(1)),
            framework: "told".into(),
            evidence: Evidence::Told,
            evidence_detail: "a test".into(),
            epoch: Epoch(1),
            completed_at_ns: i64::try_from(version).expect("a small number"),
            participants: vec![life()],
            files: self.of(content).map(|file| file.entry.clone()).collect(),
            partial: false,
            doubted: false,
        };
        let files = self.of(content).map(|file| AttemptFile {
            entry: file.entry.clone(),
            attributes: Attributes::default(),
            chunks: Arc::clone(&file.chunks),
            pin: Some(Arc::clone(&file.pin)),
        });
        Attempt::new(record, files.collect(), None)
    }

    pub(super) fn loose(&self, generation: u64) -> LooseUpload {
        let file = &self.sealed[LOOSE];
        LooseUpload {
            path: file.entry.path.clone(),
            generation: Generation(generation),
            file: file.entry.file,
            seal: file.entry.seal,
            bytes: LooseBytes::Sealed { chunks: Arc::clone(&file.chunks), pin: Arc::clone(&file.pin) },
            left: Left::Closed,
            attributes: Attributes::default(),
            session: None,
            closed_at_ns: 1,
            earlier: None,
        }
    }
}

fn path_of(name: &str) -> RelPath {
    let path = if name == LOOSE { format!("r/{name}") } else { format!("r/step1/{name}") };
    RelPath::new(path).expect("a path")
}

pub(super) fn version_id(version: u64) -> VersionId {
    VersionId {
        run: RunPath::new(RelPath::new("r").expect("a path")).expect("a run"),
        directory: CheckpointName::new("step1").expect("a name"),
        timeline: Timeline(0),
        version: Version(version),
    }
}

/// Returns a client that has no knowledge of other clients' requests.
pub(super) async fn fresh(
    url: &str,
    variables: Vec<(String, String)>,
    request_timeout: Duration,
) -> Arc<dyn Store> {
    let settings = StoreSettings {
        request_timeout,
        connect_timeout: request_timeout,
        retry: RetryPolicy {
            attempts: 3,
            first_pause: Duration::from_millis(5),
            longest_pause: Duration::from_millis(20),
        },
        variables: Some(variables),
        ..StoreSettings::default()
    };
    open_with(url, &settings).await.expect("open")
}

pub(super) fn drain(store: Arc<dyn Store>, part_checksums: bool) -> Arc<Drain> {
    let probe = Probe {
        fencing: true,
        fencing_reason: String::new(),
        part_checksums,
        part_checksums_reason: String::new(),
    };
    Arc::new(Drain::new(store, life(), Epoch(1), UploadLimits::default(), &probe, Arc::new(Metrics::new())))
}
