//! `cargo xtask soak`: the crash campaign for as long as the caller likes.
//!
//! Owns: the command's options and how the suite gets them. Does not own: kills and promises (the suite).

use anyhow::{Context, Result, bail};

use crate::cargo;
use crate::scratch::Scratch;
use crate::shell::{say, watch};
use crate::suites::SUITES;
use crate::workspace::Workspace;

/// The suite, and its test that takes a time and a seed.
const SUITE: &str = "campaign";
const TEST: &str = "every_promise_is_kept_whatever_is_killed";

/// How long, and which campaign.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SoakOptions {
    pub(crate) minutes: u64,
    /// Drawn and shown when it is not given.
    pub(crate) seed: Option<u64>,
}

/// Reads `--minutes N [--seed S]`.
pub(crate) fn options(arguments: &[String]) -> Result<SoakOptions> {
    let (mut minutes, mut seed) = (None, None);
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let place = match argument.as_str() {
            "--minutes" => &mut minutes,
            "--seed" => &mut seed,
            unknown => bail!("`cargo xtask soak` knows no `{unknown}`; see `cargo xtask --help`"),
        };
        let value = rest.next().with_context(|| format!("{argument} needs a number"))?;
        *place = Some(value.parse::<u64>().with_context(|| format!("{argument} {value}"))?);
    }
    Ok(SoakOptions { minutes: minutes.context("`cargo xtask soak` needs --minutes N")?, seed })
}

/// Runs it; true when every promise was kept.
pub(crate) fn soak(options: &SoakOptions) -> Result<bool> {
    let workspace = Workspace::read()?;
    if let Some(why) = SUITES.iter().find(|suite| suite.name == SUITE).and_then(|suite| suite.lacking()) {
        bail!("this machine cannot run it: {why}");
    }
    let build = ["build", "--profile", "ci", "--workspace", "--all-targets", "--locked"];
    if !watch(cargo::linting().args(build).args(cargo::FEATURES).current_dir(&workspace.root))?.success {
        return Ok(false);
    }
    let folder = workspace.root.join("target").join("campaign");
    std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let report = folder.join("report.json");
    // Not the figures of another campaign, when this one ends early.
    if report.exists() {
        std::fs::remove_file(&report).with_context(|| format!("removing {}", report.display()))?;
    }
    let mut command = cargo::linting();
    // Not nextest, which would end it as a test that hangs.
    command
        .args(["test", "--profile", "ci", "--workspace", "--locked"])
        .args(cargo::FEATURES)
        .args(["--test", SUITE, "--", TEST, "--nocapture"])
        .current_dir(&workspace.root)
        .env("TIDEMARK_BIN_DIR", workspace.bin_dir())
        .env("TIDEMARK_REQUIRED", "1")
        .env("TIDEMARK_CAMPAIGN_SECONDS", (options.minutes * 60).to_string())
        .env("TIDEMARK_CAMPAIGN_REPORT", &report);
    if let Some(seed) = options.seed {
        command.env("TIDEMARK_CAMPAIGN_SEED", seed.to_string());
    }
    let scratch = Scratch::with_room()?;
    scratch.lend(&mut command);
    let ran = watch(&mut command)?;
    if report.exists() {
        say(&format!("the figures: {}", report.display()));
    }
    Ok(ran.success)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<SoakOptions> {
        options(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn minutes_are_needed_and_a_seed_may_be_given() {
        assert_eq!(read("--minutes 5").unwrap(), SoakOptions { minutes: 5, seed: None });
        assert_eq!(read("--seed 7 --minutes 1").unwrap(), SoakOptions { minutes: 1, seed: Some(7) });
        for wrong in ["", "--seed 7", "--minutes", "--minutes many", "--minutes 1 --sede 7"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
