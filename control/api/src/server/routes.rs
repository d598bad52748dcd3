//! The command that each path calls.
//!
//! Owns: the routes, the bounds on requests, the HTTP status of each error. Does not own: streams (`stream`).

use super::connections::Holding;
use super::stream::{self, Ending};
use super::{HTTP_REQUESTS_MAX, REQUESTS_MAX};
use crate::command::{self, Ask, Get, Visit, Work};
use crate::{EventSink, NodeApi, ProgressSink, REQUEST_BYTES_MAX, path};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde::{Serialize, de::DeserializeOwned};
use std::sync::Arc;
use tidemark_protocol::report::{ApiError, ErrorCode};
use tokio::sync::Semaphore;

/// The content type of Prometheus text.
const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Node = Arc<dyn NodeApi>;

/// State that the handlers of the unix socket share.
#[derive(Clone)]
struct Shared {
    node: Node,
    ending: Ending,
}

/// The routes of commands.
struct Commands(Router<Shared>);

impl Visit for Commands {
    fn get<C: Get>(self) -> Self {
        Self(self.0.route(C::PATH, get(got::<C>)))
    }

    fn ask<C: Ask>(self) -> Self {
        Self(self.0.route(C::PATH, post(ask::<C>)))
    }

    fn work<C: Work>(self) -> Self {
        Self(self.0.route(C::PATH, post(work::<C>)))
    }
}

/// Makes the routes of every command, for the unix socket.
pub(super) fn commands(node: Node, ending: Ending) -> Router {
    let health = Router::new()
        .route(path::METRICS, get(metrics))
        .route(path::HEALTHZ, get(healthz))
        .with_state(Arc::clone(&node));
    let shared = Shared { node, ending };
    let Commands(routes) = command::each(Commands(Router::new()));
    let routes = routes.route(path::EVENTS, post(events)).with_state(shared);
    let unknown = ("this daemon has no such command", "use a ckptctl of the daemon's version");
    bounded(routes.merge(health), REQUESTS_MAX, unknown)
}

/// Makes the routes that anybody on this machine may read, for TCP. No route here changes anything.
pub(super) fn health(node: Node) -> Router {
    let routes = Router::new()
        .route(path::METRICS, get(metrics))
        .route(path::HEALTHZ, get(healthz))
        .route(path::STATUS_HTTP, get(|State(node): State<Node>| async move { answer(node.status().await) }))
        .with_state(node);
    bounded(routes, HTTP_REQUESTS_MAX, ("there is nothing at this path", "GET /healthz, /metrics or /status"))
}

/// Adds the bounds to routes. `unknown`: the error for an unknown path, and the advice.
fn bounded(routes: Router, requests_max: usize, unknown: (&'static str, &'static str)) -> Router {
    let permits = Arc::new(Semaphore::new(requests_max));
    let (what, action) = unknown;
    routes
        .fallback(move || async move { error(&ApiError::new(ErrorCode::NotFound, what, action)) })
        .layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX))
        .layer(middleware::from_fn_with_state(permits, admit))
}

/// Admits a request when fewer than the bound are at work, and counts it until its answer's last byte is gone.
async fn admit(State(permits): State<Arc<Semaphore>>, request: Request, next: Next) -> Response {
    let Ok(permit) = permits.try_acquire_owned() else {
        let what = "the daemon is answering as many requests as it takes at once";
        return error(&ApiError::new(
            ErrorCode::Unavailable,
            what,
            "try again, or end a command that follows events",
        ));
    };
    next.run(request).await.map(|body| Body::new(Holding::new(body, permit)))
}

/// Answers a command without arguments.
async fn got<C: Get>(State(shared): State<Shared>) -> Response {
    answer(C::answer(shared.node.as_ref()).await)
}

/// Answers a command in one piece.
async fn ask<C: Ask>(State(shared): State<Shared>, body: Bytes) -> Response {
    match parse::<C>(&body) {
        Ok(request) => answer(request.answer(shared.node.as_ref()).await),
        Err(refused) => error(&refused),
    }
}

/// Answers a command with its progress until it is done.
async fn work<C: Work>(State(shared): State<Shared>, body: Bytes) -> Response {
    let request = match parse::<C>(&body) {
        Ok(request) => request,
        Err(refused) => return error(&refused),
    };
    let (progress, lines) = ProgressSink::channel();
    let node = shared.node;
    let work = async move { request.answer(node.as_ref(), progress).await };
    stream::work(work, lines, shared.ending)
}

async fn events(State(shared): State<Shared>, body: Bytes) -> Response {
    let request = match parse(&body) {
        Ok(request) => request,
        Err(refused) => return error(&refused),
    };
    let (sink, lines) = EventSink::channel();
    let work = async move { shared.node.events(request, sink).await };
    stream::events(work, lines, shared.ending)
}

async fn metrics(State(node): State<Node>) -> Response {
    ([(header::CONTENT_TYPE, METRICS_TYPE)], node.metrics_text()).into_response()
}

async fn healthz(State(node): State<Node>) -> Response {
    match node.healthy() {
        Ok(()) => match node.concerns() {
            concerns if concerns.is_empty() => "ok\n".into_response(),
            concerns => format!("degraded\n{}\n", concerns.join("\n")).into_response(),
        },
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")).into_response(),
    }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, ApiError> {
    serde_json::from_slice(body).map_err(|source| {
        let what = format!("the request is not what this command takes: {source}");
        ApiError::new(ErrorCode::Usage, what, "use a ckptctl of the daemon's version")
    })
}

fn answer<T: Serialize>(result: Result<T, ApiError>) -> Response {
    match result {
        Ok(value) => json(StatusCode::OK, &value),
        Err(refused) => error(&refused),
    }
}

fn error(refused: &ApiError) -> Response {
    let status = match refused.code {
        ErrorCode::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        ErrorCode::Usage => StatusCode::BAD_REQUEST,
        ErrorCode::NotFound => StatusCode::NOT_FOUND,
        ErrorCode::NotRecoverable => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorCode::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        ErrorCode::Fenced => StatusCode::CONFLICT,
    };
    json(status, refused)
}

fn json<T: Serialize>(status: StatusCode, value: &T) -> Response {
    let body =
        serde_json::to_vec(value).expect("reports have text keys and no map that can fail to be written");
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}
