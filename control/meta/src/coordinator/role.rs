//! How a standby becomes the coordinator.
//!
//! Owns: following, the election, catching up, the check that the store did not go back. Does not own: the decision to take over.

use super::copy::Progress;
use super::{Command, Coordinator, Lane, Leading, Phase, Why};
use crate::key::Key;
use crate::message::ToNode;
use crate::rules::Rule;
use crate::store::{Request, Response, Revision};
use crate::value::{Role, Standing, Value};
use tidemark_protocol::id::Epoch;

/// The steps of an election.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Electing {
    /// The present election is being read. `tried`: the epoch of an election whose answer was lost.
    Reads { tried: Option<Epoch> },
    /// The role is being put.
    Puts { epoch: Epoch },
    /// The copy is being brought up to the election.
    CatchesUp { election: Revision, epoch: Epoch },
}

impl Coordinator {
    pub(super) fn take_over(&mut self, out: &mut Vec<Command>) {
        if matches!(self.phase, Phase::Standby { .. }) {
            self.read_role(None, out);
        }
    }

    fn read_role(&mut self, tried: Option<Epoch>, out: &mut Vec<Command>) {
        self.phase = Phase::Electing(Electing::Reads { tried });
        out.push(Command::Store(Lane::Role, Request::Read(vec![Key::Coordinator])));
    }

    /// Brings a standby's copy forward by one request.
    pub(super) fn follow(&mut self, out: &mut Vec<Command>) {
        if let Phase::Standby { asked } = &mut self.phase
            && !std::mem::replace(asked, true)
        {
            out.push(Command::Store(Lane::Role, self.copy.request()));
        }
    }

    pub(super) fn role_stored(&mut self, response: Response, out: &mut Vec<Command>) {
        match self.phase {
            Phase::Standby { .. } => {
                let known = self.last_known();
                self.phase = Phase::Standby { asked: false };
                if self.copy.take(response) == Progress::More && !self.went_back(known, out) {
                    self.follow(out);
                }
            }
            Phase::Electing(Electing::Reads { tried }) => self.role_read(tried, response, out),
            Phase::Electing(Electing::Puts { epoch }) => match response {
                Response::Taken(election) => self.elected(election, epoch, out),
                Response::Refused => self.step_down(),
                _ => self.read_role(Some(epoch), out),
            },
            Phase::Electing(Electing::CatchesUp { election, epoch }) => {
                let known = self.last_known();
                self.copy.take(response);
                if !self.went_back(known, out) {
                    self.catch_up(election, epoch, out);
                }
            }
            Phase::Leading(_) | Phase::Stopped(_) => {}
        }
    }

    fn role_read(&mut self, tried: Option<Epoch>, response: Response, out: &mut Vec<Command>) {
        let Response::Values(values) = response else { return self.read_role(tried, out) };
        let [stored] = &values[..] else { return self.read_role(tried, out) };
        let mut over = None;
        if let Some(stored) = stored
            && let Value::Role(role) = &stored.value
        {
            if role.life == self.me && Some(role.epoch) == tried {
                return self.elected(stored.revision, role.epoch, out);
            }
            over = Some(stored.revision);
            self.epoch = self.epoch.max(role.epoch);
        }
        let epoch = self.epoch.next();
        self.epoch = epoch;
        let role = Role { life: self.me.clone(), address: self.address.clone(), epoch };
        self.phase = Phase::Electing(Electing::Puts { epoch });
        out.push(Command::Store(Lane::Role, Request::Elect { over, role }));
    }

    fn elected(&mut self, election: Revision, epoch: Epoch, out: &mut Vec<Command>) {
        self.phase = Phase::Electing(Electing::CatchesUp { election, epoch });
        self.catch_up(election, epoch, out);
    }

    /// Leads as soon as the copy contains the election: then it contains every earlier write, and no other node has written since.
    fn catch_up(&mut self, election: Revision, epoch: Epoch, out: &mut Vec<Command>) {
        let current = self.copy.revision.is_some_and(|revision| revision >= election);
        let enough = self.copy.revision.is_some() && !self.rules.has(Rule::CatchUp);
        if !current && !enough {
            out.push(Command::Store(Lane::Role, self.copy.request()));
            return;
        }
        self.phase = Phase::Leading(Box::new(Leading {
            election,
            epoch,
            waiting: vec![],
            looking: vec![],
            membership: vec![],
            append: None,
            confirming: None,
            suspect: false,
        }));
        let state = std::sync::Arc::clone(&self.copy.state);
        for (node, member) in state.members() {
            if member.standing != Standing::Gone {
                self.send(node.clone(), ToNode::Lead, out);
            }
        }
    }

    /// Returns the era and the transactions of the copy; `None` before anything was loaded.
    fn last_known(&self) -> Option<(u64, u64)> {
        self.copy.state.era().map(|era| (era, self.copy.state.tick()))
    }

    /// Stops if the copy is older now than it was, or of another era.
    fn went_back(&mut self, known: Option<(u64, u64)>, out: &mut Vec<Command>) -> bool {
        let (Some((known_era, known)), Some((found_era, found))) = (known, self.last_known()) else {
            return false;
        };
        self.stop_if_back(known_era, known, found_era, found, out)
    }

    /// Stops if the state in the store is older than the known one, or of another era.
    pub(super) fn stop_if_back(
        &mut self,
        known_era: u64,
        known: u64,
        found_era: u64,
        found: u64,
        out: &mut Vec<Command>,
    ) -> bool {
        let back = found_era != known_era || found < known;
        if back {
            self.stop(Why::WentBack { known_era, known, found_era, found }, out);
        }
        back
    }
}
