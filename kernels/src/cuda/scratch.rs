//! Device memory for the tables of one call at a time.
//!
//! Owns: that memory, which grows, and is kept until the process ends; unsafe code is allowed here. Does not own: its content.
//!
//! A buffer for each call would be taken from the system and given back. The driver's pool keeps none once a stream has been waited for,
//! and mapping a new one takes longer than compressing a tensor of a million elements.

use super::CudaError;
use super::device::Device;
use cudarc::driver::result;
use std::sync::{MutexGuard, PoisonError};

/// The smallest allocation, so that growing is rare.
const LEAST_BYTES: usize = 1 << 20;

/// Memory of a device; none at first.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    address: u64,
    bytes: usize,
}

impl Scratch {
    /// Returns the address of the first byte, a multiple of 256.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Device {
    /// Returns at least `bytes`, with any content, for this caller alone until the guard is dropped. By then all work on the device that
    /// uses the bytes must be done. Waits while another caller has them.
    ///
    /// # Errors
    /// The driver's error: out of memory.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<MutexGuard<'_, Scratch>, CudaError> {
        let mut scratch = self.tables().lock().unwrap_or_else(PoisonError::into_inner);
        if scratch.bytes < bytes {
            let _entered = self.enter()?;
            let old = std::mem::take(&mut *scratch);
            if old.bytes > 0 {
                // SAFETY: the memory was allocated below and is taken out of its place, so that it is freed once. No other call uses it,
                // because this one holds the guard.
                let freed = unsafe { result::free_sync(old.address) };
                freed.map_err(CudaError::while_("freeing tables"))?;
            }
            let bytes = bytes.next_power_of_two().max(LEAST_BYTES);
            // SAFETY: the context is current. The memory is freed above, or lives as long as the process.
            let address = unsafe { result::malloc_sync(bytes) };
            let address = address.map_err(CudaError::while_("allocating tables"))?;
            *scratch = Scratch { address, bytes };
        }
        Ok(scratch)
    }
}
