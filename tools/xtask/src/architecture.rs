//! Rules of dependencies between crates, checked against Cargo's own view and the sources.
//!
//! Owns: the list of rules. Each rule states its reason, because the reader of a failure is about to break it.

use std::collections::{BTreeMap, VecDeque};
use std::fs;

use anyhow::Result;

use crate::tidy;
use crate::workspace::Workspace;

/// A member and what its normal dependencies may not be.
struct Forbidden {
    member: &'static str,
    dependencies: &'static [&'static str],
    why: &'static str,
}

/// Everything that the rules of the protocol may use. A list of what is allowed, so that a new crate is a decision.
const PROTOCOL_MAY_USE: &[&str] =
    &["base64", "blake3", "postcard", "regex", "serde", "serde_json", "thiserror"];

/// The readers of content are given bytes.
const CONTENT_MAY_USE: &[&str] = &["memchr", "serde", "serde_json"];

/// Dependencies of the order of changes, a pure function: no runtime, no store's client.
const META_MAY_USE: &[&str] = &["postcard", "serde", "thiserror", "tidemark-protocol"];

/// Packages that know bytes, not their use.
const ALONE: &[&str] = &["tidemark-kernels", "tidemark-transport"];

/// Packages that may use the client of Tier-3: the store, and those that measure it against that client.
const TALKS_TO_TIER3: &[&str] = &["tidemark-store", "tidemark-tests", "tidemark-benches"];

const FORBIDDEN: &[Forbidden] = &[
    Forbidden {
        member: "tidemark-engine",
        dependencies: &["tidemark-control", "tidemark-fuse"],
        why: "membership, epochs and the mount reach the engine as calls and events",
    },
    Forbidden {
        member: "tidemark-fuse",
        dependencies: &["tidemark-control"],
        why: "the mount knows the namespace, and of other nodes what the engine says",
    },
    Forbidden {
        member: "tidemark-store",
        dependencies: &["tidemark-tier1", "tidemark-namespace", "tidemark-engine", "tidemark-transport"],
        why: "Tier-3 knows keys and bytes, not whose they are",
    },
    Forbidden {
        member: "tidemark-tier1",
        dependencies: &[
            "tidemark-store",
            "tidemark-namespace",
            "tidemark-engine",
            "tidemark-transport",
            "tokio",
        ],
        why: "memory knows no names, and is asked by threads that may not wait for a runtime",
    },
    Forbidden {
        member: "tidemark-namespace",
        dependencies: &["tidemark-store", "tidemark-engine", "tidemark-transport", "object_store"],
        why: "the tree knows where bytes lie in memory, and of Tier-3 and other nodes what it is told",
    },
    Forbidden {
        member: "tidemark-api",
        dependencies: &["tidemark-engine", "tidemark-control", "tidemark-namespace", "object_store"],
        why: "what people ask has a shape of its own, and whoever asks builds no engine",
    },
    Forbidden {
        member: "tidemark-keeper",
        dependencies: &["tidemark-engine", "tidemark-fuse", "tidemark-control", "tidemark-protocol", "tokio"],
        why: "what must outlive everything else depends on nothing of it",
    },
    Forbidden {
        member: "tidemark-control",
        dependencies: &["tidemark-fuse"],
        why: "the coordinator works where nothing is mounted",
    },
    Forbidden {
        member: "ckptctl",
        dependencies: &["tidemark-engine", "tidemark-fuse", "object_store"],
        why: "the command line asks a daemon; it has no copy of the engine to disagree with",
    },
];

/// Words that must not stand in the sources below a folder, comments apart.
struct Silent {
    folder: &'static str,
    words: &'static [&'static str],
    why: &'static str,
}

const SILENT: &[Silent] = &[
    Silent {
        folder: "engine/protocol/src",
        words: &[
            "std::fs",
            "std::net",
            "std::thread",
            "std::env",
            "Instant::now",
            "SystemTime::now",
            "tokio::",
        ],
        why: "the protocol does no I/O and reads no clock; time is an argument",
    },
    Silent {
        folder: "control/meta/src",
        words: &["std::fs", "std::net", "std::thread", "std::env", "Instant::now", "SystemTime::now"],
        why: "time is an argument, and what happens outside is an event",
    },
    Silent {
        folder: "engine/content/src",
        words: &["std::fs", "std::net", "std::thread", "std::env", "Instant::now", "SystemTime::now"],
        why: "the readers are given the bytes and the clock",
    },
];

/// Returns the problems, one line each; empty when the architecture holds.
pub(crate) fn problems(workspace: &Workspace) -> Result<Vec<String>> {
    let mut problems = dependency_problems(workspace);
    for rule in SILENT {
        for path in tidy::files(&workspace.root.join(rule.folder))? {
            if path.extension().is_some_and(|ending| ending == "rs") {
                let text = fs::read_to_string(&path)?;
                problems.extend(spoken(&text, rule.words).map(|(line, word)| {
                    format!("{}:{line} says `{word}`, but {}", workspace.shown(&path), rule.why)
                }));
            }
        }
    }
    Ok(problems)
}

