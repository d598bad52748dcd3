//! The choice of a bench: the first argument of the one executable that holds all of them.
//!
//! Owns: the command line up to the bench's name, and the list of benches for people. Does not own: the table
//! (`benches/main.rs`), the options after the name (`options`).

use crate::compare::Bench;
use crate::crowd;
use crate::options::Options;
use anyhow::{Context, bail};
use std::io::{self, Write};
use std::process::ExitCode;

/// The exit code when no bench was named.
const USAGE_EXIT_CODE: u8 = 2;

/// A bench: a file of its name in `benches`, whose first line asks its question.
#[derive(Clone, Copy, Debug)]
pub struct Stage {
    pub name: &'static str,
    /// The text of the bench's file.
    pub source: &'static str,
    pub run: fn(Bench) -> anyhow::Result<()>,
}

/// The request of a command line.
#[derive(Debug)]
enum Choice<'a> {
    Run(&'a Stage, &'a [String]),
    /// `--list`, or no argument, as from `cargo test --benches`.
    List,
    /// `--list --format terse`: a test runner's question for tests, of which there are none.
    NoTests,
    /// `cargo bench` without a name. All benches together take hours, so nothing is run.
    Unnamed,
}

/// Runs the bench that this process's first argument names.
///
/// # Errors
/// An unknown name, wrong options, or the bench's own error.
pub fn start(stages: &[Stage]) -> anyhow::Result<ExitCode> {
    if crowd::serve_where_asked()? {
        return Ok(ExitCode::SUCCESS);
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match choose(stages, &arguments)? {
        Choice::Run(stage, options) => {
            let bench = Bench::start(stage.name, stage.question()?, Options::from_arguments(options)?)?;
            (stage.run)(bench)?;
        }
        Choice::List => print(&list(stages)?)?,
        Choice::NoTests => {}
        Choice::Unnamed => {
            print("Name one of the benches: cargo bench -p tidemark-benches -- NAME [OPTIONS]\n\n")?;
            print(&list(stages)?)?;
            return Ok(ExitCode::from(USAGE_EXIT_CODE));
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl Stage {
    /// Returns the question that the bench answers: the first line of its file.
    ///
    /// # Errors
    /// The file opens with something else.
    pub fn question(&self) -> anyhow::Result<&'static str> {
        let first = self.source.lines().next().and_then(|line| line.strip_prefix("//! "));
        first.filter(|line| line.ends_with('?')).with_context(|| {
            format!(
                "benches/{}.rs does not open with its question: make its first line `//! How …?`",
                self.name
            )
        })
    }
}

fn choose<'a>(stages: &'a [Stage], arguments: &'a [String]) -> anyhow::Result<Choice<'a>> {
    let given = |flag: &str| arguments.iter().any(|argument| argument == flag);
    match arguments {
        [name, options @ ..] if !name.starts_with('-') => {
            match stages.iter().find(|stage| stage.name == name) {
                Some(stage) => Ok(Choice::Run(stage, options)),
                None => {
                    let known: Vec<&str> = stages.iter().map(|stage| stage.name).collect();
                    bail!("no bench is called `{name}`; there are {}", known.join(", "))
                }
            }
        }
        _ if given("--list") && given("--format") => Ok(Choice::NoTests),
        _ if given("--list") => Ok(Choice::List),
        // `cargo bench` adds this by itself, and `cargo test` does not.
        _ if given("--bench") => Ok(Choice::Unnamed),
        [] => Ok(Choice::List),
        [option, ..] => bail!("`{option}` comes after the name of a bench; `--list` shows the names"),
    }
}

fn list(stages: &[Stage]) -> anyhow::Result<String> {
    let wide = stages.iter().map(|stage| stage.name.len()).max().unwrap_or(0);
    stages.iter().map(|stage| Ok(format!("{:wide$}  {}\n", stage.name, stage.question()?))).collect()
}

fn print(text: &str) -> anyhow::Result<()> {
    io::stdout().lock().write_all(text.as_bytes()).context("write to stdout")
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAGES: [Stage; 2] = [
        Stage { name: "write", source: "//! How fast?\n//!\n", run: |_| Ok(()) },
        Stage { name: "read", source: "//! Reads.\n", run: |_| Ok(()) },
    ];

    fn chosen(words: &[&str]) -> String {
        let arguments: Vec<String> = words.iter().map(ToString::to_string).collect();
        match choose(&STAGES, &arguments) {
            Ok(Choice::Run(stage, options)) => format!("{} {}", stage.name, options.join(" ")),
            Ok(other) => format!("{other:?}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn the_first_argument_names_the_bench() {
        assert_eq!(chosen(&["read", "--rounds", "4", "--bench"]), "read --rounds 4 --bench");
        assert_eq!(chosen(&["raed"]), "no bench is called `raed`; there are write, read");
        assert!(chosen(&["--rounds", "4"]).starts_with("`--rounds` comes after"));
    }

    #[test]
    fn without_a_name_nothing_is_run() {
        assert_eq!(chosen(&["--bench"]), "Unnamed");
        assert_eq!(chosen(&["--smoke", "--bench"]), "Unnamed");
        assert_eq!(chosen(&[]), "List");
        assert_eq!(chosen(&["--list", "--bench"]), "List");
        assert_eq!(chosen(&["--list", "--format", "terse"]), "NoTests");
    }

    #[test]
    fn a_file_opens_with_its_question() {
        assert_eq!(STAGES[0].question().unwrap(), "How fast?");
        assert!(STAGES[1].question().unwrap_err().to_string().contains("benches/read.rs"));
        assert_eq!(list(&STAGES[..1]).unwrap(), "write  How fast?\n");
    }
}
