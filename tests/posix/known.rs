//! `known.txt`, the list of the cases that do not pass.
//!
//! Owns: reading it, and refusing a line without a reason. Does not own: the results of a run (`pjdfstest`).

use std::collections::BTreeMap;

const LIST: &str = include_str!("known.txt");

/// How the mount under test serves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    Passthrough,
    Fallback,
}

/// Result of a case, actual or expected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Failed,
    Skipped,
}

impl Mode {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Passthrough => "passthrough",
            Self::Fallback => "fallback",
        }
    }
}

/// Returns the cases that do not pass in a mode, with the outcome of each.
pub(crate) fn known(mode: Mode) -> BTreeMap<String, Outcome> {
    parse(LIST, mode)
}

fn parse(text: &str, mode: Mode) -> BTreeMap<String, Outcome> {
    let mut found = BTreeMap::new();
    let mut above = "";
    for line in text.lines() {
        if !line.is_empty() && !line.starts_with('#') {
            assert!(above.starts_with('#'), "`{line}` in known.txt has no reason above it");
            let words: Vec<&str> = line.split(' ').collect();
            let [case, outcome, modes] = words[..] else {
                panic!("`{line}` in known.txt is not `case outcome modes`");
            };
            let outcome = match outcome {
                "fails" => Outcome::Failed,
                "skipped" => Outcome::Skipped,
                other => panic!("`{other}` in known.txt is neither `fails` nor `skipped`"),
            };
            let known_modes = [Mode::Passthrough.word(), Mode::Fallback.word()];
            assert!(modes.split(',').all(|word| known_modes.contains(&word)), "the modes of `{line}`");
            if modes.split(',').any(|word| word == mode.word()) {
                assert!(found.insert(case.to_owned(), outcome).is_none(), "{case} is there twice");
            }
        }
        above = line;
    }
    found
}

#[test]
fn the_list_is_read_by_mode() {
    let text = "# why\na::b fails passthrough\n\n# why\nc skipped passthrough,fallback\n";
    assert_eq!(parse(text, Mode::Passthrough).len(), 2);
    assert_eq!(parse(text, Mode::Fallback), BTreeMap::from([("c".to_owned(), Outcome::Skipped)]));
}

#[test]
#[should_panic(expected = "has no reason")]
fn a_line_without_a_reason_is_refused() {
    parse("# why\na fails fallback\nb fails fallback\n", Mode::Fallback);
}
