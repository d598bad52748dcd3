//! A rule and a set of rules: the meaning of a name.
//!
//! Owns: a rule's fields, compiling it, applying it to one name. Does not own: the built-in table (`frameworks`), how names make groups
//! (`super`).

use super::spec::{IndexKind, MarkerBy, RuleSpec, TrackerHolds};
use super::{CheckpointId, Role, Shape, frameworks};
use crate::id::Step;
use crate::path::RelPath;
use regex::bytes::{Regex, RegexBuilder, RegexSet, RegexSetBuilder};
use std::sync::LazyLock;

/// Maximum number of bytes that one compiled pattern may take, so that a configuration cannot exhaust memory.
const MAX_PATTERN_BYTES: usize = 1 << 20;
/// Maximum number of bytes that one kind of pattern of all rules may take together.
const MAX_SET_BYTES: usize = 16 << 20;

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
    #[error("the rules' patterns for {field} are too large together; take some out of the configuration")]
    TooLarge {
        field: &'static str,
        #[source]
        source: regex::Error,
    },
}

/// A compiled rule.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    name: String,
    directory: Option<Regex>,
    parent: Option<Regex>,
    signature: Option<Regex>,
    on_top: bool,
    shard: Option<Regex>,
    index: Option<(Regex, IndexKind)>,
    marker: Option<Regex>,
    marker_by: MarkerBy,
    rank_marker: Option<Regex>,
    each_rank: Option<Regex>,
    anywhere: bool,
    renamed: bool,
    in_flight: Option<Regex>,
    unfinished: Option<Regex>,
    more_follows: bool,
    single: Option<Regex>,
    except: Option<Regex>,
    tracker: Option<(Regex, TrackerHolds)>,
}

/// A rule set; the first rule that matches counts, and users' rules come before ours.
#[derive(Debug, Clone)]
pub struct Rules {
    rules: Vec<Rule>,
    /// All rules' patterns of one kind, because most names match none.
    directories: RegexSet,
    signatures: RegexSet,
    singles: RegexSet,
    temporaries: RegexSet,
}

/// A step in a path. The short words need a border before them: `deep5` is no episode.
pub(super) static STEP: LazyLock<Regex> = LazyLock::new(|| {
    ours(
        r"(?i-u)(?:global_step|step|iteration|iter|checkpoint|ckpt|epoch|(?:^|[^A-Za-z])(?:ep|ba))[-_=]?(\d+)",
    )
});
/// The item `step` of one rank, as users of torch_checkpointing save it, and the directories that it lies in.
static STEP_ITEM: LazyLock<Regex> = LazyLock::new(|| ours(r"(?-u)^step_\d+\.pt$"));
static STEP_ITSELF: LazyLock<Regex> = LazyLock::new(|| ours(r"(?-u)^(?:tmp_)?step[-_]?\d+$"));
/// rsync's name for a file that it is receiving: the file's own name between a dot and the suffix of mkstemp(3).
static RECEIVED: LazyLock<Regex> = LazyLock::new(|| ours(r"(?-u)^\.(.+)\.[A-Za-z0-9]{6}$"));
/// A rank in a name. The word needs a border before it: `frank1` is a person, and `dprank1` a rank of a part of the job.
static RANK: LazyLock<Regex> =
    LazyLock::new(|| ours(r"(?-u)(?:^|[^A-Za-z])(?:mp_rank_|rank[-_]?|shard[-_]?)(\d+)"));

/// Control files that a downloader keeps beside a file that it fills in any order, until the file is whole: aria2, and pget of lftp.
static FILLED_BY: LazyLock<Regex> = LazyLock::new(|| ours(r"(?-u)^(?<name>.+)\.(?:aria2|lftp-pget-status)$"));

static BUILTIN: LazyLock<Rules> = LazyLock::new(|| {
    Rules::compile(&frameworks::builtin()).expect("our own rules compile; a test reads them")
});

