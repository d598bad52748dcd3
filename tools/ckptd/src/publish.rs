//! Published state, readable without asking: the control files, the last known status, the mount's counters.
//!
//! Owns: when they are written, and who waits for that. Does not own: what a status says (`api`).

use crate::api::Daemon;
use crate::host::DaemonHost;
use crate::state_dir::StateDir;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tidemark_engine::cluster::Seat;
use tidemark_engine::metrics::raise_to;
use tidemark_fuse::Opcode;
use tidemark_protocol::report::{NodeState, Problem, ProblemCode, one_line};
use tokio::sync::{Notify, watch};

/// How often the control files and the last known status are written again, where that is cheap.
const PUBLISH_EVERY: Duration = Duration::from_millis(200);

/// Writing them costs several passes over all files and checkpoints, and the node loop does nothing else meanwhile. So after a pass the
/// publisher rests this many times as long: publishing takes a sixteenth of the loop's time.
const REST_SHARE: u32 = 15;

/// The longest rest. Programs that read the files see a state that is no older, also where a million files are looked at.
const REST_MAX: Duration = Duration::from_secs(5);

/// A command that did something does not wait longer for the files to say so: it is done, whatever they say.
const CAUGHT_UP_WITHIN: Duration = Duration::from_secs(2);

/// How often the files were written, for commands after which a program reads them.
#[derive(Debug)]
pub(crate) struct Published {
    asked: Notify,
    /// How often it was begun, and which of those was the last that ended.
    counts: watch::Sender<(u64, u64)>,
}

impl Default for Published {
    fn default() -> Self {
        Self { asked: Notify::new(), counts: watch::Sender::new((0, 0)) }
    }
}

impl Published {
    fn begin(&self) -> u64 {
        let mut number = 0;
        self.counts.send_modify(|(begun, _)| {
            *begun += 1;
            number = *begun;
        });
        number
    }

    fn end(&self, number: u64) {
        self.counts.send_modify(|(_, ended)| *ended = number.max(*ended));
    }

    /// Has the files written, and waits until they say what is so now.
    pub(crate) async fn catch_up(&self) {
        let mut counts = self.counts.subscribe();
        let next = counts.borrow().0 + 1;
        self.asked.notify_one();
        // A daemon that ends has them written no more.
        let _ = tokio::time::timeout(CAUGHT_UP_WITHIN, counts.wait_for(|(_, ended)| *ended >= next)).await;
    }
}

pub(crate) async fn publish_on(daemon: Arc<Daemon>, host: Arc<DaemonHost>, state_dir: StateDir) {
    loop {
        let begun = Instant::now();
        publish(&daemon, &host, &state_dir).await;
        tokio::select! {
            () = tokio::time::sleep(rest_after(begun.elapsed())) => {}
            () = daemon.published.asked.notified() => {}
        }
    }
}

/// Returns how long the publisher rests after it took so long.
fn rest_after(took: Duration) -> Duration {
    (took * REST_SHARE).clamp(PUBLISH_EVERY, REST_MAX)
}

pub(crate) async fn publish(daemon: &Daemon, host: &DaemonHost, state_dir: &StateDir) {
    let number = daemon.published.begin();
    let Ok(status) = daemon.own_status().await else { return };
    count_requests(daemon);
    count_calls(daemon);
    tell_problems(daemon, &status.problems);
    let json = serde_json::to_vec_pretty(&status).expect("a status is written as JSON");
    if let Err(error) = state_dir.write_status(&json) {
        tracing::debug!(%error, "the last known status was not written");
    }
    let latest = daemon.node.whole_last().await.flatten().map(OsString::from_vec);
    let latest = latest.map(|path| [daemon.mountpoint().join(path).as_os_str().as_bytes(), b"\n"].concat());
    host.publish("status", text_of(status.state, &status.problems).into_bytes());
    host.publish("status.json", json);
    host.publish("latest", latest.unwrap_or_default());
    if let Ok(rows) = daemon.own_list(tidemark_api::ListRequest::default()).await {
        host.publish("checkpoints.json", serde_json::to_vec_pretty(&rows).expect("rows are written as JSON"));
    }
    daemon.published.end(number);
}

