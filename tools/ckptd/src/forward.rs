//! Commands that only the coordinator can answer, from the node that received them.
//!
//! Owns: the set of those commands, their path over the link and back, and the bounds of both. Does not own: the answers (`api`), the link
//! (transport).
//!
//! The format is JSON, as between `ckptctl` and a daemon. Commands that take long or delete are not forwarded. The caller gives them to the
//! coordinator itself, where a person can watch and end them. A flush, which each node's job may wait for, is asked for again and again.

use crate::api::Daemon;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::pin::Pin;
use std::time::{Duration, Instant};
use tidemark_api::{
    CommitRequest, FlushRequest, ListRequest, NodeApi, PinRequest, ProgressSink, REQUEST_BYTES_MAX,
    RecoverRequest, ShowRequest, UndeleteRequest, WhyRequest,
};
use tidemark_engine::cluster::{Away, Seat};
use tidemark_protocol::membership::Coordinator;
use tidemark_protocol::report::{ApiError, ErrorCode, Flush};
use tidemark_transport::{BODY_BYTES_MAX, LinkErrorKind, Refusal};
use tokio::sync::Semaphore;

/// Half of what `ckptctl` waits for an answer.
const DEADLINE: Duration = Duration::from_secs(30);

/// Limit for a silent coordinator: people ask just then, and need an answer in a few seconds.
const SILENT_DEADLINE: Duration = Duration::from_secs(2);

/// Interval at which a waiting command checks whether the coordinator is silent.
const SILENCE_LOOK: Duration = Duration::from_millis(50);

/// First and longest time that the coordinator waits before it reports what is still pending, below [`DEADLINE`]. The time grows, because
/// work that takes longer than a round would never be seen to end.
const FLUSH_ROUND_S: u64 = 2;
const FLUSH_ROUND_S_MAX: u64 = 16;

/// Extra time of a round, for the case that no coordinator decides yet.
const FLUSH_LATE: Duration = Duration::from_secs(5);

/// Longest wait of the coordinator for nodes that do not publish their changes, if the caller gives no limit. For a node that is cut off
/// the wait ends sooner, unless `[members] cut_off_s` is set higher.
const HEAR_MAX: Duration = Duration::from_secs(40);

/// Pause after a round without a result.
const FLUSH_AGAIN: Duration = Duration::from_millis(200);

/// Commands answered at once for other nodes. If the nodes of a cluster all ask at one moment, some are told to ask again.
const COMMANDS_MAX: usize = 16;

static ANSWERING: Semaphore = Semaphore::const_new(COMMANDS_MAX);

/// Flushes waited for at once for other nodes: every node of a job may, when it ends. Each is an entry in a list.
const FLUSHES_MAX: usize = 4096;

static FLUSHING: Semaphore = Semaphore::const_new(FLUSHES_MAX);

/// Rounds of this node's flushes on their way at once: each holds a credit of the connection that beats and look-ups need, too.
const ROUNDS_MAX: usize = 8;

static ROUNDS: Semaphore = Semaphore::const_new(ROUNDS_MAX);

/// See the module's head.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Command {
    Nodes,
    Placement,
    Runs,
    List(ListRequest),
    Show(ShowRequest),
    Why(WhyRequest),
    Flush(FlushRequest),
    Commit(CommitRequest),
    Pin(PinRequest),
    Undelete(UndeleteRequest),
    Recover(RecoverRequest),
}

/// Where a command is to be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Decides {
    Here,
    Elsewhere,
}

impl Daemon {
    /// Returns where checkpoints and nodes are decided: here, if this node is alone or the coordinator.
    pub(crate) fn decides(&self) -> Decides {
        match self.node.shared().cluster.get() {
            Some(cluster) if !cluster.following.is_coordinator() => Decides::Elsewhere,
            Some(_) | None => Decides::Here,
        }
    }

    /// Names the coordinator and its address, for people.
    pub(crate) fn coordinator_text(&self) -> String {
        match self.node.shared().cluster.get().map(|cluster| cluster.following.seat()) {
            Some(Seat::There(address)) => format!("node {} ({})", address.node, address.address),
            Some(Seat::Here(_)) => "this node".to_owned(),
            Some(Seat::Unknown) | None => "nobody known here".to_owned(),
        }
    }

