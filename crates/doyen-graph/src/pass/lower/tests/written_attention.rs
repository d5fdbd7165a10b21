//! Attention in plain operators becomes attention over a paged cache; what mixes tokens otherwise is refused by name.

use super::{
    build::{Build, HEAD, HEADS, HIDDEN, KV_HEADS, VOCAB},
    equal::agrees,
    refuse::{refusal, says},
};
use crate::{
    ir::{Attr, Dim, Fact, Graph, ValueId},
    lowered::{Attention, CachePorts, LOp, Lowered, Operand},
    pass::lower::{LowerSpec, StatePair, StatePorts},
};
use doyen_tensor::{DType, Tensor};

const WINDOW: i64 = 4;

/// How an attention is written; the first ones are attentions.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Style {
    /// A mask is added.
    Added,
    /// A window as well.
    Window,
    /// A mask chooses between scores and a low number.
    Chosen,
    /// Sinks as another column, the largest score subtracted.
    Sinks,
    /// A softcap below the mask.
    Softcap,
    /// Scale on both sides.
    TwoScales,
    /// Queries and keys rotated by Split, Neg, Concat, Mul and Add.
    Rotary,
    /// The softmax is computed in another type.
    Casts,
    /// Queries see one key beyond their own.
    OffByOne,
    /// Queries do not see their own key.
    Strict,
    /// Every query sees every key.
    NoMask,
    /// Every second key.
    Sparse,
    /// A mask of a bias that falls with the distance.
    Distance,
    /// The softmax is over the queries.
    OverQueries,
    /// Heads are repeated as a whole, not each for its group.
    Tiled,
    /// The result runs along the tokens.
    RunningSum,
    /// The mask depends on the queries.
    DataMask,
}

struct Writer {
    b: Build,
    style: Style,
}

impl Writer {
    fn number(&mut self, value: f32) -> ValueId {
        let name = format!("number {value}");
        self.b.g.find(&name).unwrap_or_else(|| self.b.g.add_constant(&name, Tensor::scalar(value)))
    }

    fn heads(&mut self, what: &str, x: ValueId, heads: usize) -> ValueId {
        let p = self.b.matmul(what, x, HIDDEN, heads * HEAD);
        let shape = self.b.ints(&format!("{what}.shape"), &[0, 0, heads as i64, HEAD as i64]);
        let split = self.b.node("Reshape", &format!("{what}.split"), [], &[Some(p), Some(shape)]);
        let perm = [("perm", Attr::Ints(vec![0, 2, 1, 3]))];
        self.b.node("Transpose", &format!("{what}.heads"), perm, &[Some(split)])
    }

    /// `[batch, 1, new, total]`: whether the query sees the key, from distances of positions in the mask.
    fn sees(&mut self) -> ValueId {
        let style = self.style;
        let b = &mut self.b;
        let mask = b.g.find("attention_mask");
        let ids = b.g.find("input_ids");
        let one = b.g.add_constant("cumsum_axis", Tensor::scalar(1i64));
        let running = b.node("CumSum", "running", [], &[mask, Some(one)]);
        let extent = |b: &mut Build, name: &str, of: Option<ValueId>| {
            b.node("Shape", name, [("start", Attr::Int(1)), ("end", Attr::Int(2))], &[of])
        };
        let (total, new) = (extent(b, "total_extent", mask), extent(b, "new_extent", ids));
        let past = b.node("Sub", "past_extent", [], &[Some(total), Some(new)]);
        let axis = b.ints("slice_axis", &[1]);
        let own = b.node("Slice", "own", [], &[Some(running), Some(past), Some(total), Some(axis)]);
        let (to_rows, to_columns) = (b.ints("to_rows", &[2]), b.ints("to_columns", &[1]));
        let rows = b.node("Unsqueeze", "rows", [], &[Some(own), Some(to_rows)]);
        let columns = b.node("Unsqueeze", "columns", [], &[Some(running), Some(to_columns)]);
        let distance = b.node("Sub", "distance", [], &[Some(rows), Some(columns)]);
        let whole = |b: &mut Build, name: &str, v: i64| b.g.add_constant(name, Tensor::scalar(v));
        let least = whole(
            b,
            "least",
            match style {
                Style::OffByOne => -1,
                Style::Strict => 1,
                _ => 0,
            },
        );
        let mut sees = b.node("GreaterOrEqual", "not_later", [], &[Some(distance), Some(least)]);
        if style == Style::Window {
            let window = whole(b, "window", WINDOW);
            let near = b.node("Less", "near", [], &[Some(distance), Some(window)]);
            sees = b.node("And", "sees_near", [], &[Some(sees), Some(near)]);
        }
        if style == Style::Sparse {
            let (two, zero) = (whole(b, "two", 2), whole(b, "zero", 0));
            let rest = b.node("Mod", "rest", [], &[Some(distance), Some(two)]);
            let even = b.node("Equal", "even", [], &[Some(rest), Some(zero)]);
            sees = b.node("And", "sees_even", [], &[Some(sees), Some(even)]);
        }
        let heads = b.ints("to_heads", &[1]);
        b.node("Unsqueeze", "sees", [], &[Some(sees), Some(heads)])
    }

