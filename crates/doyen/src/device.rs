//! Which device a verb runs on: the CPU, or a card. The only place that names backends.
//!
//! A device that is asked for is used, or it is an error that says what is missing; nothing falls back to the CPU.

use crate::model::cpu;
use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use doyen_cpu::CpuDevice;
use doyen_graph::device::{Device, Numerics};
use doyen_runtime::Plan;
use doyen_tensor::{ByteCount, FloatType};
use std::{num::NonZeroUsize, str::FromStr};

/// `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceName {
    /// The CPU.
    #[default]
    Cpu,
    /// An NVIDIA card by its index.
    Cuda(usize),
}

impl FromStr for DeviceName {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let expected = || format!("expected cpu, cuda or cuda:N, found {s:?}");
        match s.split_once(':') {
            None if s == "cpu" => Ok(Self::Cpu),
            None if s == "cuda" => Ok(Self::Cuda(0)),
            Some(("cuda", n)) => n.parse().map(Self::Cuda).map_err(|_| expected()),
            _ => Err(expected()),
        }
    }
}

/// `--compute-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FloatName {
    /// float32
    F32,
    /// float16
    F16,
    /// bfloat16
    Bf16,
}

/// `--kv-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvName {
    /// float32
    F32,
    /// float16
    F16,
    /// bfloat16
    Bf16,
    /// int8 with a scale for every token and head, on a card
    Int8,
}

impl KvName {
    /// The float type; none for codes.
    const fn float(self) -> Option<FloatType> {
        match self {
            Self::F32 => Some(FloatType::F32),
            Self::F16 => Some(FloatType::F16),
            Self::Bf16 => Some(FloatType::BF16),
            Self::Int8 => None,
        }
    }
}

impl From<FloatName> for KvName {
    fn from(name: FloatName) -> Self {
        match name {
            FloatName::F32 => Self::F32,
            FloatName::F16 => Self::F16,
            FloatName::Bf16 => Self::Bf16,
        }
    }
}

/// Where to compute, and in what.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DeviceArgs {
    /// Where to compute: cpu, cuda, or cuda:N for a certain card
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    pub device: DeviceName,

    /// What a card's tensor cores multiply; f32 keeps to float32 and is slow with long prompts [default: bf16]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub compute_dtype: Option<FloatName>,

    /// Type of the KV cache, where the package does not quantize it [default: f32 with exact numerics, otherwise f16 on the CPU and the compute type on a card]
    #[arg(long, value_enum, value_name = "TYPE")]
    pub kv_dtype: Option<KvName>,

    /// MiB of a card that experts written out densely may take at a time, which is done for those that no packed kernel
    /// takes [default: 1024]
    #[arg(long, value_name = "MIB", allow_negative_numbers = true)]
    pub qmoe_scratch: Option<NonZeroUsize>,

    /// Multiply all experts densely, to compare with what packed kernels give.
    #[arg(skip)]
    pub all_dense: bool,
}

/// An opened device.
pub struct Opened {
    /// It.
    pub device: Box<dyn Device>,
    /// Memory that a plan may take, where the system does not tell.
    pub memory: Option<ByteCount>,
}

impl DeviceArgs {
    /// The type of caches: float32 where `numerics` are exact, unless told otherwise.
    fn kv(&self, numerics: Numerics, fast: KvName) -> KvName {
        self.kv_dtype.unwrap_or(if numerics == Numerics::Exact { KvName::F32 } else { fast })
    }

    /// Opens the device, for a model in `numerics`.
    ///
    /// # Errors
    /// When it cannot be used; says what is missing.
    pub fn open(&self, threads: Option<NonZeroUsize>, numerics: Numerics) -> Result<Opened> {
        match self.device {
            DeviceName::Cpu => Ok(Opened { device: Box::new(self.cpu(threads, numerics)?), memory: None }),
            DeviceName::Cuda(ordinal) => self.cuda(ordinal, numerics),
        }
    }

