//! The keeper's loop: one child that serves, and the reaction when it dies, is replaced, or ends.
//!
//! Owns: the child, the kept descriptors, signals. Does not own: the messages (`message`), the pauses (`restart`).

use crate::control::{Listener, Question};
use crate::message::{MESSAGE_MAX_BYTES, Message};
use crate::names;
use crate::pulse::{self, Pulse};
use crate::restart::{Restart, Verdict};
use crate::run_ahead::RunAhead;
use crate::stand_in::StandIn;
use crate::store::{KEEPER_NAME, Keeper, PASSED_MAX, PASSED_VARIABLE};
use crate::sys::{self, Told};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketFlags, SocketType,
    recvmsg, socketpair,
};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

/// How long a daemon that replaces another may take to serve.
const REPLACE_PATIENCE: Duration = Duration::from_secs(10);

/// How long a daemon that was told twice to end may take. A serving daemon unmounts, waits for pending answers and for blocking work, some
/// 12 s together; a daemon that never served has nothing to lose.
const END_PATIENCE: Duration = Duration::from_secs(30);
const END_PATIENCE_BEFORE_SERVING: Duration = Duration::from_secs(1);

/// Longest sleep of the loop while nothing happens.
const LOOK_AROUND: Duration = Duration::from_secs(1);

/// The daemon to keep, and its surroundings.
#[derive(Debug)]
pub struct Plan {
    /// Arguments of the daemon, without the program's name.
    pub arguments: Vec<OsString>,
    /// Directory of the control socket and the keeper's own status.
    pub state_dir: PathBuf,
    /// Descriptors that are kept from the start, by name.
    pub descriptors: BTreeMap<String, OwnedFd>,
}

/// How keeping ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kept {
    /// The daemon ended on purpose, or never began, with this exit code.
    Ended(u8),
    /// The keeper was told to end while no daemon was there to end in order: whatever was not in Tier-3 is gone.
    Abandoned,
}

/// A binary, by its open file: it can be started whatever happens to its path.
#[derive(Debug)]
struct Binary {
    file: File,
}

#[derive(Debug)]
struct Daemon {
    child: Child,
    pidfd: OwnedFd,
    socket: OwnedFd,
    started: Instant,
    ready: Option<Instant>,
    stopping: bool,
    /// Whether the daemon was told to end.
    told: bool,
    /// When the daemon was told to end for the second time.
    told_again: Option<Instant>,
    pulse: Pulse,
    /// Whether the daemon closed its end of the socket: it is about to die, and sends nothing more.
    hung_up: bool,
    /// Makes space ready in the daemon's place, until the daemon takes over.
    ahead: Option<RunAhead>,
}

#[derive(Debug)]
struct Keep {
    plan: Plan,
    signals: OwnedFd,
    listener: Listener,
    binary: Binary,
    /// The service manager that started this process and expects status messages, such as systemd.
    manager: Keeper,
    restart: Restart,
    mount: Option<PathBuf>,
    /// Whether a daemon has served: from then on there is something to keep.
    served: bool,
    /// How often the keeper was told to end.
    terminations: u32,
}

/// Starts `ckptd` (this very binary) and keeps it, until it ends on purpose.
///
/// # Errors
/// Failures that keep the keeper itself from starting.
pub fn keep(plan: Plan) -> io::Result<Kept> {
    let signals = sys::watch_signals()?;
    let listener = Listener::bind(&plan.state_dir)?;
    let binary = Binary { file: File::open("/proc/self/exe")? };
    let mut keep = Keep {
        plan,
        signals,
        listener,
        binary,
        manager: Keeper::only_to_be_told(),
        restart: Restart::default(),
        mount: None,
        served: false,
        terminations: 0,
    };
    let kept = keep.run();
    keep.clear_status();
    kept
}

impl Binary {
    fn open(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::PermissionsExt;
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        let can_run = metadata.is_file() && metadata.permissions().mode() & 0o111 != 0;
        if can_run { Ok(Self { file }) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        command.arg0("ckptd");
        command
    }
}

impl Daemon {
    /// Returns the longest time to wait for an event of the daemon.
    fn patience(&self) -> Duration {
        self.ahead.as_ref().map_or(LOOK_AROUND, RunAhead::patience).min(LOOK_AROUND)
    }

