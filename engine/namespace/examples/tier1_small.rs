//! Cost of creating, writing and closing a small file, step by step, and through the namespace.
//!
//! Owns: the measurement; prints medians and 99th percentiles as `RESULT name_us median p99`. Does not own: FUSE's
//! part (`benches/create.rs` measures the mount).
//!
//! `tier1_small [FILES] [ROUNDS]`, by default 1000 and 10; a Tier-1 of 2 GiB.

#![expect(clippy::print_stdout, reason = "the figures are this program's answer")]

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidemark_namespace::{Caller, Namespace, NamespaceSettings};
use tidemark_protocol::id::Incarnation;
use tidemark_tier1::{Backing, MediumChoice, Tier1, Tier1Settings};

const SIZE_BYTES: u64 = 2 << 30;
const FILE_BYTES: usize = 4096;
/// Interval between two files of the paced kind: a job that writes one small file now and then.
const PAUSE: Duration = Duration::from_millis(2);
const ROOT: u64 = 1;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let files: usize = arguments.next().map_or(Ok(1000), |text| text.parse())?;
    let rounds: usize = arguments.next().map_or(Ok(10), |text| text.parse())?;
    let tier1 =
        Tier1::open(Tier1Settings { size_bytes: SIZE_BYTES, ballast: true, medium: MediumChoice::Auto })?;
    println!("private tmpfs: {}", tier1.capabilities().private_tmpfs.works);
    let namespace = Namespace::new(NamespaceSettings::new(Incarnation(1)), Arc::clone(&tier1))?;
    let mut figures = Figures::default();
    for round in 0..rounds {
        wait_warm(&tier1);
        burst(&tier1, files, &mut figures)?;
        wait_warm(&tier1);
        paced(&tier1, files / 10, &mut figures)?;
        wait_warm(&tier1);
        through_namespace(&namespace, round, files, &mut figures)?;
    }
    figures.print();
    Ok(())
}

/// Every duration by the name of its step, in microseconds.
#[derive(Default)]
struct Figures(BTreeMap<&'static str, Vec<f64>>);

impl Figures {
    fn time<T>(&mut self, name: &'static str, step: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let made = step();
        self.add(name, begun);
        made
    }

    fn add(&mut self, name: &'static str, begun: Instant) {
        self.0.entry(name).or_default().push(begun.elapsed().as_secs_f64() * 1e6);
    }

    fn print(&mut self) {
        for (name, values) in &mut self.0 {
            values.sort_by(f64::total_cmp);
            let at = |part: usize| values.get(values.len() * part / 100).copied().unwrap_or(f64::NAN);
            println!("RESULT {name}_us {:.1} p99 {:.1}", at(50), at(99));
        }
    }
}

fn wait_warm(tier1: &Tier1) {
    let begun = Instant::now();
    while tier1.usage().warm_fraction() < 0.98 && begun.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(20));
    }
    std::thread::sleep(Duration::from_millis(100));
}

fn burst(tier1: &Arc<Tier1>, files: usize, figures: &mut Figures) -> Result<(), Box<dyn Error>> {
    let bytes = [7; FILE_BYTES];
    let mut kept = Vec::new();
    for _ in 0..files {
        let all = Instant::now();
        let backing = figures.time("burst_create", || tier1.create(None))?;
        figures.time("burst_begin_growth", || backing.begin_growth());
        let mut file = figures.time("burst_open", || open_for_writing(&backing))?;
        figures.time("burst_write", || file.write_all(&bytes))?;
        figures.time("burst_close", || drop(file));
        figures.time("burst_end_growth", || backing.end_growth());
        figures.add("burst_all", all);
        kept.push(backing);
    }
    for backing in &kept {
        figures.time("burst_trim", || backing.trim())?;
    }
    for backing in kept {
        figures.time("burst_drop", || drop(backing));
    }
    Ok(())
}

fn paced(tier1: &Arc<Tier1>, files: usize, figures: &mut Figures) -> Result<(), Box<dyn Error>> {
    let bytes = [7; FILE_BYTES];
    for _ in 0..files {
        let all = Instant::now();
        let backing = figures.time("paced_create", || tier1.create(None))?;
        backing.begin_growth();
        let mut file = open_for_writing(&backing)?;
        file.write_all(&bytes)?;
        drop(file);
        backing.end_growth();
        figures.add("paced_all", all);
        backing.trim()?;
        drop(backing);
        std::thread::sleep(PAUSE);
    }
    Ok(())
}

fn through_namespace(
    namespace: &Arc<Namespace>,
    round: usize,
    files: usize,
    figures: &mut Figures,
) -> Result<(), Box<dyn Error>> {
    let flags = create_flags()?;
    let caller = Caller { uid: 0, gid: 0, pid: std::process::id(), now_ns: 1, request: 0 };
    let bytes = [7; FILE_BYTES];
    for number in 0..files {
        let name = format!("file-{round}-{number}");
        let all = Instant::now();
        let (_, open) = figures
            .time("namespace_create", || namespace.create(&caller, ROOT, name.as_bytes(), 0o644, flags))?;
        let mut file = open_for_writing(&open.backing)?;
        file.write_all(&bytes)?;
        drop(file);
        figures.time("namespace_flush", || namespace.handles().flush(open.fh, &caller, false))?;
        figures.time("namespace_release", || namespace.handles().release(open.fh))?;
        figures.add("namespace_all", all);
    }
    for number in 0..files {
        let name = format!("file-{round}-{number}");
        figures.time("namespace_unlink", || namespace.names().unlink(&caller, ROOT, name.as_bytes()))?;
    }
    Ok(())
}

/// Returns O_WRONLY | O_CREAT, as open(2) of a new file has them.
fn create_flags() -> Result<i32, std::num::TryFromIntError> {
    (rustix::fs::OFlags::WRONLY | rustix::fs::OFlags::CREATE).bits().try_into()
}

fn open_for_writing(backing: &Backing) -> std::io::Result<File> {
    File::options().write(true).open(backing.host_path())
}
