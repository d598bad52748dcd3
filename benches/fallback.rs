//! How fast does the daemon write and read itself, on a kernel without passthrough?
//!
//! Owns: the mount's fallback mode against a plain direct-I/O FUSE. Does not own: that baseline
//! (`harness/direct_fuse`).

use anyhow::ensure;
use tidemark_benches::direct_fuse::DirectFuse;
use tidemark_benches::{Bench, Mount, files};

const AGAINST: &str = "a plain FUSE file system over memory, with direct I/O";

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "fallback starts its own daemon: leave --path out");
    let mount = Mount::start(&bench.options, Some("[mount]\nmode = \"fallback\"\n"))?;
    let folder = tempfile::tempdir()?;
    let plain = DirectFuse::mount(folder.path())?;
    let (ours, theirs) = (mount.path().join("bench-fallback"), folder.path().join("file"));
    let size_bytes = bench.options.size_bytes;
    let written = bench.alternate(
        || Ok(files::write_new(&ours, size_bytes)? / 1e9),
        || Ok(files::write_new(&theirs, size_bytes)? / 1e9),
    )?;
    let read = bench.alternate(
        || Ok(files::read(&ours, size_bytes)? / 1e9),
        || Ok(files::read(&theirs, size_bytes)? / 1e9),
    )?;
    files::remove(&ours)?;
    files::remove(&theirs)?;
    plain.unmount()?;
    mount.close()?;
    bench.result("fallback_write", "GB/s", AGAINST, written)?;
    bench.result("fallback_read", "GB/s", AGAINST, read)
}