    /// The CPU, with caches of the type asked for or, in fast numerics, of f16: half of the bytes, at no loss that was measured
    /// (docs/numerics.md).
    ///
    /// # Errors
    /// As [`cpu`], and when it is asked to compute in another type than its own.
    pub fn cpu(&self, threads: Option<NonZeroUsize>, numerics: Numerics) -> Result<CpuDevice> {
        ensure!(
            matches!(self.compute_dtype, None | Some(FloatName::F32)),
            "--compute-dtype is a card's (--device cuda): the CPU computes in f32"
        );
        ensure!(self.qmoe_scratch.is_none(), "--qmoe-scratch is a card's (--device cuda)");
        let kv = self.kv(numerics, KvName::F16).float();
        let kv = kv.context("--kv-dtype int8 is a card's (--device cuda): the CPU keeps f32, bf16 or f16")?;
        Ok(cpu(threads)?.with_kv(kv))
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, ordinal: usize, numerics: Numerics) -> Result<Opened> {
        use doyen_cuda::{CudaDevice, CudaOptions, Dense, KvType, module::Operand};

        let compute = self.compute_dtype.unwrap_or(FloatName::Bf16);
        let operand = match compute {
            FloatName::F32 => None,
            FloatName::F16 => Some(Operand::F16),
            FloatName::Bf16 => Some(Operand::Bf16),
        };
        let kv = self.kv(numerics, compute.into());
        let kv = kv.float().map_or(KvType::Int8, KvType::Float);
        let scratch = self
            .qmoe_scratch
            .map_or(Dense::default().scratch, |mib| ByteCount((mib.get() as u64).saturating_mul(1 << 20)));
        let dense = Dense { scratch, all: self.all_dense };
        let options = CudaOptions { ordinal, operand, kv, cache: cubins(), packaged: packaged()?, dense };
        let device =
            CudaDevice::new(&options).with_context(|| format!("cannot compute on cuda:{ordinal}"))?;
        let memory = Some(device.free_memory()?);
        Ok(Opened { device: Box::new(device), memory })
    }

    #[cfg(not(feature = "cuda"))]
    #[expect(clippy::unused_self, reason = "called as the one that opens a card")]
    fn cuda(&self, _: usize, _: Numerics) -> Result<Opened> {
        anyhow::bail!("this build has no CUDA: build with --features cuda")
    }
}

/// What is said of nodes that have no kernel on a card.
#[cfg(feature = "cuda")]
pub fn host_notice(plan: &Plan) -> Option<String> {
    let mut nodes = plan.nodes().iter().filter_map(|n| n.kernel.strip_prefix(doyen_cuda::HOST_REFERENCE));
    let first = nodes.next()?.trim();
    let others = nodes.count();
    let others = if others > 0 { format!(" and {others} other nodes have") } else { " has".to_owned() };
    Some(format!(
        "note: {first}{others} no kernel for the card and run on the host, which the card waits for"
    ))
}

/// Without cards there are none.
#[cfg(not(feature = "cuda"))]
pub const fn host_notice(_: &Plan) -> Option<String> {
    None
}

/// Where compiled kernels are kept: the user's cache folder, if there is one.
#[cfg(feature = "cuda")]
pub(crate) fn cubins() -> Option<std::path::PathBuf> {
    let absolute =
        |name: &str| std::env::var_os(name).map(std::path::PathBuf::from).filter(|p| p.is_absolute());
    let caches = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    caches.map(|c| c.join("doyen").join("cubins"))
}

/// The kernels that a release carries; none in other builds.
///
/// # Errors
/// When they are damaged.
#[cfg(feature = "cuda")]
pub(crate) fn packaged() -> Result<Option<doyen_cuda::compile::Packaged>, doyen_cuda::CudaError> {
    #[cfg(feature = "kernels")]
    const KERNELS: Option<&[u8]> = Some(include_bytes!(env!(
        "DOYEN_KERNELS",
        "the feature kernels is for releases: scripts/package.sh compiles the kernels and builds the program"
    )));
    #[cfg(not(feature = "kernels"))]
    const KERNELS: Option<&[u8]> = None;
    KERNELS.map(doyen_cuda::compile::Packaged::new).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names() {
        assert_eq!("cpu".parse(), Ok(DeviceName::Cpu));
        assert_eq!("cuda".parse(), Ok(DeviceName::Cuda(0)));
        assert_eq!("cuda:3".parse(), Ok(DeviceName::Cuda(3)));
        for bad in ["", "gpu", "cuda:", "cuda:x", "cpu:0", "cuda:-1"] {
            assert!(bad.parse::<DeviceName>().is_err(), "{bad}");
        }
    }
}
