//! Mixers with a state of fixed size: the gated delta net over `CausalConvWithState` and `LinearAttention`, and the short
//! convolution.
//!
//! States have the names and layouts of ONNX Runtime GenAI's builder: `past.N.conv` `[batch, channels, taps - 1]` and
//! `past.N.recurrent` `[batch, value heads, key channels, value channels]`.

use super::{
    Builder, Format, MS,
    linear::{Piece, scope},
};
use crate::{
    ConvertError,
    config::{DeltaNet, DeltaProjections, ShortConv},
    job::Rows,
    options::{LayerFormats, Width},
    report::Part,
};
use doyen_graph::ir::{Attrs, Dim, Fact, ValueId};
use doyen_tensor::{FloatType, Tensor};

/// Added to the sum of squares of a query or key head before it is divided by the root, as the released code does.
const L2_EPSILON: f32 = 1e-6;

impl Builder<'_> {
    /// The gated delta net of one layer over normed activations `[batch, sequence, hidden]`.
    pub(crate) fn delta_net(
        &mut self,
        layer: usize,
        d: &DeltaNet,
        x: ValueId,
        formats: &LayerFormats,
    ) -> Result<ValueId, ConvertError> {
        let module = format!("model.layers.{layer}.linear_attn");
        let at = scope(&module);
        let (width, asked) = (formats.attention, formats.asked.attention);
        let format = Format { width, asked, layer: formats, part: Part::Attention };
        // A few rows each, and every state depends on them.
        let exact = Format { width: Width::Float, asked: true, ..format };
        let input = (x, self.config.hidden);
        let pieces = Pieces::of(&module, d);
        let qkv = self.linear(&format!("{module}.in_proj_qkv"), &pieces.qkv, false, input, format)?;
        let z = self.linear(&format!("{module}.in_proj_z"), &pieces.z, false, input, format)?;
        let b = self.linear(&format!("{module}.in_proj_b"), &pieces.b, false, input, exact)?;
        let a = self.linear(&format!("{module}.in_proj_a"), &pieces.a, false, input, exact)?;
        let mixed =
            self.convolution(layer, &format!("{module}.conv1d"), qkv, (d.channels(), d.taps), (true, false))?;
        let sizes = [d.keys(), d.keys(), d.values()].map(|n| n as i64);
        let parts =
            self.ints(&format!("/model/constants/ints/{},{},{}", sizes[0], sizes[1], sizes[2]), &sizes)?;
        let name = format!("{at}/Split");
        let outputs = [0, 1, 2].map(|i| format!("{name}/output_{i}"));
        let [q, k, v] = self.named_node(
            &name,
            ("", "Split"),
            [("axis", (-1i64).into())].into(),
            &[Some(mixed), Some(parts)],
            [&outputs[0], &outputs[1], &outputs[2]],
        )?;
        let (q, k) = (self.unit_heads(&format!("{at}/q"), q, d)?, self.unit_heads(&format!("{at}/k"), k, d)?);
        let [decay, beta] = self.gates(&module, d, [a, b])?;
        let y = self.linear_attention(layer, d, [q, k, v, decay, beta])?;
        let gamma = self.vector(&format!("{module}.norm.weight"), d.value_dim, 0.0, Part::Norms)?;
        let attrs = [("epsilon", self.config.norm.eps.into()), ("activation", "silu".into())];
        let gated =
            self.node(&format!("{at}/norm"), (MS, "GatedRMSNorm"), attrs, &[Some(y), Some(gamma), Some(z)])?;
        let output = format!("{module}.out_proj");
        self.project(&output, self.config.hidden, false, (gated, d.values()), format)
    }

    /// The short convolution of one layer over normed activations.
    pub(crate) fn short_conv(
        &mut self,
        layer: usize,
        c: ShortConv,
        x: ValueId,
        formats: &LayerFormats,
    ) -> Result<ValueId, ConvertError> {
        let module = format!("model.layers.{layer}.conv");
        let at = scope(&module);
        let (width, asked) = (formats.attention, formats.asked.attention);
        let format = Format { width, asked, layer: formats, part: Part::Attention };
        let hidden = self.config.hidden;
        let all = self.project(&format!("{module}.in_proj"), 3 * hidden, c.bias, (x, hidden), format)?;
        let parts =
            self.ints(&format!("/model/constants/ints/{hidden},{hidden},{hidden}"), &[hidden as i64; 3])?;
        let name = format!("{at}/Split");
        let outputs = [0, 1, 2].map(|i| format!("{name}/output_{i}"));
        let [before, after, x] = self.named_node(
            &name,
            ("", "Split"),
            [("axis", (-1i64).into())].into(),
            &[Some(all), Some(parts)],
            [&outputs[0], &outputs[1], &outputs[2]],
        )?;
        let gated = self.node(&format!("{at}/before"), ("", "Mul"), [], &[Some(before), Some(x)])?;
        let y =
            self.convolution(layer, &format!("{module}.conv"), gated, (hidden, c.taps), (false, c.bias))?;
        let y = self.node(&format!("{at}/after"), ("", "Mul"), [], &[Some(after), Some(y)])?;
        self.project(&format!("{module}.out_proj"), hidden, c.bias, (y, hidden), format)
    }

    /// A causal convolution of each channel of `x [batch, sequence, channels]`.
    fn convolution(
        &mut self,
        layer: usize,
        module: &str,
        x: ValueId,
        (channels, taps): (usize, usize),
        (silu, bias): (bool, bool),
    ) -> Result<ValueId, ConvertError> {
        let at = scope(module);
        let stored = format!("{module}.weight");
        let shape = [channels, 1, taps];
        let weight = vec![Rows::Tensor(self.checkpoint.take_as(&stored, &shape, (channels, taps))?)];
        let weight = self.store.float(&mut self.graph, &stored, self.dtype, &shape, weight, Part::Attention);
        let bias = if bias {
            Some(self.vector(&format!("{module}.bias"), channels, 0.0, Part::Attention)?)
        } else {
            None
        };
        let swap = || [("perm", vec![0i64, 2, 1].into())];
        let x = self.node(&format!("{at}/input"), ("", "Transpose"), swap(), &[Some(x)])?;
        let dims = [channels.into(), (taps - 1).into()];
        let attrs = [("activation", if silu { "silu" } else { "none" }.into())];
        let inputs = [Some(x), Some(weight), bias];
        let y =
            self.recurrent(layer, "conv", (&at, "CausalConvWithState"), attrs.into(), (&inputs, &dims))?;
        self.node(&format!("{at}/output"), ("", "Transpose"), swap(), &[Some(y)])
    }

    /// Every head of queries or keys divided by its length: `x / sqrt(sum(x^2) + eps)` is the RMS norm
    /// `x / sqrt(mean(x^2) + eps / n)` with a weight of `1 / sqrt(n)`.
    fn unit_heads(&mut self, at: &str, x: ValueId, d: &DeltaNet) -> Result<ValueId, ConvertError> {
        let (heads, dim) = (d.key_heads, d.key_dim);
        let split = self
            .ints(&format!("/model/constants/ints/0,0,{heads},{dim}"), &[0, 0, heads as i64, dim as i64])?;
        let joined =
            self.ints(&format!("/model/constants/ints/0,0,{}", heads * dim), &[0, 0, (heads * dim) as i64])?;
        let name = format!("/model/constants/unit/{dim}");
        let weight = if let Some(weight) = self.graph.find(&name) {
            weight
        } else {
            let values = vec![1.0 / (dim as f32).sqrt(); dim];
            let tensor = Tensor::from_f32(self.dtype.dtype(), [dim], &values)
                .map_err(|e| doyen_graph::ir::GraphError::Graph(e.to_string()))?;
            self.graph.add_constant(&name, tensor)
        };
        let attrs = [
            ("axis", (-1i64).into()),
            ("epsilon", (L2_EPSILON / dim as f32).into()),
            ("stash_type", 1i64.into()),
        ];
        let x = self.node(&format!("{at}/split"), ("", "Reshape"), [], &[Some(x), Some(split)])?;
        let x = self.node(at, ("", "SimplifiedLayerNormalization"), attrs, &[Some(x), Some(weight)])?;
        self.node(&format!("{at}/join"), ("", "Reshape"), [], &[Some(x), Some(joined)])
    }

    /// Decay `-exp(A_log) softplus(a + dt_bias)` and update rate `sigmoid(b)` of every value head.
    fn gates(
        &mut self,
        module: &str,
        d: &DeltaNet,
        [a, b]: [ValueId; 2],
    ) -> Result<[ValueId; 2], ConvertError> {
        let at = scope(module);
        // The operator takes both in float32, whatever the activations are.
        let mut vector = |name: &str| {
            let name = format!("{module}.{name}");
            let rows = vec![Rows::Tensor(self.take(&name, &[d.value_heads])?)];
            let (heads, ty) = ([d.value_heads], FloatType::F32);
            Ok::<_, ConvertError>(self.store.float(&mut self.graph, &name, ty, &heads, rows, Part::Attention))
        };
        let (log, bias) = (vector("A_log")?, vector("dt_bias")?);
        let scale = self.node(&format!("{at}/A"), ("", "Exp"), [], &[Some(log)])?;
        let scale = self.node(&format!("{at}/A"), ("", "Neg"), [], &[Some(scale)])?;
        let name = format!("{at}/LinearAttentionGate");
        let outputs = [0, 1].map(|i| format!("{name}/output_{i}"));
        let inputs = [Some(a), Some(bias), Some(scale), Some(b)];
        let op = (MS, "LinearAttentionGate");
        self.named_node(&name, op, Attrs::default(), &inputs, [&outputs[0], &outputs[1]])
    }

    fn linear_attention(
        &mut self,
        layer: usize,
        d: &DeltaNet,
        [q, k, v, decay, beta]: [ValueId; 5],
    ) -> Result<ValueId, ConvertError> {
        let at = scope(&format!("model.layers.{layer}.linear_attn"));
        let attrs = [
            ("q_num_heads", (d.key_heads as i64).into()),
            ("kv_num_heads", (d.value_heads as i64).into()),
            ("update_rule", "gated_delta".into()),
            ("scale", (1.0 / (d.key_dim as f64).sqrt() as f32).into()),
        ];
        let inputs = [Some(q), Some(k), Some(v), None, Some(decay), Some(beta)];
        let dims = [d.value_heads.into(), d.key_dim.into(), d.value_dim.into()];
        self.recurrent(layer, "recurrent", (&at, "LinearAttention"), attrs.into(), (&inputs, &dims))
    }

    /// A node whose fourth input is the layer's state of this kind and whose second output is the next.
    fn recurrent(
        &mut self,
        layer: usize,
        kind: &str,
        (at, op): (&str, &str),
        attrs: Attrs,
        (inputs, dims): (&[Option<ValueId>], &[Dim]),
    ) -> Result<ValueId, ConvertError> {
        let dims: Vec<Dim> = [Dim::from("batch_size")].into_iter().chain(dims.iter().cloned()).collect();
        let fact = Fact::new(self.dtype.dtype(), dims);
        let past = self.graph.add_input(&format!("past.{layer}.{kind}"), fact.clone());
        let mut inputs = inputs.to_vec();
        inputs.resize(inputs.len().max(4), None);
        inputs[3] = Some(past);
        let name = format!("{at}/{op}");
        let outputs = [format!("{name}/output_0"), format!("present.{layer}.{kind}")];
        let [y, present] = self.named_node(&name, (MS, op), attrs, &inputs, [&outputs[0], &outputs[1]])?;
        self.graph.value_mut(present).fact = fact;
        self.graph.add_output(present);
        Ok(y)
    }
}

