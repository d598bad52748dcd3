//! Recent events, for `ckptctl events`.
//!
//! Owns: a bounded memory of events and their numbers. Does not own: logs (tracing) and what counts as an event.

use std::collections::VecDeque;
use std::sync::Mutex;
use tidemark_protocol::report::{Event, EventLevel};
use tokio::sync::watch;

/// Most events kept. A save makes a handful, so this is enough for some hundred saves, and takes half a MiB.
const EVENTS_MAX: usize = 4096;

/// The events of this start of the daemon; all calls take `&self`.
#[derive(Debug)]
pub struct Events {
    kept: Mutex<VecDeque<Event>>,
    newest: watch::Sender<u64>,
}

impl Default for Events {
    fn default() -> Self {
        Self { kept: Mutex::new(VecDeque::new()), newest: watch::channel(0).0 }
    }
}

impl Events {
    /// Adds an event. If there are more than `EVENTS_MAX`, the oldest is dropped.
    pub fn add(&self, time_ns: i64, level: EventLevel, kind: &str, path: Option<String>, what: String) {
        let mut kept = self.kept.lock().expect("nothing panics while it holds the events");
        let number = *self.newest.borrow() + 1;
        kept.push_back(Event {
            number,
            time_ms: time_ns / 1_000_000,
            level,
            kind: kind.to_owned(),
            path,
            what,
        });
        if kept.len() > EVENTS_MAX {
            kept.pop_front();
        }
        drop(kept);
        self.newest.send_replace(number);
    }

    /// Returns the events with a greater number, oldest first. A number that was not assigned yet is from a daemon before this one, so
    /// all events are returned.
    #[must_use]
    pub fn since(&self, number: u64) -> Vec<Event> {
        let kept = self.kept.lock().expect("nothing panics while it holds the events");
        let last = kept.back().map_or(0, |event| event.number);
        kept.iter().filter(|event| event.number > number || number > last).cloned().collect()
    }

    /// Returns a receiver that is woken by each event, with its number.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_in_the_numbers_shows_that_older_events_are_forgotten() {
        let events = Events::default();
        for _ in 0..EVENTS_MAX + 10 {
            events.add(0, EventLevel::Info, "sealed", None, String::new());
        }
        let kept = events.since(0);
        assert_eq!(kept.len(), EVENTS_MAX);
        assert_eq!(kept[0].number, 11);
        assert_eq!(events.since(kept.last().unwrap().number), []);
    }

    #[test]
    fn whoever_goes_on_from_a_number_of_the_daemon_before_misses_nothing() {
        let events = Events::default();
        assert_eq!(events.since(7), [], "nothing has happened yet");
        events.add(0, EventLevel::Info, "sealed", None, String::new());
        let numbers = |since| events.since(since).iter().map(|event| event.number).collect::<Vec<_>>();
        assert_eq!(numbers(7), [1], "numbers begin at 1 again");
        assert_eq!(numbers(1), [0; 0]);
    }
}
