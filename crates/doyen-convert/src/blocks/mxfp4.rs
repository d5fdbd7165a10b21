//! Experts of 4-bit floats as the source has them: QMoE's kind `fp4` (operator contract, section 1.12).

use super::{
    Builder,
    moe::{Experts, swiglu},
    routing::Routed,
};
use crate::{ConvertError, config::Moe, report::Part, source::Packing};
use doyen_graph::ir::{GraphError, ValueId};
use doyen_tensor::{DType, Tensor};

impl Builder<'_> {
    /// Experts of 4-bit floats as the source has them, `[E, N, K/2]` with codes that neighbour in K in one byte. The factor that the
    /// operator has for each expert is 1.
    pub(super) fn mxfp4_experts(
        &mut self,
        module: &str,
        moe: &Moe,
        (x, routed): (ValueId, Routed),
        experts: Experts,
    ) -> Result<ValueId, ConvertError> {
        let mut place = |name: &str, rows, part| {
            self.store.mxfp4(&mut self.graph, &format!("{module}.experts.{name}"), rows, part)
        };
        let fc1 = place("gate_up_proj", experts.fc1, Part::ExpertsFc1);
        let fc2 = place("down_proj", experts.fc2, Part::ExpertsFc2);
        let ones = self.ones(moe.experts)?;
        let mut attrs = swiglu(moe, moe.routing.normalize);
        attrs.set("expert_weight_bits", 4i64);
        attrs.set("block_size", Packing::MXFP4_GROUP as i64);
        attrs.set("quant_type", "fp4");
        self.qmoe(module, moe, (x, routed), (fc1, fc2, experts.biases), (attrs, Some(ones)))
    }

    /// A factor of 1 for every expert.
    fn ones(&mut self, experts: usize) -> Result<ValueId, ConvertError> {
        let name = format!("/model/constants/ones/{experts}");
        if let Some(id) = self.graph.find(&name) {
            return Ok(id);
        }
        let tensor = Tensor::from_f32(DType::F32, [experts], &vec![1.0; experts])
            .map_err(|e| GraphError::Graph(e.to_string()))?;
        Ok(self.graph.add_constant(&name, tensor))
    }
}
