//! Bytes between a socket and a file that can be read on the way, and not changed.
//!
//! Owns: the keys and the tags. The connection began with TLS, which proved both ends' identities; after the greeting it continues without
//! records. The keys come out of that handshake (RFC 8446, 7.5), so that only these two ends have them, for this connection.
//!
//! ```text
//!   header | tag        segment of a piece, at most 256 KiB | tag
//! ```
//! A tag is the keyed blake3 of the bytes before it and of its number in its direction. Nothing can therefore be changed, left out,
//! repeated or sent back. A segment is checked before a byte of it is written. Bytes that were changed on the way are thus never stored
//! where a checksum without a key might later find them good.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use rustix::net::SendFlags;
use tokio::net::TcpStream;
use tokio_rustls::TlsStream;

use super::encrypted::into_inner;
use super::halves::{BUFFER_BYTES, Failure, ended, read_some, send_all, unreadable, unwritable};
use crate::copy::{read_at, write_at};
use crate::link::{BytesSink, BytesSource};

const TAG_BYTES: usize = blake3::OUT_LEN;

/// The tags of one direction of a connection.
#[derive(Debug)]
struct Tags {
    key: Key,
    number: u64,
}

/// A secret: `Debug` hides it.
struct Key([u8; blake3::KEY_LEN]);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Tags {
    fn next(&mut self, bytes: &[u8]) -> blake3::Hash {
        let number = self.number.to_le_bytes();
        self.number += 1;
        // The number last: the hash is fastest where a long input begins on a boundary.
        blake3::Hasher::new_keyed(&self.key.0).update(bytes).update(&number).finalize()
    }

    /// Returns whether `bytes` end with the next tag. Blake3 compares in constant time.
    fn accepts(&mut self, bytes: &[u8]) -> bool {
        let Some((bytes, tag)) = bytes.split_last_chunk::<TAG_BYTES>() else { return false };
        self.next(bytes) == *tag
    }
}

pub(super) fn split(stream: TlsStream<TcpStream>) -> io::Result<(In, Out)> {
    let is_client = matches!(stream, TlsStream::Client(_));
    let (socket, mut tls) = into_inner(stream);
    // Both ends wait for each other in the greeting, so nothing is on the way when it is over.
    let early = tls.wants_write()
        || !matches!(tls.reader().into_first_chunk(), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
    if early {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "bytes came before the greeting was over"));
    }
    let key = |label: &[u8]| {
        tls.export_keying_material([0; blake3::KEY_LEN], label, None)
            .map(|key| Tags { key: Key(key), number: 0 })
            .map_err(io::Error::other)
    };
    let (opened, accepted) =
        (key(b"EXPORTER-tidemark-bulk-opener")?, key(b"EXPORTER-tidemark-bulk-acceptor")?);
    let (ours, theirs) = if is_client { (opened, accepted) } else { (accepted, opened) };
    let socket = Arc::new(socket);
    let buffer = || vec![0; BUFFER_BYTES + TAG_BYTES];
    let receiving = In { socket: Arc::clone(&socket), tags: theirs, buffer: buffer() };
    Ok((receiving, Out { socket, tags: ours, buffer: buffer() }))
}

/// The sending half.
#[derive(Debug)]
pub(crate) struct Out {
    socket: Arc<TcpStream>,
    tags: Tags,
    buffer: Vec<u8>,
}

impl Out {
    pub(super) async fn header(&mut self, bytes: &[u8], more: bool) -> io::Result<()> {
        let flags = if more { SendFlags::MORE } else { SendFlags::empty() };
        self.buffer[..bytes.len()].copy_from_slice(bytes);
        self.send(bytes.len(), flags).await
    }

