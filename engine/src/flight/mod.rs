//! Places for parts on their way to or from the durable tier: as many as the path holds, and no more than memory allows.
//!
//! Owns: taking a place, and waiting for one. Does not own: how many there are (`window`), what a part is.
//!
//! Uploads have a flight and fetches another, so that each counts the memory of its parts in one place, over all files.

mod window;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use window::Window;

/// Smallest part that takes a place. A smaller one needs little memory, and its time shows the store's delay, not the network's.
pub const PLACE_FROM_BYTES: u64 = 256 << 10;

/// See the module's head.
#[derive(Debug)]
pub struct Flight {
    most: usize,
    places: Arc<Semaphore>,
    counts: Mutex<Counts>,
    started: Instant,
}

#[derive(Debug)]
struct Counts {
    window: Window,
    /// Number of places: free, taken, and given to a waiting task that has not run yet.
    places: usize,
}

/// A place, held as long as its part is on its way.
#[derive(Debug)]
pub struct Place {
    /// None for a part that needs no place.
    flight: Option<Arc<Flight>>,
    bytes: u64,
}

impl Flight {
    /// Makes a flight of at most `most` parts at once.
    #[must_use]
    pub fn new(most: usize) -> Arc<Self> {
        let window = Window::new(most);
        let places = window.parts();
        Arc::new(Self {
            most: most.max(1),
            places: Arc::new(Semaphore::new(places)),
            counts: Mutex::new(Counts { window, places }),
            started: Instant::now(),
        })
    }

    /// Waits for a place for a part of `bytes`.
    pub async fn begin(self: &Arc<Self>, bytes: u64) -> Place {
        if bytes < PLACE_FROM_BYTES {
            return Place { flight: None, bytes };
        }
        // The permit comes back when the place is dropped, unless there is one too many then.
        self.places.acquire().await.expect("the semaphore is never closed").forget();
        Place { flight: Some(Arc::clone(self)), bytes }
    }

    /// Does as [`Self::begin`], for a thread that may block.
    #[must_use]
    pub fn begin_blocking(self: &Arc<Self>, bytes: u64) -> Place {
        futures::executor::block_on(self.begin(bytes))
    }

    /// Returns how many parts may be on their way now.
    #[must_use]
    pub fn window(&self) -> usize {
        self.counts().window.parts()
    }

    /// Returns the maximum of the window.
    #[must_use]
    pub fn most(&self) -> usize {
        self.most
    }

    /// Records that a part failed: the times of the parts around it are discarded.
    pub fn disturbed(&self) {
        self.counts().window.disturbed();
    }

    fn end(&self, bytes: u64) {
        let mut counts = self.counts();
        // A returned place goes to a waiting task at once, so a free place means that no task waits.
        let full = self.places.available_permits() == 0;
        counts.window.ended(self.started.elapsed(), bytes, full);
        // Ends this part's place, and adds as many as the window has more.
        counts.places -= 1;
        let more = counts.window.parts().saturating_sub(counts.places);
        counts.places += more;
        drop(counts);
        self.places.add_permits(more);
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(flight) = &self.flight {
            flight.end(self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    const PART_BYTES: u64 = 8 << 20;

    #[tokio::test]
    async fn more_than_the_window_wait_and_the_last_place_comes_back() {
        let flight = Flight::new(3);
        let now = |bytes| flight.begin(bytes).now_or_never();
        let mut held: Vec<_> = (0..3).map(|_| now(PART_BYTES).expect("a free place")).collect();
        assert!(now(PART_BYTES).is_none(), "all are taken");
        assert!(now(PLACE_FROM_BYTES - 1).is_some(), "a small part needs none");
        held.pop();
        assert!(now(PART_BYTES).is_some(), "one came back");
        held.clear();
        assert_eq!(flight.places.available_permits(), 3);
    }

    #[tokio::test]
    async fn as_many_are_on_their_way_as_the_window_says_while_it_changes() {
        let most = 32;
        let flight = Flight::new(most);
        let (present, peak) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let parts = (0..1500).map(|_| {
            let (flight, present, peak) = (Arc::clone(&flight), Arc::clone(&present), Arc::clone(&peak));
            tokio::spawn(async move {
                let _place = flight.begin(PART_BYTES).await;
                peak.fetch_max(present.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                // On a path with nothing but delay, more parts are always better.
                tokio::time::sleep(Duration::from_millis(2)).await;
                present.fetch_sub(1, Ordering::SeqCst);
            })
        });
        for part in parts.collect::<Vec<_>>() {
            part.await.expect("no part panics");
        }
        let peak = peak.load(Ordering::SeqCst);
        assert!(peak > window::START && peak <= most, "{peak} at once");
        let counts = flight.counts();
        assert_eq!(counts.places, counts.window.parts());
        assert_eq!(flight.places.available_permits(), counts.places);
    }
}
