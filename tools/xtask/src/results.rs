//! `cargo xtask figures`: runs benches and keeps their figures in `benches/results` and `benches/RESULTS.md`.
//!
//! Owns: the files and the page. Does not own: the running of benches (`bench`), a figure's fields (`figure`).
//!
//! `benches/results/NAME.json` has the output of one bench's last good run, with the machine and the date. The page is made
//! from all of these files, so a run of some benches replaces only their tables.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::bench::{self, BenchOptions, Stage};
use crate::figure::{Figure, round, size};
use crate::machine;
use crate::scratch::Scratch;
use crate::shell::{capture, say};
use crate::workspace::Workspace;

/// Where, when and of what figures were taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Origin {
    machine: String,
    date: String,
    commit: String,
}

/// The record of a bench.
#[derive(Clone, Debug, Default, PartialEq)]
struct Taken {
    origin: Origin,
    /// Why the newest run gave no figures; those here are from the one before it, or there are none.
    failed: Option<String>,
    figures: Vec<Figure>,
}

/// Runs the named benches, or all, and writes their figures; true when each of them succeeded.
pub(crate) fn figures(options: &BenchOptions) -> Result<bool> {
    let smoke = options.smoke || std::env::var_os("TIDEMARK_BENCH_SMOKE").is_some_and(|value| value == "1");
    ensure!(!smoke && !options.list, "`cargo xtask figures` takes neither --smoke nor --list");
    let workspace = Workspace::read()?;
    let all = bench::stages(&workspace.root)?;
    let chosen = bench::chosen(all.clone(), &options.names)?;
    let origin = Origin::here(&workspace.root)?;
    let executable = bench::build(&workspace, false)?;
    let scratch = Scratch::with_room()?;
    let folder = workspace.root.join(bench::FOLDER);
    let mut good = true;
    for stage in chosen {
        let ran = bench::one(&executable, &stage.name, false, &options.passed_on, &scratch)?;
        let taken = match ran {
            Ok(figures) if figures.iter().any(|figure| figure.smoke) => {
                bail!("{} made a smoke run, whose figures mean nothing: leave --smoke out", stage.name)
            }
            Ok(figures) => Taken { origin: origin.clone(), failed: None, figures },
            Err(why) => {
                say(&why);
                good = false;
                let failed =
                    format!("{} at commit {} on {}: {why}", origin.date, origin.commit, origin.machine);
                Taken { failed: Some(failed), ..read(&folder, &stage.name)?.unwrap_or_default() }
            }
        };
        write(&file(&folder, &stage.name), &taken.text())?;
        // After each bench: a run of all of them takes hours, and may be ended in its midst.
        let mut tables = vec![];
        for stage in &all {
            tables.push((stage.clone(), read(&folder, &stage.name)?));
        }
        write(&folder.join("RESULTS.md"), &page(&origin, &tables))?;
    }
    say(&format!("the figures: {}", workspace.shown(&folder.join("RESULTS.md"))));
    Ok(good)
}

impl Origin {
    /// Describes this machine, today, and the commit that is checked out.
    fn here(root: &Path) -> Result<Self> {
        let git = |arguments: &[&str]| capture(Command::new("git").args(arguments).current_dir(root));
        // A source tree without its history can be measured, too.
        let commit = git(&["rev-parse", "--short", "HEAD"]).map_or_else(|_| "unknown".into(), trimmed);
        // The files that this command writes do not count as a change.
        let own = [":!benches/RESULTS.md", ":!benches/results"];
        let changed = git(&[&["status", "--porcelain", "--", "."][..], &own].concat());
        let changed = changed.is_ok_and(|lines| !lines.trim().is_empty());
        Ok(Self {
            machine: machine::describe(),
            date: trimmed(capture(Command::new("date").args(["-u", "+%F"]))?),
            commit: if changed { format!("{commit} with changes") } else { commit },
        })
    }
}

