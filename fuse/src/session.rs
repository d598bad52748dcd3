//! A mount from beginning to end: probe, attach, agree, serve, detach.
//!
//! Owns: [`mount`], [`Mounted`], the choice between passthrough and FALLBACK. Does not own: the requests
//! (`adapter`), the mountpoint's state (`mount`).

use crate::adapter::Adapter;
use crate::attr::{BLOCK_SIZE_FALLBACK, BLOCK_SIZE_PASSTHROUGH};
use crate::awake::Awake;
use crate::cold::Workers;
use crate::control_dir::ControlDir;
use crate::convert::now_ns;
use crate::counters::{Counters, RequestCounters};
use crate::device::Device;
use crate::error::MountError;
use crate::handshake::{self, InitExchange};
use crate::host::Host;
use crate::listing::Listings;
use crate::locks::is_locked;
use crate::mount::{attach, detach, device_at, is_ours_at, prepare};
use crate::notify::{self, Invalidator};
use crate::probe;
use crate::shared::Shared;
use fuser::Config;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use tidemark_namespace::Namespace;
use tidemark_tier1::Tier1;

/// Threads that answer requests. Metadata requests take microseconds, and each thread costs a buffer of 16 MiB of address space. In
/// FALLBACK at least two are needed, so that one write is received while another is copied.
const THREADS_MIN: usize = 2;
const THREADS_MAX: usize = 8;

/// How long to wait for the session's end. After an unmount the kernel ends the session at once unless something is still open below.
const SESSION_END_PATIENCE: Duration = Duration::from_secs(5);

/// The choice of a data path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ModeChoice {
    /// Passthrough where the probe says it works, FALLBACK elsewhere.
    #[default]
    Auto,
    /// Passthrough, or no mount.
    Passthrough,
    /// FALLBACK even where passthrough works.
    Fallback,
}

/// The data path in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The kernel reads and writes Tier-1 itself.
    Passthrough,
    /// Reads and writes come to the daemon.
    Fallback,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Passthrough => "passthrough",
            Self::Fallback => "fallback",
        })
    }
}

/// The settings of a mount.
#[derive(Debug, Clone)]
pub struct MountSettings {
    /// The path of the mount. Created if missing; refused when not empty or when it carries a live mount.
    pub mountpoint: PathBuf,
    pub mode: ModeChoice,
    pub session: SessionSettings,
}

/// How requests are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionSettings {
    /// Threads that answer requests; 0 chooses by the number of CPUs, between 2 and 8.
    pub threads: usize,
    /// Whether idle processors are kept awake while requests follow each other (`awake`), where the kernel permits it.
    pub keep_awake: bool,
}

impl Default for SessionSettings {
    fn default() -> Self {
        Self { threads: 0, keep_awake: true }
    }
}

impl MountSettings {
    /// Makes the default settings: automatic mode, threads by the number of CPUs, processors kept awake.
    #[must_use]
    pub fn new(mountpoint: impl Into<PathBuf>) -> Self {
        Self { mountpoint: mountpoint.into(), mode: ModeChoice::Auto, session: SessionSettings::default() }
    }
}

/// A mount that lives while no daemon serves it, with everything that its next daemon needs.
#[derive(Debug)]
pub struct KeptMount {
    pub device: OwnedFd,
    pub record: MountRecord,
}

/// The facts about a mount besides its device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountRecord {
    pub path: PathBuf,
    pub mode: Mode,
    pub reason: String,
    pub privileged: bool,
    pub allow_other: bool,
    pub init: InitExchange,
}

impl MountRecord {
    /// Returns whether the kernel sends unanswered requests again (Linux 6.9), so that the mount can continue under another daemon.
    #[must_use]
    pub fn can_be_taken_over(&self) -> bool {
        self.init.can_resend()
    }
}

