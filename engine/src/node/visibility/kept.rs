//! What a stop kept of checkpoints that were not whole: out of sight before anybody looks, as it would have been had this memory
//! outlived the job, and the trackers beside it name what is whole.
//!
//! Owns: which versions those are, waiting for what trackers say. Does not own: keeping it (`rescue`), where the names lie and
//! the way back (`torn`).

use crate::node::book::{Book, Number};
use crate::node::recover::{Names, shown};
use crate::node::run::Engine;
use crate::node::visibility::timetable::Subject;
use crate::node::visibility::torn::names_of;
use crate::node::visibility::tracker::Wrong;
use std::time::Instant;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::report::EventLevel;
use tidemark_protocol::shield::Named;

impl Engine {
    /// Of versions that the tree does not show because their marker or manifest is damaged: a tracker may name one.
    pub(crate) fn follow_unreadable(&mut self, names: Names) {
        if self.shields_nothing() || names == Names::Kept {
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

    /// Before the mount is there. `Kept` names lie where the last daemon, or a person, wanted them.
    pub(crate) fn hide_kept(&mut self, names: Names) {
        if self.shields_nothing() {
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
            let in_sight = |path: &&RelPath| self.shared.namespace.node_at(path.as_bytes()).is_some();
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
            // Nobody removed it.
            self.visibility.out_of_sight.insert((id, number));
        }
    }

    /// Looks at the trackers beside what went, once what they may name is known.
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

    /// Whether all trackers could be looked at.
    fn follow_at_start(&mut self, id: &CheckpointId, number: Number) -> bool {
        let of_run = self.ledger.books.values().filter(|book| book.id.run == id.run);
        let is_known = |book: &Book| {
            book.candidate.is_some()
                || book.committed().is_none()
                || self.shared.namespace.node_at(&book.path()).is_none()
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
                self.file_jobs.fetch(&self.shared, &mut self.jobs, view.node);
                all = false;
            }
        }
        all
    }
}
