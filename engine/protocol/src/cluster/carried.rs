//! The names of an older document, after the operations that were done to names since.
//!
//! Owns: following one name through operations in their order. Does not own: where operations and documents come from, the tree.
//!
//! A coordinator that starts without an earlier catalog takes names from Tier-3. The coordinator then applies to them the operations that
//! its own node and others have done since: otherwise removed or renamed names would be back.

use super::wire::NameOperation;
use crate::id::FileId;
use std::collections::BTreeMap;

/// Operations on names, in their order.
#[derive(Debug, Default)]
pub struct Carried {
    operations: Vec<NameOperation>,
    /// The operations by the names that they are about.
    by_path: BTreeMap<Vec<u8>, Vec<usize>>,
    /// The operations that give a file one more name, or take all away, by the file.
    by_file: BTreeMap<FileId, Vec<usize>>,
    /// Whether the document has none of the operations. Otherwise it may be younger than some.
    has_none: bool,
}

impl Carried {
    /// Makes the operations that a document is known to have none of.
    #[must_use]
    pub fn after(operations: Vec<NameOperation>) -> Self {
        let mut carried = Self { has_none: true, ..Self::default() };
        operations.into_iter().for_each(|operation| carried.push(operation));
        carried
    }

    /// Adds an operation after all others.
    pub fn push(&mut self, operation: NameOperation) {
        let at = self.operations.len();
        let mut about = |path: &[u8]| self.by_path.entry(path.to_vec()).or_default().push(at);
        match &operation {
            NameOperation::Removed { path, .. }
            | NameOperation::File { path, .. }
            | NameOperation::Directory { path, .. }
            | NameOperation::Symlink { path, .. } => about(path),
            NameOperation::Renamed { from, to, .. } => {
                about(from);
                about(to);
            }
            NameOperation::Linked { path, what, .. } => {
                about(path);
                if let Some(file) = what {
                    self.by_file.entry(*file).or_default().push(at);
                }
            }
            NameOperation::Taken { from, .. } => self.by_file.entry(*from).or_default().push(at),
        }
        self.operations.push(operation);
    }

    /// Returns the number of operations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Returns the present names of the file or directory that a document has under `path`: none if they were removed, and all further
    /// names that a file was given. `file` is the file that the document means; none for a directory or a symlink.
    #[must_use]
    pub fn names(&self, path: &[u8], file: Option<FileId>) -> Vec<Vec<u8>> {
        self.names_from(path, file, 0)
    }

    /// Returns the names that operation `at`, which makes a file, and the later ones leave to that file; none for other operations.
    #[must_use]
    pub fn left_by(&self, at: usize) -> Vec<Vec<u8>> {
        match &self.operations[at] {
            NameOperation::File { path, file, .. } => self.names_from(path, Some(*file), at + 1),
            _ => Vec::new(),
        }
    }

    /// Returns the present names of what had `path` right before the operation `next`, and all further names that it was given.
    fn names_from(&self, path: &[u8], file: Option<FileId>, next: usize) -> Vec<Vec<u8>> {
        let of_file = file.and_then(|file| self.by_file.get(&file)).map_or(&[][..], Vec::as_slice);
        // The node that took the names last publishes those that the file had until then.
        let taken =
            of_file.iter().rposition(|at| matches!(self.operations[*at], NameOperation::Taken { .. }));
        let own = taken.is_none().then_some((path, next));
        let given = of_file[taken.map_or(0, |taken| taken + 1)..].iter();
        let given = given.filter_map(|at| match &self.operations[*at] {
            NameOperation::Linked { path, .. } => Some((path.as_slice(), at + 1)),
            _ => None,
        });
        own.into_iter().chain(given).filter_map(|(path, next)| self.now(path, file, next)).collect()
    }

    /// Returns the present name of what had `path` right before the operation `next`; none if it was removed. No operation since then takes
    /// all names of the file.
    fn now(&self, path: &[u8], file: Option<FileId>, next: usize) -> Option<Vec<u8>> {
        let (mut path, mut next) = (path.to_vec(), next);
        while let Some(at) = self.first_from(&path, next) {
            path = after(&self.operations[at], path, file, self.has_none)?;
            next = at + 1;
        }
        Some(path)
    }

