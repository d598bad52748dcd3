//! Notifying the nodes that pace their copies that a checkpoint is complete, or that a caller waits.
//!
//! Owns: the notice, sent once and without waiting for answers. Does not own: when to send it (`node::pace`), the pace (`replicate`).

use super::{ANSWER_DEADLINE, Cluster};
use std::collections::BTreeSet;
use tidemark_protocol::cluster::wire::ToNode;
use tidemark_protocol::id::Incarnation;

impl Cluster {
    /// Notifies these lives that a checkpoint with files of theirs is complete. A node that misses the notice keeps its pace, and once
    /// takes the interval to be twice as long. Only a coordinator's notice is heeded.
    pub fn tell_completed(&self, homes: &BTreeSet<Incarnation>) {
        let members = self.following.members();
        let wrote = members.members.iter().filter(|member| homes.contains(&member.life.incarnation));
        let message = ToNode::Pace { epoch: self.following.epoch(), waited_for: false };
        self.tell_each(wrote, &message, ANSWER_DEADLINE, "that a checkpoint is complete");
    }

    /// Notifies all nodes that a caller waits for copies of any node's files. Only a coordinator's notice is heeded.
    pub fn tell_waited_for(&self) {
        let message = ToNode::Pace { epoch: self.following.epoch(), waited_for: true };
        self.tell_others(&self.following.members(), &message, ANSWER_DEADLINE, "that somebody waits");
    }
}
