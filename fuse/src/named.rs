//! Requests that find, make, move or remove names, once other nodes have granted leave.
//!
//! Owns: each request's work once it has leave. Does not own: getting leave (`gate`), the namespace's part.

use crate::adapter::FILE_MODE_BITS;
use crate::cold::{Job, Workers};
use crate::gate;
use crate::shared::Shared;
use fuser::{ReplyEmpty, ReplyEntry};
use tidemark_engine::cluster::Wanted;
use tidemark_engine::step_point::{StepPoint, reach};
use tidemark_namespace::{Caller, Looked, NodeId, RENAME_EXCHANGE, Special};

/// A directory and a name in it.
pub(crate) type Place = (NodeId, Vec<u8>);

/// Kind of removal: unlink or rmdir.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Remove {
    Name,
    Directory,
}

fn change((parent, name): &Place, sure: bool) -> Wanted {
    Wanted::Change { parent: *parent, name: name.clone(), sure }
}

/// Finds a name. If the names of a file are about to go to a new node, a worker completes that first.
pub(crate) fn lookup(
    shared: &Shared,
    workers: &Workers,
    caller: Caller,
    (parent, name): (NodeId, &[u8]),
    reply: ReplyEntry,
) {
    let (later, owned) = (workers.clone(), name.to_vec());
    gate::pass(
        shared,
        workers,
        || Wanted::Look { parent, name: name.to_vec() },
        move |shared, leave| match leave
            .and_then(|_leave| shared.namespace.lookup_by(caller.pid, parent, &owned))
        {
            Ok(Looked::Found(found)) => shared.answer_entry(0, Ok(found), reply),
            Ok(Looked::Begun) => later.submit(Job::LookupAnew { caller, place: (parent, owned), reply }),
            Err(error) => shared.answer_entry(0, Err(error), reply),
        },
    );
}

/// Makes a directory, which this node then has to itself.
pub(crate) fn mkdir(
    shared: &Shared,
    workers: &Workers,
    caller: Caller,
    place: Place,
    mode: u32,
    reply: ReplyEntry,
) {
    let wanted = change(&place, false);
    gate::pass(
        shared,
        workers,
        || wanted,
        move |shared, leave| {
            let entered = leave.and_then(|leave| {
                let entered = shared.namespace.names().mkdir(&caller, place.0, &place.1, mode)?;
                leave.made(entered.node);
                Ok(entered)
            });
            shared.answer_entry(caller.request, entered, reply);
        },
    );
}

/// Makes a pipe, a socket or a device; or an empty file, which is not opened and stays.
pub(crate) fn mknod(
    shared: &Shared,
    workers: &Workers,
    caller: Caller,
    place: Place,
    mode: u32,
    special: Option<Special>,
    reply: ReplyEntry,
) {
    let wanted = change(&place, true);
    gate::pass(
        shared,
        workers,
        || wanted,
        move |shared, leave| {
            let entered = leave.and_then(|_leave| {
                if let Some(special) = special {
                    return shared.namespace.names().make_special(
                        &caller,
                        place.0,
                        &place.1,
                        mode & 0o7777,
                        special,
                    );
                }
                shared.namespace.make_file(&caller, place.0, &place.1, mode & FILE_MODE_BITS)
            });
            shared.answer_entry(caller.request, entered, reply);
        },
    );
}

/// Removes a name.
pub(crate) fn remove(
    shared: &Shared,
    workers: &Workers,
    caller: Caller,
    place: Place,
    how: Remove,
    reply: ReplyEmpty,
) {
    let wanted = match how {
        Remove::Name => change(&place, true),
        Remove::Directory => Wanted::RemoveDirectory { parent: place.0, name: place.1.clone() },
    };
    gate::pass(
        shared,
        workers,
        || wanted,
        move |shared, leave| {
            let done = leave.and_then(|leave| {
                match how {
                    Remove::Name => shared.namespace.names().unlink(&caller, place.0, &place.1)?,
                    Remove::Directory => shared.namespace.names().rmdir(&caller, place.0, &place.1)?,
                }
                leave.ordered()?;
                Ok(())
            });
            shared.answer_done(caller.request, done, reply);
        },
    );
}

/// Makes a symlink.
pub(crate) fn symlink(
    shared: &Shared,
    workers: &Workers,
    caller: Caller,
    place: Place,
    target: Vec<u8>,
    reply: ReplyEntry,
) {
    let wanted = change(&place, true);
    gate::pass(
        shared,
        workers,
        || wanted,
        move |shared, leave| {
            let entered = leave
                .and_then(|_leave| shared.namespace.names().symlink(&caller, place.0, &place.1, &target));
            shared.answer_entry(caller.request, entered, reply);
        },
    );
}

/// Gives a file another name beside those it has.
pub(crate) fn link(
    shared: &Shared,
    workers: &Workers,
    caller: Caller,
    node: NodeId,
    place: Place,
    reply: ReplyEntry,
) {
    let wanted = Wanted::Link { node, to: place.clone() };
    gate::pass(
        shared,
        workers,
        || wanted,
        move |shared, leave| {
            let entered = leave.and_then(|leave| {
                let entered = shared.namespace.names().link(&caller, node, place.0, &place.1)?;
                leave.ordered()?;
                Ok(entered)
            });
            shared.answer_entry(caller.request, entered, reply);
        },
    );
}

/// Moves a name.
pub(crate) fn rename(
    shared: &Shared,
    workers: &Workers,
    caller: Caller,
    (from, to): (Place, Place),
    flags: u32,
    reply: ReplyEmpty,
) {
    let wanted = Wanted::Rename { from: from.clone(), to: to.clone() };
    gate::pass(
        shared,
        workers,
        || wanted,
        move |shared, leave| {
            let done = leave.and_then(|leave| {
                shared.namespace.names().rename(&caller, (from.0, &from.1), (to.0, &to.1), flags)?;
                leave.moved((from.0, &from.1), (to.0, &to.1), flags == RENAME_EXCHANGE);
                leave.ordered()?;
                Ok(())
            });
            reach(StepPoint::RenameBeforeAnswer);
            shared.answer_done(caller.request, done, reply);
        },
    );
}
