//! Builds small decoders node by node in the patterns that producers write, with reproducible random weights.

use crate::{
    ir::{Attr, Attrs, Dim, Fact, Graph, ValueId},
    lowered::CachePorts,
    pass::lower::{LowerSpec, StatePair, StatePorts},
};
use doyen_tensor::{DType, Tensor};

pub(super) const VOCAB: usize = 37;
pub(super) const HIDDEN: usize = 32;
pub(super) const HEADS: usize = 4;
pub(super) const KV_HEADS: usize = 2;
pub(super) const HEAD: usize = 16;
pub(super) const CONTEXT: usize = 64;

const MS: &str = "com.microsoft";

/// A graph under construction.
pub(super) struct Build {
    pub(super) g: Graph,
    pub(super) spec: LowerSpec,
    seed: u64,
    dtype: DType,
    seqlens: Option<ValueId>,
    total: Option<ValueId>,
}

/// How lengths are derived from the mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lengths {
    /// ReduceSum without the axis, Sub, Cast.
    Genai,
    /// ReduceSum keeping the axis: `seqlens_k` is `[batch, 1]`.
    Mobius,
}

impl Build {
    pub(super) fn new(dtype: DType) -> Self {
        let mut g = Graph::new("decoder", [("", 24), (MS, 1)]);
        let (b, s) = (Dim::from("batch"), Dim::from("sequence"));
        g.add_input("input_ids", Fact::new(DType::I64, [b.clone(), s]));
        g.add_input("attention_mask", Fact::new(DType::I64, [b, Dim::from("total")]));
        let spec = LowerSpec {
            input_ids: "input_ids".into(),
            attention_mask: Some("attention_mask".into()),
            position_ids: None,
            logits: "logits".into(),
            states: Vec::new(),
        };
        Self { g, spec, seed: 7, dtype, seqlens: None, total: None }
    }

    fn next(&mut self) -> u64 {
        self.seed = self.seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.seed >> 33
    }