impl Taken {
    /// Reads what [`Taken::text`] made.
    fn parse(text: &str) -> Result<Self> {
        let json: Value = serde_json::from_str(text).context("it is no JSON")?;
        let text =
            |key: &str| json[key].as_str().map(str::to_owned).with_context(|| format!("it has no {key}"));
        let figures = json["figures"].as_array().context("it has no figures")?;
        let figures: Result<Vec<Figure>, String> = figures.iter().map(Figure::from_json).collect();
        Ok(Self {
            origin: Origin { machine: text("machine")?, date: text("date")?, commit: text("commit")? },
            failed: json["failed"].as_str().map(str::to_owned),
            figures: figures.map_err(|why| anyhow::anyhow!("one of its figures {why}"))?,
        })
    }

    /// Returns JSON with one figure a line, so that a change of one figure is a change of one line.
    fn text(&self) -> String {
        let head = [
            ("machine", json!(self.origin.machine)),
            ("date", json!(self.origin.date)),
            ("commit", json!(self.origin.commit)),
            ("failed", json!(self.failed)),
        ];
        let head: String = head.iter().map(|(key, value)| format!("  \"{key}\": {value},\n")).collect();
        let figures: Vec<String> =
            self.figures.iter().map(|figure| format!("\n    {}", figure.json())).collect();
        format!("{{\n{head}  \"figures\": [{}\n  ]\n}}\n", figures.join(","))
    }
}

/// Makes the page from what is kept of each bench, in the order of the benches.
fn page(latest: &Origin, tables: &[(Stage, Option<Taken>)]) -> String {
    let contents: String = tables.iter().map(|(stage, taken)| entry(stage, taken.is_some())).collect();
    let tables: Vec<String> = tables
        .iter()
        .filter_map(|(stage, taken)| taken.as_ref().map(|taken| section(stage, taken)))
        .collect();
    format!(
        "# Results\n\
         \n\
         Written by `cargo xtask figures` from `results/*.json`; edits here are lost.\n\
         Last run: {}, commit {}, {}. Each table names its own.\n\
         \n\
         The [method](README.md#method) is in README.md, and so is what each figure [counts](README.md#stages). \
         The ratio is Tidemark over baseline: for rates (GB/s, 1/s) more is better, for times and sizes less is.\n\
         \n\
         {contents}\n{}",
        latest.date,
        latest.commit,
        latest.machine,
        tables.join("\n")
    )
}

/// A line of the page's contents.
fn entry(stage: &Stage, taken: bool) -> String {
    let Stage { name, question } = stage;
    if taken {
        format!("- [{name}](#{name}): {question}\n")
    } else {
        format!("- {name} (not taken yet): {question}\n")
    }
}

/// Writes a question's section: its answer as a table, and where, when and of what the figures were taken.
fn section(stage: &Stage, taken: &Taken) -> String {
    let Taken { origin, failed, figures } = taken;
    let mut text = format!("## {}\n\n**{}**\n\n", stage.name, stage.question);
    if let Some(failed) = failed {
        let rest = if figures.is_empty() { "There are no figures." } else { "The figures below are older." };
        text.push_str(&format!("The newest run failed ({failed}). {rest}\n\n"));
    }
    let Some(first) = figures.first() else { return text };
    let sizes =
        if first.size_bytes > 0 { format!(", size {}", size(first.size_bytes)) } else { String::new() };
    text.push_str(&format!(
        "{}, commit {}, {}. Rounds {}{sizes}. [Raw samples](results/{}.json).\n\n",
        origin.date, origin.commit, origin.machine, first.rounds, stage.name
    ));
    text.push_str("| figure | unit | Tidemark | baseline | what the baseline is | ratio |\n");
    text.push_str("|---|---|---:|---:|---|---:|\n");
    for figure in figures {
        text.push_str(&row(figure));
    }
    text
}

fn row(figure: &Figure) -> String {
    let shown = |number: Option<f64>| number.map_or_else(|| "—".into(), round);
    // A bar would begin another cell.
    let against = figure.against.as_deref().unwrap_or("—").replace('|', "\\|");
    format!(
        "| {} | {} | {} | {} | {against} | {} |\n",
        figure.name,
        figure.unit,
        round(figure.value),
        shown(figure.baseline),
        shown(figure.ratio)
    )
}

