//! Norms: alone, and fused with the residual addition before them.

use super::{Builder, MS, linear::scope};
use crate::{
    ConvertError,
    config::{Norm, NormKind},
    report::Part,
};
use doyen_graph::ir::ValueId;

/// Operators of a kind of norm: alone, after an addition, and where the latter's sum is among its outputs.
const fn operators(kind: NormKind) -> (&'static str, &'static str) {
    match kind {
        NormKind::Rms => ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"),
        NormKind::MeanVariance { .. } => ("LayerNormalization", "SkipLayerNormalization"),
    }
}

impl Builder<'_> {
    /// The norm over the last axis of `width` values, with the weight (and bias) of `module`.
    pub(crate) fn norm(
        &mut self,
        module: &str,
        x: ValueId,
        width: usize,
        norm: Norm,
    ) -> Result<ValueId, ConvertError> {
        let [weight, bias] = self.norm_weights(module, width, norm)?;
        let attrs = [("axis", (-1i64).into()), ("epsilon", norm.eps.into()), ("stash_type", 1i64.into())];
        let op = ("", operators(norm.kind).0);
        self.node(&scope(module), op, attrs, &[Some(x), weight, bias])
    }

    /// `residual + x` and its norm with the weight of `module`: `(normed, sum)`.
    pub(crate) fn add_norm(
        &mut self,
        module: &str,
        residual: ValueId,
        x: ValueId,
    ) -> Result<(ValueId, ValueId), ConvertError> {
        let sum = format!("{}/{}/output_3", scope(module), operators(self.config.norm.kind).1);
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
        let norm = self.config.norm;
        let [weight, bias] = self.norm_weights(module, self.config.hidden, norm)?;
        let epsilon = [("epsilon", norm.eps.into())];
        let inputs = [Some(residual), Some(x), weight, bias];
        self.node(&scope(module), (MS, operators(norm.kind).1), epsilon, &inputs)
    }

    fn norm_weights(
        &mut self,
        module: &str,
        width: usize,
        norm: Norm,
    ) -> Result<[Option<ValueId>; 2], ConvertError> {
        let shift = if norm.zero_centred { 1.0 } else { 0.0 };
        let weight = self.vector(&format!("{module}.weight"), width, shift, Part::Norms)?;
        let bias = match norm.kind {
            NormKind::Rms | NormKind::MeanVariance { bias: false } => None,
            NormKind::MeanVariance { bias: true } => {
                Some(self.vector(&format!("{module}.bias"), width, 0.0, Part::Norms)?)
            }
        };
        Ok([Some(weight), bias])
    }
}
