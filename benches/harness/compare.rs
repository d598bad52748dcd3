//! Compares two things in one run: alternating order, medians, raw samples, RESULT lines.
//!
//! Owns: the method, and the content of a RESULT line. Does not own: the content of a sample.

use crate::options::Options;
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use std::fs;
use std::io::{self, Write};

/// The most samples of a RESULT line. A figure from more samples is a percentile of thousands of operations. A line
/// with them would be a hundred times as large as everything else, so it has none.
const SAMPLES_MAX: usize = 1000;

/// A run of a bench.
#[derive(Debug)]
pub struct Bench {
    pub options: Options,
    question: &'static str,
}

/// A number, and the samples from which it is made, in the order in which they were taken.
///
/// A number that was counted or computed has no samples.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sampled {
    pub number: f64,
    pub samples: Vec<f64>,
}

/// Results of two things that were measured in the same run.
#[derive(Clone, Debug, PartialEq)]
pub struct Compared {
    pub value: Sampled,
    pub baseline: Sampled,
}

impl From<f64> for Sampled {
    fn from(number: f64) -> Self {
        Self { number, samples: Vec::new() }
    }
}

impl Sampled {
    /// Takes the middle of `samples`, or the mean of the middle two.
    ///
    /// # Errors
    /// No sample.
    pub fn median(samples: Vec<f64>) -> anyhow::Result<Self> {
        Ok(Self { number: median(&samples)?, samples })
    }

    /// Takes the [`percentile`] of `samples`.
    ///
    /// # Errors
    /// No sample, or more than 100 hundredths.
    pub fn percentile(samples: Vec<f64>, hundredths: usize) -> anyhow::Result<Self> {
        Ok(Self { number: percentile(&mut samples.clone(), hundredths)?, samples })
    }

    /// Multiplies the number and every sample, for another unit.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        let samples = self.samples.into_iter().map(|sample| sample * factor).collect();
        Self { number: self.number * factor, samples }
    }
}

impl Compared {
    /// Compares `value` with `baseline`.
    pub fn new(value: impl Into<Sampled>, baseline: impl Into<Sampled>) -> Self {
        Self { value: value.into(), baseline: baseline.into() }
    }
}

impl Bench {
    /// Prints the bench, its question, the machine and the sizes.
    ///
    /// # Errors
    /// /proc that cannot be read; a closed stdout.
    pub fn start(name: &str, question: &'static str, options: Options) -> anyhow::Result<Self> {
        let bench = Self { options, question };
        bench.say(&format!("bench: {name}: {question}"))?;
        bench.say(&format!("machine: {}", machine()?))?;
        bench.say(&format!(
            "method: {} rounds, {} bytes, order alternates, medians{}",
            bench.options.rounds,
            bench.options.size_bytes,
            if bench.options.smoke { "; SMOKE RUN: the figures mean nothing" } else { "" }
        ))?;
        Ok(bench)
    }

    /// Takes `rounds` samples of each, and swaps their order every round: on the machine where this was written, the
    /// run before a sample changed it by up to 3 times. Discards a first round of both.
    ///
    /// # Errors
    /// The first error of a sample.
    pub fn alternate(
        &self,
        mut value: impl FnMut() -> anyhow::Result<f64>,
        mut baseline: impl FnMut() -> anyhow::Result<f64>,
    ) -> anyhow::Result<Compared> {
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
        Ok(Compared { value: Sampled::median(values)?, baseline: Sampled::median(baselines)? })
    }

    /// Returns the folder of the baseline, as the name to which a mount is compared.
    #[must_use]
    pub fn baseline_folder(&self) -> String {
        self.options.baseline.display().to_string()
    }

    /// Prints a figure for people and its RESULT line. `against` names the baseline in plain words; the ratio is value
    /// over baseline.
    ///
    /// # Errors
    /// A baseline of zero, or a closed stdout.
    pub fn result(&self, name: &str, unit: &str, against: &str, compared: Compared) -> anyhow::Result<()> {
        let (value, baseline) = (compared.value.number, compared.baseline.number);
        ensure!(baseline > 0.0, "the baseline of {name} measured {baseline} {unit}: nothing to compare with");
        let ratio = value / baseline;
        self.say(&format!(
            "{name}: {value:.4} {unit}, baseline {baseline:.4} {unit} ({against}), ratio {ratio:.3}"
        ))?;
        let mut line = self.line(name, unit, compared.value);
        line["baseline"] = json!(baseline);
        line["baseline_samples"] = listed(compared.baseline.samples);
        line["against"] = json!(against);
        line["ratio"] = json!(ratio);
        self.say(&format!("RESULT {line}"))
    }

