//! Sends a tensor of the host through a device, where it is compressed or added to.
//!
//! Owns: the copies, in memory of this module. Does not own: the launches.

use super::super::{Compressed, Settings, SparseChunk, Values, check};
use super::launch::Launcher;
use super::{DeviceCompressError, DeviceInt8, DeviceSparse, DeviceTensor, DeviceValues};
use crate::cuda::{CudaError, Device};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::sync::Arc;

impl Device {
    /// Compresses a tensor of the host's memory as [`crate::compress::compress`] does, bit for bit. Runs on the low-priority stream, and is
    /// done when this returns. The device holds the tensor, the residual and the result at once.
    ///
    /// # Errors
    /// [`DeviceCompressError`], and nothing is changed.
    pub fn compress(
        &self,
        values: Values<'_>,
        residual: Option<&mut [f32]>,
        settings: &Settings,
        seed: u64,
    ) -> Result<Compressed, DeviceCompressError> {
        check::residual(values, residual.as_deref())?;
        let len = values.len();
        let dense = settings.is_dense(len);
        let (chunk_elements, block) = (settings.chunk_elements(), settings.block());
        if len == 0 && dense {
            return Ok(Compressed::Int8 { len, block, scales: Vec::new(), values: Vec::new() });
        } else if len == 0 {
            return Ok(Compressed::Sparse { len, chunk_elements, chunks: Vec::new() });
        }
        let _entered = self.enter()?;
        let work = Work(self.background());
        let (kept32, kept16);
        let device_values = match values {
            Values::F32(values) => {
                kept32 = work.up(values)?;
                DeviceValues::F32(work.address(&kept32))
            }
            Values::Bf16(values) => {
                kept16 = work.up(values.reinterpret_cast())?;
                DeviceValues::Bf16(work.address(&kept16))
            }
            Values::F16(values) => {
                kept16 = work.up(values.reinterpret_cast())?;
                DeviceValues::F16(work.address(&kept16))
            }
        };
        let device_residual = residual.as_deref().map(|residual| work.up(residual)).transpose()?;
        let tensor = DeviceTensor {
            values: device_values,
            residual: device_residual.as_ref().map(|residual| work.address(residual)),
            elements: len,
        };
        let launcher = Launcher { device: self, stream: work.0 };
        let compressed = if dense {
            let (quantised, scales) = (work.room::<i8>(len)?, work.room::<f32>(len.div_ceil(block))?);
            let out = DeviceInt8 { values: work.address(&quantised), scales: work.address(&scales), block };
            // SAFETY: every address is of a buffer of this function, each as long as the tensor or its blocks, no two the same.
            unsafe { launcher.int8(&tensor, &out) }?;
            Compressed::Int8 { len, block, scales: work.down(&scales)?, values: work.down(&quantised)? }
        } else {
            let (entries, indices, values) = work.sparse(&launcher, &tensor, settings, seed)?;
            let mut rest = (&indices[..], &values[..]);
            let chunks = (0u64..).zip(entries).map(|(number, entries)| {
                let (indices, values) = (rest.0.split_at(entries), rest.1.split_at(entries));
                rest = (indices.1, values.1);
                SparseChunk {
                    begin: number * chunk_elements as u64,
                    indices: indices.0.to_vec(),
                    values: values.0.iter().map(|&bits| f16::from_bits(bits)).collect(),
                }
            });
            Compressed::Sparse { len, chunk_elements, chunks: chunks.collect() }
        };
        if let (Some(residual), Some(from)) = (residual, &device_residual) {
            residual.copy_from_slice(&work.down(from)?);
        }
        Ok(compressed)
    }

