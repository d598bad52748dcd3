//! Parts of checkpoints that the last stop kept. The start hides them before the mount is there, as would have happened had this memory
//! outlived the job. The trackers beside them then name a whole checkpoint.
//!
//! Owns: which versions those are, waiting until their trackers can be read. Does not own: keeping the parts (`rescue`), where the
//! names lie and putting them back (`torn`).

use crate::node::book::{Book, Number};
use crate::node::recover::{Names, shown};
use crate::node::visibility::Shielding;
use crate::node::visibility::timetable::Subject;
use crate::node::visibility::torn::names_of;
use crate::node::visibility::tracker::{Trackers, Wrong};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::report::EventLevel;
use tidemark_protocol::shield::Named;
use tokio::time::Instant;

impl Trackers<'_> {
    /// Queues versions for [`Self::follow_kept`] that the tree does not show because their marker or manifest is damaged: a tracker may
    /// name one.
    pub(crate) fn follow_unreadable(&mut self, names: Names) {
        if self.rights.shields_nothing() || names == Names::Kept {
            return;
        }
        let unshown = self.ledger.books.values().filter_map(|book| {
            let (number, version) = book.unreadable()?;
            let known = !version.record().framework.is_empty() && self.gc.is_unshown(&book.id, *number);
            known.then(|| (book.id.clone(), *number))
        });
        let unshown: Vec<_> = unshown.collect();
        self.visibility.kept.extend(unshown);
    }

    /// Examines the trackers beside the queued versions, once it is known what they may name.
    pub(crate) fn follow_kept(&mut self, now: Instant) {
        let early = !self.ledger.has_seen_tree || self.visibility.rests(&Subject::FollowersOfKept, now);
        if self.visibility.kept.is_empty() || early {
            return;
        }
        self.visibility.timetable.ask_again(Subject::FollowersOfKept, now, None);
        for (id, number) in std::mem::take(&mut self.visibility.kept) {
            if !self.follow_at_start(&id, number) {
                self.visibility.kept.push((id, number));
            }
        }
    }

    /// Makes the trackers beside a version name a whole checkpoint. Returns whether all trackers could be examined.
    fn follow_at_start(&mut self, id: &CheckpointId, number: Number) -> bool {
        let of_run = self.ledger.books.values().filter(|book| book.id.run == id.run);
        let is_known = |book: &Book| {
            book.candidate.is_some()
                || book.committed().is_none()
                || self.shared.namespace.nodes().node_at(&book.path()).is_none()
        };
        if !of_run.clone().all(is_known) {
            return false;
        }
        let record = self.books().version(id, number).record();
        let (framework, step) = (record.framework.clone(), record.step.map(|step| step.0));
        let mut all = true;
        for (path, view, holds) in self.books().trackers_of(id, &framework).collect::<Vec<_>>() {
            if view.host {
                all &= self.mend(id, Wrong::Hidden(Named::of(id, step)), &path, &view, holds);
            } else {
                self.file_jobs.fetch(self.shared, self.jobs, view.node);
                all = false;
            }
        }
        all
    }
}

impl Shielding<'_> {
    /// Hides the partial versions that the last stop kept. Runs before the mount is there. `Names::Kept` leaves names where the last
    /// daemon, or a person, put them.
    pub(crate) fn hide_kept(&mut self, names: Names) {
        if self.rights.shields_nothing() {
            return;
        }
        let is_partial = |book: &Book| {
            let (number, version) = shown(book, None)?;
            let checkpoint = &version.checkpoint;
            let kept = version.record().partial && !checkpoint.is_proven() && !checkpoint.is_committed();
            kept.then(|| (book.id.clone(), *number))
        };
        let partial: Vec<_> = self.ledger.books.values().filter_map(is_partial).collect();
        for (id, number) in partial {
            let version = self.books().version(&id, number);
            let why = version.record().evidence_detail.clone();
            let Some(candidate) = version.candidate(self.ledger.rules(), &id) else { continue };
            if !self.tree_names().has_committed_beside(&id, &candidate) {
                continue;
            }
            let in_sight = |path: &&RelPath| self.shared.namespace.nodes().node_at(path.as_bytes()).is_some();
            match (names_of(&candidate).iter().find(in_sight).is_some(), names) {
                (true, Names::Kept) => continue,
                (true, Names::Empty) => {
                    if let Err(error) = self.shared.hide_names(&candidate) {
                        tracing::error!(checkpoint = %format_args!("{}/{}", id.run, id.directory), %error, "a part of a checkpoint stays in sight");
                        continue;
                    }
                    let what = format!(
                        "{} files of it were kept, and are out of sight, below .tidemark/torn: {why}; `ckptctl undelete` puts \
                         them back",
                        candidate.files.len()
                    );
                    self.shared.event_of(EventLevel::Warn, "hidden", &id, what);
                    self.visibility.kept.push((id.clone(), number));
                }
                (false, Names::Kept | Names::Empty) => {}
            }
            // Hidden by the daemon, not removed by the job.
            self.visibility.out_of_sight.insert((id, number));
        }
    }
}
