//! The two phases that make a version exist in Tier-3, and the only writer of markers.
//!
//! Owns: the order record → data → prepared → manifest → marker → boundary, and the handling of a doubtful answer at each
//! step. Does not own: when a version is complete (protocol), uploading bytes (`upload`), when to try again (the node
//! loop). `engine/design/0003-tier3-format.md` has the format and the argument by cases.

use crate::restore::locate::{FormatProblem, read_retired};
use crate::save::drain::{Drain, Raised, Stored};
use crate::save::encode;
use crate::save::share::{Means, Share, ShareError};
use crate::save::upload::{SealedBytes, UploadError};
use crate::step_point::{StepPoint, reach};
use futures::stream::{self, StreamExt};
use std::collections::BTreeMap;
use std::sync::Arc;
use tidemark_namespace::SealPin;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::documents::BoundaryDocument;
use tidemark_protocol::error::ErrorKind;
use tidemark_protocol::format::{Document, FORMAT, Flaw, FormatError, MAX_MARKER_BYTES};
use tidemark_protocol::id::{AttemptId, ContentHash, Epoch, Step};
use tidemark_protocol::key::{Key, Label, NodeLife, Part, Series, VersionId, VersionRef};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::manifest::{
    Attributes, Directory, HardLink, Manifest, ManifestFile, Prepared, Symlink, ValidatedManifest, format_of,
};
use tidemark_protocol::marker::{Decision, Marker, MarkerOutcome, Retired, doubt};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::record::{Evidence, Record, RecordFile};
use tidemark_protocol::retention::Retirement;
use tidemark_store::{StoreError, current_epoch};

/// Maximum number of files of one attempt on their way. Many small files hide each other's round trips; the drain bounds the
/// parts of large ones.
const FILES_IN_FLIGHT: usize = 16;

/// Maximum number of a retired or aborted version's objects that are removed at once.
const DELETES_IN_FLIGHT: usize = 16;

/// Maximum number of tries to create a marker, if each create was doubtful and reading found no marker.
const MARKER_TRIES: u32 = 5;

/// A file of an attempt that is not in Tier-3 yet.
#[derive(Debug)]
pub struct AttemptFile {
    pub entry: RecordFile,
    pub attributes: Attributes,
    pub chunks: Arc<[Crc64]>,
    /// `None` once uploaded: Tier-1 is not read any more, and the pages may be evicted.
    pub pin: Option<Arc<SealPin>>,
}

/// A try to bring a version to Tier-3. Remembers the finished steps, so that trying again repeats none.
#[derive(Debug)]
pub struct Attempt {
    pub record: Record,
    pub files: Vec<AttemptFile>,
    pub directories: Vec<Directory>,
    pub symlinks: Vec<Symlink>,
    pub hard_links: Vec<HardLink>,
    /// The committed version of the lineage before this one, named in the marker.
    pub previous: Option<VersionRef>,
    /// The parts whose files other nodes have.
    pub shares: Vec<Share>,
    /// The lost node whose part this attempt does, if it does one.
    pub(super) stands_for: Option<NodeLife>,
    recorded: bool,
    uploaded: BTreeMap<RelPath, ManifestFile>,
    /// The prepared marker of this node.
    prepared: Option<Prepared>,
    failures: u32,
    /// Failures because something else stood in a document's place.
    no_documents: u32,
}

impl From<ShareError> for CommitError {
    fn from(error: ShareError) -> Self {
        Self::Share(Box::new(error))
    }
}

