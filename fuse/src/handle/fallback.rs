//! The data path without passthrough: reads and writes come to the daemon and go to the backing file.
//!
//! Owns: open files of FALLBACK. Does not own: their backing files, the decision to be in FALLBACK (`probe`).
//!
//! Costs: a write is copied twice, from the program into the daemon's buffer (by the kernel, in the daemon's read of `/dev/fuse`) and from
//! there into the backing file; and the program sleeps meanwhile. A write is acknowledged only when it is in the backing file: this process
//! may die at any moment, the backing file does not. A read is copied once: the kernel copies from the daemon's mapping of the backing file
//! straight into the program's buffer.

use super::pages::{PageDropper, Written};
use crate::errno::io_errno;
use fuser::{Errno, FopenFlags, Notifier, ReplyData, ReplyWrite};
use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use tidemark_namespace::{LARGEST_FILE_BYTES, NodeId, OpenFile};
use tidemark_tier1::{Backing, Mapping};

/// Size of the smallest read that is mapped. Smaller reads are copied through a buffer: faulting a mapping in costs more than the second
/// copy.
const MAP_MIN_BYTES: u64 = 64 * 1024;

/// The open files of one mount.
#[derive(Debug)]
pub(crate) struct Fallback {
    /// Whether the kernel can map files opened with FOPEN_DIRECT_IO shared.
    direct_mmap: bool,
    /// Keeps cached readers from seeing old bytes. If the kernel cannot map such files, set when the mount begins to serve.
    pages: OnceLock<PageDropper>,
    files: RwLock<HashMap<u64, Arc<Served>>>,
    nodes: Mutex<HashMap<NodeId, Node>>,
}

#[derive(Debug)]
struct Node {
    io: Arc<NodeIo>,
    opens: u64,
}

/// State that all open files of one node share.
#[derive(Debug, Default)]
struct NodeIo {
    /// Number of open files whose reads go through the page cache.
    cached_opens: AtomicU64,
    mapping: Mutex<Option<Arc<Mapping>>>,
}

/// An open file.
#[derive(Debug)]
struct Served {
    backing: Arc<Backing>,
    node: NodeId,
    cached: bool,
    io: Arc<NodeIo>,
}

impl Fallback {
    pub(crate) fn new(direct_mmap: bool) -> Self {
        Self { direct_mmap, pages: OnceLock::new(), files: RwLock::default(), nodes: Mutex::default() }
    }

    /// Prepares for serving.
    pub(crate) fn begin(&self, notifier: Notifier) -> io::Result<()> {
        if !self.direct_mmap {
            let set = self.pages.set(PageDropper::start(notifier)?);
            assert!(set.is_ok(), "a mount begins once");
        }
        Ok(())
    }

    /// Registers an open file, and returns the flags to open it with.
    ///
    /// Direct I/O spares the page cache's copy and sends requests as large as the kernel allows. Where the kernel
    /// cannot map such files shared, read-only opens go through the page cache instead.
    pub(crate) fn opened(&self, file: &OpenFile) -> FopenFlags {
        let mut nodes = self.nodes();
        let node = nodes.entry(file.node).or_insert_with(|| Node { io: Arc::default(), opens: 0 });
        node.opens += 1;
        let cached = !file.writable && !self.direct_mmap;
        let io = Arc::clone(&node.io);
        // Before the kernel learns of the open, and so before it has a page of the file.
        io.cached_opens.fetch_add(u64::from(cached), Ordering::SeqCst);
        let served = Served { backing: Arc::clone(&file.backing), node: file.node, cached, io };
        drop(nodes);
        let replaced =
            self.files.write().unwrap_or_else(PoisonError::into_inner).insert(file.fh, Arc::new(served));
        if let Some(replaced) = replaced {
            // Recovered from the previous daemon, and now answered once more.
            self.let_go(&replaced);
        }
        if cached { FopenFlags::empty() } else { FopenFlags::FOPEN_DIRECT_IO }
    }

    /// Notes that a file is closed for good.
    pub(crate) fn released(&self, fh: u64) {
        let served = self.files.write().unwrap_or_else(PoisonError::into_inner).remove(&fh);
        if let Some(served) = served {
            self.let_go(&served);
        }
    }

