//! What all threads that answer requests share, and the answers that several kinds of requests have in common.
//!
//! Owns: that a file the kernel never heard of is given back. Does not own: which request gets which answer (`adapter`,
//! `cold`).

use crate::attr;
use crate::control_dir::ControlDir;
use crate::counters::RequestCounters;
use crate::errno::errno;
use crate::handle::DataPath;
use crate::host::Host;
use fuser::{Generation, ReplyAttr, ReplyCreate, ReplyEntry, ReplyOpen};
use std::sync::{Arc, OnceLock};
use tidemark_engine::namespace::{Attr, FsError, Namespace, OpenFile};

/// What the session threads and the restore threads share.
pub(crate) struct Shared {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) host: Arc<dyn Host>,
    pub(crate) control: ControlDir,
    pub(crate) counters: RequestCounters,
    pub(crate) data: OnceLock<DataPath>,
    pub(crate) block_size: u32,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("data", &self.data).finish_non_exhaustive()
    }
}

impl Shared {
    pub(crate) fn data(&self) -> &DataPath {
        self.data.get().expect("set when INIT was answered, and no request comes before that")
    }

    /// Answers an OPEN with a file of the namespace, or gives the file back when it cannot be.
    pub(crate) fn answer_open(&self, file: &OpenFile, reply: ReplyOpen) {
        if let Err((reply, errno)) = self.data().opened(file, reply) {
            self.give_back(file);
            reply.error(errno);
        }
    }

    /// Answers a CREATE with what the namespace made, or takes it back when it cannot be.
    pub(crate) fn answer_create(&self, made: Result<(Attr, OpenFile), FsError>, reply: ReplyCreate) {
        match made {
            Ok((made, file)) => {
                let entered = attr::entry(&made, self.block_size);
                let ttl = attr::ttl(&made);
                if let Err((reply, errno)) = self.data().created(&file, &entered, ttl, reply) {
                    self.namespace.forget(made.node, 1);
                    self.give_back(&file);
                    reply.error(errno);
                }
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    /// Gives a file back that the kernel never heard of.
    pub(crate) fn give_back(&self, file: &OpenFile) {
        if let Err(error) = self.namespace.release(file.fh) {
            tracing::warn!(fh = file.fh, %error, "an open file could not be given back");
        }
    }

    pub(crate) fn answer_entry(&self, result: Result<Attr, FsError>, reply: ReplyEntry) {
        match result {
            Ok(found) => {
                reply.entry(&attr::ttl(&found), &attr::entry(&found, self.block_size), Generation(0));
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    pub(crate) fn answer_attr(&self, result: Result<Attr, FsError>, reply: ReplyAttr) {
        match result {
            Ok(found) => reply.attr(&attr::ttl(&found), &attr::stat(&found, self.block_size)),
            Err(error) => reply.error(errno(error)),
        }
    }
}
