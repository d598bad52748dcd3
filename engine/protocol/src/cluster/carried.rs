//! What became of names that an older document tells of: the operations that were done to them since.
//!
//! Owns: following one name through operations in their order. Does not own: where operations and documents come from, the tree.
//!
//! Who becomes the coordinator with no catalog of before takes names from Tier-3. What it and others did to names since is done to those
//! as well: otherwise what was removed or renamed would be back.

use super::wire::NameOperation;
use crate::id::FileId;
use std::collections::BTreeMap;

/// Operations on names, in their order.
#[derive(Debug, Default)]
pub struct Carried {
    operations: Vec<NameOperation>,
    /// The operations that take a name away or move it, by that name.
    by_path: BTreeMap<Vec<u8>, Vec<usize>>,
    /// Those that give a file one more name, or take all away, by the file.
    by_file: BTreeMap<FileId, Vec<usize>>,
}

impl Carried {
    #[must_use]
    pub fn new(operations: Vec<NameOperation>) -> Self {
        let (mut by_path, mut by_file): (BTreeMap<_, Vec<_>>, BTreeMap<_, Vec<_>>) = Default::default();
        for (at, operation) in operations.iter().enumerate() {
            match operation {
                NameOperation::Removed { path, .. } => by_path.entry(path.clone()).or_default().push(at),
                NameOperation::Renamed { from, to, .. } => {
                    by_path.entry(from.clone()).or_default().push(at);
                    by_path.entry(to.clone()).or_default().push(at);
                }
                NameOperation::Linked { what: Some(file), .. } | NameOperation::Taken { from: file, .. } => {
                    by_file.entry(*file).or_default().push(at);
                }
                // A name that was free is in no older document, or something else took it away first.
                NameOperation::Linked { what: None, .. }
                | NameOperation::Directory { .. }
                | NameOperation::Symlink { .. }
                | NameOperation::File { .. } => {}
            }
        }
        Self { operations, by_path, by_file }
    }

    /// Whether every name is where it was.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_path.is_empty() && self.by_file.is_empty()
    }

    /// What a name of before is called now; nothing where it was taken away, and all further names that a file was given. `file` is what it
    /// meant; none for what is no file.
    #[must_use]
    pub fn names(&self, path: &[u8], file: Option<FileId>) -> Vec<Vec<u8>> {
        let of_file = file.and_then(|file| self.by_file.get(&file)).map_or(&[][..], Vec::as_slice);
        let given = of_file.iter().filter_map(|at| match &self.operations[*at] {
            NameOperation::Linked { path, .. } => Some((path.as_slice(), at + 1)),
            _ => None,
        });
        let all = std::iter::once((path, 0)).chain(given);
        all.filter_map(|(path, next)| self.now(path, file, next, of_file)).collect()
    }

    /// What a name is called now that something had before the operation `next`.
    fn now(&self, path: &[u8], file: Option<FileId>, next: usize, of_file: &[usize]) -> Option<Vec<u8>> {
        let is_taken =
            |at: &usize| *at >= next && matches!(self.operations[*at], NameOperation::Taken { .. });
        // Whoever took its names tells of them.
        if of_file.iter().any(is_taken) {
            return None;
        }
        let (mut path, mut next) = (path.to_vec(), next);
        while let Some(at) = self.first_from(&path, next) {
            path = after(&self.operations[at], path, file)?;
            next = at + 1;
        }
        Some(path)
    }

    /// The first operation from a number on that is about this name or a directory above it.
    fn first_from(&self, path: &[u8], next: usize) -> Option<usize> {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(end, _)| end);
        let above = ends.chain([path.len()]).map(|end| &path[..end]);
        let firsts = above.filter_map(|prefix| {
            let numbers = self.by_path.get(prefix)?;
            numbers.get(numbers.partition_point(|number| *number < next)).copied()
        });
        firsts.min()
    }
}

