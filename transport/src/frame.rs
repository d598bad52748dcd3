//! Frames: how words are cut on a control connection.
//!
//! Owns: the header, its checks, and reading a body without trusting its length. Does not own: the meaning of a body,
//! nor the greeting before the first frame (`tcp/greeting`).
//!
//! ```text
//!  0      1              4            8                    16
//!  | kind | zero (3)     | body bytes | id                 | body …
//! ```
//! Numbers are little-endian. The id ties an answer to its call; a tell has the id 0.

use std::io;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::error::{LinkErrorKind, Refusal};
use crate::link::BODY_BYTES_MAX;

/// Bytes of a header.
pub const HEADER_BYTES: usize = 16;

/// The memory that a reader reserves before any byte of a body has come, and the most it reserves ahead of them.
const AHEAD_BYTES: usize = 64 << 10;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A request; answered by `Answer` or `Refusal` under the same id.
    Call,
    /// The service's answer.
    Answer,
    /// The service's refusal: a byte for its kind, then the reason.
    Refusal,
    /// A one-way message.
    Tell,
}

impl Kind {
    fn number(self) -> u8 {
        match self {
            Self::Call => 1,
            Self::Answer => 2,
            Self::Refusal => 3,
            Self::Tell => 4,
        }
    }

    /// Returns the longest body of this kind, in bytes.
    pub fn body_bytes_max(self) -> usize {
        match self {
            Self::Call | Self::Answer | Self::Tell => BODY_BYTES_MAX,
            Self::Refusal => 1 + Refusal::REASON_BYTES_MAX,
        }
    }
}

/// A header that was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The kind of frame.
    pub kind: Kind,
    /// The id of the call; 0 for a tell.
    pub id: u64,
    /// The body's length, at most [`Kind::body_bytes_max`].
    pub body_bytes: usize,
}

/// Why bytes are not a frame. The connection that they came on is of no more use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// A kind that this version does not know, or bytes that must be zero and are not.
    #[error("no frame begins with {0:02x?}")]
    Unknown([u8; 4]),
    /// A tell with an id, or another frame without one.
    #[error("a frame of kind {kind:?} with the id {id}")]
    Id {
        /// The frame's kind.
        kind: Kind,
        /// The frame's id.
        id: u64,
    },
    /// A body that is longer than its kind allows.
    #[error("a frame of kind {kind:?} with {bytes} bytes, more than its limit of {limit_bytes}")]
    TooLong {
        /// The frame's kind.
        kind: Kind,
        /// The length in the header.
        bytes: u32,
        /// The longest body of this kind.
        limit_bytes: usize,
    },
}

