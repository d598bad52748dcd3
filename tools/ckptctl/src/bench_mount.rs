//! `ckptctl bench mount`: the mount against another folder, in one run.
//!
//! Owns: the order of the samples, alternating, and the medians. Does not own: the samples (`sample`), the command line, the
//! check of a mount's warmth (the caller hands that in), printing.

use anyhow::{Context, ensure};
use ckptctl::sample;
use serde::Serialize;
use std::fs;
use std::hint::black_box;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};
use tidemark_protocol::size::Shown;

/// Samples of each place; a first one of both is thrown away besides.
const ROUNDS: usize = 5;
/// Tries to remove a folder that a sample still writes into.
const REMOVE_TRIES: u32 = 100;
/// Far beyond the caches, and little enough for a small machine.
const MEMCPY_BYTES: usize = 256 << 20;
/// The whole budget has to be touched once.
const WARM_MAX: Duration = Duration::from_secs(600);
const WARM_POLL: Duration = Duration::from_millis(200);

/// Settings of a measurement.
pub(crate) struct BenchMount<'a> {
    /// A folder of the mount.
    pub path: PathBuf,
    /// A folder to compare with, usually /dev/shm.
    pub baseline: PathBuf,
    /// Size of the file that is written and read; each place holds one such file at a time.
    pub size_bytes: u64,
    /// Start at once, even where Tier-1's memory has not been touched yet.
    pub no_wait: bool,
    /// Whether Tier-1's memory is warm now.
    pub wait_until_warm: &'a dyn Fn() -> bool,
}

impl std::fmt::Debug for BenchMount<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BenchMount")
            .field("path", &self.path)
            .field("baseline", &self.baseline)
            .field("size_bytes", &self.size_bytes)
            .field("no_wait", &self.no_wait)
            .finish_non_exhaustive()
    }
}

/// The medians of one run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct BenchReport {
    pub figures: Vec<BenchFigure>,
    pub memcpy_bytes_per_s: f64,
}

/// A use of a file, measured in both places.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct BenchFigure {
    /// `write`, `read`, `mmap` or `save`.
    pub name: &'static str,
    pub mount_bytes_per_s: f64,
    pub baseline_bytes_per_s: f64,
    /// Mount over baseline: above 1 the mount is faster.
    pub ratio: f64,
}

type Sample = fn(&Path, u64) -> anyhow::Result<f64>;

/// The order matters: reads and mappings find what the writes left.
const FIGURES: [(&str, Sample); 4] = [
    ("write", sample::write_new),
    ("read", sample::read),
    ("mmap", |path, _| sample::map(path)),
    ("save", sample::save_new),
];

/// Waits until warm, then measures. Removes its files afterwards, also when a sample failed.
///
/// # Errors
/// A size of zero, a place that cannot be written, or memory that does not get warm in ten minutes.
pub(crate) fn run(bench: BenchMount<'_>) -> anyhow::Result<BenchReport> {
    ensure!(bench.size_bytes > 0, "--size must be at least 1 byte, not 0");
    let waiting_since = Instant::now();
    while !bench.no_wait && !(bench.wait_until_warm)() {
        ensure!(
            waiting_since.elapsed() < WARM_MAX,
            "Tier-1 is not warm after {} s: see `ckptctl status`, or measure as it is with --no-wait",
            WARM_MAX.as_secs()
        );
        thread::sleep(WARM_POLL);
    }
    let places = Places::of(&bench.path, &bench.baseline);
    let made = places.make();
    let (mount, baseline) = (places.mount.join(FILE), places.baseline.join(FILE));
    let figures = made.and_then(|()| {
        let figures = FIGURES.into_iter();
        figures.map(|(name, sample)| compare(name, sample, &mount, &baseline, bench.size_bytes)).collect()
    });
    let removed = places.remove();
    let figures: Vec<BenchFigure> = figures?;
    removed?;
    Ok(BenchReport { figures, memcpy_bytes_per_s: memcpy_bytes_per_s() })
}

/// The file in each of the folders.
const FILE: &str = "file";

/// A folder of this process in each place. Removing one ends the measurement: no file is made where its folder is gone.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    mount: PathBuf,
    baseline: PathBuf,
}

impl Places {
    /// Returns the places that a measurement of this process uses.
    pub(crate) fn of(mount: &Path, baseline: &Path) -> Self {
        let name = format!("tidemark-bench-{}", std::process::id());
        Self { mount: mount.join(&name), baseline: baseline.join(name) }
    }

    fn make(&self) -> anyhow::Result<()> {
        [&self.mount, &self.baseline].into_iter().try_for_each(|folder| {
            fs::create_dir(folder).with_context(|| format!("make {}", folder.display()))
        })
    }

    /// Removes both, also when the first cannot be removed.
    ///
    /// # Errors
    /// Something of them stays.
    pub(crate) fn remove(&self) -> anyhow::Result<()> {
        let remove = |folder: &Path| {
            // A sample that is under way may make its file once more before the folder goes.
            let mut tries = 0;
            loop {
                tries += 1;
                match fs::remove_dir_all(folder) {
                    Ok(()) => return Ok(()),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                    Err(_) if tries < REMOVE_TRIES => {}
                    Err(error) => return Err(error).with_context(|| format!("remove {}", folder.display())),
                }
            }
        };
        let (of_mount, of_baseline) = (remove(&self.mount), remove(&self.baseline));
        of_mount.and(of_baseline)
    }
}

