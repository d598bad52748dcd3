//! Content of a checkpoint that is not durable, and why.
//!
//! Owns: the reason that people see, and whether waiting may help. Does not own: the waiting (`flush`), the upload (`run`), what
//! counts as complete (protocol).

use crate::node::Shared;
use crate::node::book::{Book, BookLookup, VersionBook};
use crate::node::decide::{self};
use crate::node::flush::SAVE_GAP_NS;
use crate::node::gc::Gc;
use crate::node::ledger::{Ledger, contents};
use crate::node::rescue::{self, Rescue};
use crate::node::rights::Rights;
use crate::node::visibility::Visibility;
use crate::node::visibility::fallbacks::Fallbacks;
use crate::node::visibility::tree_names::TreeNames;
use std::sync::Arc;
use tidemark_namespace::{FileState, FileView, is_alive};
use tidemark_protocol::evidence::Verdict;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{CheckpointId, Shape};
use tidemark_protocol::report::{Pending, PendingReason, path_text};
use tidemark_protocol::shield::Named;

/// Something that is not durable, and why.
pub(crate) struct Row {
    pub(crate) pending: Pending,
    /// Whether waiting may make it durable, as far as its reason allows.
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

    /// Makes a row for something that no waiting makes durable.
    fn left(path: &str, reason: PendingReason, what: String) -> Self {
        Self { pending: Pending { path: path.to_owned(), reason, what }, comes: false }
    }
}

/// Checkpoints and files that a program is still saving, and what of them is not durable.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Saves<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
    pub(crate) gc: &'a Gc,
    pub(crate) visibility: &'a Visibility,
    pub(crate) rights: &'a Rights,
}

impl<'a> Saves<'a> {
    /// Returns what a checkpoint waits for, if that comes to Tier-3 by itself.
    pub(crate) fn comes(self, book: &Book) -> Option<Pending> {
        self.pending_book(book).filter(|row| row.comes).map(|row| row.pending)
    }

    /// Returns what of a checkpoint is not durable, and why.
    pub(crate) fn pending_book(self, book: &Book) -> Option<Row> {
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
        // A file beside the checkpoint holds back nothing of the rest.
        let beside = self.left_beside(book, &path, &files);
        if beside.is_some() {
            files.retain(|(path, _)| !book.apart.contains(*path));
        }
        self.pending_files(book, &path, &files).or(beside)
    }

    /// Returns the row for a file, beside what is whole, that no waiting brings to Tier-3: a program has it open, or never closed
    /// it. An ending daemon keeps an unclosed file as it is. On several nodes it does not, because another node may have a writer.
    fn left_beside(self, book: &Book, of: &str, files: &[(&RelPath, &Arc<FileView>)]) -> Option<Row> {
        if book.apart.is_empty() {
            return None;
        }
        let present = contents(files.iter().copied());
        let is_kept = present.is_some_and(|present| book.covering(self.shared, &present).is_some());
        let stays = self.shared.cluster.get().is_some() || !self.rights.draining;
        let left = |(path, view): &(&RelPath, &Arc<FileView>)| match view.state {
            FileState::Open { .. } | FileState::Mapped if !self.rights.draining => {
                self.written(path, view, false)
            }
            FileState::Cut | FileState::Sealed { .. } if view.is_left_cut() && stays && !is_kept => {
                Some((PendingReason::Incomplete, left_unclosed(path)))
            }
            _ => None,
        };
        let (reason, what) = files.iter().filter(|(path, _)| book.apart.contains(*path)).find_map(left)?;
        Some(Row::left(of, reason, what))
    }

