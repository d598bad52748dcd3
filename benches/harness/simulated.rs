//! Many nodes of one cluster in this process: no mount, no memory, only the messages that they exchange with the coordinator, over the real
//! links.
//!
//! Owns: their links, joining one coordinator after another, beating at the interval that it sets, publishing and looking. Does not own: the
//! coordinator, which is a real daemon; times and counts.

use anyhow::{Context, bail};
use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};
use tidemark_protocol::checksum::Crc64;
use tidemark_protocol::cluster::wire::{
    self, Answer, Beat, Beaten, FileFacts, Intent, Join, Joined, Look, Looked, NameOperation, NodeAttributes,
    NodeKind, NodeState, Publication, Published, ToCoordinator, ToNode, WireState,
};
use tidemark_protocol::id::{
    Epoch, FileCounter, FileId, Generation, Incarnation, NodeName, SealNumber, StartId,
};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::membership::{Ask, BEAT_MS, Heard, Life};
use tidemark_transport::tcp::{self, Security};
use tidemark_transport::{Address, Identity, Link, Peer, Refusal, Service, Tcp};
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

/// The first byte of a call to the coordinator (`cluster::tag` of the engine).
const TO_COORDINATOR: u8 = b'C';
/// Descriptors of a process that are not for nodes.
const OTHER_DESCRIPTORS: u64 = 200;
/// Messages under way at once: as many as nodes send at the same moment when a job ends its save.
const AT_ONCE: usize = 32;
/// The daemon's own limit for answers that may depend on other nodes' answers.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// The most times that a question is asked, and the time between two.
const ASKED_MAX: usize = 20;
const ASK_AGAIN: Duration = Duration::from_millis(250);

/// The numbers of messages and of their answers.
#[derive(Debug, Default)]
pub struct Counted {
    pub beats: AtomicU64,
    /// Beats that were not answered, or were refused because the node was declared gone; the node joins again then.
    pub failed: AtomicU64,
    /// The longest answer to a beat, in microseconds.
    pub beat_us: AtomicU64,
    /// Messages of the coordinator: members, recalls.
    pub heard: AtomicU64,
    pub heard_bytes: AtomicU64,
}

/// Returns the most nodes that a daemon has descriptors for, if it may have as many as this process: a connection from each and one to it.
#[must_use]
pub fn joined_max() -> usize {
    nodes_max(2)
}

/// Returns the most nodes of this process: each has a listening socket and two connections.
#[must_use]
pub fn in_a_process_max() -> usize {
    nodes_max(3)
}

fn nodes_max(descriptors_each: u64) -> usize {
    let maximum = getrlimit(Resource::Nofile).maximum.unwrap_or(u64::MAX);
    usize::try_from(maximum.saturating_sub(OTHER_DESCRIPTORS) / descriptors_each).unwrap_or(usize::MAX)
}

/// The nodes. Dropping the value closes their links.
#[derive(Debug)]
pub struct Simulated {
    runtime: Runtime,
    coordinator: Arc<RwLock<Address>>,
    /// The number of the first node.
    first: usize,
    nodes: Vec<Arc<One>>,
    beating: Vec<JoinHandle<()>>,
    pub counted: Arc<Counted>,
}

#[derive(Debug)]
struct One {
    life: NodeLife,
    start: StartId,
    link: Tcp,
    coordinator: Arc<RwLock<Address>>,
    epoch: AtomicU64,
    /// The number of the last publication.
    published: AtomicU64,
    /// The interval between two beats that the coordinator set last.
    interval_ms: AtomicU64,
}

/// More bytes than a question has whether a node is heard. Lists of members are longer, and reading them would cost the nodes' process more
/// than the coordinator's work that is measured.
const QUESTION_BYTES_MAX: usize = 512;

/// A service that answers every message of the coordinator with "done", and says which nodes it hears.
struct Done {
    life: Life,
    counted: Arc<Counted>,
}

