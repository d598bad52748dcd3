//! Problems on this node, as far as the loop knows them.
//!
//! Owns: which problems there are, and their words. Does not own: the codes (`protocol::report`), what only the daemon knows.

use crate::node::book::VersionBook;
use crate::node::run::Engine;
use std::collections::{BTreeMap, BTreeSet};
use tidemark_namespace::FileView;
use tidemark_protocol::report::{Problem, ProblemCode, SEE_WRITERS, TierStatus, path_text};
use tokio::time::Instant;

/// Returns a sentence about the first of many, with the number of the others.
pub(super) fn and_more(first: String, more: usize, of_what: &str) -> String {
    if more == 0 { first } else { format!("{first}; and {more} more {of_what}") }
}

/// Returns the remedy for bad bytes in memory. `waits`: they are still there, and Tier-3 has an object that is not known to be bad.
/// `stored`: Tier-3 had them at some time.
const fn way_out(waits: bool, stored: bool) -> &'static str {
    match (waits, stored) {
        (true, _) => {
            "it is replaced by itself once no program has it open and Tier-3 gives its object; `ckptctl verify` tries it now"
        }
        (false, true) => {
            "it was in Tier-3: restore its object from a copy of Tier-3 and run `ckptctl verify --deep`, or save it again"
        }
        (false, false) => "save it again; nothing that was committed is affected",
    }
}

