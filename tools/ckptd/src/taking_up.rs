//! Tier-3 recovered by a daemon that goes on with its predecessor's memory: it serves, and tries until it succeeds.
//!
//! Owns: the tries, and the effects of each on the loop, on cold files and on other nodes. Does not own: a try itself (`tier3`), reading
//! Tier-3 (the engine), the order of a start (`up`).
//!
//! A readable Tier-3 is read meanwhile: if it takes no writes, since it is full or read-only, or if the right to commit takes long. The
//! store lets no write through before that right is certain.

use crate::alone::Sign;
use crate::api::Daemon;
use crate::host::DaemonHost;
use crate::tier3::{Opener, Right, waited_for};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tidemark_engine::node::{Names, Node, Recovered, Shared, look, recover};
use tidemark_protocol::id::Epoch;
use tidemark_store::LaterStore;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, JoinHandle};

/// Interval between two tries.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// Interval at which the log repeats the reason: it names the object tried last, which is another one each time.
const SAID_EVERY: Duration = Duration::from_secs(10);

/// How long a start waits for Tier-3 before it answers commands without. Nearly always Tier-3 is there at once, and then nothing has to be
/// concluded twice.
const FIRST_PATIENCE: Duration = Duration::from_secs(3);

/// Why nothing is written before the first try has ended.
pub(crate) const BEGUN: &str = "it is being read, and the right to commit there is not certain yet";

/// How long a Tier-3 may neither give the right nor be read until it is reported as away, although nothing has failed. A healthy Tier-3 is
/// faster: another's lease is waited for 30 s, its signs of life for 25 s. By then opens of cold files fail, too.
const SILENT_AFTER: Duration = Duration::from_secs(60);
const UNANSWERED: &str = "it has not answered since this daemon began";

/// Reports that the loop has not read yet: three at most follow each other at once.
const UNHEARD_MAX: usize = 4;

/// A report of the tries.
#[derive(Debug)]
enum Told {
    /// Tier-3 may not be written to, and why.
    Away(String),
    /// The committed versions of a Tier-3 that can be read.
    Committed(Box<Recovered>),
    Taken(Box<Taken>),
}

/// The right to commit, and the state to decide on.
#[derive(Debug)]
pub(crate) struct Taken {
    pub(crate) right: Right,
    pub(crate) recovered: Recovered,
}

/// Whether this node may commit to Tier-3 when it begins to serve.
#[derive(Debug)]
pub(crate) enum Claim {
    /// The node has the right, or another node decides.
    Has(Box<Right>),
    Later(TakingUp),
}

/// See the module's head. Dropped, it tries no more.
#[derive(Debug)]
pub(crate) struct TakingUp {
    told: mpsc::Receiver<Told>,
    /// Why Tier-3 may not be written to. None: no try has failed.
    why: Option<String>,
    /// The committed versions were reported.
    is_read: bool,
    tries: JoinHandle<()>,
    /// The sign of life that the tries have taken, if any.
    sign: Sign,
}

/// The task that tries.
struct Tries {
    store: Arc<LaterStore>,
    opener: Opener,
    shared: Arc<Shared>,
    tell: mpsc::Sender<Told>,
    /// When the log last said why a try failed.
    said: Option<Instant>,
    /// The committed versions were reported.
    is_read: AtomicBool,
}

impl TakingUp {
    /// `store` holds writes back, and is the one that `shared` has.
    pub(crate) fn begin(store: Arc<LaterStore>, opener: Opener, shared: Arc<Shared>) -> Self {
        let (tell, told) = mpsc::channel(UNHEARD_MAX);
        let sign = opener.sign.clone();
        let tries = Tries { store, opener, shared, tell, said: None, is_read: AtomicBool::new(false) };
        Self { told, why: None, is_read: false, tries: tokio::spawn(tries.run()), sign }
    }

    /// Waits for the first try, for [`FIRST_PATIENCE`] at most.
    ///
    /// # Errors
    /// It has not succeeded: what the loop begins with until [`Self::follow`] says more.
    pub(crate) async fn first(&mut self) -> Result<Box<Taken>, Box<Recovered>> {
        let give_up = tokio::time::Instant::now() + FIRST_PATIENCE;
        while let Ok(Some(told)) = tokio::time::timeout_at(give_up, self.told.recv()).await {
            match told {
                Told::Taken(taken) => return Ok(taken),
                Told::Committed(recovered) => {
                    self.is_read = true;
                    return Err(recovered);
                }
                // A report of the committed versions may follow, because Tier-3 may still be readable.
                Told::Away(why) => self.why = Some(why),
            }
        }
        Err(Box::new(Recovered::names_only()))
    }

    /// Says in the status of a node why it does not have the right, where a try has failed.
    pub(crate) async fn say_why(&self, node: &Node) {
        if let Some(why) = &self.why {
            node.tier3_is_not_taken_up(why.clone()).await;
        }
    }

