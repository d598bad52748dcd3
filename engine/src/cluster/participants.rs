//! Asking other nodes for their parts of a commit, on the coordinator.
//!
//! Owns: the question. Does not own: phase 1 (`save::share`).

use super::{Cluster, address_of};
use crate::save::share::{Participants, Unheard};
use std::time::Duration;
use tidemark_protocol::cluster::wire::{Member, Prepare, Preparing, ToNode};
use tidemark_protocol::id::{Epoch, Incarnation};

/// Longest wait for an answer. A node that does not answer in time is asked again with the next try of the attempt.
const DEADLINE: Duration = Duration::from_secs(10);

impl Cluster {
    fn present(&self, life: Incarnation) -> Option<Member> {
        self.following.member_of(life).filter(|member| !member.gone)
    }
}

#[async_trait::async_trait]
impl Participants for Cluster {
    fn epoch(&self) -> Epoch {
        self.following.epoch()
    }

    fn is_present(&self, life: Incarnation) -> bool {
        self.present(life).is_some()
    }

    async fn prepare(&self, life: Incarnation, prepare: Prepare) -> Result<Preparing, Unheard> {
        let Some(member) = self.present(life) else { return Err("it is gone".into()) };
        Ok(self.ask_node(&address_of(&member), &ToNode::Prepare(Box::new(prepare)), DEADLINE).await?)
    }
}