    /// Asks the coordinator for an answer, for at most `deadline`. If another node takes over meanwhile, that one is asked instead, also if
    /// it is this node.
    pub(crate) async fn forward_within<T: DeserializeOwned>(
        &self,
        command: &Command,
        deadline: Duration,
    ) -> Result<T, ApiError> {
        let away = |what: String| {
            let who = self.coordinator_text();
            let what = format!("the coordinator, {who}, did not answer: {what}");
            ApiError::new(
                ErrorCode::Unavailable,
                what,
                "see `ckptctl status`, and look at that node and the network to it",
            )
        };
        let Some(cluster) = self.node.shared().cluster.get() else {
            return Err(away("there is none".to_owned()));
        };
        let body = serde_json::to_vec(command)
            .expect("requests have text keys and no map that can fail to be written");
        let until = Instant::now() + deadline;
        let mut seats = cluster.following.watch_seat();
        let answer = loop {
            seats.mark_unchanged();
            let left = until.saturating_duration_since(Instant::now());
            let answer = async {
                match self.decides() {
                    Decides::Here => self.answer_here(&body).await.map_err(Away::Refused),
                    Decides::Elsewhere => cluster.forward(&body, left).await,
                }
            };
            tokio::select! {
                answer = answer => break answer.map_err(|error| match error {
                    Away::Refused(refusal) => away(refusal.reason),
                    error => away(chain(&error)),
                })?,
                why = self.stays_silent() => return Err(away(why)),
                () = tokio::time::sleep(left) => return Err(away(format!("no answer in {} s", deadline.as_secs()))),
                // The sender lives as long as the cluster.
                _ = seats.changed() => {}
            }
        };
        let answer: Result<T, ApiError> = serde_json::from_slice(&answer).map_err(|error| {
            let what = format!("the answer of the coordinator cannot be read: {error}");
            ApiError::new(ErrorCode::Failed, what, "run the same version on all nodes")
        })?;
        answer
    }

    /// Resolves with the reason once the coordinator has been silent for [`SILENT_DEADLINE`].
    async fn stays_silent(&self) -> String {
        let mut since = None;
        loop {
            let why = self.silence();
            since = why.as_ref().map(|_| since.unwrap_or_else(Instant::now));
            if let (Some(why), Some(since)) = (why, since)
                && since.elapsed() >= SILENT_DEADLINE
            {
                return why;
            }
            tokio::time::sleep(SILENCE_LOOK).await;
        }
    }

    pub(crate) async fn forward<T: DeserializeOwned>(&self, command: Command) -> Result<T, ApiError> {
        self.forward_within(&command, DEADLINE).await
    }

    /// Flushes on the coordinator, after publishing this node's changes to it. If the caller wants to wait, waits in short rounds. Follows
    /// a coordinator that is replaced meanwhile, and waits for a busy or absent one for up to [`DEADLINE`].
    pub(crate) async fn forward_flush(&self, request: FlushRequest) -> Result<Flush, ApiError> {
        let began = Instant::now();
        let (mut all, mut heard) = (Flush { waited: request.wait, ..Flush::default() }, began);
        let mut round_s = FLUSH_ROUND_S;
        loop {
            let left_s = || request.timeout_s.map(|most| most.saturating_sub(began.elapsed().as_secs()));
            // Many flushes share the turns: then each gets a short round, and a flush without a turn learns what is pending.
            let longest_s = if ROUNDS.available_permits() == 0 { FLUSH_ROUND_S } else { round_s };
            let turn = async {
                let most = left_s().map_or(DEADLINE, |left_s| Duration::from_secs(left_s).min(DEADLINE));
                tokio::time::timeout(most, ROUNDS.acquire()).await.ok()?.ok()
            };
            let turn = if request.wait { turn.await } else { None };
            let longest_s = turn.as_ref().map_or(0, |_| longest_s);
            let left_s = left_s();
            let timeout_s = request.wait.then(|| left_s.map_or(longest_s, |left_s| left_s.min(longest_s)));
            let round = FlushRequest { place: request.place.clone(), wait: request.wait, timeout_s };
            let answered = self.flush_round(round).await;
            drop(turn);
            match answered {
                Ok(round) => {
                    (heard, round_s) = (Instant::now(), FLUSH_ROUND_S_MAX.min(2 * round_s));
                    all.uploaded_files += round.uploaded_files;
                    all.uploaded_bytes += round.uploaded_bytes;
                    all.committed.extend(round.committed);
                    (all.pending, all.tier3_away) = (round.pending, round.tier3_away);
                    // Without a time-out it ended because nothing more will come of it.
                    if !round.timed_out || left_s == Some(0) {
                        all.timed_out = round.timed_out;
                        return Ok(all);
                    }
                }
                Err(error) if !request.wait || error.code != ErrorCode::Unavailable => return Err(error),
                Err(error) if heard.elapsed() >= DEADLINE || left_s == Some(0) => return Err(error),
                Err(_) => tokio::time::sleep(FLUSH_AGAIN).await,
            }
        }
    }

