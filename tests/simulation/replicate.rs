//! Copies on other nodes: sending, landing, fetching, and reporting which node keeps what, as the engine's `replicate` and
//! `cluster::copies` do.
//!
//! Owns: carrying out the requests of the sender and the landing. Does not own: those rules (protocol), the use of copies.
//!
//! A push that lost its leave may still write one more piece, as bytes on their way do.

use super::exec::{Signal, within};
use super::memory::Copy;
use super::names::{ANSWER_DEADLINE, Away};
use super::network::{Answer, From, Letter, Refused, call};
use super::node::Node;
use super::tree::sum;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;
use tidemark_protocol::cluster::wire::{
    self, Copies, FileFacts, NodeAttributes, NodeKind, NodeState, ToCoordinator, WireState,
};
use tidemark_protocol::file::{FileState, Seal};
use tidemark_protocol::id::{ContentHash, FileId, Generation, Incarnation, SealNumber};
use tidemark_protocol::layout::CHUNK_BYTES;
use tidemark_protocol::replication::{
    self, Ask, BulkToken, CopyMeta, Holder, Landing, LandingCommand, LandingEvent, Request, SealedCopy,
    Sender, SenderCommand, SenderEvent,
};

/// Time that the network takes for a chunk.
const CHUNK_TIME: Duration = Duration::from_millis(4);
const CALL_DEADLINE: Duration = Duration::from_secs(10);
/// Files in flight below which a growing file is begun. Sealed files are begun below twice as many.
const SENDING_MAX: usize = 8;
/// Most tokens for reads at a time. A reader that never comes keeps its token until then.
const PULLS_MAX: usize = 64;

#[derive(Default)]
pub(crate) struct Replication {
    /// Signal that a copy came or went, or a file was sealed.
    pub(crate) changed: Signal,
    sending: RefCell<BTreeSet<(FileId, Incarnation)>>,
    pub(crate) acknowledged: RefCell<BTreeMap<(FileId, Incarnation), SealNumber>>,
    landings: RefCell<BTreeMap<FileId, Rc<RefCell<Arriving>>>>,
    pulls: RefCell<BTreeMap<[u8; 16], (FileId, SealNumber)>>,
}

/// A file that is landing here.
struct Arriving {
    landing: Landing,
    bytes: BTreeMap<u64, u64>,
    touched: BTreeSet<u64>,
    token: Option<[u8; 16]>,
    /// Number of pushes under way.
    active: u32,
}

pub(crate) fn hash(chunks: &[u64]) -> ContentHash {
    ContentHash::of(&chunks.iter().flat_map(|content| content.to_le_bytes()).collect::<Vec<_>>())
}

impl Node {
    fn token(&self) -> [u8; 16] {
        let drawn: [u8; 32] = std::array::from_fn(|_| self.world.rng.next().to_le_bytes()[0]);
        // A token once had all 32 bytes, which are still drawn, so that a seed goes on giving the same run.
        std::array::from_fn(|at| drawn[at])
    }

    // Sending.

    /// Sends the files of this node to its partner, for as long as the daemon lives.
    pub(crate) async fn replicate_on(self: Rc<Self>) {
        loop {
            let _told = within(&self.world.exec, Duration::from_millis(200), async {
                let mut first = true;
                self.replication.changed.until(|| (!std::mem::take(&mut first)).then_some(())).await;
            })
            .await;
            let Some((to, partner)) = self.partner() else { continue };
            let mut files: Vec<_> = {
                let tree = self.memory.tree.borrow();
                let acknowledged = self.replication.acknowledged.borrow();
                let lacks = |file: &FileId, own: &super::tree::Own| match own.fate.state() {
                    FileState::Sealed { seal, .. } => acknowledged.get(&(*file, partner)) != Some(&seal),
                    FileState::Open { .. } => true,
                    FileState::Closed | FileState::Cut | FileState::Mapped => false,
                };
                let lacking = tree.own_files().filter(|(file, own)| lacks(file, own));
                lacking.map(|(file, own)| (own.fate.seal().is_none(), *file)).collect()
            };
            // Sealed files come first, so that a file that is never closed does not hold them up.
            files.sort_unstable();
            for (grows, file) in files {
                let mut sending = self.replication.sending.borrow_mut();
                let most = if grows { SENDING_MAX } else { 2 * SENDING_MAX };
                if sending.len() < most && sending.insert((file, partner)) {
                    self.run(|node| async move {
                        node.send_file(file, to, partner).await;
                        node.replication.sending.borrow_mut().remove(&(file, partner));
                    });
                }
            }
        }
    }

