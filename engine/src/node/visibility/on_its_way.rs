//! Whole versions that are hidden on their way to Tier-3, because a torn save came under their name. Once such a version is committed,
//! the name means it again.
//!
//! Owns: which versions those are, which version has the name meanwhile, giving the name back. Does not own: what is hidden (`torn`),
//! the commit (`advance`).
//!
//! Nothing of this outlives the daemon.

use crate::node::book::Number;
use crate::node::visibility::Shielding;
use tidemark_namespace::{FsError, Listed};
use tidemark_protocol::checkpoint::Checkpoint;
use tidemark_protocol::id::FileId;
use tidemark_protocol::recognise::{CheckpointId, Shape};

/// See the module's head.
#[derive(Debug)]
pub(crate) struct OnItsWay {
    pub(crate) number: Number,
    /// Shape that it had in the tree.
    shape: Shape,
    /// The committed version that is served under the name meanwhile.
    pub(crate) meanwhile: Option<Number>,
}

/// Current holder of the name of a version that is to be served.
pub(crate) enum Name {
    Free,
    /// An older version, which stands in for it.
    StandIn(Number),
    /// The job, or a person, which put something else there or removed the stand-in.
    Taken,
}

impl Shielding<'_> {
    /// Records the newest whole version, not committed yet, of a checkpoint that was just hidden.
    pub(super) fn note_on_its_way(&mut self, id: &CheckpointId, shape: Shape) {
        let book = &self.ledger.books[id];
        let committed = book.committed().map(|(number, _)| *number);
        let mut newer = book.versions.iter().rev().take_while(|(number, _)| Some(**number) > committed);
        let is_whole = |checkpoint: &Checkpoint| checkpoint.is_alive() && checkpoint.is_proven();
        match newer.find(|(_, version)| is_whole(&version.checkpoint)).map(|(number, _)| *number) {
            Some(number) => {
                self.visibility.on_its_way.insert(id.clone(), OnItsWay { number, shape, meanwhile: None });
            }
            None => {
                self.visibility.on_its_way.remove(id);
            }
        }
    }

    /// Serves the hidden versions that were committed since, and forgets those that never will be.
    pub(crate) fn serve_arrivals(&mut self) {
        for id in self.visibility.on_its_way.keys().cloned().collect::<Vec<_>>() {
            self.serve_arrival(&id);
        }
    }

    /// Does the same for one checkpoint.
    pub(crate) fn serve_arrival(&mut self, id: &CheckpointId) {
        let Some(OnItsWay { number, shape, meanwhile }) = self.visibility.on_its_way.get(id) else { return };
        let (number, shape, meanwhile) = (*number, *shape, *meanwhile);
        let version = self.books().version(id, number);
        if !version.checkpoint.is_committed() {
            if !version.checkpoint.is_alive() {
                self.forget_on_its_way(id, number);
            }
            return;
        }
        // An ending daemon puts all hidden names back itself, and a stand-in keeps the name until the next daemon.
        if self.rights.shields_nothing() {
            return;
        }
        let open = |(file, _): &(FileId, _)| self.shared.namespace.hidden().is_open_out_of_sight(*file);
        // All names move, or none: the next pass tries again.
        if version.contents.values().any(open) || self.shared.had_not_heard_of(self.ledger, id) {
            return;
        }
        match self.tree_names().who_has_name(id, number, shape, meanwhile) {
            Name::Taken => self.forget_on_its_way(id, number),
            Name::Free => {
                self.visibility.on_its_way.remove(id);
                self.serve_again(id, number);
            }
            Name::StandIn(older) => {
                self.visibility.on_its_way.remove(id);
                if let Err(error) = self.withdraw_stand_in(id, older, number) {
                    tracing::error!(checkpoint = %format_args!("{}/{}", id.run, id.directory), %error, "some names of the version before stay");
                }
                self.serve_again(id, number);
            }
        }
    }

    /// Removes names of the older version that the newer one lacks, or has with other bytes. Programs keep the files that they have open.
    fn withdraw_stand_in(&self, id: &CheckpointId, older: Number, newer: Number) -> Result<usize, FsError> {
        let newer = &self.books().version(id, newer).contents;
        let stands_in = self.books().version(id, older).contents.iter();
        let others = stands_in.filter(|(path, of)| newer.get(*path) != Some(*of));
        let others = others.map(|(path, (file, seal))| Listed { path, file: *file, seal: *seal, key: "" });
        let listed: Vec<_> = others.collect();
        self.shared.withdraw(&listed, &[])
    }

    /// Forgets a version because its name means something else for good. From now on its missing names count as removed.
    fn forget_on_its_way(&mut self, id: &CheckpointId, number: Number) {
        self.visibility.on_its_way.remove(id);
        self.visibility.out_of_sight.remove(&(id.clone(), number));
        self.ledger.due.insert(id.clone());
        self.tree.tells_more(self.ledger);
    }
}
