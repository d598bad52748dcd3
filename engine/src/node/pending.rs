//! What of a checkpoint is not durable, and why.
//!
//! Owns: the reason that people are told, and whether waiting may bring it. Does not own: the waiting (`flush`), the upload (`run`), what
//! counts as complete (protocol).

use crate::node::book::Book;
use crate::node::decide;
use crate::node::ledger::{Contents, contents};
use crate::node::rescue::{self, Rescue};
use crate::node::run::Engine;
use std::sync::Arc;
use tidemark_namespace::{FileState, FileView};
use tidemark_protocol::evidence::Verdict;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::{Pending, PendingReason, path_text};

/// What is not durable.
pub(crate) struct Row {
    pub(crate) pending: Pending,
    /// Waiting may bring it, as far as its reason lets it.
    pub(crate) comes: bool,
}

impl Row {
    pub(crate) fn of(pending: Pending) -> Self {
        let comes = !matches!(
            pending.reason,
            PendingReason::Torn
                | PendingReason::Unreadable
                | PendingReason::Damaged
                | PendingReason::Unnameable
        );
        Self { pending, comes }
    }

    /// No waiting brings it.
    fn left(path: &str, reason: PendingReason, what: String) -> Self {
        Self { pending: Pending { path: path.to_owned(), reason, what }, comes: false }
    }
}

impl Engine {
    /// What a checkpoint waits for that is to come to Tier-3 by itself.
    pub(crate) fn comes(&self, book: &Book) -> Option<Pending> {
        self.pending_book(book).filter(|row| row.comes).map(|row| row.pending)
    }

    /// Nothing more comes, and all of the newest committed version is in the tree.
    fn is_committed_with_more(&self, book: &Book) -> bool {
        matches!(book.verdict, Some(Verdict::Settled { undecided: false, .. }))
            && book.committed().is_some_and(|(_, version)| self.is_in_sight(book, version))
    }

    /// The newest committed version is in the tree, and what else is there lies beside it, or is not there any more.
    pub(super) fn is_committed_beside(&self, book: &Book, present: Option<&Contents>) -> bool {
        let lies_beside = || {
            !book.apart.is_empty()
                && book.committed().is_some_and(|(_, version)| self.is_in_sight(book, version))
        };
        present.is_some_and(|present| book.is_committed_with(&self.shared, present)) || lies_beside()
    }

    /// What is not durable of a checkpoint, and why.
    pub(crate) fn pending_book(&self, book: &Book) -> Option<Row> {
        let path = path_text(&book.path());
        let row = |reason, what: String| Some(Row::of(Pending { path: path.clone(), reason, what }));
        if let Some(version) = self.on_its_way(&book.id) {
            let what = version.trouble.clone();
            let what = what.unwrap_or_else(|| "what was whole of it is on its way to Tier-3".to_owned());
            return row(PendingReason::Uploading, what);
        }
        if self.is_stood_in(&book.id) {
            return None;
        }
        let candidate = book.candidate.as_ref()?;
        let mut files: Vec<_> = self.ledger.files_of(candidate, &book.scope).collect();
        // That holds back nothing of the rest.
        let beside = self.left_beside(book, &path, &files);
        if beside.is_some() {
            files.retain(|(path, _)| !book.apart.contains(*path));
        }
        self.pending_files(book, &path, &files).or(beside)
    }

    /// A file beside what is whole that no waiting brings to Tier-3: a program has it open, or it was left unclosed. The end of the daemon
    /// keeps the latter as it is, but not on several nodes, where another one may have a writer.
    fn left_beside(&self, book: &Book, of: &str, files: &[(&RelPath, &Arc<FileView>)]) -> Option<Row> {
        if book.apart.is_empty() {
            return None;
        }
        let present = contents(files.iter().copied());
        let is_kept = present.is_some_and(|present| book.covering(&self.shared, &present).is_some());
        let stays = self.shared.cluster.get().is_some() || !self.draining;
        let left = |(path, view): &(&RelPath, &Arc<FileView>)| match view.state {
            FileState::Open { .. } | FileState::Mapped if !self.draining => self.written(path, view, false),
            FileState::Cut | FileState::Sealed { .. } if view.is_left_cut() && stays && !is_kept => {
                Some((PendingReason::Incomplete, left_unclosed(path)))
            }
            _ => None,
        };
        let (reason, what) = files.iter().filter(|(path, _)| book.apart.contains(*path)).find_map(left)?;
        Some(Row::left(of, reason, what))
    }

