//! The command line of `ckptd`.
//!
//! Owns: flags, how they win over the configuration file, and exit codes. Does not own: what a command does.

use crate::config::Config;
use crate::state_dir::StateDir;
use anyhow::Context;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use tidemark_engine::settings::{EtcdSettings, Settings};
use tidemark_engine::step_point::{Dies, StepPoint};
use tidemark_keeper::{Inherited, Kept, Plan, UpgradeError, names};
use tidemark_protocol::id::NodeName;
use tidemark_protocol::report::ExitCode as ProcessExit;

/// Path of the configuration without another choice; absent is fine there.
const CONFIG_DEFAULT: &str = "/etc/tidemark/ckptd.toml";

/// Saves checkpoints to memory through a mount, and drains them to a durable tier.
#[derive(Debug, Parser)]
#[command(name = "ckptd", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Mount MOUNTPOINT and serve it in the foreground until SIGTERM.
    Up(Box<Up>),
    /// Replace the running daemon by another binary. Open files stay open; if the new binary does not serve within ten seconds, the old one
    /// is started again.
    Upgrade(Upgrade),
    /// Try what Tidemark needs from this machine without a daemon, and print the report as JSON (`ckptctl doctor` shows it).
    Doctor,
    /// Print a commented configuration file (`ckptd config example`), or a reference of its keys.
    Config(Config),
    /// List the named steps at which TIDEMARK_STOP_AT (or, with its keeper, TIDEMARK_STOP_NODE_AT) may
    /// stop this process (for crash tests).
    #[command(hide = true)]
    StepPoints,
}

/// Flags of `ckptd up`. Every one wins over the configuration file.
#[derive(Debug, Args)]
pub(crate) struct Up {
    /// The directory to mount on; made if missing, refused if it is not empty or carries a live mount.
    pub(crate) mountpoint: PathBuf,
    /// TOML configuration, as `ckptd config example` prints it [default: /etc/tidemark/ckptd.toml, where it exists].
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Name of this node [default: the host name].
    #[arg(long, value_name = "NODE")]
    pub(crate) name: Option<String>,
    /// Memory for checkpoints: bytes, or K, M, G, T with optional iB, powers of 1024 [default: half of what is free].
    #[arg(long, value_name = "SIZE")]
    pub(crate) tier1: Option<String>,
    /// The durable tier: s3://BUCKET/PREFIX, gs://…, az://CONTAINER/PREFIX or file:///DIRECTORY [default: file:///var/lib/tidemark/tier3].
    #[arg(long, value_name = "URL")]
    pub(crate) tier3: Option<String>,
    /// Socket, lock and last known status; nothing durable [default: /run/tidemark].
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// Where peers connect; port 0 takes a free one [default: 127.0.0.1:7070].
    #[arg(long, value_name = "ADDR")]
    pub(crate) listen: Option<String>,
    /// Plain HTTP for /metrics and /healthz; port 0 takes a free one [default: 127.0.0.1:7071].
    #[arg(long, value_name = "ADDR")]
    pub(crate) http: Option<String>,
    /// Where the coordinator is: embedded, or NODE@HOST:PORT [default: embedded].
    #[arg(long, value_name = "WHERE")]
    pub(crate) coordinator: Option<String>,
    /// For several nodes: the etcd whose lease makes one of them the coordinator, http[s]://HOST:PORT[,…]/PREFIX. User and certificates for
    /// it stand in the configuration, in [etcd].
    #[arg(long, value_name = "URL", conflicts_with = "lease")]
    pub(crate) etcd: Option<String>,
    /// The coordinator's lease of a node that is alone: file:PATH or tier3 [default: a lock file in the state directory]. etcd://… is the
    /// older spelling of --etcd http://….
    #[arg(long, value_name = "LEASE")]
    pub(crate) lease: Option<String>,
    /// Where peers reach this node [default: where it listens].
    #[arg(long, value_name = "ADDR")]
    pub(crate) advertise: Option<String>,
    /// Certificates of this cluster, made by `ckptctl certs`; with them this node speaks with others.
    #[arg(long, value_name = "DIR")]
    pub(crate) certs: Option<PathBuf>,
    /// Speak with other nodes without certificates; on loopback only.
    #[arg(long)]
    pub(crate) insecure: bool,
    /// Start on a Tier-3 that another stand-alone daemon holds. The other daemon is fenced: it commits nothing any more.
    #[arg(long)]
    pub(crate) take_over: bool,
    /// Label of this node for placement; may be given several times.
    #[arg(long = "label", value_name = "K=V")]
    pub(crate) labels: Vec<String>,
}

