//! Answers to requests for a listing.
//!
//! Owns: the two entries that every listing begins with, and filling an answer. Does not own: where a listing ends (`listing`), the
//! control files (`control_dir`).

use crate::attr;
use crate::control_dir::ControlDir;
use crate::shared::Shared;
use fuser::{FileAttr, FileHandle, FileType, Generation, INodeNo, ReplyDirectory, ReplyDirectoryPlus};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;
use tidemark_namespace::FsError;

/// Cookies of the two entries that every listing begins with; the namespace's cookies begin after them.
const COOKIE_SELF: u64 = 1;
const COOKIE_PARENT: u64 = 2;

/// Fills an answer with the names after `cookie`, as far as it has room.
///
/// # Errors
/// The node is not a directory, or gone.
pub(crate) fn fill(
    shared: &Shared,
    node: INodeNo,
    fh: FileHandle,
    cookie: u64,
    reply: &mut ReplyDirectory,
) -> Result<(), FsError> {
    for (own, name) in [(COOKIE_SELF, "."), (COOKIE_PARENT, "..")] {
        if cookie < own && reply.add(node, own, FileType::Directory, name) {
            return Ok(());
        }
    }
    if ControlDir::owns(node.0) {
        shared.control.fill(&shared.namespace, (COOKIE_PARENT, cookie), reply);
        return Ok(());
    }
    for entry in shared.list(node.0, fh.0, cookie)? {
        let kind = attr::file_type(entry.kind);
        if reply.add(INodeNo(entry.ino), entry.cookie, kind, OsStr::from_bytes(&entry.name)) {
            break;
        }
    }
    Ok(())
}

/// Fills an answer with names and attributes: each entry is a look-up of its own.
///
/// # Errors
/// As [`fill`].
pub(crate) fn fill_plus(
    shared: &Shared,
    node: INodeNo,
    fh: FileHandle,
    cookie: u64,
    reply: &mut ReplyDirectoryPlus,
) -> Result<(), FsError> {
    let mut add = |cookie, name: &OsStr, ttl: Duration, found: &FileAttr| {
        reply.add(found.ino, cookie, name, &ttl, found, Generation(0))
    };
    if ControlDir::owns(node.0) {
        let directory = shared.control.directory();
        for (own, name) in [(COOKIE_SELF, "."), (COOKIE_PARENT, "..")] {
            if cookie < own && add(own, OsStr::new(name), Duration::ZERO, &directory) {
                return Ok(());
            }
        }
        shared.control.fill_plus(&shared.namespace, (COOKIE_PARENT, cookie), shared.block_size, reply);
        return Ok(());
    }
    let own = shared.namespace.getattr(node.0)?;
    let entries = shared.list(node.0, fh.0, cookie)?;
    // The kernel takes no reference from the entries for itself and its parent (fs/fuse/readdir.c).
    let own = attr::entry(&own, shared.block_size);
    for (position, name) in [(COOKIE_SELF, "."), (COOKIE_PARENT, "..")] {
        if cookie < position && add(position, OsStr::new(name), Duration::ZERO, &own) {
            return Ok(());
        }
    }
    for entry in entries {
        // Each entry is a look-up that the kernel will forget; a file that was removed meanwhile is left out.
        let Ok(found) = shared.namespace.lookup(node.0, &entry.name) else { continue };
        let sent = attr::entry(&found, shared.block_size);
        if add(entry.cookie, OsStr::from_bytes(&entry.name), shared.ttl(&found), &sent) {
            shared.namespace.forget(found.node, 1);
            break;
        }
    }
    Ok(())
}
