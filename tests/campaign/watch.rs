//! The daemon's own figures, read from outside during the whole campaign: gauges, Tier-1's use, open descriptors.
//!
//! Owns: the sampling. Does not own: the demands on the figures (`report`).

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use serde::Serialize;
use tidemark_tests::daemon::{Daemon, http_get_from, metric_sum};

/// Interval of samples, short enough to see a save exceed the budget. Each sample is one small answer.
const SAMPLE_EVERY: Duration = Duration::from_millis(50);
/// Gauges that are zero when nothing is under way.
pub(crate) const IDLE_GAUGES: [&str; 4] = [
    "tidemark_upload_parts_in_flight",
    "tidemark_lag_versions",
    "tidemark_lag_bytes",
    "tidemark_lag_seconds",
];

/// Tier-1 as sampled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Tier1 {
    pub(crate) samples: u64,
    pub(crate) size_bytes: f64,
    pub(crate) most_used_bytes: f64,
}

/// A thread that samples until it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    ended: Arc<AtomicBool>,
    state: Arc<Mutex<(String, Tier1)>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    pub(crate) fn start(daemon: &Daemon) -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let state = Arc::new(Mutex::new((daemon.ready().http.clone(), Tier1::default())));
        let thread = {
            let (ended, state) = (Arc::clone(&ended), Arc::clone(&state));
            std::thread::spawn(move || {
                while !ended.load(Ordering::Acquire) {
                    sample(&state);
                    std::thread::sleep(SAMPLE_EVERY);
                }
            })
        };
        Self { ended, state, thread: Some(thread) }
    }

    /// Follows a daemon that was started again, perhaps with another address.
    pub(crate) fn follow(&self, daemon: &Daemon) {
        self.state.lock().expect("no panic in the sampling").0 = daemon.ready().http.clone();
    }

    pub(crate) fn tier1(&self) -> Tier1 {
        self.state.lock().expect("no panic in the sampling").1
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

fn sample(state: &Mutex<(String, Tier1)>) {
    let address = state.lock().expect("no panic in the sampling").0.clone();
    // A daemon that is dead at the moment gives no sample.
    let Ok(text) = http_get_from(&address, "/metrics") else { return };
    let mut state = state.lock().expect("no panic in the sampling");
    let tier1 = &mut state.1;
    tier1.samples += 1;
    tier1.size_bytes = metric_sum(&text, "tidemark_tier1_size_bytes", &[]);
    tier1.most_used_bytes = tier1.most_used_bytes.max(metric_sum(&text, "tidemark_tier1_used_bytes", &[]));
}

/// Counts the open descriptors of the serving daemon by kind.
pub(crate) fn descriptors(daemon: &Daemon) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    let folder = format!("/proc/{}/fd", daemon.ready().pid);
    for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder}: {error}")) {
        // A descriptor that was closed meanwhile is not open.
        let Ok(target) = entry.and_then(|entry| fs::read_link(entry.path())) else { continue };
        let target = target.to_string_lossy();
        let kind = match target.split_once(':') {
            Some(("anon_inode", kind)) => kind.trim_matches(['[', ']']).to_owned(),
            Some((kind, _)) if !kind.starts_with('/') => kind.to_owned(),
            _ if target.starts_with("/dev/") => target.into_owned(),
            // Names of files of one kind differ only from their first digit on.
            _ => {
                let name = target.rsplit('/').next().unwrap_or_default();
                name.split(|c: char| c.is_ascii_digit()).next().unwrap_or_default().to_owned()
            }
        };
        *found.entry(kind).or_default() += 1;
    }
    found
}
