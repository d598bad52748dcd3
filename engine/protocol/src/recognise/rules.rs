//! The rules as data: one set per framework, compiled once; users add theirs in the configuration.
//!
//! Owns: the patterns and what they say about one name. Does not own: how names make groups (`super`).

use super::{CheckpointId, Role};
use crate::id::Step;
use crate::path::RelPath;
use regex::bytes::{Regex, RegexBuilder};
use serde::{Deserialize, Serialize};
use std::sync::LazyLock;

/// The most bytes that one compiled pattern may take, so that a configuration cannot exhaust memory.
const MAX_PATTERN_BYTES: usize = 1 << 20;

/// One framework's names. Patterns are regular expressions over bytes, matched against one component; they are
/// searched for, so anchor them with `^` and `$`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RuleSpec {
    /// What `ls` shows as the framework.
    pub name: String,
    /// The name of a directory that is one checkpoint with all that lies below; its group `step` is the step.
    /// Without it, the checkpoint is what lies directly in a directory with a file of the signature.
    pub directory: Option<String>,
    /// The name that the directory above must have.
    pub parent: Option<String>,
    /// A file that shows that the rule applies.
    pub signature: Option<String>,
    /// Files that hold state; the group `rank` is the rank.
    pub shard: Option<String>,
    /// The file that lists what the checkpoint needs, and its format.
    pub index: Option<String>,
    pub index_kind: Option<IndexKind>,
    /// The file that is written last, after a barrier over all ranks.
    pub marker: Option<String>,
    /// The file that each rank writes last; the group `rank` is the rank.
    pub rank_marker: Option<String>,
    /// A file that is a checkpoint by itself (or one rank's part of one, where its name carries a rank).
    pub single: Option<String>,
    /// Names of files that are still being written.
    pub temporary: Option<String>,
}

/// The format of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IndexKind {
    /// The pickled `.metadata` of torch.distributed.checkpoint.
    Dcp,
    /// `*.safetensors.index.json`.
    Safetensors,
}

/// A rule that cannot be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum RuleError {
    #[error("the rule {rule:?} has a bad pattern for {field}; correct it in the configuration")]
    Pattern {
        rule: String,
        field: &'static str,
        #[source]
        source: regex::Error,
    },
    #[error("the rule {rule:?} {problem}; correct it in the configuration")]
    Incomplete { rule: String, problem: &'static str },
}

#[derive(Debug, Clone)]
struct Rule {
    name: String,
    directory: Option<Regex>,
    parent: Option<Regex>,
    signature: Option<Regex>,
    shard: Option<Regex>,
    index: Option<(Regex, IndexKind)>,
    marker: Option<Regex>,
    rank_marker: Option<Regex>,
    single: Option<Regex>,
    temporary: Option<Regex>,
}

/// A rule set; the first rule that matches counts, and users' rules come before ours.
#[derive(Debug, Clone)]
pub struct Rules {
    rules: Vec<Rule>,
}

/// A step in a path. The short words need a border before them: `deep5` is no episode.
static STEP: LazyLock<Regex> = LazyLock::new(|| {
    ours(r"(?i-u)(?:global_step|step|iter|checkpoint|ckpt|epoch|(?:^|[^A-Za-z])(?:ep|ba))[-_=]?(\d+)")
});
/// A rank in a name.
static RANK: LazyLock<Regex> = LazyLock::new(|| ours(r"(?-u)(?:mp_rank_|rank[-_]?|shard[-_]?)(\d+)"));

static BUILTIN: LazyLock<Rules> = LazyLock::new(|| {
    let rules = builtin().iter().map(Rule::compile).collect::<Result<_, _>>();
    Rules { rules: rules.expect("the rules in this file compile; a test reads them") }
});

fn ours(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern in this file compiles; a test reads it")
}

const STEP_DIRECTORY: &str = r"(?i-u)^(?:(?:global_step|step|iter|iteration|checkpoint|ckpt|epoch|ep|ba)[-_=]?(?<step>\d+)[-_,.]?)+(?:ckpt)?$";
const DCP_SHARD: &str = r"(?-u)^__(?<rank>\d+)_\d+\.distcp$";
const SAFETENSORS: &str = r"(?-u)-of-\d{5}\.safetensors$|\.safetensors\.index\.json$";

