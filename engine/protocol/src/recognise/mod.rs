//! Which checkpoint a file belongs to, from names alone.
//!
//! Owns: the grouping of paths into candidate checkpoints; a pure function of the set of paths, whatever their order.
//! Does not own: the rules (`rules`), whether a candidate is complete (`evidence`).
//!
//! A file belongs to the outermost directory above it that is a checkpoint by its name (`step-100`, `checkpoint-500`),
//! so nested matches fold; else to its own directory when a file in there says so (`__0_0.distcp`); else it is a
//! checkpoint by itself, or one rank's part of a family of such files; else it is loose.

mod rules;

pub use rules::{IndexKind, RuleError, RuleSpec, Rules};

use crate::id::Step;
use crate::path::{CheckpointName, RelPath, RunPath};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One checkpoint's name, over all its timelines and versions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct CheckpointId {
    pub run: RunPath,
    pub directory: CheckpointName,
}

/// What one file is to its checkpoint.
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
    /// Anything else that lies with the shards.
    Other,
}

/// How a checkpoint lies in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Shape {
    /// Everything below a directory, which its name says is a checkpoint.
    Tree,
    /// What lies directly in a directory that holds a telling file.
    Flat,
    /// Files of a run directory whose names differ in the rank only.
    Family,
    /// One file.
    Single,
}

/// The files that make one checkpoint, as far as they are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Candidate {
    pub id: CheckpointId,
    /// The rule, as `ls` shows it.
    pub framework: String,
    pub shape: Shape,
    pub step: Option<Step>,
    pub files: BTreeMap<RelPath, Role>,
    /// Files in flight under a temporary name.
    pub temporaries: BTreeSet<RelPath>,
    /// The rule has a marker, and is not complete without it.
    pub wants_marker: bool,
}

/// Every path, once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Grouping {
    /// Sorted by run and name.
    pub candidates: Vec<Candidate>,
    pub loose: BTreeSet<RelPath>,
    /// Temporary names that lie in no checkpoint.
    pub temporaries: BTreeSet<RelPath>,
}

/// Where one path belongs.
struct Place {
    id: CheckpointId,
    shape: Shape,
    step: Option<Step>,
}

impl Rules {
    /// Groups paths into candidates. `paths` are all files of some scopes (see [`Rules::scope`]): a file's neighbours
    /// decide, so leaving some of them out changes the answer.
    #[must_use]
    pub fn group<'a>(&self, paths: impl IntoIterator<Item = &'a RelPath>) -> Grouping {
        let mut paths: BTreeSet<&RelPath> = paths.into_iter().collect();
        let (temporary, lasting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut paths).into_iter().partition(|path| self.is_temporary(path));
        let mut trees = BTreeSet::new();
        let mut flats = BTreeSet::new();
        for path in &lasting {
            for directory in self.trees_above(path) {
                if self.makes_tree(path) {
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
                wants_marker: false,
            });
            candidate.files.insert(path.clone(), self.role(path));
        }
        for path in temporary {
            let owner =
                self.directory_place(path, &trees, &flats).and_then(|place| candidates.get_mut(&place.id));
            match owner {
                Some(candidate) => candidate.temporaries.insert(path.clone()),
                None => grouping.temporaries.insert(path.clone()),
            };
        }
        for candidate in candidates.values_mut() {
            let (framework, wants_marker) = self.framework(&candidate.id, candidate.files.keys());
            candidate.framework = framework;
            candidate.wants_marker = wants_marker;
        }
        grouping.candidates = candidates.into_values().collect();
        grouping
    }

    /// The smallest directory (`None` is the mount) whose files decide about `path`: group all files below it again
    /// when something happened to `path`.
    #[must_use]
    pub fn scope(&self, path: &RelPath) -> Option<RelPath> {
        directories_above(path)
            .find(|directory| self.step_of_tree(directory).is_some())
            .or_else(|| path.parent())
    }

    /// The checkpoint trees that could hold `path`, outermost first: named like one, and nothing between says another
    /// step.
    fn trees_above(&self, path: &RelPath) -> Vec<RelPath> {
        directories_above(path)
            .filter(|directory| {
                let Some(step) = self.step_of_tree(directory) else { return false };
                let Some(below) = path.below(directory) else { return false };
                self.step_inside(&below).is_none_or(|inner| inner == step)
            })
            .collect()
    }

    /// The step that a path inside a checkpoint names: in its directories, or in the name of a file that could be a
    /// checkpoint by itself (`custom_checkpoint_0.pkl` numbers objects, not steps).
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
        let step = directory.as_ref().and_then(|directory| self.step(directory.as_bytes()));
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

