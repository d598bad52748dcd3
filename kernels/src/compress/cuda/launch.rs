//! The launches, on one stream.
//!
//! Owns: grids, arguments and the returned status; unsafe code is allowed here. Does not own: the checks (`mod`).

use super::super::sample::Sample;
use super::super::{CompressError, LEAST_KEPT_BITS, SCALE_MAX, Settings, check};
use super::{DeviceCompressError, DeviceInt8, DeviceSparse, DeviceTensor, DeviceValues, SOURCE};
use crate::cuda::{CudaError, Device};
use cudarc::driver::{CudaStream, DeviceRepr, LaunchConfig, PushKernelArg, result};
use std::sync::Arc;

/// Elements per warp of `count` and `fill`, as in compress.cu.
const TILE: usize = 1024;
/// Threads per block: whole warps.
const THREADS: u32 = 256;
/// Tiles per block of threads: a warp has 32.
const TILES_PER_BLOCK: u32 = THREADS / 32;
/// Threads of the kernels with a single block: as many as a block can have, and the memory of `scan` has room for them.
const THREADS_OF_ONE_BLOCK: u32 = 1024;
/// Most blocks of the kernels whose blocks loop until all is done: more than can run at once on any device.
const BLOCKS_MAX: usize = 1 << 13;
/// No index, as in compress.cu.
const NONE: u64 = u64::MAX;
/// The status's size in the tables, in 64-bit words; the ends of the chunks come after it.
const STATUS_WORDS: usize = size_of::<Status>() / 8;

/// The structure of the same name in compress.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Status {
    not_finite: u64,
    bad_sum: u64,
    kept: u64,
    capacity: u64,
    threshold: u64,
}

/// The structure of the same name in compress.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    values: u64,
    residual: u64,
    len: u64,
    kind: u64,
}

// SAFETY: `repr(C)` with the fields of `Tensor` in compress.cu, addresses and numbers of 64 bits.
unsafe impl DeviceRepr for Tensor {}

impl Tensor {
    fn of(tensor: &DeviceTensor) -> Self {
        let (values, kind) = match tensor.values {
            DeviceValues::F32(values) => (values, 0),
            DeviceValues::Bf16(values) => (values, 1),
            DeviceValues::F16(values) => (values, 2),
        };
        Self { values, residual: tensor.residual.unwrap_or(0), len: tensor.elements as u64, kind }
    }
}

/// An argument of a kernel: by its size, an address or a number.
enum Arg {
    Tensor(Tensor),
    Long(u64),
    Int(u32),
    Float(f32),
}

/// A chunk of a tensor, and its tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) begin: usize,
    pub(super) elements: usize,
    /// Number of tiles of the chunks before.
    pub(super) tiles_before: usize,
    pub(super) tiles: usize,
}

/// Lists the chunks of a tensor, in order.
pub(super) fn chunks(len: usize, chunk_elements: usize) -> Vec<Chunk> {
    let mut tiles_before = 0;
    (0..len.div_ceil(chunk_elements))
        .map(|number| {
            let (begin, elements) = check::chunk_range(len, chunk_elements, number);
            let chunk = Chunk { begin, elements, tiles_before, tiles: elements.div_ceil(TILE) };
            tiles_before += chunk.tiles;
            chunk
        })
        .collect()
}

/// A device and one of its streams.
pub(super) struct Launcher<'a> {
    pub(super) device: &'a Device,
    pub(super) stream: &'a Arc<CudaStream>,
}