    /// Random numbers within `+-scale`, rounded to the model's type.
    pub(super) fn floats(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| (self.next() % 2001) as f32 / 1000.0 * scale - scale).collect()
    }

    pub(super) fn weight(&mut self, name: &str, shape: &[usize], scale: f32) -> ValueId {
        let values = self.floats(shape.iter().product(), scale);
        self.g.add_constant(name, Tensor::from_f32(self.dtype, shape, &values).unwrap())
    }

    /// Norm weights around one.
    pub(super) fn gamma(&mut self, name: &str, size: usize) -> ValueId {
        let values: Vec<f32> = self.floats(size, 0.3).into_iter().map(|v| 1.0 + v).collect();
        self.g.add_constant(name, Tensor::from_f32(self.dtype, [size], &values).unwrap())
    }

    pub(super) fn bytes(&mut self, name: &str, shape: &[usize]) -> ValueId {
        let n = shape.iter().product();
        let values: Vec<u8> = (0..n).map(|_| self.next() as u8).collect();
        self.g.add_constant(name, Tensor::from_slice(shape, &values).unwrap())
    }

    pub(super) fn ints(&mut self, name: &str, values: &[i64]) -> ValueId {
        self.g.add_constant(name, Tensor::from_slice([values.len()], values).unwrap())
    }

    /// A node of one output, named after it.
    pub(super) fn node<const N: usize>(
        &mut self,
        op: &str,
        out: &str,
        attrs: [(&str, Attr); N],
        inputs: &[Option<ValueId>],
    ) -> ValueId {
        self.nodes(op, &[out], attrs, inputs)[0]
    }

    /// A node of several outputs; an empty name is an output nobody wants.
    pub(super) fn nodes<const N: usize>(
        &mut self,
        op: &str,
        outs: &[&str],
        attrs: [(&str, Attr); N],
        inputs: &[Option<ValueId>],
    ) -> Vec<ValueId> {
        const CONTRIB: [&str; 6] = [
            "MatMulNBits",
            "QMoE",
            "MoE",
            "GroupQueryAttention",
            "SkipSimplifiedLayerNormalization",
            "GatherBlockQuantized",
        ];
        let (domain, op) = match op.strip_prefix("com.microsoft::") {
            Some(op) => (MS, op),
            None if CONTRIB.contains(&op) => (MS, op),
            None => ("", op),
        };
        let named: Vec<String> = outs
            .iter()
            .enumerate()
            .map(|(i, o)| if o.is_empty() { format!("{}/unread{i}", outs[0]) } else { (*o).to_owned() })
            .collect();
        let named: Vec<&str> = named.iter().map(String::as_str).collect();
        let made = self.g.add_node(outs[0], (domain, op), Attrs::from(attrs), inputs, &named).unwrap();
        let node = self.g.nodes.last_mut().unwrap();
        for (slot, o) in node.outputs.iter_mut().zip(outs) {
            if o.is_empty() {
                *slot = None;
            }
        }
        made
    }

    /// Declares the positions as an input.
    pub(super) fn positions(&mut self) -> ValueId {
        self.spec.position_ids = Some("position_ids".into());
        let shape: [Dim; 2] = ["batch".into(), "sequence".into()];
        self.g.add_input("position_ids", Fact::new(DType::I64, shape))
    }

    pub(super) fn embed(&mut self) -> ValueId {
        let table = self.weight("embed", &[VOCAB, HIDDEN], 1.0);
        let ids = self.g.find("input_ids");
        self.node("Gather", "embedded", [], &[Some(table), ids])
    }

    pub(super) fn matmul(&mut self, out: &str, x: ValueId, k: usize, n: usize) -> ValueId {
        let w = self.weight(&format!("{out}.weight"), &[k, n], 1.7 / (k as f32).sqrt());
        self.node("MatMul", out, [], &[Some(x), Some(w)])
    }

    pub(super) fn norm(&mut self, out: &str, x: ValueId, size: usize) -> ValueId {
        let gamma = self.gamma(&format!("{out}.gamma"), size);
        self.node(
            "SimplifiedLayerNormalization",
            out,
            [("epsilon", Attr::Float(1e-6))],
            &[Some(x), Some(gamma)],
        )
    }

    /// Norm of the sum: the normed value and the sum.
    pub(super) fn skip_norm(&mut self, out: &str, x: ValueId, skip: ValueId) -> (ValueId, ValueId) {
        let gamma = self.gamma(&format!("{out}.gamma"), HIDDEN);
        let outs = [out, "", "", &format!("{out}.sum")];
        let made = self.nodes(
            "SkipSimplifiedLayerNormalization",
            &outs,
            [("epsilon", Attr::Float(1e-6))],
            &[Some(x), Some(skip), Some(gamma)],
        );
        (made[0], made[3])
    }

    /// `seqlens_k` and `total_sequence_length` out of the attention mask.
    pub(super) fn lengths(&mut self, style: Lengths) -> (ValueId, ValueId) {
        if let (Some(s), Some(t)) = (self.seqlens, self.total) {
            return (s, t);
        }
        let mask = self.g.find("attention_mask");
        let one = self.ints("one", &[1]);
        let keep = i64::from(style == Lengths::Mobius);
        let sum = self.node("ReduceSum", "mask_sum", [("keepdims", Attr::Int(keep))], &[mask, Some(one)]);
        let last = self.node("Sub", "mask_last", [], &[Some(sum), Some(one)]);
        let seqlens = self.node("Cast", "seqlens_k", [("to", Attr::Int(6))], &[Some(last)]);
        let shape = self.node("Shape", "mask_shape", [], &[mask]);
        let axis = self.g.add_constant("axis_one", Tensor::scalar(1i64));
        let extent = self.node("Gather", "mask_extent", [], &[Some(shape), Some(axis)]);
        let total = self.node("Cast", "total", [("to", Attr::Int(6))], &[Some(extent)]);
        (self.seqlens, self.total) = (Some(seqlens), Some(total));
        (seqlens, total)
    }

    pub(super) fn caches(&mut self) -> (ValueId, ValueId) {
        if let (Some(c), Some(s)) = (self.g.find("cos"), self.g.find("sin")) {
            return (c, s);
        }
        let angle = |i: usize| {
            let (p, j) = ((i / (HEAD / 2)) as f32, (i % (HEAD / 2)) as f32);
            p * 0.3f32.powf(j / 3.0)
        };
        let table = |f: fn(f32) -> f32| {
            let values: Vec<f32> = (0..CONTEXT * HEAD / 2).map(|i| f(angle(i))).collect();
            Tensor::from_f32(self.dtype, [CONTEXT, HEAD / 2], &values).unwrap()
        };
        let (cos, sin) = (table(f32::cos), table(f32::sin));
        (self.g.add_constant("cos", cos), self.g.add_constant("sin", sin))
    }

    /// GroupQueryAttention with the layer's cache ports; `extra` attributes beside heads and rotary.
    pub(super) fn attention<const N: usize>(
        &mut self,
        layer: usize,
        style: Lengths,
        [q, k, v]: [Option<ValueId>; 3],
        extra: [(&str, Attr); N],
    ) -> ValueId {
        let port = |what: &str| format!("{what}.{layer}");
        let ports = CachePorts {
            past_key: port("past_key"),
            past_value: port("past_value"),
            present_key: port("present_key"),
            present_value: port("present_value"),
        };
        let shape: [Dim; 4] = ["batch".into(), KV_HEADS.into(), "past".into(), HEAD.into()];
        let past_k = self.g.add_input(&ports.past_key, Fact::new(self.dtype, shape.clone()));
        let past_v = self.g.add_input(&ports.past_value, Fact::new(self.dtype, shape));
        let (seqlens, total) = self.lengths(style);
        let (cos, sin) = self.caches();
        let out = port("attention");
        let mut attrs = Attrs::default();
        attrs.set("num_heads", HEADS as i64).set("kv_num_heads", KV_HEADS as i64).set("do_rotary", 1i64);
        for (name, value) in extra {
            attrs.set(name, value);
        }
        let inputs = [q, k, v, Some(past_k), Some(past_v), Some(seqlens), Some(total), Some(cos), Some(sin)];
        let outs = [out.as_str(), &ports.present_key, &ports.present_value];
        let made = self.g.add_node(&out, (MS, "GroupQueryAttention"), attrs, &inputs, &outs).unwrap();
        self.g.add_output(made[1]);
        self.g.add_output(made[2]);
        self.spec.states.push(StatePair { layer, ports: StatePorts::KeyValue(ports) });
        made[0]
    }

    /// A node with a state of fixed size `[batch, dims..]`, its fourth input and second output.
    pub(super) fn recurrent(
        &mut self,
        op: &str,
        out: &str,
        (attrs, inputs): (Attrs, &[Option<ValueId>]),
        dims: &[usize],
    ) -> ValueId {
        let (past, present) = (format!("past.{out}"), format!("present.{out}"));
        let shape: Vec<Dim> =
            [Dim::from("batch")].into_iter().chain(dims.iter().map(|&d| d.into())).collect();
        let state = self.g.add_input(&past, Fact::new(self.dtype, shape));
        let mut inputs = inputs.to_vec();
        inputs.resize(inputs.len().max(4), None);
        inputs[3] = Some(state);
        let made = self.g.add_node(out, (MS, op), attrs, &inputs, &[out, &present]).unwrap();
        self.g.add_output(made[1]);
        self.spec.states.push(StatePair { layer: 0, ports: StatePorts::Fixed { past, present } });
        made[0]
    }

    pub(super) fn silu_mlp(&mut self, layer: usize, x: ValueId) -> ValueId {
        let name = |what: &str| format!("mlp.{layer}.{what}");
        let gate = self.matmul(&name("gate"), x, HIDDEN, 48);
        let up = self.matmul(&name("up"), x, HIDDEN, 48);
        let s = self.node("Sigmoid", &name("sigmoid"), [], &[Some(gate)]);
        let silu = self.node("Mul", &name("silu"), [], &[Some(gate), Some(s)]);
        let act = self.node("Mul", &name("act"), [], &[Some(silu), Some(up)]);
        self.matmul(&name("down"), act, 48, HIDDEN)
    }

    /// The head on a normed value; ends the graph.
    pub(super) fn head(mut self, x: ValueId) -> (Graph, LowerSpec) {
        let logits = self.matmul("logits", x, HIDDEN, VOCAB);
        self.g.outputs.insert(0, logits);
        (self.g, self.spec)
    }
}

