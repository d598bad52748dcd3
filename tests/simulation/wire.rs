//! The messages between the nodes: how long they take, and which are lost.
//!
//! Owns: who can reach whom, the delay of each message, the beginning and the end of connections. Does not own: what is said (the product),
//! the bytes of files (`moves`), when links are cut (`main`).

use super::moves::{Granted, Ours};
use async_trait::async_trait;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tidemark_transport::{
    Address, BytesSink, BytesSource, Grant, Link, LinkError, Pace, Peer, Refusal, Service, TOKEN_BYTES,
    Token, Unpaced,
};
use tokio::task::AbortHandle;

/// Delays of most messages, and of one in [`SLOW_ONE_IN`]: a message that is late enough to be overtaken by several others.
const QUICK: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(2));
const SLOW: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(120));
const SLOW_ONE_IN: u64 = 12;

/// What a node's daemon offers to the others while it runs.
struct Place {
    me: Peer,
    service: Arc<dyn Service>,
    /// Calls at work, which end with the daemon.
    at_work: Vec<AbortHandle>,
}

/// The network of one cluster.
pub(super) struct Wire(Mutex<State>);

pub(super) struct State {
    rng: fastrand::Rng,
    places: BTreeMap<String, Place>,
    /// Daemons that have spoken with each other, by node and start.
    met: BTreeSet<[(String, u64); 2]>,
    /// The files that nodes let each other move.
    pub(super) granted: BTreeMap<[u8; TOKEN_BYTES], Granted>,
    pub(super) tokens: u64,
    /// Directions in which nothing arrives.
    cut: BTreeSet<(String, String)>,
    /// One in so many calls breaks its connection: after the request arrived, or before. 0: none.
    breaks_one_in: u64,
    messages: u64,
}

/// A node's end.
pub(super) struct End {
    pub(super) wire: Arc<Wire>,
    pub(super) me: Peer,
}

impl fmt::Debug for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "End({})", self.me.node)
    }
}

impl Wire {
    pub(super) fn new(seed: u64, breaks_one_in: u64) -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            rng: fastrand::Rng::with_seed(seed),
            places: BTreeMap::new(),
            met: BTreeSet::new(),
            granted: BTreeMap::new(),
            tokens: 0,
            cut: BTreeSet::new(),
            breaks_one_in,
            messages: 0,
        })))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a daemon reachable under its node's name.
    pub(super) fn join(self: &Arc<Self>, me: Peer, service: Arc<dyn Service>) -> Arc<dyn Link> {
        self.lock().places.insert(me.node.clone(), Place { me: me.clone(), service, at_work: Vec::new() });
        Arc::new(End { wire: Arc::clone(self), me })
    }

    /// Ends a daemon: what it was asked is not carried on, and the others learn that its connections are gone.
    pub(super) fn leave(&self, peer: &Peer) {
        let others: Vec<_> = {
            let mut state = self.lock();
            if let Some(place) = state.places.remove(&peer.node) {
                place.at_work.iter().for_each(AbortHandle::abort);
            }
            state.granted.retain(|_, granted| granted.by.node != peer.node);
            let reached = state.places.iter().filter(|(other, _)| state.arrives(&peer.node, other));
            reached.map(|(_, place)| Arc::clone(&place.service)).collect()
        };
        others.iter().for_each(|service| service.disconnected(peer));
    }

    /// Cuts one direction between two nodes.
    pub(super) fn cut(&self, from: &str, to: &str) {
        self.lock().cut.insert((from.to_owned(), to.to_owned()));
    }

    pub(super) fn heal(&self) {
        self.lock().cut.clear();
    }

    /// Ends broken connections for good, so that a history can come to its end.
    pub(super) fn calm(&self) {
        let mut state = self.lock();
        state.cut.clear();
        state.breaks_one_in = 0;
    }

    pub(super) fn messages(&self) -> u64 {
        self.lock().messages
    }

    /// Whether this daemon runs.
    pub(super) fn runs(&self, peer: &Peer) -> bool {
        self.lock().places.get(&peer.node).is_some_and(|place| place.me == *peer)
    }

    /// Whether a message arrives at once, for what is no call.
    pub(super) fn reaches(&self, from: &str, to: &str) -> bool {
        self.lock().arrives(from, to)
    }

    /// Draws how long a message takes.
    pub(super) fn delay(&self) -> Duration {
        let rng = &mut self.lock().rng;
        let (least, most) = if rng.u64(0..SLOW_ONE_IN) == 0 { SLOW } else { QUICK };
        between(rng, least, most)
    }

    /// Draws whether a connection breaks, and then whether the request arrived.
    pub(super) fn breaks(&self) -> Option<bool> {
        let mut state = self.lock();
        let one_in = state.breaks_one_in;
        (one_in > 0 && state.rng.u64(0..one_in) == 0).then(|| state.rng.bool())
    }
}

