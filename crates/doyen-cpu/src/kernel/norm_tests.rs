//! Normalisation against an f64 evaluation of the formulas, at awkward widths, and row independence.

use super::*;
use proptest::prelude::*;
use std::num::NonZeroUsize;

fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap()
}

/// Numbers without pattern; proptest shrinks the seed and the sizes, which is what matters here.
fn noise(seed: u64, n: usize) -> Vec<f32> {
    crate::kernel::test_data::noise(seed, n)
}

#[allow(clippy::struct_excessive_bools)]
#[derive(Debug, Clone, Copy)]
struct Case {
    rows: usize,
    width: usize,
    seed: u64,
    skip: bool,
    bias: bool,
    beta: bool,
    keep_sum: bool,
    layer: bool,
}

fn cases() -> impl Strategy<Value = Case> {
    let width = prop_oneof![1usize..10, 30usize..35, 60usize..70, Just(128), 200usize..260];
    (0usize..5, width, any::<u64>(), any::<[bool; 5]>()).prop_map(|(rows, width, seed, [a, b, c, d, e])| {
        Case { rows, width, seed, skip: a, bias: b, beta: c && e, keep_sum: d, layer: e }
    })
}

fn check(case: Case, isa: Isa, pool: &Pool) {
    let Case { rows, width, seed, .. } = case;
    let n = rows * width;
    let (x, skip) = (noise(seed, n), noise(seed ^ 1, n));
    let (gamma, beta, bias) = (noise(seed ^ 2, width), noise(seed ^ 3, width), noise(seed ^ 4, width));
    let affine = Affine { gamma: &gamma, beta: case.beta.then_some(&beta), eps: 1e-5 };
    let residual = case.skip.then_some(Residual { skip: &skip, bias: case.bias.then_some(&bias) });
    let (mut y, mut sum, mut mean, mut inv) = (vec![9.0; n], vec![9.0; n], vec![9.0; rows], vec![9.0; rows]);
    let out = Outputs {
        y: &mut y,
        sum: case.keep_sum.then_some(&mut sum[..]),
        mean: Some(&mut mean),
        inv_std: Some(&mut inv),
    };
    let norm = Norm::new(isa);
    if case.layer {
        norm.layer(pool, &x, residual, affine, out);
    } else {
        norm.rms(pool, &x, residual, affine, out);
    }
    for r in 0..rows {
        let row: Vec<f64> = (0..width)
            .map(|i| {
                let at = r * width + i;
                let mut v = x[at];
                if case.skip {
                    v += skip[at];
                    if case.bias {
                        v += bias[i];
                    }
                }
                if case.keep_sum {
                    assert_eq!(sum[at], v);
                }
                f64::from(v)
            })
            .collect();
        let m = if case.layer { row.iter().sum::<f64>() / width as f64 } else { 0.0 };
        let square = row.iter().map(|v| (v - m).powi(2)).sum::<f64>() / width as f64;
        let s = 1.0 / (square + 1e-5).sqrt();
        assert!((f64::from(mean[r]) - m).abs() < 1e-6);
        assert!((f64::from(inv[r]) / s - 1.0).abs() < 2e-6 + 1e-6 * s, "{} {s}", inv[r]);
        for i in 0..width {
            let b = if case.beta { f64::from(beta[i]) } else { 0.0 };
            let expected = (row[i] - m) * s * f64::from(gamma[i]) + b;
            let got = f64::from(y[r * width + i]);
            assert!((got - expected).abs() <= 2e-6 * (1.0 + s + expected.abs()), "{case:?} {got} {expected}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn agrees_with_f64(case in cases()) {
        let pool = pool(1);
        for isa in Isa::all() {
            check(case, isa, &pool);
        }
    }
}

#[test]
fn a_row_does_not_depend_on_the_others_or_on_threads() {
    let (rows, width) = (97, 301);
    let (x, gamma) = (noise(7, rows * width), noise(8, width));
    let affine = Affine { gamma: &gamma, beta: None, eps: 1e-6 };
    for isa in Isa::all() {
        let norm = Norm::new(isa);
        let mut all = vec![0.0; rows * width];
        norm.rms(&pool(3), &x, None, affine, Outputs { y: &mut all, ..Outputs::default() });
        let one = pool(1);
        for (x, all) in x.chunks(width).zip(all.chunks(width)) {
            let mut alone = vec![0.0; width];
            norm.rms(&one, x, None, affine, Outputs { y: &mut alone, ..Outputs::default() });
            assert_eq!(alone, all);
        }
    }
}

#[test]
fn heads_are_normalised_in_place_between_strides() {
    let (tokens, stride, heads, d) = (3, 29, 2, 9);
    let x = noise(3, (tokens - 1) * stride + heads * d);
    let gamma = noise(4, d);
    for isa in Isa::all() {
        let mut got = x.clone();
        Norm::new(isa).rms_heads(&pool(1), &mut got, (tokens, stride, heads), &gamma, 1e-6);
        for (i, (&g, &x0)) in got.iter().zip(&x).enumerate() {
            let (t, c) = (i / stride, i % stride);
            if c >= heads * d {
                assert_eq!(g, x0);
                continue;
            }
            let head = &x[t * stride + c / d * d..][..d];
            let square = head.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / d as f64;
            let expected = f64::from(x0) / (square + 1e-6).sqrt() * f64::from(gamma[c % d]);
            assert!((f64::from(g) - expected).abs() < 2e-6 * (1.0 + expected.abs()));
        }
    }
}

#[test]
fn nothing_to_do_is_fine() {
    let affine = Affine { gamma: &[1.0; 4], beta: None, eps: 1e-6 };
    Norm::new(Isa::detect()).rms(&pool(2), &[], None, affine, Outputs::default());
}
