//! Requests that set attributes, once other nodes have granted leave.
//!
//! Owns: each request's work once it has leave. Does not own: getting leave (`gate`), cutting a file (`cold`), the namespace's part.

use crate::cold::{Job, Workers};
use crate::gate;
use crate::shared::Shared;
use fuser::{ReplyAttr, ReplyEmpty};
use tidemark_engine::cluster::{Leave, Wanted};
use tidemark_namespace::{Caller, FsError, Namespace, NodeId, SetAttr};

/// Sets attributes. A worker sets a size, as it may have to wait. `writes`: the caller has the file open for writing, so has had leave.
pub(crate) fn setattr(
    shared: &Shared,
    workers: &Workers,
    caller: Caller,
    (node, writes): (NodeId, bool),
    change: SetAttr,
    reply: ReplyAttr,
) {
    if change.size.is_none() {
        return gate::pass(
            shared,
            workers,
            || Wanted::Attributes { node },
            move |shared, leave| {
                let set = leave.and_then(|_leave| shared.namespace.setattr(&caller, node, &change));
                shared.answer_attr(set, reply);
            },
        );
    }
    if writes {
        return workers.submit(Job::Resize { caller, node, change, leave: Leave::default(), reply });
    }
    let later = workers.clone();
    gate::pass(
        shared,
        workers,
        || Wanted::Write { node },
        move |shared, leave| match leave {
            Ok(leave) => later.submit(Job::Resize { caller, node, change, leave, reply }),
            Err(error) => shared.answer_attr(Err(error), reply),
        },
    );
}

/// Sets an extended attribute, or removes one.
pub(crate) fn xattr(
    shared: &Shared,
    workers: &Workers,
    caller: Caller,
    node: NodeId,
    set: impl FnOnce(&Namespace, &Caller) -> Result<(), FsError> + Send + 'static,
    reply: ReplyEmpty,
) {
    gate::pass(
        shared,
        workers,
        || Wanted::Attributes { node },
        move |shared, leave| {
            let done = leave.and_then(|_leave| set(&shared.namespace, &caller));
            shared.answer_done(caller.request, done, reply);
        },
    );
}
