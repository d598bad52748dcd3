//! The house in figures: circles of imports, types that hold much, names that mean two things.
//!
//! Owns: what is counted, and what may be. Does not own: which crate may depend on which (`architecture`).

mod graph;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::shell::{self, say};
use crate::workspace::Workspace;

/// Methods of one type, and files that they stand in, at most: more is two types.
const METHODS_MAX: usize = 40;
const FILES_MAX: usize = 2;

/// Types that are larger, with the most methods and files that they may have. The numbers only shrink: a change that makes a type
/// smaller lowers its line, or takes it out.
const LARGER: &[(&str, &str, usize, usize)] = &[("tidemark-meta", "Node", 54, 4)];

/// Packages that are not shipped.
const FOR_DEVELOPERS: &[&str] = &["xtask", "tidemark-tests", "tidemark-benches"];

/// The binaries that are.
const BINARIES: &[&str] = &["ckptd", "ckptctl"];

/// How many of the largest types are shown.
const TYPES_SHOWN: usize = 5;

/// Names that files have by the language, or by what is agreed here.
const COMMON_FILES: &[&str] = &["mod.rs", "lib.rs", "main.rs", "error.rs"];

/// Figures of all crates of the workspace.
#[derive(Debug, Default)]
pub(crate) struct House {
    /// Circles of folders, and of files.
    folders: Vec<BTreeSet<PathBuf>>,
    files: Vec<BTreeSet<PathBuf>>,
    /// Methods by crate and type name, and the files that they stand in.
    types: BTreeMap<(String, String), (usize, BTreeSet<PathBuf>)>,
    /// Names that two or more files have, and that two or more types have, with how many.
    file_names: BTreeMap<String, usize>,
    type_names: BTreeMap<String, usize>,
}

impl House {
    /// Reads the sources of every member.
    pub(crate) fn read(workspace: &Workspace) -> Result<Self> {
        let mut house = Self::default();
        for (name, root) in
            workspace.roots.iter().filter(|(name, _)| !FOR_DEVELOPERS.contains(&name.as_str()))
        {
            let modules = source::read(root)?;
            let files = graph::files(&modules);
            let folder = root.parent().expect("a root file lies in a folder");
            house.add_circles(&files, folder);
            for file in files.keys() {
                let name =
                    file.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
                *house.file_names.entry(name).or_default() += 1;
            }
            for module in modules.values() {
                for defined in &module.types {
                    *house.type_names.entry(defined.clone()).or_default() += 1;
                }
                for (of, methods) in &module.methods {
                    let held = house.types.entry((name.clone(), of.clone())).or_default();
                    held.0 += methods;
                    held.1.insert(module.file.clone());
                }
            }
        }
        house.file_names.retain(|name, count| *count > 1 && !COMMON_FILES.contains(&name.as_str()));
        house.type_names.retain(|_, count| *count > 1);
        Ok(house)
    }

    fn add_circles(&mut self, files: &graph::Graph<PathBuf>, root: &Path) {
        self.files.extend(graph::circles(files));
        let above = files.keys().flat_map(|file| file.ancestors().skip(1));
        let folders: BTreeSet<&Path> = above.filter(|folder| folder.starts_with(root)).collect();
        for folder in folders {
            self.folders.extend(graph::circles(&graph::folders(files, folder)));
        }
    }

    /// Returns the violations, a line each.
    pub(crate) fn problems(&self, workspace: &Workspace) -> Vec<String> {
        let circles = self
            .folders
            .iter()
            .map(|circle| format!("folders take from each other: {}", named(workspace, circle)));
        let large = self.types.iter().filter_map(|((package, name), (methods, files))| {
            let larger = LARGER.iter().find(|of| (of.0, of.1) == (package.as_str(), name.as_str()));
            let (methods_max, files_max) = larger.map_or((METHODS_MAX, FILES_MAX), |of| (of.2, of.3));
            // A small type may stand where each of its methods is used.
            let spread = *methods > METHODS_MAX && files.len() > files_max;
            (*methods > methods_max || spread).then(|| {
                format!(
                    "{name} of {package} has {methods} methods in {} files; {methods_max} in {files_max} are the most: what it owns is \
                     more than one thing",
                    files.len()
                )
            })
        });
        circles.chain(large).collect()
    }

    /// For people.
    pub(crate) fn text(&self, workspace: &Workspace) -> String {
        let mut text = format!("circles of folders: {}\n", self.folders.len());
        self.folders.iter().for_each(|circle| text.push_str(&format!("  {}\n", named(workspace, circle))));
        text.push_str(&format!("circles of files: {}\n", self.files.len()));
        self.files.iter().for_each(|circle| text.push_str(&format!("  {}\n", named(workspace, circle))));
        text.push_str("the largest types: methods, files\n");
        let mut largest: Vec<_> = self.types.iter().collect();
        largest.sort_by_key(|(name, (methods, _))| (std::cmp::Reverse(*methods), *name));
        for ((package, name), (methods, files)) in largest.into_iter().take(TYPES_SHOWN) {
            text.push_str(&format!("  {methods:>4} {:>3}  {package} {name}\n", files.len()));
        }
        text.push_str(&format!("names of two types or more: {}\n", self.type_names.len()));
        text.push_str(&format!("names of two files or more: {}\n", self.file_names.len()));
        text
    }
}

fn named(workspace: &Workspace, circle: &BTreeSet<PathBuf>) -> String {
    circle.iter().map(|one| workspace.shown(one)).collect::<Vec<_>>().join(", ")
}

/// Prints the house in figures; true when nothing is in it that must not be.
pub(crate) fn show() -> Result<bool> {
    let workspace = Workspace::read()?;
    let house = House::read(&workspace)?;
    let mut text = house.text(&workspace);
    text.push_str("binaries: packages, MB as shipped\n");
    for binary in BINARIES {
        let size = std::fs::metadata(workspace.target_dir.join("shipped").join(binary));
        let size = size.map_or_else(
            |_| "`cargo xtask dist` makes it".into(),
            |file| format!("{}", file.len() / 1_000_000),
        );
        text.push_str(&format!("  {:>4}  {binary} {size}\n", packages_of(&workspace, binary)?));
    }
    say(&text);
    let problems = house.problems(&workspace);
    problems.iter().for_each(|problem| say(problem));
    Ok(problems.is_empty())
}

/// Packages that are compiled for a binary, itself included.
fn packages_of(workspace: &Workspace, package: &str) -> Result<usize> {
    let mut cargo = std::process::Command::new("cargo");
    cargo.current_dir(&workspace.root).args(["tree", "--package", package, "--edges", "normal,build"]);
    let text = shell::capture(cargo.args(["--prefix", "none", "--format", "{p}"]))?;
    Ok(text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<BTreeSet<_>>().len())
}