#[async_trait]
impl Service for Done {
    async fn call(&self, _: Peer, body: Bytes) -> Result<Bytes, Refusal> {
        self.counted.heard.fetch_add(1, Ordering::Relaxed);
        self.counted.heard_bytes.fetch_add(body.len() as u64, Ordering::Relaxed);
        let question = body.get(1..).filter(|body| body.len() <= QUESTION_BYTES_MAX);
        let answer = match question.map(wire::decode::<ToNode>) {
            Some(Ok(ToNode::Knock)) => wire::encode(&self.life),
            Some(Ok(ToNode::Ask(Ask { epoch, question, about, .. }))) => {
                // Simulated nodes live as long as their process. A daemon that is asked about was killed.
                let (from, heard) = (self.life.clone(), is_simulated(&about.node));
                wire::encode(&Heard { from, epoch, question, about: about.node, heard })
            }
            _ => wire::encode(&()),
        };
        Ok(Bytes::from(answer.expect("what a node answers is small")))
    }
    fn tell(&self, _: Peer, _: Bytes) {}
    fn epoch(&self) -> u64 {
        0
    }
    fn saw_epoch(&self, _: &Peer, _: u64) {}
    fn connected(&self, _: &Peer) {}
    fn disconnected(&self, _: &Peer) {}
}

impl Simulated {
    /// Makes an empty set; nodes are numbered from `first` on. The coordinator listens on loopback without certificates.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn new(coordinator: Address, first: usize) -> anyhow::Result<Self> {
        let runtime = Runtime::new().context("threads for the simulated nodes")?;
        let maximum = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
            .context("raise the limit of descriptors")?;
        let (nodes, beating) = (Vec::new(), Vec::new());
        let coordinator = Arc::new(RwLock::new(coordinator));
        Ok(Self { runtime, coordinator, first, nodes, beating, counted: Arc::default() })
    }

    /// Returns the number of nodes.
    #[must_use]
    pub fn count(&self) -> usize {
        self.nodes.len()
    }

    /// Adds `more` nodes, which join and then beat until the end. Returns the seconds of each join. If a node was refused or `limit` passed
    /// before all had joined, also returns why there are fewer.
    ///
    /// # Errors
    /// A link cannot be opened.
    pub fn join(&mut self, more: usize, limit: Duration) -> anyhow::Result<(Vec<f64>, Option<String>)> {
        let (first, until) = (self.first + self.nodes.len(), Instant::now() + limit);
        let (counted, coordinator) = (&self.counted, &self.coordinator);
        let joined: Vec<_> = self.runtime.block_on(async {
            let each = (first..first + more).map(|number| async move {
                let one = One::open(number, Arc::clone(coordinator), Arc::clone(counted)).await?;
                let started = Instant::now();
                if started >= until {
                    return Ok(Err(format!("{} s had passed", limit.as_secs())));
                }
                let joined = one.join().await.map(|()| (Arc::new(one), started.elapsed().as_secs_f64()));
                Ok::<_, anyhow::Error>(joined.map_err(|error| format!("node {number}: {error:#}")))
            });
            // After the first refusal no further node tries.
            let mut failed = false;
            let tried = stream::iter(each).buffered(AT_ONCE).take_while(|tried| {
                let go_on = !failed;
                failed |= !matches!(tried, Ok(Ok(_)));
                std::future::ready(go_on)
            });
            tried.try_collect().await
        })?;
        let (mut seconds, mut why) = (Vec::new(), None);
        for tried in joined {
            let (one, took_s) = match tried {
                Ok(joined) => joined,
                Err(said) => {
                    why = Some(said);
                    continue;
                }
            };
            let beats = Arc::clone(&one).beat(Arc::clone(&self.counted));
            self.beating.push(self.runtime.spawn(beats));
            self.nodes.push(one);
            seconds.push(took_s);
        }
        Ok((seconds, why))
    }

    /// Makes each node from `first` on publish a directory of its own with a file in it. Returns the seconds of each publication.
    ///
    /// # Errors
    /// The coordinator refuses a publication.
    pub fn publish(&self, first: usize) -> anyhow::Result<Vec<f64>> {
        self.each(first, |one, number| async move {
            let message = ToCoordinator::Publish(one.publication(number));
            let published: Published = one.ask_on(&message).await?;
            anyhow::ensure!(!published.whole_wanted, "node {number} was not known any more");
            one.published.store(1, Ordering::Relaxed);
            Ok(())
        })
    }

    /// Makes all nodes join another coordinator, which has their publications, and tell it that they have nothing to add.
    ///
    /// # Errors
    /// The coordinator refuses a node.
    pub fn follow(&self, coordinator: Address) -> anyhow::Result<()> {
        *self.coordinator.write().unwrap_or_else(PoisonError::into_inner) = coordinator;
        let joined = self.each(0, |one, number| async move {
            one.join().await.with_context(|| format!("node {number} joins the next coordinator"))?;
            one.ask_on::<()>(&ToCoordinator::Reported).await
        });
        joined.map(drop)
    }

    /// Makes each node from `first` on look for the file of the node before it. Returns the seconds of each.
    ///
    /// # Errors
    /// The coordinator does not know the file, or does not answer.
    pub fn look(&self, first: usize) -> anyhow::Result<Vec<f64>> {
        let count = self.nodes.len();
        self.each(first, |one, number| async move {
            let directory = directory_of((number + count - 1) % count).into_bytes();
            let look = Look { directory, name: FILE.to_vec(), intent: Intent::Read };
            let message = ToCoordinator::Look(look);
            let mut answer: Answer<Looked> = one.ask_on(&message).await?;
            // A new coordinator has not heard all nodes yet.
            for _ in 1..ASKED_MAX {
                if matches!(answer, Answer::Known(_)) {
                    break;
                }
                tokio::time::sleep(ASK_AGAIN).await;
                answer = one.ask_on(&message).await?;
            }
            let Answer::Known(looked) = answer else { bail!("the coordinator does not know yet") };
            anyhow::ensure!(looked.found.is_some(), "the file of the node before {number} is not known");
            Ok(())
        })
    }

    fn each<F>(&self, first: usize, act: impl Fn(Arc<One>, usize) -> F) -> anyhow::Result<Vec<f64>>
    where
        F: Future<Output = anyhow::Result<()>>,
    {
        let act = &act;
        let all = self.nodes.iter().enumerate().skip(first).map(|(number, one)| async move {
            let started = Instant::now();
            act(Arc::clone(one), number).await?;
            Ok::<_, anyhow::Error>(started.elapsed().as_secs_f64())
        });
        self.runtime.block_on(stream::iter(all).buffered(AT_ONCE).try_collect())
    }
}

