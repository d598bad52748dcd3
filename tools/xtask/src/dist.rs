//! `cargo xtask dist`: the binaries that are shipped, with their line tables in files beside them.
//!
//! Owns: the list of binaries and the place of the line tables. Does not own: the optimisation (the profile `dist` in
//! Cargo.toml).

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::shell::{say, watch};
use crate::workspace::Workspace;

/// Binaries that are shipped.
const BINARIES: [&str; 2] = ["ckptd", "ckptctl"];
/// Folders below the target folder: the profile's, and the one for shipped files.
const PROFILE: &str = "dist";
const SHIPPED: &str = "shipped";

/// Builds the binaries and takes their line tables out; true when all went well. Needs `objcopy` (binutils).
///
/// Leaves `target/shipped/NAME` and `NAME.debug` beside it, which a debugger finds by its name in the first.
pub(crate) fn dist() -> Result<bool> {
    let workspace = Workspace::read()?;
    let mut build = Command::new("cargo");
    build.args(["build", "--profile", PROFILE, "--locked"]).current_dir(&workspace.root);
    build.args(BINARIES.iter().flat_map(|name| ["--bin", name]));
    if !watch(&mut build)?.success {
        return Ok(false);
    }
    let folder = workspace.target_dir.join(SHIPPED);
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    for name in BINARIES {
        let built = workspace.target_dir.join(PROFILE).join(name);
        let debug = format!("{name}.debug");
        objcopy(&folder, "--only-keep-debug", &built, &debug)?;
        objcopy(&folder, "--strip-debug", &built, name)?;
        let link = format!("--add-gnu-debuglink={debug}");
        objcopy(&folder, &link, Path::new(name), name)?;
        for shipped in [name, debug.as_str()] {
            let path = folder.join(shipped);
            let size = fs::metadata(&path).with_context(|| format!("looking at {}", path.display()))?.len();
            say(&format!("{:>8.1} MiB  {}", size as f64 / f64::from(1 << 20), workspace.shown(&path)));
        }
    }
    Ok(true)
}

fn objcopy(folder: &Path, what: &str, from: &Path, to: &str) -> Result<()> {
    if watch(Command::new("objcopy").arg(what).arg(from).arg(to).current_dir(folder))?.success {
        return Ok(());
    }
    bail!("objcopy, which comes with binutils, failed on {}; its output is above", from.display())
}
