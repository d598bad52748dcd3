//! Everything about one checkpoint, or one file outside checkpoints, as `ckptctl show` asks for it.
//!
//! Owns: putting the answer together. Does not own: finding the checkpoint, and its row (`answer`).

use crate::node::answer::{Identity, is_of};
use crate::node::book::{Book, VersionBook};
use crate::node::damage::BadCopies;
use crate::node::decide;
use crate::node::inventory::Inventory;
use crate::node::outstanding::Outstanding;
use crate::node::run::{Engine, Node};
use crate::node::select::Wanted;
use std::collections::BTreeSet;
use tidemark_namespace::FileState;
use tidemark_protocol::key::{Key, checkpoint_path};
use tidemark_protocol::manifest::Manifest;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::{ApiError, CheckpointRef, Copies, CopyCount, File, Show, path_text};
use tokio::time::Instant;

impl Node {
    /// Returns everything about the checkpoint or loose file that `wanted` names. The outer `None`: the loop has stopped. The inner
    /// one: there is none.
    ///
    /// # Errors
    /// Fails when `wanted` names several.
    pub async fn show(
        &self,
        wanted: Wanted,
        files: bool,
        identity: Identity,
    ) -> Option<Result<Option<Show>, ApiError>> {
        self.ask(move |engine| Showing { engine }.show(&wanted, files, &identity)).await
    }
}

