//! `ckptd up`: the sequence from nothing, or from what a dead daemon left, to a mount that serves, and back.
//!
//! Owns: the order of starting and ending, and what each failure means for the exit code. Does not own: any of the
//! parts.
//!
//! A first start looks at Tier-3 first: when it is away nothing has been mounted and no memory has been touched. A start
//! over a live mount serves first: programs wait for it, and what they wait for is in memory.

use crate::alone::Sign;
use crate::api::Daemon;
use crate::attributes::Attributes;
use crate::base::{Base, OwnMemory};
use crate::cli::{Failure, Up, node_name, parse_addr};
use crate::descriptors;
use crate::drain::drain;
use crate::ends::{as_usual, before_others, cores, ended, keeper_gone, keeper_pid, unmount};
use crate::engine;
use crate::host::DaemonHost;
use crate::keeping::Keeping;
use crate::last_end::LastEnd;
use crate::let_in::let_in;
use crate::memory;
use crate::peers::{Peers, Role, check_certificates, open_etcd};
use crate::publish::{publish, publish_on};
use crate::seat;
use crate::session::{self, Found, Serving};
use crate::state_dir::StateDir;
use crate::taking_up::{BEGUN, Claim, Taken, TakingUp};
use crate::tier3::{Opener, Tier3, waited_for};
use anyhow::Context;
use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tidemark_api::NodeApi;
use tidemark_control::lease::EtcdAccess;
use tidemark_engine::node::{Names, Node, Recovered, Shared, recover};
use tidemark_engine::settings::{MountMode, Settings};
use tidemark_engine::step_point::{StepPoint, reach};
use tidemark_fuse::{Host, KeptMount, ModeChoice, MountSettings, Mounted, SessionSettings};
use tidemark_keeper::{Answered, Inherited, Keeper, names};
use tidemark_namespace::Caller;
use tidemark_protocol::id::{NodeName, StartId};
use tidemark_protocol::key::NodeLife;
use tidemark_store::LaterStore;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How often this process looks after what others may take away from it, and gives its keeper a life sign.
const WATCH_EVERY: Duration = Duration::from_secs(1);

/// Inputs of a start.
#[derive(Debug)]
struct Start<'a> {
    version: &'static str,
    mountpoint: &'a Path,
    settings: &'a Settings,
    keeper: &'a Keeper,
    state_dir: &'a StateDir,
    name: NodeName,
    http: SocketAddr,
    listen: SocketAddr,
    id: StartId,
    role: Role,
    etcd: Option<EtcdAccess>,
    take_over: bool,
    memory: OwnMemory,
    sign: Sign,
}

/// How a start came to serve.
#[derive(Debug, Clone, Copy)]
struct Began {
    /// Whether no daemon has served this mount before.
    first: bool,
    /// Whether the daemon was told to end before it served.
    told_to_end: bool,
}

/// The signals that end this process in order.
#[derive(Debug)]
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

/// Parts of a serving daemon.
#[derive(Debug)]
struct Serves {
    base: Base,
    claim: Claim,
    host: Arc<DaemonHost>,
    shared: Arc<Shared>,
    node: Node,
    /// None: this node is alone.
    peers: Option<Peers>,
    /// None: still to be mounted.
    mounted: Option<Arc<Mounted>>,
}

impl Signals {
    fn watch() -> std::io::Result<Self> {
        // Signals that others send by habit: a closed terminal, a rotation of logs, a reload. Their default would end this
        // process.
        for kind in [SignalKind::hangup(), SignalKind::user_defined1(), SignalKind::user_defined2()] {
            let mut signals = signal(kind)?;
            tokio::spawn(async move {
                while signals.recv().await.is_some() {
                    let signal = kind.as_raw_value();
                    tracing::info!(signal, "nothing follows from this signal; SIGTERM ends ckptd in order");
                }
            });
        }
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Resolves when one has come, or the keeper is gone.
    async fn told_to_end(&mut self, gone: &mut tokio::sync::oneshot::Receiver<()>) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            Ok(()) = gone => {}
        }
    }
}