    /// Adds: `dense[i] += scale * value` in the host's memory, as [`crate::compress::accumulate`] does, bit for bit. Runs on the
    /// low-priority stream, and is done when this returns.
    ///
    /// # Errors
    /// [`DeviceCompressError`], and nothing is changed.
    pub fn accumulate(
        &self,
        compressed: &Compressed,
        scale: f32,
        dense: &mut [f32],
    ) -> Result<(), DeviceCompressError> {
        compressed.check()?;
        check::length("the dense tensor", dense.len(), compressed.len())?;
        if dense.is_empty() {
            return Ok(());
        }
        let _entered = self.enter()?;
        let work = Work(self.background());
        let launcher = Launcher { device: self, stream: work.0 };
        let device_dense = work.up(dense)?;
        let at = work.address(&device_dense);
        match compressed {
            Compressed::Int8 { block, scales, values, .. } => {
                let (values, scales) = (work.up(values)?, work.up(scales)?);
                let of = DeviceInt8 {
                    values: work.address(&values),
                    scales: work.address(&scales),
                    block: *block,
                };
                // SAFETY: every address is of a buffer of this function, as long as was checked, and freed in the stream's order.
                unsafe { launcher.add_int8(&of, scale, at, dense.len()) }?;
            }
            Compressed::Sparse { chunk_elements, chunks, .. } => {
                for (number, chunk) in
                    chunks.iter().enumerate().filter(|(_, chunk)| !chunk.indices.is_empty())
                {
                    let (begin, elements) = check::chunk_range(dense.len(), *chunk_elements, number);
                    let (indices, values) =
                        (work.up(&chunk.indices)?, work.up(chunk.values.reinterpret_cast())?);
                    let of = DeviceSparse {
                        indices: work.address(&indices),
                        values: work.address(&values),
                        capacity: chunk.indices.len(),
                    };
                    // SAFETY: as above; the chunk is within the tensor.
                    unsafe { launcher.add_sparse(&of, scale, at + 4 * begin as u64, elements) }?;
                }
            }
        }
        dense.copy_from_slice(&work.down(&device_dense)?);
        Ok(())
    }
}

/// A sparse result before it is cut into chunks: entries per chunk, and at least as many indices and values.
type Kept = (Vec<usize>, Vec<i32>, Vec<u16>);

/// The stream of this call's buffers.
struct Work<'a>(&'a Arc<CudaStream>);

impl Drop for Work<'_> {
    /// Copies from pinned memory of the caller may still run after the calls that began them. Waiting here ensures that none outlives this
    /// call, whichever error ended the rest.
    fn drop(&mut self) {
        let _ = self.0.synchronize();
    }
}

impl Work<'_> {
    /// Returns entries per chunk, indices and values; tries again with more room if the usual room is not enough.
    fn sparse(
        &self,
        launcher: &Launcher<'_>,
        tensor: &DeviceTensor,
        settings: &Settings,
        seed: u64,
    ) -> Result<Kept, DeviceCompressError> {
        let mut capacity = settings.capacity(tensor.elements);
        loop {
            let (indices, values) = (self.room::<i32>(capacity)?, self.room::<u16>(capacity)?);
            let out =
                DeviceSparse { indices: self.address(&indices), values: self.address(&values), capacity };
            // SAFETY: the tensor is the caller's, in buffers that outlive this; the others are ours; no two are the same.
            match unsafe { launcher.sparse(tensor, settings, seed, &out) } {
                // Nothing was changed: the same work finds the same number again.
                Err(DeviceCompressError::Capacity { found, .. })
                    if found <= tensor.elements && found > capacity =>
                {
                    capacity = found;
                }
                Err(why) => return Err(why),
                Ok(entries) => return Ok((entries, self.down(&indices)?, self.down(&values)?)),
            }
        }
    }

    fn up<T: DeviceRepr>(&self, from: &[T]) -> Result<CudaSlice<T>, CudaError> {
        self.0.clone_htod(from).map_err(CudaError::while_("copying to the device"))
    }

    fn room<T: DeviceRepr + cudarc::driver::ValidAsZeroBits>(
        &self,
        elements: usize,
    ) -> Result<CudaSlice<T>, CudaError> {
        self.0.alloc_zeros(elements).map_err(CudaError::while_("allocating room for a compressed tensor"))
    }

    /// Copies a buffer from the device, and waits for the stream.
    fn down<T: DeviceRepr + Clone + Default>(&self, from: &CudaSlice<T>) -> Result<Vec<T>, CudaError> {
        let mut to = vec![T::default(); from.len()];
        self.0.memcpy_dtoh(from, &mut to).map_err(CudaError::while_("copying from the device"))?;
        self.0.synchronize().map_err(CudaError::while_("waiting for a copy from the device"))?;
        Ok(to)
    }

    /// Returns a buffer's address. All work on the buffer is put on the stream that it was allocated on, so that nothing else needs to be
    /// ordered.
    fn address<T>(&self, slice: &CudaSlice<T>) -> u64 {
        slice.device_ptr(self.0).0
    }
}
