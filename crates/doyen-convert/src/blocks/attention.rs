//! Attention: projections, norms, rotation and cache in one `GroupQueryAttention`.

use super::{
    Builder, Format, MS,
    linear::{Piece, scope},
};
use crate::{
    ConvertError,
    config::{Attention, Gate, Mixer, Norm, NormKind, QkNorm, Rope},
    job::Rows,
    options::LayerFormats,
    quant::form,
    report::Part,
    source::SourceType,
};
use doyen_graph::ir::{Attrs, Dim, Fact, ValueId};
use doyen_tensor::{DType, Tensor};
use std::sync::Arc;

/// What all layers' attention shares: values computed once from the mask.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionInputs {
    /// Where a layer's operator takes them.
    lengths: Option<Lengths>,
    /// int64 `[batch, sequence]`, where a layer rotates outside of its operator.
    pub positions: Option<ValueId>,
}

#[derive(Debug, Clone, Copy)]
struct Lengths {
    /// int32 `[batch]`: each row's total length minus 1.
    seqlens: ValueId,
    /// int32 scalar: the mask's length.
    total: ValueId,
}

/// Cosines and sines of the positions, for layers of the same rotation.
#[derive(Debug, Clone)]
pub(crate) struct RotaryCaches {
    pub rope: Rope,
    pub cos: ValueId,
    pub sin: ValueId,
}