    /// Returns the descriptor that becomes readable when the daemon sends a message, or dies. A socket that was hung up is always readable,
    /// and its process takes tens of milliseconds until its death; polling it would waste that time.
    fn voice(&self) -> &OwnedFd {
        if self.hung_up { &self.pidfd } else { &self.socket }
    }

    fn run_ahead(&mut self) {
        self.ahead.take_if(|ahead| !ahead.goes_on());
    }
}

impl Keep {
    fn run(&mut self) -> io::Result<Kept> {
        let mut daemon = self.start()?;
        loop {
            let status = self.serve(&mut daemon)?;
            if daemon.stopping || !self.served {
                return Ok(Kept::Ended(exit_code(status)));
            }
            if daemon.told_again.is_some() {
                // The daemon hung, or was killed by a caller that would not wait either.
                self.abandon();
                return Ok(Kept::Abandoned);
            }
            let mut ready = daemon.ready;
            let mut last = how(status);
            daemon = loop {
                let Verdict { pause, crash_loop } = self.restart.died(ready, Instant::now());
                tracing::error!(pid = daemon.child.id(), how = %last, deaths = self.restart.deaths,
                    "the daemon died; it is started again, and what was open stays open");
                if crash_loop {
                    self.write_status(&last, pause);
                } else {
                    self.clear_status();
                }
                if pause > Duration::ZERO
                    && let Some(abandoned) = self.wait(pause)?
                {
                    return Ok(abandoned);
                }
                match self.start() {
                    Ok(next) => break next,
                    // No process or no descriptor was available: treated like any death, since the descriptors must stay.
                    Err(error) => (ready, last) = (None, format!("not started: {error}")),
                }
            };
        }
    }

