//! Compression on a CUDA device: over memory that torch owns, or over a tensor of the host, which is copied there and back.
//!
//! Owns: tensors by addresses, their checks, and their entry points; unsafe code is allowed here. Does not own: the arithmetic
//! (compress.cu), the launches (`launch`), or the device (`crate::cuda`).
//!
//! Device memory beside the caller's: 8 bytes per started 1,024 elements of each chunk, 8 per chunk, and the sample. Each device has one
//! such memory, which is kept; calls that use it wait for each other.

mod host;
mod launch;
#[cfg(test)]
mod tests;

use super::{BLOCK_MAX, CHUNK_ELEMENTS_MAX, CompressError, Settings, check};
use crate::cuda::{CudaError, Device, Source};
use launch::Launcher;
use std::fmt;

/// The device code of compression.
pub const SOURCE: Source = Source { name: "compress", text: include_str!("compress.cu") };

/// A gradient in a device's memory, by its address.
#[derive(Clone, Copy, Debug)]
pub enum DeviceValues {
    /// An f32 per element.
    F32(u64),
    /// A bfloat16 per element.
    Bf16(u64),
    /// A binary16 per element.
    F16(u64),
}

/// A flat tensor to compress.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTensor {
    /// The gradient.
    pub values: DeviceValues,
    /// The residual, an f32 per element, which is changed.
    pub residual: Option<u64>,
    /// Number of elements of each.
    pub elements: usize,
}

/// The destination of a sparse result: chunk after chunk.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSparse {
    /// `capacity` i32: places within their chunk, ascending.
    pub indices: u64,
    /// `capacity` binary16.
    pub values: u64,
    /// Number of entries that have room.
    pub capacity: usize,
}

/// The place of an INT8 result.
#[derive(Clone, Copy, Debug)]
pub struct DeviceInt8 {
    /// The values, an i8 per element.
    pub values: u64,
    /// The scales, an f32 per started block.
    pub scales: u64,
    /// Elements per block.
    pub block: usize,
}

/// Why a gradient is not compressed, or not added, on a device.
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceCompressError {
    /// Values or lengths do not fit. Nothing was changed.
    Compress(CompressError),
    /// More elements are kept than have room. Nothing was changed.
    Capacity {
        /// Number of elements that are kept.
        found: usize,
        /// Number of elements that have room.
        capacity: usize,
    },
    /// An address is 0, or no multiple of its elements' size. Nothing was changed.
    Address {
        /// The value that the address belongs to.
        what: &'static str,
        /// The address.
        address: u64,
        /// The required alignment, in bytes.
        multiple: u64,
    },
    /// The device, its driver or its compiler failed. The content of the results is undefined.
    Cuda(CudaError),
}

impl fmt::Display for DeviceCompressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Compress(why) => why.fmt(f),
            Self::Capacity { found, capacity } => {
                write!(f, "{found} elements are kept, and the buffers have room for {capacity}")
            }
            Self::Address { what, address, multiple } => {
                write!(
                    f,
                    "the address of {what} is {address:#x}: it should be a multiple of {multiple} and not 0"
                )
            }
            Self::Cuda(why) => why.fmt(f),
        }
    }
}

impl std::error::Error for DeviceCompressError {}

impl From<CompressError> for DeviceCompressError {
    fn from(why: CompressError) -> Self {
        Self::Compress(why)
    }
}

impl From<CudaError> for DeviceCompressError {
    fn from(why: CudaError) -> Self {
        Self::Cuda(why)
    }
}

impl Device {
    /// Keeps the largest elements of a tensor, as [`super::compress`] does for a sparse one, bit for bit and whatever
    /// [`Settings::is_dense`] says. Returns the number of entries of each chunk. The work is put on `stream` (a `cudaStream_t`; torch:
    /// `torch.cuda.current_stream().cuda_stream`), and this waits for it.
    ///
    /// [`Settings::capacity`] is enough room, unless many elements have the same magnitude. Reads gradient and residual twice and writes
    /// the residual once. Not for a stream that is captured into a graph. The first call on a device compiles, which takes some hundred
    /// milliseconds.
    ///
    /// # Errors
    /// [`DeviceCompressError`]. Nothing is changed except after [`DeviceCompressError::Cuda`], not even if [`CompressError::Residual`] is
    /// found.
    ///
    /// # Safety
    /// Every address is of memory that this device can reach, as long as its description here says; the residual and the results overlap no
    /// other named memory. Until this returns the memory lives, and no other code uses it. `stream` is 0 or a stream of this device's
    /// primary context, and lives.
    pub unsafe fn compress_sparse_at(
        &self,
        tensor: &DeviceTensor,
        settings: &Settings,
        seed: u64,
        out: &DeviceSparse,
        stream: u64,
    ) -> Result<Vec<usize>, DeviceCompressError> {
        check_tensor(tensor)?;
        there("the indices", out.indices, 4, out.capacity)?;
        there("the kept values", out.values, 2, out.capacity)?;
        if tensor.elements == 0 {
            return Ok(Vec::new());
        }
        let _entered = self.enter()?;
        // SAFETY: the caller promises that the stream is one of this device and lives. What is allocated on it is freed in its
        // order, before this returns.
        let stream = unsafe { self.borrow_stream(stream) };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { Launcher { device: self, stream: &stream }.sparse(tensor, settings, seed, out) }
    }