/// The reason why an attempt does not get further.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    #[error("{what} of {version} was not written")]
    Write { what: &'static str, version: VersionId, source: StoreError },
    #[error(
        "{key} holds other bytes than ours; another writer uses this attempt's number; the next try takes another"
    )]
    Taken { key: String },
    #[error(transparent)]
    Upload(#[from] UploadError),
    #[error(transparent)]
    Share(Box<ShareError>),
    #[error("version {version} cannot be described")]
    Format { version: VersionId, source: FormatError },
    #[error("the prepared files of {version} do not make its record")]
    Join { version: VersionId, source: Flaw },
    #[error(
        "epoch {ours} may not commit {version}: epoch {newer} is in Tier-3; another coordinator took over, and this one \
         must stop"
    )]
    Fenced { version: VersionId, ours: Epoch, newer: Epoch },
    #[error(
        "{version} is decided otherwise: {decision} of attempt {attempt} in epoch {epoch}; the next save is the next version"
    )]
    Lost { version: VersionId, decision: Decision, attempt: AttemptId, epoch: Epoch },
    #[error("whether {version} is committed stays unknown after {tries} tries; it is asked again later")]
    Unknown { version: VersionId, tries: u32 },
    #[error("the marker of {version} cannot be read")]
    Marker { version: VersionId, source: FormatError },
    #[error("what stands for the retirement of {version} (_RETIRED) is not believed")]
    NotRetired { version: VersionId, source: Box<FormatProblem> },
}

impl CommitError {
    /// Whether this attempt can never be finished, although its files may be good: something else is decided, or is in its place.
    #[must_use]
    pub fn ends_the_attempt(&self) -> bool {
        match self {
            Self::Lost { .. } | Self::Taken { .. } => true,
            Self::Share(error) => matches!(**error, ShareError::Taken { .. }),
            _ => false,
        }
    }

    /// Whether something that is no document stands in a document's place, or was the answer for it. Nothing is decided by that.
    #[must_use]
    pub fn is_no_document(&self) -> bool {
        matches!(
            self,
            Self::Marker { .. }
                | Self::NotRetired { .. }
                | Self::Write { source: StoreError::NoDocument { .. }, .. }
        )
    }

    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        match self {
            // The answer of Tier-3 came damaged: the content is unknown, and read again.
            Self::Write { source: StoreError::Damaged { .. }, .. } => ErrorKind::Unavailable,
            Self::Write { source, .. } => source.kind(),
            Self::Upload(error) => error.kind(),
            Self::Share(error) => match &**error {
                ShareError::NotHere { .. } | ShareError::Changed { .. } => ErrorKind::Corrupt,
                ShareError::Garbled { .. } | ShareError::Taken { .. } => ErrorKind::Invalid,
                ShareError::Away { .. } | ShareError::Failed { .. } | ShareError::Lost { .. } => {
                    ErrorKind::Unavailable
                }
            },
            Self::Taken { .. } | Self::Lost { .. } => ErrorKind::Invalid,
            Self::Format { .. } | Self::Join { .. } => ErrorKind::Invalid,
            Self::Fenced { .. } => ErrorKind::Fenced,
            Self::Unknown { .. } => ErrorKind::Unavailable,
            Self::Marker { .. } | Self::NotRetired { .. } => ErrorKind::Corrupt,
        }
    }
}

impl Attempt {
    /// Makes an attempt that has done nothing yet.
    #[must_use]
    pub fn new(record: Record, files: Vec<AttemptFile>, previous: Option<VersionRef>) -> Self {
        Self {
            record,
            files,
            directories: Vec::new(),
            symlinks: Vec::new(),
            hard_links: Vec::new(),
            previous,
            shares: Vec::new(),
            stands_for: None,
            recorded: false,
            uploaded: BTreeMap::new(),
            prepared: None,
            failures: 0,
            no_documents: 0,
        }
    }

    /// Makes an attempt that was found prepared in Tier-3: only its decision is missing.
    #[must_use]
    pub fn found(record: Record, prepared: Prepared, previous: Option<VersionRef>) -> Self {
        Self { recorded: true, prepared: Some(prepared), ..Self::new(record, Vec::new(), previous) }
    }

    /// Makes a participant's part of an attempt, whose record the coordinator has written.
    #[must_use]
    pub(super) fn of_participant(record: Record, files: Vec<AttemptFile>) -> Self {
        Self { recorded: true, ..Self::new(record, files, None) }
    }

