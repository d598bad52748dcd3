//! System calls that the standard library hides: the answer of close(2), and a shared mapping.
//!
//! Owns: the unsafe code of the trainer.

use std::fs::File;
use std::io;
use std::os::fd::IntoRawFd;

use memmap2::{MmapMut, MmapOptions};

/// Calls close(2) and returns its error, which dropping a file would hide.
pub(crate) fn close(file: File) -> io::Result<()> {
    let descriptor = file.into_raw_fd();
    // SAFETY: the descriptor was the file's own, and no other owner has it.
    match unsafe { libc::close(descriptor) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Maps the whole file, shared.
pub(crate) fn map(file: &File) -> io::Result<MmapMut> {
    // SAFETY: only this trainer writes or shortens the file while it is mapped.
    unsafe { MmapOptions::new().map_mut(file) }
}
