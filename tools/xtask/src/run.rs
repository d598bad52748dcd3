//! `cargo xtask test`: every check this machine can run, in the order a person would wait for it.
//!
//! Owns: the order, the choice of what is left out, and the verdict. Does not own: counting, installing and the rules,
//! which have modules of their own.

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use crate::build_times::BuildTimes;
use crate::count::{self, Count};
use crate::house::House;
use crate::machine::{self, has_cargo_command};
use crate::prepare::{self, Installing, Tool};
use crate::scratch::Scratch;
use crate::shell::{Ran, say, watch, watch_some};
use crate::spent::{Spent, Stopwatch};
use crate::suites::{self, BENCH, SUITES, Suite, UNIT};
use crate::summary::{Outcome, Row, Summary};
use crate::test_times;
use crate::workspace::Workspace;
use crate::{architecture, bench, cargo, licences, tidy};

/// The package whose test targets are the suites.
const TESTS: &str = "tidemark-tests";

/// The manifest of the Python package, which is a workspace of its own.
const PYTHON: &str = "tools/python/Cargo.toml";

/// The report that a run leaves below the target folder: what it printed at its end.
const REPORT: &str = "test-report.txt";

/// Arguments of `cargo xtask test`.
#[derive(Debug, Default)]
pub(crate) struct TestOptions {
    pub(crate) long: bool,
    pub(crate) list: bool,
    pub(crate) only: Vec<String>,
}

impl TestOptions {
    fn wants(&self, name: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == name)
    }
}

/// A run: the workspace, the arguments, and the results so far.
struct Run<'a> {
    workspace: Arc<Workspace>,
    options: &'a TestOptions,
    nextest: bool,
    installing: Installing,
    scratch: Scratch,
    summary: Summary,
}

/// Runs what was asked for; true when nothing failed.
pub(crate) fn test(options: &TestOptions) -> Result<bool> {
    if options.list {
        list();
        return Ok(true);
    }
    for name in &options.only {
        if !suites::asked().any(|asked| asked.name == name) {
            bail!("no check or suite is called `{name}`; `cargo xtask test --list` names them");
        }
    }
    let workspace = Arc::new(Workspace::read()?);
    let scratch = Scratch::make()?;
    let nextest = has_cargo_command("nextest");
    say(&format!("machine: {}", machine::describe()));
    let suites = SUITES.iter().filter(|suite| options.wants(suite.name) && suite.lacking().is_none());
    let unit = options.wants(UNIT).then_some(&Tool::Nvrtc);
    let tools = unit.into_iter().chain(suites.flat_map(|suite| suite.tools)).copied().collect();
    let installing = Installing::start(tools, Arc::clone(&workspace));
    let mut run = Run { workspace, options, nextest, installing, scratch, summary: Summary::default() };
    run.all()?;
    // With `--long` a suite takes what it takes.
    let text = run.summary.text(|name| suites::share_s(name).filter(|_| !options.long));
    let report = run.workspace.target_dir.join(REPORT);
    fs::write(&report, &text).with_context(|| format!("writing {}", report.display()))?;
    say(&text);
    Ok(run.summary.good())
}

/// The checks that need no build; true when nothing failed.
pub(crate) fn tidy() -> Result<bool> {
    let options = TestOptions {
        only: vec!["tidy".into(), "architecture".into(), "licences".into()],
        ..Default::default()
    };
    test(&options)
}

