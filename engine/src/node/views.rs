//! Parts of the loop's state, borrowed by what asks about one thing or does one thing.
//!
//! Owns: lending the parts. Does not own: which parts each may read or change (its fields say it), what is answered or done; each stands in the
//! file that it is about.

use crate::node::advance::Versions;
use crate::node::book::BookLookup;
use crate::node::by_path::ByPath;
use crate::node::gc::Retiring;
use crate::node::generations::Sifting;
use crate::node::given_up::StillCounts;
use crate::node::loose::LooseUploads;
use crate::node::pending::Saves;
use crate::node::rescue::PartialSaves;
use crate::node::run::Engine;
use crate::node::select::Selection;
use crate::node::verdicts::Retention;
use crate::node::visibility::Shielding;
use crate::node::visibility::sessions::Sessions;
use crate::node::visibility::tree_names::TreeNames;
use crate::node::visibility::unwritten::Beginnings;

impl Engine {
    pub(crate) fn books(&self) -> BookLookup<'_> {
        BookLookup { ledger: &self.ledger }
    }

    pub(crate) fn by_path(&self) -> ByPath<'_> {
        ByPath { shared: &self.shared, ledger: &self.ledger }
    }

    pub(crate) fn tree_names(&self) -> TreeNames<'_> {
        TreeNames { shared: &self.shared, ledger: &self.ledger }
    }

    pub(crate) fn selection(&self) -> Selection<'_> {
        Selection { shared: &self.shared, ledger: &self.ledger, gc: &self.gc, visibility: &self.visibility }
    }

    pub(crate) fn sessions(&self) -> Sessions<'_> {
        Sessions { shared: &self.shared, ledger: &self.ledger }
    }

    pub(crate) fn saves(&self) -> Saves<'_> {
        let Self { shared, ledger, gc, visibility, rights, .. } = self;
        Saves { shared, ledger, gc, visibility, rights }
    }

    pub(crate) fn retention(&self) -> Retention<'_> {
        let Self { shared, ledger, gc, visibility, said_later, .. } = self;
        Retention { shared, ledger, gc, visibility, said_later }
    }

    pub(crate) fn still_counts(&self) -> StillCounts<'_> {
        StillCounts { shared: &self.shared, ledger: &self.ledger, gc: &self.gc }
    }

    pub(crate) fn beginnings(&self) -> Beginnings<'_> {
        let Self { shared, ledger, visibility, flushes, rights, .. } = self;
        Beginnings { shared, ledger, visibility, flushes, rights }
    }

    pub(crate) fn rescues(&self) -> PartialSaves<'_> {
        PartialSaves { engine: self }
    }

    pub(crate) fn versions(&mut self) -> Versions<'_> {
        let Self { shared, ledger, backlog, jobs, tree, gc, tier3_away, rights, flushes, scrub, .. } = self;
        Versions { shared, ledger, backlog, jobs, tree, gc, tier3_away, rights, flushes, scrub }
    }

    pub(crate) fn shielding(&mut self) -> Shielding<'_> {
        let Self {
            shared, ledger, visibility, gc, said_later, tree, file_jobs, jobs, flushes, rights, ..
        } = self;
        Shielding { shared, ledger, visibility, gc, said_later, tree, file_jobs, jobs, flushes, rights }
    }

    pub(crate) fn retiring(&mut self) -> Retiring<'_> {
        let Self { shared, ledger, gc, said_later, jobs, tier3_away, rights, visibility, flushes, .. } = self;
        Retiring { shared, ledger, gc, said_later, jobs, tier3_away, rights, visibility, flushes }
    }

    pub(crate) fn sifting(&mut self) -> Sifting<'_> {
        let Self { shared, ledger, generations, jobs, scrub, rights, tree, gc, tier3_away, flushes, .. } =
            self;
        Sifting { shared, ledger, generations, jobs, scrub, rights, tree, gc, tier3_away, flushes }
    }

    pub(crate) fn loose_uploads(&mut self) -> LooseUploads<'_> {
        let Self {
            shared,
            ledger,
            loose_in_flight: in_flight,
            jobs,
            file_jobs,
            generations,
            tree,
            tier3_away,
            visibility,
            gc,
            flushes,
            rights,
            ..
        } = self;
        LooseUploads {
            shared,
            ledger,
            in_flight,
            jobs,
            file_jobs,
            generations,
            tree,
            tier3_away,
            visibility,
            gc,
            flushes,
            rights,
        }
    }
}
