//! Layers that producers write out in plain operators are recognised, and what only looks like them is left alone: both
//! give the numbers of the reference interpreter.

use super::{
    build::{Build, HEAD, HEADS, HIDDEN, KV_HEADS, Lengths, VOCAB},
    equal::agrees,
};
use crate::{
    ir::{Attr, Graph, ValueId},
    lowered::{Experts, LNode, LOp, Lowered},
    ops::{
        Op,
        activation::{Activation, Swiglu},
        quant::Block,
        unary::Unary,
    },
    pass::lower::LowerSpec,
};
use doyen_tensor::{DType, Tensor};

const EXPERTS: usize = 5;
const INTER: usize = 24;

impl Build {
    fn number(&mut self, value: f32) -> ValueId {
        let name = format!("number {value}");
        self.g.find(&name).unwrap_or_else(|| self.g.add_constant(&name, Tensor::scalar(value)))
    }

    /// `x` times codes in blocks of 16.
    fn codes(&mut self, out: &str, x: ValueId, (k, n): (usize, usize), bits: usize, coded: Coded) -> ValueId {
        let blocks = k.div_ceil(16);
        let codes = self.bytes(&format!("{out}.codes"), &[n, blocks, 2 * bits]);
        let scales = self.weight(&format!("{out}.scales"), &[n * blocks], 0.4 / (1 << bits) as f32);
        let packed = n * (blocks * bits).div_ceil(8);
        let zero_points =
            (coded == Coded::ZeroPoints).then(|| self.bytes(&format!("{out}.zero_points"), &[packed]));
        let attrs =
            [("K", k), ("N", n), ("bits", bits), ("block_size", 16)].map(|(a, v)| (a, Attr::Int(v as i64)));
        self.node("MatMulNBits", out, attrs, &[Some(x), Some(codes), Some(scales), zero_points])
    }

    fn add_bias(&mut self, out: &str, x: ValueId, n: usize) -> ValueId {
        let bias = self.weight(&format!("{out}.bias"), &[n], 0.3);
        self.node("Add", &format!("{out}.biased"), [], &[Some(x), Some(bias)])
    }
}

/// One layer: attention, then whatever `ffn` makes of the normed residual, added to it.
fn layer(ffn: impl FnOnce(&mut Build, ValueId) -> ValueId) -> (Graph, LowerSpec) {
    let mut b = Build::new(DType::F32);
    let e = b.embed();
    let qkv = b.matmul("qkv.0", e, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD);
    let y = b.attention(0, Lengths::Genai, [Some(qkv), None, None], []);
    let o = b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
    let (normed, sum) = b.skip_norm("post_norm", e, o);
    let made = ffn(&mut b, normed);
    let x = b.node("Add", "layer", [], &[Some(sum), Some(made)]);
    b.head(x)
}

fn find(l: &Lowered, is: impl Fn(&LNode) -> bool) -> Vec<&LNode> {
    l.nodes.iter().filter(|n| is(n)).collect()
}

fn banks(l: &Lowered) -> usize {
    find(l, |n| matches!(n.op, LOp::Experts(_))).len()
}