impl Run<'_> {
    fn all(&mut self) -> Result<()> {
        if self.wants("tidy") {
            let mut problems = tidy::problems(&self.workspace)?;
            problems.extend(suites::mismatches(&self.workspace.targets(TESTS, "test")));
            self.rules("tidy", &problems);
        }
        if self.wants("architecture") {
            let mut problems = architecture::problems(&self.workspace)?;
            problems.extend(House::read(&self.workspace)?.problems(&self.workspace));
            self.rules("architecture", &problems);
        }
        if self.wants("licences") {
            let mut problems = licences::problems(&self.workspace);
            problems.extend(licences::problems(&Workspace::of(&self.workspace.root.join(PYTHON))?));
            self.rules("licences", &problems);
        }
        let python = ["fmt", "--check", "--manifest-path", PYTHON];
        self.toolchain("fmt", "rustfmt", &[&["fmt", "--all", "--check"], &python])?;
        if self.needs_build() {
            self.scratch.ensure_room()?;
            // Always built, with everything in one go: another selection of packages would select other features of
            // shared dependencies and build those twice. If all is built already, this costs a second.
            if !self.build()? {
                return Ok(());
            }
        }
        if self.wants(UNIT) {
            self.unit()?;
        }
        if self.wants("doc") {
            self.doc()?;
        }
        for round in suites::rounds(|suite| self.wants(suite.name)) {
            if self.nextest {
                self.round(&round)?;
            } else {
                round.iter().try_for_each(|suite| self.round(&[*suite]))?;
            }
        }
        if self.wants(BENCH) {
            self.bench()?;
        }
        Ok(())
    }

    fn wants(&self, name: &str) -> bool {
        self.options.wants(name)
    }

    fn needs_build(&self) -> bool {
        let without = ["tidy", "architecture", "licences", "fmt"];
        self.options.only.is_empty() || self.options.only.iter().any(|only| !without.contains(&only.as_str()))
    }

    /// A check of ours: each problem is printed, and the check is one that passed or failed.
    fn rules(&mut self, name: &str, problems: &[String]) {
        say(&format!("\n== {name}"));
        for problem in problems {
            say(problem);
        }
        let note = if problems.is_empty() {
            String::new()
        } else {
            format!("{} problems, listed above", problems.len())
        };
        self.row(name, single(problems.is_empty()), Spent::default(), &note);
    }

    /// A check by a component of the toolchain, which may be missing: it is never downloaded.
    fn toolchain(&mut self, name: &str, component: &str, commands: &[&[&str]]) -> Result<()> {
        if !self.wants(name) {
            return Ok(());
        }
        if !has_cargo_command(name) {
            let why =
                format!("this toolchain has no {component}: `rustup component add {component}` brings it");
            self.left_out(name, why);
            return Ok(());
        }
        let (mut success, mut spent) = (true, Spent::default());
        for arguments in commands {
            let ran = self.watch(name, Command::new("cargo").args(*arguments))?;
            success &= ran.success;
            spent += ran.spent;
        }
        self.row(name, single(success), spent, "");
        Ok(())
    }

    fn build(&mut self) -> Result<bool> {
        let arguments = ["build", "--profile", "ci", "--workspace", "--all-targets", "--locked", "--timings"];
        let began = SystemTime::now();
        if let Some(why) = cargo::lacks_lints() {
            self.left_out("clippy", why.to_owned());
        }
        let ran = self.watch("build", cargo::linting().args(arguments).args(cargo::FEATURES))?;
        let members = &self.workspace;
        self.summary.built = BuildTimes::read(&members.target_dir, began, |name| members.has_member(name));
        self.row("build", single(ran.success), ran.spent, "");
        Ok(ran.success)
    }

    /// Runs the tests beside the code. The tests of device code need its compiler.
    fn unit(&mut self) -> Result<()> {
        if let Some(why) = self.lacking(&[Tool::Nvrtc])? {
            self.row(UNIT, single(false), Spent::default(), &why);
            return Ok(());
        }
        self.tests(UNIT, &[], &self.unit_arguments(), false)
    }

    fn unit_arguments(&self) -> Vec<String> {
        if self.nextest {
            return words(&format!("-E not(package({TESTS})&kind(test))"));
        }
        // Integration tests of single crates, if there are any, are named one by one: `--tests` would bring the suites.
        let members =
            self.workspace.packages.iter().filter(|package| package.member && package.name != TESTS);
        let targets = members.flat_map(|package| self.workspace.targets(&package.name, "test"));
        ["--lib", "--bins"]
            .map(str::to_owned)
            .into_iter()
            .chain(targets.flat_map(|t| words(&format!("--test {t}"))))
            .collect()
    }

    fn doc(&mut self) -> Result<()> {
        let arguments = ["test", "--profile", "ci", "--workspace", "--doc", "--locked"];
        let ran = self.watch("doc", cargo::linting().args(arguments).args(cargo::FEATURES))?;
        let count = count::tests(&ran.output);
        // A workspace without examples has nothing to fail.
        let count =
            if count.passed + count.failed == 0 { single(ran.success) } else { honest(count, ran.success) };
        self.row("doc", count, ran.spent, "");
        Ok(())
    }

    /// Whether a suite can run; where it cannot, its row says why.
    fn is_ready(&mut self, suite: &Suite) -> Result<bool> {
        if let Some(why) = suite.lacking() {
            self.left_out(suite.name, why);
            return Ok(false);
        }
        if !self.workspace.targets(TESTS, "test").contains(&suite.name) {
            self.row(
                suite.name,
                single(false),
                Spent::default(),
                "it has no test target, although this machine can run it",
            );
            return Ok(false);
        }
        if let Some(why) = self.lacking(suite.tools)? {
            // The machine could run the suite, so this is a failure and not something left out.
            self.row(suite.name, single(false), Spent::default(), &why);
            return Ok(false);
        }
        Ok(true)
    }

    /// Waits for what is being installed; why one of these tools is not there.
    fn lacking(&mut self, tools: &[Tool]) -> Result<Option<String>> {
        let stopwatch = Stopwatch::start();
        let lacking = self.installing.wait(tools)?.map(str::to_owned);
        self.summary.waited += stopwatch.read();
        Ok(lacking)
    }

    /// Runs suites in one go.
    fn round(&mut self, round: &[&Suite]) -> Result<()> {
        let mut ready = Vec::new();
        for suite in round {
            if self.is_ready(suite)? {
                ready.push(*suite);
            }
        }
        if ready.is_empty() {
            return Ok(());
        }
        let names: Vec<_> = ready.iter().map(|suite| suite.name).collect();
        let arguments = if self.nextest {
            words(&format!("-E package({TESTS})&binary(/^({})$/)", names.join("|")))
        } else {
            names.iter().flat_map(|name| words(&format!("--test {name}"))).collect()
        };
        let daemons = ready.iter().any(|suite| suite.daemons);
        self.tests(&suites::row_name(&ready), &names, &arguments, daemons)
    }

    /// Runs tests that are built already, and counts them. `suites`: of each of these at least one has to run.
    fn tests(&mut self, name: &str, suites: &[&str], selection: &[String], daemons: bool) -> Result<()> {
        let mut command = cargo::linting();
        if self.nextest {
            command.args([
                "nextest",
                "run",
                "--cargo-profile",
                "ci",
                "--workspace",
                "--locked",
                "--no-fail-fast",
                // Each test's time is read from its line.
                "--status-level",
                "pass",
            ]);
            command.args(["--test-threads", &suites::tests_at_once(daemons).to_string()]);
            command.args(cargo::FEATURES).args(selection);
        } else {
            command
                .args(["test", "--profile", "ci", "--workspace", "--locked", "--no-fail-fast"])
                .args(cargo::FEATURES)
                .args(selection);
            if daemons {
                command.args(["--", "--test-threads=1"]);
            }
        }
        command.env("TIDEMARK_BIN_DIR", self.workspace.bin_dir()).env("TIDEMARK_REQUIRED", "1");
        if name == UNIT {
            command.env("LD_LIBRARY_PATH", prepare::nvrtc_folder(&self.workspace)?);
        }
        self.scratch.lend(&mut command);
        if self.options.long {
            command.env("TIDEMARK_LONG", "1").env("PROPTEST_CASES", "4096");
        }
        say(&format!("\n== {name}"));
        let ran = watch_some(command.current_dir(&self.workspace.root), |line| !test_times::is_pass(line))?;
        self.summary.tests.read(&ran.output);
        let count = count::tests(&ran.output);
        let silent = suites.iter().find(|suite| self.nextest && !test_times::names(&ran.output, suite));
        let note = match silent {
            Some(suite) => format!("no test of {suite} ran"),
            None if count.passed + count.failed == 0 => "no test ran".to_owned(),
            None => String::new(),
        };
        self.row(name, honest(count, ran.success && silent.is_none()), ran.spent, &note);
        Ok(())
    }

    fn bench(&mut self) -> Result<()> {
        say(&format!("\n== {BENCH}"));
        let stopwatch = Stopwatch::start();
        let executable = match bench::build(&self.workspace, true) {
            Ok(executable) => executable,
            Err(error) => {
                self.row(BENCH, single(false), stopwatch.read(), &format!("{error:#}"));
                return Ok(());
            }
        };
        let count = bench::smoke(&executable, bench::stages(&self.workspace.root)?, &self.scratch)?;
        self.row(BENCH, honest(count, true), stopwatch.read(), "");
        Ok(())
    }

    fn watch(&self, name: &str, command: &mut Command) -> Result<Ran> {
        say(&format!("\n== {name}"));
        watch(command.current_dir(&self.workspace.root))
    }

    fn row(&mut self, name: &str, count: Count, spent: Spent, note: &str) {
        self.summary.push(Row { name: name.into(), outcome: Outcome::Ran(count), spent, note: note.into() });
    }

    fn left_out(&mut self, name: &str, why: String) {
        say(&format!("\n== {name}\nleft out: {why}"));
        let outcome = Outcome::LeftOut(why);
        self.summary.push(Row { name: name.into(), outcome, spent: Spent::default(), note: String::new() });
    }
}