    /// Has the node decide as soon as it has the right, which is held until `ending`. `begin`: what waits for the right besides.
    pub(crate) async fn follow(
        mut self,
        daemon: Arc<Daemon>,
        host: Arc<DaemonHost>,
        begin: impl FnOnce(Epoch),
        mut ending: oneshot::Receiver<()>,
    ) {
        if self.is_read {
            host.begin(Arc::clone(daemon.node.shared()));
        }
        let Taken { right, recovered } = tokio::select! {
            taken = self.until_taken(&daemon.node, &host) => taken,
            // An error means that the sender is gone, which is the end, too.
            _ = &mut ending => {
                // The right may have been taken while Tier-3 is still being read. From here on they take nothing more.
                self.tries.abort();
                let _ = (&mut self.tries).await;
                return self.sign.give_back().await;
            }
        };
        begin(right.epoch);
        daemon.node.decide_from_now_on(recovered).await;
        tracing::info!("Tier-3 is taken up: what waits for it goes there");
        right.keep(daemon, ending).await;
    }

    async fn until_taken(&mut self, node: &Node, host: &DaemonHost) -> Taken {
        while let Some(told) = self.told.recv().await {
            match told {
                Told::Away(why) => node.tier3_is_not_taken_up(why).await,
                Told::Committed(recovered) => {
                    node.decide_from_now_on(*recovered).await;
                    host.begin(Arc::clone(node.shared()));
                }
                Told::Taken(taken) => return *taken,
            }
        }
        // The tries end without success only if they panic. This task must then end with the same panic, because no other task would
        // commit.
        match (&mut self.tries).await.map_err(JoinError::try_into_panic) {
            Err(Ok(panic)) => std::panic::resume_unwind(panic),
            // The runtime ends, and this task with it.
            Ok(()) | Err(Err(_)) => std::future::pending().await,
        }
    }
}

impl Drop for TakingUp {
    fn drop(&mut self) {
        self.tries.abort();
    }
}

impl Tries {
    async fn run(mut self) {
        let url = self.opener.settings.tier3.url.clone();
        let right = loop {
            match waited_for(&url, self.beside_a_look(self.take())).await {
                Ok(right) => break right,
                Err(why) => self.is_away(why).await,
            }
        };
        let recovered = loop {
            match waited_for(&url, recover(&self.shared, Names::Kept)).await {
                Ok(recovered) => break recovered,
                Err(error) => self.is_away(format!("{:#}", anyhow::Error::from(error))).await,
            }
        };
        // A start that ends meanwhile needs neither.
        let _ = self.tell.send(Told::Taken(Box::new(Taken { right, recovered }))).await;
    }

    /// Waits for `take`. After the patience of a start, reads and reports the committed versions meanwhile, once.
    async fn beside_a_look<T>(&self, take: impl Future<Output = T>) -> T {
        let mut take = std::pin::pin!(take);
        if let Ok(done) = tokio::time::timeout(FIRST_PATIENCE, take.as_mut()).await {
            return done;
        }
        if !self.is_read.load(Ordering::Acquire) {
            let mut looks = std::pin::pin!(self.look());
            let mut is_told = false;
            loop {
                tokio::select! {
                    biased;
                    done = take.as_mut() => return done,
                    () = looks.as_mut() => break,
                    () = tokio::time::sleep(SILENT_AFTER), if !is_told => is_told = true,
                }
                self.tell_away(UNANSWERED.to_owned()).await;
            }
        }
        take.await
    }

    /// From here on writes are of the epoch that was raised.
    async fn take(&self) -> Result<Right, String> {
        let store = self.store.opened().await.map_err(|error| format!("{:#}", anyhow::Error::from(error)))?;
        let (probe, right) = self.opener.take(store).await.map_err(|failure| failure.to_string())?;
        self.shared.drain.learn(&probe);
        self.shared.drain.set_epoch(right.epoch, true);
        self.store.let_writes_through();
        Ok(right)
    }

    /// Tells why a try failed and, once, what can be read all the same; then pauses.
    async fn is_away(&mut self, why: String) {
        if self.said.is_none_or(|at| at.elapsed() >= SAID_EVERY) {
            tracing::warn!(%why, "memory is served, and Tier-3 is tried again");
            self.said = Some(Instant::now());
        }
        self.tell_away(why).await;
        if !self.is_read.load(Ordering::Acquire) {
            self.look().await;
        }
        tokio::time::sleep(TRY_AGAIN).await;
    }

    async fn tell_away(&self, why: String) {
        self.store.say_why(&why);
        // The receiver is gone if the start ends, and these tries with it.
        let _ = self.tell.send(Told::Away(why)).await;
    }

    /// Reads what is committed, and tells it where it can be read.
    async fn look(&self) {
        match look(&self.shared).await {
            Ok(recovered) => {
                tracing::info!("Tier-3 can be read: what is committed there is served");
                let _ = self.tell.send(Told::Committed(Box::new(recovered))).await;
                self.is_read.store(true, Ordering::Release);
            }
            Err(error) => {
                tracing::debug!(error = &error as &dyn std::error::Error, "it cannot be read");
            }
        }
    }
}
