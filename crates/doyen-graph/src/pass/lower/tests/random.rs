//! Decoders of random layers: whatever lowers, lowers to the same function.

use super::{
    build::{Build, HEAD, HEADS, HIDDEN, KV_HEADS, Lengths, VOCAB},
    equal::agrees,
};
use crate::ir::{Attr, ValueId};
use doyen_tensor::DType;
use proptest::prelude::*;

/// A layer's choices, independent of each other.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::struct_excessive_bools)]
struct Layer {
    packed: bool,
    head_norms: bool,
    window: i64,
    softcap: f32,
    smooth: bool,
    interleaved: bool,
    feed_forward: FeedForward,
    skip_norm: bool,
}

#[derive(Debug, Clone, Copy)]
enum FeedForward {
    Silu,
    Tanh,
    None,
}

fn layer() -> impl Strategy<Value = Layer> {
    let feed_forward = prop_oneof![Just(FeedForward::Silu), Just(FeedForward::Tanh), Just(FeedForward::None)];
    let numbers = (prop_oneof![Just(-1i64), 1i64..6], prop_oneof![Just(0f32), 1f32..5.0]);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (numbers, flags, feed_forward).prop_map(|((window, softcap), (a, b, c, d, e), feed_forward)| Layer {
        packed: a,
        head_norms: b,
        smooth: c,
        interleaved: d,
        skip_norm: e,
        window,
        softcap,
        feed_forward,
    })
}

/// A projection with a norm of every head between reshapes.
fn normed(b: &mut Build, name: &str, p: ValueId) -> ValueId {
    let per_head = b.ints(&format!("{name}.per_head"), &[0, 0, -1, HEAD as i64]);
    let merged = b.ints(&format!("{name}.merged"), &[0, 0, -1]);
    let split = b.node("Reshape", &format!("{name}.split"), [], &[Some(p), Some(per_head)]);
    let normed = b.norm(&format!("{name}.norm"), split, HEAD);
    b.node("Reshape", &format!("{name}.joined"), [], &[Some(normed), Some(merged)])
}

fn attention(b: &mut Build, at: usize, l: Layer, x: ValueId) -> ValueId {
    let extra = [
        ("local_window_size", Attr::Int(l.window)),
        ("softcap", Attr::Float(l.softcap)),
        ("smooth_softmax", Attr::Int(i64::from(l.smooth))),
        ("rotary_interleaved", Attr::Int(i64::from(l.interleaved))),
    ];
    let operands = if l.packed {
        [Some(b.matmul(&format!("qkv.{at}"), x, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD)), None, None]
    } else {
        [("q", HEADS, l.head_norms), ("k", KV_HEADS, l.head_norms), ("v", KV_HEADS, false)].map(
            |(what, heads, norm)| {
                let name = format!("{what}.{at}");
                let p = b.matmul(&name, x, HIDDEN, heads * HEAD);
                Some(if norm { normed(b, &name, p) } else { p })
            },
        )
    };
    let y = b.attention(at, Lengths::Genai, operands, extra);
    b.matmul(&format!("o.{at}"), y, HEADS * HEAD, HIDDEN)
}

fn add_layer(b: &mut Build, at: usize, l: Layer, x: ValueId) -> ValueId {
    let normed = b.norm(&format!("in_norm.{at}"), x, HIDDEN);
    let o = attention(b, at, l, normed);
    let (normed, sum) = if l.skip_norm {
        b.skip_norm(&format!("post_norm.{at}"), x, o)
    } else {
        let sum = b.node("Add", &format!("residual.{at}"), [], &[Some(x), Some(o)]);
        (b.norm(&format!("post_norm.{at}"), sum, HIDDEN), sum)
    };
    let out = match l.feed_forward {
        FeedForward::None => return sum,
        FeedForward::Silu => b.silu_mlp(at, normed),
        FeedForward::Tanh => {
            let up = b.matmul(&format!("up.{at}"), normed, HIDDEN, 24);
            let act = b.node("Tanh", &format!("tanh.{at}"), [], &[Some(up)]);
            b.matmul(&format!("down.{at}"), act, 24, HIDDEN)
        }
    };
    b.node("Add", &format!("out.{at}"), [], &[Some(sum), Some(out)])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn random_decoders_keep_their_function(layers in prop::collection::vec(layer(), 1..4)) {
        let mut b = Build::new(DType::F32);
        let mut x = b.embed();
        for (at, l) in layers.iter().enumerate() {
            x = add_layer(&mut b, at, *l, x);
        }
        let x = b.norm("last_norm", x, HIDDEN);
        let (mut graph, spec) = b.head(x);
        let lowered = agrees(&mut graph, &spec, VOCAB, 2e-4);
        let mut windows: Vec<i64> = layers.iter().map(|l| l.window).collect();
        windows.sort_unstable();
        windows.dedup();
        prop_assert_eq!(lowered.groups.len(), windows.len());
    }
}
