//! Comparing two things in one run: alternating order, medians, RESULT lines.
//!
//! Owns: the method. Does not own: what a sample does.

use crate::options::Options;
use anyhow::{Context, ensure};
use serde_json::json;
use std::fs;
use std::io::{self, Write};

/// One stage's run.
#[derive(Debug)]
pub struct Bench {
    pub options: Options,
}

/// The medians of two things that were sampled in turns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Medians {
    pub value: f64,
    pub baseline: f64,
}

impl Bench {
    /// Reads the command line and prints the stage, the machine and the sizes.
    ///
    /// # Errors
    /// A wrong command line; /proc that cannot be read.
    pub fn start(stage: &str) -> anyhow::Result<Self> {
        let options = Options::from_process()?;
        let bench = Self { options };
        bench.say(&format!("stage: {stage}"))?;
        bench.say(&format!("machine: {}", machine()?))?;
        bench.say(&format!(
            "method: {} rounds, {} bytes, order alternates, medians{}",
            bench.options.rounds,
            bench.options.size_bytes,
            if bench.options.smoke { "; SMOKE RUN: the figures mean nothing" } else { "" }
        ))?;
        Ok(bench)
    }

    /// Takes `rounds` samples of each, the first of a round changing every time: what ran before a sample moved
    /// it by up to 3 times on the machine this was written on. A first round of both is thrown away.
    ///
    /// # Errors
    /// The first error of a sample.
    pub fn alternate(
        &self,
        mut value: impl FnMut() -> anyhow::Result<f64>,
        mut baseline: impl FnMut() -> anyhow::Result<f64>,
    ) -> anyhow::Result<Medians> {
        let (mut values, mut baselines) = (Vec::new(), Vec::new());
        value().context("first, unmeasured sample")?;
        baseline().context("first, unmeasured sample of the baseline")?;
        for round in 0..self.options.rounds {
            if round % 2 == 0 {
                values.push(value().context("sample")?);
                baselines.push(baseline().context("sample of the baseline")?);
            } else {
                baselines.push(baseline().context("sample of the baseline")?);
                values.push(value().context("sample")?);
            }
        }
        Ok(Medians { value: median(&mut values)?, baseline: median(&mut baselines)? })
    }

    /// Prints a figure for people and its RESULT line. `ratio` is value over baseline.
    ///
    /// # Errors
    /// A baseline of zero, or a closed stdout.
    pub fn result(&self, name: &str, unit: &str, medians: Medians) -> anyhow::Result<()> {
        let Medians { value, baseline } = medians;
        ensure!(baseline > 0.0, "the baseline of {name} measured {baseline} {unit}: nothing to compare with");
        let ratio = value / baseline;
        self.say(&format!("{name}: {value:.4} {unit}, baseline {baseline:.4} {unit}, ratio {ratio:.3}"))?;
        let line = json!({"name": name, "value": value, "unit": unit, "baseline": baseline, "ratio": ratio});
        self.say(&format!("RESULT {line}"))
    }

    /// Prints a figure that nothing is compared with, and its RESULT line.
    ///
    /// # Errors
    /// A closed stdout.
    pub fn figure(&self, name: &str, unit: &str, value: f64) -> anyhow::Result<()> {
        self.say(&format!("{name}: {value:.4} {unit}"))?;
        let line = json!({"name": name, "value": value, "unit": unit, "baseline": null, "ratio": null});
        self.say(&format!("RESULT {line}"))
    }

    /// One line to stdout.
    ///
    /// # Errors
    /// A closed stdout.
    pub fn say(&self, line: &str) -> anyhow::Result<()> {
        writeln!(io::stdout().lock(), "{line}").context("write to stdout")
    }
}

/// The middle of `samples`, or the mean of the middle two.
///
/// # Errors
/// No sample.
pub fn median(samples: &mut [f64]) -> anyhow::Result<f64> {
    ensure!(!samples.is_empty(), "a median needs at least one sample");
    samples.sort_by(f64::total_cmp);
    let middle = samples.len() / 2;
    Ok(if samples.len() % 2 == 1 { samples[middle] } else { (samples[middle - 1] + samples[middle]) / 2.0 })
}

/// The sample that `share` (0 to 1, in hundredths) of all samples do not exceed: nearest rank.
///
/// # Errors
/// No sample, or more than 100 hundredths.
pub fn percentile(samples: &mut [f64], hundredths: usize) -> anyhow::Result<f64> {
    ensure!(!samples.is_empty() && hundredths <= 100, "{hundredths} hundredths of {} samples", samples.len());
    samples.sort_by(f64::total_cmp);
    Ok(samples[(samples.len() * hundredths).div_ceil(100).max(1) - 1])
}

fn machine() -> anyhow::Result<String> {
    let field = |path: &str, key: &str| -> anyhow::Result<String> {
        let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
        let line = text.lines().find(|line| line.starts_with(key));
        let value = line.and_then(|line| line.split_once(':')).map_or("unknown", |(_, value)| value.trim());
        Ok(value.to_owned())
    };
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").context("read the kernel's release")?;
    let cores = std::thread::available_parallelism().context("count the cores")?;
    Ok(format!(
        "cpu={} cores={cores} kernel={} memory={} available={}",
        field("/proc/cpuinfo", "model name")?,
        kernel.trim(),
        field("/proc/meminfo", "MemTotal")?,
        field("/proc/meminfo", "MemAvailable")?
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::path::PathBuf;

    #[test]
    fn the_first_of_a_round_alternates() {
        let options = Options {
            path: None,
            baseline: PathBuf::new(),
            size_bytes: 1,
            size_given: true,
            tier1_bytes: None,
            rounds: 4,
            saves: None,
            smoke: true,
        };
        let order = RefCell::new(String::new());
        let sample = |letter: char| {
            order.borrow_mut().push(letter);
            Ok(1.0)
        };
        Bench { options }.alternate(|| sample('v'), || sample('b')).unwrap();
        assert_eq!(order.into_inner(), "vbvbbvvbbv");
    }

    #[test]
    fn medians_and_percentiles_are_samples_or_means_of_two() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]).unwrap(), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]).unwrap(), 2.5);
        assert!(median(&mut []).is_err());
        let mut hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&mut hundred, 99).unwrap(), 99.0);
        assert_eq!(percentile(&mut [7.0], 50).unwrap(), 7.0);
    }
}
