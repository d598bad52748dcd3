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
    /// No effect, and no answer ever.
    TimeoutBefore,
    /// The request takes effect, and no answer ever comes.
    TimeoutAfter,
    /// No answer ever comes. The request takes effect this many milliseconds later, when the client has given it up.
    LateAfterTimeout(u64),
    /// The first block of the request's body is read and the rest never is. No effect, and no answer.
    SlowRequestBody,
    /// The connection is closed when the first block of the request's body has come. No effect.
    CutRequestBody,
    /// A bit of the request's body flips before the store verifies it.
    DamagedOnWrite,
    /// No effect, and 500.
    Status500Before,
    /// The request takes effect, and the answer is 500.
    Status500After,
    /// No effect, and the answer is 200 with an error document, as S3 sends it when it has begun to answer too early.
    OkWithErrorBodyBefore,
    /// The request takes effect, and the answer is 200 with an error document.
    OkWithErrorBodyAfter,
    /// The request takes effect, and the answer is 412, as when a proxy repeats a conditional put.
    PreconditionFailedAfterSuccess,
    /// The request takes effect, and the answer is 404 `NoSuchUpload`, as when a proxy repeats the end of an upload.
    NoSuchUploadAfterSuccess,
    /// No effect, and 409.
    Conflict409,
    /// A bit of the body read is flipped; headers stay.
    WrongChecksumOnRead,
    /// The first byte of the body comes, the rest never does.
    SlowBody,
    /// The request takes effect, and the connection is closed without an answer.
    DropConnection,
    /// A listing without this many of the newest objects below its prefix.
    ListWithoutNewest(usize),
    /// A listing that still has what was deleted.
    ListWithDeleted,
    /// The request takes effect once the faults are lifted, and is answered then.
    HeldUntilLifted,
    /// No effect, and 200 with a page of others, as a proxy that wants a password answers every request.
    PageOfOthers,
}

/// A scripted fault.
#[derive(Debug, Clone)]
pub struct Fault {
    pub operation: S3Operation,
    /// Meets requests whose path (for lists: query) contains this, percent-encoded as on the wire.
    pub key_contains: String,
    /// The how-manieth matching request it meets, from 1; `None` meets every one.
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

/// The faults of one server and what it was asked so far.
#[derive(Debug, Default)]
pub struct Faults {
    armed: Mutex<Vec<Armed>>,
    requests: Mutex<BTreeMap<S3Operation, u64>>,
}

impl Faults {
    /// Adds a fault; the number returned names it in [`Self::fired`].
    pub fn add(&self, fault: Fault) -> usize {
        let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        armed.push(Armed { fault, matched: 0, fired: 0, lifted: false });
        armed.len() - 1
    }

    /// How often that fault took effect. A test that scripts one asserts that it did.
    pub fn fired(&self, number: usize) -> u64 {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner).get(number).map_or(0, |armed| armed.fired)
    }

    /// From now on no fault added so far takes effect; what they did stays counted.
    pub fn lift(&self) {
        let mut armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        armed.iter_mut().for_each(|armed| armed.lifted = true);
    }

    /// Whether requests are held: some fault does that, and was not lifted.
    pub(super) fn hold(&self) -> bool {
        let armed = self.armed.lock().unwrap_or_else(PoisonError::into_inner);
        armed.iter().any(|armed| armed.fault.effect == FaultEffect::HeldUntilLifted && !armed.lifted)
    }

    /// Requests of that kind so far, failed ones included.
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
