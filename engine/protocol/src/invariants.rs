//! What must always be true, one function each, named by its sentence.
//!
//! Owns: the checks that tests and `ckptctl verify` share. Does not own: repairs.

use crate::format::{Flaw, FormatError, expect_same};
use crate::key::Key;
use crate::lineage::{Choice, Standing, StandingKind};
use crate::manifest::{Manifest, ManifestFile, ValidatedManifest, check_file};
use crate::marker::{Decision, Marker};
use crate::record::Record;
use crate::retention::{ALWAYS_KEPT, Committed, Keep};
use std::collections::BTreeSet;

/// A marker decides about the version under whose prefix it lies, and about no other.
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

/// # Errors
/// The first path that is named twice.
pub fn a_manifest_names_each_path_once(manifest: &Manifest) -> Result<(), Flaw> {
    let mut seen = BTreeSet::new();
    let paths = (manifest.files.iter().map(|file| &file.path))
        .chain(manifest.directories.iter().map(|directory| &directory.path))
        .chain(manifest.symlinks.iter().map(|link| &link.path))
        .chain(manifest.hard_links.iter().map(|link| &link.path));
    for path in paths {
        if !seen.insert(path) {
            return Err(Flaw::PathTwice { path: path.to_string() });
        }
    }
    Ok(())
}

/// Whole and chunks say the same, without a byte being read.
///
/// # Errors
/// When they do not.
pub fn the_chunks_of_a_file_combine_to_its_checksum(file: &ManifestFile) -> Result<(), Flaw> {
    check_file(file)
}

/// All files of a checkpoint or none.
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

/// # Errors
/// A sentence when what was chosen is not whole or not proven complete.
pub fn the_chosen_version_can_be_had_whole(choice: &Choice, versions: &[Standing]) -> Result<(), String> {
    let Some(chosen) = &choice.chosen else { return Ok(()) };
    let standing = versions.iter().find(|standing| standing.version == *chosen);
    match standing {
        Some(standing) if standing.kind != StandingKind::Settled && standing.missing.is_empty() => Ok(()),
        Some(standing) => {
            Err(format!("{chosen} was chosen, and {} files are missing", standing.missing.len()))
        }
        None => Err(format!("{chosen} was chosen, and nobody holds it")),
    }
}

/// # Errors
/// A sentence naming a version that retention gave up and must not.
pub fn the_newest_verified_versions_are_kept(lineage: &[Committed], verdicts: &[Keep]) -> Result<(), String> {
    let verified = lineage.iter().zip(verdicts).rev().filter(|(version, _)| version.verified);
    for (version, verdict) in verified.take(ALWAYS_KEPT) {
        if let Keep::Retired { reason } = verdict {
            return Err(format!(
                "{} is among the newest verified, and was given up: {reason}",
                version.version
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

        assert_eq!(a_manifest_names_each_path_once(&manifest()), Ok(()));
        assert_eq!(a_manifest_holds_exactly_the_files_of_its_record(&manifest(), &record()), Ok(()));
        let mut twice = manifest();
        twice.files.push(twice.files[0].clone());
        assert!(a_manifest_names_each_path_once(&twice).is_err());
        let mut short = manifest();
        short.files.pop();
        assert!(a_manifest_holds_exactly_the_files_of_its_record(&short, &record()).is_err());
        let mut other = record();
        other.files.pop();
        assert!(a_manifest_holds_exactly_the_files_of_its_record(&manifest(), &other).is_err());
        let mut size = manifest();
        size.files[0].size_bytes = 9;
        assert!(the_chunks_of_a_file_combine_to_its_checksum(&size.files[0]).is_err());
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
