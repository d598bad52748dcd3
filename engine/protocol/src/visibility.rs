//! Visibility of a checkpoint in which something is missing or broken: its standing, and whether a job may see it.
//!
//! Owns: both decisions over all combinations of facts, with their reasons. Does not own: the proof that all names exist
//! (`evidence`), how the processes ended and which of their session live (the node), the content of a tracker (`shield`).
//!
//! A job that comes back takes the newest checkpoint that it sees, so showing a broken one does harm. A file that a program
//! closed before it ended well is the user's, whole or not, so hiding it does harm too. If facts are missing, files stay.

use crate::shield::{Session, who_is_left};

/// The ends of the processes that wrote the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ends {
    /// A process lives, or has ended and the kernel has not said how yet.
    Living,
    /// All ended with status 0.
    Well,
    /// Process `process` ended by a signal or with another status, before its files had been quiet for the settle time.
    Failed { process: u32 },
    /// The ends were not seen, or came long after the last file.
    Unknown,
}

/// Whether all names of the checkpoint exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Names {
    /// Something proves it.
    All,
    /// Some are known to be missing.
    Lacking,
    /// Nothing proves either.
    Unknown,
}

/// The verdict of the formats on the bytes of the files. The worst of them counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Content {
    /// The format proves that the bytes are complete.
    Whole,
    /// The format is unknown, or proves nothing.
    #[default]
    Unknown,
    /// The bytes begin as a format whose own structure they contradict.
    Broken,
}

/// The facts about a checkpoint, without its neighbours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    pub ends: Ends,
    pub names: Names,
    pub content: Content,
    /// Whether a process ended with a file open, and neither content nor an index proves that file whole.
    pub cut: bool,
    /// Whether a trainer wrote the checkpoint: a launcher gave it a rank, or it wrote another checkpoint of the run.
    pub trainer: bool,
    /// Whether the files are laid out as by one framework: no plain file, nor a model's parts, which people copy around.
    pub layout: bool,
}

/// The standing of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// A process may write the rest.
    Open,
    Complete,
    /// Nothing proves that something is missing, or that nothing is.
    Settled,
    /// Names are missing, and all writers ended well: the checkpoint may be a copy of a part.
    Incomplete,
    /// Names are missing, and it is not known how the writers ended.
    Undecided,
    /// The checkpoint can never be complete.
    Torn,
    /// A file contradicts its own format.
    Broken,
}

/// Returns the standing of a checkpoint.
#[must_use]
pub fn standing(seen: Seen) -> Standing {
    match seen {
        // The writer, trainer or not, never declared the file whole.
        Seen { cut: true, .. } => Standing::Torn,
        Seen { content: Content::Broken, .. } => Standing::Broken,
        Seen { names: Names::All, .. } => Standing::Complete,
        Seen { ends: Ends::Living, .. } => Standing::Open,
        Seen { names: Names::Unknown, .. } => Standing::Settled,
        Seen { ends: Ends::Well, .. } => Standing::Incomplete,
        Seen { ends: Ends::Failed { .. }, .. } => Standing::Torn,
        // No person lays out a framework's directory by hand, and no rank ends before the others are done.
        Seen { ends: Ends::Unknown, trainer: true, layout: true, .. } => Standing::Torn,
        Seen { ends: Ends::Unknown, .. } => Standing::Undecided,
    }
}

impl Standing {
    /// Whether a version of the checkpoint may be committed. Settled, incomplete and undecided checkpoints are kept without a
    /// commit.
    #[must_use]
    pub fn commits(self) -> bool {
        self == Self::Complete
    }
}

/// Whether a checkpoint stays in the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tree {
    Stays { why: String },
    Hides,
}

