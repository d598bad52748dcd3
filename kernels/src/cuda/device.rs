//! A device of this machine: its primary context, a stream that yields to training, and the modules compiled for it.
//!
//! Owns: opening a device once per process, and the cache of modules per device; unsafe code is allowed here. Does not own:
//! any kernel or launch.
//!
//! The context is the primary one, which torch uses too: each can use the other's memory and streams.

use super::compile::{Source, compile};
use super::error::CudaError;
use super::scratch::Scratch;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, result, sys};
use cudarc::nvrtc::Ptx;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Returns whether the driver's library can be loaded here, and has a driver's functions. Checked once per process.
#[must_use]
pub fn driver_is_here() -> bool {
    static HERE: OnceLock<bool> = OnceLock::new();
    *HERE.get_or_init(|| {
        // SAFETY: loading the driver's library runs its initialisers, which have no preconditions.
        let present = unsafe { sys::is_culib_present() };
        present && {
            // SAFETY: as above; it was found a moment ago.
            let library = unsafe { sys::culib() };
            // SAFETY: the symbol is looked for, and not used.
            unsafe { library.get::<*const ()>(b"cuDevicePrimaryCtxRetain\0") }.is_ok()
        }
    })
}

/// Returns the number of devices that the driver sees; 0 without a driver.
#[must_use]
pub fn devices() -> usize {
    if !driver_is_here() {
        return 0;
    }
    CudaContext::device_count().ok().and_then(|count| usize::try_from(count).ok()).unwrap_or(0)
}

/// A CUDA device. There is one value per ordinal and process, held until the process ends.
pub struct Device {
    context: Arc<CudaContext>,
    background: Arc<CudaStream>,
    arch: String,
    name: String,
    modules: Mutex<HashMap<&'static str, Arc<CudaModule>>>,
    tables: Mutex<Scratch>,
}

impl Device {
    /// Opens the device of this ordinal, counted from 0 as torch counts. The first call per device waits once for all present work of the
    /// device, because it makes a stream.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`], [`CudaError::NoDevice`], or the driver's own error.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        static OPENED: OnceLock<Mutex<HashMap<usize, Arc<Device>>>> = OnceLock::new();
        if !driver_is_here() {
            return Err(CudaError::NoDriver);
        }
        let mut opened = OPENED.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = opened.get(&ordinal) {
            return Ok(Arc::clone(device));
        }
        let count = match CudaContext::device_count() {
            Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => 0,
            counted => counted.map_err(CudaError::while_("counting devices"))?,
        };
        let devices = usize::try_from(count).unwrap_or(0);
        if ordinal >= devices {
            return Err(CudaError::NoDevice { ordinal, devices });
        }
        let caller = Entered::remember();
        let device = Self::make(ordinal);
        drop(caller);
        let device = Arc::new(device?);
        opened.insert(ordinal, Arc::clone(&device));
        Ok(device)
    }

    fn make(ordinal: usize) -> Result<Self, CudaError> {
        let context =
            CudaContext::new(ordinal).map_err(CudaError::while_("opening the device's primary context"))?;
        let (major, minor) =
            context.compute_capability().map_err(CudaError::while_("asking for the compute capability"))?;
        let name = context.name().map_err(CudaError::while_("asking for the device's name"))?;
        let (least, _) = result::stream::get_priority_range()
            .map_err(CudaError::while_("asking for stream priorities"))?;
        let background = context
            .new_stream_with_priority(least)
            .map_err(CudaError::while_("making a low-priority stream"))?;
        let arch = format!("sm_{major}{minor}");
        Ok(Self { context, background, arch, name, modules: Mutex::default(), tables: Mutex::default() })
    }

    /// Returns the context, for allocations and copies. Calls that make it current leave it so: hold [`Self::enter`]'s guard around them on
    /// a thread that other CUDA code shares.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Returns a stream of the lowest priority that does not wait for the default stream: for work that yields to training.
    #[must_use]
    pub fn background(&self) -> &Arc<CudaStream> {
        &self.background
    }

    /// Returns the architecture for which modules are compiled, such as `sm_90`.
    #[must_use]
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// Returns the device's name, as the driver has it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the memory that [`Self::scratch`] lends.
    pub(super) fn tables(&self) -> &Mutex<Scratch> {
        &self.tables
    }

    /// Makes the context current on this thread; dropping the guard restores the one before.
    ///
    /// # Errors
    /// The driver's error.
    pub fn enter(&self) -> Result<Entered, CudaError> {
        let entered = Entered::remember();
        self.context.bind_to_thread().map_err(CudaError::while_("making the device current"))?;
        Ok(entered)
    }

    /// Borrows another owner's stream (torch: `torch.cuda.current_stream().cuda_stream`; 0 is the default stream), for launches in its
    /// order. Dropping the result does not destroy the stream.
    ///
    /// # Safety
    /// `stream` is 0 or a `cudaStream_t` of this device that lives until the work put on it, and every buffer allocated on
    /// the result, is gone.
    #[must_use]
    pub unsafe fn borrow_stream(&self, stream: u64) -> Arc<CudaStream> {
        let stream = std::ptr::with_exposed_provenance_mut(usize::try_from(stream).unwrap_or(0));
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { self.context.wrap_borrowed_stream(stream) }
    }

    /// Returns a function of `source`, which is compiled at its first use on this device and kept until the process ends.
    ///
    /// # Errors
    /// [`CudaError::NoCompiler`], [`CudaError::Compile`], or the driver's error if it does not load the module or finds no such function in
    /// it.
    pub fn function(&self, source: Source, function: &str) -> Result<CudaFunction, CudaError> {
        let _entered = self.enter()?;
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        let module = match modules.get(source.name) {
            Some(module) => Arc::clone(module),
            None => {
                let code = compile(source, &self.arch)?;
                let loaded = self.context.load_module(Ptx::from_binary(code));
                let module = loaded.map_err(CudaError::while_("loading a compiled module"))?;
                modules.insert(source.name, Arc::clone(&module));
                module
            }
        };
        module.load_function(function).map_err(CudaError::while_("looking a kernel up"))
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("name", &self.name).field("arch", &self.arch).finish_non_exhaustive()
    }
}

/// The context that was current on this thread, restored when this is dropped. torch reads its current device from there.
#[derive(Debug)]
pub struct Entered {
    /// A raw pointer, so that this value cannot leave its thread.
    before: Option<sys::CUcontext>,
}

impl Entered {
    fn remember() -> Self {
        Self { before: result::ctx::get_current().ok().flatten() }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current when this was made; its owner keeps primary contexts for the life of the process.
            let _ = unsafe { result::ctx::set_current(before) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_opens_or_the_error_names_what_is_missing() {
        match Device::open(0) {
            Ok(device) => {
                eprintln!("device 0: {} ({})", device.name(), device.arch());
                let again = Device::open(0).expect("it opened a moment ago");
                assert!(Arc::ptr_eq(&device, &again));
            }
            Err(CudaError::NoDriver) => assert!(!driver_is_here()),
            Err(why) => eprintln!("no device: {why}"),
        }
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error_and_no_panic() {
        let why = Device::open(usize::MAX).expect_err("nobody has so many");
        assert!(!why.to_string().is_empty());
        assert!(
            matches!(why, CudaError::NoDriver | CudaError::NoDevice { .. } | CudaError::Driver { .. }),
            "{why:?}"
        );
    }
}
