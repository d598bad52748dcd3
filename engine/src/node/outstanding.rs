//! Files and names that are not in Tier-3 yet, for callers that wait for them.
//!
//! Owns: the rows of a flush, and whether waiting may shorten them. Does not own: the waiting (`flush`), what is not durable of one
//! checkpoint (`pending`).

use crate::node::book::{LooseBook, LooseStage};
use crate::node::flush::{FlushOutcome, PENDING_MAX, SAVE_GAP_NS, covers};
use crate::node::inventory::Inventory;
use crate::node::loose::{Lack, READ_TRIES, is_in_flight, may_change, stays_cut};
use crate::node::pending::Row;
use crate::node::recover::Knows;
use crate::node::run::Engine;
use crate::node::select::is_inside;
use std::sync::Arc;
use tidemark_namespace::{FileState, FileView, torn_path};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::{Pending, PendingReason, path_text};
use tokio::time::Instant;

/// View of the engine that lists what is not in Tier-3 yet.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Outstanding<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> Outstanding<'a> {
    /// Whether any program is saving: a checkpoint, or a file under a name that it will not keep.
    pub(crate) fn is_anything_saved(self) -> bool {
        // The cheap look first: there may be very many files.
        let in_flight = |(path, view): (&RelPath, &Arc<FileView>)| {
            (view.sealed().is_none() || self.engine.saves().was_just_closed(view))
                && self.engine.ledger.rules().is_temporary(path)
                && self.engine.saves().written(path, view, true).is_some()
        };
        self.engine.ledger.books.values().any(|book| self.engine.saves().saving(book).is_some())
            || self.engine.ledger.files().any(in_flight)
            || self.engine.beginnings().is_anything_begun(SAVE_GAP_NS)
    }

    pub(crate) fn outcome(self, pending: &[Row], began: Instant, timed_out: bool) -> FlushOutcome {
        let mut pending: Vec<_> = pending.iter().map(|row| row.pending.clone()).collect();
        if self.engine.tree.is_pending(began) {
            pending.push(self.untold_names());
        }
        pending.truncate(PENDING_MAX);
        FlushOutcome {
            pending,
            timed_out,
            tier3_away: self.engine.tier3_away.trouble(&self.engine.shared).is_some(),
        }
    }

    /// Returns everything at or below `place` that is not durable, and the checkpoint in which it lies, with the reasons. `asked`:
    /// when a caller asked last.
    pub(crate) fn pending(self, place: &[u8], asked: Option<Instant>, now: Instant) -> Vec<Row> {
        let mut rows = Vec::new();
        for book in self.engine.by_path().books_about(place) {
            rows.extend(self.engine.saves().pending_book(book));
        }
        for (candidate, _) in self.engine.sessions().torn() {
            let is_meant = |path: &RelPath| {
                let path = path.as_bytes();
                covers(place, path) || is_inside(path, place, candidate.files.keys())
            };
            let Some(path) = candidate.id.path().filter(is_meant) else { continue };
            let path = path_text(&torn_path(&path));
            let what = "it can never be complete, and is out of sight".to_owned();
            rows.push(Row::of(Pending { path, reason: PendingReason::Torn, what }));
        }
        for (path, book) in self.engine.ledger.loose.iter().filter(|(path, _)| covers(place, path.as_bytes()))
        {
            if let Some(Lack { reason, what, comes }) = self.lack_of(path, book, asked, now) {
                rows.push(Row { pending: Pending { path: path.to_string(), reason, what }, comes });
            }
        }
        rows.extend(self.engine.ledger.unkept.pending(place).take(PENDING_MAX).map(Row::of));
        rows
    }

    /// Whether waiting may bring the tree to Tier-3.
    pub(crate) fn tree_may_come(self, since: Instant) -> bool {
        self.engine.tree.may_come(
            since,
            self.engine.rights.fenced.is_none(),
            self.engine.rights.knows == Knows::All,
        )
    }

    /// Returns the row for a tree whose newest names Tier-3 lacks.
    fn untold_names(self) -> Pending {
        let (reason, what) = match &self.engine.rights.fenced {
            None => {
                (PendingReason::Uploading, "the names outside checkpoints are not in Tier-3 yet".to_owned())
            }
            Some(why) => (
                PendingReason::Unknown,
                format!(
                    "names that were given, changed or removed are not in Tier-3 and do not get there: another daemon decides ({why})"
                ),
            ),
        };
        Pending { path: String::new(), reason, what }
    }

    /// Returns what Tier-3 lacks of a loose file. `None`: it lacks nothing, or another name brings it. `asked`: since when a caller
    /// waits for the content of that moment.
    pub(crate) fn lack_of(
        self,
        path: &RelPath,
        book: &LooseBook,
        asked: Option<Instant>,
        now: Instant,
    ) -> Option<Lack> {
        let view = self.engine.ledger.file(path)?;
        // A further name of a file: another name carries the bytes, the tree document the link.
        let further = self.engine.ledger.is_further(path, view.node);
        if further || view.sealed().is_some_and(|seal| book.uploaded() == Some((view.file, seal))) {
            return None;
        }
        // The checkpoint itself is named.
        if self.engine.ledger.is_left_by_torn(path) {
            return None;
        }
        let lack = |reason, what: &str, comes| Some(Lack { reason, what: what.to_owned(), comes });
        // The writer gives the file its wanted name, if the daemon does not end before.
        if is_in_flight(&self.engine.shared, &self.engine.ledger, path, view, self.engine.rights.draining) {
            let what = "it is written under a temporary name, and ends with this memory";
            return if self.engine.rights.draining { lack(PendingReason::Open, what, false) } else { None };
        }
        if let Some(why) = self.engine.ledger.unreadable.get(&view.node) {
            let what = format!("it is closed and cannot be read to be sealed: {why}");
            return lack(PendingReason::Unreadable, &what, false);
        }
        let (reason, who) = match &view.state {
            FileState::Cut if stays_cut(&self.engine.shared, &self.engine.ledger, path, view) => {
                return lack(PendingReason::Torn, "its writer was killed before it closed it", false);
            }
            FileState::Open { writers } => (PendingReason::Open, format!("{writers} open writers")),
            FileState::Mapped => (PendingReason::Mapped, "a writable mapping of it lives".to_owned()),
            FileState::Closed | FileState::Cut => {
                return lack(PendingReason::Uploading, "it is being sealed", true);
            }
            FileState::Sealed { .. } => {
                if let Some(why) = self.engine.beginnings().why_beginning_waits(path, now) {
                    return lack(PendingReason::Incomplete, &why, true);
                }
                if let Some(waits) = self.engine.saves().why_tracker_waits(path) {
                    return lack(waits.reason, &waits.what, true);
                }
                let why = match &book.stage {
                    LooseStage::Waiting { why, .. } => why,
                    _ => "its bytes are on their way to Tier-3",
                };
                return lack(PendingReason::Uploading, why, true);
            }
        };
        if !may_change(view) {
            return lack(reason, &who, true);
        }
        if book.is_asked_for(view.node, asked) {
            // A file that changes while it is read is not waited for without end.
            let tries = match &book.stage {
                LooseStage::Waiting { tries, .. } => *tries,
                _ => 0,
            };
            let comes = tries < READ_TRIES || self.engine.tier3_away.is_away();
            return lack(PendingReason::Uploading, &format!("{who}; what it holds now is on its way"), comes);
        }
        let what =
            if book.lacks_what_stands(view.node, || self.engine.shared.namespace.seals().reach(view.node)) {
                "Tier-3 has what it held a while ago"
            } else {
                "Tier-3 has what it holds"
            };
        lack(reason, &format!("{who}; {what}"), false)
    }

    /// Returns how many bytes a loose file has now, and whether Tier-3 has these.
    pub(crate) fn standing_of_loose(self, path: &RelPath, view: &FileView) -> (u64, bool) {
        if !may_change(view) {
            // The answer is about its present bytes, under whichever of its names they went there.
            return (
                Inventory { engine: self.engine }.size_now(view),
                view.sealed().is_some() && view.object.is_some(),
            );
        }
        let reach = self.engine.shared.namespace.seals().reach(view.node);
        let book = self.engine.ledger.loose.get(path);
        let there = book.is_some_and(|book| !book.lacks_what_stands(view.node, || reach));
        (
            reach.map_or_else(|| Inventory { engine: self.engine }.size_now(view), |reach| reach.size_bytes),
            there,
        )
    }
}
