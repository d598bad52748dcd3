//! How long does a closed file take to be committed in an S3 bucket?
//!
//! Owns: close to the end of `ckptctl flush --wait`, against a bare client that sends the same bytes from memory with as many
//! parts in flight, over loopback HTTP to the same server. Does not own: a network; server and clients share this machine.

use anyhow::ensure;
use bytes::Bytes;
use std::time::Instant;
use tidemark_benches::{Bench, Footprint, Mount, S3};

/// The daemon's own defaults, set here for both.
const PART_BYTES: usize = 8 << 20;
const PARTS_IN_FLIGHT: usize = 8;

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "upload_s3 starts its own daemon: leave --path out");
    let server = S3::start()?;
    let config =
        format!("[tier3]\npaced = false\npart_bytes = {PART_BYTES}\nparts_in_flight = {PARTS_IN_FLIGHT}\n");
    let mount = Mount::start_over(&bench.options, Some(&config), Some(server.bucket("tidemark")))?;
    let client = server.client()?;
    let size_bytes = bench.options.size_bytes;
    let bytes = Bytes::from(vec![7; usize::try_from(size_bytes)?]);
    let ours = mount.path().join("bench-upload");
    let mut footprint = Footprint::default();
    let pid = mount.serving_pid()?;
    let medians = bench.alternate(
        || footprint.during(pid, || mount.drain_rate(&ours, size_bytes)),
        || {
            let started = Instant::now();
            client.upload("plain-copy", &bytes, PART_BYTES, PARTS_IN_FLIGHT)?;
            let taken = started.elapsed();
            client.remove("plain-copy")?;
            Ok(size_bytes as f64 / 1e9 / taken.as_secs_f64())
        },
    )?;
    mount.close()?;
    let against = "object_store's client, the same bytes from memory, no checksums";
    bench.result("upload_s3", "GB/s", against, medians)?;
    bench.figure("upload_s3_anonymous_peak", "MiB", footprint.peak_mib())?;
    bench.figure("upload_s3_daemon_cpu", "s/GB", footprint.cpu_s_per_gb(size_bytes))
}
