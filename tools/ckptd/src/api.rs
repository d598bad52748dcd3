//! The commands of this node, answered from the loop, the mount and the machine.
//!
//! Owns: putting their answers together. Does not own: the answers of the loop (engine), transport (control).

use crate::cli::Failure;
use crate::descriptors;
use crate::doctor::{check, of_machine};
use crate::forward::{Command, Decides};
use crate::last_end::LastEnd;
use crate::places::{described, known, no_file_at, not_found};
use crate::publish::Published;
use crate::replication::{self, Counted};
use crate::told::{LastTold, line_of};
use crate::troubles::Troubles;
use async_trait::async_trait;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tidemark_api::server::Server;
use tidemark_api::{
    CommitRequest, EventSink, EventsRequest, ExportRequest, FlushRequest, GcRequest, ImportRequest,
    ListRequest, NodeApi, PinRequest, PrefetchRequest, ProgressSink, RecoverRequest, RemoveRequest,
    ShowRequest, UndeleteRequest, VerifyRequest, WhyRequest,
};
use tidemark_engine::cluster::{Authority, Seat};
use tidemark_engine::node::{Identity, Node};
use tidemark_fuse::{Mode, Mounted};
use tidemark_namespace::{HIDDEN, LastLink};
use tidemark_protocol::cluster::wire::Standing;
use tidemark_protocol::id::{Incarnation, StartId};
use tidemark_protocol::key::is_foreign;
use tidemark_protocol::path::RelPath;
use tidemark_protocol::report::{
    ApiError, Check, CheckVerdict, Checkpoint, Commit, Doctor, ErrorCode, Export, Flush, FuseMode, Gc,
    Import, MountStatus, NodeState, Pending, PendingReason, Pin, Placement, Prefetch, Problem, ProblemCode,
    Recovery, Removal, RunStatus, Show, Status, TierStatus, Undelete, Verify, Why, path_text, shortened,
};
use tidemark_protocol::selector::Place;

/// State of this node, as the API shows it.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) version: &'static str,
    pub(crate) node: Node,
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) start: StartId,
    pub(crate) keeper_pid: Option<u32>,
    pub(crate) listen: String,
    pub(crate) http: String,
    /// The mount point as it was given. For the actual path see [`Daemon::mountpoint`].
    pub(crate) wanted_mountpoint: PathBuf,
    /// Set once the daemon serves.
    pub(crate) mounted: OnceLock<Arc<Mounted>>,
    pub(crate) draining: std::sync::atomic::AtomicBool,
    /// The daemon has ended, and all files are durable.
    pub(crate) stopped: std::sync::atomic::AtomicBool,
    /// Possible costs of the previous daemon's end.
    pub(crate) last_end: LastEnd,
    pub(crate) told: LastTold,
    pub(crate) troubles: Troubles,
    pub(crate) published: Published,
    /// Files that lack copies.
    pub(crate) counted: Counted,
    /// The coordinator's last report of runs.
    pub(crate) runs_elsewhere: tokio::sync::Mutex<Option<(Instant, Vec<RunStatus>)>>,
    pub(crate) began: Instant,
}

/// Age limit of the coordinator's report of runs: `ckptctl` asks for the status first when a path is given.
const RUNS_AGE: Duration = Duration::from_secs(1);
/// Limit of a status's wait for the coordinator.
const RUNS_DEADLINE: Duration = Duration::from_secs(1);
/// Limit of a flush that does not wait: half of it goes to other nodes, which publish their changes first.
const HEARD_WITHIN: Duration = Duration::from_secs(2);
/// Time for a new node to join. Until then the missing coordinator is no problem.
const JOIN_PATIENCE: Duration = Duration::from_secs(5);

pub(crate) fn stopped() -> ApiError {
    ApiError::new(ErrorCode::Unavailable, "the daemon is ending", "ask again when it runs")
}

