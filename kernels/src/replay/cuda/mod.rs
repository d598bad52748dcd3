//! Replay on a CUDA device: over memory that torch owns, or over a state of the host, which is copied there and back.
//!
//! Owns: the checks of addresses and the launches; unsafe code is allowed here. Does not own: the arithmetic (replay.cu), the
//! cuts and addresses (`args`), or the device (`crate::cuda`).
//!
//! Device memory beside the caller's: 88 bytes per step, and for sparse gradients up to 32 MiB of tables.

mod args;
mod host;
#[cfg(test)]
mod tests;

use super::check::{applied, length, unit};
use super::{CHUNK_ELEMENTS_MAX, Factors, ReplayError, Step};
use crate::cuda::{CudaError, Device, Source};
use args::{Part, StepArgs, is_wide, parts, sparse_count, step_args};
use cudarc::driver::sys::CUdevice_attribute;
use cudarc::driver::{CudaStream, DevicePtr, DeviceRepr, LaunchConfig, PushKernelArg};
use std::fmt;
use std::sync::Arc;

/// The device code of replay.
pub const SOURCE: Source = Source { name: "replay", text: include_str!("replay.cu") };

/// Threads per block, as in replay.cu.
const THREADS: u32 = 256;
/// Blocks per multiprocessor: more than can run there at once, so that the last blocks end together.
const BLOCKS_PER_MULTIPROCESSOR: usize = 16;

/// A flat range of parameters in a device's memory, by addresses. Each slice has `elements` elements.
#[derive(Clone, Copy, Debug)]
pub struct DeviceState {
    /// FP32 master weights.
    pub weights: u64,
    /// `exp_avg`, FP32.
    pub exp_avg: u64,
    /// `exp_avg_sq`, FP32.
    pub exp_avg_sq: u64,
    /// The 16-bit copy.
    pub half: DeviceHalf,
    /// Number of elements of each.
    pub elements: usize,
}

/// The second destination of the weights, rounded to nearest, ties to even.
#[derive(Clone, Copy, Debug, Default)]
pub enum DeviceHalf {
    /// None.
    #[default]
    None,
    /// As bfloat16, at this address.
    Bf16(u64),
    /// As IEEE binary16, at this address.
    F16(u64),
}

impl DeviceHalf {
    fn address(self) -> u64 {
        match self {
            Self::None => 0,
            Self::Bf16(address) | Self::F16(address) => address,
        }
    }

    /// Returns the number of this kind in replay.cu.
    fn kind(self) -> u32 {
        match self {
            Self::None => 0,
            Self::Bf16(_) => 1,
            Self::F16(_) => 2,
        }
    }
}

/// A gradient in a device's memory, by addresses; otherwise as [`Gradient`](super::Gradient).
#[derive(Clone, Copy, Debug)]
pub enum DeviceGradient<'a> {
    /// An f32 per element.
    F32(u64),
    /// A bfloat16 per element.
    Bf16(u64),
    /// A binary16 per element.
    F16(u64),
    /// Values of few elements.
    Sparse {
        /// Elements per chunk; the last chunk may have fewer.
        chunk_elements: usize,
        /// ⌈elements / `chunk_elements`⌉ chunks, in order.
        chunks: &'a [DeviceSparseChunk],
    },
    /// 8-bit blocks.
    Int8 {
        /// The values, an i8 per element.
        values: u64,
        /// The scales, an f32 per started block.
        scales: u64,
        /// Elements per block.
        block: usize,
    },
}

/// The elements of one chunk that a sparse gradient has. Indices are strictly ascending and within the chunk. The host cannot check that
/// here: other indices are left out, and no memory but the range is written.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSparseChunk {
    /// `entries` i32.
    pub indices: u64,
    /// `entries` binary16.
    pub values: u64,
    /// Number of entries.
    pub entries: usize,
}

/// A step and its gradient. A skipped step's gradient is not read.
#[derive(Clone, Copy, Debug)]
pub struct DeviceGradientStep<'a> {
    /// The use of the gradient.
    pub step: Step,
    /// The gradient.
    pub gradient: DeviceGradient<'a>,
}

/// Why steps are not applied on a device.
#[derive(Clone, Debug, PartialEq)]
pub enum DeviceReplayError {
    /// Steps, lengths or values do not fit. Nothing was changed.
    Replay(ReplayError),
    /// An address is 0, or no multiple of its elements' size. Nothing was changed.
    Address {
        /// The value that the address belongs to.
        what: &'static str,
        /// The address.
        address: u64,
        /// The required alignment, in bytes.
        multiple: u64,
    },
    /// The device, its driver or its compiler failed. The state may be changed in part, and is undefined.
    Cuda(CudaError),
}

