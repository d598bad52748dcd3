//! How long does a small file take, and a close after a large write?
//!
//! Owns: both latencies, as percentiles. Does not own: throughput.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::Instant;
use tidemark_benches::compare::{Medians, percentile};
use tidemark_benches::{Bench, Mount, files};

/// One page: a `latest` file, a `.metadata`.
const SMALL_BYTES: usize = 4096;
const SMALL_FILES: usize = 2000;
const SMALL_FILES_SMOKE: usize = 50;

fn main() -> anyhow::Result<()> {
    let bench = Bench::start("create")?;
    let mount = Mount::open(&bench.options)?;
    let count = if bench.options.smoke { SMALL_FILES_SMOKE } else { SMALL_FILES };
    let ours = mount.path().join("bench-create");
    let theirs = bench.options.baseline.join("tidemark-bench-create");
    for (name, hundredths) in [("create_write_close_p50", 50), ("create_write_close_p99", 99)] {
        let medians: Medians = bench
            .alternate(|| small_us(&ours, count, hundredths), || small_us(&theirs, count, hundredths))?;
        bench.result(name, "us", medians)?;
    }
    let size_bytes = bench.options.size_bytes;
    let medians = bench.alternate(|| close_us(&ours, size_bytes), || close_us(&theirs, size_bytes))?;
    bench.result("close_after_large_write", "us", medians)?;
    mount.close()
}

fn small_us(folder: &Path, count: usize, hundredths: usize) -> anyhow::Result<f64> {
    fs::create_dir(folder)?;
    let bytes = [7; SMALL_BYTES];
    let mut samples = Vec::with_capacity(count);
    for index in 0..count {
        let path = folder.join(index.to_string());
        let started = Instant::now();
        let mut file = File::create(path)?;
        file.write_all(&bytes)?;
        drop(file);
        samples.push(started.elapsed().as_secs_f64() * 1e6);
    }
    fs::remove_dir_all(folder)?;
    percentile(&mut samples, hundredths)
}

fn close_us(path: &Path, size_bytes: u64) -> anyhow::Result<f64> {
    files::remove(path)?;
    files::warm(size_bytes);
    let block = files::buffer(files::BLOCK_BYTES);
    let mut file = File::create(path)?;
    let mut left = size_bytes;
    while left > 0 {
        let take = usize::try_from(left)?.min(block.len());
        file.write_all(&block[..take])?;
        left -= take as u64;
    }
    let started = Instant::now();
    drop(file);
    let took_us = started.elapsed().as_secs_f64() * 1e6;
    files::remove(path)?;
    Ok(took_us)
}
