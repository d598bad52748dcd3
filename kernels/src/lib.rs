//! Arithmetic over large buffers: CRC-64/NVME, whole files at memory speed; chunks made smaller, and themselves again;
//! gradients made small; optimizer steps applied again.
//!
//! Owns: what is computed over bytes, a plain reference for its meaning, and fast back ends that agree with
//! it bit for bit. Does not own: checksums as values (the protocol crate has their text form and how two of
//! them combine), files, or what is done when a checksum differs. Depends on no other crate of the
//! workspace.
//!
//! Nothing here allocates by a length that a caller did not hand in. What fails is reading an encoded chunk that is none,
//! gradients that are not finite, optimizer steps that do not fit their state, and a device that is not there; each with an error of its own.

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