    /// Returns the version's manifest. Fails unless the prepared files make the record.
    pub fn manifest(&self) -> Result<Manifest, Flaw> {
        Manifest::join(&self.record, &self.markers())
    }

    /// Whether phase 1 is done.
    #[must_use]
    pub fn is_prepared(&self) -> bool {
        self.prepared.is_some() && self.shares.iter().all(|share| share.prepared.is_some())
    }

    pub(super) fn own_marker(&self) -> Option<&Prepared> {
        self.prepared.as_ref()
    }

    fn markers(&self) -> Vec<Prepared> {
        let others = self.shares.iter().filter_map(|share| share.prepared.as_ref());
        self.prepared.iter().chain(others).cloned().collect()
    }

    /// Sets better evidence than the record was written with. The manifest carries it; the record in Tier-3 stays as it is.
    pub fn raise(&mut self, evidence: Evidence, detail: &str) {
        assert!(evidence.commits(), "evidence is only ever raised to one that commits");
        self.record.evidence = evidence;
        self.record.partial = false;
        detail.clone_into(&mut self.record.evidence_detail);
    }

    /// Counts a failure that may pass, and returns how many there were before.
    pub fn count_failure(&mut self) -> u32 {
        self.failures = self.failures.saturating_add(1);
        self.failures - 1
    }

    /// Counts a failure because something else stood in a document's place, and returns how many there are now.
    pub fn count_no_document(&mut self) -> u32 {
        self.no_documents = self.no_documents.saturating_add(1);
        self.no_documents
    }

    /// Returns how many bytes still have to be uploaded.
    #[must_use]
    pub fn bytes_left(&self) -> u64 {
        let own = self.files.iter().filter(|file| file.pin.is_some()).map(|file| file.entry.size_bytes);
        own.chain(self.shares.iter().map(Share::bytes_left)).sum()
    }

    /// Carries out phase 1: the record, then every file, then the prepared marker. Repeats no finished step.
    pub async fn prepare(&mut self, drain: &Arc<Drain>) -> Result<(), CommitError> {
        debug_assert!(self.shares.is_empty(), "what other nodes have is theirs to upload");
        self.write_record(drain).await?;
        self.prepare_own(drain).await
    }

    /// Carries out phase 1 if other nodes have some of the files.
    pub async fn prepare_over_nodes(&mut self, means: Means<'_>) -> Result<(), CommitError> {
        let drain = means.drain;
        if self.shares.is_empty() {
            return self.prepare(drain).await;
        }
        self.write_record(drain).await?;
        let (record, mut shares) = (self.record.clone(), std::mem::take(&mut self.shares));
        let (own, others) = {
            let others = shares.iter_mut().map(|share| share.prepare(&record, means));
            futures::join!(self.prepare_own(drain), futures::future::join_all(others))
        };
        self.shares = shares;
        own?;
        others.into_iter().collect()
    }

    async fn write_record(&mut self, drain: &Drain) -> Result<(), CommitError> {
        let version = self.record.version.clone();
        if !self.recorded {
            make_sure_of_epoch(drain, &version).await?;
            reach(StepPoint::CommitBeforeAttempt);
            // A provisional record is written too: it describes the data below it.
            let key = Key::Record { version: version.clone(), attempt: self.record.attempt };
            write_document(drain, "the record", &version, &key, &self.record).await?;
            self.recorded = true;
            reach(StepPoint::CommitAfterAttempt);
        }
        Ok(())
    }

