//! Notifies the kernel that something it has cached has changed.
//!
//! Owns: the one thread that sends invalidations, and its queue. Does not own: the decision that something changed (the node loop).
//!
//! The kernel takes the directory's lock to drop an entry, and a request handler may be answering a request under that very lock: an
//! invalidation sent from a handler would never end. So invalidations are only put into a queue, and one thread that holds no lock of the
//! daemon sends them. If the bounded queue is full, the invalidation is dropped and counted, because cached entries and attributes end by
//! their time to live anyway.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::attr::TTL_DEFAULT;
use fuser::{INodeNo, Notifier};

/// The most invalidations that wait. 4096 names of at most 255 bytes are about 1 MiB.
const QUEUE_MAX: usize = 4096;

#[derive(Debug)]
enum Stale {
    Entry {
        parent: u64,
        name: Vec<u8>,
    },
    Node {
        node: u64,
    },
    /// The name is about to lead to another node, and this one to lose its last name.
    Gone {
        parent: u64,
        node: u64,
        name: Vec<u8>,
    },
    /// The node's attributes, without its pages.
    Attributes {
        node: u64,
    },
    /// A marker: everything queued before it was sent.
    Sent(SyncSender<()>),
}

/// Puts invalidations into the queue. Never blocks; any thread may call it.
#[derive(Debug, Clone)]
pub struct Invalidator {
    queue: SyncSender<Stale>,
    dropped: Arc<AtomicU64>,
}

impl Invalidator {
    /// Invalidates a name that leads elsewhere now.
    pub fn entry(&self, parent: u64, name: &[u8]) {
        self.put(Stale::Entry { parent, name: name.to_vec() });
    }

    /// Invalidates a name that is gone, and was the node's last.
    pub fn gone(&self, parent: u64, node: u64, name: &[u8]) {
        self.put(Stale::Gone { parent, node, name: name.to_vec() });
    }

    /// Invalidates the node's attributes (and, in FALLBACK, cached pages).
    pub fn node(&self, node: u64) {
        self.put(Stale::Node { node });
    }

    /// Makes the kernel forget these names of a node before they lead to another, and the node once no process has it open. Blocks until
    /// the kernel has done so, or until their time to live is over: a directory may be locked by a call that waits for the daemon. Not to
    /// be called by a thread that answers requests.
    pub(crate) fn forget_names(&self, node: u64, names: Vec<(u64, Vec<u8>)>) {
        let names = names.into_iter().map(|(parent, name)| Stale::Gone { parent, node, name });
        self.send_and_wait(names.chain([Stale::Attributes { node }]));
    }

    /// Blocks until the kernel has received every invalidation that was queued before, or until the time to live is over: a program that
    /// was notified that a name is gone must not see it. Not to be called by a thread that answers requests.
    pub fn wait(&self) {
        self.send_and_wait(std::iter::empty());
    }

    fn send_and_wait(&self, stale: impl Iterator<Item = Stale>) {
        let (done, sent) = sync_channel(1);
        if stale.chain([Stale::Sent(done)]).all(|stale| self.queue.try_send(stale).is_ok()) {
            // Whether the answer came in time or not, the kernel no longer believes what it had cached.
            let _ = sent.recv_timeout(TTL_DEFAULT);
        } else {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(TTL_DEFAULT);
        }
    }

    /// Returns the number of invalidations that were dropped because the queue was full; they took effect when the time to live ended.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    fn put(&self, stale: Stale) {
        if self.queue.try_send(stale).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Starts the thread, which ends when the last [`Invalidator`] is dropped.
pub(crate) fn start(notifier: Notifier) -> io::Result<Invalidator> {
    let (queue, waiting) = sync_channel(QUEUE_MAX);
    std::thread::Builder::new().name("mount-notify".into()).spawn(move || send_all(&notifier, &waiting))?;
    Ok(Invalidator { queue, dropped: Arc::default() })
}

fn send_all(notifier: &Notifier, waiting: &Receiver<Stale>) {
    for stale in waiting {
        let sent = match &stale {
            Stale::Entry { parent, name } => {
                notifier.inval_entry(INodeNo(*parent), &OsString::from_vec(name.clone()))
            }
            // From offset 0 to the end: attributes and all pages (fs/fuse/inode.c, fuse_reverse_inval_inode).
            Stale::Node { node } => notifier.inval_inode(INodeNo(*node), 0, 0),
            Stale::Attributes { node } => notifier.inval_inode(INodeNo(*node), -1, 0),
            // Drops the entry, and sets the inode's link count to zero: otherwise the kernel would keep an inode without a name, and the
            // daemon its bytes, until the kernel is short of memory itself.
            Stale::Gone { parent, node, name } => {
                notifier.delete(INodeNo(*parent), INodeNo(*node), &OsString::from_vec(name.clone()))
            }
            Stale::Sent(done) => {
                // The waiting caller may have timed out.
                let _ = done.try_send(());
                continue;
            }
        };
        if let Err(error) = sent {
            tracing::debug!(?stale, %error, "the kernel did not take an invalidation");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_forgotten_when_all_that_is_needed_for_it_was_sent() {
        let (queue, waiting) = sync_channel(8);
        let invalidator = Invalidator { queue, dropped: Arc::default() };
        let waits = std::thread::spawn(move || {
            invalidator.forget_names(7, vec![(1, b"a".to_vec()), (3, b"b".to_vec())]);
        });
        assert!(matches!(waiting.recv(), Ok(Stale::Gone { parent: 1, node: 7, .. })));
        assert!(matches!(waiting.recv(), Ok(Stale::Gone { parent: 3, node: 7, .. })));
        assert!(matches!(waiting.recv(), Ok(Stale::Attributes { node: 7 })));
        let Ok(Stale::Sent(done)) = waiting.recv() else { panic!("nobody waits") };
        done.send(()).unwrap();
        waits.join().unwrap();
    }

    #[test]
    fn who_waits_does_so_for_all_that_was_put_before() {
        let (queue, waiting) = sync_channel(8);
        let invalidator = Invalidator { queue, dropped: Arc::default() };
        invalidator.gone(1, 7, b"a");
        let waits = std::thread::spawn(move || invalidator.wait());
        assert!(matches!(waiting.recv(), Ok(Stale::Gone { parent: 1, node: 7, .. })));
        let Ok(Stale::Sent(done)) = waiting.recv() else { panic!("nobody waits") };
        assert!(!waits.is_finished());
        done.send(()).unwrap();
        waits.join().unwrap();
    }

    #[test]
    fn a_full_queue_drops_and_counts_instead_of_blocking() {
        let (queue, waiting) = sync_channel(1);
        let invalidator = Invalidator { queue, dropped: Arc::default() };
        invalidator.node(1);
        invalidator.node(2);
        invalidator.entry(1, b"name");
        assert_eq!(invalidator.dropped(), 2);
        assert!(matches!(waiting.recv(), Ok(Stale::Node { node: 1 })));
    }
}
