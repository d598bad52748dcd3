//! How fast is a sequential read of a file just written, in blocks of 1 MiB?
//!
//! Owns: open and read on the mount and on the baseline. Does not own: reads of files that are no longer in memory
//! (`restore`).

use tidemark_benches::{Bench, Mount, files};

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    let mount = Mount::open(&bench.options)?;
    let (ours, theirs) =
        (mount.path().join("bench-read"), bench.options.baseline.join("tidemark-bench-read"));
    let size_bytes = bench.options.size_bytes;
    files::write_new(&ours, size_bytes)?;
    files::write_new(&theirs, size_bytes)?;
    let medians = bench.alternate(
        || Ok(files::read(&ours, size_bytes)? / 1e9),
        || Ok(files::read(&theirs, size_bytes)? / 1e9),
    )?;
    files::remove(&ours)?;
    files::remove(&theirs)?;
    mount.close()?;
    bench.result("read", "GB/s", &bench.baseline_folder(), medians)
}
