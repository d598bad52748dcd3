//! One checkpoint as this node knows it, over all its versions; and one loose file.
//!
//! Owns: the states of a version on its way to Tier-3, what waits where. Does not own: what moves it (`decide`,
//! `run`), the files themselves (the namespace).

use crate::node::decide::is_covered;
use crate::node::ledger::{Contents, Ledger, contents};
use crate::save::commit::Attempt;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;
use tidemark_protocol::evidence::{Covered, Told, Verdict};
use tidemark_protocol::id::{Epoch, FileId, Generation, SealNumber, Step, Timeline, Version};
use tidemark_protocol::key::{VersionId, VersionRef};
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{Candidate, CheckpointId};
use tidemark_protocol::record::Record;

/// A version's number within its checkpoint.
pub(crate) type Number = (Timeline, Version);

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Book {
    pub(crate) id: CheckpointId,
    pub(crate) scope: Option<RelPath>,
    /// What the tree holds under this name now.
    pub(crate) candidate: Option<Candidate>,
    /// What was concluded of it last.
    pub(crate) verdict: Option<Verdict>,
    /// Somebody said that it is whole, of these contents.
    pub(crate) told_of: Option<Contents>,
    pub(crate) versions: BTreeMap<Number, VersionBook>,
    /// The indices as they were read.
    pub(crate) indices: BTreeMap<RelPath, ParsedIndex>,
}

/// An index that was read once.
#[derive(Debug)]
pub(crate) struct ParsedIndex {
    pub(crate) of: (FileId, SealNumber),
    /// What it lists; an error was said when it was read.
    pub(crate) covered: Result<Arc<Covered>, ()>,
}

/// One version.
#[derive(Debug)]
pub(crate) struct VersionBook {
    pub(crate) record: Record,
    pub(crate) contents: Contents,
    pub(crate) stage: Stage,
    pub(crate) previous: Option<VersionRef>,
}

/// How far a version is. Each stage carries what it waits for.
#[derive(Debug)]
pub(crate) enum Stage {
    /// A job has the attempt: record, upload and prepared marker.
    Preparing,
    /// A job has the attempt: manifest and marker.
    Deciding,
    /// Something failed that may pass; tried again then.
    Waiting {
        attempt: Box<Attempt>,
        until: Instant,
        why: String,
    },
    /// Everything is in Tier-3; only evidence is missing.
    Prepared {
        attempt: Box<Attempt>,
    },
    Committed {
        manifest: Arc<Manifest>,
        epoch: Epoch,
    },
    /// Decided against, here or by another coordinator; the number is used.
    Aborted,
    /// Given up: nothing will make these bytes whole again.
    Failed {
        why: String,
    },
}

impl Stage {
    /// Whether the version may still become committed.
    pub(crate) fn is_alive(&self) -> bool {
        match self {
            Self::Preparing | Self::Deciding | Self::Waiting { .. } | Self::Prepared { .. } => true,
            Self::Committed { .. } | Self::Aborted | Self::Failed { .. } => false,
        }
    }
}

impl Book {
    pub(crate) fn new(id: CheckpointId) -> Self {
        Self {
            id,
            scope: None,
            candidate: None,
            verdict: None,
            told_of: None,
            versions: BTreeMap::new(),
            indices: BTreeMap::new(),
        }
    }

    pub(crate) fn set_candidate(&mut self, candidate: Option<Candidate>, scope: Option<RelPath>) {
        self.scope = scope;
        if candidate.is_none() {
            self.verdict = None;
            self.told_of = None;
            self.indices.clear();
        }
        self.candidate = candidate;
    }

    /// The newest version that is, or may become, committed.
    pub(crate) fn newest(&self) -> Option<(&Number, &VersionBook)> {
        self.versions
            .iter()
            .rev()
            .find(|(_, version)| version.stage.is_alive() || matches!(version.stage, Stage::Committed { .. }))
    }

    /// The newest version that stands or may come to stand and holds all of `present`.
    pub(crate) fn covering(&self, present: &Contents) -> Option<(&Number, &VersionBook)> {
        self.versions.iter().rev().find(|(_, version)| {
            let stands = version.stage.is_alive() || matches!(version.stage, Stage::Committed { .. });
            stands && is_covered(present, &version.contents)
        })
    }

    /// The newest committed version.
    pub(crate) fn committed(&self) -> Option<(&Number, &VersionBook)> {
        self.versions.iter().rev().find(|(_, version)| matches!(version.stage, Stage::Committed { .. }))
    }

    /// The number the next version takes: above every number ever used, decided or not.
    pub(crate) fn next_number(&self) -> Number {
        let last = self.versions.keys().next_back();
        last.map_or((Timeline(0), Version(1)), |(timeline, version)| (*timeline, version.next()))
    }

    pub(crate) fn version_id(&self, number: Number) -> VersionId {
        VersionId {
            run: self.id.run.clone(),
            directory: self.id.directory.clone(),
            timeline: number.0,
            version: number.1,
        }
    }

    /// How another marker names the newest committed version.
    pub(crate) fn committed_ref(&self) -> Option<(Option<Step>, VersionRef)> {
        let (&(timeline, version), book) = self.committed()?;
        let step = book.record.step;
        Some((step, VersionRef { directory: self.id.directory.clone(), timeline, version, step }))
    }

    /// What a person said of exactly what the tree holds now. A word about other bytes counts for nothing.
    pub(crate) fn told(&self, ledger: &Ledger) -> Told {
        let (Some(told_of), Some(candidate)) = (&self.told_of, &self.candidate) else { return Told::No };
        let present = contents(ledger.files_of(candidate, &self.scope));
        if present.as_ref() == Some(told_of) { Told::Commit } else { Told::No }
    }

    /// Whether the file at `path` is part of what the tree holds under this name.
    pub(crate) fn holds(&self, path: &RelPath) -> bool {
        let candidate = self.candidate.as_ref();
        candidate.is_some_and(|found| found.files.contains_key(path) || found.temporaries.contains(path))
    }

    /// It can never be complete as it is.
    pub(crate) fn is_torn(&self) -> bool {
        matches!(self.verdict, Some(Verdict::Torn { .. }))
    }

    /// Where the checkpoint is on the mount, relative to it.
    pub(crate) fn path(&self) -> Vec<u8> {
        tidemark_protocol::key::checkpoint_path(&self.id.run, &self.id.directory)
    }
}

/// A file that belongs to no checkpoint.
#[derive(Debug, Default)]
pub(crate) struct LooseBook {
    pub(crate) stage: LooseStage,
    /// The newest generation that was begun.
    pub(crate) generation: Option<Generation>,
    /// What that generation holds.
    pub(crate) of: Option<(FileId, SealNumber)>,
}

/// How far a loose file is.
#[derive(Debug, Default)]
pub(crate) enum LooseStage {
    #[default]
    Idle,
    Uploading,
    Waiting {
        until: Instant,
        tries: u32,
        why: String,
    },
    Uploaded {
        of: (FileId, SealNumber),
    },
}
