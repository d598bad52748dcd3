//! The rights of this node: to decide, to write to Tier-3, to hide names.
//!
//! Owns: the reasons why it may not. Does not own: what they follow from (the daemon, `recover`), what is done with them.

use crate::node::recover::Knows;
use tokio::time::Instant;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Rights {
    /// Why nothing is decided here any more: another coordinator took over.
    pub(crate) fenced: Option<String>,
    /// Knowledge of this node, which limits what it may decide.
    pub(crate) knows: Knows,
    /// Whether the daemon ends.
    pub(crate) draining: bool,
    /// While the daemon ends: the moment until which it waits for programs that save.
    pub(crate) grace_until: Option<Instant>,
    /// Whether the settings let names go out of sight.
    hides: bool,
}

impl Rights {
    pub(crate) fn new(knows: Knows, hides: bool) -> Self {
        Self { fenced: None, knows, draining: false, grace_until: None, hides }
    }

    /// Takes over from `before` that the daemon ends.
    pub(crate) fn end_as(&mut self, before: &Self) {
        (self.draining, self.grace_until) = (before.draining, before.grace_until);
    }

    /// Whether Tier-3 may be written to.
    pub(crate) fn may_write(&self) -> bool {
        self.fenced.is_none() && self.knows == Knows::All
    }

    /// Whether nothing is to be hidden and no tracker is to be changed now.
    pub(crate) fn shields_nothing(&self) -> bool {
        self.draining || self.never_shields()
    }

    /// Whether this daemon never hides anything: it is fenced, or its settings forbid it.
    pub(crate) fn never_shields(&self) -> bool {
        self.fenced.is_some() || !self.hides
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fenced_node_writes_and_hides_nothing_and_an_ending_one_writes_on() {
        let mut rights = Rights::new(Knows::All, true);
        assert!(rights.may_write() && !rights.shields_nothing());
        let mut next = Rights::new(Knows::Committed, true);
        assert!(!next.may_write() && !next.never_shields(), "Tier-3 takes no writes yet");
        rights.draining = true;
        assert!(rights.may_write() && rights.shields_nothing() && !rights.never_shields());
        next.end_as(&rights);
        assert!(next.draining && next.shields_nothing());
        rights.fenced = Some("another daemon commits".to_owned());
        assert!(!rights.may_write() && rights.never_shields());
        assert!(Rights::new(Knows::All, false).never_shields());
    }
}
