//! What is asked for on a bulk connection, and how it is confirmed.
//!
//! It owns both layouts and the signature. It does not own whether a token is good for it (`token`).
//!
//! ```text
//! request   0        1         4        8           16       24            56
//!           | what   | zero    | bytes  | token id  | offset | signature   |  push: the bytes follow
//! reply     0        1         4        8           16
//!           | status | zero    | bytes  | offset    |                         pull: the bytes follow, when it is yes
//! ```
//! The signature is a keyed blake3 of everything before it, the connection's nonce and the request's number on it. Its key
//! is the token, so a token is never seen on the way, and a request that is recorded is good nowhere else.

use std::io;
use std::ops::Range;

use crate::error::TokenRefusal;
use crate::range::PIECE_BYTES;
use crate::token::{Direction, Token};

pub(crate) const REQUEST_BYTES: usize = 56;
pub(crate) const REPLY_BYTES: usize = 16;

const SIGNED_BYTES: usize = 24;

/// What a connection's signatures depend on.
#[derive(Debug, Clone)]
pub(crate) struct Series {
    nonce: [u8; 32],
    number: u64,
}

impl Series {
    pub(crate) fn new(nonce: [u8; 32]) -> Self {
        Self { nonce, number: 0 }
    }

    fn sign(&self, token: Token, signed: &[u8]) -> blake3::Hash {
        blake3::Hasher::new_keyed(&token.to_bytes())
            .update(&self.nonce)
            .update(&self.number.to_le_bytes())
            .update(signed)
            .finalize()
    }
}

/// A piece that somebody wants to move. `direction` is the answering node's view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) direction: Direction,
    pub(crate) token_id: u64,
    pub(crate) range: Range<u64>,
}

impl Request {
    /// Writes the next request of a series.
    pub(crate) fn encode(
        direction: Direction,
        token: Token,
        range: &Range<u64>,
        series: &mut Series,
    ) -> [u8; REQUEST_BYTES] {
        let mut request = [0; REQUEST_BYTES];
        request[0] = match direction {
            Direction::Receive => 1,
            Direction::Send => 2,
        };
        let bytes = u32::try_from(range.end - range.start).expect("a piece is small");
        request[4..8].copy_from_slice(&bytes.to_le_bytes());
        request[8..16].copy_from_slice(&token.id().to_le_bytes());
        request[16..24].copy_from_slice(&range.start.to_le_bytes());
        let signature = series.sign(token, &request[..SIGNED_BYTES]);
        series.number += 1;
        request[SIGNED_BYTES..].copy_from_slice(signature.as_bytes());
        request
    }

    /// Reads the next request of a series. The signature is checked when the token was found, by [`Request::is_signed`].
    pub(crate) fn decode(request: &[u8; REQUEST_BYTES]) -> io::Result<Self> {
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let direction = match request[..4] {
            [1, 0, 0, 0] => Direction::Receive,
            [2, 0, 0, 0] => Direction::Send,
            _ => return Err(wrong("a request for bytes that begins with nothing known")),
        };
        let bytes = u64::from(u32::from_le_bytes(four(&request[4..8])));
        let (token_id, start) = (number(&request[8..16]), number(&request[16..24]));
        let end = start.checked_add(bytes).filter(|_| (1..=PIECE_BYTES).contains(&bytes));
        let end = end.ok_or_else(|| wrong("a request for no piece, or for more than one"))?;
        Ok(Self { direction, token_id, range: start..end })
    }

    /// Whether `token` made this request, as the next one of the series. Counts it either way.
    pub(crate) fn is_signed(
        request: &[u8; REQUEST_BYTES],
        token: Option<Token>,
        series: &mut Series,
    ) -> bool {
        let (signed, signature) = request.split_at(SIGNED_BYTES);
        let expected = token.map(|token| series.sign(token, signed));
        series.number += 1;
        // Compared in constant time by blake3.
        expected.is_some_and(|expected| {
            signature.try_into().is_ok_and(|signature: [u8; 32]| expected == signature)
        })
    }
}

/// The answer to a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) range: Range<u64>,
    pub(crate) said: Result<(), TokenRefusal>,
}

