//! `cargo xtask bench` and `cargo xtask figures`: the benches, and their figures as a table.
//!
//! It owns the reading of `RESULT` lines. What is measured, and against what, belongs to each bench.

use std::process::Command;

use anyhow::{Result, bail};
use serde_json::Value;

use crate::machine;
use crate::shell::{say, watch};
use crate::workspace::Workspace;

/// The package whose bench targets are run.
const BENCHES: &str = "tidemark-benches";
/// Each figure is one line that begins with this word and goes on as a JSON object.
const RESULT: &str = "RESULT ";

/// One figure, as a bench printed it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Figure {
    name: String,
    value: f64,
    unit: String,
    baseline: String,
    ratio: Option<f64>,
}

/// Runs the named benches, or all; true when each of them succeeded.
pub(crate) fn run(only: &[&str], smoke: bool) -> Result<bool> {
    Ok(collect(only, smoke)?.is_some())
}

/// Runs all benches and prints their figures as a Markdown table; true when each of them succeeded.
pub(crate) fn figures() -> Result<bool> {
    let Some(figures) = collect(&[], false)? else { return Ok(false) };
    say(&table(&figures));
    Ok(true)
}

/// The benches of the workspace.
pub(crate) fn names(workspace: &Workspace) -> Vec<&str> {
    workspace.targets(BENCHES, "bench")
}

/// Runs one bench; its figures, or what was wrong with it.
///
/// Figures are taken with the profile that ships; a smoke run takes the one that the tests have built already.
pub(crate) fn one(name: &str, smoke: bool) -> Result<Result<Vec<Figure>, String>> {
    let mut command = Command::new("cargo");
    command.args(["bench", "--locked", "--workspace", "--bench", name]);
    if smoke {
        command.args(["--profile", "ci", "--", "--smoke"]);
    }
    let ran = watch(&mut command)?;
    if !ran.success {
        return Ok(Err(format!("bench {name} failed")));
    }
    let figures: Result<Vec<Figure>, String> =
        ran.output.lines().filter_map(|line| line.strip_prefix(RESULT)).map(parse).collect();
    Ok(figures.and_then(|found| {
        if found.is_empty() { Err(format!("bench {name} printed no {RESULT}line")) } else { Ok(found) }
    }))
}

fn collect(only: &[&str], smoke: bool) -> Result<Option<Vec<Figure>>> {
    let workspace = Workspace::read()?;
    let all = names(&workspace);
    if let Some(unknown) = only.iter().find(|name| !all.contains(name)) {
        bail!("no bench is called `{unknown}`; there are {}", all.join(", "));
    }
    let (mut figures, mut good) = (vec![], true);
    for name in all.into_iter().filter(|name| only.is_empty() || only.contains(name)) {
        match one(name, smoke)? {
            Ok(found) => figures.extend(found),
            Err(why) => {
                say(&why);
                good = false;
            }
        }
    }
    if figures.is_empty() {
        say("no figure was taken");
    }
    Ok((good && !figures.is_empty()).then_some(figures))
}

fn parse(text: &str) -> Result<Figure, String> {
    let wrong = |what: &str| format!("a {RESULT}line {what}: {text}");
    let json: Value = serde_json::from_str(text).map_err(|error| wrong(&format!("is no JSON ({error})")))?;
    Ok(Figure {
        name: json["name"].as_str().ok_or_else(|| wrong("has no name"))?.into(),
        value: json["value"].as_f64().ok_or_else(|| wrong("has no value"))?,
        unit: json["unit"].as_str().ok_or_else(|| wrong("has no unit"))?.into(),
        baseline: match &json["baseline"] {
            Value::Null => "—".into(),
            Value::String(words) => words.clone(),
            Value::Number(number) => number.as_f64().map_or_else(|| number.to_string(), round),
            other => other.to_string(),
        },
        ratio: json["ratio"].as_f64(),
    })
}

fn table(figures: &[Figure]) -> String {
    let mut text = format!(
        "\n{}\n\n| figure | value | unit | baseline | ratio |\n|---|---:|---|---:|---:|\n",
        machine::describe()
    );
    for figure in figures {
        let ratio = figure.ratio.map_or_else(|| "—".into(), |ratio| format!("{ratio:.2}×"));
        text.push_str(&format!(
            "| {} | {} | {} | {} | {ratio} |\n",
            figure.name,
            round(figure.value),
            figure.unit,
            figure.baseline
        ));
    }
    text
}

/// Three digits say all that a figure taken on one machine can say.
fn round(value: f64) -> String {
    let magnitude = value.abs();
    if magnitude >= 100.0 {
        format!("{value:.0}")
    } else if magnitude >= 10.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_becomes_a_row() {
        let figure =
            parse(r#"{"name":"write","value":7.825,"unit":"GB/s","baseline":3.1,"ratio":2.524}"#).unwrap();
        assert!(table(&[figure]).ends_with("| write | 7.83 | GB/s | 3.10 | 2.52× |\n"));
        let alone =
            parse(r#"{"name":"close","value":120,"unit":"us","baseline":null,"ratio":null}"#).unwrap();
        assert!(table(&[alone]).ends_with("| close | 120 | us | — | — |\n"));
    }

    #[test]
    fn a_figure_without_a_value_is_refused() {
        assert!(parse(r#"{"name":"write","unit":"GB/s"}"#).unwrap_err().contains("has no value"));
        assert!(parse("7 GB/s").is_err());
    }
}