fn builtin() -> [RuleSpec; 4] {
    let some = |text: &str| Some(text.to_owned());
    [
        // The validity test of torchtitan itself: `step-N` below `checkpoint` with `.metadata` or the index.
        RuleSpec {
            name: "torchtitan".into(),
            directory: some(r"(?-u)^step-(?<step>\d+)$"),
            parent: some("^checkpoint$"),
            signature: Some(format!(r"(?-u)^__\d+_\d+\.distcp$|{SAFETENSORS}")),
            ..RuleSpec::default()
        },
        // `.metadata` is renamed into place by the coordinator after all ranks reported; without collectives each
        // rank renames its own.
        RuleSpec {
            name: "dcp".into(),
            signature: some(DCP_SHARD),
            shard: some(DCP_SHARD),
            index: some(r"^\.metadata$"),
            index_kind: Some(IndexKind::Dcp),
            rank_marker: some(r"(?-u)^__(?<rank>\d+)\.metadata$"),
            temporary: some(r"(?-u)^\.metadata\.tmp$|^__\d+\.metadata\.tmp$"),
            ..RuleSpec::default()
        },
        RuleSpec {
            name: "safetensors".into(),
            signature: some(SAFETENSORS),
            shard: some(r"(?-u)-of-\d{5}\.safetensors$"),
            index: some(r"\.safetensors\.index\.json$"),
            index_kind: Some(IndexKind::Safetensors),
            temporary: some(r"(?-u)^\.tmp[A-Za-z0-9]{6}$"),
            ..RuleSpec::default()
        },
        // Whatever torch.save writes. In a directory named for a step it makes that directory one checkpoint.
        RuleSpec {
            name: "torch_save".into(),
            directory: some(STEP_DIRECTORY),
            signature: some(
                r"(?-u)\.(?:pt|pth|bin|ckpt|safetensors|distcp)$|(?:mp_rank_|rank[-_]?|shard[-_]?)\d+",
            ),
            shard: some(r"(?-u)(?:mp_rank_|rank[-_]?|shard[-_]?)(?<rank>\d+)"),
            single: some(r"\.(?:pt|pth|bin|ckpt|safetensors)$"),
            temporary: some(
                r"(?-u)\.tmp$|^\.tmp|\.__lock$|\.dirty\.pt$|\.partial$|\.incomplete$|\.orbax-checkpoint-tmp|^tmp_.*\.(?:pt|pth)$",
            ),
            ..RuleSpec::default()
        },
    ]
}

impl Rule {
    fn compile(spec: &RuleSpec) -> Result<Self, RuleError> {
        let compile = |field, pattern: &Option<String>| {
            let Some(pattern) = pattern else { return Ok(None) };
            let built = RegexBuilder::new(pattern).size_limit(MAX_PATTERN_BYTES).build();
            built.map(Some).map_err(|source| RuleError::Pattern { rule: spec.name.clone(), field, source })
        };
        let incomplete = |problem| RuleError::Incomplete { rule: spec.name.clone(), problem };
        if spec.name.is_empty() {
            return Err(incomplete("has no name"));
        }
        if spec.directory.is_some() && spec.signature.is_none() {
            return Err(incomplete("names directories but no signature that shows that one is a checkpoint"));
        }
        let index = match (compile("index", &spec.index)?, spec.index_kind) {
            (Some(pattern), Some(kind)) => Some((pattern, kind)),
            (None, None) => None,
            _ => return Err(incomplete("has one of index and index_kind, and needs both")),
        };
        Ok(Self {
            name: spec.name.clone(),
            directory: compile("directory", &spec.directory)?,
            parent: compile("parent", &spec.parent)?,
            signature: compile("signature", &spec.signature)?,
            shard: compile("shard", &spec.shard)?,
            index,
            marker: compile("marker", &spec.marker)?,
            rank_marker: compile("rank_marker", &spec.rank_marker)?,
            single: compile("single", &spec.single)?,
            temporary: compile("temporary", &spec.temporary)?,
        })
    }

    fn names_tree(&self, directory: &RelPath) -> bool {
        let Some(pattern) = &self.directory else { return false };
        if !pattern.is_match(directory.name()) {
            return false;
        }
        let Some(parent) = &self.parent else { return true };
        directory.parent().is_some_and(|above| parent.is_match(above.name()))
    }
}

fn matches(pattern: Option<&Regex>, name: &[u8]) -> bool {
    pattern.is_some_and(|pattern| pattern.is_match(name))
}

impl Rules {
    /// PyTorch DCP, torchtitan, safetensors, and plain `torch.save` files.
    #[must_use]
    pub fn builtin() -> Self {
        BUILTIN.clone()
    }

    /// The user's rules, then ours.
    ///
    /// # Errors
    /// The first rule that cannot be used.
    pub fn with(users: &[RuleSpec]) -> Result<Self, RuleError> {
        let mut rules = users.iter().map(Rule::compile).collect::<Result<Vec<_>, _>>()?;
        rules.extend(BUILTIN.rules.iter().cloned());
        Ok(Self { rules })
    }

    /// Whether the name says that the file is still being written, or a directory above it does.
    #[must_use]
    pub fn is_temporary(&self, path: &RelPath) -> bool {
        self.rules.iter().any(|rule| matches(rule.temporary.as_ref(), path.name()))
    }

    /// The step that a path carries: the last one in it.
    #[must_use]
    pub fn step(&self, path: &[u8]) -> Option<Step> {
        for component in path.rsplit(|b| *b == b'/') {
            for rule in &self.rules {
                let named = rule.directory.as_ref().and_then(|pattern| pattern.captures(component));
                if let Some(found) = named.and_then(|captures| number(captures.name("step")?.as_bytes())) {
                    return Some(Step(found));
                }
            }
            if let Some(found) = STEP.captures_iter(component).last() {
                return number(found.get(1)?.as_bytes()).map(Step);
            }
        }
        None
    }