    /// Returns the row for the given files of a checkpoint.
    fn pending_files(self, book: &Book, path: &str, files: &[(&RelPath, &Arc<FileView>)]) -> Option<Row> {
        let row = |reason, what: String| Some(Row::of(Pending { path: path.to_owned(), reason, what }));
        let contents = contents(files.iter().copied());
        let covering = contents.as_ref().and_then(|contents| book.covering(self.shared, contents));
        if let Some((_, version)) = covering {
            let checkpoint = &version.checkpoint;
            let unproven = checkpoint.is_prepared() && !checkpoint.is_proven();
            return match &version.trouble {
                // A flush ignores content that cannot be read any more.
                _ if checkpoint.is_committed() || checkpoint.why_unreadable().is_some() => None,
                Some(why) => row(PendingReason::Uploading, why.clone()),
                None if unproven && version.record().partial => {
                    row(PendingReason::Torn, version.record().evidence_detail.clone())
                }
                // Taken up early because the daemon ends: it is committed when its time has passed.
                None if unproven && self.rights.draining && self.is_waiting_for_time(book) => {
                    row(PendingReason::Uploading, decide::waits_for(book))
                }
                // Tier-3 has what lies beside what is committed, or lay there, and that stands.
                None if unproven && self.tree_names().is_committed_beside(book, contents.as_ref()) => None,
                // Tier-3 has all that there is of it, and waiting brings no proof.
                None if unproven && version.record().doubted => {
                    Some(Row::left(path, PendingReason::Incomplete, decide::waits_for(book)))
                }
                // Tier-3 has what was added to what is committed, and that stands.
                None if unproven && self.tree_names().is_committed_with_more(book) => None,
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
        if self.rights.draining {
            if let Some((reason, what)) = self.saving(book).filter(|_| self.rights.grace_until.is_some()) {
                return row(reason, what);
            }
            let what = match rescue::look(self.shared, self.ledger, book) {
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
        // On several nodes it is never sealed as it is.
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

    /// Whether the end of the daemon still waits for a program that saves this checkpoint.
    pub(crate) fn waits_for_saving(self, book: &Book) -> bool {
        self.rights.grace_until.is_some() && self.saving(book).is_some()
    }

    /// Returns why a program is believed to be still saving this checkpoint. `None`: no program is.
    pub(crate) fn saving(self, book: &Book) -> Option<(PendingReason, String)> {
        let candidate = book.candidate.as_ref().filter(|_| !book.is_torn())?;
        let is_part = matches!(
            book.verdict,
            Some(Verdict::Incomplete { .. } | Verdict::Open { again_at_ns: None, .. })
        );
        // To a directory more may come.
        let is_part = is_part || candidate.shape == Shape::Tree && self.is_waiting_for_time(book);
        self.ledger
            .files_of(candidate, &book.scope)
            .find_map(|(path, view)| self.written(path, view, is_part))
    }

    fn is_waiting_for_time(self, book: &Book) -> bool {
        decide::is_waiting_for_time(book, book.verdict.as_ref(), self.shared.now_ns())
    }

    pub(crate) fn was_just_closed(self, view: &FileView) -> bool {
        self.shared.now_ns().saturating_sub(view.closed_ns) < SAVE_GAP_NS
    }

    /// Returns why a file is believed to be still written. `is_part`: the files present do not complete its save.
    pub(crate) fn written(
        self,
        path: &RelPath,
        view: &FileView,
        is_part: bool,
    ) -> Option<(PendingReason, String)> {
        match view.state {
            FileState::Open { writers } => {
                Some((PendingReason::Open, format!("{path} has {writers} open writers")))
            }
            FileState::Mapped => Some((PendingReason::Mapped, format!("{path} is mapped writable"))),
            FileState::Closed | FileState::Cut | FileState::Sealed { .. } => {
                let lives = |writer| is_alive(&self.shared.namespace, writer);
                let goes_on = is_part && self.was_just_closed(view) && view.writers.iter().any(lives);
                let what = || format!("{path} was closed a moment ago, and more is to come");
                goes_on.then(|| (PendingReason::Incomplete, what()))
            }
        }
    }

    /// Returns the version that was whole when its checkpoint was hidden, and that is not in Tier-3 yet.
    fn on_its_way(self, id: &CheckpointId) -> Option<&'a VersionBook> {
        let version = self.books().version(id, self.visibility.on_its_way(id)?.number);
        version.checkpoint.is_alive().then_some(version)
    }

    /// Whether what the tree holds of a checkpoint is an older version that stands in for one on its way: no save, and nothing to decide.
    pub(crate) fn is_stood_in(self, id: &CheckpointId) -> bool {
        let meanwhile = self.visibility.on_its_way(id).and_then(|on_its_way| on_its_way.meanwhile);
        meanwhile.is_some_and(|older| self.tree_names().shows_only(&self.ledger.books[id], older))
    }

    /// Returns why a tracker is kept out of Tier-3: the checkpoint that it names is not there yet. After the loss of the node the
    /// job would not find that one; the previous tracker names one that it finds.
    pub(crate) fn why_tracker_waits(self, path: &RelPath) -> Option<Pending> {
        let rules = self.ledger.rules();
        if !rules.is_tracker_name(path) {
            return None;
        }
        let above = path.parent();
        let beside = self.ledger.books.values().filter(|book| book.id.run.path() == above.as_ref());
        let unsaved: Vec<_> = beside
            .filter(|book| !book.is_prepared())
            .filter_map(|book| {
                let candidate = book.candidate.as_ref()?;
                Some((book, candidate, rules.tracker(&candidate.framework, path)?))
            })
            .collect();
        let view = self.ledger.file(path).filter(|view| view.sealed().is_some() && !unsaved.is_empty())?;
        let content = self.fallbacks().content(view)?;
        unsaved.into_iter().find_map(|(book, candidate, holds)| {
            let named = Named::of(&book.id, candidate.step.map(|step| step.0));
            let of_named = named.is_in(holds, &content).then(|| self.first_comes(book))??;
            let what = format!("it names {}, which is not in Tier-3: {}", of_named.path, of_named.what);
            Some(Pending { path: path.to_string(), reason: of_named.reason, what })
        })
    }

    /// Returns why Tier-3 has nothing of a checkpoint yet. `None`: it has something, or nothing is to come.
    pub(crate) fn first_comes(self, book: &Book) -> Option<Pending> {
        // At the end what is closed goes, too, where nothing more comes of what it names.
        let ended =
            || self.rights.draining && matches!(rescue::look(self.shared, self.ledger, book), Rescue::Done);
        if book.is_prepared() || ended() { None } else { self.comes(book) }
    }

    fn books(self) -> BookLookup<'a> {
        BookLookup { ledger: self.ledger }
    }

    fn fallbacks(self) -> Fallbacks<'a> {
        Fallbacks { shared: self.shared, ledger: self.ledger, gc: self.gc }
    }

    fn tree_names(self) -> TreeNames<'a> {
        TreeNames { shared: self.shared, ledger: self.ledger }
    }
}

/// Returns why a file that no program will close is not in Tier-3.
pub(crate) fn left_unclosed(path: &RelPath) -> String {
    format!("{path} was left unclosed by a program that has ended")
}
