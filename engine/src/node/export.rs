//! `ckptctl export`: which version is written out, and that it stays until it is.
//!
//! Owns: choosing it, the hold on it, how an error reads. Does not own: the writing (`restore::export`).

use crate::error::ErrorKind;
use crate::node::answer::{Wanted, checkpoint_ref, unreadable};
use crate::node::book::Number;
use crate::node::run::{Engine, Node, error_text};
use crate::restore::export::{ExportError, export};
use std::path::PathBuf;
use std::sync::Arc;
use tidemark_protocol::id::{Timeline, Version};
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::report::{ApiError, CheckpointRef, ErrorCode, Export, Progress, path_text};

/// A version that somebody reads out of the tree's sight; retention keeps it while this lives.
struct Held {
    manifest: Arc<Manifest>,
    reference: CheckpointRef,
    _hold: Arc<()>,
}

impl Node {
    /// Writes a committed version into a new directory outside of the mount: the newest of the checkpoint, or `number`.
    ///
    /// # Errors
    /// There is none; the target is there; no copy of a file verifies; Tier-3 is away; the disk is full; the daemon is ending.
    /// Nothing is left of it then.
    pub async fn export(
        &self,
        wanted: Wanted,
        number: Option<(Timeline, Version)>,
        target: PathBuf,
        tell: impl Fn(Progress),
    ) -> Result<Export, ApiError> {
        let ending =
            || ApiError::new(ErrorCode::Unavailable, "the daemon is ending", "ask again when it runs");
        let held = self.ask(move |engine| engine.hold(&wanted, number)).await.ok_or_else(ending)??;
        let (total_bytes, total_files) = (held.manifest.size_bytes(), held.manifest.files.len() as u64);
        tell(Progress { total_bytes, total_files, ..Progress::default() });
        let tell = |done_bytes, done_files, path: &tidemark_protocol::path::RelPath| {
            tell(Progress { done_bytes, total_bytes, done_files, total_files, now: Some(path.to_string()) });
        };
        let exported = export(self.shared(), &held.manifest, target.clone(), tell).await;
        let exported = exported.map_err(|error| refusal(&error))?;
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

impl Engine {
    fn hold(&mut self, wanted: &Wanted, number: Option<Number>) -> Result<Held, ApiError> {
        let none =
            |what: String| ApiError::new(ErrorCode::NotFound, what, "`ckptctl ls --all` shows what there is");
        let book =
            self.find_committed(wanted).ok_or_else(|| none("there is no such checkpoint".to_owned()))?;
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
        let of = (book.id.clone(), number);
        self.gc.check_stays(&of)?;
        Ok(Held { manifest, reference, _hold: self.gc.hold(of) })
    }
}
