//! Does the table say what is exposed, and does somebody record each row?

use super::*;
use std::fs;
use std::path::{Path, PathBuf};

/// Where a recorded metric may be: the engine's flows and those that wire them.
const RECORDING_FOLDERS: [&str; 3] = ["engine/src", "fuse/src", "tools/ckptd/src"];
/// A handle is always reached through something of this name.
const HOLDER: &str = "metrics.";

/// The fields that `source` records: what follows `metrics.`.
fn recorded_in(source: &str) -> impl Iterator<Item = &str> {
    source.match_indices(HOLDER).map(|(at, _)| {
        let rest = &source[at + HOLDER.len()..];
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
        &rest[..end]
    })
}

/// The rows that none of the sources records.
fn unrecorded(sources: &[String]) -> Vec<&'static str> {
    let recorded: std::collections::BTreeSet<&str> =
        sources.iter().flat_map(|text| recorded_in(text)).collect();
    TABLE.iter().map(|row| row.field).filter(|field| !recorded.contains(field)).collect()
}

fn sources_below(folder: &Path, sources: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path: PathBuf = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() {
            sources_below(&path, sources);
        } else if name.ends_with(".rs")
            && !name.ends_with("_test.rs")
            && !path.ends_with("engine/src/metrics.rs")
        {
            // White space goes, so that a call broken over lines is found.
            sources.push(fs::read_to_string(&path).unwrap().split_whitespace().collect());
        }
    }
}

#[test]
fn every_metric_of_the_table_is_recorded_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut sources = Vec::new();
    for folder in RECORDING_FOLDERS {
        sources_below(&root.join(folder), &mut sources);
    }
    let missing = unrecorded(&sources);
    assert!(
        missing.is_empty(),
        "nobody records {missing:?} (as `metrics.<field>`): record them or drop their rows"
    );
}

#[test]
fn a_row_without_a_recording_line_is_found() {
    let all: Vec<String> = TABLE.iter().map(|row| format!("self.metrics.{}.inc();", row.field)).collect();
    assert_eq!(unrecorded(&all), [""; 0]);
    assert_eq!(unrecorded(&all[1..]), [TABLE[0].field]);
    let longer = vec![all[1..].concat(), format!("metrics.{}_of_another", TABLE[0].field)];
    assert_eq!(unrecorded(&longer), [TABLE[0].field], "a name that only begins the same does not count");
}

#[test]
fn names_end_with_their_unit_and_are_said_once() {
    let metrics = Metrics::new();
    metrics.verify_mismatches.get_or_create(&[("copy", "host")]).inc();
    metrics.fuse_requests.get_or_create(&[("opcode", "create")]).inc();
    metrics.coordinator_calls.get_or_create(&[("call", "look")]).inc();
    metrics.catalog_calls.get_or_create(&[("call", "look")]).inc();
    metrics.problem.get_or_create(&[("code", "lost")]).set(1);
    let text = metrics.encode();
    for row in TABLE {
        let unit = if row.unit == "count" { String::new() } else { format!("_{}", row.unit) };
        let name = format!("tidemark_{}{unit}", row.name);
        assert!(!row.name.ends_with(row.unit), "{name} would say its unit twice");
        let declared = format!("# TYPE {name} {}\n", row.kind);
        assert_eq!(text.matches(&declared).count(), 1, "{declared}{text}");
        assert!(text.contains(&format!("# HELP {name} {}.\n", row.help)), "{name}");
    }
    assert!(text.ends_with("# EOF\n"));
}

#[test]
fn what_is_recorded_is_in_the_text() {
    let metrics = Metrics::new();
    metrics.seal_bytes.inc_by(7);
    metrics.seal_seconds.observe(0.5);
    metrics.tier1_used_bytes.set(9);
    metrics.tier1_warm_ratios.set(0.25);
    metrics.fuse_requests.get_or_create(&[("opcode", "create")]).inc();
    let text = metrics.encode();
    for line in [
        "tidemark_seal_bytes_total 7\n",
        "tidemark_seal_seconds_count 1\n",
        "tidemark_tier1_used_bytes 9\n",
        "tidemark_tier1_warm_ratios 0.25\n",
        "tidemark_fuse_requests_total{opcode=\"create\"} 1\n",
    ] {
        assert!(text.contains(line), "{line}{text}");
    }
}

#[test]
fn a_total_counted_elsewhere_only_raises_the_counter() {
    let counter = Counter::default();
    for (total, expected) in [(5, 5), (5, 5), (3, 5), (9, 9)] {
        raise_to(&counter, total);
        assert_eq!(counter.get(), expected);
    }
}
