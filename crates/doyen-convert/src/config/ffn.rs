//! The dense feed-forward, which is also that of shared experts.

use super::{Fields, Tensors};
use crate::ConvertError;

/// `down(act(gate(x)) * up(x))`, or `down(act(up(x)))` where there is no gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mlp {
    /// Tensor names.
    pub names: MlpNames,
    /// Rows of the gate and up projections.
    pub intermediate: usize,
    /// Whether the projections have biases.
    pub bias: bool,
    /// Of the gate, if there is one.
    pub activation: Activation,
}

/// Modules below the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MlpNames {
    /// The feed-forward itself.
    pub module: &'static str,
    /// Projections of its input.
    pub inner: Inner,
    /// Down projection.
    pub down: &'static str,
}

/// Projections of a feed-forward's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inner {
    /// Gate and up.
    Gated(Tensors<2>),
    /// Up alone.
    Plain(&'static str),
}

impl MlpNames {
    /// As Llama has them.
    pub const LLAMA: Self = Self {
        module: "mlp",
        inner: Inner::Gated(Tensors::Each(["gate_proj", "up_proj"])),
        down: "down_proj",
    };

    /// As Llama has them, gate and up in one tensor.
    pub const FUSED: Self = Self { inner: Inner::Gated(Tensors::Fused("gate_up_proj")), ..Self::LLAMA };

    /// As Llama has them, without a gate.
    pub const PLAIN: Self = Self { inner: Inner::Plain("up_proj"), ..Self::LLAMA };

    /// As Llama has them, in another module.
    pub const fn at(module: &'static str) -> Self {
        Self { module, ..Self::LLAMA }
    }
}

/// What the gate goes through, or where there is none the up projection's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(x)`.
    Silu,
    /// Gelu by its approximation with tanh.
    GeluTanh,
    /// Gelu by the error function.
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    SquaredRelu,
}

impl Activation {
    /// Reads `hidden_act`, or `hidden_activation` where that is set.
    pub(super) fn read(f: &Fields) -> Result<Self, ConvertError> {
        // Read, so that it is known to say nothing beside the other.
        let _ = f.value("hidden_act");
        Ok(match Self::named(f, "hidden_activation")? {
            Some(own) => own,
            None => Self::named(f, "hidden_act")?.unwrap_or(Self::Silu),
        })
    }

    /// That of this field, if it is there.
    pub(super) fn named(f: &Fields, name: &str) -> Result<Option<Self>, ConvertError> {
        let Some(text) = f.string(name)? else { return Ok(None) };
        match text {
            "silu" | "swish" => Ok(Some(Self::Silu)),
            "gelu_pytorch_tanh" | "gelu_new" | "gelu_fast" => Ok(Some(Self::GeluTanh)),
            "gelu" | "gelu_python" => Ok(Some(Self::Gelu)),
            "relu" => Ok(Some(Self::Relu)),
            "relu2" | "relu_squared" => Ok(Some(Self::SquaredRelu)),
            other => {
                let expected = "\"silu\", \"gelu_pytorch_tanh\", \"gelu\", \"relu\" or \"relu2\"";
                Err(f.wrong(name, format!("{other:?}"), expected))
            }
        }
    }
}

impl Mlp {
    /// Llama's feed-forward: what families start from.
    pub(super) fn read(f: &Fields) -> Result<Self, ConvertError> {
        Self::of(f, f.size("intermediate_size")?)
    }

    /// Llama's feed-forward of this many rows.
    pub(super) fn of(f: &Fields, intermediate: usize) -> Result<Self, ConvertError> {
        Ok(Self { names: MlpNames::LLAMA, intermediate, bias: false, activation: Activation::read(f)? })
    }
}
