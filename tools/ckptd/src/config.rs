//! `ckptd config`: the commented configuration file, and the page made from it.
//!
//! Owns: reading `ckptd.toml` as blocks, the page's form. Does not own: the keys, their defaults and limits (the engine's
//! settings), reading a user's file (`cli`).
//!
//! The only source of the texts is `ckptd.toml`, because a file that people read and edit needs no code to print it. A schema
//! derived from doc comments (schemars) would add a derive to the engine and the protocol, which every first build waits for, and
//! still need an example for each key without a default; tests here keep the file from drifting instead.

use crate::cli::Failure;
use anyhow::Context;
use clap::{Args, Subcommand};
use std::io::Write;

/// A configuration file with every key, its text and its default. Blocks are separated by empty lines; a block is `# `
/// text and then a key or a section, which stands behind a `#` without a space where it is optional.
const EXAMPLE: &str = include_str!("../ckptd.toml");

/// The page's text above the keys.
const PAGE_HEAD: &str = "\
# Configuration

<!-- Generated from ckptd.toml: ckptd config reference > tools/ckptd/CONFIGURATION.md -->
";

/// Flags of `ckptd config`.
#[derive(Debug, Args)]
#[command(disable_help_subcommand = true)]
pub(crate) struct Config {
    #[command(subcommand)]
    form: Form,
}

/// How the configuration is printed.
#[derive(Debug, Clone, Copy, Subcommand)]
enum Form {
    /// Print a commented configuration file: every key with its meaning, limits and default.
    Example,
    /// Print the same as a page in Markdown.
    Reference,
}

impl Config {
    /// Prints what was asked for on stdout.
    pub(crate) fn print(&self) -> Result<(), Failure> {
        let text = match self.form {
            Form::Example => EXAMPLE.to_owned(),
            Form::Reference => page(),
        };
        let mut stdout = std::io::stdout().lock();
        let printed = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        printed.context("the configuration cannot be written to stdout").map_err(Failure::failed)
    }
}

/// A text with the key or section that it describes; none for the text at the top.
#[derive(Debug)]
struct Block {
    text: Vec<&'static str>,
    code: Option<&'static str>,
}

fn blocks() -> impl Iterator<Item = Block> {
    EXAMPLE.split("\n\n").map(|block| {
        let (text, code): (Vec<_>, Vec<_>) =
            block.lines().partition(|line| *line == "#" || line.starts_with("# "));
        let text = text.iter().map(|line| line[1..].trim_start()).collect();
        Block { text, code: code.first().map(|line| line.trim_start_matches('#')) }
    })
}

