//! A file, written, read or mapped, and how fast that was: the samples of `ckptctl bench mount` and of the benches.
//!
//! Owns: the work within the measured time and the work before it. Does not own: the choice of places, medians.
//! Memory maps: unsafe code is allowed here.

use anyhow::{Context, ensure};
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::{self, File};
use std::hint::black_box;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Instant;

/// Bytes of a write(2) or read(2), as large writers use it.
pub const BLOCK_BYTES: usize = 1 << 20;
/// A mapped file is touched once in each of these.
const PAGE_BYTES: usize = 4096;
/// Sizes of torch.save's writes: per tensor a zip header, the tensor in one call, a data descriptor; at the end the
/// archive's directory. Sequential, and nothing is ever written twice.
const SAVE_HEADER_BYTES: usize = 128;
const SAVE_TENSOR_BYTES: usize = 16 << 20;
const SAVE_DESCRIPTOR_BYTES: usize = 24;
const SAVE_DIRECTORY_BYTES: usize = 16 << 10;

/// `size_bytes` of bytes that do not repeat within a page, every page touched.
#[must_use]
pub fn buffer(size_bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut bytes = Vec::with_capacity(size_bytes);
    while bytes.len() < size_bytes {
        // Xorshift: cheap, and long before it repeats.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let word = state.to_le_bytes();
        let take = word.len().min(size_bytes - bytes.len());
        bytes.extend_from_slice(&word[..take]);
    }
    bytes
}

/// Touches `size_bytes` of fresh memory and gives it back, so that what is allocated next is warm.
///
/// A virtual machine hands pages that were free for a few seconds to its host, and touching them again costs a
/// fault there: without this, the sample that comes later in a round pays and the other does not.
///
/// # Errors
/// This process may not have so much memory.
pub fn warm(size_bytes: u64) -> anyhow::Result<()> {
    let size_bytes = usize::try_from(size_bytes).context("a size for memory")?;
    let mut memory = Vec::new();
    memory.try_reserve_exact(size_bytes).context("memory for one file, to have it warm")?;
    // Ones, not zeroes: zeroed memory would be mapped without being touched.
    memory.resize(size_bytes, 1_u8);
    black_box(memory);
    Ok(())
}

/// Creates `path`, writes `size_bytes` in blocks and closes it; bytes per second of all three.
///
/// # Errors
/// Any of the three fails.
pub fn write(path: &Path, size_bytes: u64) -> anyhow::Result<f64> {
    write_with(path, size_bytes, &[BLOCK_BYTES], &[])
}

/// The same as [`write`] in a new file: what `path` names is removed first, and warm memory is made ready,
/// both outside the time.
///
/// # Errors
/// As [`write`].
pub fn write_new(path: &Path, size_bytes: u64) -> anyhow::Result<f64> {
    remove(path)?;
    warm(size_bytes)?;
    write(path, size_bytes)
}

/// The same as [`write_new`] as torch.save would write it, and its archive's directory.
///
/// # Errors
/// As [`write`].
pub fn save_new(path: &Path, size_bytes: u64) -> anyhow::Result<f64> {
    remove(path)?;
    warm(size_bytes)?;
    let tensor = [SAVE_HEADER_BYTES, SAVE_TENSOR_BYTES, SAVE_DESCRIPTOR_BYTES];
    write_with(path, size_bytes, &tensor, &[SAVE_DIRECTORY_BYTES])
}

/// Writes `repeated` again and again until `size_bytes` are written, then `last`.
fn write_with(path: &Path, size_bytes: u64, repeated: &[usize], last: &[usize]) -> anyhow::Result<f64> {
    let longest = repeated.iter().chain(last).copied().max().unwrap_or(1);
    let block = buffer(longest);
    let started = Instant::now();
    let mut file = File::create(path).with_context(|| format!("create {}", path.display()))?;
    let mut written: u64 = 0;
    for &length in repeated.iter().cycle() {
        let left = usize::try_from(size_bytes - written).unwrap_or(usize::MAX);
        if left == 0 {
            break;
        }
        let length = length.min(left);
        file.write_all(&block[..length]).with_context(|| format!("write {}", path.display()))?;
        written += length as u64;
    }
    for &length in last {
        file.write_all(&block[..length]).with_context(|| format!("write {}", path.display()))?;
        written += length as u64;
    }
    drop(file);
    Ok(written as f64 / started.elapsed().as_secs_f64())
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
    ensure!(size_bytes > 0, "{} is empty: nothing to map, or somebody else truncated it", path.display());
    // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
    let address = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), size_bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0)
    }
    .with_context(|| format!("map {}", path.display()))?;
    // SAFETY: the mapping has size_bytes bytes, is readable until munmap below, and its file is written by
    // nobody in the meantime: only this process knows its name.
    let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), size_bytes) };
    black_box(bytes.iter().step_by(PAGE_BYTES).fold(0_u8, |all, byte| all ^ byte));
    let bytes_per_s = size_bytes as f64 / started.elapsed().as_secs_f64();
    // SAFETY: exactly the mapping made above; `bytes` is not used any more.
    unsafe { rustix::mm::munmap(address, size_bytes) }.context("unmap")?;
    Ok(bytes_per_s)
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
