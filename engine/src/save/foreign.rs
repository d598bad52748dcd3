//! Checkpoints in Tier-3 that Tidemark did not write: their objects, their evidence, their checksums.
//!
//! Owns: listing them, recognition under the paths they get, evidence, hashing every byte once. Does not own: the record and the
//! marker (`commit`), the tree (`node::import`).
//!
//! The bytes stay where they are, and a manifest names them there. No checksums exist before, so each byte is hashed once, a chunk
//! at a time. From then on every read is verified like any other: if such an object is changed later, verification fails, and
//! nothing of it is served.

use crate::flight::Flight;
use futures::stream::{self, StreamExt, TryStreamExt};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::evidence::{
    Before, Covered, Facts, FileFact, IndexError, MAX_INDEX_BYTES, SETTLE_NS, Told, Verdict, complete,
    parse_index,
};
use tidemark_protocol::file::FileState;
use tidemark_protocol::key::is_foreign;
use tidemark_protocol::layout::{chunk_count, chunk_range};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{Candidate, Rules};
use tidemark_protocol::record::Evidence;
use tidemark_protocol::visibility::Content;
use tidemark_store::{Listing, ObjectHead, Store, StoreError};

/// Maximum number of indices read of a checkpoint, which has one or two.
const INDICES_MAX: usize = 64;

/// An object under the path that it gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignFile {
    pub path: RelPath,
    pub object: ObjectHead,
}

/// A recognised checkpoint.
#[derive(Debug)]
pub struct ForeignCheckpoint {
    pub candidate: Candidate,
    /// The files, in order of path.
    pub files: Vec<ForeignFile>,
}

impl ForeignCheckpoint {
    #[must_use]
    pub fn size_bytes(&self) -> u64 {
        self.files.iter().map(|file| file.object.size_bytes).sum()
    }
}

/// The objects below a path.
#[derive(Debug, Default)]
pub struct Found {
    /// The checkpoints, in order of run, step and name.
    pub checkpoints: Vec<ForeignCheckpoint>,
    /// Number of files that belong to no checkpoint.
    pub loose: u64,
    /// Objects that cannot be files of the mount, each with the reason.
    pub refused: Vec<(String, String)>,
}

/// Lists `from` (a directory of Tier-3, or one object), as if it were at `to` on the mount.
///
/// # Errors
/// The store is away, or there is more than a listing may hold.
pub async fn find(
    store: &Arc<dyn Store>,
    rules: &Rules,
    from: &str,
    to: &RelPath,
) -> Result<Found, StoreError> {
    let prefix = format!("{from}/");
    let Listing { mut keys, .. } = store.list(&prefix, false).await?;
    if keys.is_empty() {
        keys.extend(store.head(from).await?);
    }
    let mut found = Found::default();
    let mut files = BTreeMap::new();
    for object in keys {
        let below = object.key.strip_prefix(&prefix);
        let path = match below.map(|below| RelPath::new(below.as_bytes())) {
            None => Ok(to.clone()),
            Some(below) => below.and_then(|below| to.join(&below)),
        };
        match path {
            Ok(path) if is_foreign(&object.key) => {
                files.insert(path, object);
            }
            Ok(_) => {
                let why = "it is where Tidemark keeps its own objects".to_owned();
                found.refused.push((object.key, why));
            }
            Err(problem) => found.refused.push((object.key, format!("it cannot be a path: {problem}"))),
        }
    }
    // A file is recognised by its neighbours, too, and all of them are known here.
    let grouping = rules.group(files.keys());
    found.loose = u64::try_from(grouping.loose.len()).expect("a count fits 64 bits");
    found.checkpoints = grouping
        .candidates
        .into_iter()
        .map(|candidate| {
            let of = candidate.files.keys().filter_map(|path| files.get_key_value(path));
            let files = of.map(|(path, object)| ForeignFile { path: path.clone(), object: object.clone() });
            let files = files.collect();
            ForeignCheckpoint { candidate, files }
        })
        .collect();
    let order = |one: &ForeignCheckpoint| {
        (one.candidate.id.run.clone(), one.candidate.step, one.candidate.id.directory.clone())
    };
    found.checkpoints.sort_by_key(order);
    Ok(found)
}

