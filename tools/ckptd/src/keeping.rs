//! The task that holds the right to commit, or seeks it, beside the serving.
//!
//! Owns: waiting for its end, and what a panic in it means for the process. Does not own: its work (`taking_up`, `tier3`, `seat`).

use crate::cli::Failure;
use std::time::Duration;
use tokio::task::JoinHandle;

/// How long the end waits for Tier-3 to take that this daemon is gone.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Keeping {
    /// None: it has ended, and was not to be waited for again.
    task: Option<JoinHandle<()>>,
}

impl Keeping {
    pub(crate) fn of(work: impl Future<Output = ()> + Send + 'static) -> Self {
        Self { task: Some(tokio::spawn(work)) }
    }

    /// Resolves only if the task panicked: the daemon would serve on and never commit. A fenced daemon goes on without the task.
    pub(crate) async fn failed(&mut self) -> Failure {
        if let Some(task) = &mut self.task {
            let ended = task.await;
            self.task = None;
            if let Err(error) = ended {
                let what = "the right to commit to Tier-3 is neither held nor sought any more";
                return Failure::failed(anyhow::Error::new(error).context(what));
            }
        }
        std::future::pending().await
    }

    /// Waits until the task has given the right back, for 2 s at most. The caller has told the task before that this is the end.
    pub(crate) async fn end(self) {
        let Some(mut task) = self.task else { return };
        if tokio::time::timeout(RELEASE_PATIENCE, &mut task).await.is_err() {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_is_a_failure_and_an_end_in_order_is_none() {
        let mut panicked = Keeping::of(async { panic!("a bug") });
        let failure = panicked.failed().await;
        assert!(failure.to_string().contains("the right to commit"), "{failure}");
        let mut fenced = Keeping::of(async {});
        // Long enough for a task that does nothing: the runtime of a test runs each that is ready.
        let turns = async {
            for _ in 0..8 {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            failure = fenced.failed() => panic!("{failure}"),
            () = turns => {}
        }
        fenced.end().await;
    }
}
