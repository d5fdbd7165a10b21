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

    /// [`OpDef::infer`] for a node that names `outputs` outputs, which decides what Split does; every other operator
    /// ignores it.
    ///
    /// # Errors
    /// As [`OpDef::infer`].
    fn infer_outputs(&self, inputs: &[Option<&Fact>], outputs: usize) -> Result<Vec<Fact>, OpError> {
        let _ = outputs;
        self.infer(inputs)
    }

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
    ($($(#[$doc:meta])* $variant:ident($ty:ty) $($domain:literal [$($name:ident),* $(,)?])+),* $(,)?) => {
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
                    $($($(($domain, stringify!($name)) => {
                        let op = <$ty as OpDef>::parse(op_type, opset, &mut attrs)?;
                        attrs.finish()?;
                        Ok(Self::$variant(op))
                    })*)+)*
                    _ => Err(OpError::unknown_operator(domain, op_type)),
                }
            }

            /// Domain and name of every operator known, in the order of the table.
            pub fn known() -> &'static [(&'static str, &'static str)] {
                &[$($($(($domain, stringify!($name)),)*)+)*]
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

            /// See [`OpDef::infer_outputs`].
            ///
            /// # Errors
            /// As [`OpDef::infer`].
            pub fn infer_outputs(
                &self,
                inputs: &[Option<&Fact>],
                outputs: usize,
            ) -> Result<Vec<Fact>, OpError> {
                match self {
                    $(Self::$variant(op) => op.infer_outputs(inputs, outputs),)*
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

pub mod arith;
pub mod axes;
pub mod cast;
pub mod clip;
pub mod compare;
mod erf;
pub mod extent;
pub mod fill;
pub mod gather;
pub mod identity;
pub mod join;
mod lines;
pub mod matmul;
pub mod minifloat;
pub mod reduce;
pub mod reshape;
pub mod scatter;
pub mod select;
pub mod slice;
pub mod softmax;
mod strided;
#[cfg(test)]
mod test_data;
mod token_axis;
pub mod topk;
pub mod transpose;
pub mod unary;
mod util;
mod value;

pub mod activation;
mod args;
pub mod attention;
pub mod causal_conv;
mod experts;
pub mod gated;
pub mod gather_block_quantized;
pub mod gqa;
pub mod linear_attention;
pub mod lp_norm;
pub mod matmul_nbits;
pub mod mha;
pub mod moe;
pub mod norm;
pub mod qmoe;
pub mod quant;
pub mod rotary;
pub mod route;
pub mod skip_norm;

ops! {
    /// Position of the largest or smallest element.
    ArgReduce(topk::ArgReduce) "" [ArgMax, ArgMin],
    /// Arithmetic of two inputs.
    Binary(arith::Binary) "" [Add, Div, Mod, Mul, Pow, Sub],
    /// To another element type.
    Cast(cast::Cast) "" [Cast, CastLike],
    /// Limits to an interval.
    Clip(clip::Clip) "" [Clip],
    /// Comparison or logic of two inputs.
    Compare(compare::Compare) "" [And, Equal, Greater, GreaterOrEqual, Less, LessOrEqual, Or, Xor],
    /// Values side by side.
    Concat(join::Concat) "" [Concat],
    /// One value everywhere.
    ConstantOfShape(fill::ConstantOfShape) "" [ConstantOfShape],
    /// Running sums.
    CumSum(softmax::CumSum) "" [CumSum],
    /// Broadcast to a shape.
    Expand(fill::Expand) "" [Expand],
    /// To a matrix.
    Flatten(reshape::Flatten) "" [Flatten],
    /// Slices at indices.
    Gather(gather::Gather) "" [Gather],
    /// Elements at indices.
    GatherElements(gather::GatherElements) "" [GatherElements],
    /// Slices at coordinates.
    GatherNd(gather::GatherNd) "" [GatherND],
    /// Scaled product of two matrices plus a bias.
    Gemm(matmul::Gemm) "" [Gemm],
    /// Passes its input on.
    Identity(identity::Identity) "" [Identity],
    /// Product of matrices.
    MatMul(matmul::MatMul) "" [MatMul],
    /// An arithmetic sequence.
    Range(fill::Range) "" [Range],
    /// A reduction over axes.
    Reduce(reduce::Reduce) "" [
        ReduceL1, ReduceL2, ReduceMax, ReduceMean, ReduceMin, ReduceProd, ReduceSum, ReduceSumSquare,
    ],
    /// The same elements under another shape.
    Reshape(reshape::Reshape) "" [Reshape],
    /// Elements written at indices.
    ScatterElements(scatter::ScatterElements) "" [ScatterElements],
    /// Slices written at coordinates.
    ScatterNd(scatter::ScatterNd) "" [ScatterND],
    /// Extents as data.
    Shape(extent::Shape) "" [Shape],
    /// The number of elements.
    Size(extent::Size) "" [Size],
    /// A strided window.
    Slice(slice::Slice) "" [Slice],
    /// Softmax along an axis.
    Softmax(softmax::Softmax) "" [LogSoftmax, Softmax],
    /// Parts along an axis.
    Split(join::Split) "" [Split],
    /// Removes axes of extent 1.
    Squeeze(reshape::Squeeze) "" [Squeeze],
    /// New entries of a cache.
    TensorScatter(scatter::TensorScatter) "" [TensorScatter],
    /// Repetition along axes.
    Tile(fill::Tile) "" [Tile],
    /// The largest or smallest elements.
    TopK(topk::TopK) "" [TopK],
    /// Permutes axes.
    Transpose(transpose::Transpose) "" [Transpose],
    /// A triangle of a matrix.
    Trilu(transpose::Trilu) "" [Trilu],
    /// A function of each element.
    Unary(unary::Unary) "" [
        Abs, Ceil, Cos, Erf, Exp, Floor, Gelu, IsInf, IsNaN, Log, Neg, Not, Reciprocal, Relu, Round, Sigmoid, Sign,
        Sin, Softplus, Sqrt, Swish, Tanh,
    ],
    /// Inserts axes of extent 1.
    Unsqueeze(reshape::Unsqueeze) "" [Unsqueeze],
    /// A fold over any number of inputs.
    Variadic(arith::Variadic) "" [Max, Mean, Min, Sum],
    /// One of two values.
    Where(select::Where) "" [Where],

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
    /// Attention over inputs and an explicit past.
    Attention(attention::Attention) "" [Attention],
    /// Attention over a state of fixed size.
    LinearAttention(linear_attention::LinearAttention) "" [LinearAttention] "com.microsoft" [LinearAttention],
    /// Convolution over the tokens with a state.
    CausalConv(causal_conv::CausalConv) "" [CausalConvWithState] "com.microsoft" [CausalConvWithState],
    /// Attention with a key and value head for every query head.
    MultiHeadAttention(mha::MultiHeadAttention) "com.microsoft" [MultiHeadAttention],
    /// Rotary embedding, contrib form.
    ContribRotary(rotary::ContribRotary) "com.microsoft" [RotaryEmbedding],
    /// Rotary embedding, standard form.
    OnnxRotary(rotary::OnnxRotary) "" [RotaryEmbedding],
    /// Rotary embedding with three position streams.
    MRotary(rotary::MRotary) "com.microsoft" [MRotaryEmbedding],
    /// Layer and RMS normalisation.
    Norm(norm::Norm) "" [LayerNormalization, RMSNormalization, SimplifiedLayerNormalization],
    /// Division by a norm.
    LpNorm(lp_norm::LpNorm) "" [LpNormalization],
    /// RMS normalisation times an activated gate.
    GatedRmsNorm(gated::GatedRmsNorm) "com.microsoft" [GatedRMSNorm],
    /// Sum with a gated value.
    GatedAdd(gated::GatedAdd) "com.microsoft" [GatedAdd],
    /// Decay and update rate of linear attention.
    LinearAttentionGate(gated::LinearAttentionGate) "com.microsoft" [LinearAttentionGate],
    /// Normalisation of the sum with the residual stream.
    SkipNorm(skip_norm::SkipNorm) "com.microsoft" [SkipLayerNormalization, SkipSimplifiedLayerNormalization],
}