fn name_of(number: usize) -> String {
    format!("s{number}")
}

fn is_simulated(node: &NodeName) -> bool {
    node.as_str().strip_prefix('s').is_some_and(|number| number.parse::<usize>().is_ok())
}

const FILE: &[u8] = b"rank.log";

fn directory_of(number: usize) -> String {
    format!("simulated-{number}")
}

impl One {
    async fn open(
        number: usize,
        coordinator: Arc<RwLock<Address>>,
        counted: Arc<Counted>,
    ) -> anyhow::Result<Self> {
        let node = name_of(number);
        let incarnation = Incarnation(1 + number as u64);
        let start = StartId(1 + number as u64);
        let settings = tcp::Settings {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            security: Security::Insecure { off_loopback: false },
            encrypt_bulk: false,
            bulk_streams: 1,
        };
        let identity = Identity {
            cluster: "tidemark".to_owned(),
            node: node.clone(),
            incarnation: incarnation.0,
            start: start.0,
        };
        let node: NodeName = node.parse().context("its name")?;
        let service = Done { life: Life { node: node.clone(), incarnation, start }, counted };
        let link = Tcp::listen(identity, settings, Arc::new(service)).await.context("listen")?;
        let life = NodeLife { node, incarnation };
        Ok(Self {
            life,
            start,
            link,
            coordinator,
            epoch: AtomicU64::new(0),
            published: AtomicU64::new(0),
            interval_ms: AtomicU64::new(BEAT_MS),
        })
    }

    async fn ask<T: DeserializeOwned>(&self, message: &ToCoordinator) -> anyhow::Result<T> {
        let mut body = vec![TO_COORDINATOR];
        body.extend(wire::encode(message)?);
        let coordinator = self.coordinator.read().unwrap_or_else(PoisonError::into_inner).clone();
        let answer = self.link.call(&coordinator, body.into(), ANSWER_MAX).await?;
        Ok(wire::decode(&answer)?)
    }

