//! The coordinator's word that a checkpoint is complete, or that somebody waits, for those who pace the copies of what they wrote.
//!
//! Owns: telling it, once and without waiting for anybody. Does not own: when it is so (`node::pace`), the pace (`replicate`).

use super::{ANSWER_DEADLINE, Cluster};
use std::collections::BTreeSet;
use tidemark_protocol::cluster::wire::ToNode;
use tidemark_protocol::id::Incarnation;

impl Cluster {
    /// A checkpoint with files of these lives is complete. Who misses it goes on at the pace that it has, and takes the interval to be
    /// twice as long once. For the coordinator; others are not heeded.
    pub fn tell_completed(&self, homes: &BTreeSet<Incarnation>) {
        let members = self.members();
        let wrote = members.members.iter().filter(|member| homes.contains(&member.life.incarnation));
        let message = ToNode::Pace { epoch: self.epoch(), waited_for: false };
        self.tell_each(wrote, &message, ANSWER_DEADLINE, "that a checkpoint is complete");
    }

    /// Somebody waits for what any node has. For the coordinator; others are not heeded.
    pub fn tell_waited_for(&self) {
        let message = ToNode::Pace { epoch: self.epoch(), waited_for: true };
        self.tell_others(&self.members(), &message, ANSWER_DEADLINE, "that somebody waits");
    }
}