    /// Carries out this node's part of phase 1: its files, then its marker.
    pub(super) async fn prepare_own(&mut self, drain: &Arc<Drain>) -> Result<(), CommitError> {
        let version = self.record.version.clone();
        self.upload(drain).await?;
        if self.prepared.is_none() {
            reach(StepPoint::CommitBeforePrepared);
            let prepared = self.describe(drain);
            let key = Key::Prepared {
                version: version.clone(),
                attempt: self.record.attempt,
                life: prepared.life.clone(),
                by: prepared.by.clone(),
            };
            write_document(drain, "the prepared marker", &version, &key, &prepared).await?;
            self.prepared = Some(prepared);
            reach(StepPoint::CommitAfterPrepared);
        }
        Ok(())
    }

    async fn upload(&mut self, drain: &Arc<Drain>) -> Result<(), CommitError> {
        let version = self.record.version.clone();
        let stand_in = self.stands_for.as_ref().map(|_| drain.life.incarnation);
        let part = Part { attempt: self.record.attempt, stand_in };
        let mut todo = Vec::new();
        for file in &self.files {
            let Some(pin) = file.pin.clone() else { continue };
            let key = Key::data(&version, part, &file.entry.path)
                .expect("a record names files of its run")
                .to_string();
            let bytes =
                SealedBytes { path: file.entry.path.to_string(), pin, chunks: Arc::clone(&file.chunks) };
            todo.push((file.entry.path.clone(), key, bytes));
        }
        let codec = drain.codec_of(&version.run);
        let mut running = stream::iter(todo.into_iter().map(|(path, key, bytes)| async move {
            (path, encode::upload(drain, &key, bytes, codec).await, key)
        }))
        .buffer_unordered(FILES_IN_FLIGHT);
        let mut first_error = None;
        while let Some((path, result, key)) = running.next().await {
            match result {
                Ok(sent) => {
                    let file = self
                        .files
                        .iter_mut()
                        .find(|file| file.entry.path == path)
                        .expect("it came from here");
                    file.pin = None;
                    let entry = ManifestFile {
                        path: path.clone(),
                        key,
                        size_bytes: file.entry.size_bytes,
                        crc64nvme: file.entry.crc64nvme,
                        chunks: file.chunks.to_vec(),
                        encoding: sent.encoding,
                        etag: sent.etag,
                        file: file.entry.file,
                        seal: file.entry.seal,
                        attributes: file.attributes.clone(),
                    };
                    self.uploaded.insert(path, entry);
                    reach(StepPoint::UploadAfterFile);
                }
                Err(error) => first_error = first_error.or(Some(error)),
            }
        }
        first_error.map_or(Ok(()), |error| Err(error.into()))
    }

    fn describe(&self, drain: &Drain) -> Prepared {
        let files: Vec<_> = self.uploaded.values().cloned().collect();
        Prepared {
            format: format_of(&files, self.record.format),
            version: self.record.version.clone(),
            attempt: self.record.attempt,
            epoch: drain.epoch(),
            life: self.stands_for.clone().unwrap_or_else(|| drain.life.clone()),
            by: self.stands_for.as_ref().map(|_| drain.life.clone()),
            chunk_bytes: CHUNK_BYTES,
            files,
            directories: self.directories.clone(),
            symlinks: self.symlinks.clone(),
            hard_links: self.hard_links.clone(),
        }
    }

    /// Carries out phase 2: the manifest, then the marker.
    ///
    /// Panics if phase 1 is not done; the loop calls this only then.
    pub async fn commit(&self, drain: &Arc<Drain>) -> Result<Manifest, CommitError> {
        assert!(self.is_prepared(), "a version is prepared before it is committed");
        decide(drain, &self.record, &self.markers(), self.previous.clone()).await
    }
}