/// The directories above a path, outermost first.
fn directories_above(path: &RelPath) -> impl Iterator<Item = RelPath> {
    let mut above: Vec<_> = std::iter::successors(path.parent(), RelPath::parent).collect();
    above.reverse();
    above.into_iter()
}

/// `None` when the name does not fit a key: such files stay loose.
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn paths(texts: &[&str]) -> Vec<RelPath> {
        texts.iter().map(|text| RelPath::new(*text).unwrap()).collect()
    }

    /// `run|name|framework|step|files`, one line per candidate.
    fn grouped(texts: &[&str]) -> Vec<String> {
        let paths = paths(texts);
        let grouping = Rules::builtin().group(&paths);
        let line = |c: &Candidate| {
            let step = c.step.map_or_else(|| "-".to_owned(), |step| step.to_string());
            format!("{}|{}|{}|{step}|{}", c.id.run, c.id.directory, c.framework, c.files.len())
        };
        grouping.candidates.iter().map(line).collect()
    }

    #[test]
    fn dcp_is_any_directory_that_holds_its_shards() {
        let files =
            ["any/place/__0_0.distcp", "any/place/__1_0.distcp", "any/place/.metadata", "any/place/meta.pt"];
        assert_eq!(grouped(&files), ["any|place|dcp|-|4"]);
        assert_eq!(grouped(&["__0_0.distcp"]), ["_|%2E|dcp|-|1"]);
        let roles: Vec<_> =
            Rules::builtin().group(&paths(&files)).candidates[0].files.values().copied().collect();
        assert!(roles.contains(&Role::Index(IndexKind::Dcp)));
        assert!(roles.contains(&Role::Shard { rank: Some(1) }));
    }

    #[test]
    fn torchtitan_is_dcp_under_its_own_names() {
        let files = ["out/checkpoint/step-100/__0_0.distcp", "out/checkpoint/step-100/.metadata"];
        assert_eq!(grouped(&files), ["out/checkpoint|step-100|torchtitan|100|2"]);
        assert_eq!(grouped(&["out/step-7/__0_0.distcp"]), ["out|step-7|dcp|7|1"]);
    }

    #[test]
    fn plain_files_are_checkpoints_by_themselves() {
        assert_eq!(grouped(&["r/step100.pt"]), ["r|step100.pt|torch_save|100|1"]);
        assert_eq!(grouped(&["model.pt"]), ["_|model.pt|torch_save|-|1"]);
        assert_eq!(
            grouped(&["r/model_epoch=3-step=40.ckpt"]),
            ["r|model_epoch=3-step=40.ckpt|torch_save|40|1"]
        );
        assert_eq!(grouped(&["r/notes.txt", "r/latest"]), [""; 0]);
    }

    #[test]
    fn ranks_of_one_name_are_one_version() {
        let family = ["r/step5_rank0.pt", "r/step5_rank1.pt", "r/step6_rank0.pt"];
        assert_eq!(grouped(&family), ["r|step5_rank*.pt|torch_save|5|2", "r|step6_rank*.pt|torch_save|6|1"]);
        let directory = ["r/step_5/rank_0.pt", "r/step_5/rank_1.pt", "r/step_5/config.json"];
        assert_eq!(grouped(&directory), ["r|step_5|torch_save|5|3"]);
    }

    #[test]
    fn nested_checkpoints_fold_into_the_outermost() {
        let files = [
            "r/checkpoint-500/global_step500/mp_rank_00_model_states.pt",
            "r/checkpoint-500/trainer_state.json",
            "r/checkpoint-500/pytorch_model_fsdp_0/__0_0.distcp",
            "r/checkpoint-500/custom_checkpoint_0.pkl",
        ];
        assert_eq!(grouped(&files), ["r|checkpoint-500|dcp|500|4"]);
        let run = ["hf/model-00001-of-00002.safetensors", "hf/checkpoint-5/model.safetensors"];
        assert_eq!(grouped(&run), ["_|hf|safetensors|-|1", "hf|checkpoint-5|torch_save|5|1"]);
        let steps = ["epoch_3/step_100.pt", "epoch_3/step_200.pt"];
        assert_eq!(
            grouped(&steps),
            ["epoch_3|step_100.pt|torch_save|100|1", "epoch_3|step_200.pt|torch_save|200|1"]
        );
    }

    #[test]
    fn temporary_names_are_part_of_nothing() {
        let files = paths(&["r/s/__0_0.distcp", "r/s/.metadata.tmp", "r/.tmpAbc123", "r/x.pt.tmp"]);
        let grouping = Rules::builtin().group(&files);
        assert_eq!(grouping.candidates[0].files.len(), 1);
        assert_eq!(grouping.candidates[0].temporaries.len(), 1);
        assert_eq!(grouping.temporaries.len(), 2);
    }

    #[test]
    fn a_user_adds_rules() {
        let text = r#"{"name":"mine","directory":"^save(?<step>\\d+)$","signature":"\\.npz$",
                       "shard":"^w(?<rank>\\d+)\\.npz$","marker":"^DONE$"}"#;
        let spec: RuleSpec = serde_json::from_str(text).unwrap();
        let rules = Rules::with(&[spec]).unwrap();
        let grouping = rules.group(&paths(&["r/save9/w0.npz", "r/save9/DONE"]));
        let found = &grouping.candidates[0];
        assert_eq!((found.framework.as_str(), found.step, found.wants_marker), ("mine", Some(Step(9)), true));
        let broken = RuleSpec { name: "x".into(), signature: Some("(".into()), ..RuleSpec::default() };
        assert!(Rules::with(&[broken]).is_err());
    }

    proptest! {
        #[test]
        fn every_path_is_grouped_once_and_scopes_decide_alone(
            mut texts in prop::collection::btree_set(
                "(r|step-1|checkpoint|epoch_2)(/(step-1|x|sub|step-3)){0,2}/(__0_0[.]distcp|[.]metadata|a[.]pt|rank1[.]pt|n|b[.]tmp)",
                1..14,
            ),
        ) {
            // A path cannot be a file and a directory.
            let all = texts.clone();
            texts.retain(|text| !all.iter().any(|other| other.starts_with(&format!("{text}/"))));
            let files: Vec<_> = texts.iter().map(|text| RelPath::new(text.as_str()).unwrap()).collect();
            let rules = Rules::builtin();
            let whole = rules.group(&files);
            let count = whole.candidates.iter().map(|c| c.files.len() + c.temporaries.len()).sum::<usize>();
            prop_assert_eq!(count + whole.loose.len() + whole.temporaries.len(), files.len());
            for path in &files {
                let scope = rules.scope(path);
                let near: Vec<_> = files.iter()
                    .filter(|f| scope.as_ref().is_none_or(|scope| f.is_below(scope))).collect();
                let part = rules.group(near);
                let of = |g: &Grouping| g.candidates.iter().find(|c| c.files.contains_key(path)).cloned();
                prop_assert_eq!(of(&part), of(&whole), "{:?}", path);
                let directory = |c: &Candidate| matches!(c.shape, Shape::Tree | Shape::Flat);
                if rules.is_plain(path) && !whole.candidates.iter().any(directory) {
                    let mut without = rules.group(files.iter().filter(|other| *other != path));
                    prop_assert!(without.loose.insert(path.clone()));
                    prop_assert_eq!(&without, &whole, "{:?} is plain and decides nothing", path);
                }
            }
        }
    }
}