/// A checkpoint or loose file, as `show` prints it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Showing<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> Showing<'a> {
    fn show(self, wanted: &Wanted, files: bool, identity: &Identity) -> Result<Option<Show>, ApiError> {
        match self.engine.selection().find(wanted)? {
            Some(book) => Ok(self.show_book(book, files, identity)),
            None => Ok(self.show_loose(wanted, files, identity)),
        }
    }

    fn show_book(self, book: &Book, files: bool, identity: &Identity) -> Option<Show> {
        let checkpoint = Inventory { engine: self.engine }.rows(book, false).into_iter().next()?;
        let number = (checkpoint.timeline, checkpoint.version);
        let version = book.versions.get(&number);
        let committed = version.and_then(|version| version.committed.as_ref());
        let id = book.version_id(number);
        let mut waits_for = Vec::new();
        if committed.is_none() {
            let unreadable = version.and_then(|version| version.checkpoint.why_unreadable());
            let trouble = version.and_then(|version| version.trouble.clone());
            let trouble = unreadable.map(ToOwned::to_owned).or(trouble);
            waits_for.push(match (trouble, version.map(|version| &version.checkpoint)) {
                (Some(why), _) => why,
                (None, Some(version)) if version.is_alive() && version.is_proven() => {
                    "its bytes are on their way to Tier-3".to_owned()
                }
                (None, _) => decide::waits_for(book),
            });
        }
        Some(Show {
            evidence_detail: version.map(|version| version.checkpoint.evidence().1.to_owned()),
            waits_for,
            attempt: version.map(|version| version.record().attempt.to_string()),
            participants: version.map_or_else(Vec::new, |version| {
                version.record().participants.iter().map(ToString::to_string).collect()
            }),
            marker_key: committed.map(|_| Key::Committed { version: id.clone() }.to_string()),
            manifest_key: committed.and_then(|(manifest, _)| {
                let (_, hash) = manifest.encode_named().ok()?;
                Some(Key::Manifest { version: id.clone(), attempt: manifest.attempt, hash }.to_string())
            }),
            epoch: committed.map(|(_, epoch)| epoch.0),
            lost: version.and_then(|version| {
                let unreadable = version.checkpoint.why_unreadable().map(ToOwned::to_owned);
                unreadable.or_else(|| self.engine.tree_names().why_lost(version.record()))
            }),
            previous: version.and_then(|version| version.previous.as_ref()).map(|previous| CheckpointRef {
                timeline: previous.timeline,
                step: previous.step,
                version: previous.version,
                path: path_text(&checkpoint_path(&book.id.run, &previous.directory)),
            }),
            files: files.then(|| self.files_shown(book, version, identity)),
            checkpoint,
        })
    }

    /// Returns a file that belongs to no checkpoint, as if it were one.
    fn show_loose(self, wanted: &Wanted, files: bool, identity: &Identity) -> Option<Show> {
        let Wanted::Path(path) = wanted else { return None };
        let path = RelPath::new(path.clone()).ok()?;
        let book = self.engine.ledger.loose.get(&path)?;
        let checkpoint = Inventory { engine: self.engine }.loose_row(&path)?;
        let mut file = self.file_shown(path.clone(), None, identity);
        (file.bytes, file.copies) = (checkpoint.bytes, checkpoint.copies);
        Some(Show {
            evidence_detail: None,
            waits_for: Outstanding { engine: self.engine }
                .lack_of(&path, book, None, Instant::now())
                .map(|lack| lack.what)
                .into_iter()
                .collect(),
            attempt: None,
            participants: Vec::new(),
            marker_key: None,
            manifest_key: None,
            epoch: None,
            previous: None,
            lost: None,
            files: files.then(|| vec![file]),
            checkpoint,
        })
    }

    fn files_shown(self, book: &Book, version: Option<&VersionBook>, identity: &Identity) -> Vec<File> {
        let mut paths: BTreeSet<RelPath> = version
            .map(|version| version.record().files.iter().map(|file| file.path.clone()).collect())
            .unwrap_or_default();
        if version.is_none() {
            paths.extend(book.candidate.iter().flat_map(|candidate| candidate.files.keys().cloned()));
        }
        paths.into_iter().map(|path| self.file_shown(path, version, identity)).collect()
    }

    fn file_shown(self, path: RelPath, version: Option<&VersionBook>, identity: &Identity) -> File {
        let entry = version.and_then(|version| version.record().files.iter().find(|file| file.path == path));
        let view = self.engine.ledger.file(&path).filter(|view| entry.is_none_or(|entry| is_of(entry, view)));
        let bytes =
            entry.map(|entry| entry.size_bytes).or_else(|| view.map(|view| view.size_bytes)).unwrap_or(0);
        let count = |here: bool| if here { CopyCount { files: 1, bytes } } else { CopyCount::default() };
        let key = |manifest: &Manifest| {
            manifest.files.iter().find(|file| file.path == path).map(|file| file.key.clone())
        };
        let stored = version.and_then(|version| match (version.manifest(), &version.attempt) {
            (Some(manifest), _) => key(manifest),
            (None, Some(attempt)) => attempt.manifest().ok().and_then(|manifest| key(&manifest)),
            (None, None) => None,
        });
        // While a file is written again, its noted copy is of other bytes.
        let noted = view.filter(|view| view.sealed().is_some()).and_then(|view| view.object.as_ref());
        let object_key = stored.or_else(|| noted.map(|object| object.key.clone()));
        let of = entry.map(|entry| (entry.file, entry.seal));
        let of = of.or_else(|| view.and_then(|view| Some((view.file, view.sealed()?))));
        let is_good =
            |key: &String| of.is_none_or(|(file, seal)| !self.engine.scrub.is_bad_object(file, seal, key));
        let object = object_key.as_ref().is_some_and(is_good);
        let state = view.map_or("sealed", |view| decide::state_word(&view.state));
        let sealed = view.and_then(|view| match &view.state {
            FileState::Sealed { crc, .. } => Some(*crc),
            FileState::Open { .. } | FileState::Closed | FileState::Cut | FileState::Mapped => None,
        });
        let host = view.is_some_and(|view| view.host);
        let is_bad = view.is_some_and(|view| BadCopies { engine: self.engine }.is_bad_host(view));
        File {
            bytes,
            crc64nvme: entry.map(|entry| entry.crc64nvme).or(sealed),
            copies: Copies { host: count(host && !is_bad), object: count(object), ..Copies::default() },
            host_path: view
                .filter(|_| host)
                .and_then(|view| self.engine.shared.namespace.nodes().host_path(view.node)),
            state: state.to_owned(),
            node: identity.node.clone(),
            object_key,
            mtime_ms: view.map(|view| view.mtime_ns / 1_000_000),
            path: path.to_string(),
        }
    }
}
