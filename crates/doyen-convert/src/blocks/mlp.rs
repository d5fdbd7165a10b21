//! Dense feed-forward: `down(act(gate(x)) * up(x))`, or `down(act(up(x)))`.

use super::{
    Builder, Format,
    linear::{Piece, scope},
};
use crate::{
    ConvertError,
    config::{Activation, Inner, Mlp},
};
use doyen_graph::ir::ValueId;

impl Builder<'_> {
    /// A dense feed-forward whose module is below that of the layer.
    pub(crate) fn mlp(
        &mut self,
        layer: &str,
        mlp: Mlp,
        x: ValueId,
        format: Format<'_>,
    ) -> Result<ValueId, ConvertError> {
        let module = format!("{layer}.{}", mlp.names.module);
        let (hidden, inner) = (self.config.hidden, mlp.intermediate);
        let mut project = |name: &str, piece: &Piece| {
            let name = format!("{module}.{name}");
            self.linear(&name, std::slice::from_ref(piece), mlp.bias, (x, hidden), format)
        };
        let at = scope(&module);
        let act = format!("{at}/act_fn");
        let product = match mlp.names.inner {
            Inner::Gated(tensors) => {
                let pieces = Piece::of(&module, tensors, [inner, inner]);
                let gate = project("gate_proj", &pieces[0])?;
                let up = project("up_proj", &pieces[1])?;
                let act = self.activation(&act, gate, mlp.activation)?;
                self.node(&at, ("", "Mul"), [], &[Some(act), Some(up)])?
            }
            Inner::Plain(name) => {
                let up = project("up_proj", &Piece::whole(format!("{module}.{name}"), inner))?;
                self.activation(&act, up, mlp.activation)?
            }
        };
        self.project(&format!("{module}.{}", mlp.names.down), hidden, mlp.bias, (product, inner), format)
    }

    fn activation(&mut self, at: &str, x: ValueId, activation: Activation) -> Result<ValueId, ConvertError> {
        let gelu = |kind: &str| [("approximate", kind.into())];
        match activation {
            Activation::Silu => {
                let sigmoid = self.node(at, ("", "Sigmoid"), [], &[Some(x)])?;
                self.node(at, ("", "Mul"), [], &[Some(x), Some(sigmoid)])
            }
            Activation::GeluTanh => self.node(at, ("", "Gelu"), gelu("tanh"), &[Some(x)]),
            Activation::Gelu => self.node(at, ("", "Gelu"), gelu("none"), &[Some(x)]),
            Activation::Relu => self.node(at, ("", "Relu"), [], &[Some(x)]),
            Activation::SquaredRelu => {
                let x = self.node(at, ("", "Relu"), [], &[Some(x)])?;
                self.node(at, ("", "Mul"), [], &[Some(x), Some(x)])
            }
        }
    }
}
