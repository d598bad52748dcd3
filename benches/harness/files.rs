//! The file operations that are timed, the same for every place.
//!
//! Owns: write, read, map and save of one file. Does not own: which places are compared. Memory maps: unsafe
//! code is allowed here.

use crate::memory::{self, rate};
use anyhow::{Context, ensure};
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

/// One write(2) or read(2): what large writers use.
pub const BLOCK_BYTES: usize = 1 << 20;
/// A mapped file is touched once in each of these.
const PAGE_BYTES: usize = 4096;

/// Creates `path`, writes `size_bytes` in blocks and closes it; bytes per second of all three.
///
/// # Errors
/// Any of the three fails.
pub fn write(path: &Path, size_bytes: u64) -> anyhow::Result<f64> {
    let block = memory::buffer(BLOCK_BYTES);
    let started = Instant::now();
    let mut file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    let mut left = size_bytes;
    while left > 0 {
        let take = usize::try_from(left).unwrap_or(usize::MAX).min(block.len());
        file.write_all(&block[..take]).with_context(|| format!("write {}", path.display()))?;
        left -= take as u64;
    }
    drop(file);
    Ok(size_bytes as f64 / started.elapsed().as_secs_f64())
}

/// The same as [`write`] in a new file: what `path` names is removed first, and warm memory is made ready,
/// both outside the time.
///
/// # Errors
/// As [`write`].
pub fn write_new(path: &Path, size_bytes: u64) -> anyhow::Result<f64> {
    remove(path)?;
    memory::warm(size_bytes);
    write(path, size_bytes)
}

/// Opens `path` and reads it to the end in blocks; bytes per second.
///
/// # Errors
/// Open or read fails, or the file has not `size_bytes`.
pub fn read(path: &Path, size_bytes: u64) -> anyhow::Result<f64> {
    let mut block = vec![0; BLOCK_BYTES];
    let started = Instant::now();
    let mut file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let mut total: u64 = 0;
    loop {
        let got = file.read(&mut block).with_context(|| format!("read {}", path.display()))?;
        if got == 0 {
            break;
        }
        total += got as u64;
    }
    let took_s = started.elapsed().as_secs_f64();
    ensure!(total == size_bytes, "{} has {total} bytes, written were {size_bytes}", path.display());
    Ok(total as f64 / took_s)
}

/// Opens `path`, maps it and touches each of its pages for the first time; bytes per second.
///
/// # Errors
/// Open or map fails, or the file is empty.
pub fn map(path: &Path) -> anyhow::Result<f64> {
    let started = Instant::now();
    let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
    let size_bytes = usize::try_from(file.metadata()?.len())?;
    ensure!(size_bytes > 0, "{} is empty: nothing to map", path.display());
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let address = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), size_bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0)
    }
    .with_context(|| format!("map {}", path.display()))?;
    // SAFETY: the mapping has size_bytes bytes, is readable until munmap below, and its file is written by
    // nobody in the meantime: only this process knows its name.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), size_bytes) };
    let touched = bytes.iter().step_by(PAGE_BYTES).fold(0_u8, |all, byte| all ^ byte);
    std::hint::black_box(touched);
    let rate = rate(size_bytes, started);
    // SAFETY: exactly the mapping made above; `bytes` is not used any more.
    unsafe { rustix::mm::munmap(address, size_bytes) }.context("unmap")?;
    Ok(rate)
}

/// Removes a file if it is there.
///
/// # Errors
/// Anything but that it is not there.
pub fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_and_mapped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let size_bytes = BLOCK_BYTES as u64 + 17;
        assert!(write_new(&path, size_bytes).unwrap() > 0.0);
        assert!(read(&path, size_bytes).unwrap() > 0.0);
        assert!(map(&path).unwrap() > 0.0);
        assert!(read(&path, size_bytes - 1).is_err(), "a short or long file is no sample");
    }
}
