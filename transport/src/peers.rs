//! The connected peers: at most one life of each node, and when it came and left.
//!
//! Owns: the rule that only one of two lives with one name speaks, and the order of the service's `connected` and
//! `disconnected`. Does not own: the connections; the guards that they hold tell them to end.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::sync::watch;

use crate::error::Mismatch;
use crate::link::{Peer, Service};
use crate::token::Tokens;

/// The most control connections of one peer that one side opened: the one in use, and a dead one that is not noticed
/// yet. A third ends the oldest.
const CONNECTIONS_PER_SIDE_MAX: usize = 2;

/// The side that opened a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Ours,
    Theirs,
}

/// The most peers at a time: 16,384 nodes, and others that come and go. An entry is about 300 bytes.
pub(crate) const PEERS_MAX: usize = 20_000;

/// The treatment of a connection of `new` while `live` is connected.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    /// No node of that name is connected.
    First,
    /// Another connection of the same life and run.
    Join,
    /// The same memory, another run of its daemon: the earlier run is dead, but its connections have not noticed yet.
    Replace,
    /// Another memory with the same name is alive.
    TwoNodes,
}

fn judge(live: Option<&Peer>, new: &Peer) -> Verdict {
    match live {
        None => Verdict::First,
        Some(live) if live.incarnation != new.incarnation => Verdict::TwoNodes,
        Some(live) if live.start != new.start => Verdict::Replace,
        Some(_) => Verdict::Join,
    }
}

/// The peers of one node.
pub(crate) struct Peers {
    service: Arc<dyn Service>,
    tokens: Arc<Tokens>,
    live: Mutex<HashMap<String, Live>>,
    admitted: AtomicU64,
}

struct Live {
    peer: Peer,
    connections: Vec<Connection>,
}

struct Connection {
    number: u64,
    side: Side,
    ended: watch::Sender<bool>,
}

impl Live {
    /// Ends the oldest connections of one side until there is room for one more.
    fn make_room(&self, side: Side) {
        let open = self.connections.iter().filter(|open| open.side == side && !*open.ended.borrow());
        let open: Vec<_> = open.collect();
        let too_many = (open.len() + 1).saturating_sub(CONNECTIONS_PER_SIDE_MAX);
        for oldest in open.into_iter().take(too_many) {
            oldest.ended.send_replace(true);
        }
    }
}

impl fmt::Debug for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        f.debug_list().entries(live.values().map(|live| &live.peer)).finish()
    }
}

impl Peers {
    pub(crate) fn new(service: Arc<dyn Service>, tokens: Arc<Tokens>) -> Arc<Self> {
        Arc::new(Self { service, tokens, live: Mutex::default(), admitted: AtomicU64::new(0) })
    }

    /// Admits a connection of this peer for as long as the connection holds the returned guard.
    pub(crate) fn admit(self: &Arc<Self>, peer: &Peer, side: Side) -> Result<Admitted, Mismatch> {
        // Locked over the service's calls, so that the service learns of coming and leaving in the order in which they
        // happened.
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        let found = live.get(&peer.node).map(|live| live.peer.clone());
        match judge(found.as_ref(), peer) {
            Verdict::TwoNodes => {
                return Err(Mismatch::TwoNodes {
                    node: peer.node.clone(),
                    live: found.map_or(0, |found| found.incarnation),
                    refused: peer.incarnation,
                });
            }
            Verdict::First if live.len() >= PEERS_MAX => return Err(Mismatch::Busy),
            Verdict::Join => {}
            verdict @ (Verdict::First | Verdict::Replace) => {
                if let (Verdict::Replace, Some(old)) = (verdict, live.remove(&peer.node)) {
                    for open in old.connections {
                        open.ended.send_replace(true);
                    }
                    self.service.disconnected(&old.peer);
                }
                live.insert(peer.node.clone(), Live { peer: peer.clone(), connections: vec![] });
                self.tokens.peer_came(&peer.node);
                self.service.connected(peer);
            }
        }
        let entry = live.get_mut(&peer.node).expect("it was found or inserted above");
        entry.make_room(side);
        let number = self.admitted.fetch_add(1, Ordering::Relaxed);
        let (ended, heard) = watch::channel(false);
        entry.connections.push(Connection { number, side, ended });
        Ok(Admitted { peers: Arc::clone(self), peer: peer.clone(), number, ended: heard })
    }

    fn left(&self, peer: &Peer, number: u64) {
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        // After a replacement the entry is the successor's.
        let Some(entry) = live.get_mut(&peer.node).filter(|live| live.peer == *peer) else { return };
        entry.connections.retain(|open| open.number != number);
        if entry.connections.is_empty() {
            live.remove(&peer.node);
            self.tokens.peer_left(&peer.node, Instant::now());
            self.service.disconnected(peer);
        }
    }
}

/// A connection's right to be open. Dropped when the connection ends.
#[derive(Debug)]
pub(crate) struct Admitted {
    peers: Arc<Peers>,
    pub(crate) peer: Peer,
    number: u64,
    ended: watch::Receiver<bool>,
}

impl Admitted {
    /// Waits until a later connection or a later run of the same node has replaced this one. Cancel safe.
    pub(crate) fn replaced(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut ended = self.ended.clone();
        async move {
            // An error means that the entry is gone: the connection was replaced before.
            drop(ended.wait_for(|ended| *ended).await);
        }
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.peers.left(&self.peer, self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_memories_with_one_name_the_connected_one_stays() {
        let peer = |incarnation, start| Peer { node: "a".into(), incarnation, start };
        assert_eq!(judge(None, &peer(1, 1)), Verdict::First);
        assert_eq!(judge(Some(&peer(1, 1)), &peer(1, 1)), Verdict::Join);
        assert_eq!(judge(Some(&peer(1, 9)), &peer(1, 1)), Verdict::Replace);
        assert_eq!(judge(Some(&peer(1, 1)), &peer(2, 9)), Verdict::TwoNodes);
    }
}