/// Brings the node up, serves, and takes it down again. `Ok(false)`: ended, but not everything is durable.
pub(crate) async fn up(
    version: &'static str,
    up: &Up,
    settings: Settings,
    inherited: Inherited,
) -> Result<bool, Failure> {
    // First: once the keeper knows that this process serves, it may end this process in order.
    let mut signals = Signals::watch().map_err(Failure::failed)?;
    let Inherited { keeper, mut descriptors } = inherited;
    let lock = descriptors.remove(names::LOCK);
    let state_dir = StateDir::take(&settings.node.state_dir, lock).map_err(Failure::failed)?;
    let role = Role::of(&settings).map_err(Failure::usage)?;
    let start = Start {
        version,
        mountpoint: &up.mountpoint,
        settings: &settings,
        keeper: &keeper,
        state_dir: &state_dir,
        name: node_name(&settings).map_err(Failure::usage)?,
        http: parse_addr("--http", &settings.node.http).map_err(Failure::usage)?,
        listen: parse_addr("--listen", &settings.node.listen).map_err(Failure::usage)?,
        id: StartId(getrandom::u64().context("the kernel has random numbers").map_err(Failure::failed)?),
        etcd: open_etcd(&settings, &role).map_err(Failure::usage)?,
        role,
        take_over: up.take_over,
        memory: OwnMemory::default(),
        sign: Sign::default(),
    };
    check_certificates(&settings, &start.role, start.name.as_str()).map_err(Failure::usage)?;
    descriptors::raise_limit().map_err(Failure::failed)?;
    let mut gone = keeper_gone(&keeper).map_err(Failure::failed)?;
    match session::find(&keeper, descriptors).map_err(Failure::failed)? {
        None => {
            let serves = tokio::select! {
                serves = start.begin() => serves?,
                () = signals.told_to_end(&mut gone) => {
                    tracing::warn!("told to end before it served: nothing was mounted");
                    start.say_the_end();
                    start.sign.give_back().await;
                    return Ok(true);
                }
            };
            start.serve(serves, Began { first: true, told_to_end: false }, signals, gone).await
        }
        Some(found) => {
            let (http, listen) = (found.record.http.parse(), found.record.listen.parse());
            let start =
                Start { http: http.unwrap_or(start.http), listen: listen.unwrap_or(start.listen), ..start };
            let patience = Duration::from_secs(settings.shutdown.drain_timeout_s);
            let told = AtomicBool::new(false);
            let told_to_end = async {
                signals.told_to_end(&mut gone).await;
                told.store(true, Ordering::Release);
                tokio::time::sleep(patience).await;
            };
            let serves = tokio::select! {
                serves = start.go_on(found) => Some(serves?),
                () = told_to_end => None,
            };
            let Some(serves) = serves else {
                // The mount went with what was waited for.
                tracing::error!(
                    waited_s = patience.as_secs(),
                    "told to end, and Tier-3 did not answer: what was not there is lost"
                );
                start.say_the_end();
                start.sign.give_back().await;
                return Ok(false);
            };
            let told = told.load(Ordering::Acquire);
            let taken = serves.mounted.clone();
            let began = Began { first: false, told_to_end: told };
            let served = start.serve(serves, began, signals, gone).await;
            // Whatever this daemon fails at, the mount stays for the next one.
            served.map_err(|failure| match &taken {
                Some(taken) => start.leave(taken, failure),
                None => failure,
            })
        }
    }
}

