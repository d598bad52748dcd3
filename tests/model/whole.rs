//! Does the node loop keep its promises, whatever happens between a save and its commit?
//!
//! Owns: random saves, removals, commits by a person, flushes and starts with empty memory, over a store that loses
//! answers, and the required content of Tier-3 after each. Does not own: the file system's own behaviour (`main`), one
//! version's states (protocol). With assertions on, the loop checks its own invariants. A broken one ends the loop, and
//! then no question is answered.

use super::{O_RDWR, O_TRUNC, folder, tier1};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tidemark_content::Verdict;
use tidemark_engine::metrics::Metrics;
use tidemark_engine::node::{Events, Names, Node, NodeParts, Shared, recover};
use tidemark_engine::restore::peer::Nearby;
use tidemark_engine::restore::{Restorer, locate};
use tidemark_engine::save::drain::Drain;
use tidemark_engine::settings::Settings;
use tidemark_namespace::{Caller, Clock, FsError, Namespace, NamespaceSettings, OpenOutcome};
use tidemark_protocol::format::Document;
use tidemark_protocol::id::{Epoch, Incarnation};
use tidemark_protocol::invariants;
use tidemark_protocol::key::{Key, NodeLife, VersionId};
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::marker::Marker;
use tidemark_protocol::recognise::Rules;
use tidemark_protocol::record::Record;
use tidemark_store::{
    Effect, Fault, FaultyStore, MemoryStore, Operation, Probe, Store, UploadLimits, raise_epoch,
};
use tidemark_tier1::Tier1;

/// Limit of a flush, longer than any step here takes. A flush that needs it fails the test.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(60);
/// Settle time, so short that versions without evidence settle within a case.
const SETTLE_S: f64 = 0.02;
const STEPS: usize = 3;

#[derive(Debug, Clone)]
enum Op {
    Save {
        step: usize,
    },
    Remove {
        step: usize,
    },
    /// A person commits the step's checkpoint by a command.
    Tell {
        step: usize,
    },
    Flush,
    Pass {
        ms: u64,
    },
    /// The node and its memory are lost. Another start recovers from Tier-3, through a store with this fault.
    Restart {
        fault: usize,
    },
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => (0..STEPS).prop_map(|step| Op::Save { step }),
        1 => (0..STEPS).prop_map(|step| Op::Remove { step }),
        3 => (0..STEPS).prop_map(|step| Op::Tell { step }),
        1 => Just(Op::Flush),
        3 => (0_u64..60).prop_map(|ms| Op::Pass { ms }),
        2 => (0..FAULTS.len()).prop_map(|fault| Op::Restart { fault }),
    ];
    prop::collection::vec(op, 1..14)
}

/// Faults of requests: a lost or a refused one of each kind that a save makes.
const FAULTS: [(Operation, &str, Effect); 7] = [
    (Operation::Create, "attempt.json", Effect::FailAfter),
    (Operation::Upload, "step", Effect::FailBefore),
    (Operation::Upload, "step", Effect::FailAfter),
    (Operation::Create, "prepared-", Effect::FailBefore),
    (Operation::Create, "manifest-", Effect::FailAfter),
    (Operation::Create, "_COMMITTED", Effect::FailBefore),
    (Operation::Create, "_COMMITTED", Effect::FailAfter),
];

struct Site {
    tier1: Arc<Tier1>,
    inner: Arc<dyn Store>,
    epoch: u64,
    node: Option<Node>,
    /// Content of each save, in order.
    saves: Vec<(usize, Vec<u8>)>,
    /// The last save of each step whose name still exists.
    present: BTreeMap<usize, usize>,
    committed: BTreeSet<VersionId>,
    judges: bool,
}

impl Site {
    fn new(tier1: Arc<Tier1>) -> Self {
        let inner: Arc<dyn Store> = Arc::new(MemoryStore::new());
        let (saves, present, committed) = (Vec::new(), BTreeMap::new(), BTreeSet::new());
        Self { tier1, inner, epoch: 0, node: None, saves, present, committed, judges: true }
    }

    fn node(&self) -> &Node {
        self.node.as_ref().unwrap()
    }

    fn namespace(&self) -> Arc<Namespace> {
        Arc::clone(&self.node().shared().namespace)
    }

