//! How long does a small file take, and a close after a large write?
//!
//! Owns: both latencies, as percentiles, and the time that the machine takes for as many wake-ups. Does not own: throughput.

use anyhow::Context;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fs::{self, File};
use std::io::{Read, Write, pipe};
use std::path::Path;
use std::time::Instant;
use tidemark_benches::compare::{Compared, Sampled, percentile};
use tidemark_benches::{Bench, Mount, files};

/// A page: the size of a `latest` file or a `.metadata`.
const SMALL_BYTES: usize = 4096;
const SMALL_FILES: usize = 2000;
const SMALL_FILES_SMOKE: usize = 50;
/// Requests for each file: GETATTR of the directory (its attributes expire with each name that is made in it), LOOKUP, CREATE, GETXATTR
/// (the kernel's question for capabilities at the first write) and FLUSH. RELEASE comes after close.
const REQUESTS: f64 = 5.0;

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    let mount = Mount::open(&bench.options)?;
    let count = if bench.options.smoke { SMALL_FILES_SMOKE } else { SMALL_FILES };
    let ours = mount.path().join("bench-create");
    let theirs = bench.options.baseline.join("tidemark-bench-create");
    for (name, hundredths) in [("create_write_close_p50", 50), ("create_write_close_p99", 99)] {
        let medians = bench
            .alternate(|| small_us(&ours, count, hundredths), || small_us(&theirs, count, hundredths))?;
        bench.result(name, "us", &bench.baseline_folder(), medians.clone())?;
        if hundredths == 50 {
            // Each request wakes the daemon, and its answer wakes the caller.
            let waking: Vec<f64> =
                (0..bench.options.rounds).map(|_| there_and_back_us(count)).collect::<Result<_, _>>()?;
            let waking = Sampled::median(waking)?.times(REQUESTS);
            let against = format!("{REQUESTS} times a byte to a thread on another processor and back");
            let compared = Compared::new(medians.value, waking);
            bench.result("create_against_the_waking_in_its_requests", "us", &against, compared)?;
        }
    }
    let size_bytes = bench.options.size_bytes;
    let medians = bench.alternate(|| close_us(&ours, size_bytes), || close_us(&theirs, size_bytes))?;
    bench.result("close_after_large_write", "us", &bench.baseline_folder(), medians)?;
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

/// Measures a byte to a thread on another processor, and back, p50: each thread waits until the other is woken there.
fn there_and_back_us(count: usize) -> anyhow::Result<f64> {
    let ((mut asked, mut ask), (mut answered, mut answer)) = (pipe()?, pipe()?);
    let allowed = sched_getaffinity(None)?;
    let mut processors = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
    let (one, other) = (processors.next().context("a processor")?, processors.next());
    let asks = std::thread::spawn(move || -> anyhow::Result<Vec<f64>> {
        stay_on(one)?;
        let mut samples = Vec::with_capacity(count);
        for _ in 0..count {
            let started = Instant::now();
            ask.write_all(&[7])?;
            answered.read_exact(&mut [0])?;
            samples.push(started.elapsed().as_secs_f64() * 1e6);
        }
        Ok(samples)
    });
    let answers = std::thread::spawn(move || -> anyhow::Result<()> {
        stay_on(other.unwrap_or(one))?;
        let mut byte = [0];
        while asked.read(&mut byte)? == 1 {
            answer.write_all(&byte)?;
        }
        Ok(())
    });
    let mut samples = asks.join().expect("it does not panic")?;
    answers.join().expect("it does not panic")?;
    percentile(&mut samples, 50)
}

fn stay_on(processor: usize) -> anyhow::Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    Ok(sched_setaffinity(None, &set)?)
}

fn close_us(path: &Path, size_bytes: u64) -> anyhow::Result<f64> {
    files::remove(path)?;
    files::warm(size_bytes)?;
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
