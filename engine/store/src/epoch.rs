//! The epoch in Tier-3: the number below which no coordinator writes there any more.
//!
//! Owns: raising and reading `epoch/<20 digits>`. Does not own: which coordinator may hold which epoch (the
//! lease), the next steps of a fenced coordinator.

use super::{Store, StoreError};
use bytes::Bytes;
use std::time::Duration;
use tidemark_protocol::id::Epoch;
use tidemark_protocol::key::{Key, Series};

/// Maximum number of attempts at a doubtful create before its error is returned.
const RAISE_ATTEMPTS: u32 = 3;
const RAISE_PAUSE: Duration = Duration::from_millis(100);

/// Raises the epoch in `store` to `at_least`, unless it is there or higher; returns the highest now present.
///
/// If a caller gets back more than its own epoch, it is fenced: a newer coordinator writes here. The call must
/// succeed before the first write of an epoch. The body is the number alone, so two callers that raise to the same
/// epoch agree. Costs a create and a listing.
pub async fn raise_epoch(store: &dyn Store, at_least: Epoch) -> Result<Epoch, StoreError> {
    let highest = current_epoch(store).await?;
    if highest >= Some(at_least) {
        return Ok(highest.unwrap_or(at_least));
    }
    let key = Key::numbered(Series::Epoch, at_least.0).to_string();
    let mut attempts = 1;
    // An object that existed before is as good: its name is its whole meaning.
    while let Err(error) = store.create(&key, Bytes::from(format!("{}\n", at_least.0))).await {
        if !error.is_doubtful() || attempts >= RAISE_ATTEMPTS {
            return Err(error);
        }
        attempts += 1;
        store.pause(RAISE_PAUSE).await;
    }
    // Reads again after the write: of two callers that raise at once, the lower one must see the higher.
    let highest = current_epoch(store).await?;
    Ok(highest.map_or(at_least, |highest| highest.max(at_least)))
}

/// Returns the highest epoch present in `store`; `None` if no coordinator ever wrote. Names that are not numbers
/// are not ours and are skipped.
pub async fn current_epoch(store: &dyn Store) -> Result<Option<Epoch>, StoreError> {
    let listing = store.list(&Series::Epoch.prefix(), true).await?;
    Ok(listing.keys.iter().filter_map(|head| parse_epoch(&head.key)).max())
}

fn parse_epoch(key: &str) -> Option<Epoch> {
    match key.parse().ok()? {
        Key::Numbered { series: Series::Epoch, number } => Some(Epoch(number)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Effect, Fault, FaultyStore, MemoryStore, Operation};
    use std::sync::Arc;

    #[tokio::test]
    async fn the_epoch_only_rises_and_an_older_holder_sees_that_it_is_fenced() {
        let store = MemoryStore::new();
        assert_eq!(current_epoch(&store).await.expect("list"), None);
        assert_eq!(raise_epoch(&store, Epoch(3)).await.expect("raise"), Epoch(3));
        assert_eq!(raise_epoch(&store, Epoch(3)).await.expect("again"), Epoch(3));
        assert_eq!(raise_epoch(&store, Epoch(11)).await.expect("raise"), Epoch(11));
        assert_eq!(raise_epoch(&store, Epoch(4)).await.expect("older"), Epoch(11), "fenced");
        assert_eq!(current_epoch(&store).await.expect("list"), Some(Epoch(11)));
        assert!(store.head(".tidemark/epoch/00000000000000000004").await.expect("head").is_none());
    }

    #[tokio::test]
    async fn names_that_are_not_numbers_do_not_count() {
        let store = MemoryStore::new();
        for name in ["99", "0000000000000000000x", "99999999999999999999"] {
            store.create(&format!("{}{name}", Series::Epoch.prefix()), Bytes::new()).await.expect("create");
        }
        assert_eq!(current_epoch(&store).await.expect("list"), None);
    }

    #[tokio::test]
    async fn a_lost_answer_does_not_stop_the_epoch_from_rising() {
        let fault = Fault {
            operation: Operation::Create,
            key_contains: "epoch".to_owned(),
            nth: Some(1),
            effect: Effect::FailAfter,
        };
        let store = FaultyStore::new(Arc::new(MemoryStore::new()), vec![fault]);
        assert_eq!(raise_epoch(&store, Epoch(2)).await.expect("raise"), Epoch(2));
        assert_eq!(store.fired(0), 1);
    }
}
