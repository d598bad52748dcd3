//! Code shared by all device code: the device, its compiler, its errors.
//!
//! Owns: opening a device by its ordinal, compiling sources for it, and errors for missing parts. Does not own: any kernel (they lie in
//! `<topic>/cuda/`). The cargo feature `cuda` adds this module; libraries are found at run time, and without them every call returns a
//! [`CudaError`].

pub(crate) mod compile;
mod device;
mod error;
mod scratch;

pub use compile::{Source, compile, compiler_is_here};
pub use device::{Device, Entered, devices, driver_is_here};
pub use error::CudaError;
