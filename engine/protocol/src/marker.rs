//! `_COMMITTED`, the one decision about a version, and `_RETIRED`, the retirement of a committed version.
//!
//! Owns: their fields, the check against the manifest that they name, and the meaning of a doubtful answer to the
//! conditional create once the marker was read. Does not own: the request itself (the engine's store).

use crate::format::{Document, Flaw, MAX_MARKER_BYTES, expect_same};
use crate::id::{AttemptId, ContentHash, Epoch, Step};
use crate::key::{Key, VersionId, VersionRef};
use crate::manifest::ValidatedManifest;
use serde::{Deserialize, Serialize};
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    Commit,
    Abort,
}

impl Decision {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Commit => "commit",
            Self::Abort => "abort",
        }
    }
}

impl fmt::Display for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// `_COMMITTED`: the decision about a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Marker {
    pub format: u32,
    pub decision: Decision,
    pub attempt: AttemptId,
    /// The manifest's key; `null` when the decision is to abort.
    pub manifest: Option<String>,
    pub manifest_hash: Option<ContentHash>,
    pub epoch: Epoch,
    #[serde(flatten)]
    pub version: VersionId,
    pub step: Option<Step>,
    /// The committed version of the lineage before this one.
    pub previous: Option<VersionRef>,
}

impl Marker {
    /// Makes a decision to commit the manifest of that hash.
    #[must_use]
    pub fn commit(
        version: VersionId,
        attempt: AttemptId,
        manifest: ContentHash,
        step: Option<Step>,
        epoch: Epoch,
        previous: Option<VersionRef>,
    ) -> Self {
        let key = Key::Manifest { version: version.clone(), attempt, hash: manifest };
        Self {
            format: crate::format::FORMAT,
            decision: Decision::Commit,
            attempt,
            manifest: Some(key.to_string()),
            manifest_hash: Some(manifest),
            epoch,
            version,
            step,
            previous,
        }
    }

    /// Makes a decision that this version is never committed.
    #[must_use]
    pub fn abort(version: VersionId, attempt: AttemptId, step: Option<Step>, epoch: Epoch) -> Self {
        Self {
            format: crate::format::FORMAT,
            decision: Decision::Abort,
            attempt,
            manifest: None,
            manifest_hash: None,
            epoch,
            version,
            step,
            previous: None,
        }
    }

    /// Checks that the marker stands at the place that its body names. A marker that was copied elsewhere decides
    /// nothing there.
    ///
    /// # Errors
    /// `Flaw::Mismatch` when the key is another version's.
    pub fn check_place(&self, key_version: &VersionId) -> Result<(), Flaw> {
        expect_same("version", &self.version, key_version)
    }

    /// Checks that this marker commits that manifest.
    ///
    /// # Errors
    /// When the marker aborts, or names another manifest, version, attempt or step.
    pub fn check_manifest(&self, found: &ValidatedManifest) -> Result<(), Flaw> {
        let Some(hash) = self.manifest_hash else {
            return Err(Flaw::Decision { decision: "abort", problem: "has no manifest" });
        };
        let manifest = found.manifest();
        expect_same("manifest_hash", &found.hash(), &hash)?;
        expect_same("version", &manifest.version, &self.version)?;
        expect_same("attempt", &manifest.attempt, &self.attempt)?;
        let step = |step: Option<Step>| step.map_or_else(|| "null".to_owned(), |step| step.to_string());
        expect_same("step", &step(manifest.step), &step(self.step))
    }
}

impl Document for Marker {
    const WHAT: &'static str = "a commit marker (_COMMITTED)";
    const MAX_BYTES: usize = MAX_MARKER_BYTES;
    // The fields are a contract with readers that do not use Tidemark; the manifest has a hash.
    const SEALED: bool = false;

    fn format(&self) -> u32 {
        self.format
    }

    fn validate(&self) -> Result<(), Flaw> {
        let decision = self.decision.as_str();
        match (self.decision, &self.manifest, self.manifest_hash) {
            (Decision::Commit, Some(key), Some(hash)) => {
                let (version, attempt) = (self.version.clone(), self.attempt);
                expect_same("manifest", key, &Key::Manifest { version, attempt, hash }.to_string())
            }
            (Decision::Commit, ..) => Err(Flaw::Decision { decision, problem: "names no manifest" }),
            (Decision::Abort, None, None) => Ok(()),
            (Decision::Abort, ..) => Err(Flaw::Decision { decision, problem: "names a manifest" }),
        }
    }
}

/// The outcome of a conditional create with a doubtful answer, once the marker was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MarkerOutcome {
    /// The decision stands as this coordinator wrote it, or another coordinator wrote the same one.
    Mine,
    /// Another decision stands, and this coordinator's never will.
    Lost { decision: Decision, attempt: AttemptId, epoch: Epoch },
    /// Nothing is decided: try again, up to a limit.
    Absent,
}

