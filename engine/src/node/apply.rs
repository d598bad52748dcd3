//! What follows from the end of a job.
//!
//! Owns: what seals and fetches come to. Does not own: starting jobs (`run`), versions of checkpoints (`advance`), loose files
//! (`loose`).

use crate::node::jobs::{Done, Hashed};
use crate::node::run::Engine;
use std::time::Instant;
use tidemark_namespace::SealTicket;

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
            Done::Loose(done) => self.loose_done(done, now),
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
            Done::Sifted(done) => self.sifted(done, now),
            Done::Scrubbed(scrubbed) => self.scrubbed(&scrubbed, now),
            Done::Retired { id, number, leave, result } => self.retired(&id, number, &leave, result, now),
        }
    }

    fn sealed(&mut self, ticket: SealTicket, hashed: std::io::Result<Hashed>) {
        self.sealing.remove(&ticket.node);
        match hashed {
            Ok(Hashed { sums, content }) => {
                match self.shared.namespace.finish_seal(&ticket, sums.crc, sums.chunks) {
                    Ok(()) => {
                        self.ledger.unreadable.remove(&ticket.node);
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
                if self.ledger.unreadable.insert(ticket.node, error.to_string()).is_none() {
                    tracing::error!(node = ticket.node, %error, "a closed file cannot be read to be sealed; trying on");
                }
                self.ledger.seals_later.insert(ticket.node);
            }
        }
    }
}
