//! `ckptd up`: the sequence from nothing to a mount that serves, and back.
//!
//! Owns: the order of starting and ending, and what each failure means for the exit code. Does not own: any of the
//! parts.

use crate::api::Daemon;
use crate::attributes::Attributes;
use crate::cli::Failure;
use crate::descriptors;
use crate::host::DaemonHost;
use crate::memory;
use crate::state_dir::StateDir;
use anyhow::Context;
use std::io::Write;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tidemark_control::api::NodeApi;
use tidemark_control::lease::{FileLease, LeaseTimes, StoreLease, Turn};
use tidemark_control::server::Server;
use tidemark_engine::metrics::{Metrics, raise_to};
use tidemark_engine::namespace::{Clock, Namespace, NamespaceSettings};
use tidemark_engine::node::{Node, NodeParts, Shared, recover};
use tidemark_engine::save::drain::Drain;
use tidemark_engine::settings::{MountMode, Settings};
use tidemark_engine::store::{self, Store, StoreError, UploadLimits, current_epoch, raise_epoch};
use tidemark_engine::tier1::{MediumChoice, Tier1, Tier1Settings};
use tidemark_fuse::{Host, ModeChoice, MountSettings, Mounted, Opcode};
use tidemark_protocol::id::{Epoch, Incarnation, NodeName, StartId};
use tidemark_protocol::key::NodeLife;
use tidemark_protocol::recognise::Rules;
use tokio::signal::unix::{SignalKind, signal};

/// How often the control files and the last known status are written again.
const PUBLISH_EVERY: Duration = Duration::from_millis(200);

/// How long a new holder waits for the lease in Tier-3 before it says who has it.
const LEASE_PATIENCE: Duration = Duration::from_secs(30);

/// Brings the node up, serves, and takes it down again. `Ok(false)`: ended, but not everything is durable.
pub(crate) async fn up(mountpoint: &Path, settings: Settings) -> Result<bool, Failure> {
    let state_dir = StateDir::take(&settings.node.state_dir).map_err(Failure::failed)?;
    let name = node_name(&settings).map_err(Failure::usage)?;
    let tier1_bytes = memory::tier1_bytes(settings.tier1.size.as_deref()).map_err(Failure::usage)?;
    let http: SocketAddr = parse_addr("--http", &settings.node.http).map_err(Failure::usage)?;
    let listen: SocketAddr = parse_addr("--listen", &settings.node.listen).map_err(Failure::usage)?;
    descriptors::raise_limit();

    // Tier-3 first: when it is away nothing has been mounted and no memory has been touched.
    let store = store::open(&settings.tier3.url).await.map_err(|error| match error {
        StoreError::Url { .. } => Failure::usage(error),
        error => Failure::unavailable(anyhow::Error::from(error).context("Tier-3 cannot be used")),
    })?;
    let probe =
        store::probe(store.as_ref()).await.context("Tier-3 cannot be used").map_err(Failure::unavailable)?;
    let lease =
        Lease::take(&settings, &state_dir, &store, name.as_str()).await.map_err(Failure::unavailable)?;
    let epoch = lease.epoch();
    let highest = raise_epoch(store.as_ref(), epoch)
        .await
        .context("Tier-3 cannot be used")
        .map_err(Failure::unavailable)?;
    if highest > epoch {
        return Err(Failure::fenced(anyhow::anyhow!(
            "epoch {highest} is in Tier-3, and our lease gave {epoch}: another coordinator commits there"
        )));
    }

    let metrics = Arc::new(Metrics::new());
    let incarnation =
        Incarnation(getrandom::u64().context("the kernel has random numbers").map_err(Failure::failed)?);
    let life = NodeLife { node: name.clone(), incarnation };
    if !life.is_unambiguous() {
        return Err(Failure::usage(anyhow::anyhow!(
            "--name {name} reads as another node's in a key; choose another"
        )));
    }
    let limits = UploadLimits {
        part_bytes: settings.tier3.part_bytes,
        parts_in_flight: usize::try_from(settings.tier3.parts_in_flight).expect("at most 256"),
    };
    let drain = Arc::new(Drain::new(Arc::clone(&store), life, epoch, limits, &probe, Arc::clone(&metrics)));
    let medium = settings.tier1.directory.clone().map_or(MediumChoice::Auto, MediumChoice::Directory);
    let tier1 =
        Tier1::open(Tier1Settings { size_bytes: tier1_bytes, ballast: settings.tier1.ballast, medium })
            .context("Tier-1 cannot be made")
            .map_err(Failure::failed)?;
    let namespace = Namespace::new(NamespaceSettings::new(incarnation), Arc::clone(&tier1))
        .context("the namespace cannot be made")
        .map_err(Failure::failed)?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    let shared = Arc::new(Shared {
        fetches_in_flight: usize::try_from(settings.tier3.fetches_in_flight).expect("at most 256"),
        settings: settings.clone(),
        namespace: Arc::clone(&namespace),
        tier1: Arc::clone(&tier1),
        drain,
        metrics,
        events: tidemark_engine::node::Events::default(),
        clock: Clock::system(),
        sizes: Arc::default(),
        seal_threads: cores,
    });
    let recovered =
        recover(&shared).await.context("Tier-3 cannot be taken up").map_err(Failure::unavailable)?;
    let node =
        Node::start(NodeParts { shared: Arc::clone(&shared), rules: Rules::builtin().clone(), recovered });

    let server = Server::bind(&state_dir.socket(), http)
        .await
        .context("commands cannot be served")
        .map_err(Failure::failed)?;
    let peers = tokio::net::TcpListener::bind(listen)
        .await
        .with_context(|| format!("--listen {listen} cannot be bound; choose another address"))
        .map_err(Failure::failed)?;
    let daemon = Arc::new(Daemon {
        node,
        name: name.to_string(),
        incarnation,
        start: StartId(getrandom::u64().context("the kernel has random numbers").map_err(Failure::failed)?),
        epoch: epoch.0,
        listen: peers.local_addr().map_err(Failure::failed)?.to_string(),
        http: server.http_addr().to_string(),
        mountpoint: mountpoint.to_owned(),
        mounted: OnceLock::new(),
        draining: AtomicBool::new(false),
    });
    let attributes = Attributes::new(&daemon, tokio::runtime::Handle::current());
    namespace.set_xattr_source(Arc::new(attributes));
    let host = Arc::new(DaemonHost::new(Arc::clone(&shared), tokio::runtime::Handle::current()));
    publish(&daemon, &host, &state_dir).await;
    let mounted = mount(mountpoint, &settings, &tier1, &namespace, &host).await?;
    let mounted = Arc::new(mounted);
    daemon.mounted.set(Arc::clone(&mounted)).expect("it is set once, here");

    let (end_server, server_ends) = tokio::sync::oneshot::channel::<()>();
    let api: Arc<dyn NodeApi> = Arc::clone(&daemon) as Arc<dyn NodeApi>;
    let serving = tokio::spawn(server.run(api, async move {
        // An error means that the sender is gone, which ends the server too.
        let _ = server_ends.await;
    }));
    let keeping = tokio::spawn(lease.keep(Arc::clone(&daemon)));
    let publishing = tokio::spawn(publish_on(Arc::clone(&daemon), Arc::clone(&host), state_dir));

    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::failed)?;
    say_ready(&daemon, &mounted, &settings.node.state_dir)?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
        () = ended(&mounted) => tracing::warn!("the mount was taken away from outside"),
    }

    daemon.draining.store(true, Ordering::Release);
    let durable = tokio::select! {
        durable = drain_all(&daemon, &settings) => durable,
        _ = terminate.recv() => {
            tracing::warn!("a second SIGTERM: ending at once");
            false
        }
    };
    unmount(&mounted).await;
    daemon.node.stop();
    keeping.abort();
    publishing.abort();
    // The receiver is gone only when the server has ended by itself.
    let _ = end_server.send(());
    match serving.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::error!(error = &error as &dyn std::error::Error, "serving commands ended badly")
        }
        Err(error) => tracing::error!(%error, "serving commands panicked"),
    }
    Ok(durable)
}

