//! Effects of faults on the wire.
//!
//! Owns: every effect on one request and its answer. Does not own: which request a fault meets (`fault`), what the bucket
//! holds (`backend`).

use super::backend::Staleness;
use super::fault::{FaultEffect, Faults, S3Operation};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use hyper::body::{Body as _, Incoming};
use hyper::header::CONTENT_LENGTH;
use hyper::{Request, Response, StatusCode};
use s3s::Body;
use s3s::dto::StreamingBlob;
use s3s::service::S3Service;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// Answer of a proxy that stands in for the store.
const PAGE: &str = "<html>login</html>";

/// Interval at which a held request checks whether the faults were lifted.
const HOLD_LOOK: Duration = Duration::from_millis(5);

pub(super) async fn respond(
    service: S3Service,
    faults: Arc<Faults>,
    mut request: Request<Incoming>,
) -> io::Result<Response<Body>> {
    let operation = S3Operation::of(request.method(), request.uri().query().unwrap_or(""));
    let at = request.uri().path_and_query().map_or_else(String::new, ToString::to_string);
    let effect = faults.meet(operation, &at);
    let request = match effect {
        Some(FaultEffect::TimeoutBefore) => return std::future::pending().await,
        Some(FaultEffect::Status500Before) => {
            return Ok(refusal(StatusCode::INTERNAL_SERVER_ERROR, "InternalError"));
        }
        Some(FaultEffect::OkWithErrorBodyBefore) => return Ok(refusal(StatusCode::OK, "InternalError")),
        Some(FaultEffect::Conflict409) => {
            return Ok(refusal(StatusCode::CONFLICT, "ConditionalRequestConflict"));
        }
        Some(FaultEffect::SlowRequestBody) => {
            first_block(request.body_mut()).await;
            return std::future::pending().await;
        }
        Some(FaultEffect::CutRequestBody) => {
            first_block(request.body_mut()).await;
            return Err(dropped());
        }
        Some(FaultEffect::LateAfterTimeout(after_ms)) => {
            let request = whole(request, |_| ()).await?;
            // A task of its own, because this answer ends when the client goes away.
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(after_ms)).await;
                let _ = service.call(request).await;
            });
            return std::future::pending().await;
        }
        Some(FaultEffect::PageOfOthers) => {
            let mut response = Response::new(Body::from(PAGE.to_owned()));
            response.headers_mut().insert(CONTENT_LENGTH, PAGE.len().into());
            return Ok(response);
        }
        Some(FaultEffect::HeldUntilLifted) => {
            while faults.hold() {
                tokio::time::sleep(HOLD_LOOK).await;
            }
            request.map(Body::from)
        }
        Some(FaultEffect::DamagedOnWrite) => whole(request, flip).await?,
        Some(FaultEffect::ListWithoutNewest(hidden)) => with(request, Staleness { hidden, deleted: false }),
        Some(FaultEffect::ListWithDeleted) => with(request, Staleness { hidden: 0, deleted: true }),
        _ => request.map(Body::from),
    };
    let response = service.call(request).await.map_err(|error| io::Error::other(format!("{error:?}")))?;
    match effect {
        Some(FaultEffect::TimeoutAfter) => std::future::pending().await,
        Some(FaultEffect::DropConnection) => Err(dropped()),
        Some(FaultEffect::Status500After) => Ok(refusal(StatusCode::INTERNAL_SERVER_ERROR, "InternalError")),
        // Differs from the code of `OkWithErrorBodyBefore`, because fewer clients look for this one in such a body.
        Some(FaultEffect::OkWithErrorBodyAfter) => Ok(refusal(StatusCode::OK, "ServiceUnavailable")),
        Some(FaultEffect::PreconditionFailedAfterSuccess) => {
            Ok(refusal(StatusCode::PRECONDITION_FAILED, "PreconditionFailed"))
        }
        Some(FaultEffect::NoSuchUploadAfterSuccess) => Ok(refusal(StatusCode::NOT_FOUND, "NoSuchUpload")),
        Some(FaultEffect::WrongChecksumOnRead) => {
            let (parts, body) = response.into_parts();
            let mut bytes = collect(body).await?;
            flip(&mut bytes);
            Ok(Response::from_parts(parts, Body::from(Bytes::from(bytes))))
        }
        Some(FaultEffect::SlowBody) => {
            let (parts, body) = response.into_parts();
            let bytes = Bytes::from(collect(body).await?);
            let first = bytes.slice(..bytes.len().min(1));
            let slow = stream::iter([Ok::<_, io::Error>(first)]).chain(stream::pending());
            Ok(Response::from_parts(parts, Body::from(StreamingBlob::wrap(Box::pin(slow)))))
        }
        _ => Ok(response),
    }
}

/// Takes the first block of a body that is still arriving. If there is none, the body was empty.
async fn first_block(body: &mut Incoming) {
    std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
}

/// Reads all of a request's body, and returns the request with the body changed.
async fn whole(request: Request<Incoming>, change: impl FnOnce(&mut [u8])) -> io::Result<Request<Body>> {
    let (parts, body) = request.into_parts();
    let mut bytes = collect(Body::from(body)).await?;
    change(&mut bytes);
    Ok(Request::from_parts(parts, Body::from(Bytes::from(bytes))))
}

fn with(mut request: Request<Incoming>, staleness: Staleness) -> Request<Body> {
    request.extensions_mut().insert(staleness);
    request.map(Body::from)
}

fn flip(bytes: &mut [u8]) {
    if let Some(byte) = bytes.first_mut() {
        *byte ^= 1;
    }
}

fn dropped() -> io::Error {
    io::Error::other("scripted: the connection is dropped")
}

async fn collect(body: Body) -> io::Result<Vec<u8>> {
    let fold = |mut all: Vec<u8>, block: Bytes| async move {
        all.extend_from_slice(&block);
        Ok(all)
    };
    body.map_err(io::Error::other).try_fold(Vec::new(), fold).await
}

fn refusal(status: StatusCode, code: &str) -> Response<Body> {
    let document =
        format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>scripted</Message></Error>");
    let mut response = Response::new(Body::from(document));
    *response.status_mut() = status;
    response
}
