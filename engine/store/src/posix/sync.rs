//! fsync of directories, where one call serves all its waiters.
//!
//! Owns: which directories are being synced, and that each caller is served by a sync that began after its request.
//! Does not own: which directories an object needs (`files`).
//!
//! 100,000 small objects share the directories above them, and an fsync is a flush of the disk. A caller that asks
//! while one runs waits for the next, and all waiters are served by that one.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, PoisonError};

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct DirectorySyncs {
    /// Directories that a caller waits for.
    waited: Mutex<HashMap<PathBuf, Rounds>>,
    ended: Condvar,
}

/// The syncs of one directory, counted from the first that a caller waited for.
#[derive(Debug, Default)]
struct Rounds {
    begun: u64,
    ended: u64,
    /// The last sync that failed, and its error. The kernel reports an error once, so every caller that needs this
    /// round or an earlier one must get it, whatever later rounds return.
    failed: Option<(u64, i32)>,
    callers: usize,
}

impl DirectorySyncs {
    /// Makes all that was in `directory` before the call durable.
    pub(super) fn sync(&self, directory: &Path) -> io::Result<()> {
        self.sync_by(directory, |directory| std::fs::File::open(directory)?.sync_all())
    }

    fn sync_by(&self, directory: &Path, fsync: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        let mut fsync = Some(fsync);
        let mut waited = self.waited.lock().unwrap_or_else(PoisonError::into_inner);
        let rounds = waited.entry(directory.to_owned()).or_default();
        rounds.callers += 1;
        // A sync that runs already may have missed what we need.
        let needed = rounds.begun + 1;
        loop {
            let rounds = waited.get_mut(directory).expect("it stays while a caller counts");
            if rounds.ended >= needed {
                let failed = rounds.failed.filter(|(round, _)| *round >= needed);
                rounds.callers -= 1;
                if rounds.callers == 0 {
                    waited.remove(directory);
                }
                return failed.map_or(Ok(()), |(_, code)| Err(io::Error::from_raw_os_error(code)));
            }
            if rounds.begun > rounds.ended {
                waited = self.ended.wait(waited).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            rounds.begun += 1;
            let round = rounds.begun;
            drop(waited);
            let fsync = fsync.take().expect("the round that a caller begins is one that it needs");
            let result = fsync(directory);
            waited = self.waited.lock().unwrap_or_else(PoisonError::into_inner);
            let rounds = waited.get_mut(directory).expect("it stays while a caller counts");
            rounds.ended = round;
            if let Err(error) = result {
                rounds.failed = Some((round, error.raw_os_error().unwrap_or(libc::EIO)));
            }
            self.ended.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Barrier};
    use std::time::Duration;
    use tokio::time::Instant;

    const DIRECTORY: &str = "/some/directory";

    fn wait_for_callers(syncs: &DirectorySyncs, callers: usize) {
        let begun = Instant::now();
        while syncs.waited.lock().unwrap().get(Path::new(DIRECTORY)).map_or(0, |rounds| rounds.callers)
            != callers
        {
            assert!(begun.elapsed() < Duration::from_secs(20), "not {callers} callers");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Runs one sync while ten others ask; returns the number of syncs and the result of each of the ten.
    fn ten_behind_one(next: impl Fn() -> io::Result<()> + Sync) -> (u32, Vec<io::Result<()>>) {
        let syncs = Arc::new(DirectorySyncs::default());
        let (runs, gate) = (AtomicU32::new(0), Barrier::new(2));
        let told = std::thread::scope(|scope| {
            let first = scope.spawn(|| {
                syncs.sync_by(Path::new(DIRECTORY), |_| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    gate.wait();
                    gate.wait();
                    Ok(())
                })
            });
            gate.wait();
            let ask = || {
                syncs.sync_by(Path::new(DIRECTORY), |_| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    next()
                })
            };
            let others: Vec<_> = (0..10).map(|_| scope.spawn(ask)).collect();
            wait_for_callers(&syncs, 11);
            gate.wait();
            assert!(first.join().unwrap().is_ok());
            others.into_iter().map(|other| other.join().unwrap()).collect()
        });
        assert!(syncs.waited.lock().unwrap().is_empty(), "a directory nobody waits for is forgotten");
        (runs.into_inner(), told)
    }

    #[test]
    fn those_who_ask_while_one_runs_are_served_by_the_next_and_not_by_that_one() {
        let (runs, told) = ten_behind_one(|| Ok(()));
        assert_eq!(runs, 2);
        assert!(told.iter().all(Result::is_ok));
    }

    #[test]
    fn everybody_whom_a_failed_sync_was_to_serve_is_told() {
        let (runs, told) = ten_behind_one(|| Err(io::Error::from_raw_os_error(libc::ENOSPC)));
        assert_eq!(runs, 2);
        assert!(told.iter().all(|told| told.as_ref().is_err_and(|e| e.raw_os_error() == Some(libc::ENOSPC))));
    }
}