fn activation(l: &Lowered) -> Activation {
    match &find(l, |n| matches!(n.op, LOp::Experts(_)))[0].op {
        LOp::Experts(e) => match &e.op {
            Op::Moe(m) => m.activation,
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

/// How a routing is written.
#[derive(Clone, Copy, PartialEq)]
enum Router {
    /// Softmax, TopK, over the sum of the chosen.
    Renormalized,
    /// Softmax, TopK.
    OfAll,
    /// TopK, Softmax.
    OfChosen,
    /// Sigmoid, TopK, over the sum plus something, times a factor.
    Sigmoid,
    /// The smallest logits.
    Smallest,
}

/// Ids and weights `[1,T,2]`.
fn route(b: &mut Build, router: Router, x: ValueId) -> (ValueId, ValueId) {
    let last = b.ints("last", &[-1]);
    let logits = b.matmul("router", x, HIDDEN, EXPERTS);
    let softmax = || [("axis", Attr::Int(-1))];
    let scores = match router {
        Router::Renormalized | Router::OfAll => b.node("Softmax", "scores", softmax(), &[Some(logits)]),
        Router::Sigmoid => b.node("Sigmoid", "scores", [], &[Some(logits)]),
        Router::OfChosen | Router::Smallest => logits,
    };
    let k = b.ints("k", &[2]);
    let attrs = [("axis", Attr::Int(-1)), ("largest", Attr::Int(i64::from(router != Router::Smallest)))];
    let made = b.nodes("TopK", &["chosen", "ids"], attrs, &[Some(scores), Some(k)]);
    let (values, ids) = (made[0], made[1]);
    let total = |b: &mut Build| {
        b.node("ReduceSum", "sum_of_chosen", [("keepdims", Attr::Int(1))], &[Some(values), Some(last)])
    };
    let weights = match router {
        Router::OfAll => values,
        Router::OfChosen | Router::Smallest => b.node("Softmax", "mix", softmax(), &[Some(values)]),
        Router::Renormalized => {
            let total = total(b);
            b.node("Div", "mix", [], &[Some(values), Some(total)])
        }
        Router::Sigmoid => {
            let total = total(b);
            let (small, factor) = (b.number(1e-9), b.number(1.75));
            let total = b.node("Add", "some", [], &[Some(total), Some(small)]);
            let mix = b.node("Div", "mix", [], &[Some(values), Some(total)]);
            b.node("Mul", "scaled_mix", [], &[Some(mix), Some(factor)])
        }
    };
    (ids, weights)
}

/// What stands between an expert's products.
#[derive(Clone, Copy, PartialEq)]
enum Act {
    Silu,
    /// GPT-OSS: limits, a steeper sigmoid, a shift, biases.
    Clipped,
    /// As Clipped, but the sides are limited differently.
    Lopsided,
    /// No gate.
    Relu,
    /// Silu between products with codes, of 4 bits up and of 8 down.
    Codes(Coded),
}

/// What goes with the codes.
#[derive(Clone, Copy, PartialEq)]
enum Coded {
    Symmetric,
    ZeroPoints,
    /// Blocks of the down projection that its rows end within.
    CutShort,
}

fn expert(b: &mut Build, e: usize, act: Act, x: ValueId) -> ValueId {
    let name = |what: &str| format!("expert.{e}.{what}");
    let biased = matches!(act, Act::Clipped | Act::Lopsided);
    let inter = if matches!(act, Act::Codes(coded) if coded != Coded::CutShort) { 32 } else { INTER };
    let linear = |b: &mut Build, what: &str, x: ValueId, k: usize, n: usize| {
        if let Act::Codes(coded) = act {
            return b.codes(&name(what), x, (k, n), if what == "down" { 8 } else { 4 }, coded);
        }
        let y = b.matmul(&name(what), x, k, n);
        if biased { b.add_bias(&name(what), y, n) } else { y }
    };
    let gate = linear(b, "gate", x, HIDDEN, inter);
    let up = if act == Act::Relu { gate } else { linear(b, "up", x, HIDDEN, inter) };
    let middle = match act {
        Act::Relu => b.node("Relu", &name("act"), [], &[Some(gate)]),
        Act::Silu | Act::Codes(_) => {
            let s = b.node("Sigmoid", &name("sigmoid"), [], &[Some(gate)]);
            let silu = b.node("Mul", &name("silu"), [], &[Some(gate), Some(s)]);
            b.node("Mul", &name("act"), [], &[Some(silu), Some(up)])
        }
        Act::Clipped | Act::Lopsided => {
            let (high, low) = (b.number(0.7), b.number(-0.7));
            let (alpha, beta) = (b.number(1.702), b.number(1.0));
            let low = if act == Act::Clipped { low } else { b.number(-0.4) };
            let g = b.node("Min", &name("limited"), [], &[Some(gate), Some(high)]);
            let u = b.node("Clip", &name("clipped"), [], &[Some(up), Some(low), Some(high)]);
            let steep = b.node("Mul", &name("steep"), [], &[Some(alpha), Some(g)]);
            let s = b.node("Sigmoid", &name("sigmoid"), [], &[Some(steep)]);
            let glu = b.node("Mul", &name("glu"), [], &[Some(g), Some(s)]);
            let shifted = b.node("Add", &name("shifted"), [], &[Some(u), Some(beta)]);
            b.node("Mul", &name("act"), [], &[Some(shifted), Some(glu)])
        }
    };
    linear(b, "down", middle, inter, HIDDEN)
}

/// What differs from experts that are all there and alike.
#[derive(Clone, Copy, PartialEq)]
enum Oddity {
    None,
    /// The last expert is left out.
    Missing,
    /// The last one answers to the number of the first.
    Twice,
    /// The last one reads another value.
    OtherInput,
    /// The last one has another activation.
    OtherActivation,
    /// The weights of the last one are ReduceMax's, not ReduceSum's.
    OtherShare,
    /// A partial sum is read elsewhere.
    PartialSum,
}

fn dense(b: &mut Build, router: Router, act: Act, odd: Oddity, x: ValueId) -> ValueId {
    let last = b.ints("last", &[-1]);
    let (ids, weights) = route(b, router, x);
    let mut sum: Option<ValueId> = None;
    let mut partial = None;
    let count = if odd == Oddity::Missing { EXPERTS - 1 } else { EXPERTS };
    for e in 0..count {
        let is_odd = e + 1 == count;
        let name = |what: &str| format!("expert.{e}.{what}");
        let input = if is_odd && odd == Oddity::OtherInput {
            b.node("Tanh", "other_input", [], &[Some(x)])
        } else {
            x
        };
        let own = if is_odd && odd == Oddity::OtherActivation { Act::Relu } else { act };
        let y = expert(b, e, own, input);
        let number = if is_odd && odd == Oddity::Twice { 0 } else { e as i64 };
        let number = b.g.add_constant(&name("number"), Tensor::scalar(number));
        let mask = b.node("Equal", &name("is"), [], &[Some(ids), Some(number)]);
        let mask = b.node("Cast", &name("mask"), [("to", Attr::Int(1))], &[Some(mask)]);
        let masked = b.node("Mul", &name("masked"), [], &[Some(weights), Some(mask)]);
        let reduce = if is_odd && odd == Oddity::OtherShare { "ReduceMax" } else { "ReduceSum" };
        let share = b.node(reduce, &name("share"), [("keepdims", Attr::Int(1))], &[Some(masked), Some(last)]);
        let term = b.node("Mul", &name("term"), [], &[Some(y), Some(share)]);
        sum = Some(match sum {
            None => term,
            Some(sum) => b.node("Add", &name("sum"), [], &[Some(sum), Some(term)]),
        });
        if e == 2 {
            partial = sum;
        }
    }
    let sum = sum.unwrap();
    if odd == Oddity::PartialSum {
        return b.node("Add", "and_partial", [], &[Some(sum), partial]);
    }
    sum
}

fn dense_layer(router: Router, act: Act, odd: Oddity) -> (Graph, LowerSpec) {
    layer(|b, x| dense(b, router, act, odd, x))
}

#[test]
fn dense_experts_become_a_bank() {
    for (router, routes, given) in [
        (Router::Renormalized, 1, false),
        (Router::OfAll, 1, false),
        (Router::OfChosen, 1, false),
        (Router::Sigmoid, 1, true),
        // The smallest logits choose as well; only the routing stays as written.
        (Router::Smallest, 0, false),
    ] {
        let (mut graph, spec) = dense_layer(router, Act::Silu, Oddity::None);
        let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
        assert_eq!(banks(&l), 1);
        let written = find(&l, |n| matches!(&n.op, LOp::Op(Op::TopK(_))));
        let made = find(&l, |n| matches!(n.op, LOp::Route(_)));
        assert_eq!((made.len(), written.len()), (routes, 1 - routes));
        assert!(made.iter().all(|n| n.inputs[1].is_some() == given));
        let left = find(&l, |n| matches!(&n.op, LOp::Op(Op::Compare(_) | Op::Unary(Unary::Relu))));
        assert!(left.is_empty(), "{left:?}");
        assert_eq!(activation(&l), Activation::Silu);
    }
}

#[test]
fn the_bank_views_the_weights_where_they_lie() {
    let (mut graph, spec) = dense_layer(Router::Renormalized, Act::Silu, Oddity::None);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    let bank = find(&l, |n| matches!(n.op, LOp::Experts(_)))[0];
    for (i, what, shape) in [
        (3, "gate", [EXPERTS, INTER, HIDDEN]),
        (5, "down", [EXPERTS, HIDDEN, INTER]),
        (7, "up", [EXPERTS, INTER, HIDDEN]),
    ] {
        let Some(crate::lowered::Operand::Const(c)) = bank.inputs[i] else { panic!("operand {i}") };
        let data = &l.constant(c).data;
        assert_eq!((data.shape().dims(), data.parts().len()), (&shape[..], EXPERTS));
        for (e, part) in data.parts().iter().enumerate() {
            let own = graph.find(&format!("expert.{e}.{what}.weight")).unwrap();
            let own = graph.value(own).fact.constant.as_ref().unwrap();
            assert_eq!(part.bytes.as_ptr(), own.parts()[0].bytes.as_ptr(), "{what} of expert {e}");
        }
    }
}

/// Products with codes keep them: the bank is a QMoE of the same widths, blocks and bytes.
#[test]
fn dense_experts_with_codes_become_a_bank() {
    for coded in [Coded::Symmetric, Coded::ZeroPoints] {
        let (mut graph, spec) = dense_layer(Router::Renormalized, Act::Codes(coded), Oddity::None);
        let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
        let bank = find(&l, |n| matches!(n.op, LOp::Experts(_)))[0];
        let LOp::Experts(Experts { op: Op::QMoe(q), experts: EXPERTS, k: 2 }) = &bank.op else {
            panic!("{:?}", bank.op)
        };
        assert_eq!([q.fc1_bits, q.fc2_bits, q.fc3_bits].map(doyen_tensor::format::Bits::get), [4, 8, 4]);
        assert_eq!((q.block, q.activation), (Block::Blocks(16), Activation::Silu));
        let has = coded == Coded::ZeroPoints;
        for (i, what) in [(3, "gate"), (6, "down"), (9, "up"), (12, "gate"), (13, "down"), (14, "up")] {
            let Some(crate::lowered::Operand::Const(c)) = bank.inputs[i] else {
                assert!(i >= 12 && !has, "operand {i}");
                continue;
            };
            let kind = if i < 12 { "codes" } else { "zero_points" };
            for (e, part) in l.constant(c).data.parts().iter().enumerate() {
                let own = graph.find(&format!("expert.{e}.{what}.{kind}")).unwrap();
                let own = graph.value(own).fact.constant.as_ref().unwrap();
                assert_eq!(part.bytes.as_ptr(), own.parts()[0].bytes.as_ptr(), "{what} {kind} of expert {e}");
            }
        }
    }
    for (coded, odd) in [
        (Coded::Symmetric, Oddity::Missing),
        (Coded::Symmetric, Oddity::OtherActivation),
        (Coded::CutShort, Oddity::None),
    ] {
        let (mut graph, spec) = dense_layer(Router::Renormalized, Act::Codes(coded), odd);
        assert_eq!(banks(&agrees(&mut graph, &spec, VOCAB, 1e-4)), 0);
    }
}

#[test]
fn other_activations_of_experts() {
    let (mut graph, spec) = dense_layer(Router::OfChosen, Act::Clipped, Oddity::None);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    let Activation::Swiglu(Swiglu { alpha, beta, limit, .. }) = activation(&l) else { panic!() };
    assert_eq!((banks(&l), alpha, beta, limit), (1, 1.702, 1.0, 0.7));

    let (mut graph, spec) = dense_layer(Router::OfChosen, Act::Relu, Oddity::None);
    let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
    assert_eq!((banks(&l), activation(&l)), (1, Activation::Relu));
}

#[test]
fn what_only_looks_like_experts_is_left_alone() {
    for odd in [
        Oddity::Missing,
        Oddity::Twice,
        Oddity::OtherInput,
        Oddity::OtherActivation,
        Oddity::OtherShare,
        Oddity::PartialSum,
    ] {
        let (mut graph, spec) = dense_layer(Router::Renormalized, Act::Silu, odd);
        let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
        assert_eq!(banks(&l), 0);
    }
    let (mut graph, spec) = dense_layer(Router::OfChosen, Act::Lopsided, Oddity::None);
    assert_eq!(banks(&agrees(&mut graph, &spec, VOCAB, 1e-4)), 0);
}

/// How an RMS norm is written.
#[derive(Clone, Copy, PartialEq)]
enum Norm {
    Reciprocal,
    Divided,
    Power,
    /// The mean of another value's square.
    OtherSquare,
    /// The mean over the heads' axis of a split value.
    OtherAxis,
    /// The root of the mean alone.
    NoEpsilon,
}

fn written_norm(b: &mut Build, norm: Norm, x: ValueId) -> ValueId {
    let gamma = b.gamma("written_gamma", if norm == Norm::OtherAxis { 1 } else { HIDDEN });
    let (two, one, eps) = (b.number(2.0), b.number(1.0), b.number(1e-5));
    let x = if norm == Norm::OtherAxis {
        let shape = b.ints("split_shape", &[0, 0, HIDDEN as i64, 1]);
        b.node("Reshape", "split", [], &[Some(x), Some(shape)])
    } else {
        x
    };
    let of = if norm == Norm::OtherSquare { b.node("Tanh", "other", [], &[Some(x)]) } else { x };
    let axis = b.ints("norm_axis", &[if norm == Norm::OtherAxis { 2 } else { -1 }]);
    let square = if norm == Norm::Power {
        b.node("Mul", "square", [], &[Some(of), Some(of)])
    } else {
        b.node("Pow", "square", [], &[Some(of), Some(two)])
    };
    let mean = b.node("ReduceMean", "mean", [("keepdims", Attr::Int(1))], &[Some(square), Some(axis)]);
    let inside =
        if norm == Norm::NoEpsilon { mean } else { b.node("Add", "inside", [], &[Some(mean), Some(eps)]) };
    let unit = match norm {
        Norm::Power => {
            let power = b.number(-0.5);
            let inverse = b.node("Pow", "inverse", [], &[Some(inside), Some(power)]);
            b.node("Mul", "unit", [], &[Some(inverse), Some(x)])
        }
        Norm::Divided => {
            let root = b.node("Sqrt", "root", [], &[Some(inside)]);
            b.node("Div", "unit", [], &[Some(x), Some(root)])
        }
        Norm::Reciprocal => {
            let root = b.node("Sqrt", "root", [], &[Some(inside)]);
            let inverse = b.node("Reciprocal", "inverse", [], &[Some(root)]);
            b.node("Mul", "unit", [], &[Some(x), Some(inverse)])
        }
        Norm::OtherSquare | Norm::OtherAxis | Norm::NoEpsilon => {
            let root = b.node("Sqrt", "root", [], &[Some(inside)]);
            let inverse = b.node("Div", "inverse", [], &[Some(one), Some(root)]);
            b.node("Mul", "unit", [], &[Some(x), Some(inverse)])
        }
    };
    let y = b.node("Mul", "normed", [], &[Some(gamma), Some(unit)]);
    let back = b.ints("back", &[0, 0, HIDDEN as i64]);
    let y = b.node("Reshape", "normed_rows", [], &[Some(y), Some(back)]);
    b.matmul("after_norm", y, HIDDEN, HIDDEN)
}

#[test]
fn rms_norms_written_out() {
    for (norm, recognised) in [
        (Norm::Reciprocal, true),
        (Norm::Divided, true),
        (Norm::Power, true),
        (Norm::OtherSquare, false),
        (Norm::OtherAxis, false),
        (Norm::NoEpsilon, false),
    ] {
        let (mut graph, spec) = layer(|b, x| written_norm(b, norm, x));
        let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
        let norms = find(&l, |n| n.name == "normed" && matches!(n.op, LOp::Op(Op::Norm(_))));
        let roots = find(&l, |n| matches!(n.op, LOp::Op(Op::Reduce(_))));
        assert_eq!((norms.len(), roots.len()), if recognised { (1, 0) } else { (0, 1) });
    }
}

/// GELU with erf or tanh, its constants scaled by `slope`.
fn written_gelu(b: &mut Build, tanh: bool, slope: f32, x: ValueId) -> ValueId {
    let (half, one) = (b.number(0.5), b.number(1.0));
    let inner = if tanh {
        let (c, root, three) = (b.number(0.044_715), b.number(0.797_884_6 * slope), b.number(3.0));
        let cube = b.node("Pow", "cube", [], &[Some(x), Some(three)]);
        let term = b.node("Mul", "cubic", [], &[Some(c), Some(cube)]);
        let sum = b.node("Add", "argument", [], &[Some(x), Some(term)]);
        let scaled = b.node("Mul", "scaled", [], &[Some(root), Some(sum)]);
        b.node("Tanh", "tanh", [], &[Some(scaled)])
    } else {
        let root = b.number(std::f32::consts::SQRT_2 / slope);
        let scaled = b.node("Div", "scaled", [], &[Some(x), Some(root)]);
        b.node("Erf", "erf", [], &[Some(scaled)])
    };
    let gate = b.node("Add", "gate", [], &[Some(inner), Some(one)]);
    if tanh {
        let halved = b.node("Mul", "halved", [], &[Some(half), Some(x)]);
        return b.node("Mul", "gelu", [], &[Some(halved), Some(gate)]);
    }
    let whole = b.node("Mul", "whole", [], &[Some(x), Some(gate)]);
    b.node("Mul", "gelu", [], &[Some(whole), Some(half)])
}

#[test]
fn gelus_written_out() {
    for (tanh, slope, found) in [
        (false, 1.0, Some(Unary::Gelu)),
        (true, 1.0, Some(Unary::GeluTanh)),
        (false, 1.01, None),
        (true, 1.01, None),
    ] {
        let (mut graph, spec) = layer(|b, x| written_gelu(b, tanh, slope, x));
        let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
        let gelu = l.nodes.iter().find(|n| n.name == "gelu").unwrap();
        match found {
            Some(f) => assert_eq!(gelu.op, LOp::Op(Op::Unary(f))),
            None => assert!(matches!(gelu.op, LOp::Op(Op::Binary(_))), "{gelu:?}"),
        }
    }
}
