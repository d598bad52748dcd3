//! Cargo, as all that builds with the tests' profile calls it: each of our crates is compiled by clippy's driver, so that one build
//! compiles and lints. A separate check compiled every dependency a second time, which took a quarter of a run.
//!
//! Owns: the environment that these calls share. A call with another environment would build our crates again.

use std::process::Command;
use std::sync::LazyLock;

use crate::machine::has_cargo_command;

/// `cargo clippy -- -D warnings`, as it hands that to the driver.
const WARNINGS_ARE_ERRORS: &str = "-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__";

/// Features that are built and tested beside the default ones: device code compiles and is checked without a device.
pub(crate) const FEATURES: [&str; 2] = ["--features", "tidemark-kernels/cuda"];

/// Why nothing is linted; none where everything is.
pub(crate) fn lacks_lints() -> Option<&'static str> {
    static HAS_CLIPPY: LazyLock<bool> = LazyLock::new(|| has_cargo_command("clippy"));
    (!*HAS_CLIPPY).then_some("this toolchain has no clippy: `rustup component add clippy` brings it")
}

/// `cargo`, for the profile `ci`. Without clippy it builds and does not lint.
pub(crate) fn linting() -> Command {
    let mut cargo = Command::new("cargo");
    if lacks_lints().is_none() {
        cargo.env("RUSTC_WORKSPACE_WRAPPER", "clippy-driver").env("CLIPPY_ARGS", WARNINGS_ARE_ERRORS);
    }
    cargo
}
