//! The daemon's side: what it was handed at its start, and handing over what its successor needs.
//!
//! Owns: which manager there is (our keeper, systemd, or none) and how it is talked to. Does not own: what the
//! descriptors mean.

use crate::message::Message;
use crate::sys::{FIRST_LISTEN, FIRST_PASSED, forget_variable, take_passed};
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg, sendmsg_addr,
};
use std::collections::BTreeMap;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Names of the descriptors that our keeper passes, from [`FIRST_PASSED`] on, joined by colons.
pub(crate) const PASSED_VARIABLE: &str = "TIDEMARK_KEPT";
/// The socket to our keeper is passed under this name.
pub(crate) const KEEPER_NAME: &str = "keeper";

/// Descriptors handed to one process; more than anything of ours needs.
pub(crate) const PASSED_MAX: usize = 64;

/// Who keeps descriptors for this process.
#[derive(Debug)]
pub enum Keeper {
    /// Our keeper, by a socket that ends when it does.
    Ours(OwnedFd),
    /// A service manager with a descriptor store: the address of its socket.
    Systemd(SocketAddrUnix, OwnedFd),
    /// Nobody: when this process dies, everything goes.
    Nobody,
}

/// What this process was handed.
#[derive(Debug)]
pub struct Inherited {
    pub keeper: Keeper,
    pub descriptors: BTreeMap<String, OwnedFd>,
}

/// A descriptor could not be handed over, so that nothing would outlive this process.
#[derive(Debug)]
pub struct StoreError {
    what: &'static str,
    source: io::Error,
}

impl std::fmt::Display for StoreError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the keeper was not told ({}): is it alive?", self.what)
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

impl Inherited {
    /// Takes what this process was handed, once, first of all.
    ///
    /// # Errors
    /// Descriptors are named and not there: whoever started this process has made a mistake.
    pub fn take() -> io::Result<Self> {
        if let Ok(names) = std::env::var(PASSED_VARIABLE) {
            forget_variable(PASSED_VARIABLE);
            let mut descriptors = passed(FIRST_PASSED, &names)?;
            let missing = || io::Error::other("our keeper passed no socket");
            let socket = descriptors.remove(KEEPER_NAME).ok_or_else(missing)?;
            return Ok(Self { keeper: Keeper::Ours(socket), descriptors });
        }
        let own = std::env::var("LISTEN_PID").is_ok_and(|pid| pid == std::process::id().to_string());
        let names = if own { std::env::var("LISTEN_FDNAMES").unwrap_or_default() } else { String::new() };
        let descriptors = if names.is_empty() { BTreeMap::new() } else { passed(FIRST_LISTEN, &names)? };
        ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"].into_iter().for_each(forget_variable);
        Ok(Self { keeper: systemd()?, descriptors })
    }

    /// A process of ours that was started by a person, and has nobody yet to keep anything.
    #[must_use]
    pub fn is_first(&self) -> bool {
        matches!(self.keeper, Keeper::Nobody)
    }
}

fn passed(first: RawFd, names: &str) -> io::Result<BTreeMap<String, OwnedFd>> {
    let numbered = (first..).zip(names.split(':').take(PASSED_MAX));
    numbered.map(|(number, name)| Ok((name.to_owned(), take_passed(number)?))).collect()
}

/// systemd keeps descriptors for a unit with `FileDescriptorStoreMax=`, which it says with `FDSTORE` (systemd 254). Without that a
/// keeper of ours keeps them, and tells systemd how things stand (`keep`).
fn systemd() -> io::Result<Keeper> {
    let room = std::env::var("FDSTORE").ok().and_then(|room| room.parse::<u32>().ok()).unwrap_or(0);
    if room > 0 { service_manager() } else { Ok(Keeper::Nobody) }
}

