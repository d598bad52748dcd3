//! How long does a closed file take to be committed in a local Tier-3?
//!
//! Owns: close to the end of `ckptctl flush --wait`, against cp and fsync to the same disk; the
//! daemon's own memory meanwhile. Does not own: the write before it, or S3.

use anyhow::{Context, ensure};
use std::fs::{self, File};
use std::time::Instant;
use tidemark_benches::{Bench, Footprint, Mount, files};

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "upload starts its own daemon: leave --path out");
    let mount = Mount::start(&bench.options, None)?;
    let (_, tier3) = mount.folders().context("a daemon that was started here has folders")?;
    let (source, copy) =
        (bench.options.baseline.join("tidemark-bench-upload"), tier3.with_file_name("plain-copy"));
    let size_bytes = bench.options.size_bytes;
    files::write_new(&source, size_bytes)?;
    let ours = mount.path().join("bench-upload");
    let mut footprint = Footprint::default();
    let pid = mount.serving_pid()?;
    let medians = bench.alternate(
        || footprint.during(pid, || mount.drain_rate(&ours, size_bytes)),
        || {
            files::remove(&copy)?;
            let started = Instant::now();
            fs::copy(&source, &copy).context("copy")?;
            File::open(&copy)?.sync_all().context("fsync of the copy")?;
            Ok(size_bytes as f64 / 1e9 / started.elapsed().as_secs_f64())
        },
    )?;
    files::remove(&source)?;
    mount.close()?;
    bench.result("upload_local", "GB/s", "cp and fsync to the same disk", medians)?;
    bench.figure("upload_local_anonymous_peak", "MiB", footprint.peak_mib())?;
    bench.figure("upload_local_daemon_cpu", "s/GB", footprint.cpu_s_per_gb(size_bytes))
}