/// Checks the target of an export, and returns the path as the kernel sees it. A target in the daemon's own mount is refused: it would be
/// one more save, and the daemon's own threads would wait for it. The device is compared, too: a bind mount shows the mount under another
/// path.
async fn outside_of_the_mount(mounted: Option<Arc<Mounted>>, target: PathBuf) -> Result<PathBuf, ApiError> {
    let usage =
        |what: String| ApiError::new(ErrorCode::Usage, what, "give a new name in a directory that is there");
    let shown = target.display().to_string();
    let named = target.file_name().map(ToOwned::to_owned).filter(|_| target.is_absolute());
    let (Some(name), Some(above)) = (named, target.parent().map(Path::to_owned)) else {
        return Err(usage(format!("{shown} is no new name in a directory")));
    };
    let look = move || -> std::io::Result<(PathBuf, bool)> {
        let real = above.canonicalize()?;
        let is_ours = match &mounted {
            Some(mounted) => {
                real.starts_with(mounted.path()) && mounted.is_there() || mounted.holds(&real)?
            }
            None => false,
        };
        Ok((real, is_ours))
    };
    let looked = tokio::task::spawn_blocking(look).await.expect("looking at a path does not panic");
    let (real, is_ours) =
        looked.map_err(|error| usage(format!("the directory of {shown} cannot be looked at: {error}")))?;
    if is_ours {
        return Err(usage(format!("{shown} is in the mount itself")));
    }
    Ok(real.join(name))
}

