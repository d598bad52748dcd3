//! What does a save cost whose size nothing predicts?
//!
//! Owns: a name never seen before, and the same name saved 30 % larger and 30 % smaller than last time. Does
//! not own: the save that repeats its size (`write`).

use std::path::PathBuf;
use tidemark_benches::{Bench, Mount, files};

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    let mount = Mount::open(&bench.options)?;
    let size_bytes = bench.options.size_bytes;
    let theirs = bench.options.baseline.join("tidemark-bench-first-save");

    let mut round = 0_u32;
    let mut last: Option<PathBuf> = None;
    let first = bench.alternate(
        || {
            if let Some(last) = &last {
                files::remove(last)?;
            }
            round += 1;
            let path = last.insert(mount.path().join(format!("bench-first-{round}")));
            Ok(files::write_new(path, size_bytes)? / 1e9)
        },
        || Ok(files::write_new(&theirs, size_bytes)? / 1e9),
    )?;
    if let Some(last) = &last {
        files::remove(last)?;
    }
    bench.result("write_size_unknown", "GB/s", &bench.baseline_folder(), first)?;

    for (name, percent) in [("write_30_percent_larger", 130), ("write_30_percent_smaller", 70)] {
        // The save before has another size in each round, untimed, so that the prediction is always wrong.
        let before_bytes = size_bytes * 100 / percent;
        let ours = mount.path().join("bench-resave");
        let resave = |path: &PathBuf| {
            files::write_new(path, before_bytes)?;
            Ok(files::write_new(path, size_bytes)? / 1e9)
        };
        let medians = bench.alternate(|| resave(&ours), || resave(&theirs))?;
        files::remove(&ours)?;
        bench.result(name, "GB/s", &bench.baseline_folder(), medians)?;
    }
    files::remove(&theirs)?;
    mount.close()
}