    /// The same of those files of a checkpoint.
    fn pending_files(&self, book: &Book, path: &str, files: &[(&RelPath, &Arc<FileView>)]) -> Option<Row> {
        let row = |reason, what: String| Some(Row::of(Pending { path: path.to_owned(), reason, what }));
        let contents = contents(files.iter().copied());
        let covering = contents.as_ref().and_then(|contents| book.covering(&self.shared, contents));
        if let Some((_, version)) = covering {
            let checkpoint = &version.checkpoint;
            let unproven = checkpoint.is_prepared() && !checkpoint.is_proven();
            return match &version.trouble {
                // Of what cannot be read any more a flush makes nothing.
                _ if checkpoint.is_committed() || checkpoint.why_unreadable().is_some() => None,
                Some(why) => row(PendingReason::Uploading, why.clone()),
                None if unproven && version.record().partial => {
                    row(PendingReason::Torn, version.record().evidence_detail.clone())
                }
                // Taken up early because the daemon ends: it is committed when its time has passed.
                None if unproven && self.draining && self.is_waiting_for_time(book) => {
                    row(PendingReason::Uploading, decide::waits_for(book))
                }
                // Tier-3 has what lies beside what is committed, or lay there, and that stands.
                None if unproven && self.is_committed_beside(book, contents.as_ref()) => None,
                // Tier-3 has all that there is of it, and waiting brings no proof.
                None if unproven && version.record().doubted => {
                    Some(Row::left(path, PendingReason::Incomplete, decide::waits_for(book)))
                }
                // Tier-3 has what was added to what is committed, and that stands.
                None if unproven && self.is_committed_with_more(book) => None,
                None if unproven => row(PendingReason::Incomplete, decide::waits_for(book)),
                None => row(PendingReason::Uploading, "its bytes are on their way to Tier-3".to_owned()),
            };
        }
        let unreadable = |(path, view): &(&RelPath, &Arc<FileView>)| {
            let why = self.ledger.unreadable.get(&view.node)?;
            Some(format!("{path} is closed and cannot be read to be sealed: {why}"))
        };
        if let Some(what) = files.iter().find_map(unreadable) {
            return row(PendingReason::Unreadable, what);
        }
        if self.draining {
            if let Some((reason, what)) = self.saving(book).filter(|_| self.grace_until.is_some()) {
                return row(reason, what);
            }
            let what = match rescue::look(&self.shared, &self.ledger, book) {
                Rescue::Sealing => Some("its files are being sealed"),
                Rescue::Uploading | Rescue::Wanted(_) => Some("its sealed files are on their way to Tier-3"),
                Rescue::Done => None,
            };
            if let Some(what) = what {
                return row(PendingReason::Uploading, what.to_owned());
            }
        }
        if book.is_torn() {
            return row(PendingReason::Torn, decide::waits_for(book));
        }
        for (path, view) in files {
            match view.state {
                FileState::Open { writers } => {
                    return row(PendingReason::Open, format!("{path} has {writers} open writers"));
                }
                FileState::Mapped => return row(PendingReason::Mapped, format!("{path} is mapped writable")),
                FileState::Closed | FileState::Cut | FileState::Sealed { .. } => {}
            }
        }
        if contents.is_none() && !files.iter().any(|(_, view)| matches!(view.state, FileState::Cut)) {
            return row(PendingReason::Uploading, "its files are being sealed".to_owned());
        }
        // A failed version covers these contents: nothing will make them whole.
        if let Some((_, version)) = book.versions.iter().next_back()
            && let (Some(why), Some(contents)) = (version.checkpoint.failure(), &contents)
            && decide::is_covered(contents, &version.contents)
        {
            return row(PendingReason::Torn, why.to_owned());
        }
        // On several nodes nobody seals it as it is.
        if matches!(book.verdict, Some(Verdict::Settled { .. }))
            && self.shared.cluster.get().is_some()
            && let Some((left, _)) = files.iter().find(|(_, view)| view.state == FileState::Cut)
        {
            return Some(Row::left(path, PendingReason::Incomplete, left_unclosed(left)));
        }
        if let Some((beside, _)) = files.iter().find(|(path, _)| book.apart.contains(*path)) {
            let what = format!("{beside} lies beside what is whole, and is on its way to Tier-3");
            return row(PendingReason::Uploading, what);
        }
        if let (Some(why), Some(Verdict::Complete { .. })) = (book.in_the_way.why(), &book.verdict) {
            return row(PendingReason::Uploading, why.to_owned());
        }
        let settling = decide::is_settling(book);
        let reason = if settling { PendingReason::Uploading } else { PendingReason::Incomplete };
        row(reason, decide::waits_for(book))
    }
}

/// Why a file is not in Tier-3 that nobody will close.
pub(crate) fn left_unclosed(path: &RelPath) -> String {
    format!("{path} was left unclosed by a program that has ended")
}
