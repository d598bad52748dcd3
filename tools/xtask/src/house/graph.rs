//! Dependencies between the files of a crate, and their circles.
//!
//! Owns: finding the file that a name leads to, and circles. Does not own: reading (`source`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use super::source::{Module, ModulePath};

/// Names that are passed on from module to module are followed so far; a longer chain is a circle of names.
const STEPS_MAX: usize = 16;

/// From a file to those that it takes something from.
pub(crate) type Graph<T> = BTreeMap<T, BTreeSet<T>>;

/// The files of a crate.
pub(crate) fn files(modules: &BTreeMap<ModulePath, Module>) -> Graph<PathBuf> {
    let mut graph: Graph<PathBuf> = BTreeMap::new();
    for (path, module) in modules {
        let taken = graph.entry(module.file.clone()).or_default();
        for name in &module.names {
            let from = absolute(path, name, modules).and_then(|name| leads_to(&name, modules, STEPS_MAX));
            taken.extend(from.filter(|from| *from != module.file));
        }
    }
    graph
}

/// A path as it is written in `module`, from the crate's root; none for what is not of this crate.
fn absolute(
    module: &[String],
    name: &[String],
    modules: &BTreeMap<ModulePath, Module>,
) -> Option<ModulePath> {
    let (first, rest) = name.split_first()?;
    match first.as_str() {
        "crate" => Some(rest.to_vec()),
        "self" => Some([module, rest].concat()),
        "super" => absolute(&module[..module.len().checked_sub(1)?], &with_self(rest), modules),
        first_name => {
            let child = [module, std::slice::from_ref(first)].concat();
            if modules.contains_key(&child) {
                return Some([module, name].concat());
            }
            let known = modules.get(module)?.passes_on.get(first_name)?;
            // `use crate::a;` and then `a::b`.
            (known.first() != Some(first)).then(|| absolute(module, &[&known[..], rest].concat(), modules))?
        }
    }
}

fn with_self(rest: &[String]) -> ModulePath {
    if rest.first().is_some_and(|first| first == "super") {
        return rest.to_vec();
    }
    [&["self".to_owned()], rest].concat()
}

/// The file that defines what a path names.
fn leads_to(name: &[String], modules: &BTreeMap<ModulePath, Module>, steps: usize) -> Option<PathBuf> {
    let depth = (0..=name.len()).rev().find(|depth| modules.contains_key(&name[..*depth]))?;
    let (path, rest) = name.split_at(depth);
    let module = &modules[path];
    // A file that only names a module takes nothing of it yet.
    let first = rest.first()?;
    if module.defines.contains(first) || steps == 0 {
        return Some(module.file.clone());
    }
    if let Some(from) = module.passes_on.get(first) {
        let onward = absolute(path, &[&from[..], &rest[1..]].concat(), modules)?;
        return leads_to(&onward, modules, steps - 1);
    }
    for from in &module.passes_on_all {
        let onward = absolute(path, &[&from[..], rest].concat(), modules);
        let found = onward.and_then(|onward| defined_at(&onward, modules));
        if found.is_some() {
            return found;
        }
    }
    None
}

fn defined_at(name: &[String], modules: &BTreeMap<ModulePath, Module>) -> Option<PathBuf> {
    let (last, path) = name.split_last()?;
    modules.get(path).filter(|module| module.defines.contains(last)).map(|module| module.file.clone())
}

/// The same between the folders in `folder`: what lies in one of them, however deep, belongs to it.
pub(crate) fn folders(files: &Graph<PathBuf>, folder: &Path) -> Graph<PathBuf> {
    let room = |file: &Path| {
        let inside = file.strip_prefix(folder).ok()?;
        let mut steps = inside.components();
        let first = steps.next()?;
        steps.next().map(|_| folder.join(first))
    };
    let mut graph: Graph<PathBuf> = BTreeMap::new();
    for (file, taken) in files {
        let Some(from) = room(file) else { continue };
        let to = taken.iter().filter_map(|file| room(file)).filter(|to| *to != from);
        graph.entry(from.clone()).or_default().extend(to);
    }
    graph
}

/// Finds the circles of nodes that take from each other, each circle with all nodes in it.
pub(crate) fn circles<T: Ord + Clone>(graph: &Graph<T>) -> Vec<BTreeSet<T>> {
    let reached: BTreeMap<&T, BTreeSet<&T>> = graph.keys().map(|from| (from, reach(graph, from))).collect();
    let mut found: BTreeSet<BTreeSet<T>> = BTreeSet::new();
    for (from, to) in &reached {
        let both = to.iter().filter(|to| reached.get(**to).is_some_and(|back| back.contains(from)));
        let circle: BTreeSet<T> = both.map(|one| (*one).clone()).collect();
        if circle.len() > 1 {
            found.insert(circle);
        }
    }
    found.into_iter().collect()
}

fn reach<'a, T: Ord>(graph: &'a Graph<T>, from: &T) -> BTreeSet<&'a T> {
    let mut seen = BTreeSet::new();
    let mut left: Vec<&T> = graph.get(from).into_iter().flatten().collect();
    while let Some(next) = left.pop() {
        if seen.insert(next) {
            left.extend(graph.get(next).into_iter().flatten());
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::super::source;
    use super::*;

    fn graph(files: &[(&str, &str)]) -> (PathBuf, Graph<PathBuf>) {
        let folder = std::env::temp_dir().join(format!("house-{}-{}", std::process::id(), files.len()));
        for (name, text) in files {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let modules = source::read(&folder.join("lib.rs")).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        (folder, super::files(&modules))
    }

    #[test]
    fn a_name_leads_to_the_file_that_defines_it() {
        let (folder, graph) = graph(&[
            ("lib.rs", "pub mod a; mod b;"),
            ("a/mod.rs", "mod inner; pub use inner::Thing; pub struct Own; fn f() { crate::b::g() }"),
            ("a/inner.rs", "pub struct Thing;"),
            (
                "b.rs",
                "use crate::a::{self, Thing}; pub fn g() { (a::Own, Thing); } #[cfg(test)] mod tests { use crate::a; }",
            ),
        ]);
        let taken = |file: &str| -> Vec<_> { graph[&folder.join(file)].iter().cloned().collect() };
        assert_eq!(taken("b.rs"), [folder.join("a/inner.rs"), folder.join("a/mod.rs")]);
        assert_eq!(taken("a/mod.rs"), [folder.join("b.rs")], "passing a name on takes nothing");
        let circle = BTreeSet::from([folder.join("a/mod.rs"), folder.join("b.rs")]);
        assert_eq!(circles(&graph), [circle]);
        assert!(circles(&folders(&graph, &folder)).is_empty(), "there is one folder");
    }

    #[test]
    fn two_folders_that_take_from_each_other_are_a_circle_though_no_two_files_are() {
        let (folder, graph) = graph(&[
            ("lib.rs", "mod a; mod b;"),
            ("a/mod.rs", "pub mod one; pub mod two;"),
            ("a/one.rs", "pub struct One;"),
            ("a/two.rs", "use crate::b::Three;"),
            ("b/mod.rs", "use crate::a::one::One; pub struct Three(One);"),
        ]);
        assert!(circles(&graph).is_empty());
        assert_eq!(
            circles(&folders(&graph, &folder)),
            [BTreeSet::from([folder.join("a"), folder.join("b")])]
        );
    }
}
