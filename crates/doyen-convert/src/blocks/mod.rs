//! One recipe per building block; each takes values of the graph under construction and adds its nodes and weights.
//!
//! A recipe knows the checkpoint's tensor names and the operators' ports; it reads no weights (that is `job`) and
//! knows no files. `graph` puts the blocks together. Names of values follow the checkpoint's, so that errors, `show`
//! and the data file speak of the same things.

pub(crate) mod attention;
pub(crate) mod embedding;
pub(crate) mod latent;
pub(crate) mod linear;
pub(crate) mod mlp;
pub(crate) mod moe;
mod mxfp4;
pub(crate) mod norm;
pub(crate) mod recurrent;
pub(crate) mod routing;

use crate::{
    ConvertError,
    config::ModelConfig,
    job::{Made, Rows},
    options::{LayerFormats, Mxfp4, Width},
    quant::{QuantSpec, ZeroPointKind, common_form},
    report::Part,
    source::{Checkpoint, Weight},
    store::{Consumer, Store},
};
use doyen_graph::ir::{Attr, Attrs, Graph, ValueId};
use doyen_tensor::{FloatType, Shape, Tensor, format::Bits};

/// Operator domain of the fused operators.
pub(crate) const MS: &str = "com.microsoft";

/// The graph under construction, with what recipes need to extend it.
pub(crate) struct Builder<'a> {
    pub graph: Graph,
    /// Rotary caches that layers share.
    pub rotaries: Vec<attention::RotaryCaches>,
    pub store: Store,
    pub checkpoint: &'a mut Checkpoint,
    pub config: &'a ModelConfig,
    /// Type of activations, scales and float weights.
    pub dtype: FloatType,
    /// What experts of 4-bit floats become.
    pub mxfp4: Mxfp4,
    pub notices: Vec<String>,
}

impl Builder<'_> {
    /// A node named by its place (`/model/layers.0/mlp/gate_proj/MatMul`) with one output.
    pub(crate) fn node<const N: usize>(
        &mut self,
        scope: &str,
        op: (&str, &str),
        attrs: [(&str, Attr); N],
        inputs: &[Option<ValueId>],
    ) -> Result<ValueId, ConvertError> {
        let name = format!("{scope}/{}", op.1);
        let output = format!("{name}/output_0");
        let [value] = self.named_node(&name, op, attrs.into(), inputs, [&output])?;
        Ok(value)
    }

    /// A node whose outputs are named by the caller; an empty name is an output that nobody wants.
    pub(crate) fn named_node<const N: usize>(
        &mut self,
        name: &str,
        op: (&str, &str),
        attrs: Attrs,
        inputs: &[Option<ValueId>],
        outputs: [&str; N],
    ) -> Result<[ValueId; N], ConvertError> {
        let used = inputs.iter().rposition(Option::is_some).map_or(0, |i| i + 1);
        let made = self.graph.add_node(name, op, attrs, &inputs[..used], &outputs)?;
        let mut values = [ValueId(0); N];
        values.copy_from_slice(&made);
        Ok(values)
    }

    /// A small int64 constant, kept in the model file.
    pub(crate) fn ints(&mut self, name: &str, values: &[i64]) -> Result<ValueId, ConvertError> {
        if let Some(id) = self.graph.find(name) {
            return Ok(id);
        }
        let tensor = Tensor::from_slice([values.len()], values)
            .map_err(|e| doyen_graph::ir::GraphError::Graph(e.to_string()))?;
        Ok(self.graph.add_constant(name, tensor))
    }

    /// A scalar constant of the package's float type, kept in the model file.
    pub(crate) fn scalar(&mut self, value: f32) -> Result<ValueId, ConvertError> {
        self.scalar_of(self.dtype, value)
    }

    pub(crate) fn scalar_of(&mut self, ty: FloatType, value: f32) -> Result<ValueId, ConvertError> {
        let name = format!("/model/constants/{}/{value}", ty.dtype());
        if let Some(id) = self.graph.find(&name) {
            return Ok(id);
        }
        let tensor = Tensor::from_f32(ty.dtype(), Shape::from([]), &[value])
            .map_err(|e| doyen_graph::ir::GraphError::Graph(e.to_string()))?;
        Ok(self.graph.add_constant(&name, tensor))
    }

    /// `x` times a factor; `x` itself where that is 1.
    pub(crate) fn scaled(&mut self, scope: &str, x: ValueId, factor: f32) -> Result<ValueId, ConvertError> {
        #[allow(clippy::float_cmp, reason = "exactly 1 stands for no factor")]
        if factor == 1.0 {
            return Ok(x);
        }
        let factor = self.scalar(factor)?;
        self.node(&format!("{scope}/scale"), ("", "Mul"), [], &[Some(x), Some(factor)])
    }

    /// A tensor of the checkpoint.
    pub(crate) fn take(&mut self, name: &str, shape: &[usize]) -> Result<Weight, ConvertError> {
        self.checkpoint.take(name, shape)
    }

    /// A vector of the checkpoint as a float initializer of the same name, with `shift` added.
    pub(crate) fn vector(
        &mut self,
        name: &str,
        len: usize,
        shift: f32,
        part: Part,
    ) -> Result<ValueId, ConvertError> {
        let weight = self.take(name, &[len])?;
        let rows = vec![if shift == 0.0 { Rows::Tensor(weight) } else { Rows::Shifted(weight, shift) }];
        Ok(self.store.float(&mut self.graph, name, self.dtype, &[len], rows, part))
    }

    /// Tells the user something once.
    pub(crate) fn notice(&mut self, text: String) {
        if !self.notices.contains(&text) {
            self.notices.push(text);
        }
    }

    pub(crate) fn spec(&self, bits: Bits, formats: &LayerFormats) -> QuantSpec {
        QuantSpec {
            bits,
            block: formats.block.columns(),
            zero_points: ZeroPointKind::rounded(formats.zero_points),
            scale_type: self.dtype,
        }
    }

    /// What the weights of one matrix are stored as. Where nobody asked for the width, codes of the source are kept
    /// if all of the weights have some and the consumer takes their zero points.
    pub(crate) fn stored(
        &self,
        weights: &[Weight],
        width: Width,
        asked: bool,
        consumer: Consumer,
        formats: &LayerFormats,
    ) -> Stored {
        let kinds: Option<Vec<_>> = weights.iter().map(|w| w.dtype().codes()).collect();
        let form = kinds.filter(|_| !asked).and_then(|kinds| common_form(&kinds));
        match (form.filter(|f| consumer.takes(f.2)), width) {
            (Some((bits, block, zero_points)), _) => {
                let spec = QuantSpec { bits, block, zero_points, scale_type: self.dtype };
                Stored::Quantized(spec, Made::Carried)
            }
            // Nobody asked for another rounding of weights that were rounded once.
            (None, _) if !asked && weights.iter().any(|w| w.dtype().is_lost()) => Stored::Float,
            (None, Width::Bits(bits)) => Stored::Quantized(self.spec(bits, formats), Made::Rounded),
            (None, Width::Float) => Stored::Float,
        }
    }
}

/// How a matrix is stored, decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// In the package's float type.
    Float,
    /// As codes.
    Quantized(QuantSpec, Made),
}

/// How one projection is stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Format<'a> {
    pub width: Width,
    /// Whether somebody chose the width.
    pub asked: bool,
    pub layer: &'a LayerFormats,
    pub part: Part,
}
