//! Removing dead objects from Tier-3: unfinished multipart uploads of dead writers, and remains of retirements and aborts that
//! were cut short.
//!
//! Owns: which of them are known to be dead. Does not own: finding and aborting uploads (store), removing a version's objects
//! (`commit`), what Tier-3 holds (`restore::locate`).
//!
//! Age proves nothing: a slow upload of another node may be as old as a dead one. An upload to a version is dead if the version has a
//! marker: a commit has all its data, and an abort needs none. An upload of a loose file is dead if its generation, or a later one,
//! has a sidecar. All other uploads stay.

use crate::save::commit::{self, CommitError};
use crate::save::drain::Drain;
use futures::stream::{self, StreamExt};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_protocol::id::Generation;
use tidemark_protocol::key::{Key, PathOrHash, VersionId};
use tidemark_protocol::path::RelPath;

/// Maximum number of requests on their way; no caller waits for them.
const ABORTS_IN_FLIGHT: usize = 4;

/// The final decisions that Tier-3 held when the daemon started.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Decided {
    /// Versions with a marker that was read.
    pub versions: BTreeSet<VersionId>,
    /// The newest generation of each loose file whose sidecar was read.
    pub loose: BTreeMap<RelPath, Generation>,
    /// Aborted versions that have objects left beside their markers.
    pub aborted_remains: Vec<VersionId>,
    /// Retired versions that have objects left beside their markers.
    pub retired_remains: Vec<VersionId>,
}

impl Decided {
    /// Whether an upload to this key can never matter any more.
    #[must_use]
    pub fn is_dead(&self, key: &str) -> bool {
        match key.parse::<Key>() {
            Ok(Key::Data { version, .. }) => self.versions.contains(&version),
            Ok(Key::Loose { path: PathOrHash::Path(path), generation }) => {
                self.loose.get(&path).is_some_and(|decided| *decided >= generation)
            }
            // The key is not one of ours, or its object is never uploaded in parts.
            Ok(_) | Err(_) => false,
        }
    }
}

/// Removes dead objects. If a removal fails, this logs it, and the object stays until the next start.
pub async fn sweep(drain: Arc<Drain>, decided: Decided) {
    // Versions are cleared first, so that an upload still going on belongs to a decided version by then.
    for version in &decided.aborted_remains {
        say_cleared(version, &commit::clear(&drain, version).await);
    }
    for version in &decided.retired_remains {
        // The boundary precedes the deletes, and may be missing if the retirement was cut short.
        say_cleared(version, &commit::resume_retirement(&drain, version).await);
    }
    abort_uploads(&drain, &decided).await;
}

fn say_cleared(version: &VersionId, result: &Result<(), CommitError>) {
    match result {
        Ok(()) => tracing::info!(%version, "what was left of a version that is given up was removed"),
        Err(error) => {
            let error = error as &dyn std::error::Error;
            tracing::warn!(%version, error, "what is left of a version that is given up stays");
        }
    }
}

async fn abort_uploads(drain: &Arc<Drain>, decided: &Decided) {
    let store = drain.store.describe();
    let found = match drain.store.unfinished_uploads().await {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!(
                %store,
                error = &error as &dyn std::error::Error,
                "unfinished uploads cannot be listed, and their parts cost space until they are aborted: permit \
                 s3:ListBucketMultipartUploads and s3:AbortMultipartUpload, or give the bucket a lifecycle rule with \
                 AbortIncompleteMultipartUpload"
            );
            return;
        }
    };
    let (dead, left): (Vec<_>, Vec<_>) = found.into_iter().partition(|upload| decided.is_dead(&upload.key));
    if !left.is_empty() {
        tracing::info!(%store, uploads = left.len(), "unfinished uploads may belong to a live writer and stay");
    }
    let aborts = dead.into_iter().map(|upload| {
        let drain = Arc::clone(drain);
        async move {
            let result = drain.store.abort_upload(&upload).await;
            (upload.key, result)
        }
    });
    let mut aborts = stream::iter(aborts).buffer_unordered(ABORTS_IN_FLIGHT);
    while let Some((key, result)) = aborts.next().await {
        match result {
            Ok(()) => tracing::info!(%key, "an unfinished upload of a dead writer was aborted"),
            Err(error) => {
                tracing::warn!(%key, error = &error as &dyn std::error::Error, "an unfinished upload stays");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_decided_is_dead() {
        let mut decided = Decided::default();
        let key = |version: u32| format!("r/step1.pt/v0.{version}/a-1f2e3d4c5b6a7988/step1.pt");
        let Ok(Key::Data { version, .. }) = key(1).parse::<Key>() else { panic!("a data key") };
        decided.versions.insert(version);
        decided.loose.insert(RelPath::new("r/notes.txt").unwrap(), Generation(2));
        let stand_in = "r/step1.pt/v0.1/a-1f2e3d4c5b6a7988+00000000000000aa/step1.pt";
        for dead in
            [key(1).as_str(), stand_in, ".tidemark/loose/r/notes.txt/g-1", ".tidemark/loose/r/notes.txt/g-2"]
        {
            assert!(decided.is_dead(dead), "{dead}");
        }
        for alive in [
            key(2).as_str(),
            ".tidemark/loose/r/notes.txt/g-3",
            ".tidemark/loose/r/other.txt/g-1",
            "README",
            "",
        ] {
            assert!(!decided.is_dead(alive), "{alive}");
        }
    }
}
