//! Invariants, one function each, named by its sentence.
//!
//! Owns: the checks that tests, the node loop's debug assertions and `ckptctl verify` share. Does not own: repairs.
//! The invariants of a single document are checked whenever it is read or written (`format`).

use crate::checkpoint::Checkpoint;
use crate::format::{Flaw, FormatError, expect_same};
use crate::key::Key;
use crate::lineage::{order, watermark};
use crate::manifest::{Manifest, ValidatedManifest};
use crate::marker::{Decision, Marker};
use crate::path::RelPath;
use crate::record::Record;
use crate::residency::ReclaimClass;
use crate::retention::{ALWAYS_KEPT, Committed, Keep};
use std::collections::BTreeSet;

/// Checks that a version committed here is committed in Tier-3: the marker exists, says commit, and names the same
/// attempt.
///
/// # Errors
/// A sentence with the marker's actual content.
pub fn a_committed_version_has_its_marker(
    version: &Checkpoint,
    marker: Option<&Marker>,
) -> Result<(), String> {
    let attempt = version.record().attempt;
    match marker {
        _ if !version.is_committed() => Ok(()),
        Some(marker) if (marker.decision, marker.attempt) == (Decision::Commit, attempt) => Ok(()),
        Some(marker) => {
            let (decision, other) = (marker.decision, marker.attempt);
            Err(format!("attempt {attempt} is committed, and the marker says {decision} of attempt {other}"))
        }
        None => Err(format!("attempt {attempt} is committed, and there is no marker")),
    }
}

/// Checks that a marker decides only about the version under whose prefix it lies.
///
/// # Errors
/// When the key is no marker's, or another version's.
pub fn a_commit_marker_stands_where_its_body_says(marker: &Marker, key: &str) -> Result<(), Flaw> {
    expect_same(
        "the marker's key",
        &Key::Committed { version: marker.version.clone() }.to_string(),
        &key.to_owned(),
    )
}

/// # Errors
/// When the marker aborts, the bytes do not hash to its name, or they are another version's manifest.
pub fn a_commit_marker_names_a_manifest_that_hashes_to_its_name(
    marker: &Marker,
    manifest_bytes: &[u8],
) -> Result<ValidatedManifest, FormatError> {
    let what = "a commit marker (_COMMITTED)";
    let meaning = |flaw| FormatError::Meaning { what, flaw };
    let (Decision::Commit, Some(hash)) = (marker.decision, marker.manifest_hash) else {
        return Err(meaning(Flaw::Decision {
            decision: marker.decision.as_str(),
            problem: "names no manifest",
        }));
    };
    let manifest = ValidatedManifest::parse(manifest_bytes, &hash)?;
    marker.check_manifest(&manifest).map_err(meaning)?;
    Ok(manifest)
}

/// Checks that a manifest holds all files of a checkpoint, and no others.
///
/// # Errors
/// When the manifest leaves out a file of the record, or has one that the record does not list.
pub fn a_manifest_holds_exactly_the_files_of_its_record(
    manifest: &Manifest,
    record: &Record,
) -> Result<(), Flaw> {
    expect_same("version", &manifest.version, &record.version)?;
    expect_same("attempt", &manifest.attempt, &record.attempt)?;
    let linked = manifest.hard_links.iter().map(|link| &link.path);
    let held: BTreeSet<_> = manifest.files.iter().map(|file| &file.path).chain(linked).collect();
    if let Some(file) = record.files.iter().find(|file| !held.contains(&file.path)) {
        return Err(Flaw::NotPrepared { path: file.path.to_string() });
    }
    let listed: BTreeSet<_> = record.files.iter().map(|file| &file.path).collect();
    match manifest.files.iter().find(|file| !listed.contains(&file.path)) {
        Some(file) => {
            let (path, version) = (file.path.to_string(), record.version.to_string());
            Err(Flaw::Outside { path, version })
        }
        None => Ok(()),
    }
}

/// Checks that a committed version has evidence; quiescence alone is none.
///
/// # Errors
/// A sentence naming the version.
pub fn nothing_is_committed_without_evidence(version: &Checkpoint) -> Result<(), String> {
    if version.is_committed() && !version.is_proven() {
        let (evidence, detail) = version.evidence();
        return Err(format!("{} is committed by {evidence}: {detail}", version.record().version));
    }
    Ok(())
}

/// Checks that each version of a run has a number of its own, and that no committed version is above the watermark.
///
/// # Errors
/// A sentence naming the versions.
pub fn the_watermark_is_the_newest_committed_version<'a>(
    run: impl IntoIterator<Item = &'a Checkpoint> + Clone,
) -> Result<(), String> {
    let mut seen = BTreeSet::new();
    for version in run.clone() {
        if !seen.insert(&version.record().version) {
            return Err(format!("{} is two versions", version.record().version));
        }
    }
    let Some(watermark) = watermark(run.clone()) else { return Ok(()) };
    let above =
        |version: &&Checkpoint| version.is_committed() && order(version.record()) > order(watermark.record());
    match run.into_iter().find(above) {
        Some(above) => Err(format!(
            "{} is committed above the watermark, {}",
            above.record().version,
            watermark.record().version
        )),
        None => Ok(()),
    }
}

/// Checks that the host copies of the newest committed version give way last: none of its files is in a class that
/// is reclaimed earlier.
///
/// # Errors
/// A sentence naming the file.
pub fn the_newest_committed_version_gives_way_last(files: &[(RelPath, ReclaimClass)]) -> Result<(), String> {
    match files.iter().find(|(_, class)| *class < ReclaimClass::CommittedNewest) {
        Some((path, class)) => Err(format!("{path} of the newest committed version is {class:?}")),
        None => Ok(()),
    }
}