    /// Starts again, with another epoch and empty memory.
    async fn start(&mut self, fault: usize) {
        if let Some(node) = self.node.take() {
            node.stop();
            // A question is an event: the loop sees the flag and ends.
            while node.standing().await.is_some() {}
        }
        self.epoch += 1;
        raise_epoch(self.inner.as_ref(), Epoch(self.epoch)).await.unwrap();
        let (operation, key, effect) = FAULTS[fault];
        let fault = Fault { operation, key_contains: key.into(), nth: Some(1), effect };
        let store = Arc::new(FaultyStore::new(Arc::clone(&self.inner), vec![fault]));
        // The fault may meet the start itself. Such a start is refused, and the next one must succeed.
        for last in [false, true] {
            let shared = self.shared(Arc::clone(&store) as Arc<dyn Store>);
            match recover(&shared, Names::Empty).await {
                Ok(recovered) => {
                    let rules = Rules::builtin().clone();
                    self.node = Some(Node::start(NodeParts { shared, rules, recovered }));
                    break;
                }
                Err(error) => assert!(!last, "{error:?}"),
            }
        }
        // Files that Tier-3 did not have are lost with the memory.
        self.present = (0..STEPS).filter_map(|step| Some((step, self.shown(step)?))).collect();
        let root = self.namespace().nodes().node_at(b"").unwrap();
        let made = self.namespace().names().mkdir(&caller(), root, b"r", 0o755);
        assert!(matches!(made, Ok(_) | Err(FsError::Exists)), "{made:?}");
    }

    fn shared(&self, store: Arc<dyn Store>) -> Arc<Shared> {
        let incarnation = Incarnation(self.epoch);
        let life = NodeLife { node: "n1".parse().unwrap(), incarnation };
        let probe = Probe {
            fencing: true,
            fencing_reason: String::new(),
            part_checksums: true,
            part_checksums_reason: String::new(),
        };
        let metrics = Arc::new(Metrics::new());
        let mut settings = Settings::default();
        settings.save.settle_s = SETTLE_S;
        settings.content.judge = self.judges;
        let (epoch, limits) = (Epoch(self.epoch), UploadLimits::default());
        let namespace = Namespace::new(NamespaceSettings::new(incarnation), Arc::clone(&self.tier1)).unwrap();
        let drain = Arc::new(Drain::new(store, life, epoch, limits, &probe, Arc::clone(&metrics)));
        let (named, store) = (Arc::clone(&namespace), Arc::clone(&drain.store));
        let restorer = Restorer::new(named, store, Arc::clone(&metrics), 2, Nearby::alone());
        Arc::new(Shared {
            restorer,
            cluster: Default::default(),
            replicator: Default::default(),
            settings,
            namespace,
            tier1: Arc::clone(&self.tier1),
            drain,
            metrics,
            events: Events::default(),
            clock: Clock::system(),
            sizes: Arc::default(),
            seal_threads: 1,
        })
    }

    /// Returns the save that the tree shows. The size identifies it, because no two saves have the same.
    fn shown(&self, step: usize) -> Option<usize> {
        let namespace = self.namespace();
        let view = namespace.nodes().view(namespace.nodes().node_at(&path(step))?)?;
        self.saves.iter().position(|(_, bytes)| bytes.len() as u64 == view.size_bytes)
    }

    fn save(&mut self, step: usize) {
        self.save_bytes(step, vec![u8::try_from(step).unwrap(); self.saves.len() + 1]);
    }

