//! Metrics that a job sets on its checkpoints by `user.tidemark.metric`.
//!
//! Owns: which value counts for a version, and keeping a value that was set after the commit. Does not own: which values are
//! numbers and what follows from them (`protocol::retention`), when the values are written (`tree`).
//!
//! An evaluation ends long after the save that it is about, when the manifest is fixed. So the loop notes a value while the tree
//! shows the version, and the tree document keeps it.

use crate::node::Shared;
use crate::node::book::{Book, Number, VersionBook};
use crate::node::decide::is_covered;
use crate::node::ledger::{Ledger, contents};
use std::collections::BTreeMap;
use tidemark_namespace::{Caller, FsError, Namespace};
use tidemark_protocol::documents::VersionMetric;
use tidemark_protocol::manifest::{Attributes, Base64, Manifest};
use tidemark_protocol::path::{RawText, RelPath};
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::retention::{METRIC_XATTR, Metric};

/// Metrics of committed versions that differ from those in their manifests.
#[derive(Debug, Default)]
pub(crate) struct SaidLater(BTreeMap<(CheckpointId, Number), Said>);

/// A value and the name that carries it. If the job removed the value, it is empty.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Said {
    path: RelPath,
    value: Vec<u8>,
}

impl SaidLater {
    /// Restores the values that an earlier start wrote to the tree document.
    pub(crate) fn of(metrics: Vec<VersionMetric>) -> Self {
        let entry = |metric: VersionMetric| {
            let version = metric.version;
            let id = CheckpointId { run: version.run, directory: version.directory };
            ((id, (version.timeline, version.version)), Said { path: metric.path, value: metric.value.0 })
        };
        Self(metrics.into_iter().map(entry).collect())
    }

    /// Returns the metric that counts for a version now.
    pub(crate) fn metric_of(&self, book: &Book, number: Number, version: &VersionBook) -> Metric {
        let later = self.0.get(&(book.id.clone(), number)).cloned();
        let said = later.or_else(|| in_manifest(version.manifest()?, &book.path()));
        said.map_or(Metric::Unsaid, |said| Metric::parse(&said.value))
    }

    /// Returns the metrics as the tree document keeps them.
    pub(crate) fn documented(&self, ledger: &Ledger) -> Vec<VersionMetric> {
        let row = |((id, number), said): (&(CheckpointId, Number), &Said)| {
            let version = ledger.books.get(id)?.version_id(*number);
            Some(VersionMetric { version, path: said.path.clone(), value: Base64(said.value.clone()) })
        };
        self.0.iter().filter_map(row).collect()
    }

    /// Forgets the metric of a version that is no more.
    pub(crate) fn forget(&mut self, of: &(CheckpointId, Number)) {
        self.0.remove(of);
    }

    /// Takes down what the tree says of a checkpoint's newest committed version. Costs a pass over its names.
    pub(crate) fn note_metric(&mut self, shared: &Shared, ledger: &mut Ledger, id: &CheckpointId) {
        let Some(book) = ledger.books.get(id) else { return };
        let Some((number, version)) = book.committed() else { return };
        let Some(manifest) = version.manifest() else { return };
        let of = (id.clone(), *number);
        let written = in_manifest(manifest, &book.path());
        let before = self.0.get(&of).or(written.as_ref());
        let now = in_tree(shared, ledger, book, version);
        if now.as_ref() == before || !has_every_name(ledger, book, version) {
            return;
        }
        let taken_away = || Some(Said { path: before?.path.clone(), value: Vec::new() });
        let now = now.or_else(taken_away);
        if now.as_ref() == before {
            return;
        }
        match now.filter(|now| Some(now) != written.as_ref()) {
            Some(now) => self.0.insert(of, now),
            None => self.0.remove(&of),
        };
        ledger.tree_changed = true;
    }

    /// Sets the metric on a version's names after they were made from its manifest.
    pub(crate) fn show_metric(&self, shared: &Shared, id: &CheckpointId, number: Number) {
        if let Some(said) = self.0.get(&(id.clone(), number)) {
            show(shared, &said.path, &said.value);
        }
    }
}

fn value_of(attributes: &Attributes) -> Option<&Base64> {
    attributes.xattrs.get(&RawText(METRIC_XATTR.as_bytes().to_vec()))
}

/// Returns the value in a manifest: that of the checkpoint's own directory, else of the first file by path that has one.
fn in_manifest(manifest: &Manifest, top: &[u8]) -> Option<Said> {
    let own = manifest.directories.iter().filter(|directory| directory.path.as_bytes() == top);
    let own = own.map(|directory| (&directory.path, &directory.attributes));
    let files = manifest.files.iter().map(|file| (&file.path, &file.attributes));
    own.chain(files).find_map(|(path, attributes)| {
        Some(Said { path: path.clone(), value: value_of(attributes)?.0.clone() })
    })
}

/// Gives a name the value of its version, after the tree was made from a manifest.
pub(crate) fn show(shared: &Shared, path: &RelPath, value: &[u8]) {
    let Some(node) = shared.namespace.nodes().node_at(path.as_bytes()) else { return };
    let caller = Caller { uid: 0, gid: 0, pid: 0, now_ns: shared.now_ns(), request: 0 };
    let name = METRIC_XATTR.as_bytes();
    let done = if value.is_empty() {
        shared.namespace.xattrs().removexattr(node, name, &caller)
    } else {
        shared.namespace.xattrs().setxattr(node, name, value, 0, &caller)
    };
    match done {
        Ok(()) | Err(FsError::NoAttribute) => {}
        Err(error) => tracing::warn!(%path, ?error, "a metric from Tier-3 cannot be in the tree"),
    }
}

fn in_tree(shared: &Shared, ledger: &Ledger, book: &Book, version: &VersionBook) -> Option<Said> {
    let top = RelPath::new(book.path()).ok();
    let own = top.and_then(|path| Some(Said { value: metric_at(&shared.namespace, &path)?, path }));
    own.or_else(|| {
        version.contents.keys().find_map(|path| {
            let xattrs = &ledger.file(path)?.xattrs;
            let (_, value) = xattrs.iter().find(|(name, _)| name == METRIC_XATTR.as_bytes())?;
            Some(Said { path: path.clone(), value: value.clone() })
        })
    })
}

/// Whether the tree holds all of a version, and nothing else under the checkpoint's name: then what it says is about that
/// version, and what it does not say was not lost with a name.
fn has_every_name(ledger: &Ledger, book: &Book, version: &VersionBook) -> bool {
    let Some(candidate) = &book.candidate else { return false };
    let present = contents(ledger.files_of(candidate, &book.scope));
    present.is_some_and(|present| {
        present.len() == version.contents.len() && is_covered(&present, &version.contents)
    })
}

fn metric_at(namespace: &Namespace, path: &RelPath) -> Option<Vec<u8>> {
    let node = namespace.nodes().node_at(path.as_bytes())?;
    namespace.xattrs().getxattr(node, METRIC_XATTR.as_bytes()).ok()
}
