//! Operators: one file each, with attributes, load-time check and shape rule, scalar reference and token-axis rule.
//!
//! [`Op`] is the closed set of operators the project knows; the table at the end of this file is the one place
//! where an operator is registered. A family of operators with one shape rule (unary, binary, reductions) shares a
//! file. The reference follows the operator contract with f64 or f32 accumulation and is never tuned; passes and
//! backends match on the variants to reach an operator's parameters.

mod error;
mod trace;

pub use error::OpError;
pub use trace::{TokenAxis, Trace, Traced};

use crate::ir::{Attrs, Fact};
use doyen_tensor::Tensor;

/// What every operator provides.
pub trait OpDef: std::fmt::Debug + Clone + PartialEq + Send + Sync + Sized {
    /// Parses the operator from its attributes, in the version of its domain's opset.
    ///
    /// # Errors
    /// Names the attribute, what was expected and what was found.
    fn parse(op_type: &str, opset: i64, attrs: &mut Attrs) -> Result<Self, OpError>;

    /// Checks everything known at load (types, shapes, constants) and says what the outputs will be.
    /// `inputs` may be shorter than the schema where trailing optional inputs are left out.
    ///
    /// # Errors
    /// Names the input, what was expected and what was found.
    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError>;

    /// The scalar reference. Returns all outputs that were computed, at least the first; `outputs` says how many
    /// the node names. Checks everything [`OpDef::infer`] could not know.
    ///
    /// # Errors
    /// Names the input, what was expected and what was found.
    fn eval(&self, inputs: &[Option<&Tensor>], outputs: usize) -> Result<Vec<Tensor>, OpError>;

    /// How the operator treats the axis that counts tokens; see [`Trace`]. The default knows operators that see
    /// no token axis at all, and calls everything else mixing.
    ///
    /// # Errors
    /// Says in a few words why the operator mixes tokens.
    fn trace(
        &self,
        inputs: &[Option<Traced<'_>>],
        outputs: &[doyen_tensor::Shape],
    ) -> Result<Vec<Trace>, String> {
        if inputs.iter().flatten().all(|t| t.trace == Trace::Absent) {
            Ok(vec![Trace::Absent; outputs.len()])
        } else {
            Err("it mixes tokens".into())
        }
    }
}

macro_rules! ops {
    ($($(#[$doc:meta])* $variant:ident($ty:ty) $domain:literal [$($name:ident),* $(,)?]),* $(,)?) => {
        /// An operator with its attributes.
        #[derive(Debug, Clone, PartialEq)]
        pub enum Op {
            $($(#[$doc])* $variant($ty),)*
            /// An operator this project does not know; kept for display, refused by the checker.
            Unknown,
        }

        impl Op {
            /// Parses an operator.
            ///
            /// # Errors
            /// When the operator is not known or refuses its attributes.
            pub fn parse(domain: &str, op_type: &str, opset: i64, attrs: &Attrs) -> Result<Self, OpError> {
                let domain = if domain == "ai.onnx" { "" } else { domain };
                let mut attrs = attrs.clone();
                match (domain, op_type) {
                    $($(($domain, stringify!($name)) => {
                        let op = <$ty as OpDef>::parse(op_type, opset, &mut attrs)?;
                        attrs.finish()?;
                        Ok(Self::$variant(op))
                    })*)*
                    _ => Err(OpError::unknown_operator(domain, op_type)),
                }
            }

            /// Domain and name of every operator known, in the order of the table.
            pub fn known() -> &'static [(&'static str, &'static str)] {
                &[$($(($domain, stringify!($name)),)*)*]
            }

            /// See [`OpDef::infer`].
            ///
            /// # Errors
            /// As [`OpDef::infer`].
            pub fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
                match self {
                    $(Self::$variant(op) => op.infer(inputs),)*
                    Self::Unknown => Err(OpError::other("this operator is not known")),
                }
            }

            /// See [`OpDef::eval`].
            ///
            /// # Errors
            /// As [`OpDef::eval`].
            pub fn eval(&self, inputs: &[Option<&Tensor>], outputs: usize) -> Result<Vec<Tensor>, OpError> {
                match self {
                    $(Self::$variant(op) => op.eval(inputs, outputs),)*
                    Self::Unknown => Err(OpError::other("this operator is not known")),
                }
            }

            /// See [`OpDef::trace`].
            ///
            /// # Errors
            /// As [`OpDef::trace`].
            pub fn trace(
                &self,
                inputs: &[Option<Traced<'_>>],
                outputs: &[doyen_tensor::Shape],
            ) -> Result<Vec<Trace>, String> {
                match self {
                    $(Self::$variant(op) => op.trace(inputs, outputs),)*
                    Self::Unknown => Err("this operator is not known".into()),
                }
            }
        }
    };
}

mod arith;
mod compare;
mod erf;
mod identity;
#[allow(dead_code)]
mod strided;
#[allow(dead_code)]
mod token_axis;
mod unary;
#[allow(dead_code)]
mod util;
#[allow(dead_code)]
mod value;

pub mod activation;
mod args;
mod experts;
pub mod gather_block_quantized;
pub mod gqa;
pub mod matmul_nbits;
pub mod moe;
pub mod norm;
pub mod qmoe;
pub mod quant;
pub mod rotary;
pub mod route;
pub mod skip_norm;

ops! {
    /// Passes its input on.
    Identity(identity::Identity) "" [Identity],
    /// Arithmetic of two inputs.
    Binary(arith::Binary) "" [Add, Div, Mod, Mul, Pow, Sub],
    /// Comparison or logic of two inputs.
    Compare(compare::Compare) "" [And, Equal, Greater, GreaterOrEqual, Less, LessOrEqual, Or, Xor],
    /// A function of each element.
    Unary(unary::Unary) "" [
        Abs, Ceil, Cos, Erf, Exp, Floor, Gelu, IsInf, IsNaN, Log, Neg, Not, Reciprocal, Relu, Round, Sigmoid, Sign,
        Sin, Softplus, Sqrt, Swish, Tanh,
    ],
    /// A fold over any number of inputs.
    Variadic(arith::Variadic) "" [Max, Mean, Min, Sum],

    /// Mixture of experts over integer-quantized weights.
    QMoe(qmoe::QMoe) "com.microsoft" [QMoE],
    /// Mixture of experts over float weights.
    Moe(moe::Moe) "com.microsoft" [MoE],
    /// Product with a block-quantized weight.
    MatMulNBits(matmul_nbits::MatMulNBits) "com.microsoft" [MatMulNBits],
    /// Rows of a quantized table.
    GatherBlockQuantized(gather_block_quantized::GatherBlockQuantized) "com.microsoft" [GatherBlockQuantized],
    /// Attention with its own cache.
    GroupQueryAttention(gqa::GroupQueryAttention) "com.microsoft" [GroupQueryAttention],
    /// Rotary embedding, contrib form.
    ContribRotary(rotary::ContribRotary) "com.microsoft" [RotaryEmbedding],
    /// Rotary embedding, standard form.
    OnnxRotary(rotary::OnnxRotary) "" [RotaryEmbedding],
    /// Rotary embedding with three position streams.
    MRotary(rotary::MRotary) "com.microsoft" [MRotaryEmbedding],
    /// Layer and RMS normalisation.
    Norm(norm::Norm) "" [LayerNormalization, RMSNormalization, SimplifiedLayerNormalization],
    /// Normalisation of the sum with the residual stream.
    SkipNorm(skip_norm::SkipNorm) "com.microsoft" [SkipLayerNormalization, SkipSimplifiedLayerNormalization],
}
