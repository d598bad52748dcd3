//! How near does the seal hash come to what one core can read from memory?
//!
//! Owns: the hash against the read, both over a buffer far larger than the caches. Does not own: the hash.

use std::time::Instant;
use tidemark_benches::{Bench, files, memory};
use tidemark_kernels::Backend;

/// Bytes that a seal gives to each thread at a time.
const CHUNK_BYTES: usize = 8 << 20;
const AGAINST: &str = "one core reading the same bytes";

pub(crate) fn run(mut bench: Bench) -> anyhow::Result<()> {
    bench.options.size_bytes = bench.options.size_bytes.min(memory::BEYOND_CACHE_BYTES as u64);
    let bytes = files::buffer(usize::try_from(bench.options.size_bytes)?);
    let read = || Ok(memory::read_bytes_per_s(&bytes) / 1e9);
    for backend in Backend::all_here() {
        // A byte at a time is for tails; over the whole buffer it would only take time.
        if backend == Backend::Table {
            continue;
        }
        let hash = || {
            let started = Instant::now();
            std::hint::black_box(backend.extend(0, &bytes));
            Ok(memory::rate(bytes.len(), started) / 1e9)
        };
        let medians = bench.alternate(hash, read)?;
        let (value, baseline) = (medians.value.number, medians.baseline.number);
        bench.say(&format!("back end {backend:?}: {value:.2} GB/s of {baseline:.2}"))?;
        if backend == Backend::fastest() {
            bench.result("seal_hash_one_core", "GB/s", AGAINST, medians)?;
        }
    }
    let threads = std::thread::available_parallelism()?.get();
    let hash = || {
        let started = Instant::now();
        std::hint::black_box(tidemark_kernels::hash_chunks(&bytes, CHUNK_BYTES, threads, || true));
        Ok(memory::rate(bytes.len(), started) / 1e9)
    };
    let medians = bench.alternate(hash, read)?;
    bench.result("seal_hash_all_cores", "GB/s", AGAINST, medians)
}