    /// Runs a round. Only a coordinator that has heard this node's changes can answer that none of them is pending.
    async fn flush_round(&self, round: FlushRequest) -> Result<Flush, ApiError> {
        if self.decides() == Decides::Here {
            return self.flush(round, ProgressSink::channel().0).await;
        }
        let unheard = |why: String| {
            let what = format!("the coordinator has not heard what was done here: {why}");
            ApiError::new(ErrorCode::Unavailable, what, "see `ckptctl status`, and ask again")
        };
        if let Some(why) = self.silence() {
            return Err(unheard(why));
        }
        if let Some(cluster) = self.node.shared().cluster.get() {
            let told = tokio::time::timeout(SILENT_DEADLINE, cluster.publish()).await;
            told.map_err(|_| unheard(format!("no answer in {} s", SILENT_DEADLINE.as_secs())))?
                .map_err(|away| unheard(chain(&away)))?;
        }
        self.forward(Command::Flush(round)).await
    }

    /// On the coordinator: has all nodes tell what they made, and waits for those that do not for half of the time that there is, so that what is
    /// known has the rest. A sentence for each that has not; none elsewhere.
    pub(crate) async fn hear_all(&self, timeout: Option<Duration>) -> Vec<String> {
        let Some(cluster) = self.node.shared().cluster.get() else { return Vec::new() };
        let until = Instant::now() + timeout.map_or(HEAR_MAX, |timeout| HEAR_MAX.min(timeout / 2));
        loop {
            let Seat::Here(authority) = cluster.following.seat() else { return Vec::new() };
            let unheard = if authority.hears_still() {
                vec!["this coordinator is new, and some nodes have not said yet what they know".to_owned()]
            } else {
                authority.hear_all().await
            };
            if unheard.is_empty() || Instant::now() >= until {
                return unheard;
            }
            tokio::time::sleep(FLUSH_AGAIN).await;
        }
    }

    /// Refuses a command that only the coordinator carries out, and that is not forwarded.
    pub(crate) fn only_where_it_decides(&self, command: &str) -> Result<(), ApiError> {
        match self.decides() {
            Decides::Here => Ok(()),
            Decides::Elsewhere => {
                let what =
                    format!("`ckptctl {command}` is a matter of the coordinator, and this node is not it");
                Err(ApiError::new(
                    ErrorCode::Unavailable,
                    what,
                    format!("run it on {}", self.coordinator_text()),
                ))
            }
        }
    }