impl From<FrameError> for io::Error {
    fn from(error: FrameError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

impl Header {
    /// Makes the header of a body. Panics when the body is longer than its kind allows: callers check that first.
    pub fn encode(kind: Kind, id: u64, body_bytes: usize) -> [u8; HEADER_BYTES] {
        assert!(
            body_bytes <= kind.body_bytes_max(),
            "{kind:?} of {body_bytes} bytes was not refused earlier"
        );
        let length = u32::try_from(body_bytes).expect("the limits are far below 4 GiB");
        let mut header = [0; HEADER_BYTES];
        header[0] = kind.number();
        header[4..8].copy_from_slice(&length.to_le_bytes());
        header[8..].copy_from_slice(&id.to_le_bytes());
        header
    }

    /// Checks a received header.
    ///
    /// # Errors
    /// Anything that [`Header::encode`] does not make.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let [k, z1, z2, z3, l0, l1, l2, l3, id @ ..] = *bytes;
        let kind = match (k, [z1, z2, z3]) {
            (1, [0, 0, 0]) => Kind::Call,
            (2, [0, 0, 0]) => Kind::Answer,
            (3, [0, 0, 0]) => Kind::Refusal,
            (4, [0, 0, 0]) => Kind::Tell,
            _ => return Err(FrameError::Unknown([k, z1, z2, z3])),
        };
        let (length, id) = (u32::from_le_bytes([l0, l1, l2, l3]), u64::from_le_bytes(id));
        if (kind == Kind::Tell) != (id == 0) {
            return Err(FrameError::Id { kind, id });
        }
        let limit_bytes = kind.body_bytes_max();
        match usize::try_from(length) {
            Ok(body_bytes) if body_bytes <= limit_bytes => Ok(Self { kind, id, body_bytes }),
            _ => Err(FrameError::TooLong { kind, bytes: length, limit_bytes }),
        }
    }
}

/// Reads the next header, or `None` when the connection ends between two frames.
pub(crate) async fn read_header(from: &mut (impl AsyncRead + Unpin)) -> io::Result<Option<Header>> {
    let mut header = [0; HEADER_BYTES];
    let mut filled = 0;
    while filled < HEADER_BYTES {
        match from.read(&mut header[filled..]).await? {
            0 if filled == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => filled += read,
        }
    }
    Ok(Some(Header::decode(&header)?))
}

/// Reads a body whose length the peer claims. Memory is reserved as bytes come, doubling. A false length thus costs the
/// peer as many bytes as it costs this node, within [`AHEAD_BYTES`].
pub(crate) async fn read_body(from: &mut (impl AsyncRead + Unpin), bytes: usize) -> io::Result<Bytes> {
    let mut body = BytesMut::new();
    while body.len() < bytes {
        let missing = bytes - body.len();
        if body.capacity() == body.len() {
            body.reserve(missing.min(body.len().max(AHEAD_BYTES)));
        }
        let mut rest = (&mut *from).take(missing as u64);
        if rest.read_buf(&mut body).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(body.freeze())
}

/// Encodes a refusal for the connection.
pub(crate) fn encode_refusal(refusal: &Refusal) -> Bytes {
    let number = match refusal.kind {
        LinkErrorKind::Invalid => 1,
        LinkErrorKind::NotFound => 2,
        LinkErrorKind::Corrupt => 3,
        LinkErrorKind::Unavailable => 4,
        LinkErrorKind::Fenced => 5,
        LinkErrorKind::NoSpace => 6,
    };
    let end = refusal.reason.floor_char_boundary(Refusal::REASON_BYTES_MAX);
    let mut body = Vec::with_capacity(1 + end);
    body.push(number);
    body.extend_from_slice(&refusal.reason.as_bytes()[..end]);
    body.into()
}

/// Decodes a received refusal. A kind from a later version reads as `Unavailable`: asking again later is never wrong.
pub(crate) fn decode_refusal(body: &[u8]) -> Refusal {
    let (number, reason) = body.split_first().unwrap_or((&0, &[]));
    let kind = match number {
        1 => LinkErrorKind::Invalid,
        2 => LinkErrorKind::NotFound,
        3 => LinkErrorKind::Corrupt,
        5 => LinkErrorKind::Fenced,
        6 => LinkErrorKind::NoSpace,
        _ => LinkErrorKind::Unavailable,
    };
    Refusal { kind, reason: String::from_utf8_lossy(reason).into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use tokio::io::ReadBuf;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().expect("a runtime").block_on(future)
    }

    fn kind() -> impl Strategy<Value = Kind> {
        prop_oneof![Just(Kind::Call), Just(Kind::Answer), Just(Kind::Refusal), Just(Kind::Tell)]
    }

    proptest! {
        #[test]
        fn a_frame_reads_back_as_it_was_written(kind in kind(), id in 1u64.., len in 0usize..300_000, seed: u8) {
            let id = if kind == Kind::Tell { 0 } else { id };
            prop_assume!(len <= kind.body_bytes_max());
            // Drawing each byte takes a hundred times as long as reading them all.
            let body: Vec<u8> = (0..=250u8).cycle().take(len).map(|byte| byte ^ seed).collect();
            let mut written = Header::encode(kind, id, body.len()).to_vec();
            written.extend_from_slice(&body);
            let mut from = written.as_slice();
            let read = block_on(async {
                let header = read_header(&mut from).await.expect("a header").expect("not the end");
                (header, read_body(&mut from, header.body_bytes).await.expect("a body"))
            });
            prop_assert_eq!(read.0, Header { kind, id, body_bytes: body.len() });
            prop_assert_eq!(&read.1[..], &body[..]);
            prop_assert!(from.is_empty());
        }

        #[test]
        fn what_is_read_is_what_would_be_written(bytes: [u8; HEADER_BYTES]) {
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert_eq!(Header::encode(header.kind, header.id, header.body_bytes), bytes);
            }
        }

        #[test]
        fn no_bytes_make_a_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let mut from = bytes.as_slice();
            block_on(async {
                while let Ok(Some(header)) = read_header(&mut from).await {
                    if read_body(&mut from, header.body_bytes).await.is_err() {
                        break;
                    }
                }
            });
            decode_refusal(&bytes);
        }

        #[test]
        fn a_refusal_reads_back_as_it_was_written(reason in ".{0,100}") {
            let refusal = Refusal::new(LinkErrorKind::Fenced, reason);
            prop_assert_eq!(decode_refusal(&encode_refusal(&refusal)), refusal);
        }
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_anything_is_set_aside() {
        let mut header = Header::encode(Kind::Call, 7, BODY_BYTES_MAX);
        assert!(Header::decode(&header).is_ok());
        header[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(Header::decode(&header), Err(FrameError::TooLong { bytes: u32::MAX, .. })));
    }

    /// Gives 100 bytes, and notes how much room it was ever offered.
    struct Miser {
        left: usize,
        offered_bytes: usize,
    }

    impl AsyncRead for Miser {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            self.offered_bytes = self.offered_bytes.max(buffer.remaining());
            let given = self.left.min(1).min(buffer.remaining());
            buffer.put_slice(&[7][..given]);
            self.left -= given;
            Poll::Ready(Ok(()))
        }
    }

    #[test]
    fn a_body_that_does_not_come_costs_little_memory() {
        let mut miser = Miser { left: 100, offered_bytes: 0 };
        let error = block_on(read_body(&mut miser, BODY_BYTES_MAX)).expect_err("it ended early");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert!(miser.offered_bytes <= AHEAD_BYTES, "{} bytes set aside", miser.offered_bytes);
    }

    #[test]
    fn a_long_reason_is_cut_between_letters() {
        let refusal = Refusal::new(LinkErrorKind::NoSpace, "ä".repeat(Refusal::REASON_BYTES_MAX));
        let cut = decode_refusal(&encode_refusal(&refusal));
        assert_eq!(cut.reason.len(), Refusal::REASON_BYTES_MAX);
        assert!(refusal.reason.starts_with(&cut.reason));
    }
}
