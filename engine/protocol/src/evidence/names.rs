//! Findings from the names of a checkpoint's files: indices, parts that carry their total, ranks; and the names that are missing.
//!
//! Owns: these findings. Does not own: their consequences (the parent), reading an index (`index`).

use super::{Before, Case, Covered, Ends, FileFact, Finding};
use crate::path::RelPath;
use crate::recognise::{IndexKind, Role, Rule, Shape, masked_digits};
use crate::record::Evidence;
use crate::visibility::Content;
use std::collections::{BTreeMap, BTreeSet};

/// Findings from the names of a checkpoint's files.
#[derive(Clone, Copy)]
pub(super) struct ByName<'a> {
    pub(super) case: &'a Case<'a>,
}

impl ByName<'_> {
    /// Judges the indices. An index proves the checkpoint if all files that it lists exist with at least the size that it gives, and every
    /// shard is listed by an index. If a program may go on, the listed files must also be older than their index.
    pub(super) fn index(self) -> Finding {
        let indices: Vec<_> =
            self.case.present().filter(|(_, role, _)| matches!(role, Role::Index(_))).collect();
        if indices.is_empty() {
            let dcp = self.case.candidate.files.iter().find(|(path, _)| path.name().ends_with(b".distcp"));
            let without = |(path, _): (&RelPath, &Role)| {
                let why = "torch.distributed.checkpoint has not written .metadata".to_owned();
                let directory = path.parent().map_or_else(String::new, |directory| format!("{directory}/"));
                Finding::Missing(vec![format!("{directory}.metadata")], why)
            };
            let by_rank =
                self.case.candidate.files.values().any(|role| matches!(role, Role::RankMarker { .. }));
            return dcp.filter(|_| !by_rank).map_or(Finding::Silent, without);
        }
        // A job writes its index last, and a job that goes on may be about to rewrite it. A copy has any order.
        let copied =
            self.case.is_over() && (self.case.ends() == Ends::Well || self.case.is_a_copy_that_failed());
        let mut listed = BTreeSet::new();
        let dcp = indices.iter().any(|(_, role, _)| *role == Role::Index(IndexKind::Dcp));
        for (index, role, fact) in &indices {
            let Role::Index(kind) = role else { continue };
            let Some(covered) = self.case.facts.indices.get(*index) else {
                // Only sealed bytes are read. Bytes that a program left unclosed are sealed only if the program ended well.
                if fact.is_cut() && !fact.was_left_well() {
                    let why = format!("{index} was not closed by the program that wrote it");
                    return Finding::Missing(Vec::new(), why);
                }
                return Finding::Read((*index).clone(), *kind);
            };
            let covered = match covered {
                Ok(covered) => covered,
                Err(problem) => {
                    return Finding::Missing(Vec::new(), format!("{index} cannot be used: {problem}"));
                }
            };
            let directory = index.parent();
            let mut missing = Vec::new();
            let mut removed = 0;
            for (relative, exact) in covered {
                let path =
                    directory.as_ref().map_or_else(|| Ok(relative.clone()), |above| above.join(relative));
                let Some((path, file)) = path
                    .as_ref()
                    .ok()
                    .and_then(|path| Some((path.clone(), self.case.facts.files.get(path)?)))
                else {
                    removed += usize::from(path.is_ok_and(|path| self.case.facts.removed.contains(&path)));
                    missing.push(relative.to_string());
                    continue;
                };
                if file.published_at_ns > fact.published_at_ns && !copied {
                    return Finding::Missing(Vec::new(), format!("{path} was written after {index}"));
                }
                if let Some(exact) = exact.filter(|exact| *exact > file.size_bytes) {
                    let why = format!("{path} has {} bytes, and {index} needs {exact}", file.size_bytes);
                    return Finding::Missing(Vec::new(), why);
                }
                listed.insert(path);
            }
            let all_missing = !missing.is_empty() && missing.len() == covered.len();
            let taken = removed == covered.len();
            // The committed version has this index, too, and lacks all of its files.
            let lacked = fact.committed && removed == 0;
            if all_missing
                && (taken && self.case.ends() == Ends::Well
                    || (taken || lacked) && self.is_replaced(fact, covered))
            {
                // The index is left over from a version before.
                continue;
            }
            if !missing.is_empty() {
                let why = format!("{} of the files that {index} lists are missing", missing.len());
                return Finding::Missing(missing, why);
            }
        }
        if listed.is_empty() {
            return Finding::Silent;
        }
        let size = self.case.world_size();
        let published = self.case.present().filter(|(path, ..)| listed.contains(*path));
        let first_ns = published.map(|(_, _, fact)| fact.published_at_ns).min();
        let stray = self.case.present().find(|(path, role, fact)| {
            // Files of further ranks that an older save left in the same directory.
            let left = first_ns.is_some_and(|first_ns| fact.published_at_ns < first_ns)
                || dcp && path.name().ends_with(b".distcp");
            is_of_one_rank(*role, size) && !listed.contains(*path) && !left
        });
        match stray {
            // State of other ranks that no index lists: the count decides.
            Some(_) => Finding::Silent,
            None => {
                Finding::Proves(Evidence::Index, format!("{} lists {} files", indices[0].0, listed.len()))
            }
        }
    }

    /// Whether a file of the format that an index lists was written after the index, and its content proves it whole: a model in one
    /// file, over its shards. The writer of that file may live on.
    fn is_replaced(self, index: &FileFact, covered: &Covered) -> bool {
        let ending = |name: &RelPath| name.name().rsplit(|byte| *byte == b'.').next().map(<[u8]>::to_vec);
        let format = covered.keys().next().and_then(ending);
        self.case.present().any(|(path, _, file)| {
            file.content == Content::Whole
                && file.published_at_ns > index.published_at_ns
                && part_of(path).is_none()
                && ending(path) == format
        })
    }

    /// Whether an index lies directly in the checkpoint's directory and is DCP's, which comes after all ranks reported.
    pub(super) fn index_lies_on_top(self) -> bool {
        let directory = self.case.candidate.id.directory.as_bytes();
        self.case.candidate.files.iter().any(|(path, role)| {
            let above = path.parent();
            let top = above.as_ref().is_some_and(|above| above.name() == directory);
            *role == Role::Index(IndexKind::Dcp) && top
        })
    }

    pub(super) fn rank_markers(self) -> Finding {
        let mut ranks = Ranks::new();
        for (path, role) in &self.case.candidate.files {
            if let Role::RankMarker { rank } = role {
                self.add(&mut ranks, *rank, path);
            }
        }
        match self.case.world_size() {
            _ if ranks.is_empty() => Finding::Silent,
            None => Finding::Missing(Vec::new(), "the size of the job is not known".into()),
            Some(size) => self.counted(&ranks, size, "markers of ranks"),
        }
    }

    /// Counts `-of-NNNNN` in names, or the ranks of WORLD_SIZE.
    pub(super) fn count(self) -> Finding {
        let mut families: BTreeMap<(Vec<u8>, u64), BTreeSet<u64>> = BTreeMap::new();
        // A data set or pictures beside the state may be there in part. A file by itself is no part of anything here: each such file
        // is a checkpoint of its own.
        let rule = self.case.rule();
        let has_parts = self.case.candidate.shape != Shape::Single;
        let is_state = |path: &RelPath, role: Role| {
            has_parts && (role != Role::Other || rule.is_some_and(|rule| rule.is_signature(path.name())))
        };
        for (path, role) in &self.case.candidate.files {
            if let Some((stem, index, of)) = part_of(path).filter(|_| is_state(path, *role)) {
                families.entry((stem, of)).or_default().insert(index);
            }
        }
        for ((stem, of), present) in &families {
            let missing = missing_parts(present, *of);
            if !missing.is_empty() {
                let why =
                    format!("{} of {of} parts of {} are there", present.len(), crate::escape::escape(stem));
                return Finding::Missing(missing, why);
            }
        }
        let Some(size) = self.case.world_size().filter(|size| *size > 1) else {
            let parts = families.values().map(BTreeSet::len).sum::<usize>();
            // Without a size, complete sets of parts prove only the files that carry parts.
            let all_parts = parts == self.case.candidate.files.len();
            return if parts > 0 && all_parts {
                Finding::Proves(Evidence::Count, format!("all {parts} parts are there"))
            } else {
                Finding::Silent
            };
        };
        if !rule.is_some_and(Rule::counts_shards) {
            return Finding::Silent;
        }
        let mut shards: BTreeMap<Vec<u8>, Vec<(u64, &RelPath)>> = BTreeMap::new();
        for (path, role) in &self.case.candidate.files {
            if let (Role::Shard { rank: Some(rank) }, Some(masked)) =
                (role, self.case.rules.mask_rank(path.name()))
            {
                shards.entry(masked).or_default().push((*rank, path));
            }
        }
        let mut families: BTreeMap<Vec<u8>, Ranks> = BTreeMap::new();
        for (name, shards) in shards {
            let first = u64::from(shards.iter().all(|(number, path)| self.counts_from_one(*number, path)));
            let family = families.entry(name).or_default();
            for (number, path) in shards {
                self.add(family, number - first, path);
            }
        }
        // Numbers beyond the job's ranks are no ranks.
        families.retain(|_, ranks| ranks.range(..size).next().is_some());
        // Ranks of a tensor-parallel group write fewer files than the job has ranks: full families decide.
        let mut full = families.values().filter(|ranks| is_full(ranks, size)).peekable();
        if full.peek().is_some() {
            return all_of(full.map(|ranks| self.counted(ranks, size, "ranks")));
        }
        match families.values().max_by_key(|ranks| ranks.len()) {
            None => Finding::Silent,
            Some(ranks) => self.counted(ranks, size, "ranks"),
        }
    }

    /// Checks that each kind of file that every rank writes exists as often as the job has ranks.
    pub(super) fn each_rank(self) -> Finding {
        let Some(size) = self.case.world_size().filter(|size| *size > 1) else { return Finding::Silent };
        let mut families: BTreeMap<Vec<u8>, Vec<(u64, Before)>> = BTreeMap::new();
        for (path, role) in &self.case.candidate.files {
            if let Role::EachRank { rank } = role {
                families.entry(masked_digits(path.name())).or_default().push((*rank, self.before(path)));
            }
        }
        all_of(families.iter().map(|(name, files)| {
            let name = crate::escape::escape(name);
            if usize::try_from(size).is_ok_and(|size| files.len() >= size) {
                return self.of_this_save(files, size, format!("all {size} ranks wrote their {name}"));
            }
            let distinct: BTreeSet<_> = files.iter().map(|(rank, _)| *rank).collect();
            // If a name carries two ranks, one rank alone does not tell which file is missing.
            let missing = if distinct.len() == files.len() {
                named((0..size).filter(|rank| !distinct.contains(rank)))
            } else {
                Vec::new()
            };
            Finding::Missing(missing, format!("{} of {size} ranks wrote their {name}", files.len()))
        }))
    }

    /// Whether the file's number is one more than the rank that wrote it: `shard_1.pt` is rank 0's.
    fn counts_from_one(self, number: u64, path: &RelPath) -> bool {
        let ranks = self.case.facts.files.get(path).into_iter().flat_map(|fact| &fact.writers);
        let mut ranks = ranks.map(|writer| writer.rank).peekable();
        ranks.peek().is_some() && ranks.all(|rank| rank.and_then(|rank| rank.checked_add(1)) == Some(number))
    }

    /// Whether a file is one rank's, by its name and its writers.
    pub(super) fn is_one_ranks(self, path: &RelPath, role: Role) -> bool {
        let size = self.case.world_size();
        let is_after_its_writer = |number| self.counts_from_one(number, path);
        is_of_one_rank(role, size)
            || size.is_some_and(|size| size > 1) && role.rank().is_some_and(is_after_its_writer)
    }

    fn add(self, ranks: &mut Ranks, rank: u64, path: &RelPath) {
        let before = self.before(path);
        ranks.entry(rank).and_modify(|known| *known = before.max(*known)).or_insert(before);
    }

    fn counted(self, present: &Ranks, size: u64, what: &str) -> Finding {
        let here: Vec<_> = present.range(..size).map(|(rank, before)| (*rank, *before)).collect();
        if is_full(present, size) {
            return self.of_this_save(&here, size, format!("all {size} {what} are there"));
        }
        let missing = named((0..size).filter(|rank| !present.contains_key(rank)));
        Finding::Missing(missing, format!("{} of {size} {what} are there", here.len()))
    }
}