/// A name after an operation that is about it or a directory above; none where it was taken away.
fn after(operation: &NameOperation, path: Vec<u8>, file: Option<FileId>) -> Option<Vec<u8>> {
    match operation {
        NameOperation::Removed { path: removed, what } => (path != *removed || file != *what).then_some(path),
        NameOperation::Renamed { from, to, exchange, what } => {
            let moved = |from: &[u8], to: &[u8]| {
                let rest = path.strip_prefix(from).filter(|rest| rest.is_empty() || rest[0] == b'/')?;
                Some([to, rest].concat())
            };
            let is_what = path != *from || file == *what;
            if let Some(moved) = moved(from, to).filter(|_| is_what) {
                return Some(moved);
            }
            if *exchange && let Some(moved) = moved(to, from) {
                return Some(moved);
            }
            // Replaced. Below it was nothing: a rename replaces no directory that has something in it.
            (*exchange || path != *to).then_some(path)
        }
        NameOperation::Directory { .. }
        | NameOperation::Symlink { .. }
        | NameOperation::File { .. }
        | NameOperation::Linked { .. }
        | NameOperation::Taken { .. } => Some(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::{FileCounter, Incarnation};

    fn file(number: u64) -> Option<FileId> {
        Some(FileId { incarnation: Incarnation(7), counter: FileCounter(number) })
    }

    fn removed(path: &str, what: Option<FileId>) -> NameOperation {
        NameOperation::Removed { path: path.into(), what }
    }

    fn renamed(from: &str, to: &str, what: Option<FileId>) -> NameOperation {
        NameOperation::Renamed { from: from.into(), to: to.into(), exchange: false, what }
    }

    fn now(operations: &[NameOperation], path: &str, file: Option<FileId>) -> Option<String> {
        let names = names(operations, path, file);
        assert!(names.len() < 2, "{names:?}");
        names.into_iter().next()
    }

    fn names(operations: &[NameOperation], path: &str, file: Option<FileId>) -> Vec<String> {
        let names = Carried::new(operations.to_vec()).names(path.as_bytes(), file).into_iter();
        names.map(|name| String::from_utf8(name).expect("names of tests are UTF-8")).collect()
    }

    #[test]
    fn a_name_follows_what_was_done_to_it_and_to_the_directories_above() {
        let done = [
            renamed("run/a", "run/b", file(1)),
            renamed("run", "old", None),
            removed("old/c", file(3)),
            renamed("old/b", "old/d", file(1)),
        ];
        assert_eq!(now(&done, "run/a", file(1)).as_deref(), Some("old/d"));
        assert_eq!(now(&done, "run/c", file(3)), None);
        assert_eq!(now(&done, "run/sub/x", file(4)).as_deref(), Some("old/sub/x"));
        assert_eq!(now(&done, "run", None).as_deref(), Some("old"));
        assert_eq!(now(&done, "runs/a", file(1)).as_deref(), Some("runs/a"), "only begins alike");
        assert_eq!(now(&done, "old/d", file(5)), None, "replaced");
    }

    #[test]
    fn what_was_done_to_another_file_of_the_name_does_not_count() {
        assert_eq!(now(&[removed("a", file(1))], "a", file(2)).as_deref(), Some("a"));
        assert_eq!(now(&[renamed("a", "b", file(1))], "a", file(2)).as_deref(), Some("a"));
        assert_eq!(now(&[removed("a", None)], "a", file(2)).as_deref(), Some("a"), "a directory was removed");
    }

    #[test]
    fn two_names_that_were_exchanged_have_changed_places_with_what_is_below() {
        let done = [NameOperation::Renamed { from: "a".into(), to: "b".into(), exchange: true, what: None }];
        assert_eq!(now(&done, "a/x", file(1)).as_deref(), Some("b/x"));
        assert_eq!(now(&done, "b/x", file(1)).as_deref(), Some("a/x"));
        assert_eq!(now(&done, "b", None).as_deref(), Some("a"));
    }

    #[test]
    fn a_file_has_the_names_that_it_was_given_and_none_once_another_took_them() {
        let link = |from: &str, path: &str| NameOperation::Linked {
            from: from.into(),
            path: path.into(),
            what: file(1),
        };
        let done = [
            link("a", "b"),
            renamed("a", "c", file(1)),
            link("b", "d"),
            removed("d", file(1)),
            renamed("b", "e", file(1)),
        ];
        assert_eq!(names(&done, "a", file(1)), ["c", "e"]);
        let taken = NameOperation::Taken {
            path: b"c".to_vec(),
            from: file(1).expect("a file"),
            file: file(2).expect("a file"),
            attributes: Default::default(),
        };
        assert!(names(&[&done[..], std::slice::from_ref(&taken)].concat(), "a", file(1)).is_empty());
        assert_eq!(
            names(&[&[taken][..], &[link("x", "b")]].concat(), "a", file(1)),
            ["b"],
            "given after that"
        );
    }

    #[test]
    fn there_and_back_again_is_where_it_was() {
        let done = [renamed("a", "b", file(1)), renamed("b", "a", file(1))];
        assert_eq!(now(&done, "a", file(1)).as_deref(), Some("a"));
        assert_eq!(now(&done, "b", file(2)), None);
        assert!(Carried::default().is_empty() && !Carried::new(done.to_vec()).is_empty());
    }
}
