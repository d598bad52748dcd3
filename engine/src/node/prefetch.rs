//! Brings a checkpoint back into memory before a program opens it.
//!
//! Owns: which files are fetched, what is done about room, the sum of what came of it. Does not own: fetching one file
//! (`jobs`), which copies may give way for it (the namespace: never what is not committed).

use crate::node::Shared;
use crate::node::inventory::Inventory;
use crate::node::verify_scope::VerifyScope;
use tidemark_namespace::NodeId;
use tidemark_protocol::error::{ErrorKind, error_text};

use crate::node::run::Node;
use crate::node::verify::Unsealed;
use crate::restore::RestoreError;
use futures::stream::{self, StreamExt};
use std::sync::Arc;
use std::time::Duration;
use tidemark_protocol::report::{Prefetch, Progress, Unfetched};

/// Files fetched at once; each has up to `tier3.fetches_in_flight` chunks on their way.
const FILES_IN_FLIGHT: usize = 4;

/// How long a prefetched copy gives way last, to saves only, and to no other prefetch. A job that is started after its checkpoint
/// was fetched imports its packages first. Later the copy is like any other.
const HOLD: Duration = Duration::from_secs(10 * 60);

/// A file to fetch.
#[derive(Debug, Clone)]
struct Wanted {
    node: NodeId,
    path: String,
    size_bytes: u64,
}

/// Outcome for one file.
enum Came {
    /// The bytes were here already.
    Here,
    Fetched,
    /// Tier-1 has no room, and no other copy may give way.
    NoRoom(String),
    Failed(String),
}

impl Node {
    /// Makes every file at or below `place` openable without a fetch. Files that are still being written are here already, or
    /// cannot be fetched.
    ///
    /// With `wait`, returns the outcome; dropping the future stops the work between two files. Without `wait`, returns the plan,
    /// and the work continues in the background.
    pub async fn prefetch(
        &self,
        place: Vec<u8>,
        wait: bool,
        progress: impl Fn(Progress),
    ) -> Option<Prefetch> {
        let asked = self.ask(move |engine| {
            (Inventory { engine }.targets(&place), VerifyScope { engine }.unsealed(&place))
        });
        let (targets, unsealed) = asked.await?;
        let mut wanted: Vec<_> = targets
            .into_iter()
            .map(|listed| listed.target)
            .map(|target| Wanted { node: target.node, path: target.path, size_bytes: target.size_bytes })
            .collect();
        // In the order of their names, as most loaders open them.
        wanted.sort_by(|a, b| a.path.cmp(&b.path));
        let shared = Arc::clone(self.shared());
        if wait {
            return Some(fetch_all(shared, wanted, unsealed, progress).await);
        }
        let planned = Prefetch {
            total_files: (wanted.len() + unsealed.len()) as u64,
            total_bytes: sum_bytes(&wanted, &unsealed),
            ..Prefetch::default()
        };
        tokio::spawn(async move {
            let came = fetch_all(shared, wanted, unsealed, |_| ()).await;
            for file in came.no_room.iter().chain(&came.failed) {
                tracing::warn!(path = file.path, what = file.what, "a file was not prefetched");
            }
            tracing::info!(
                fetched_files = came.fetched_files,
                fetched_bytes = came.fetched_bytes,
                here_files = came.here_files,
                "prefetched"
            );
        });
        Some(planned)
    }
}

fn sum_bytes(wanted: &[Wanted], unsealed: &[Unsealed]) -> u64 {
    let sealed = wanted.iter().map(|file| file.size_bytes);
    sealed.chain(unsealed.iter().map(|file| file.size_bytes)).sum()
}

/// Adds files that have no checksum yet: nothing of them can be fetched.
fn add_unsealed(result: &mut Prefetch, unsealed: Vec<Unsealed>) {
    for Unsealed { path, size_bytes, host, why } in unsealed {
        if host {
            result.here_files += 1;
            result.here_bytes += size_bytes;
        } else {
            result.failed.push(Unfetched { path, size_bytes, what: why });
        }
    }
}

async fn fetch_all(
    shared: Arc<Shared>,
    wanted: Vec<Wanted>,
    unsealed: Vec<Unsealed>,
    progress: impl Fn(Progress),
) -> Prefetch {
    let total_bytes = sum_bytes(&wanted, &unsealed);
    let total_files = (wanted.len() + unsealed.len()) as u64;
    let mut result = Prefetch { waited: true, total_files, total_bytes, ..Prefetch::default() };
    add_unsealed(&mut result, unsealed);
    // Files that are here already must not give way to the rest.
    for file in &wanted {
        shared.namespace.hosts().hold_prefetched(file.node, HOLD);
    }
    let shared = &shared;
    let fetched = wanted.into_iter().map(|file| async move {
        let came = fetch_one(shared, &file).await;
        (file, came)
    });
    let mut fetched = stream::iter(fetched).buffer_unordered(FILES_IN_FLIGHT);
    let (mut done_files, mut done_bytes) = (result.here_files, result.here_bytes);
    while let Some((file, came)) = fetched.next().await {
        done_files += 1;
        done_bytes += file.size_bytes;
        let now = Some(file.path.clone());
        match came {
            Came::Here => {
                result.here_files += 1;
                result.here_bytes += file.size_bytes;
            }
            Came::Fetched => {
                result.fetched_files += 1;
                result.fetched_bytes += file.size_bytes;
            }
            Came::NoRoom(what) => {
                result.no_room.push(Unfetched { path: file.path, size_bytes: file.size_bytes, what });
            }
            Came::Failed(what) => {
                result.failed.push(Unfetched { path: file.path, size_bytes: file.size_bytes, what });
            }
        }
        progress(Progress { done_bytes, total_bytes, done_files, total_files, now });
    }
    result.no_room.sort_by(|a, b| a.path.cmp(&b.path));
    result.failed.sort_by(|a, b| a.path.cmp(&b.path));
    result
}

async fn fetch_one(shared: &Shared, file: &Wanted) -> Came {
    let Some(cold) = shared.namespace.hosts().cold(file.node) else { return Came::Here };
    if cold.size_bytes == 0 {
        // An empty file has nothing to fetch.
        return Came::Here;
    }
    match shared.restorer.restore_at_once(file.path.clone(), cold).await {
        Ok(()) => {
            shared.namespace.hosts().hold_prefetched(file.node, HOLD);
            Came::Fetched
        }
        Err(RestoreError::NoSpace { source, .. }) if source.kind() == ErrorKind::NoSpace => {
            Came::NoRoom(source.to_string())
        }
        Err(error) => Came::Failed(error_text(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_still_is_here_or_named() {
        let file = |path: &str, host| Unsealed { path: path.into(), size_bytes: 3, host, why: "open".into() };
        let mut result = Prefetch::default();
        add_unsealed(&mut result, vec![file("r/a", true), file("r/b", false)]);
        assert_eq!((result.here_files, result.here_bytes), (1, 3));
        let failed: Vec<_> =
            result.failed.iter().map(|file| (file.path.as_str(), file.what.as_str())).collect();
        assert_eq!(failed, [("r/b", "open")]);
    }
}
