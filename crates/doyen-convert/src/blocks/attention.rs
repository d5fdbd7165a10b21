//! Attention: projections, head norms, rotation and cache in one `GroupQueryAttention`.

use super::{Builder, Format, MS, linear::scope};
use crate::{ConvertError, job::Rows, options::LayerFormats, quant::form, report::Part, source::SourceType};
use doyen_graph::ir::{Attrs, Dim, Fact, ValueId};
use doyen_tensor::{DType, Tensor};
use std::sync::Arc;

/// What all layers' attention shares: values computed once from the mask, and the rotary caches.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionInputs {
    /// int32 `[batch]`: each row's total length minus 1.
    seqlens: ValueId,
    /// int32 scalar: the mask's length.
    total: ValueId,
    cos: ValueId,
    sin: ValueId,
}

impl Builder<'_> {
    /// Adds the `attention_mask` input, the lengths derived from it, and the rotary caches.
    pub(crate) fn attention_inputs(&mut self) -> Result<AttentionInputs, ConvertError> {
        let shape = [Dim::from("batch_size"), Dim::from("total_sequence_length")];
        let mask = self.graph.add_input("attention_mask", Fact::new(DType::I64, shape));
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

        let (cos, sin) = (self.rotary_cache("cos_cache", false), self.rotary_cache("sin_cache", true));
        Ok(AttentionInputs { seqlens, total, cos, sin })
    }

    fn rotary_cache(&mut self, name: &str, sine: bool) -> ValueId {
        let positions = self.config.max_positions;
        let (frequencies, factor) = self.config.rope.frequencies(self.config.attention.head_dim);
        let frequencies: Arc<[f32]> = frequencies.into();
        let shape = [positions, frequencies.len()];
        let rows = vec![Rows::Rotary { frequencies, factor, positions, sine }];
        self.store.float(&mut self.graph, name, self.dtype, &shape, rows, Part::Rotary)
    }

    /// The attention of one layer over normed activations `[batch, sequence, hidden]`.
    pub(crate) fn attention(
        &mut self,
        layer: usize,
        x: ValueId,
        shared: AttentionInputs,
        formats: &LayerFormats,
    ) -> Result<ValueId, ConvertError> {
        let a = self.config.attention;
        let module = format!("model.layers.{layer}.self_attn");
        let (width, asked) = (formats.attention, formats.asked.attention);
        let format = Format { width, asked, layer: formats, part: Part::Attention };
        let input = (x, self.config.hidden);
        let (q_rows, kv_rows) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let part = |name: &str, rows: usize| (format!("{module}.{name}"), rows);
        let stack = [part("q_proj", q_rows), part("k_proj", kv_rows), part("v_proj", kv_rows)];
        let (q, k, v) = if a.qk_norm || !self.stackable(&stack, asked) {
            let mut project = |this: &(String, usize)| {
                self.linear(&this.0, std::slice::from_ref(this), a.qkv_bias, input, format)
            };
            let (mut q, mut k, v) = (project(&stack[0])?, project(&stack[1])?, project(&stack[2])?);
            if a.qk_norm {
                q = self.head_norm(&format!("{module}.q_norm"), q, a.heads)?;
                k = self.head_norm(&format!("{module}.k_norm"), k, a.kv_heads)?;
            }
            (q, Some(k), Some(v))
        } else {
            (self.linear(&format!("{module}.qkv_proj"), &stack, a.qkv_bias, input, format)?, None, None)
        };
        let out = self.group_query(layer, [Some(q), k, v], shared)?;
        let stack = [part("o_proj", self.config.hidden)];
        self.linear(&stack[0].0, &stack, a.output_bias, (out, q_rows), format)
    }

    /// Whether projections share a format. Codes of different widths that a source holds would all be stored at the
    /// widest if they were one matrix.
    fn stackable(&self, modules: &[(String, usize)], asked: bool) -> bool {
        let mut forms = modules.iter().map(|(m, _)| {
            let codes = self.checkpoint.dtype(&format!("{m}.weight")).and_then(SourceType::codes);
            codes.filter(|_| !asked).map(form)
        });
        let first = forms.next();
        forms.all(|f| Some(f) == first)
    }

    /// RMS norm of every head on its own. ONNX Runtime's CPU kernel refuses norm weights inside GroupQueryAttention,
    /// so they stand before it.
    fn head_norm(&mut self, module: &str, x: ValueId, heads: usize) -> Result<ValueId, ConvertError> {
        let dim = self.config.attention.head_dim;
        let at = scope(module);
        let split = self
            .ints(&format!("/model/constants/ints/0,0,{heads},{dim}"), &[0, 0, heads as i64, dim as i64])?;
        let joined =
            self.ints(&format!("/model/constants/ints/0,0,{}", heads * dim), &[0, 0, (heads * dim) as i64])?;
        let x = self.node(&format!("{at}/split"), ("", "Reshape"), [], &[Some(x), Some(split)])?;
        let x = self.norm(module, x, dim)?;
        self.node(&format!("{at}/join"), ("", "Reshape"), [], &[Some(x), Some(joined)])
    }

    fn group_query(
        &mut self,
        layer: usize,
        qkv: [Option<ValueId>; 3],
        shared: AttentionInputs,
    ) -> Result<ValueId, ConvertError> {
        let a = self.config.attention;
        let cache = |length: &str| {
            let dims = [Dim::from("batch_size"), a.kv_heads.into(), Dim::from(length), a.head_dim.into()];
            Fact::new(self.dtype.dtype(), dims)
        };
        let (past, present) = (cache("past_sequence_length"), cache("total_sequence_length"));
        let past_key = self.graph.add_input(&format!("past_key_values.{layer}.key"), past.clone());
        let past_value = self.graph.add_input(&format!("past_key_values.{layer}.value"), past);
        let mut attrs: Attrs = [
            ("num_heads", (a.heads as i64).into()),
            ("kv_num_heads", (a.kv_heads as i64).into()),
            ("scale", (1.0 / (a.head_dim as f64).sqrt() as f32).into()),
            ("do_rotary", 1i64.into()),
            ("rotary_interleaved", 0i64.into()),
        ]
        .into();
        if let Some(window) = self.config.layers[layer].window {
            attrs.set("local_window_size", window as i64);
        }
        let inputs = [
            qkv[0],
            qkv[1],
            qkv[2],
            Some(past_key),
            Some(past_value),
            Some(shared.seqlens),
            Some(shared.total),
            Some(shared.cos),
            Some(shared.sin),
        ];
        let name = format!("/model/layers.{layer}/self_attn/GroupQueryAttention");
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