/// Mounts and serves until unmounted. `tier1` is where the namespace keeps its files: the probe uses one of them.
///
/// # Errors
/// The error names the failed step, the path, and what to do; nothing stays mounted.
pub fn mount(
    settings: &MountSettings,
    tier1: &Arc<Tier1>,
    namespace: Arc<Namespace>,
    host: Arc<dyn Host>,
) -> Result<Mounted, MountError> {
    let path = prepare(&settings.mountpoint)?;
    let (mut mode, mut reason) = choose(settings.mode, tier1)?;
    let attached = attach(&path)?;
    if mode == Mode::Passthrough && !attached.privileged {
        mode = Mode::Fallback;
        reason = "mounted by fusermount3, without CAP_SYS_ADMIN".to_owned();
    }
    let (privileged, allow_other) = (attached.privileged, attached.allow_other);
    match serve(settings.session, &path, mode, Device::new(attached.device), None, namespace, host) {
        Ok(served) => {
            tracing::info!(path = %path.display(), %mode, reason, "mounted");
            let init = served.init.clone();
            let record = MountRecord { path, mode, reason, privileged, allow_other, init };
            Ok(Mounted { record, served, detached: Mutex::new(false) })
        }
        Err(error) => {
            if let Err(second) = detach(&path, true, privileged) {
                tracing::warn!(%second, "a mount that failed could not be taken away");
            }
            Err(error)
        }
    }
}

/// Continues to serve a mount whose daemon died. `namespace` has recovered its handles. The kernel sends requests that got no answer again.
///
/// # Errors
/// On an error the mount stays as it is, for another try.
pub fn take_over(
    kept: KeptMount,
    settings: SessionSettings,
    namespace: Arc<Namespace>,
    host: Arc<dyn Host>,
) -> Result<Mounted, MountError> {
    let KeptMount { device, record } = kept;
    let device = Device::new(device);
    let served = serve(settings, &record.path, record.mode, device, Some(&record.init), namespace, host)?;
    tracing::info!(path = %record.path.display(), mode = %record.mode, "took the mount over");
    Ok(Mounted { record, served, detached: Mutex::new(false) })
}

/// Unmounts, lazily, a mount whose daemon died and which cannot be taken over. Does not wait for processes that use it. Closing the last
/// descriptor of its device ends the mount for good.
///
/// # Errors
/// If it cannot be unmounted.
pub fn give_up(kept: KeptMount) -> Result<(), MountError> {
    detach(&kept.record.path, true, kept.record.privileged)
}

/// Returns whether passthrough works, and why, without mounting anything at a path: shown by `ckptctl doctor`.
#[must_use]
pub fn probe_mode(tier1: &Arc<Tier1>) -> (Mode, String) {
    let backing = match tier1.create(None) {
        Ok(backing) => backing,
        Err(error) => return (Mode::Fallback, format!("Tier-1 gave no file to probe with: {error}")),
    };
    let descriptor = match backing.read_fd() {
        Ok(descriptor) => descriptor,
        Err(error) => return (Mode::Fallback, format!("Tier-1's file cannot be opened: {error}")),
    };
    match probe::passthrough(descriptor.as_fd()) {
        Ok(()) => (Mode::Passthrough, "probed: bytes and size arrive without a request".to_owned()),
        Err(why) => (Mode::Fallback, why),
    }
}

fn choose(choice: ModeChoice, tier1: &Arc<Tier1>) -> Result<(Mode, String), MountError> {
    let chosen = choose_by_memory(choice, tier1)?;
    if chosen.0 == Mode::Passthrough && tier1.has_spill() {
        probe_spill(tier1).map_err(|reason| MountError::Spill { reason })?;
    }
    Ok(chosen)
}

/// Tests passthrough for the spill: a mount has one mode, so what works for memory must work for the spill too.
fn probe_spill(tier1: &Arc<Tier1>) -> Result<(), String> {
    let backing = tier1.create_spilled(Some(0)).map_err(|error| error.to_string())?;
    let descriptor = backing.read_fd().map_err(|error| error.to_string())?;
    probe::passthrough(descriptor.as_fd())
}