/// Refuses a size that the mount, the baseline or this process has no memory for: what is measured beyond them is the machine's
/// distress. `tier1_bytes`: the budget, where the daemon says it.
///
/// # Errors
/// Which of them it is, with both sizes.
pub(crate) fn check_size(size_bytes: u64, tier1_bytes: Option<u64>, baseline: &Path) -> anyhow::Result<()> {
    let size = Shown(size_bytes);
    if let Some(tier1_bytes) = tier1_bytes {
        let budget = Shown(tier1_bytes);
        ensure!(
            size_bytes <= tier1_bytes,
            "--size {size} does not fit into Tier-1, which has {budget}; give less"
        );
    }
    if let Some(available) = available_memory_bytes() {
        let available_shown = Shown(available);
        ensure!(
            size_bytes <= available,
            "--size {size} is more than the {available_shown} of memory that are available, and each sample warms so much; give less"
        );
    }
    let stat = rustix::fs::statvfs(baseline).with_context(|| format!("look at {}", baseline.display()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let place = baseline.display();
    ensure!(
        size_bytes <= free,
        "--size {size} does not fit into {place}, where {} are free; give less",
        Shown(free)
    );
    Ok(())
}

/// MemAvailable of /proc/meminfo; none where it does not say.
fn available_memory_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn compare(
    name: &'static str,
    sample: Sample,
    mount: &Path,
    baseline: &Path,
    size_bytes: u64,
) -> anyhow::Result<BenchFigure> {
    let (mut mounts, mut baselines) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let mut places = [(mount, &mut mounts), (baseline, &mut baselines)];
        // Whatever ran just before changes a sample by up to three times, so neither place is always first.
        if round % 2 == 1 {
            places.reverse();
        }
        for (path, samples) in places {
            let bytes_per_s = sample(path, size_bytes).with_context(|| format!("measure {name}"))?;
            if round > 0 {
                samples.push(bytes_per_s);
            }
        }
    }
    let (mount_bytes_per_s, baseline_bytes_per_s) = (median(mounts), median(baselines));
    Ok(BenchFigure {
        name,
        mount_bytes_per_s,
        baseline_bytes_per_s,
        ratio: mount_bytes_per_s / baseline_bytes_per_s,
    })
}

fn memcpy_bytes_per_s() -> f64 {
    let (from, mut to) = (vec![1_u8; MEMCPY_BYTES], vec![2_u8; MEMCPY_BYTES]);
    let samples = (0..ROUNDS).map(|_| {
        let started = Instant::now();
        to.copy_from_slice(black_box(&from));
        black_box(&mut to);
        MEMCPY_BYTES as f64 / started.elapsed().as_secs_f64()
    });
    median(samples.collect())
}

/// The upper middle one; there is always a sample.
fn median(mut samples: Vec<f64>) -> f64 {
    assert!(!samples.is_empty(), "every figure has samples");
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_nothing_can_hold_is_refused_with_both_sizes() {
        let here = std::env::temp_dir();
        check_size(1 << 10, Some(1 << 20), &here).unwrap();
        let refused = check_size(2 << 20, Some(1 << 20), &here).expect_err("Tier-1 is smaller").to_string();
        assert!(refused.contains("2.0 MiB") && refused.contains("1.0 MiB"), "{refused}");
        check_size(1 << 60, None, &here).expect_err("no machine has that");
        sample::warm(1 << 60).expect_err("an error, and not the end of the process");
    }

    #[test]
    fn whoever_removes_the_folders_ends_the_measurement_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let places = Places::of(folder.path(), folder.path());
        places.make().expect_err("one name in one folder");
        places.remove().unwrap();
        sample::write(&places.mount.join(FILE), 10).expect_err("its folder is gone");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_report_has_four_figures_and_leaves_nothing_behind() {
        let folder = std::env::temp_dir().join(format!("bench-mount-test-{}", std::process::id()));
        let (one, two) = (folder.join("one"), folder.join("two"));
        fs::create_dir_all(&one).unwrap();
        fs::create_dir_all(&two).unwrap();
        let asked = std::cell::Cell::new(0);
        let wait_until_warm = &|| {
            asked.set(asked.get() + 1);
            asked.get() == 2
        };
        let (path, baseline) = (one.clone(), two.clone());
        let report =
            run(BenchMount { path, baseline, size_bytes: 3 << 20, no_wait: false, wait_until_warm }).unwrap();
        assert_eq!(asked.get(), 2, "it waits exactly until warm");
        let json = serde_json::to_value(&report).unwrap();
        let names: Vec<_> =
            json["figures"].as_array().unwrap().iter().map(|figure| &figure["name"]).collect();
        assert_eq!(names, ["write", "read", "mmap", "save"]);
        for figure in json["figures"].as_array().unwrap() {
            assert!(figure["ratio"].as_f64().unwrap() > 0.0, "{figure}");
        }
        assert!(json["memcpy_bytes_per_s"].as_f64().unwrap() > 0.0);
        assert_eq!(fs::read_dir(&one).unwrap().count() + fs::read_dir(&two).unwrap().count(), 0);
        fs::remove_dir_all(folder).unwrap();
    }
}
