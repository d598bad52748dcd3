//! The calls of a job and its tools on a mount, without pause, and without ever seeing an error.
//!
//! Owns: the threads, the current call of each, the longest duration of each call. Does not own: the kills.
//!
//! Every call that changes a name would fail if it were carried out twice: a second `mkdir` returns EEXIST, a second
//! `unlink` ENOENT. A call that succeeds was thus executed once.

use crate::pattern;
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;
/// Size of a saved file, with which some saves are whole between two kills and some are not.
const SAVE_BYTES: usize = 96 * MIB;
/// Saves that are kept. Older ones are removed, as jobs do.
const SAVES_KEPT: usize = 3;

/// A kind of call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Write,
    Open,
    Rename,
    Other,
}

/// The state of a thread: a count that each beginning and each end of a call raises, odd inside a call.
#[derive(Debug, Default)]
pub(crate) struct Inside {
    count: AtomicU64,
    longest_us: AtomicU64,
}

impl Inside {
    /// Makes a call. An error fails the test, because no call of this load may fail.
    pub(crate) fn call<T>(&self, what: &str, call: impl FnOnce() -> std::io::Result<T>) -> T {
        self.count.fetch_add(1, Ordering::SeqCst);
        let begun = Instant::now();
        let result = call();
        let took_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.count.fetch_add(1, Ordering::SeqCst);
        self.longest_us.fetch_max(took_us, Ordering::Relaxed);
        result.unwrap_or_else(|error| panic!("{what} failed after {took_us} us: {error}"))
    }

    /// Returns the count of the current call, if the thread is in one.
    pub(crate) fn now(&self) -> Option<u64> {
        Some(self.count.load(Ordering::SeqCst)).filter(|count| count % 2 == 1)
    }

    pub(crate) fn calls(&self) -> u64 {
        self.count.load(Ordering::SeqCst) / 2
    }

    pub(crate) fn longest(&self) -> Duration {
        Duration::from_micros(self.longest_us.load(Ordering::Relaxed))
    }
}

/// A running thread of each kind.
#[derive(Debug)]
pub(crate) struct Workload {
    stop: Arc<AtomicBool>,
    pub(crate) inside: Vec<(Call, Arc<Inside>)>,
    threads: Vec<JoinHandle<()>>,
}

type Body = fn(&Path, &AtomicBool, &Inside);

impl Workload {
    /// Starts the load below `directory`, which exists.
    pub(crate) fn begin(directory: &Path) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let bodies: [(&str, Call, Body); 7] = [
            ("saves", Call::Write, saves),
            ("rewrites", Call::Write, rewrites),
            ("maps", Call::Other, maps),
            ("reads", Call::Open, reads),
            ("renames", Call::Rename, renames),
            ("makes", Call::Other, makes),
            ("grows", Call::Other, grows),
        ];
        let (mut inside, mut threads) = (Vec::new(), Vec::new());
        for (name, call, body) in bodies {
            let (own, stopped) = (Arc::new(Inside::default()), Arc::clone(&stop));
            inside.push((call, Arc::clone(&own)));
            let directory = directory.join(name);
            let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
                own.call("making a directory", || fs::create_dir(&directory));
                body(&directory, &stopped, &own);
            });
            threads.push(thread.expect("a thread can be started"));
        }
        Self { stop, inside, threads }
    }

    /// Returns the unanswered calls of a kind, each with its thread and its count.
    pub(crate) fn unanswered(&self, call: Call) -> Vec<(usize, u64)> {
        let of_kind = self.inside.iter().enumerate().filter(|(_, (kind, _))| *kind == call);
        of_kind.filter_map(|(thread, (_, inside))| Some((thread, inside.now()?))).collect()
    }

    pub(crate) fn longest(&self, call: Call) -> Duration {
        let of_kind = self.inside.iter().filter(|(kind, _)| *kind == call);
        of_kind.map(|(_, inside)| inside.longest()).max().unwrap_or_default()
    }

    /// Fails if a thread has ended, which happens only after an error.
    pub(crate) fn check(&self) {
        assert!(
            self.stop.load(Ordering::Relaxed) || self.threads.iter().all(|thread| !thread.is_finished()),
            "a thread of the load ended; its panic is above"
        );
    }

    /// Ends all threads, each of which has verified its writes.
    pub(crate) fn end(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        for thread in self.threads {
            let name = thread.thread().name().unwrap_or_default().to_owned();
            thread.join().unwrap_or_else(|_| panic!("{name} met an error"));
        }
        self.inside.iter().map(|(_, inside)| inside.calls()).sum()
    }
}

fn goes_on(stop: &AtomicBool) -> bool {
    !stop.load(Ordering::Relaxed)
}

/// Saves file after file: 1 MiB writes into a fresh file, close, read back.
fn saves(directory: &Path, stop: &AtomicBool, inside: &Inside) {
    let path = |step: usize| directory.join(format!("step_{step}.pt"));
    let mut step = 0;
    while goes_on(stop) {
        let mut file = inside.call("creating", || File::create_new(path(step)));
        for at in (0..SAVE_BYTES).step_by(MIB) {
            let bytes = pattern(step as u64, at as u64, MIB);
            inside.call("writing", || file.write_all(&bytes));
        }
        drop(file);
        verify(&path(step), step as u64, SAVE_BYTES, inside);
        step += 1;
        if step >= SAVES_KEPT {
            inside.call("removing", || fs::remove_file(path(step - SAVES_KEPT)));
        }
    }
}

