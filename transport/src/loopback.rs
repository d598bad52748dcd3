//! Links inside one process: the contract without sockets, for tests and for nodes that are simulated together.
//!
//! Owns: the network of such nodes. Keeps the same contract as `tcp`: order, credits, tokens, one life of each name.
//! Does not own: faults (`faulty`).

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::error::{LinkError, Mismatch};
use crate::link::{
    Address, BODY_BYTES_MAX, BytesSink, BytesSource, Grant, Identity, Link, Pace, Peer, Service, Unpaced,
    local,
};
use crate::peers::{Admitted, Peers, Side};
use crate::range::{Landed, PIECE_BYTES, pieces};
use crate::token::{Direction, Token, Tokens};
use crate::{CALLS_IN_FLIGHT_MAX, Refusal, TELL_CONNECTS, copy};

/// Most messages that wait for one connection's reader: the calls that credits allow, and as many tells.
const WORDS_WAITING_MAX: usize = 2 * CALLS_IN_FLIGHT_MAX;

/// The pause between two attempts to find a node that is not there.
const LOOKS_AGAIN: Duration = Duration::from_millis(10);

/// The nodes of one process that can reach each other.
#[derive(Debug, Default)]
pub struct Network {
    members: Mutex<HashMap<String, Weak<Member>>>,
}

impl Network {
    /// Makes an empty network.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Adds a node under an address. An earlier node under the same address is no longer found.
    pub fn join(self: &Arc<Self>, address: &str, identity: Identity, service: Arc<dyn Service>) -> Loopback {
        let tokens = Arc::new(Tokens::default());
        let (closed, _) = watch::channel(false);
        let member = Arc::new(Member {
            peers: Peers::new(Arc::clone(&service), Arc::clone(&tokens)),
            identity,
            service,
            tokens,
            connections: tokio::sync::Mutex::default(),
            closed,
        });
        let mut members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.retain(|_, member| member.strong_count() > 0);
        members.insert(address.to_owned(), Arc::downgrade(&member));
        Loopback { network: Arc::clone(self), member }
    }

    fn find(&self, address: &str) -> Option<Arc<Member>> {
        let members = self.members.lock().unwrap_or_else(PoisonError::into_inner);
        members.get(address).and_then(Weak::upgrade).filter(|member| !*member.closed.borrow())
    }
}

/// A node's end in a [`Network`].
pub struct Loopback {
    network: Arc<Network>,
    member: Arc<Member>,
}

impl fmt::Debug for Loopback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loopback({})", self.member.identity.node)
    }
}

struct Member {
    identity: Identity,
    service: Arc<dyn Service>,
    peers: Arc<Peers>,
    tokens: Arc<Tokens>,
    /// The connections that this node opened.
    connections: tokio::sync::Mutex<HashMap<Address, Connection>>,
    closed: watch::Sender<bool>,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("identity", &self.identity).finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct Connection {
    words: mpsc::Sender<Word>,
    credits: Arc<Semaphore>,
}

enum Word {
    Tell(Bytes),
    Call { body: Bytes, answer: oneshot::Sender<Result<Bytes, Refusal>>, credit: OwnedSemaphorePermit },
}

impl Member {
    fn peer(&self) -> Peer {
        let Identity { node, incarnation, start, .. } = self.identity.clone();
        Peer { node, incarnation, start }
    }
}

impl Loopback {
    /// Returns the member at the address, if it is the node that `to` names.
    fn reach(&self, to: &Address) -> Result<Arc<Member>, LinkError> {
        if *self.member.closed.borrow() {
            return Err(LinkError::Closed);
        }
        let member = self.network.find(&to.address).ok_or_else(|| LinkError::Unreachable {
            node: to.node.clone(),
            address: to.address.clone(),
            source: std::io::ErrorKind::ConnectionRefused.into(),
        })?;
        let (ours, theirs) = (&self.member.identity, &member.identity);
        if ours.cluster != theirs.cluster {
            let why = Mismatch::OtherCluster { ours: ours.cluster.clone(), theirs: theirs.cluster.clone() };
            return Err(mismatch(to, why));
        }
        if theirs.node != to.node {
            let why = Mismatch::OtherNode { wanted: to.node.clone(), found: theirs.node.clone() };
            return Err(mismatch(to, why));
        }
        Ok(member)
    }

