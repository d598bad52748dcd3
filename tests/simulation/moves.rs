//! The bytes of files between the nodes: how long they take, and where they stop.
//!
//! Owns: what a token lets another node move, and moving it piece by piece. Does not own: who can reach whom (`wire`), which bytes go where
//! (the product).

use super::wire::End;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;
use tidemark_transport::{
    Address, BytesSink, BytesSource, Grant, LinkError, Pace, Peer, TOKEN_BYTES, Token, TokenRefusal,
};

/// Bytes that move at once.
const PIECE_BYTES: u64 = 128 << 10;

/// How long a transfer waits for a node that it does not reach any more.
const PATIENCE: Duration = Duration::from_secs(3);

/// A file that a node lets another one move.
pub(super) struct Granted {
    pub(super) by: Peer,
    to: String,
    grant: Arc<Grant>,
}

/// The caller's file.
pub(super) enum Ours {
    From(Arc<dyn BytesSource>),
    Into(Arc<dyn BytesSink>),
}

impl End {
    pub(super) fn lend(&self, to: &str, grant: Grant) -> Token {
        let mut state = self.wire.lock();
        state.tokens += 1;
        let mut token = [0; TOKEN_BYTES];
        token[..8].copy_from_slice(&state.tokens.to_le_bytes());
        let granted = Granted { by: self.me.clone(), to: to.to_owned(), grant: Arc::new(grant) };
        state.granted.insert(token, granted);
        Token::from_bytes(token)
    }

    /// Moves ranges between this node's file and the one behind the token.
    pub(super) async fn carry(
        &self,
        with: &Address,
        token: Token,
        ours: Ours,
        ranges: &[Range<u64>],
        pace: &dyn Pace,
    ) -> Result<(), LinkError> {
        let mut landed: Vec<Range<u64>> = Vec::new();
        let cut = |landed: &[Range<u64>], reason: &str| {
            let (node, reason) = (with.node.clone(), reason.to_owned());
            LinkError::Cut { node, landed: landed.to_vec(), reason }
        };
        for range in ranges.iter().flat_map(pieces) {
            pace.take(range.end - range.start).await;
            let breaks = self.wire.breaks();
            tokio::time::sleep(self.wire.delay()).await;
            // A daemon that was killed moves nothing.
            if !self.wire.runs(&self.me) {
                return std::future::pending().await;
            }
            if breaks == Some(false) {
                return Err(cut(&landed, "the connection broke"));
            }
            let reached = {
                let state = self.wire.lock();
                state.arrives(&self.me.node, &with.node) && state.arrives(&with.node, &self.me.node)
            };
            if !reached {
                tokio::time::sleep(PATIENCE).await;
                return Err(cut(&landed, "nothing arrives"));
            }
            let refused = |why| LinkError::Token { node: with.node.clone(), range: range.clone(), why };
            let grant = {
                let state = self.wire.lock();
                let granted =
                    state.granted.get(&token.to_bytes()).filter(|granted| granted.by.node == with.node);
                let granted = granted.ok_or_else(|| refused(TokenRefusal::Unknown))?;
                if granted.to != self.me.node {
                    return Err(refused(TokenRefusal::OtherNode));
                }
                Arc::clone(&granted.grant)
            };
            let (from, into, limit_bytes) = match (&ours, &*grant) {
                (Ours::From(from), Grant::Receive { into, limit_bytes }) => (from, into, *limit_bytes),
                (Ours::Into(into), Grant::Send { from, size_bytes }) => (from, into, *size_bytes),
                _ => return Err(refused(TokenRefusal::OtherDirection)),
            };
            if range.end > limit_bytes {
                return Err(refused(TokenRefusal::BeyondLimit));
            }
            into.landing(range.clone());
            // A broken connection leaves a part of a piece behind.
            let part = if breaks.is_some() { (range.end - range.start) / 2 } else { range.end - range.start };
            copy(from.file(), into.file(), range.start, part).map_err(|source| LinkError::Local {
                doing: "moving",
                offset: range.start,
                bytes: part,
                source,
            })?;
            if breaks.is_some() {
                return Err(cut(&landed, "the connection broke"));
            }
            into.landed(range.clone());
            match landed.last_mut().filter(|last| last.end == range.start) {
                Some(last) => last.end = range.end,
                None => landed.push(range),
            }
        }
        Ok(())
    }
}

fn pieces(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = range.end;
    (range.start..end)
        .step_by(usize::try_from(PIECE_BYTES).expect("a piece fits into memory"))
        .map(move |start| start..end.min(start + PIECE_BYTES))
}

fn copy(from: BorrowedFd<'_>, into: BorrowedFd<'_>, start: u64, bytes: u64) -> io::Result<()> {
    let (from, into) = (File::from(from.try_clone_to_owned()?), File::from(into.try_clone_to_owned()?));
    let mut piece = vec![0; usize::try_from(bytes).expect("a piece fits into memory")];
    from.read_exact_at(&mut piece, start)?;
    into.write_all_at(&piece, start)
}