/// Decides whether a job may see the checkpoint. `sessions`: those that wrote it. `fallback`: an older whole checkpoint of the
/// run, or an older version of the same name, can be loaded instead. Without a fallback a job has to fail, and must not begin at
/// step 0 unnoticed.
#[must_use]
pub fn tree(standing: Standing, trainer: bool, sessions: &[Session], fallback: bool) -> Tree {
    let stays = |why: &str| Tree::Stays { why: why.to_owned() };
    match standing {
        Standing::Torn => {}
        Standing::Broken if trainer => {}
        Standing::Broken => return stays("no trainer wrote it"),
        Standing::Open
        | Standing::Complete
        | Standing::Settled
        | Standing::Incomplete
        | Standing::Undecided => return stays("nothing says that it can never be complete"),
    }
    match who_is_left(sessions) {
        Some(why) => Tree::Stays { why },
        None if fallback => Tree::Hides,
        None => stays("nothing whole is there that a job could load instead"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<(Seen, Session, bool)> {
        let mut found = Vec::new();
        let ends = [Ends::Living, Ends::Well, Ends::Failed { process: 7 }, Ends::Unknown];
        for ends in ends {
            for names in [Names::All, Names::Lacking, Names::Unknown] {
                for content in [Content::Whole, Content::Unknown, Content::Broken] {
                    for flags in 0..16 {
                        let is = |flag: u32| flags & (1 << flag) != 0;
                        let seen = Seen { ends, names, content, cut: is(0), trainer: is(1), layout: is(2) };
                        let doubt = Session::Doubtful { why: "unreadable".into() };
                        for session in [Session::Gone, Session::Alive { process: 7 }, doubt] {
                            found.push((seen, session, is(3)));
                        }
                    }
                }
            }
        }
        found
    }

    fn is_hidden(seen: Seen, session: &Session, fallback: bool) -> bool {
        tree(standing(seen), seen.trainer, std::slice::from_ref(session), fallback) == Tree::Hides
    }

    #[test]
    fn what_is_hidden_is_proven_broken_and_has_something_whole_beside_it() {
        let mut hidden = 0;
        for (seen, session, fallback) in all() {
            if !is_hidden(seen, &session, fallback) {
                continue;
            }
            hidden += 1;
            let failed = matches!(seen.ends, Ends::Failed { .. });
            let left = seen.ends == Ends::Unknown && seen.trainer && seen.layout;
            let lacks = seen.names == Names::Lacking && (failed || left);
            assert!(seen.cut || seen.content == Content::Broken || lacks, "{seen:?}");
            assert!(fallback && session == Session::Gone, "{seen:?} {session:?}");
        }
        assert!(hidden > 0);
    }

    #[test]
    fn where_everybody_ended_well_and_nothing_is_broken_or_cut_nothing_is_hidden() {
        for (seen, session, fallback) in all() {
            if seen.ends == Ends::Well && seen.content != Content::Broken && !seen.cut {
                assert!(!is_hidden(seen, &session, fallback), "{seen:?}");
            }
        }
    }

    #[test]
    fn more_proof_never_hides() {
        for (seen, session, fallback) in all() {
            let named = Seen { names: Names::All, ..seen };
            // A broken file does not lack proof.
            let content = if seen.content == Content::Broken { seen.content } else { Content::Whole };
            let proven = Seen { content, cut: false, ..seen };
            for more in [named, proven] {
                let hides = is_hidden(more, &session, fallback);
                assert!(!hides || is_hidden(seen, &session, fallback), "{seen:?} {more:?}");
            }
        }
    }

    #[test]
    fn only_what_has_all_names_and_nothing_broken_or_cut_is_committed() {
        for (seen, ..) in all() {
            let whole = seen.names == Names::All && seen.content != Content::Broken && !seen.cut;
            assert_eq!(standing(seen).commits(), whole, "{seen:?}");
        }
    }

    #[test]
    fn what_stays_has_a_reason() {
        for (seen, session, fallback) in all() {
            if let Tree::Stays { why } = tree(standing(seen), seen.trainer, &[session], fallback) {
                assert!(!why.is_empty(), "{seen:?}");
            }
        }
        assert!(
            matches!(tree(Standing::Torn, true, &[], true), Tree::Stays { .. }),
            "nobody knows who wrote it"
        );
    }
}
