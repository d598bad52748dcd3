//! Abilities of this machine that a test needs, and what happens if one is missing.
//!
//! A plain `cargo test --workspace` passes on a machine with only a toolchain: a test that needs more prints so and
//! returns. `cargo xtask test` decides beforehand which suites run here and sets `TIDEMARK_REQUIRED`. A test that then
//! leaves itself out fails, so that no test is skipped unseen.

use std::path::{Path, PathBuf};
use std::{env, fs};

/// Variable set by `cargo xtask test`. With it, leaving a test out is a failure.
pub const REQUIRED_ENV: &str = "TIDEMARK_REQUIRED";
/// Variable with the directory of `ckptd` and `ckptctl`, if that is not the one above the test executable.
pub const BIN_DIR_ENV: &str = "TIDEMARK_BIN_DIR";
/// Variable set by `cargo xtask test --long`, for more cases and larger sizes.
pub const LONG_ENV: &str = "TIDEMARK_LONG";

/// Prints that a test does not run here, and why. Panics if `cargo xtask test` decided that it runs here.
#[expect(clippy::print_stderr, reason = "a test that leaves itself out must be visible in its output")]
pub fn left_out(why: &str) {
    assert!(
        env::var_os(REQUIRED_ENV).is_none(),
        "this test was left out although {REQUIRED_ENV} is set: {why}"
    );
    eprintln!("left out: {why}");
}

/// Returns the running kernel's version (major, minor), because kernels report different things.
pub fn kernel_release() -> (u32, u32) {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").expect("procfs");
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Whether this test may start a real `ckptd` with a real mount. If not, the test was left out and must return.
pub fn can_mount() -> bool {
    let lacking = if !rustix::process::geteuid().is_root() {
        "a real mount needs root"
    } else if !Path::new("/dev/fuse").exists() {
        "a real mount needs /dev/fuse"
    } else if !binary("ckptd").exists() || !binary("ckptctl").exists() {
        "ckptd and ckptctl are not built: run `cargo xtask test`, or build them with `--profile ci`"
    } else {
        return true;
    };
    left_out(lacking);
    false
}

/// Returns the path of a program that `cargo xtask test` builds for the suites. If it was not built, returns `None` and
/// leaves the test out.
pub fn tool(name: &str, suite: &str) -> Option<PathBuf> {
    let path = target_dir().join("tools").join(name).join("bin").join(name);
    if path.exists() {
        return Some(path);
    }
    left_out(&format!("{} is not built: run `cargo xtask test --only {suite}`", path.display()));
    None
}

/// Whether the tests run with `--long`.
pub fn long() -> bool {
    env::var_os(LONG_ENV).is_some()
}

/// Returns the path of a binary of this workspace: in `TIDEMARK_BIN_DIR`, else in this test executable's profile directory.
pub fn binary(name: &str) -> PathBuf {
    bin_dir().join(name)
}

/// Returns the target directory that this test executable was built in.
///
/// The path of a test executable is `<target>/<profile>/deps/<name>`. Since a target triple may stand before the
/// profile, the marker file that Cargo leaves at the top decides.
pub fn target_dir() -> PathBuf {
    let executable = env::current_exe().expect("the path of the test executable is readable");
    executable
        .ancestors()
        .find(|dir| dir.join("CACHEDIR.TAG").exists())
        .unwrap_or_else(|| panic!("{} is not in a Cargo target directory", executable.display()))
        .to_path_buf()
}

fn bin_dir() -> PathBuf {
    if let Some(dir) = env::var_os(BIN_DIR_ENV) {
        return PathBuf::from(dir);
    }
    let executable = env::current_exe().expect("the path of the test executable is readable");
    let dir = executable.parent().expect("an executable lies in a directory");
    if dir.ends_with("deps") {
        dir.parent().expect("deps lies in the profile's directory").to_path_buf()
    } else {
        dir.to_path_buf()
    }
}

/// Returns the last lines of a text file, for a failure message. If the file is missing, the text says so.
pub fn tail(path: &Path, lines: usize) -> String {
    let Ok(bytes) = fs::read(path) else { return format!("({} cannot be read)", path.display()) };
    let text = String::from_utf8_lossy(&bytes);
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_directory_holds_the_executable() {
        assert!(env::current_exe().unwrap().starts_with(target_dir()));
    }

    #[test]
    fn tail_keeps_the_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "a\nb\nc\n").unwrap();
        assert_eq!(tail(file.path(), 2), "b\nc");
    }
}
