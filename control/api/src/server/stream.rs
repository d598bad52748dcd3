//! Long answers, line by line, for as long as a client reads them.
//!
//! Owns: the order of lines (progress, then one end), keep-alive, and cancelling. Does not own: the work.
//!
//! The work is not a task of its own: it is polled by the body that carries its answer. When the client hangs up,
//! hyper drops the body, and with it the work.

use crate::KEEPALIVE;
use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::stream::{self, BoxStream, StreamExt};
use serde::Serialize;
use std::convert::Infallible;
use tidemark_protocol::report::{ApiError, ErrorCode, Event, Progress, StreamLine};
use tokio::sync::{mpsc, watch};

/// A value that becomes true when the server ends.
pub(super) type Ending = watch::Receiver<bool>;

/// Streams progress as it comes, then the result or the error.
pub(super) fn work<T: Serialize + Send + 'static>(
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    progress: mpsc::Receiver<Progress>,
    ending: Ending,
) -> Response {
    let last = |end| match end {
        Ok(result) => line(&StreamLine::Result(result)),
        Err(error) => line(&StreamLine::<T>::Error(error)),
    };
    respond(lines(work, progress, ending, |progress| line(&StreamLine::<T>::Progress(progress)), last))
}

/// Streams events as they come; if the work ends with an error, that is the last line.
pub(super) fn events(
    work: impl Future<Output = Result<(), ApiError>> + Send + 'static,
    events: mpsc::Receiver<Event>,
    ending: Ending,
) -> Response {
    let last = |end| match end {
        Ok(()) => line(&StreamLine::Result(None::<Event>)),
        Err(error) => line(&StreamLine::<Event>::Error(error)),
    };
    respond(lines(work, events, ending, |event| line(&StreamLine::Result(Some(event))), last))
}

fn respond(lines: BoxStream<'static, Bytes>) -> Response {
    let body = Body::from_stream(lines.map(Ok::<_, Infallible>));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

/// The next event of a running stream.
enum Next<M, T> {
    Message(M),
    End(Result<T, ApiError>),
    Silence,
}

fn lines<M: Send + 'static, T: Send + 'static>(
    work: impl Future<Output = Result<T, ApiError>> + Send + 'static,
    messages: mpsc::Receiver<M>,
    ending: Ending,
    message_line: impl Fn(M) -> Bytes + Send + 'static,
    last_line: impl Fn(Result<T, ApiError>) -> Bytes + Send + 'static,
) -> BoxStream<'static, Bytes> {
    let state = Some((Box::pin(work), messages, ending));
    stream::unfold((state, message_line, last_line), |(state, message_line, last_line)| async move {
        let (mut work, mut messages, mut ending) = state?;
        let next = tokio::select! {
            // Messages first: those sent before the end come before it.
            biased;
            Some(message) = messages.recv() => Next::Message(message),
            end = &mut work => Next::End(end),
            _ = ending.wait_for(|ending| *ending) => {
                let what = "the daemon is ending; the command was not finished";
                Next::End(Err(ApiError::new(ErrorCode::Unavailable, what, "run it again when the daemon is back")))
            }
            () = tokio::time::sleep(KEEPALIVE) => Next::Silence,
        };
        Some(match next {
            Next::Message(message) => {
                (message_line(message), (Some((work, messages, ending)), message_line, last_line))
            }
            Next::Silence => {
                (Bytes::from_static(b"\n"), (Some((work, messages, ending)), message_line, last_line))
            }
            Next::End(end) => {
                // What the work sent in its last poll is still queued.
                let mut rest = Vec::new();
                while let Ok(message) = messages.try_recv() {
                    rest.extend_from_slice(&message_line(message));
                }
                rest.extend_from_slice(&last_line(end));
                (Bytes::from(rest), (None, message_line, last_line))
            }
        })
    })
    .boxed()
}

fn line<T: Serialize>(value: &StreamLine<T>) -> Bytes {
    let mut text =
        serde_json::to_vec(value).expect("reports have text keys and no map that can fail to be written");
    text.push(b'\n');
    text.into()
}
