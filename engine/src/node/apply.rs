//! Applies the results of ended jobs.
//!
//! Owns: the dispatch of each result to its handler. Does not own: the handlers for files (`file_jobs`), versions of checkpoints
//! (`advance`), loose files (`loose`).

use crate::node::jobs::Done;
use crate::node::run::Engine;
use tokio::time::Instant;

impl Engine {
    pub(crate) fn apply(&mut self, done: Done) {
        let now = Instant::now();
        match done {
            Done::Sealed { hashed, given_up } => {
                self.file_jobs.seals_ended(&self.shared, &mut self.ledger, hashed, given_up);
                // A seal changes its file: what is decided next knows of it, without waiting for the loop's next look.
                self.shared.catch_up(&mut self.ledger);
            }
            Done::Prepared { id, number, attempt, result } => {
                self.versions().prepare_done(&id, number, attempt, result);
            }
            Done::Decided { id, number, attempt, result } => {
                if self.versions().decide_done(&id, number, attempt, result) {
                    // Before torn files under the name are dropped: hidden names of this version would go with them.
                    self.shielding().serve_arrival(&id);
                    self.shielding().drop_torn(&id);
                }
            }
            Done::Loose(done) => self.loose_uploads().done(done, now),
            Done::Judged(judged) => self.file_jobs.judged(&self.shared, judged),
            Done::Heard { id, contents, heard } => self.others_heard(id, contents, heard),
            Done::Fetched { node, result } => {
                self.file_jobs.fetched(node);
                if let Err(error) = result {
                    tracing::error!(
                        node,
                        error = &error as &dyn std::error::Error,
                        "a cold file was not fetched"
                    );
                }
            }
            Done::Tree { number, result } => self.tree_done(number, result, now),
            Done::Sifted(done) => self.sifting().sifted(done, now),
            Done::Scrubbed(scrubbed) => self.scrub.scrubbed(&self.shared, &scrubbed, now),
            Done::Retired { id, number, leave, result } => {
                if self.retiring().retired(&id, number, &leave, result, now) {
                    self.versions().forget_version(&id, number, leave.reason());
                }
            }
        }
    }
}
