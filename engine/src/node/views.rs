//! Parts of the loop's state, borrowed by callers that ask about one thing.
//!
//! Owns: which parts each view borrows. Does not own: what a view answers; each stands in the file that it is about.

use crate::node::attributes::XattrAnswers;
use crate::node::book::BookLookup;
use crate::node::by_path::ByPath;
use crate::node::damage::BadCopies;
use crate::node::given_up::StillCounts;
use crate::node::inventory::Inventory;
use crate::node::outstanding::Outstanding;
use crate::node::pending::Saves;
use crate::node::problems::NodeHealth;
use crate::node::recovery::Standings;
use crate::node::rescue::PartialSaves;
use crate::node::run::Engine;
use crate::node::select::Selection;
use crate::node::show::Showing;
use crate::node::tiers::Tiers;
use crate::node::tree_now::TreeNow;
use crate::node::verdicts::Retention;
use crate::node::verify_scope::VerifyScope;
use crate::node::visibility::fallbacks::Fallbacks;
use crate::node::visibility::noted::Removals;
use crate::node::visibility::sessions::Sessions;
use crate::node::visibility::tree_names::TreeNames;
use crate::node::visibility::unwritten::Beginnings;
use crate::node::why::Reasons;

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

    pub(crate) fn fallbacks(&self) -> Fallbacks<'_> {
        Fallbacks { shared: &self.shared, ledger: &self.ledger, gc: &self.gc }
    }

    pub(crate) fn saves(&self) -> Saves<'_> {
        Saves {
            shared: &self.shared,
            ledger: &self.ledger,
            gc: &self.gc,
            visibility: &self.visibility,
            draining: self.draining,
            grace_until: self.grace_until,
        }
    }

    pub(crate) fn retention(&self) -> Retention<'_> {
        Retention {
            shared: &self.shared,
            ledger: &self.ledger,
            gc: &self.gc,
            visibility: &self.visibility,
            said_later: &self.said_later,
        }
    }

    pub(crate) fn still_counts(&self) -> StillCounts<'_> {
        StillCounts { shared: &self.shared, ledger: &self.ledger, gc: &self.gc }
    }

    pub(crate) fn inventory(&self) -> Inventory<'_> {
        Inventory { engine: self }
    }

    pub(crate) fn bad_copies(&self) -> BadCopies<'_> {
        BadCopies { engine: self }
    }

    pub(crate) fn showing(&self) -> Showing<'_> {
        Showing { engine: self }
    }

    pub(crate) fn reasons(&self) -> Reasons<'_> {
        Reasons { engine: self }
    }

    pub(crate) fn health(&self) -> NodeHealth<'_> {
        NodeHealth { engine: self }
    }

    pub(crate) fn tiers_now(&self) -> Tiers<'_> {
        Tiers { engine: self }
    }

    pub(crate) fn standings(&self) -> Standings<'_> {
        Standings { engine: self }
    }

    pub(crate) fn tree_now(&self) -> TreeNow<'_> {
        TreeNow { engine: self }
    }

    pub(crate) fn beginnings(&self) -> Beginnings<'_> {
        Beginnings { engine: self }
    }

    pub(crate) fn removals_noted(&self) -> Removals<'_> {
        Removals {
            shared: &self.shared,
            ledger: &self.ledger,
            visibility: &self.visibility,
            file_jobs: &self.file_jobs,
        }
    }

    pub(crate) fn outstanding(&self) -> Outstanding<'_> {
        Outstanding { engine: self }
    }

    pub(crate) fn rescues(&self) -> PartialSaves<'_> {
        PartialSaves { engine: self }
    }

    pub(crate) fn verify_scope(&self) -> VerifyScope<'_> {
        VerifyScope { engine: self }
    }

    pub(crate) fn xattr_answers(&self) -> XattrAnswers<'_> {
        XattrAnswers { engine: self }
    }
}
