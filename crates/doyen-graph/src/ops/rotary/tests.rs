//! The three operators against each other and by hand.

use super::*;
use crate::ir::Attr;
use crate::ops::{Op, TokenAxis};
use doyen_tensor::Shape;

fn f(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_slice(shape.to_vec(), values).unwrap()
}

fn ids(shape: &[usize], values: &[i64]) -> Tensor {
    Tensor::from_slice(shape.to_vec(), values).unwrap()
}

fn parse(domain: &str, name: &str, attrs: &[(&str, Attr)]) -> Op {
    let mut a = Attrs::default();
    for (n, v) in attrs {
        a.set(*n, v.clone());
    }
    Op::parse(domain, name, 23, &a).unwrap()
}

fn ramp(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    f(shape, &(0..n).map(|i| (i as f32 * 0.37).sin()).collect::<Vec<_>>())
}

fn tables(rows: usize, half: usize) -> (Tensor, Tensor) {
    let angle = |i: usize| (i / half) as f32 * 0.5f32.powi((i % half) as i32);
    let table =
        |g: fn(f32) -> f32| f(&[rows, half], &(0..rows * half).map(|i| g(angle(i))).collect::<Vec<_>>());
    (table(f32::cos), table(f32::sin))
}

#[test]
fn a_quarter_turn() {
    let (cos, sin) = (f(&[2, 1], &[1.0, 0.0]), f(&[2, 1], &[0.0, 1.0]));
    let op = parse("com.microsoft", "RotaryEmbedding", &[]);
    let x = f(&[1, 1, 2], &[3.0, 4.0]);
    let at = |p: i64| {
        let p = ids(&[1, 1], &[p]);
        op.eval(&[Some(&x), Some(&p), Some(&cos), Some(&sin)], 1).unwrap()[0].to_f32().unwrap()
    };
    assert_eq!(at(0), [3.0, 4.0]);
    assert_eq!(at(1), [-4.0, 3.0]);
    for bad in [-1, 2, i64::MIN, i64::MAX] {
        let p = ids(&[1, 1], &[bad]);
        let e = op.eval(&[Some(&x), Some(&p), Some(&cos), Some(&sin)], 1).unwrap_err().to_string();
        assert!(e.contains("position_ids"), "{e}");
    }
}

/// The two domains, both layouts, offsets, ids and expanded caches say the same.
#[test]
fn forms_agree() {
    let (cos, sin) = tables(16, 4);
    let (b, s, n, d) = (2, 3, 2, 8);
    let x = ramp(&[b, s, n * d]);
    let at = ids(&[b, s], &[5, 6, 7, 5, 6, 7]);
    let ms = |ids: &Tensor| {
        let op = parse("com.microsoft", "RotaryEmbedding", &[("scale", Attr::Float(2.0))]);
        op.eval(&[Some(&x), Some(ids), Some(&cos), Some(&sin)], 1).unwrap().remove(0)
    };
    let want = ms(&at);
    assert_eq!(ms(&ids(&[1], &[5])), want);
    assert_eq!(ms(&ids(&[3, b, s], &[5, 6, 7, 5, 6, 7].repeat(3))), want);
    let onnx = parse("", "RotaryEmbedding", &[("num_heads", Attr::Int(2))]);
    let got = onnx.eval(&[Some(&x), Some(&cos), Some(&sin), Some(&at)], 1).unwrap();
    assert_eq!(got[0], want);
    let expand = |t: &Tensor| {
        let v = t.to_f32().unwrap();
        f(
            &[b, s, 4],
            &[5, 6, 7, 5, 6, 7].iter().flat_map(|&p| v[p * 4..p * 4 + 4].to_vec()).collect::<Vec<_>>(),
        )
    };
    let got = onnx.eval(&[Some(&x), Some(&expand(&cos)), Some(&expand(&sin))], 1).unwrap();
    assert_eq!(got[0], want);
    let swap = |t: &Tensor, (outer, inner): (usize, usize)| {
        let v = t.to_f32().unwrap();
        let mut out = Vec::new();
        for b in 0..b {
            for j in 0..inner {
                for i in 0..outer {
                    let at = ((b * outer + i) * inner + j) * d;
                    out.extend_from_slice(&v[at..at + d]);
                }
            }
        }
        out
    };
    let bnsh = f(&[b, n, s, d], &swap(&x, (s, n)));
    let plain = parse("", "RotaryEmbedding", &[]);
    let got = plain.eval(&[Some(&bnsh), Some(&cos), Some(&sin), Some(&at)], 1).unwrap();
    assert_eq!(got[0].to_f32().unwrap(), swap(&want, (s, n)));
    let streams = [5, 6, 7, 5, 6, 7].repeat(3);
    for layout in 0..2 {
        let section = Attr::Ints(vec![2, 1, 1]);
        let m = parse(
            "com.microsoft",
            "MRotaryEmbedding",
            &[("mrope_section", section), ("mrope_layout", Attr::Int(layout))],
        );
        let p = ids(&[3, b, s], &streams);
        assert_eq!(m.eval(&[Some(&x), Some(&p), Some(&cos), Some(&sin)], 1).unwrap()[0], want);
    }
    let mut apart = streams;
    apart[7] = 9;
    let op = parse("com.microsoft", "RotaryEmbedding", &[]);
    let p = ids(&[3, b, s], &apart);
    let e = op.eval(&[Some(&x), Some(&p), Some(&cos), Some(&sin)], 1).unwrap_err().to_string();
    assert!(e.contains("MRotaryEmbedding"), "{e}");
}

