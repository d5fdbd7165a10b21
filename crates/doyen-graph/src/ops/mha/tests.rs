//! Forms and refusals that the conformance set does not have.

use super::super::{Op, OpError};
use crate::ir::{Attr, Attrs};
use doyen_tensor::Tensor;

fn op(attrs: &[(&str, Attr)]) -> Op {
    let mut all = Attrs::default();
    all.set("num_heads", 2i64);
    for (name, value) in attrs {
        all.set(*name, value.clone());
    }
    Op::parse("com.microsoft", "MultiHeadAttention", 1, &all).unwrap()
}

fn tensor(shape: &[usize], seed: u32) -> Tensor {
    let n: usize = shape.iter().product();
    let value = |i: usize| ((i as u32 * 7919 + seed * 104_729) % 1009) as f32 / 500.0 - 1.0;
    Tensor::from_slice(shape, &(0..n).map(value).collect::<Vec<_>>()).unwrap()
}

fn run(op: &Op, inputs: &[Option<&Tensor>]) -> Result<Vec<f32>, OpError> {
    Ok(op.eval(inputs, 1)?[0].to_f32().unwrap())
}

/// Rearranges `[B,L,N*D]` tensors as `[B,L,N,parts,D]`.
fn packed(parts: &[&Tensor], heads: usize) -> Tensor {
    let shape = parts[0].shape();
    let size = shape[2] / heads;
    let values: Vec<Vec<f32>> = parts.iter().map(|t| t.to_f32().unwrap()).collect();
    let mut out = Vec::new();
    for head in 0..shape[0] * shape[1] * heads {
        for v in &values {
            out.extend_from_slice(&v[head * size..(head + 1) * size]);
        }
    }
    Tensor::from_slice([shape[0], shape[1], heads, parts.len(), size], &out).unwrap()
}

#[test]
fn packed_forms_mean_the_same() {
    let op = op(&[]);
    let [q, k, v] = [0, 1, 2].map(|seed| tensor(&[2, 3, 8], seed));
    let want = run(&op, &[Some(&q), Some(&k), Some(&v)]).unwrap();
    assert_eq!(run(&op, &[Some(&q), Some(&packed(&[&k, &v], 2))]).unwrap(), want);
    assert_eq!(run(&op, &[Some(&packed(&[&q, &k, &v], 2))]).unwrap(), want);
}

#[test]
fn bias_is_added_before_the_products() {
    let op = op(&[]);
    let [q, k, v] = [0, 1, 2].map(|seed| tensor(&[1, 3, 8], seed));
    let bias = tensor(&[24], 5);
    let b = bias.to_f32().unwrap();
    let plus = |t: &Tensor, start: usize| {
        let sum: Vec<f32> =
            t.to_f32().unwrap().iter().enumerate().map(|(i, v)| v + b[start + i % 8]).collect();
        Tensor::from_slice(t.shape().clone(), &sum).unwrap()
    };
    let want = run(&op, &[Some(&plus(&q, 0)), Some(&plus(&k, 8)), Some(&plus(&v, 16))]).unwrap();
    let got = run(&op, &[Some(&q), Some(&k), Some(&v), Some(&bias)]).unwrap();
    assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-5), "{got:?} {want:?}");
    let got = run(&op, &[Some(&packed(&[&q, &k, &v], 2)), None, None, Some(&bias)]).unwrap();
    assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-5), "{got:?} {want:?}");
}

#[test]
fn lengths_hide_the_padding() {
    let op = op(&[]);
    let [q, k, v] = [0, 1, 2].map(|seed| tensor(&[1, 4, 8], seed));
    let lengths = Tensor::from_slice([1], &[3i32]).unwrap();
    let mask = Tensor::from_slice([1, 4], &[1i32, 1, 1, 0]).unwrap();
    let by = |m: &Tensor| run(&op, &[Some(&q), Some(&k), Some(&v), None, Some(m)]).unwrap();
    assert_eq!(by(&lengths), by(&mask));
}

#[test]
fn what_cannot_be_meant_is_refused_by_name() {
    let op = op(&[]);
    let (q, k) = (tensor(&[1, 3, 8], 0), tensor(&[1, 3, 8], 1));
    let says = |inputs: &[Option<&Tensor>], word: &str| {
        let text = run(&op, inputs).unwrap_err().to_string();
        assert!(text.contains(word), "{text:?} does not say {word:?}");
    };
    says(&[Some(&q)], "key");
    says(&[Some(&q), Some(&k)], "value");
    says(&[Some(&tensor(&[1, 3, 7], 0)), Some(&k), Some(&k)], "num_heads");
    says(&[Some(&q), Some(&tensor(&[1, 3, 6], 0)), Some(&k)], "key");
    says(&[Some(&q), Some(&k), Some(&k), Some(&tensor(&[23], 0))], "bias");
    says(&[Some(&q), Some(&k), Some(&k), None, None, Some(&tensor(&[1, 2, 3, 4], 0))], "attention_bias");
    says(&[Some(&q), Some(&k), Some(&k), None, None, None, Some(&tensor(&[1, 2, 3, 4], 0))], "past_value");
    let eight = [Some(&q), Some(&k), Some(&k), None, None, None, None, None, Some(&q)];
    says(&eight, "past_sequence_length");
}
