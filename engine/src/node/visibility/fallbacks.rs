//! Checkpoints that a job can load in place of another.
//!
//! Owns: which checkpoints those are, and which of them a tracker may name. Does not own: hiding checkpoints (`torn`, `lost`), writing
//! trackers (`tracker`).

use crate::node::Shared;
use crate::node::book::Book;
use crate::node::decide::{look, run_of};
use crate::node::gc::Gc;
use crate::node::ledger::Ledger;
use crate::node::visibility::sessions::Sessions;
use crate::node::visibility::tree_names::TreeNames;
use std::collections::BTreeSet;
use std::sync::Arc;
use tidemark_namespace::{FileState, FileView};
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::evidence::{Told, Verdict};
use tidemark_protocol::lineage;
use tidemark_protocol::path::RunPath;
use tidemark_protocol::recognise::{Candidate, CheckpointId, PARTS, may_stand_in};
use tidemark_protocol::record::Evidence;
use tidemark_protocol::shield::{self, MAX_TRACKER_BYTES};

/// Checkpoints of a run that a tracker may name now or later.
pub(crate) struct Fit {
    /// The newest whole checkpoint, and its step.
    pub(crate) named: Option<(CheckpointId, Option<u64>)>,
    /// A newer checkpoint that may become whole.
    pub(crate) newer: Option<Newer>,
}

pub(crate) struct Newer {
    pub(crate) id: CheckpointId,
    /// Whether its files are still being grouped or hashed, which ends by itself.
    pub(crate) sealing: bool,
}

/// State of a checkpoint in the tree, for the choice of a tracker. If no version covers it: also when it got its last file.
enum Standing {
    Covered,
    /// Evidence proves it complete, and no process is left that could add to it: waiting brings nothing more.
    Whole(i64),
    Undecided {
        published_ns: i64,
        sealing: bool,
    },
}

fn id_of(checkpoint: &Checkpoint) -> CheckpointId {
    let version = &checkpoint.record().version;
    CheckpointId { run: version.run.clone(), directory: version.directory.clone() }
}

/// Checkpoints that a job can load in place of another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fallbacks<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
    pub(crate) gc: &'a Gc,
}

impl<'a> Fallbacks<'a> {
    /// Returns a tracker's bytes; none if they are not in this node's memory, or are more than [`MAX_TRACKER_BYTES`].
    pub(crate) fn content(self, view: &FileView) -> Option<Vec<u8>> {
        if view.size_bytes > MAX_TRACKER_BYTES as u64 {
            return None;
        }
        std::fs::read(self.shared.namespace.nodes().host_path(view.node)?).ok()
    }