impl Launcher<'_> {
    /// # Safety
    /// As [`Device::compress_sparse_at`]; addresses are checked, and there is at least one element.
    pub(super) unsafe fn sparse(
        &self,
        tensor: &DeviceTensor,
        settings: &Settings,
        seed: u64,
        out: &DeviceSparse,
    ) -> Result<Vec<usize>, DeviceCompressError> {
        let of = Tensor::of(tensor);
        let sample = Sample::of(tensor.elements, settings, seed);
        let chunks = chunks(tensor.elements, settings.chunk_elements());
        let tiles = chunks.last().map_or(0, |chunk| chunk.tiles_before + chunk.tiles);
        let tables = Tables::of(chunks.len(), tiles, sample.count);
        let scratch = self.device.scratch(tables.bytes)?;
        let begun = Status::begun(out.capacity);
        let _done = Done(self.stream);
        let status_at = scratch.address();
        let [ends_at, counts_at, magnitudes_at] =
            [tables.ends, tables.counts, tables.magnitudes].map(|offset| status_at + offset as u64);
        // SAFETY: the tables are ours until `scratch` goes, and have room for the status, which lives longer than `_done`.
        unsafe { self.begin(&begun, status_at) }?;
        let (count, rank) = (int(sample.count), int(sample.count - sample.keep));

        let args = [
            Arg::Tensor(of),
            long(sample.stride),
            Arg::Int(count),
            Arg::Long(seed),
            Arg::Long(magnitudes_at),
        ];
        // SAFETY: the arguments are those of `sample`, which reads the tensor below `len` and writes `count` magnitudes.
        unsafe { self.launch("sample", count.div_ceil(THREADS), THREADS, &args) }?;
        let args = [
            Arg::Long(magnitudes_at),
            Arg::Int(count),
            Arg::Int(rank),
            Arg::Int(LEAST_KEPT_BITS),
            Arg::Long(status_at),
        ];
        // SAFETY: the arguments are those of `threshold`, which reads `count` magnitudes and writes the status.
        unsafe { self.launch("threshold", 1, THREADS_OF_ONE_BLOCK, &args) }?;
        for chunk in &chunks {
            let args = chunk.args(of, counts_at, [Arg::Long(status_at)]);
            // SAFETY: the arguments are those of `count`, which reads the chunk's elements, all below `len`, and writes its
            // tiles' counts and the status.
            unsafe { self.launch("count", chunk.blocks(), THREADS, &args) }?;
        }
        for (number, chunk) in (0u64..).zip(&chunks) {
            let args = [
                Arg::Long(chunk.counts(counts_at)),
                Arg::Int(int(chunk.tiles)),
                Arg::Long(ends_at + 8 * number),
                Arg::Long(status_at),
            ];
            // SAFETY: the arguments are those of `scan`, which reads and writes the chunk's counts, its end and the status.
            unsafe { self.launch("scan", 1, THREADS_OF_ONE_BLOCK, &args) }?;
        }
        for chunk in &chunks {
            let more = [Arg::Long(out.indices), Arg::Long(out.values), Arg::Long(status_at)];
            let args = chunk.args(of, counts_at, more);
            // SAFETY: the arguments are those of `fill`, which reads the chunk's elements and writes their residual, and writes
            // results only where the status says that all of them have room.
            unsafe { self.launch("fill", chunk.blocks(), THREADS, &args) }?;
        }
        // SAFETY: the status and the ends lie there.
        let ends = unsafe { self.finish(status_at, chunks.len()) }?;
        let mut before = 0;
        Ok(ends.into_iter().map(|end| usize_of(end - std::mem::replace(&mut before, end))).collect())
    }

    /// # Safety
    /// As [`Device::compress_int8_at`]; addresses and the block are checked, and there is at least one element.
    pub(super) unsafe fn int8(
        &self,
        tensor: &DeviceTensor,
        out: &DeviceInt8,
    ) -> Result<(), DeviceCompressError> {
        let of = Tensor::of(tensor);
        let scratch = self.device.scratch(8 * STATUS_WORDS)?;
        let begun = Status::begun(0);
        let _done = Done(self.stream);
        let status_at = scratch.address();
        // SAFETY: the tables are ours until `scratch` goes, and have room for the status, which lives longer than `_done`.
        unsafe { self.begin(&begun, status_at) }?;
        let threads = usize::try_from(THREADS).unwrap_or(usize::MAX);
        let args = [Arg::Tensor(of), Arg::Long(status_at)];
        // SAFETY: the arguments are those of `check`, which reads the tensor below `len` and writes the status.
        unsafe { self.launch("check", grid(tensor.elements.div_ceil(threads)), THREADS, &args) }?;
        let args = [
            Arg::Tensor(of),
            Arg::Int(int(out.block)),
            Arg::Float(SCALE_MAX),
            Arg::Long(out.values),
            Arg::Long(out.scales),
            Arg::Long(status_at),
        ];
        let blocks = grid(tensor.elements.div_ceil(out.block));
        // SAFETY: the arguments are those of `int8`, which reads the tensor below `len` and writes as many values and residuals,
        // and a scale per started block.
        unsafe { self.launch("int8", blocks, THREADS, &args) }?;
        // SAFETY: the status lies there.
        unsafe { self.finish(status_at, 0) }.map(drop)
    }

    /// # Safety
    /// As [`Device::accumulate_sparse_at`]; addresses and lengths are checked.
    pub(super) unsafe fn add_sparse(
        &self,
        of: &DeviceSparse,
        scale: f32,
        dense: u64,
        elements: usize,
    ) -> Result<(), DeviceCompressError> {
        let threads = usize::try_from(THREADS).unwrap_or(usize::MAX);
        let args = [
            Arg::Long(dense),
            Arg::Int(int(elements)),
            Arg::Long(of.indices),
            Arg::Long(of.values),
            long(of.capacity),
            Arg::Float(scale),
        ];
        // SAFETY: the arguments are those of `add_sparse`, which reads as many entries as there are and writes below `elements`.
        Ok(unsafe { self.launch("add_sparse", grid(of.capacity.div_ceil(threads)), THREADS, &args) }?)
    }

    /// # Safety
    /// As [`Device::accumulate_int8_at`]; addresses and the block are checked.
    pub(super) unsafe fn add_int8(
        &self,
        of: &DeviceInt8,
        scale: f32,
        dense: u64,
        elements: usize,
    ) -> Result<(), DeviceCompressError> {
        let args = [
            Arg::Long(dense),
            long(elements),
            Arg::Int(int(of.block)),
            Arg::Long(of.values),
            Arg::Long(of.scales),
            Arg::Float(scale),
        ];
        // SAFETY: the arguments are those of `add_int8`, which reads `elements` values and their blocks' scales and writes below
        // `elements`.
        Ok(unsafe { self.launch("add_int8", grid(elements.div_ceil(of.block)), THREADS, &args) }?)
    }

    /// # Safety
    /// The arguments are those of the kernel, in number, order and size, and describe memory that it may use as it does.
    unsafe fn launch(
        &self,
        name: &'static str,
        blocks: u32,
        threads: u32,
        args: &[Arg],
    ) -> Result<(), CudaError> {
        let function = self.device.function(SOURCE, name)?;
        let mut launch = self.stream.launch_builder(&function);
        for arg in args {
            match arg {
                Arg::Tensor(tensor) => launch.arg(tensor),
                Arg::Long(long) => launch.arg(long),
                Arg::Int(int) => launch.arg(int),
                Arg::Float(float) => launch.arg(float),
            };
        }
        let config =
            LaunchConfig { grid_dim: (blocks, 1, 1), block_dim: (threads, 1, 1), shared_mem_bytes: 0 };
        // SAFETY: the caller's promise.
        let launched = unsafe { launch.launch(config) };
        launched.map(|_| ()).map_err(CudaError::while_("launching compression"))
    }

    /// Puts a status where kernels find it.
    ///
    /// # Safety
    /// `at` has room for the status, which lives until the stream has been waited for.
    unsafe fn begin(&self, status: &Status, at: u64) -> Result<(), CudaError> {
        // SAFETY: the caller's promises.
        let copied =
            unsafe { result::memcpy_htod_async(at, std::slice::from_ref(status), self.stream.cu_stream()) };
        copied.map_err(CudaError::while_("copying compression's status to the device"))
    }

    /// Waits for the stream, returns the error in the status, if any, or else the ends of `chunks` chunks.
    ///
    /// # Safety
    /// The status is at `at`, and the ends come after it.
    unsafe fn finish(&self, at: u64, chunks: usize) -> Result<Vec<u64>, DeviceCompressError> {
        let mut words = vec![0u64; STATUS_WORDS + chunks];
        // SAFETY: the caller's promise; the words live until the stream has been waited for, here.
        let copied = unsafe { result::memcpy_dtoh_async(&mut words, at, self.stream.cu_stream()) };
        let waited = self.stream.synchronize();
        copied.map_err(CudaError::while_("copying compression's status"))?;
        waited.map_err(CudaError::while_("waiting for compression"))?;
        let ends = words.split_off(STATUS_WORDS);
        Status::read(&words).refused()?;
        Ok(ends)
    }
}

