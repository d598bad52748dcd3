//! How fast does a checkpoint come back: after its trainer died, and after its node's memory was lost?
//!
//! Owns: both reads, the first against the same death over the baseline, the second against a copy out of Tier-3 with
//! plain tools. Does not own: how soon a death is noticed, or the restart's own time.

use anyhow::{Context, ensure};
use rustix::fs::{Advice, fadvise};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;
use tidemark_benches::{Bench, Footprint, Mount, files};

pub(crate) fn run(bench: Bench) -> anyhow::Result<()> {
    ensure!(bench.options.path.is_none(), "restore starts its own daemon: leave --path out");
    let mut mount = Mount::start(&bench.options, None)?;
    let size_bytes = bench.options.size_bytes;
    let (ours, theirs) =
        (mount.path().join("bench-restore"), bench.options.baseline.join("tidemark-bench-restore"));
    let medians = bench.alternate(|| after_death(&ours, size_bytes), || after_death(&theirs, size_bytes))?;
    files::remove(&theirs)?;
    let against = format!("{}, after the same death", bench.baseline_folder());
    bench.result("restore_after_process_death", "GB/s", &against, medians)?;
    mount.flush()?;
    let (_, tier3) = mount.folders().context("a daemon that was started here has folders")?;
    let object = object_of(&tier3, size_bytes)?.context("a flushed file has an object of its size")?;
    let mut footprint = Footprint::default();
    let medians = bench.alternate(
        || {
            // A daemon that ends frees its Tier-1, so the next one has to fetch.
            mount.restart()?;
            drop_cached(&object)?;
            let pid = mount.serving_pid()?;
            footprint.during(pid, || Ok(files::read(&ours, size_bytes)? / 1e9))
        },
        || {
            files::remove(&theirs)?;
            files::warm(size_bytes)?;
            drop_cached(&object)?;
            let started = Instant::now();
            fs::copy(&object, &theirs).context("copy out of Tier-3")?;
            files::read(&theirs, size_bytes)?;
            Ok(size_bytes as f64 / 1e9 / started.elapsed().as_secs_f64())
        },
    )?;
    files::remove(&theirs)?;
    mount.close()?;
    let against = format!("cp out of Tier-3 to {} and a read there", bench.baseline_folder());
    bench.result("restore_cold", "GB/s", &against, medians)?;
    bench.figure("restore_cold_anonymous_peak", "MiB", footprint.peak_mib())?;
    bench.figure("restore_cold_daemon_cpu", "s/GB", footprint.cpu_s_per_gb(size_bytes))
}

/// Lets a process of its own write the file and be killed; then reads the file.
fn after_death(path: &Path, size_bytes: u64) -> anyhow::Result<f64> {
    files::remove(path)?;
    files::warm(size_bytes)?;
    let script = "head -c \"$1\" /dev/zero > \"$0\" && echo written && exec sleep 600";
    let mut trainer = Command::new("sh")
        .args(["-c", script])
        .arg(path)
        .arg(size_bytes.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .context("start the process that dies")?;
    let mut line = String::new();
    let out = trainer.stdout.take().context("its output is a pipe")?;
    BufReader::new(out).read_line(&mut line)?;
    trainer.kill().context("kill it")?;
    trainer.wait()?;
    ensure!(line == "written\n", "the process that was to die wrote {line:?}, not its file");
    Ok(files::read(path, size_bytes)? / 1e9)
}

/// Returns the single file of this size below `folder`.
fn object_of(folder: &Path, size_bytes: u64) -> anyhow::Result<Option<PathBuf>> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let meta = fs::symlink_metadata(&path)?;
        if meta.is_dir()
            && let Some(found) = object_of(&path, size_bytes)?
        {
            return Ok(Some(found));
        }
        if meta.is_file() && meta.len() == size_bytes {
            return Ok(Some(path));
        }
    }
    Ok(None)
}

/// Drops an object from the page cache, so that it is read from the disk.
fn drop_cached(object: &Path) -> anyhow::Result<()> {
    fadvise(File::open(object)?, 0, None, Advice::DontNeed).context("drop an object from the page cache")
}