/// Resolves every doubtful answer (time-out, 5xx, 409, 412, "already exists"): the caller reads the marker, and only
/// that counts. The same decision about the same manifest is ours whoever wrote it, because a successor finishes the
/// attempt that it finds and would write the same.
#[must_use]
pub fn doubt(mine: &Marker, found: Option<&Marker>) -> MarkerOutcome {
    let Some(found) = found else { return MarkerOutcome::Absent };
    let same = found.version == mine.version
        && found.decision == mine.decision
        && found.attempt == mine.attempt
        && found.manifest_hash == mine.manifest_hash;
    if same {
        return MarkerOutcome::Mine;
    }
    MarkerOutcome::Lost { decision: found.decision, attempt: found.attempt, epoch: found.epoch }
}

/// `_RETIRED`: the retirement of a committed version; readers ignore the version from then on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retired {
    pub format: u32,
    #[serde(flatten)]
    pub version: VersionId,
    pub attempt: AttemptId,
    pub manifest_hash: ContentHash,
    pub epoch: Epoch,
    /// The rule of retention, or the person who asked, in one sentence.
    pub reason: String,
    /// CLOCK_REALTIME at the retirement.
    pub retired_at_ns: i64,
}

impl Retired {
    /// Checks that this retirement lies where the key says, and retires the manifest with this hash if one is given.
    ///
    /// # Errors
    /// `Flaw::Mismatch` when it belongs to another version, or another manifest.
    pub fn check(&self, key_version: &VersionId, manifest: Option<&ContentHash>) -> Result<(), Flaw> {
        expect_same("version", &self.version, key_version)?;
        manifest.map_or(Ok(()), |hash| expect_same("manifest_hash", &self.manifest_hash, hash))
    }
}

impl Document for Retired {
    const WHAT: &'static str = "a retirement (_RETIRED)";
    const MAX_BYTES: usize = MAX_MARKER_BYTES;
    const SEALED: bool = true;

    fn format(&self) -> u32 {
        self.format
    }

    fn validate(&self) -> Result<(), Flaw> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::FormatError;
    use crate::manifest::tests::manifest;
    use crate::record::tests::version;

    fn marker() -> Marker {
        let (_, hash) = manifest().encode_named().unwrap();
        Marker::commit(version(), AttemptId(5), hash, Some(Step(1)), Epoch(1), None)
    }

    #[test]
    fn a_marker_has_the_fields_of_the_format_note() {
        let json: serde_json::Value = serde_json::from_slice(&marker().encode().unwrap()).unwrap();
        let fields = [
            "attempt",
            "decision",
            "directory",
            "epoch",
            "format",
            "manifest",
            "manifest_hash",
            "previous",
            "run",
            "step",
            "timeline",
            "version",
        ];
        let mut found: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
        found.sort_unstable();
        assert_eq!(found, fields);
        assert_eq!((&json["decision"], &json["run"]), (&"commit".into(), &"r".into()));
        assert_eq!((&json["timeline"], &json["version"]), (&0.into(), &1.into()));
    }

    #[test]
    fn a_marker_commits_only_the_manifest_it_names() {
        let (bytes, hash) = manifest().encode_named().unwrap();
        let validated = ValidatedManifest::parse(&bytes, &hash).unwrap();
        assert_eq!(marker().check_manifest(&validated), Ok(()));
        let mut other = manifest();
        other.completed_at_ns += 1;
        let (bytes, hash) = other.encode_named().unwrap();
        let validated = ValidatedManifest::parse(&bytes, &hash).unwrap();
        assert!(marker().check_manifest(&validated).is_err());
    }

    #[test]
    fn a_marker_that_contradicts_itself_is_refused() {
        let mut abort = marker();
        abort.decision = Decision::Abort;
        assert!(matches!(abort.encode(), Err(FormatError::Meaning { .. })));
        let mut elsewhere = marker();
        elsewhere.version.version = elsewhere.version.version.next();
        assert!(matches!(elsewhere.encode(), Err(FormatError::Meaning { .. })));
        assert!(marker().check_place(&elsewhere.version).is_err());
        let bytes = marker().encode().unwrap();
        for end in 0..bytes.len() {
            assert!(Marker::parse(&bytes[..end]).is_err());
        }
    }

    #[test]
    fn a_doubtful_answer_is_decided_by_what_stands() {
        let mine = marker();
        assert_eq!(doubt(&mine, None), MarkerOutcome::Absent);
        assert_eq!(doubt(&mine, Some(&mine)), MarkerOutcome::Mine);
        let mut older = mine.clone();
        older.epoch = Epoch(0);
        assert_eq!(doubt(&mine, Some(&older)), MarkerOutcome::Mine, "another coordinator, the same decision");
        let abort = Marker::abort(version(), AttemptId(5), None, Epoch(9));
        assert!(matches!(doubt(&mine, Some(&abort)), MarkerOutcome::Lost { decision: Decision::Abort, .. }));
        let mut other = mine.clone();
        other.attempt = AttemptId(6);
        assert!(matches!(doubt(&mine, Some(&other)), MarkerOutcome::Lost { .. }));
    }
}