    /// Starts the present binary with all kept descriptors.
    fn start(&self) -> io::Result<Daemon> {
        // Before the start, which takes some milliseconds, so that growth meanwhile is noticed.
        let ahead = if self.served { self.begin_run_ahead() } else { None };
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let kept = &self.plan.descriptors;
        let count = kept.len() + 1;
        let mut passed = vec![sys::above(theirs.as_fd(), count)?];
        for fd in kept.values() {
            passed.push(sys::above(fd.as_fd(), count)?);
        }
        drop(theirs);
        let names: Vec<_> = std::iter::once(KEEPER_NAME).chain(kept.keys().map(String::as_str)).collect();
        let mut command = self.binary.command();
        // In a process group of its own: a terminal's interrupt goes to the keeper, which passes it on once.
        command.args(&self.plan.arguments).env(PASSED_VARIABLE, names.join(":")).process_group(0);
        // systemd listens to this process only, which passes the daemon's status on.
        for variable in ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"] {
            command.env_remove(variable);
        }
        sys::pass(&mut command, passed)?;
        let mut child = command.spawn()?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).expect("a child has a number");
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                // Its death would go unnoticed.
                child.kill()?;
                child.wait()?;
                return Err(error.into());
            }
        };
        let started = Instant::now();
        Ok(Daemon {
            child,
            pidfd,
            socket: ours,
            started,
            ready: None,
            stopping: false,
            told: false,
            told_again: None,
            pulse: Pulse::default(),
            hung_up: false,
            ahead,
        })
    }

    /// Waits on one daemon until it has died, and replaces it when a caller requests that.
    fn serve(&mut self, daemon: &mut Daemon) -> io::Result<ExitStatus> {
        loop {
            let watched = [&self.signals, &daemon.pidfd, daemon.voice(), &self.listener.socket];
            let [signals, dead, said, asked] = wait_for(watched, Some(daemon.patience()))?;
            self.attend(daemon, said || dead);
            if dead {
                return daemon.child.wait();
            }
            if signals && self.is_told_to_end() {
                self.terminations += 1;
                self.pass_on(daemon);
            }
            if asked && let Ok(question) = self.listener.accept() {
                self.replace(daemon, question)?;
            }
            self.look_after(daemon, Instant::now())?;
            self.listener.stay(&self.plan.state_dir);
        }
    }

    /// Takes one signal, and returns whether it is one to end.
    fn is_told_to_end(&self) -> bool {
        match sys::take_signal(&self.signals) {
            Some(Told::End) => true,
            Some(Told::Nothing(signal)) => {
                tracing::info!(signal, "nothing follows from this signal; SIGTERM ends ckptd in order");
                false
            }
            None => false,
        }
    }

    /// Kills a daemon that fails to do what no other process can do for it: end when it was told twice, or work while requests wait.
    fn look_after(&self, daemon: &mut Daemon, now: Instant) -> io::Result<()> {
        let patience = if self.served { END_PATIENCE } else { END_PATIENCE_BEFORE_SERVING };
        if daemon.told_again.is_some_and(|told| now.saturating_duration_since(told) >= patience) {
            let (pid, waited_s) = (daemon.child.id(), patience.as_secs());
            tracing::error!(pid, waited_s, "told twice to end, the daemon lives; it is killed");
            return daemon.child.kill();
        }
        if !daemon.pulse.is_silent(now) {
            return Ok(());
        }
        let requests_wait = self.plan.descriptors.get(names::DEVICE).is_some_and(is_readable);
        let Some(facts) = pulse::facts_of(daemon.child.id(), requests_wait) else { return Ok(()) };
        if let Some(silent) = daemon.pulse.look(now, facts) {
            let (pid, silent_s) = (daemon.child.id(), silent.as_secs());
            tracing::error!(
                pid,
                silent_s,
                "the daemon hangs: its loop does not turn, and programs wait; it is killed, and what is open stays open"
            );
            daemon.child.kill()?;
        }
        Ok(())
    }

    /// Unmounts, because no daemon serves the mount any more.
    fn abandon(&self) {
        if let Some(mount) = &self.mount {
            unmount(mount);
        }
    }

    fn begin_run_ahead(&self) -> Option<RunAhead> {
        let kept = &self.plan.descriptors;
        let (files, ballast) = (kept.get(names::FILES)?, kept.get(names::BALLAST)?);
        match RunAhead::begin(files.as_fd(), ballast.as_fd()) {
            Ok(ahead) => Some(ahead),
            Err(error) => {
                tracing::warn!(%error, "space is not made ready while the daemon is away");
                None
            }
        }
    }

    /// Tells a daemon to end; the second time, to end at once.
    fn pass_on(&self, daemon: &mut Daemon) {
        if daemon.told {
            daemon.told_again.get_or_insert_with(Instant::now);
        }
        daemon.told = true;
        // The daemon may have died just now; then the loop notices that.
        let _ = pidfd_send_signal(&daemon.pidfd, Signal::TERM);
    }

    /// Does everything that is due for a daemon after an event: reads all its messages, and makes room for growing files until it takes
    /// over. A dead daemon's last messages count too, since they may carry descriptors to keep.
    fn attend(&mut self, daemon: &mut Daemon, said: bool) {
        // Messages first: one of them ends the run-ahead.
        if said {
            while self.hear(daemon) {}
        }
        daemon.run_ahead();
    }

    /// Reads one message; returns false when there is none.
    fn hear(&mut self, daemon: &mut Daemon) -> bool {
        let mut text = [0; MESSAGE_MAX_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let mut iov = [io::IoSliceMut::new(&mut text)];
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let received = match recvmsg(&daemon.socket, &mut iov, &mut ancillary, flags) {
            Ok(received) if received.bytes > 0 => received,
            Ok(_) => {
                daemon.hung_up = true;
                return false;
            }
            Err(_) => return false,
        };
        let mut fds = ancillary.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let fd = fds.next().and_then(|mut fds| fds.next());
        drop(fds);
        match Message::decode(&text[..received.bytes]) {
            Some(Message::Store { name }) => {
                let kept = &mut self.plan.descriptors;
                match fd {
                    Some(fd) if kept.contains_key(&name) || kept.len() + 1 < PASSED_MAX => {
                        kept.insert(name, fd);
                    }
                    Some(_) => tracing::error!(name, most = PASSED_MAX, "no more descriptors are kept"),
                    None => tracing::error!(name, "a descriptor to keep did not come with its name"),
                }
            }
            Some(Message::Remove { name }) => drop(self.plan.descriptors.remove(&name)),
            Some(Message::Mount { path }) => self.mount = Some(PathBuf::from(OsString::from_vec(path))),
            Some(Message::Stopping) => {
                daemon.stopping = true;
                self.manager.tell(&Message::Stopping);
            }
            Some(Message::Turned) => {
                daemon.pulse.turned(Instant::now());
                if std::env::var_os("WATCHDOG_USEC").is_some() {
                    self.manager.tell(&Message::Turned);
                }
            }
            // Sent when the mount serves, and again when commands are answered too.
            Some(Message::Ready) if daemon.ready.is_some() => {}
            Some(Message::Ready) => {
                daemon.ready = Some(Instant::now());
                if !self.served {
                    self.manager.tell(&Message::Ready);
                }
                self.served = true;
                let took = daemon.started.elapsed();
                tracing::info!(pid = daemon.child.id(), took_ms = took.as_millis(), "the daemon serves");
                if self.terminations > 0 && !daemon.told {
                    // The daemon before died while it was ending; this one must end too. Told twice, it would not wait.
                    self.pass_on(daemon);
                }
            }
            Some(Message::Taking) => {
                // From here on Tier-1 belongs to the daemon. If the daemon has not died already, it receives this.
                daemon.ahead = None;
                let _ = rustix::net::send(&daemon.socket, &[1], SendFlags::NOSIGNAL);
            }
            None => tracing::debug!("a message that is not known"),
        }
        true
    }

    /// Replaces the daemon by another binary; by its own again when that does not serve in time.
    fn replace(&mut self, daemon: &mut Daemon, question: Question) -> io::Result<()> {
        if daemon.ready.is_none() || daemon.stopping || self.terminations > 0 {
            question.refused("the daemon does not serve now: it is starting or ending; nothing was replaced");
            return Ok(());
        }
        let new = match Binary::open(&question.binary) {
            Ok(new) => new,
            Err(error) => {
                let binary = question.binary.display();
                question.refused(&format!("{binary} cannot be run: {error}; nothing was replaced"));
                return Ok(());
            }
        };
        let old = std::mem::replace(&mut self.binary, new);
        tracing::info!(binary = %question.binary.display(), "replacing the daemon");
        // As in a crash: the daemon's state is journaled at every moment.
        let _ = daemon.child.kill();
        daemon.child.wait()?;
        while self.hear(daemon) {}
        if daemon.stopping {
            // It ended in the meantime, in order: there is nothing to go on with, which the loop finds.
            question.refused("the daemon was ending; nothing was replaced");
            return Ok(());
        }
        let failed = match self.start_and_wait() {
            Ok(next) => {
                *daemon = next;
                self.restart.replaced();
                question.ready(daemon.child.id());
                return Ok(());
            }
            Err(failed) => failed,
        };
        tracing::error!(%failed, "the new daemon does not serve; the old one is started again");
        self.binary = old;
        match self.start_and_wait() {
            Ok(again) => {
                *daemon = again;
                question
                    .refused(&format!("the new daemon did not serve: {failed}; the old one serves again"));
            }
            Err(second) => {
                question.refused(&format!(
                    "the new daemon did not serve: {failed}; and the old one does not either: {second}; see its log"
                ));
                // It is dead, which the loop finds and goes on from as from any death.
            }
        }
        Ok(())
    }

    /// Starts the present binary and waits, up to a limit, until it serves. A daemon that does not serve in time is killed.
    fn start_and_wait(&mut self) -> io::Result<Daemon> {
        let mut daemon = self.start()?;
        let give_up = daemon.started + REPLACE_PATIENCE;
        while daemon.ready.is_none() {
            let pause = daemon.patience().min(Duration::from_millis(50));
            let [dead, said] = wait_for([&daemon.pidfd, daemon.voice()], Some(pause))?;
            self.attend(&mut daemon, said || dead);
            if dead {
                let status = daemon.child.wait()?;
                return Err(io::Error::other(format!("it ended before it served ({})", how(status))));
            }
            if Instant::now() >= give_up {
                daemon.child.kill()?;
                daemon.child.wait()?;
                return Err(io::Error::other(format!(
                    "it did not serve within {} s",
                    REPLACE_PATIENCE.as_secs()
                )));
            }
        }
        Ok(daemon)
    }

    /// Waits between two starts: for the pause to pass, for a signal to end, or for another binary. Meanwhile serves open files.
    fn wait(&mut self, pause: Duration) -> io::Result<Option<Kept>> {
        let until = Instant::now() + pause;
        let mut ahead = self.begin_run_ahead();
        let mut stand_in = self.begin_stand_in();
        if let Some(answered) =
            stand_in.as_ref().and_then(|standing| standing.answered().try_clone_to_owned().ok())
        {
            self.plan.descriptors.insert(names::ANSWERED.to_owned(), answered);
        }
        loop {
            let Some(left) = until.checked_duration_since(Instant::now()) else { return Ok(None) };
            let tick = ahead.as_ref().map_or(left, RunAhead::patience);
            let device = stand_in.as_ref().map_or(&self.signals, StandIn::device);
            let [signals, asked, requested] =
                wait_for([&self.signals, &self.listener.socket, device], Some(left.min(tick)))?;
            if signals && self.is_told_to_end() {
                self.terminations += 1;
                if self.terminations == 1 {
                    // Starts another daemon, to end in order.
                    return Ok(None);
                }
                self.abandon();
                return Ok(Some(Kept::Abandoned));
            }
            ahead.take_if(|ahead| !ahead.goes_on());
            if requested
                && let Some(standing) = &mut stand_in
                && let Err(error) = standing.serve_one()
            {
                tracing::error!(%error, "open files are not answered until the next start");
                stand_in = None;
            }
            if asked && let Ok(question) = self.listener.accept() {
                match Binary::open(&question.binary) {
                    Ok(new) => {
                        self.binary = new;
                        self.restart.replaced();
                        self.clear_status();
                        question.refused(
                            "the daemon was in a crash loop; the new one is being started, see status",
                        );
                        return Ok(None);
                    }
                    Err(error) => {
                        question.refused(&format!("{} cannot be run: {error}", question.binary.display()));
                    }
                }
            }
        }
    }

    fn begin_stand_in(&self) -> Option<StandIn> {
        let kept = &self.plan.descriptors;
        let before = kept.get(names::ANSWERED).map(AsFd::as_fd);
        match StandIn::begin(kept.get(names::DEVICE)?.as_fd(), before) {
            Ok(standing) => Some(standing),
            Err(error) => {
                tracing::error!(%error, "open files are not answered until the next start");
                None
            }
        }
    }

    fn status_path(&self) -> PathBuf {
        self.plan.state_dir.join("keeper.json")
    }

    /// Writes for `ckptctl status` what is wrong while no daemon answers it.
    fn write_status(&self, last: &str, pause: Duration) {
        tracing::error!(deaths = self.restart.deaths, %last, pause_ms = pause.as_millis(),
            "crash loop: the mount and what is open stay; the next start waits");
        let text = format!(
            "{{\"state\":\"crash_loop\",\"keeper_pid\":{},\"deaths\":{},\"last_death\":\"{}\",\"next_start_ms\":{}}}\n",
            std::process::id(),
            self.restart.deaths,
            last,
            pause.as_millis()
        );
        if let Err(error) = write_closed(&self.status_path(), &text) {
            tracing::warn!(%error, "the keeper's status was not written");
        }
    }

    fn clear_status(&self) {
        // Usually there is no such file.
        let _ = std::fs::remove_file(self.status_path());
    }
}