    pub(super) async fn piece(&mut self, from: &dyn BytesSource, range: &Range<u64>) -> Result<(), Failure> {
        let mut at = range.start;
        while at < range.end {
            let length = segment_bytes(range.end - at);
            let mut filled = 0;
            while filled < length {
                filled += read_at(from, &mut self.buffer[filled..length], at + filled as u64)
                    .map_err(unreadable)?;
            }
            self.send(length, SendFlags::empty()).await?;
            at += length as u64;
        }
        Ok(())
    }

    /// Sends the first bytes of the buffer and their tag.
    async fn send(&mut self, length: usize, flags: SendFlags) -> io::Result<()> {
        let tag = self.tags.next(&self.buffer[..length]);
        let whole = length + TAG_BYTES;
        self.buffer[length..whole].copy_from_slice(tag.as_bytes());
        send_all(&self.socket, &self.buffer[..whole], flags).await
    }
}

/// Returns the length of the next segment of a piece of which `missing` bytes are due.
fn segment_bytes(missing: u64) -> usize {
    usize::try_from(missing).map_or(BUFFER_BYTES, |missing| missing.min(BUFFER_BYTES))
}

/// The receiving half.
#[derive(Debug)]
pub(crate) struct In {
    pub(super) socket: Arc<TcpStream>,
    tags: Tags,
    buffer: Vec<u8>,
}

impl In {
    pub(super) async fn header<const N: usize>(&mut self) -> io::Result<Option<[u8; N]>> {
        if !self.fill(N).await? {
            return Ok(None);
        }
        let mut header = [0; N];
        header.copy_from_slice(self.checked(N)?);
        Ok(Some(header))
    }

    pub(super) async fn piece(&mut self, into: &dyn BytesSink, range: &Range<u64>) -> Result<(), Failure> {
        let mut at = range.start;
        while at < range.end {
            let segment = self.segment(segment_bytes(range.end - at)).await?;
            let after = at + segment.len() as u64;
            write_at(into, segment, at).map_err(|source| unwritable(source, range.end - after))?;
            at = after;
        }
        Ok(())
    }

    /// Reads one segment and checks it.
    pub(super) async fn segment(&mut self, length: usize) -> io::Result<&[u8]> {
        if self.fill(length).await? { self.checked(length) } else { Err(ended()) }
    }

    /// Reads `length` bytes and their tag; false when the connection ended before the first byte.
    async fn fill(&mut self, length: usize) -> io::Result<bool> {
        let whole = length + TAG_BYTES;
        let mut filled = 0;
        while filled < whole {
            match read_some(&self.socket, &mut self.buffer[filled..whole]).await? {
                0 if filled == 0 => return Ok(false),
                0 => return Err(ended()),
                read => filled += read,
            }
        }
        Ok(true)
    }

    fn checked(&mut self, length: usize) -> io::Result<&[u8]> {
        if self.tags.accepts(&self.buffer[..length + TAG_BYTES]) {
            return Ok(&self.buffer[..length]);
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, format!("{length} bytes were changed on the way")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tags(key: u8) -> Tags {
        Tags { key: Key([key; blake3::KEY_LEN]), number: 0 }
    }

    #[test]
    fn a_tag_is_good_once_for_its_bytes_in_its_direction() {
        let tagged = |bytes: &[u8], tags: &mut Tags| [bytes, tags.next(bytes).as_bytes()].concat();
        let mut ours = tags(1);
        let (first, second) = (tagged(b"first", &mut ours), tagged(b"second", &mut ours));
        let mut theirs = tags(1);
        assert!(theirs.accepts(&first) && theirs.accepts(&second));
        assert!(!theirs.accepts(&second), "said twice");
        assert!(!tags(1).accepts(&second), "the first was left out");
        assert!(!tags(2).accepts(&first), "another direction or connection");
        for at in 0..first.len() {
            let mut changed = first.clone();
            changed[at] ^= 1;
            assert!(!tags(1).accepts(&changed), "byte {at}");
        }
        assert!(!tags(1).accepts(&first[1..]) && !tags(1).accepts(b"short"));
    }
}
