//! Bytes between a socket and a file: sendfile out, splice in, or through a buffer where TLS is between.
//!
//! It owns the two halves of a bulk connection and its pipe. It does not own what is moved (`wire`) nor what a failure
//! means. Figures for the choices: design 0001.

use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::pipe::{PipeFlags, SpliceFlags};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest, ReadHalf, WriteHalf};
use tokio::net::TcpStream;

use crate::copy::{read_at, write_at};
use crate::link::{BytesSink, BytesSource};
use crate::range::PIECE_BYTES;
use crate::tcp::stream::Stream;

/// Between TLS and a file; also for bytes that nobody wants. Fits a core's second-level cache.
const BUFFER_BYTES: usize = 256 << 10;

/// A pipe of this size took a quarter less CPU per byte than one of 256 KiB. It is also what an unprivileged process
/// may ask for by default; what the system gives instead is used as it is.
const PIPE_BYTES: usize = 1 << 20;

/// What went wrong while bytes were moved.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The connection; nothing more can be done on it.
    Connection(io::Error),
    /// The file here. `missing_bytes` of the piece have not been taken from the connection yet.
    File { doing: &'static str, missing_bytes: u64, source: io::Error },
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Connection(error)
    }
}

/// Splits a greeted connection in two that work side by side.
pub(crate) fn split(stream: Stream) -> (Receiving, Sending) {
    match stream {
        Stream::Plain(socket) => {
            let socket = Arc::new(socket);
            let receiving = Receiving::Plain { socket: Arc::clone(&socket), pipe: None };
            (receiving, Sending::Plain(socket))
        }
        tls @ Stream::Tls(_) => {
            let (reading, writing) = tokio::io::split(tls);
            let (receiving, sending) = (vec![0; BUFFER_BYTES], vec![0; BUFFER_BYTES]);
            (Receiving::Tls { reading, buffer: receiving }, Sending::Tls { writing, buffer: sending })
        }
    }
}

/// The half that bytes leave by.
#[derive(Debug)]
pub(crate) enum Sending {
    Plain(Arc<TcpStream>),
    Tls { writing: WriteHalf<Stream>, buffer: Vec<u8> },
}

impl Sending {
    /// Sends a header. With `more`, it may wait for the bytes that follow and share their packet.
    pub(crate) async fn header(&mut self, mut bytes: &[u8], more: bool) -> io::Result<()> {
        match self {
            Self::Plain(socket) => {
                let flags = if more { SendFlags::MORE } else { SendFlags::empty() } | SendFlags::NOSIGNAL;
                while !bytes.is_empty() {
                    let sent = socket
                        .async_io(Interest::WRITABLE, || {
                            Ok(rustix::net::send(socket.as_ref(), bytes, flags)?)
                        })
                        .await?;
                    bytes = &bytes[sent..];
                }
                Ok(())
            }
            Self::Tls { writing, .. } => {
                writing.write_all(bytes).await?;
                if more { Ok(()) } else { writing.flush().await }
            }
        }
    }

    /// Sends a piece of a file.
    pub(crate) async fn piece(&mut self, from: &dyn BytesSource, range: &Range<u64>) -> Result<(), Failure> {
        let mut at = range.start;
        match self {
            Self::Plain(socket) => {
                while at < range.end {
                    let missing = usize::try_from(range.end - at).unwrap_or(usize::MAX);
                    let sent = socket.async_io(Interest::WRITABLE, || {
                        Ok(rustix::fs::sendfile(socket.as_ref(), from.file(), Some(&mut at), missing)?)
                    });
                    if sent.await.map_err(blame)? == 0 {
                        return Err(unreadable(io::ErrorKind::UnexpectedEof.into()));
                    }
                }
            }
            Self::Tls { writing, buffer } => {
                while at < range.end {
                    let missing = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(buffer.len());
                    let read = read_at(from, &mut buffer[..missing], at).map_err(unreadable)?;
                    writing.write_all(&buffer[..read]).await?;
                    at += read as u64;
                }
                writing.flush().await?;
            }
        }
        Ok(())
    }
}

fn unreadable(source: io::Error) -> Failure {
    Failure::File { doing: "reading", missing_bytes: 0, source }
}

