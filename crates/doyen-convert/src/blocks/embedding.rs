//! Token embedding and output head, which may be one block of bytes.

use super::{
    Builder, Format, MS, Stored,
    linear::{Extent, Matrix, scope},
};
use crate::{
    ConvertError,
    config::Head,
    job::{Made, Rows},
    options::{LayerFormats, TABLE_WIDTH, Width},
    report::Part,
    store::{Consumer, Quantized},
};
use doyen_graph::ir::{Attrs, Dim, Fact, ValueId};
use doyen_tensor::format::Bits;

const EMBED: &str = "model.embed_tokens";
const HEAD: &str = "lm_head";

/// The embedding as placed, for a head that shares it.
pub(crate) struct Embedding {
    /// Activations `[batch, sequence, hidden]`.
    pub hidden: ValueId,
    table: Table,
}

enum Table {
    Float(ValueId),
    Quantized { tensors: Quantized, bits: Bits, block: usize, carried: bool },
}

impl Builder<'_> {
    /// Rows of the embedding for `input_ids`.
    pub(crate) fn embedding(
        &mut self,
        input_ids: ValueId,
        width: Option<Width>,
        formats: &LayerFormats,
    ) -> Result<Embedding, ConvertError> {
        let (v, h) = (self.config.vocab, self.config.hidden);
        let weight = [self.take(&format!("{EMBED}.weight"), &[v, h])?];
        let (asked, width) = (width.is_some(), width.unwrap_or(TABLE_WIDTH));
        let stored = self.stored(&weight, width, asked, Consumer::Gather, formats);
        let rows = weight.map(Rows::Tensor).into();
        let at = scope(EMBED);
        match stored {
            Stored::Float => {
                let name = format!("{EMBED}.weight");
                let table =
                    self.store.float(&mut self.graph, &name, self.dtype, &[v, h], rows, Part::Embedding);
                let axis = [("axis", 0i64.into())];
                let rows = self.node(&at, ("", "Gather"), axis, &[Some(table), Some(input_ids)])?;
                let hidden = self.scaled(&at, rows, self.config.embedding_scale)?;
                Ok(Embedding { hidden, table: Table::Float(table) })
            }
            Stored::Quantized(spec, made) => {
                let bits = spec.bits;
                if !h.is_multiple_of(bits.per_byte()) {
                    let expected =
                        format!("a multiple of {}, to pack at {} bits", bits.per_byte(), bits.get());
                    return Err(ConvertError::config("hidden_size", h, expected));
                }
                let tensors = self.store.quantized(
                    &mut self.graph,
                    EMBED,
                    (spec, made),
                    Consumer::Gather,
                    rows,
                    Part::Embedding,
                );
                let attrs = [
                    ("bits", (bits.get() as i64).into()),
                    ("block_size", (spec.block as i64).into()),
                    ("gather_axis", 0i64.into()),
                    ("quantize_axis", 1i64.into()),
                ];
                let Quantized { codes, scales, zero_points } = tensors;
                let inputs = [Some(codes), Some(input_ids), Some(scales), zero_points];
                let rows = self.node(&at, (MS, "GatherBlockQuantized"), attrs, &inputs)?;
                let hidden = self.scaled(&at, rows, self.config.embedding_scale)?;
                let carried = made == Made::Carried;
                Ok(Embedding {
                    hidden,
                    table: Table::Quantized { tensors, bits, block: spec.block, carried },
                })
            }
        }
    }

    /// The `logits` output `[batch, sequence, vocab]` of normed activations.
    pub(crate) fn head(
        &mut self,
        x: ValueId,
        embedding: &Embedding,
        width: Option<Width>,
        formats: &LayerFormats,
    ) -> Result<(), ConvertError> {
        let extent = Extent { n: self.config.vocab, k: self.config.hidden };
        let asked = width.is_some();
        // A tied head without a width of its own reads what the source's codes became.
        let width = match (width, &embedding.table) {
            (Some(w), _) => w,
            (None, Table::Quantized { bits, carried: true, .. }) if self.config.head.tied => {
                Width::Bits(*bits)
            }
            (None, _) => TABLE_WIDTH,
        };
        let shared = if self.config.head.tied { self.shared(embedding, width)? } else { None };
        let matrix = if let Some(matrix) = shared {
            matrix
        } else {
            let module = if self.config.head.tied { EMBED } else { HEAD };
            let weight = self.take(&format!("{module}.weight"), &[extent.n, extent.k])?;
            self.matrix(HEAD, vec![weight], extent, Format { width, asked, layer: formats, part: Part::Head })
        };
        let bias = if self.config.head.bias {
            Some(self.vector(&format!("{HEAD}.bias"), extent.n, 0.0, Part::Head)?)
        } else {
            None
        };
        let logits = self.logits(x, &matrix, (extent, bias))?;
        let shape = [Dim::from("batch_size"), Dim::from("sequence_length"), extent.n.into()];
        self.graph.value_mut(logits).fact = Fact::new(self.dtype.dtype(), shape);
        // The logits come first, before the caches that layers have added.
        self.graph.outputs.insert(0, logits);
        Ok(())
    }

    /// The product with the head's matrix, divided and capped; the last value is named `logits`.
    fn logits(
        &mut self,
        x: ValueId,
        matrix: &Matrix,
        shape: (Extent, Option<ValueId>),
    ) -> Result<ValueId, ConvertError> {
        let Head { divisor, softcap, .. } = self.config.head;
        let at = scope(HEAD);
        #[allow(clippy::float_cmp, reason = "exactly 1 stands for no division")]
        let divides = divisor != 1.0;
        let product = if divides || softcap.is_some() { format!("{at}/output") } else { "logits".to_owned() };
        let mut value = self.multiply(&at, &product, x, matrix, shape)?;
        let mut step = |name: &str, op: &str, other: Option<f32>, last: bool, x: ValueId| {
            let other = other.map(|v| self.scalar(v)).transpose()?;
            let node = format!("{at}/{name}/{op}");
            let output = if last { "logits".to_owned() } else { format!("{node}/output_0") };
            let [value] = self.named_node(&node, ("", op), Attrs::default(), &[Some(x), other], [&output])?;
            Ok::<_, ConvertError>(value)
        };
        if divides {
            value = step("divisor", "Div", Some(divisor), softcap.is_none(), value)?;
        }
        if let Some(cap) = softcap {
            value = step("softcap", "Div", Some(cap), false, value)?;
            value = step("softcap", "Tanh", None, false, value)?;
            value = step("softcap", "Mul", Some(cap), true, value)?;
        }
        Ok(value)
    }

    /// The embedding's bytes as the head's matrix, where both formats say the same. GatherBlockQuantized reads
    /// `[V, bytes]`, MatMulNBits `[V, blocks, bytes of a block]`: the same bytes when blocks divide a row.
    fn shared(&mut self, embedding: &Embedding, width: Width) -> Result<Option<Matrix>, ConvertError> {
        let h = self.config.hidden;
        let why = match (&embedding.table, width) {
            (Table::Float(table), Width::Float) => return Ok(Some(Matrix::Float(*table))),
            (Table::Quantized { tensors, bits, block, .. }, Width::Bits(head)) if head == *bits => {
                if h.is_multiple_of(*block) {
                    let (blocks, bytes) = (h / block, bits.packed_len(*block));
                    let shape = [self.config.vocab as i64, blocks as i64, bytes as i64];
                    let shape = self.ints("/lm_head/constants/shape", &shape)?;
                    let inputs = [Some(tensors.codes), Some(shape)];
                    let codes = self.node(&scope(HEAD), ("", "Reshape"), [], &inputs)?;
                    let tensors = Quantized { codes, ..*tensors };
                    return Ok(Some(Matrix::Quantized { tensors, bits: *bits, block: *block }));
                }
                format!("block {block} does not divide hidden_size = {h}")
            }
            (Table::Float(_), Width::Bits(b)) => {
                format!("the embedding is float, the head has {} bits", b.get())
            }
            (Table::Quantized { bits, .. }, head) => {
                format!("the embedding has {} bits, the head is {head}", bits.get())
            }
        };
        self.notice(format!("embedding and head are tied in the checkpoint, stored twice here: {why}"));
        Ok(None)
    }
}
