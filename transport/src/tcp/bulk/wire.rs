//! Requests on a bulk connection, and their replies.
//!
//! Owns: both layouts. Does not own: whether a token allows a request (`token`), nor the protection on the way
//! (`halves`).
//!
//! ```text
//! request   0        1         4        8        16       32
//!           | what   | zero    | bytes  | offset | token  |         push: the bytes follow
//! reply     0        1         4        8        16
//!           | status | zero    | bytes  | offset |                  pull: the bytes follow, when it is yes
//! ```

use std::io;
use std::ops::Range;

use crate::error::TokenRefusal;
use crate::range::PIECE_BYTES;
use crate::token::{Direction, TOKEN_BYTES, Token};

pub(crate) const REQUEST_BYTES: usize = 16 + TOKEN_BYTES;
pub(crate) const REPLY_BYTES: usize = 16;

/// A piece that a peer wants to move. `direction` is the answering node's view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) direction: Direction,
    pub(crate) token: Token,
    pub(crate) range: Range<u64>,
}

impl Request {
    pub(crate) fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut request = [0; REQUEST_BYTES];
        request[0] = match self.direction {
            Direction::Receive => 1,
            Direction::Send => 2,
        };
        let bytes = u32::try_from(self.range.end - self.range.start).expect("a piece is small");
        request[4..8].copy_from_slice(&bytes.to_le_bytes());
        request[8..16].copy_from_slice(&self.range.start.to_le_bytes());
        request[16..].copy_from_slice(&self.token.to_bytes());
        request
    }

    pub(crate) fn decode(request: &[u8; REQUEST_BYTES]) -> io::Result<Self> {
        let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
        let direction = match request[..4] {
            [1, 0, 0, 0] => Direction::Receive,
            [2, 0, 0, 0] => Direction::Send,
            _ => return Err(wrong("a request for bytes that begins with nothing known")),
        };
        let (bytes, start) = (u64::from(u32::from_le_bytes(array(&request[4..8]))), number(&request[8..16]));
        let end = start.checked_add(bytes).filter(|_| (1..=PIECE_BYTES).contains(&bytes));
        let end = end.ok_or_else(|| wrong("a request for no piece, or for more than one"))?;
        Ok(Self { direction, token: Token::from_bytes(array(&request[16..])), range: start..end })
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
        let (bytes, start) = (u64::from(u32::from_le_bytes(array(&reply[4..8]))), number(&reply[8..]));
        let end = start.checked_add(bytes);
        let end = end.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a reply beyond any file"))?;
        Ok(Self { range: start..end, said })
    }
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(array(bytes))
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
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
            let request = Request { direction, token, range: range.clone() };
            prop_assert_eq!(Request::decode(&request.encode()).expect("it reads"), request);
            let mut reply = Reply { range, said: Ok(()) }.encode();
            reply[0] = status;
            prop_assert_eq!(Reply::decode(&reply).expect("it reads").encode(), reply);
        }

        #[test]
        fn no_bytes_make_a_reader_panic(
            request in any::<[u8; REQUEST_BYTES]>(), reply in any::<[u8; REPLY_BYTES]>()
        ) {
            if let Ok(read) = Request::decode(&request) {
                prop_assert!(read.range.end - read.range.start <= PIECE_BYTES);
            }
            let _ = Reply::decode(&reply);
        }
    }
}