/// `.tidemark/status`: a line for the state, and one for each problem.
fn text_of(state: NodeState, problems: &[Problem]) -> String {
    let mut text = format!("state: {}\n", state.word());
    for Problem { code, what, action } in problems {
        text.push_str(&format!("problem: {}\n", one_line(&format!("{code}: {what}; {action}"))));
    }
    text
}

/// Brings the metric of each problem, and what `/healthz` says, up to the status.
fn tell_problems(daemon: &Daemon, problems: &[Problem]) {
    let metrics = &daemon.node.shared().metrics;
    for code in ProblemCode::ALL {
        let count = problems.iter().filter(|problem| problem.code == code.word()).count();
        let gauge = metrics.problem.get_or_create(&[("code", code.word())]);
        gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
    }
    daemon.told.tell(problems, Instant::now());
}

/// Brings the metrics of the mount up to its own counters.
fn count_requests(daemon: &Daemon) {
    let Some(mounted) = daemon.mounted.get() else { return };
    let metrics = &daemon.node.shared().metrics;
    metrics.fuse_awake_seconds.set(mounted.kept_awake().as_secs_f64());
    for (opcode, count) in mounted.counters().iter() {
        raise_to(&metrics.fuse_requests.get_or_create(&[("opcode", opcode.name())]), count);
        if opcode == Opcode::Create {
            raise_to(&metrics.create_files, count);
        }
    }
}

/// Brings the metrics of what the coordinator was asked up to both ends' own counters.
fn count_calls(daemon: &Daemon) {
    let Some(cluster) = daemon.node.shared().cluster.get() else { return };
    let metrics = &daemon.node.shared().metrics;
    for (call, count) in cluster.calls() {
        raise_to(&metrics.coordinator_calls.get_or_create(&[("call", call)]), count);
    }
    let Seat::Here(authority) = cluster.following.seat() else { return };
    for (call, count) in authority.calls() {
        raise_to(&metrics.catalog_calls.get_or_create(&[("call", call)]), count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::Pin;
    use std::task::Poll;

    async fn is_done(mut waits: Pin<&mut impl Future<Output = ()>>) -> bool {
        std::future::poll_fn(|cx| Poll::Ready(waits.as_mut().poll(cx).is_ready())).await
    }

    #[tokio::test]
    async fn who_catches_up_waits_for_what_was_begun_after_it_asked() {
        let published = Published::default();
        let running = published.begin();
        let mut waits = std::pin::pin!(published.catch_up());
        assert!(!is_done(waits.as_mut()).await);
        published.end(running);
        assert!(!is_done(waits.as_mut()).await, "that one may have looked before");
        published.asked.notified().await;
        let next = published.begin();
        assert!(!is_done(waits.as_mut()).await);
        published.end(next);
        assert!(is_done(waits.as_mut()).await);
    }

    #[test]
    fn publishing_takes_a_sixteenth_of_the_time_and_the_files_are_never_old() {
        let ms = Duration::from_millis;
        assert_eq!(rest_after(ms(1)), PUBLISH_EVERY, "a small tree does not wait");
        assert_eq!(rest_after(ms(40)), ms(600));
        assert_eq!(rest_after(Duration::from_secs(2)), REST_MAX);
    }

    #[test]
    fn each_problem_is_one_line_of_the_status() {
        let named = Problem::new(ProblemCode::NotCommitted, "a\nproblem: fenced: x", "save it again");
        let text = text_of(NodeState::Degraded, &[named]);
        assert_eq!(text, "state: degraded\nproblem: not_committed: a\\nproblem: fenced: x; save it again\n");
    }
}