/// The page: a heading for each section, an item for each key.
fn page() -> String {
    let mut page = PAGE_HEAD.to_owned();
    for Block { text, code } in blocks() {
        let (title, indent) = match code {
            None => ("\n".to_owned(), ""),
            Some(section) if section.starts_with('[') => (format!("\n## `{section}`\n\n"), ""),
            Some(key) => (format!("\n- `{key}`\\\n"), "  "),
        };
        page.push_str(&title);
        for line in text {
            page.push_str(format!("{indent}{line}").trim_end());
            page.push('\n');
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::collections::{BTreeMap, BTreeSet};
    use tidemark_engine::settings::Settings;
    use tidemark_protocol::recognise::RuleSpec;

    /// The example with every key in force.
    fn all_keys() -> String {
        let line = |line: &str| match line.strip_prefix('#') {
            Some(key) if !key.is_empty() && !key.starts_with(' ') => format!("{key}\n"),
            _ => format!("{line}\n"),
        };
        EXAMPLE.lines().map(line).collect()
    }

    /// Every value by its path, such as `tier1.size`. Entries of a list share theirs.
    fn leaves(value: impl serde::Serialize) -> BTreeMap<String, Value> {
        fn walk(path: &str, value: Value, found: &mut BTreeMap<String, Value>) {
            match value {
                Value::Object(table) if !table.is_empty() => {
                    table.into_iter().for_each(|(key, value)| walk(&format!("{path}.{key}"), value, found));
                }
                Value::Array(list) if !list.is_empty() => {
                    list.into_iter().for_each(|value| walk(path, value, found));
                }
                value => drop(found.insert(path.trim_start_matches('.').to_owned(), value)),
            }
        }
        let mut found = BTreeMap::new();
        walk("", serde_json::to_value(value).unwrap(), &mut found);
        found
    }

    #[test]
    fn every_table_refuses_a_key_that_it_does_not_have() {
        let example = all_keys();
        let lines: Vec<_> = example.lines().collect();
        let heads = lines.iter().enumerate().filter(|(_, line)| line.starts_with('['));
        // Labels have the names that people give them.
        let heads: Vec<_> = heads.filter(|(_, line)| !line.contains("labels")).collect();
        assert!(heads.len() > 12, "{heads:?}");
        for (at, head) in heads {
            let mut with = lines.clone();
            with.insert(at + 1, "no_such_key = 1");
            let refused = toml::from_str::<Settings>(&with.join("\n")).expect_err(head).to_string();
            assert!(refused.contains("no_such_key"), "{head}: {refused}");
        }
        toml::from_str::<Settings>(&format!("no_such_key = 1\n{example}")).expect_err("outside of any table");
    }

    #[test]
    fn the_example_is_the_default_as_it_stands_and_valid_with_every_key() {
        assert_eq!(toml::from_str::<Settings>(EXAMPLE).unwrap(), Settings::default());
        let mut settings: Settings = toml::from_str(&all_keys()).unwrap();
        // The keys for a lease file on one machine and for an etcd on several exclude each other.
        assert!(settings.validate().unwrap_err().to_string().contains("node.lease"));
        settings.node.lease = None;
        settings.validate().unwrap();
        // These values are checked where they are used.
        crate::peers::Role::of(&settings).unwrap();
        settings.node.name.unwrap().parse::<tidemark_protocol::id::NodeName>().unwrap();
        for size in [settings.tier1.size.unwrap(), settings.spill.budget.unwrap()] {
            tidemark_protocol::size::parse(&size).unwrap();
        }
    }

    #[test]
    fn the_example_has_every_key_and_its_default() {
        let shown = leaves(toml::from_str::<toml::Table>(&all_keys()).unwrap());
        let known = leaves(toml::from_str::<Settings>(&all_keys()).unwrap());
        let keys = |leaves: BTreeMap<String, Value>| leaves.into_keys().collect::<BTreeSet<_>>();
        // A single run has the keys of its section, which are all there.
        let (shown_keys, known_keys) = (keys(shown.clone()), keys(known));
        let differ = shown_keys.symmetric_difference(&known_keys).filter(|path| !path.contains(".runs."));
        assert_eq!(differ.collect::<Vec<_>>(), [""; 0], "keys that either ckptd.toml or the settings lack");
        let rules = vec![RuleSpec::default()];
        let defaults = leaves(Settings { rules, ..Settings::default() });
        let is_unset = |value: &Value| [Value::Null, json!(""), json!({})].contains(value);
        for (path, default) in defaults.iter().filter(|(_, default)| !is_unset(default)) {
            assert_eq!(shown.get(path), Some(default), "{path} is shown with its default");
        }
        let mut section = String::new();
        for Block { text, code } in blocks() {
            let Some(code) = code else { continue };
            let Some((key, _)) = code.split_once(" = ") else {
                code.trim_matches(['[', ']']).clone_into(&mut section);
                continue;
            };
            let has_default = !is_unset(&defaults[&format!("{section}.{key}")]);
            let text = text.join(" ");
            assert!(
                section == "rules" || text.contains("Default: ") != has_default,
                "{section}.{key}: {text}"
            );
        }
    }

    #[test]
    fn the_page_is_up_to_date() {
        let written = include_str!("../CONFIGURATION.md");
        assert!(
            page() == written,
            "tools/ckptd/CONFIGURATION.md is out of date: \
             cargo run --bin ckptd -- config reference > tools/ckptd/CONFIGURATION.md"
        );
    }
}