    /// Asks until the coordinator answers, as a daemon does: etcd may be slow, and a node whose beats came too late has to join again.
    async fn ask_on<T: DeserializeOwned>(&self, message: &ToCoordinator) -> anyhow::Result<T> {
        for _ in 1..ASKED_MAX {
            if let Ok(answer) = self.ask(message).await {
                return Ok(answer);
            }
            tokio::time::sleep(ASK_AGAIN).await;
            // The next question shows whether it helped.
            drop(self.join().await);
        }
        self.ask(message).await
    }

    async fn join(&self) -> anyhow::Result<()> {
        let join = Join {
            life: self.life.clone(),
            start: self.start,
            address: self.link.local_address().to_string(),
            labels: BTreeMap::new(),
            epoch: Epoch(0),
            publication: self.published.load(Ordering::Relaxed),
            alone: Vec::new(),
            version: "simulated".to_owned(),
        };
        let joined: Joined = self.ask(&ToCoordinator::Join(join)).await?;
        self.epoch.store(joined.admit.epoch.0, Ordering::Relaxed);
        self.interval_ms.store(joined.admit.interval_ms, Ordering::Relaxed);
        Ok(())
    }

    async fn beat(self: Arc<Self>, counted: Arc<Counted>) {
        let mut number = 0;
        let mut due = Instant::now();
        loop {
            // Counted from the last beat, not from its answer: the interval is the time between two beats.
            due += Duration::from_millis(self.interval_ms.load(Ordering::Relaxed));
            tokio::time::sleep_until(due.into()).await;
            let epoch = Epoch(self.epoch.load(Ordering::Relaxed));
            number += 1;
            let (start, tier1_used_bytes, tier1_size_bytes) = (self.start, 0, 1);
            let beat = Beat { start, epoch, number, tier1_used_bytes, tier1_size_bytes, now_ns: 0 };
            let asked = Instant::now();
            if let Ok(beaten) = self.ask::<Beaten>(&ToCoordinator::Beat(beat)).await {
                self.interval_ms.store(beaten.echo.interval_ms, Ordering::Relaxed);
                counted.beats.fetch_add(1, Ordering::Relaxed);
                let took_us = u64::try_from(asked.elapsed().as_micros()).unwrap_or(u64::MAX);
                counted.beat_us.fetch_max(took_us, Ordering::Relaxed);
            } else {
                counted.failed.fetch_add(1, Ordering::Relaxed);
                // As a daemon would do; the next beat shows whether it helped.
                drop(self.join().await);
            }
            due = due.max(Instant::now() - Duration::from_millis(self.interval_ms.load(Ordering::Relaxed)));
        }
    }

    /// Makes a node's first publication: a directory of its own and a sealed file in it, which belongs to no checkpoint.
    fn publication(&self, number: usize) -> Publication {
        let directory = directory_of(number).into_bytes();
        let path = [directory.as_slice(), FILE].join(&b'/');
        let file = FileId { incarnation: self.life.incarnation, counter: FileCounter(1) };
        let attributes = |mode| NodeAttributes { mode, ..NodeAttributes::default() };
        let facts = FileFacts {
            file,
            size_bytes: 1 << 20,
            state: WireState::Sealed { crc: Crc64(1), chunks: vec![Crc64(1)].into() },
            seal: SealNumber(1),
            opened_ns: 1,
            closed_ns: 1,
            published_ns: 1,
            vouched: false,
            generation: Generation(1),
            writers: Vec::new(),
            host: true,
            object: None,
        };
        Publication {
            number: 1,
            operations: vec![
                NameOperation::Directory { path: directory, attributes: attributes(0o40755) },
                NameOperation::File { path: path.clone(), file, attributes: attributes(0o100_644) },
            ],
            states: vec![NodeState {
                path,
                attributes: attributes(0o100_644),
                attributes_ns: 0,
                other_names: None,
                kind: NodeKind::File(Box::new(facts)),
            }],
            ..Publication::default()
        }
    }
}

impl Drop for Simulated {
    fn drop(&mut self) {
        self.beating.iter().for_each(JoinHandle::abort);
    }
}
