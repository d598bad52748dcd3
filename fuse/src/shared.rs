//! State that all threads that answer requests share, and answers that several kinds of requests have in common.
//!
//! Owns: giving back a file that the kernel never learned of. Does not own: which request gets which answer (`adapter`,
//! `cold`).

use crate::attr;
use crate::awake::Awake;
use crate::control_dir::ControlDir;
use crate::convert::{answer_empty, is_resent, request_id};
use crate::counters::{Opcode, RequestCounters};
use crate::errno::errno;
use crate::handle::DataPath;
use crate::host::Host;
use crate::listing::Listings;
use crate::notify::Invalidator;
use crate::promptly;
use fuser::{Generation, ReplyAttr, ReplyCreate, ReplyEmpty, ReplyEntry, ReplyOpen, Request};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tidemark_namespace::{Answer, Attr, DirEntry, FsError, Namespace, NodeId, OpenFile, RequestId};

/// State shared by the session threads and the restore threads.
pub(crate) struct Shared {
    pub(crate) namespace: Arc<Namespace>,
    pub(crate) host: Arc<dyn Host>,
    pub(crate) control: ControlDir,
    pub(crate) counters: RequestCounters,
    pub(crate) awake: Arc<Awake>,
    pub(crate) data: OnceLock<DataPath>,
    pub(crate) block_size: u32,
    pub(crate) listings: Listings,
    /// Set before the first request.
    pub(crate) invalidator: OnceLock<Invalidator>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("data", &self.data).finish_non_exhaustive()
    }
}

impl Shared {
    /// Counts a request that a thread of the session received.
    pub(crate) fn count(&self, opcode: Opcode) {
        // In FALLBACK requests carry bytes, and copying those is work like any other.
        if matches!(self.data.get(), Some(DataPath::Passthrough(_))) {
            promptly::answering();
        }
        self.namespace.asked();
        self.awake.request();
        self.counters.count(opcode);
    }

    /// Returns how long the kernel may keep a name: not at all where other nodes may change it.
    pub(crate) fn ttl(&self, found: &Attr) -> Duration {
        if self.host.cluster().is_some() { Duration::ZERO } else { attr::ttl(found) }
    }

    pub(crate) fn data(&self) -> &DataPath {
        self.data.get().expect("set when INIT was answered, and no request comes before that")
    }

    /// Returns the first result of a request that is sent again, or `None` if the request was not carried out.
    pub(crate) fn answered(&self, request: &Request) -> Option<Answer> {
        if is_resent(request) { self.namespace.session().answered(request_id(request)) } else { None }
    }

    /// Answers an OPEN with a file of the namespace, or gives the file back when it cannot be.
    pub(crate) fn answer_open(&self, request: RequestId, file: &OpenFile, reply: ReplyOpen) {
        if let Err((reply, errno)) = self.data().opened(file, reply) {
            self.give_back(file);
            reply.error(errno);
        }
        self.namespace.session().delivered(request);
    }

    /// Makes a call that needs room. If a worker has to wait for files that were just removed, returns
    /// [`FsError::NoSpace`] without calling.
    pub(crate) fn unless_departing<R>(
        &self,
        call: impl FnOnce() -> Result<R, FsError>,
    ) -> Result<R, FsError> {
        if self.namespace.room().awaits_departures() { Err(FsError::NoSpace) } else { call() }
    }

    /// Returns the next entries of the listing that a directory's handle reads; none at its end.
    pub(crate) fn list(&self, node: NodeId, fh: u64, cookie: u64) -> Result<Vec<DirEntry>, FsError> {
        let end = self.listings.end(fh, cookie == 0, || self.namespace.names().listing_end(node))?;
        self.namespace.names().readdir_to(node, cookie, end)
    }

    /// Makes the kernel forget the names of a node that are about to lead to another, before the kernel is sent back to
    /// them.
    pub(crate) fn forget_names(&self, node: NodeId) {
        let names = self.namespace.nodes().names_of(node);
        if let (Some(invalidator), false) = (self.invalidator.get(), names.is_empty()) {
            invalidator.forget_names(node, names);
        }
    }

