//! Checks the documents that name the files outside checkpoints in Tier-3: their sidecars, and the tree document.
//!
//! Owns: which of them differ from what this daemon read or wrote, and that Tier-3 gets them once more. Does not own: the bytes
//! (`verify`), checkpoints (`proof`), the uploads (`loose`, `tree`).
//!
//! No key is written twice: the next generation of the file, or the next number of the tree, replaces the bad one.

use crate::node::book::LooseStage;
use crate::node::flush::{FlushOutcome, Waits};
use crate::node::run::{Engine, Node};
use crate::node::verify::note_repaired;
use crate::node::verify_scope::VerifyScope;
use crate::restore::locate::{FormatProblem, document};
use futures::stream;
use futures::stream::StreamExt;
use std::time::Duration;
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::documents::{LooseSidecar, TreeDocument};
use tidemark_protocol::error::error_text;
use tidemark_protocol::evidence::Told;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::key::{Key, Series};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::{BrokenInvariant, Unrecoverable, Verify};
use tidemark_store::StoreError;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Sidecars read at once: hides the round trip.
const READS_IN_FLIGHT: usize = 16;

/// How long the answer waits for names that go to Tier-3 once more. The upload continues after that.
const AGAIN_WITHIN: Duration = Duration::from_secs(30);

/// Interval between two checks of that upload.
const ASK_EVERY: Duration = Duration::from_millis(100);

/// A document that this daemon knows to be in Tier-3.
#[derive(Debug, Clone)]
pub(crate) enum Named {
    Loose {
        path: RelPath,
        generation: Generation,
        of: (FileId, SealNumber),
        /// Size and checksum of the bytes, if the tree has the same bytes.
        sums: Option<(u64, Crc64)>,
    },
    Tree {
        number: u64,
    },
}

/// Progress of a document that goes to Tier-3 once more.
pub(crate) enum Again {
    Done,
    /// The name is gone.
    Gone,
    Waits(String),
}

impl Named {
    fn key(&self) -> String {
        match self {
            Self::Loose { path, generation, .. } => Key::loose(path, *generation).1.to_string(),
            Self::Tree { number } => Key::numbered(Series::Tree, *number).to_string(),
        }
    }

    fn path(&self) -> String {
        match self {
            Self::Loose { path, .. } => path.to_string(),
            Self::Tree { .. } => self.key(),
        }
    }

    fn invariant(&self) -> &'static str {
        match self {
            Self::Loose { .. } => "a_file_outside_checkpoints_has_its_sidecar",
            Self::Tree { .. } => "the_tree_has_its_document",
        }
    }

    /// Returns what is wrong with a sidecar that can be read.
    fn flaw(&self, sidecar: &LooseSidecar) -> Option<String> {
        let Self::Loose { path, generation, of, sums } = self else { return None };
        let file = &sidecar.file;
        let key = self.key();
        if (&file.path, sidecar.generation) != (path, *generation) {
            return Some(format!("{key} is of generation {} of {}", sidecar.generation, file.path));
        }
        if (file.file, file.seal) != *of {
            let (found, seal) = (file.file, file.seal);
            return Some(format!("{key} names seal {seal} of file {found}, expected {} of {}", of.1, of.0));
        }
        let (size_bytes, crc) = sums.filter(|sums| *sums != (file.size_bytes, file.crc64nvme))?;
        Some(format!(
            "{key} says {} bytes with checksum {}, expected {size_bytes} with {crc}",
            file.size_bytes, file.crc64nvme
        ))
    }
}

/// Reading the documents that hold names, and having bad ones sent again.
#[derive(Clone, Copy)]
pub(super) struct NamesAtRest<'a> {
    pub(super) node: &'a Node,
}

