//! The rules that keep one order, each with a name, so that a test can show the error without it.
//!
//! Owns: the list of rules. Does not own: the effect of a rule, which stands where it is applied.

/// A rule that can be left out, by a test only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Rule {
    /// A transaction compares the coordinator's election.
    Fence,
    /// A call whose number was taken is not taken again.
    Chain,
    /// Calls of a life that is not present are refused.
    Life,
    /// A look-up in a delegated directory has the delegate publish first.
    AskDelegate,
    /// A look-up of a file has the file's holder publish first.
    AskHolder,
    /// A look-up is answered after a read that shows the coordinator's own election.
    Confirm,
    /// A look-up waits for its own node's earlier publications.
    OwnFirst,
    /// A change in a directory that another node has alone waits until that node has given it back.
    Recall,
    /// A delegation ends when it is given back, or with a verdict, and never by time.
    NoExpiry,
    /// A file that is open for writing is not given back.
    WritersBlock,
    /// A removed name leaves a tombstone while a life is gone.
    Tombstones,
    /// A change of a life that is over is published only if the versions that it depends on are still there.
    RebaseCompares,
    /// A removal of a life that is over is not published.
    RebaseKeeps,
    /// After a doubtful answer the store is read.
    ReadAfterDoubt,
    /// A new coordinator answers when its copy contains its own election.
    CatchUp,
    /// A name that only unreachable nodes can know is not answered as absent.
    NoGuess,
    /// A grant that was recalled before it arrived is not used.
    RecalledGrant,
    /// A name with a call under way is not changed or answered locally.
    BusyNames,
    /// A file that another node changed is not answered from the holder's own memory.
    SharedFiles,
    /// A call that would wait while its node owes something itself is refused as busy.
    Yield,
    /// A directory does not move below itself.
    NoLoops,
    /// A directory is removed after its delegate has given it back.
    EmptyForAll,
}

/// The rules in force. The product has [`Rules::COMPLETE`]; a test leaves one out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rules {
    left_out: Option<Rule>,
}

impl Rules {
    /// Every rule.
    pub const COMPLETE: Self = Self { left_out: None };

    /// Returns every rule but one, to show that the model finds the error that the rule prevents.
    #[must_use]
    pub const fn without(rule: Rule) -> Self {
        Self { left_out: Some(rule) }
    }

    /// Returns whether `rule` is in force.
    #[must_use]
    pub fn has(self, rule: Rule) -> bool {
        self.left_out != Some(rule)
    }
}
