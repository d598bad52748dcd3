//! Reading and removing the generations of a loose file in Tier-3.
//!
//! Owns: reading the sidecars, the order of the deletes. Does not own: which generations are removed (`protocol::loose`), when
//! (`node::generations`).

use crate::restore::locate::{self, FormatProblem};
use crate::save::drain::{Drain, Raised};
use crate::save::loose::LooseStored;
use futures::stream::{self, StreamExt, TryStreamExt};
use std::collections::BTreeSet;
use std::sync::Arc;
use tidemark_protocol::documents::LooseSidecar;
use tidemark_protocol::id::{Epoch, Generation};
use tidemark_protocol::key::Key;
use tidemark_protocol::loose::Held;
use tidemark_protocol::path::RelPath;
use tidemark_store::{StoreError, current_epoch};

/// Maximum number of sidecars read at once, which hides the round trip.
const READS_IN_FLIGHT: usize = 16;

/// The reason why no further generation is removed.
#[derive(Debug, thiserror::Error)]
pub enum GiveUpError {
    #[error("what Tier-3 has of {path} cannot be read or removed")]
    Store { path: String, source: StoreError },
    #[error("generation {generation} of {path} cannot be read, and may share bytes with others: {why}")]
    Unreadable { path: String, generation: Generation, why: FormatProblem },
    #[error("epoch {newer} is in Tier-3, this node has {ours}: another coordinator took over")]
    Fenced { ours: Epoch, newer: Epoch },
}

/// The generations of a path in Tier-3.
#[derive(Debug, Default)]
pub struct Generations {
    /// The sidecars, the oldest first.
    pub sidecars: Vec<LooseSidecar>,
    /// Generations with bytes of abandoned uploads: no sidecar proves them whole.
    pub remains: BTreeSet<Generation>,
}

/// Returns a generation as input of the retention rule.
#[must_use]
pub fn held(sidecar: &LooseSidecar) -> Held {
    Held {
        generation: sidecar.generation,
        left: sidecar.left,
        follows: sidecar.follows,
        parts: LooseStored::of(sidecar).parts.iter().map(|part| part.generation).collect(),
        closed_at_ns: sidecar.closed_at_ns,
    }
}

/// Reads the generations of `path` in Tier-3, up to and with `newest`. Costs one listing, and a read for each.
///
/// # Errors
/// Tier-3 is away, or a sidecar cannot be read: the generations whose bytes it shares are then unknown.
pub async fn read(drain: &Drain, path: &RelPath, newest: Generation) -> Result<Generations, GiveUpError> {
    let (found, unreadable) = read_all(drain, path, newest).await?;
    unreadable.map_or(Ok(found), Err)
}

/// Does as [`read`], but leaves out generations that cannot be read.
///
/// # Errors
/// Tier-3 is away.
pub async fn readable(drain: &Drain, path: &RelPath, newest: Generation) -> Result<Generations, GiveUpError> {
    Ok(read_all(drain, path, newest).await?.0)
}

/// Reads all generations that can be read, and returns why one cannot.
///
/// # Errors
/// Tier-3 is away.
pub(crate) async fn read_all(
    drain: &Drain,
    path: &RelPath,
    newest: Generation,
) -> Result<(Generations, Option<GiveUpError>), GiveUpError> {
    let failed = |source| GiveUpError::Store { path: path.to_string(), source };
    let (of_one, _) = Key::loose(path, newest);
    let key = of_one.to_string();
    let (directory, _) = key.rsplit_once('/').expect("a key of ours lies in a directory");
    let listing = drain.store.list(&format!("{directory}/"), true).await.map_err(failed)?;
    let (mut described, mut bytes) = (BTreeSet::new(), BTreeSet::new());
    for head in listing.keys {
        match head.key.parse() {
            Ok(Key::LooseSidecar { generation, .. }) if generation <= newest => {
                described.insert(generation);
            }
            Ok(Key::Loose { generation, .. }) if generation < newest => {
                bytes.insert(generation);
            }
            // A newer generation may be on its way; any other key is not one of ours.
            Ok(_) | Err(_) => {}
        }
    }
    let remains = bytes.difference(&described).copied().collect();
    let reads = described.into_iter().map(|generation| async move {
        let key = Key::loose(path, generation).1.to_string();
        let read = locate::document::<LooseSidecar>(&drain.store, &key).await.map_err(failed)?;
        Ok(read.map_err(|why| GiveUpError::Unreadable { path: path.to_string(), generation, why }))
    });
    let read: Vec<_> = stream::iter(reads).buffered(READS_IN_FLIGHT).try_collect().await?;
    let (mut sidecars, mut unreadable) = (Vec::new(), None);
    for one in read {
        match one {
            Ok(sidecar) => sidecars.push(sidecar),
            Err(why) => unreadable = Some(why),
        }
    }
    Ok((Generations { sidecars, remains }, unreadable))
}

/// Removes generations of `path`: each sidecar before its bytes, so that no reader looks for bytes that are gone.
///
/// # Errors
/// Tier-3 is away, or another coordinator took over. A repeated call does the rest.
pub async fn give_up(
    drain: &Arc<Drain>,
    path: &RelPath,
    generations: &BTreeSet<Generation>,
) -> Result<(), GiveUpError> {
    let failed = |source| GiveUpError::Store { path: path.to_string(), source };
    let ours = drain.epoch();
    let raised = drain.make_sure_of_epoch().await.map_err(failed)?;
    let newest = match raised {
        Raised::Newer(newer) => Some(newer),
        Raised::Ours => current_epoch(drain.store.as_ref()).await.map_err(failed)?,
    };
    if let Some(newer) = newest.filter(|newer| *newer > ours) {
        return Err(GiveUpError::Fenced { ours, newer });
    }
    for generation in generations {
        let (bytes, sidecar) = Key::loose(path, *generation);
        for key in [sidecar, bytes] {
            drain.store.delete(&key.to_string()).await.map_err(failed)?;
        }
    }
    Ok(())
}
