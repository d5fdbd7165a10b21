//! The contract's worked examples, traps and relations between equal models in different layouts.

use super::*;
use crate::ir::Attr;
use crate::ops::Op;
use doyen_tensor::{DType, ExpertId};
use proptest::prelude::*;
use std::collections::BTreeMap;

const NAMES: [&str; 15] = [
    "input",
    "router_probs",
    "fc1_experts_weights",
    "fc1_scales",
    "fc1_experts_bias",
    "fc2_experts_weights",
    "fc2_scales",
    "fc2_experts_bias",
    "fc3_experts_weights",
    "fc3_scales",
    "fc3_experts_bias",
    "fc1_zero_points",
    "fc2_zero_points",
    "fc3_zero_points",
    "router_weights",
];

/// A node with its inputs by name.
#[derive(Clone, Default)]
struct Case {
    attrs: Attrs,
    inputs: BTreeMap<&'static str, Tensor>,
}

impl Case {
    fn attr(mut self, name: &str, value: impl Into<Attr>) -> Self {
        self.attrs.set(name, value);
        self
    }

    fn input(mut self, name: &'static str, t: Tensor) -> Self {
        assert!(NAMES.contains(&name));
        self.inputs.insert(name, t);
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.inputs.remove(name);
        self
    }

    fn run(&self) -> Result<Vec<f64>, OpError> {
        let op = Op::parse("com.microsoft", "QMoE", 1, &self.attrs)?;
        let inputs: Vec<Option<&Tensor>> = NAMES.iter().map(|n| self.inputs.get(n)).collect();
        Ok(op.eval(&inputs, 1)?.remove(0).to_f64()?)
    }

    fn error(&self) -> String {
        self.run().unwrap_err().to_string()
    }
}

fn floats(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_slice(shape.to_vec(), values).unwrap()
}

fn bytes(shape: &[usize], values: &[u8]) -> Tensor {
    Tensor::from_slice(shape.to_vec(), values).unwrap()
}

/// A small generator, so that every case is the same on every run.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.0 >> 33
    }

    fn floats(&mut self, shape: &[usize]) -> Tensor {
        let n = shape.iter().product();
        let v: Vec<f32> = (0..n).map(|_| (self.next() % 2001) as f32 / 1000.0 - 1.0).collect();
        floats(shape, &v)
    }

    fn codes(&mut self, n: usize, bits: Bits) -> Vec<u8> {
        (0..n).map(|_| (self.next() % (1 << bits.get())) as u8).collect()
    }
}

/// Codes of one projection before packing, so that a test can store them in several layouts.
#[derive(Clone)]
struct Bank {
    e: usize,
    n: usize,
    k: usize,
    block: usize,
    bits: Bits,
    codes: Vec<u8>,
    scales: Vec<f32>,
    zero_points: Vec<u8>,
    bias: Vec<f32>,
}

impl Bank {
    fn random(rng: &mut Rng, (e, n, k): (usize, usize, usize), block: usize, bits: Bits) -> Self {
        let blocks = k.div_ceil(block);
        Self {
            e,
            n,
            k,
            block,
            bits,
            codes: rng.codes(e * n * k, bits),
            scales: rng.floats(&[e * n * blocks]).to_f32().unwrap(),
            zero_points: rng.codes(e * n * blocks, bits),
            bias: rng.floats(&[e * n]).to_f32().unwrap(),
        }
    }

    fn blocks(&self) -> usize {
        self.k.div_ceil(self.block)
    }

    /// The same bank with its rows in another order.
    fn permuted(&self, order: impl Fn(usize) -> usize) -> Self {
        let rows = |width: usize| {
            let mut at = Vec::new();
            for e in 0..self.e {
                for r in 0..self.n {
                    at.extend((0..width).map(|c| (e * self.n + order(r)) * width + c));
                }
            }
            at
        };
        let mut out = self.clone();
        out.codes = rows(self.k).iter().map(|&i| self.codes[i]).collect();
        out.scales = rows(self.blocks()).iter().map(|&i| self.scales[i]).collect();
        out.zero_points = rows(self.blocks()).iter().map(|&i| self.zero_points[i]).collect();
        out.bias = rows(1).iter().map(|&i| self.bias[i]).collect();
        out
    }