    /// Returns the first operation from `next` on that concerns this name or a directory above it.
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

/// Returns a name after an operation on it or on a directory above; none if it was removed. `has_none`: the name is surely of before.
fn after(operation: &NameOperation, path: Vec<u8>, file: Option<FileId>, has_none: bool) -> Option<Vec<u8>> {
    match operation {
        NameOperation::Removed { path: removed, what } => (path != *removed || file != *what).then_some(path),
        NameOperation::Renamed { from, to, exchange, what } => {
            // If the document is younger than the operation, it has the new name already. Directories and symlinks have no identity that
            // would show this.
            if !has_none && path == *to && file == *what && !(*exchange && what.is_none()) {
                return Some(path);
            }
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
            // The name was replaced. Nothing was below it: a rename replaces only empty directories.
            (*exchange || path != *to).then_some(path)
        }
        // The name means the new file, whatever it meant before.
        NameOperation::File { path: given, file: what, .. } => {
            (path != *given || file == Some(*what)).then_some(path)
        }
        NameOperation::Linked { path: given, what, .. } => (path != *given || file == *what).then_some(path),
        NameOperation::Directory { path: given, .. } | NameOperation::Symlink { path: given, .. } => {
            (path != *given || file.is_none()).then_some(path)
        }
        NameOperation::Taken { .. } => Some(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::wire::NodeAttributes;
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

    fn carried(operations: &[NameOperation]) -> Carried {
        let mut carried = Carried::default();
        operations.iter().cloned().for_each(|operation| carried.push(operation));
        carried
    }

    fn now(operations: &[NameOperation], path: &str, file: Option<FileId>) -> Option<String> {
        let names = names(operations, path, file);
        assert!(names.len() < 2, "{names:?}");
        names.into_iter().next()
    }

    fn names(operations: &[NameOperation], path: &str, file: Option<FileId>) -> Vec<String> {
        let names = carried(operations).names(path.as_bytes(), file).into_iter();
        names.map(|name| String::from_utf8(name).expect("names of tests are UTF-8")).collect()
    }

    #[test]
    fn a_file_that_was_made_has_the_names_that_later_operations_leave_to_it() {
        let made = |number| NameOperation::File {
            path: b"a".into(),
            file: file(number).unwrap(),
            attributes: NodeAttributes::default(),
        };
        let removed = |path: &str| NameOperation::Removed { path: path.into(), what: file(1) };
        let linked = NameOperation::Linked { from: b"a".into(), path: b"b".into(), what: file(1) };
        let taken = NameOperation::Taken {
            path: b"a".into(),
            from: file(1).unwrap(),
            file: file(2).unwrap(),
            attributes: NodeAttributes::default(),
        };
        for (later, left) in [
            (vec![], vec!["a"]),
            (vec![renamed("a", "b", file(1))], vec!["b"]),
            (vec![linked.clone()], vec!["a", "b"]),
            (vec![linked, removed("a")], vec!["b"]),
            (vec![removed("a")], vec![]),
            (vec![made(2)], vec![]),
            (vec![taken], vec![]),
        ] {
            let before = NameOperation::Removed { path: b"a".into(), what: file(3) };
            let carried = Carried::after([before, made(1)].into_iter().chain(later.clone()).collect());
            let left: Vec<_> = left.into_iter().map(|path| path.as_bytes().to_vec()).collect();
            assert_eq!(carried.left_by(1), left, "{later:?}");
            assert!(carried.left_by(0).is_empty(), "it makes nothing");
        }
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
            names(&[std::slice::from_ref(&taken), &[link("x", "b")]].concat(), "a", file(1)),
            ["b"],
            "given after that"
        );
        let twice = [taken.clone(), link("x", "b"), taken, link("x", "d"), link("x", "e")];
        assert_eq!(names(&twice, "a", file(1)), ["d", "e"], "given after the last");
    }

    #[test]
    fn there_and_back_again_is_where_it_was() {
        let done = [renamed("a", "b", file(1)), renamed("b", "a", file(1))];
        assert_eq!(now(&done, "a", file(1)).as_deref(), Some("a"));
        assert_eq!(now(&done, "b", file(2)), None);
        assert!(Carried::default().is_empty() && carried(&done).len() == 2);
    }

    #[test]
    fn what_a_younger_document_has_already_is_not_done_to_it_again() {
        let done = [renamed("a", "b", file(1))];
        assert_eq!(now(&done, "b", file(1)).as_deref(), Some("b"));
        let exchanged =
            [NameOperation::Renamed { from: "a".into(), to: "b".into(), exchange: true, what: file(1) }];
        assert_eq!(now(&exchanged, "b", file(1)).as_deref(), Some("b"));
        assert_eq!(now(&exchanged, "a", file(2)).as_deref(), Some("a"));
        assert_eq!(now(&exchanged, "a", file(1)).as_deref(), Some("b"));
    }

    #[test]
    fn a_name_that_something_else_was_given_is_not_what_it_was() {
        let given = NameOperation::File {
            path: b"a".to_vec(),
            file: file(2).expect("a file"),
            attributes: Default::default(),
        };
        let done = [given, renamed("a", "b", file(2))];
        assert_eq!(now(&done, "a", file(1)), None, "who removed it had been answered");
        assert_eq!(now(&done, "a", file(2)).as_deref(), Some("b"));
    }
}
