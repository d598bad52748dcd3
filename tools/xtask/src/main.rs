//! Developer tasks: everything that is checked, in one command.
//!
//! Owns: the command line of `cargo xtask` and the list of its commands. Does not own: the meaning of a check,
//! which has a module of its own.

mod architecture;
mod bench;
mod build_times;
mod cargo;
mod count;
mod dist;
mod figure;
mod house;
mod licences;
mod machine;
mod prepare;
mod prose;
mod results;
mod run;
mod scratch;
mod shell;
mod soak;
mod spent;
mod suites;
mod summary;
mod test_times;
mod tidy;
mod workspace;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::run::TestOptions;

const HELP: &str = "\
Developer tasks of Tidemark.

  cargo xtask test [--long] [--only NAME]... [--list]
      Everything this machine can check, in the order a person would wait for it. Installs what a suite needs.
      --only NAME  this check or suite alone; may be given again
      --long       more cases and larger sizes
      --list       name the checks and suites, and what this machine cannot run
  cargo xtask tidy
      The checks that need no build: files, architecture, licences.
  cargo xtask architecture
      The house in figures: circles of imports, the largest types, names that mean two things, what each binary is built of.
  cargo xtask bench [--smoke] [--list] [NAME]... [-- OPTION...]
      The named benches, or all. What follows `--` goes to each of them: `-- --rounds 4`.
      --smoke  small sizes, to see that they run; the figures mean nothing
      --list   name the benches and their questions
  cargo xtask soak --minutes N [--seed S]
      The crash campaign for that long; a seed that it showed gives the same kills again.
  cargo xtask dist
      The binaries that are shipped, below target/shipped, with their line tables in files beside them.
  cargo xtask figures [NAME]... [-- OPTION...]
      The named benches, or all, and their figures as tables in benches/RESULTS.md. The tables of other benches stay.
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            shell::say(&format!("error: {error:#}"));
            ExitCode::from(2)
        }
    }
}

/// True when all went well; an error is a wrong use or a machine on which nothing could be tried.
fn dispatch(arguments: &[String]) -> Result<bool> {
    let (command, rest) = match arguments {
        [] => ("--help", arguments),
        [command, rest @ ..] => (command.as_str(), rest),
    };
    match command {
        "test" => run::test(&test_options(rest)?),
        "tidy" => {
            no_more(rest)?;
            run::tidy()
        }
        "architecture" => {
            no_more(rest)?;
            house::show()
        }
        "bench" => bench::run(&bench::options(rest)?),
        "soak" => soak::soak(&soak::options(rest)?),
        "dist" => {
            no_more(rest)?;
            dist::dist()
        }
        "figures" => results::figures(&bench::options(rest)?),
        "--help" | "-h" | "help" => {
            shell::say(HELP);
            Ok(true)
        }
        unknown => bail!("no command is called `{unknown}`; `cargo xtask --help` lists them"),
    }
}

fn test_options(arguments: &[String]) -> Result<TestOptions> {
    let mut options = TestOptions::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_str() {
            "--long" => options.long = true,
            "--list" => options.list = true,
            "--only" => {
                options.only.push(rest.next().context("--only needs a name; --list shows them")?.clone())
            }
            unknown => bail!("`cargo xtask test` knows no `{unknown}`; see `cargo xtask --help`"),
        }
    }
    Ok(options)
}

fn no_more(rest: &[String]) -> Result<()> {
    match rest.first() {
        None => Ok(()),
        Some(unknown) => bail!("`{unknown}` is one argument too many; see `cargo xtask --help`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn only_may_be_given_again() {
        let options = test_options(&words("--only crash --long --only s3")).unwrap();
        assert_eq!(options.only, ["crash", "s3"]);
        assert!(options.long && !options.list);
    }

    #[test]
    fn a_misspelt_flag_is_refused() {
        assert!(test_options(&words("--onyl crash")).is_err());
        assert!(test_options(&words("--only")).is_err());
        assert!(dispatch(&words("tset")).is_err());
    }
}