/// Flags of `ckptd upgrade`.
#[derive(Debug, Args)]
pub(crate) struct Upgrade {
    /// The new binary [default: this one].
    #[arg(long, value_name = "PATH")]
    binary: Option<PathBuf>,
    /// The state directory of the daemon to replace [default: $TIDEMARK_STATE_DIR, then /run/tidemark].
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
}

impl Up {
    /// Reads the file, lets the flags win, and checks the whole.
    fn settings(&self) -> anyhow::Result<Settings> {
        let (path, required) = match &self.config {
            Some(path) => (path.clone(), true),
            None => (PathBuf::from(CONFIG_DEFAULT), false),
        };
        let mut settings = match std::fs::read_to_string(&path) {
            Ok(text) => toml::from_str(&text).with_context(|| {
                format!("the configuration {} does not parse; nothing was mounted", path.display())
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !required => Settings::default(),
            Err(error) => {
                return Err(error)
                    .with_context(|| format!("the configuration {} cannot be read", path.display()));
            }
        };
        let Settings { node, etcd, tier1, tier3, .. } = &mut settings;
        if let Some(name) = &self.name {
            node.name = Some(name.clone());
        }
        if let Some(dir) = &self.state_dir {
            node.state_dir.clone_from(dir);
        }
        if let Some(listen) = &self.listen {
            node.listen.clone_from(listen);
        }
        if let Some(http) = &self.http {
            node.http.clone_from(http);
        }
        if let Some(url) = &self.etcd {
            etcd.url = Some(url.clone());
            node.lease = None;
        }
        if let Some(lease) = &self.lease {
            etcd.url = None;
            if !lease.starts_with("etcd://") {
                // The file's user and certificates are for a place that this start does not use.
                *etcd = EtcdSettings::default();
            }
            node.lease = Some(lease.clone());
        }
        if let Some(coordinator) = &self.coordinator {
            node.coordinator.clone_from(coordinator);
        }
        if let Some(advertise) = &self.advertise {
            node.advertise = Some(advertise.clone());
        }
        if let Some(certs) = &self.certs {
            node.certs = Some(certs.clone());
        }
        node.insecure |= self.insecure;
        for label in &self.labels {
            let (key, value) = label
                .split_once('=')
                .with_context(|| format!("--label {label:?} is not KEY=VALUE, as in rack=r1"))?;
            node.labels.insert(key.to_owned(), value.to_owned());
        }
        if let Some(size) = &self.tier1 {
            tier1.size = Some(size.clone());
        }
        if let Some(url) = &self.tier3 {
            tier3.url.clone_from(url);
        }
        settings.validate()?;
        Ok(settings)
    }
}

/// Why `ckptd` ends without having served, and the exit code that says so.
#[derive(Debug)]
pub(crate) struct Failure {
    code: ProcessExit,
    error: anyhow::Error,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#}", self.error)
    }
}

impl Failure {
    pub(crate) fn failed(error: impl Into<anyhow::Error>) -> Self {
        Self { code: ProcessExit::Failed, error: error.into() }
    }

    pub(crate) fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self { code: ProcessExit::Usage, error: error.into() }
    }

    pub(crate) fn unavailable(error: impl Into<anyhow::Error>) -> Self {
        Self { code: ProcessExit::Unavailable, error: error.into() }
    }

    pub(crate) fn fenced(error: impl Into<anyhow::Error>) -> Self {
        Self { code: ProcessExit::Fenced, error: error.into() }
    }
}

/// Properties of a binary.
#[derive(Debug, Clone, Copy)]
pub struct Build {
    /// Shown by `--version` and in `status`.
    pub version: &'static str,
    /// Whether TIDEMARK_STOP_AT is heeded.
    pub stops_at_steps: bool,
}

