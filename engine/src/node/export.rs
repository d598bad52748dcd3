//! `ckptctl export`: chooses the version to write out, and holds it until it is written.
//!
//! Owns: choosing the version, the hold on it, adding names of the tree that versions do not record, the words of an error. Does not own:
//! the writing (`restore::export`).

use crate::node::Shared;
use crate::node::answer::{checkpoint_ref, unreadable};
use crate::node::book::Number;
use crate::node::run::{Engine, Node};
use crate::node::select::Wanted;
use crate::node::tree_now::attributes_of;
use crate::restore::export::{ExportError, export};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use tidemark_namespace::TreeSnapshot;
use tidemark_protocol::error::{ErrorKind, error_text};
use tidemark_protocol::format::Document;
use tidemark_protocol::id::{Timeline, Version};
use tidemark_protocol::manifest::{Directory, Manifest, Symlink};
use tidemark_protocol::path::{RawText, RelPath};
use tidemark_protocol::recognise::Shape;
use tidemark_protocol::report::{ApiError, CheckpointRef, ErrorCode, Export, Progress, path_text};

/// A version that is read without the tree. Retention keeps the version while this lives.
struct Held {
    manifest: Arc<Manifest>,
    reference: CheckpointRef,
    /// Directory of the version, if the tree shows it in one.
    shown: Option<(RelPath, Shape)>,
    _hold: Arc<()>,
}

/// Returns the manifest, extended by the symbolic links and directories that the tree has below `top`, which no version records. Also
/// returns a description of what is left out.
fn with_tree(
    manifest: &Manifest,
    snapshot: &TreeSnapshot,
    (top, shape): &(RelPath, Shape),
) -> (Manifest, BTreeSet<String>) {
    // Beside the files of a flat checkpoint lie unrelated directories.
    let is_whole_tree = *shape == Shape::Tree;
    let inside = |path: &[u8]| {
        let path = RelPath::new(path).ok()?;
        let is_inside = if is_whole_tree { path.is_below(top) } else { path.parent().as_ref() == Some(top) };
        is_inside.then_some(path)
    };
    let mut more = manifest.clone();
    if is_whole_tree {
        let listed: BTreeSet<_> = manifest.directories.iter().map(|directory| &directory.path).collect();
        let found = snapshot.directories.iter().filter_map(|node| Some((inside(&node.path)?, node)));
        let unlisted = found.filter(|(path, _)| !listed.contains(path));
        let directory = |(path, node)| Directory { path, attributes: attributes_of(node) };
        more.directories.extend(unlisted.map(directory));
    }
    let links: BTreeMap<&[u8], _> =
        snapshot.symlinks.iter().map(|link| (link.0.path.as_slice(), link)).collect();
    let further = snapshot.hard_links.iter().filter_map(|name| {
        let link = links.get(name.to.as_slice())?;
        Some((name.path.as_slice(), *link))
    });
    let names = links.iter().map(|(path, link)| (*path, *link)).chain(further);
    more.symlinks.extend(names.filter_map(|(path, (node, target))| {
        let (uid, gid, mtime_ns) = (node.uid, node.gid, node.mtime_ns);
        Some(Symlink { path: inside(path)?, target: RawText(target.clone()), uid, gid, mtime_ns })
    }));
    let mut left_out = BTreeSet::new();
    let specials = snapshot.specials.iter().filter(|(node, _)| inside(&node.path).is_some()).count();
    if specials > 0 {
        left_out.insert(format!("pipes, sockets and devices: {specials}"));
    }
    match more.validate() {
        Ok(()) => (more, left_out),
        // The tree has changed since it was found to show this version.
        Err(flaw) => {
            left_out.insert(format!("symbolic links and empty directories: {flaw}"));
            (manifest.clone(), left_out)
        }
    }
}

/// Does the same with the current tree. Costs a pass over the whole tree.
async fn with_tree_now(shared: &Arc<Shared>, held: &Held) -> (Arc<Manifest>, BTreeSet<String>) {
    let Some(place) = held.shown.clone() else { return (Arc::clone(&held.manifest), BTreeSet::new()) };
    let (shared, manifest) = (Arc::clone(shared), Arc::clone(&held.manifest));
    let look = move || {
        let (manifest, left_out) = with_tree(&manifest, &shared.namespace.tree_snapshot(), &place);
        (Arc::new(manifest), left_out)
    };
    tokio::task::spawn_blocking(look).await.expect("looking at the tree does not panic")
}

