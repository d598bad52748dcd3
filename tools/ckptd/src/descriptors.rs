//! How many files this process may have open.
//!
//! Owns: raising the limit at the start, and saying when it is too small, or was reached. Does not own: who holds descriptors (engine).

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::time::Duration;
use tidemark_protocol::report::{Problem, ProblemCode};
use tidemark_tier1::descriptors::last_refusal;

/// Asked for first; needs CAP_SYS_RESOURCE, and is the most that Linux allows by default (`fs.nr_open`).
const WANTED: u64 = 1 << 20;

/// Below this the daemon says so. A file in memory holds no descriptor, but each one that is written in large pieces,
/// fetched, uploaded or dropped while a program still maps it holds one or two.
const ENOUGH: u64 = 4096;

/// Below this a start cannot succeed: a daemon of its own needs some 60, and its keeper passes them on above number 100.
const LEAST: u64 = 128;

/// How long a refusal is shown.
const SHOWN_FOR: Duration = Duration::from_secs(600);

/// Raises the limit as far as this process may, once at the start. Errors: even then it is too small to start with.
pub(crate) fn raise_limit() -> anyhow::Result<()> {
    let limit = getrlimit(Resource::Nofile);
    let wanted = Rlimit { current: Some(WANTED), maximum: Some(WANTED) };
    if setrlimit(Resource::Nofile, wanted).is_err() {
        // Without privileges: as far as the hard limit allows.
        let own = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, own) {
            tracing::warn!(%error, limit = ?limit.current, "the descriptor limit stays as it is");
        }
    }
    if let Some(limit) = getrlimit(Resource::Nofile).current.filter(|limit| *limit < LEAST) {
        anyhow::bail!(
            "this process may open {limit} files (descriptors), and at least {LEAST} are needed to start; {FIX}"
        );
    }
    let (enough, what) = check();
    if !enough {
        tracing::warn!(what, fix = FIX, "the descriptor limit is small");
    }
    Ok(())
}

/// Returns a problem if a program's call was refused for want of a descriptor lately.
pub(crate) fn problem() -> Option<Problem> {
    let ago = last_refusal()?.elapsed();
    (ago < SHOWN_FOR).then(|| {
        let (_, limit) = check();
        let what = format!(
            "a program's open or create was refused {} s ago (EMFILE), because ckptd has as many files open as it may: {limit}",
            ago.as_secs()
        );
        Problem::new(ProblemCode::Descriptors, what, FIX)
    })
}

/// Advice about a small limit.
pub(crate) const FIX: &str =
    "raise LimitNOFILE of the service, or the hard limit (ulimit -Hn) before it starts";

/// Whether the limit is enough, and the numbers.
pub(crate) fn check() -> (bool, String) {
    let limit = getrlimit(Resource::Nofile).current;
    let enough = limit.is_none_or(|limit| limit >= ENOUGH);
    let limit = limit.map_or_else(|| "any number of".to_owned(), |limit| limit.to_string());
    (enough, format!("{limit} files may be open at once, {ENOUGH} are enough for most loads"))
}
