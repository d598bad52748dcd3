//! Hides torn checkpoints from a job that comes back.
//!
//! Owns: carrying the decision out, undoing it. Does not own: which processes live (`sessions`), the decision (`protocol::visibility`),
//! when a checkpoint is torn (protocol), where the names lie meanwhile (`namespace::hidden`), the trackers beside it (`tracker`).
//!
//! Names are hidden as soon as the last process of the session that wrote them is gone, even while a program reads them.

use crate::node::Shared;
use crate::node::book::Number;
use crate::node::decide::verdict_text;
use crate::node::recover::{Adopter, Knows, Wishes, adopt_files};
use crate::node::visibility::InSight;
use crate::node::visibility::Shielding;
use crate::node::visibility::timetable::Subject;
use std::sync::Arc;
use tidemark_namespace::{FsError, path_of_torn};
use tidemark_protocol::evidence::Verdict;
use tidemark_protocol::id::FileId;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::{Candidate, CheckpointId, Shape};
use tidemark_protocol::report::{CheckpointRef, EventLevel, path_text};
use tidemark_protocol::shield::Session;
use tidemark_protocol::visibility::{self, Standing, Tree};
use tokio::time::Instant;

/// Returns the names of a checkpoint that move together: its directory, or each of its files.
pub(crate) fn names_of(candidate: &Candidate) -> Vec<RelPath> {
    let mut names: Vec<RelPath> = match (candidate.shape, candidate.id.path()) {
        (Shape::Tree, Some(top)) => {
            let beside = candidate.temporaries.iter().filter(|path| !path.is_below(&top));
            beside.cloned().chain([top.clone()]).collect()
        }
        _ => candidate.files.keys().chain(&candidate.temporaries).cloned().collect(),
    };
    names.sort();
    names
}

impl Shared {
    pub(crate) fn hide_names(&self, candidate: &Candidate) -> Result<(), FsError> {
        names_of(candidate).iter().try_for_each(|name| self.hide(name))
    }
}

