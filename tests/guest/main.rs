//! Does FALLBACK keep its promises on a real kernel that has no passthrough?
//!
//! Owns: booting Debian's kernel (6.1) on an emulated processor, with the host's root read-only over 9p, and judging its
//! console's output. A daemon there chooses FALLBACK by itself, saves, commits and ends. The whole mount suite runs in
//! FALLBACK, by the same executable as on the host. Does not own: those tests.

mod image;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use tidemark_tests::{machine, process};

use crate::image::Kernel;

/// The first kernel with passthrough.
const PASSTHROUGH_SINCE: (u32, u32) = (6, 9);
/// Limit of the guest, which only ends one that hangs. Boot takes about 8 s, everything about 140 s alone on two cores, and more than 400 s if
/// other work has the processors.
const GUEST_LIMIT: Duration = Duration::from_secs(900);
/// Number of tests in the mount suite when this was written. Fewer would mean that some were lost.
const TESTS_LEAST: usize = 51;
/// Most tests that may be left out: four of promises that only passthrough makes, and the ten of `mount/ends.rs`, which
/// need Python, which the guest lacks. The four of `mount/closing.rs`, in sh, check the same promises in FALLBACK.
const LEFT_OUT_MOST: usize = 14;
/// Memory of the guest. The tests' budgets of 512 MiB follow each other, beside 100 MB of programs in memory.
const GUEST_MEMORY: &str = "2G";

#[test]
fn fallback_on_a_kernel_without_passthrough() {
    if !machine::can_mount() {
        return;
    }
    let Some(kernel) = Kernel::find() else { return };
    let suite = mount_suite();
    let tests = count_tests(&suite);
    assert!(tests >= TESTS_LEAST, "{} lists {tests} tests", suite.display());
    let directory = tempfile::tempdir().expect("a temporary directory");
    let initramfs = kernel.initramfs(
        directory.path(),
        &[
            ("ckptd", &machine::binary("ckptd")),
            ("ckptctl", &machine::binary("ckptctl")),
            ("mount-suite", &suite),
        ],
    );
    let console = boot(&kernel, &initramfs);
    let version = console.word_after("guest: kernel ");
    assert!(numbers(version) < PASSTHROUGH_SINCE, "the guest runs {version}, which has passthrough");
    let ready = console.word_after("ready: ");
    assert!(ready.split(' ').any(|word| word == "mode=fallback"), "{ready}");
    for said in ["guest: read back what was saved", "guest: committed", "guest: the daemon ended clean"] {
        assert!(console.0.lines().any(|line| line == said), "no `{said}` in:\n{}", console.0);
    }
    let result = console.word_after("test result: ok. ");
    let passed = format!("{tests} passed; 0 failed; 0 ignored");
    assert!(result.starts_with(&passed), "the guest said `{result}`, not `{passed}`:\n{}", console.0);
    let left_out = console.0.matches("left out:").count();
    assert!(left_out <= LEFT_OUT_MOST, "{left_out} tests were left out in the guest:\n{}", console.0);
    let ran = tests - left_out;
    println!(
        "guest: Linux {version}, mode fallback, {ran} tests of the mount suite passed, {left_out} left out"
    );
}

/// Output of the guest, without carriage returns.
struct Console(String);

impl Console {
    /// Returns the rest of the only line that begins with `beginning`.
    fn word_after(&self, beginning: &str) -> &str {
        let mut lines = self.0.lines().filter_map(|line| line.strip_prefix(beginning));
        let rest = lines.next().unwrap_or_else(|| panic!("the guest did not say `{beginning}`:\n{}", self.0));
        assert!(lines.next().is_none(), "the guest said `{beginning}` twice:\n{}", self.0);
        rest
    }
}

fn boot(kernel: &Kernel, initramfs: &Path) -> Console {
    let mut qemu = Command::new("qemu-system-x86_64");
    qemu.args(["-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", GUEST_MEMORY]);
    qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"]);
    qemu.arg("-kernel").arg(&kernel.image).arg("-initrd").arg(initramfs);
    // A panic ends the guest, and so the test, at once.
    qemu.args(["-append", "console=ttyS0 quiet panic=-1"]);
    let host = "local,path=/,mount_tag=host0,security_model=passthrough,readonly=on,multidevs=remap";
    qemu.args(["-virtfs", host]);
    let output = process::run(&mut qemu, GUEST_LIMIT);
    let said = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    assert!(
        output.status.success(),
        "qemu: {}\n{said}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Console(said)
}

/// Returns the newest executable of the mount suite, since older builds leave theirs behind.
fn mount_suite() -> PathBuf {
    let own = env::current_exe().expect("the path of the test executable is readable");
    let directory = own.parent().expect("an executable lies in a directory");
    let named = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"mount-"))
            && path.extension().is_none()
    };
    let changed = |path: &PathBuf| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    fs::read_dir(directory)
        .expect("the directory of the test executables is readable")
        .map(|entry| entry.expect("a readable directory").path())
        .filter(named)
        .max_by_key(changed)
        .unwrap_or_else(|| panic!("the mount suite is not built in {}", directory.display()))
}

fn count_tests(suite: &Path) -> usize {
    let output = process::run(Command::new(suite).arg("--list"), Duration::from_secs(60));
    String::from_utf8_lossy(&output.stdout).lines().filter(|line| line.ends_with(": test")).count()
}

/// Returns the first two numbers of a kernel's release.
fn numbers(release: &str) -> (u32, u32) {
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[test]
fn releases_are_compared_by_number() {
    assert!(numbers("6.1.0-48-amd64") < PASSTHROUGH_SINCE && numbers("6.10.1") > PASSTHROUGH_SINCE);
}
