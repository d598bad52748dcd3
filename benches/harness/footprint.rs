//! Measures a daemon's own memory and processor time during some work.
//!
//! Owns: sampling RssAnon of one process, the largest sample, and its processor time. Does not own: the choice of process and work.
//!
//! RssAnon is the daemon's own: heap, stacks, buffers. VmHWM would be wrong here: it counts Tier-1's pages too, as long as the daemon has
//! them mapped.

use crate::compare::Sampled;
use anyhow::{Context, ensure};
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Interval between samples: a buffer of 8 MiB lives for some milliseconds if the disk is fast.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(2);

/// The samples so far: a peak and a processor time for each run.
#[derive(Debug, Default)]
pub struct Footprint {
    peaks_bytes: Vec<u64>,
    cpu_s: Vec<f64>,
}

impl Footprint {
    /// Runs `work` and samples the process meanwhile.
    ///
    /// # Errors
    /// The error of `work`; the process ended or cannot be sampled.
    pub fn during<R>(&mut self, pid: u32, work: impl FnOnce() -> anyhow::Result<R>) -> anyhow::Result<R> {
        let ended = AtomicBool::new(false);
        let before_s = cpu_s(pid)?;
        let (done, seen_bytes) = thread::scope(|scope| {
            let sampler = scope.spawn(|| sample_until(&ended, pid));
            let done = work();
            ended.store(true, Ordering::Release);
            (done, sampler.join().expect("sampling does not panic"))
        });
        self.peaks_bytes.push(seen_bytes?);
        self.cpu_s.push(cpu_s(pid)? - before_s);
        done
    }

    /// Returns the largest peak of all runs, in MiB.
    #[must_use]
    pub fn peak_mib(&self) -> Sampled {
        let mib = |bytes: &u64| *bytes as f64 / f64::from(1 << 20);
        let samples: Vec<f64> = self.peaks_bytes.iter().map(mib).collect();
        Sampled { number: samples.iter().copied().fold(0.0, f64::max), samples }
    }

    /// Returns the processor time of all threads of the process per GB, if each run moved `bytes`: the mean over all runs, in seconds of
    /// one core.
    #[must_use]
    pub fn cpu_s_per_gb(&self, bytes: u64) -> Sampled {
        let samples: Vec<f64> = self.cpu_s.iter().map(|cpu_s| cpu_s / (bytes as f64 / 1e9)).collect();
        Sampled { number: samples.iter().sum::<f64>() / samples.len().max(1) as f64, samples }
    }
}

fn sample_until(ended: &AtomicBool, pid: u32) -> anyhow::Result<u64> {
    let mut peak_bytes = 0;
    loop {
        let last = ended.load(Ordering::Acquire);
        peak_bytes = peak_bytes.max(anonymous_bytes(pid)?);
        if last {
            return Ok(peak_bytes);
        }
        thread::sleep(SAMPLE_INTERVAL);
    }
}

/// Returns a process's RssAnon.
///
/// # Errors
/// There is no such process.
pub fn anonymous_bytes(pid: u32) -> anyhow::Result<u64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    rss_anon_bytes(&text).with_context(|| format!("{path} has no RssAnon"))
}

/// Returns user and system time of all threads of a process, in seconds of one core.
///
/// # Errors
/// There is no such process.
pub fn cpu_s(pid: u32) -> anyhow::Result<f64> {
    Ok(cpu_times_s(pid)?.0)
}

/// Returns the same of the children that the process has waited for, and of theirs.
///
/// # Errors
/// There is no such process.
pub fn cpu_of_children_s(pid: u32) -> anyhow::Result<f64> {
    Ok(cpu_times_s(pid)?.1)
}

fn cpu_times_s(pid: u32) -> anyhow::Result<(f64, f64)> {
    let path = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let (own, children) = cpu_ticks(&text).with_context(|| format!("{path} names no times"))?;
    let per_second = rustix::param::clock_ticks_per_second() as f64;
    Ok((own as f64 / per_second, children as f64 / per_second))
}

/// Returns the ticks of the process itself, and of the children that it has waited for.
fn cpu_ticks(stat: &str) -> Option<(u64, u64)> {
    // The name, in brackets, may contain any characters; utime, stime, cutime and cstime are the 12th to 15th field after it.
    let (_, fields) = stat.rsplit_once(')')?;
    let mut times = fields.split_whitespace().skip(11).map(str::parse::<u64>);
    let mut next = || times.next()?.ok();
    Some((next()? + next()?, next()? + next()?))
}

fn rss_anon_bytes(status: &str) -> anyhow::Result<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).context("no such line")?;
    let mut words = line.split_whitespace();
    let kib: u64 = words.next().context("no number")?.parse().context("its number")?;
    ensure!(words.next() == Some("kB"), "not in kB: {line:?}");
    Ok(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    fn memory_that_was_touched_and_given_back_is_in_the_peak() {
        let mut footprint = Footprint::default();
        let before_bytes = anonymous_bytes(std::process::id()).unwrap();
        let touched_bytes = 64_usize << 20;
        footprint
            .during(std::process::id(), || {
                let bytes = black_box(vec![1_u8; touched_bytes]);
                thread::sleep(50 * SAMPLE_INTERVAL);
                drop(bytes);
                Ok(())
            })
            .unwrap();
        assert!(footprint.peaks_bytes[0] >= before_bytes + touched_bytes as u64, "{footprint:?}");
        assert!(footprint.during(u32::MAX, || Ok(())).is_err(), "no such process");
    }

    #[test]
    fn the_time_of_a_process_is_found_behind_its_name() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194560 9 0 0 0 150 50 3 4 20 0 9 0 77";
        assert_eq!(cpu_ticks(stat), Some((200, 7)));
        assert_eq!(cpu_ticks("7 (a) S 1"), None);
        assert!(cpu_s(std::process::id()).is_ok());
    }

    #[test]
    fn a_status_without_anonymous_memory_is_refused() {
        assert_eq!(rss_anon_bytes("VmHWM:\t  9 kB\nRssAnon:\t     105 kB\n").unwrap(), 105 << 10);
        assert!(rss_anon_bytes("RssFile:\t 1 kB\n").is_err());
        assert!(rss_anon_bytes("RssAnon:\t 1 MB\n").is_err());
    }
}
