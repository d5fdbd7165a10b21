//! Masks, offsets and layouts by small examples.

use super::*;
use crate::ir::Attr;
use crate::ops::Op;
use proptest::prelude::*;

fn f(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_slice(shape.to_vec(), values).unwrap()
}

fn ramp(shape: &[usize], seed: f32) -> Tensor {
    let n: usize = shape.iter().product();
    f(shape, &(0..n).map(|i| (i as f32 * 0.73 + seed).sin()).collect::<Vec<_>>())
}

fn op(opset: i64, attrs: &[(&str, Attr)]) -> Op {
    let mut a = Attrs::default();
    for (n, v) in attrs {
        a.set(*n, v.clone());
    }
    Op::parse("", "Attention", opset, &a).unwrap()
}

fn eval(op: &Op, inputs: &[Option<&Tensor>]) -> Vec<Vec<f32>> {
    op.eval(inputs, 4).unwrap().iter().map(|t| t.to_f32().unwrap()).collect()
}

fn bools(shape: &[usize], values: &[bool]) -> Tensor {
    Tensor::from_slice(shape.to_vec(), values).unwrap()
}

/// Values weigh equally where scores are equal: which keys are visible shows as a mean.
fn visible(op: &Op, queries: usize, keys: usize, extra: &[(usize, &Tensor)]) -> Vec<f32> {
    let q = f(&[1, 1, queries, 1], &vec![0.0; queries]);
    let k = f(&[1, 1, keys, 1], &vec![0.0; keys]);
    let v = f(&[1, 1, keys, 1], &(0..keys).map(|j| (1 << j) as f32).collect::<Vec<_>>());
    let mut inputs: Vec<Option<&Tensor>> = vec![Some(&q), Some(&k), Some(&v), None, None, None, None];
    for (i, t) in extra {
        inputs[*i] = Some(t);
    }
    while inputs.last() == Some(&None) {
        inputs.pop();
    }
    eval(op, &inputs).swap_remove(0)
}

#[test]
fn offsets_of_the_causal_mask() {
    let causal = op(24, &[("is_causal", Attr::Int(1))]);
    assert_eq!(visible(&causal, 2, 2, &[]), [1.0, 1.5]);
    let n = Tensor::from_slice([1], &[3i64]).unwrap();
    assert_eq!(visible(&causal, 2, 4, &[(6, &n)]), [1.5, 7.0 / 3.0]);
    assert_eq!(visible(&op(24, &[]), 1, 4, &[(6, &n)]), [7.0 / 3.0]);
    let none = Tensor::from_slice([1], &[1i64]).unwrap();
    assert_eq!(visible(&causal, 2, 4, &[(6, &none)]), [0.0, 1.0], "an empty row is zero");
    let window = op(25, &[("left_window_size", Attr::Int(1)), ("right_window_size", Attr::Int(0))]);
    assert_eq!(visible(&window, 3, 3, &[]), [1.0, 1.5, 3.0]);
    for bad in [-1i64, 5] {
        let n = Tensor::from_slice([1], &[bad]).unwrap();
        let (q, k) = (f(&[1, 1, 1, 1], &[0.0]), f(&[1, 1, 4, 1], &[0.0; 4]));
        let e = causal.eval(&[Some(&q), Some(&k), Some(&k), None, None, None, Some(&n)], 1).unwrap_err();
        assert!(e.to_string().contains("nonpad_kv_seqlen"), "{e}");
    }
}

#[test]
fn short_masks_hide_the_rest() {
    let mask = bools(&[2, 2], &[true, false, true, true]);
    assert_eq!(visible(&op(24, &[]), 2, 3, &[(3, &mask)]), [1.0, 1.5]);
    let (q, k) = (f(&[1, 1, 2, 1], &[0.0; 2]), f(&[1, 1, 3, 1], &[0.0; 3]));
    let e = op(23, &[]).eval(&[Some(&q), Some(&k), Some(&k), Some(&mask)], 1).unwrap_err().to_string();
    assert!(e.contains("attn_mask"), "{e}");
    let one = bools(&[2, 1], &[true, false]);
    let all = visible(&op(23, &[]), 2, 3, &[(3, &one)]);
    assert_eq!(all, [7.0 / 3.0, 0.0]);
}