impl Start<'_> {
    /// From nothing: Tier-3, then memory; the mount comes when the tree is known.
    async fn begin(&self) -> Result<Serves, Failure> {
        let setting = self.settings.tier1.size.as_deref();
        let tier1_bytes = memory::tier1_bytes(setting).map_err(Failure::usage)?;
        let tier3 = self.tier3().await?;
        seat::look(self.etcd.as_ref()).await?;
        let base = Base::fresh(self.settings, self.name.as_str(), tier1_bytes, &self.memory)?;
        let host = self.host(&base);
        let peers = self.peers(&base).await?;
        let shared = self.shared(&base, &tier3, peers.as_ref())?;
        let recovered = match self.role {
            // The coordinator knows what Tier-3 holds.
            Role::Member(_) | Role::Candidate(_) => Recovered::default(),
            Role::Alone | Role::Coordinator => {
                let recovered = waited_for(&self.settings.tier3.url, recover(&shared, Names::Empty)).await;
                recovered.context("Tier-3 cannot be taken up").map_err(Failure::unavailable)?
            }
        };
        let node = engine::start(&shared, recovered);
        let claim = Claim::Has(Box::new(tier3.right));
        Ok(Serves { base, claim, host, shared, node, peers, mounted: None })
    }

    async fn tier3(&self) -> Result<Tier3, Failure> {
        match self.role {
            Role::Alone | Role::Coordinator => Tier3::open(&self.opener(self.take_over)).await,
            // The coordinator examines it for all.
            Role::Member(_) | Role::Candidate(_) => Tier3::of_member(self.settings).await,
        }
    }

    fn opener(&self, take_over: bool) -> Opener {
        Opener {
            settings: self.settings.clone(),
            state_dir: self.state_dir.clone(),
            name: self.name.to_string(),
            keeper: keeper_pid(self.keeper),
            take_over,
            sign: self.sign.clone(),
        }
    }

    async fn peers(&self, base: &Base) -> Result<Option<Peers>, Failure> {
        let life = NodeLife { node: self.name.clone(), incarnation: base.incarnation };
        let namespace = Arc::clone(&base.namespace);
        Peers::open(self.settings, self.role.clone(), (life, self.id), self.listen, namespace).await
    }

    /// From what a daemon left that died: memory, names and open files, then the mount, and Tier-3 when it answers.
    async fn go_on(&self, found: Found) -> Result<Serves, Failure> {
        let hurries = before_others();
        let goes_on = found.session_goes_on();
        let Found { record, mounts, mount, answered } = found;
        let started = Instant::now();
        self.keeper.taking().map_err(Failure::failed)?;
        let base = Base::take_over(self.settings, &record, mounts, goes_on, &self.memory)?;
        let took_ms = started.elapsed().as_millis();
        tracing::info!(took_ms, "took over memory and names");
        take_up_answers(&base, &answered);
        self.keeper.remove(names::ANSWERED).map_err(Failure::failed)?;
        reach(StepPoint::ResumeBeforeServing);
        let host = self.host(&base);
        let peers = self.peers(&base).await?;
        if let Some(peers) = &peers {
            host.join(Arc::clone(&peers.cluster));
        }
        let mounted = match mount {
            Some(mount) if goes_on => {
                let mounted = self.take_over(mount, &base, &host).await?;
                self.keeper.ready().map_err(Failure::failed)?;
                Some(Arc::new(mounted))
            }
            Some(mount) => {
                tracing::warn!(
                    "this kernel cannot send requests again (Linux 6.9 can): the mount is made anew, and files that were open are cut"
                );
                // The record goes first, so that no daemon tries to go on with the mount: this process may die between two
                // steps.
                session::let_mount_go(self.keeper, record).map_err(Failure::failed)?;
                if let Err(error) = tidemark_fuse::give_up(mount) {
                    // The mount is gone already, or it is in the way of the next, which will say so.
                    tracing::warn!(
                        error = &error as &dyn std::error::Error,
                        "the mount of the daemon before"
                    );
                }
                None
            }
            // A daemon before this one gave it up, and died before there was another.
            None => None,
        };
        if hurries {
            as_usual();
        }
        reach(StepPoint::ResumeAfterServing);
        let (shared, recovered, claim) = match self.role {
            Role::Alone | Role::Coordinator => {
                let store = LaterStore::held(&self.settings.tier3.url, BEGUN);
                let tier3 = Tier3::unknown(Arc::clone(&store) as Arc<_>);
                let shared = self.shared(&base, &tier3, peers.as_ref())?;
                // The Tier-3 taken over at the first start is this daemon's own, or another's by now.
                let mut taking_up = TakingUp::begin(store, self.opener(false), Arc::clone(&shared));
                match taking_up.first().await {
                    Ok(taken) => {
                        let Taken { right, recovered } = *taken;
                        (shared, recovered, Claim::Has(Box::new(right)))
                    }
                    Err(known) => (shared, *known, Claim::Later(taking_up)),
                }
            }
            Role::Member(_) | Role::Candidate(_) => {
                let tier3 = Tier3::of_member(self.settings).await?;
                let shared = self.shared(&base, &tier3, peers.as_ref())?;
                (shared, Recovered::default(), Claim::Has(Box::new(tier3.right)))
            }
        };
        let node = engine::start(&shared, recovered);
        Ok(Serves { base, claim, host, shared, node, peers, mounted })
    }

    async fn take_over(
        &self,
        mount: KeptMount,
        base: &Base,
        host: &Arc<DaemonHost>,
    ) -> Result<Mounted, Failure> {
        let settings = self.session_settings();
        let namespace = Arc::clone(&base.namespace);
        let host = Arc::clone(host) as Arc<dyn Host>;
        let taken = tokio::task::spawn_blocking(move || {
            let hurries = before_others();
            let taken = tidemark_fuse::take_over(mount, settings, namespace, host);
            if hurries {
                as_usual();
            }
            taken
        });
        let mounted = taken.await.expect("taking over does not panic");
        mounted.context("the mount cannot be taken over").map_err(Failure::failed)
    }

    fn session_settings(&self) -> SessionSettings {
        let settings = &self.settings.mount;
        SessionSettings {
            threads: usize::try_from(settings.threads).expect("at most 64"),
            keep_awake: settings.keep_awake,
        }
    }

    fn host(&self, base: &Base) -> Arc<DaemonHost> {
        let runtime = tokio::runtime::Handle::current();
        Arc::new(DaemonHost::new(Arc::clone(&base.namespace), cores(), runtime))
    }

    fn shared(&self, base: &Base, tier3: &Tier3, peers: Option<&Peers>) -> Result<Arc<Shared>, Failure> {
        let life = NodeLife { node: self.name.clone(), incarnation: base.incarnation };
        engine::shared(self.settings, life, base, tier3, peers).map_err(Failure::usage)
    }

    async fn serve(
        &self,
        serves: Serves,
        began: Began,
        mut signals: Signals,
        mut gone: tokio::sync::oneshot::Receiver<()>,
    ) -> Result<bool, Failure> {
        let Serves { base, claim, host, shared, node, peers, mounted } = serves;
        let peers = peers.map(Arc::new);
        let server = crate::api::bind(&self.state_dir.socket(), self.http, began.first).await?;
        // A node that is alone keeps its address, too, so that no other process is taken for it.
        let (listener, listen) = match &peers {
            Some(peers) => (None, peers.local_address()),
            None => match tokio::net::TcpListener::bind(self.listen).await {
                Ok(listener) => {
                    let listen = listener.local_addr().map_err(Failure::failed)?;
                    (Some(listener), listen)
                }
                // No node speaks to a node that is alone: no memory is lost for that.
                Err(error) if !began.first => {
                    tracing::warn!(listen = %self.listen, %error, "somebody took the address while no daemon served");
                    (None, self.listen)
                }
                Err(error) => {
                    let what = format!("--listen {} cannot be bound; choose another address", self.listen);
                    return Err(Failure::failed(anyhow::Error::new(error).context(what)));
                }
            },
        };
        let start = self.id;
        let daemon = Arc::new(Daemon {
            version: self.version,
            node,
            name: self.name.to_string(),
            incarnation: base.incarnation,
            start,
            keeper_pid: keeper_pid(self.keeper),
            listen: listen.to_string(),
            http: server.http_addr().to_string(),
            wanted_mountpoint: mounted.as_deref().map_or(self.mountpoint, Mounted::path).to_owned(),
            mounted: OnceLock::new(),
            draining: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            last_end: if began.first {
                LastEnd::of(self.state_dir.last_status())
            } else {
                LastEnd::default()
            },
            told: Default::default(),
            troubles: Default::default(),
            published: Default::default(),
            counted: Default::default(),
            runs_elsewhere: Default::default(),
            began: Instant::now(),
        });
        daemon.last_end.tell(&shared);
        let attributes = Attributes::new(&daemon, tokio::runtime::Handle::current());
        base.namespace.xattrs().set_xattr_source(Arc::new(attributes));
        if let Some(peers) = &peers {
            peers.serve(&shared, &daemon);
        }
        let begin = {
            let (host, shared, peers) = (Arc::clone(&host), Arc::clone(&shared), peers.clone());
            let (version, state_dir) = (self.version, self.state_dir.clone());
            move |epoch| {
                host.begin(Arc::clone(&shared));
                if let Some(peers) = &peers {
                    peers.begin(&shared, epoch, version, &state_dir);
                }
            }
        };
        match &claim {
            Claim::Has(right) => begin(right.epoch),
            Claim::Later(taking_up) => taking_up.say_why(&daemon.node).await,
        }
        if let Some(peers) = peers.as_ref().filter(|_| mounted.is_none()) {
            host.join(Arc::clone(&peers.cluster));
        }
        publish(&daemon, &host, self.state_dir).await;
        let (end_server, server_ends) = tokio::sync::oneshot::channel::<()>();
        let api: Arc<dyn NodeApi> = Arc::clone(&daemon) as Arc<dyn NodeApi>;
        let serving = tokio::spawn(server.run(api, async move {
            // An error means that the sender is gone, which ends the server too.
            let _ = server_ends.await;
        }));
        let (end_lease, lease_ends) = tokio::sync::oneshot::channel::<()>();
        let candidate = peers.as_ref().and_then(|peers| peers.candidate(&daemon, self.etcd.clone()));
        let mut keeping = match (candidate, claim) {
            (Some(candidate), _) => Keeping::of(candidate.run()),
            (None, Claim::Has(right)) => Keeping::of(right.keep(Arc::clone(&daemon), lease_ends)),
            (None, Claim::Later(taking_up)) => {
                Keeping::of(taking_up.follow(Arc::clone(&daemon), Arc::clone(&host), begin, lease_ends))
            }
        };
        if let Some(peers) = peers.as_ref().filter(|_| began.first) {
            tokio::select! {
                let_in = let_in(&peers.cluster) => let_in?,
                () = signals.told_to_end(&mut gone) => {
                    tracing::warn!("told to end before a coordinator let this node in: nothing was mounted");
                    self.say_the_end();
                    self.sign.give_back().await;
                    return Ok(true);
                }
            }
        }
        let mounted = match mounted {
            Some(mounted) => mounted,
            None => {
                let mounted = Arc::new(self.mount(&base, &host).await?);
                self.hand_over(&daemon, &base, &mounted)?;
                mounted
            }
        };
        let invalidator = mounted.invalidator().clone();
        let told = Box::new(move |parent, name: &[u8], gone: Option<u64>| match gone {
            Some(node) => invalidator.gone(parent, node, name),
            None => invalidator.entry(parent, name),
        });
        shared.namespace.hidden().tell_withdrawn(told);
        daemon.mounted.set(Arc::clone(&mounted)).expect("it is set once, here");

        let publishing =
            tokio::spawn(publish_on(Arc::clone(&daemon), Arc::clone(&host), self.state_dir.clone()));

        // The first of its life signs: from now on silence means something.
        self.keeper.turned();
        if let Err(error) = self.keeper.ready() {
            // A keeper that is gone ends this daemon in order, below.
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "nobody hears that this process serves"
            );
        }
        // After the keeper: a reader of the ready line may count on a successor.
        if began.first {
            say_ready(&daemon, &mounted, &self.settings.node.state_dir)?;
        }
        self.state_dir.clear_keeper_status();
        let mut watching = std::pin::pin!(self.watch(&daemon, &mounted));
        tokio::select! {
            () = std::future::ready(()), if began.told_to_end => {}
            _ = signals.terminate.recv() => {}
            _ = signals.interrupt.recv() => {}
            Ok(()) = &mut gone, if !began.told_to_end => tracing::error!("the keeper is gone, and nobody would start this daemon again: it drains and ends"),
            () = ended(&mounted) => {
                daemon.troubles.mount_is_gone();
                tracing::warn!("the mount was taken away from outside: what was saved is drained, then this daemon ends");
            }
            failure = keeping.failed() => return Err(self.leave(&mounted, failure)),
            never = &mut watching => match never {},
        }

        daemon.draining.store(true, Ordering::Release);
        let durable = tokio::select! {
            durable = drain(&daemon, self.settings) => durable,
            _ = signals.terminate.recv() => {
                tracing::warn!("a second SIGTERM: ending at once");
                false
            }
            failure = keeping.failed() => return Err(self.leave(&mounted, failure)),
            never = &mut watching => match never {},
        };
        // However the drain ended: what is closed from now on would be lost, and no program is to believe otherwise.
        shared.namespace.gate().refuse_writers();
        // The last known status says what is durable at the end.
        daemon.stopped.store(durable, Ordering::Release);
        publish(&daemon, &host, self.state_dir).await;
        unmount(&mounted).await;
        // Only now: a daemon that dies while it drains is to be followed by one that drains on.
        self.say_the_end();
        daemon.node.stop();
        // The receiver is gone if the lease was lost, or belongs to a candidate, which ends by itself.
        let _ = end_lease.send(());
        keeping.end().await;
        publishing.abort();
        // The receiver is gone only when the server has ended by itself.
        let _ = end_server.send(());
        if let Err(error) = serving.await {
            tracing::error!(%error, "serving commands panicked");
        }
        drop(listener);
        Ok(durable)
    }

    /// Looks after what may be taken away from under a daemon, and says that its loop turns; also while it drains.
    async fn watch(&self, daemon: &Daemon, mounted: &Arc<Mounted>) -> std::convert::Infallible {
        let (mut answered, mut missed) = (0, false);
        loop {
            tokio::time::sleep(WATCH_EVERY).await;
            // Progress of either is enough: a loop that examines very many files for long holds no program up.
            let turned = tokio::time::timeout(WATCH_EVERY, daemon.node.turns()).await.is_ok();
            let requests = mounted.counters().iter().map(|(_, count)| count).sum::<u64>();
            if turned || requests != answered {
                self.keeper.turned();
            }
            answered = requests;
            let (state_dir, looked_at) = (self.state_dir.clone(), Arc::clone(mounted));
            let looks = tokio::task::spawn_blocking(move || (looked_at.is_there(), state_dir.is_there()));
            let (mount_there, state_dir_there) = looks.await.expect("looking does not panic");
            // The table of mounts changes while it is read, and one look may miss ours.
            let missed_before = std::mem::replace(&mut missed, !mount_there);
            if missed && missed_before && daemon.troubles.mount_is_gone() {
                let path = mounted.path().display();
                tracing::error!(%path, "the mount is not at its place any more; what is open below it goes on");
            }
            if !state_dir_there {
                self.make_state_dir_again(daemon);
            }
        }
    }

    /// The state directory was removed: without it no command reaches this daemon, and no other is kept off.
    fn make_state_dir_again(&self, daemon: &Daemon) {
        let made = self.state_dir.make_again().and_then(|()| {
            if self.keeper.is_ours() {
                self.keeper.put(names::LOCK, self.state_dir.lock()?.as_fd())?;
            }
            Ok(())
        });
        let path = self.settings.node.state_dir.display();
        match made {
            Ok(()) => {
                daemon.troubles.state_dir_is_back();
                tracing::warn!(%path, "the state directory was removed; it is made again, and commands are answered there");
            }
            Err(error) => {
                let why = format!("{error:#}");
                if daemon.troubles.state_dir_is_gone(&why) {
                    tracing::error!(%path, %why, "the state directory was removed, and is not made again");
                }
            }
        }
    }

    /// Nothing is to be kept any more.
    fn say_the_end(&self) {
        self.memory.let_go();
        if let Err(error) = self
            .keeper
            .stopping()
            .map_err(anyhow::Error::from)
            .and_then(|()| session::let_all_go(self.keeper))
        {
            tracing::warn!(%error, "the keeper does not hear that this is the end");
        }
    }

    /// Ends this process while the next daemon goes on with the mount, which is taken away with the last reference to it.
    fn leave(&self, mounted: &Arc<Mounted>, failure: Failure) -> Failure {
        if !matches!(self.keeper, Keeper::Nobody) {
            std::mem::forget(Arc::clone(mounted));
        }
        failure
    }

    async fn mount(&self, base: &Base, host: &Arc<DaemonHost>) -> Result<Mounted, Failure> {
        let wanted = MountSettings {
            mountpoint: self.mountpoint.to_owned(),
            mode: match self.settings.mount.mode {
                MountMode::Auto => ModeChoice::Auto,
                MountMode::Passthrough => ModeChoice::Passthrough,
                MountMode::Fallback => ModeChoice::Fallback,
            },
            session: self.session_settings(),
        };
        let (tier1, namespace) = (Arc::clone(&base.tier1), Arc::clone(&base.namespace));
        let host = Arc::clone(host) as Arc<dyn Host>;
        tokio::task::spawn_blocking(move || tidemark_fuse::mount(&wanted, &tier1, namespace, host))
            .await
            .expect("mounting does not panic")
            .with_context(|| format!("{} cannot be mounted", self.mountpoint.display()))
            .map_err(Failure::failed)
    }

    /// From now on the mount and all that it serves outlive this process.
    fn hand_over(&self, daemon: &Daemon, base: &Base, mounted: &Mounted) -> Result<(), Failure> {
        let mounts = base.tier1.kept_mounts().context("descriptors to keep").map_err(Failure::failed)?;
        let serving = Serving {
            node: &daemon.name,
            incarnation: base.incarnation,
            tier1_bytes: base.tier1_bytes,
            listen: &daemon.listen,
            http: &daemon.http,
            mounted,
            mounts: &mounts,
            memory: &self.memory,
        };
        session::hand_over(self.keeper, &serving)
            .context("the keeper cannot be given what it is to keep")
            .map_err(Failure::failed)
    }
}

