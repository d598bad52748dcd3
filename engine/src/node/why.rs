//! Conclusions about a path, and the facts behind them, for a person who wonders.
//!
//! Owns: putting the answer together. Does not own: the facts (`decide`), the conclusions (`protocol::evidence`, `visibility`).

use crate::node::book::Book;
use crate::node::decide;
use crate::node::inventory::Inventory;
use crate::node::run::{Engine, Node};
use crate::node::visibility::fallbacks::Fallbacks;
use std::collections::BTreeMap;
use tidemark_namespace::{FileView, fate_of, path_of_torn};
use tidemark_protocol::evidence::Fate;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::{CheckpointState, Why, WhyFile, WhyWriter, path_text};

/// Files listed: a person reads the first of them, and the answer stays below a megabyte.
const FILES_MAX: usize = 1000;

impl Node {
    /// Returns what is known about the checkpoint that a path belongs to, or about a file outside any. The outer `None`: the loop
    /// has stopped. The inner one: nothing is known.
    pub async fn why(&self, place: Vec<u8>) -> Option<Option<Why>> {
        self.ask(move |engine| Reasons { engine }.why(&place)).await
    }
}

/// The reason that `why` gives for the state of a path.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reasons<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> Reasons<'a> {
    pub(crate) fn why(self, place: &[u8]) -> Option<Why> {
        let hidden = self.engine.sessions().torn().into_iter().find(|(candidate, _)| {
            let inside = candidate.files.keys().any(|path| path.as_bytes() == place);
            inside || candidate.id.path().is_some_and(|path| path.as_bytes() == place)
        });
        let found = self.engine.by_path().find_at(place);
        if let Some((candidate, files)) = hidden.filter(|_| found.is_none_or(|book| book.candidate.is_none()))
        {
            let sight = self.engine.visibility.why_hidden(&candidate.id).map(str::to_owned);
            let why = sight.clone().unwrap_or_else(|| "it can never be complete".to_owned());
            let of_torn = |view: &FileView| {
                let paths =
                    view.paths.iter().filter_map(|path| RelPath::new(path_of_torn(path)?.to_vec()).ok());
                paths.collect::<Vec<_>>()
            };
            let at: BTreeMap<RelPath, &FileView> = files
                .iter()
                .flat_map(|view| of_torn(view).into_iter().map(move |path| (path, view)))
                .collect();
            let files: Vec<_> = at.iter().map(|(path, view)| (path, *view)).collect();
            let path = candidate.id.path().map_or_else(String::new, |path| path.to_string());
            return Some(self.answer(path, (CheckpointState::Torn, why), (false, sight), true, &files, None));
        }
        let Some(book) = found else { return self.why_loose(place) };
        let row = Inventory { engine: self.engine }.standing_row(book)?;
        let version = book.versions.get(&(row.timeline, row.version));
        let verdict = match version {
            Some(version) if version.checkpoint.why_unreadable().is_some() => {
                let why = version.checkpoint.why_unreadable().unwrap_or_default();
                format!("Tier-3 does not say any more what was committed: {why}")
            }
            Some(version) => {
                let (evidence, detail) = version.checkpoint.evidence();
                format!("{evidence}: {detail}")
            }
            None => decide::waits_for(book),
        };
        let files: Vec<_> = match &book.candidate {
            Some(candidate) => self.engine.ledger.files_of(candidate, &book.scope).collect(),
            None => Vec::new(),
        };
        let files: Vec<_> = files.into_iter().map(|(path, view)| (path, view.as_ref())).collect();
        let in_sight = book.candidate.is_some()
            || version.is_some_and(|version| self.engine.tree_names().shows_all(version));
        let sight = match version.and_then(|version| self.engine.tree_names().successor(book, version)) {
            Some(other) => Some(format!("its names are those of {} now", path_text(&other.path()))),
            None => self.engine.visibility.why_in_sight(&book.id).map(str::to_owned),
        };
        let sight = (in_sight, sight);
        let Engine { shared, ledger, gc, .. } = self.engine;
        let fallback = Fallbacks { shared, ledger, gc }.has_fallback(&book.id);
        Some(self.answer(row.path, (row.state, verdict), sight, fallback, &files, Some(book)))
    }

    fn why_loose(self, place: &[u8]) -> Option<Why> {
        let path = RelPath::new(place.to_vec()).ok()?;
        let view = self.engine.ledger.file(&path)?;
        let verdict = "no rule takes it for a part of a checkpoint: it is kept as it is".to_owned();
        let standing = (CheckpointState::Loose, verdict);
        Some(self.answer(path_text(place), standing, (true, None), false, &[(&path, view.as_ref())], None))
    }

    fn answer(
        self,
        path: String,
        (state, verdict): (CheckpointState, String),
        (in_sight, sight): (bool, Option<String>),
        fallback: bool,
        files: &[(&RelPath, &FileView)],
        book: Option<&Book>,
    ) -> Why {
        let mut writers: BTreeMap<(u32, u64), WhyWriter> = BTreeMap::new();
        for (_, view) in files {
            let cut = view.is_left_cut();
            for writer in &view.writers {
                let found = writers.entry(writer.process()).or_insert_with(|| WhyWriter {
                    process: writer.tgid,
                    session: writer.session.0.clone(),
                    rank: writer.rank,
                    world_size: writer.world_size,
                    end: end(fate_of(&self.engine.shared.namespace, writer, cut).0).to_owned(),
                    files: 0,
                });
                found.files += 1;
            }
        }
        let committed = book.and_then(Book::committed).map(|(_, version)| &version.contents);
        let shown = |(path, view): &(&RelPath, &FileView)| WhyFile {
            path: path.to_string(),
            bytes: view.size_bytes,
            state: decide::state_word(&view.state).to_owned(),
            renamed: view.renamed,
            committed: committed.is_some_and(|committed| {
                decide::seal_of(view).is_some_and(|seal| committed.get(*path) == Some(&seal))
            }),
        };
        Why {
            path,
            state,
            verdict,
            in_sight,
            sight,
            fallback,
            writers: writers.into_values().collect(),
            files: files.iter().take(FILES_MAX).map(shown).collect(),
            files_left_out: u64::try_from(files.len().saturating_sub(FILES_MAX)).unwrap_or(u64::MAX),
        }
    }
}

fn end(fate: Fate) -> &'static str {
    match fate {
        Fate::Alive => "lives",
        Fate::Exited => "ended well",
        Fate::Failed => "failed",
        Fate::Killed => "was killed, or ended with a file open",
        Fate::Ended => "has ended, and the kernel has not said how yet",
        Fate::Gone => "is gone, and nobody saw how",
    }
}
