//! Projections: `MatMulNBits`, or `MatMul` over the transposed view of the stored rows.

use super::{Builder, Format, MS, Stored};
use crate::{
    ConvertError,
    config::Tensors,
    job::Rows,
    source::Weight,
    store::{Consumer, Quantized},
};
use doyen_graph::ir::{Attrs, ValueId};
use doyen_tensor::format::Bits;
use std::ops::Range;

/// The matrix that a projection multiplies with, as operator inputs.
pub(crate) enum Matrix {
    /// Float rows `[N, K]` as stored in the checkpoint.
    Float(ValueId),
    /// Codes `[N, blocks, bytes]` with scales and zero points.
    Quantized { tensors: Quantized, bits: Bits, block: usize },
}

/// Output rows and input columns of a projection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extent {
    pub n: usize,
    pub k: usize,
}

/// Rows of a tensor in the checkpoint that belong to one projection.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    /// Name without `.weight`.
    pub module: String,
    /// Rows of the tensor.
    pub total: usize,
    /// Those of the projection.
    pub rows: Range<usize>,
}

impl Piece {
    pub(crate) fn whole(module: impl Into<String>, rows: usize) -> Self {
        Self { module: module.into(), total: rows, rows: 0..rows }
    }

    /// Of a tensor with `each` rows for every one of `heads`, these rows of each head.
    pub(crate) fn of_heads(module: &str, (heads, each): (usize, usize), rows: &Range<usize>) -> Vec<Self> {
        (0..heads)
            .map(|h| Self {
                module: module.to_owned(),
                total: heads * each,
                rows: h * each + rows.start..h * each + rows.end,
            })
            .collect()
    }

    /// The projections of one input with this many rows each, from below `module`.
    pub(crate) fn of<const N: usize>(module: &str, tensors: Tensors<N>, rows: [usize; N]) -> [Self; N] {
        let total = rows.iter().sum();
        let mut start = 0;
        std::array::from_fn(|i| match tensors {
            Tensors::Each(names) => Self::whole(format!("{module}.{}", names[i]), rows[i]),
            Tensors::Fused(name) => {
                let range = start..start + rows[i];
                start = range.end;
                Self { module: format!("{module}.{name}"), total, rows: range }
            }
        })
    }
}

impl Builder<'_> {
    /// A projection by rows of the checkpoint's tensors, one piece after the other. Values and tensors of a stack take
    /// `name`.
    pub(crate) fn linear(
        &mut self,
        name: &str,
        pieces: &[Piece],
        bias: bool,
        input: (ValueId, usize),
        format: Format<'_>,
    ) -> Result<ValueId, ConvertError> {
        let (x, k) = input;
        let n = pieces.iter().map(|p| p.rows.len()).sum();
        let weights = pieces
            .iter()
            .map(|p| {
                Ok(self.take(&format!("{}.weight", p.module), &[p.total, k])?.part(p.rows.clone(), false))
            })
            .collect::<Result<Vec<_>, ConvertError>>()?;
        let bias = if bias {
            let rows = pieces
                .iter()
                .map(|p| Ok(self.take(&format!("{}.bias", p.module), &[p.total])?.part(p.rows.clone(), true)))
                .map(|w: Result<_, ConvertError>| w.map(Rows::Tensor))
                .collect::<Result<Vec<_>, _>>()?;
            let bias = format!("{name}.bias");
            Some(self.store.float(&mut self.graph, &bias, self.dtype, &[n], rows, format.part))
        } else {
            None
        };
        let matrix = self.matrix(name, weights, Extent { n, k }, format);
        let at = scope(name);
        self.multiply(&at, &format!("{at}/output"), x, &matrix, (Extent { n, k }, bias))
    }

    /// A projection by one whole tensor.
    pub(crate) fn project(
        &mut self,
        module: &str,
        rows: usize,
        bias: bool,
        input: (ValueId, usize),
        format: Format<'_>,
    ) -> Result<ValueId, ConvertError> {
        self.linear(module, &[Piece::whole(module, rows)], bias, input, format)
    }

    pub(crate) fn matrix(
        &mut self,
        name: &str,
        weights: Vec<Weight>,
        extent: Extent,
        format: Format<'_>,
    ) -> Matrix {
        let stored = self.stored(&weights, format.width, format.asked, Consumer::MatMul, format.layer);
        let rows = weights.into_iter().map(Rows::Tensor).collect();
        match stored {
            Stored::Float => Matrix::Float(self.store.float(
                &mut self.graph,
                &format!("{name}.weight"),
                self.dtype,
                &[extent.n, extent.k],
                rows,
                format.part,
            )),
            Stored::Quantized(spec, made) => {
                let consumer = Consumer::MatMul;
                let spec_made = (spec, made);
                let tensors =
                    self.store.quantized(&mut self.graph, name, spec_made, consumer, rows, format.part);
                Matrix::Quantized { tensors, bits: spec.bits, block: spec.block }
            }
        }
    }

    /// `x W^T + bias`, named `output`.
    ///
    /// Float weights keep the checkpoint's rows, each contiguous along K: that is how CPU kernels read them, and an
    /// embedding can share them. `MatMul` wants `[K, N]`, so a Transpose of the initializer stands between, which every
    /// runtime folds.
    pub(crate) fn multiply(
        &mut self,
        scope: &str,
        output: &str,
        x: ValueId,
        matrix: &Matrix,
        (Extent { n, k }, bias): (Extent, Option<ValueId>),
    ) -> Result<ValueId, ConvertError> {
        let last = |op: &str| (format!("{scope}/{op}"), [output]);
        let [value] = match *matrix {
            Matrix::Float(rows) => {
                let perm = [("perm", vec![1i64, 0].into())];
                let columns = self.node(scope, ("", "Transpose"), perm, &[Some(rows)])?;
                let inputs = [Some(x), Some(columns)];
                match bias {
                    None => {
                        let (name, outputs) = last("MatMul");
                        self.named_node(&name, ("", "MatMul"), Attrs::default(), &inputs, outputs)?
                    }
                    Some(b) => {
                        let product = self.node(scope, ("", "MatMul"), [], &inputs)?;
                        let (name, outputs) = last("Add");
                        let inputs = [Some(product), Some(b)];
                        self.named_node(&name, ("", "Add"), Attrs::default(), &inputs, outputs)?
                    }
                }
            }
            Matrix::Quantized { tensors, bits, block } => {
                let attrs = [
                    ("K", (k as i64).into()),
                    ("N", (n as i64).into()),
                    ("bits", (bits.get() as i64).into()),
                    ("block_size", (block as i64).into()),
                    ("accuracy_level", 4i64.into()),
                ];
                let Quantized { codes, scales, zero_points } = tensors;
                let inputs = [Some(x), Some(codes), Some(scales), zero_points, None, bias];
                let (name, outputs) = last("MatMulNBits");
                self.named_node(&name, (MS, "MatMulNBits"), attrs.into(), &inputs, outputs)?
            }
        };
        Ok(value)
    }
}

/// The node scope of a module: `model.layers.0.mlp.up_proj` is `/model/layers.0/mlp/up_proj`.
pub(crate) fn scope(module: &str) -> String {
    let mut out = String::with_capacity(module.len() + 1);
    let mut previous_is_list = false;
    for piece in module.split('.') {
        out.push(if previous_is_list { '.' } else { '/' });
        out.push_str(piece);
        previous_is_list = piece == "layers";
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn scopes_follow_modules() {
        assert_eq!(super::scope("model.layers.10.mlp.up_proj"), "/model/layers.10/mlp/up_proj");
        assert_eq!(super::scope("lm_head"), "/lm_head");
    }
}