/// The ranks of a family. If a rank has several files, a file that this save has not written counts.
type Ranks = BTreeMap<u64, Before>;

fn is_full(present: &Ranks, size: u64) -> bool {
    u64::try_from(present.range(..size).count()).is_ok_and(|here| here == size)
}

/// Whether a file is one rank's, given the job's number of ranks: `lora_rank8.pt` is no rank's of two.
fn is_of_one_rank(role: Role, size: Option<u64>) -> bool {
    role.rank().is_some_and(|rank| size.is_none_or(|size| rank < size))
}

/// Returns the first finding that lacks something, or else the first that proves.
fn all_of(findings: impl Iterator<Item = Finding>) -> Finding {
    let mut found = Finding::Silent;
    for finding in findings {
        match finding {
            Finding::Missing(..) => return finding,
            Finding::Proves(..) if matches!(found, Finding::Silent) => found = finding,
            Finding::Proves(..) | Finding::Silent | Finding::Read(..) => {}
        }
    }
    found
}

/// Maximum number of missing names that a verdict carries.
const MAX_NAMED: usize = 16;

/// Names the first of these ranks for people.
pub(super) fn named(ranks: impl Iterator<Item = u64>) -> Vec<String> {
    ranks.take(MAX_NAMED).map(|rank| format!("rank {rank}")).collect()
}

