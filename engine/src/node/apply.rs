//! What follows from the end of a job.
//!
//! Owns: what seals, fetches and loose files come to. Does not own: starting jobs (`run`), versions of checkpoints
//! (`advance`).

use crate::namespace::{ObjectCopy, SealTicket};
use crate::node::attributes;
use crate::node::away::Cause;
use crate::node::book::LooseStage;
use crate::node::jobs::{Done, Hashed};
use crate::node::run::{Engine, error_text, retry_pause};
use crate::save::loose::LooseError;
use crate::save::upload::UploadError;
use std::time::Instant;
use tidemark_protocol::id::{FileId, Generation, SealNumber};
use tidemark_protocol::path::RelPath;
use tidemark_protocol::residency::loose_class;

impl Engine {
    pub(crate) fn apply(&mut self, done: Done) {
        let now = Instant::now();
        match done {
            Done::Sealed { hashed, given_up } => {
                self.seals_in_flight -= 1;
                for (ticket, hashed) in hashed {
                    self.sealed(ticket, hashed);
                }
                for node in given_up {
                    self.sealing.remove(&node);
                    // It may have got a name again.
                    self.ledger.seals_later.insert(node);
                }
            }
            Done::Prepared { id, number, attempt, result } => self.prepare_done(&id, number, attempt, result),
            Done::Decided { id, number, attempt, result } => self.decide_done(&id, number, attempt, result),
            Done::Loose { path, of, generation, size_bytes, tries, result } => {
                self.loose_in_flight -= 1;
                self.loose_in_flight_bytes -= size_bytes;
                let result = result.map(|key| ObjectCopy { key, size_bytes, encoding: None });
                self.loose_done(&path, of, (generation, tries), result, now);
            }
            Done::Judged(judged) => {
                for (ticket, content) in judged {
                    self.judging.remove(&ticket.node);
                    self.shared.namespace.end_judging(&ticket, content);
                }
            }
            Done::Heard { id, contents, heard } => self.others_heard(id, contents, heard),
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
            Done::Retired { id, number, leave, result } => self.retired(&id, number, &leave, result, now),
        }
    }

    fn sealed(&mut self, ticket: SealTicket, hashed: std::io::Result<Hashed>) {
        self.sealing.remove(&ticket.node);
        match hashed {
            Ok(Hashed { sums, content }) => {
                match self.shared.namespace.finish_seal(&ticket, sums.crc, sums.chunks) {
                    Ok(()) => {
                        self.shared.metrics.seal_files.inc();
                        self.shared.namespace.note_content(ticket.file, ticket.seal, content);
                        if let Some(path) = self.shared.namespace.path_of(ticket.node) {
                            self.shared.sizes.learn(&path, ticket.size_bytes);
                        }
                    }
                    Err(_voided) => {
                        self.shared.metrics.seal_voided_files.inc();
                        self.ledger.seals_later.insert(ticket.node);
                    }
                }
            }
            Err(error) => {
                // Tried again with every tick: a hole may need memory that others give back later.
                if self.ledger.unreadable.insert(ticket.node) {
                    tracing::error!(node = ticket.node, %error, "a closed file cannot be read to be sealed; trying on");
                }
                self.ledger.seals_later.insert(ticket.node);
            }
        }
    }

    fn loose_done(
        &mut self,
        path: &RelPath,
        of: (FileId, SealNumber),
        (generation, tries): (Generation, u32),
        result: Result<ObjectCopy, LooseError>,
        now: Instant,
    ) {
        let longest = self.retry_longest();
        let here = self.ledger.loose.contains_key(path);
        let books = if here { &mut self.ledger.loose } else { &mut self.ledger.removed_loose };
        let Some(book) = books.get_mut(path) else { return };
        if book.generation != Some(generation) {
            // The name went and came back meanwhile: a later upload has the book.
            return;
        }
        match result {
            Ok(object) => {
                self.tier3_away.ended(&Cause::Loose(path.clone()));
                book.stage = LooseStage::Uploaded { of };
                let sent = book.attributes.clone();
                // The bytes are those of the file that was uploaded, whatever has its name by now.
                if let Some(cluster) = self.shared.cluster.get() {
                    cluster.tell_objects(vec![(of.0, of.1, object.clone())]);
                }
                self.shared.namespace.note_object(of.0, of.1, object);
                if let Some(view) = self.ledger.file(path).filter(|view| view.file == of.0) {
                    let known = self.shared.namespace.view(view.node).map(|view| view.reclaim);
                    self.shared.namespace.set_reclaim(of.0, loose_class(known.unwrap_or_default()));
                }
                let shows = self.shared.namespace.view_of(of.0).map(|view| attributes(&view));
                if shows.is_some_and(|shows| shows != sent) {
                    self.tree_tells_more();
                }
                self.tree_may_tell_more();
            }
            Err(error) => {
                let why = error_text(&error);
                let pause = retry_pause(tries, longest);
                tracing::warn!(%path, %why, "a loose file did not reach Tier-3 yet");
                if !matches!(error, LooseError::Upload(UploadError::Removed { .. })) {
                    self.tier3_away.failed(Cause::Loose(path.clone()), now, why.clone());
                }
                book.stage = LooseStage::Waiting { until: now + pause, tries: tries + 1, why };
            }
        }
        if here {
            self.ledger.loose_due.insert(path.clone());
        }
    }
}
