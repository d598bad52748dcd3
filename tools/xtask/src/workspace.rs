//! The workspace as Cargo sees it: members, their targets and dependencies, licences of what is linked.
//!
//! Owns: the reading of `cargo metadata`. Does not own: any rule about it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::shell;

/// The data that `cargo metadata` prints.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target_dir: PathBuf,
    pub(crate) packages: Vec<Package>,
    /// The root files of members' libraries and binaries, with the package's name.
    pub(crate) roots: Vec<(String, PathBuf)>,
}

/// A member of the workspace or something it depends on.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) licence: Option<String>,
    pub(crate) member: bool,
    /// Direct dependencies with their kind; an empty kind is a normal one.
    pub(crate) dependencies: Vec<(String, String)>,
    /// Packages that it is built with, directly, with the features that the workspace asks for.
    pub(crate) built_with: Vec<String>,
    /// Targets with their kind: `test`, `bench`, `bin`, `lib` …
    pub(crate) targets: Vec<(String, String)>,
}

impl Workspace {
    pub(crate) fn read() -> Result<Self> {
        Self::ask(&mut metadata())
    }

    /// The workspace of another manifest.
    pub(crate) fn of(manifest: &Path) -> Result<Self> {
        Self::ask(metadata().arg("--manifest-path").arg(manifest))
    }

    fn ask(command: &mut Command) -> Result<Self> {
        let text = shell::capture(command).context("reading the workspace; is Cargo.lock up to date?")?;
        Self::parse(&text)
    }

    fn parse(text: &str) -> Result<Self> {
        let metadata: Value = serde_json::from_str(text).context("cargo metadata printed no JSON")?;
        let members: Vec<&str> = strings(&metadata["workspace_members"]).collect();
        let is_member = |package: &Value| package["id"].as_str().is_some_and(|id| members.contains(&id));
        let roots = list(&metadata["packages"]).filter(|package| is_member(package)).flat_map(|package| {
            let built = |target: &&Value| strings(&target["kind"]).any(|kind| kind == "lib" || kind == "bin");
            let built = list(&package["targets"]).filter(built);
            built.map(|target| (text_of(package, "name"), PathBuf::from(text_of(target, "src_path"))))
        });
        let roots = roots.collect();
        let names: BTreeMap<String, String> = list(&metadata["packages"])
            .map(|package| (text_of(package, "id"), text_of(package, "name")))
            .collect();
        let built_with: BTreeMap<String, Vec<String>> = list(&metadata["resolve"]["nodes"])
            .map(|node| {
                let normal = |with: &&Value| list(&with["dep_kinds"]).any(|kind| kind["kind"].is_null());
                let with =
                    list(&node["deps"]).filter(normal).filter_map(|with| names.get(&text_of(with, "pkg")));
                (text_of(node, "id"), with.cloned().collect())
            })
            .collect();
        let packages = list(&metadata["packages"])
            .map(|package| Package {
                name: text_of(package, "name"),
                version: text_of(package, "version"),
                licence: package["license"].as_str().map(str::to_owned),
                member: is_member(package),
                dependencies: list(&package["dependencies"])
                    .map(|dependency| (text_of(dependency, "name"), text_of(dependency, "kind")))
                    .collect(),
                built_with: built_with.get(&text_of(package, "id")).cloned().unwrap_or_default(),
                targets: list(&package["targets"])
                    .filter_map(|target| {
                        Some((text_of(target, "name"), strings(&target["kind"]).next()?.to_owned()))
                    })
                    .collect(),
            })
            .collect();
        Ok(Self {
            root: text_of(&metadata, "workspace_root").into(),
            target_dir: text_of(&metadata, "target_directory").into(),
            packages,
            roots,
        })
    }

    /// The targets of one kind in a member, by name.
    pub(crate) fn targets(&self, package: &str, kind: &str) -> Vec<&str> {
        self.packages
            .iter()
            .filter(|found| found.member && found.name == package)
            .flat_map(|found| &found.targets)
            .filter(|(_, target_kind)| target_kind == kind)
            .map(|(name, _)| name.as_str())
            .collect()
    }

    /// True for a package of this workspace.
    pub(crate) fn has_member(&self, name: &str) -> bool {
        self.packages.iter().any(|package| package.member && package.name == name)
    }

    /// Where `ckptd`, `ckptctl` and the test executables are built.
    pub(crate) fn bin_dir(&self) -> PathBuf {
        self.target_dir.join("ci")
    }

    /// Tools that the suites need and that are not Debian packages.
    pub(crate) fn tools_dir(&self) -> PathBuf {
        self.target_dir.join("tools")
    }

    /// A path below the workspace's root as people write it.
    pub(crate) fn shown(&self, path: &Path) -> String {
        path.strip_prefix(&self.root).unwrap_or(path).display().to_string()
    }
}

fn metadata() -> Command {
    let mut command = Command::new("cargo");
    command.args(["metadata", "--format-version", "1", "--locked"]);
    command
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn strings(value: &Value) -> impl Iterator<Item = &str> {
    list(value).filter_map(Value::as_str)
}

fn text_of(value: &Value, key: &str) -> String {
    value[key].as_str().unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_told_from_what_they_depend_on() {
        let text = r#"{"workspace_root":"/r","target_directory":"/t","workspace_members":["a 1"],"packages":[
            {"id":"a 1","name":"a","version":"1","license":"MIT","targets":[{"name":"s","kind":["test"]}],
             "dependencies":[{"name":"b","kind":null},{"name":"c","kind":"dev"}]},
            {"id":"b 2","name":"b","version":"2","license":null,"targets":[],"dependencies":[]}]}"#;
        let workspace = Workspace::parse(text).unwrap();
        assert_eq!(workspace.targets("a", "test"), ["s"]);
        assert_eq!(
            workspace.packages[0].dependencies,
            [("b".into(), String::new()), ("c".into(), "dev".into())]
        );
        assert!(workspace.packages[0].member && !workspace.packages[1].member);
    }
}
