//! `com.microsoft::QMoE`: mixture of experts over quantized weights (operator contract, section 1).
//!
//! * this file: attributes
//! * `check`: the load-time checks of every input; `float`: those of the floating-point kinds
//! * `operands`: the weight tensors as views, shared by the reference, the backends and the display
//!
//! Routing is in [`super::route`], the activation in [`super::activation`], the reference in `super::experts`.

mod check;
mod float;
#[cfg(test)]
mod float_tests;
mod operands;
#[cfg(test)]
mod tests;

pub use float::Kind;
pub use operands::{Operands, Projection, StoredMatrix};

use super::activation::{Activation, Fusion};
use super::quant::{AccuracyLevel, Block, bits};
use super::route::Routing;
use super::util::{optional, outputs_of, required};
use super::{OpDef, OpError, Trace, Traced, experts};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{Shape, Tensor, format::Bits};

/// Mixture of experts over quantized weights.
#[derive(Debug, Clone, PartialEq)]
pub struct QMoe {
    /// Top-k rule.
    pub routing: Routing,
    /// Between FC1 and FC2.
    pub activation: Activation,
    /// What codes are.
    pub kind: Kind,
    /// Code width of FC1.
    pub fc1_bits: Bits,
    /// Code width of FC2.
    pub fc2_bits: Bits,
    /// Code width of FC3; means nothing without FC3.
    pub fc3_bits: Bits,
    /// Blocks along K, for all projections.
    pub block: Block,
    /// What the attribute says of the byte order of the weights.
    pub weights_prepacked: Prepacked,
    /// What the node permits of its activations.
    pub accuracy_level: AccuracyLevel,
}

/// What `weights_prepacked` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Prepacked {
    /// 0: the portable layout.
    Raw,
    /// -1 or absent: the provider's default. Raw in a package for the CPU; in one for CUDA the bytes are permuted
    /// without a trace in the graph, so whoever reads the package's manifest must refuse it there.
    ProviderDefault,
}

impl QMoe {
    /// Code width of a projection.
    pub const fn bits(&self, projection: Projection) -> Bits {
        match projection {
            Projection::Fc1 => self.fc1_bits,
            Projection::Fc2 => self.fc2_bits,
            Projection::Fc3 => self.fc3_bits,
        }
    }

    /// The weight operands as views: the inputs from index 2 on, in the operator's order (constants, or values
    /// given as graph inputs).
    ///
    /// # Errors
    /// Every check that [`OpDef::infer`] makes of these inputs.
    pub fn operands<'a>(&self, inputs: &[Option<&'a Tensor>]) -> Result<Operands<'a>, OpError> {
        Operands::new(self, inputs)
    }
}

impl OpDef for QMoe {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let kind = Kind::parse(attrs)?;
        let routing = Routing::parse(attrs)?;
        let activation = Activation::parse(attrs)?;
        let base = bits(attrs, "expert_weight_bits")?.unwrap_or(Bits::B4);
        let fc1_bits = bits(attrs, "fc1_expert_weight_bits")?.unwrap_or(base);
        let fc2_bits = bits(attrs, "fc2_expert_weight_bits")?.unwrap_or(base);
        let fc3_bits = bits(attrs, "fc3_expert_weight_bits")?.unwrap_or(base);
        for (name, own) in [
            ("expert_weight_bits", base),
            ("fc1_expert_weight_bits", fc1_bits),
            ("fc2_expert_weight_bits", fc2_bits),
            ("fc3_expert_weight_bits", fc3_bits),
        ] {
            kind.check_width(name, own.get())?;
        }
        let says_fused = matches!(activation, Activation::Swiglu(s) if s.fusion != Fusion::Separate);
        if says_fused && fc3_bits != fc1_bits {
            let expected = format!("{} as FC1, with fused SwiGLU", fc1_bits.get());
            let found = format!("{} (an absent attribute inherits expert_weight_bits)", fc3_bits.get());
            return Err(OpError::attribute("fc3_expert_weight_bits", expected, found));
        }
        let block = kind.block(attrs.int("block_size")?)?;
        let weights_prepacked = match attrs.int("weights_prepacked")?.unwrap_or(-1) {
            0 => Prepacked::Raw,
            -1 => Prepacked::ProviderDefault,
            v => {
                let expected = "0 or -1 (weights in the portable layout; prepacked weights cannot be read)";
                return Err(OpError::attribute("weights_prepacked", expected, v));
            }
        };
        let accuracy_level = AccuracyLevel::parse(attrs)?;
        Ok(Self {
            routing,
            activation,
            kind,
            fc1_bits,
            fc2_bits,
            fc3_bits,
            block,
            weights_prepacked,
            accuracy_level,
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        check::inputs(self, inputs)
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        outputs_of(self, inputs)?;
        let x = required(inputs, 0, "input")?;
        let operands = self.operands(&inputs[2..])?;
        let routes =
            experts::routes(&self.routing, required(inputs, 1, "router_probs")?, optional(inputs, 14))?;
        let y = experts::run(x, operands.hidden, &routes, operands.experts, self.activation, |e| {
            operands.expert(e)
        })?;
        Ok(vec![y])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        experts::trace(inputs, &[1, 14])
    }
}