    /// Rows `from..to` of every expert.
    fn rows(&self, from: usize, to: usize) -> Self {
        let mut p = self.permuted(|r| from + r % (to - from));
        let keep = to - from;
        let cut = |v: usize| (0..self.e).flat_map(move |e| (0..keep * v).map(move |i| e * self.n * v + i));
        p.codes = cut(self.k).map(|i| p.codes[i]).collect();
        p.scales = cut(self.blocks()).map(|i| p.scales[i]).collect();
        p.zero_points = cut(self.blocks()).map(|i| p.zero_points[i]).collect();
        p.bias = cut(1).map(|i| p.bias[i]).collect();
        p.n = keep;
        p
    }

    /// The same values at a wider width: codes and zero points do not change.
    fn widened(&self, bits: Bits) -> Self {
        Self { bits, ..self.clone() }
    }

    fn put(&self, case: Case, [w, s, b, z]: [&'static str; 4], pad: u8) -> Case {
        let (e, n) = (self.e, self.n);
        let packed: Vec<u8> = self.codes.chunks(self.k).flat_map(|r| self.bits.pack(r)).collect();
        let zp: Vec<u8> = self
            .zero_points
            .chunks(self.blocks())
            .flat_map(|r| {
                let mut row = self.bits.pack(r);
                let used = (r.len() * self.bits.get()) % 8;
                if used > 0 {
                    *row.last_mut().unwrap() |= pad << used;
                }
                row
            })
            .collect();
        case.input(w, bytes(&[e, n, self.bits.packed_len(self.k)], &packed))
            .input(s, floats(&[e, n, self.blocks()], &self.scales))
            .input(b, floats(&[e, n], &self.bias))
            .input(z, bytes(&[e, n, self.bits.packed_len(self.blocks())], &zp))
    }
}

const FC1: [&str; 4] = ["fc1_experts_weights", "fc1_scales", "fc1_experts_bias", "fc1_zero_points"];
const FC2: [&str; 4] = ["fc2_experts_weights", "fc2_scales", "fc2_experts_bias", "fc2_zero_points"];
const FC3: [&str; 4] = ["fc3_experts_weights", "fc3_scales", "fc3_experts_bias", "fc3_zero_points"];

fn width(b: Bits) -> i64 {
    b.get() as i64
}

/// Two banks behind one node.
fn node(rng: &mut Rng, tokens: usize, b1: &Bank, b2: &Bank) -> Case {
    let case = Case::default()
        .attr("k", 2i64.min(b1.e as i64))
        .attr("expert_weight_bits", width(b2.bits))
        .attr("fc1_expert_weight_bits", width(b1.bits))
        .attr("fc2_expert_weight_bits", width(b2.bits))
        .attr("fc3_expert_weight_bits", width(b1.bits))
        .attr("block_size", b1.block as i64)
        .input("input", rng.floats(&[tokens, b1.k]))
        .input("router_probs", rng.floats(&[tokens, b1.e]));
    b2.put(b1.put(case, FC1, 0), FC2, 0)
}

fn close(a: &[f64], b: &[f64]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x - y).abs() <= 1e-5 * y.abs().max(1.0))
}