/// Waits for a stream when dropped, also after an error: until then the memory that another call gets next is still in use.
struct Done<'a>(&'a CudaStream);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        // If the stream fails, the next call on it reports that.
        let _ = self.0.synchronize();
    }
}

/// Offsets of the tables of one call, in bytes from their beginning, which is the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tables {
    /// The ends of chunks, a u64 each.
    pub(super) ends: usize,
    /// The counts of tiles, a u64 each.
    pub(super) counts: usize,
    /// The magnitudes of the sample, a u32 each.
    pub(super) magnitudes: usize,
    /// Size of all tables.
    pub(super) bytes: usize,
}

impl Tables {
    pub(super) fn of(chunks: usize, tiles: usize, sample: usize) -> Self {
        let ends = 8 * STATUS_WORDS;
        let counts = ends + 8 * chunks;
        let magnitudes = counts + 8 * tiles;
        Self { ends, counts, magnitudes, bytes: magnitudes + 4 * sample }
    }
}

impl Status {
    fn begun(capacity: usize) -> Self {
        Self {
            not_finite: NONE,
            bad_sum: NONE,
            kept: 0,
            capacity: capacity as u64,
            threshold: u64::from(LEAST_KEPT_BITS),
        }
    }

    /// Reads a status from its words, in the order of its fields.
    fn read(words: &[u64]) -> Self {
        let word = |place: usize| words.get(place).copied().unwrap_or(NONE);
        let [not_finite, bad_sum, kept, capacity, threshold] = [0, 1, 2, 3, 4].map(word);
        Self { not_finite, bad_sum, kept, capacity, threshold }
    }

