//! Commands that only the coordinator can answer, from the node that they were given to.
//!
//! Owns: which commands those are, their way over the link and back, and the bounds of both. Does not own: the answers (`api`), the
//! link (transport).
//!
//! JSON, as between `ckptctl` and a daemon. What takes long or deletes is not among them: it is to be given to the coordinator itself,
//! where somebody can see how far it is and end it.

use crate::api::Daemon;
use bytes::Bytes;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tidemark_control::api::{
    CommitRequest, ListRequest, NodeApi, PinRequest, REQUEST_BYTES_MAX, RecoverRequest, ShowRequest,
    UndeleteRequest,
};
use tidemark_engine::cluster::{Away, Seat};
use tidemark_protocol::membership::Coordinator;
use tidemark_protocol::report::{ApiError, ErrorCode};
use tidemark_transport::{BODY_BYTES_MAX, LinkErrorKind, Refusal};
use tokio::sync::Semaphore;

/// Half of what `ckptctl` waits for an answer.
const DEADLINE: Duration = Duration::from_secs(30);

/// Of a coordinator that has been silent before the question.
const SILENT_DEADLINE: Duration = Duration::from_secs(2);

/// Answered at once for other nodes. A cluster whose nodes all ask at one moment is told to ask again.
const COMMANDS_MAX: usize = 16;

static ANSWERING: Semaphore = Semaphore::const_new(COMMANDS_MAX);

/// See the module's head.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Command {
    Nodes,
    Placement,
    Runs,
    List(ListRequest),
    Show(ShowRequest),
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
    /// Who knows of checkpoints and nodes: this node where it is alone or the coordinator.
    pub(crate) fn decides(&self) -> Decides {
        match self.node.shared().cluster.get() {
            Some(cluster) if !cluster.is_coordinator() => Decides::Elsewhere,
            Some(_) | None => Decides::Here,
        }
    }

    /// Who and where the coordinator is, for people.
    pub(crate) fn coordinator_text(&self) -> String {
        match self.node.shared().cluster.get().map(|cluster| cluster.seat()) {
            Some(Seat::There(address)) => format!("node {} ({})", address.node, address.address),
            Some(Seat::Here(_)) => "this node".to_owned(),
            Some(Seat::Unknown) | None => "nobody known here".to_owned(),
        }
    }

    /// Has the coordinator answer, for at most `deadline`.
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
        let deadline = if self.silence().is_some() { deadline.min(SILENT_DEADLINE) } else { deadline };
        let body = serde_json::to_vec(command)
            .expect("requests have text keys and no map that can fail to be written");
        let answer = cluster.forward(&body, deadline).await.map_err(|error| match error {
            Away::Refused(refusal) => away(refusal.reason),
            error => away(chain(&error)),
        })?;
        let answer: Result<T, ApiError> = serde_json::from_slice(&answer).map_err(|error| {
            let what = format!("the answer of the coordinator cannot be read: {error}");
            ApiError::new(ErrorCode::Failed, what, "run the same version on all nodes")
        })?;
        answer
    }

    pub(crate) async fn forward<T: DeserializeOwned>(&self, command: Command) -> Result<T, ApiError> {
        self.forward_within(&command, DEADLINE).await
    }

    /// What is done by the coordinator alone, and is not forwarded.
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
        let Ok(_permit) = ANSWERING.try_acquire() else {
            let why = format!("{COMMANDS_MAX} commands are being answered for other nodes; ask again");
            return Err(Refusal::new(LinkErrorKind::Unavailable, why));
        };
        let answer = match command {
            Command::Nodes => json(&self.nodes().await),
            Command::Placement => json(&self.placement().await),
            Command::Runs => json(&self.runs().await),
            Command::List(request) => json(&self.list(request).await),
            Command::Show(request) => json(&self.show(request).await),
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

    /// Where the coordinator is not heard: a problem for people.
    pub(crate) fn silence(&self) -> Option<String> {
        let cluster = self.node.shared().cluster.get().filter(|cluster| !cluster.is_coordinator())?;
        match cluster.coordinator() {
            Coordinator::Heard { .. } => None,
            Coordinator::Silent { name, for_ms } => {
                let for_s = Duration::from_millis(for_ms).as_secs_f64();
                Some(format!("the coordinator, node {name}, has not answered for {for_s:.1} s"))
            }
            Coordinator::Unknown => {
                Some(format!("the coordinator, {}, has not let this node in", self.coordinator_text()))
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
