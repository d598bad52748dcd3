//! How many files this process may have open.
//!
//! Owns: raising the limit at the start, and saying when it is small. Does not own: who holds descriptors (engine).

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Asked for first; needs CAP_SYS_RESOURCE, and is the most that Linux allows by default (`fs.nr_open`).
const WANTED: u64 = 1 << 20;

/// Below this the daemon says so. A file in memory holds no descriptor, but each one that is written in large pieces,
/// fetched, uploaded or dropped while a program still maps it holds one or two.
const ENOUGH: u64 = 4096;

/// Raises the limit as far as this process may, once at the start.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: Some(WANTED), maximum: Some(WANTED) };
    if setrlimit(Resource::Nofile, wanted).is_err() {
        // Without privileges: as far as the hard limit allows.
        let own = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, own) {
            tracing::warn!(%error, limit = ?limit.current, "the descriptor limit stays as it is");
        }
    }
    let (enough, what) = check();
    if !enough {
        tracing::warn!(what, fix = FIX, "the descriptor limit is small");
    }
}

/// What to do about a small limit.
pub(crate) const FIX: &str =
    "raise LimitNOFILE of the service, or the hard limit (ulimit -Hn) before it starts";

/// Whether the limit is enough, and the numbers.
pub(crate) fn check() -> (bool, String) {
    let limit = getrlimit(Resource::Nofile).current;
    let enough = limit.is_none_or(|limit| limit >= ENOUGH);
    let limit = limit.map_or_else(|| "any number of".to_owned(), |limit| limit.to_string());
    (enough, format!("{limit} files may be open at once, {ENOUGH} are enough for most loads"))
}
