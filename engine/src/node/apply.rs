//! What follows from the end of a job.
//!
//! Owns: what seals, fetches and loose files come to. Does not own: starting jobs (`run`), versions of checkpoints
//! (`advance`).

use crate::namespace::{ObjectCopy, SealTicket};
use crate::node::book::LooseStage;
use crate::node::jobs::Done;
use crate::node::run::{Engine, error_text, retry_pause};
use crate::save::loose::LooseError;
use crate::save::seal::SealSums;
use std::time::Instant;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::residency::loose_class;

impl Engine {
    pub(crate) fn apply(&mut self, done: Done) {
        let now = Instant::now();
        match done {
            Done::Sealed { ticket, sums } => self.sealed(ticket, sums),
            Done::Prepared { id, number, attempt, result } => self.prepare_done(&id, number, attempt, result),
            Done::Decided { id, number, attempt, result } => self.decide_done(&id, number, attempt, result),
            Done::Loose { path, of, result } => {
                self.loose_in_flight -= 1;
                self.loose_done(&path, of, result, now);
            }
            Done::Fetched { node, result } => {
                self.fetching.remove(&node);
                if let Err(error) = result {
                    tracing::error!(
                        node,
                        error = &error as &dyn std::error::Error,
                        "a cold file was not fetched"
                    );
                }
            }
            Done::Tree { number, result } => self.tree_done(number, result, now),
            Done::Scrubbed(scrubbed) => self.scrubbed(scrubbed),
        }
    }

    fn sealed(&mut self, ticket: SealTicket, sums: std::io::Result<SealSums>) {
        self.sealing.remove(&ticket.node);
        match sums {
            Ok(sums) => match self.shared.namespace.finish_seal(&ticket, sums.crc, sums.chunks) {
                Ok(()) => {
                    self.ledger.unsealed.remove(&ticket.node);
                    self.shared.metrics.seal_files.inc();
                    if let Some(path) = self.shared.namespace.path_of(ticket.node) {
                        self.shared.sizes.learn(&path, ticket.size_bytes);
                    }
                }
                Err(_voided) => {
                    self.shared.metrics.seal_voided_files.inc();
                }
            },
            Err(error) => {
                tracing::error!(node = ticket.node, %error, "a closed file could not be read to be sealed")
            }
        }
    }

    fn loose_done(
        &mut self,
        path: &RelPath,
        of: (FileId, SealNumber),
        result: Result<(Generation, String), LooseError>,
        now: Instant,
    ) {
        let longest = self.retry_longest();
        let Some(book) = self.ledger.loose.get_mut(path) else { return };
        match result {
            Ok((generation, key)) => {
                self.tier3_away = None;
                book.generation = Some(generation);
                book.stage = LooseStage::Uploaded { of };
                if let Some(view) = self.ledger.file(path) {
                    let object = ObjectCopy { key, size_bytes: view.size_bytes };
                    self.shared.namespace.note_object(of.0, of.1, object);
                    let known = self.shared.namespace.view(view.node).map(|view| view.reclaim);
                    self.shared.namespace.set_reclaim(of.0, loose_class(known.unwrap_or_default()));
                }
            }
            Err(error) => {
                let why = error_text(&error);
                let tries = match &book.stage {
                    LooseStage::Waiting { tries, .. } => tries + 1,
                    _ => 0,
                };
                let pause = retry_pause(tries, longest);
                tracing::warn!(%path, %why, "a loose file did not reach Tier-3 yet");
                self.tier3_away.get_or_insert_with(|| (now, why.clone()));
                book.stage = LooseStage::Waiting { until: now + pause, tries, why };
            }
        }
        self.ledger.loose_due.insert(path.clone());
    }
}
