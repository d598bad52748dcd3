//! How fast are eight files written at once, as the eight ranks of a machine do?
//!
//! Owns: their sum. Does not own: one file (`write`).

use anyhow::Context;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;
use tidemark_benches::{Bench, Mount, files};

/// Number of ranks of a usual machine with accelerators.
const FILES: u64 = 8;

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    let mount = Mount::open(&bench.options)?;
    let each_bytes = (bench.options.size_bytes / FILES).max(1);
    let (ours, theirs) = (named(mount.path()), named(&bench.options.baseline));
    let medians = bench.alternate(|| write_all(&ours, each_bytes), || write_all(&theirs, each_bytes))?;
    for path in ours.iter().chain(&theirs) {
        files::remove(path)?;
    }
    mount.close()?;
    bench.result("write_8_files", "GB/s", &bench.baseline_folder(), medians)
}

fn named(folder: &Path) -> Vec<PathBuf> {
    (0..FILES).map(|rank| folder.join(format!("tidemark-bench-rank-{rank}"))).collect()
}

fn write_all(paths: &[PathBuf], each_bytes: u64) -> anyhow::Result<f64> {
    for path in paths {
        files::remove(path)?;
    }
    files::warm(each_bytes * FILES)?;
    let started = Instant::now();
    thread::scope(|scope| {
        let writers: Vec<_> =
            paths.iter().map(|path| scope.spawn(move || files::write(path, each_bytes))).collect();
        writers.into_iter().try_for_each(|writer| writer.join().expect("writing does not panic").map(drop))
    })
    .context("write eight files")?;
    Ok((each_bytes * FILES) as f64 / 1e9 / started.elapsed().as_secs_f64())
}