/// Applies the keeper's answers to closes and fsyncs, which it gave in the daemon's place.
fn take_up_answers(base: &Base, answered: &[Answered]) {
    let nobody = Caller { uid: 0, gid: 0, pid: 0, now_ns: 0, request: 0 };
    for answer in answered {
        let taken = match *answer {
            Answered::Closed { fh } => base.namespace.handles().flush(fh, &nobody, false),
            Answered::Cut { fh } => base.namespace.handles().flush(fh, &nobody, true),
            Answered::Synced { fh } => base.namespace.handles().fsync(fh),
        };
        if let Err(error) = taken {
            // A directory's handle, or one of a control file: there is nothing to know of it.
            tracing::debug!(?answer, %error, "an answer of the keeper is of no open file");
        }
    }
}

/// The one line on stdout.
#[expect(clippy::print_stdout, reason = "the contract: one flushed line on stdout when the mount serves")]
fn say_ready(daemon: &Daemon, mounted: &Mounted, state_dir: &Path) -> Result<(), Failure> {
    println!(
        "ready: mount={} mode={} node={} pid={} listen={} http={} state_dir={}",
        mounted.path().display(),
        mounted.mode(),
        daemon.name,
        std::process::id(),
        daemon.listen,
        daemon.http,
        state_dir.display(),
    );
    std::io::stdout().flush().context("stdout is closed").map_err(Failure::failed)
}
