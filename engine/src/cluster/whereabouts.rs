//! Finding the nodes that have a file's bytes.
//!
//! Owns: asking, and recording the answer in the tree. Does not own: fetching (`restore`), who has which bytes (the coordinator).

use super::names::MISS_WAIT;
use super::{ANSWER_DEADLINE, Away, Cluster, address_of};
use crate::restore::peer::Suppliers;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tidemark_namespace::{ColdFile, NodeId};
use tidemark_protocol::cluster::wire::{NodeKind, NodeState, ToCoordinator, Whereabouts};
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_transport::{Address, Link};
use tokio::sync::Semaphore;
use tokio::time::Instant;

impl Cluster {
    /// Returns the file as it is to be fetched now, and the nodes to ask for it, none of them in `failed`. If there are none, Tier-3 is
    /// read. Waits, up to a limit, while another node seals the file.
    ///
    /// # Errors
    /// The coordinator is away.
    pub async fn whereabouts(
        &self,
        cold: &ColdFile,
        failed: &[Address],
    ) -> Result<(ColdFile, Vec<Address>), Away> {
        let failed = failed.iter().filter_map(|address| address.node.parse().ok()).collect();
        let message = ToCoordinator::Where { file: cold.file, failed };
        let found: Whereabouts = self.ask(&message, ANSWER_DEADLINE).await?;
        if let (Some(facts), None) = (found.facts, &cold.checksums)
            && let Some(node) = self.namespace.standing().outgoing_file(cold.file)
        {
            let home = facts.file.incarnation;
            let state = NodeState {
                path: node.path,
                attributes: node.attributes,
                attributes_ns: node.attributes_ns,
                other_names: None,
                kind: NodeKind::File(Box::new(facts)),
            };
            if home != self.life.incarnation {
                self.namespace.mirror().take_states(&[state], home, false);
            }
        }
        let now = self.namespace.hosts().cold(cold.node).unwrap_or_else(|| cold.clone());
        let others = found.suppliers.iter().filter(|member| member.life != self.life);
        Ok((now, others.map(address_of).collect()))
    }

    /// Whether a file was open for writing on a lost node that published nothing of its bytes: they are unknown. A node that is silent for
    /// a moment is not lost.
    #[must_use]
    pub fn is_begun_on_lost(&self, node: NodeId) -> bool {
        let home =
            self.namespace.standing().begun_elsewhere(node).and_then(|home| self.following.member_of(home));
        home.is_some_and(|member| member.gone)
    }
}

/// Other nodes' memory as a source for restores; remembers the coordinator's latest answers.
#[derive(Debug)]
pub struct Near {
    cluster: Arc<Cluster>,
    link: Arc<dyn Link>,
    asked: Mutex<BTreeMap<(FileId, SealNumber), Vec<Address>>>,
    waiting: Semaphore,
}

/// Maximum number of opens that wait for a coordinator: half of the threads that fetch.
const WAITING_MAX: usize = 8;

/// Pause between two tries while no coordinator answers.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// Maximum number of answers remembered for restores: for all in progress, and some that were abandoned.
const ASKED_MAX: usize = 4096;

impl Near {
    /// Makes a source that fetches over `link`, whose calls are about copies.
    #[must_use]
    pub fn new(cluster: Arc<Cluster>, link: Arc<dyn Link>) -> Arc<Self> {
        Arc::new(Self { cluster, link, asked: Mutex::default(), waiting: Semaphore::new(WAITING_MAX) })
    }
}

#[async_trait::async_trait]
impl Suppliers for Near {
    async fn find(&self, cold: &ColdFile, failed: &[Address]) -> ColdFile {
        let (give_up, mut waits) = (Instant::now() + MISS_WAIT, None);
        let (now, suppliers) = loop {
            match self.cluster.whereabouts(cold, failed).await {
                Ok(found) => break found,
                // The next coordinator knows where the file is. A file in Tier-3 need not wait for it.
                Err(away) if cold.object.is_none() && away.passes() && Instant::now() < give_up => {
                    // The other threads fetch from Tier-3 meanwhile.
                    waits = waits.or_else(|| self.waiting.try_acquire().ok());
                    if waits.is_none() {
                        return cold.clone();
                    }
                    tokio::time::sleep(ASK_AGAIN).await;
                }
                Err(away) => {
                    tracing::warn!(file = %cold.file, error = &away as &dyn std::error::Error, "who has a file cannot be asked");
                    return cold.clone();
                }
            }
        };
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.len() >= ASKED_MAX {
            asked.pop_first();
        }
        asked.insert((now.file, now.seal), suppliers);
        now
    }

    fn suppliers(&self, file: FileId, seal: SealNumber) -> Vec<Address> {
        let asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        asked.get(&(file, seal)).cloned().unwrap_or_default()
    }

    fn link(&self) -> Arc<dyn Link> {
        Arc::clone(&self.link)
    }

    fn is_bad(&self, node: &str, file: FileId, seal: SealNumber, chunk: u64) {
        tracing::error!(node, %file, %seal, chunk, "a node sent bytes that are not what was sealed");
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(suppliers) = asked.get_mut(&(file, seal)) {
            suppliers.retain(|supplier| supplier.node != node);
        }
    }
}