pub(super) fn ours(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern in this file compiles; a test reads it")
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
        let tracker = match (compile("tracker", &spec.tracker)?, spec.tracker_holds) {
            (Some(pattern), Some(holds)) => Some((pattern, holds)),
            (None, None) => None,
            _ => return Err(incomplete("has one of tracker and tracker_holds, and needs both")),
        };
        let with_group = |field, pattern: &Option<String>, group: &str, problem| {
            let compiled = compile(field, pattern)?;
            let has = |regex: &Regex| regex.capture_names().flatten().any(|name| name == group);
            if compiled.as_ref().is_none_or(has) { Ok(compiled) } else { Err(incomplete(problem)) }
        };
        // Only the set of all patterns is used, but its error does not say which pattern is bad.
        compile("temporary", &spec.temporary)?;
        Ok(Self {
            name: spec.name.clone(),
            directory: compile("directory", &spec.directory)?,
            parent: compile("parent", &spec.parent)?,
            signature: compile("signature", &spec.signature)?,
            on_top: spec.on_top,
            shard: compile("shard", &spec.shard)?,
            index,
            marker: compile("marker", &spec.marker)?,
            marker_by: spec.marker_by,
            rank_marker: with_group(
                "rank_marker",
                &spec.rank_marker,
                "rank",
                "has a rank_marker without a group named rank",
            )?,
            each_rank: with_group(
                "each_rank",
                &spec.each_rank,
                "rank",
                "has an each_rank without a group named rank",
            )?,
            anywhere: spec.anywhere,
            renamed: spec.renamed,
            in_flight: compile("in_flight", &spec.in_flight)?,
            unfinished: with_group(
                "unfinished",
                &spec.unfinished,
                "name",
                "has an unfinished without a group named name",
            )?,
            more_follows: spec.more_follows,
            single: compile("single", &spec.single)?,
            except: compile("except", &spec.except)?,
            tracker,
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

    /// Whether the file shows that this rule applies to the directory, whose name matches.
    fn signs(&self, path: &RelPath, directory: &RelPath) -> bool {
        let deep = self.on_top && path.parent().as_ref() != Some(directory);
        !deep && self.is_signature(path.name())
    }

    /// Whether the file shows that the rule applies to its directory.
    pub(crate) fn is_signature(&self, name: &[u8]) -> bool {
        matches(self.signature.as_ref(), name) && !matches(self.except.as_ref(), name)
    }

    fn is_single(&self, name: &[u8]) -> bool {
        matches(self.single.as_ref(), name) && !matches(self.except.as_ref(), name)
    }

    /// Returns the step in the directory's name.
    fn step(&self, directory: &RelPath) -> Option<Step> {
        let captures = self.directory.as_ref()?.captures(directory.name())?;
        number(captures.name("step")?.as_bytes()).map(Step)
    }

    /// Returns the writer of the marker, the last file, which the checkpoint must have; none if the rule has no marker.
    pub(crate) fn marker_by(&self) -> Option<MarkerBy> {
        self.marker.as_ref().map(|_| self.marker_by)
    }

    /// Whether a directory that got its name by rename after its last file is complete.
    pub(crate) fn is_renamed_when_done(&self) -> bool {
        self.renamed
    }

    /// Whether the directory's name shows that it is still being written.
    pub(crate) fn is_in_flight(&self, directory: &[u8]) -> bool {
        matches(self.in_flight.as_ref(), directory)
    }

    pub(crate) fn more_follows(&self) -> bool {
        self.more_follows
    }

    /// Whether ranks in the names of shards are counted, because nothing better is known.
    pub(crate) fn counts_shards(&self) -> bool {
        self.each_rank.is_none()
    }
}

fn matches(pattern: Option<&Regex>, name: &[u8]) -> bool {
    pattern.is_some_and(|pattern| pattern.is_match(name))
}

fn rank_in(pattern: Option<&Regex>, name: &[u8]) -> Option<u64> {
    number(pattern?.captures(name)?.name("rank")?.as_bytes())
}

impl Rules {
    /// Returns the rules of the frameworks that we know.
    #[must_use]
    pub fn builtin() -> Self {
        BUILTIN.clone()
    }

    /// Makes a rule set of the user's rules, then ours.
    ///
    /// Costs the compiling of all patterns; without rules of the user that is done once in a process.
    ///
    /// # Errors
    /// The first rule that cannot be used.
    pub fn with(users: &[RuleSpec]) -> Result<Self, RuleError> {
        if users.is_empty() {
            return Ok(Self::builtin());
        }
        Self::compile(&[users, &frameworks::builtin()].concat())
    }

    fn compile(specs: &[RuleSpec]) -> Result<Self, RuleError> {
        let set = |field, pattern: fn(&RuleSpec) -> Option<&String>| {
            let patterns = specs.iter().filter_map(pattern);
            let built = RegexSetBuilder::new(patterns).size_limit(MAX_SET_BYTES).build();
            built.map_err(|source| RuleError::TooLarge { field, source })
        };
        Ok(Self {
            rules: specs.iter().map(Rule::compile).collect::<Result<_, _>>()?,
            directories: set("directory", |spec| spec.directory.as_ref())?,
            signatures: set("signature", |spec| spec.signature.as_ref())?,
            singles: set("single", |spec| spec.single.as_ref())?,
            temporaries: set("temporary", |spec| spec.temporary.as_ref())?,
        })
    }

    /// Returns the rule of a framework, as [`Rules::framework`] named it.
    pub(crate) fn rule(&self, framework: &str) -> Option<&Rule> {
        self.rules.iter().find(|rule| rule.name == framework)
    }

    /// Whether the name shows that the file is still being written, or something beside it.
    #[must_use]
    pub fn is_temporary(&self, path: &RelPath) -> bool {
        self.temporaries.is_match(path.name()) || self.is_mark(path) || self.is_being_received(path.name())
    }

    /// Whether the file only says that another file, or a directory, is not whole (`model.safetensors.aria2`). Such a file concerns only
    /// bytes beside it.
    #[must_use]
    pub fn is_mark(&self, path: &RelPath) -> bool {
        self.filled_beside(path).is_some() || self.unfinished_beside(path).is_some()
    }

    /// Whether the name is rsync's for a file of a model. A person's suffix (`.model.pt.backup`) is a word. A suffix without a capital
    /// letter therefore counts as a word, although 1 in 26 of rsync's have none; such files count as any others.
    fn is_being_received(&self, name: &[u8]) -> bool {
        let Some(of) = RECEIVED.captures(name).and_then(|captures| captures.get(1)) else { return false };
        name[of.end()..].iter().any(u8::is_ascii_uppercase)
            && self.rules.iter().any(|rule| rule.is_signature(of.as_bytes()) || rule.is_single(of.as_bytes()))
    }

    /// Whether the file holds none of a model's state, and is written before any of it.
    #[must_use]
    pub fn is_foreword(path: &RelPath) -> bool {
        frameworks::FOREWORDS.contains(&path.name())
    }

    /// Returns the directory that is still being written while `path` exists.
    pub(crate) fn unfinished_beside(&self, path: &RelPath) -> Option<RelPath> {
        self.rules.iter().find_map(|rule| {
            let captures = rule.unfinished.as_ref()?.captures(path.name())?;
            let directory = beside(path, captures.name("name")?.as_bytes())?;
            rule.names_tree(&directory).then_some(directory)
        })
    }

    /// Returns the file that is still being filled while `path` exists, whatever its size and its first bytes.
    pub(crate) fn filled_beside(&self, path: &RelPath) -> Option<RelPath> {
        beside(path, FILLED_BY.captures(path.name())?.name("name")?.as_bytes())
    }

    /// Returns the step in a path: the last one in it.
    #[must_use]
    pub fn step(&self, path: &[u8]) -> Option<Step> {
        let found = path.rsplit(|b| *b == b'/').find_map(|component| STEP.captures_iter(component).last())?;
        number(found.get(1)?.as_bytes()).map(Step)
    }

    /// Whether the directory's name may make all below it one checkpoint.
    pub(super) fn names_tree(&self, directory: &RelPath) -> bool {
        self.naming(directory).next().is_some()
    }

    /// Returns the rules whose directories may have that name.
    fn naming(&self, directory: &RelPath) -> impl Iterator<Item = &Rule> {
        let any = self.directories.is_match(directory.name());
        self.rules.iter().filter(move |rule| any && rule.names_tree(directory))
    }

    /// Returns the step of a directory that is a checkpoint.
    pub(super) fn step_of(&self, directory: &RelPath) -> Option<Step> {
        self.naming(directory).find_map(|rule| rule.step(directory)).or_else(|| self.step(directory.name()))
    }

    /// Whether the file shows that a directory above it, with the name of a checkpoint, is one.
    pub(super) fn makes_tree(&self, path: &RelPath, directory: &RelPath) -> bool {
        self.is_signature(path) && self.naming(directory).any(|rule| rule.signs(path, directory))
    }

    fn is_signature(&self, path: &RelPath) -> bool {
        let name = path.name();
        self.signatures.is_match(name) && self.rules.iter().any(|rule| rule.is_signature(name))
    }

    /// Whether `path` decides about no other path, and is loose unless a directory above is a checkpoint. Such a file may come and go
    /// without its scope being grouped again.
    #[must_use]
    pub fn is_plain(&self, path: &RelPath) -> bool {
        !self.is_signature(path) && !self.is_single(path) && !self.is_temporary(path)
    }

    /// Whether the file shows that its directory, whatever its name, is a checkpoint.
    pub(super) fn makes_flat(&self, path: &RelPath) -> bool {
        let flat = |rule: &Rule| rule.directory.is_none() && rule.is_signature(path.name());
        self.is_signature(path) && self.rules.iter().any(flat)
    }

    pub(super) fn is_single(&self, path: &RelPath) -> bool {
        let name = path.name();
        self.singles.is_match(name) && self.rules.iter().any(|rule| rule.is_single(name))
    }

    /// Returns the role of a file in a checkpoint of that framework, by its name. Markers and most indices are the framework's own:
    /// elsewhere such a name may be any file.
    #[must_use]
    pub fn role(&self, framework: &str, path: &RelPath) -> Role {
        let name = path.name();
        let own = self.rule(framework);
        if own.is_some_and(|rule| matches(rule.marker.as_ref(), name)) {
            return Role::Marker;
        }
        for rule in own.into_iter().chain(self.rules.iter().filter(|rule| rule.anywhere)) {
            if let Some((pattern, kind)) = &rule.index
                && pattern.is_match(name)
            {
                return Role::Index(*kind);
            }
            if let Some(rank) = rank_in(rule.rank_marker.as_ref(), name) {
                return Role::RankMarker { rank };
            }
            if let Some(rank) = rank_in(rule.each_rank.as_ref(), name) {
                return Role::EachRank { rank };
            }
        }
        for rule in own.into_iter().chain(&self.rules) {
            if matches(rule.shard.as_ref(), name) && !matches(rule.except.as_ref(), name) {
                return Role::Shard { rank: rank_in(rule.shard.as_ref(), name) };
            }
        }
        if self.is_single(path) { Role::Shard { rank: None } } else { Role::Other }
    }

    /// Returns how a file beside checkpoints of that framework names one of them; `None` for any other file.
    #[must_use]
    pub fn tracker(&self, framework: &str, path: &RelPath) -> Option<TrackerHolds> {
        let of = self.rules.iter().filter(|rule| rule.name == framework);
        let (_, holds) =
            of.filter_map(|rule| rule.tracker.as_ref()).find(|(pattern, _)| pattern.is_match(path.name()))?;
        Some(*holds)
    }

    /// Whether a file of this name would be a tracker beside checkpoints of some framework.
    #[must_use]
    pub fn is_tracker_name(&self, path: &RelPath) -> bool {
        let mut patterns = self.rules.iter().filter_map(|rule| rule.tracker.as_ref());
        patterns.any(|(pattern, _)| pattern.is_match(path.name()))
    }

    /// Returns the name with its last rank as `*`; `None` if it has none.
    #[must_use]
    pub fn mask_rank(&self, name: &[u8]) -> Option<Vec<u8>> {
        let rank = RANK.captures_iter(name).last()?.get(1)?.range();
        Some([&name[..rank.start], b"*", &name[rank.end..]].concat())
    }

    /// Returns the first rule that matches the checkpoint's place and files.
    pub(super) fn framework<'a>(
        &self,
        id: &CheckpointId,
        shape: Shape,
        files: impl Iterator<Item = &'a RelPath> + Clone,
    ) -> String {
        let directory = id.path();
        let fits = |rule: &&Rule| match shape {
            Shape::Single | Shape::Family => files.clone().any(|path| rule.is_single(path.name())),
            Shape::Flat => {
                rule.directory.is_none() && files.clone().any(|path| rule.is_signature(path.name()))
            }
            Shape::Tree => {
                let Some(directory) = &directory else { return false };
                let named = rule.directory.is_none() || rule.names_tree(directory);
                named && files.clone().any(|path| rule.signs(path, directory))
            }
        };
        self.rules.iter().find(fits).map_or_else(String::new, |rule| rule.name.clone())
    }
}

/// Returns another name in the same directory.
fn beside(path: &RelPath, name: &[u8]) -> Option<RelPath> {
    let name = RelPath::new(name).ok()?;
    path.parent().map_or_else(|| Ok(name.clone()), |above| above.join(&name)).ok()
}

/// Whether the number in the file's name is a rank: `step_0.pt` in `step_4`. An epoch's directory holds steps.
pub(super) fn is_step_item(directory: &RelPath, below: &RelPath) -> bool {
    STEP_ITEM.is_match(below.as_bytes()) && STEP_ITSELF.is_match(directory.name())
}

/// Parses decimal digits; `None` past 2^64.
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
        for word in ["frank1.pt", "crank2.pt", "dprank001.pt", "reshard4.pt"] {
            assert_eq!(mask(word), None, "{word}");
        }
        assert_eq!(mask("ba5rank0.pt").as_deref(), Some("ba5rank*.pt"), "a digit is a border");
    }
}
