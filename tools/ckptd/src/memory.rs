//! How much memory Tier-1 may have: the default, and the refusal of more than there is.
//!
//! Owns: reading MemAvailable and the limits of this process's memory cgroup and of those above it, in both versions. Does not
//! own: the budget itself (engine, tier1).

use anyhow::{Context, bail, ensure};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Below this a Tier-1 cannot hold one file being written beside one being drained.
const TIER1_MIN_BYTES: u64 = 64 << 20;

/// Memory that the daemon and its keeper need besides Tier-1, out of a cgroup's limit, which the kernel enforces by killing.
const OWN_BYTES: u64 = 64 << 20;

/// Directories from a cgroup up to its root; deeper ones are not made by people.
const LEVELS_MAX: usize = 64;

/// The budget from the setting, or half of what may be used.
///
/// Errors: a size that does not parse, that is below 64 MiB, or that is more than this machine or cgroup has.
pub(crate) fn tier1_bytes(setting: Option<&str>) -> anyhow::Result<u64> {
    let usable = usable()?;
    let Some(text) = setting else {
        ensure!(
            usable.bytes >= TIER1_MIN_BYTES,
            "only {} bytes are available for Tier-1 here ({}), and at least {TIER1_MIN_BYTES} are needed",
            usable.bytes,
            usable.because
        );
        return Ok((usable.bytes / 2).max(TIER1_MIN_BYTES));
    };
    let bytes = tidemark_protocol::size::parse(text).map_err(|error| anyhow::anyhow!("--tier1: {error}"))?;
    if bytes < TIER1_MIN_BYTES {
        bail!("--tier1 {text} is {bytes} bytes; at least {TIER1_MIN_BYTES} are needed");
    }
    if bytes > usable.bytes {
        bail!(
            "--tier1 {text} is {bytes} bytes, but only {} are available here ({}); ask for less",
            usable.bytes,
            usable.because
        );
    }
    Ok(bytes)
}

/// Bytes that Tier-1 may take, and the source of that bound.
#[derive(Debug, PartialEq, Eq)]
struct Usable {
    bytes: u64,
    because: String,
}

fn usable() -> anyhow::Result<Usable> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").context("/proc/meminfo cannot be read")?;
    let available = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().trim_end_matches("kB").trim().parse::<u64>().ok())
        .context("/proc/meminfo has no MemAvailable")?
        * 1024;
    let of_machine = Usable { bytes: available, because: "MemAvailable".to_owned() };
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let places =
        places(&read("/proc/self/cgroup"), &std::fs::read("/proc/self/mountinfo").unwrap_or_default());
    let of_cgroup = places.iter().filter_map(|place| place.usable(|path| std::fs::read_to_string(path).ok()));
    Ok(of_cgroup.chain([of_machine]).min_by_key(|usable| usable.bytes).expect("there is one"))
}

/// Where the memory limits of this process are: a directory of one cgroup hierarchy, and the root up to which others add theirs.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    root: PathBuf,
    own: PathBuf,
    names: &'static Names,
}

/// File and field names of a version of cgroups.
#[derive(Debug, PartialEq, Eq)]
struct Names {
    limit: &'static str,
    used: &'static str,
    /// A line of `memory.stat`: pages of files that are not in use, which give way.
    reclaimable: &'static str,
}

const V1: Names = Names {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    reclaimable: "total_inactive_file",
};
const V2: Names = Names { limit: "memory.max", used: "memory.current", reclaimable: "inactive_file" };

impl Place {
    /// The least that the cgroup and those above it leave. Where a limit is no number (`max`), or is beyond all memory as version 1
    /// has it for none, there is no bound.
    fn usable(&self, read: impl Fn(&Path) -> Option<String>) -> Option<Usable> {
        let levels = self.own.ancestors().take_while(|at| at.starts_with(&self.root)).take(LEVELS_MAX);
        let left = levels.filter_map(|at| {
            let number = |name: &str| read(&at.join(name))?.trim().parse::<u64>().ok();
            let limit = number(self.names.limit).filter(|limit| *limit < i64::MAX as u64 / 2)?;
            let reclaimable = read(&at.join("memory.stat")).and_then(|stat| {
                let line = stat.lines().find_map(|line| {
                    line.strip_prefix(self.names.reclaimable)?.strip_prefix(' ').map(str::to_owned)
                });
                line?.trim().parse::<u64>().ok()
            });
            let used = number(self.names.used).unwrap_or(0).saturating_sub(reclaimable.unwrap_or(0));
            let because =
                format!("{} of {} is {limit}, of which {used} are in use", self.names.limit, at.display());
            Some(Usable { bytes: limit.saturating_sub(used).saturating_sub(OWN_BYTES), because })
        });
        left.min_by_key(|usable| usable.bytes)
    }
}

/// Finds the memory cgroups of this process: `cgroup` is /proc/self/cgroup, `mounts` /proc/self/mountinfo.
fn places(cgroup: &str, mounts: &[u8]) -> Vec<Place> {
    let mut places = Vec::new();
    for line in cgroup.lines() {
        // cgroups(7): number, controllers (none in version 2), path from the root of the hierarchy.
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let names = match controllers {
            "" => &V2,
            some if some.split(',').any(|controller| controller == "memory") => &V1,
            _ => continue,
        };
        for (at, root) in mounts.split(|byte| *byte == b'\n').filter_map(|line| hierarchy(line, names)) {
            // In a container the path may lie above what is mounted: the limits that are seen are those of the mount itself.
            let below = Path::new(path).strip_prefix(&root).ok();
            let below = below.filter(|below| below.components().all(|part| part.as_os_str() != ".."));
            let below = below.unwrap_or_else(|| Path::new(""));
            places.push(Place { own: at.join(below), root: at, names });
        }
    }
    places
}