/// Writes the manifest of a record whose participants are all prepared, and then the marker, which alone decides.
///
/// A new coordinator calls this, too, for an attempt that it finds prepared; it would write the same.
pub async fn decide(
    drain: &Arc<Drain>,
    record: &Record,
    prepared: &[Prepared],
    previous: Option<VersionRef>,
) -> Result<Manifest, CommitError> {
    let version = record.version.clone();
    assert!(record.evidence.commits(), "quiescence alone never commits {version}");
    let format = |source| CommitError::Format { version: version.clone(), source };
    let manifest = Manifest::join(record, prepared)
        .map_err(|source| CommitError::Join { version: version.clone(), source })?;
    let (bytes, hash) = manifest.encode_named().map_err(format)?;
    // A manifest that cannot be parsed must not be committed: bytes are checked when they leave and when they come back.
    ValidatedManifest::parse(&bytes, &hash).map_err(format)?;
    let key = Key::Manifest { version: version.clone(), attempt: record.attempt, hash };
    write(drain, "the manifest", &version, &key, &bytes).await?;
    check_epoch(drain, &version).await?;
    reach(StepPoint::CommitBeforeMarker);
    let marker = Marker::commit(version.clone(), record.attempt, hash, record.step, drain.epoch(), previous);
    create_marker(drain, &marker).await?;
    reach(StepPoint::CommitAfterMarker);
    Ok(manifest)
}

/// Commits a version whose bytes are in Tier-3 already, in foreign objects. Writes the same documents in the same order, without
/// any upload; a coordinator that finds it half done goes on as with any other version.
pub async fn adopt(
    drain: &Arc<Drain>,
    record: &Record,
    prepared: &Prepared,
    previous: Option<VersionRef>,
) -> Result<Manifest, CommitError> {
    let version = &record.version;
    check_epoch(drain, version).await?;
    let key = Key::Record { version: version.clone(), attempt: record.attempt };
    write_document(drain, "the record", version, &key, record).await?;
    reach(StepPoint::CommitAfterAttempt);
    let (life, by) = (prepared.life.clone(), prepared.by.clone());
    let key = Key::Prepared { version: version.clone(), attempt: record.attempt, life, by };
    write_document(drain, "the prepared marker", version, &key, prepared).await?;
    reach(StepPoint::CommitAfterPrepared);
    decide(drain, record, std::slice::from_ref(prepared), previous).await
}

/// Decides that a version is never committed, so that the remains of its attempts may be swept.
pub async fn abort(drain: &Arc<Drain>, record: &Record) -> Result<(), CommitError> {
    check_epoch(drain, &record.version).await?;
    let marker = Marker::abort(record.version.clone(), record.attempt, record.step, drain.epoch());
    create_marker(drain, &marker).await
}

/// Refuses further decisions once a newer coordinator has raised the epoch. The marker's conditional create already makes a
/// late decision harmless; this check makes an old coordinator notice.
pub async fn check_epoch(drain: &Drain, version: &VersionId) -> Result<(), CommitError> {
    make_sure_of_epoch(drain, version).await?;
    let newest = current_epoch(drain.store.as_ref()).await.map_err(|source| CommitError::Write {
        what: "the decision",
        version: version.clone(),
        source,
    })?;
    match newest {
        Some(newer) if newer > drain.epoch() => {
            Err(CommitError::Fenced { version: version.clone(), ours: drain.epoch(), newer })
        }
        _ => Ok(()),
    }
}

async fn make_sure_of_epoch(drain: &Drain, version: &VersionId) -> Result<(), CommitError> {
    let raised = drain.make_sure_of_epoch().await.map_err(|source| CommitError::Write {
        what: "the epoch",
        version: version.clone(),
        source,
    })?;
    match raised {
        Raised::Ours => Ok(()),
        Raised::Newer(newer) => {
            Err(CommitError::Fenced { version: version.clone(), ours: drain.epoch(), newer })
        }
    }
}