fn choose_by_memory(choice: ModeChoice, tier1: &Arc<Tier1>) -> Result<(Mode, String), MountError> {
    match choice {
        ModeChoice::Fallback => Ok((Mode::Fallback, "asked for by the settings".to_owned())),
        ModeChoice::Auto => Ok(probe_mode(tier1)),
        ModeChoice::Passthrough => match probe_mode(tier1) {
            (Mode::Fallback, reason) => Err(MountError::NoPassthrough { reason }),
            works => Ok(works),
        },
    }
}

#[derive(Debug)]
struct Served {
    shared: Arc<Shared>,
    device: Arc<Device>,
    invalidator: Invalidator,
    ended: Arc<Ended>,
    init: InitExchange,
    /// Major and minor number; `None` where the mount was not found in the table of mounts.
    number: Option<(u32, u32)>,
}

/// Whether the session's threads have ended, and with what error.
#[derive(Debug, Default)]
struct Ended {
    result: Mutex<Option<Result<(), String>>>,
    changed: Condvar,
}

fn serve(
    settings: SessionSettings,
    path: &Path,
    mode: Mode,
    device: Device,
    kept: Option<&InitExchange>,
    namespace: Arc<Namespace>,
    host: Arc<dyn Host>,
) -> Result<Served, MountError> {
    let thread = |source: io::Error| MountError::Thread { path: path.to_owned(), source };
    let handshake = |source: io::Error| MountError::Handshake { path: path.to_owned(), source };
    let device = Arc::new(device);
    let shared = Arc::new(Shared {
        namespace,
        control: ControlDir::new(Arc::clone(&host), SystemTime::now()),
        host,
        counters: RequestCounters::default(),
        awake: if settings.keep_awake { Awake::start().map_err(thread)? } else { Awake::off() },
        data: OnceLock::new(),
        block_size: match mode {
            Mode::Passthrough => BLOCK_SIZE_PASSTHROUGH,
            Mode::Fallback => BLOCK_SIZE_FALLBACK,
        },
        listings: Listings::new(now_ns()),
        invalidator: OnceLock::new(),
    });
    let number = device_at(path);
    match number {
        Some(device) => shared.namespace.set_lock_oracle(Box::new(move |inodes| is_locked(device, inodes))),
        None => {
            tracing::warn!(path = %path.display(), "the mount is not in /proc/self/mountinfo; locks are not seen")
        }
    }
    let adapter = Adapter {
        workers: Workers::start(&shared).map_err(thread)?,
        passthrough: (mode == Mode::Passthrough).then(|| Arc::clone(&device)),
        agreed_before: kept.and_then(InitExchange::agreed),
        shared: Arc::clone(&shared),
    };
    let mut config = Config::default();
    config.n_threads = Some(threads(settings.threads));
    // The kernel checks which users may enter (allow_other); fuser's own check would only repeat it.
    let (session, init) = handshake::begin(adapter, &device, config, kept).map_err(handshake)?;
    if kept.is_some() {
        shared.data().take_up(&shared.namespace).map_err(handshake)?;
        device.resend().map_err(handshake)?;
    }
    shared.data().begin(session.notifier()).map_err(thread)?;
    let invalidator = notify::start(session.notifier()).map_err(thread)?;
    assert!(shared.invalidator.set(invalidator.clone()).is_ok(), "a session begins once");
    let ended = Arc::new(Ended::default());
    let report = Arc::clone(&ended);
    std::thread::Builder::new()
        .name("mount-session".into())
        .spawn(move || {
            let result = session.run().map_err(|error| error.to_string());
            if let Err(error) = &result {
                tracing::error!(error, "the mount's session ended with an error");
            }
            *report.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            report.changed.notify_all();
        })
        .map_err(thread)?;
    Ok(Served { shared, device, invalidator, ended, init, number })
}

fn threads(wanted: usize) -> usize {
    if wanted > 0 {
        return wanted;
    }
    std::thread::available_parallelism()
        .map_or(THREADS_MIN, |cpus| cpus.get().clamp(THREADS_MIN, THREADS_MAX))
}

/// A mount that is being served. Dropping it unmounts lazily.
#[derive(Debug)]
pub struct Mounted {
    record: MountRecord,
    served: Served,
    detached: Mutex<bool>,
}

