//! Cached pages that a write has made old, on kernels that cannot map files opened with FOPEN_DIRECT_IO shared.
//!
//! Owns: the thread that drops such pages and then acknowledges the write. Does not own: which opens are cached
//! (`fallback`).
//!
//! On such kernels read-only opens go through the page cache so that they can be mapped, and writes go past it: a
//! reader that has the file open would still see its old pages. Dropping a page waits for a pending read of it, which
//! the daemon must answer. So a thread that answers requests must not drop pages: if all waited, none would answer the
//! reads. The write is acknowledged after the pages are gone, not before: a read that starts later must see it.

use fuser::{Errno, INodeNo, Notifier, ReplyWrite};
use std::io;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use tidemark_namespace::NodeId;

/// The most writes that wait. Each is a program in write(2) to a file that another program has open for reading. About
/// 1 MiB of queue.
const QUEUE_MAX: usize = 16_384;

/// Bytes that are in the backing file, and whose writer waits.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) node: NodeId,
    pub(super) offset: u64,
    pub(super) bytes: u32,
    pub(super) reply: ReplyWrite,
}

/// Passes writes to the thread, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct PageDropper {
    queue: SyncSender<Written>,
}

impl PageDropper {
    pub(super) fn start(notifier: Notifier) -> io::Result<Self> {
        let (queue, waiting) = sync_channel(QUEUE_MAX);
        std::thread::Builder::new()
            .name("mount-pages".into())
            .spawn(move || drop_all(&notifier, &waiting))?;
        Ok(Self { queue })
    }

    /// Drops the pages of these bytes, then acknowledges the write.
    pub(super) fn drop_and_acknowledge(&self, written: Written) {
        match self.queue.try_send(written) {
            Ok(()) => {}
            // Waiting here would keep this thread from the reads that the dropping waits for.
            Err(TrySendError::Full(unsent)) => unsent.reply.error(Errno::EAGAIN),
            // The thread ends only with this value, so it panicked, and the panic was logged.
            Err(TrySendError::Disconnected(unsent)) => unsent.reply.error(Errno::EIO),
        }
    }
}

fn drop_all(notifier: &Notifier, waiting: &Receiver<Written>) {
    for Written { node, offset, bytes, reply } in waiting {
        // The kernel refuses nodes that it does not know: then there are no pages either.
        if let Ok(offset) = i64::try_from(offset)
            && let Err(error) = notifier.inval_inode(INodeNo(node), offset, i64::from(bytes))
        {
            tracing::debug!(node, offset, bytes, %error, "the kernel dropped no pages");
        }
        reply.written(bytes);
    }
}
