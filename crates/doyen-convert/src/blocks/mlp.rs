//! Dense SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`.

use super::{Builder, Format, linear::scope};
use crate::{ConvertError, options::LayerFormats, report::Part};
use doyen_graph::ir::ValueId;

impl Builder<'_> {
    /// The dense feed-forward of one layer.
    pub(crate) fn mlp(
        &mut self,
        layer: usize,
        x: ValueId,
        formats: &LayerFormats,
    ) -> Result<ValueId, ConvertError> {
        let module = format!("model.layers.{layer}.mlp");
        let (hidden, inner, bias) = (self.config.hidden, self.config.intermediate, self.config.mlp_bias);
        let format = Format { width: formats.mlp, asked: formats.asked.mlp, layer: formats, part: Part::Mlp };
        let mut project = |name: &str, rows: usize, input: (ValueId, usize)| {
            let this = format!("{module}.{name}");
            self.linear(&this.clone(), &[(this, rows)], bias, input, format)
        };
        let gate = project("gate_proj", inner, (x, hidden))?;
        let up = project("up_proj", inner, (x, hidden))?;
        let at = scope(&module);
        let act = format!("{at}/act_fn");
        let sigmoid = self.node(&act, ("", "Sigmoid"), [], &[Some(gate)])?;
        let silu = self.node(&act, ("", "Mul"), [], &[Some(gate), Some(sigmoid)])?;
        let product = self.node(&at, ("", "Mul"), [], &[Some(silu), Some(up)])?;
        let this = format!("{module}.down_proj");
        self.linear(&this.clone(), &[(this, hidden)], bias, (product, inner), format)
    }
}
