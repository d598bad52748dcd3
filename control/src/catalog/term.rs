//! The time for which a coordinator may answer.
//!
//! Owns: the end of the term, as far as it is renewed, and the refusal after it. Does not own: renewing (`lease`), giving the role up (the
//! daemon's task, which may run later: a process may be stopped at any moment).

use std::sync::{Mutex, PoisonError};
use tidemark_protocol::id::Epoch;
use tidemark_transport::{LinkErrorKind, Refusal};
use tokio::time::Instant;

/// A term. It has no end until one is set: a fixed coordinator's never ends.
#[derive(Debug, Default)]
pub struct Term {
    until: Mutex<Option<Instant>>,
}

impl Term {
    /// Sets the end, as far as the term is renewed. From then on nobody is answered: another coordinator may decide. So an answer need not ask
    /// etcd who leads.
    pub fn lasts_until(&self, until: Option<Instant>) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = until;
    }

    /// Refuses an answer that was made too late.
    pub(super) fn check(&self, epoch: Epoch) -> Result<(), Refusal> {
        let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
        if until.is_none_or(|until| Instant::now() < until) {
            return Ok(());
        }
        let why = format!("the term of the coordinator of epoch {epoch} is over; ask again");
        Err(Refusal::new(LinkErrorKind::Unavailable, why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_given_until_the_term_is_over_and_after_it_was_renewed() {
        let (term, second) = (Term::default(), Duration::from_secs(1));
        assert!(term.check(Epoch(3)).is_ok(), "it never ends");
        term.lasts_until(Some(Instant::now() + second));
        assert!(term.check(Epoch(3)).is_ok());
        tokio::time::advance(second).await;
        let refused = term.check(Epoch(3)).expect_err("it is over");
        assert_eq!(refused.kind, LinkErrorKind::Unavailable);
        term.lasts_until(Some(Instant::now() + second));
        assert!(term.check(Epoch(3)).is_ok());
    }
}
