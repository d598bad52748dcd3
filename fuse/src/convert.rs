//! Small translations between the kernel's types and Tidemark's.
//!
//! Owns: callers, times, and the answers that many requests share. Does not own: any request (`adapter`).

use crate::attr;
use crate::control_dir::ControlDir;
use crate::errno::errno;
use fuser::{Errno, INodeNo, ReplyEmpty, ReplyXattr, Request, TimeOrNow};
use rustix::time::{ClockId, clock_gettime};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use tidemark_namespace::{Caller, FsError, RequestId, SetTime};

pub(crate) fn caller(request: &Request) -> Caller {
    Caller {
        uid: request.uid(),
        gid: request.gid(),
        pid: request.pid(),
        now_ns: now_ns(),
        request: request_id(request),
    }
}

/// The bit in a request's number that the kernel sets when it sends the request again (FUSE_UNIQUE_RESEND,
/// include/uapi/linux/fuse.h).
const RESENT: u64 = 1 << 63;

/// Returns the kernel's number of a request, which is the same however often it is sent.
pub(crate) fn request_id(request: &Request) -> RequestId {
    request.unique().0 & !RESENT
}

/// Returns whether the request was sent to a daemon before, which may have carried it out.
pub(crate) fn is_resent(request: &Request) -> bool {
    request.unique().0 & RESENT != 0
}

/// Returns CLOCK_REALTIME in nanoseconds since 1970.
pub(crate) fn now_ns() -> i64 {
    let now = clock_gettime(ClockId::Realtime);
    now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
}

pub(crate) fn answer_empty(result: Result<(), FsError>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

/// Refuses a change of a name that is the control directory's, or in it.
pub(crate) fn refuse(parent: INodeNo, name: &OsStr) -> Option<Errno> {
    if ControlDir::owns(parent.0) {
        Some(Errno::EROFS)
    } else {
        ControlDir::is_reserved(parent.0, name.as_bytes()).then_some(Errno::EPERM)
    }
}

pub(crate) fn set_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::SpecificTime(time) => SetTime::At(attr::nanoseconds(time)),
        TimeOrNow::Now => SetTime::Now,
    }
}

pub(crate) fn answer_bytes(bytes: &[u8], size: u32, reply: ReplyXattr) {
    match u32::try_from(bytes.len()) {
        Ok(length) if size == 0 => reply.size(length),
        Ok(length) if length <= size => reply.data(bytes),
        Ok(_) => reply.error(Errno::ERANGE),
        Err(_) => reply.error(Errno::E2BIG),
    }
}