/// Parses, runs, and says how it ended.
#[must_use]
pub fn run(build: Build) -> ExitCode {
    // First of all: descriptors that were passed are known by number only.
    let inherited = match Inherited::take() {
        Ok(inherited) => inherited,
        Err(error) => return ExitCode::from(say(&Failure::failed(error)).number()),
    };
    let matches = Cli::command().version(build.version).get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let code = match cli.command {
        Command::StepPoints => step_points(),
        Command::Doctor => look_at_machine(),
        Command::Up(up) => {
            crate::logs::start();
            match serve(build, &up, inherited) {
                Ok(code) => return code,
                Err(failure) => say(&failure),
            }
        }
        Command::Upgrade(upgrade) => exit_code(replace(&upgrade)),
        Command::Config(config) => exit_code(config.print()),
    };
    ExitCode::from(code.number())
}

fn exit_code(result: Result<(), Failure>) -> ProcessExit {
    match result {
        Ok(()) => ProcessExit::Done,
        Err(failure) => say(&failure),
    }
}

#[expect(clippy::print_stderr, reason = "the last words of a daemon that does not start are for a person")]
fn say(failure: &Failure) -> ProcessExit {
    eprintln!("ckptd: {:#}", failure.error);
    failure.code
}

#[expect(clippy::print_stdout, reason = "the answer of a command")]
fn step_points() -> ProcessExit {
    for point in StepPoint::ALL {
        println!("{}", point.name());
    }
    ProcessExit::Done
}

#[expect(clippy::print_stdout, reason = "the answer of a command")]
fn look_at_machine() -> ProcessExit {
    let doctor = crate::doctor::without_daemon();
    println!("{}", serde_json::to_string_pretty(&doctor).expect("a report is written as JSON"));
    doctor.exit_code()
}

/// Serves, or keeps the process that does.
fn serve(build: Build, up: &Up, inherited: Inherited) -> Result<ExitCode, Failure> {
    crate::process::guard();
    let settings = up.settings().map_err(Failure::usage)?;
    if inherited.is_first() { keep(&settings) } else { serve_kept(build, up, settings, inherited) }
}

/// Makes this process, which a person started, the keeper, and starts the binary once more to serve.
fn keep(settings: &Settings) -> Result<ExitCode, Failure> {
    crate::descriptors::raise_limit().map_err(Failure::failed)?;
    let state_dir = StateDir::take(&settings.node.state_dir, None).map_err(Failure::failed)?;
    let lock = state_dir.lock().map_err(Failure::failed)?;
    let plan = Plan {
        arguments: std::env::args_os().skip(1).collect(),
        state_dir: settings.node.state_dir.clone(),
        descriptors: [(names::LOCK.to_owned(), lock)].into(),
    };
    crate::ends::before_others();
    match tidemark_keeper::keep(plan).context("the keeper cannot start").map_err(Failure::failed)? {
        Kept::Ended(code) => Ok(ExitCode::from(code)),
        Kept::Abandoned => Err(Failure::failed(anyhow::anyhow!(
            "told to end while no daemon was there: the mount is gone, and what was not in Tier-3 with it"
        ))),
    }
}