/// sendfile's errors are of either side.
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

/// The half that bytes come by.
#[derive(Debug)]
pub(crate) enum Receiving {
    Plain { socket: Arc<TcpStream>, pipe: Option<Pipe> },
    Tls { reading: ReadHalf<Stream>, buffer: Vec<u8> },
}

#[derive(Debug)]
pub(crate) struct Pipe {
    out: OwnedFd,
    into: OwnedFd,
    bytes: usize,
}

impl Pipe {
    fn new() -> io::Result<Self> {
        let (out, into) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        // The system may give less, to processes without privileges that have many.
        let bytes = rustix::pipe::fcntl_setpipe_size(&into, PIPE_BYTES)
            .or_else(|_| rustix::pipe::fcntl_getpipe_size(&into))?;
        Ok(Self { out, into, bytes })
    }
}

impl Receiving {
    /// Fills `bytes`, or says that the connection ended before the first of them.
    pub(crate) async fn header<const N: usize>(&mut self) -> io::Result<Option<[u8; N]>> {
        let mut header = [0; N];
        let mut filled = 0;
        while filled < N {
            let rest = &mut header[filled..];
            let read = match self {
                Self::Plain { socket, .. } => {
                    socket.async_io(Interest::READABLE, || socket.try_read(rest)).await?
                }
                Self::Tls { reading, .. } => reading.read(rest).await?,
            };
            match read {
                0 if filled == 0 => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => filled += read,
            }
        }
        Ok(Some(header))
    }

    /// Puts a piece into a file.
    pub(crate) async fn piece(&mut self, into: &dyn BytesSink, range: &Range<u64>) -> Result<(), Failure> {
        let mut at = range.start;
        let unwritable =
            |source, at| Failure::File { doing: "writing", missing_bytes: range.end - at, source };
        match self {
            Self::Plain { socket, pipe } => {
                // Taken out, so that one that holds bytes of a piece that failed is not used again.
                let held = match pipe.take() {
                    Some(pipe) => pipe,
                    None => Pipe::new().map_err(|source| unwritable(source, at))?,
                };
                while at < range.end {
                    let missing = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(held.bytes);
                    let flags = SpliceFlags::MOVE | SpliceFlags::NONBLOCK;
                    let taken = socket.async_io(Interest::READABLE, || {
                        Ok(rustix::pipe::splice(socket.as_ref(), None, &held.into, None, missing, flags)?)
                    });
                    let taken = taken.await?;
                    if taken == 0 {
                        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                    }
                    empty(&held, into, at, taken).map_err(|source| unwritable(source, at + taken as u64))?;
                    at += taken as u64;
                }
                *pipe = Some(held);
            }
            Self::Tls { reading, buffer } => {
                while at < range.end {
                    let missing = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(buffer.len());
                    let read = reading.read(&mut buffer[..missing]).await?;
                    if read == 0 {
                        return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
                    }
                    let after = at + read as u64;
                    write_at(into, &buffer[..read], at).map_err(|source| unwritable(source, after))?;
                    at = after;
                }
            }
        }
        Ok(())
    }

    /// Takes bytes that nobody wants from the connection, so that what follows them can be read.
    pub(crate) async fn discard(&mut self, bytes: u64) -> io::Result<()> {
        assert!(bytes <= PIECE_BYTES, "more than a piece was asked for");
        let mut buffer = vec![0; BUFFER_BYTES];
        let mut missing = usize::try_from(bytes).unwrap_or(usize::MAX);
        while missing > 0 {
            let rest = &mut buffer[..missing.min(BUFFER_BYTES)];
            let read = match self {
                Self::Plain { socket, .. } => {
                    socket.async_io(Interest::READABLE, || socket.try_read(rest)).await?
                }
                Self::Tls { reading, .. } => reading.read(rest).await?,
            };
            if read == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            missing -= read;
        }
        Ok(())
    }

    /// Whether a connection that waits was left alone: neither ended nor spoken to. TLS shows it at the next use only.
    pub(crate) fn is_quiet(&self) -> bool {
        match self {
            Self::Plain { socket, .. } => {
                matches!(socket.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            Self::Tls { .. } => true,
        }
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
