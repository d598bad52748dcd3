//! Committed checkpoints that cannot be read whole any more. Each is reported once. If an older checkpoint is whole, the lost one is
//! hidden, so that a job that comes back loads the older one. Once a lost checkpoint was read whole after all, it is visible again.
//!
//! Owns: which files have no good copy left, and what follows for their checkpoint. Does not own: finding that out (an open,
//! `verify`), what a job comes back to (`protocol::recovery`).
//!
//! The next daemon knows nothing of this. At the first open, the loss is found again.

use crate::node::Shared;
use crate::node::answer::Listed;
use crate::node::book::{Book, BookLookup, Number};
use crate::node::decide::{is_covered, seal_of};
use crate::node::flush::covers;
use crate::node::ledger::Ledger;
use crate::node::scrub::target;
use crate::node::visibility::{Shielding, Visibility};
use std::collections::{BTreeMap, BTreeSet};
use tidemark_namespace::{FileView, FsError};
use tidemark_protocol::id::FileId;
use tidemark_protocol::lineage;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::CheckpointId;
use tidemark_protocol::record::Record;
use tidemark_protocol::report::EventLevel;

impl Shared {
    /// Returns why a version cannot be read whole; none if no file of it is known to be lost. Costs nothing while nothing is lost.
    pub(crate) fn why_lost(&self, record: &Record) -> Option<String> {
        let losses = &self.restorer.losses;
        if losses.is_empty() {
            return None;
        }
        record.files.iter().find_map(|file| losses.why(file.file, file.seal))
    }
}

impl Visibility {
    /// Lists the files at or below `place` of hidden versions that were not removed. Files that could not be read may be good again.
    pub(crate) fn lost_targets(&self, shared: &Shared, ledger: &Ledger, place: &[u8]) -> Vec<Listed> {
        let mut paths: BTreeMap<FileId, (&RelPath, Vec<u8>)> = BTreeMap::new();
        for (id, number) in &self.out_of_sight {
            let checkpoint = ledger.books[id].path();
            let contents = BookLookup { ledger }.version(id, *number).contents.iter();
            let wanted =
                contents.filter(|(path, _)| covers(place, path.as_bytes()) || covers(place, &checkpoint));
            paths.extend(wanted.map(|(path, (file, _))| (*file, (path, checkpoint.clone()))));
        }
        if paths.is_empty() {
            return Vec::new();
        }
        let listed = |view: FileView| {
            let (path, checkpoint) = paths.get(&view.file)?;
            let target = target(path.to_string(), &view)?;
            let bad = shared.restorer.losses.why(target.file, target.seal);
            Some(Listed { target, checkpoint: Some(checkpoint.clone()), bad, suspects: BTreeSet::new() })
        };
        shared.namespace.hidden().torn_files().into_iter().filter_map(listed).collect()
    }
}

impl Shielding<'_> {
    /// Hides versions that were found to be lost since the last call, if a job can load an older checkpoint.
    pub(crate) fn hide_lost(&mut self) {
        if self.rights.shields_nothing() || !self.shared.restorer.losses.take_news() {
            return;
        }
        let lost = |book: &Book| {
            let (number, version) = book.committed()?;
            let why = self.tree_names().why_lost(version.record())?;
            let present = self.ledger.present(book)?;
            // A job loads the newest checkpoint, so an older one that is lost does no harm. If nothing is left to load, the
            // job must fail, and not begin at step 0.
            let whole = self.fallbacks().whole_of(
                &book.id.run,
                Some(&book.id),
                self.fallbacks().stands_in_for(book),
            )?;
            let is_newer = lineage::order(version.record()) > lineage::order(whole.record());
            (is_newer && is_covered(&present, &version.contents)).then(|| (book.id.clone(), *number, why))
        };
        let lost: Vec<_> = self.ledger.books.values().filter_map(lost).collect();
        for (id, number, why) in lost {
            if let Err(error) = self.hide_version(&id, number, &why) {
                tracing::error!(checkpoint = %format_args!("{}/{}", id.run, id.directory), %error, "what cannot be read whole stays in sight");
            }
        }
    }

    /// Shows versions again that were hidden as lost and have no lost file any more. If something else has the name by now, the version
    /// stays hidden. Costs nothing unless a lost file was read whole since the last call.
    pub(crate) fn show_found(&mut self) {
        if !self.shared.restorer.losses.take_good_news() {
            return;
        }
        let out_of_sight = &self.visibility.out_of_sight;
        self.visibility.lost.retain(|of| out_of_sight.contains(of));
        let whole = |(id, number): &&(CheckpointId, Number)| {
            self.ledger.books[id].candidate.is_none()
                && self.tree_names().why_lost(self.books().version(id, *number).record()).is_none()
        };
        let found: Vec<_> = self.visibility.lost.iter().filter(whole).cloned().collect();
        let hidden = || self.shared.namespace.hidden().torn_files().iter().filter_map(seal_of).collect();
        let hidden: BTreeSet<_> = if found.is_empty() { BTreeSet::new() } else { hidden() };
        // A save that was torn since may lie there instead.
        let is_all_there = |(id, number): &(CheckpointId, Number)| {
            self.books().version(id, *number).contents.values().all(|held| hidden.contains(held))
        };
        let found: Vec<_> = found.into_iter().filter(is_all_there).collect();
        for of in found {
            let mut torn = self.sessions().torn().into_iter().map(|(candidate, _)| candidate);
            let Some(candidate) = torn.find(|candidate| candidate.id == of.0) else { continue };
            self.visibility.lost.remove(&of);
            match self.show_names(&candidate) {
                Ok(()) => {
                    let what = format!("version {} was read whole after all, and is in sight again", of.1.1);
                    self.shared.event_of(EventLevel::Info, "found", &of.0, what);
                }
                Err(why) => {
                    tracing::error!(checkpoint = %format_args!("{}/{}", of.0.run, of.0.directory), why, "what was read whole stays out of sight");
                }
            }
        }
    }

    fn hide_version(&mut self, id: &CheckpointId, number: Number, why: &str) -> Result<(), FsError> {
        let Some(candidate) =
            self.ledger.books[id].candidate.clone().filter(|_| !self.visibility.was_returned(id))
        else {
            return Ok(());
        };
        self.shared.hide_names(&candidate)?;
        // Hidden by the daemon, not removed by the job.
        self.gc.keep_unshown(id.clone(), number);
        self.visibility.out_of_sight.insert((id.clone(), number));
        self.visibility.lost.insert((id.clone(), number));
        let what = format!(
            "version {} cannot be read whole, and went out of sight, below .tidemark/torn: {why}; once it is read whole it \
             comes back, and `ckptctl undelete` puts it back at once, `ckptctl recover --plan` says what a job loads now",
            number.1
        );
        self.shared.event_of(EventLevel::Error, "lost", id, what);
        let book = &self.ledger.books[id];
        let older = book.versions.range(..number).rev();
        let mut readable = older.filter(|(_, version)| {
            version.checkpoint.is_committed() && self.tree_names().why_lost(version.record()).is_none()
        });
        if let Some(older) = readable.next().map(|(number, _)| *number) {
            self.serve_again(id, older);
        }
        self.trackers().follow(id, &candidate);
        Ok(())
    }
}
