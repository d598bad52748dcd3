//! Reads what Tier-3 holds: committed versions, undecided attempts, loose files, the tree.
//!
//! Owns: which keys are read and in what order, which objects are passed over and why. Does not own: the use of the catalog
//! (`node::recover`), the keys themselves (protocol).

use futures::stream::{self, StreamExt, TryStreamExt};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_protocol::documents::{LooseSidecar, PinDocument};
use tidemark_protocol::error::error_text;
use tidemark_protocol::format::{Document, FormatError, MAX_DOCUMENT_BYTES, MAX_MARKER_BYTES};
use tidemark_protocol::id::{AttemptId, ContentHash, Generation};
use tidemark_protocol::key::{Key, PathOrHash, Series, VersionId};
use tidemark_protocol::manifest::{Manifest, Prepared, ValidatedManifest};
use tidemark_protocol::marker::{Decision, Marker, Retired};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::record::Record;
use tidemark_store::{Listing, Store, StoreError};

/// Maximum number of listings and small reads on their way: hides the round trip of an object store without a burst.
const READS_IN_FLIGHT: usize = 16;

/// Maximum number of directories below the prefix that are read. A run is a handful of directories deep; with more
/// directories than this, the prefix is not ours alone, and a start would take hours.
const PREFIXES_MAX: usize = 1_000_000;

/// The versions and attempts in Tier-3.
#[derive(Debug, Default)]
pub struct Catalog {
    pub committed: Vec<CommittedVersion>,
    pub undecided: Vec<UndecidedAttempt>,
    /// Aborted versions; their numbers are used.
    pub aborted: Vec<DeadVersion>,
    /// Retired versions; their numbers are used.
    pub retired: Vec<DeadVersion>,
    /// Decided versions whose marker or manifest is not believed.
    pub unreadable: Vec<UnreadableVersion>,
    /// Objects that were passed over, with the reasons.
    pub passed_over: Vec<PassedOver>,
}

/// A version that may have been committed. `Catalog::passed_over` names the object that is not believed.
#[derive(Debug)]
pub struct UnreadableVersion {
    pub version: VersionId,
    /// The record, which lists the version's files; none if that cannot be read either.
    pub record: Option<Record>,
    pub why: String,
}

/// A retired or aborted version, of which only the number counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeadVersion {
    pub version: VersionId,
    /// Whether objects of the version are left beside its markers.
    pub has_remains: bool,
}

/// A version whose marker says commit, with its manifest.
#[derive(Debug)]
pub struct CommittedVersion {
    pub marker: Marker,
    pub manifest: Manifest,
}

/// An attempt without a marker: its coordinator stopped before deciding.
#[derive(Debug)]
pub struct UndecidedAttempt {
    pub record: Record,
    pub prepared: Vec<Prepared>,
}

/// An object in Tier-3 that is not believed.
#[derive(Debug)]
pub struct PassedOver {
    pub key: String,
    pub why: FormatProblem,
}

