//! What there is to compute with: driver, cards, compilers; and what a card does at most.

pub use super::Origin;
use super::{Buffer, Gpu, Grid, failed};
pub use crate::compile::Found;
use crate::{
    compile::{Compiler, Packaged},
    error::CudaError,
    module::{Arch, Module},
    params,
};
use cudarc::driver::{result, sys};
use doyen_graph::device::DeviceError;
use doyen_tensor::ByteCount;
use std::{path::PathBuf, time::Instant};

/// A card as the driver describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// Its name.
    pub name: String,
    /// Its compute capability.
    pub arch: Arch,
    /// All its memory.
    pub memory: ByteCount,
    /// Multiprocessors.
    pub multiprocessors: usize,
}

/// Driver and cards.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Driver {
    /// The version of CUDA that it supports.
    pub version: (i32, i32),
    /// Its cards, by index.
    pub cards: Vec<Card>,
}

/// The driver and its cards.
///
/// # Errors
/// When there is no driver, or it does not answer.
pub fn driver() -> Result<Driver, CudaError> {
    // SAFETY: loading the driver by its well-known name runs its initialisers, which it allows at any time.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    result::init().map_err(failed("cannot start the NVIDIA driver"))?;
    let mut version = 0;
    // SAFETY: an integer to write to.
    unsafe { sys::cuDriverGetVersion(&raw mut version) }
        .result()
        .map_err(failed("cannot ask the driver's version"))?;
    let count = result::device::get_count().map_err(failed("cannot count the cards"))?;
    let cards = (0..count).map(card).collect::<Result<_, _>>()?;
    Ok(Driver { version: (version / 1000, version % 1000 / 10), cards })
}

fn card(index: i32) -> Result<Card, CudaError> {
    let what = || format!("cannot ask what card {index} is");
    let device = result::device::get(index).map_err(failed(what()))?;
    let name = result::device::get_name(device).map_err(failed(what()))?;
    // SAFETY: the driver gave the device.
    let memory = unsafe { result::device::total_mem(device) }.map_err(failed(what()))?;
    let attribute = |a: sys::CUdevice_attribute| {
        // SAFETY: the driver gave the device.
        unsafe { result::device::get_attribute(device, a) }.map_err(failed(what()))
    };
    let arch = Arch {
        major: attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    };
    let multiprocessors = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    let multiprocessors = usize::try_from(multiprocessors).unwrap_or(0);
    Ok(Card { name, arch, memory: ByteCount(memory as u64), multiprocessors })
}

/// The version of NVRTC, and where the library lies if the system tells.
///
/// # Errors
/// When it is not there or too old.
pub fn nvrtc() -> Result<((i32, i32), Option<PathBuf>), CudaError> {
    let version = Compiler::load()?.version();
    Ok((version, loaded_from("libnvrtc.so")))
}

/// The file that a loaded library came from.
fn loaded_from(name: &str) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let path = maps.lines().filter_map(|l| l.split_whitespace().nth(5)).find(|p| p.contains(name))?;
    Some(PathBuf::from(path))
}

/// What a card does at most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    /// Memory that nobody uses.
    pub free: ByteCount,
    /// Bytes a second of a copy within its memory, read and written ones counted.
    pub copy: f64,
    /// Operations a second of bfloat16 products in registers (mma; Hopper's and later cards' own instructions do more).
    pub products: f64,
    /// Where the kernel that measured came from.
    pub origin: Option<Origin>,
}

/// Rounds of `peak`, its products a round and the operations of one; warps of a block.
const ROUNDS: u32 = 20_000;
const CHAINS: u64 = 8;
const OPERATIONS: u64 = 2 * 16 * 8 * 16;
const WARPS: u64 = 8;
/// Bytes of a copy at most, and copies.
const COPY: usize = 1 << 30;
const COPIES: u32 = 10;

/// Measures a card with kernels of a release or of a folder.
///
/// # Errors
/// When the card or its kernels cannot be used.
pub fn measure(
    ordinal: usize,
    cache: Option<PathBuf>,
    packaged: Option<Packaged>,
) -> Result<Peak, DeviceError> {
    let gpu = Gpu::open(ordinal, cache, packaged)?;
    let free = gpu.free()?;
    let (copy, products) = (copy(&gpu, free)?, products(&gpu)?);
    Ok(Peak { free: ByteCount(free as u64), copy, products, origin: gpu.origin(Module::Peak) })
}

fn copy(gpu: &Gpu, free: usize) -> Result<f64, DeviceError> {
    let bytes = COPY.min(free / 4).max(1);
    let from = Buffer::new(gpu, bytes, "a copy")?;
    let mut to = Buffer::new(gpu, bytes, "a copy")?;
    to.copy(gpu, &from)?;
    gpu.wait()?;
    let start = Instant::now();
    for _ in 0..COPIES {
        to.copy(gpu, &from)?;
    }
    gpu.wait()?;
    Ok(2.0 * bytes as f64 * f64::from(COPIES) / start.elapsed().as_secs_f64())
}

fn products(gpu: &Gpu) -> Result<f64, DeviceError> {
    let function = gpu.function(Module::Peak, "peak", 0)?;
    let blocks = 8 * gpu.multiprocessors();
    let y = Buffer::new(gpu, 4 * blocks, "a measurement")?;
    let grid = Grid::new([blocks, 1, 1], 32 * WARPS as u32);
    let run = |rounds| gpu.launch(&function, grid, params::Peak { y: y.start(), rounds });
    run(1)?;
    gpu.wait()?;
    let start = Instant::now();
    run(ROUNDS)?;
    gpu.wait()?;
    let done = blocks as u64 * WARPS * u64::from(ROUNDS) * CHAINS * OPERATIONS;
    Ok(done as f64 / start.elapsed().as_secs_f64())
}
