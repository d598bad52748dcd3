//! Bytes between a socket and a file through TLS.
//!
//! Owns: making and reading records. rustls is driven by hand here, because through an `AsyncRead` each record took five reads of the
//! socket and one more copy. The handshake and the greeting are over (`dial`, `listen`).

use std::io::{self, BufRead, Write};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::Connection;
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

use super::halves::{BUFFER_BYTES, Failure, ended, unreadable, unwritable};
use crate::copy::{read_at, write_at};
use crate::link::{BytesSink, BytesSource};

/// State of both halves. A single task drives both, so the lock is always free.
#[derive(Debug)]
struct Session {
    socket: TcpStream,
    tls: Mutex<Connection>,
}

impl Session {
    fn tls(&self) -> MutexGuard<'_, Connection> {
        self.tls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends the records that are ready.
    async fn flush(&self) -> io::Result<()> {
        loop {
            let written = {
                let mut tls = self.tls();
                if !tls.wants_write() {
                    return Ok(());
                }
                tls.write_tls(&mut Socket(&self.socket))
            };
            match written {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.socket.writable().await?,
                written => drop(written?),
            }
        }
    }
}

/// A socket that does not block, as rustls writes to it: some sixteen records in one call.
struct Socket<'a>(&'a TcpStream);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, bytes: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

pub(super) fn split(stream: TlsStream<TcpStream>) -> (In, Out) {
    let (socket, mut tls) = into_inner(stream);
    // A header and one buffer of plain bytes become records at once.
    tls.set_buffer_limit(Some(2 * BUFFER_BYTES));
    let session = Arc::new(Session { socket, tls: Mutex::new(tls) });
    let receiving = In { session: Arc::clone(&session), buffer: vec![0; BUFFER_BYTES], left: 0..0 };
    (receiving, Out { session, buffer: vec![0; BUFFER_BYTES] })
}

/// Takes a stream apart into its socket and its session.
pub(super) fn into_inner(stream: TlsStream<TcpStream>) -> (TcpStream, Connection) {
    match stream {
        TlsStream::Client(stream) => {
            let (socket, tls) = stream.into_inner();
            (socket, tls.into())
        }
        TlsStream::Server(stream) => {
            let (socket, tls) = stream.into_inner();
            (socket, tls.into())
        }
    }
}

/// The sending half.
#[derive(Debug)]
pub(crate) struct Out {
    session: Arc<Session>,
    buffer: Vec<u8>,
}

impl Out {
    pub(super) async fn header(&mut self, bytes: &[u8], more: bool) -> io::Result<()> {
        send(&self.session, bytes).await?;
        if more { Ok(()) } else { self.session.flush().await }
    }

    pub(super) async fn piece(&mut self, from: &dyn BytesSource, range: &Range<u64>) -> Result<(), Failure> {
        let mut at = range.start;
        while at < range.end {
            let missing = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(BUFFER_BYTES);
            let read = read_at(from, &mut self.buffer[..missing], at).map_err(unreadable)?;
            send(&self.session, &self.buffer[..read]).await?;
            self.session.flush().await?;
            at += read as u64;
        }
        Ok(())
    }
}

/// Encrypts all bytes into records. Sends those that do not fit the session's buffer.
async fn send(session: &Session, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        let taken = session.tls().writer().write(bytes)?;
        bytes = &bytes[taken..];
        if !bytes.is_empty() {
            session.flush().await?;
        }
    }
    Ok(())
}

/// The receiving half.
#[derive(Debug)]
pub(crate) struct In {
    session: Arc<Session>,
    /// Records as received.
    buffer: Vec<u8>,
    /// The range of `buffer` that the session has not taken.
    left: Range<usize>,
}

impl In {
    pub(super) fn socket(&self) -> &TcpStream {
        &self.session.socket
    }

    /// Returns whether the session took everything that came.
    pub(super) fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// Waits until decrypted bytes are there; returns false at the end of the connection.
    async fn wait(&mut self) -> io::Result<bool> {
        loop {
            {
                let mut tls = self.session.tls();
                match tls.reader().fill_buf() {
                    Ok(bytes) => return Ok(!bytes.is_empty()),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
                if !self.left.is_empty() {
                    let taken = tls.read_tls(&mut &self.buffer[self.left.clone()])?;
                    self.left.start += taken;
                    if let Err(error) = tls.process_new_packets() {
                        // The other end is notified of the error, too; it may be gone.
                        let _ = tls.write_tls(&mut Socket(&self.session.socket));
                        return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                    }
                    continue;
                }
            }
            self.session.socket.readable().await?;
            match self.session.socket.try_read(&mut self.buffer) {
                Ok(0) => return Ok(false),
                Ok(read) => self.left = 0..read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Passes some decrypted bytes to `take`, at most `most`; returns `None` at the end of the connection.
    async fn some<T>(&mut self, most: usize, take: impl FnOnce(&[u8]) -> T) -> io::Result<Option<T>> {
        if !self.wait().await? {
            return Ok(None);
        }
        let mut tls = self.session.tls();
        let mut reader = tls.reader();
        let bytes = reader.fill_buf()?;
        let bytes = &bytes[..bytes.len().min(most)];
        let (length, taken) = (bytes.len(), take(bytes));
        reader.consume(length);
        Ok(Some(taken))
    }

    pub(super) async fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let most = into.len();
        let copied = self.some(most, |bytes| {
            into[..bytes.len()].copy_from_slice(bytes);
            bytes.len()
        });
        Ok(copied.await?.unwrap_or(0))
    }

    pub(super) async fn piece(&mut self, into: &dyn BytesSink, range: &Range<u64>) -> Result<(), Failure> {
        let mut at = range.start;
        while at < range.end {
            let missing = usize::try_from(range.end - at).unwrap_or(usize::MAX);
            let written = self.some(missing, |bytes| (bytes.len(), write_at(into, bytes, at)));
            let (length, written) = written.await?.ok_or_else(ended)?;
            at += length as u64;
            written.map_err(|source| unwritable(source, range.end - at))?;
        }
        Ok(())
    }
}