/// The reason why an object is not believed.
#[derive(Debug, thiserror::Error)]
pub enum FormatProblem {
    #[error("it is not there, though a marker names it")]
    Missing,
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("it contradicts its marker")]
    Flaw(#[source] tidemark_protocol::format::Flaw),
    #[error("it is larger than such an object can be")]
    TooLarge,
    #[error("the store returns other bytes than it was given")]
    Damaged,
    #[error("only the hash of its file's path is known, and that file is not in the tree")]
    Nameless(#[source] Box<Self>),
}

/// Reads all markers in Tier-3. Costs one listing for each directory (data objects are never listed), two
/// reads for each committed version and one for each retired version.
///
/// Errors: the store is away. An object that is not believed is no error: it is listed in `passed_over`.
pub async fn read(store: &Arc<dyn Store>) -> Result<Catalog, StoreError> {
    let found = enumerate(store).await?;
    let mut catalog = Catalog::default();
    let mut looked = stream::iter(found.into_values().map(|version| look(store, version)))
        .buffer_unordered(READS_IN_FLIGHT);
    while let Some((outcome, not_believed)) = looked.try_next().await? {
        catalog.add(outcome);
        catalog.passed_over.extend(not_believed);
    }
    // Reads finish in any order; decisions made from a catalog must not depend on it.
    catalog.committed.sort_by(|a, b| a.marker.version.cmp(&b.marker.version));
    catalog.undecided.sort_by(|a, b| a.record.version.cmp(&b.record.version));
    catalog.unreadable.sort_by(|a, b| a.version.cmp(&b.version));
    Ok(catalog)
}

/// Reads the outcome of one version, as [`read`] does for all.
///
/// Errors: the store is away.
pub async fn read_version(store: &Arc<dyn Store>, version: &VersionId) -> Result<Catalog, StoreError> {
    let prefix = format!("{version}/");
    let mut found = BTreeMap::new();
    sort_out(&mut found, &prefix, store.list(&prefix, true).await?);
    let mut catalog = Catalog::default();
    for version in found.into_values() {
        let (outcome, not_believed) = look(store, version).await?;
        catalog.add(outcome);
        catalog.passed_over.extend(not_believed);
    }
    Ok(catalog)
}

impl Catalog {
    fn add(&mut self, outcome: Looked) {
        match outcome {
            Looked::Committed(version) => self.committed.push(*version),
            Looked::Undecided { attempts, mut passed } => {
                self.undecided.extend(attempts);
                self.passed_over.append(&mut passed);
            }
            Looked::Aborted(version) => self.aborted.push(version),
            Looked::Retired(version) => self.retired.push(version),
            Looked::PassedOver(passed) => self.passed_over.push(passed),
            Looked::Unreadable(version, passed) => {
                self.unreadable.push(*version);
                self.passed_over.push(passed);
            }
        }
    }
}

/// A version's own directory, as the listing shows it.
#[derive(Debug, Default)]
struct Found {
    version: Option<VersionId>,
    committed: bool,
    retired: bool,
    attempts: Vec<String>,
}

async fn enumerate(store: &Arc<dyn Store>) -> Result<BTreeMap<String, Found>, StoreError> {
    let mut found: BTreeMap<String, Found> = BTreeMap::new();
    let mut todo = vec![String::new()];
    let mut seen = 0;
    while !todo.is_empty() {
        let batch = todo.split_off(todo.len().saturating_sub(READS_IN_FLIGHT));
        seen += batch.len();
        if seen > PREFIXES_MAX {
            return Err(StoreError::TooMany {
                prefix: String::new(),
                store: store.describe(),
                limit: PREFIXES_MAX,
            });
        }
        let listings = batch.into_iter().map(|prefix| async move {
            let listing = store.list(&prefix, true).await?;
            Ok::<_, StoreError>((prefix, listing))
        });
        let mut listings = stream::iter(listings).buffer_unordered(READS_IN_FLIGHT);
        while let Some((prefix, listing)) = listings.try_next().await? {
            todo.extend(sort_out(&mut found, &prefix, listing));
        }
    }
    Ok(found)
}

/// Notes the markers and attempts in the listing of a directory. Returns its directories that are no attempt's.
fn sort_out(found: &mut BTreeMap<String, Found>, prefix: &str, listing: Listing) -> Vec<String> {
    for head in listing.keys {
        match head.key.parse::<Key>() {
            Ok(Key::Committed { version }) => {
                let entry = found.entry(prefix.to_owned()).or_default();
                entry.version = Some(version);
                entry.committed = true;
            }
            Ok(Key::Retired { version }) => {
                let entry = found.entry(prefix.to_owned()).or_default();
                entry.version = Some(version);
                entry.retired = true;
            }
            // The key is not ours, or decides nothing: all other objects below the prefix are left alone.
            Ok(_) | Err(_) => {}
        }
    }
    let mut others = Vec::new();
    for inner in listing.prefixes {
        if prefix.is_empty() && inner == ".tidemark/" {
            continue;
        }
        match attempt_of(&inner) {
            Some(version) => {
                let entry = found.entry(prefix.to_owned()).or_default();
                entry.version = Some(version);
                entry.attempts.push(inner);
            }
            None => others.push(inner),
        }
    }
    others
}

/// Returns the version of a prefix that is an attempt's directory. A user's own component `a-…` is escaped in keys,
/// so it is never taken for an attempt's.
fn attempt_of(prefix: &str) -> Option<VersionId> {
    match format!("{prefix}.tidemark/attempt.json").parse::<Key>() {
        Ok(Key::Record { version, .. }) => Some(version),
        _ => None,
    }
}

enum Looked {
    Committed(Box<CommittedVersion>),
    Undecided { attempts: Vec<UndecidedAttempt>, passed: Vec<PassedOver> },
    Aborted(DeadVersion),
    Retired(DeadVersion),
    PassedOver(PassedOver),
    Unreadable(Box<UnreadableVersion>, PassedOver),
}

/// Reads one version. Also returns the object in the place of its retirement, if that is not believed: the version then counts as not
/// retired.
async fn look(store: &Arc<dyn Store>, mut found: Found) -> Result<(Looked, Option<PassedOver>), StoreError> {
    let version = found.version.take().expect("every entry was made with a version");
    let has_remains = !found.attempts.is_empty();
    let mut not_believed = None;
    if found.retired {
        match read_retired(store, &version, None).await? {
            Ok(_) => return Ok((Looked::Retired(DeadVersion { version, has_remains }), None)),
            Err(why) => {
                let key = Key::Retired { version: version.clone() }.to_string();
                not_believed = Some(PassedOver { key, why });
            }
        }
    }
    if found.committed {
        return Ok((decided(store, version, &found.attempts).await?, not_believed));
    }
    // Only a committed version is ever retired. So its attempts do not count as undecided, and are not swept.
    if let Some(passed) = not_believed {
        return Ok((unreadable(store, version, &found.attempts, None, passed).await?, None));
    }
    Ok((undecided(store, &found.attempts).await?, None))
}

/// Reads a version that has a marker.
async fn decided(
    store: &Arc<dyn Store>,
    version: VersionId,
    attempts: &[String],
) -> Result<Looked, StoreError> {
    let has_remains = !attempts.is_empty();
    let key = Key::Committed { version: version.clone() }.to_string();
    let marker: Marker = match document(store, &key).await? {
        Ok(marker) => marker,
        // The marker is gone since it was listed, so there is nothing left to believe.
        Err(why @ FormatProblem::Missing) => return Ok(Looked::PassedOver(PassedOver { key, why })),
        Err(why) => return unreadable(store, version, attempts, None, PassedOver { key, why }).await,
    };
    if let Err(flaw) = marker.check_place(&version) {
        let why = FormatProblem::Flaw(flaw);
        return unreadable(store, version, attempts, None, PassedOver { key, why }).await;
    }
    let attempt = Some(marker.attempt);
    let pass = |key: String, why| {
        let passed = PassedOver { key, why };
        unreadable(store, version.clone(), attempts, attempt, passed)
    };
    let (Decision::Commit, Some(manifest_key), Some(hash)) =
        (marker.decision, marker.manifest.clone(), marker.manifest_hash)
    else {
        return Ok(Looked::Aborted(DeadVersion { version, has_remains }));
    };
    let bytes = match bounded(store, &manifest_key, MAX_DOCUMENT_BYTES).await? {
        Ok(bytes) => bytes,
        // The version was retired since its directory was listed: the retirement precedes the first delete.
        Err(FormatProblem::Missing) if read_retired(store, &version, None).await?.is_ok() => {
            return Ok(Looked::Retired(DeadVersion { version, has_remains }));
        }
        Err(why) => return pass(manifest_key, why).await,
    };
    let validated = match ValidatedManifest::parse(&bytes, &hash) {
        Ok(validated) => validated,
        Err(error) => return pass(manifest_key, error.into()).await,
    };
    if let Err(flaw) = marker.check_manifest(&validated) {
        return pass(manifest_key, FormatProblem::Flaw(flaw)).await;
    }
    let manifest = validated.into_manifest();
    Ok(Looked::Committed(Box::new(CommittedVersion { marker, manifest })))
}

/// Returns a version whose marker or manifest is not believed, with its record: the record of the `named` attempt, if the marker can be
/// read.
async fn unreadable(
    store: &Arc<dyn Store>,
    version: VersionId,
    attempts: &[String],
    named: Option<AttemptId>,
    passed: PassedOver,
) -> Result<Looked, StoreError> {
    // A marker proves at least that the version was decided. If nothing else is left, the version was aborted.
    if named.is_none() && attempts.is_empty() {
        return Ok(Looked::PassedOver(passed));
    }
    let mut records = Vec::new();
    for prefix in attempts {
        let key = format!("{prefix}.tidemark/attempt.json");
        let Ok(Key::Record { attempt, .. }) = key.parse() else { continue };
        if named.is_some_and(|named| named != attempt) {
            continue;
        }
        // A record that cannot be read is left out, and is no further problem.
        let record = document::<Record>(store, &key).await?;
        records.extend(record.ok().filter(|record| record.version == version));
    }
    let record = records.into_iter().max_by_key(|record| (record.evidence.commits(), record.epoch));
    let why = format!("{}: {}", passed.key, error_text(&passed.why));
    Ok(Looked::Unreadable(Box::new(UnreadableVersion { version, record, why }), passed))
}

/// Reads the retirement of a version, and of the `manifest` with that hash if one is named. An object under the key proves nothing: a
/// proxy's page, or a document of another version, retires nothing. The inner error says why it is not believed; `Missing` if there
/// is none.
///
/// Errors: the store is away.
pub async fn read_retired(
    store: &Arc<dyn Store>,
    version: &VersionId,
    manifest: Option<&ContentHash>,
) -> Result<Result<Retired, FormatProblem>, StoreError> {
    let read = document::<Retired>(store, &Key::Retired { version: version.clone() }.to_string()).await?;
    Ok(read.and_then(|retired| {
        retired.check(version, manifest).map_err(FormatProblem::Flaw)?;
        Ok(retired)
    }))
}

async fn undecided(store: &Arc<dyn Store>, attempts: &[String]) -> Result<Looked, StoreError> {
    let mut undecided = Vec::new();
    let mut passed = Vec::new();
    for prefix in attempts {
        let before = passed.len();
        let mut record = None;
        let mut prepared = Vec::new();
        for head in store.list(&format!("{prefix}.tidemark/"), true).await?.keys {
            match head.key.parse::<Key>() {
                Ok(Key::Record { .. }) => match document::<Record>(store, &head.key).await? {
                    Ok(found) => record = Some(found),
                    // The record was there a moment ago: a coordinator aborted the version, and sweeps it.
                    Err(FormatProblem::Missing) => {}
                    Err(why) => passed.push(PassedOver { key: head.key, why }),
                },
                Ok(Key::Prepared { .. }) => match document::<Prepared>(store, &head.key).await? {
                    Ok(found) => prepared.push(found),
                    Err(FormatProblem::Missing) => {}
                    Err(why) => passed.push(PassedOver { key: head.key, why }),
                },
                Ok(_) | Err(_) => {}
            }
        }
        // An attempt with a document that cannot be read may have been prepared, so it is not aborted.
        if passed.len() == before {
            // Without a record, no part of the attempt was promised to any caller.
            undecided.extend(record.map(|record| UndecidedAttempt { record, prepared }));
        }
    }
    Ok(Looked::Undecided { attempts: undecided, passed })
}

/// Reads a document; the inner error says why it is not believed.
pub async fn document<D: Document>(
    store: &Arc<dyn Store>,
    key: &str,
) -> Result<Result<D, FormatProblem>, StoreError> {
    let limit = D::MAX_BYTES.max(MAX_MARKER_BYTES);
    Ok(bounded(store, key, limit).await?.and_then(|bytes| D::parse(&bytes).map_err(FormatProblem::from)))
}

async fn bounded(
    store: &Arc<dyn Store>,
    key: &str,
    limit: usize,
) -> Result<Result<bytes::Bytes, FormatProblem>, StoreError> {
    match store.get(key, u64::try_from(limit).expect("a constant")).await {
        Ok(Some(bytes)) => Ok(Ok(bytes)),
        Ok(None) => Ok(Err(FormatProblem::Missing)),
        Err(StoreError::TooLarge { .. }) => Ok(Err(FormatProblem::TooLarge)),
        Err(StoreError::Damaged { .. }) => Ok(Err(FormatProblem::Damaged)),
        Err(error) => Err(error),
    }
}

/// Whether every file of an attempt's record is prepared, so that a coordinator that finds the attempt can decide it.
#[must_use]
pub fn is_prepared(attempt: &UndecidedAttempt) -> bool {
    Manifest::join(&attempt.record, &attempt.prepared).is_ok()
}

/// Returns the highest number of a series, and the newest document that is believed; `None` if there is none.
///
/// A document that is not believed is passed over, and the one before it counts: an older document says less, never something
/// wrong.
pub async fn newest<D: Document>(
    store: &Arc<dyn Store>,
    series: &Series,
    passed_over: &mut Vec<PassedOver>,
) -> Result<(u64, Option<D>), StoreError> {
    let listing = store.list(&series.prefix(), true).await?;
    let mut numbers: Vec<u64> = listing
        .keys
        .iter()
        .filter_map(|head| match head.key.parse::<Key>() {
            Ok(Key::Numbered { number, .. }) => Some(number),
            Ok(_) | Err(_) => None,
        })
        .collect();
    numbers.sort_unstable();
    let highest = numbers.last().copied().unwrap_or(0);
    for number in numbers.into_iter().rev() {
        let key = Key::numbered(series.clone(), number).to_string();
        match document(store, &key).await? {
            Ok(found) => return Ok((highest, Some(found))),
            Err(why) => passed_over.push(PassedOver { key, why }),
        }
    }
    Ok((highest, None))
}

/// Returns the series of every pin that stands.
pub async fn pins(
    store: &Arc<dyn Store>,
    passed_over: &mut Vec<PassedOver>,
) -> Result<BTreeSet<Series>, StoreError> {
    let mut highest: BTreeMap<Series, u64> = BTreeMap::new();
    for head in store.list(&Series::pins_prefix(), false).await?.keys {
        if let Ok(Key::Numbered { series: series @ Series::Pins { .. }, number }) = head.key.parse() {
            let known = highest.entry(series).or_default();
            *known = number.max(*known);
        }
    }
    let mut pinned = BTreeSet::new();
    for (series, number) in highest {
        let key = Key::numbered(series.clone(), number).to_string();
        match document::<PinDocument>(store, &key).await? {
            Ok(pin) if !pin.pinned => {}
            Ok(_) => {
                pinned.insert(series);
            }
            Err(why) => {
                // The pin's state is unknown, so it counts as pinned and nothing is retired.
                passed_over.push(PassedOver { key, why });
                pinned.insert(series);
            }
        }
    }
    Ok(pinned)
}

/// The loose files in Tier-3.
#[derive(Debug, Default)]
pub struct LooseFiles {
    /// The newest generation of each file, if it is believed.
    pub believed: Vec<LooseSidecar>,
    /// Files whose newest generation is not believed.
    pub unreadable: Vec<UnreadableLoose>,
    /// The highest number used for each path, believed or not: the next one is above it.
    pub numbers: BTreeMap<RelPath, Generation>,
}

/// A loose file whose last content is unknown. The list of objects passed over names the sidecar.
#[derive(Debug)]
pub struct UnreadableLoose {
    pub path: RelPath,
    pub generation: Generation,
    pub why: String,
    /// The newest generation that is believed, with older bytes.
    pub older: Option<LooseSidecar>,
}

/// The result of reading one file's sidecars.
#[derive(Debug, Default)]
struct ReadLoose {
    believed: Option<LooseSidecar>,
    /// The newest generation, if it is present and not believed, with its path if the key has it.
    unreadable: Option<(Option<RelPath>, Generation, String)>,
    passed: Vec<PassedOver>,
}

/// Reads every loose file's newest sidecar. If that is damaged, reads the one before, and returns it apart because it says less.
pub async fn loose(
    store: &Arc<dyn Store>,
    passed_over: &mut Vec<PassedOver>,
) -> Result<LooseFiles, StoreError> {
    let mut numbers = BTreeMap::new();
    let mut todo = vec![".tidemark/loose/".to_owned()];
    let mut sidecars: BTreeMap<String, Vec<(Generation, String, Option<RelPath>)>> = BTreeMap::new();
    while let Some(prefix) = todo.pop() {
        let listing = store.list(&prefix, true).await?;
        for head in listing.keys {
            match head.key.parse::<Key>() {
                Ok(Key::LooseSidecar { generation, path }) => {
                    let named = match &path {
                        PathOrHash::Path(path) => Some(path.clone()),
                        PathOrHash::Hash(_) => None,
                    };
                    use_number(&mut numbers, path, generation);
                    sidecars.entry(prefix.clone()).or_default().push((generation, head.key, named));
                }
                // The upload of bytes without a sidecar was cut off; their number is used.
                Ok(Key::Loose { generation, path }) => use_number(&mut numbers, path, generation),
                Ok(_) | Err(_) => {}
            }
        }
        todo.extend(listing.prefixes);
    }
    let reads = sidecars.into_values().map(|mut generations| async move {
        generations.sort_unstable();
        let mut read = ReadLoose::default();
        for (generation, key, path) in generations.into_iter().rev() {
            match document::<LooseSidecar>(store, &key).await? {
                Ok(found) => {
                    read.believed = Some(found);
                    break;
                }
                Err(why) => {
                    // A sidecar that is gone since it was listed was removed with its generation, and the one before counts.
                    if read.passed.is_empty() && !matches!(why, FormatProblem::Missing) {
                        read.unreadable = Some((path, generation, format!("{key}: {}", error_text(&why))));
                    }
                    read.passed.push(PassedOver { key, why });
                }
            }
        }
        Ok::<_, StoreError>(read)
    });
    let mut files = LooseFiles { numbers, ..LooseFiles::default() };
    let mut reads = stream::iter(reads).buffer_unordered(READS_IN_FLIGHT);
    while let Some(read) = reads.try_next().await? {
        files.add(read, passed_over);
    }
    files.believed.sort_by(|a, b| a.file.path.cmp(&b.file.path));
    files.unreadable.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

impl LooseFiles {
    fn add(&mut self, read: ReadLoose, passed_over: &mut Vec<PassedOver>) {
        let ReadLoose { believed, unreadable, passed } = read;
        let mut passed = passed.into_iter();
        if let Some((path, generation, why)) = unreadable {
            let path = path.or_else(|| Some(believed.as_ref()?.file.path.clone()));
            match path {
                Some(path) => {
                    self.unreadable.push(UnreadableLoose { path, generation, why, older: believed });
                }
                None => passed_over.extend(passed.next().map(|passed| PassedOver {
                    why: FormatProblem::Nameless(Box::new(passed.why)),
                    ..passed
                })),
            }
        } else {
            self.believed.extend(believed);
        }
        passed_over.extend(passed);
    }
}

/// Records a used number, unless the key has only the path's hash: such a path is learnt from its sidecar.
fn use_number(numbers: &mut BTreeMap<RelPath, Generation>, path: PathOrHash, generation: Generation) {
    if let PathOrHash::Path(path) = path {
        let known = numbers.entry(path).or_insert(generation);
        *known = (*known).max(generation);
    }
}
