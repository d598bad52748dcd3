//! Tokens: names of the files whose bytes a peer may move, and the table of the tokens that were given.
//!
//! Owns: making tokens, whom they are valid for and when they are forgotten. Does not own: who a peer is (its certificate says so) nor the
//! bytes. Time is an argument.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::TokenRefusal;
use crate::link::Grant;

/// How long a token outlives its peer's last control connection. Long enough for a daemon that restarts or a switch that reboots; short
/// enough to release the files behind dead peers' tokens.
pub const TOKEN_ORPHANED_MS: u64 = 60_000;

/// The most tokens that one node has given at a time. A grant beyond it revokes the oldest, whose holder asks again. A node takes in some
/// thousand files at once, and an entry is about 200 bytes.
pub const TOKENS_MAX: usize = 65_536;

/// Bytes of a token.
pub const TOKEN_BYTES: usize = 16;

/// Name of one grant to one node. No secret: the connection proves who uses it. Random, so that a token of an earlier run of this daemon
/// names nothing in the next.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; TOKEN_BYTES]);

impl Token {
    /// Draws a new token.
    pub(crate) fn random() -> Self {
        let mut bytes = [0; TOKEN_BYTES];
        getrandom::fill(&mut bytes).expect("the kernel has random numbers");
        Self(bytes)
    }

    /// Returns the token's bytes, to be put in a call.
    pub fn to_bytes(self) -> [u8; TOKEN_BYTES] {
        self.0
    }

    /// Makes a token from the bytes that came in a call.
    pub fn from_bytes(bytes: [u8; TOKEN_BYTES]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token({:032x})", u128::from_be_bytes(self.0))
    }
}

/// The direction in which bytes move, seen from the node that gave the token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    Receive,
    Send,
}

/// The tokens that this node has given.
#[derive(Debug, Default)]
pub(crate) struct Tokens(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    given: HashMap<Token, Given>,
    /// Tokens by age, for the limit. May include tokens that are gone.
    oldest: VecDeque<Token>,
    /// Peers without a control connection, and since when.
    away: HashMap<String, Instant>,
}

#[derive(Debug)]
struct Given {
    peer: String,
    grant: Arc<Grant>,
}

impl Tokens {
    pub(crate) fn grant(&self, peer: &str, grant: Grant) -> Token {
        let token = Token::random();
        let mut table = self.table();
        while table.given.len() >= TOKENS_MAX {
            let Some(oldest) = table.oldest.pop_front() else { break };
            table.given.remove(&oldest);
        }
        table.given.insert(token, Given { peer: peer.to_owned(), grant: Arc::new(grant) });
        table.oldest.push_back(token);
        if table.oldest.len() > 2 * TOKENS_MAX {
            let Table { given, oldest, .. } = &mut *table;
            oldest.retain(|token| given.contains_key(token));
        }
        token
    }

    pub(crate) fn revoke(&self, token: Token) {
        self.table().given.remove(&token);
    }

    /// Forgets all tokens, and releases their files.
    pub(crate) fn clear(&self) {
        *self.table() = Table::default();
    }

    /// Checks that `peer` may move these bytes, and returns the grant.
    pub(crate) fn check(
        &self,
        token: Token,
        peer: &str,
        direction: Direction,
        range: &Range<u64>,
    ) -> Result<Arc<Grant>, TokenRefusal> {
        let table = self.table();
        let given = table.given.get(&token).ok_or(TokenRefusal::Unknown)?;
        if given.peer != peer {
            return Err(TokenRefusal::OtherNode);
        }
        let limit_bytes = match (&*given.grant, direction) {
            (Grant::Receive { limit_bytes, .. }, Direction::Receive) => *limit_bytes,
            (Grant::Send { size_bytes, .. }, Direction::Send) => *size_bytes,
            _ => return Err(TokenRefusal::OtherDirection),
        };
        if range.start > range.end || range.end > limit_bytes {
            return Err(TokenRefusal::BeyondLimit);
        }
        Ok(Arc::clone(&given.grant))
    }