/// Retires a committed version: `_RETIRED`, then the boundary, then the data, then the manifest. Nothing is deleted
/// before `_RETIRED` stands. So a reader that comes between two steps skips the version, and a coordinator that finds the
/// retirement half done may repeat the rest.
///
/// The leave comes from retention (P7, pins, holds). The markers themselves stay, because their number is used.
pub async fn retire(
    drain: &Arc<Drain>,
    manifest: &Manifest,
    leave: &Retirement,
    now_ns: i64,
) -> Result<(), CommitError> {
    let version = manifest.version.clone();
    assert_eq!(*leave.version(), version, "leave to retire one version is none for another");
    check_epoch(drain, &version).await?;
    let (_, hash) =
        manifest.encode_named().map_err(|source| CommitError::Format { version: version.clone(), source })?;
    // Asks the marker itself, not a memory of it, whether this manifest was committed.
    match read_marker(drain, &version).await? {
        Some(marker) if marker.manifest_hash == Some(hash) => {}
        Some(Marker { decision, attempt, epoch, .. }) => {
            return Err(CommitError::Lost { version, decision, attempt, epoch });
        }
        None => return Err(CommitError::Unknown { version, tries: 1 }),
    }
    let retired = Retired {
        format: FORMAT,
        version: version.clone(),
        attempt: manifest.attempt,
        manifest_hash: hash,
        epoch: drain.epoch(),
        reason: leave.reason().to_owned(),
        retired_at_ns: now_ns,
    };
    let key = Key::Retired { version: version.clone() };
    let bytes =
        retired.encode().map_err(|source| CommitError::Format { version: version.clone(), source })?;
    match write(drain, "the retirement", &version, &key, &bytes).await {
        Ok(()) => {}
        // Another coordinator retired the version first, with its own reason; the remaining steps are the same.
        Err(error) if matches!(error, CommitError::Taken { .. }) || error.is_no_document() => {
            check_retired(drain, &version, Some(&hash)).await?;
        }
        Err(error) => return Err(error),
    }
    reach(StepPoint::RetireAfterMarker);
    move_boundary(drain, &version, manifest.step).await?;
    reach(StepPoint::RetireAfterBoundary);
    clear(drain, &version).await
}

/// Finishes a retirement that was cut short after `_RETIRED` stood. The boundary may name the version already; a second entry
/// changes nothing, and a check would read every boundary there is.
pub async fn resume_retirement(drain: &Arc<Drain>, version: &VersionId) -> Result<(), CommitError> {
    let marker = read_marker(drain, version).await?;
    let hash = marker.as_ref().and_then(|marker| marker.manifest_hash);
    check_retired(drain, version, hash.as_ref()).await?;
    move_boundary(drain, version, marker.and_then(|marker| marker.step)).await?;
    clear(drain, version).await
}

/// Makes sure that a document of ours retires the version with the manifest of this hash. A document that cannot be read retires
/// nothing.
async fn check_retired(
    drain: &Drain,
    version: &VersionId,
    manifest: Option<&ContentHash>,
) -> Result<(), CommitError> {
    let read = read_retired(&drain.store, version, manifest).await.map_err(|source| CommitError::Write {
        what: "the retirement",
        version: version.clone(),
        source,
    })?;
    read.map(drop).map_err(|why| CommitError::NotRetired { version: version.clone(), source: Box::new(why) })
}

/// Removes all objects of a version but its markers: the data first, then the documents. The version must be aborted or
/// retired, so that no job reads or writes them any more.
pub async fn clear(drain: &Arc<Drain>, version: &VersionId) -> Result<(), CommitError> {
    let failed = |source| CommitError::Write { what: "the removal", version: version.clone(), source };
    let listing = drain.store.list(&format!("{version}/a-"), false).await.map_err(failed)?;
    let keys = listing.keys.into_iter().map(|head| head.key);
    let (documents, data): (Vec<_>, Vec<_>) =
        keys.partition(|key| !matches!(key.parse(), Ok(Key::Data { .. })));
    for keys in [data, documents] {
        let deletes = keys.into_iter().map(|key| async move { drain.store.delete(&key).await });
        let mut deletes = stream::iter(deletes).buffer_unordered(DELETES_IN_FLIGHT);
        while let Some(result) = deletes.next().await {
            result.map_err(failed)?;
            reach(StepPoint::RetireAfterFirstDelete);
        }
    }
    Ok(())
}