    /// Describes a file that is sealed here and that the partner has not acknowledged.
    pub(crate) fn lacks_copies(&self) -> Option<String> {
        let (to, partner) = self.partner().or_else(|| {
            (self.world.machines.len() == 1).then_some((self.machine, self.memory.life.incarnation))
        })?;
        let tree = self.memory.tree.borrow();
        let acknowledged = self.replication.acknowledged.borrow();
        let lacks = |(file, own): (&FileId, &super::tree::Own)| {
            let seal = own.fate.seal()?;
            (acknowledged.get(&(*file, partner)) != Some(&seal.number)).then_some(*file)
        };
        let file = tree.own_files().find_map(lacks)?;
        Some(format!("{file} of {} has no copy at {}", self.name(), self.world.machines[to].name))
    }

    fn partner(&self) -> Option<(usize, Incarnation)> {
        let members = self.members.borrow();
        let me = members.members.iter().find(|member| member.life == self.memory.life)?;
        let name = me.partners.first()?;
        let partner = members.members.iter().find(|member| member.life.node == *name && !member.gone)?;
        Some((self.world.index_of(name)?, partner.life.incarnation))
    }

    /// Sends a file to a partner until the partner has it or is no longer the partner.
    async fn send_file(self: &Rc<Self>, file: FileId, to: usize, partner: Incarnation) {
        let mut sender = Sender::new(file);
        let mut known: Option<SealNumber> = None;
        let mut next: Option<SenderEvent> = None;
        loop {
            if self.partner() != Some((to, partner)) {
                return;
            }
            let seen = {
                let tree = self.memory.tree.borrow();
                let Some(own) = tree.own(file) else { return };
                match (own.fate.seal(), own.fate.writers()) {
                    (Some(seal), _) if known == Some(seal.number) => None,
                    (Some(seal), _) => {
                        known = Some(seal.number);
                        Some(SenderEvent::Sealed(seal.clone()))
                    }
                    (None, 0) if known.is_none() => return,
                    (None, _) if known.take().is_some() => Some(SenderEvent::Changed),
                    (None, _) => {
                        Some(SenderEvent::Grew { stable_bytes: own.chunks.len() as u64 * CHUNK_BYTES })
                    }
                }
            };
            let mut todo = Vec::new();
            let now = self.world.now();
            for event in seen.into_iter().chain([next.take().unwrap_or(SenderEvent::Tick)]) {
                sender.step(event, now, &mut todo);
            }
            let mut wake = now + Duration::from_millis(50);
            for command in todo {
                match command {
                    SenderCommand::Call { op, ask } => next = Some(self.asks(file, to, op, ask).await),
                    SenderCommand::Push { op, token, chunks } => {
                        next = Some(self.pushes(file, to, op, token, &chunks).await);
                    }
                    SenderCommand::Hash { op } => {
                        let own = self.memory.tree.borrow().own(file).cloned();
                        let hash = hash(&own.map(|own| own.chunks).unwrap_or_default());
                        next = Some(SenderEvent::Hashed { op, hash });
                    }
                    SenderCommand::Acknowledged { seal, by } => {
                        self.replication.acknowledged.borrow_mut().insert((file, by.0), seal);
                        self.world.count("copy acknowledged");
                        self.world.truth.borrow().acknowledged(&self.world, file, seal, by.0);
                    }
                    SenderCommand::Wake { at } => wake = at,
                }
            }
            if sender.acknowledged().is_some() && next.is_none() {
                return;
            }
            if next.is_none() {
                self.world.exec.sleep_until(wake).await;
            }
        }
    }

    async fn asks(self: &Rc<Self>, file: FileId, to: usize, op: u64, ask: Ask) -> SenderEvent {
        let failed = |why: &str| SenderEvent::Failed { op, why: why.to_owned() };
        let request = match ask {
            Ask::Begin { until_bytes, sealed, differs } => {
                Some(Request::Begin { file, until_bytes, sealed, differs })
            }
            Ask::Landed { chunks, until_bytes } => Some(Request::Landed { file, chunks, until_bytes }),
            Ask::Keep(seal) => self.copy_of(file, seal).map(Request::Keep),
            Ask::Prove(seal, hash) => self.copy_of(file, seal).map(|copy| Request::Prove(copy, hash)),
            // No file is that small here.
            Ask::Small(_) => None,
        };
        let Some(request) = request else { return failed("it was written again") };
        let bytes = replication::encode(&request).expect("no request is that large here");
        match call(self, to, Letter::Replication(bytes), CALL_DEADLINE).await {
            Some(Ok(bytes)) => {
                SenderEvent::Answered { op, answer: replication::decode(&bytes).expect("both of one build") }
            }
            Some(Err(refused)) => failed(&format!("{refused:?}")),
            None => failed("no answer"),
        }
    }