impl Shielding<'_> {
    /// Decides whether to hide a torn checkpoint, and hides it or records why it stays.
    pub(crate) fn shield(&mut self, id: &CheckpointId, now: Instant) {
        let subject = Subject::Torn(id.clone());
        if self.rights.shields_nothing()
            || self.visibility.rests(&subject, now)
            || self.visibility.was_returned(id)
        {
            return;
        }
        let Some(candidate) = self.ledger.books[id].candidate.clone() else { return };
        // While only names are known, files with an object copy may belong to a committed version.
        let mut files = self.ledger.files_of(&candidate, &self.ledger.books[id].scope);
        if self.rights.knows == Knows::Names && files.any(|(_, view)| view.object.is_some()) {
            return;
        }
        drop(files);
        let sessions = self.sessions().sessions_of(id, &candidate);
        let standing = match &self.ledger.books[id].verdict {
            Some(Verdict::Broken { .. }) => Standing::Broken,
            _ => Standing::Torn,
        };
        let trainer = self.sessions().is_of_a_trainer(id, &candidate);
        let stays = match visibility::tree(standing, trainer, &sessions, self.fallbacks().has_fallback(id)) {
            Tree::Stays { why } => Some(why),
            // A living process may have added to it.
            Tree::Hides if self.shared.had_not_heard_of(self.ledger, id) => return,
            Tree::Hides => self.hide(id, &candidate).err().map(|error| error.to_string()),
        };
        let process = sessions.iter().find_map(Session::living);
        self.visibility.timetable.ask_again(subject, now, process);
        let Some(why) = stays else {
            self.visibility.in_sight.remove(id);
            return;
        };
        let said = self.visibility.why_in_sight(id) == Some(why.as_str());
        if !said {
            self.shared.event_of(
                EventLevel::Warn,
                "torn_in_sight",
                id,
                format!("it stays where it is: {why}"),
            );
        }
        self.visibility.in_sight.insert(id.clone(), InSight { why, lasts: process.is_none() });
    }

    fn hide(&mut self, id: &CheckpointId, candidate: &Candidate) -> Result<(), FsError> {
        self.shared.hide_names(candidate)?;
        self.shared.metrics.torn_hidden.inc();
        let why = self.ledger.books[id].verdict.as_ref().map(verdict_text).unwrap_or_default();
        self.visibility.hidden.insert(id.clone(), why.clone());
        // Versions that Tier-3 has or gets were not removed by anybody.
        let versions = self.ledger.books[id].versions.iter();
        let kept = versions.filter(|(_, version)| {
            let checkpoint = &version.checkpoint;
            checkpoint.is_alive() && (version.record().partial || checkpoint.is_proven())
        });
        let kept: Vec<_> = kept.map(|(number, _)| (id.clone(), *number)).collect();
        self.visibility.out_of_sight.extend(kept);
        let what = format!(
            "{} files went out of sight, below .tidemark/torn: {why}; `ckptctl undelete` puts them back",
            candidate.files.len()
        );
        self.shared.event_of(EventLevel::Warn, "hidden", id, what);
        // If the torn save went over a committed version, the name means that version again.
        let committed = self.ledger.books[id].committed().map(|(number, _)| *number);
        self.note_on_its_way(id, candidate.shape);
        if let Some(number) = committed.filter(|number| self.gc.check_stays(&(id.clone(), *number)).is_ok()) {
            self.serve_again(id, number);
        }
        self.trackers().follow(id, candidate);
        Ok(())
    }

    pub(crate) fn serve_again(&mut self, id: &CheckpointId, number: Number) {
        let version = self.books().version(id, number);
        let open = |(file, _): &(FileId, _)| self.shared.namespace.hidden().is_open_out_of_sight(*file);
        if version.contents.values().any(open) {
            // All names come back, or none.
            self.visibility.timetable.ask_again(Subject::Owed(id.clone()), Instant::now(), None);
            self.visibility.owed.insert(id.clone(), number);
            return;
        }
        self.visibility.end_owed(id);
        self.visibility.out_of_sight.remove(&(id.clone(), number));
        let (files, back) = self.put_back(id, number);
        self.visibility.note_stand_in(id, number);
        let what = format!("version {} is served under the name again, {back} of {files} files", number.1);
        self.shared.event_of(EventLevel::Warn, "fallback", id, what);
    }

    /// Tries once a second to put back the versions in `owed`, until that succeeds or the name is used anew.
    pub(crate) fn serve_owed(&mut self, now: Instant) {
        let rests = |id: &CheckpointId| self.visibility.rests(&Subject::Owed(id.clone()), now);
        let due = self.visibility.owed.iter().filter(|(id, _)| !rests(id));
        let due: Vec<_> = due.map(|(id, number)| (id.clone(), *number)).collect();
        for (id, number) in due {
            let book = &self.ledger.books[&id];
            let newest = book.committed().map(|(newest, _)| *newest);
            if newest != Some(number) || book.candidate.is_some() || self.rights.draining {
                self.visibility.end_owed(&id);
            } else {
                self.serve_again(&id, number);
            }
        }
    }

    /// Puts the names of a committed version into the tree; bytes come when a file is opened. Returns how many names the version has, and
    /// how many are there now.
    pub(crate) fn put_back(&mut self, id: &CheckpointId, number: Number) -> (usize, usize) {
        let Some(manifest) = self.books().version(id, number).manifest().map(Arc::clone) else {
            return (0, 0);
        };
        let names = manifest.files.iter().map(|file| &file.path);
        let names = names.chain(manifest.hard_links.iter().map(|link| &link.path));
        let directories = manifest.directories.iter().map(|directory| &directory.path);
        self.shared.bring_back(names.clone().chain(directories), || {
            let mut adopter = Adopter::new(self.shared);
            adopt_files(&mut adopter, &manifest, &Wishes::default());
            manifest.directories.iter().for_each(|directory| adopter.adopt_directory(directory));
        });
        self.gc.end_withdrawal(&(id.clone(), number));
        self.said_later.show_metric(self.shared, id, number);
        self.shared.classify_run(self.ledger, &id.run);
        let there = |path: &&RelPath| self.shared.namespace.nodes().node_at(path.as_bytes()).is_some();
        (names.clone().count(), names.filter(there).count())
    }

    /// Shows a hidden torn checkpoint again, and keeps it visible while this daemon lives. None: no checkpoint is hidden under that path.
    pub(crate) fn show_torn(&mut self, path: &[u8]) -> Option<Result<(CheckpointRef, usize), String>> {
        let path = path_of_torn(path).unwrap_or(path);
        let mut torn = self.sessions().torn().into_iter().map(|(candidate, _)| candidate);
        let found = torn.find(|candidate| candidate.id.path().is_some_and(|of| of.as_bytes() == path))?;
        if let Err(why) = self.show_names(&found) {
            return Some(Err(why));
        }
        self.visibility.returned.insert(found.id.clone());
        self.shared.event_of(
            EventLevel::Info,
            "undeleted",
            &found.id,
            "it is in sight again, as it is".to_owned(),
        );
        let (timeline, version) = self.books().next_number(&found.id);
        let reference = CheckpointRef { timeline, step: found.step, version, path: path_text(path) };
        Some(Ok((reference, found.files.len())))
    }

    /// Puts back the names of a hidden checkpoint.
    ///
    /// # Errors
    /// Fails on a name that is taken, with a sentence. The names before it are back.
    pub(super) fn show_names(&mut self, found: &Candidate) -> Result<(), String> {
        for name in names_of(found) {
            if let Err(error) = self.shared.show_again(&name) {
                return Err(format!("{name} stays out of sight: {error}"));
            }
        }
        self.visibility.hidden.remove(&found.id);
        self.visibility.on_its_way.remove(&found.id);
        self.visibility.out_of_sight.retain(|(id, _)| *id != found.id);
        self.gc.is_shown_again(&found.id);
        Ok(())
    }

    /// Puts back all hidden names that are still free: the daemon ends, and with it this memory.
    pub(crate) fn show_all_torn(&mut self) {
        for (candidate, _) in self.sessions().torn() {
            for name in names_of(&candidate) {
                if let Err(error) = self.shared.show_again(&name) {
                    tracing::warn!(%name, %error, "it was torn, and ends with this memory");
                }
            }
        }
    }

    /// Drops the torn files that are hidden under a name: they are of no use once that name is committed.
    pub(crate) fn drop_torn(&mut self, id: &CheckpointId) {
        self.visibility.returned.remove(id);
        self.visibility.in_sight.remove(id);
        self.visibility.timetable.forget(&Subject::Torn(id.clone()));
        self.visibility.hidden.remove(id);
        let found = self.sessions().torn().into_iter().find(|(candidate, _)| candidate.id == *id);
        // A directory with only files in flight is no candidate: its own name is dropped.
        let unwritten = id.path().filter(|path| self.ledger.rules().named_by_directory(path).is_some());
        let names = found.map_or_else(|| Vec::from_iter(unwritten), |(candidate, _)| names_of(&candidate));
        for name in names {
            if let Err(error) = self.shared.namespace.hidden().drop_torn(&name) {
                tracing::error!(%name, %error, "what was torn under this name stays out of sight");
            }
        }
    }
}
