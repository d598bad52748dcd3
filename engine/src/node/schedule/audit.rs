//! Invariants that must hold in the shared memory after every request of any start.
//!
//! Owns: the invariants, checked in the memory itself; the bytes that were truly saved, to compare with. Does not own: the beliefs of
//! a start (`life`). A violation panics; the trace is printed where the schedule was begun.

use super::tally::{Seen, Tally};
use super::wire::{Bucket, Call};

use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::documents::BoundaryDocument;
use tidemark_protocol::format::Document;
use tidemark_protocol::id::AttemptId;
use tidemark_protocol::invariants;
use tidemark_protocol::key::{Key, Label, Series, VersionId};
use tidemark_protocol::lineage::order;
use tidemark_protocol::manifest::{Manifest, ManifestFile, Prepared};
use tidemark_protocol::marker::{Decision, Marker};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::record::Record;
use tidemark_protocol::retention::ALWAYS_KEPT;

/// The bytes of one attempt's files.
type Saved = BTreeMap<RelPath, Bytes>;

#[derive(Debug, Default)]
pub(super) struct Audit {
    /// Every key that was ever written, with its bytes.
    bodies: BTreeMap<String, Bytes>,
    saved: BTreeMap<(VersionId, AttemptId), Saved>,
    attempts: BTreeMap<VersionId, BTreeSet<AttemptId>>,
    /// The record of every version that was ever committed.
    committed: BTreeMap<VersionId, Record>,
    /// Versions that were whole and proven when a start began to read: the start must not abort them.
    whole: BTreeMap<u64, BTreeSet<VersionId>>,
    /// How often a start read the epoch, and which decisions it made.
    looks: BTreeMap<u64, (usize, BTreeSet<String>)>,
    /// The highest epoch that was raised.
    pub(super) epoch: u64,
}

impl Audit {
    /// Records the bytes of an attempt's files.
    pub(super) fn save(&mut self, record: &Record, files: Saved) {
        self.saved.insert((record.version.clone(), record.attempt), files);
    }

    /// Returns the committed versions that were not retired.
    pub(super) fn standing(&self, bucket: &Bucket) -> BTreeSet<VersionId> {
        let stands = |version: &&VersionId| !is_retired(bucket, version);
        self.committed.keys().filter(stands).cloned().collect()
    }

    /// Records that a start begins to read the shared memory.
    pub(super) fn reading_begins(&mut self, bucket: &Bucket, start: u64) {
        let undecided = self.attempts.keys().filter(|version| marker(bucket, version).is_none());
        let whole = undecided.filter(|version| {
            let attempts = self.attempts[*version].iter();
            attempts
                .filter_map(|attempt| whole(bucket, version, *attempt))
                .any(|record| record.evidence.commits())
        });
        self.whole.insert(start, whole.cloned().collect());
        self.looks.insert(start, Default::default());
    }

    pub(super) fn reading_ended(&mut self, start: u64) {
        self.whole.remove(&start);
    }

