//! The daemon's side: the descriptors it received at its start, and passing on what its successor needs.
//!
//! Owns: which manager there is (a Tidemark keeper, systemd, or none) and how it is contacted. Does not own: the meaning of the
//! descriptors.

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

/// Names of the descriptors that a Tidemark keeper passes, from [`FIRST_PASSED`] on, joined by colons.
pub(crate) const PASSED_VARIABLE: &str = "TIDEMARK_KEPT";
/// The name under which the socket to the keeper is passed.
pub(crate) const KEEPER_NAME: &str = "keeper";

/// Most descriptors passed to one process; more than any Tidemark process needs.
pub(crate) const PASSED_MAX: usize = 64;

/// The keeper of this process's descriptors.
#[derive(Debug)]
pub enum Keeper {
    /// A Tidemark keeper, by a socket that ends with it.
    Ours(OwnedFd),
    /// A service manager with a descriptor store: the address of its socket.
    Systemd(SocketAddrUnix, OwnedFd),
    /// None: when this process dies, everything is lost.
    Nobody,
}

/// The descriptors and the keeper that this process received at its start.
#[derive(Debug)]
pub struct Inherited {
    pub keeper: Keeper,
    pub descriptors: BTreeMap<String, OwnedFd>,
}

/// A descriptor could not be passed on, so that nothing would outlive this process.
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
    /// Takes over what this process received. To be called once, before anything else.
    ///
    /// # Errors
    /// Descriptors are named but not open: the starter of this process has made a mistake.
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

    /// Returns whether this process was started by a person, so that nothing keeps its descriptors yet.
    #[must_use]
    pub fn is_first(&self) -> bool {
        matches!(self.keeper, Keeper::Nobody)
    }
}

fn passed(first: RawFd, names: &str) -> io::Result<BTreeMap<String, OwnedFd>> {
    let numbered = (first..).zip(names.split(':').take(PASSED_MAX));
    numbered.map(|(number, name)| Ok((name.to_owned(), take_passed(number)?))).collect()
}

/// Returns systemd if it keeps descriptors for this unit: with `FileDescriptorStoreMax=` it sets `FDSTORE` (systemd 254). Without that a
/// Tidemark keeper keeps them, and passes the status on to systemd (`keep`).
fn systemd() -> io::Result<Keeper> {
    let room = std::env::var("FDSTORE").ok().and_then(|room| room.parse::<u32>().ok()).unwrap_or(0);
    if room > 0 { service_manager() } else { Ok(Keeper::Nobody) }
}

/// Returns the service manager that started this process and expects messages, by path or by abstract name.
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
    /// Returns the service manager for a process that keeps descriptors itself: the manager gets status messages, and keeps nothing.
    pub(crate) fn only_to_be_told() -> Self {
        service_manager().unwrap_or_else(|error| {
            tracing::warn!(%error, "NOTIFY_SOCKET cannot be used; the service manager is told nothing");
            Self::Nobody
        })
    }

    /// Sends a message to the service manager, without waiting for it.
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

    /// Stores a duplicate under a name until [`Keeper::remove`]; the next daemon receives it.
    ///
    /// # Errors
    /// The keeper did not receive the message.
    pub fn put(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), StoreError> {
        self.say(&Message::Store { name: name.to_owned() }, Some(fd), "a descriptor to keep")
    }

    /// Closes a kept descriptor.
    ///
    /// # Errors
    /// The keeper did not receive the message.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        self.say(&Message::Remove { name: name.to_owned() }, None, "a descriptor to let go")
    }

    /// Reports that this process serves.
    ///
    /// # Errors
    /// The keeper did not receive the message.
    pub fn ready(&self) -> Result<(), StoreError> {
        self.say(&Message::Ready, None, "that the mount serves")
    }

    /// Reports that this process ends on purpose, and is not to be started again.
    ///
    /// # Errors
    /// The keeper did not receive the message.
    pub fn stopping(&self) -> Result<(), StoreError> {
        self.say(&Message::Stopping, None, "that this is the end")
    }

    /// Reports the path of the mount.
    ///
    /// # Errors
    /// The keeper did not receive the message.
    pub fn mounted(&self, path: &Path) -> Result<(), StoreError> {
        let path = path.as_os_str().as_bytes().to_vec();
        self.say(&Message::Mount { path }, None, "where the mount is")
    }

    /// Announces that Tier-1 is about to be taken over. When this returns, the keeper leaves Tier-1 alone. Blocks until the keeper
    /// confirms, some microseconds.
    ///
    /// # Errors
    /// The keeper did not receive the message.
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

    /// Reports that the loop of this process has turned. Never waits: a keeper that is behind receives the next report.
    pub fn turned(&self) {
        // systemd asks for life signs with WatchdogSec=; unrequested ones would only fill its queue.
        if !self.is_ours() && std::env::var_os("WATCHDOG_USEC").is_none() {
            return;
        }
        let what = "that the loop turned";
        if let Err(error) = self.send(&Message::Turned, None, SendFlags::NOSIGNAL | SendFlags::DONTWAIT, what)
        {
            tracing::debug!(%error, "no life sign was given");
        }
    }

    /// Returns whether a Tidemark keeper keeps the descriptors, and not systemd.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        matches!(self, Self::Ours(_))
    }

    /// Returns a descriptor that becomes readable when the keeper is gone, or `None` where there is nothing to watch.
    ///
    /// # Errors
    /// If this process may open no more descriptors.
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
