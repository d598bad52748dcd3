//! Replays optimizer steps from gradients: Adam and AdamW, one step or many in one pass over the state.
//!
//! Owns: the effect of a step on a flat range of parameters (`reference` is the meaning), and back ends that agree with it bit for bit.
//! Does not own: how gradients were compressed (`compress`), where they are kept, or which steps are due. (TierCheck, sections 3.3 and 4:
//! fused multi-step differential replay.)
//!
//! A range is any part of a flat parameter group whose elements share their hyperparameters and their step number: a tensor, a ZeRO
//! partition, an FSDP shard. Groups with other hyperparameters need calls of their own.
//!
//! Compared with torch's for-loop (`torch.optim`, `foreach=False, fused=False`), the order of operations is torch's. But torch's CPU
//! kernels contract some products and sums into one rounding, and these back ends never do; and one division per step is a multiplication
//! here ([`Factors::correction`]). The tests hold N steps to N·[`TORCH_ULPS_PER_STEP`].

mod check;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
pub mod reference;
mod step;
#[cfg(test)]
mod tests;
mod types;

pub use cpu::{CpuBackend, THREADS_MAX, replay};
pub use error::ReplayError;
pub use step::{Decay, Factors, Step};
pub use types::{CHUNK_ELEMENTS_MAX, Gradient, GradientStep, HalfCopy, SparseChunk, State};

/// Most steps in one call. TierCheck's batches have 5, a base interval some 100. More steps would only make the tables of the device back
/// end large, and a caller can call again.
pub const STEPS_MAX: usize = 4096;

/// How far a weight or a moment may be from torch's for-loop, per step: in units of the last place (f32) of the largest value that the
/// element, or a value added to it, had in these steps.
pub const TORCH_ULPS_PER_STEP: u32 = 1;