    fn save_bytes(&mut self, step: usize, bytes: Vec<u8>) {
        let namespace = self.namespace();
        let folder = namespace.nodes().node_at(b"r").unwrap();
        let file = loop {
            let opened = match namespace.nodes().node_at(&path(step)) {
                Some(node) => namespace.open(&caller(), node, O_RDWR | O_TRUNC),
                None => {
                    let made = namespace.create(&caller(), folder, &name(step), 0o644, O_RDWR);
                    made.map(|(_, file)| OpenOutcome::Ready(file))
                }
            };
            match opened {
                Ok(OpenOutcome::Ready(file)) => break file,
                // A program reads the old bytes, so a look-up gives the name to another file, which gets the new bytes.
                Err(FsError::Stale) => {
                    namespace.lookup_anew(&caller(), folder, &name(step)).unwrap();
                }
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(file.backing.write_at(&bytes, 0).unwrap(), bytes.len());
        namespace.handles().flush(file.fh, &caller(), false).unwrap();
        namespace.handles().release(file.fh).unwrap();
        self.present.insert(step, self.saves.len());
        self.saves.push((step, bytes));
    }

    /// Returns the content verdict on a step's file, once it is sealed.
    async fn verdict(&self, step: usize) -> Option<Verdict> {
        let namespace = self.namespace();
        loop {
            let view = namespace.nodes().view(namespace.nodes().node_at(&path(step)).unwrap()).unwrap();
            if view.sealed().is_some() {
                // The loop keeps the verdict in the turn in which it seals, so any later answer follows both.
                assert!(self.node().standing().await.is_some());
                let view = namespace.nodes().view(view.node).expect("it has a name");
                return view.content.map(|content| content.verdict);
            }
            assert!(view.content.is_none(), "the verdict is of older bytes");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    async fn apply(&mut self, op: &Op) {
        match op {
            Op::Save { step } => self.save(*step),
            Op::Remove { step } => {
                let namespace = self.namespace();
                let folder = namespace.nodes().node_at(b"r").unwrap();
                let removed = namespace.names().unlink(&caller(), folder, &name(*step));
                assert_eq!(removed.is_ok(), self.present.remove(step).is_some());
            }
            Op::Tell { step } => {
                self.node().commit(path(*step)).await.expect("the loop runs");
            }
            Op::Flush => self.flush().await,
            Op::Pass { ms } => tokio::time::sleep(Duration::from_millis(*ms)).await,
            Op::Restart { fault } => self.start(*fault).await,
        }
    }

    /// Flushes, and checks that each existing name is committed with its present bytes.
    async fn flush(&mut self) {
        let flush = self.node().flush(Vec::new(), true, Some(FLUSH_TIMEOUT), |_| ()).await;
        let flush = flush.expect("the loop runs");
        assert!(!flush.timed_out && flush.pending.is_empty(), "{flush:?}");
        let newest = self.newest_committed_saves().await;
        for (step, save) in &self.present {
            assert_eq!(newest.get(step), Some(save), "step {step} of {newest:?}");
        }
    }

    /// Returns the save in the newest committed version of each step.
    async fn newest_committed_saves(&self) -> BTreeMap<usize, usize> {
        let mut newest = BTreeMap::new();
        for manifest in self.manifests().await {
            let save = self.save_of(&manifest).await;
            let found = newest.entry(self.saves[save].0).or_insert((manifest.version.version, save));
            *found = (*found).max((manifest.version.version, save));
        }
        newest.into_iter().map(|(step, (_, save))| (step, save)).collect()
    }

    async fn manifests(&self) -> Vec<Manifest> {
        let catalog = locate::read(&self.inner).await.unwrap();
        assert!(catalog.passed_over.is_empty(), "{:?}", catalog.passed_over);
        catalog.committed.into_iter().map(|version| version.manifest).collect()
    }

    async fn save_of(&self, manifest: &Manifest) -> usize {
        let [file] = &manifest.files[..] else { panic!("{} files", manifest.files.len()) };
        let bytes = self.inner.get(&file.key, 1 << 20).await.unwrap().expect("a committed file is there");
        let saved = self
            .saves
            .iter()
            .position(|(step, saved)| *saved == bytes && path(*step) == file.path.as_bytes());
        saved.expect("what is committed was saved, as a whole and under that name")
    }

    /// Returns the invariants that do not hold, in order of path.
    async fn verify(&self) -> Vec<String> {
        let verify = self.node().verify(Vec::new(), false, |_| ()).await.expect("the loop runs");
        assert!(verify.unrecoverable.is_empty() && verify.unchecked.is_empty(), "{verify:?}");
        verify.broken.into_iter().map(|broken| broken.invariant).collect()
    }

    async fn damage(&self, key: &str) {
        let mut bytes = self.inner.get(key, 1 << 20).await.unwrap().unwrap().to_vec();
        bytes[40] ^= 1;
        self.inner.delete(key).await.unwrap();
        self.inner.create(key, bytes.into()).await.unwrap();
    }

    /// Checks the rules that Tier-3 must satisfy at any moment.
    async fn look(&mut self) {
        let mut manifests = self.manifests().await;
        for manifest in &manifests {
            assert!(manifest.evidence.commits(), "quiescence commits nothing");
            let (version, attempt) = (manifest.version.clone(), manifest.attempt);
            let key = Key::Record { version, attempt }.to_string();
            let record = self.inner.get(&key, 1 << 20).await.unwrap().expect("a record comes first");
            let record = Record::parse(&record).unwrap();
            assert_eq!(
                invariants::a_manifest_holds_exactly_the_files_of_its_record(manifest, &record),
                Ok(())
            );
        }
        let now: BTreeSet<_> = manifests.iter().map(|manifest| manifest.version.clone()).collect();
        assert!(now.is_superset(&self.committed), "a commit is for good");
        self.committed = now;
        // Within a lineage, versions are in the order of their saves, whenever they were proven.
        manifests.sort_by_key(|manifest| manifest.completed_at_ns);
        let mut saves = Vec::new();
        for manifest in &manifests {
            saves.push(self.save_of(manifest).await);
        }
        assert!(saves.is_sorted(), "{saves:?}");
    }
}

fn caller() -> Caller {
    Caller { uid: 1, gid: 1, pid: 0, now_ns: (Clock::system().0)(), request: 0 }
}

fn name(step: usize) -> Vec<u8> {
    format!("step{step}.pt").into_bytes()
}

fn path(step: usize) -> Vec<u8> {
    [b"r/", &name(step)[..]].concat()
}

#[test]
fn what_a_commit_rests_on_is_verified_and_a_finding_names_the_sentence() {
    let folder = folder();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut site = Site::new(tier1(folder.path()));
        site.start(0).await;
        (0..STEPS).for_each(|step| site.save(step));
        site.flush().await;
        assert_eq!(site.verify().await, Vec::<String>::new());
        let manifests = site.manifests().await;
        let keys = |manifest: &Manifest| {
            let (version, attempt) = (manifest.version.clone(), manifest.attempt);
            let (_, hash) = manifest.encode_named().unwrap();
            let marker = Key::Committed { version: version.clone() }.to_string();
            let document = Key::Manifest { version: version.clone(), attempt, hash }.to_string();
            (marker, document, Key::Record { version, attempt }.to_string())
        };
        let [first, second, third] = &manifests[..] else { panic!("{} versions", manifests.len()) };
        let (version, attempt) = (first.version.clone(), first.attempt);
        let otherwise = Marker::abort(version, attempt, first.step, first.epoch).encode().unwrap();
        site.inner.delete(&keys(first).0).await.unwrap();
        site.inner.create(&keys(first).0, otherwise.into()).await.unwrap();
        let manifest = site.inner.get(&keys(second).1, 1 << 20).await.unwrap().unwrap();
        site.damage(&keys(second).1).await;
        let other = site.inner.get(&keys(second).2, 1 << 20).await.unwrap().unwrap();
        site.inner.delete(&keys(third).2).await.unwrap();
        site.inner.create(&keys(third).2, other).await.unwrap();
        // The decision stands. The node has rewritten the documents of the other versions, because it knows their
        // content.
        let sentences = ["a_committed_version_has_its_marker"];
        assert_eq!(site.verify().await, sentences);
        let again = site.inner.get(&keys(second).1, 1 << 20).await.unwrap().unwrap();
        assert_eq!(again, manifest);
        let record = site.inner.get(&keys(third).2, 1 << 20).await.unwrap().unwrap();
        assert_eq!(Record::parse(&record).unwrap().version, third.version);
        site.inner.delete(&keys(second).0).await.unwrap();
        site.inner.delete(&keys(third).0).await.unwrap();
        site.inner.create(&keys(third).0, Vec::new().into()).await.unwrap();
        assert_eq!(site.verify().await, sentences);
        let marker = site.inner.get(&keys(second).0, 1 << 20).await.unwrap().unwrap();
        assert_eq!(Marker::parse(&marker).unwrap().version, second.version);
        let marker = site.inner.get(&keys(third).0, 1 << 20).await.unwrap().unwrap();
        assert_eq!(Marker::parse(&marker).unwrap().version, third.version);
        site.node().stop();
    });
}

/// Returns a header of safetensors for a file of this size.
fn safetensors(bytes: usize) -> Vec<u8> {
    let header = format!(r#"{{"a":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![7; bytes]].concat()
}

#[test]
fn a_sealed_file_is_judged_by_its_bytes_until_they_change() {
    let folder = folder();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let mut site = Site::new(tier1(folder.path()));
        for judges in [true, false] {
            site.judges = judges;
            site.start(0).await;
            // Small files are read, larger files are mapped.
            let large = safetensors(1 << 20);
            site.save_bytes(0, large.clone());
            site.save_bytes(1, large[..large.len() - 1].to_vec());
            site.save_bytes(2, b"step,loss".to_vec());
            let expected =
                if judges { [Some(Verdict::Whole), Some(Verdict::Broken), None] } else { [None; 3] };
            assert_eq!([site.verdict(0).await, site.verdict(1).await, site.verdict(2).await], expected);
            site.save_bytes(0, safetensors(100)[..90].to_vec());
            assert_eq!(site.verdict(0).await, judges.then_some(Verdict::Broken), "of the new bytes");
        }
        site.node().stop();
    });
}

#[test]
fn whatever_comes_between_a_save_and_its_commit_the_promises_hold() {
    let folder = folder();
    let tier1 = tier1(folder.path());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let config =
        ProptestConfig { cases: 12, max_shrink_iters: 30, failure_persistence: None, ..Default::default() };
    proptest!(config, |(ops in ops())| {
        runtime.block_on(async {
            let mut site = Site::new(Arc::clone(&tier1));
            site.start(0).await;
            for op in ops.iter().chain([&Op::Flush, &Op::Restart { fault: 0 }, &Op::Flush]) {
                site.apply(op).await;
                site.look().await;
            }
            site.node().stop();
        });
    });
}