/// Returns the evidence that the checkpoint is whole, or why there is none.
///
/// # Errors
/// An index cannot be read because the store is away.
pub async fn judge(
    store: &Arc<dyn Store>,
    rules: &Rules,
    checkpoint: &ForeignCheckpoint,
) -> Result<Result<(Evidence, String), String>, StoreError> {
    let fact = |file: &ForeignFile| {
        let fact = FileFact {
            state: FileState::Closed,
            size_bytes: file.object.size_bytes,
            // The times of writing are no longer known, and so neither is the order.
            opened_at_ns: 0,
            published_at_ns: 0,
            closed_at_ns: 0,
            vouched: true,
            content: Content::Unknown,
            content_reason: String::new(),
            committed: false,
            before: Before::Nothing,
            doubted: false,
            writers: Vec::new(),
        };
        (file.path.clone(), fact)
    };
    let files: BTreeMap<_, _> = checkpoint.files.iter().map(fact).collect();
    let mut indices: BTreeMap<RelPath, Result<Covered, IndexError>> = BTreeMap::new();
    loop {
        let facts = Facts {
            files: &files,
            indices: &indices,
            told: Told::No,
            history: None,
            older: None,
            succeeded: false,
            removed: &BTreeSet::new(),
            names_before: 0,
            renamed_at_ns: None,
            settle_ns: SETTLE_NS,
        };
        // The time is long after the last write: no further file follows.
        match complete(rules, &checkpoint.candidate, &facts, 2 * SETTLE_NS) {
            Verdict::ReadIndex { path, kind } if indices.len() < INDICES_MAX => {
                let Some(file) = checkpoint.files.iter().find(|file| file.path == path) else {
                    return Ok(Err(format!("{path} is not there")));
                };
                let limit = u64::try_from(MAX_INDEX_BYTES).expect("a constant");
                let index = match store.get(&file.object.key, limit).await {
                    Ok(Some(bytes)) => parse_index(kind, &bytes),
                    Ok(None) => return Ok(Err(format!("{path} is gone"))),
                    Err(StoreError::TooLarge { size_bytes, .. }) => {
                        let bytes = usize::try_from(size_bytes).unwrap_or(usize::MAX);
                        Err(IndexError::TooLarge { bytes })
                    }
                    Err(error) => return Err(error),
                };
                indices.insert(path, index);
            }
            Verdict::Complete { evidence, detail } => return Ok(Ok((evidence, detail))),
            Verdict::Settled { .. } => {
                let detail = "an administrator imported it; nothing in it says whether every rank wrote";
                return Ok(Ok((Evidence::Told, detail.to_owned())));
            }
            Verdict::Open { why, .. }
            | Verdict::Incomplete { why, .. }
            | Verdict::Torn { why }
            | Verdict::Broken { why, .. } => {
                return Ok(Err(why));
            }
            Verdict::ReadIndex { path, .. } => {
                return Ok(Err(format!(
                    "{path} is index number {}, and {INDICES_MAX} are read",
                    INDICES_MAX + 1
                )));
            }
        }
    }
}

/// Returns the chunk checksums of an object. Costs a read of the whole object, and a chunk of memory for each place. Calls `tell` with
/// the bytes of each read.
///
/// # Errors
/// The store is away, or the object has become shorter.
pub async fn sums(
    store: &Arc<dyn Store>,
    object: &ObjectHead,
    flight: &Arc<Flight>,
    tell: impl Fn(u64),
) -> Result<Vec<Crc64>, StoreError> {
    let size_bytes = object.size_bytes;
    let tell = &tell;
    let sum = |chunk| {
        let (store, key) = (Arc::clone(store), object.key.clone());
        async move {
            let range = chunk_range(size_bytes, chunk);
            let _place = flight.begin(range.end - range.start).await;
            let bytes = store.get_range(&key, range.clone()).await?;
            tell(range.end - range.start);
            // A chunk keeps a core busy for milliseconds: not on a runtime thread.
            let hashed = tokio::task::spawn_blocking(move || Crc64(tidemark_kernels::crc64(&bytes)));
            Ok(hashed.await.expect("hashing does not panic"))
        }
    };
    stream::iter(0..chunk_count(size_bytes)).map(sum).buffered(flight.most()).try_collect().await
}