    /// Returns the newest version of the run that is whole and in the tree. `gone` is the checkpoint that just left the tree; `fits` is a
    /// further condition.
    pub(crate) fn whole_of(
        self,
        run: &RunPath,
        gone: Option<&CheckpointId>,
        fits: impl Fn(&Book) -> bool,
    ) -> Option<&'a Checkpoint> {
        let standing = self.standing_of_run(run, gone).filter(|book| fits(book));
        let standing: BTreeSet<_> = standing.map(|book| &book.id).collect();
        let whole = run_of(self.ledger, run).filter(|checkpoint| self.tree_names().is_loadable(checkpoint));
        let whole = whole.filter(|found| standing.contains(&id_of(found)));
        whole.max_by_key(|checkpoint| lineage::order(checkpoint.record()))
    }

    /// Returns the checkpoints of the run that are in the tree and not torn. `gone` counts, too, while its name is in the tree: an older
    /// version may have that name again.
    fn standing_of_run(self, run: &RunPath, gone: Option<&CheckpointId>) -> impl Iterator<Item = &'a Book> {
        let of_run = self.ledger.books.values().filter(move |book| book.id.run == *run);
        of_run.filter(move |book| {
            let top = self.shared.namespace.nodes().node_at(&book.path()).is_some();
            top && (Some(&book.id) == gone || book.candidate.is_some() && !book.is_torn())
        })
    }

    /// Returns a test whether a job that lost `lost` may load another checkpoint: a model does not stand in for the optimizer beside it.
    /// If `lost` is a model in parts, this costs a pass over the run.
    pub(crate) fn stands_in_for(self, lost: &Book) -> impl Fn(&Book) -> bool {
        let in_parts = lost.candidate.as_ref().filter(|candidate| candidate.framework == PARTS);
        let trained = in_parts.is_some_and(|candidate| self.sessions().is_of_a_trainer(&lost.id, candidate));
        move |other| {
            let both = lost.candidate.as_ref().zip(other.candidate.as_ref());
            both.is_some_and(|(lost, other)| may_stand_in(lost, other, trained))
        }
    }

    /// Whether a job could load an older version of this checkpoint, or a whole checkpoint of the run that may stand in for it. Such a
    /// checkpoint is committed, or waits for nothing but time.
    pub(crate) fn has_fallback(self, id: &CheckpointId) -> bool {
        let book = &self.ledger.books[id];
        let committed = book.committed().map(|(number, _)| *number);
        // An own version that is on its way gets the name back only when it is committed.
        let stands_in = self.stands_in_for(book);
        let another = |other: &Book| other.id != *id && stands_in(other);
        committed.is_some_and(|number| self.gc.check_stays(&(id.clone(), number)).is_ok())
            || self.fit_to_be_named(&id.run, Some(id), another).named.is_some()
    }

    /// Whether a job could load another directory of the run instead of this one, in which no rule knows any file.
    pub(crate) fn has_another(self, id: &CheckpointId) -> bool {
        let is_directory = |other: &Book| other.candidate.as_ref().is_some_and(Candidate::is_directory);
        self.fit_to_be_named(&id.run, Some(id), is_directory).named.is_some()
    }

    pub(crate) fn fit_to_be_named(
        self,
        run: &RunPath,
        gone: Option<&CheckpointId>,
        fits: impl Fn(&Book) -> bool,
    ) -> Fit {
        let recorded = self.whole_of(run, gone, &fits);
        // A settling checkpoint has no record yet, so it is newer than all that have one. An undecided one may never get a record: it may
        // be old, so the times are compared.
        let recorded_ns = recorded.map_or(i64::MIN, |whole| whole.record().completed_at_ns);
        let (mut settling, mut undecided) = (Vec::new(), Vec::new());
        for book in self.standing_of_run(run, gone).filter(|book| Some(&book.id) != gone && fits(book)) {
            match self.standing_for_tracker(book) {
                Standing::Covered => {}
                Standing::Whole(published_ns) => settling.push((published_ns, book)),
                Standing::Undecided { published_ns, sealing } => {
                    undecided.push((published_ns, Newer { id: book.id.clone(), sealing }));
                }
            }
        }
        let (named_ns, named) = match settling.into_iter().max_by_key(|(published_ns, _)| *published_ns) {
            Some((published_ns, book)) => {
                let step = book.candidate.as_ref().and_then(|candidate| candidate.step);
                (published_ns, Some((book.id.clone(), step.map(|step| step.0))))
            }
            None => {
                let named = |newest: &Checkpoint| (id_of(newest), newest.record().step.map(|step| step.0));
                (recorded_ns, recorded.map(named))
            }
        };
        let newest = undecided.into_iter().max_by_key(|(published_ns, _)| *published_ns);
        let newer = newest.filter(|(published_ns, _)| *published_ns > named_ns).map(|(_, newer)| newer);
        Fit { named, newer }
    }

    fn standing_for_tracker(self, book: &Book) -> Standing {
        let Some(candidate) = &book.candidate else { return Standing::Covered };
        let files: Vec<_> = self.ledger.files_of(candidate, &book.scope).collect();
        let Some(published_ns) = files.iter().map(|(_, view)| view.published_ns).max() else {
            return Standing::Covered;
        };
        let sealing = || {
            let is_closed = |state: &FileState| matches!(state, FileState::Closed | FileState::Sealed { .. });
            files.iter().all(|(_, view)| is_closed(&view.state))
                && files.iter().any(|(_, view)| view.state == FileState::Closed)
        };
        // More files may be there than were grouped: another process may be adding to them.
        if self.ledger.is_stale_scope(&book.scope) || self.ledger.is_stale_before(candidate) {
            return Standing::Undecided { published_ns, sealing: true };
        }
        match look(self.shared, self.ledger, book, Told::Flush).verdict {
            // It is hidden, or about to be.
            None | Some(Verdict::Torn { .. } | Verdict::Broken { .. }) => Standing::Covered,
            // `Told` proves nothing here: a flush takes unproven files for whole.
            Some(Verdict::Complete { evidence, .. })
                if evidence.commits()
                    && evidence != Evidence::Told
                    && shield::who_is_left(&self.sessions().sessions_of(&book.id, candidate)).is_none() =>
            {
                Standing::Whole(published_ns)
            }
            Some(_) => Standing::Undecided { published_ns, sealing: sealing() },
        }
    }

    fn sessions(self) -> Sessions<'a> {
        Sessions { shared: self.shared, ledger: self.ledger }
    }

    fn tree_names(self) -> TreeNames<'a> {
        TreeNames { shared: self.shared, ledger: self.ledger }
    }
}
