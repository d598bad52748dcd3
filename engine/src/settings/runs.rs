//! Tables of single runs.
//!
//! Owns: that each key of such a table is a run's path. Does not own: what is set for a run (`settings`).
//!
//! A key is the text that `ckptctl status` shows: the run's path below the mount, `_` for the mount itself. A key that could be no run would never
//! apply, and what it was to keep would be deleted. So it is refused when the file is read.

use serde::de::{Deserialize, Deserializer, Error};
use std::collections::BTreeMap;
use tidemark_protocol::path::RunPath;

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
    let parsed = named.into_iter().map(|(name, value)| match name.parse::<RunPath>() {
        Ok(run) => Ok((run, value)),
        Err(problem) => Err(D::Error::custom(format!(
            "{table}.{name:?} names no run: {problem}; write the run's path below the mount as `ckptctl status` shows it, such as \
             team/run7, or _ for the mount itself"
        ))),
    });
    parsed.collect()
}
