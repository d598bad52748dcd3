//! How fast is a sequential write of a new file, in blocks of 1 MiB?
//!
//! Owns: create, write and close on the mount and on the baseline. Does not own: first saves and odd sizes
//! (`first_save`), several files (`parallel`).

use tidemark_benches::{Bench, Mount, files};

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    let mount = Mount::open(&bench.options)?;
    let (ours, theirs) =
        (mount.path().join("bench-write"), bench.options.baseline.join("tidemark-bench-write"));
    let size_bytes = bench.options.size_bytes;
    let medians = bench.alternate(
        || Ok(files::write_new(&ours, size_bytes)? / 1e9),
        || Ok(files::write_new(&theirs, size_bytes)? / 1e9),
    )?;
    files::remove(&ours)?;
    files::remove(&theirs)?;
    mount.close()?;
    bench.result("write", "GB/s", &bench.baseline_folder(), medians)
}
