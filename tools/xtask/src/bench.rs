//! `cargo xtask bench`: the list of benches, building them once, and running each.
//!
//! Owns: the reading of the benches' table and of their output. Does not own: what a bench measures, the keeping of its figures
//! (`results`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::cargo;
use crate::count::Count;
use crate::figure::Figure;
use crate::scratch::Scratch;
use crate::shell::{capture, say, watch};
use crate::workspace::Workspace;

/// The folder of the benches below the workspace's root.
pub(crate) const FOLDER: &str = "benches";
/// The bench target that holds all of them, in `benches/Cargo.toml`.
const TARGET: &str = "benches";
/// The programs that benches start; they look for them beside their own executable.
const PROGRAMS: [&str; 3] = ["ckptd", "ckptctl", "tidemark-s3"];
/// Smoke benches that run at once, one more than there are processors where time is shortest: they wait too. Each has at most a few
/// hundred MiB of Tier-1.
const SMOKE_AT_ONCE: usize = 3;
/// Each figure is one line that begins with this word and goes on as a JSON object.
const RESULT: &str = "RESULT ";

/// A bench, as the table in `benches/main.rs` has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stage {
    pub(crate) name: String,
    pub(crate) question: String,
}

/// Arguments of `cargo xtask bench` or `cargo xtask figures`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct BenchOptions {
    pub(crate) smoke: bool,
    pub(crate) list: bool,
    /// All benches when it is empty.
    pub(crate) names: Vec<String>,
    /// Arguments after `--`: options of the benches themselves.
    pub(crate) passed_on: Vec<String>,
}

/// Reads `[--smoke] [--list] [NAME]... [-- OPTION...]`.
pub(crate) fn options(arguments: &[String]) -> Result<BenchOptions> {
    let mut options = BenchOptions::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--smoke" => options.smoke = true,
            "--list" => options.list = true,
            "--" => options.passed_on.extend(rest.by_ref().cloned()),
            flag if flag.starts_with('-') => {
                bail!(
                    "`{flag}` is not known here; options of a bench come after `--`; see `cargo xtask --help`"
                )
            }
            name => options.names.push(name.to_owned()),
        }
    }
    Ok(options)
}

/// Runs the named benches, or all; true when each of them succeeded.
pub(crate) fn run(options: &BenchOptions) -> Result<bool> {
    let workspace = Workspace::read()?;
    let stages = chosen(stages(&workspace.root)?, &options.names)?;
    if options.list {
        for Stage { name, question } in &stages {
            say(&format!("{name:12} {question}"));
        }
        return Ok(true);
    }
    let executable = build(&workspace, options.smoke)?;
    let scratch = Scratch::with_room()?;
    let mut good = true;
    for stage in &stages {
        if let Err(why) = one(&executable, &stage.name, options.smoke, &options.passed_on, &scratch)? {
            say(&why);
            good = false;
        }
    }
    Ok(good)
}

/// Returns the benches in the order of their table. Reads sources, so that a misspelt name is refused before minutes of
/// building.
pub(crate) fn stages(root: &Path) -> Result<Vec<Stage>> {
    let folder = root.join(FOLDER);
    let read = |path: &Path| fs::read_to_string(path).with_context(|| format!("reading {}", path.display()));
    let table = folder.join("main.rs");
    let stages = names(&read(&table)?)
        .map(|name| {
            let path = folder.join(format!("{name}.rs"));
            let question = question(&read(&path)?).with_context(|| {
                format!(
                    "{} does not open with its question: make its first line `//! How …?`",
                    path.display()
                )
            })?;
            Ok(Stage { name: name.to_owned(), question })
        })
        .collect::<Result<Vec<_>>>()?;
    ensure!(!stages.is_empty(), "{} has no line `stage!(NAME),`: the table of benches", table.display());
    Ok(stages)
}

/// Returns those of `stages` that `names` has, in the order of the table; all of them when it has none.
pub(crate) fn chosen(stages: Vec<Stage>, names: &[String]) -> Result<Vec<Stage>> {
    if let Some(unknown) = names.iter().find(|name| stages.iter().all(|stage| stage.name != **name)) {
        let known: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
        bail!("no bench is called `{unknown}`; there are {}", known.join(", "));
    }
    Ok(stages.into_iter().filter(|stage| names.is_empty() || names.contains(&stage.name)).collect())
}

/// Builds the benches and the programs that they start; returns the benches' executable.
///
/// Figures are taken with what a person builds; a smoke run takes what the tests have built already. The whole
/// workspace is selected, as for the tests: other packages would select other features, and build all of it again.
pub(crate) fn build(workspace: &Workspace, smoke: bool) -> Result<PathBuf> {
    let profile = if smoke { "ci" } else { "release" };
    say(&format!("building the benches with profile {profile}"));
    let mut command = if smoke { cargo::linting() } else { Command::new("cargo") };
    command
        .args(["build", "--profile", profile, "--locked", "--workspace", "--bench", TARGET])
        .args(PROGRAMS.iter().flat_map(|program| ["--bin", program]))
        .args(cargo::FEATURES.iter().filter(|_| smoke))
        .args(["--message-format", "json-render-diagnostics"])
        .current_dir(&workspace.root)
        .stderr(Stdio::inherit());
    let messages = capture(&mut command).context("the benches do not build; what cargo said is above")?;
    executable(&messages)
        .with_context(|| format!("cargo built no bench target `{TARGET}`; is it in {FOLDER}/Cargo.toml?"))
}