/// Draws a time.
pub(super) fn between(rng: &mut fastrand::Rng, least: Duration, most: Duration) -> Duration {
    least + (most - least).mul_f64(rng.f64())
}

impl State {
    pub(super) fn arrives(&self, from: &str, to: &str) -> bool {
        !self.cut.contains(&(from.to_owned(), to.to_owned()))
    }
}

impl End {
    /// Tells both daemons of their first connection.
    fn meet(&self, to: &Address) {
        let mut state = self.wire.lock();
        let services =
            |node: &str| state.places.get(node).map(|place| (place.me.clone(), Arc::clone(&place.service)));
        let (Some((me, ours)), Some((other, theirs))) = (services(&self.me.node), services(&to.node)) else {
            return;
        };
        let of = |peer: &Peer| (peer.node.clone(), peer.start);
        let both = [of(&me), of(&other)];
        let reversed = [of(&other), of(&me)];
        if me != self.me || state.met.contains(&reversed) || !state.met.insert(both) {
            return;
        }
        drop(state);
        theirs.connected(&me);
        ours.connected(&other);
    }

    /// Gives a request to its receiver; none if it does not arrive.
    fn deliver(
        &self,
        to: &Address,
        body: Bytes,
    ) -> Result<Option<tokio::task::JoinHandle<Result<Bytes, Refusal>>>, LinkError> {
        let mut state = self.wire.lock();
        state.messages += 1;
        let is_own = |place: &Place| place.me == self.me;
        if !state.places.get(&self.me.node).is_some_and(is_own) || !state.arrives(&self.me.node, &to.node) {
            return Ok(None);
        }
        let Some(place) = state.places.get_mut(&to.node) else {
            return Err(LinkError::Unreachable {
                node: to.node.clone(),
                address: to.address.clone(),
                source: io::Error::from(io::ErrorKind::ConnectionRefused),
            });
        };
        let (service, from) = (Arc::clone(&place.service), self.me.clone());
        let answer = tokio::spawn(async move { service.call(from, body).await });
        place.at_work.retain(|call| !call.is_finished());
        place.at_work.push(answer.abort_handle());
        Ok(Some(answer))
    }

    async fn exchange(&self, to: &Address, body: Bytes) -> Result<Bytes, LinkError> {
        let lost = || LinkError::Lost { node: to.node.clone() };
        let breaks = self.wire.breaks();
        tokio::time::sleep(self.wire.delay()).await;
        if breaks == Some(false) {
            return Err(lost());
        }
        let Some(answer) = self.deliver(to, body)? else { return std::future::pending().await };
        self.meet(to);
        if breaks == Some(true) {
            return Err(lost());
        }
        let answer = match answer.await {
            Ok(answer) => answer,
            Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            Err(_) => return Err(lost()),
        };
        tokio::time::sleep(self.wire.delay()).await;
        if !self.wire.reaches(&to.node, &self.me.node) {
            return std::future::pending().await;
        }
        answer.map_err(|refusal: Refusal| LinkError::Refused { node: to.node.clone(), refusal })
    }
}

#[async_trait]
impl Link for End {
    async fn call(&self, to: &Address, body: Bytes, deadline: Duration) -> Result<Bytes, LinkError> {
        let answer = tokio::time::timeout(deadline, self.exchange(to, body)).await;
        answer.unwrap_or_else(|_| Err(LinkError::Deadline { node: to.node.clone(), deadline }))
    }

    async fn tell(&self, _: &Address, _: Bytes) -> Result<(), LinkError> {
        unreachable!("names are not told this way")
    }

    fn grant(&self, peer: &str, grant: Grant) -> Token {
        self.lend(peer, grant)
    }

    fn revoke(&self, token: Token) {
        self.wire.lock().granted.remove(&token.to_bytes());
    }

    async fn push(
        &self,
        to: &Address,
        token: Token,
        from: Arc<dyn BytesSource>,
        ranges: &[Range<u64>],
        pace: &dyn Pace,
    ) -> Result<(), LinkError> {
        self.carry(to, token, Ours::From(from), ranges, pace).await
    }

    async fn pull(
        &self,
        from: &Address,
        token: Token,
        ranges: &[Range<u64>],
        into: Arc<dyn BytesSink>,
    ) -> Result<(), LinkError> {
        self.carry(from, token, Ours::Into(into), ranges, &Unpaced).await
    }

    async fn close(&self) {}
}
