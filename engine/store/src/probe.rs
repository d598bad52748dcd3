//! What this store can be trusted with, found out by trying.
//!
//! Owns: the two facts `fencing` and `part_checksums`, with reasons. Does not own: what follows from them (one
//! node may go on without fencing, several may not; without part checksums each object is read back).

use super::{Created, Damage, Operation, Store, StoreError};
use bytes::Bytes;
use futures::future::join_all;

/// Concurrent creates of one key, and how many times over: a store whose check and write are two steps lets two
/// win within a round or two, on every implementation tried.
const CREATORS: usize = 16;
const ROUNDS: usize = 8;

/// The folder of everything a probe writes; each run has its own name below it and removes it.
const PROBE_FOLDER: &str = ".tidemark/probe/";

/// The facts, each with the reason for its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Create-if-absent has exactly one winner, so markers decide and epochs fence.
    pub fencing: bool,
    pub fencing_reason: String,
    /// A part that differs from its checksum is refused by the store.
    pub part_checksums: bool,
    pub part_checksums_reason: String,
}

impl Probe {
    /// Of a store that was not tried by this node: what it is not known for is not relied on.
    #[must_use]
    pub fn unknown() -> Self {
        let reason = "this node has not tried it; the coordinator has".to_owned();
        Self {
            fencing: false,
            fencing_reason: reason.clone(),
            part_checksums: false,
            part_checksums_reason: reason,
        }
    }
}

/// Tries the store: writes, reads back, races and damages objects below `.tidemark/probe/`, then removes them.
///
/// Costs about 160 small requests. A store that cannot be reached, read or written is an error that names its URL
/// and what to do about it, before any of the facts.
pub async fn probe(store: &dyn Store) -> Result<Probe, StoreError> {
    let folder = format!("{PROBE_FOLDER}{:016x}", random_name(store)?);
    let result = run(store, &folder).await;
    // Also after a failure: what was written before it should not stay. A store that is away keeps its litter,
    // which nobody reads.
    let cleaned = clean(store, &folder).await;
    let probe = result?;
    cleaned?;
    Ok(probe)
}

async fn run(store: &dyn Store, folder: &str) -> Result<Probe, StoreError> {
    reads_its_writes(store, folder).await?;
    let (fencing, fencing_reason) = one_winner(store, folder).await?;
    let (part_checksums, part_checksums_reason) =
        match store.send_damaged_part(&format!("{folder}/part")).await? {
            Damage::Refused => (true, "a damaged part was refused".to_owned()),
            Damage::Accepted { reason } => (false, reason),
        };
    Ok(Probe { fencing, fencing_reason, part_checksums, part_checksums_reason })
}

async fn reads_its_writes(store: &dyn Store, folder: &str) -> Result<(), StoreError> {
    let key = format!("{folder}/hello");
    let body = Bytes::from(folder.to_owned());
    store.create(&key, body.clone()).await?;
    let there = store.get(&key, body.len() as u64).await?;
    let listed = store.list(&format!("{folder}/"), true).await?;
    if there.as_ref() == Some(&body) && listed.keys.iter().any(|head| head.key == key) {
        return Ok(());
    }
    Err(StoreError::Refused {
        operation: Operation::Probe,
        key,
        store: store.describe(),
        reason: "an object just written is not read back or not listed".to_owned(),
        action: "use a store with strong read-after-write and list consistency".to_owned(),
    })
}

async fn one_winner(store: &dyn Store, folder: &str) -> Result<(bool, String), StoreError> {
    for round in 0..ROUNDS {
        let key = format!("{folder}/race-{round}");
        let bodies: Vec<Bytes> = (0..CREATORS).map(|i| Bytes::from(format!("{round}-{i}"))).collect();
        let answers = join_all(bodies.iter().map(|body| store.create(&key, body.clone()))).await;
        let (mut winners, mut unknown) = (Vec::new(), None);
        for (i, answer) in answers.into_iter().enumerate() {
            match answer {
                Ok(Created::Created) => winners.push(i),
                Ok(Created::AlreadyExists) => {}
                Err(error) => unknown = Some(error),
            }
        }
        let there = match store.get(&key, 64).await {
            // The bytes of one and the checksum of another: they were written into each other.
            Err(StoreError::Damaged { reason, .. }) => {
                return Ok((false, format!("in round {round} more than one create was written: {reason}")));
            }
            there => there?,
        };
        // Two that won are enough; of fewer, each one that is not known might be another.
        if let (Some(error), 0..=1) = (unknown, winners.len()) {
            return Err(error);
        }
        match winners.as_slice() {
            [one] if there.as_ref() == Some(&bodies[*one]) => {}
            [_] => return Ok((false, format!("in round {round} the winner's bytes are not what stayed"))),
            many => {
                let count = many.len();
                return Ok((false, format!("in round {round} of {CREATORS} creates of one key {count} won")));
            }
        }
        // A plain overwrite must be refused as well when the first write is long done.
        if store.create(&key, Bytes::from("late")).await? == Created::Created {
            return Ok((false, format!("in round {round} a create replaced an object that was there")));
        }
    }
    Ok((true, format!("{ROUNDS} rounds of {CREATORS} concurrent creates had one winner each")))
}

async fn clean(store: &dyn Store, folder: &str) -> Result<(), StoreError> {
    for head in store.list(&format!("{folder}/"), false).await?.keys {
        store.delete(&head.key).await?;
    }
    Ok(())
}

fn random_name(store: &dyn Store) -> Result<u64, StoreError> {
    getrandom::u64().map_err(|error| StoreError::Unavailable {
        operation: Operation::Probe,
        key: PROBE_FOLDER.to_owned(),
        store: store.describe(),
        attempts: 1,
        source: Box::new(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryStore;

    #[tokio::test]
    async fn memory_fences_has_no_part_checksums_and_is_left_clean() {
        let store = MemoryStore::new();
        let found = probe(&store).await.expect("probe");
        assert!(found.fencing, "{}", found.fencing_reason);
        assert!(!found.part_checksums, "{}", found.part_checksums_reason);
        assert!(store.list("", false).await.expect("list").keys.is_empty());
    }
}