/// Contract section 0 at every width, pad bits clear and set: `x = ones` gives 112 a row.
#[test]
fn worked_zero_point_example() {
    for bits in Bits::ALL {
        for pad in [0, 0xFF] {
            let b1 = Bank {
                e: 1,
                n: 16,
                k: 80,
                block: 16,
                bits,
                codes: vec![3; 16 * 80],
                scales: vec![1.0; 16 * 5],
                zero_points: [1, 2, 3, 0, 2].repeat(16),
                bias: vec![0.0; 16],
            };
            let two = bits.default_zero_point();
            let b2 = Bank {
                n: 80,
                k: 16,
                codes: (0..80).flat_map(|r| (0..16).map(move |c| two + u8::from(r == c))).collect(),
                scales: vec![1.0; 80],
                zero_points: vec![two; 80],
                bias: vec![0.0; 80],
                ..b1.clone()
            };
            let case = node(&mut Rng(1), 1, &b1, &b2).input("input", floats(&[1, 80], &[1.0; 80]));
            let case = b1.put(case, FC1, pad).attr("activation_type", "identity").attr("k", 1i64);
            let y = case.run().unwrap();
            assert!(y[..16].iter().all(|&v| v == 112.0), "{bits:?} {y:?}");
            assert!(y[16..].iter().all(|&v| v == 0.0));
        }
    }
}

fn small(fused: bool) -> (Rng, Bank, Bank) {
    let mut rng = Rng(7);
    let b1 = Bank::random(&mut rng, (3, if fused { 64 } else { 32 }, 48), 16, Bits::B2);
    let b2 = Bank::random(&mut rng, (3, 48, 32), 16, Bits::B4);
    (rng, b1, b2)
}

/// Traps 1, 10, 11: each projection has its own width, default zero point, row bytes and expert stride.
#[test]
fn mixed_widths_equal_the_same_values_at_eight_bits() {
    for (w1, w2) in [(2, 4), (4, 2), (2, 8), (8, 2), (4, 8), (8, 4), (2, 2)] {
        let (mut rng, mut b1, mut b2) = small(false);
        let (w1, w2) = (Bits::new(w1).unwrap(), Bits::new(w2).unwrap());
        (b1.bits, b2.bits) = (w1, w2);
        for (b, seed) in [(&mut b1, 1), (&mut b2, 2)] {
            b.codes = Rng(seed).codes(b.codes.len(), b.bits);
            b.zero_points = Rng(seed + 9).codes(b.zero_points.len(), b.bits);
        }
        let case = node(&mut rng, 4, &b1, &b2);
        let wide = node(&mut Rng(0), 4, &b1.widened(Bits::B8), &b2.widened(Bits::B8))
            .input("input", case.inputs["input"].clone())
            .input("router_probs", case.inputs["router_probs"].clone());
        assert!(close(&case.run().unwrap(), &wide.run().unwrap()), "{w1:?} {w2:?}");
        let default = case.without("fc1_zero_points").without("fc2_zero_points");
        let (mut d1, mut d2) = (b1.clone(), b2.clone());
        d1.zero_points.fill(w1.default_zero_point());
        d2.zero_points.fill(w2.default_zero_point());
        let explicit = d2.put(d1.put(default.clone(), FC1, 0), FC2, 0);
        assert_eq!(default.run().unwrap(), explicit.run().unwrap());
    }
}

/// Traps 6: one model in the three row orders, and the remap of `swiglu_fusion` 0 without FC3.
#[test]
fn fusions_agree() {
    let (mut rng, concatenated, b2) = small(true);
    let i = concatenated.n / 2;
    let interleaved = concatenated.permuted(|r| if r % 2 == 0 { r / 2 } else { i + r / 2 });
    let base = |case: Case| {
        case.attr("activation_type", "swiglu")
            .attr("activation_alpha", 1.702f32)
            .attr("activation_beta", 1.0f32)
            .attr("swiglu_limit", 2.0f32)
    };
    let case = base(node(&mut rng, 3, &concatenated, &b2)).attr("swiglu_fusion", 2i64);
    let want = case.run().unwrap();
    let inter = interleaved.put(case.clone(), FC1, 0);
    assert_eq!(inter.clone().attr("swiglu_fusion", 1i64).run().unwrap(), want);
    assert_eq!(inter.attr("swiglu_fusion", 0i64).run().unwrap(), want);
    let separate = concatenated.rows(0, i).put(case.attr("swiglu_fusion", 0i64), FC1, 0);
    let separate = concatenated.rows(i, 2 * i).put(separate, FC3, 0);
    assert_eq!(separate.run().unwrap(), want);
    let e = separate.attr("swiglu_fusion", 1i64).error();
    assert!(e.contains("fc3_experts_weights"), "{e}");
}

