//! The decision about a checkpoint whose names a job removed.
//!
//! Owns: the decision, with its reason. Does not own: who removed the names and how they ended (the node), when the
//! bytes are deleted (`retention`).
//!
//! Some jobs remove the old checkpoint before they write the new one (Accelerate with `total_limit=1`, Megatron's
//! non-persistent saves). If such a job dies between the two, nothing is left to resume from, and the job did not
//! intend that.

/// The fate of a process that removed names of a checkpoint, or made its directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Actor {
    Alive {
        process: u32,
    },
    /// The process has ended, but its parent has not waited for it, so the kernel has not said how.
    Ended,
    /// Killed, or ended with a failure.
    Failed {
        process: u32,
    },
    /// The process has ended, unknown how, and had begun another checkpoint of the run.
    Lost {
        process: u32,
    },
    /// The process ended well; or its end is unknown, and it had begun nothing.
    Meant,
}

/// The facts about the run whose newest checkpoint was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left {
    /// Whether a whole checkpoint of the run is in the tree.
    pub whole: bool,
    /// Whether names of another checkpoint exist, and it is not yet known whether that one is whole.
    pub in_hand: bool,
    /// Whether the removed checkpoint is in Tier-3.
    pub committed: bool,
    /// Whether the removed checkpoint is on its way to Tier-3.
    pub on_its_way: bool,
}

/// The decision; see the module's head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Removal {
    /// The checkpoint stays removed.
    Stands { why: &'static str },
    /// Ask again later.
    Waits { why: String },
    /// The names come back.
    Undone { why: String },
}

/// Decides about the newest removed checkpoint of a run.
#[must_use]
pub fn decide(removers: &[Actor], left: Left) -> Removal {
    if left.whole {
        return Removal::Stands { why: "another whole checkpoint of the run is there" };
    }
    let living = removers.iter().find_map(|remover| match remover {
        Actor::Alive { process } => Some(format!("process {process}, which removed it, lives")),
        Actor::Ended => Some("how the process ended that removed it is not known yet".to_owned()),
        Actor::Failed { .. } | Actor::Lost { .. } | Actor::Meant => None,
    });
    if let Some(why) = living {
        return Removal::Waits { why };
    }
    let unfinished = removers.iter().find_map(|remover| match remover {
        Actor::Failed { process } => Some((process, "and failed")),
        Actor::Lost { process } => Some((process, "and ended, nobody knows how,")),
        Actor::Alive { .. } | Actor::Ended | Actor::Meant => None,
    });
    match unfinished {
        None => Removal::Stands { why: "who removed it ended well" },
        Some(_) if left.in_hand => {
            Removal::Waits { why: "another checkpoint of the run is being looked at".to_owned() }
        }
        Some((process, ended)) if left.committed => Removal::Undone {
            why: format!("process {process} removed it, {ended} before anything else of the run was whole"),
        },
        Some(_) if left.on_its_way => Removal::Waits { why: "it is on its way to Tier-3".to_owned() },
        Some(_) => Removal::Stands { why: "it was never committed" },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: Left = Left { whole: false, in_hand: false, committed: true, on_its_way: false };

    #[test]
    fn only_who_failed_before_anything_else_was_whole_is_undone() {
        let failed = [Actor::Meant, Actor::Failed { process: 7 }];
        assert!(matches!(decide(&failed, NOTHING), Removal::Undone { why } if why.contains("process 7")));
        assert!(matches!(decide(&failed, Left { whole: true, ..NOTHING }), Removal::Stands { .. }));
        assert!(matches!(decide(&[Actor::Meant], NOTHING), Removal::Stands { .. }));
        let lost = [Actor::Lost { process: 9 }];
        assert!(
            matches!(decide(&lost, NOTHING), Removal::Undone { why } if why.contains("nobody knows how"))
        );
        assert!(matches!(decide(&lost, Left { whole: true, ..NOTHING }), Removal::Stands { .. }));
        assert!(matches!(decide(&[], NOTHING), Removal::Stands { .. }));
    }

    #[test]
    fn while_one_of_them_lives_or_its_end_is_not_known_it_is_asked_again() {
        for living in [Actor::Alive { process: 8 }, Actor::Ended] {
            let removers = [Actor::Failed { process: 7 }, living];
            assert!(matches!(decide(&removers, NOTHING), Removal::Waits { .. }));
            assert!(matches!(decide(&removers, Left { whole: true, ..NOTHING }), Removal::Stands { .. }));
        }
    }

    #[test]
    fn while_another_checkpoint_is_being_looked_at_it_is_asked_again() {
        let left = Left { in_hand: true, ..NOTHING };
        assert!(matches!(decide(&[Actor::Failed { process: 7 }], left), Removal::Waits { .. }));
        assert!(matches!(decide(&[Actor::Meant], left), Removal::Stands { .. }));
    }

    #[test]
    fn what_is_not_committed_comes_back_once_it_is_or_never() {
        let failed = [Actor::Failed { process: 7 }];
        let uncommitted = Left { committed: false, ..NOTHING };
        assert!(matches!(decide(&failed, Left { on_its_way: true, ..uncommitted }), Removal::Waits { .. }));
        assert!(matches!(decide(&failed, uncommitted), Removal::Stands { .. }));
    }
}