impl Node {
    /// Writes a committed version into a new directory outside of the mount: the newest of the checkpoint, or `number`.
    ///
    /// # Errors
    /// Fails if no checkpoint or several are meant, the target exists, no copy of a file verifies, Tier-3 is away, the disk is full, or
    /// the daemon is ending. After an error, nothing is left at the target.
    pub async fn export(
        &self,
        wanted: Wanted,
        number: Option<(Timeline, Version)>,
        target: PathBuf,
        tell: impl Fn(Progress),
    ) -> Result<Export, ApiError> {
        let ending =
            || ApiError::new(ErrorCode::Unavailable, "the daemon is ending", "ask again when it runs");
        let held = self.ask(move |engine| hold(engine, &wanted, number)).await.ok_or_else(ending)??;
        let (total_bytes, total_files) = (held.manifest.size_bytes(), held.manifest.files.len() as u64);
        tell(Progress { total_bytes, total_files, ..Progress::default() });
        let tell = |done_bytes, done_files, path: &RelPath| {
            tell(Progress { done_bytes, total_bytes, done_files, total_files, now: Some(path.to_string()) });
        };
        let (manifest, left_out) = with_tree_now(self.shared(), &held).await;
        let exported = export(&self.shared().restorer, &manifest, target.clone(), tell).await;
        let mut exported = exported.map_err(|error| refusal(&error))?;
        exported.left_out.extend(left_out);
        Ok(Export {
            checkpoint: held.reference.clone(),
            directory: target.to_string_lossy().into_owned(),
            files: exported.files,
            bytes: exported.bytes,
            host_files: exported.host_files,
            left_out: exported.left_out.into_iter().collect(),
        })
    }
}

fn refusal(error: &ExportError) -> ApiError {
    let (code, action) = match (error.kind(), error) {
        (_, ExportError::Exists { .. }) => (ErrorCode::Failed, "give a name that is free"),
        (_, ExportError::Place { .. }) => (ErrorCode::Usage, "give a new name in a directory that is there"),
        (ErrorKind::Corrupt | ErrorKind::NotFound, _) => (
            ErrorCode::NotRecoverable,
            "nothing was left there; `ckptctl verify --deep` tells which copies are good",
        ),
        (ErrorKind::Unavailable, _) => {
            (ErrorCode::Unavailable, "nothing was left there; `ckptctl status` shows how Tier-3 is")
        }
        (ErrorKind::Fenced, _) => (ErrorCode::Fenced, ""),
        (ErrorKind::Invalid | ErrorKind::NoSpace, _) => (ErrorCode::Failed, "nothing was left there"),
    };
    ApiError::new(code, error_text(error), action)
}

/// Keeps the version that is asked for until the returned value ends.
fn hold(engine: &mut Engine, wanted: &Wanted, number: Option<Number>) -> Result<Held, ApiError> {
    let none =
        |what: String| ApiError::new(ErrorCode::NotFound, what, "`ckptctl ls --all` shows what there is");
    let book =
        engine.selection().find(wanted)?.ok_or_else(|| none("there is no such checkpoint".to_owned()))?;
    let path = path_text(&book.path());
    let found = match number {
        None => book.committed().map(|(number, version)| (*number, version)),
        Some(number) => book.versions.get(&number).map(|version| (number, version)),
    };
    let damaged = match number {
        None => book.unreadable().map(|(_, version)| version),
        Some(number) => book.versions.get(&number),
    };
    let damaged = damaged.and_then(|version| version.checkpoint.why_unreadable());
    let (number, version) =
        found.filter(|(_, version)| version.checkpoint.is_committed()).ok_or_else(|| {
            if let Some(why) = damaged {
                return unreadable(&path, why);
            }
            let which = number.map_or_else(
                || "no version".to_owned(),
                |(timeline, version)| format!("no version {timeline}.{version}"),
            );
            none(format!("{which} of {path} is committed"))
        })?;
    let Some(manifest) = version.manifest().map(Arc::clone) else {
        return Err(none(format!("the manifest of {path} is not known")));
    };
    let reference = checkpoint_ref(&version.checkpoint);
    let candidate = book.candidate.as_ref().filter(|candidate| candidate.is_directory());
    let candidate = candidate.filter(|_| engine.tree_names().is_in_sight(book, version));
    let shown = candidate.and_then(|candidate| Some((candidate.id.path()?, candidate.shape)));
    let of = (book.id.clone(), number);
    engine.gc.check_stays(&of)?;
    Ok(Held { manifest, reference, shown, _hold: engine.gc.hold(of) })
}
