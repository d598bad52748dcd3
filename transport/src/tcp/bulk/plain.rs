//! Bytes between a socket and a file without protection: sendfile out, splice in.
//!
//! Owns: the pipe. Only a link without certificates comes here (`halves::split`). Figures for the choices: design 0001.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::pipe::{PipeFlags, SpliceFlags};
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::halves::{BUFFER_BYTES, Failure, ended, read_some, send_all, unreadable, unwritable};
use crate::copy::write_at;
use crate::link::{BytesSink, BytesSource};

/// Size asked for the pipe. A pipe of 1 MiB took a quarter less CPU per byte than one of 256 KiB. An unprivileged process may by default
/// ask for as much; a smaller pipe from the system is used as it is.
const PIPE_BYTES: usize = 1 << 20;

/// The sending half.
#[derive(Debug)]
pub(crate) struct Out(pub(super) Arc<TcpStream>);

impl Out {
    pub(super) async fn header(&mut self, bytes: &[u8], more: bool) -> io::Result<()> {
        let flags = if more { SendFlags::MORE } else { SendFlags::empty() };
        send_all(&self.0, bytes, flags).await
    }

    pub(super) async fn piece(&mut self, from: &dyn BytesSource, range: &Range<u64>) -> Result<(), Failure> {
        let mut at = range.start;
        while at < range.end {
            let missing = usize::try_from(range.end - at).unwrap_or(usize::MAX);
            let sent = self.0.async_io(Interest::WRITABLE, || {
                Ok(rustix::fs::sendfile(self.0.as_ref(), from.file(), Some(&mut at), missing)?)
            });
            if sent.await.map_err(blame)? == 0 {
                return Err(unreadable(io::ErrorKind::UnexpectedEof.into()));
            }
        }
        Ok(())
    }
}

/// Attributes an error of sendfile, which may come from either side.
fn blame(error: io::Error) -> Failure {
    match Errno::from_io_error(&error) {
        Some(
            Errno::PIPE
            | Errno::CONNRESET
            | Errno::CONNABORTED
            | Errno::TIMEDOUT
            | Errno::NOTCONN
            | Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::NETDOWN
            | Errno::NOBUFS,
        ) => Failure::Connection(error),
        _ => unreadable(error),
    }
}

/// The receiving half.
#[derive(Debug)]
pub(crate) struct In {
    pub(super) socket: Arc<TcpStream>,
    pipe: Option<Pipe>,
}

#[derive(Debug)]
struct Pipe {
    out: OwnedFd,
    into: OwnedFd,
    bytes: usize,
}

impl Pipe {
    fn new() -> io::Result<Self> {
        let (out, into) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // The system may give less to unprivileged processes that have many pipes.
        let bytes = rustix::pipe::fcntl_setpipe_size(&into, PIPE_BYTES)
            .or_else(|_| rustix::pipe::fcntl_getpipe_size(&into))?;
        Ok(Self { out, into, bytes })
    }
}

impl In {
    pub(super) fn new(socket: Arc<TcpStream>) -> Self {
        Self { socket, pipe: None }
    }

    pub(super) async fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        read_some(&self.socket, buffer).await
    }

    pub(super) async fn piece(&mut self, into: &dyn BytesSink, range: &Range<u64>) -> Result<(), Failure> {
        let mut at = range.start;
        // Taken out, so that a pipe that holds bytes of a failed piece is not used again.
        let held = match self.pipe.take() {
            Some(pipe) => pipe,
            None => Pipe::new().map_err(|source| unwritable(source, range.end - at))?,
        };
        while at < range.end {
            let missing = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(held.bytes);
            let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
            let taken = self.socket.async_io(Interest::READABLE, || {
                Ok(rustix::pipe::splice(self.socket.as_ref(), None, &held.into, None, missing, flags)?)
            });
            let taken = taken.await?;
            if taken == 0 {
                return Err(ended().into());
            }
            let after = at + taken as u64;
            empty(&held, into, at, taken).map_err(|source| unwritable(source, range.end - after))?;
            at = after;
        }
        self.pipe = Some(held);
        Ok(())
    }
}

/// Moves everything that a pipe holds into a file.
fn empty(pipe: &Pipe, into: &dyn BytesSink, at: u64, mut held: usize) -> io::Result<()> {
    let mut offset = at;
    while held > 0 {
        let spliced = rustix::io::retry_on_intr(|| {
            rustix::pipe::splice(&pipe.out, None, into.file(), Some(&mut offset), held, SpliceFlags::MOVE)
        });
        match spliced {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(moved) => held -= moved,
            // Not every file takes a splice.
            Err(Errno::INVAL) => {
                let mut buffer = vec![0; held.min(BUFFER_BYTES)];
                let read = rustix::io::retry_on_intr(|| rustix::io::read(&pipe.out, &mut buffer[..]))?;
                write_at(into, &buffer[..read], offset)?;
                offset += read as u64;
                held -= read;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
