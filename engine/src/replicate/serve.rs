//! Sealed bytes that other nodes read.
//!
//! Owns: which bytes are lent to which node, and revoking that. Does not own: moving the bytes (the link), which node is asked
//! (`restore::peer`).

use super::here::Here;
use crate::chunk::bytes::Source;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tidemark_namespace::{FileState, SealPin};
use tidemark_protocol::file::Seal;
use tidemark_protocol::id::{FileId, SealNumber};
use tidemark_protocol::replication::{Answer, BulkToken};
use tidemark_transport::{Grant, Peer, TOKEN_BYTES, Token};

/// Maximum number of files that other nodes read at once: each keeps a descriptor and its bytes. A node that wants more asks again.
pub const PULLS_MAX: usize = 256;

/// Time after which a reader that has not finished counts as gone: 100 GB at 200 MB/s take less.
const LENT_MOST: Duration = Duration::from_secs(600);

/// The lent bytes: each token with its reader, and since when.
#[derive(Debug, Default)]
pub(super) struct Pulls(Mutex<BTreeMap<[u8; TOKEN_BYTES], (Peer, Duration)>>);

impl Pulls {
    /// Lends the bytes of a seal, from a file of this node or a copy. Bytes that were not verified since a restart are verified first.
    pub(super) async fn grant(
        &self,
        here: &Arc<Here>,
        from: &Peer,
        file: FileId,
        seal: SealNumber,
    ) -> Answer {
        // Checks this before the bytes, so that bytes which arrive in between are found.
        let coming = here.coming.has(file, seal);
        let Some((pin, _)) = good(here, file, seal).await else {
            return if coming { Answer::Coming } else { Answer::NotHere };
        };
        let size_bytes = pin.size_bytes;
        let backing = Arc::clone(&pin.backing);
        let source = match Source::open(&backing, pin) {
            Ok(source) => source,
            Err(error) => {
                tracing::error!(%error, %file, %seal, "a sealed file cannot be lent");
                return Answer::NotHere;
            }
        };
        let mut lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // An earlier daemon of this node is dead, and gives nothing back.
        keep(&mut lent, here, |(to, _)| to.node != from.node || to == from);
        if lent.len() >= PULLS_MAX {
            return Answer::Busy;
        }
        let token = here.link().grant(&from.node, Grant::Send { from: Arc::new(source), size_bytes });
        lent.insert(token.to_bytes(), (from.clone(), here.now()));
        Answer::Granted { token: BulkToken(token.to_bytes()), size_bytes }
    }

    /// Takes back the bytes that were lent to that node under the token.
    pub(super) fn end(&self, here: &Here, from: &Peer, token: BulkToken) -> Answer {
        let mut lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lent.get(&token.0).is_some_and(|(to, _)| to.node == from.node) {
            lent.remove(&token.0);
            here.link().revoke(Token::from_bytes(token.0));
        }
        Answer::Noted
    }

    pub(super) fn sweep(&self, here: &Here, now: Duration) {
        let mut lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        keep(&mut lent, here, |(_, since)| now.saturating_sub(*since) < LENT_MOST);
    }
}

/// Takes back all lent bytes that `keeps` does not keep.
fn keep(
    lent: &mut BTreeMap<[u8; TOKEN_BYTES], (Peer, Duration)>,
    here: &Here,
    keeps: impl Fn(&(Peer, Duration)) -> bool,
) {
    lent.retain(|token, to| {
        let keeps = keeps(to);
        if !keeps {
            here.link().revoke(Token::from_bytes(*token));
        }
        keeps
    });
}

/// Returns the verified bytes of a seal, from a file of this node or a copy.
async fn good(here: &Arc<Here>, file: FileId, seal: SealNumber) -> Option<(SealPin, Seal)> {
    let namespace = &here.namespace;
    let own = namespace.nodes().node_of_file(file).and_then(|node| namespace.nodes().view(node));
    if let Some(view) = own
        && let FileState::Sealed { seal: number, size_bytes, crc, chunks } = view.state
        && number == seal
        && let Some(pin) = namespace.seals().pin_seal(file, seal)
    {
        let sealed = Seal { number, size_bytes, crc, chunks };
        if !namespace.seals().is_unverified(view.node) {
            return Some((pin, sealed));
        }
        // A bad file stays for the scrub, which can repair it from another copy.
        if here.is_good(pin, sealed.clone()).await {
            namespace.seals().verified(file, seal);
            return Some((namespace.seals().pin_seal(file, seal)?, sealed));
        }
    }
    let copy = namespace.peer_copies().copy(file, seal)?;
    if copy.unverified {
        let pin = namespace.peer_copies().pin_copy(file, seal)?;
        if !here.is_good(pin, copy.sealed.clone()).await {
            here.metrics.verify_mismatches.get_or_create(&[("copy", "peer")]).inc();
            namespace.peer_copies().lose_copy(file, seal, "it was bad when it was looked at after a restart");
            return None;
        }
        namespace.seals().verified(copy.own, seal);
    }
    Some((namespace.peer_copies().pin_copy(file, seal)?, copy.sealed))
}