    fn mask(&mut self, scores: ValueId) -> ValueId {
        if self.style == Style::NoMask {
            return scores;
        }
        let sees = self.sees();
        let (shown, hidden) = (self.number(0.0), self.number(f32::MIN));
        let style = self.style;
        let b = &mut self.b;
        if style == Style::Chosen {
            return b.node("Where", "masked", [], &[Some(sees), Some(scores), Some(hidden)]);
        }
        let shown = match style {
            Style::Distance => {
                let to = [("to", Attr::Int(1))];
                b.node("Cast", "falling", to, &[b.g.find("distance")])
            }
            Style::DataMask => {
                let axes = b.ints("query_axis", &[-1]);
                let keep = [("keepdims", Attr::Int(1))];
                b.node("ReduceMean", "of_queries", keep, &[b.g.find("q.heads"), Some(axes)])
            }
            _ => shown,
        };
        let bias = b.node("Where", "bias", [], &[Some(sees), Some(shown), Some(hidden)]);
        b.node("Add", "masked", [], &[Some(scores), Some(bias)])
    }

    fn past(&mut self, what: &str) -> (ValueId, String, String) {
        let names = (format!("past_{what}.0"), format!("present_{what}.0"));
        let shape: [Dim; 4] = ["batch".into(), KV_HEADS.into(), "past".into(), HEAD.into()];
        (self.b.g.add_input(&names.0, Fact::new(DType::F32, shape)), names.0, names.1)
    }

    /// Each head for the query heads of its group.
    fn repeated(&mut self, what: &str, x: ValueId) -> ValueId {
        const GROUP: i64 = (HEADS / KV_HEADS) as i64;
        let tiled = self.style == Style::Tiled;
        let b = &mut self.b;
        let name = |part: &str| format!("{what}.{part}");
        let shape =
            b.node("Shape", &name("length"), [("start", Attr::Int(2)), ("end", Attr::Int(3))], &[Some(x)]);
        let (lead, tail) = (b.ints(&name("lead"), &[1]), b.ints(&name("tail"), &[HEAD as i64]));
        let concat = |b: &mut Build, out: &str, heads: &[i64]| {
            let heads = b.ints(&format!("{out}.heads"), heads);
            let parts = [Some(lead), Some(heads), Some(shape), Some(tail)];
            b.node("Concat", out, [("axis", Attr::Int(0))], &parts)
        };
        let kv = KV_HEADS as i64;
        let groups = if tiled { [GROUP, kv] } else { [kv, GROUP] };
        let axes = b.ints(&name("group_axis"), &[if tiled { 1 } else { 2 }]);
        let split = b.node("Unsqueeze", &name("groups"), [], &[Some(x), Some(axes)]);
        let to = concat(b, &name("grouped_shape"), &groups);
        let all = b.node("Expand", &name("grouped"), [], &[Some(split), Some(to)]);
        let to = concat(b, &name("merged_shape"), &[HEADS as i64]);
        b.node("Reshape", &name("merged"), [], &[Some(all), Some(to)])
    }

    fn weights(&mut self, scores: ValueId) -> ValueId {
        let axis = if self.style == Style::OverQueries { 2 } else { -1 };
        let softmax = [("axis", Attr::Int(axis))];
        if self.style != Style::Sinks {
            return self.b.node("Softmax", "weights", softmax, &[Some(scores)]);
        }
        let b = &mut self.b;
        let sinks = b.weight("sinks", &[1, HEADS, 1, 1], 1.5);
        let (lead, heads, one) =
            (b.ints("sink_lead", &[1]), b.ints("sink_heads", &[HEADS as i64]), b.ints("sink_one", &[1]));
        let new = b.g.find("new_extent");
        let to = [Some(lead), Some(heads), new, Some(one)];
        let to = b.node("Concat", "sink_shape", [("axis", Attr::Int(0))], &to);
        let column = b.node("Expand", "sink_column", [], &[Some(sinks), Some(to)]);
        let all = b.node("Concat", "with_sinks", [("axis", Attr::Int(-1))], &[Some(scores), Some(column)]);
        let last = b.ints("last_axis", &[-1]);
        let max = b.node("ReduceMax", "largest", [("keepdims", Attr::Int(1))], &[Some(all), Some(last)]);
        let shifted = b.node("Sub", "shifted", [], &[Some(all), Some(max)]);
        let weights = b.node("Softmax", "all_weights", softmax, &[Some(shifted)]);
        let (from, to, axes) = (b.ints("from", &[0]), b.ints("to", &[-1]), b.ints("slice_last", &[3]));
        b.node("Slice", "weights", [], &[Some(weights), Some(from), Some(to), Some(axes)])
    }

