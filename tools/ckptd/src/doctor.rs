//! Abilities of this machine that Tidemark uses, tried: with the Tier-1 of a serving daemon, or without any daemon.
//!
//! Owns: the checks of the machine. Does not own: the checks of Tier-3 and of a node's standing (`api`), showing them (ckptctl).

use crate::{descriptors, memory};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use tidemark_fuse::Mode;
use tidemark_protocol::report::{Check, CheckVerdict, Doctor};
use tidemark_tier1::{MediumChoice, Tier1, Tier1Settings};

/// The least that Tier-1 can be made with: what is tried needs one small file.
const TRIAL_BYTES: u64 = 64 << 20;

/// The inode of the machine's first pid namespace (include/uapi/linux/nsfs.h, `PID_NS_INIT_INO`).
const FIRST_PID_NAMESPACE: u64 = 0xEFFF_FFFC;

/// A check that is good, or a weakness with its remedy.
pub(crate) fn check(name: &str, ok: bool, what: String, fix: Option<&str>) -> Check {
    let verdict = if ok { CheckVerdict::Ok } else { CheckVerdict::Warn };
    Check { name: name.to_owned(), verdict, what, fix: fix.filter(|_| !ok).map(ToOwned::to_owned) }
}

/// Returns the checks of the machine by a daemon with this Tier-1 and this mode.
pub(crate) fn of_machine(mode: Option<Mode>, reason: String, tier1: &Tier1) -> Vec<Check> {
    let mut checks = vec![check(
        "passthrough",
        mode == Some(Mode::Passthrough),
        reason,
        Some("needs Linux 6.9 or later and CAP_SYS_ADMIN; without it every byte passes the daemon"),
    )];
    let capabilities = tier1.capabilities();
    for (name, capability) in [
        ("private_tmpfs", &capabilities.private_tmpfs),
        ("huge_pages", &capabilities.huge),
        ("noswap", &capabilities.noswap),
        ("leases", &capabilities.leases),
        ("preallocation", &capabilities.preallocation),
    ] {
        let fix = Some("see `ckptctl doctor` as root");
        checks.push(check(name, capability.works, capability.reason.clone(), fix));
    }
    checks.push(pid_namespace(std::fs::metadata("/proc/self/ns/pid").ok().map(|link| link.ino())));
    let (enough, what) = descriptors::check();
    checks.push(check("descriptors", enough, what, Some(descriptors::FIX)));
    checks
}

/// Reports the processes that this process can see. In a separate namespace, only a later sign shows whether jobs run elsewhere: a daemon
/// that meets such a job has the problem `writers_unseen`.
fn pid_namespace(inode: Option<u64>) -> Check {
    let what = match inode {
        Some(FIRST_PID_NAMESPACE) => "the machine's own: every process is seen",
        Some(_) => {
            "one of its own: only jobs in it and below are seen; for others ckptd needs hostPID: true (Kubernetes) or --pid=host (Docker)"
        }
        None => "not known: /proc does not tell",
    };
    check("pid_namespace", true, what.to_owned(), None)
}

/// The same where no daemon runs, with a Tier-1 that is made for it and goes again. Nothing is mounted at a path.
pub(crate) fn without_daemon() -> Doctor {
    let fails = |name: &str, what: String, fix: &str| Check {
        name: name.to_owned(),
        verdict: CheckVerdict::Fail,
        what,
        fix: Some(fix.to_owned()),
    };
    let medium = MediumChoice::Auto;
    let mut checks = match Tier1::open(Tier1Settings { size_bytes: TRIAL_BYTES, ballast: false, medium }) {
        Ok(tier1) => trial(&tier1),
        Err(error) => {
            let error = format!("{:#}", anyhow::Error::from(error));
            vec![fails("tier1", error, "run ckptd as root, or give it memory in /dev/shm")]
        }
    };
    match memory::tier1_bytes(None) {
        Ok(bytes) => {
            let what = format!("--tier1 is {} by default", tidemark_protocol::size::Shown(bytes));
            checks.push(check("memory", true, what, None));
        }
        Err(error) => {
            checks.push(fails("memory", format!("{error:#}"), "raise the limit, or free memory"));
        }
    }
    Doctor { checks }
}

fn trial(tier1: &Arc<Tier1>) -> Vec<Check> {
    let (mode, reason) = tidemark_fuse::probe_mode(tier1);
    of_machine(Some(mode), reason, tier1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_namespace_is_the_machine_s_or_is_said_to_see_only_its_own() {
        let what = |inode| pid_namespace(inode).what;
        assert!(what(Some(FIRST_PID_NAMESPACE)).contains("every process"));
        assert!(what(Some(FIRST_PID_NAMESPACE - 1)).contains("hostPID: true"));
        assert!(what(None).contains("not known"));
    }

    #[test]
    fn a_machine_is_looked_at_without_a_daemon() {
        let doctor = without_daemon();
        let names: Vec<_> = doctor.checks.iter().map(|check| check.name.as_str()).collect();
        assert!(
            names.contains(&"memory") && (names.contains(&"passthrough") || names == ["tier1", "memory"])
        );
        for check in &doctor.checks {
            assert!(!check.what.is_empty(), "{check:?}");
            assert_eq!(check.fix.is_none(), check.verdict == CheckVerdict::Ok, "{check:?}");
        }
    }
}