    async fn pushes(
        self: &Rc<Self>,
        file: FileId,
        to: usize,
        op: u64,
        token: BulkToken,
        chunks: &[u64],
    ) -> SenderEvent {
        let bytes: Vec<(u64, u64)> = {
            let tree = self.memory.tree.borrow();
            let own = tree.own(file).map(|own| own.chunks.clone()).unwrap_or_default();
            let at = |chunk: &u64| own.get(usize::try_from(*chunk).expect("files are small here")).copied();
            chunks.iter().filter_map(|chunk| Some((*chunk, at(chunk)?))).collect()
        };
        let sums = bytes.iter().map(|(chunk, content)| (*chunk, sum(*content))).collect();
        let most = CALL_DEADLINE + CHUNK_TIME * u32::try_from(bytes.len()).expect("files are small here");
        match call(self, to, Letter::Push { token: token.0, chunks: bytes }, most).await {
            Some(Ok(_)) => SenderEvent::Pushed { op, sums },
            _ => SenderEvent::Failed { op, why: "the bytes did not arrive".to_owned() },
        }
    }

    fn copy_of(&self, file: FileId, seal: SealNumber) -> Option<SealedCopy> {
        let tree = self.memory.tree.borrow();
        let sealed = tree.own(file)?.fate.seal().filter(|sealed| sealed.number == seal)?.clone();
        let facts = tree.facts_of(file)?;
        let meta = CopyMeta {
            path: tree.paths.get(&file).cloned().unwrap_or_else(|| b".without-a-name".to_vec()),
            mode: 0o644,
            uid: 0,
            gid: 0,
            mtime_ns: facts.closed_ns,
            xattrs: Vec::new(),
            home: self.name().to_owned(),
            published_at_ns: facts.published_ns,
            facts: wire::encode(&facts.writers).expect("a few writers"),
        };
        Some(SealedCopy::new(file, &sealed, meta))
    }

    // Landings.

    pub(crate) fn asked_of_copies(self: &Rc<Self>, from: &From, bytes: &[u8]) -> Answer {
        let request: Request = replication::decode(bytes).expect("both sides are of one build");
        request.check().map_err(|error| Refused::Fenced(error.to_string()))?;
        let answer = match request {
            Request::Begin { file, until_bytes, sealed, differs } => {
                self.land(file, LandingEvent::Begin { until_bytes, sealed, differs })
            }
            Request::Landed { file, chunks, until_bytes } => {
                self.land(file, LandingEvent::Landed { chunks, until_bytes })
            }
            Request::Keep(copy) => self.land(copy.file, LandingEvent::Keep(Box::new(copy))),
            Request::Prove(copy, hash) => self.prove(copy, hash),
            Request::Pull { file, seal } => self.pull(file, seal),
            Request::Pulled { token, .. } => {
                self.replication.pulls.borrow_mut().remove(&token.0);
                replication::Answer::Noted
            }
            Request::Small(..)
            | Request::Drop { .. }
            | Request::Withdrawn { .. }
            | Request::Suspect { .. } => {
                unreachable!("{} sends no such thing", from.life)
            }
        };
        Ok(replication::encode(&answer).expect("no answer is that large here"))
    }

    fn holder(&self) -> Holder {
        Holder(self.memory.life.incarnation)
    }

