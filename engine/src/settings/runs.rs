//! Tables of single runs.
//!
//! Owns: that each key of such a table is a run's path. Does not own: the settings of a run (`settings`).
//!
//! A key is the run's path below the mount, also as `ckptctl status` shows it; `_`, or nothing, is the mount itself. A key that names no
//! run would never apply, and versions that it should keep would be deleted. So it is refused when the file is read.

use serde::de::{Deserialize, Deserializer, Error};
use std::collections::BTreeMap;
use tidemark_protocol::path::{PathProblem, RelPath, RunPath};

pub(super) fn of_retention<'de, D, T>(deserializer: D) -> Result<BTreeMap<RunPath, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    read(deserializer, "retention.runs")
}

pub(super) fn of_compression<'de, D, T>(deserializer: D) -> Result<BTreeMap<RunPath, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    read(deserializer, "compression.runs")
}

fn read<'de, D, T>(deserializer: D, table: &str) -> Result<BTreeMap<RunPath, T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    let named = BTreeMap::<String, T>::deserialize(deserializer)?;
    let mut tables = BTreeMap::new();
    for (name, value) in named {
        let run = run_of(&name).map_err(|problem| {
            D::Error::custom(format!(
                "{table}.{name:?} names no run: {problem}; write the run's path below the mount, such as team/run7, or _ for the mount itself"
            ))
        })?;
        if tables.insert(run, value).is_some() {
            return Err(D::Error::custom(format!(
                "{table}.{name:?} names a run that another key of {table} names"
            )));
        }
    }
    Ok(tables)
}

/// Parses a run as `ckptctl status` shows it, or as its plain path, which differs if a name has characters that keys escape.
fn run_of(name: &str) -> Result<RunPath, PathProblem> {
    match name.parse() {
        Ok(run) => Ok(run),
        Err(_) if name.is_empty() => Ok(RunPath::root()),
        Err(_) => RunPath::new(RelPath::new(name)?),
    }
}
