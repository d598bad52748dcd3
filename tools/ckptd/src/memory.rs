//! How much memory Tier-1 may have: the default, and the refusal of more than there is.
//!
//! Owns: reading MemAvailable and the cgroup's limit. Does not own: the budget itself (engine, tier1).

use anyhow::{Context, bail};

/// Below this a Tier-1 cannot hold one file being written beside one being drained.
const TIER1_MIN_BYTES: u64 = 64 << 20;

/// The budget from the setting, or half of what may be used.
///
/// Errors: a size that does not parse, that is below 64 MiB, or that is more than this machine or cgroup has.
pub(crate) fn tier1_bytes(setting: Option<&str>) -> anyhow::Result<u64> {
    let usable = usable_bytes()?;
    let Some(text) = setting else { return Ok((usable / 2).max(TIER1_MIN_BYTES)) };
    let bytes = tidemark_protocol::size::parse(text).map_err(|error| anyhow::anyhow!("--tier1: {error}"))?;
    if bytes < TIER1_MIN_BYTES {
        bail!("--tier1 {text} is {bytes} bytes; at least {TIER1_MIN_BYTES} are needed");
    }
    if bytes > usable {
        bail!("--tier1 {text} is {bytes} bytes, but only {usable} are available here; ask for less");
    }
    Ok(bytes)
}

fn usable_bytes() -> anyhow::Result<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo cannot be read")?;
    let available = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
        .context("/proc/meminfo has no MemAvailable")?
        * 1024;
    Ok(cgroup_limit_bytes().map_or(available, |limit| limit.min(available)))
}

/// `memory.max` of this process's cgroup (v2); `None` where there is none or it says `max`.
fn cgroup_limit_bytes() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?;
    std::fs::read_to_string(format!("/sys/fs/cgroup{path}/memory.max")).ok()?.trim().parse().ok()
}
