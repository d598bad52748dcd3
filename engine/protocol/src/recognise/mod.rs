//! Recognition: the checkpoint that a file belongs to, from names alone.
//!
//! Owns: the grouping of paths into candidate checkpoints; a pure function of the set of paths, whatever their order.
//! Does not own: the rules (`rules`), whether a candidate is complete (`evidence`).
//!
//! A file belongs to the outermost directory above it whose name is a checkpoint's (`step-100`, `checkpoint-500`), so
//! nested matches fold. Otherwise it belongs to its own directory if a file in there is telling (`__0_0.distcp`).
//! Otherwise it is a checkpoint by itself, or one rank's part of a family of such files. Otherwise it is loose.

mod frameworks;
mod rules;
mod series;
mod spec;

pub(crate) use rules::Rule;
pub use rules::{RuleError, Rules};
pub(crate) use series::is_called_whole;
pub(crate) use series::masked_digits;
pub use series::{may_stand_in, series};
pub use spec::{IndexKind, MarkerBy, RuleSpec, TrackerHolds};

use crate::id::Step;
use crate::path::{CheckpointName, RelPath, RunPath};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// The rule of a model's parts, which people copy around.
pub const PARTS: &str = "safetensors";

/// The name of a checkpoint, over all its timelines and versions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CheckpointId {
    pub run: RunPath,
    pub directory: CheckpointName,
}

/// The role of a file in its checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// State, of one rank where the name says which.
    Shard { rank: Option<u64> },
    /// Lists the files that the checkpoint needs.
    Index(IndexKind),
    /// Written last, after a barrier over all ranks.
    Marker,
    /// Written last by each rank.
    RankMarker { rank: u64 },
    /// State that every rank writes a file of.
    EachRank { rank: u64 },
    /// Anything else that lies with the shards.
    Other,
}

impl Role {
    /// Returns the only rank that wrote the file, if the name gives it.
    #[must_use]
    pub fn rank(self) -> Option<u64> {
        match self {
            Self::Shard { rank } => rank,
            Self::EachRank { rank } => Some(rank),
            Self::Index(_) | Self::Marker | Self::RankMarker { .. } | Self::Other => None,
        }
    }
}

/// The shape of a checkpoint in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Shape {
    /// All files below a directory whose name is a checkpoint's.
    Tree,
    /// All files directly in a directory that holds a telling file.
    Flat,
    /// Files of a run directory whose names differ only in the rank.
    Family,
    /// A single file.
    Single,
}

/// The files that make one checkpoint, as far as they exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub id: CheckpointId,
    /// The name of the rule, as `ls` shows it.
    pub framework: String,
    pub shape: Shape,
    pub step: Option<Step>,
    pub files: BTreeMap<RelPath, Role>,
    /// Files in flight under a temporary name, and names beside the checkpoint that exist while it is written.
    pub temporaries: BTreeSet<RelPath>,
}

impl Candidate {
    /// Whether the checkpoint is a directory, and not files of one.
    #[must_use]
    pub fn is_directory(&self) -> bool {
        matches!(self.shape, Shape::Tree | Shape::Flat)
    }

    /// Returns how many of those files exist that every rank writes one of.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.files.values().filter(|role| matches!(role, Role::EachRank { .. })).count()
    }
}

impl CheckpointId {
    /// Returns the checkpoint at a path, whatever is there; none if the name is too long for a key.
    #[must_use]
    pub fn at(path: &RelPath) -> Option<Self> {
        id_of(Some(path))
    }

    /// Returns the checkpoint's path below the mount; `None` for the mount itself.
    #[must_use]
    pub fn path(&self) -> Option<RelPath> {
        RelPath::new(crate::key::checkpoint_path(&self.run, &self.directory)).ok()
    }
}

/// A grouping of paths, with every path once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Grouping {
    /// Candidates, sorted by run and name.
    pub candidates: Vec<Candidate>,
    pub loose: BTreeSet<RelPath>,
    /// Temporary names that belong to no checkpoint.
    pub temporaries: BTreeSet<RelPath>,
}

/// The place of a path in a checkpoint.
struct Place {
    id: CheckpointId,
    shape: Shape,
    step: Option<Step>,
}