/// Where an import reads in Tier-3, whose URL is `url`, and where it is on the mount.
fn import_places(url: &str, request: &ImportRequest) -> Result<(String, RelPath), ApiError> {
    let action = format!("name a directory or a file below {url}");
    let usage = |what: String| ApiError::new(ErrorCode::Usage, what, action.clone());
    let from = request.from.strip_prefix(url.trim_end_matches('/')).unwrap_or(&request.from);
    let from = from.trim_matches('/');
    if from.contains("://") || !is_foreign(from) {
        return Err(usage(format!("{:?} is nothing that others can have in Tier-3", request.from)));
    }
    let last = from.rsplit('/').next().unwrap_or(from).as_bytes();
    let to = request.to.as_ref().map_or(last, Place::as_bytes);
    let to = RelPath::new(to)
        .map_err(|problem| usage(format!("{} is no place on the mount: {problem}", path_text(to))))?;
    if to.components().next() == Some(HIDDEN) {
        let what = format!("{to} is below {}, which is the daemon's own", path_text(HIDDEN));
        return Err(ApiError::new(ErrorCode::Usage, what, "give --as another path on the mount"));
    }
    Ok((from.to_owned(), to))
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

impl Daemon {
    /// The epoch that this node commits in, or follows.
    fn epoch(&self) -> u64 {
        let shared = self.node.shared();
        shared.cluster.get().map_or_else(|| shared.drain.epoch(), |cluster| cluster.following.epoch()).0
    }

    /// Where the mount is, absolute and without symbolic links, from the moment at which it is there.
    pub(crate) fn mountpoint(&self) -> &Path {
        self.mounted.get().map_or(self.wanted_mountpoint.as_path(), |mounted| mounted.path())
    }

    fn identity(&self) -> Identity {
        Identity { node: self.name.clone() }
    }

    fn mount_status(&self) -> MountStatus {
        let path = self.mountpoint().to_string_lossy().into_owned();
        match self.mounted.get() {
            Some(mounted) => MountStatus {
                path,
                mode: match mounted.mode() {
                    Mode::Passthrough => FuseMode::Passthrough,
                    Mode::Fallback => FuseMode::Fallback,
                },
                reason: mounted.reason().to_owned(),
                requests: mounted
                    .counters()
                    .iter()
                    .map(|(opcode, count)| (opcode.name().to_ascii_lowercase(), count))
                    .collect(),
            },
            None => MountStatus {
                path,
                mode: FuseMode::Unknown,
                reason: "not mounted yet".to_owned(),
                requests: BTreeMap::new(),
            },
        }
    }

    fn state(&self, degraded: bool) -> NodeState {
        if self.stopped.load(std::sync::atomic::Ordering::Acquire) {
            NodeState::Stopped
        } else if self.draining.load(std::sync::atomic::Ordering::Acquire) {
            NodeState::Draining
        } else if self.mounted.get().is_none() {
            NodeState::Starting
        } else if degraded {
            NodeState::Degraded
        } else {
            NodeState::Serving
        }
    }
}

impl Daemon {
    /// Returns the status from this node's own knowledge. On a node that does not decide, its runs are only those that the node holds.
    pub(crate) async fn own_status(&self) -> Result<Status, ApiError> {
        let standing = self.node.standing().await.ok_or_else(stopped)?;
        let replication = self.counted.status(self.node.shared(), now_ms());
        let mut problems = standing.problems;
        problems.extend(self.cost_of_last_end(&standing.runs).await);
        problems.extend(replication.as_ref().and_then(replication::problem));
        problems.extend(self.troubles.problems(self.mountpoint()));
        problems.extend(descriptors::problem());
        if self.began.elapsed() > JOIN_PATIENCE
            && let Some(what) = self.silence()
        {
            problems.push(Problem::new(
                ProblemCode::CoordinatorAway,
                format!("{what}; saves go on here, and nothing new is committed"),
                "look at that node and at the network to it",
            ));
        }
        problems.extend(self.nodes_away());
        let problems = shortened(problems);
        Ok(Status {
            version: self.version.to_owned(),
            pid: std::process::id(),
            keeper_pid: self.keeper_pid,
            start: self.start,
            node: self.name.clone(),
            incarnation: self.incarnation,
            state: self.state(!problems.is_empty()),
            listen: self.listen.clone(),
            http: self.http.clone(),
            problems,
            mount: self.mount_status(),
            tiers: standing.tiers,
            runs: standing.runs,
            unsaved: standing.unsaved,
            unsealed: standing.unsealed,
            untold: standing.untold,
            replication,
            written_ms: now_ms(),
        })
    }

    /// Returns the costs of the previous end, judged by the deciding node's knowledge of runs. `own`: this node's knowledge of runs.
    async fn cost_of_last_end(&self, own: &[RunStatus]) -> Vec<Problem> {
        let asks = self.last_end.asks_about_runs() && self.decides() == Decides::Elsewhere;
        let runs = if asks && self.silence().is_none() { self.runs().await.ok() } else { None };
        self.last_end.problems(runs.as_deref().unwrap_or(own), self.began.elapsed() > JOIN_PATIENCE)
    }

    /// Returns, on the coordinator, nodes that it cannot hear while others can. A node that is gone is no problem: it may have ended in
    /// order.
    fn nodes_away(&self) -> Vec<Problem> {
        let cluster = self.node.shared().cluster.get().filter(|cluster| cluster.following.is_coordinator());
        let Some(members) = cluster.map(|cluster| cluster.following.members()) else { return Vec::new() };
        let away = members.members.iter().filter(|member| member.standing == Standing::CutOff).map(|member| {
            let what = format!("node {} is cut off from this coordinator: {}", member.life.node, member.why);
            let action =
                "look at that node and at the network to it; what it made and has not told is not in Tier-3";
            Problem::new(ProblemCode::NodeAway, what, action)
        });
        away.collect()
    }

    /// Checkpoints that this node knows of.
    pub(crate) async fn own_list(&self, request: ListRequest) -> Result<Vec<Checkpoint>, ApiError> {
        let place = self.led(&request.place, LastLink::Followed).await?;
        let is_known = self.node.is_known(place.clone()).await;
        self.node.list(known(place, is_known)?, request.all).await.ok_or_else(stopped)
    }

    /// Returns the state of each run, from the node that decides.
    pub(crate) async fn runs(&self) -> Result<Vec<RunStatus>, ApiError> {
        if self.decides() == Decides::Here {
            return Ok(self.node.standing().await.ok_or_else(stopped)?.runs);
        }
        let mut said = self.runs_elsewhere.lock().await;
        if let Some((at, runs)) = said.as_ref()
            && at.elapsed() < RUNS_AGE
        {
            return Ok(runs.clone());
        }
        let runs: Vec<RunStatus> = self.forward_within(&Command::Runs, RUNS_DEADLINE).await?;
        *said = Some((Instant::now(), runs.clone()));
        Ok(runs)
    }

    /// The only node that there is.
    async fn alone(&self) -> Result<Vec<tidemark_protocol::report::Node>, ApiError> {
        let status = self.own_status().await?;
        let tier1 = status.tiers.iter().find(|tier| tier.name == "tier1");
        Ok(vec![tidemark_protocol::report::Node {
            name: status.node,
            incarnation: self.incarnation,
            start: self.start,
            state: status.state,
            listen: status.listen,
            version: status.version,
            epoch: self.epoch(),
            coordinator: true,
            this: true,
            tier1_used_bytes: tier1.map_or(0, |tier| tier.used_bytes),
            tier1_size_bytes: tier1.and_then(|tier| tier.size_bytes).unwrap_or(0),
            standing: Standing::Alive.word().to_owned(),
            since_ms: None,
            why: None,
            heard_ago_seconds: None,
            labels: self.node.shared().settings.node.labels.clone(),
            partner: None,
        }])
    }

    /// Until the kernel shows no name any more that a command has taken away.
    async fn kernel_forgets(&self) {
        let Some(mounted) = self.mounted.get() else { return };
        let invalidator = mounted.invalidator().clone();
        // The wait fails only if the runtime ends, and the answer with it.
        let _ = tokio::task::spawn_blocking(move || invalidator.wait()).await;
    }

    /// Returns the authority on nodes and their places, if this process has it.
    fn authority(&self) -> Option<Arc<dyn Authority>> {
        match self.node.shared().cluster.get()?.following.seat() {
            Seat::Here(authority) => Some(authority),
            Seat::There(_) | Seat::Unknown => None,
        }
    }
}

#[async_trait]
impl NodeApi for Daemon {
    async fn status(&self) -> Result<Status, ApiError> {
        let mut status = self.own_status().await?;
        // Without an answer it is what this node knows, and a problem says who is away.
        if self.decides() == Decides::Elsewhere
            && self.silence().is_none()
            && let Ok(runs) = self.runs().await
        {
            status.runs = runs;
        }
        Ok(status)
    }

    async fn list(&self, request: ListRequest) -> Result<Vec<Checkpoint>, ApiError> {
        match self.decides() {
            Decides::Elsewhere => self.forward(Command::List(request)).await,
            Decides::Here => self.own_list(request).await,
        }
    }

    async fn show(&self, request: ShowRequest) -> Result<Show, ApiError> {
        if self.decides() == Decides::Elsewhere {
            return self.forward(Command::Show(request)).await;
        }
        let what = described(&request.checkpoint);
        let wanted = self.wanted(&request.checkpoint, LastLink::Followed).await?;
        let shown = self.node.show(wanted, request.files, self.identity()).await;
        shown.ok_or_else(stopped)??.ok_or_else(|| not_found(&what))
    }

    async fn why(&self, request: WhyRequest) -> Result<Why, ApiError> {
        if self.decides() == Decides::Elsewhere {
            return self.forward(Command::Why(request)).await;
        }
        let place = self.led(&request.place, LastLink::Followed).await?;
        let why = self.node.why(place.clone()).await;
        why.ok_or_else(stopped)?.ok_or_else(|| not_found(&path_text(&place)))
    }

    async fn tiers(&self) -> Result<Vec<TierStatus>, ApiError> {
        Ok(self.node.standing().await.ok_or_else(stopped)?.tiers)
    }

    async fn nodes(&self) -> Result<Vec<tidemark_protocol::report::Node>, ApiError> {
        let mut rows = match self.authority() {
            Some(authority) => authority.nodes(),
            None if self.decides() == Decides::Here => return self.alone().await,
            None => self.forward(Command::Nodes).await?,
        };
        let state = self.own_status().await?.state;
        for row in &mut rows {
            row.this = row.name == self.name;
            if row.this {
                row.state = state;
            }
        }
        Ok(rows)
    }

    async fn placement(&self) -> Result<Placement, ApiError> {
        match self.authority() {
            Some(authority) => Ok(authority.placement()),
            None if self.decides() == Decides::Here => Err(ApiError::new(
                ErrorCode::NotFound,
                "this node is alone, and nobody keeps copies of its files",
                "give it --certs DIR, and let other nodes join it with --coordinator NODE@HOST:PORT",
            )),
            None => self.forward(Command::Placement).await,
        }
    }

    async fn doctor(&self) -> Result<Doctor, ApiError> {
        let status = self.own_status().await?;
        let mode = self.mounted.get().map(|mounted| mounted.mode());
        let mut checks = of_machine(mode, status.mount.reason, &self.node.shared().tier1);
        for tier in &status.tiers {
            if let Some(fencing) = tier.fencing {
                let what = format!("{}: one winner of many creates of one key: {fencing}", tier.medium);
                checks.push(check("fencing", fencing, what, Some("use this store with one node only")));
            }
            if let Some(part_checksums) = tier.part_checksums {
                let what = format!("{}: refuses damaged parts: {part_checksums}", tier.medium);
                checks.push(check(
                    "part_checksums",
                    part_checksums,
                    what,
                    Some("uploads are read back instead"),
                ));
            }
        }
        for problem in status.problems {
            checks.push(Check {
                name: problem.code,
                verdict: CheckVerdict::Fail,
                what: problem.what,
                fix: Some(problem.action),
            });
        }
        Ok(Doctor { checks })
    }

    async fn verify(&self, request: VerifyRequest, progress: ProgressSink) -> Result<Verify, ApiError> {
        let place = match &request.checkpoint {
            None => Vec::new(),
            Some(selector) => self.place_of(selector).await?,
        };
        let verify = self.node.verify(place.clone(), request.deep, move |now| progress.tell(now)).await;
        let verify = verify.ok_or_else(stopped)?;
        // A mount without files is a good one.
        if verify.is_empty() && !place.is_empty() { Err(no_file_at(&place)) } else { Ok(verify) }
    }

    async fn prefetch(&self, request: PrefetchRequest, progress: ProgressSink) -> Result<Prefetch, ApiError> {
        let place = self.place_of(&request.checkpoint).await?;
        let prefetch = self.node.prefetch(place.clone(), request.wait, move |now| progress.tell(now)).await;
        let prefetch = prefetch.ok_or_else(stopped)?;
        if prefetch.total_files == 0 && !place.is_empty() { Err(no_file_at(&place)) } else { Ok(prefetch) }
    }

    async fn flush(&self, request: FlushRequest, progress: ProgressSink) -> Result<Flush, ApiError> {
        if self.decides() == Decides::Elsewhere {
            return self.forward_flush(request).await;
        }
        let (began, timeout) = (Instant::now(), request.timeout_s.map(Duration::from_secs));
        let unheard = self.hear_all(if request.wait { timeout } else { Some(HEARD_WITHIN) }).await;
        let place = self.led(&request.place, LastLink::Followed).await?;
        let is_known = self.node.is_known(place.clone()).await;
        let place = known(place, is_known)?;
        let left = timeout.map(|timeout| timeout.saturating_sub(began.elapsed()));
        let flushed = self.node.flush(place, request.wait, left, move |now| progress.tell(now)).await;
        let mut flushed = flushed.ok_or_else(stopped)?;
        // A caller that waits longer may hear them yet.
        flushed.timed_out |= request.wait && timeout.is_some() && !unheard.is_empty();
        let unheard = unheard.into_iter();
        flushed.pending.extend(unheard.map(|what| Pending {
            path: String::new(),
            reason: PendingReason::Unknown,
            what,
        }));
        // A job's writes since the mount was lost went to the directory below, and nothing of them is here to be flushed.
        flushed.pending.extend(self.troubles.pending(self.mountpoint()));
        if request.wait {
            // A script reads `.tidemark/latest` next.
            self.published.catch_up().await;
        }
        Ok(flushed)
    }

    async fn commit(&self, request: CommitRequest) -> Result<Commit, ApiError> {
        if self.decides() == Decides::Elsewhere {
            return self.forward(Command::Commit(request)).await;
        }
        let path = self.led_to_change(&request.place, LastLink::Followed).await?;
        let what = path_text(&path);
        self.node.commit(path).await.ok_or_else(stopped)?.ok_or_else(|| not_found(&what))
    }

    async fn gc(&self, request: GcRequest, progress: ProgressSink) -> Result<Gc, ApiError> {
        self.only_where_it_decides("gc")?;
        let gc = self.node.gc(request.dry_run, move |now| progress.tell(now)).await;
        self.kernel_forgets().await;
        gc
    }

    async fn pin(&self, request: PinRequest) -> Result<Pin, ApiError> {
        if self.decides() == Decides::Elsewhere {
            return self.forward(Command::Pin(request)).await;
        }
        let wanted = self.wanted_to_change(&request.checkpoint, LastLink::Followed).await?;
        self.node.pin(wanted, request.pinned, request.by).await
    }

    async fn remove(&self, request: RemoveRequest, progress: ProgressSink) -> Result<Removal, ApiError> {
        self.only_where_it_decides("rm")?;
        let wanted = self.wanted_to_remove(&request.checkpoint).await?;
        let removal = self.node.remove(wanted, move |now| progress.tell(now)).await;
        self.kernel_forgets().await;
        removal
    }

    async fn undelete(&self, request: UndeleteRequest) -> Result<Undelete, ApiError> {
        if self.decides() == Decides::Elsewhere {
            return self.forward(Command::Undelete(request)).await;
        }
        // The name that it had: what has it now, a link or not, is in its way.
        self.node.undelete(self.wanted_to_change(&request.checkpoint, LastLink::Kept).await?).await
    }

    async fn export(&self, request: ExportRequest, progress: ProgressSink) -> Result<Export, ApiError> {
        self.only_where_it_decides("export")?;
        let mounted = self.mounted.get().cloned();
        let target = outside_of_the_mount(mounted, PathBuf::from(request.directory)).await?;
        let number = request.version.map(|number| (number.timeline, number.version));
        let wanted = self.wanted(&request.checkpoint, LastLink::Followed).await?;
        self.node.export(wanted, number, target, move |now| progress.tell(now)).await
    }

    async fn import(&self, request: ImportRequest, progress: ProgressSink) -> Result<Import, ApiError> {
        self.only_where_it_decides("import")?;
        let (from, to) = import_places(&self.node.shared().drain.store.describe(), &request)?;
        self.node.import(&from, &to, move |now| progress.tell(now)).await
    }

    async fn recover(&self, request: RecoverRequest) -> Result<Recovery, ApiError> {
        if self.decides() == Decides::Elsewhere {
            return self.forward(Command::Recover(request)).await;
        }
        let place = self.led(&request.place, LastLink::Followed).await?;
        let is_known = self.node.is_known(place.clone()).await;
        self.node.recovery(known(place, is_known)?).await.ok_or_else(stopped)
    }

    async fn events(&self, request: EventsRequest, events: EventSink) -> Result<(), ApiError> {
        let kept = &self.node.shared().events;
        let mut newest = kept.watch();
        let mut since = request.since;
        loop {
            newest.mark_unchanged();
            for event in kept.since(since) {
                since = event.number;
                events.send(event).await?;
            }
            if !request.follow {
                return Ok(());
            }
            newest.changed().await.map_err(|_| stopped())?;
        }
    }

    fn metrics_text(&self) -> String {
        let metrics = &self.node.shared().metrics;
        // While the loop hangs no other code sets it. Before the mount serves, no status is published repeatedly.
        if self.mounted.get().is_some() && self.told.silence(Instant::now()).is_some() {
            metrics.problem.get_or_create(&[("code", ProblemCode::NoAnswer.word())]).set(1);
        }
        metrics.encode()
    }

    fn healthy(&self) -> Result<(), String> {
        if self.mounted.get().is_none() {
            return Err("the mount does not serve yet".to_owned());
        }
        if let Some(what) = self.troubles.mount_gone(self.mountpoint()) {
            return Err(what);
        }
        let problems = self.told.problems(Instant::now());
        let fails =
            |problem: &&Problem| ProblemCode::of(&problem.code).is_some_and(ProblemCode::fails_health);
        problems.iter().find(fails).map_or(Ok(()), |problem| Err(line_of(problem)))
    }

    fn concerns(&self) -> Vec<String> {
        self.told.problems(Instant::now()).iter().map(line_of).collect()
    }
}
/// Binds the addresses of commands. If another process took an address while no daemon served, that costs no mount: unless this daemon is
/// the `first`, another port is taken then.
pub(crate) async fn bind(socket: &Path, http: SocketAddr, first: bool) -> Result<Server, Failure> {
    let failed = |error| Failure::failed(anyhow::Error::new(error).context("commands cannot be served"));
    match Server::bind(socket, http).await {
        Err(error) if !first => {
            tracing::warn!(%http, %error, "another port is taken, and status says which");
            Server::bind(socket, SocketAddr::new(http.ip(), 0)).await.map_err(failed)
        }
        server => server.map_err(failed),
    }
}
