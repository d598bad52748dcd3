//! The probe: properties of a store, found out by trying.
//!
//! Owns: the two facts `fencing` and `part_checksums`, with reasons. Does not own: their consequences (one node
//! may go on without fencing, several may not; without part checksums each object is read back).

use super::{Created, Damage, Operation, Store, StoreError};
use bytes::Bytes;
use futures::future::join_all;

/// Concurrent creates of one key, and the number of rounds. If a store's check and write are two steps, two
/// creates win within a round or two, on every implementation tried.
const CREATORS: usize = 16;
const ROUNDS: usize = 8;

/// The folder of everything a probe writes; each run has its own name below it and removes it.
const PROBE_FOLDER: &str = ".tidemark/probe/";

/// The facts, each with the reason for its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Whether create-if-absent has exactly one winner, so that markers decide and epochs fence.
    pub fencing: bool,
    pub fencing_reason: String,
    /// Whether the store refuses a part that differs from its checksum.
    pub part_checksums: bool,
    pub part_checksums_reason: String,
}

impl Probe {
    /// Returns the facts for a store that this node has not tried: only known properties are relied on.
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
/// Costs about 160 small requests. If the store cannot be reached, read or written, the error names its URL and
/// the remedy, and no facts are returned.
pub async fn probe(store: &dyn Store) -> Result<Probe, StoreError> {
    let folder = format!("{PROBE_FOLDER}{:016x}", random_name(store)?);
    let result = run(store, &folder).await;
    // Also cleans up after a failure, so that earlier writes do not stay. If the store is away, the leftovers
    // stay, but they are never read.
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
            // The bytes of one create and the checksum of another: two writes were mixed.
            Err(StoreError::Damaged { reason, .. }) => {
                return Ok((false, format!("in round {round} more than one create was written: {reason}")));
            }
            there => there?,
        };
        // Two winners are enough to decide. With fewer, each create with an unknown result might be another
        // winner.
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
        // A plain overwrite must be refused as well, long after the first write.
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