/// Rows of the checkpoint's projections by what they make.
struct Pieces {
    qkv: Vec<Piece>,
    z: Vec<Piece>,
    b: Vec<Piece>,
    a: Vec<Piece>,
}

impl Pieces {
    fn of(module: &str, d: &DeltaNet) -> Self {
        let whole = |name: &str, rows: usize| vec![Piece::whole(format!("{module}.{name}"), rows)];
        match d.projections {
            DeltaProjections::Apart => Self {
                qkv: whole("in_proj_qkv", d.channels()),
                z: whole("in_proj_z", d.values()),
                b: whole("in_proj_b", d.value_heads),
                a: whole("in_proj_a", d.value_heads),
            },
            DeltaProjections::ByKeyHead => {
                let (dk, dv) = (d.key_dim, d.values() / d.key_heads);
                let heads = d.value_heads / d.key_heads;
                let of = |name: &str, each: usize, from: usize, rows: usize| {
                    Piece::of_heads(&format!("{module}.{name}"), (d.key_heads, each), &(from..from + rows))
                };
                let qkvz = |from, rows| of("in_proj_qkvz", 2 * (dk + dv), from, rows);
                let ba = |from| of("in_proj_ba", 2 * heads, from, heads);
                Self {
                    qkv: [qkvz(0, dk), qkvz(dk, dk), qkvz(2 * dk, dv)].concat(),
                    z: qkvz(2 * dk + dv, dv),
                    b: ba(0),
                    a: ba(heads),
                }
            }
        }
    }
}
