//! The documents, names and files that a `verify` of a place examines.
//!
//! Owns: which those are. Does not own: examining them (`verify`, `verify_names`, `verify_removed`).

use crate::node::flush::covers;
use crate::node::inventory::Inventory;
use crate::node::outstanding::Outstanding;
use crate::node::recover::Knows;
use crate::node::run::Engine;
use crate::node::verify::{Unsealed, why_unsealed};
use crate::node::verify_names::{Again, Named};
use tidemark_namespace::FileState;
use tidemark_protocol::id::Generation;
use tidemark_protocol::key::{Key, Series};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::BrokenInvariant;
use tokio::time::Instant;

/// The documents, names and files that a `verify` of a place examines.
#[derive(Debug, Clone, Copy)]
pub(crate) struct VerifyScope<'a> {
    pub(crate) engine: &'a Engine,
}

impl<'a> VerifyScope<'a> {
    /// Returns what Tier-3 must say of the names at or below `place`.
    pub(crate) fn named_below(self, place: &[u8]) -> Vec<Named> {
        if self.engine.rights.knows != Knows::All {
            return Vec::new();
        }
        let loose = self.engine.ledger.loose.iter().filter(|(path, _)| covers(place, path.as_bytes()));
        let loose = loose.filter_map(|(path, book)| {
            let (of, generation) = (book.uploaded()?, book.described?);
            let view = self.engine.ledger.file(path);
            let sums = view.and_then(|view| match view.state {
                FileState::Sealed { seal, size_bytes, crc, .. } if (view.file, seal) == of => {
                    Some((size_bytes, crc))
                }
                _ => None,
            });
            Some(Named::Loose { path: path.clone(), generation, of, sums })
        });
        // A document that could not be read at the start is not known to this daemon.
        let tree = self.engine.tree.in_tier3().filter(|number| {
            let key = Key::numbered(Series::Tree, *number).to_string();
            place.is_empty() && !self.engine.passed_over.iter().any(|passed| passed.key == key)
        });
        loose.chain(tree.map(|number| Named::Tree { number })).collect()
    }

    /// Documents that the start passed over of checkpoints at or below `place`, or in which it lies, where no name stands for one.
    pub(crate) fn not_believed(self, place: &[u8]) -> Vec<BrokenInvariant> {
        let wanted = |of: &[u8]| match of {
            b"" => place.is_empty(),
            checkpoint => covers(place, checkpoint) || covers(checkpoint, place),
        };
        let passed =
            self.engine.passed_over.iter().filter(|passed| passed.place.as_deref().is_some_and(wanted));
        let broken = passed.map(|passed| BrokenInvariant {
            path: passed.key.clone(),
            invariant: "every_document_of_tier_3_can_be_read".to_owned(),
            what: passed.what.clone(),
        });
        broken.collect()
    }

    pub(crate) fn is_sent_again(self, named: &Named) -> Again {
        match named {
            Named::Tree { number } if self.engine.tree.in_tier3().is_some_and(|stands| stands > *number) => {
                Again::Done
            }
            Named::Tree { .. } => Again::Waits("it is on its way to Tier-3 again".to_owned()),
            Named::Loose { path, .. } => match self.engine.ledger.loose.get(path) {
                None => Again::Gone,
                Some(book) if book.described.is_some() => Again::Done,
                Some(book) => {
                    let lack = Outstanding { engine: self.engine }
                        .lack_of(path, book, None, Instant::now())
                        .map(|lack| lack.what);
                    Again::Waits(lack.unwrap_or_else(|| "it is on its way to Tier-3 again".to_owned()))
                }
            },
        }
    }

    /// Names of files outside checkpoints that were removed at or below `place`, each with the newest generation that was begun.
    pub(crate) fn removed_below(self, place: &[u8]) -> Vec<(RelPath, Generation)> {
        if self.engine.rights.knows != Knows::All {
            return Vec::new();
        }
        let removed =
            self.engine.ledger.removed_loose.iter().filter(|(path, _)| covers(place, path.as_bytes()));
        removed.filter_map(|(path, book)| Some((path.clone(), book.generation?))).collect()
    }

    /// Returns the files of the tree at or below `place` that have no checksum yet.
    pub(crate) fn unsealed(self, place: &[u8]) -> Vec<Unsealed> {
        let unsealed = Inventory { engine: self.engine }.files_at(place).filter_map(|(path, view, _)| {
            let why = why_unsealed(&view.state)?;
            let (path, size_bytes) = (path.to_string(), Inventory { engine: self.engine }.size_now(view));
            Some(Unsealed { path, size_bytes, host: view.host, why })
        });
        unsealed.collect()
    }
}