fn node_name(settings: &Settings) -> anyhow::Result<NodeName> {
    let name = match &settings.node.name {
        Some(name) => name.clone(),
        None => rustix::system::uname().nodename().to_string_lossy().into_owned(),
    };
    name.parse::<NodeName>().map_err(|error| anyhow::anyhow!("--name: {error}"))
}

fn parse_addr(flag: &str, text: &str) -> anyhow::Result<SocketAddr> {
    text.parse().with_context(|| format!("{flag} {text:?} is not an address such as 127.0.0.1:7070"))
}

/// The coordinator's lease of this node.
enum Lease {
    File(FileLease),
    Store(Box<StoreLease>, Epoch),
}

impl Lease {
    async fn take(
        settings: &Settings,
        state_dir: &StateDir,
        store: &Arc<dyn Store>,
        name: &str,
    ) -> anyhow::Result<Self> {
        let in_tier3 = current_epoch(store.as_ref()).await.context("Tier-3 cannot be used")?;
        match settings.node.lease.as_deref() {
            None => Ok(Self::File(FileLease::acquire(&state_dir.lease(), in_tier3)?)),
            Some("tier3") => {
                let nonce = getrandom::u64().context("the kernel has random numbers")?;
                let mut lease =
                    StoreLease::new(Arc::clone(store), name.to_owned(), nonce, LeaseTimes::default());
                let give_up = Instant::now() + LEASE_PATIENCE;
                loop {
                    match lease.try_acquire(Instant::now()).await? {
                        Turn::Ours(epoch) => return Ok(Self::Store(Box::new(lease), epoch)),
                        Turn::Theirs { holder, epoch, wait } => {
                            anyhow::ensure!(
                                Instant::now() + wait < give_up,
                                "the lease in Tier-3 is held by {holder} (epoch {epoch}); stop it, or wait until it is gone"
                            );
                            tokio::time::sleep(wait).await;
                        }
                    }
                }
            }
            Some(other) => {
                let path = other.strip_prefix("file:").with_context(|| {
                    format!("--lease {other:?} is not supported; write file:PATH or tier3")
                })?;
                Ok(Self::File(FileLease::acquire(Path::new(path), in_tier3)?))
            }
        }
    }