impl NamesAtRest<'_> {
    /// Adds to `verify` what Tier-3 does not say of the names at or below `place`; `unmended` gets what stays so.
    pub(super) async fn verify(
        self,
        place: &[u8],
        verify: &mut Verify,
        unmended: &mut Vec<BrokenInvariant>,
    ) -> Option<()> {
        let below = place.to_vec();
        let (named, not_believed) = self
            .node
            .ask(move |engine| {
                (VerifyScope { engine }.named_below(&below), VerifyScope { engine }.not_believed(&below))
            })
            .await?;
        verify.broken.extend(not_believed);
        let looked = named.into_iter().map(|named| async move {
            let found = self.look_at(&named).await;
            (named, found)
        });
        let mut looked = stream::iter(looked).buffer_unordered(READS_IN_FLIGHT);
        let mut bad = Vec::new();
        while let Some((named, found)) = looked.next().await {
            match found {
                Ok(None) => {}
                Ok(Some(what)) => bad.push((named, what)),
                Err(error) => {
                    verify.away = true;
                    verify.unchecked.push(Unrecoverable { path: named.path(), what: error_text(&error) });
                }
            }
        }
        drop(looked);
        if bad.is_empty() { Some(()) } else { self.send_again(place, bad, verify, unmended).await }
    }

    /// Reads a document and returns what is wrong with it.
    async fn look_at(self, named: &Named) -> Result<Option<String>, StoreError> {
        let (store, key) = (&self.node.shared().drain.store, named.key());
        let unread = |why: FormatProblem| match why {
            FormatProblem::Missing => format!("{key} is not there"),
            why => format!("{key}: {}", error_text(&why)),
        };
        Ok(match named {
            Named::Loose { .. } => match document::<LooseSidecar>(store, &key).await? {
                Ok(sidecar) => named.flaw(&sidecar),
                Err(why) => Some(unread(why)),
            },
            Named::Tree { .. } => document::<TreeDocument>(store, &key).await?.err().map(unread),
        })
    }

    /// Waits, up to a limit, until Tier-3 has what it lacks.
    async fn send_again(
        self,
        place: &[u8],
        bad: Vec<(Named, String)>,
        verify: &mut Verify,
        unmended: &mut Vec<BrokenInvariant>,
    ) -> Option<()> {
        let until = Instant::now() + AGAIN_WITHIN;
        let (place, begun) = (place.to_vec(), bad.clone());
        let begun = self.node.ask(move |engine| engine.send_again(place, begun, until)).await?;
        let (mut left, _waiting) = match begun {
            Ok((left, waiting)) => (left, waiting),
            Err(why) => {
                let broken = bad.into_iter().map(|(named, what)| still_broken(&named, &what, &why));
                unmended.extend(broken);
                return Some(());
            }
        };
        loop {
            let asked: Vec<_> = left.iter().map(|(named, _)| named.clone()).collect();
            let states = self
                .node
                .ask(move |engine| {
                    asked.iter().map(|named| VerifyScope { engine }.is_sent_again(named)).collect::<Vec<_>>()
                })
                .await?;
            let is_over = Instant::now() >= until;
            let mut waits = Vec::new();
            for ((named, what), state) in left.into_iter().zip(states) {
                match state {
                    Again::Gone => {}
                    Again::Done => {
                        note_repaired(
                            self.node.shared(),
                            named.path(),
                            what,
                            "it was sent to Tier-3 again",
                            verify,
                        );
                    }
                    Again::Waits(why) if is_over => unmended.push(still_broken(&named, &what, &why)),
                    Again::Waits(_) => waits.push((named, what)),
                }
            }
            if waits.is_empty() {
                return Some(());
            }
            left = waits;
            tokio::time::sleep(ASK_EVERY).await;
        }
    }
}

fn still_broken(named: &Named, what: &str, why: &str) -> BrokenInvariant {
    BrokenInvariant {
        path: named.path(),
        invariant: named.invariant().to_owned(),
        what: format!("{what}; {why}"),
    }
}

/// Begun, and the flush that hurries it; or why nothing is.
type Begun = Result<(Vec<(Named, String)>, oneshot::Receiver<FlushOutcome>), String>;

/// Takes it that Tier-3 lacks one of these. Returns false if it was superseded.
fn begin_again(engine: &mut Engine, named: &Named) -> bool {
    match named {
        Named::Tree { number } => {
            let stands = engine.tree.in_tier3() == Some(*number);
            if stands {
                engine.tree.write_again(&mut engine.ledger);
            }
            stands
        }
        Named::Loose { path, generation, of, .. } => {
            let book = engine.ledger.loose.get_mut(path).filter(|book| book.described == Some(*generation));
            let Some(book) = book.filter(|book| book.uploaded() == Some(*of)) else { return false };
            book.stage = LooseStage::Idle;
            book.described = None;
            // Nothing is shared with what may be gone, too.
            (book.stored, book.read) = (None, None);
            engine.scrub.bad_objects.retain(|(file, seal, _), _| (*file, *seal) != *of);
            engine.ledger.loose_due.insert(path.clone());
            true
        }
    }
}

impl Engine {
    /// Takes it that Tier-3 lacks these. Gives those that are not superseded.
    fn send_again(&mut self, place: Vec<u8>, bad: Vec<(Named, String)>, until: Instant) -> Begun {
        if let Some(why) = &self.rights.fenced {
            return Err(format!("this node writes nothing to Tier-3: {why}"));
        }
        let begun: Vec<_> = bad.into_iter().filter(|(named, _)| begin_again(self, named)).collect();
        Ok((begun, self.begin_flush(place, Some(until), Told::No, Waits::Caller)))
    }
}