    pub(crate) fn refuse_open(&self, request: RequestId, error: FsError, reply: ReplyOpen) {
        reply.error(errno(error));
        self.namespace.session().delivered(request);
    }

    /// Answers an OPEN that was carried out before.
    pub(crate) fn answer_open_again(&self, request: RequestId, answer: Answer, reply: ReplyOpen) {
        let file = match answer {
            Answer::Opened(fh) => self.namespace.handles().handle(fh).ok_or(FsError::BadHandle),
            Answer::Superseded => Err(FsError::Stale),
            Answer::Done | Answer::Entered(_) | Answer::Created(..) => Err(FsError::Io),
        };
        match file {
            Ok(file) => self.answer_open(request, &file, reply),
            Err(error) => self.refuse_open(request, error, reply),
        }
    }

    /// Answers a CREATE that was carried out before: it made the file, or opened one that was there.
    pub(crate) fn answer_create_again(&self, request: RequestId, answer: Answer, reply: ReplyCreate) {
        let opened = |fh| self.namespace.handles().handle(fh).ok_or(FsError::BadHandle);
        let entered = |file: OpenFile| Ok((self.namespace.session().enter(file.node)?, file));
        let made = match answer {
            Answer::Opened(fh) | Answer::Created(_, fh) => opened(fh).and_then(entered),
            Answer::Superseded => Err(FsError::Stale),
            Answer::Done | Answer::Entered(_) => Err(FsError::Io),
        };
        self.answer_create(request, made, reply);
    }

    /// Answers a request that made an entry before.
    pub(crate) fn answer_entry_again(&self, request: RequestId, answer: Answer, reply: ReplyEntry) {
        let made = match answer {
            Answer::Entered(node) => self.namespace.session().enter(node),
            Answer::Created(node, fh) => {
                // A file made by MKNOD is closed before the answer; that may have been left undone.
                if self.namespace.handles().handle(fh).is_some()
                    && let Err(error) = self.namespace.handles().close(fh)
                {
                    tracing::warn!(fh, %error, "a file that was made without being opened could not be closed");
                }
                self.namespace.session().enter(node)
            }
            Answer::Done | Answer::Opened(_) | Answer::Superseded => Err(FsError::Io),
        };
        self.answer_entry(request, made, reply);
    }

    /// Answers a CREATE with the file that the namespace made, or takes the file back when the answer fails.
    pub(crate) fn answer_create(
        &self,
        request: RequestId,
        made: Result<(Attr, OpenFile), FsError>,
        reply: ReplyCreate,
    ) {
        match made {
            Ok((made, file)) => {
                let entered = attr::entry(&made, self.block_size);
                let ttl = self.ttl(&made);
                if let Err((reply, errno)) = self.data().created(&file, &entered, ttl, reply) {
                    self.namespace.forget(made.node, 1);
                    self.give_back(&file);
                    reply.error(errno);
                }
            }
            Err(error) => reply.error(errno(error)),
        }
        self.namespace.session().delivered(request);
    }

    /// Gives back a file that the kernel never learned of.
    pub(crate) fn give_back(&self, file: &OpenFile) {
        if let Err(error) = self.namespace.handles().take_back(file.fh) {
            tracing::warn!(fh = file.fh, %error, "an open file could not be given back");
        }
    }

    pub(crate) fn answer_entry(&self, request: RequestId, result: Result<Attr, FsError>, reply: ReplyEntry) {
        match result {
            Ok(found) => {
                reply.entry(&self.ttl(&found), &attr::entry(&found, self.block_size), Generation(0));
            }
            Err(error) => reply.error(errno(error)),
        }
        self.namespace.session().delivered(request);
    }

    /// Answers a request whose result is success or an error only.
    pub(crate) fn answer_done(&self, request: RequestId, result: Result<(), FsError>, reply: ReplyEmpty) {
        answer_empty(result, reply);
        self.namespace.session().delivered(request);
    }

    pub(crate) fn answer_attr(&self, result: Result<Attr, FsError>, reply: ReplyAttr) {
        match result {
            Ok(found) => reply.attr(&self.ttl(&found), &attr::stat(&found, self.block_size)),
            Err(error) => reply.error(errno(error)),
        }
    }
}
