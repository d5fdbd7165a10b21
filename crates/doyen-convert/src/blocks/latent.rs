//! Multi-head latent attention: projections, the rotation of a part of each head, and `Attention` over expanded caches.
//!
//! The caches are those that every runtime knows, a key and a value for each head; one that recognises the latent row
//! keeps that instead.

use super::{Builder, Format, MS, linear::scope};
use crate::{
    ConvertError,
    config::{Latent, Norm, NormKind},
    options::LayerFormats,
    report::Part,
};
use doyen_graph::ir::{Attrs, Dim, Fact, ValueId};

/// Values shared by the projections of one layer.
struct Layer<'a> {
    a: &'a Latent,
    module: String,
    format: Format<'a>,
    /// Positions, cosines and sines.
    rotary: [Option<ValueId>; 3],
}

impl Builder<'_> {
    /// The attention of one layer over normed activations `[batch, sequence, hidden]`; `positions [batch, sequence]`.
    pub(crate) fn latent_attention(
        &mut self,
        layer: usize,
        a: &Latent,
        x: ValueId,
        positions: Option<ValueId>,
        formats: &LayerFormats,
    ) -> Result<ValueId, ConvertError> {
        let (width, asked) = (formats.attention, formats.asked.attention);
        let caches = self.rotaries.iter().find(|r| r.rope == a.rope);
        let rotary = [positions, caches.map(|c| c.cos), caches.map(|c| c.sin)];
        let module = format!("model.layers.{layer}.self_attn");
        let format = Format { width, asked, layer: formats, part: Part::Attention };
        let l = Layer { a, module, format, rotary };
        let q = self.latent_queries(&l, x)?;
        let (k, v) = self.latent_keys_and_values(&l, x)?;
        let out = self.expanded_attention(layer, &l, [q, k, v])?;
        let output = format!("{}.o_proj", l.module);
        self.project(&output, self.config.hidden, a.bias, (out, a.heads * a.v_head_dim), format)
    }

    fn inner_norm(&mut self, module: &str, x: ValueId, width: usize) -> Result<ValueId, ConvertError> {
        let norm = Norm { kind: NormKind::Rms, eps: Latent::NORM_EPS, zero_centred: false };
        self.norm(module, x, width, norm)
    }

    /// `[batch, sequence, heads * (nope + rope)]`.
    fn latent_queries(&mut self, l: &Layer<'_>, x: ValueId) -> Result<ValueId, ConvertError> {
        let (a, module) = (l.a, &l.module);
        let (rows, input) = (a.heads * a.head_dim(), (x, self.config.hidden));
        let q = match a.q_rank {
            None => self.project(&format!("{module}.q_proj"), rows, false, input, l.format)?,
            Some(rank) => {
                let q = self.project(&format!("{module}.q_a_proj"), rank, a.bias, input, l.format)?;
                let q = self.inner_norm(&format!("{module}.q_a_layernorm"), q, rank)?;
                self.project(&format!("{module}.q_b_proj"), rows, false, (q, rank), l.format)?
            }
        };
        let at = format!("{}/q", scope(module));
        let heads = self.reshaped(&format!("{at}/heads"), q, &[0, 0, a.heads, a.head_dim()])?;
        let [own, rotated] = self.halves(&at, heads, [a.nope, a.rope.dim])?;
        let rotated = self.reshaped(&format!("{at}/rope"), rotated, &[0, 0, a.heads * a.rope.dim])?;
        let rotated = self.rotated(&at, l, rotated, a.heads)?;
        let rotated = self.reshaped(&format!("{at}/rope_heads"), rotated, &[0, 0, a.heads, a.rope.dim])?;
        let both = self.node(&at, ("", "Concat"), [("axis", (-1i64).into())], &[Some(own), Some(rotated)])?;
        self.reshaped(&format!("{at}/rows"), both, &[0, 0, rows])
    }

    /// `[batch, sequence, heads * (nope + rope)]` and `[batch, sequence, heads * v_head_dim]`.
    fn latent_keys_and_values(
        &mut self,
        l: &Layer<'_>,
        x: ValueId,
    ) -> Result<(ValueId, ValueId), ConvertError> {
        let (a, module, at) = (l.a, &l.module, scope(&l.module));
        let name = format!("{module}.kv_a_proj_with_mqa");
        let input = (x, self.config.hidden);
        let both = self.project(&name, a.kv_rank + a.rope.dim, a.bias, input, l.format)?;
        let [row, shared] = self.halves(&format!("{at}/kv_a"), both, [a.kv_rank, a.rope.dim])?;
        let row = self.inner_norm(&format!("{module}.kv_a_layernorm"), row, a.kv_rank)?;
        let width = a.heads * (a.nope + a.v_head_dim);
        let kv = self.project(&format!("{module}.kv_b_proj"), width, false, (row, a.kv_rank), l.format)?;
        let kv = self.reshaped(&format!("{at}/kv/heads"), kv, &[0, 0, a.heads, a.nope + a.v_head_dim])?;
        let [own, v] = self.halves(&format!("{at}/kv"), kv, [a.nope, a.v_head_dim])?;

        let at = format!("{at}/k");
        let shared = self.rotated(&at, l, shared, 1)?;
        let shared = self.reshaped(&format!("{at}/shared"), shared, &[0, 0, 1, a.rope.dim])?;
        let repeats = self.sizes(&[1, 1, a.heads, 1])?;
        let shared = self.node(&at, ("", "Expand"), [], &[Some(shared), Some(repeats)])?;
        let k = self.node(&at, ("", "Concat"), [("axis", (-1i64).into())], &[Some(own), Some(shared)])?;
        let k = self.reshaped(&format!("{at}/rows"), k, &[0, 0, a.heads * a.head_dim()])?;
        let v = self.reshaped(&format!("{}/v/rows", scope(module)), v, &[0, 0, a.heads * a.v_head_dim])?;
        Ok((k, v))
    }

    fn expanded_attention(
        &mut self,
        layer: usize,
        l: &Layer<'_>,
        [q, k, v]: [ValueId; 3],
    ) -> Result<ValueId, ConvertError> {
        let a = l.a;
        let cache = |length: &str, size: usize| {
            let dims = [Dim::from("batch_size"), a.heads.into(), Dim::from(length), size.into()];
            Fact::new(self.dtype.dtype(), dims)
        };
        let facts = |length| [cache(length, a.head_dim()), cache(length, a.v_head_dim)];
        let ([past_k, past_v], present) = (facts("past_sequence_length"), facts("total_sequence_length"));
        let past_key = self.graph.add_input(&format!("past_key_values.{layer}.key"), past_k);
        let past_value = self.graph.add_input(&format!("past_key_values.{layer}.value"), past_v);
        let attrs: Attrs = [
            ("q_num_heads", (a.heads as i64).into()),
            ("kv_num_heads", (a.heads as i64).into()),
            ("scale", a.scale.into()),
            ("is_causal", 1i64.into()),
        ]
        .into();
        let name = format!("{}/Attention", scope(&l.module));
        let inputs = [Some(q), Some(k), Some(v), None, Some(past_key), Some(past_value)];
        let outputs =
            [format!("{name}/output_0"), format!("present.{layer}.key"), format!("present.{layer}.value")];
        let outputs = [outputs[0].as_str(), &outputs[1], &outputs[2]];
        let [out, key, value] = self.named_node(&name, ("", "Attention"), attrs, &inputs, outputs)?;
        for (id, fact) in [key, value].into_iter().zip(present) {
            self.graph.value_mut(id).fact = fact;
            self.graph.add_output(id);
        }
        Ok(out)
    }

    fn rotated(
        &mut self,
        at: &str,
        l: &Layer<'_>,
        x: ValueId,
        heads: usize,
    ) -> Result<ValueId, ConvertError> {
        let attrs =
            [("interleaved", i64::from(l.a.rope.interleaved).into()), ("num_heads", (heads as i64).into())];
        let [positions, cos, sin] = l.rotary;
        self.node(at, (MS, "RotaryEmbedding"), attrs, &[Some(x), positions, cos, sin])
    }

    /// The two parts of the last axis.
    fn halves(&mut self, at: &str, x: ValueId, sizes: [usize; 2]) -> Result<[ValueId; 2], ConvertError> {
        let sizes = self.sizes(&sizes)?;
        let name = format!("{at}/Split");
        let outputs = [format!("{name}/output_0"), format!("{name}/output_1")];
        let attrs = [("axis", (-1i64).into())].into();
        self.named_node(&name, ("", "Split"), attrs, &[Some(x), Some(sizes)], [&outputs[0], &outputs[1]])
    }

    fn reshaped(&mut self, at: &str, x: ValueId, shape: &[usize]) -> Result<ValueId, ConvertError> {
        let shape = self.sizes(shape)?;
        self.node(at, ("", "Reshape"), [], &[Some(x), Some(shape)])
    }

    fn sizes(&mut self, sizes: &[usize]) -> Result<ValueId, ConvertError> {
        let values: Vec<i64> = sizes.iter().map(|&n| n as i64).collect();
        let text: Vec<String> = values.iter().map(ToString::to_string).collect();
        self.ints(&format!("/model/constants/ints/{}", text.join(",")), &values)
    }
}