    /// The step of a directory whose name makes all below it one checkpoint.
    pub(super) fn step_of_tree(&self, directory: &RelPath) -> Option<Step> {
        if !self.rules.iter().any(|rule| rule.names_tree(directory)) {
            return None;
        }
        self.step(directory.name())
    }

    /// Whether the file shows that a directory named for a step is a checkpoint.
    pub(super) fn makes_tree(&self, path: &RelPath) -> bool {
        self.rules.iter().any(|rule| matches(rule.signature.as_ref(), path.name()))
    }

    /// Whether `path` decides about no other path, and is loose wherever no checkpoint is a directory. Such a file may
    /// come and go without its scope being grouped again.
    #[must_use]
    pub fn is_plain(&self, path: &RelPath) -> bool {
        !self.makes_tree(path) && !self.is_single(path) && !self.is_temporary(path)
    }

    /// Whether the file shows that its directory, whatever its name, is a checkpoint.
    pub(super) fn makes_flat(&self, path: &RelPath) -> bool {
        let flat = |rule: &Rule| rule.directory.is_none() && matches(rule.signature.as_ref(), path.name());
        self.rules.iter().any(flat)
    }

    pub(super) fn is_single(&self, path: &RelPath) -> bool {
        self.rules.iter().any(|rule| matches(rule.single.as_ref(), path.name()))
    }

    /// What a file's name says that it is.
    #[must_use]
    pub fn role(&self, path: &RelPath) -> Role {
        let name = path.name();
        let rank = |pattern: &Regex| {
            number(pattern.captures(name)?.name("rank").map_or(&b""[..], |found| found.as_bytes()))
        };
        for rule in &self.rules {
            if let Some((pattern, kind)) = &rule.index
                && pattern.is_match(name)
            {
                return Role::Index(*kind);
            }
            if matches(rule.marker.as_ref(), name) {
                return Role::Marker;
            }
            if let Some(rank) = rule.rank_marker.as_ref().and_then(rank) {
                return Role::RankMarker { rank };
            }
            if let Some(pattern) = rule.shard.as_ref().filter(|pattern| pattern.is_match(name)) {
                return Role::Shard { rank: rank(pattern) };
            }
        }
        if self.is_single(path) { Role::Shard { rank: None } } else { Role::Other }
    }

    /// The name with its rank (the last one) as `*`; `None` when it has none.
    #[must_use]
    pub fn mask_rank(&self, name: &[u8]) -> Option<Vec<u8>> {
        let rank = RANK.captures_iter(name).last()?.get(1)?.range();
        Some([&name[..rank.start], b"*", &name[rank.end..]].concat())
    }

    /// The first rule whose signature one of the files has, and whether that rule has a marker.
    pub(super) fn framework<'a>(
        &self,
        id: &CheckpointId,
        files: impl Iterator<Item = &'a RelPath> + Clone,
    ) -> (String, bool) {
        let name = RelPath::new(id.directory.as_bytes()).ok();
        let directory = match (id.run.path(), name) {
            (Some(run), Some(name)) => run.join(&name).ok(),
            (None, name) => name,
            (Some(_), None) => None,
        };
        for rule in &self.rules {
            if rule.directory.is_some() && !directory.as_ref().is_some_and(|path| rule.names_tree(path)) {
                continue;
            }
            if files.clone().any(|path| matches(rule.signature.as_ref(), path.name())) {
                return (rule.name.clone(), rule.marker.is_some());
            }
        }
        let single = |rule: &&Rule| files.clone().any(|path| matches(rule.single.as_ref(), path.name()));
        let rule = self.rules.iter().find(single);
        rule.map_or((String::new(), false), |rule| (rule.name.clone(), rule.marker.is_some()))
    }
}

/// Decimal digits; `None` past 2^64.
fn number(digits: &[u8]) -> Option<u64> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_read_from_the_last_word_that_carries_one() {
        let step = |path: &str| Rules::builtin().step(path.as_bytes()).map(|step| step.0);
        for (path, expected) in [
            ("r/step100.pt", Some(100)),
            ("r/iter_0000250", Some(250)),
            ("r/epoch=3-step=40.ckpt", Some(40)),
            ("step_7/model.pt", Some(7)),
            ("r/ep1-ba20-rank0.pt", Some(20)),
            ("r/deep5.pt", None),
            ("r/model.pt", None),
            ("r/step99999999999999999999.pt", None),
        ] {
            assert_eq!(step(path), expected, "{path}");
        }
    }

    #[test]
    fn a_rank_is_masked_once() {
        let mask = |name: &str| {
            Rules::builtin().mask_rank(name.as_bytes()).map(|masked| String::from_utf8(masked).unwrap())
        };
        assert_eq!(mask("step5_rank12.pt").as_deref(), Some("step5_rank*.pt"));
        assert_eq!(mask("mp_rank_00_model_states.pt").as_deref(), Some("mp_rank_*_model_states.pt"));
        assert_eq!(mask("step5.pt"), None);
    }
}
