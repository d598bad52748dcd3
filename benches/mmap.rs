//! How fast is a file mapped and touched, once per page, for the first time?
//!
//! Owns: open, mmap and first touch on the mount and on the baseline. Does not own: mappings that are written.

use tidemark_benches::{Bench, Mount, files};

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    let mount = Mount::open(&bench.options)?;
    let (ours, theirs) =
        (mount.path().join("bench-mmap"), bench.options.baseline.join("tidemark-bench-mmap"));
    files::write_new(&ours, bench.options.size_bytes)?;
    files::write_new(&theirs, bench.options.size_bytes)?;
    let medians = bench.alternate(|| Ok(files::map(&ours)? / 1e9), || Ok(files::map(&theirs)? / 1e9))?;
    files::remove(&ours)?;
    files::remove(&theirs)?;
    mount.close()?;
    bench.result("mmap_first_touch", "GB/s", &bench.baseline_folder(), medians)
}