/// Waits until one of the descriptors is readable, or the time is up.
fn wait_for<const N: usize>(fds: [&OwnedFd; N], time: Option<Duration>) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|fd| PollFd::new(fd, PollFlags::IN));
    let time = time.map(|time| Timespec::try_from(time).expect("pauses are short"));
    match poll(&mut polled, time.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(polled.map(|fd| !fd.revents().is_empty())),
        Err(errno) => Err(errno.into()),
    }
}

/// Replaces a file of the state directory, readable for its owner only. Follows no link.
fn write_closed(path: &Path, text: &str) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options.open(path)?.write_all(text.as_bytes())
}

/// Returns whether a read would find something now.
fn is_readable(fd: &OwnedFd) -> bool {
    wait_for([fd], Some(Duration::ZERO)).is_ok_and(|[readable]| readable)
}

fn unmount(path: &Path) {
    use rustix::mount::UnmountFlags;
    match rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) => tracing::warn!(path = %path.display(), "unmounted without a daemon"),
        Err(error) => tracing::error!(path = %path.display(), %error, "could not be unmounted"),
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => u8::try_from(code).unwrap_or(1),
        // The exit code that a shell would give.
        (None, Some(signal)) => u8::try_from(128 + signal).unwrap_or(1),
        (None, None) => 1,
    }
}

fn how(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "no status".to_owned(),
    }
}