impl Mounted {
    /// Returns the path of the mount, absolute and without symlinks.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.record.path
    }

    /// Returns the data path in use.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.record.mode
    }

    /// Returns the reason for the mode, in words for `status` and `doctor`.
    #[must_use]
    pub fn reason(&self) -> &str {
        &self.record.reason
    }

    /// Returns the record that the next daemon needs besides the device.
    #[must_use]
    pub fn record(&self) -> &MountRecord {
        &self.record
    }

    /// Returns whether users other than the daemon's may enter.
    #[must_use]
    pub fn allow_other(&self) -> bool {
        self.record.allow_other
    }

    /// Returns the numbers of requests so far, by kind.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.served.shared.counters.snapshot()
    }

    /// Returns how long idle processors were kept awake for requests, over all finished spells.
    #[must_use]
    pub fn kept_awake(&self) -> Duration {
        self.served.shared.awake.held()
    }

    /// Returns the invalidator, which notifies the kernel of changes that did not come through the mount.
    #[must_use]
    pub fn invalidator(&self) -> &Invalidator {
        &self.served.invalidator
    }

    /// Returns the `/dev/fuse` descriptor. A process that holds a duplicate keeps the mount alive without this process.
    #[must_use]
    pub fn device(&self) -> BorrowedFd<'_> {
        self.served.device.as_fd()
    }

    /// Returns whether the mount is still at its path; true where that cannot be determined.
    #[must_use]
    pub fn is_there(&self) -> bool {
        is_ours_at(&self.record.path).unwrap_or(true)
    }

    /// Returns whether a directory belongs to this mount, by whatever path: a bind mount shows it under another one. Follows symbolic
    /// links, and asks the file system of `directory`, which may be this one: not to be called by a thread that serves it.
    ///
    /// # Errors
    /// The directory cannot be examined.
    pub fn holds(&self, directory: &Path) -> io::Result<bool> {
        let device = std::fs::metadata(directory)?.dev();
        Ok(self.served.number == Some((rustix::fs::major(device), rustix::fs::minor(device))))
    }

    /// Unmounts and waits, at most five seconds, for the session to end. If `lazy`, the name goes at once, and open files stay usable until
    /// they are closed or this process ends.
    ///
    /// # Errors
    /// [`MountError::Busy`] names the processes and the paths that they have open; the mount then continues to serve.
    pub fn unmount(&self, lazy: bool) -> Result<(), MountError> {
        let mut detached = self.detached.lock().unwrap_or_else(PoisonError::into_inner);
        // Another mount that has the path now must stay.
        if !*detached && self.is_there() {
            detach(&self.record.path, lazy, self.record.privileged)?;
        }
        *detached = true;
        drop(detached);
        if !self.ended_within(SESSION_END_PATIENCE) {
            tracing::info!(path = %self.record.path.display(), "unmounted, but still in use");
        }
        Ok(())
    }

    /// Blocks until the session has ended, for whatever reason.
    ///
    /// # Errors
    /// If its threads failed; the log has the reason.
    pub fn wait(&self) -> io::Result<()> {
        let ended = &self.served.ended;
        let mut result = ended.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            match &*result {
                Some(Ok(())) => return Ok(()),
                Some(Err(error)) => return Err(io::Error::other(error.clone())),
                None => result = ended.changed.wait(result).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Blocks until the session has ended or the time is up; returns whether the session has ended.
    #[must_use]
    pub fn ended_within(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let ended = &self.served.ended;
        let mut result = ended.result.lock().unwrap_or_else(PoisonError::into_inner);
        while result.is_none() {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            (result, _) = ended.changed.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner);
        }
        true
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let detached = *self.detached.lock().unwrap_or_else(PoisonError::into_inner);
        if !detached
            && !self.ended_within(Duration::ZERO)
            && self.is_there()
            && let Err(error) = detach(&self.record.path, true, self.record.privileged)
        {
            tracing::warn!(%error, "the mount could not be taken away");
        }
    }
}
