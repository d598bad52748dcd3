//! Clients: a call or a look-up on a node, and the observer's judgement of the answer.
//!
//! Owns: how a scenario's call becomes the node's. Does not own: when it is made (`actions`).

use super::{At, Dir, Link, Op, World};
use crate::ghost::Tree;
use std::sync::Arc;
use tidemark_meta::key::{Name, Place, ROOT};
use tidemark_meta::node::{Answer, Look};
use tidemark_meta::state::Call;
use tidemark_meta::value::{Attributes, Kind, SealSummary};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::id::{FileId, SealNumber};

impl World {
    pub(super) fn dir(tree: &Tree, dir: Dir) -> Option<FileId> {
        match dir {
            Dir::Root => Some(ROOT),
            Dir::In(name) => tree.directory(name),
        }
    }

    pub(super) fn at(tree: &Tree, at: At) -> Option<Place> {
        Self::dir(tree, at.0).map(|directory| place(directory, at.1))
    }

    /// Makes a client's call; returns false if it makes no sense now.
    pub(super) fn client(&mut self, node: usize, op: Op) -> bool {
        if self.sites[node].blocked.len() >= self.clients || self.sites[node].link == Link::Dead {
            return false;
        }
        let tree = self.ghost.effective();
        let seal = SealSummary {
            number: SealNumber(1),
            size_bytes: 1,
            crc: Crc64(100 + u64::from(self.operations)),
        };
        let attributes = Attributes { mode: u32::from(self.operations) + 1, ..Attributes::default() };
        let file =
            |at: At| Self::at(&tree, at).and_then(|place| tree.at(&place)).filter(|id| tree.is_file(*id));
        let holder = self.sites[node].node.life();
        let bases = None;
        let call = match op {
            Op::Look(at) => {
                let Some(place) = Self::at(&tree, at) else { return false };
                self.look(node, &place);
                return true;
            }
            Op::Write(at) => {
                let Some(place) = Self::at(&tree, at) else { return false };
                let id = Arc::make_mut(&mut self.sites[node].node).new_id();
                let attributes = Attributes::default();
                if self.sites[node].node.has_alone(place.directory) {
                    self.call(node, Call::Create { place, base: None, id, kind: Kind::File, attributes });
                    self.call(node, Call::Take { id, truncate: false });
                    if self.sites[node].node.writers(id) > 0 {
                        self.call(node, Call::Close { id, base: 0, holder, seal });
                    }
                    return true;
                }
                return false;
            }
            Op::Delegate(dir) => Self::dir(&tree, dir).map(|directory| Call::Delegate { directory }),
            Op::Create(at) | Op::Mkdir(at) => {
                let kind = if matches!(op, Op::Create(_)) { Kind::File } else { Kind::Directory };
                let place = Self::at(&tree, at);
                let id = Arc::make_mut(&mut self.sites[node].node).new_id();
                let attributes = Attributes::default();
                place.map(|place| Call::Create { place, base: None, id, kind, attributes })
            }
            Op::Unlink(at) => Self::at(&tree, at).map(|place| Call::Unlink { place, base: None }),
            Op::Rmdir(at) => Self::at(&tree, at).map(|place| Call::Rmdir { place }),
            Op::Rename(from, to) | Op::Exchange(from, to) => {
                let exchange = matches!(op, Op::Exchange(..));
                let places = Self::at(&tree, from).zip(Self::at(&tree, to));
                places.map(|(from, to)| Call::Rename { from, to, bases, replaces: true, exchange })
            }
            Op::Link(from, to) => {
                file(from).zip(Self::at(&tree, to)).map(|(id, place)| Call::Link { id, place })
            }
            Op::Open(at) | Op::Truncate(at) => {
                let truncate = matches!(op, Op::Truncate(_));
                self.truncated |= truncate;
                file(at).map(|id| Call::Take { id, truncate })
            }
            Op::Chmod(at) => file(at).map(|id| Call::SetAttributes { id, attributes }),
            Op::Close => {
                let id = self.sites[node].open.first().copied();
                id.map(|id| Call::Close { id, base: 0, holder, seal })
            }
        };
        let Some(call) = call else { return false };
        self.call(node, call);
        true
    }

    pub(super) fn call(&mut self, at: usize, call: Call) {
        let site = &mut self.sites[at];
        if let Call::Close { id, .. } = &call {
            let at = site.open.iter().position(|open| open == id);
            at.map(|at| site.open.remove(at));
        }
        let node = Arc::make_mut(&mut site.node);
        match node.call(call.clone()) {
            Answer::Done(origin) => {
                if let Call::Take { id, .. } = &call {
                    site.open.push(*id);
                }
                if let Some(origin) = origin {
                    let queued = site.node.queue().find(|queued| queued.origin == origin);
                    let call = queued.map_or(call, |queued| queued.call.clone());
                    let verdict = self.ghost().acked(origin, &call);
                    self.fail(verdict);
                }
            }
            Answer::Waits(ticket) => {
                site.blocked.push(ticket.0);
                if let Call::Take { id, .. } = call {
                    site.opening.push((ticket.0, id));
                }
            }
            // A writer loses its file to a truncation, or with its node's life; else its close counts.
            Answer::Refused(why) if matches!(call, Call::Close { .. }) && !self.truncated => {
                if self.sites[at].lives.len() == 1 {
                    self.fail(Err(format!("a writer's file was taken from under it ({why})")));
                }
            }
            Answer::Refused(_) => {}
        }
    }

    pub(super) fn look(&mut self, at: usize, place: &Place) {
        let site = &mut self.sites[at];
        let life = site.node.life();
        match Arc::make_mut(&mut site.node).look(place.clone()) {
            Look::Found(found) => {
                let verdict = self.ghost().read_here(life, place, &found);
                self.fail(verdict);
            }
            Look::Waits(ticket) => {
                site.blocked.push(ticket.0);
                self.ghost().read_begins(life, ticket.0, place);
            }
        }
    }
}

fn place(directory: FileId, name: &str) -> Place {
    Place { directory, name: Name::new(name.as_bytes()).unwrap() }
}