impl Reply {
    pub(crate) fn encode(&self) -> [u8; REPLY_BYTES] {
        let mut reply = [0; REPLY_BYTES];
        reply[0] = match self.said {
            Ok(()) => 0,
            Err(TokenRefusal::Unknown) => 1,
            Err(TokenRefusal::OtherNode) => 2,
            Err(TokenRefusal::OtherDirection) => 3,
            Err(TokenRefusal::BeyondLimit) => 4,
            Err(TokenRefusal::NoSpace) => 5,
            Err(TokenRefusal::File) => 6,
        };
        let bytes = u32::try_from(self.range.end - self.range.start).expect("a piece is small");
        reply[4..8].copy_from_slice(&bytes.to_le_bytes());
        reply[8..].copy_from_slice(&self.range.start.to_le_bytes());
        reply
    }

    pub(crate) fn decode(reply: &[u8; REPLY_BYTES]) -> io::Result<Self> {
        let said = match reply[..4] {
            [0, 0, 0, 0] => Ok(()),
            [1, 0, 0, 0] => Err(TokenRefusal::Unknown),
            [2, 0, 0, 0] => Err(TokenRefusal::OtherNode),
            [3, 0, 0, 0] => Err(TokenRefusal::OtherDirection),
            [4, 0, 0, 0] => Err(TokenRefusal::BeyondLimit),
            [5, 0, 0, 0] => Err(TokenRefusal::NoSpace),
            [6, 0, 0, 0] => Err(TokenRefusal::File),
            _ => return Err(io::Error::new(io::ErrorKind::InvalidData, "a reply that is none")),
        };
        let (bytes, start) = (u64::from(u32::from_le_bytes(four(&reply[4..8]))), number(&reply[8..]));
        let end = start.checked_add(bytes);
        let end = end.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a reply beyond any file"))?;
        Ok(Self { range: start..end, said })
    }
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

fn four(bytes: &[u8]) -> [u8; 4] {
    let mut array = [0; 4];
    array.copy_from_slice(bytes);
    array
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn requests_and_replies_read_back_as_they_were_written(
            start in 0..u64::MAX - PIECE_BYTES, bytes in 1..=PIECE_BYTES, send: bool, status in 0..7u8
        ) {
            let (token, range) = (Token::random(), start..start + bytes);
            let direction = if send { Direction::Send } else { Direction::Receive };
            let written = Request::encode(direction, token, &range, &mut Series::new([1; 32]));
            let expected = Request { direction, token_id: token.id(), range: range.clone() };
            prop_assert_eq!(Request::decode(&written).expect("it reads"), expected);
            let mut reply = Reply { range, said: Ok(()) }.encode();
            reply[0] = status;
            prop_assert_eq!(Reply::decode(&reply).expect("it reads").encode(), reply);
        }

        #[test]
        fn no_bytes_make_a_reader_panic(request: [u8; 32], start in any::<[u8; REPLY_BYTES]>()) {
            let mut whole = [0; REQUEST_BYTES];
            whole[..32].copy_from_slice(&request);
            if let Ok(read) = Request::decode(&whole) {
                prop_assert!(read.range.end - read.range.start <= PIECE_BYTES);
            }
            let _ = Reply::decode(&start);
        }
    }

    #[test]
    fn a_signature_is_good_once_on_one_connection_for_one_piece() {
        let (token, here) = (Token::random(), Series::new([1; 32]));
        let written = Request::encode(Direction::Receive, token, &(0..10), &mut here.clone());
        let good =
            |request: &_, token, series: &Series| Request::is_signed(request, token, &mut series.clone());
        assert!(good(&written, Some(token), &here));
        assert!(!good(&written, None, &here));
        assert!(!good(&written, Some(Token::random()), &here));
        assert!(!good(&written, Some(token), &Series::new([2; 32])), "on another connection");
        assert!(!good(&written, Some(token), &Series { number: 1, ..here.clone() }), "replayed");
        let mut changed = written;
        changed[16] ^= 1;
        assert!(!good(&changed, Some(token), &here), "at another offset");
        assert!(
            !String::from_utf8_lossy(&written).contains(&*String::from_utf8_lossy(&token.to_bytes()[8..]))
        );
    }
}
