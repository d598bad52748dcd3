//! Why device code does not run, in words that say what to do.
//!
//! Owns: the error of everything that needs a device or its compiler. Does not own: wrong lengths and values, which each kernel's own error
//! names before the device is used.

use cudarc::driver::DriverError;
use std::fmt;

/// A device, its driver or its compiler failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CudaError {
    /// The driver's library (libcuda) cannot be loaded.
    NoDriver,
    /// The run-time compiler's library (libnvrtc) cannot be loaded.
    NoCompiler,
    /// The driver has no device of this ordinal.
    NoDevice {
        /// The requested device, counted from 0.
        ordinal: usize,
        /// The number of devices that the driver sees.
        devices: usize,
    },
    /// The compiler refused a module.
    Compile {
        /// The module's name.
        module: &'static str,
        /// The architecture for which it was compiled, such as `sm_90`.
        arch: String,
        /// The compiler's log.
        log: String,
    },
    /// A call to the driver failed.
    Driver {
        /// The step that failed, in words.
        doing: &'static str,
        /// The driver's code.
        source: DriverError,
    },
}

impl CudaError {
    /// Returns a function that turns a failed driver call into an error with its purpose: `.map_err(CudaError::while_("…"))`.
    pub(crate) fn while_(doing: &'static str) -> impl Fn(DriverError) -> Self {
        move |source| Self::Driver { doing, source }
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDriver => f.write_str(
                "the CUDA driver's library, libcuda.so.1, is not found: install NVIDIA's driver, or use the CPU back end",
            ),
            Self::NoCompiler => f.write_str(
                "CUDA's run-time compiler, libnvrtc.so.12 or .13, is not found: install it (it is in the CUDA toolkit and in \
                 the package nvidia-cuda-nvrtc), put its folder on LD_LIBRARY_PATH, or use the CPU back end",
            ),
            Self::NoDevice { ordinal, devices } => {
                write!(f, "there is no CUDA device {ordinal}: the driver sees {devices} (CUDA_VISIBLE_DEVICES hides some)")
            }
            Self::Compile { module, arch, log } => write!(f, "NVRTC does not compile {module} for {arch}: {log}"),
            Self::Driver { doing, source } => write!(f, "CUDA fails while {doing}: {source}"),
        }
    }
}

impl std::error::Error for CudaError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Driver { source, .. } => Some(source),
            _ => None,
        }
    }
}
