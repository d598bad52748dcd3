//! Times of a build's parts, read from the report that `cargo build --timings` writes.
//!
//! Owns: the reading of that report. Cargo does not promise its format, so unreadable parts are left out. Cargo
//! times a unit from its start to its end, so an executable's time holds its code and its linking.

use std::path::Path;
use std::time::{Duration, SystemTime};

use serde_json::Value;

/// Cargo's report, below the target folder.
const REPORT: &str = "cargo-timings/cargo-timing.html";
/// The units stand in the report as one JSON array, on lines of its own.
const BEGINS: &str = "const UNIT_DATA = ";
const ENDS: &str = ";\n";

/// Seconds of compiling by what was compiled. Units run side by side, so they sum to more than the wall clock shows.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct BuildTimes {
    dependencies: Part,
    libraries: Part,
    executables: Part,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Part {
    units: u64,
    seconds: f64,
}

impl BuildTimes {
    /// The report of the build that began at `began`; `None` when there is none that can be read.
    pub(crate) fn read(target_dir: &Path, began: SystemTime, member: impl Fn(&str) -> bool) -> Option<Self> {
        let report = target_dir.join(REPORT);
        let written = std::fs::metadata(&report).and_then(|metadata| metadata.modified()).ok()?;
        // A coarse clock may stamp a file a little before the time that a program reads.
        if written + Duration::from_secs(1) < began {
            return None;
        }
        Self::parse(&std::fs::read_to_string(&report).ok()?, member)
    }

    fn parse(report: &str, member: impl Fn(&str) -> bool) -> Option<Self> {
        let (_, rest) = report.split_once(BEGINS)?;
        let (array, _) = rest.split_once(ENDS)?;
        let units: Value = serde_json::from_str(array).ok()?;
        let mut times = Self::default();
        for unit in units.as_array()? {
            let part = if !member(unit["name"].as_str()?) {
                &mut times.dependencies
            } else if unit["target"].as_str()?.trim().is_empty() {
                &mut times.libraries
            } else {
                &mut times.executables
            };
            part.units += 1;
            part.seconds += unit["duration"].as_f64()?;
        }
        Some(times)
    }

    /// Returns the parts of the build, the number of their units, and their seconds.
    pub(crate) fn parts(&self) -> [(&'static str, u64, f64); 3] {
        [
            ("units of dependencies", self.dependencies),
            ("libraries of ours", self.libraries),
            ("executables of ours, with linking", self.executables),
        ]
        .map(|(what, part)| (what, part.units, part.seconds))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT_TEXT: &str = "<script>\nconst UNIT_DATA = [\n\
        {\"name\": \"syn\", \"target\": \"\", \"duration\": 1.5},\n\
        {\"name\": \"ours\", \"target\": \"\", \"duration\": 2.5},\n\
        {\"name\": \"ours\", \"target\": \" lib (test)\", \"duration\": 4.0},\n\
        {\"name\": \"ours\", \"target\": \" ckptd \\\"bin\\\"\", \"duration\": 0.5}\n];\nconst X = 1;\n";

    #[test]
    fn units_are_told_apart() {
        let times = BuildTimes::parse(REPORT_TEXT, |name| name == "ours").unwrap();
        let parts = times.parts().map(|(_, units, seconds)| (units, seconds));
        assert_eq!(parts, [(1, 1.5), (1, 2.5), (2, 4.5)]);
    }

    #[test]
    fn another_format_is_no_report() {
        for text in ["", "const UNIT_DATA = [", "const UNIT_DATA = [{}];\n", "const UNIT_DATA = 7;\n"] {
            assert_eq!(BuildTimes::parse(text, |_| true), None, "{text}");
        }
    }

    #[test]
    fn an_older_report_is_not_taken() {
        let folder = std::env::temp_dir().join(format!("xtask-build-times-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("cargo-timings")).unwrap();
        std::fs::write(folder.join(REPORT), REPORT_TEXT).unwrap();
        let now = SystemTime::now();
        assert!(BuildTimes::read(&folder, now, |_| true).is_some());
        assert!(BuildTimes::read(&folder, now + Duration::from_secs(60), |_| true).is_none());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