    fn land(self: &Rc<Self>, file: FileId, event: LandingEvent) -> replication::Answer {
        let now = self.world.now();
        let arriving = {
            let mut landings = self.replication.landings.borrow_mut();
            landings.retain(|_, arriving| !arriving.borrow().landing.is_stale(now));
            Rc::clone(landings.entry(file).or_insert_with(|| {
                Rc::new(RefCell::new(Arriving {
                    landing: Landing::new(file, self.holder(), now),
                    bytes: BTreeMap::new(),
                    touched: BTreeSet::new(),
                    token: None,
                    active: 0,
                }))
            }))
        };
        let mut arriving = arriving.borrow_mut();
        let mut keeping = match &event {
            LandingEvent::Keep(copy) => Some(copy.clone()),
            _ => None,
        };
        let mut todo = arriving.landing.step(event, now);
        loop {
            let mut next = None;
            for command in todo {
                next = Some(match command {
                    LandingCommand::LookUp { seal, size_bytes, crc } => {
                        let copy = self.memory.copies.borrow().contains_key(&(file, seal));
                        let alike = !copy && self.alike(size_bytes, crc).is_some();
                        LandingEvent::Found { copy, alike }
                    }
                    LandingCommand::Settle => {
                        arriving.token = None;
                        let touched = std::mem::take(&mut arriving.touched).into_iter().collect();
                        LandingEvent::Settled { touched, quiet: arriving.active == 0 }
                    }
                    LandingCommand::Hash { chunks, .. } => {
                        let here = chunks
                            .iter()
                            .filter_map(|chunk| Some((*chunk, sum(*arriving.bytes.get(chunk)?))));
                        LandingEvent::Hashed(here.collect())
                    }
                    LandingCommand::Grant { until_bytes } if self.memory.full.get() => {
                        self.world.count("no room for a copy");
                        LandingEvent::NoRoom { wanted_bytes: until_bytes, free_bytes: 0 }
                    }
                    LandingCommand::Grant { .. } => {
                        let token = self.token();
                        arriving.token = Some(token);
                        LandingEvent::Granted(BulkToken(token))
                    }
                    LandingCommand::Keep => {
                        let copy = keeping.take().expect("only what was asked is kept");
                        LandingEvent::Kept(self.keep(*copy, &std::mem::take(&mut arriving.bytes)))
                    }
                    LandingCommand::Answer(answer) => return answer,
                });
            }
            todo = arriving.landing.step(next.expect("every step ends with an answer"), now);
        }
    }

    fn keep(&self, copy: SealedCopy, bytes: &BTreeMap<u64, u64>) -> bool {
        let chunks: Vec<u64> =
            (0..copy.chunks.len() as u64).filter_map(|chunk| bytes.get(&chunk).copied()).collect();
        if chunks.len() != copy.chunks.len() {
            return false;
        }
        let key = (copy.file, copy.seal);
        self.memory.copies.borrow_mut().insert(key, Copy { sealed: copy, chunks });
        self.replication.changed.tell();
        true
    }

    /// Returns the content of a file or copy here that has this size and checksum.
    fn alike(&self, size_bytes: u64, crc: tidemark_protocol::checksum::Crc64) -> Option<Vec<u64>> {
        let same = |seal: &Seal| seal.size_bytes == size_bytes && seal.crc == crc;
        let tree = self.memory.tree.borrow();
        let own = tree.own_files().find(|(_, own)| own.fate.seal().is_some_and(same));
        if let Some((_, own)) = own {
            return Some(own.chunks.clone());
        }
        let copies = self.memory.copies.borrow();
        let copy = copies.values().find(|copy| same(&copy.sealed.sealed()));
        copy.map(|copy| copy.chunks.clone())
    }

    fn prove(&self, copy: SealedCopy, wanted: ContentHash) -> replication::Answer {
        let (file, seal) = (copy.file, copy.seal);
        match self.alike(copy.size_bytes, copy.crc).filter(|chunks| hash(chunks) == wanted) {
            Some(chunks) => {
                self.world.count("copy proven without sending");
                self.memory.copies.borrow_mut().insert((file, seal), Copy { sealed: copy, chunks });
                self.replication.changed.tell();
                replication::Answer::Acknowledged { file, seal, by: self.holder() }
            }
            None => replication::Answer::Differs,
        }
    }

    /// Writes the bytes pushed under a token, chunk by chunk.
    pub(crate) async fn pushed(self: &Rc<Self>, token: [u8; 16], chunks: &[(u64, u64)]) -> Answer {
        let refused = || Err(Refused::Unavailable("nobody gave leave for these bytes".to_owned()));
        let arriving = {
            let landings = self.replication.landings.borrow();
            landings.values().find(|arriving| arriving.borrow().token == Some(token)).cloned()
        };
        let Some(arriving) = arriving else { return refused() };
        arriving.borrow_mut().active += 1;
        let mut whole = true;
        for (chunk, content) in chunks {
            whole &= arriving.borrow().token == Some(token);
            if !whole {
                break;
            }
            self.world.sleep(CHUNK_TIME).await;
            let weather = self.world.network.weather.get();
            let damaged = self.world.rng.permille(weather.lost / 4);
            if damaged {
                self.world.count("bytes damaged on their way");
            }
            let mut arriving = arriving.borrow_mut();
            arriving.bytes.insert(*chunk, content ^ u64::from(damaged));
            arriving.touched.insert(*chunk);
        }
        arriving.borrow_mut().active -= 1;
        if whole { Ok(Vec::new()) } else { refused() }
    }