fn file(folder: &Path, name: &str) -> PathBuf {
    folder.join("results").join(format!("{name}.json"))
}

/// Reads the record of a bench, or `None` when it was never run.
fn read(folder: &Path, name: &str) -> Result<Option<Taken>> {
    let path = file(folder, name);
    if !path.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    let taken = Taken::parse(&text).with_context(|| {
        format!("{} is not as `cargo xtask figures` writes it; restore or remove it", path.display())
    })?;
    Ok(Some(taken))
}

fn write(path: &Path, text: &str) -> Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    }
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

fn trimmed(text: String) -> String {
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(name: &str) -> Stage {
        Stage { name: name.into(), question: format!("How fast is a {name}?") }
    }

    fn taken(date: &str) -> Taken {
        let figure = Figure {
            question: "How fast is a write?".into(),
            name: "write".into(),
            unit: "GB/s".into(),
            value: 7.825,
            samples: vec![8.0, 7.65],
            baseline: Some(3.1),
            baseline_samples: vec![3.0, 3.2],
            against: Some("/dev/shm".into()),
            ratio: Some(2.524),
            rounds: 2,
            size_bytes: 4 << 30,
            smoke: false,
        };
        let alone = Figure {
            name: "peak".into(),
            unit: "MiB".into(),
            value: 29.0,
            baseline: None,
            against: None,
            ratio: None,
            ..figure.clone()
        };
        let origin = Origin { machine: "a Xeon, 2 cores".into(), date: date.into(), commit: "abc".into() };
        Taken { origin, failed: None, figures: vec![figure, alone] }
    }

    #[test]
    fn what_is_kept_reads_back_with_one_figure_a_line() {
        let mut kept = taken("2026-01-02");
        assert_eq!(Taken::parse(&kept.text()).unwrap(), kept);
        assert_eq!(kept.text().lines().filter(|line| line.contains("\"samples\"")).count(), 2);
        kept.failed = Some("it was \"late\"".into());
        kept.figures.clear();
        assert_eq!(Taken::parse(&kept.text()).unwrap(), kept);
        assert!(Taken::parse("{}").is_err());
    }

    #[test]
    fn a_figure_is_a_row_and_each_table_names_its_own_machine_and_day() {
        let text = section(&stage("write"), &taken("2026-01-02"));
        assert!(text.starts_with("## write\n\n**How fast is a write?**\n"));
        assert!(text.contains(
            "2026-01-02, commit abc, a Xeon, 2 cores. Rounds 2, size 4 GiB. [Raw samples](results/write.json)."
        ));
        assert!(text.contains("| write | GB/s | 7.83 | 3.10 | /dev/shm | 2.52 |\n"));
        assert!(text.ends_with("| peak | MiB | 29.0 | — | — | — |\n"));
    }

    #[test]
    fn a_bench_that_failed_keeps_its_table_and_says_so() {
        let failed = Some("2026-02-03 at commit def: bench write failed".to_owned());
        let text = section(&stage("write"), &Taken { failed: failed.clone(), ..taken("2026-01-02") });
        assert!(
            text.contains(
                "failed (2026-02-03 at commit def: bench write failed). The figures below are older."
            )
        );
        assert!(text.contains("2026-01-02") && text.contains("| write | GB/s"));
        let text = section(&stage("write"), &Taken { failed, ..Taken::default() });
        assert!(text.ends_with("There are no figures.\n\n"));
    }

    #[test]
    fn the_page_has_the_order_of_the_benches_and_names_those_never_run() {
        let tables = [(stage("write"), Some(taken("2026-01-02"))), (stage("read"), None)];
        let latest = Origin { machine: "an EPYC".into(), date: "2026-02-03".into(), commit: "def".into() };
        let text = page(&latest, &tables);
        assert!(text.contains("Last run: 2026-02-03, commit def, an EPYC."));
        assert!(text.contains(
            "- [write](#write): How fast is a write?\n- read (not taken yet): How fast is a read?\n\n## write\n"
        ));
        assert!(!text.contains("## read"));
    }
}
