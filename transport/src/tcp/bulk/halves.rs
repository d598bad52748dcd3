//! The two halves of a bulk connection: plain, encrypted, or authenticated without being encrypted.
//!
//! Owns: which of the three a connection is, and the code they share. Does not own: the pieces that are moved (`wire`) nor what a failure
//! means. Figures for the choices: design 0001 and 0002.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use rustix::net::SendFlags;
use tokio::io::Interest;
use tokio::net::TcpStream;

use super::{authenticated, encrypted, plain};
use crate::link::{BytesSink, BytesSource};
use crate::range::PIECE_BYTES;
use crate::tcp::stream::Stream;

/// Bytes that are protected, checked or discarded at a time. Fits a core's second-level cache.
pub(super) const BUFFER_BYTES: usize = 256 << 10;

/// The error of a transfer, by the side that failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// The connection failed; nothing more can be done on it.
    Connection(io::Error),
    /// The file here failed. `missing_bytes` of the piece have not been read from the connection yet.
    File { doing: &'static str, missing_bytes: u64, source: io::Error },
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Connection(error)
    }
}

pub(super) fn unreadable(source: io::Error) -> Failure {
    Failure::File { doing: "reading", missing_bytes: 0, source }
}

pub(super) fn unwritable(source: io::Error, missing_bytes: u64) -> Failure {
    Failure::File { doing: "writing", missing_bytes, source }
}

/// Makes the error of a connection that ended where more bytes were due.
pub(super) fn ended() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

/// Splits a greeted connection in two halves that work side by side. A connection with certificates never becomes a plain one: without
/// `encrypts` its bytes are still authenticated, under keys that only its TLS handshake gives.
///
/// # Errors
/// The TLS session gives no keys, or holds bytes that were not due yet.
pub(crate) fn split(stream: Stream, encrypts: bool) -> io::Result<(Receiving, Sending)> {
    Ok(match stream {
        Stream::Plain(socket) => {
            let socket = Arc::new(socket);
            (Receiving::Plain(plain::In::new(Arc::clone(&socket))), Sending::Plain(plain::Out(socket)))
        }
        Stream::Tls(stream) if encrypts => {
            let (receiving, sending) = encrypted::split(*stream);
            (Receiving::Encrypted(receiving), Sending::Encrypted(sending))
        }
        Stream::Tls(stream) => {
            let (receiving, sending) = authenticated::split(*stream)?;
            (Receiving::Authenticated(receiving), Sending::Authenticated(sending))
        }
    })
}

/// The sending half.
#[derive(Debug)]
pub(crate) enum Sending {
    Plain(plain::Out),
    Encrypted(encrypted::Out),
    Authenticated(authenticated::Out),
}

impl Sending {
    /// Sends a header. With `more`, the header may wait for the bytes that follow and share their packet.
    pub(crate) async fn header(&mut self, bytes: &[u8], more: bool) -> io::Result<()> {
        match self {
            Self::Plain(out) => out.header(bytes, more).await,
            Self::Encrypted(out) => out.header(bytes, more).await,
            Self::Authenticated(out) => out.header(bytes, more).await,
        }
    }

    /// Sends a piece of a file.
    pub(crate) async fn piece(&mut self, from: &dyn BytesSource, range: &Range<u64>) -> Result<(), Failure> {
        match self {
            Self::Plain(out) => out.piece(from, range).await,
            Self::Encrypted(out) => out.piece(from, range).await,
            Self::Authenticated(out) => out.piece(from, range).await,
        }
    }
}

/// The receiving half.
#[derive(Debug)]
pub(crate) enum Receiving {
    Plain(plain::In),
    Encrypted(encrypted::In),
    Authenticated(authenticated::In),
}

impl Receiving {
    /// Returns the next header, or `None` when the connection ended before its first byte.
    pub(crate) async fn header<const N: usize>(&mut self) -> io::Result<Option<[u8; N]>> {
        let mut header = [0; N];
        let mut filled = 0;
        while filled < N {
            let rest = &mut header[filled..];
            let read = match self {
                Self::Plain(from) => from.read(rest).await?,
                Self::Encrypted(from) => from.read(rest).await?,
                Self::Authenticated(from) => return from.header().await,
            };
            match read {
                0 if filled == 0 => return Ok(None),
                0 => return Err(ended()),
                read => filled += read,
            }
        }
        Ok(Some(header))
    }

    /// Reads a piece into a file. If the connection is protected, no byte that was changed on the way is written.
    pub(crate) async fn piece(&mut self, into: &dyn BytesSink, range: &Range<u64>) -> Result<(), Failure> {
        match self {
            Self::Plain(from) => from.piece(into, range).await,
            Self::Encrypted(from) => from.piece(into, range).await,
            Self::Authenticated(from) => from.piece(into, range).await,
        }
    }

    /// Reads and drops unwanted bytes of a piece, so that what follows them can be read.
    pub(crate) async fn discard(&mut self, bytes: u64) -> io::Result<()> {
        assert!(bytes <= PIECE_BYTES, "more than a piece was asked for");
        let mut missing = usize::try_from(bytes).unwrap_or(usize::MAX);
        let mut buffer = vec![0; BUFFER_BYTES];
        while missing > 0 {
            let rest = &mut buffer[..missing.min(BUFFER_BYTES)];
            let read = match self {
                Self::Plain(from) => from.read(rest).await?,
                Self::Encrypted(from) => from.read(rest).await?,
                Self::Authenticated(from) => from.segment(rest.len()).await?.len(),
            };
            if read == 0 {
                return Err(ended());
            }
            missing -= read;
        }
        Ok(())
    }

    /// Returns whether a waiting connection is still open and without unread bytes.
    pub(crate) fn is_quiet(&self) -> bool {
        let (socket, is_empty) = match self {
            Self::Plain(from) => (from.socket.as_ref(), true),
            Self::Encrypted(from) => (from.socket(), from.is_empty()),
            Self::Authenticated(from) => (from.socket.as_ref(), true),
        };
        let silent =
            || matches!(socket.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        is_empty && silent()
    }
}

/// Sends all bytes.
pub(super) async fn send_all(socket: &TcpStream, mut bytes: &[u8], flags: SendFlags) -> io::Result<()> {
    while !bytes.is_empty() {
        let send = || Ok(rustix::net::send(socket, bytes, flags | SendFlags::NOSIGNAL)?);
        let sent = socket.async_io(Interest::WRITABLE, send).await?;
        bytes = &bytes[sent..];
    }
    Ok(())
}

/// Reads some bytes; returns 0 at the end of the connection.
pub(super) async fn read_some(socket: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
    socket.async_io(Interest::READABLE, || socket.try_read(buffer)).await
}
