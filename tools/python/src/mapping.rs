//! Storing bytes into a mapping of the file, past the processor's cache.
//!
//! Owns: the mapping, the stores, and the handler that keeps a file which another program truncates meanwhile from ending this one.
//! Does not own: which files are mapped, what happens when bytes are lost.
//!
//! Stores past the cache do not read a line before they overwrite it, which write(2) does: they take half of its time. A mapping
//! can fail in one way that write(2) cannot: touching what another program has cut off is SIGBUS. Ranks that all save to one name do
//! that to each other. So pages are asked for before each block, and a handler puts private memory in the place of pages that go in
//! between; the caller is told, and writes everything once more with write(2).

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::copy::File;

/// Saves of one process at a time that are mapped; further ones use write(2).
const MAPPINGS: usize = 16;
const PAGE_BYTES: usize = 4096;

/// A range of addresses in which the handler may act.
struct Slot {
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

static SLOTS: [Slot; MAPPINGS] =
    [const { Slot { start: AtomicUsize::new(0), end: AtomicUsize::new(0), lost: AtomicBool::new(false) } };
        MAPPINGS];
/// Whether each slot is taken.
static TAKEN: Mutex<[bool; MAPPINGS]> = Mutex::new([false; MAPPINGS]);
/// The address of the handler that was there before ours, and whether it takes three arguments.
static BEFORE: AtomicUsize = AtomicUsize::new(libc::SIG_DFL);
static BEFORE_FLAGS: AtomicUsize = AtomicUsize::new(0);

/// A range of a file, shared and writable, in this process.
#[derive(Debug)]
pub(crate) struct Mapping {
    slot: usize,
    address: usize,
    len: usize,
    /// Where in the file it begins.
    offset: u64,
}

impl Mapping {
    /// Maps `len` bytes from `offset` on, which the file has.
    pub(crate) fn new(file: File, offset: u64, len: usize) -> io::Result<Self> {
        let before = usize::try_from(offset % PAGE_BYTES as u64).map_err(io::Error::other)?;
        let (offset, len) = (offset - before as u64, len + before);
        let slot = take()?;
        let at = libc::off_t::try_from(offset).map_err(io::Error::other)?;
        let (protection, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.fd().as_raw_fd());
        // SAFETY: the kernel chooses the place; nothing of ours is there.
        let address = unsafe { libc::mmap(ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, at) };
        if address == libc::MAP_FAILED {
            give_back(slot);
            return Err(io::Error::last_os_error());
        }
        let mapping = Self { slot, address: address.expose_provenance(), len, offset };
        SLOTS[slot].lost.store(false, Ordering::SeqCst);
        SLOTS[slot].start.store(mapping.address, Ordering::SeqCst);
        SLOTS[slot].end.store(mapping.address + len, Ordering::SeqCst);
        Ok(mapping)
    }

    /// Whether bytes that were stored are not in the file.
    pub(crate) fn lost(&self) -> bool {
        SLOTS[self.slot].lost.load(Ordering::SeqCst)
    }

