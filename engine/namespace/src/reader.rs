//! Reading programs: the files that each process opened, so far as they show what kind of program it is.
//!
//! Owns: the bounded memory of these files. Does not own: identifying processes (`writer`), the consequences of reading another
//! checkpoint (the node's visibility).

use super::writer::process_of;
use super::{NodeId, UNPOISONED};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Threads remembered: the latest to open a new file.
const THREADS: usize = 1024;
/// Latest files remembered per thread: a job that resumes opens the files of one checkpoint.
const FILES: usize = 64;
/// A thread id is looked up again after this time, since it may belong to another thread by now.
const CERTAIN_FOR: Duration = Duration::from_secs(60);

/// The files that threads opened for reading.
#[derive(Debug)]
pub(super) struct Readers {
    proc_root: PathBuf,
    threads: Mutex<BTreeMap<u32, Reader>>,
}

#[derive(Debug)]
struct Reader {
    process: (u32, u64),
    since: Instant,
    opened: VecDeque<NodeId>,
}

impl Readers {
    pub(super) fn new(proc_root: PathBuf) -> Self {
        Self { proc_root, threads: Mutex::default() }
    }

    /// Notes that thread `tid` opened the file at `node`. Costs a short lock; two files of /proc if the thread was not seen lately.
    pub(super) fn opened(&self, tid: u32, node: NodeId) {
        let known = |reader: &Reader| reader.since.elapsed() < CERTAIN_FOR;
        {
            let mut threads = self.threads.lock().expect(UNPOISONED);
            if let Some(reader) = threads.get_mut(&tid).filter(|reader| known(reader)) {
                return reader.add(node);
            }
        }
        // 0: a process in a pid namespace that we do not see.
        let Some(process) = (tid != 0).then(|| process_of(&self.proc_root, tid)).flatten() else { return };
        let mut threads = self.threads.lock().expect(UNPOISONED);
        if threads.len() >= THREADS
            && !threads.contains_key(&tid)
            && let Some(oldest) = threads.iter().min_by_key(|(_, reader)| reader.since).map(|(tid, _)| *tid)
        {
            threads.remove(&oldest);
        }
        let before = threads.remove(&tid).filter(|reader| reader.process == process);
        let opened = before.map(|reader| reader.opened).unwrap_or_default();
        let mut reader = Reader { process, since: Instant::now(), opened };
        reader.add(node);
        threads.insert(tid, reader);
    }
}

impl Readers {
    /// Returns the latest files that any thread of these processes opened for reading.
    pub(super) fn opened_by(&self, processes: &BTreeSet<(u32, u64)>) -> BTreeSet<NodeId> {
        let threads = self.threads.lock().expect(UNPOISONED);
        let theirs = threads.values().filter(|reader| processes.contains(&reader.process));
        theirs.flat_map(|reader| &reader.opened).copied().collect()
    }
}

impl Reader {
    fn add(&mut self, node: NodeId) {
        if self.opened.contains(&node) {
            return;
        }
        if self.opened.len() >= FILES {
            self.opened.pop_front();
        }
        self.opened.push_back(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_opened_is_remembered_within_bounds() {
        let readers = Readers::new("/proc".into());
        let tid = std::process::id();
        let own = process_of(&readers.proc_root, tid).unwrap();
        for node in (0..=FILES as u64).chain([5]) {
            readers.opened(tid, node);
        }
        readers.opened(0, 7);
        readers.opened(u32::MAX, 7);
        {
            let threads = readers.threads.lock().unwrap();
            assert_eq!(threads.len(), 1, "a thread that cannot be seen is none");
            assert_eq!((threads[&tid].process, threads[&tid].opened.len()), (own, FILES));
            assert!(!threads[&tid].opened.contains(&0), "the first gave way");
        }
        // The number is another process's now.
        let mut threads = readers.threads.lock().unwrap();
        let reader = threads.get_mut(&tid).unwrap();
        (reader.process, reader.since) = ((1, 1), Instant::now() - CERTAIN_FOR);
        drop(threads);
        readers.opened(tid, 9);
        let threads = readers.threads.lock().unwrap();
        assert_eq!((threads[&tid].process, threads[&tid].opened.len()), (own, 1), "what it did not open");
    }
}