/// Trap 4: FC3 inherits the base width, although there is no FC3.
#[test]
fn fc3_inherits_the_base() {
    let attrs = |fc3: Option<i64>| {
        let mut a = Attrs::from([
            ("activation_type", Attr::Str("swiglu".into())),
            ("swiglu_fusion", Attr::Int(1)),
            ("expert_weight_bits", Attr::Int(4)),
            ("fc1_expert_weight_bits", Attr::Int(2)),
        ]);
        if let Some(v) = fc3 {
            a.set("fc3_expert_weight_bits", v);
        }
        Op::parse("com.microsoft", "QMoE", 1, &a)
    };
    assert!(attrs(None).unwrap_err().to_string().contains("fc3_expert_weight_bits"));
    assert!(attrs(Some(4)).unwrap_err().to_string().contains("fc3_expert_weight_bits"));
    assert!(attrs(Some(2)).is_ok());
}

/// A width for all is the same as that width for each, whatever the base.
#[test]
fn uniform_width_equals_overrides() {
    let names = ["fc1_expert_weight_bits", "fc2_expert_weight_bits", "fc3_expert_weight_bits"];
    for bits in [2i64, 4, 8] {
        let uniform = Attrs::from([("expert_weight_bits", Attr::Int(bits))]);
        for base in [2i64, 4, 8] {
            let mut each = Attrs::from([("expert_weight_bits", Attr::Int(base))]);
            for name in names {
                each.set(name, bits);
            }
            let parse = |a: &Attrs| Op::parse("com.microsoft", "QMoE", 1, a).unwrap();
            assert_eq!(parse(&each), parse(&uniform));
        }
    }
}

/// Traps 2 and 7: block-wise or row-wise is what `block_size` says.
#[test]
fn one_block_rows() {
    for bits in Bits::ALL {
        let mut rng = Rng(3);
        let b1 = Bank::random(&mut rng, (2, 5, 32), 32, bits);
        let b2 = Bank::random(&mut rng, (2, 32, 5), 32, Bits::B8);
        let case = node(&mut rng, 3, &b1, &b2);
        let want = case.run().unwrap();
        let across = |b: &Bank| {
            let zp: Vec<u8> = b.zero_points.chunks(b.n).flat_map(|r| b.bits.pack(r)).collect();
            bytes(&[b.e, b.bits.packed_len(b.n)], &zp)
        };
        let rows = case
            .clone()
            .attr("block_size", 0i64)
            .input("fc1_scales", floats(&[2, 5], &b1.scales))
            .input("fc2_scales", floats(&[2, 32], &b2.scales))
            .input("fc1_zero_points", across(&b1))
            .input("fc2_zero_points", across(&b2));
        assert_eq!(rows.run().unwrap(), want, "row-wise equals one block");
        let e = case.clone().input("fc1_zero_points", across(&b1)).error();
        assert!(e.contains("fc1_zero_points"), "{e}");
        let e = case.clone().attr("block_size", -1i64).error();
        assert!(e.contains("fc1_zero_points"), "{e}");
        let plain = case.without("fc1_zero_points").without("fc2_zero_points");
        let want = plain.run().unwrap();
        let flat = plain.clone().input("fc1_scales", floats(&[2, 5], &b1.scales));
        assert_eq!(flat.run().unwrap(), want, "[E,N] scales with block_size == K");
        assert_eq!(plain.attr("block_size", 0i64).run().unwrap(), want, "[E,N,1] scales without block_size");
    }
    let (mut rng, b1, b2) = small(false);
    let case = node(&mut rng, 1, &b1, &b2);
    let row_scales = case.clone().input("fc1_scales", floats(&[3, 32], &b1.scales[..96]));
    assert!(row_scales.error().contains("fc1_scales"));
    assert!(case.attr("block_size", 0i64).error().contains("fc1_scales"));
}