    /// [`Self::answer_for_others`], of which the answers themselves may ask a coordinator.
    fn answer_here<'a>(
        &'a self,
        body: &'a [u8],
    ) -> Pin<Box<dyn Future<Output = Result<Bytes, Refusal>> + Send + 'a>> {
        Box::pin(self.answer_for_others(body))
    }

    /// Answers a command that another node was given.
    pub(crate) async fn answer_for_others(&self, body: &[u8]) -> Result<Bytes, Refusal> {
        let invalid = |why: String| Refusal::new(LinkErrorKind::Invalid, why);
        if body.len() > REQUEST_BYTES_MAX {
            return Err(invalid(format!(
                "a command of {} bytes, and at most {REQUEST_BYTES_MAX} are taken",
                body.len()
            )));
        }
        let command: Command = serde_json::from_slice(body)
            .map_err(|error| invalid(format!("the command is not known here: {error}")))?;
        if self.decides() == Decides::Elsewhere {
            let why = format!("this node is not the coordinator; {} is", self.coordinator_text());
            return Err(Refusal::new(LinkErrorKind::Unavailable, why));
        }
        let (turns, most) = match &command {
            Command::Flush(_) => (&FLUSHING, FLUSHES_MAX),
            _ => (&ANSWERING, COMMANDS_MAX),
        };
        let Ok(_permit) = turns.try_acquire() else {
            let why = format!("{most} commands of this kind are being answered for other nodes; ask again");
            return Err(Refusal::new(LinkErrorKind::Unavailable, why));
        };
        let answer = match command {
            Command::Nodes => json(&self.nodes().await),
            Command::Placement => json(&self.placement().await),
            Command::Runs => json(&self.runs().await),
            Command::List(request) => json(&self.list(request).await),
            Command::Show(request) => json(&self.show(request).await),
            Command::Why(request) => json(&self.why(request).await),
            // How far it is, the answers tell.
            Command::Flush(request) => json(&self.flush_for_others(request).await?),
            Command::Commit(request) => json(&self.commit(request).await),
            Command::Pin(request) => json(&self.pin(request).await),
            Command::Undelete(request) => json(&self.undelete(request).await),
            Command::Recover(request) => json(&self.recover(request).await),
        };
        if answer.len() > BODY_BYTES_MAX {
            let what = format!(
                "the answer has {} bytes, and {BODY_BYTES_MAX} are sent to other nodes",
                answer.len()
            );
            let action = format!("ask for less, or ask node {} itself", self.name);
            return Ok(json(&Err::<(), _>(ApiError::new(ErrorCode::Failed, what, action))));
        }
        Ok(answer)
    }

    /// Runs a round of another node's flush. Refused while this coordinator has not heard all nodes, and if checkpoints are not decided in
    /// time.
    async fn flush_for_others(&self, request: FlushRequest) -> Result<Result<Flush, ApiError>, Refusal> {
        let unavailable = |why: &str| Refusal::new(LinkErrorKind::Unavailable, why);
        if self.node.shared().cluster.get().is_some_and(|cluster| cluster.hears_still()) {
            return Err(unavailable("it is new, and some nodes have not said yet what they know; ask again"));
        }
        let timeout_s = request.timeout_s.unwrap_or(FLUSH_ROUND_S).min(FLUSH_ROUND_S_MAX);
        let request = FlushRequest { timeout_s: Some(timeout_s), ..request };
        let within = Duration::from_secs(timeout_s) + FLUSH_LATE;
        let flushed = tokio::time::timeout(within, self.flush(request, ProgressSink::channel().0)).await;
        flushed.map_err(|_| unavailable("checkpoints are not decided over yet; ask again"))
    }

    /// Where the coordinator is not heard: a problem for people.
    pub(crate) fn silence(&self) -> Option<String> {
        let cluster =
            self.node.shared().cluster.get().filter(|cluster| !cluster.following.is_coordinator())?;
        match cluster.following.coordinator() {
            Coordinator::Heard { .. } => None,
            Coordinator::Silent { name, for_ms } => {
                let for_s = Duration::from_millis(for_ms).as_secs_f64();
                Some(format!("the coordinator, node {name}, has not answered for {for_s:.1} s"))
            }
            Coordinator::Unknown => {
                let why = cluster
                    .following
                    .why_not_in()
                    .map_or_else(String::new, |not_in| format!(": {}", not_in.why));
                Some(format!("the coordinator, {}, has not let this node in{why}", self.coordinator_text()))
            }
        }
    }
}

fn json<T: Serialize>(answer: &Result<T, ApiError>) -> Bytes {
    serde_json::to_vec(answer).expect("reports have text keys and no map that can fail to be written").into()
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_read_as_it_was_written_and_others_are_not_known() {
        let text = serde_json::to_string(&Command::List(ListRequest { all: true, ..ListRequest::default() }))
            .unwrap();
        assert!(matches!(serde_json::from_str(&text).unwrap(), Command::List(request) if request.all));
        assert!(matches!(serde_json::from_str(r#""nodes""#).unwrap(), Command::Nodes));
        for text in [r#"{"gc":{"dry_run":false}}"#, r#""halt""#, "", r#"{"list":{}}"#] {
            assert!(serde_json::from_str::<Command>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn an_error_of_the_coordinator_comes_back_as_it_was() {
        let error = ApiError::new(ErrorCode::NotFound, "w", "a");
        let back: Result<(), ApiError> = serde_json::from_slice(&json(&Err::<(), _>(error.clone()))).unwrap();
        assert_eq!(back, Err(error));
    }
}