#[test]
fn partial_rotation_passes_the_rest() {
    let (cos, sin) = tables(8, 2);
    let x = ramp(&[1, 2, 12]);
    let attrs = [("num_heads", Attr::Int(2)), ("rotary_embedding_dim", Attr::Int(4))];
    let op = parse("com.microsoft", "RotaryEmbedding", &attrs);
    let p = ids(&[1, 2], &[3, 4]);
    let y = op.eval(&[Some(&x), Some(&p), Some(&cos), Some(&sin)], 1).unwrap()[0].to_f32().unwrap();
    let x = x.to_f32().unwrap();
    for (i, (a, b)) in x.iter().zip(&y).enumerate() {
        assert_eq!(a == b, i % 6 >= 4, "channel {i}");
    }
}

#[test]
fn streams_of_both_layouts() {
    let m =
        |layout, section| MRotary { interleaved: false, num_heads: None, rotary_dim: None, section, layout };
    let streams = |m: &MRotary| (0..6).map(|i| m.stream(i)).collect::<Vec<_>>();
    assert_eq!(streams(&m(MropeLayout::Sectioned, [2, 3, 1])), [0, 0, 1, 1, 1, 2]);
    assert_eq!(streams(&m(MropeLayout::Interleaved, [2, 2, 2])), [0, 1, 2, 0, 1, 2]);
    assert_eq!(streams(&m(MropeLayout::Interleaved, [4, 1, 1])), [0, 1, 2, 0, 0, 0]);
}

#[test]
fn tokens_stay_on_the_sequence_axis() {
    let op = parse("com.microsoft", "RotaryEmbedding", &[]);
    let (x, p, c) = (Shape::from([1, 5, 48]), Shape::from([1, 5]), Shape::from([40, 8]));
    let at = |axis| Trace::Tokens(TokenAxis { axis, inner: 1 });
    let seen = |trace, shape| Some(Traced { trace, shape, constant: None });
    let inputs = [seen(at(1), &x), seen(at(1), &p), seen(Trace::Absent, &c), seen(Trace::Absent, &c)];
    assert_eq!(op.trace(&inputs, std::slice::from_ref(&x)).unwrap(), [at(1)]);
    let one = Shape::from([1]);
    let offset = [inputs[0], seen(Trace::Absent, &one), inputs[2], inputs[3]];
    assert!(op.trace(&offset, std::slice::from_ref(&x)).is_err());
}