    async fn connection(&self, to: &Address) -> Result<Connection, LinkError> {
        let mut connections = self.member.connections.lock().await;
        if let Some(connection) = connections.get(to).filter(|connection| !connection.words.is_closed()) {
            return Ok(connection.clone());
        }
        let member = self.reach(to)?;
        let theirs =
            member.peers.admit(&self.member.peer(), Side::Theirs).map_err(|why| mismatch(to, why))?;
        let ours = self.member.peers.admit(&member.peer(), Side::Ours).map_err(|why| mismatch(to, why))?;
        member.service.saw_epoch(&theirs.peer, self.member.service.epoch());
        self.member.service.saw_epoch(&ours.peer, member.service.epoch());
        let (words, waiting) = mpsc::channel(WORDS_WAITING_MAX);
        let closed = [self.member.closed.subscribe(), member.closed.subscribe()];
        tokio::spawn(hear(closed, waiting, Arc::clone(&member.service), [ours, theirs]));
        let connection = Connection { words, credits: Arc::new(Semaphore::new(CALLS_IN_FLIGHT_MAX)) };
        connections.insert(to.clone(), connection.clone());
        Ok(connection)
    }

    /// Connects to `to`. As over TCP, retries until `until` while the node is not there.
    async fn connect(&self, to: &Address, until: Instant) -> Result<Connection, LinkError> {
        loop {
            match self.connection(to).await {
                Err(LinkError::Unreachable { .. }) if Instant::now() + LOOKS_AGAIN < until => {
                    tokio::time::sleep(LOOKS_AGAIN).await;
                }
                connected => return connected,
            }
        }
    }

    async fn ask(&self, to: &Address, until: Instant, body: Bytes) -> Result<Bytes, LinkError> {
        let connection = self.connect(to, until).await?;
        let lost = || LinkError::Lost { node: to.node.clone() };
        let credit = Arc::clone(&connection.credits).acquire_owned().await.map_err(|_| lost())?;
        let (answer, answered) = oneshot::channel();
        connection.words.send(Word::Call { body, answer, credit }).await.map_err(|_| lost())?;
        match answered.await.map_err(|_| lost())? {
            Ok(body) if body.len() > BODY_BYTES_MAX => Err(LinkError::Refused {
                node: to.node.clone(),
                refusal: crate::error::answer_too_big(body.len()),
            }),
            Ok(body) => Ok(body),
            Err(refusal) => Err(LinkError::Refused { node: to.node.clone(), refusal }),
        }
    }