/// Capping after the mask would let hidden keys through.
#[test]
fn softcap_comes_before_the_mask() {
    let o = op(23, &[("softcap", Attr::Float(2.0)), ("qk_matmul_output_mode", Attr::Int(2))]);
    let (q, k) = (ramp(&[1, 1, 2, 4], 0.0), ramp(&[1, 1, 3, 4], 1.0));
    let mask = f(&[2, 3], &[0.0, -1e4, 0.0, f32::NEG_INFINITY, 0.0, 0.0]);
    let out = eval(&o, &[Some(&q), Some(&k), Some(&k), Some(&mask)]);
    assert!(out[3][1] < -9e3 && out[3][3] == f32::NEG_INFINITY);
}

#[test]
fn modes_of_the_fourth_output() {
    let (q, k) = (ramp(&[1, 2, 2, 4], 0.0), ramp(&[1, 2, 3, 4], 1.0));
    let mask = bools(&[3], &[true, true, false]);
    let out = |mode: i64| {
        let attrs = [("softcap", Attr::Float(0.5)), ("qk_matmul_output_mode", Attr::Int(mode))];
        eval(&op(23, &attrs), &[Some(&q), Some(&k), Some(&k), Some(&mask)]).swap_remove(3)
    };
    let modes: Vec<Vec<f32>> = (0..4).map(out).collect();
    for (i, &raw) in modes[0].iter().enumerate() {
        assert!((modes[1][i] - 0.5 * (raw / 0.5).tanh()).abs() < 1e-6);
        assert_eq!(modes[2][i], if i % 3 == 2 { f32::NEG_INFINITY } else { modes[1][i] });
    }
    assert!(modes[3].chunks(3).all(|p| (p[0] + p[1] - 1.0).abs() < 1e-6 && p[2] == 0.0));
}

#[test]
fn heads_are_required_for_rank_three() {
    let (q, k) = (ramp(&[1, 2, 8], 0.0), ramp(&[1, 2, 4], 1.0));
    let e = op(23, &[]).eval(&[Some(&q), Some(&k), Some(&k)], 1).unwrap_err().to_string();
    assert!(e.contains("q_num_heads"), "{e}");
    let o = op(23, &[("q_num_heads", Attr::Int(3)), ("kv_num_heads", Attr::Int(2))]);
    assert!(o.eval(&[Some(&q), Some(&k), Some(&k)], 1).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A past is keys seen before; rank 3 is rank 4 with the axes in another order.
    #[test]
    fn past_equals_earlier_keys(past in 1usize..4, new in 1usize..4, seed in 0f32..9.0) {
        let o = op(23, &[("is_causal", Attr::Int(1)), ("q_num_heads", Attr::Int(4)), ("kv_num_heads", Attr::Int(2))]);
        let n = past + new;
        let (q, k, v) = (ramp(&[1, n, 16], seed), ramp(&[1, n, 8], seed + 1.0), ramp(&[1, n, 6], seed + 2.0));
        let whole = eval(&o, &[Some(&q), Some(&k), Some(&v)]);
        let cut = |t: &Tensor, from: usize, to: usize| {
            let row = t.shape()[2];
            f(&[1, to - from, row], &t.to_f32().unwrap()[from * row..to * row])
        };
        let first = o.eval(&[Some(&cut(&q, 0, past)), Some(&cut(&k, 0, past)), Some(&cut(&v, 0, past))], 3).unwrap();
        let (q2, k2, v2) = (cut(&q, past, n), cut(&k, past, n), cut(&v, past, n));
        let rest = eval(&o, &[Some(&q2), Some(&k2), Some(&v2), None, Some(&first[1]), Some(&first[2])]);
        prop_assert_eq!(&rest[0][..], &whole[0][past * 12..]);
        prop_assert_eq!(&rest[1], &whole[1]);
    }
}
