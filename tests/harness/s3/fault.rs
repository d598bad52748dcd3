//! Scripted faults of the S3 server, as data.
//!
//! Owns: which request a fault meets, and the count that proves it did. Does not own: what the effect looks like on
//! the wire (`wire`).

use hyper::Method;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// An S3 operation, read off method and query.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum S3Operation {
    PutObject,
    GetObject,
    HeadObject,
    ListObjects,
    DeleteObject,
    DeleteObjects,
    CreateMultipartUpload,
    UploadPart,
    CompleteMultipartUpload,
    AbortMultipartUpload,
    ListMultipartUploads,
    Other,
}

impl S3Operation {
    pub(super) fn of(method: &Method, query: &str) -> Self {
        let has = |name: &str| query.split('&').any(|pair| pair.split('=').next() == Some(name));
        match (method.as_str(), has("uploadId"), has("uploads")) {
            ("PUT", true, _) => Self::UploadPart,
            ("PUT", false, _) => Self::PutObject,
            ("POST", true, _) => Self::CompleteMultipartUpload,
            ("POST", _, true) => Self::CreateMultipartUpload,
            ("POST", ..) if has("delete") => Self::DeleteObjects,
            ("DELETE", true, _) => Self::AbortMultipartUpload,
            ("DELETE", ..) => Self::DeleteObject,
            ("HEAD", ..) => Self::HeadObject,
            ("GET", _, true) => Self::ListMultipartUploads,
            ("GET", ..) if has("list-type") => Self::ListObjects,
            ("GET", false, _) => Self::GetObject,
            _ => Self::Other,
        }
    }
}

/// Effect of a fault as the client sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FaultEffect {
    /// The request has no effect, and is never answered.
    TimeoutBefore,
    /// The request takes effect, and is never answered.
    TimeoutAfter,
    /// The request is never answered. After this many milliseconds, when the client has abandoned it, it takes effect.
    LateAfterTimeout(u64),
    /// Only the first block of the request's body is read. The request has no effect and is never answered.
    SlowRequestBody,
    /// The connection is closed after the first block of the request's body. The request has no effect.
    CutRequestBody,
    /// A bit of the request's body flips before the store verifies it.
    DamagedOnWrite,
    /// The request has no effect, and the answer is 500.
    Status500Before,
    /// The request takes effect, and the answer is 500.
    Status500After,
    /// The request has no effect, and the answer is 200 with an error document, as S3 sends it if it began to answer early.
    OkWithErrorBodyBefore,
    /// The request takes effect, and the answer is 200 with an error document.
    OkWithErrorBodyAfter,
    /// The request takes effect, and the answer is 412, as when a proxy repeats a conditional put.
    PreconditionFailedAfterSuccess,
    /// The request takes effect, and the answer is 404 `NoSuchUpload`, as when a proxy repeats the end of an upload.
    NoSuchUploadAfterSuccess,
    /// The request has no effect, and the answer is 409.
    Conflict409,
    /// A bit of the answer's body flips; the headers stay.
    WrongChecksumOnRead,
    /// Only the first byte of the answer's body ever comes.
    SlowBody,
    /// The request takes effect, and the connection is closed without an answer.
    DropConnection,
    /// A listing without this many of the newest objects below its prefix.
    ListWithoutNewest(usize),
    /// A listing that still has what was deleted.
    ListWithDeleted,
    /// The request takes effect once the faults are lifted, and is answered then.
    HeldUntilLifted,
    /// The request has no effect, and the answer is 200 with a foreign page, as from a proxy that demands a password.
    PageOfOthers,
}

/// A scripted fault.
#[derive(Debug, Clone)]
pub struct Fault {
    pub operation: S3Operation,
    /// Meets requests whose path (for lists: query) contains this, percent-encoded as on the wire.
    pub key_contains: String,
    /// Number of the matching request that the fault meets, from 1. `None` meets every request.
    pub nth: Option<u64>,
    pub effect: FaultEffect,
}

#[derive(Debug)]
struct Armed {
    fault: Fault,
    matched: u64,
    fired: u64,
    lifted: bool,
}

/// The faults of one server, and the counts of its requests so far.
#[derive(Debug, Default)]
pub struct Faults {
    armed: Mutex<Vec<Armed>>,
    requests: Mutex<BTreeMap<S3Operation, u64>>,
}

impl Faults {
    /// Adds a fault, and returns its number for [`Self::fired`].
    pub fn add(&self, fault: Fault) -> usize {
        let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        armed.push(Armed { fault, matched: 0, fired: 0, lifted: false });
        armed.len() - 1
    }

    /// Returns how often a fault took effect. A test that scripts a fault asserts that it did.
    pub fn fired(&self, number: usize) -> u64 {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner).get(number).map_or(0, |armed| armed.fired)
    }

    /// Lifts all faults added so far: from now on they have no effect. Their counts stay.
    pub fn lift(&self) {
        let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        armed.iter_mut().for_each(|armed| armed.lifted = true);
    }

    /// Whether requests are held, because a fault that holds them was not lifted.
    pub(super) fn hold(&self) -> bool {
        let armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        armed.iter().any(|armed| armed.fault.effect == FaultEffect::HeldUntilLifted && !armed.lifted)
    }

    /// Returns the number of requests of that kind so far, failed ones included.
    pub fn requests(&self, operation: S3Operation) -> u64 {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        requests.get(&operation).copied().unwrap_or(0)
    }

    pub(super) fn meet(&self, operation: S3Operation, path_and_query: &str) -> Option<FaultEffect> {
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner).entry(operation).or_default() += 1;
        let mut effect = None;
        for armed in self.armed.lock().unwrap_or_else(PoisonError::into_inner).iter_mut() {
            let meets =
                armed.fault.operation == operation && path_and_query.contains(&armed.fault.key_contains);
            if !meets || armed.lifted {
                continue;
            }
            armed.matched += 1;
            if effect.is_none() && armed.fault.nth.is_none_or(|nth| nth == armed.matched) {
                armed.fired += 1;
                effect = Some(armed.fault.effect);
            }
        }
        effect
    }
}
