//! The return of a node that was declared gone and is not.
//!
//! Owns: which changes of the life that is over are published under the next one. Does not own: the conflicts' files, sessions
//! that were superseded.

use super::{Node, Notice, Output, Queued, Standing};
use crate::message::Found;
use crate::refusal::Refusal;
use crate::rules::Rule;
use crate::state::Call;
use tidemark_protocol::id::Incarnation;

impl Node {
    /// Begins a new life after [`Notice::Over`]. [`Node::send`] asks for its admission. Until then every call waits.
    ///
    /// # Panics
    /// If the present life is not over: two lives of one node would exist at once.
    pub fn come_back(&mut self, life: Incarnation) -> Vec<Notice> {
        assert!(self.is_over(), "life {} is not over", self.life);
        let mut out = Output::default();
        let old = std::mem::replace(&mut self.life, life);
        self.standing = Standing::Joining { replaces: Some(old), sent: false };
        let queue = std::mem::take(&mut self.queue);
        if self.former.is_none() {
            (self.former, self.returning) = (Some(old), queue.into());
        } else {
            // This node never knew that the ended life was a member: no call was answered for in it.
            for ticket in queue.into_iter().filter_map(|queued| queued.ticket) {
                out.notices.push(Notice::Answered(ticket, Err(Refusal::Unreachable)));
            }
        }
        self.give_up_rights(&mut out);
        (self.files_made, self.answered) = (0, 0);
        out.notices
    }

    /// Notes that the node is a member. `before`: the former life, and its last call that was taken.
    pub(super) fn joined(&mut self, before: Option<(Incarnation, u64)>, out: &mut Output) {
        if !matches!(self.standing, Standing::Joining { .. }) {
            return;
        }
        self.standing = Standing::Member;
        let Some(old) = self.former.take() else { return };
        let taken = before.filter(|(life, _)| *life == old).map_or(0, |(_, number)| number);
        let later = std::mem::take(&mut self.queue);
        for queued in std::mem::take(&mut self.returning) {
            if queued.number > taken {
                self.publish_again(queued, out);
            } else if let Some(ticket) = queued.ticket {
                out.notices.push(Notice::Answered(ticket, Err(Refusal::Unreachable)));
            }
        }
        self.push(None, Call::Returned);
        for Queued { ticket, call, .. } in later {
            self.push(ticket, call);
        }
    }

    /// Ends the rights of a former life.
    fn give_up_rights(&mut self, out: &mut Output) {
        self.sent = None;
        self.directories.clear();
        for (id, held) in std::mem::take(&mut self.held) {
            if held.writers > 0 {
                *self.stale.entry(id).or_default() += held.writers;
            }
        }
        self.shared.clear();
        self.wanted.clear();
        for (ticket, _) in std::mem::take(&mut self.parked) {
            out.notices.push(Notice::Answered(ticket, Err(Refusal::Unreachable)));
        }
        for ticket in std::mem::take(&mut self.looking).into_keys() {
            out.notices.push(Notice::Looked(ticket, Found::Refused(Refusal::Unreachable)));
        }
    }

    /// Publishes a call of the former life again: creations, closes and renames to free names, on the versions that they depended on. Calls
    /// that remove something are not published again.
    fn publish_again(&mut self, queued: Queued, out: &mut Output) {
        let Queued { origin, ticket, call, .. } = queued;
        if let Some(ticket) = ticket {
            out.notices.push(Notice::Answered(ticket, Err(Refusal::Unreachable)));
            return;
        }
        let publish = match &call {
            Call::GiveBack { .. } | Call::Returned => return,
            Call::Create { .. } | Call::Close { .. } => true,
            Call::Rename { replaces, .. } => !replaces,
            Call::Unlink { .. } => !self.rules.has(Rule::RebaseKeeps),
            _ => false,
        };
        if !publish {
            out.notices.push(Notice::Logged { origin, call });
            return;
        }
        let call = if self.rules.has(Rule::RebaseCompares) { call } else { without_base(call) };
        let number = self.last_number() + 1;
        self.queue.push_back(Queued { number, origin, ticket: None, call });
    }
}

fn without_base(call: Call) -> Call {
    match call {
        Call::Create { place, id, kind, attributes, .. } => {
            Call::Create { place, base: None, id, kind, attributes }
        }
        Call::Unlink { place, .. } => Call::Unlink { place, base: None },
        Call::Rename { from, to, replaces, exchange, .. } => {
            Call::Rename { from, to, bases: None, replaces, exchange }
        }
        call => call,
    }
}