/// Adds the version to the run's boundary, in a document with the next free number.
async fn move_boundary(drain: &Drain, version: &VersionId, step: Option<Step>) -> Result<(), CommitError> {
    let series = Series::Boundary(Label::of_run(&version.run));
    let document = BoundaryDocument {
        format: FORMAT,
        run: version.run.clone(),
        epoch: drain.epoch(),
        retired: vec![VersionRef {
            directory: version.directory.clone(),
            timeline: version.timeline,
            version: version.version,
            step,
        }],
    };
    for _ in 0..MARKER_TRIES {
        let failed = |source| CommitError::Write { what: "the boundary", version: version.clone(), source };
        let listing = drain.store.list(&series.prefix(), true).await.map_err(failed)?;
        let highest = listing.keys.iter().filter_map(|head| match head.key.parse::<Key>() {
            Ok(Key::Numbered { number, .. }) => Some(number),
            Ok(_) | Err(_) => None,
        });
        let key = Key::numbered(series.clone(), highest.max().unwrap_or(0) + 1);
        match write_document(drain, "the boundary", version, &key, &document).await {
            Err(CommitError::Taken { .. }) => {}
            result => return result,
        }
    }
    Err(CommitError::Unknown { version: version.clone(), tries: MARKER_TRIES })
}

/// Creates a marker. Fails with the decision of another marker in its place.
pub(super) async fn create_marker(drain: &Drain, marker: &Marker) -> Result<(), CommitError> {
    let version = marker.version.clone();
    let key = Key::Committed { version: version.clone() }.to_string();
    let bytes = marker.encode().map_err(|source| CommitError::Format { version: version.clone(), source })?;
    for _ in 0..MARKER_TRIES {
        match drain.create(&key, &bytes).await {
            Ok(Stored::Ours) => return Ok(()),
            Ok(Stored::Theirs) => {}
            Err(error) if error.is_doubtful() => {}
            Err(source) => {
                return Err(CommitError::Write { what: "the marker", version, source });
            }
        }
        let found = read_marker(drain, &version).await?;
        match doubt(marker, found.as_ref()) {
            MarkerOutcome::Mine => return Ok(()),
            MarkerOutcome::Lost { decision, attempt, epoch } => {
                return Err(CommitError::Lost { version, decision, attempt, epoch });
            }
            MarkerOutcome::Absent => {}
        }
    }
    Err(CommitError::Unknown { version, tries: MARKER_TRIES })
}

/// Reads the marker of `version`; `None` if there is none.
pub async fn read_marker(drain: &Drain, version: &VersionId) -> Result<Option<Marker>, CommitError> {
    let key = Key::Committed { version: version.clone() }.to_string();
    let limit = u64::try_from(MAX_MARKER_BYTES).expect("a constant");
    let found = drain.store.get(&key, limit).await.map_err(|source| CommitError::Write {
        what: "the decision",
        version: version.clone(),
        source,
    })?;
    found
        .map(|bytes| {
            Marker::parse(&bytes).map_err(|source| CommitError::Marker { version: version.clone(), source })
        })
        .transpose()
}

async fn write_document<D: Document>(
    drain: &Drain,
    what: &'static str,
    version: &VersionId,
    key: &Key,
    document: &D,
) -> Result<(), CommitError> {
    let bytes =
        document.encode().map_err(|source| CommitError::Format { version: version.clone(), source })?;
    write(drain, what, version, key, &bytes).await
}

async fn write(
    drain: &Drain,
    what: &'static str,
    version: &VersionId,
    key: &Key,
    bytes: &[u8],
) -> Result<(), CommitError> {
    let key = key.to_string();
    match drain.create(&key, bytes).await {
        Ok(Stored::Ours) => Ok(()),
        Ok(Stored::Theirs) => Err(CommitError::Taken { key }),
        Err(source) => Err(CommitError::Write { what, version: version.clone(), source }),
    }
}
