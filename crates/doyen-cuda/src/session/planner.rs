//! Plans for a card that is not here: what a model would take and which kernels it would run.

use super::{CudaOptions, Dense, KvType, caches, plan};
use crate::{
    bind::Setting,
    module::{Arch, Operand},
};
use doyen_graph::{
    device::{Device, DeviceError, Limits, NodePlan, Numerics, Program, Session},
    lowered::{LNode, Lowered},
};
use doyen_tensor::ByteCount;

/// Plans for a card by its compute capability; it loads nothing.
#[derive(Debug, Clone)]
pub struct CudaPlanner {
    arch: Arch,
    operand: Option<Operand>,
    kv: KvType,
    dense: Dense,
}

impl CudaPlanner {
    /// Plans for cards of a compute capability.
    pub const fn new(options: &CudaOptions, arch: Arch) -> Self {
        Self { arch, operand: options.operand, kv: options.kv, dense: options.dense }
    }
}

/// Dynamic shared memory that a block may have at most (CUDA C++ Programming Guide, technical specifications per compute
/// capability).
const fn shared(arch: Arch) -> usize {
    match (arch.major, arch.minor) {
        (8, 0 | 7) => 163 << 10,
        (9 | 10, _) => 227 << 10,
        _ => 99 << 10,
    }
}

impl Device for CudaPlanner {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn describe(&self) -> String {
        format!("a plan for {}", self.arch)
    }

    fn plan(
        &self,
        graph: &Lowered,
        node: &LNode,
        limits: &Limits,
        numerics: Numerics,
    ) -> Result<NodePlan, DeviceError> {
        let setting = Setting {
            operand: self.operand.filter(|_| numerics != Numerics::Exact),
            kv: self.kv,
            shared: shared(self.arch),
            dense: usize::try_from(self.dense.scratch.0).unwrap_or(usize::MAX),
            all_dense: self.dense.all,
        };
        plan(graph, node, limits, setting)
    }

    fn kv_type(&self) -> &'static str {
        self.kv.name()
    }

    fn page_bytes(&self, graph: &Lowered, page_size: usize) -> Vec<ByteCount> {
        caches::all_page_bytes(graph, page_size, self.kv)
    }

    fn load(&self, _: Program) -> Result<Box<dyn Session>, DeviceError> {
        Err(DeviceError::Step("this is a plan for a card; open the card to load a program".into()))
    }
}
