//! Arithmetic over large buffers: CRC-64/NVME of whole files at memory speed; lossless encoding of chunks; compression of gradients; replay
//! of optimizer steps.
//!
//! Owns: the computations over bytes, a plain reference for their meaning, and fast back ends that agree with it bit for bit. Does not own:
//! checksums as values (the protocol crate has their text form and how two of them combine), files, or the reaction to a checksum that
//! differs. Depends on no other crate of the workspace.
//!
//! No code here allocates by a length that the caller did not pass. Errors: bytes that are no encoded chunk, gradients that are not finite,
//! optimizer steps that do not fit their state, and a missing device; each has an error type of its own.

mod checksum;
pub mod compress;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod encoding;
pub mod replay;

/// The 16-bit floats of gradients and of weight copies.
pub use half::{bf16, f16};

pub use checksum::backend::Backend;
pub use checksum::chunks::{THREADS_MAX, hash_chunks};
pub use checksum::reference;
pub use checksum::{Crc64Digest, crc64};