/// Checks that the newest verified versions of all stay, and the newest of those that the tree shows.
///
/// # Errors
/// A sentence naming a version that retention retired and must not.
pub fn the_newest_verified_versions_are_kept(lineage: &[Committed], verdicts: &[Keep]) -> Result<(), String> {
    let verified = || lineage.iter().zip(verdicts).rev().filter(|(version, _)| version.verified);
    let shown = verified().filter(|(version, _)| version.is_shown());
    for (version, verdict) in verified().take(ALWAYS_KEPT).chain(shown.take(ALWAYS_KEPT)) {
        if let Keep::Retired(retirement) = verdict {
            return Err(format!(
                "{} is among the newest verified, and was given up: {}",
                version.version,
                retirement.reason()
            ));
        }
    }
    let kept = verdicts.iter().filter(|verdict| matches!(verdict, Keep::Kept { .. })).count();
    if kept < ALWAYS_KEPT.min(lineage.len()) {
        return Err(format!("{kept} of {} versions were kept", lineage.len()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::Document;
    use crate::id::{AttemptId, Epoch, Step};
    use crate::manifest::Prepared;
    use crate::manifest::tests::manifest;
    use crate::record::Evidence;
    use crate::record::tests::{record, version};

    #[test]
    fn each_invariant_can_fail() {
        let (bytes, hash) = manifest().encode_named().unwrap();
        let marker = Marker::commit(version(), AttemptId(5), hash, Some(Step(1)), Epoch(1), None);
        assert!(a_commit_marker_names_a_manifest_that_hashes_to_its_name(&marker, &bytes).is_ok());
        assert!(a_commit_marker_names_a_manifest_that_hashes_to_its_name(&marker, b"{}").is_err());
        let abort = Marker::abort(version(), AttemptId(5), None, Epoch(1));
        assert!(a_commit_marker_names_a_manifest_that_hashes_to_its_name(&abort, &bytes).is_err());
        assert_eq!(a_commit_marker_stands_where_its_body_says(&marker, "r/step-1/v0.1/_COMMITTED"), Ok(()));
        assert!(a_commit_marker_stands_where_its_body_says(&marker, "r/step-1/v0.2/_COMMITTED").is_err());

        assert_eq!(a_manifest_holds_exactly_the_files_of_its_record(&manifest(), &record()), Ok(()));
        let mut short = manifest();
        short.files.pop();
        assert!(a_manifest_holds_exactly_the_files_of_its_record(&short, &record()).is_err());
        let mut other = record();
        other.files.pop();
        assert!(a_manifest_holds_exactly_the_files_of_its_record(&manifest(), &other).is_err());

        let standing = Checkpoint::decided(record(), Decision::Commit);
        assert_eq!(a_committed_version_has_its_marker(&standing, Some(&marker)), Ok(()));
        assert!(a_committed_version_has_its_marker(&standing, Some(&abort)).is_err());
        assert!(a_committed_version_has_its_marker(&standing, None).is_err());
        let committed = |evidence, stamp_ns| {
            let record = Record { evidence, completed_at_ns: stamp_ns, ..record() };
            Checkpoint::decided(record, Decision::Commit)
        };
        let proven = committed(Evidence::Index, 1);
        assert_eq!(nothing_is_committed_without_evidence(&proven), Ok(()));
        assert!(nothing_is_committed_without_evidence(&committed(Evidence::Quiescence, 1)).is_err());
        assert_eq!(the_watermark_is_the_newest_committed_version([&proven]), Ok(()));
        let twin = committed(Evidence::Index, 2);
        assert!(the_watermark_is_the_newest_committed_version([&proven, &twin]).is_err());
        let path = record().files.remove(0).path;
        let gives_way = |class| the_newest_committed_version_gives_way_last(&[(path.clone(), class)]);
        assert_eq!(gives_way(ReclaimClass::CommittedNewest), Ok(()));
        assert!(gives_way(ReclaimClass::BelowWatermark).is_err());
    }

    /// The blocks of the note that begin with three backquotes and `json`, in order: record, prepared marker,
    /// manifest, commit marker of one version.
    #[test]
    fn the_worked_example_of_the_format_note_holds() {
        let note = include_str!("../../design/0003-tier3-format.md");
        let blocks: Vec<_> =
            note.split("```json\n").skip(1).filter_map(|rest| rest.split("\n```").next()).collect();
        let [record, prepared, manifest, marker] = blocks[..] else { panic!("{} blocks", blocks.len()) };
        let record = Record::parse(record.as_bytes()).unwrap();
        let prepared = Prepared::parse(prepared.as_bytes()).unwrap();
        let marker = Marker::parse(marker.as_bytes()).unwrap();
        let found = a_commit_marker_names_a_manifest_that_hashes_to_its_name(&marker, manifest.as_bytes());
        let found = found.unwrap().into_manifest();
        assert_eq!(found, Manifest::join(&record, &[prepared]).unwrap());
        assert_eq!(found.encode().unwrap(), manifest.as_bytes());
        assert_eq!(a_manifest_holds_exactly_the_files_of_its_record(&found, &record), Ok(()));
        for key in [&found.files[0].key, &marker.manifest.unwrap(), "r/step100.pt/v0.1/_COMMITTED"] {
            assert!(note.contains(key), "{key}");
        }
    }
}