/// Whoever started this process and wants to hear of it, by path or by abstract name.
fn service_manager() -> io::Result<Keeper> {
    let Some(path) = std::env::var_os("NOTIFY_SOCKET") else { return Ok(Keeper::Nobody) };
    let address = match path.as_bytes().split_first() {
        Some((b'@', name)) => SocketAddrUnix::new_abstract_name(name)?,
        _ => SocketAddrUnix::new(Path::new(&path))?,
    };
    let socket = rustix::net::socket_with(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::DGRAM,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?;
    Ok(Keeper::Systemd(address, socket))
}

impl Keeper {
    /// The service manager of a process that keeps by itself: it is told how things stand, and keeps nothing.
    pub(crate) fn only_to_be_told() -> Self {
        service_manager().unwrap_or_else(|error| {
            tracing::warn!(%error, "NOTIFY_SOCKET cannot be used; the service manager is told nothing");
            Self::Nobody
        })
    }

    /// Tells the service manager, without waiting for it.
    pub(crate) fn tell(&self, message: &Message) {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if let Err(error) = self.send(message, None, flags, "the service manager") {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(
                error,
                ?message,
                "the service manager was not told; does NOTIFY_SOCKET name a socket that lives?"
            );
        }
    }

    /// Keeps a duplicate under a name until [`Keeper::remove`]; it is handed to the next daemon.
    ///
    /// # Errors
    /// Nobody heard it.
    pub fn put(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), StoreError> {
        self.say(&Message::Store { name: name.to_owned() }, Some(fd), "a descriptor to keep")
    }

    /// Lets a kept descriptor go.
    ///
    /// # Errors
    /// Nobody heard it.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        self.say(&Message::Remove { name: name.to_owned() }, None, "a descriptor to let go")
    }

    /// This process serves.
    ///
    /// # Errors
    /// Nobody heard it.
    pub fn ready(&self) -> Result<(), StoreError> {
        self.say(&Message::Ready, None, "that the mount serves")
    }

    /// This process ends on purpose, and is not to be started again.
    ///
    /// # Errors
    /// Nobody heard it.
    pub fn stopping(&self) -> Result<(), StoreError> {
        self.say(&Message::Stopping, None, "that this is the end")
    }

    /// Where the mount is.
    ///
    /// # Errors
    /// Nobody heard it.
    pub fn mounted(&self, path: &Path) -> Result<(), StoreError> {
        let path = path.as_os_str().as_bytes().to_vec();
        self.say(&Message::Mount { path }, None, "where the mount is")
    }

    /// Tier-1 is about to be taken over: when this returns, our keeper does nothing to it any more. Blocks for that, some
    /// microseconds.
    ///
    /// # Errors
    /// Nobody heard it.
    pub fn taking(&self) -> Result<(), StoreError> {
        let Self::Ours(socket) = self else { return Ok(()) };
        let what = "that Tier-1 is taken over";
        self.say(&Message::Taking, None, what)?;
        let mut heard = [0; 1];
        match rustix::net::recv(socket, &mut heard, rustix::net::RecvFlags::empty()) {
            Ok((_, 1)) => Ok(()),
            Ok(_) => Err(StoreError { what, source: io::ErrorKind::UnexpectedEof.into() }),
            Err(errno) => Err(StoreError { what, source: errno.into() }),
        }
    }

    /// This process's loop has turned. Never waits: a keeper that is behind hears the next time.
    pub fn turned(&self) {
        // systemd asks for life signs with WatchdogSec=, and others would only fill its queue.
        if !self.is_ours() && std::env::var_os("WATCHDOG_USEC").is_none() {
            return;
        }
        let what = "that the loop turned";
        if let Err(error) = self.send(&Message::Turned, None, SendFlags::NOSIGNAL | SendFlags::DONTWAIT, what)
        {
            tracing::debug!(%error, "no life sign was given");
        }
    }

    /// Whether a process of ours keeps, and not systemd.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        matches!(self, Self::Ours(_))
    }

    /// A descriptor that becomes readable when our keeper is gone; none where there is nothing to watch.
    ///
    /// # Errors
    /// When this process may open no more.
    pub fn watch(&self) -> io::Result<Option<OwnedFd>> {
        match self {
            Self::Ours(socket) => socket.try_clone().map(Some),
            Self::Systemd(..) | Self::Nobody => Ok(None),
        }
    }

    fn say(
        &self,
        message: &Message,
        fd: Option<BorrowedFd<'_>>,
        what: &'static str,
    ) -> Result<(), StoreError> {
        self.send(message, fd, SendFlags::NOSIGNAL, what)
    }

    fn send(
        &self,
        message: &Message,
        fd: Option<BorrowedFd<'_>>,
        flags: SendFlags,
        what: &'static str,
    ) -> Result<(), StoreError> {
        let text = message.encode();
        let iov = [io::IoSlice::new(&text)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fd.into_iter().collect();
        if !fds.is_empty() {
            let pushed = ancillary.push(SendAncillaryMessage::ScmRights(&fds));
            assert!(pushed, "the space is for one descriptor");
        }
        let sent = match self {
            Self::Nobody => return Ok(()),
            Self::Ours(socket) => sendmsg(socket.as_fd(), &iov, &mut ancillary, flags),
            Self::Systemd(address, socket) => {
                sendmsg_addr(socket.as_fd(), address, &iov, &mut ancillary, flags)
            }
        };
        sent.map(|_| ()).map_err(|errno| StoreError { what, source: errno.into() })
    }
}
