//! The two paces, towards Tier-3 and towards other nodes' memory: when they change.
//!
//! Owns: when a complete version sets them, and when they are lifted. Does not own: the rates (`save::pace` and
//! `protocol::replication`), the nodes that hear of it (`cluster`), how much has no copy (each node's `replicate`).

use crate::node::Shared;
use crate::node::flush::Flushes;
use std::collections::BTreeSet;
use std::time::Duration;
use tidemark_protocol::record::Record;
use tokio::time::Instant;

/// Shortest interval between two notifications that a caller waits. A repeat replaces one that was missed. The interval limits
/// their number, since at a job's end all its nodes flush again and again.
const TELL_EVERY: Duration = Duration::from_secs(1);

impl Shared {
    /// Lifts the pace of copies, because a caller waits for copies of this node's files, or because this node ends.
    pub fn lift_pace_of_copies(&self) {
        if let Some(replicator) = self.replicator.get() {
            replicator.lift_pace();
        }
    }
}
impl Flushes {
    /// Lifts both paces, because a caller waits until all is safe. No limit applies until the next version is complete.
    pub(crate) fn lift_paces(&mut self, shared: &Shared) {
        shared.drain.with_pace(|pace, _| pace.lift());
        shared.lift_pace_of_copies();
        let is_told = self.told_others.is_some_and(|at| at.elapsed() < TELL_EVERY);
        if let Some(cluster) =
            shared.cluster.get().filter(|cluster| cluster.following.is_coordinator() && !is_told)
        {
            cluster.tell_waited_for();
            self.told_others = Some(Instant::now());
        }
    }

    /// Sets the paces after a version became complete. `backlog_bytes`, its own included, are not in Tier-3 yet. While a caller
    /// waits or the daemon ends, nothing is held back.
    pub(crate) fn set_paces(&mut self, shared: &Shared, draining: bool, record: &Record, backlog_bytes: u64) {
        if !self.is_empty() || draining {
            return;
        }
        if shared.settings.tier3.paced {
            shared.drain.with_pace(|pace, at| pace.version_completed(at, backlog_bytes));
        }
        let homes: BTreeSet<_> = record.files.iter().map(|file| file.file.incarnation).collect();
        if let Some(replicator) = shared.replicator.get()
            && homes.contains(&shared.drain.life.incarnation)
        {
            replicator.checkpoint_completed();
        }
        if let Some(cluster) = shared.cluster.get() {
            cluster.tell_completed(&homes);
        }
        self.told_others = None;
    }
}
