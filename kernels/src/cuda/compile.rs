//! Compiles CUDA C++ text to a device's machine code, by NVRTC, at run time.
//!
//! Owns: the compiler's options, which fix the meaning of the arithmetic, and its errors; unsafe code is allowed here. Does not own: the
//! sources (each kernel's folder has its own), or loading the machine code (`device`).
//!
//! The result is machine code for one architecture, not PTX: a driver older than the compiler could not read its PTX.

use super::CudaError;
use cudarc::nvrtc::{result, sys};
use std::ffi::CString;
use std::sync::OnceLock;

/// Options for the arithmetic of the host: no product and sum is contracted into one rounding, division and square root are rounded
/// correctly, subnormals are kept.
const OPTIONS: [&str; 5] =
    ["--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", "--std=c++17"];

/// A source of device code. The name is a key for caches and identifies the source in errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source {
    /// The name, unique within this crate.
    pub name: &'static str,
    /// The text: CUDA C++ that needs no header.
    pub text: &'static str,
}

/// Most bytes of machine code, or of the compiler's log, that are taken from NVRTC: far more than a kernel has.
const OUTPUT_BYTES_MAX: usize = 64 << 20;

/// Returns whether NVRTC's library can be loaded here, and is NVRTC. A library of that name without its functions does not count (some
/// packages have one to link against). Checked once per process.
#[must_use]
pub fn compiler_is_here() -> bool {
    static HERE: OnceLock<bool> = OnceLock::new();
    *HERE.get_or_init(|| {
        // SAFETY: loading NVRTC runs its initialisers, which have no preconditions.
        let present = unsafe { sys::is_culib_present() };
        present && {
            // SAFETY: as above; it was found a moment ago.
            let library = unsafe { sys::culib() };
            // SAFETY: the symbol is looked for, and not used.
            unsafe { library.get::<*const ()>(b"nvrtcVersion\0") }.is_ok()
        }
    })
}

/// Returns machine code (a cubin) of `source` for an architecture such as `sm_90`. Takes some hundred milliseconds.
///
/// # Errors
/// [`CudaError::NoCompiler`] without NVRTC; [`CudaError::Compile`] with the compiler's log if it refuses the source or does not know the
/// architecture.
pub fn compile(source: Source, arch: &str) -> Result<Vec<u8>, CudaError> {
    if !compiler_is_here() {
        return Err(CudaError::NoCompiler);
    }
    let refused = |log: String| CudaError::Compile { module: source.name, arch: arch.to_owned(), log };
    let text = CString::new(source.text).map_err(|why| refused(why.to_string()))?;
    let name = CString::new(format!("{}.cu", source.name)).map_err(|why| refused(why.to_string()))?;
    let arch_option = format!("--gpu-architecture={arch}");
    if arch_option.contains('\0') {
        return Err(refused("the architecture has a zero byte".to_owned()));
    }
    let program = result::create_program(&text, Some(&name)).map_err(|why| refused(why.to_string()))?;
    let program = Program(program);
    let options: Vec<&str> = OPTIONS.into_iter().chain([arch_option.as_str()]).collect();
    // SAFETY: the program was created above and is destroyed only when `program` goes.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    compiled.map_err(|why| refused(format!("{why}: {}", program.log())))?;
    program.machine_code().map_err(refused)
}

/// A program of NVRTC, destroyed with its owner.
struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        let mut bytes = 0usize;
        // SAFETY: the program lives as long as `self`, and the size is written to a variable of ours.
        let sized = unsafe { sys::nvrtcGetProgramLogSize(self.0, &raw mut bytes) };
        if sized.result().is_err() || bytes > OUTPUT_BYTES_MAX {
            return String::new();
        }
        let mut log = vec![0u8; bytes];
        // SAFETY: the buffer has the bytes that NVRTC asked for.
        let copied = unsafe { sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) };
        let log =
            if copied.result().is_ok() { log.split(|&byte| byte == 0).next().unwrap_or(&[]) } else { &[] };
        String::from_utf8_lossy(log).trim().to_owned()
    }

    fn machine_code(&self) -> Result<Vec<u8>, String> {
        let mut bytes = 0usize;
        // SAFETY: the program lives as long as `self`, and the size is written to a variable of ours.
        let sized = unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut bytes) };
        sized.result().map_err(|why| why.to_string())?;
        if bytes > OUTPUT_BYTES_MAX {
            return Err(format!("its machine code has {bytes} bytes, more than {OUTPUT_BYTES_MAX}"));
        }
        let mut code = vec![0u8; bytes];
        // SAFETY: the buffer has the bytes that NVRTC asked for.
        let copied = unsafe { sys::nvrtcGetCUBIN(self.0, code.as_mut_ptr().cast()) };
        copied.result().map_err(|why| why.to_string())?;
        Ok(code)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by NVRTC and destroyed here only.
        let destroyed = unsafe { result::destroy_program(self.0) };
        debug_assert!(destroyed.is_ok(), "NVRTC destroys what it created");
    }
}

/// Compiles `source` for the oldest and the newest supported architecture, if NVRTC is found: for the tests of every kernel.
///
/// # Panics
/// When it does not compile, or when NVRTC is missing and `TIDEMARK_REQUIRED=1` asks for it.
#[cfg(test)]
pub(crate) fn assert_compiles(source: Source) {
    if !compiler_is_here() {
        assert!(
            std::env::var_os("TIDEMARK_REQUIRED").is_none_or(|set| set != "1"),
            "{}",
            CudaError::NoCompiler
        );
        eprintln!("{} is not compiled: {}", source.name, CudaError::NoCompiler);
        return;
    }
    for arch in ["sm_80", "sm_90"] {
        let code = compile(source, arch).unwrap_or_else(|why| panic!("{why}"));
        assert!(code.starts_with(b"\x7fELF"), "machine code for {arch} is an ELF file");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EMPTY: Source = Source { name: "empty", text: "extern \"C\" __global__ void empty() {}" };

    #[test]
    fn a_source_compiles_where_the_compiler_is() {
        assert_compiles(EMPTY);
    }

    #[test]
    fn a_refused_source_comes_with_the_compilers_words() {
        if !compiler_is_here() {
            assert_eq!(compile(EMPTY, "sm_90"), Err(CudaError::NoCompiler));
            return;
        }
        let wrong = Source { name: "wrong", text: "extern \"C\" __global__ void wrong() { undeclared(); }" };
        let why = compile(wrong, "sm_90").expect_err("it calls what is not there").to_string();
        assert!(why.contains("undeclared"), "{why}");
        assert!(compile(EMPTY, "sm_1").is_err());
        assert!(compile(EMPTY, "sm_90\0").is_err());
        assert!(compile(Source { name: "zero", text: "\0" }, "sm_90").is_err());
    }
}