/// Where a line of mountinfo mounts the hierarchy that has the memory limits, and from which of its directories on.
fn hierarchy(line: &[u8], names: &Names) -> Option<(PathBuf, PathBuf)> {
    let mut fields = line.split(|byte| *byte == b' ');
    let root = fields.nth(3)?;
    let at = fields.next()?;
    let mut behind = fields.skip_while(|field| *field != b"-").skip(1);
    let kind = behind.next()?;
    let options = behind.nth(1).unwrap_or_default();
    let is_it = if *names == V2 {
        kind == b"cgroup2"
    } else {
        kind == b"cgroup" && options.split(|byte| *byte == b',').any(|option| option == b"memory")
    };
    let path = |bytes| PathBuf::from(OsStr::from_bytes(bytes));
    is_it.then(|| (path(at), path(root)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const MIB: u64 = 1 << 20;
    const MOUNTS: &[u8] = b"30 22 0:26 / /sys/fs/cgroup ro shared:8 - tmpfs tmpfs ro\n\
        31 30 0:27 / /sys/fs/cgroup/unified rw shared:9 - cgroup2 cgroup2 rw\n\
        33 30 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:11 - cgroup cgroup rw,cpu,cpuacct\n\
        35 30 0:31 / /sys/fs/cgroup/memory rw shared:13 - cgroup cgroup rw,memory\n";

    fn found(cgroup: &str, mounts: &[u8], files: &[(&str, &str)]) -> Option<u64> {
        let files: BTreeMap<_, _> = files.iter().map(|(path, text)| (PathBuf::from(path), *text)).collect();
        let read = |path: &Path| files.get(path).map(|text| (*text).to_owned());
        places(cgroup, mounts).iter().filter_map(|place| place.usable(read)).map(|usable| usable.bytes).min()
    }

    #[test]
    fn the_limit_of_version_1_and_of_any_cgroup_above_counts_in_a_mixed_machine() {
        let cgroup = "12:cpu,cpuacct:/jobs/a\n5:memory:/jobs/a\n0::/jobs/a\n";
        let memory = "/sys/fs/cgroup/memory";
        let own = format!("{memory}/jobs/a/memory.limit_in_bytes");
        let above = format!("{memory}/jobs/memory.limit_in_bytes");
        let (limit, none) = ((300 * MIB).to_string(), "9223372036854771712\n");
        assert_eq!(found(cgroup, MOUNTS, &[(&own, &limit)]), Some(236 * MIB));
        assert_eq!(found(cgroup, MOUNTS, &[(&own, none), (&above, &limit)]), Some(236 * MIB));
        assert_eq!(found(cgroup, MOUNTS, &[(&own, none), (&above, none)]), None);
        let used = (format!("{memory}/jobs/memory.usage_in_bytes"), (100 * MIB).to_string());
        let stat =
            (format!("{memory}/jobs/memory.stat"), format!("cache 7\ntotal_inactive_file {}\n", 40 * MIB));
        let files = [(above.as_str(), limit.as_str()), (&used.0, &used.1), (&stat.0, &stat.1)];
        assert_eq!(found(cgroup, MOUNTS, &files), Some(176 * MIB), "what others have there is not ours");
    }

    #[test]
    fn version_2_is_read_up_to_the_root_and_max_is_no_limit() {
        let mounts = b"31 30 0:27 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
        let (slice, own) =
            ("/sys/fs/cgroup/a.slice/memory.max", "/sys/fs/cgroup/a.slice/b.service/memory.max");
        let limit = (1024 * MIB).to_string();
        let cgroup = "0::/a.slice/b.service\n";
        assert_eq!(found(cgroup, mounts, &[(own, "max\n"), (slice, &limit)]), Some(960 * MIB));
        assert_eq!(found(cgroup, mounts, &[(own, "max\n")]), None);
        assert_eq!(found(cgroup, mounts, &[(own, "4096\n")]), Some(0), "less than the daemon itself needs");
    }

    #[test]
    fn in_a_container_the_mount_itself_has_the_limits() {
        let mounts = b"35 30 0:31 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
        let (limit, own) = ((128 * MIB).to_string(), "/sys/fs/cgroup/memory/memory.limit_in_bytes");
        for path in ["/docker/abc", "/", "/../elsewhere"] {
            assert_eq!(
                found(&format!("5:memory:{path}\n"), mounts, &[(own, &limit)]),
                Some(64 * MIB),
                "{path}"
            );
        }
    }

    #[test]
    fn odd_tables_hold_no_limit() {
        for (cgroup, mounts) in
            [("", MOUNTS), ("5", MOUNTS), (":::", MOUNTS), ("5:memory", b""), ("0::/a", b"1 2 3")]
                as [(&str, &[u8]); 5]
        {
            assert_eq!(found(cgroup, mounts, &[]), None, "{cgroup}");
        }
        assert!(
            tier1_bytes(None).is_ok_and(|bytes| bytes >= TIER1_MIN_BYTES),
            "and this machine has one or none"
        );
    }
}