fn list() {
    for asked in suites::asked() {
        let lacking = SUITES.iter().find(|suite| suite.name == asked.name).and_then(Suite::lacking);
        let left_out = lacking.map(|why| format!("  (left out here: {why})")).unwrap_or_default();
        say(&format!("{:12} {}{left_out}", asked.name, asked.question));
    }
}

/// A check that either holds or not counts as one test.
fn single(good: bool) -> Count {
    Count { passed: u64::from(good), failed: u64::from(!good), ignored: 0 }
}

/// A program that failed without naming a failed test, or that ran none, failed once.
fn honest(count: Count, success: bool) -> Count {
    let silent_failure = count.failed == 0 && (!success || count.passed == 0);
    Count { failed: count.failed + u64::from(silent_failure), ..count }
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_no_test_names_is_still_one() {
        let passed = Count { passed: 3, failed: 0, ignored: 0 };
        assert_eq!(honest(passed, true).failed, 0);
        assert_eq!(honest(passed, false).failed, 1);
        assert_eq!(honest(Count::default(), true).failed, 1);
        assert_eq!(honest(Count { failed: 2, ..passed }, false).failed, 2);
    }

    #[test]
    fn a_misspelt_suite_is_refused() {
        let options = TestOptions { only: vec!["frameworsk".into()], ..Default::default() };
        assert!(test(&options).is_err());
    }
}