    fn let_go(&self, served: &Served) {
        served.io.cached_opens.fetch_sub(u64::from(served.cached), Ordering::SeqCst);
        let mut nodes = self.nodes();
        let node = nodes.get_mut(&served.node).expect("a node with an open file is listed");
        node.opens -= 1;
        if node.opens == 0 {
            nodes.remove(&served.node);
        }
    }

    pub(crate) fn write(&self, fh: u64, offset: u64, data: &[u8], reply: ReplyWrite) {
        let Some(served) = self.served(fh) else { return reply.error(Errno::EBADF) };
        let written = u32::try_from(data.len()).expect("a request is far below 4 GiB");
        if offset.saturating_add(u64::from(written)) > LARGEST_FILE_BYTES {
            return reply.error(Errno::EFBIG);
        }
        // Pages that a reader has cached are old as soon as the bytes are written, and must be dropped before the program continues.
        let pages = self.pages.get().filter(|_| served.io.cached_opens.load(Ordering::SeqCst) > 0);
        match (write_all(&served.backing, data, offset), pages) {
            (Ok(()), None) => reply.written(written),
            (Ok(()), Some(pages)) => {
                pages.drop_and_acknowledge(Written { node: served.node, offset, bytes: written, reply });
            }
            (Err(error), _) => reply.error(io_errno(error)),
        }
    }

    pub(crate) fn read(&self, fh: u64, offset: u64, size: u32, reply: ReplyData) {
        let Some(served) = self.served(fh) else { return reply.error(Errno::EBADF) };
        match served.answer_read(offset, u64::from(size)) {
            Ok(Answer::Mapped(mapping, start, end)) => reply.data(&mapping[start..end]),
            Ok(Answer::Copied(bytes)) => reply.data(&bytes),
            Err(error) => reply.error(io_errno(error)),
        }
    }

    fn served(&self, fh: u64) -> Option<Arc<Served>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner).get(&fh).cloned()
    }

    fn nodes(&self) -> MutexGuard<'_, HashMap<NodeId, Node>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

enum Answer {
    Mapped(Arc<Mapping>, usize, usize),
    Copied(Vec<u8>),
}

impl Served {
    fn answer_read(&self, offset: u64, size: u64) -> io::Result<Answer> {
        let stat = self.backing.stat()?;
        let present = stat.size_bytes;
        let end = offset.saturating_add(size).min(present);
        let wanted = end.saturating_sub(offset);
        // In a mapping a hole would have to be filled first; a copy reads it as zeros.
        let sparse = stat.blocks_512 * 512 < present;
        // A file that was truncated since its size was read cannot be mapped that far: the rest of it is copied.
        if wanted >= MAP_MIN_BYTES
            && !sparse
            && let Some(mapping) = self.mapping(end)?
        {
            // The daemon's code never touches the mapped bytes: the kernel copies them, and if the file is truncated meanwhile, that copy
            // fails with EIO instead of raising SIGBUS here.
            let (start, end) = (to_usize(offset)?, to_usize(end)?);
            return Ok(Answer::Mapped(mapping, start, end));
        }
        let mut bytes = vec![0; to_usize(wanted)?];
        let mut filled = 0;
        while filled < bytes.len() {
            match self.backing.read_at(&mut bytes[filled..], offset + filled as u64)? {
                0 => break,
                n => filled += n,
            }
        }
        bytes.truncate(filled);
        Ok(Answer::Copied(bytes))
    }

    /// Returns a mapping that reaches to `end`, or `None` if the file no longer does.
    fn mapping(&self, end: u64) -> io::Result<Option<Arc<Mapping>>> {
        let mut held = self.io.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mapping) = held.as_ref().filter(|mapping| mapping.len() as u64 >= end) {
            return Ok(Some(Arc::clone(mapping)));
        }
        let mapping = Arc::new(self.backing.map()?);
        if (mapping.len() as u64) < end {
            return Ok(None);
        }
        *held = Some(Arc::clone(&mapping));
        Ok(Some(mapping))
    }
}

fn write_all(backing: &Backing, data: &[u8], offset: u64) -> io::Result<()> {
    let mut written = 0;
    while written < data.len() {
        match backing.write_at(&data[written..], offset + written as u64)? {
            0 => return Err(io::Error::from_raw_os_error(libc::EIO)),
            n => written += n,
        }
    }
    Ok(())
}

fn to_usize(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))
}
