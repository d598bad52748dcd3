//! The indices of a checkpoint, as far as they can be read.
//!
//! Owns: reading one, and what makes one readable that is not sealed. Does not own: what an index proves (protocol), carrying an action out
//! (`run`).

use crate::node::Shared;
use crate::node::book::{Book, ParsedIndex};
use crate::node::decide::{Action, left_cut};
use crate::node::ledger::Ledger;
use crate::node::pending::left_unclosed;
use std::collections::BTreeMap;
use std::sync::Arc;
use tidemark_namespace::{FileState, FileView};
use tidemark_protocol::evidence::{Covered, IndexError, Verdict, parse_index};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::recognise::IndexKind;

/// Returns the indices of the candidate that were read at their present seal.
pub(crate) fn known_indices(
    book: &Book,
    fresh: &BTreeMap<RelPath, ParsedIndex>,
    files: &[(&RelPath, &Arc<FileView>)],
) -> BTreeMap<RelPath, Result<Covered, IndexError>> {
    let mut known = BTreeMap::new();
    for (path, view) in files {
        let FileState::Sealed { seal, .. } = view.state else { continue };
        let index = fresh.get(*path).or_else(|| book.indices.get(*path));
        if let Some(index) = index.filter(|index| index.of == (view.file, seal)) {
            let covered = match &index.covered {
                Ok(covered) => Ok(Covered::clone(covered)),
                // The error was said when it was read; the verdict needs only that there is one.
                Err(()) => Err(IndexError::Empty),
            };
            known.insert((*path).clone(), covered);
        }
    }
    known
}

/// Returns the action that makes an unsealed index readable: its bytes are only elsewhere, or its writer never closed it. `None`:
/// it is being sealed, or this node may not say that an unclosed file is done.
pub(crate) fn to_read(
    shared: &Shared,
    ledger: &Ledger,
    index: &(&RelPath, &Arc<FileView>),
    vouched: bool,
) -> Option<Action> {
    let (_, view) = index;
    if view.state != FileState::Cut {
        return (!view.host && view.sealed().is_some()).then_some(Action::Fetch(view.node));
    }
    if view.host && vouched {
        return Some(Action::Accept(view.node));
    }
    let cut = left_cut(shared, ledger, std::slice::from_ref(index));
    (!cut.is_empty()).then_some(Action::SealAsTheyAre(cut))
}

/// Returns the verdict on an index that this node will not seal, because another node may have a writer of it.
pub(crate) fn not_readable(path: &RelPath, view: &FileView, settle_ns: i64, now_ns: i64) -> Verdict {
    let settles_at_ns = view.published_ns.max(view.closed_ns).saturating_add(settle_ns);
    let detail = left_unclosed(path);
    if now_ns < settles_at_ns {
        return Verdict::Open { why: detail, again_at_ns: Some(settles_at_ns) };
    }
    Verdict::Settled { detail, undecided: true }
}

pub(crate) fn read_index(
    shared: &Shared,
    files: &[(&RelPath, &Arc<FileView>)],
    path: &RelPath,
    kind: IndexKind,
) -> Option<ParsedIndex> {
    let (_, view) = files.iter().find(|(found, _)| *found == path)?;
    let FileState::Sealed { seal, .. } = view.state else { return None };
    let pin = shared.namespace.seals().pin_seal(view.file, seal)?;
    let covered = match pin.backing.map() {
        Ok(mapping) => parse_index(kind, &mapping).map_err(|error| {
            tracing::warn!(%path, error = &error as &dyn std::error::Error, "an index proves nothing");
        }),
        Err(error) => {
            tracing::error!(%path, %error, "an index could not be read from Tier-1");
            return None;
        }
    };
    Some(ParsedIndex { of: (view.file, seal), covered: covered.map(Arc::new) })
}
