//! System calls that the standard library hides: the answer of close(2), and a shared mapping.
//!
//! Owns: the unsafe code of the trainer.

use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd;

use memmap2::{MmapMut, MmapOptions};

/// close(2), whose error a dropped file keeps to itself.
pub(crate) fn close(file: File) -> io::Result<()> {
    let descriptor = file.into_raw_fd();
    // SAFETY: the descriptor was the file's own, and nobody else has it.
    match unsafe { libc::close(descriptor) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A shared mapping of the whole file.
pub(crate) fn map(file: &File) -> io::Result<MmapMut> {
    // SAFETY: the file is this trainer's own; nobody else writes or shortens it while it is mapped.
    unsafe { MmapOptions::new().map_mut(file) }
}