    fn epoch(&self) -> Epoch {
        match self {
            Self::File(lease) => lease.epoch(),
            Self::Store(_, epoch) => *epoch,
        }
    }

    /// Holds the lease until dropped; a lease that is lost fences the node.
    async fn keep(self, daemon: Arc<Daemon>) {
        match self {
            Self::File(_lease) => std::future::pending().await,
            Self::Store(mut lease, _) => loop {
                tokio::time::sleep(LeaseTimes::default().term / 3).await;
                if let Err(error) = lease.renew(Instant::now()).await {
                    tracing::warn!(error = &error as &dyn std::error::Error, "the lease was not renewed");
                    if lease.epoch(Instant::now()).is_none() {
                        daemon.node.fence(error.to_string()).await;
                        return;
                    }
                }
            },
        }
    }
}

async fn mount(
    mountpoint: &Path,
    settings: &Settings,
    tier1: &Arc<Tier1>,
    namespace: &Arc<Namespace>,
    host: &Arc<DaemonHost>,
) -> Result<Mounted, Failure> {
    let wanted = MountSettings {
        mountpoint: mountpoint.to_owned(),
        mode: match settings.mount.mode {
            MountMode::Auto => ModeChoice::Auto,
            MountMode::Passthrough => ModeChoice::Passthrough,
            MountMode::Fallback => ModeChoice::Fallback,
        },
        threads: usize::try_from(settings.mount.threads).expect("at most 64"),
    };
    let (tier1, namespace) = (Arc::clone(tier1), Arc::clone(namespace));
    let host = Arc::clone(host) as Arc<dyn Host>;
    tokio::task::spawn_blocking(move || tidemark_fuse::mount(&wanted, &tier1, namespace, host))
        .await
        .expect("mounting does not panic")
        .with_context(|| format!("{} cannot be mounted", mountpoint.display()))
        .map_err(Failure::failed)
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

async fn ended(mounted: &Arc<Mounted>) {
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        if mounted.ended_within(Duration::ZERO) {
            return;
        }
    }
}

async fn publish_on(daemon: Arc<Daemon>, host: Arc<DaemonHost>, state_dir: StateDir) {
    loop {
        publish(&daemon, &host, &state_dir).await;
        tokio::time::sleep(PUBLISH_EVERY).await;
    }
}

async fn publish(daemon: &Daemon, host: &DaemonHost, state_dir: &StateDir) {
    let Ok(status) = daemon.status().await else { return };
    count_requests(daemon);
    let json = serde_json::to_vec_pretty(&status).expect("a status is written as JSON");
    if let Err(error) = state_dir.write_status(&json) {
        tracing::debug!(%error, "the last known status was not written");
    }
    let mut text = format!("state: {}\n", status.state.word());
    for problem in &status.problems {
        text.push_str(&format!("problem: {}: {}; {}\n", problem.code, problem.what, problem.action));
    }
    let newest = status.runs.iter().filter_map(|run| run.recoverable.as_ref()).max_by_key(|found| found.step);
    let latest = newest
        .map_or_else(String::new, |found| format!("{}\n", daemon.mountpoint.join(&found.path).display()));
    host.publish("status", text.into_bytes());
    host.publish("status.json", json);
    host.publish("latest", latest.into_bytes());
    if let Ok(rows) = daemon.list(tidemark_control::api::ListRequest::default()).await {
        host.publish("checkpoints.json", serde_json::to_vec_pretty(&rows).expect("rows are written as JSON"));
    }
}

/// Brings the metrics of the mount up to its own counters.
fn count_requests(daemon: &Daemon) {
    let Some(mounted) = daemon.mounted.get() else { return };
    let metrics = &daemon.node.shared().metrics;
    for (opcode, count) in mounted.counters().iter() {
        raise_to(&metrics.fuse_requests.get_or_create(&[("opcode", opcode.name())]), count);
        if opcode == Opcode::Create {
            raise_to(&metrics.create_files, count);
        }
    }
}

async fn drain_all(daemon: &Daemon, settings: &Settings) -> bool {
    let timeout = Duration::from_secs(settings.shutdown.drain_timeout_s);
    let Some(outcome) = daemon.node.drain(timeout).await else { return false };
    for left in &outcome.pending {
        tracing::warn!(path = %left.path, reason = left.reason.word(), what = %left.what, "not durable at the end");
    }
    outcome.pending.is_empty()
}

async fn unmount(mounted: &Arc<Mounted>) {
    let mounted = Arc::clone(mounted);
    let done = tokio::task::spawn_blocking(move || {
        if let Err(error) = mounted.unmount(false) {
            tracing::warn!(error = &error as &dyn std::error::Error, "the mount is busy: unmounting lazily");
            mounted.unmount(true)?;
        }
        Ok::<_, tidemark_fuse::MountError>(())
    });
    if let Err(error) = done.await.expect("unmounting does not panic") {
        tracing::error!(error = &error as &dyn std::error::Error, "the mount could not be taken away");
    }
}