impl Builder<'_> {
    /// Adds the `attention_mask` input and the lengths (and positions) derived from it.
    pub(crate) fn attention_inputs(&mut self, input_ids: ValueId) -> Result<AttentionInputs, ConvertError> {
        let shape = [Dim::from("batch_size"), Dim::from("total_sequence_length")];
        let mask = self.graph.add_input("attention_mask", Fact::new(DType::I64, shape));
        let lengths = self.config.attentions().next().is_some().then(|| self.lengths(mask)).transpose()?;
        let rotates = |mixer: &Mixer| match mixer {
            Mixer::Attention(a) => a.rotates_apart(),
            Mixer::Latent(_) => true,
            Mixer::DeltaNet(_) | Mixer::ShortConv(_) => false,
        };
        let positions = self.config.layers.iter().any(|l| rotates(&l.mixer));
        let positions = positions.then(|| self.positions(mask, input_ids)).transpose()?;
        Ok(AttentionInputs { lengths, positions })
    }

    fn lengths(&mut self, mask: ValueId) -> Result<Lengths, ConvertError> {
        let at = "/model/attention_mask";
        let one = self.ints("/model/constants/ints/1", &[1])?;
        let to_i32 = || [("to", i64::from(DType::I32.onnx()).into())];

        let sum = [("keepdims", 0i64.into())];
        let lengths = self.node(at, ("", "ReduceSum"), sum, &[Some(mask), Some(one)])?;
        let last = self.node(at, ("", "Sub"), [], &[Some(lengths), Some(one)])?;
        let seqlens = self.node(&format!("{at}/seqlens"), ("", "Cast"), to_i32(), &[Some(last)])?;

        let index = self.graph.add_constant("/model/constants/int/1", Tensor::scalar(1i64));
        let extents = self.node(at, ("", "Shape"), [], &[Some(mask)])?;
        let axis = [("axis", 0i64.into())];
        let length = self.node(at, ("", "Gather"), axis, &[Some(extents), Some(index)])?;
        let total = self.node(&format!("{at}/total"), ("", "Cast"), to_i32(), &[Some(length)])?;
        Ok(Lengths { seqlens, total })
    }

    /// Positions of the new tokens: those of the mask's ones, the last of which are new.
    fn positions(&mut self, mask: ValueId, input_ids: ValueId) -> Result<ValueId, ConvertError> {
        let at = "/model/position_ids";
        let axis = self.graph.add_constant("/model/constants/int/axis", Tensor::scalar(1i64));
        let one = self.ints("/model/constants/ints/1", &[1])?;
        let counts = self.node(at, ("", "CumSum"), [], &[Some(mask), Some(axis)])?;
        let all = self.node(at, ("", "Sub"), [], &[Some(counts), Some(one)])?;
        let extents = [("start", 1i64.into()), ("end", 2i64.into())];
        let new = self.node(at, ("", "Shape"), extents, &[Some(input_ids)])?;
        let start = self.node(at, ("", "Neg"), [], &[Some(new)])?;
        let end = self.ints("/model/constants/ints/end", &[i64::MAX])?;
        self.node(at, ("", "Slice"), [], &[Some(all), Some(start), Some(end), Some(one)])
    }

    /// `x` of this many heads rotated by position.
    fn rotate(
        &mut self,
        module: &str,
        a: &Attention,
        (x, heads): (ValueId, usize),
        positions: ValueId,
    ) -> Result<ValueId, ConvertError> {
        let Some(caches) = a.rope.as_ref().and_then(|rope| self.rotaries.iter().find(|r| r.rope == *rope))
        else {
            return Ok(x);
        };
        let (cos, sin, dim) = (caches.cos, caches.sin, caches.rope.dim);
        let mut attrs: Attrs = [("interleaved", i64::from(caches.rope.interleaved).into())].into();
        if dim != a.head_dim {
            attrs.set("num_heads", heads as i64);
            attrs.set("rotary_embedding_dim", dim as i64);
        }
        let inputs = [Some(x), Some(positions), Some(cos), Some(sin)];
        let name = format!("{}/RotaryEmbedding", scope(module));
        let output = format!("{name}/output_0");
        let [rotated] = self.named_node(&name, (MS, "RotaryEmbedding"), attrs, &inputs, [&output])?;
        Ok(rotated)
    }

    /// Places the rotary caches of all layers, one pair for each rotation.
    pub(crate) fn place_rotaries(&mut self) {
        for layer in &self.config.layers {
            let Some(rope) = layer.mixer.rope() else { continue };
            if self.rotaries.iter().any(|r| r.rope == *rope) {
                continue;
            }
            let suffix = match self.rotaries.len() {
                0 => String::new(),
                n => format!("_{n}"),
            };
            let (cos, sin) = (
                self.rotary_cache(&format!("cos_cache{suffix}"), rope, false),
                self.rotary_cache(&format!("sin_cache{suffix}"), rope, true),
            );
            self.rotaries.push(RotaryCaches { rope: rope.clone(), cos, sin });
        }
    }

    fn rotary_cache(&mut self, name: &str, rope: &Rope, sine: bool) -> ValueId {
        let positions = self.config.max_positions;
        let (frequencies, factor) = rope.frequencies();
        let frequencies: Arc<[f32]> = frequencies.into();
        let shape = [positions, frequencies.len()];
        let rows = vec![Rows::Rotary { frequencies, factor, positions, sine }];
        self.store.float(&mut self.graph, name, self.dtype, &shape, rows, Part::Rotary)
    }

    /// The attention of one layer over normed activations `[batch, sequence, hidden]`.
    pub(crate) fn attention(
        &mut self,
        layer: usize,
        a: &Attention,
        x: ValueId,
        shared: AttentionInputs,
        formats: &LayerFormats,
    ) -> Result<ValueId, ConvertError> {
        let module = format!("model.layers.{layer}.{}", a.names.module);
        let (width, asked) = (formats.attention, formats.asked.attention);
        let format = Format { width, asked, layer: formats, part: Part::Attention };
        let input = (x, self.config.hidden);
        let pieces = Piece::of(&module, a.names.qkv, a.rows());
        let apart = a.qk_norm.is_some() || a.clip.is_some() || a.gate.is_some() || a.rotates_apart();
        let qkv = if apart || !self.stackable(&pieces, asked) {
            let [q, k, v] = pieces.map(|p| vec![p]);
            let q = if a.gate == Some(Gate::InQuery) { Self::half_of_heads(&q, a, 0) } else { q };
            let mut project = |name: &str, pieces: &[Piece]| {
                self.linear(&format!("{module}.{name}"), pieces, a.qkv_bias, input, format)
            };
            let mut qkv = [project("q_proj", &q)?, project("k_proj", &k)?, project("v_proj", &v)?];
            self.prepare(&module, a, shared.positions, &mut qkv)?;
            qkv.map(Some)
        } else {
            let stack = format!("{module}.qkv_proj");
            [Some(self.linear(&stack, &pieces, a.qkv_bias, input, format)?), None, None]
        };
        let mut out = self.group_query(layer, a, qkv, shared)?;
        if let Some(gate) = a.gate {
            let (pieces, bias) = match gate {
                Gate::InQuery => {
                    (Self::half_of_heads(&Piece::of(&module, a.names.qkv, a.rows()), a, 1), a.qkv_bias)
                }
                Gate::Module(name) => (vec![Piece::whole(format!("{module}.{name}"), a.rows()[0])], false),
            };
            let gate = self.linear(&format!("{module}.gate_proj"), &pieces, bias, input, format)?;
            let at = scope(&module);
            let gate = self.node(&format!("{at}/gate"), ("", "Sigmoid"), [], &[Some(gate)])?;
            out = self.node(&at, ("", "Mul"), [], &[Some(out), Some(gate)])?;
        }
        let output = format!("{module}.{}", a.names.output);
        self.project(&output, self.config.hidden, a.output_bias, (out, a.rows()[0]), format)
    }

    /// The first or second half of every head of a query projection that holds two values for each.
    fn half_of_heads(query: &[Piece], a: &Attention, half: usize) -> Vec<Piece> {
        let module = query.first().map_or("", |p| &p.module);
        let rows = half * a.head_dim..(half + 1) * a.head_dim;
        Piece::of_heads(module, (a.heads, 2 * a.head_dim), &rows)
    }

    /// Norms, limits and rotations of queries, keys and values, as far as the operator does not make them.
    fn prepare(
        &mut self,
        module: &str,
        a: &Attention,
        positions: Option<ValueId>,
        qkv: &mut [ValueId; 3],
    ) -> Result<(), ConvertError> {
        let norms = || a.names.norms.into_iter().zip([a.heads, a.kv_heads]).enumerate();
        for (i, (name, heads)) in norms() {
            let norm = format!("{module}.{name}");
            match a.qk_norm {
                Some(QkNorm::Heads) => qkv[i] = self.head_norm(&norm, qkv[i], heads, a.head_dim)?,
                Some(QkNorm::Whole) => {
                    qkv[i] = self.norm(&norm, qkv[i], heads * a.head_dim, self.rms())?;
                }
                Some(QkNorm::RotatedHeads) | None => {}
            }
        }
        if let Some(limit) = a.clip {
            let (low, high) = (self.scalar(-limit)?, self.scalar(limit)?);
            for (value, name) in qkv.iter_mut().zip(["q", "k", "v"]) {
                let at = scope(&format!("{module}.{name}_clip"));
                *value = self.node(&at, ("", "Clip"), [], &[Some(*value), Some(low), Some(high)])?;
            }
        }
        for (i, (name, heads)) in norms() {
            let norm = format!("{module}.{name}");
            if let Some(positions) = positions.filter(|_| a.rotates_apart()) {
                qkv[i] = self.rotate(&norm, a, (qkv[i], heads), positions)?;
            }
            if a.qk_norm == Some(QkNorm::RotatedHeads) {
                qkv[i] = self.head_norm(&norm, qkv[i], heads, a.head_dim)?;
            }
        }
        Ok(())
    }

    /// The norm of query and key heads.
    const fn rms(&self) -> Norm {
        Norm { kind: NormKind::Rms, ..self.config.norm }
    }

    /// Whether projections share a format. Codes of different widths that a source holds would all be stored at the
    /// widest if they were one matrix.
    fn stackable(&self, pieces: &[Piece], asked: bool) -> bool {
        let mut forms = pieces.iter().map(|p| {
            let codes = self.checkpoint.dtype(&format!("{}.weight", p.module)).and_then(SourceType::codes);
            codes.filter(|_| !asked).map(form)
        });
        let first = forms.next();
        forms.all(|f| Some(f) == first)
    }

    /// RMS norm of every head on its own. ONNX Runtime's CPU kernel refuses norm weights inside GroupQueryAttention,
    /// so they stand before it.
    fn head_norm(
        &mut self,
        module: &str,
        x: ValueId,
        heads: usize,
        dim: usize,
    ) -> Result<ValueId, ConvertError> {
        let at = scope(module);
        let split = self
            .ints(&format!("/model/constants/ints/0,0,{heads},{dim}"), &[0, 0, heads as i64, dim as i64])?;
        let joined =
            self.ints(&format!("/model/constants/ints/0,0,{}", heads * dim), &[0, 0, (heads * dim) as i64])?;
        let x = self.node(&format!("{at}/split"), ("", "Reshape"), [], &[Some(x), Some(split)])?;
        let x = self.norm(module, x, dim, self.rms())?;
        self.node(&format!("{at}/join"), ("", "Reshape"), [], &[Some(x), Some(joined)])
    }

    fn group_query(
        &mut self,
        layer: usize,
        a: &Attention,
        qkv: [Option<ValueId>; 3],
        shared: AttentionInputs,
    ) -> Result<ValueId, ConvertError> {
        let module = format!("model.layers.{layer}.{}", a.names.module);
        let cache = |length: &str| {
            let dims = [Dim::from("batch_size"), a.kv_heads.into(), Dim::from(length), a.head_dim.into()];
            Fact::new(self.dtype.dtype(), dims)
        };
        let (past, present) = (cache("past_sequence_length"), cache("total_sequence_length"));
        let past_key = self.graph.add_input(&format!("past_key_values.{layer}.key"), past.clone());
        let past_value = self.graph.add_input(&format!("past_key_values.{layer}.value"), past);
        let rope = a.rope.as_ref().filter(|_| !a.rotates_apart());
        let caches = rope.and_then(|rope| self.rotaries.iter().find(|r| r.rope == *rope));
        let caches = caches.map(|c| (c.cos, c.sin));
        let sinks = if a.sinks {
            Some(self.vector(&format!("{module}.sinks"), a.heads, 0.0, Part::Attention)?)
        } else {
            None
        };
        let interleaved = a.rope.as_ref().is_some_and(|r| r.interleaved);
        let mut attrs: Attrs = [
            ("num_heads", (a.heads as i64).into()),
            ("kv_num_heads", (a.kv_heads as i64).into()),
            ("scale", a.scale.into()),
            ("do_rotary", i64::from(caches.is_some()).into()),
            ("rotary_interleaved", i64::from(interleaved).into()),
        ]
        .into();
        if let Some(window) = a.window {
            attrs.set("local_window_size", window as i64);
        }
        if let Some(cap) = a.softcap {
            attrs.set("softcap", cap);
        }
        let inputs = [
            qkv[0],
            qkv[1],
            qkv[2],
            Some(past_key),
            Some(past_value),
            shared.lengths.map(|l| l.seqlens),
            shared.lengths.map(|l| l.total),
            caches.map(|c| c.0),
            caches.map(|c| c.1),
            None,
            None,
            sinks,
        ];
        let name = format!("{}/GroupQueryAttention", scope(&module));
        let outputs =
            [format!("{name}/output_0"), format!("present.{layer}.key"), format!("present.{layer}.value")];
        let [out, key, value] = self.named_node(
            &name,
            (MS, "GroupQueryAttention"),
            attrs,
            &inputs,
            [&outputs[0], &outputs[1], &outputs[2]],
        )?;
        for id in [key, value] {
            self.graph.value_mut(id).fact = present.clone();
            self.graph.add_output(id);
        }
        Ok(out)
    }
}