    fn scores(&mut self, q: ValueId, k: ValueId) -> ValueId {
        let perm = [("perm", Attr::Ints(vec![0, 1, 3, 2]))];
        let mut q = q;
        let mut kt = self.b.node("Transpose", "keys_transposed", perm, &[Some(k)]);
        let scale = self.number(0.3);
        if self.style == Style::TwoScales {
            let root = self.number(0.3f32.sqrt());
            q = self.b.node("Mul", "scaled_queries", [], &[Some(q), Some(root)]);
            kt = self.b.node("Mul", "scaled_keys", [], &[Some(kt), Some(root)]);
            return self.b.node("MatMul", "scores", [], &[Some(q), Some(kt)]);
        }
        let product = self.b.node("MatMul", "scores", [], &[Some(q), Some(kt)]);
        let scaled = self.b.node("Mul", "scaled", [], &[Some(product), Some(scale)]);
        if self.style != Style::Softcap {
            return scaled;
        }
        let cap = self.number(2.0);
        let divided = self.b.node("Div", "divided", [], &[Some(scaled), Some(cap)]);
        let tanh = self.b.node("Tanh", "tanh", [], &[Some(divided)]);
        self.b.node("Mul", "capped", [], &[Some(tanh), Some(cap)])
    }

    /// `x * cos + (-x2, x1) * sin`, rows of full width gathered at the positions.
    fn rotated(&mut self, what: &str, x: ValueId) -> ValueId {
        let b = &mut self.b;
        let positions = b.g.find("position_ids").unwrap_or_else(|| b.positions());
        let heads = b.ints("rotary_heads", &[1]);
        let table = |b: &mut Build, name: &str, f: fn(f32) -> f32| {
            let angle = |i: usize| (i / HEAD) as f32 * 0.3f32.powf((i % (HEAD / 2)) as f32 / 3.0);
            let values: Vec<f32> = (0..40 * HEAD).map(|i| f(angle(i))).collect();
            let table =
                b.g.add_constant(&format!("{name}.table"), Tensor::from_slice([40, HEAD], &values).unwrap());
            let rows = b.node("Gather", &format!("{name}.rows"), [], &[Some(table), Some(positions)]);
            b.node("Unsqueeze", name, [], &[Some(rows), Some(heads)])
        };
        let cos = table(b, &format!("{what}.cos"), f32::cos);
        let sin = table(b, &format!("{what}.sin"), f32::sin);
        let name = |part: &str| format!("{what}.{part}");
        let halves = b.ints("halves", &[(HEAD / 2) as i64, (HEAD / 2) as i64]);
        let outs = [name("x1"), name("x2")];
        let outs = [outs[0].as_str(), outs[1].as_str()];
        let parts = b.nodes("Split", &outs, [("axis", Attr::Int(-1))], &[Some(x), Some(halves)]);
        let negative = b.node("Neg", &name("negative"), [], &[Some(parts[1])]);
        let turned = [Some(negative), Some(parts[0])];
        let turned = b.node("Concat", &name("turned"), [("axis", Attr::Int(-1))], &turned);
        let along = b.node("Mul", &name("along"), [], &[Some(x), Some(cos)]);
        let across = b.node("Mul", &name("across"), [], &[Some(turned), Some(sin)]);
        b.node("Add", &name("rotated"), [], &[Some(along), Some(across)])
    }

    fn attention(&mut self, x: ValueId) -> ValueId {
        let mut q = self.heads("q", x, HEADS);
        let mut k = self.heads("k", x, KV_HEADS);
        if self.style == Style::Rotary {
            (q, k) = (self.rotated("q", q), self.rotated("k", k));
        }
        let v = self.heads("v", x, KV_HEADS);
        let (past_k, past_key, present_key) = self.past("key");
        let (past_v, past_value, present_value) = self.past("value");
        let axis = || [("axis", Attr::Int(2))];
        let keys = self.b.node("Concat", &present_key, axis(), &[Some(past_k), Some(k)]);
        let values = self.b.node("Concat", &present_value, axis(), &[Some(past_v), Some(v)]);
        self.b.g.add_output(keys);
        self.b.g.add_output(values);
        let ports = CachePorts { past_key, past_value, present_key, present_value };
        self.b.spec.states.push(StatePair { layer: 0, ports: StatePorts::KeyValue(ports) });
        let all_keys = self.repeated("keys", keys);
        let all_values = self.repeated("values", values);
        let scores = self.scores(q, all_keys);
        let mut masked = self.mask(scores);
        if self.style == Style::Casts {
            masked = self.b.node("Cast", "wide_scores", [("to", Attr::Int(11))], &[Some(masked)]);
        }
        let mut weights = self.weights(masked);
        if self.style == Style::Casts {
            weights = self.b.node("Cast", "narrow_weights", [("to", Attr::Int(1))], &[Some(weights)]);
        }
        let b = &mut self.b;
        let y = b.node("MatMul", "attended", [], &[Some(weights), Some(all_values)]);
        let y = if self.style == Style::RunningSum {
            let axis = b.g.add_constant("along_tokens", Tensor::scalar(2i64));
            b.node("CumSum", "summed", [], &[Some(y), Some(axis)])
        } else {
            y
        };
        let perm = [("perm", Attr::Ints(vec![0, 2, 1, 3]))];
        let rows = b.node("Transpose", "attended_rows", perm, &[Some(y)]);
        let merged = b.ints("merged", &[0, 0, -1]);
        b.node("Reshape", "attended_merged", [], &[Some(rows), Some(merged)])
    }
}