/// Trap 3: the transposed layout of older releases, with FC1 and FC2 of one shape or not.
#[test]
fn legacy_layout_is_refused() {
    for (h, i) in [(32, 64), (32, 32)] {
        let case = Case::default()
            .attr("activation_type", "swiglu")
            .attr("swiglu_fusion", 1i64)
            .input("input", floats(&[1, h], &vec![0.0; h]))
            .input("router_probs", floats(&[1, 1], &[0.0]))
            .input("fc1_experts_weights", bytes(&[1, h, i], &vec![0; h * i]))
            .input("fc1_scales", floats(&[1, 2 * i], &vec![1.0; 2 * i]))
            .input("fc2_experts_weights", bytes(&[1, i, h / 2], &vec![0; i * h / 2]))
            .input("fc2_scales", floats(&[1, h], &vec![1.0; h]));
        let e = case.error();
        assert!(e.contains("fc1_experts_weights") && e.contains("legacy"), "{e}");
    }
}

/// Trap 8 and contract 1.3, 1.8: values that are refused, by name.
#[test]
fn refused_attributes() {
    let cases: [(&str, Attr); 14] = [
        ("quant_type", "fp8".into()),
        ("quant_type", "int3".into()),
        ("weights_prepacked", 1i64.into()),
        ("weights_prepacked", 2i64.into()),
        ("expert_weight_bits", 3i64.into()),
        ("fc1_expert_weight_bits", 16i64.into()),
        ("block_size", 8i64.into()),
        ("block_size", 24i64.into()),
        ("k", 0i64.into()),
        ("k", 1.0f32.into()),
        ("activation_type", "geglu".into()),
        ("swiglu_fusion", 1i64.into()),
        ("num_shared_experts", 1i64.into()),
        ("zero_point_offset", 1i64.into()),
    ];
    for (name, value) in cases {
        let e = Op::parse("com.microsoft", "QMoE", 1, &Attrs::from([(name, value)])).unwrap_err().to_string();
        assert!(e.contains(name), "{name}: {e}");
    }
    let (mut rng, b1, b2) = small(false);
    let case = node(&mut rng, 2, &b1, &b2);
    assert!(case.clone().attr("k", 4i64).error().starts_with("attribute k:"));
    let e = case.clone().input("router_weights", rng.floats(&[2, 2])).error();
    assert!(e.contains("router_weights"), "{e}");
    let e = case.clone().input("router_probs", rng.floats(&[1, 3])).error();
    assert!(e.contains("router_probs"), "{e}");
    let e = case.clone().input("input", rng.floats(&[2, 40])).error();
    assert!(e.contains("fc1_experts_weights"), "{e}");
    let e = case.without("fc1_scales").error();
    assert!(e.contains("fc1_scales"), "{e}");
}

/// Trap 5: ties, negative weights and the second bias inside the weighting.
#[test]
fn routing_weights_reach_the_output() {
    let bank = |scale: [f32; 2], (n, k): (usize, usize)| Bank {
        e: 2,
        n,
        k,
        block: 16,
        bits: Bits::B4,
        codes: (0..2 * n * k).map(|i| 8 + u8::from(i % k == 0)).collect(),
        scales: scale.iter().flat_map(|&s| vec![s; n]).collect(),
        zero_points: vec![8; 2 * n],
        bias: vec![0.0; 2 * n],
    };
    let case = node(&mut Rng(5), 1, &bank([1.0, 1.0], (16, 16)), &bank([1.0, 10.0], (16, 16)))
        .attr("activation_type", "identity")
        .input("input", floats(&[1, 16], &[1.0; 16]));
    let out = |c: &Case| c.run().unwrap()[0];
    let negative = case.clone().input("router_weights", floats(&[1, 2], &[-0.5, 0.25]));
    assert!((out(&negative) - 2.0).abs() < 1e-6);
    let tie = case.attr("k", 1i64).input("router_probs", floats(&[1, 2], &[0.0, 0.0]));
    assert!((out(&tie) - 0.5).abs() < 1e-6);
    let biased = tie.input("fc2_experts_bias", floats(&[2, 16], &[4.0; 32]));
    assert!((out(&biased) - 2.5).abs() < 1e-6);
}

