//! A card: context, stream, compiled modules, memory and launches. The only place that talks to the driver.
//!
//! Everything runs in order on one stream.

mod capture;
mod memory;
pub mod survey;

pub(crate) use capture::Capture;
pub(crate) use memory::{Addr, Buffer, Pinned, Uploads};

use crate::{
    compile::{Cache, Compiler, Image, Key, Packaged},
    error::CudaError,
    module::{Arch, Module},
};
use cudarc::{
    driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError, result, sys},
    nvrtc::Ptx,
};
use std::{
    collections::HashMap,
    ffi::c_void,
    path::PathBuf,
    ptr,
    sync::{Arc, Mutex, PoisonError},
};

/// A card in use.
pub(crate) struct Gpu {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    name: String,
    arch: Arch,
    driver: i32,
    /// Dynamic shared memory that a block may have at most.
    shared: usize,
    multiprocessors: usize,
    cache: Option<Cache>,
    packaged: Option<Packaged>,
    modules: Mutex<HashMap<Module, (Arc<CudaModule>, Origin)>>,
}

/// Where a module came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Machine code of the release.
    MachineCode,
    /// PTX of the release, compiled by the driver.
    Ptx,
    /// NVRTC, now or at an earlier time.
    Nvrtc,
}

/// A structure that a kernel takes as its only parameter.
///
/// # Safety
/// The type must have the layout of the structure that the kernels given it declare, and addresses in it must be [`Addr`]s,
/// with the extents that the kernel derives from the other fields inside their buffers.
pub(crate) unsafe trait Params: Copy {}

/// Blocks and threads of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: [usize; 3],
    pub(crate) threads: [u32; 2],
    /// Dynamic shared memory of a block.
    pub(crate) shared: usize,
    /// Whether the blocks along the third axis form a cluster.
    pub(crate) cluster: bool,
}

impl Grid {
    pub(crate) const fn new(blocks: [usize; 3], threads: u32) -> Self {
        Self { blocks, threads: [threads, 1], shared: 0, cluster: false }
    }

    /// Enough blocks of 256 threads to keep any card busy, for kernels that stride over `n` elements.
    pub(crate) fn over(n: usize) -> Self {
        Self::new([n.div_ceil(256).min(8192), 1, 1], 256)
    }

    pub(crate) const fn shared(self, bytes: usize) -> Self {
        Self { shared: bytes, ..self }
    }

    pub(crate) const fn cluster(self) -> Self {
        Self { cluster: true, ..self }
    }
}

/// A kernel of a loaded module.
#[derive(Debug, Clone)]
pub(crate) struct Function(CudaFunction);

/// What the driver said, in the error of what was tried.
pub(crate) fn failed(what: impl Into<String>) -> impl FnOnce(DriverError) -> CudaError {
    move |e| {
        if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return CudaError::Memory { what: what.into() };
        }
        CudaError::Driver { what: what.into(), reason: explain(e) }
    }
}

fn explain(e: DriverError) -> String {
    match (e.error_name(), e.error_string()) {
        (Ok(name), Ok(text)) => format!("{} ({})", text.to_string_lossy(), name.to_string_lossy()),
        _ => format!("{e:?}"),
    }
}

impl Gpu {
    /// Opens a card.
    ///
    /// # Errors
    /// Says what is missing: driver, card, capability.
    pub(crate) fn open(
        ordinal: usize,
        cache: Option<PathBuf>,
        packaged: Option<Packaged>,
    ) -> Result<Self, CudaError> {
        // SAFETY: loading the driver by its well-known name runs its initialisers, which it allows at any time.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        result::init().map_err(failed("cannot start the NVIDIA driver"))?;
        let found = CudaContext::device_count().map_err(failed("cannot count the cards"))?;
        let found = usize::try_from(found).unwrap_or(0);
        if ordinal >= found {
            return Err(CudaError::NoDevice { ordinal, found });
        }
        let context = CudaContext::new(ordinal).map_err(failed(format!("cannot use card {ordinal}")))?;
        let name = context.name().map_err(failed("cannot ask the card's name"))?;
        let (major, minor) =
            context.compute_capability().map_err(failed("cannot ask the compute capability"))?;
        if major < 8 {
            return Err(CudaError::Capability { name, major, minor });
        }
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
        let shared = context.attribute(attribute).map_err(failed("cannot ask for shared memory"))?;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors =
            context.attribute(attribute).map_err(failed("cannot ask for multiprocessors"))?;
        let mut driver = 0;
        // SAFETY: an integer to write to.
        unsafe { sys::cuDriverGetVersion(&raw mut driver) }
            .result()
            .map_err(failed("cannot ask the driver's version"))?;
        let stream = context.new_stream().map_err(failed("cannot make a stream"))?;
        Ok(Self {
            context,
            stream,
            name,
            arch: Arch { major, minor },
            driver,
            shared: usize::try_from(shared).unwrap_or(0),
            multiprocessors: usize::try_from(multiprocessors).unwrap_or(1),
            cache: cache.map(Cache::new),
            packaged,
            modules: Mutex::new(HashMap::new()),
        })
    }

    pub(crate) fn describe(&self) -> String {
        let memory = self.context.total_mem().unwrap_or(0);
        format!(
            "{}, {}, {}, driver {}.{}",
            self.name,
            self.arch,
            doyen_tensor::ByteCount(memory as u64),
            self.driver / 1000,
            self.driver % 1000 / 10
        )
    }