    // Fetches.

    fn pull(&self, file: FileId, seal: SealNumber) -> replication::Answer {
        let Some((sealed, _)) = self.memory.bytes_of(file, seal) else { return replication::Answer::NotHere };
        let token = self.token();
        let mut pulls = self.replication.pulls.borrow_mut();
        if pulls.len() >= PULLS_MAX {
            pulls.pop_first();
        }
        pulls.insert(token, (file, seal));
        replication::Answer::Granted { token: BulkToken(token), size_bytes: sealed.size_bytes }
    }

    pub(crate) async fn read(self: &Rc<Self>, token: [u8; 16]) -> Answer {
        let asked = self.replication.pulls.borrow().get(&token).copied();
        let found = asked.and_then(|(file, seal)| self.memory.bytes_of(file, seal));
        let Some((_, chunks)) = found else { return Err(Refused::Unavailable("not here".to_owned())) };
        self.world.sleep(CHUNK_TIME * u32::try_from(chunks.len()).expect("files are small here")).await;
        Ok(chunks.iter().flat_map(|content| content.to_le_bytes()).collect())
    }

    /// Fetches sealed bytes from a node that has them. Returns `None` if they do not verify.
    pub(crate) async fn fetch(self: &Rc<Self>, file: FileId, seal: &Seal, from: usize) -> Option<Vec<u64>> {
        let request = replication::encode(&Request::Pull { file, seal: seal.number }).expect("it is small");
        let answer = call(self, from, Letter::Replication(request), CALL_DEADLINE).await?.ok()?;
        let replication::Answer::Granted { token, .. } =
            replication::decode(&answer).expect("both of one build")
        else {
            return None;
        };
        let bytes = call(self, from, Letter::Read { token: token.0 }, CALL_DEADLINE).await?.ok()?;
        let chunks: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")))
            .collect();
        let sums = chunks.iter().map(|content| sum(*content));
        sums.eq(seal.chunks.iter().copied()).then_some(chunks)
    }

    // Reports.

    pub(crate) fn copies_told(&self) -> Vec<NodeState> {
        self.memory.copies.borrow().values().map(state_of).collect()
    }

    /// Reports the copies kept here to the coordinator.
    pub(crate) async fn tell_copies(self: Rc<Self>) {
        let mut told: BTreeSet<(FileId, SealNumber)> = BTreeSet::new();
        let mut told_to = None;
        loop {
            self.world.sleep(Duration::from_millis(100)).await;
            if !matches!(*self.seat.borrow(), super::node::Seat::There(..)) {
                continue;
            }
            let now = (self.joined.get(), self.view.borrow().epoch());
            let whole = told_to != Some(now);
            if whole {
                told.clear();
            }
            let copies = self.copies_told();
            let fresh: Vec<_> = copies
                .into_iter()
                .filter(|state| key_of(state).is_some_and(|key| !told.contains(&key)))
                .collect();
            if fresh.is_empty() && !whole {
                continue;
            }
            let keys: Vec<_> = fresh.iter().filter_map(key_of).collect();
            let message = ToCoordinator::Copies(Copies { whole, kept: fresh, dropped: Vec::new() });
            let answer: Result<(), Away> = self.ask(message, ANSWER_DEADLINE).await;
            if answer.is_ok() && self.joined.get() == now.0 {
                told_to = Some(now);
                told.extend(keys);
            }
        }
    }
}

fn key_of(state: &NodeState) -> Option<(FileId, SealNumber)> {
    super::catalog::file_of(state).map(|facts| (facts.file, facts.seal))
}

fn state_of(copy: &Copy) -> NodeState {
    let (sealed, meta) = (&copy.sealed, &copy.sealed.meta);
    NodeState {
        path: meta.path.clone(),
        attributes: NodeAttributes::default(),
        attributes_ns: 0,
        other_names: None,
        kind: NodeKind::File(Box::new(FileFacts {
            file: sealed.file,
            size_bytes: sealed.size_bytes,
            state: WireState::Sealed { crc: sealed.crc, chunks: sealed.chunks.as_slice().into() },
            seal: sealed.seal,
            opened_ns: meta.published_at_ns,
            closed_ns: meta.published_at_ns,
            published_ns: meta.published_at_ns,
            vouched: true,
            generation: Generation(0),
            writers: wire::decode(&meta.facts).expect("as it was sent"),
            host: true,
            object: None,
        })),
    }
}