    /// Checks, before a request happens, that it may write or delete its key.
    pub(super) fn before(&mut self, bucket: &Bucket, start: u64, call: &Call, tally: &mut Tally) {
        if let Call::AbortUpload(upload) = call
            && let Some((key, by)) = bucket.uploads.get(&upload.upload_id)
        {
            tally.count(Seen::UploadAborted);
            let decided = marker_of(bucket, key).is_some();
            assert!(
                decided || *by == start,
                "start {start} aborts the upload of {key}, which start {by} needs"
            );
        }
        self.looks_before_it_decides(start, call);
        if call.writes() && start < self.epoch {
            tally.count(Seen::ZombieWrite);
        }
        let Some(key) = bucket.target(call) else { return };
        let there = bucket.get(&key);
        let (body, overwrites) = match call {
            Call::Create { body, .. } => (body, false),
            Call::Complete { body, .. } => (body, true),
            _ => {
                if there.is_some() {
                    tally.count(Seen::Delete);
                    may_delete(bucket, &key);
                }
                return;
            }
        };
        if there.is_none() || overwrites {
            let before = self.bodies.insert(key.clone(), body.clone());
            assert!(
                before.is_none_or(|before| before == *body),
                "{key} is written twice, with different bytes"
            );
        }
        if let Some(there) = there {
            if there != *body && matches!(key.parse(), Ok(Key::Committed { .. })) {
                let recovers = self.whole.contains_key(&start);
                tally.count(if recovers { Seen::LostInRecovery } else { Seen::Lost });
            }
            return;
        }
        match key.parse::<Key>() {
            Ok(Key::Committed { version }) => {
                let marker = Marker::parse(body).expect("a marker that can be read");
                match marker.decision {
                    Decision::Commit => tally.count(Seen::Commit),
                    Decision::Abort => {
                        tally.count(Seen::Abort);
                        let whole = self.whole.get(&start).is_some_and(|whole| whole.contains(&version));
                        assert!(
                            !whole,
                            "{version} was whole and proven when start {start} came, which aborts it"
                        );
                    }
                }
            }
            Ok(Key::Retired { version }) => {
                tally.count(Seen::Retirement);
                self.may_retire(&version);
            }
            Ok(Key::Record { version, attempt }) => {
                let attempts = self.attempts.entry(version).or_default();
                attempts.insert(attempt);
                if attempts.len() == 2 {
                    tally.count(Seen::Contested);
                }
            }
            Ok(Key::Numbered { series: Series::Epoch, number }) => self.epoch = self.epoch.max(number),
            Ok(_) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Checks that a start reads the epoch for each of its decisions: only so does a superseded start notice that.
    fn looks_before_it_decides(&mut self, start: u64, call: &Call) {
        let (looks, decided) = self.looks.entry(start).or_default();
        if matches!(call, Call::List { prefix, .. } if *prefix == Series::Epoch.prefix()) {
            *looks += 1;
        }
        if call.decides() {
            decided.insert(call.key().to_owned());
            assert!(
                decided.len() <= *looks,
                "start {start} decides {decided:?} after {looks} looks at the epoch"
            );
        }
    }

    /// Checks that the newest committed versions of a run are never retired, whatever a start knows of them.
    fn may_retire(&self, version: &VersionId) {
        let record = self.committed.get(version);
        let record = record.unwrap_or_else(|| panic!("{version} is given up and was never committed"));
        let newer = self.committed.values().filter(|other| order(other) > order(record)).count();
        assert!(newer >= ALWAYS_KEPT, "{version} is given up with {newer} newer committed versions");
    }

    /// Checks a key after it was written or deleted.
    pub(super) fn after(&mut self, bucket: &Bucket, start: u64, key: &str) {
        let parsed: Key = key.parse().expect("looked at before");
        let Some(version) = parsed.version().cloned() else { return };
        match (&parsed, bucket.get(key)) {
            (Key::Committed { .. }, Some(bytes)) => {
                let marker = Marker::parse(&bytes).expect("a marker that can be read");
                if marker.decision == Decision::Commit && !self.committed.contains_key(&version) {
                    let key = Key::Record { version: version.clone(), attempt: marker.attempt };
                    let record = bucket.get(&key.to_string());
                    let record = record.unwrap_or_else(|| panic!("{version} is committed without a record"));
                    self.committed.insert(version.clone(), Record::parse(&record).expect("a record"));
                }
            }
            (Key::Prepared { .. }, Some(bytes)) if marker(bucket, &version).is_none() => {
                let prepared = Prepared::parse(&bytes).expect("a prepared marker that can be read");
                prepared
                    .files
                    .iter()
                    .for_each(|file| self.is_there(bucket, &version, prepared.attempt, file));
            }
            (Key::Data { part, .. }, Some(_)) if marker(bucket, &version).is_none() => {
                let record = Key::Record { version: version.clone(), attempt: part.attempt };
                assert!(
                    bucket.get(&record.to_string()).is_some(),
                    "start {start} writes {key} before its record"
                );
            }
            _ => {}
        }
        self.holds(bucket, &version);
    }

    /// Checks a commit marker, until its version is retired. The marker must name a manifest that exists. The manifest must name exactly
    /// the record's files. Each file must exist with the very bytes that were saved.
    fn holds(&self, bucket: &Bucket, version: &VersionId) {
        if !self.committed.contains_key(version) {
            return;
        }
        let key = Key::Committed { version: version.clone() }.to_string();
        let bytes = bucket.get(&key).unwrap_or_else(|| panic!("{key} is gone"));
        assert_eq!(bytes, self.bodies[&key], "{key} changed");
        if is_retired(bucket, version) {
            return;
        }
        let marker = Marker::parse(&bytes).expect("a marker that can be read");
        invariants::a_commit_marker_stands_where_its_body_says(&marker, &key).unwrap();
        let named = marker.manifest.as_ref().expect("a commit names a manifest");
        let manifest = bucket.get(named).unwrap_or_else(|| panic!("{key} names {named}, which is not there"));
        let manifest =
            invariants::a_commit_marker_names_a_manifest_that_hashes_to_its_name(&marker, &manifest);
        let manifest = manifest.unwrap_or_else(|error| panic!("{key}: {error}")).into_manifest();
        let record = Key::Record { version: version.clone(), attempt: marker.attempt }.to_string();
        let record = bucket.get(&record).unwrap_or_else(|| panic!("{key} is a commit without {record}"));
        let record = Record::parse(&record).expect("a record that can be read");
        invariants::a_manifest_holds_exactly_the_files_of_its_record(&manifest, &record).unwrap();
        manifest.files.iter().for_each(|file| self.is_there(bucket, version, marker.attempt, file));
    }

    fn is_there(&self, bucket: &Bucket, version: &VersionId, attempt: AttemptId, file: &ManifestFile) {
        let ManifestFile { key, size_bytes, crc64nvme, .. } = file;
        let found = bucket.get(key).unwrap_or_else(|| panic!("{key} is named, and not there"));
        let sums = (found.len() as u64, Crc64(tidemark_kernels::crc64(&found)));
        assert_eq!(sums, (*size_bytes, *crc64nvme), "{key} holds other bytes than it is named with");
        assert_eq!(found, self.saved[&(version.clone(), attempt)][&file.path], "{key} was never saved so");
    }

    /// Checks all invariants for every version.
    pub(super) fn all(&self, bucket: &Bucket) {
        self.committed.keys().for_each(|version| self.holds(bucket, version));
        for (key, body) in &self.bodies {
            let parsed: Key = key.parse().expect("looked at before");
            if matches!(parsed, Key::Committed { .. } | Key::Retired { .. } | Key::Numbered { .. }) {
                assert_eq!(bucket.get(key).as_ref(), Some(body), "{key} changed");
            }
        }
    }

    /// Checks that nothing is left of aborted or retired versions, that a boundary names each retired version, and that no decided
    /// version is still being uploaded.
    pub(super) fn all_is_swept(&self, bucket: &Bucket) {
        for version in self.attempts.keys() {
            let Some(marker) = marker(bucket, version) else { continue };
            if is_retired(bucket, version) {
                assert!(boundary_names(bucket, version), "no boundary names {version}, which was given up");
            } else if marker.decision == Decision::Commit {
                continue;
            }
            let left = bucket.list(&format!("{version}/a-"));
            assert!(left.is_empty(), "{version} is no more, and this is left of it: {left:?}");
        }
        for (key, _) in bucket.uploads.values() {
            assert!(marker_of(bucket, key).is_none(), "{key} is decided, and its upload stays");
        }
    }
}

/// Checks that `key` may be deleted: it belongs to an attempt whose version was decided about. A committed version must be retired
/// first, and named by the boundary.
fn may_delete(bucket: &Bucket, key: &str) {
    let parsed: Key = key.parse().expect("a key of ours");
    let below =
        matches!(parsed, Key::Data { .. } | Key::Record { .. } | Key::Prepared { .. } | Key::Manifest { .. });
    assert!(below, "{key} is deleted, which nobody may");
    let version = parsed.version().expect("it is below a version");
    let marker = marker(bucket, version);
    let marker = marker.unwrap_or_else(|| panic!("{key} is deleted, and nobody decided about its version"));
    if marker.decision == Decision::Commit {
        assert!(is_retired(bucket, version), "{key} of a committed version is deleted");
        assert!(boundary_names(bucket, version), "{key} is deleted before the boundary names its version");
    }
}

/// Returns the decision about a version, as it stands.
pub(super) fn marker(bucket: &Bucket, version: &VersionId) -> Option<Marker> {
    let bytes = bucket.get(&Key::Committed { version: version.clone() }.to_string())?;
    Some(Marker::parse(&bytes).expect("a marker that can be read"))
}

/// Returns the decision about the version that a file's object belongs to.
fn marker_of(bucket: &Bucket, key: &str) -> Option<Marker> {
    let Ok(Key::Data { version, .. }) = key.parse() else { panic!("{key} is uploaded in parts") };
    marker(bucket, &version)
}

pub(super) fn is_retired(bucket: &Bucket, version: &VersionId) -> bool {
    bucket.get(&Key::Retired { version: version.clone() }.to_string()).is_some()
}

pub(super) fn boundary_names(bucket: &Bucket, version: &VersionId) -> bool {
    let series = Series::Boundary(Label::of_run(&version.run));
    bucket.list(&series.prefix()).iter().any(|key| {
        let bytes = bucket.get(key).expect("it was listed");
        let boundary = BoundaryDocument::parse(&bytes).expect("a boundary that can be read");
        let named = |of: (&_, _, _)| of == (&version.directory, version.timeline, version.version);
        boundary.retired.iter().any(|gone| named((&gone.directory, gone.timeline, gone.version)))
    })
}

/// Returns the record of an attempt, if every file of it is prepared.
fn whole(bucket: &Bucket, version: &VersionId, attempt: AttemptId) -> Option<Record> {
    let record = bucket.get(&Key::Record { version: version.clone(), attempt }.to_string())?;
    let record = Record::parse(&record).expect("a record that can be read");
    let keys = bucket.list(&format!("{version}/a-{attempt}/.tidemark/prepared-"));
    let prepared = keys.iter().map(|key| Prepared::parse(&bucket.get(key).expect("it was listed")).unwrap());
    Manifest::join(&record, &prepared.collect::<Vec<_>>()).is_ok().then_some(record)
}
