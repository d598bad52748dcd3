//! Sends a state of the host through a device, which applies all steps.
//!
//! Owns: the copies, in memory of this module. Does not own: the launches.

use super::super::check::checked;
use super::super::{Gradient, GradientStep, HalfCopy, State};
use super::{
    DeviceGradient, DeviceGradientStep, DeviceHalf, DeviceReplayError, DeviceSparseChunk, DeviceState,
};
use crate::cuda::{CudaError, Device};
use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DeviceRepr};
use half::slice::HalfFloatSliceExt;
use std::sync::Arc;

impl Device {
    /// Applies `steps`, in order, to a state in the host's memory, as [`replay`](crate::replay::replay) does, bit for bit. Runs on the
    /// low-priority stream, and is done when this returns.
    ///
    /// The device holds all of it at once: 12 bytes per element, the half copy, and the gradients. If the device has less memory, the
    /// caller passes one part of the range after the other.
    ///
    /// # Errors
    /// [`DeviceReplayError`]. After an error of the device the state is undefined.
    pub fn replay(&self, state: &mut State<'_>, steps: &[GradientStep<'_>]) -> Result<(), DeviceReplayError> {
        checked(state, steps)?;
        if state.weights.is_empty() {
            return Ok(());
        }
        let _entered = self.enter()?;
        let mut held = Held {
            stream: Arc::clone(self.background()),
            kept32: vec![],
            kept16: vec![],
            kept8: vec![],
            indices: vec![],
        };
        let elements = state.weights.len();
        let weights = up(&held.stream, state.weights)?;
        let exp_avg = up(&held.stream, state.exp_avg)?;
        let exp_avg_sq = up(&held.stream, state.exp_avg_sq)?;
        let half = match &state.half {
            HalfCopy::None => None,
            HalfCopy::Bf16(copy) => Some(up(&held.stream, copy.reinterpret_cast())?),
            HalfCopy::F16(copy) => Some(up(&held.stream, copy.reinterpret_cast())?),
        };
        let half_address = half.as_ref().map_or(0, |half| address(half, &held.stream));
        let on_device = DeviceState {
            weights: address(&weights, &held.stream),
            exp_avg: address(&exp_avg, &held.stream),
            exp_avg_sq: address(&exp_avg_sq, &held.stream),
            half: match &state.half {
                HalfCopy::None => DeviceHalf::None,
                HalfCopy::Bf16(_) => DeviceHalf::Bf16(half_address),
                HalfCopy::F16(_) => DeviceHalf::F16(half_address),
            },
            elements,
        };
        let steps: Vec<&GradientStep<'_>> = steps.iter().filter(|step| !step.step.skipped).collect();
        let chunks: Vec<Vec<DeviceSparseChunk>> =
            steps.iter().map(|step| held.chunks(&step.gradient)).collect::<Result<_, _>>()?;
        let mut device_steps = Vec::with_capacity(steps.len());
        for (step, chunks) in steps.into_iter().zip(&chunks) {
            let gradient = held.gradient(&step.gradient, chunks)?;
            device_steps.push(DeviceGradientStep { step: step.step, gradient });
        }
        let device_steps = super::checked(&on_device, &device_steps)?;
        // SAFETY: every address is of a buffer that this function holds until the stream is done with it, each as long as
        // the host's slice that was checked, and no two are the same.
        unsafe { self.launch(&on_device, &device_steps, &held.stream) }?;
        down(&held.stream, &weights, state.weights)?;
        down(&held.stream, &exp_avg, state.exp_avg)?;
        down(&held.stream, &exp_avg_sq, state.exp_avg_sq)?;
        match (&mut state.half, &half) {
            (HalfCopy::Bf16(copy), Some(half)) => down(&held.stream, half, copy.reinterpret_cast_mut())?,
            (HalfCopy::F16(copy), Some(half)) => down(&held.stream, half, copy.reinterpret_cast_mut())?,
            _ => {}
        }
        held.stream.synchronize().map_err(CudaError::while_("waiting for the replay"))?;
        Ok(())
    }
}

/// Buffers of gradients, until the work on them is done.
struct Held {
    stream: Arc<CudaStream>,
    kept32: Vec<CudaSlice<f32>>,
    kept16: Vec<CudaSlice<u16>>,
    kept8: Vec<CudaSlice<i8>>,
    indices: Vec<CudaSlice<i32>>,
}

impl Drop for Held {
    /// Copies from and to pinned memory of the caller may still run after the calls that began them. Waiting here ensures that none
    /// outlives this call, whichever error ended the rest.
    fn drop(&mut self) {
        let _ = self.stream.synchronize();
    }
}

impl Held {
    fn chunks(&mut self, gradient: &Gradient<'_>) -> Result<Vec<DeviceSparseChunk>, CudaError> {
        let Gradient::Sparse { chunks, .. } = gradient else { return Ok(vec![]) };
        let mut out = Vec::with_capacity(chunks.len());
        for chunk in *chunks {
            out.push(DeviceSparseChunk {
                indices: hold(&self.stream, chunk.indices, &mut self.indices)?,
                values: hold(&self.stream, chunk.values.reinterpret_cast(), &mut self.kept16)?,
                entries: chunk.indices.len(),
            });
        }
        Ok(out)
    }

    fn gradient<'a>(
        &mut self,
        gradient: &Gradient<'_>,
        chunks: &'a [DeviceSparseChunk],
    ) -> Result<DeviceGradient<'a>, CudaError> {
        Ok(match *gradient {
            Gradient::F32(values) => DeviceGradient::F32(hold(&self.stream, values, &mut self.kept32)?),
            Gradient::Bf16(values) => {
                DeviceGradient::Bf16(hold(&self.stream, values.reinterpret_cast(), &mut self.kept16)?)
            }
            Gradient::F16(values) => {
                DeviceGradient::F16(hold(&self.stream, values.reinterpret_cast(), &mut self.kept16)?)
            }
            Gradient::Sparse { chunk_elements, .. } => DeviceGradient::Sparse { chunk_elements, chunks },
            Gradient::Int8 { values, scales, block } => DeviceGradient::Int8 {
                values: hold(&self.stream, values, &mut self.kept8)?,
                scales: hold(&self.stream, scales, &mut self.kept32)?,
                block,
            },
        })
    }
}

/// Copies a slice to the device and keeps it in `kept`. Returns its address, 0 for none.
fn hold<T: DeviceRepr>(
    stream: &Arc<CudaStream>,
    from: &[T],
    kept: &mut Vec<CudaSlice<T>>,
) -> Result<u64, CudaError> {
    if from.is_empty() {
        return Ok(0);
    }
    let slice = up(stream, from)?;
    let at = address(&slice, stream);
    kept.push(slice);
    Ok(at)
}

fn up<T: DeviceRepr>(stream: &Arc<CudaStream>, from: &[T]) -> Result<CudaSlice<T>, CudaError> {
    stream.clone_htod(from).map_err(CudaError::while_("copying to the device"))
}

fn down<T: DeviceRepr>(stream: &Arc<CudaStream>, from: &CudaSlice<T>, to: &mut [T]) -> Result<(), CudaError> {
    stream.memcpy_dtoh(from, to).map_err(CudaError::while_("copying from the device"))
}

/// Returns a buffer's address. Work on the buffer is put on the stream that it was allocated on, so that nothing else needs to be ordered.
fn address<T>(slice: &CudaSlice<T>, stream: &CudaStream) -> u64 {
    slice.device_ptr(stream).0
}