/// Returns the first parts that a family lacks: some families count from 0, and others from 1.
fn missing_parts(present: &BTreeSet<u64>, of: u64) -> Vec<String> {
    let lacks = |from: u64| (from..from.saturating_add(of)).filter(|part| !present.contains(part));
    if lacks(0).next().is_none() || lacks(1).next().is_none() {
        return Vec::new();
    }
    lacks(u64::from(!present.contains(&0))).take(MAX_NAMED).map(|part| part.to_string()).collect()
}

/// Splits `<stem>-00002-of-00004.<extension>` into the stem, 2 and 4. The stem may be empty, or end in another character.
fn part_of(path: &RelPath) -> Option<(Vec<u8>, u64, u64)> {
    const DIGITS: usize = 5;
    let text = std::str::from_utf8(path.as_bytes()).ok()?;
    let (front, back) = text.rsplit_once("-of-")?;
    let (total, extension) = back.split_once('.').unwrap_or((back, ""));
    let (stem, index) = front.split_at_checked(front.len().checked_sub(DIGITS)?)?;
    let number = |digits: &str| {
        let plain = digits.len() == DIGITS && digits.bytes().all(|b| b.is_ascii_digit());
        if plain { digits.parse::<u64>().ok() } else { None }
    };
    let longer = stem.bytes().next_back().is_some_and(|b| b.is_ascii_digit());
    let stem = stem.strip_suffix('-').unwrap_or(stem);
    let family = format!("{stem}.{extension}").into_bytes();
    Some((family, number(index)?, number(total)?)).filter(|_| !longer)
}