    /// Moves pieces one by one; an error carries the ranges that landed.
    async fn carry(
        &self,
        with: &Address,
        (token, direction): (Token, Direction),
        ranges: &[Range<u64>],
        (ours, pace): (Ours<'_>, &dyn Pace),
    ) -> Result<(), LinkError> {
        let mut landed = Landed::default();
        for range in pieces(ranges, PIECE_BYTES) {
            pace.take(range.end - range.start).await;
            let member = self.reach(with).map_err(|error| LinkError::Cut {
                node: with.node.clone(),
                landed: std::mem::take(&mut landed).into_ranges(),
                reason: error.to_string(),
            })?;
            let grant = member
                .tokens
                .check(token, &self.member.identity.node, direction, &range)
                .map_err(|why| LinkError::Token { node: with.node.clone(), range: range.clone(), why })?;
            let (from, into) = match (&*grant, ours) {
                (Grant::Receive { into, .. }, Ours::Source(from)) => (from, into),
                (Grant::Send { from, .. }, Ours::Sink(into)) => (from, into),
                _ => unreachable!("check compared the direction"),
            };
            into.landing(range.clone());
            copy::piece(from.as_ref(), into.as_ref(), &range)
                .map_err(|(doing, error)| local(doing, &range, error))?;
            into.landed(range.clone());
            landed.add(range);
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}

/// The local file in a transfer.
#[derive(Clone, Copy)]
enum Ours<'a> {
    Source(&'a Arc<dyn BytesSource>),
    Sink(&'a Arc<dyn BytesSink>),
}

/// Reads one connection: tells one after another, calls side by side. Ends when either node closes.
async fn hear(
    // First parameter, so that it is dropped last: a task that waits for closing finds the peer notified.
    mut closed: [watch::Receiver<bool>; 2],
    mut waiting: mpsc::Receiver<Word>,
    service: Arc<dyn Service>,
    admitted: [Admitted; 2],
) {
    let [ours, theirs] = &mut closed;
    let [replaced_here, replaced_there] = [admitted[0].replaced(), admitted[1].replaced()];
    tokio::pin!(replaced_here, replaced_there);
    loop {
        let word = tokio::select! {
            biased;
            _ = ours.wait_for(|closed| *closed) => None,
            _ = theirs.wait_for(|closed| *closed) => None,
            () = &mut replaced_here => None,
            () = &mut replaced_there => None,
            word = waiting.recv() => word,
        };
        let from = admitted[1].peer.clone();
        match word {
            None => return,
            Some(Word::Tell(body)) => service.tell(from, body),
            Some(Word::Call { body, answer, credit }) => {
                let service = Arc::clone(&service);
                tokio::spawn(async move {
                    let said = service.call(from, body).await;
                    drop(credit);
                    // The caller may no longer wait.
                    let _ = answer.send(said);
                });
            }
        }
    }
}

fn mismatch(to: &Address, why: Mismatch) -> LinkError {
    LinkError::Handshake { node: to.node.clone(), address: to.address.clone(), why }
}

#[async_trait]
impl Link for Loopback {
    async fn call(&self, to: &Address, body: Bytes, deadline: Duration) -> Result<Bytes, LinkError> {
        crate::error::check_body(&body)?;
        tokio::time::timeout(deadline, self.ask(to, Instant::now() + deadline, body))
            .await
            .unwrap_or_else(|_| Err(LinkError::Deadline { node: to.node.clone(), deadline }))
    }

    async fn tell(&self, to: &Address, body: Bytes) -> Result<(), LinkError> {
        crate::error::check_body(&body)?;
        let connection = self.connect(to, Instant::now() + TELL_CONNECTS).await?;
        let said = connection.words.send(Word::Tell(body)).await;
        said.map_err(|_| LinkError::Lost { node: to.node.clone() })
    }

    fn grant(&self, peer: &str, grant: Grant) -> Token {
        self.member.tokens.sweep(std::time::Instant::now());
        self.member.tokens.grant(peer, grant)
    }

    fn revoke(&self, token: Token) {
        self.member.tokens.revoke(token);
    }

    async fn push(
        &self,
        to: &Address,
        token: Token,
        from: Arc<dyn BytesSource>,
        ranges: &[Range<u64>],
        pace: &dyn Pace,
    ) -> Result<(), LinkError> {
        self.reach(to)?;
        self.carry(to, (token, Direction::Receive), ranges, (Ours::Source(&from), pace)).await
    }

    async fn pull(
        &self,
        from: &Address,
        token: Token,
        ranges: &[Range<u64>],
        into: Arc<dyn BytesSink>,
    ) -> Result<(), LinkError> {
        self.reach(from)?;
        self.carry(from, (token, Direction::Send), ranges, (Ours::Sink(&into), &Unpaced)).await
    }

    async fn close(&self) {
        self.member.closed.send_replace(true);
        self.member.tokens.clear();
        let words: Vec<_> =
            self.member.connections.lock().await.drain().map(|(_, open)| open.words).collect();
        for words in words {
            words.closed().await;
        }
        // Readers of connections to us hold a receiver until they have ended.
        self.member.closed.closed().await;
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.member.closed.send_replace(true);
    }
}
