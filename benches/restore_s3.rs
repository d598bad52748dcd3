//! How fast does a checkpoint come back from an S3 bucket, after its node's memory was lost?
//!
//! Owns: the time from open to the end of the read; the baseline is a bare client that fetches the same object into /dev/shm with as many
//! ranges in flight and no checksums, and the read there; the daemon's own memory meanwhile. Does not own: a network (server and clients
//! share this machine), the restart's own time.

use anyhow::ensure;
use std::fs::File;
use std::time::Instant;
use tidemark_benches::{Bench, Footprint, Mount, S3, files};

/// The daemon's chunk, and the ranges that both have in flight.
const RANGE_BYTES: u64 = 8 << 20;
const RANGES_IN_FLIGHT: usize = 8;

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "restore_s3 starts its own daemon: leave --path out");
    let server = S3::start()?;
    let config = format!("[tier3]\npaced = false\nfetches_in_flight = {RANGES_IN_FLIGHT}\n");
    let mut mount = Mount::start_over(&bench.options, Some(&config), Some(server.bucket("tidemark")))?;
    let client = server.client()?;
    let size_bytes = bench.options.size_bytes;
    let (ours, theirs) =
        (mount.path().join("bench-restore"), bench.options.baseline.join("tidemark-bench-restore"));
    files::write_new(&ours, size_bytes)?;
    mount.flush()?;
    let key = client.key_of(size_bytes)?;
    let mut footprint = Footprint::default();
    let medians = bench.alternate(
        || {
            // A daemon that ends frees its Tier-1, so the next one has to fetch.
            mount.restart()?;
            let pid = mount.serving_pid()?;
            footprint.during(pid, || Ok(files::read(&ours, size_bytes)? / 1e9))
        },
        || {
            files::remove(&theirs)?;
            files::warm(size_bytes)?;
            let started = Instant::now();
            client.download(&key, &File::create_new(&theirs)?, size_bytes, RANGE_BYTES, RANGES_IN_FLIGHT)?;
            files::read(&theirs, size_bytes)?;
            Ok(size_bytes as f64 / 1e9 / started.elapsed().as_secs_f64())
        },
    )?;
    files::remove(&theirs)?;
    mount.close()?;
    let against =
        format!("object_store's client to {}, no checksums, and a read there", bench.baseline_folder());
    bench.result("restore_s3", "GB/s", &against, medians)?;
    bench.figure("restore_s3_anonymous_peak", "MiB", footprint.peak_mib())?;
    bench.figure("restore_s3_daemon_cpu", "s/GB", footprint.cpu_s_per_gb(size_bytes))
}