impl Rules {
    /// Groups paths into candidates. `paths` are all files of some scopes (see [`Rules::scope`]): because a file's
    /// neighbours decide, leaving some of them out changes the result.
    #[must_use]
    pub fn group<'a>(&self, paths: impl IntoIterator<Item = &'a RelPath>) -> Grouping {
        let mut paths: BTreeSet<&RelPath> = paths.into_iter().collect();
        let (temporary, lasting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut paths).into_iter().partition(|path| self.is_temporary(path));
        let mut trees = BTreeSet::new();
        let mut flats = BTreeSet::new();
        for path in &lasting {
            for directory in self.trees_above(path) {
                if self.makes_tree(path, &directory) {
                    trees.insert(directory);
                }
            }
            if self.makes_flat(path) {
                flats.insert(path.parent());
            }
        }
        let mut grouping = Grouping::default();
        let mut candidates: BTreeMap<CheckpointId, Candidate> = BTreeMap::new();
        for path in lasting {
            let Some(place) = self.place(path, &trees, &flats) else {
                grouping.loose.insert(path.clone());
                continue;
            };
            let candidate = candidates.entry(place.id.clone()).or_insert_with(|| Candidate {
                id: place.id,
                framework: String::new(),
                shape: place.shape,
                step: place.step,
                files: BTreeMap::new(),
                temporaries: BTreeSet::new(),
            });
            // The role follows once all files of the checkpoint are known.
            candidate.files.insert(path.clone(), Role::Other);
        }
        for path in temporary {
            let within = match self.unfinished_beside(path) {
                // The file counts as if it lay in that directory.
                Some(directory) => RelPath::new(path.name()).and_then(|name| directory.join(&name)),
                None => Ok(path.clone()),
            };
            let place = match self.filled_beside(path) {
                Some(file) => self.place(&file, &trees, &flats),
                None => within.ok().and_then(|within| self.directory_place(&within, &trees, &flats)),
            };
            let owner = place.and_then(|place| candidates.get_mut(&place.id));
            match owner {
                Some(candidate) => candidate.temporaries.insert(path.clone()),
                None => grouping.temporaries.insert(path.clone()),
            };
        }
        for candidate in candidates.values_mut() {
            candidate.framework = self.framework(&candidate.id, candidate.shape, candidate.files.keys());
            for (path, role) in &mut candidate.files {
                *role = self.role(&candidate.framework, path);
            }
        }
        grouping.candidates = candidates.into_values().collect();
        grouping
    }

    /// Returns the checkpoint that a directory is by its name, whatever is in it.
    #[must_use]
    pub fn named_by_directory(&self, directory: &RelPath) -> Option<CheckpointId> {
        id_of(Some(directory)).filter(|_| self.names_tree(directory))
    }

    /// Returns the smallest directory (`None` is the mount) whose files decide about `path`. After an event for
    /// `path`, all files below that directory have to be grouped again.
    #[must_use]
    pub fn scope(&self, path: &RelPath) -> Option<RelPath> {
        directories_above(path)
            .find(|directory| self.names_tree(directory))
            .or_else(|| self.unfinished_beside(path))
            .or_else(|| path.parent())
    }

    /// Returns the checkpoint trees that could hold `path`, outermost first: each has the name of one, and nothing
    /// between names another step.
    fn trees_above(&self, path: &RelPath) -> Vec<RelPath> {
        directories_above(path)
            .filter(|directory| {
                let Some(below) = path.below(directory).filter(|_| self.names_tree(directory)) else {
                    return false;
                };
                let step = self.step_of(directory);
                let other = self.step_inside(&below).filter(|inner| Some(*inner) != step);
                step.is_none() || other.is_none() || rules::is_step_item(directory, &below)
            })
            .collect()
    }

    /// Returns the step that a path inside a checkpoint names. The step stands in its directories, or in the name of a
    /// file that could be a checkpoint by itself (`custom_checkpoint_0.pkl` numbers objects, not steps).
    fn step_inside(&self, below: &RelPath) -> Option<Step> {
        if self.is_single(below) {
            return self.step(below.as_bytes());
        }
        below.parent().and_then(|directory| self.step(directory.as_bytes()))
    }

    fn directory_place(
        &self,
        path: &RelPath,
        trees: &BTreeSet<RelPath>,
        flats: &BTreeSet<Option<RelPath>>,
    ) -> Option<Place> {
        let tree = self.trees_above(path).into_iter().find(|directory| trees.contains(directory));
        let (directory, shape) = match tree {
            Some(directory) => (Some(directory), Shape::Tree),
            None if flats.contains(&path.parent()) => (path.parent(), Shape::Flat),
            None => return None,
        };
        let step = match (&directory, shape) {
            (Some(directory), Shape::Tree) => self.step_of(directory),
            (Some(directory), _) => self.step(directory.as_bytes()),
            (None, _) => None,
        };
        Some(Place { id: id_of(directory.as_ref())?, shape, step })
    }

    fn place(
        &self,
        path: &RelPath,
        trees: &BTreeSet<RelPath>,
        flats: &BTreeSet<Option<RelPath>>,
    ) -> Option<Place> {
        if let Some(place) = self.directory_place(path, trees, flats) {
            return Some(place);
        }
        if !self.is_single(path) {
            return None;
        }
        let masked = self.mask_rank(path.name());
        let shape = if masked.is_some() { Shape::Family } else { Shape::Single };
        let name = CheckpointName::new(masked.unwrap_or_else(|| path.name().to_vec())).ok()?;
        let id = CheckpointId { run: run_of(path.parent())?, directory: name };
        Some(Place { id, shape, step: self.step(path.as_bytes()) })
    }
}

/// Returns the directories above a path, outermost first.
fn directories_above(path: &RelPath) -> impl Iterator<Item = RelPath> {
    let mut above: Vec<_> = std::iter::successors(path.parent(), RelPath::parent).collect();
    above.reverse();
    above.into_iter()
}

/// Returns `None` if the name does not fit a key: such files stay loose.
fn run_of(directory: Option<RelPath>) -> Option<RunPath> {
    directory.map_or(Some(RunPath::root()), |path| RunPath::new(path).ok())
}

fn id_of(directory: Option<&RelPath>) -> Option<CheckpointId> {
    let Some(path) = directory else {
        let directory = CheckpointName::new(".").ok()?;
        return Some(CheckpointId { run: RunPath::root(), directory });
    };
    let directory = CheckpointName::new(path.name()).ok()?;
    Some(CheckpointId { run: run_of(path.parent())?, directory })
}

#[cfg(test)]
mod tests;
