//! Runs the readers of content over a closed file's bytes.
//!
//! Owns: the readers' clock and limits, and that none of them stops a seal. Does not own: the readers (`tidemark-content`), what
//! follows from a verdict.

use rustix::time::{ClockId, clock_gettime};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use tidemark_content::{Bytes, Judgement, Limits, judge};
use tidemark_tier1::Backing;

/// A backing file as input of the readers.
pub(crate) struct InMemory<'a>(pub(crate) &'a Backing);

impl Bytes for InMemory<'_> {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(into, offset)
    }
}

/// Returns the readers' verdict on the bytes; `None` if no reader knows the format that they begin with.
///
/// Costs at most [`Limits::default`] of this thread.
#[must_use]
pub(crate) fn of(bytes: &dyn Bytes, size_bytes: u64) -> Option<Judgement> {
    // Untrusted bytes go through much code here. If a panic ended the seal, the file would never be durable.
    let judged =
        catch_unwind(AssertUnwindSafe(|| judge(bytes, size_bytes, &Limits::default(), &thread_time)));
    match judged {
        Ok(judgement) => judgement.format.is_some().then_some(judgement),
        Err(_panic) => {
            tracing::error!(
                size_bytes,
                "a reader of content panicked; the file is sealed without its verdict"
            );
            None
        }
    }
}

/// Returns this thread's processor time, so that time in which other threads have the processor does not count.
fn thread_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Panics;

    impl Bytes for Panics {
        fn read_at(&self, _offset: u64, _into: &mut [u8]) -> io::Result<()> {
            panic!("a reader with a fault");
        }
    }

    #[test]
    fn a_panic_is_no_verdict() {
        assert_eq!(of(&Panics, 100), None);
        assert_eq!(of(&&b"step,loss\n"[..], 10), None);
        assert!(of(&&b"\x89HDF\r\n\x1a\n"[..], 8).is_some());
    }

    #[test]
    fn the_clock_goes() {
        let begun = thread_time();
        while thread_time() <= begun {
            std::hint::spin_loop();
        }
    }
}
