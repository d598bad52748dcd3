//! Do all open files go on when the daemon is killed, replaced, or dies again and again?
//!
//! | file | owns |
//! |---|---|
//! | `workload` | threads that write, map, read, open, rename, make and remove, and report their current call |
//! | `killed` | many kills under that load; a nearly full tier; a writer in a small cgroup |
//! | `replaced` | upgrades, their rollback, a crash loop |
//! | `systemd` | systemd in the keeper's place |
//! | `alone` | the keeper killed alone, handles closed meanwhile, very many open files, flipped bytes, kills while resuming |
//!
//! Does not own: restarts with empty memory (suites crash and durability).

mod alone;
mod killed;
mod replaced;
mod systemd;
mod workload;

use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::machine;

/// Starts a daemon in passthrough mode, or returns `None` if this machine cannot have one.
fn start(tier1: &str) -> Option<Daemon> {
    start_with(tier1, &[])
}

fn start_with(tier1: &str, env: &[(&str, &str)]) -> Option<Daemon> {
    if !machine::can_mount() {
        return None;
    }
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    let config = Some("[save]\nsettle_s = 0.5\n[tier3]\npaced = false\n".to_owned());
    let daemon = Daemon::start(DaemonOptions { tier1: tier1.to_owned(), config, env, ..Default::default() });
    daemon.assert_passthrough();
    Some(daemon)
}

/// Returns bytes that depend only on the seed and their offset, in whatever pieces they are made.
fn pattern(seed: u64, offset: u64, len: usize) -> Vec<u8> {
    const WORD: u64 = 8;
    assert!(offset.is_multiple_of(WORD) && (len as u64).is_multiple_of(WORD));
    let words = offset / WORD..(offset + len as u64) / WORD;
    words
        .flat_map(|at| (at ^ seed.rotate_left(17)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect()
}
