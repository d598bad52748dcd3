//! Requests of this process to the kernel for itself.
//!
//! Owns: its umask, that it is killed late for memory, that it leaves no core. Does not own: descriptors (`descriptors`).

use rustix::fs::Mode;
use rustix::process::{DumpableBehavior, set_dumpable_behavior, umask};

/// Rights that other users never get to a file that this process makes, whatever umask it was started with.
const OTHERS_WRITE: Mode = Mode::WGRP.union(Mode::WOTH);

/// Score against the kernel's killer. To kill this process frees next to nothing: Tier-1 is not its own memory, and every job on
/// the node waits until the next daemon serves. Not -1000: in a cgroup with nothing else to kill, the kernel must find a
/// process.
const OOM_SCORE_ADJ: &str = "-900";
const OOM_FILE: &str = "/proc/self/oom_score_adj";

/// Asks for all of it, as far as this process may; once, before it makes any file. Inherited by the daemon that a keeper starts,
/// but for the cores.
pub(crate) fn guard() {
    let was = umask(OTHERS_WRITE);
    umask(was | OTHERS_WRITE);
    // An administrator's own number stays. Before the next call, which closes the file to who is not root.
    let is_unset = std::fs::read_to_string(OOM_FILE).is_ok_and(|found| found.trim() == "0");
    if is_unset && let Err(error) = std::fs::write(OOM_FILE, OOM_SCORE_ADJ) {
        tracing::debug!(%error, "this process is killed for memory as any other");
    }
    // Keys of Tier-3 and of the cluster are in its memory, and a core may be read by others.
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "a core of this process may hold keys");
    }
}
