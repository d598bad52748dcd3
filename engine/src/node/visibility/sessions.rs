//! The processes that wrote checkpoints, and whether they still run.
//!
//! Owns: the facts about writers that the rules get. Does not own: the rules (`protocol::{shield, removal}`), what is known of a
//! process (`namespace`).

use crate::node::Shared;
use crate::node::book::VersionBook;
use crate::node::by_path::ByPath;
use crate::node::flush::covers;
use crate::node::ledger::Ledger;
use crate::node::visibility::removed::wrote;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tidemark_namespace::{Ended, FileView, Peers, SessionKey, WriterId, is_alive, path_of_torn};
use tidemark_protocol::path::{RelPath, RunPath};
use tidemark_protocol::recognise::{Candidate, CheckpointId};
use tidemark_protocol::removal::Actor;
use tidemark_protocol::shield::Session;

/// Lookups about processes that wrote checkpoints, and whether they still run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sessions<'a> {
    pub(crate) shared: &'a Arc<Shared>,
    pub(crate) ledger: &'a Ledger,
}

impl<'a> Sessions<'a> {
    /// Whether a trainer wrote the candidate: a launcher gave one of its writers a rank, or a writer wrote or opened another checkpoint
    /// of the run.
    pub(crate) fn is_of_a_trainer(self, id: &CheckpointId, candidate: &Candidate) -> bool {
        let writers = || {
            let files = self.ledger.files_of(candidate, &self.ledger.books[id].scope);
            files.flat_map(|(_, view)| &view.writers)
        };
        if writers().any(|writer| writer.rank.is_some()) {
            return true;
        }
        let processes: BTreeSet<_> = writers().map(WriterId::process).collect();
        let opened = self.shared.namespace.writers().opened_by(&processes);
        self.files_of_checkpoints(|of| of.run == id.run && of != id).any(|view| {
            opened.contains(&view.node)
                || view.writers.iter().any(|writer| processes.contains(&writer.process()))
        })
    }