/// Returns the directories of a checkpoint: its own, if it is a directory, and all in it.
#[must_use]
pub fn directories(checkpoint: &ForeignCheckpoint) -> BTreeSet<RelPath> {
    let Some(top) = checkpoint.candidate.id.path() else { return BTreeSet::new() };
    let above =
        checkpoint.files.iter().flat_map(|file| std::iter::successors(file.path.parent(), RelPath::parent));
    above.filter(|path| *path == top || path.is_below(&top)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use tidemark_store::MemoryStore;

    async fn store(objects: &[(&str, &[u8])]) -> Arc<dyn Store> {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
        for (key, bytes) in objects {
            store.create(key, Bytes::copy_from_slice(bytes)).await.unwrap();
        }
        store
    }

    fn path(text: &str) -> RelPath {
        RelPath::new(text).unwrap()
    }

    const INDEX: &[u8] = br#"{"metadata":{},"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;

    #[tokio::test]
    async fn each_checkpoint_below_a_path_is_recognised_as_on_the_mount() {
        let objects: [(&str, &[u8]); 7] = [
            ("old/run/checkpoint-20/model-00001-of-00002.safetensors", b"1"),
            ("old/run/checkpoint-20/model-00002-of-00002.safetensors", b"2"),
            ("old/run/checkpoint-20/model.safetensors.index.json", INDEX),
            ("old/run/checkpoint-9/model-00001-of-00002.safetensors", b"1"),
            ("old/run/checkpoint-9/model.safetensors.index.json", INDEX),
            ("old/run/notes.txt", b"loose"),
            ("old/run/checkpoint-20/v0.1/a-1/x", b"like our own"),
        ];
        let store = store(&objects).await;
        let rules = Rules::builtin();
        let found = find(&store, &rules, "old/run", &path("team/run7")).await.unwrap();
        let names: Vec<_> =
            found.checkpoints.iter().map(|one| one.candidate.id.path().unwrap().to_string()).collect();
        assert_eq!(names, ["team/run7/checkpoint-9", "team/run7/checkpoint-20"], "in order of step");
        assert_eq!((found.loose, found.refused.len()), (1, 1), "{:?}", found.refused);
        assert!(found.refused[0].1.contains("its own objects"), "{:?}", found.refused);
        let verdicts = [
            judge(&store, &rules, &found.checkpoints[0]).await.unwrap(),
            judge(&store, &rules, &found.checkpoints[1]).await.unwrap(),
        ];
        assert!(verdicts[0].as_ref().is_err_and(|why| why.contains("missing")), "{verdicts:?}");
        assert!(verdicts[1].as_ref().is_ok_and(|(evidence, _)| evidence.commits()), "{verdicts:?}");
    }

    #[tokio::test]
    async fn one_object_is_a_checkpoint_too_and_its_sums_are_those_of_its_chunks() {
        let bytes = vec![7; (8 << 20) + 5];
        let store = store(&[("old/step5.pt", &bytes)]).await;
        let found = find(&store, &Rules::builtin(), "old/step5.pt", &path("r/step5.pt")).await.unwrap();
        let [one] = found.checkpoints.as_slice() else { panic!("{found:?}") };
        assert_eq!((one.files[0].path.clone(), one.size_bytes()), (path("r/step5.pt"), bytes.len() as u64));
        let told = std::sync::atomic::AtomicU64::new(0);
        let tell = |bytes| {
            told.fetch_add(bytes, std::sync::atomic::Ordering::Relaxed);
        };
        let sums = sums(&store, &one.files[0].object, &Flight::new(4), tell).await.unwrap();
        let expected: Vec<_> =
            bytes.chunks(8 << 20).map(|chunk| Crc64(tidemark_kernels::crc64(chunk))).collect();
        assert_eq!((sums, told.into_inner()), (expected, bytes.len() as u64));
    }
}
