//! RMS norms: alone, and fused with the residual addition before them.

use super::{Builder, MS, linear::scope};
use crate::{ConvertError, report::Part};
use doyen_graph::ir::ValueId;

const ADD_NORM: &str = "SkipSimplifiedLayerNormalization";

impl Builder<'_> {
    /// `SimplifiedLayerNormalization` over the last axis of `width` values, with the weight of `module`.
    pub(crate) fn norm(&mut self, module: &str, x: ValueId, width: usize) -> Result<ValueId, ConvertError> {
        let weight = self.vector(&format!("{module}.weight"), width, Part::Norms)?;
        let attrs =
            [("axis", (-1i64).into()), ("epsilon", self.config.norm_eps.into()), ("stash_type", 1i64.into())];
        let op = ("", "SimplifiedLayerNormalization");
        self.node(&scope(module), op, attrs, &[Some(x), Some(weight)])
    }

    /// `residual + x` and its norm with the weight of `module`: `(normed, sum)`.
    pub(crate) fn add_norm(
        &mut self,
        module: &str,
        residual: ValueId,
        x: ValueId,
    ) -> Result<(ValueId, ValueId), ConvertError> {
        let sum = format!("{}/{ADD_NORM}/output_3", scope(module));
        let normed = self.final_norm(module, residual, x)?;
        let sum = self.graph.intern(&sum);
        // The sum is the fourth output; mean and deviation, between them, are not wanted.
        if let Some(node) = self.graph.nodes.last_mut() {
            node.outputs = vec![Some(normed), None, None, Some(sum)];
        }
        Ok((normed, sum))
    }

    /// The norm of `residual + x` alone.
    pub(crate) fn final_norm(
        &mut self,
        module: &str,
        residual: ValueId,
        x: ValueId,
    ) -> Result<ValueId, ConvertError> {
        let weight = self.vector(&format!("{module}.weight"), self.config.hidden, Part::Norms)?;
        let epsilon = [("epsilon", self.config.norm_eps.into())];
        self.node(&scope(module), (MS, ADD_NORM), epsilon, &[Some(residual), Some(x), Some(weight)])
    }
}