impl fmt::Display for DeviceReplayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Replay(why) => why.fmt(f),
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

impl std::error::Error for DeviceReplayError {}

impl From<ReplayError> for DeviceReplayError {
    fn from(why: ReplayError) -> Self {
        Self::Replay(why)
    }
}

impl From<CudaError> for DeviceReplayError {
    fn from(why: CudaError) -> Self {
        Self::Cuda(why)
    }
}

// SAFETY: `repr(C)` with the fields of `Step` in replay.cu, plain numbers without padding.
unsafe impl DeviceRepr for StepArgs {}

impl Device {
    /// Applies `steps`, in order, to a range in this device's memory, and writes the half copy, as [`replay`](super::replay) does, bit for
    /// bit. The work is put on `stream` (a `cudaStream_t`; torch: `torch.cuda.current_stream().cuda_stream`) and may not be done when this
    /// returns. An error of the work itself is returned by the next call that waits for the stream.
    ///
    /// Reads and writes the state once: 24 bytes per element, the gradients', and the half copy's. Not for a stream that is
    /// captured into a graph. The first call on a device compiles, which takes some hundred milliseconds.
    ///
    /// # Errors
    /// [`DeviceReplayError`].
    ///
    /// # Safety
    /// Every address is of memory that this device can reach, as long as its description here says; the state and the half copy overlap no
    /// other named memory. Until the stream has done the work: the memory lives, no other code writes it, and none reads the state.
    /// `stream` is 0 or a stream of this device's primary context, and lives.
    pub unsafe fn replay_at(
        &self,
        state: &DeviceState,
        steps: &[DeviceGradientStep<'_>],
        stream: u64,
    ) -> Result<(), DeviceReplayError> {
        let steps = checked(state, steps)?;
        let _entered = self.enter()?;
        // SAFETY: the caller promises that the stream is one of this device and lives until the work is done. What is
        // allocated on it here is freed in its order, before this returns.
        let stream = unsafe { self.borrow_stream(stream) };
        // SAFETY: the caller's promises are the ones that are asked for.
        unsafe { self.launch(state, &steps, &stream) }
    }

    /// # Safety
    /// As [`Self::replay_at`]; what `checked` checks has been checked.
    unsafe fn launch(
        &self,
        state: &DeviceState,
        steps: &[(Factors, DeviceGradient<'_>)],
        stream: &Arc<CudaStream>,
    ) -> Result<(), DeviceReplayError> {
        let offsets = self.function(SOURCE, "offsets")?;
        let wide = self.function(SOURCE, "replay_wide")?;
        let narrow = self.function(SOURCE, "replay_narrow")?;
        let multiprocessors = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = self.context().attribute(multiprocessors);
        let multiprocessors = multiprocessors.map_err(CudaError::while_("counting multiprocessors"))?;
        let blocks_max = usize::try_from(multiprocessors).unwrap_or(1).max(1) * BLOCKS_PER_MULTIPROCESSOR;

        let sparse = sparse_count(steps);
        let tiles_max = parts(state.elements, steps).map(Part::tiles).max().unwrap_or(0);
        let entries = if sparse == 0 { 0 } else { sparse * (tiles_max + 1) };
        let tables = (entries > 0).then(|| stream.alloc_zeros::<u32>(entries)).transpose();
        let tables = tables.map_err(CudaError::while_("allocating tables of sparse gradients"))?;
        let tables_address = tables.as_ref().map_or(0, |tables| tables.device_ptr(stream).0);
        let count = narrow32(steps.len());
        for part in parts(state.elements, steps) {
            let mut table = tables_address;
            let mut args = Vec::with_capacity(steps.len());
            for step in steps {
                args.push(step_args(step, part, table));
                if matches!(step.1, DeviceGradient::Sparse { .. }) {
                    table += 4 * (part.tiles() as u64 + 1);
                }
            }
            // Without steps the half copy still has to be written; an empty buffer cannot be allocated.
            let on_device = (!args.is_empty()).then(|| stream.clone_htod(&args)).transpose();
            let on_device = on_device.map_err(CudaError::while_("copying steps to the device"))?;
            let steps_address = on_device.as_ref().map_or(0, |steps| steps.device_ptr(stream).0);
            let elements = narrow32(part.elements);
            if sparse > 0 {
                let config = LaunchConfig {
                    grid_dim: (narrow32(part.tiles() + 1).div_ceil(THREADS), count, 1),
                    block_dim: (THREADS, 1, 1),
                    shared_mem_bytes: 0,
                };
                let mut launch = stream.launch_builder(&offsets);
                launch.arg(&steps_address).arg(&elements);
                // SAFETY: the arguments are those of `offsets` in replay.cu. It reads `count` steps, which the buffer has, and
                // the caller's indices, and writes each sparse step's table, `tiles + 1` entries, within `tables`: `sparse`
                // of them end at or before its end, since no part has more tiles than `tiles_max`.
                let launched = unsafe { launch.launch(config) };
                launched.map_err(CudaError::while_("launching the search of sparse gradients"))?;
            }
            let begin = part.begin as u64;
            let [weights, exp_avg, exp_avg_sq] =
                [state.weights, state.exp_avg, state.exp_avg_sq].map(|address| address + begin * 4);
            let (copy, copy_kind) = (state.half.address() + begin * 2, state.half.kind());
            let function = if is_wide(state, part, &args) { &wide } else { &narrow };
            let mut launch = stream.launch_builder(function);
            launch.arg(&weights).arg(&exp_avg).arg(&exp_avg_sq).arg(&copy).arg(&copy_kind);
            launch.arg(&steps_address).arg(&count).arg(&elements);
            let config = LaunchConfig {
                grid_dim: (narrow32(part.tiles().min(blocks_max)), 1, 1),
                block_dim: (THREADS, 1, 1),
                shared_mem_bytes: 0,
            };
            // SAFETY: the arguments are those of both kernels in replay.cu. They read and write `elements` elements from the
            // part's first on, which the caller says are there, and read `count` steps and their tables, which the buffers
            // have; the wide one is taken only where every address allows loads of four.
            let launched = unsafe { launch.launch(config) };
            launched.map_err(CudaError::while_("launching the replay"))?;
        }
        Ok(())
    }
}

/// Checks that steps and addresses fit each other. Returns the steps that are not skipped, with their factors.
fn checked<'a>(
    state: &DeviceState,
    steps: &[DeviceGradientStep<'a>],
) -> Result<Vec<(Factors, DeviceGradient<'a>)>, DeviceReplayError> {
    let factors = applied(steps.iter().map(|step| &step.step))?;
    let there = |what, address: u64, multiple| {
        let fits = state.elements == 0 || (address != 0 && address.is_multiple_of(multiple));
        if fits { Ok(()) } else { Err(DeviceReplayError::Address { what, address, multiple }) }
    };
    there("the weights", state.weights, 4)?;
    there("exp_avg", state.exp_avg, 4)?;
    there("exp_avg_sq", state.exp_avg_sq, 4)?;
    if !matches!(state.half, DeviceHalf::None) {
        there("the half copy", state.half.address(), 2)?;
    }
    for (at, step) in steps.iter().enumerate().filter(|(_, step)| !step.step.skipped) {
        match step.gradient {
            DeviceGradient::F32(values) => there("a gradient", values, 4)?,
            DeviceGradient::Bf16(values) | DeviceGradient::F16(values) => there("a gradient", values, 2)?,
            DeviceGradient::Int8 { values, scales, block } => {
                unit(at, "block", block, usize::MAX)?;
                there("a gradient", values, 1)?;
                there("a gradient's scales", scales, 4)?;
            }
            DeviceGradient::Sparse { chunk_elements, chunks } => {
                unit(at, "chunk", chunk_elements, CHUNK_ELEMENTS_MAX)?;
                length(at, "list of chunks", chunks.len(), state.elements.div_ceil(chunk_elements))?;
                for (number, chunk) in chunks.iter().enumerate() {
                    let most = chunk_elements.min(state.elements - number * chunk_elements);
                    if chunk.entries > most {
                        length(at, "entries of a chunk", chunk.entries, most)?;
                    }
                    if chunk.entries > 0 {
                        there("a gradient's indices", chunk.indices, 4)?;
                        there("a gradient's values", chunk.values, 2)?;
                    }
                }
            }
        }
    }
    let gradients = steps.iter().filter(|step| !step.step.skipped).map(|step| step.gradient);
    Ok(factors.into_iter().zip(gradients).collect())
}

/// Converts counts within a launch, which `parts` and `STEPS_MAX` keep far below 2³².
fn narrow32(count: usize) -> u32 {
    u32::try_from(count).expect("a launch's counts have 32 bits")
}