    /// Returns the files in the tree of the checkpoints for which `meant` is true.
    pub(crate) fn files_of_checkpoints(
        self,
        meant: impl Fn(&CheckpointId) -> bool,
    ) -> impl Iterator<Item = &'a Arc<FileView>> {
        let books = self.ledger.books.values().filter(move |book| meant(&book.id));
        let candidates = books.filter_map(|book| Some((book.candidate.as_ref()?, &book.scope)));
        candidates.flat_map(|(candidate, scope)| self.ledger.files_of(candidate, scope)).map(|(_, view)| view)
    }

    /// Returns the state of each session that wrote the candidate.
    pub(crate) fn sessions_of(self, id: &CheckpointId, candidate: &Candidate) -> Vec<Session> {
        let views: Vec<_> = self.ledger.files_of(candidate, &self.ledger.books[id].scope).collect();
        let torn_ns = views.iter().map(|(_, view)| view.closed_ns).max().unwrap_or(0);
        let writers: Vec<_> = views.iter().flat_map(|(_, view)| &view.writers).collect();
        let keys: BTreeSet<_> = writers.iter().map(|writer| &writer.session).collect();
        let of = |key: &SessionKey| {
            writers.iter().copied().filter(|writer| writer.session == *key).collect::<Vec<_>>()
        };
        keys.into_iter().map(|key| self.session_of(&id.run, &of(key), torn_ns)).collect()
    }

    /// Returns the state of the one session that all `writers` belong to. Processes that started after `before_ns` do not keep it alive,
    /// unless they wrote in the run.
    pub(crate) fn session_of(self, run: &RunPath, writers: &[&WriterId], before_ns: i64) -> Session {
        // The first writer's start tells when the session was launched.
        let first =
            writers.iter().min_by_key(|writer| writer.start_time_ticks).expect("a session has a writer");
        if let Some(process) = self.writer_of(run, &first.session) {
            return Session::Alive { process };
        }
        if let Some(writer) = writers.iter().find(|writer| !writer.environment_seen) {
            let why = format!("the environment of process {} was not seen", writer.tgid);
            return Session::Doubtful { why };
        }
        if let Some(home) = first.home {
            // Processes on a node that is gone are not waited for. Writers on other nodes were looked for above.
            return if self.shared.is_gone(home) {
                Session::Gone
            } else {
                let home = home.0;
                Session::Doubtful {
                    why: format!("whether its node, life {home:016x}, runs more of it is not known here"),
                }
            };
        }
        match self.shared.namespace.writers().peers(first, before_ns) {
            Peers::None => Session::Gone,
            Peers::Some { process } => Session::Alive { process },
            Peers::Unknown { process } => {
                Session::Doubtful { why: format!("the environment of process {process} cannot be read") }
            }
        }
    }

    /// Returns a living process of the session that wrote in the run.
    fn writer_of(self, run: &RunPath, session: &SessionKey) -> Option<u32> {
        let run = run.path();
        let of_run = self.ledger.files().filter(|(path, _)| run.is_none_or(|run| path.is_below(run)));
        let mut asked = BTreeSet::new();
        for writer in of_run.flat_map(|(_, view)| &view.writers).filter(|writer| writer.session == *session) {
            if asked.insert(writer.process()) && is_alive(&self.shared.namespace, writer) {
                return Some(writer.tgid);
            }
        }
        None
    }

    /// Returns the hidden torn checkpoints, under the paths that they had, and their files.
    pub(crate) fn torn(self) -> Vec<(Candidate, Vec<FileView>)> {
        let views = self.shared.namespace.hidden().torn_files();
        let mut at: BTreeMap<RelPath, &FileView> = BTreeMap::new();
        for view in &views {
            let paths = view.paths.iter().filter_map(|path| RelPath::new(path_of_torn(path)?.to_vec()).ok());
            at.extend(paths.map(|path| (path, view)));
        }
        let candidates = self.ledger.rules().group(at.keys()).candidates;
        let with_files = |candidate: Candidate| {
            let files =
                candidate.files.keys().filter_map(|path| Some(FileView::clone(at.get(path)?))).collect();
            (candidate, files)
        };
        candidates.into_iter().map(with_files).collect()
    }

    /// Whether a process wrote files of a checkpoint of the run that Tier-3 does not have, whole, as it stands.
    pub(crate) fn has_unfinished(self, who: &WriterId, run: &RunPath) -> bool {
        self.ledger.books.values().filter(|book| book.id.run == *run).any(|book| {
            let Some(candidate) = &book.candidate else { return false };
            let files: Vec<_> = self.ledger.files_of(candidate, &book.scope).collect();
            let present = self.ledger.present(book);
            let covering = present.and_then(|present| Some(book.covering(self.shared, &present)?.1));
            let is_whole =
                |version: &VersionBook| version.checkpoint.is_prepared() && !version.record().partial;
            !covering.is_some_and(is_whole) && files.iter().any(|(_, view)| wrote(view, who))
        })
    }

    /// Returns the state of a process that removed or made names of a run.
    pub(crate) fn actor(self, who: &WriterId, run: &RunPath) -> Actor {
        let namespace = &self.shared.namespace;
        if is_alive(namespace, who) {
            return Actor::Alive { process: who.tgid };
        }
        let failed = || Actor::Failed { process: who.tgid };
        match namespace.writers().end(who).map(|end| end.how) {
            Some(Ended::Killed) => failed(),
            // When a name is missing, rm(1) exits with 1, and still meant what it removed.
            Some(Ended::Failed) if self.has_written(who, run) => failed(),
            None if namespace.writers().is_end_awaited(who) => Actor::Ended,
            None if self.has_begun_another(who, run) => Actor::Lost { process: who.tgid },
            Some(Ended::Well | Ended::Failed) | None => Actor::Meant,
        }
    }

    /// Whether the tree has files, hidden or not, that a process wrote for a checkpoint of the run.
    fn has_begun_another(self, who: &WriterId, run: &RunPath) -> bool {
        self.files_of_checkpoints(|of| of.run == *run).any(|view| wrote(view, who))
            || self.wrote_torn(who, run)
    }

    /// Whether the tree has files of the run, hidden or not, that a process wrote.
    fn has_written(self, who: &WriterId, run: &RunPath) -> bool {
        let in_run = |path: &RelPath| run.path().is_none_or(|run| path.is_below(run));
        self.ledger.files().any(|(path, view)| in_run(path) && wrote(view, who)) || self.wrote_torn(who, run)
    }

    fn wrote_torn(self, who: &WriterId, run: &RunPath) -> bool {
        let torn = self.torn().into_iter().filter(|(candidate, _)| candidate.id.run == *run);
        torn.flat_map(|(_, files)| files).any(|view| wrote(&view, who))
    }

    pub(crate) fn is_meant(self, place: &[u8]) -> bool {
        let is_it = |path: RelPath| path.as_bytes() == place;
        self.by_path().is_known(place)
            || self.ledger.removed_loose.keys().any(|path| covers(place, path.as_bytes()))
            || self.torn().iter().any(|(candidate, _)| candidate.id.path().is_some_and(is_it))
    }

    fn by_path(self) -> ByPath<'a> {
        ByPath { shared: self.shared, ledger: self.ledger }
    }
}
