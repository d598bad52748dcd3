//! Runs a Python script of `benches/python`.
//!
//! Owns: the choice of the interpreter, and reading the script's one JSON line. Does not own: the scripts.

use crate::daemon::target_folder;
use anyhow::{Context, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Runs `script` with `arguments`, and returns the last line of its stdout as the answer.
///
/// # Errors
/// No interpreter, an exit code other than 0, or a last line that is not JSON.
pub fn run(script: &str, arguments: &[String]) -> anyhow::Result<Value> {
    let interpreter = interpreter()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python").join(script);
    let output = Command::new(&interpreter)
        .arg(&script)
        .args(arguments)
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("start {}", interpreter.display()))?;
    ensure!(output.status.success(), "{} ended with {}", script.display(), output.status);
    let text = String::from_utf8(output.stdout).context("the script's output is not UTF-8")?;
    let last = text.lines().last().context("the script printed nothing")?;
    serde_json::from_str(last).with_context(|| format!("the script's last line is not JSON: {last:?}"))
}

/// Returns TIDEMARK_PYTHON, or the environment that the test suites make.
///
/// # Errors
/// Neither exists.
pub fn interpreter() -> anyhow::Result<PathBuf> {
    if let Some(path) = std::env::var_os("TIDEMARK_PYTHON") {
        return Ok(path.into());
    }
    let root = target_folder()?;
    let path = root.parent().unwrap_or(&root).join("tools/venv/bin/python");
    ensure!(path.exists(), "no Python at {}: set TIDEMARK_PYTHON to one that has torch", path.display());
    Ok(path)
}