/// Views share the bytes they are made from.
#[test]
fn operands_share_bytes() {
    let (mut rng, b1, b2) = small(false);
    let case = node(&mut rng, 1, &b1, &b2);
    let op = QMoe::parse("QMoE", 1, &mut case.attrs.clone()).unwrap();
    let inputs: Vec<Option<&Tensor>> = NAMES[2..].iter().map(|n| case.inputs.get(n)).collect();
    let operands = op.operands(&inputs).unwrap();
    assert_eq!((operands.experts, operands.hidden, operands.inter), (3, 48, 32));
    let m = operands.matrix(Projection::Fc1, ExpertId(2)).unwrap();
    let weights = case.inputs["fc1_experts_weights"].bytes();
    assert_eq!(m.codes.as_ptr(), weights[2 * 32 * 12..].as_ptr());
    assert!(operands.matrix(Projection::Fc1, ExpertId(3)).is_none());
    assert!(operands.matrix(Projection::Fc3, ExpertId(0)).is_none());
    assert_eq!(operands.bias(Projection::Fc2, ExpertId(1)).unwrap().len(), 48);
}

#[test]
fn half_precision_and_no_tokens() {
    let (mut rng, b1, b2) = small(false);
    let case = node(&mut rng, 2, &b1, &b2);
    let want = case.run().unwrap();
    let mut half = case.clone();
    for name in ["input", "router_probs", "fc1_experts_bias", "fc2_experts_bias"] {
        let t = &case.inputs[name];
        let t = Tensor::from_f32(DType::F16, t.shape().clone(), &t.to_f32().unwrap()).unwrap();
        half = half.input(name, t);
    }
    let got = half.run().unwrap();
    assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 2e-2 * b.abs().max(1.0)));
    let none = case.input("input", floats(&[0, 48], &[])).input("router_probs", floats(&[0, 3], &[]));
    assert!(none.run().unwrap().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Partial last blocks: the same model with K cut into blocks and with a scale per column group spelled out.
    #[test]
    fn partial_blocks_equal_explicit_dequantization(
        seed in any::<u64>(), h in 1usize..12, i in 1usize..12, w1 in 0usize..3, w2 in 0usize..3,
    ) {
        let mut rng = Rng(seed);
        let (h, i) = (h * 4, i * 4);
        let b1 = Bank::random(&mut rng, (2, i, h), 16, Bits::ALL[w1]);
        let b2 = Bank::random(&mut rng, (2, h, i), 16, Bits::ALL[w2]);
        let case = node(&mut rng, 2, &b1, &b2).attr("activation_type", "gelu").attr("k", 1i64)
            .attr("normalize_routing_weights", 1i64);
        let got = case.run().unwrap();
        let x = case.inputs["input"].to_f64().unwrap();
        let logits = case.inputs["router_probs"].to_f32().unwrap();
        for t in 0..2 {
            let e = usize::from(logits[t * 2 + 1] > logits[t * 2]);
            let linear = |b: &Bank, x: &[f64]| -> Vec<f64> {
                (0..b.n).map(|n| {
                    let row = e * b.n + n;
                    let sum: f64 = (0..b.k).map(|c| {
                        let at = row * b.blocks() + c / b.block;
                        let q = f64::from(b.codes[row * b.k + c]) - f64::from(b.zero_points[at]);
                        q * f64::from(b.scales[at]) * x[c]
                    }).sum();
                    sum + f64::from(b.bias[row])
                }).collect()
            };
            let a = Activation::Gelu.apply(&linear(&b1, &x[t * h..(t + 1) * h]), None);
            prop_assert!(close(&got[t * h..(t + 1) * h], &linear(&b2, &a)));
        }
    }
}