/// The problems of this node, as `status` and `doctor` name them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeHealth<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> NodeHealth<'a> {
    pub(crate) fn problems(self, tiers: &[TierStatus], now: Instant) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut add = |code, what: String, action: &str| problems.push(Problem::new(code, what, action));
        if let Some(why) = &self.engine.rights.fenced {
            add(ProblemCode::Fenced, why.clone(), "stop this daemon: another one commits to this Tier-3");
        }
        if let Some((since, why)) = self.engine.tier3_away.trouble(&self.engine.shared) {
            let seconds = now.saturating_duration_since(since).as_secs();
            let lag = self.engine.backlog.lag(&self.engine.ledger, self.engine.shared.now_ns(), None);
            let what = format!(
                "Tier-3 does not take what it is given for {seconds} s, {} bytes wait: {why}",
                lag.bytes
            );
            add(
                ProblemCode::Tier3Away,
                what,
                "nothing is lost while this node lives; repair Tier-3, it is tried again by itself",
            );
        }
        for (what, action) in self.bad_host_copies() {
            add(ProblemCode::HostCorrupt, what, action);
        }
        for (path, why) in self.engine.selection().lost_checkpoints() {
            add(
                ProblemCode::Lost,
                format!("{path} cannot be read whole: {why}"),
                "`ckptctl recover --plan` says what a job loads instead; restore the object and run `ckptctl verify --deep`, or remove \
                 the checkpoint",
            );
        }
        let unmended = self.engine.scrub.unmended.iter().map(|(path, what)| format!("{path}: {what}"));
        for what in self.bad_objects().into_iter().chain(unmended) {
            add(
                ProblemCode::ObjectCorrupt,
                what,
                "the loss of this node would lose it; `ckptctl verify --deep` tries again to write it",
            );
        }
        if let Some(what) = self.engine.tree_names().lost_loose() {
            add(
                ProblemCode::Lost,
                what,
                "restore the object from a copy of Tier-3 and restart the daemon, or remove the file; `ckptctl undelete` then brings the \
                 newest generation that can be read",
            );
        }
        for passed in &self.engine.passed_over {
            add(
                ProblemCode::Tier3NotBelieved,
                passed.what.clone(),
                "`ckptctl verify --deep` tells what is still recoverable",
            );
        }
        for book in self.engine.ledger.books.values() {
            if let Some((_, version)) = book.versions.iter().next_back()
                && let Some(why) = version.checkpoint.failure()
            {
                let what = format!("{}: {why}", path_text(&book.path()));
                add(ProblemCode::NotCommitted, what, "save this checkpoint again");
            }
        }
        for (code, what) in self.engine.tree_names().unproven() {
            add(
                code,
                what,
                "`ckptctl why PATH` says what is known of it; save it again, `ckptctl commit` it where it is whole, or remove it",
            );
        }
        for (code, what) in self.engine.shared.full_tiers(tiers, now) {
            add(
                code,
                what,
                "`ckptctl tiers` shows what holds it; wait for the uploads, remove what is not needed, or raise the budget",
            );
        }
        let unseen = self.engine.shared.namespace.writers().writers_unseen();
        if unseen > 0 {
            let what = format!(
                "{unseen} times a file was opened for writing by a process that this daemon cannot see (another pid namespace): how such \
                 processes end is not known, so that their files go to Tier-3 and are committed only by other proof"
            );
            add(ProblemCode::WritersUnseen, what, SEE_WRITERS);
        }
        if let Some(what) = self.engine.ledger.unkept.problem() {
            add(ProblemCode::Unnameable, what, "they end with this node's memory: use shorter paths");
        }
        problems
    }

    /// Returns the flaw of each bad host copy, with its remedy. If there is any, costs a pass over the files and the versions.
    fn bad_host_copies(self) -> Vec<(String, &'static str)> {
        if self.engine.scrub.bad.is_empty() {
            return Vec::new();
        }
        // Bytes that were saved again are another seal, and the old ones do not matter any more.
        let bad_in_tree = |view: &FileView| {
            let of = (view.file, view.sealed()?);
            self.engine.scrub.bad.contains_key(&of).then(|| (of, (view.host, view.object.clone())))
        };
        let in_tree: BTreeMap<_, _> =
            self.engine.ledger.files().filter_map(|(_, view)| bad_in_tree(view.as_ref())).collect();
        let versions = self.engine.ledger.books.values().flat_map(|book| book.versions.values());
        let files = versions.filter_map(VersionBook::manifest).flat_map(|manifest| &manifest.files);
        let committed: BTreeSet<_> =
            files.map(|file| (file.file, file.seal)).filter(|of| in_tree.contains_key(of)).collect();
        let found = in_tree.into_iter().map(|(of, (host, object))| {
            let bad_keys: BTreeSet<_> =
                self.engine.scrub.bad_objects_of(of.0, of.1).map(|(key, _)| key).collect();
            let waits = host && object.as_ref().is_some_and(|object| !bad_keys.contains(&object.key));
            let stored = object.is_some() || !bad_keys.is_empty() || committed.contains(&of);
            (self.engine.scrub.bad[&of].clone(), way_out(waits, stored))
        });
        found.collect()
    }

    /// Objects that are bad, of files that are in the tree or in a committed version still.
    fn bad_objects(self) -> Vec<String> {
        if self.engine.scrub.bad_objects.is_empty() {
            return Vec::new();
        }
        let in_tree = self.engine.ledger.files().filter_map(|(_, view)| Some((view.file, view.sealed()?)));
        let versions = self.engine.ledger.books.values().flat_map(|book| book.versions.values());
        let files = versions.filter_map(VersionBook::manifest).flat_map(|manifest| &manifest.files);
        let wanted: BTreeSet<_> = in_tree.chain(files.map(|file| (file.file, file.seal))).collect();
        let bad = self
            .engine
            .scrub
            .bad_objects
            .iter()
            .filter(|((file, seal, _), _)| wanted.contains(&(*file, *seal)));
        bad.map(|(_, bad)| format!("{}: {}", bad.path, bad.what)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::way_out;

    #[test]
    fn nothing_committed_is_affected_only_where_tier_3_never_had_it() {
        let unaffected = |action: &str| action.contains("nothing that was committed is affected");
        assert!(unaffected(way_out(false, false)));
        assert!(way_out(true, true).contains("replaced by itself"));
        assert!(!unaffected(way_out(false, true)) && way_out(false, true).contains("restore its object"));
    }
}