    /// Makes the pages of a range of the file present, or says why they cannot be had.
    pub(crate) fn populate(&self, offset: u64, len: usize) -> io::Result<()> {
        let at = self.place(offset, len)?;
        let first = at - at % PAGE_BYTES;
        // SAFETY: the range is in the mapping, as `place` has checked.
        let done = unsafe {
            libc::madvise(
                ptr::with_exposed_provenance_mut(first),
                at + len - first,
                libc::MADV_POPULATE_WRITE,
            )
        };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Stores bytes at `offset` of the file.
    pub(crate) fn store(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let at = self.place(offset, bytes.len())?;
        // SAFETY: the range is in the mapping, which nothing in this process refers to as memory of its own.
        unsafe { stream(bytes, ptr::with_exposed_provenance_mut(at)) };
        Ok(())
    }

    fn place(&self, offset: u64, len: usize) -> io::Result<usize> {
        let from = offset.checked_sub(self.offset).and_then(|from| usize::try_from(from).ok());
        match from.filter(|from| from.checked_add(len).is_some_and(|end| end <= self.len)) {
            Some(from) => Ok(self.address + from),
            None => Err(io::Error::other(format!("{len} bytes at {offset} are not in the mapping"))),
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        SLOTS[self.slot].start.store(0, Ordering::SeqCst);
        SLOTS[self.slot].end.store(0, Ordering::SeqCst);
        // SAFETY: what was mapped; no reference into it is left.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.address), self.len) };
        give_back(self.slot);
    }
}

/// Copies bytes to memory without bringing that into the cache.
///
/// # Safety
/// `into` must be writable for as many bytes, and no reference to them may exist.
#[cfg(target_arch = "x86_64")]
unsafe fn stream(bytes: &[u8], into: *mut u8) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const LINE: usize = 64;
    let head = into.align_offset(LINE).min(bytes.len());
    let (first, others) = bytes.split_at(head);
    let (lines, rest) = others.split_at(others.len() - others.len() % LINE);
    // SAFETY: the first bytes, up to a line's beginning.
    unsafe { ptr::copy_nonoverlapping(first.as_ptr(), into, first.len()) };
    for (part, at) in lines.chunks_exact(16).zip((head..).step_by(16)) {
        // SAFETY: 16 bytes; no alignment is needed.
        let value = unsafe { _mm_loadu_si128(part.as_ptr().cast::<__m128i>()) };
        let place = into.wrapping_add(at).cast::<__m128i>();
        // SAFETY: within what the caller vouches for, at a multiple of 16.
        unsafe { _mm_stream_si128(place, value) };
    }
    // SAFETY: what is left behind the last whole line.
    unsafe { ptr::copy_nonoverlapping(rest.as_ptr(), into.wrapping_add(head + lines.len()), rest.len()) };
    // Other threads and the kernel see the stores after this.
    // SAFETY: every processor of this kind has it.
    unsafe { _mm_sfence() };
}

/// Copies bytes to memory, on processors for which there is no other way here.
///
/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn stream(bytes: &[u8], into: *mut u8) {
    // SAFETY: what the caller vouches for.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), into, bytes.len()) };
}

/// Takes a slot, and has the handler in place.
fn take() -> io::Result<usize> {
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    install()?;
    let free = taken.iter().position(|taken| !taken);
    let slot = free.ok_or_else(|| io::Error::other(format!("{MAPPINGS} files are mapped")))?;
    taken[slot] = true;
    Ok(slot)
}

fn give_back(slot: usize) {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)[slot] = false;
}

/// Puts our handler in front of the one that is there, unless it is in front. Called with `TAKEN` held.
fn install() -> io::Result<()> {
    let ours = handle as *const () as usize;
    // SAFETY: a structure of numbers, for which zero is a value.
    let mut found: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks only.
    if unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut found) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if found.sa_sigaction == ours {
        return Ok(());
    }
    BEFORE.store(found.sa_sigaction, Ordering::SeqCst);
    BEFORE_FLAGS.store(usize::try_from(found.sa_flags).unwrap_or(0), Ordering::SeqCst);
    found.sa_sigaction = ours;
    // On the alternative stack where a thread has one; not blocked within itself, so that a fault in the other handler ends the process.
    found.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
    // SAFETY: the handler calls only what may be called in one.
    if unsafe { libc::sigaction(libc::SIGBUS, &raw const found, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Puts private pages in the place of pages of a slot that the file does not have any more; leaves anything else to the handler
/// that was there before.
extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes it.
    let Some(info_of) = (unsafe { info.as_ref() }) else { return };
    // SAFETY: a fault has an address; that of a signal that was sent is some other number, which is no harm.
    let address = unsafe { info_of.si_addr() } as usize;
    let is_fault = info_of.si_code > 0;
    let is_in = |slot: &&Slot| {
        (slot.start.load(Ordering::SeqCst)..slot.end.load(Ordering::SeqCst)).contains(&address)
    };
    if let Some(slot) = SLOTS.iter().find(is_in).filter(|_| is_fault) {
        slot.lost.store(true, Ordering::SeqCst);
        let page = address - address % PAGE_BYTES;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED);
        // SAFETY: replaces a page of our own mapping, into which only bytes are stored that will be written once more.
        let put = unsafe {
            libc::mmap(ptr::with_exposed_provenance_mut(page), PAGE_BYTES, protection, flags, -1, 0)
        };
        if put != libc::MAP_FAILED {
            return;
        }
    }
    let before = BEFORE.load(Ordering::SeqCst);
    if !is_fault || before == libc::SIG_DFL || before == libc::SIG_IGN {
        // The handler before may have been the one that sent it, to have the process ended.
        // SAFETY: allowed in a handler.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        if !is_fault {
            // SAFETY: likewise. A fault repeats by itself when this returns.
            unsafe { libc::raise(signal) };
        }
    } else if BEFORE_FLAGS.load(Ordering::SeqCst) & libc::SA_SIGINFO as usize != 0 {
        // SAFETY: what sigaction(2) said is there, with these arguments.
        let before: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(before) };
        before(signal, info, context);
    } else {
        // SAFETY: likewise.
        let before: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(before) };
        before(signal);
    }
}
