//! Abilities of this machine, found out by looking, never by asking for its name.
//!
//! Owns: the list of needs. Does not own: what is installed for them (`prepare`).

use std::path::Path;
use std::process::Command;

use crate::shell;

/// Something that a suite needs and that cannot be installed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    /// A mount with passthrough, and a private tmpfs, are for root.
    Root,
    /// A kernel with FUSE.
    Fuse,
    /// The wheel of torch, and the guest's kernel, are for this processor and system.
    LinuxX86,
    /// A kernel whose processes may have different networks.
    NetworkNamespaces,
}

impl Need {
    /// Why this machine cannot, or `None` when it can.
    pub(crate) fn lacking(self) -> Option<String> {
        match self {
            Self::Root if !is_root() => {
                Some("not root: a private tmpfs and a mount with passthrough need it".into())
            }
            Self::Fuse if !Path::new("/dev/fuse").exists() => {
                Some("no /dev/fuse: the kernel has no FUSE".into())
            }
            Self::LinuxX86 if !cfg!(all(target_os = "linux", target_arch = "x86_64")) => {
                Some("what it installs is for Linux x86_64 only".into())
            }
            Self::NetworkNamespaces if !Path::new("/proc/self/ns/net").exists() => {
                Some("no /proc/self/ns/net: the kernel has one network for all".into())
            }
            _ => None,
        }
    }
}

/// True when the effective user is root, as the kernel tells it.
pub(crate) fn is_root() -> bool {
    std::fs::read_to_string("/proc/self/status").is_ok_and(|status| effective_uid(&status) == Some(0))
}

/// True when a component of the Rust toolchain is there. Toolchains are never downloaded by this command.
pub(crate) fn has_cargo_command(name: &str) -> bool {
    shell::works(Command::new("cargo").args([name, "--version"]))
}

/// How many threads can run at once.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// The processor, memory and kernel, for the head of a report.
pub(crate) fn describe() -> String {
    let cores = processors();
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let memory_kib = read("/proc/meminfo").split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    let processor = read("/proc/cpuinfo")
        .lines()
        .find_map(|line| Some(line.strip_prefix("model name")?.split_once(": ")?.1.to_owned()))
        .unwrap_or_else(|| "unknown processor".into());
    let kernel = read("/proc/sys/kernel/osrelease");
    format!("{processor}, {cores} cores, {} GiB, Linux {}", memory_kib.unwrap_or(0) >> 20, kernel.trim())
}

/// The second number of the `Uid:` line: real, effective, saved, file system.
fn effective_uid(status: &str) -> Option<u32> {
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_user_counts() {
        assert_eq!(effective_uid("Name:\tx\nUid:\t1000\t0\t0\t0\nGid:\t1\n"), Some(0));
        assert_eq!(effective_uid("Uid:\t0\t1000\t0\t0\n"), Some(1000));
        assert_eq!(effective_uid(""), None);
    }
}