fn serve_kept(build: Build, up: &Up, settings: Settings, inherited: Inherited) -> Result<ExitCode, Failure> {
    // Started by the number of a descriptor, which is meaningless in a list of processes.
    if let Err(error) = rustix::thread::set_name(c"ckptd") {
        tracing::debug!(%error, "the process keeps its name");
    }
    for (variable, dies) in [("TIDEMARK_STOP_AT", Dies::Daemon), ("TIDEMARK_STOP_NODE_AT", Dies::Node)] {
        if let (Ok(step), true) = (std::env::var(variable), build.stops_at_steps) {
            tidemark_engine::step_point::arm(&step, dies)
                .map_err(|error| Failure::usage(anyhow::anyhow!("{variable}: {error}")))?;
            tracing::warn!(step, "this process will kill itself at a step point");
        }
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("ckptd")
        .on_thread_start(give_way)
        .build()
        .context("threads cannot be started")
        .map_err(Failure::failed)?;
    let result = runtime.block_on(crate::up::up(build.version, up, settings, inherited));
    // Abandoned blocking work (a slow store) must not hold the end back.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    let code = if result? { ProcessExit::Done } else { ProcessExit::Failed };
    Ok(ExitCode::from(code.number()))
}

/// Lowers the priority of background work, so that the job's own threads need not wait for it once they wake.
fn give_way() {
    if let Err(error) = tidemark_tier1::priority::give_way() {
        tracing::debug!(%error, "work in the background is done at the usual priority");
    }
}

#[expect(clippy::print_stdout, reason = "the answer of a command")]
fn replace(upgrade: &Upgrade) -> Result<(), Failure> {
    let binary = match &upgrade.binary {
        Some(path) => path.clone(),
        None => std::env::current_exe().map_err(Failure::failed)?,
    };
    let binary = std::path::absolute(binary).map_err(Failure::failed)?;
    let named =
        upgrade.state_dir.clone().or_else(|| std::env::var_os("TIDEMARK_STATE_DIR").map(PathBuf::from));
    let state_dir = named.unwrap_or_else(|| Settings::default().node.state_dir);
    let pid = tidemark_keeper::request_upgrade(&state_dir, &binary).map_err(|error| match error {
        UpgradeError::NoKeeper { .. } => Failure::unavailable(error),
        UpgradeError::Refused { .. } => Failure::failed(error),
    })?;
    println!("{} serves as process {pid}", binary.display());
    Ok(())
}

/// Returns this node's name: as it is set, else its host's.
pub(crate) fn node_name(settings: &Settings) -> anyhow::Result<NodeName> {
    let name = match &settings.node.name {
        Some(name) => name.clone(),
        None => rustix::system::uname().nodename().to_string_lossy().into_owned(),
    };
    name.parse::<NodeName>().map_err(|error| anyhow::anyhow!("--name: {error}"))
}

/// The address that a flag gives.
pub(crate) fn parse_addr(flag: &str, text: &str) -> anyhow::Result<SocketAddr> {
    text.parse().with_context(|| format!("{flag} {text:?} is not an address such as 127.0.0.1:7070"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_names_the_example_of_the_configuration() {
        let help = Cli::command().render_help().to_string();
        assert!(help.contains("ckptd config example"), "{help}");
        for form in ["example", "reference"] {
            let cli = Cli::try_parse_from(["ckptd", "config", form]).unwrap();
            assert!(matches!(cli.command, Command::Config(_)), "{form}");
        }
        assert!(Cli::try_parse_from(["ckptd", "config"]).is_err());
    }

    #[test]
    fn the_flag_of_an_etcd_wins_over_the_file_and_excludes_a_lease() {
        let folder = tempfile::tempdir().unwrap();
        let settings = |config: &str, flags: &[&str]| {
            let file = folder.path().join("ckptd.toml");
            std::fs::write(&file, config).unwrap();
            let mut line = vec!["ckptd", "up", "/ckpt", "--config", file.to_str().unwrap()];
            line.extend(flags);
            match Cli::try_parse_from(line).map_err(|error| (error.exit_code(), error.to_string()))?.command {
                Command::Up(up) => up.settings().map_err(|error| (2, format!("{error:#}"))),
                _ => unreachable!("the command is `up`"),
            }
        };
        let file = "[etcd]\nurl = \"https://a:1/p\"\nuser = \"u\"\npassword_file = \"/f\"\nca = \"/ca\"\n";
        let place = |settings: &Settings| settings.etcd_place().map(ToOwned::to_owned);
        assert_eq!(place(&settings(file, &[]).unwrap()).as_deref(), Some("https://a:1/p"));
        let flag = settings(file, &["--etcd", "https://b:1/p"]).unwrap();
        assert_eq!((place(&flag).as_deref(), flag.etcd.user.as_deref()), (Some("https://b:1/p"), Some("u")));
        let older = settings("[node]\nlease = \"etcd://a:1/p\"\n", &["--etcd", "http://b:1/p"]).unwrap();
        assert_eq!(place(&older).as_deref(), Some("http://b:1/p"));
        let alone = settings(file, &["--lease", "file:/x"]).unwrap();
        assert_eq!((place(&alone), alone.etcd), (None, EtcdSettings::default()));
        let (code, words) = settings("", &["--etcd", "http://b:1/p", "--lease", "etcd://b:1/p"]).unwrap_err();
        assert!(
            code == 2 && words.contains("'--etcd <URL>' cannot be used with '--lease <LEASE>'"),
            "{words}"
        );
        let (_, words) = settings(&format!("{file}[node]\nlease = \"tier3\"\n"), &[]).unwrap_err();
        assert!(words.contains("node.lease (--lease) is \"tier3\", but must be left out"), "{words}");
    }
}