/// Runs one bench; returns its figures, or what was wrong with it.
pub(crate) fn one(
    executable: &Path,
    name: &str,
    smoke: bool,
    passed_on: &[String],
    scratch: &Scratch,
) -> Result<Result<Vec<Figure>, String>> {
    let mut command = Command::new(executable);
    command.arg(name).args(smoke.then_some("--smoke")).args(passed_on);
    scratch.lend(&mut command);
    let ran = watch(&mut command)?;
    if !ran.success {
        return Ok(Err(format!("bench {name} failed")));
    }
    let figures: Result<Vec<Figure>, String> =
        ran.output.lines().filter_map(|line| line.strip_prefix(RESULT)).map(Figure::parse).collect();
    Ok(match figures {
        Ok(found) if found.is_empty() => Err(format!("bench {name} printed no {RESULT}line")),
        Ok(found) => Ok(found),
        Err(why) => Err(format!("bench {name} printed a {RESULT}line that {why}")),
    })
}

/// Runs benches with small sizes, several at once: their figures are not read, and each mostly waits.
pub(crate) fn smoke(executable: &Path, stages: Vec<Stage>, scratch: &Scratch) -> Result<Count> {
    let left = Mutex::new(stages.into_iter());
    let next = || left.lock().expect("whoever takes a stage does not panic").next();
    let work = || -> Result<Count> {
        let mut count = Count::default();
        while let Some(stage) = next() {
            let ran = one(executable, &stage.name, true, &[], scratch)?;
            count.passed += u64::from(ran.is_ok());
            count.failed += u64::from(ran.is_err());
            if let Err(why) = ran {
                say(&why);
            }
        }
        Ok(count)
    };
    thread::scope(|scope| {
        let workers = [(); SMOKE_AT_ONCE].map(|()| scope.spawn(work));
        let counts = workers.map(|worker| worker.join().expect("a worker does not panic"));
        counts.into_iter().try_fold(Count::default(), |sum, count| Ok(sum + count?))
    })
}

/// The names in the table of `benches/main.rs`, which has each on a line `stage!(NAME),`.
fn names(table: &str) -> impl Iterator<Item = &str> {
    table.lines().filter_map(|line| line.trim().strip_prefix("stage!(")?.strip_suffix("),"))
}

/// The question that a bench's file opens with.
fn question(text: &str) -> Option<String> {
    let first = text.lines().next()?.strip_prefix("//! ")?;
    first.ends_with('?').then(|| first.to_owned())
}

/// The path of the benches' executable in what cargo prints about each thing that it built.
fn executable(messages: &str) -> Option<PathBuf> {
    let is_bench = |target: &Value| {
        target["name"] == TARGET
            && target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "bench"))
    };
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["reason"] == "compiler-artifact" && is_bench(&message["target"]))
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn names_and_options_of_benches_are_told_apart() {
        let read = options(&words("--smoke seal write -- --rounds 4 --smoke")).unwrap();
        assert!(read.smoke && !read.list);
        assert_eq!(read.names, ["seal", "write"]);
        assert_eq!(read.passed_on, ["--rounds", "4", "--smoke"]);
        assert!(options(&words("seal --rounds 4")).is_err());
    }

    #[test]
    fn a_misspelt_bench_is_refused() {
        let stages = ["write", "read"].map(|name| Stage { name: name.into(), question: "How?".into() });
        let some = chosen(stages.to_vec(), &words("read")).unwrap();
        assert_eq!(some, stages[1..]);
        assert_eq!(chosen(stages.to_vec(), &[]).unwrap(), stages);
        assert!(chosen(stages.to_vec(), &words("raed")).unwrap_err().to_string().contains("write, read"));
    }

    #[test]
    fn every_file_of_a_bench_is_in_the_table() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut listed: Vec<String> = stages(&root).unwrap().into_iter().map(|stage| stage.name).collect();
        let files = fs::read_dir(root.join(FOLDER)).unwrap().map(|entry| entry.unwrap().path());
        let mut there: Vec<String> = files
            .filter(|path| {
                path.extension().is_some_and(|ending| ending == "rs") && !path.ends_with("main.rs")
            })
            .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
            .collect();
        listed.sort_unstable();
        there.sort_unstable();
        assert_eq!(listed, there);
    }

    #[test]
    fn the_executable_is_that_of_the_bench_target() {
        let messages = r#"{"reason":"compiler-artifact","target":{"name":"benches","kind":["lib"]},"executable":null}
            {"reason":"compiler-artifact","target":{"name":"ckptd","kind":["bin"]},"executable":"/t/ckptd"}
            {"reason":"compiler-artifact","target":{"name":"benches","kind":["bench"]},"executable":"/t/deps/benches-1"}
            {"reason":"build-finished","success":true}"#;
        assert_eq!(executable(messages), Some("/t/deps/benches-1".into()));
        assert_eq!(executable("no JSON"), None);
    }
}
