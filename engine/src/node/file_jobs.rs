//! Jobs over single files: hashing them, judging their content, fetching them.
//!
//! Owns: which files have such a job, how many jobs run, applying their results. Does not own: which files are to be hashed
//! (`ledger`), judged or fetched (`decide`), the jobs' bodies (`jobs`).

use crate::node::Shared;
use crate::node::jobs::{self, Done, Hashed};
use crate::node::ledger::Ledger;
use std::collections::BTreeSet;
use std::sync::Arc;
use tidemark_content::Judgement;
use tidemark_namespace::{JudgeTicket, NodeId, NotSealable, SealTicket};
use tidemark_protocol::layout::CHUNK_BYTES;
use tokio::task::JoinSet;

/// Size from which a file is hashed by a job of its own, and limit for the small files of one job together: one chunk, some
/// milliseconds.
const SEAL_ALONE_BYTES: u64 = CHUNK_BYTES;

/// Most files judged at once beside those that are hashed: each may take some tens of milliseconds.
const JUDGED_AT_ONCE: usize = 256;

/// Most small files hashed by one job: some milliseconds of opening and mapping.
const SEAL_BATCH_FILES: usize = 256;

/// Jobs over single files. Every node has them, coordinator or not.
#[derive(Debug, Default)]
pub(crate) struct FileJobs {
    sealing: BTreeSet<NodeId>,
    seals_in_flight: usize,
    judging: BTreeSet<NodeId>,
    fetching: BTreeSet<NodeId>,
}

impl FileJobs {
    /// Whether the content of a file is being judged.
    pub(crate) fn is_judging(&self, node: NodeId) -> bool {
        self.judging.contains(&node)
    }

    /// Returns the number of files that are being fetched.
    pub(crate) fn fetches(&self) -> usize {
        self.fetching.len()
    }

    /// Starts jobs that hash closed files, one for each core. Small files share a job, because starting and ending it costs more than
    /// hashing them.
    pub(crate) fn start_seals(
        &mut self,
        shared: &Arc<Shared>,
        ledger: &mut Ledger,
        jobs: &mut JoinSet<Done>,
    ) {
        let mut batch = Vec::new();
        let mut batch_bytes = 0;
        while self.seals_in_flight < shared.seal_threads {
            let Some(node) = ledger.unsealed.pop_first() else { break };
            if self.sealing.contains(&node) {
                // It changed while being hashed: the end of that job queues it again.
                continue;
            }
            let begun = if ledger.as_they_are.contains(&node) {
                shared.namespace.seals().begin_seal_as_it_is(node)
            } else {
                shared.namespace.seals().begin_seal(node)
            };
            match begun {
                Ok(ticket) if ticket.size_bytes >= SEAL_ALONE_BYTES => {
                    self.start_seal(shared, jobs, vec![ticket])
                }
                Ok(ticket) => {
                    batch_bytes += ticket.size_bytes;
                    batch.push(ticket);
                    if batch.len() == SEAL_BATCH_FILES || batch_bytes >= SEAL_ALONE_BYTES {
                        batch_bytes = 0;
                        self.start_seal(shared, jobs, std::mem::take(&mut batch));
                    }
                }
                Err(NotSealable::Mapped | NotSealable::Busy | NotSealable::Unreadable) => {
                    ledger.seals_later.insert(node);
                }
                // The next change of the file makes it dirty again.
                Err(NotSealable::Open | NotSealable::Cut | NotSealable::Sealed | NotSealable::Gone) => {}
            }
        }
        if !batch.is_empty() {
            self.start_seal(shared, jobs, batch);
        }
    }

    fn start_seal(&mut self, shared: &Arc<Shared>, jobs: &mut JoinSet<Done>, tickets: Vec<SealTicket>) {
        self.sealing.extend(tickets.iter().map(|ticket| ticket.node));
        self.seals_in_flight += 1;
        jobs.spawn(jobs::seal(Arc::clone(shared), tickets));
    }

    /// Applies the result of a job that hashed files. `given_up` are files that it left for another try.
    pub(crate) fn seals_ended(
        &mut self,
        shared: &Shared,
        ledger: &mut Ledger,
        hashed: Vec<(SealTicket, std::io::Result<Hashed>)>,
        given_up: Vec<NodeId>,
    ) {
        self.seals_in_flight -= 1;
        for (ticket, hashed) in hashed {
            self.sealing.remove(&ticket.node);
            sealed(shared, ledger, &ticket, hashed);
        }
        for node in given_up {
            self.sealing.remove(&node);
            // The file may have a name again by now.
            ledger.seals_later.insert(node);
        }
    }

    /// Starts a job that judges the content of `nodes`, up to [`JUDGED_AT_ONCE`] files at once. The others are left out.
    pub(crate) fn judge(&mut self, shared: &Shared, jobs: &mut JoinSet<Done>, nodes: Vec<NodeId>) {
        let left = JUDGED_AT_ONCE.saturating_sub(self.judging.len());
        let asked = nodes.into_iter().filter(|node| !self.judging.contains(node)).take(left);
        let tickets: Vec<_> = asked.filter_map(|node| shared.namespace.seals().begin_judging(node)).collect();
        if !tickets.is_empty() {
            self.judging.extend(tickets.iter().map(|ticket| ticket.node));
            jobs.spawn(jobs::judge(tickets));
        }
    }

    pub(crate) fn judged(&mut self, shared: &Shared, judged: Vec<(JudgeTicket, Option<Judgement>)>) {
        for (ticket, content) in judged {
            self.judging.remove(&ticket.node);
            shared.namespace.seals().end_judging(&ticket, content);
        }
    }

    /// Fetches a cold file, unless it is being fetched.
    pub(crate) fn fetch(&mut self, shared: &Arc<Shared>, jobs: &mut JoinSet<Done>, node: NodeId) {
        if self.fetching.contains(&node) {
            return;
        }
        if let Some(cold) = shared.namespace.hosts().cold(node) {
            self.fetching.insert(node);
            let path = jobs::path_text(&shared.namespace, node);
            jobs.spawn(jobs::fetch_cold(Arc::clone(shared), path, cold));
        }
    }

    pub(crate) fn fetched(&mut self, node: NodeId) {
        self.fetching.remove(&node);
    }
}

fn sealed(shared: &Shared, ledger: &mut Ledger, ticket: &SealTicket, hashed: std::io::Result<Hashed>) {
    match hashed {
        Ok(Hashed { sums, content }) => {
            match shared.namespace.seals().finish_seal(ticket, sums.crc, sums.chunks) {
                Ok(()) => {
                    ledger.unreadable.remove(&ticket.node);
                    shared.metrics.seal_files.inc();
                    shared.namespace.seals().note_content(ticket.file, ticket.seal, content);
                    if let Some(path) = shared.namespace.nodes().path_of(ticket.node) {
                        shared.sizes.learn(&path, ticket.size_bytes);
                    }
                }
                Err(_voided) => {
                    shared.metrics.seal_voided_files.inc();
                    ledger.seals_later.insert(ticket.node);
                }
            }
        }
        Err(error) => {
            // Sealing is tried again with every tick: a hole may need memory that is freed later.
            if ledger.unreadable.insert(ticket.node, error.to_string()).is_none() {
                tracing::error!(node = ticket.node, %error, "a closed file cannot be read to be sealed; trying on");
            }
            ledger.seals_later.insert(ticket.node);
        }
    }
}