fn verify(path: &Path, seed: u64, size: usize, inside: &Inside) {
    let file = inside.call("opening", || File::open(path));
    assert_eq!(inside.call("fstat", || file.metadata()).len(), size as u64, "{}", path.display());
    let mut bytes = vec![0; MIB];
    for at in (0..size).step_by(MIB) {
        inside.call("reading", || file.read_exact_at(&mut bytes, at as u64));
        assert!(bytes == pattern(seed, at as u64, MIB), "{} at {at}", path.display());
    }
}

/// Writes again and again over one open file, so that a write is under way at nearly every moment.
fn rewrites(directory: &Path, stop: &AtomicBool, inside: &Inside) {
    const BYTES: usize = 16 * MIB;
    let path = directory.join("ring");
    let file = inside.call("creating", || File::create_new(&path));
    let whole = [0, 1].map(|seed| pattern(seed, 0, BYTES));
    let mut round = 0;
    while goes_on(stop) || round == 0 {
        inside.call("writing", || file.write_all_at(&whole[round % 2], 0));
        round += 1;
    }
    drop(file);
    verify(&path, ((round - 1) % 2) as u64, BYTES, inside);
}

/// Stores into a shared mapping, and finds them by reading.
fn maps(directory: &Path, stop: &AtomicBool, inside: &Inside) {
    const BYTES: usize = 4 * MIB;
    let path = directory.join("mapped");
    let options = || OpenOptions::new().read(true).write(true).create_new(true).open(&path);
    let file = inside.call("creating", options);
    inside.call("growing", || file.set_len(BYTES as u64));
    // SAFETY: no thread truncates the file while it is mapped, and only this thread accesses the mapping.
    let mut mapping = inside.call("mapping", || unsafe { memmap2::MmapMut::map_mut(&file) });
    let mut seed = 0;
    while goes_on(stop) || seed == 0 {
        mapping.copy_from_slice(&pattern(seed, 0, BYTES));
        let mut back = vec![0; BYTES];
        inside.call("reading", || file.read_exact_at(&mut back, 0));
        assert!(back == mapping[..], "a store into a mapping is read");
        seed += 1;
    }
}

/// Opens, stats and lists.
fn reads(directory: &Path, stop: &AtomicBool, inside: &Inside) {
    let path = directory.join("config.json");
    inside.call("writing", || fs::write(&path, b"{}"));
    while goes_on(stop) {
        let file = inside.call("opening", || File::open(&path));
        assert_eq!(inside.call("fstat", || file.metadata()).len(), 2);
        assert_eq!(inside.call("stat", || fs::metadata(&path)).len(), 2);
        assert_eq!(inside.call("listing", || fs::read_dir(directory)).count(), 1);
    }
}

/// Renames a file back and forth, once over another. Each name exists exactly when it should.
fn renames(directory: &Path, stop: &AtomicBool, inside: &Inside) {
    let [one, other] = ["latest.tmp", "latest"].map(|name| directory.join(name));
    let mut round = 0_u64;
    inside.call("writing", || fs::write(&one, round.to_le_bytes()));
    while goes_on(stop) {
        inside.call("renaming", || fs::rename(&one, &other));
        inside.call("renaming", || fs::rename(&other, &one));
        round += 1;
        if round.is_multiple_of(64) {
            inside.call("writing", || fs::write(&other, b"in the way"));
            inside.call("renaming over", || fs::rename(&one, &other));
            inside.call("renaming", || fs::rename(&other, &one));
            assert_eq!(inside.call("reading", || fs::read(&one)), 0_u64.to_le_bytes());
        }
    }
}

/// Makes and removes names of every kind. Any of these calls would fail if carried out twice.
fn makes(directory: &Path, stop: &AtomicBool, inside: &Inside) {
    let at = |name: &str| -> PathBuf { directory.join(name) };
    while goes_on(stop) {
        inside.call("mkdir", || fs::create_dir(at("d")));
        drop(inside.call("O_EXCL", || File::create_new(at("d/f"))));
        inside.call("link", || fs::hard_link(at("d/f"), at("d/g")));
        inside.call("symlink", || std::os::unix::fs::symlink("f", at("d/s")));
        let names = || fs::read_dir(at("d")).map(|list| list.count());
        assert_eq!(inside.call("listing", names), 3);
        for name in ["d/f", "d/g", "d/s"] {
            inside.call("unlink", || fs::remove_file(at(name)));
        }
        inside.call("rmdir", || fs::remove_dir(at("d")));
    }
}

/// Calls fallocate, ftruncate and fsync, and keeps an unlinked file open.
fn grows(directory: &Path, stop: &AtomicBool, inside: &Inside) {
    let path = directory.join("grown");
    while goes_on(stop) {
        let options = || OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        let file = inside.call("creating", options);
        inside.call("fallocate", || Ok(fallocate(&file, FallocateFlags::empty(), 0, MIB as u64)?));
        inside.call("ftruncate", || file.set_len(2 * MIB as u64));
        inside.call("unlink", || fs::remove_file(&path));
        inside.call("writing", || file.write_all_at(b"after its name was gone", 100));
        inside.call("fsync", || file.sync_all());
        assert_eq!(inside.call("fstat", || file.metadata()).len(), 2 * MIB as u64);
        let mut bytes = [0; 23];
        inside.call("reading", || file.read_exact_at(&mut bytes, 100));
        assert_eq!(&bytes, b"after its name was gone");
    }
}