    /// Dynamic shared memory that a block may have at most.
    pub(crate) const fn shared(&self) -> usize {
        self.shared
    }

    /// What kernels are compiled for.
    pub(crate) const fn arch(&self) -> Arch {
        self.arch
    }

    /// Multiprocessors of the card.
    pub(crate) const fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Bytes free on the card.
    pub(crate) fn free(&self) -> Result<usize, CudaError> {
        Ok(self.context.mem_get_info().map_err(failed("cannot ask for free memory"))?.0)
    }

    pub(crate) const fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Waits for everything that was launched.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        self.stream.synchronize().map_err(failed("the card failed"))
    }

    /// A kernel, compiled if the cache does not have it. `shared` is the dynamic shared memory it will be launched with at
    /// most.
    pub(crate) fn function(&self, module: Module, entry: &str, shared: usize) -> Result<Function, CudaError> {
        let function = self
            .module(module)?
            .load_function(entry)
            .map_err(failed(format!("{module} has no kernel {entry}")))?;
        // Static shared memory counts towards the 48 KiB that need no attribute.
        if shared > 40 << 10 {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function
                .set_attribute(attribute, shared as i32)
                .map_err(failed(format!("{entry} cannot have {shared} bytes of shared memory")))?;
        }
        Ok(Function(function))
    }

    fn module(&self, module: Module) -> Result<Arc<CudaModule>, CudaError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((loaded, _)) = modules.get(&module) {
            return Ok(Arc::clone(loaded));
        }
        // A release has what the table lists.
        debug_assert!(Module::all().contains(&module) && module.is_for(self.arch), "{module}");
        let (loaded, origin) = match self.of_release(module) {
            Some(found) => found,
            None => (self.compiled(module)?, Origin::Nvrtc),
        };
        modules.insert(module, (Arc::clone(&loaded), origin));
        Ok(loaded)
    }

    /// Where a module that was loaded came from.
    fn origin(&self, module: Module) -> Option<Origin> {
        let modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        modules.get(&module).map(|(_, origin)| *origin)
    }

    /// Whether some kernel was not compiled before, so that NVRTC is needed.
    pub(crate) fn compiles(&self) -> bool {
        self.packaged.as_ref().is_none_or(|p| p.found(self.arch).missing > 0)
    }

    /// What the release has of a module and the driver takes; NVRTC compiles the rest.
    fn of_release(&self, module: Module) -> Option<(Arc<CudaModule>, Origin)> {
        let images = self.packaged.iter().flat_map(|p| p.images(module, self.arch));
        let mut taken = images.filter_map(|image| {
            let (image, origin) = match image {
                Image::Cubin(cubin) => (Ptx::from_binary(cubin), Origin::MachineCode),
                Image::Ptx(text) => (Ptx::from_src(text), Origin::Ptx),
            };
            self.context.load_module(image).ok().map(|loaded| (loaded, origin))
        });
        taken.next()
    }

    fn compiled(&self, module: Module) -> Result<Arc<CudaModule>, CudaError> {
        let compiler = Compiler::load()?;
        let key = Key::new(module, self.arch, compiler.version(), self.driver);
        let load = |cubin: Vec<u8>| self.context.load_module(Ptx::from_binary(cubin));
        // A cubin that the driver does not take is made again.
        if let Some(Ok(loaded)) = self.cache.as_ref().and_then(|c| c.get(&key)).map(load) {
            return Ok(loaded);
        }
        let compiled = compiler.compile(module, self.arch)?;
        if let Some(cache) = &self.cache {
            cache.put(&key, &compiled.cubin)?;
        }
        load(compiled.cubin).map_err(failed(format!("the driver does not take {module}")))
    }

    /// Launches a kernel; nothing happens where there are no blocks.
    pub(crate) fn launch<P: Params>(&self, f: &Function, grid: Grid, params: P) -> Result<(), CudaError> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let [x, y, z] = grid.blocks;
        if y > 65535 || z > 65535 || x > i32::MAX as usize {
            let reason = format!("{x} x {y} x {z} blocks are more than a launch takes");
            return Err(CudaError::Driver { what: "cannot launch a kernel".into(), reason });
        }
        // It may start before the launch ahead of it ended: every kernel waits for that by itself.
        let early = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let together = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: 1, y: 1, z: z as u32 };
        let cluster = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { clusterDim: together },
        };
        let mut attributes = [early, cluster];
        let config = sys::CUlaunchConfig {
            gridDimX: x as u32,
            gridDimY: y as u32,
            gridDimZ: z as u32,
            blockDimX: grid.threads[0],
            blockDimY: grid.threads[1],
            blockDimZ: 1,
            sharedMemBytes: grid.shared as u32,
            hStream: self.stream.cu_stream(),
            attrs: attributes.as_mut_ptr(),
            numAttrs: if self.arch.major >= 9 { 1 + u32::from(grid.cluster && z > 1) } else { 0 },
        };
        let mut params = params;
        let mut arguments = [(&raw mut params).cast::<c_void>()];
        self.context.bind_to_thread().map_err(failed("cannot use the card"))?;
        // `Params` promises the layout of the kernel's parameter and extents inside their buffers; buffers are freed in the order
        // of this stream, after what was launched before.
        // SAFETY: the driver reads the configuration and copies the one parameter during the call.
        let status = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                f.0.cu_function(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        status.result().map_err(failed("cannot launch a kernel"))
    }
}