fn dependency_problems(workspace: &Workspace) -> Vec<String> {
    let mut problems = vec![];
    for package in workspace.packages.iter().filter(|package| package.member) {
        // Tests may use what they like; a build script's dependencies end up in no binary.
        for (dependency, _) in package.dependencies.iter().filter(|(_, kind)| kind.is_empty()) {
            if package.name == "tidemark-protocol" && !PROTOCOL_MAY_USE.contains(&dependency.as_str()) {
                problems.push(format!(
                    "tidemark-protocol depends on {dependency}, but it has no I/O and no runtime"
                ));
            }
            if package.name == "tidemark-content" && !CONTENT_MAY_USE.contains(&dependency.as_str()) {
                problems.push(format!(
                    "tidemark-content depends on {dependency}, but it reads bytes that others got, within its own bounds"
                ));
            }
            if package.name == "tidemark-meta" && !META_MAY_USE.contains(&dependency.as_str()) {
                problems.push(format!(
                    "tidemark-meta depends on {dependency}, but stores, links and clocks reach it as events"
                ));
            }
            if dependency == "object_store" && !TALKS_TO_TIER3.contains(&package.name.as_str()) {
                problems.push(format!(
                    "{} depends on object_store, but only the store talks to Tier-3",
                    package.name
                ));
            }
            if ALONE.contains(&package.name.as_str()) && dependency.starts_with("tidemark-") {
                problems.push(format!(
                    "{} depends on {dependency}, but it uses no crate of this house",
                    package.name
                ));
            }
        }
        for rule in FORBIDDEN.iter().filter(|rule| rule.member == package.name) {
            let reached = reached_from(workspace, rule.member);
            let found = rule.dependencies.iter().filter_map(|name| Some((name, reached.get(name)?)));
            problems.extend(found.map(|(name, through)| match &through[..] {
                [] => format!("{} depends on {name}, but {}", rule.member, rule.why),
                through => {
                    format!(
                        "{} depends on {name} through {}, but {}",
                        rule.member,
                        through.join(", "),
                        rule.why
                    )
                }
            }));
        }
    }
    problems
}

/// Every package that a member is built with, however far, and through which others.
fn reached_from<'a>(workspace: &'a Workspace, member: &'a str) -> BTreeMap<&'a str, Vec<&'a str>> {
    let mut reached: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut left = VecDeque::from([(member, vec![])]);
    while let Some((from, through)) = left.pop_front() {
        let packages = workspace.packages.iter().filter(|package| package.name == from);
        for next in packages.flat_map(|package| &package.built_with) {
            if !reached.contains_key(next.as_str()) {
                reached.insert(next, through.clone());
                left.push_back((next, [&through[..], &[next.as_str()]].concat()));
            }
        }
    }
    reached
}

/// The words that a source text says, with their line numbers, outside comments.
fn spoken<'a>(text: &'a str, words: &'a [&'a str]) -> impl Iterator<Item = (usize, &'a str)> {
    text.lines().enumerate().flat_map(move |(index, line)| {
        let code = tidy::without_comment(line);
        words.iter().filter(move |word| code.contains(**word)).map(move |word| (index + 1, *word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Package;

    fn member(name: &str, dependency: &str, kind: &str) -> Workspace {
        let package = Package {
            name: name.into(),
            version: "1.0.0".into(),
            licence: None,
            member: true,
            dependencies: vec![(dependency.into(), kind.into())],
            built_with: if kind.is_empty() { vec![dependency.into()] } else { vec![] },
            targets: vec![],
        };
        Workspace { root: "/".into(), target_dir: "/".into(), packages: vec![package], roots: vec![] }
    }

    #[test]
    fn a_forbidden_arrow_is_found() {
        for (name, dependency) in [
            ("tidemark-protocol", "tokio"),
            ("tidemark-meta", "tokio"),
            ("tidemark-kernels", "tidemark-protocol"),
            ("tidemark-transport", "tidemark-protocol"),
            ("tidemark-engine", "tidemark-control"),
        ] {
            assert_eq!(dependency_problems(&member(name, dependency, "")).len(), 1, "{name} -> {dependency}");
            assert!(dependency_problems(&member(name, dependency, "dev")).is_empty());
        }
        assert!(dependency_problems(&member("tidemark-control", "tidemark-engine", "")).is_empty());
    }

    #[test]
    fn a_forbidden_arrow_is_found_however_far_away() {
        let mut workspace = member("ckptctl", "tidemark-api", "");
        let api = member("tidemark-api", "tidemark-engine", "");
        workspace.packages.extend(api.packages);
        let problems = dependency_problems(&workspace);
        let found = |words: &str| problems.iter().any(|problem| problem.starts_with(words));
        assert!(found("ckptctl depends on tidemark-engine through tidemark-api, but"), "{problems:?}");
        assert!(found("tidemark-api depends on tidemark-engine, but"), "{problems:?}");
    }

    #[test]
    fn a_word_in_a_comment_is_not_spoken() {
        let text = "// std::fs is not used here\nuse std::fs;\n";
        assert_eq!(spoken(text, &["std::fs"]).collect::<Vec<_>>(), [(2, "std::fs")]);
    }
}
