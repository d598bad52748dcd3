//! Do unmodified frameworks save, die and resume? The tests use real torch on the CPU, two gloo ranks, and a real mount.
//!
//! The scripts beside this file know nothing of Tidemark: they take a path and print hashes. Owns: the moments at which
//! the daemon is stopped, and the comparison of saved and loaded states.

mod content;
mod gpt2;
mod killed;
mod packages;
mod replay;
mod small;
mod uncommitted;

use std::path::{Path, PathBuf};

use tidemark_tests::daemon::{Daemon, DaemonOptions};
use tidemark_tests::machine;
use tidemark_tests::python::Python;

/// Settle time, short, so that a test can wait for many times of it.
const SETTLE_S: f64 = 0.5;

/// Returns the environment that every test here needs; `None` when the test was left out.
fn environment() -> Option<Python> {
    if machine::can_mount() { Python::find() } else { None }
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("frameworks").join(name)
}

/// Starts a daemon in passthrough mode with a short settle time and a drain that does not pace itself.
fn daemon(tier1: &str) -> Daemon {
    daemon_with(tier1, config())
}

fn daemon_with(tier1: &str, config: String) -> Daemon {
    let options = DaemonOptions { tier1: tier1.into(), config: Some(config), ..DaemonOptions::default() };
    let daemon = Daemon::start(options);
    daemon.assert_passthrough();
    daemon
}

fn config() -> String {
    format!("[save]\nsettle_s = {SETTLE_S}\n[tier3]\npaced = false\n")
}

/// Returns a path below the mount as text.
fn below(daemon: &Daemon, path: &str) -> String {
    daemon.mount().join(path).to_str().expect("paths of tests are UTF-8").to_owned()
}

/// Makes everything durable, ends the daemon, and starts it again with nothing in memory.
fn restart_empty(daemon: &mut Daemon) {
    daemon.flush();
    daemon.stop();
    daemon.start_again();
    for checkpoint in daemon.checkpoints() {
        assert_eq!(checkpoint["copies"]["host"]["bytes"], 0, "memory is not empty: {checkpoint}");
    }
}
