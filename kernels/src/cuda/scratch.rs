//! Device memory for the tables of one call at a time.
//!
//! Owns: that memory, which grows, and is kept until the process ends; unsafe code is allowed here. Does not own: what lies
//! in it.
//!
//! A buffer for each call would be taken from the system and given back: the driver's pool keeps none once a stream has been
//! waited for, and to map one anew takes longer than to compress a tensor of a million elements.

use super::CudaError;
use super::device::Device;
use cudarc::driver::result;
use std::sync::{MutexGuard, PoisonError};

/// The least that is taken, so that growing is rare.
const LEAST_BYTES: usize = 1 << 20;

/// Memory of a device; none at first.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    address: u64,
    bytes: usize,
}

impl Scratch {
    /// Its first byte's, a multiple of 256.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Device {
    /// At least `bytes`, with anything in them, for this caller alone until the guard goes. Before that all work on the device
    /// that uses them must be done. Waits for who has them.
    ///
    /// # Errors
    /// The driver's: out of memory.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<MutexGuard<'_, Scratch>, CudaError> {
        let mut scratch = self.tables().lock().unwrap_or_else(PoisonError::into_inner);
        if scratch.bytes < bytes {
            let _entered = self.enter()?;
            let old = std::mem::take(&mut *scratch);
            if old.bytes > 0 {
                // SAFETY: it was allocated below and is taken out of its place, so that it is freed once. Nobody works with it:
                // we have the guard.
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