    fn refused(&self) -> Result<(), DeviceCompressError> {
        if self.not_finite != NONE {
            return Err(CompressError::NotFinite { index: usize_of(self.not_finite) }.into());
        }
        if self.bad_sum != NONE {
            return Err(CompressError::Residual { index: usize_of(self.bad_sum) }.into());
        }
        if self.kept > self.capacity {
            let (found, capacity) = (usize_of(self.kept), usize_of(self.capacity));
            return Err(DeviceCompressError::Capacity { found, capacity });
        }
        Ok(())
    }
}

impl Chunk {
    /// Returns the address of the chunk's counts.
    fn counts(&self, counts: u64) -> u64 {
        counts + 8 * self.tiles_before as u64
    }

    fn blocks(&self) -> u32 {
        int(self.tiles).div_ceil(TILES_PER_BLOCK)
    }

    /// Returns the arguments that `count` and `fill` share, and `more`.
    fn args<const MORE: usize>(&self, of: Tensor, counts: u64, more: [Arg; MORE]) -> Vec<Arg> {
        let counts = Arg::Long(self.counts(counts));
        let shared = [
            Arg::Tensor(of),
            long(self.begin),
            Arg::Int(int(self.elements)),
            Arg::Int(int(self.tiles)),
            counts,
        ];
        shared.into_iter().chain(more).collect()
    }
}

fn long(value: usize) -> Arg {
    Arg::Long(value as u64)
}

/// Converts counts within a chunk, a block or a sample, which their limits keep below 2³¹.
fn int(value: usize) -> u32 {
    u32::try_from(value).expect("within a chunk, a block or a sample")
}

fn grid(blocks: usize) -> u32 {
    int(blocks.min(BLOCKS_MAX))
}

fn usize_of(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}
