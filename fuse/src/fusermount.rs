//! Mounting without privileges, through the set-uid helper of the package fuse3.
//!
//! Owns: calling fusermount3 and receiving the descriptor it opens. Does not own: anything after that.

use crate::error::MountError;
use crate::holders::holders;
use crate::mount::{Attached, SOURCE};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use std::io::{self, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

const HELPER: &str = "fusermount3";

/// The variable that holds the number of the socket over which the helper sends the descriptor (libfuse,
/// util/fusermount.c).
const SOCKET_VARIABLE: &str = "_FUSE_COMMFD";

/// The longest message of the helper, in bytes: a line or two.
const MESSAGE_MAX_BYTES: u64 = 4096;

/// Mounts at `mountpoint`. Other users may enter only if `/etc/fuse.conf` has `user_allow_other`; without it the mount
/// is made for this user alone.
pub(crate) fn attach(mountpoint: &Path) -> Result<Attached, MountError> {
    match call(mountpoint, true) {
        Ok(device) => Ok(Attached { device, privileged: false, allow_other: true }),
        Err(MountError::Fusermount { message, .. }) if message.contains("user_allow_other") => {
            tracing::warn!(
                "other users cannot enter the mount: /etc/fuse.conf does not have user_allow_other"
            );
            Ok(Attached { device: call(mountpoint, false)?, privileged: false, allow_other: false })
        }
        Err(error) => Err(error),
    }
}

/// Unmounts a mount that [`attach`] made.
pub(crate) fn detach(mountpoint: &Path, lazy: bool) -> Result<(), MountError> {
    let mut command = Command::new(HELPER);
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    let output = command
        .arg("--")
        .arg(mountpoint)
        .stdin(Stdio::null())
        .output()
        .map_err(|source| MountError::NoFusermount { path: mountpoint.to_owned(), source })?;
    if output.status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    if message.contains("busy") {
        return Err(MountError::Busy { path: mountpoint.to_owned(), holders: holders(mountpoint) });
    }
    Err(MountError::Fusermount { path: mountpoint.to_owned(), message })
}

fn call(mountpoint: &Path, allow_other: bool) -> Result<OwnedFd, MountError> {
    let failed = |source: io::Error| MountError::Mount { path: mountpoint.to_owned(), source };
    let (ours, theirs) = UnixStream::pair().map_err(failed)?;
    let mut options = format!("fsname={SOURCE},subtype=tidemark,nosuid,nodev,default_permissions");
    if allow_other {
        options.push_str(",allow_other");
    }
    // The socket becomes the helper's standard input, so that no descriptor of this process has to lose its
    // close-on-exec flag while other threads run.
    let mut helper = Command::new(HELPER)
        .arg("-o")
        .arg(options)
        .arg("--")
        .arg(mountpoint)
        .env(SOCKET_VARIABLE, "0")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| MountError::NoFusermount { path: mountpoint.to_owned(), source })?;
    let received = receive_descriptor(&ours);
    let mut message = String::new();
    if let Some(stderr) = helper.stderr.take() {
        // If the message is unreadable, the exit status has to suffice.
        let _ = stderr.take(MESSAGE_MAX_BYTES).read_to_string(&mut message);
    }
    let status = helper.wait().map_err(failed)?;
    match received {
        Ok(Some(device)) if status.success() => Ok(device),
        Ok(_) => Err(MountError::Fusermount {
            path: mountpoint.to_owned(),
            message: format!("{} ({status})", message.trim()),
        }),
        Err(source) => Err(failed(source)),
    }
}

/// Receives the descriptor in the helper's one message, or `None` when the helper closed the socket without sending.
fn receive_descriptor(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = [0u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    Ok(ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}