    pub(crate) fn peer_left(&self, peer: &str, now: Instant) {
        let mut table = self.table();
        // Peers without tokens are not remembered, so that strangers cannot fill the table.
        if table.given.values().any(|given| given.peer == peer) {
            table.away.insert(peer.to_owned(), now);
        }
    }

    pub(crate) fn peer_came(&self, peer: &str) {
        self.table().away.remove(peer);
    }

    /// Forgets the tokens of peers that have been away too long. Callers run it about every second.
    pub(crate) fn sweep(&self, now: Instant) {
        let mut table = self.table();
        let Table { given, away, oldest } = &mut *table;
        let orphaned = Duration::from_millis(TOKEN_ORPHANED_MS);
        let gone: Vec<String> = away
            .iter()
            .filter(|(_, since)| now.saturating_duration_since(**since) >= orphaned)
            .map(|(peer, _)| peer.clone())
            .collect();
        for peer in gone {
            away.remove(&peer);
            given.retain(|_, given| given.peer != peer);
            oldest.retain(|token| given.contains_key(token));
        }
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Tokens {
        fn knows(&self, token: Token) -> bool {
            self.table().given.contains_key(&token)
        }
    }

    fn null() -> Arc<std::fs::File> {
        Arc::new(std::fs::File::open("/dev/null").expect("/dev/null"))
    }

    fn source() -> Grant {
        Grant::Send { from: null(), size_bytes: 100 }
    }

    #[test]
    fn a_token_is_for_one_node_one_direction_and_no_byte_beyond_the_limit() {
        let tokens = Tokens::default();
        let token = tokens.grant("a", source());
        assert!(tokens.check(token, "a", Direction::Send, &(0..100)).is_ok());
        let refused = |peer, direction, range| tokens.check(token, peer, direction, &range).err();
        assert_eq!(refused("b", Direction::Send, 0..1), Some(TokenRefusal::OtherNode));
        assert_eq!(refused("a", Direction::Receive, 0..1), Some(TokenRefusal::OtherDirection));
        assert_eq!(refused("a", Direction::Send, 100..101), Some(TokenRefusal::BeyondLimit));
        let mut other = token.to_bytes();
        other[TOKEN_BYTES - 1] ^= 1;
        let other = Token::from_bytes(other);
        assert_eq!(tokens.check(other, "a", Direction::Send, &(0..1)).err(), Some(TokenRefusal::Unknown));
        tokens.revoke(other);
        assert!(tokens.check(token, "a", Direction::Send, &(0..1)).is_ok());
        tokens.revoke(token);
        assert_eq!(refused("a", Direction::Send, 0..1), Some(TokenRefusal::Unknown));
    }

    #[test]
    fn tokens_outlive_a_short_absence_and_not_a_long_one() {
        let tokens = Tokens::default();
        let (of_a, of_b) = (tokens.grant("a", source()), tokens.grant("b", source()));
        let start = Instant::now();
        let later = |ms| start + Duration::from_millis(ms);
        tokens.peer_left("a", start);
        tokens.sweep(later(TOKEN_ORPHANED_MS - 1));
        assert!(tokens.knows(of_a));
        tokens.peer_came("a");
        tokens.sweep(later(2 * TOKEN_ORPHANED_MS));
        assert!(tokens.knows(of_a));
        tokens.peer_left("a", start);
        tokens.sweep(later(TOKEN_ORPHANED_MS));
        assert!(!tokens.knows(of_a));
        assert!(tokens.knows(of_b));
    }

    #[test]
    fn the_oldest_token_makes_room_for_one_too_many() {
        let (tokens, null) = (Tokens::default(), null());
        let grant = || tokens.grant("a", Grant::Send { from: null.clone(), size_bytes: 100 });
        let (first, second) = (grant(), grant());
        tokens.revoke(second);
        for _ in 1..TOKENS_MAX {
            grant();
        }
        assert!(tokens.knows(first));
        grant();
        assert!(!tokens.knows(first));
        assert_eq!(tokens.table().given.len(), TOKENS_MAX);
    }
}