    /// Makes INT8 blocks of a tensor, as [`super::compress`] does for a dense one, bit for bit, with `out.block` elements per block. Uses
    /// `stream` as [`Self::compress_sparse_at`] does, and waits for it.
    ///
    /// # Errors
    /// [`DeviceCompressError`]. Nothing is changed except after [`DeviceCompressError::Cuda`].
    ///
    /// # Safety
    /// As [`Self::compress_sparse_at`].
    pub unsafe fn compress_int8_at(
        &self,
        tensor: &DeviceTensor,
        out: &DeviceInt8,
        stream: u64,
    ) -> Result<(), DeviceCompressError> {
        check_tensor(tensor)?;
        check_int8(out, tensor.elements)?;
        if tensor.elements == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        // SAFETY: as in `compress_sparse_at`.
        let stream = unsafe { self.borrow_stream(stream) };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { Launcher { device: self, stream: &stream }.int8(tensor, out) }
    }

    /// Adds: `dense[i] += scale * value` for one chunk of a sparse gradient, as [`super::accumulate`] does. `dense` is the address of the
    /// chunk's `elements` f32, `of.capacity` the number of entries. The work is put on `stream` and may not be done when this returns.
    /// Indices that do not ascend, or are not within the chunk, are left out: they cannot be checked here.
    ///
    /// # Errors
    /// [`DeviceCompressError`].
    ///
    /// # Safety
    /// As [`Self::compress_sparse_at`], until the stream has done the work.
    pub unsafe fn accumulate_sparse_at(
        &self,
        of: &DeviceSparse,
        scale: f32,
        dense: u64,
        elements: usize,
        stream: u64,
    ) -> Result<(), DeviceCompressError> {
        if elements > CHUNK_ELEMENTS_MAX {
            let (name, found, most) = ("chunk_elements", elements, CHUNK_ELEMENTS_MAX);
            return Err(CompressError::Setting { name, found, most }.into());
        }
        there("the dense tensor", dense, 4, elements)?;
        there("the indices", of.indices, 4, of.capacity)?;
        there("the kept values", of.values, 2, of.capacity)?;
        if elements == 0 || of.capacity == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        // SAFETY: as in `compress_sparse_at`.
        let stream = unsafe { self.borrow_stream(stream) };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { Launcher { device: self, stream: &stream }.add_sparse(of, scale, dense, elements) }
    }

    /// Adds: `dense[i] += scale * value` for INT8 blocks, as [`super::accumulate`] does. The work is put on `stream` and may not be done
    /// when this returns.
    ///
    /// # Errors
    /// [`DeviceCompressError`].
    ///
    /// # Safety
    /// As [`Self::compress_sparse_at`], until the stream has done the work.
    pub unsafe fn accumulate_int8_at(
        &self,
        of: &DeviceInt8,
        scale: f32,
        dense: u64,
        elements: usize,
        stream: u64,
    ) -> Result<(), DeviceCompressError> {
        check_int8(of, elements)?;
        there("the dense tensor", dense, 4, elements)?;
        if elements == 0 {
            return Ok(());
        }
        let _entered = self.enter()?;
        // SAFETY: as in `compress_sparse_at`.
        let stream = unsafe { self.borrow_stream(stream) };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { Launcher { device: self, stream: &stream }.add_int8(of, scale, dense, elements) }
    }
}

fn check_tensor(tensor: &DeviceTensor) -> Result<(), DeviceCompressError> {
    match tensor.values {
        DeviceValues::F32(values) => there("the gradient", values, 4, tensor.elements)?,
        DeviceValues::Bf16(values) | DeviceValues::F16(values) => {
            there("the gradient", values, 2, tensor.elements)?;
        }
    }
    tensor.residual.map_or(Ok(()), |residual| there("the residual", residual, 4, tensor.elements))
}

fn check_int8(of: &DeviceInt8, elements: usize) -> Result<(), DeviceCompressError> {
    check::setting("block", of.block, BLOCK_MAX)?;
    there("the INT8 values", of.values, 1, elements)?;
    there("the scales", of.scales, 4, elements)
}

/// Checks that an address can be that of `elements` elements of `multiple` bytes.
fn there(
    what: &'static str,
    address: u64,
    multiple: u64,
    elements: usize,
) -> Result<(), DeviceCompressError> {
    let fits = elements == 0 || (address != 0 && address.is_multiple_of(multiple));
    if fits { Ok(()) } else { Err(DeviceCompressError::Address { what, address, multiple }) }
}