/// Two layers as the genai builder writes Llama: packed QKV, SiLU as Sigmoid and Mul, skip norms.
pub(super) fn genai_llama(dtype: DType) -> (Graph, LowerSpec) {
    let mut b = Build::new(dtype);
    let mut residual = b.embed();
    let mut x = b.norm("first_norm", residual, HIDDEN);
    for layer in 0..2 {
        let qkv = b.matmul(&format!("qkv.{layer}"), x, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
        let y = b.attention(layer, Lengths::Genai, [Some(qkv), None, None], []);
        let o = b.matmul(&format!("o.{layer}"), y, HEADS * HEAD, HIDDEN);
        let (normed, sum) = b.skip_norm(&format!("post_norm.{layer}"), residual, o);
        let mlp = b.silu_mlp(layer, normed);
        (x, residual) = b.skip_norm(&format!("next_norm.{layer}"), sum, mlp);
    }
    b.head(x)
}

/// Two layers of Qwen3-MoE as mobius and our converter write it: separate projections, norms of every head between
/// reshapes, QMoE with 4-bit gate and up and 8-bit down, router weights given where `given`.
pub(super) fn qwen3_moe(given: bool) -> (Graph, LowerSpec) {
    const EXPERTS: usize = 6;
    const INTER: usize = 32;
    let mut b = Build::new(DType::F32);
    let mut residual = b.embed();
    let mut x = b.norm("first_norm", residual, HIDDEN);
    let per_head = b.ints("per_head", &[0, 0, -1, HEAD as i64]);
    let merged = b.ints("merged", &[0, 0, -1]);
    let flat = b.ints("flat", &[-1, EXPERTS as i64]);
    for layer in 0..2 {
        let name = |what: &str| format!("{what}.{layer}");
        let mut qk = Vec::new();
        for (what, heads) in [("q", HEADS), ("k", KV_HEADS)] {
            let p = b.matmul(&name(what), x, HIDDEN, heads * HEAD);
            let split = b.node("Reshape", &name(&format!("{what}_heads")), [], &[Some(p), Some(per_head)]);
            let gamma = b.gamma(&name(&format!("{what}_gamma")), HEAD);
            let attrs = [("epsilon", Attr::Float(1e-6)), ("axis", Attr::Int(-1))];
            let normed = b.node(
                "RMSNormalization",
                &name(&format!("{what}_norm")),
                attrs,
                &[Some(split), Some(gamma)],
            );
            qk.push(Some(b.node(
                "Reshape",
                &name(&format!("{what}_merged")),
                [],
                &[Some(normed), Some(merged)],
            )));
        }
        let v = b.matmul(&name("v"), x, HIDDEN, KV_HEADS * HEAD);
        let y = b.attention(layer, Lengths::Mobius, [qk[0], qk[1], Some(v)], []);
        let o = b.matmul(&name("o"), y, HEADS * HEAD, HIDDEN);
        let (normed, sum) = b.skip_norm(&name("post_norm"), residual, o);
        let router = b.matmul(&name("router"), normed, HIDDEN, EXPERTS);
        let logits = b.node("Reshape", &name("router_flat"), [], &[Some(router), Some(flat)]);
        let mixing = given
            .then(|| b.node("Softmax", &name("router_weights"), [("axis", Attr::Int(-1))], &[Some(logits)]));
        let fc1 = b.bytes(&name("fc1"), &[EXPERTS, 2 * INTER, HIDDEN / 2]);
        let s1 = b.weight(&name("fc1_scales"), &[EXPERTS, 2 * INTER, HIDDEN / 16], 0.05);
        let fc2 = b.bytes(&name("fc2"), &[EXPERTS, HIDDEN, INTER]);
        let s2 = b.weight(&name("fc2_scales"), &[EXPERTS, HIDDEN, INTER / 16], 0.004);
        let mut inputs = vec![Some(normed), Some(logits), Some(fc1), Some(s1), None, Some(fc2), Some(s2)];
        if given {
            inputs.resize(14, None);
            inputs.push(mixing);
        }
        let attrs = [
            ("k", Attr::Int(2)),
            ("activation_type", Attr::from("swiglu")),
            ("swiglu_fusion", Attr::Int(1)),
            ("normalize_routing_weights", Attr::Int(i64::from(!given))),
            ("expert_weight_bits", Attr::Int(4)),
            ("fc2_expert_weight_bits", Attr::Int(8)),
            ("block_size", Attr::Int(16)),
        ];
        let moe = b.node("QMoE", &name("moe"), attrs, &inputs);
        (x, residual) = b.skip_norm(&name("next_norm"), sum, moe);
    }
    b.head(x)
}

/// A recurrent layer as the genai builder writes Qwen3.5, but for what varies elsewhere: channels last, a dilation, more
/// query heads than states and a decay for every key channel; then one of attention.
pub(super) fn hybrid() -> (Graph, LowerSpec) {
    const KEY: usize = 8;
    const PARTS: [usize; 3] = [HEADS * KEY, KV_HEADS * KEY, KV_HEADS * HEAD];
    const CHANNELS: usize = PARTS[0] + PARTS[1] + PARTS[2];
    let mut b = Build::new(DType::F32);
    let embedded = b.embed();
    let x = b.norm("first_norm", embedded, HIDDEN);
    let mixed = b.matmul("mixed", x, HIDDEN, CHANNELS);
    let (weight, bias) =
        (b.weight("conv.weight", &[CHANNELS, 1, 3], 0.6), b.weight("conv.bias", &[CHANNELS], 0.2));
    let attrs = Attrs::from([
        ("activation", Attr::from("silu")),
        ("channels_last", Attr::Int(1)),
        ("dilation", Attr::Int(2)),
    ]);
    let operands = [Some(mixed), Some(weight), Some(bias)];
    let conv = b.recurrent("CausalConvWithState", "conv", (attrs, &operands), &[4, CHANNELS]);
    let parts = b.ints("parts", &PARTS.map(|p| p as i64));
    let qkv = b.nodes("Split", &["q", "k", "v"], [("axis", Attr::Int(-1))], &[Some(conv), Some(parts)]);
    let a = b.matmul("a", x, HIDDEN, KV_HEADS * KEY);
    let (dt_bias, scale) =
        (b.weight("dt_bias", &[KV_HEADS * KEY], 0.5), b.gamma("decay_scale", KV_HEADS * KEY));
    let scale = b.node("Neg", "minus_scale", [], &[Some(scale)]);
    let decay =
        b.node("com.microsoft::LinearAttentionGate", "decay", [], &[Some(a), Some(dt_bias), Some(scale)]);
    let attrs = Attrs::from([
        ("q_num_heads", Attr::Int(HEADS as i64)),
        ("kv_num_heads", Attr::Int(KV_HEADS as i64)),
        ("update_rule", Attr::from("gated")),
    ]);
    let operands = [Some(qkv[0]), Some(qkv[1]), Some(qkv[2]), None, Some(decay)];
    let y = b.recurrent("LinearAttention", "linear", (attrs, &operands), &[KV_HEADS, KEY, HEAD]);
    let (gamma, gate) = (b.gamma("gate_gamma", HEAD), b.matmul("gate", x, HIDDEN, HEADS * HEAD));
    let normed = b.node("com.microsoft::GatedRMSNorm", "gated", [], &[Some(y), Some(gamma), Some(gate)]);
    let o = b.matmul("o.0", normed, HEADS * HEAD, HIDDEN);
    let (x, sum) = b.skip_norm("next_norm", embedded, o);
    let qkv = b.matmul("qkv.1", x, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
    let y = b.attention(1, Lengths::Genai, [Some(qkv), None, None], []);
    let o = b.matmul("o.1", y, HEADS * HEAD, HIDDEN);
    let (x, _) = b.skip_norm("last_norm", sum, o);
    b.head(x)
}