    /// Prints a figure without a baseline, and its RESULT line.
    ///
    /// # Errors
    /// A closed stdout.
    pub fn figure(&self, name: &str, unit: &str, value: impl Into<Sampled>) -> anyhow::Result<()> {
        let value = value.into();
        self.say(&format!("{name}: {:.4} {unit}", value.number))?;
        self.say(&format!("RESULT {}", self.line(name, unit, value)))
    }

    /// Prints one line to stdout.
    ///
    /// # Errors
    /// A closed stdout.
    pub fn say(&self, line: &str) -> anyhow::Result<()> {
        writeln!(io::stdout().lock(), "{line}").context("write to stdout")
    }

    /// Returns the fields of every RESULT line, without a baseline.
    fn line(&self, name: &str, unit: &str, value: Sampled) -> Value {
        json!({
            "question": self.question,
            "name": name,
            "unit": unit,
            "value": value.number,
            "samples": listed(value.samples),
            "baseline": null,
            "baseline_samples": null,
            "against": null,
            "ratio": null,
            "rounds": self.options.rounds,
            "size_bytes": self.options.size_bytes,
            "smoke": self.options.smoke,
        })
    }
}

/// Returns samples as in a RESULT line: null if there are none, or too many.
fn listed(samples: Vec<f64>) -> Value {
    if samples.is_empty() || samples.len() > SAMPLES_MAX { Value::Null } else { samples.into() }
}

fn median(samples: &[f64]) -> anyhow::Result<f64> {
    ensure!(!samples.is_empty(), "a median needs at least one sample");
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    Ok(if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 })
}

/// Returns the sample that `hundredths` of all samples do not exceed: nearest rank. Sorts them.
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

    fn bench() -> Bench {
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
        Bench { options, question: "How fast?" }
    }

    #[test]
    fn the_first_of_a_round_alternates() {
        let order = RefCell::new(String::new());
        let sample = |letter: char| {
            order.borrow_mut().push(letter);
            Ok(1.0)
        };
        bench().alternate(|| sample('v'), || sample('b')).unwrap();
        assert_eq!(order.into_inner(), "vbvbbvvbbv");
    }

    #[test]
    fn samples_are_kept_in_the_order_they_were_taken() {
        let (mut taken, mut baseline) = ([9.0, 4.0, 1.0, 3.0, 2.0].into_iter(), 0.0);
        let compared = bench()
            .alternate(
                || taken.next().context("one for each round and the first"),
                || {
                    baseline += 1.0;
                    Ok(baseline)
                },
            )
            .unwrap();
        assert_eq!(compared.value, Sampled { number: 2.5, samples: vec![4.0, 1.0, 3.0, 2.0] });
        assert_eq!(compared.baseline, Sampled { number: 3.5, samples: vec![2.0, 3.0, 4.0, 5.0] });
        assert_eq!(compared.value.times(2.0), Sampled { number: 5.0, samples: vec![8.0, 2.0, 6.0, 4.0] });
    }

    #[test]
    fn a_line_has_the_question_and_the_samples_that_are_few_enough() {
        let line = bench().line("write", "GB/s", Sampled::median(vec![2.0, 1.0]).unwrap());
        assert_eq!(line["question"], "How fast?");
        assert_eq!((&line["value"], &line["samples"]), (&json!(1.5), &json!([2.0, 1.0])));
        assert_eq!(bench().line("peak", "MiB", 7.0.into())["samples"], Value::Null);
        assert_eq!(listed(vec![1.0; SAMPLES_MAX + 1]), Value::Null);
    }

    #[test]
    fn medians_and_percentiles_are_samples_or_means_of_two() {
        assert_eq!(median(&[3.0, 1.0, 2.0]).unwrap(), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]).unwrap(), 2.5);
        assert!(median(&[]).is_err());
        let mut hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&mut hundred, 99).unwrap(), 99.0);
        assert_eq!(percentile(&mut [7.0], 50).unwrap(), 7.0);
    }
}
