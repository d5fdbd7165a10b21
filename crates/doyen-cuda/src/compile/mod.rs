//! NVRTC: from a module's source to a cubin. The library is loaded when the first module is compiled.
//!
//! * [`Compiler`]: NVRTC with its version
//! * [`Cache`]: cubins on disk
//! * [`Packaged`]: kernels compiled when a release was made
//! * [`Resources`]: registers and spills of a kernel, from ptxas' messages

mod cache;
mod packaged;
mod resources;

pub use cache::{Cache, Key};
pub use packaged::{Found, Image, PTX_ARCHS, Packaged};
pub use resources::Resources;

use crate::{
    error::CudaError,
    module::{Arch, HEADER, Module},
};
use cudarc::nvrtc::{result, sys};
use std::{
    ffi::{CStr, CString, c_char},
    ptr,
};

/// NVRTC of at least the oldest supported version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compiler {
    version: (i32, i32),
}

/// A compiled module.
#[derive(Debug, Clone)]
pub struct Compiled {
    /// Machine code, as the driver loads it.
    pub cubin: Vec<u8>,
    /// What every kernel takes.
    pub resources: Vec<Resources>,
}

/// The oldest NVRTC that kernels are compiled with in CI.
const OLDEST: (i32, i32) = (13, 0);

impl Compiler {
    /// Loads NVRTC.
    ///
    /// # Errors
    /// When it is not there or too old.
    pub fn load() -> Result<Self, CudaError> {
        // SAFETY: loading a library by its well-known name runs its initialisers, which NVRTC allows at any time.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoNvrtc);
        }
        let (mut major, mut minor) = (0, 0);
        // SAFETY: two integers to write to.
        let status = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
        if status != sys::nvrtcResult::NVRTC_SUCCESS || (major, minor) < OLDEST {
            return Err(CudaError::NvrtcVersion { major, minor });
        }
        Ok(Self { version: (major, minor) })
    }

    /// Version of the library.
    pub const fn version(&self) -> (i32, i32) {
        self.version
    }

    /// Compiles a module.
    ///
    /// # Errors
    /// With NVRTC's messages.
    pub fn compile(&self, module: Module, arch: Arch) -> Result<Compiled, CudaError> {
        let (program, log) = Self::program(module, &arch.to_string())?;
        let cubin =
            program.cubin().map_err(|reason| compile_error(module, &arch.to_string(), reason, &log))?;
        Ok(Compiled { cubin, resources: resources::parse(&log) })
    }

    /// Compiles a module to PTX, for the cards from `arch` on.
    ///
    /// # Errors
    /// With NVRTC's messages.
    pub fn ptx(&self, module: Module, arch: Arch) -> Result<Vec<u8>, CudaError> {
        let target = format!("compute_{}{}", arch.major, arch.minor);
        let (program, log) = Self::program(module, &target)?;
        program.ptx().map_err(|reason| compile_error(module, &target, reason, &log))
    }

    /// A compiled program with its messages.
    fn program(module: Module, target: &str) -> Result<(Program, String), CudaError> {
        let program = Program::new(module).map_err(|reason| compile_error(module, target, reason, ""))?;
        let mut options = vec![
            format!("--gpu-architecture={target}"),
            "--std=c++17".to_owned(),
            "--ptxas-options=-v".to_owned(),
        ];
        options.extend(module.defines().iter().map(|d| format!("--define-macro={d}")));
        // SAFETY: the program is alive.
        let outcome = unsafe { result::compile_program(program.0, &options) };
        let log = program.log();
        match outcome {
            Ok(()) => Ok((program, log)),
            Err(e) => Err(compile_error(module, target, format!("{:?}", e.0), &log)),
        }
    }
}

fn compile_error(module: Module, target: &str, reason: String, log: &str) -> CudaError {
    CudaError::Compile { module: module.to_string(), arch: target.to_owned(), reason, log: log.to_owned() }
}

/// An NVRTC program, destroyed with it.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(module: Module) -> Result<Self, String> {
        let text = |s: &str| CString::new(s).map_err(|e| e.to_string());
        let (file, source) = module.source();
        let (file, source) = (text(file)?, text(source)?);
        let (name, header) = (text(HEADER.0)?, text(HEADER.1)?);
        let (headers, names) = ([header.as_ptr()], [name.as_ptr()]);
        let mut program = ptr::null_mut();
        // SAFETY: all strings are zero-terminated and outlive the call, which copies them; there is one header.
        let status = unsafe {
            sys::nvrtcCreateProgram(
                &raw mut program,
                source.as_ptr(),
                file.as_ptr(),
                1,
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        check(status)?;
        Ok(Self(program))
    }

    fn log(&self) -> String {
        // SAFETY: the program is alive.
        let Ok(log) = (unsafe { result::get_program_log(self.0) }) else { return String::new() };
        let bytes: Vec<u8> = log.iter().take_while(|&&c| c != 0).map(|&c| c.cast_unsigned()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn cubin(&self) -> Result<Vec<u8>, String> {
        let mut len = 0usize;
        // SAFETY: the program is alive and compiled; `len` is written.
        check(unsafe { sys::nvrtcGetCUBINSize(self.0, &raw mut len) })?;
        let mut cubin = vec![0u8; len];
        // SAFETY: the buffer has the length that NVRTC asks for.
        check(unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast::<c_char>()) })?;
        Ok(cubin)
    }

    /// Text, without the zero that ends it.
    fn ptx(&self) -> Result<Vec<u8>, String> {
        let mut len = 0usize;
        // SAFETY: the program is alive and compiled; `len` is written.
        check(unsafe { sys::nvrtcGetPTXSize(self.0, &raw mut len) })?;
        let mut ptx = vec![0u8; len];
        // SAFETY: the buffer has the length that NVRTC asks for.
        check(unsafe { sys::nvrtcGetPTX(self.0, ptx.as_mut_ptr().cast::<c_char>()) })?;
        while ptx.last() == Some(&0) {
            ptx.pop();
        }
        Ok(ptx)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: the program is alive and nobody uses it any more; a failure leaks it, which harms nobody.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

fn check(status: sys::nvrtcResult) -> Result<(), String> {
    if status == sys::nvrtcResult::NVRTC_SUCCESS {
        return Ok(());
    }
    // SAFETY: NVRTC gives a static zero-terminated string for every status.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(status)) };
    Err(text.to_string_lossy().into_owned())
}