fn written(style: Style) -> (Graph, LowerSpec) {
    let mut w = Writer { b: Build::new(DType::F32), style };
    let e = w.b.embed();
    let y = w.attention(e);
    let o = w.b.matmul("o.0", y, HEADS * HEAD, HIDDEN);
    let sum = w.b.node("Add", "sum", [], &[Some(e), Some(o)]);
    w.b.head(sum)
}

fn attention(l: &Lowered) -> (&Attention, bool) {
    let mut all = l.nodes.iter().filter_map(|n| match &n.op {
        LOp::Attention(a) => Some((a, matches!(n.inputs[7], Some(Operand::Const(_))))),
        _ => None,
    });
    let found = all.next().expect("an attention");
    assert!(all.next().is_none());
    found
}

#[test]
fn attention_in_plain_operators_lowers_to_the_same_function() {
    for style in [
        Style::Added,
        Style::Window,
        Style::Chosen,
        Style::Sinks,
        Style::Softcap,
        Style::TwoScales,
        Style::Rotary,
        Style::Casts,
    ] {
        let (mut graph, spec) = written(style);
        let l = agrees(&mut graph, &spec, VOCAB, 1e-4);
        let (a, sinks) = attention(&l);
        assert!(
            a.causal && (a.heads, a.kv_heads, a.head_size) == (HEADS, KV_HEADS, HEAD),
            "{style:?}: {a:?}"
        );
        let window = (style == Style::Window).then_some(WINDOW as usize);
        assert_eq!((a.window, l.groups[0].window), (window, window), "{style:?}");
        assert_eq!(sinks, style == Style::Sinks);
        assert_eq!(a.softcap > 0.0, style == Style::Softcap);
        // Queries may be scaled before the product, keys are not: they go into the cache as they are.
        let scale = if style == Style::TwoScales { 0.3f32.sqrt() } else { 0.3 };
        assert!((a.scale - scale).abs() < 1e-6, "{style:?}: {}", a.scale);
    }
}

#[test]
fn masks_that_mean_something_else_are_refused_where_they_apply() {
    for (style, words) in [
        (Style::OffByOne, &["masked", "bias", "sees the keys"][..]),
        (Style::Strict, &["masked", "bias", "sees the keys"]),
        (Style::NoMask, &["attended", "keys after their own"]),
        (Style::Sparse, &["masked", "bias", "not consecutive"]),
        (Style::Distance, &["masked", "bias", "neither shows a key nor hides it"]),
    ] {
        says(&refusal(written(style)), words);
    }
}

#[test]
fn other_mixing_of_tokens_is_refused_by_name() {
    for (style, words) in [
        (Style::OverQueries, &["present_key.0", "Concat", "past_key.0"][..]),
        (Style::Tiled, &["present_key.0", "Concat", "past_key.0"]),
        (Style::DataMask, &["present_key.0", "Concat", "past_key.0"]),
        (Style::RunningSum, &["summed", "CumSum"]),
    ] {
        says(&refusal(written(style)), words);
    }
}

/// An encoder has attention but no cache: its products mix tokens.
#[test]
fn encoders_are_refused_at_their_attention() {
    let mut b = Build::new(DType::F32);
    let e = b.embed();
    let perm = [("perm", Attr::Ints(vec![0, 2, 1]))];
    let keys = b.node("Transpose", "keys_transposed", perm, &[Some(e)]);
    let scores = b.node("MatMul", "scores", [], &[Some(e), Some(keys)]);
    let weights = b.node("Softmax", "weights", [("axis", Attr::Int(-1))], &[Some(scores)]);
    let y = b.node("MatMul", "attended", [], &[Some(weights), Some(e)]);
    says(&refusal(b.head(y)), &["scores", "MatMul"]);
}
