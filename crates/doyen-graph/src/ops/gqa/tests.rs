//! Relations between runs that must agree, the window cache, and hostile lengths.

use super::*;
use crate::ir::Attr;
use crate::ops::Op;
use doyen_tensor::DType;
use proptest::prelude::*;

const NQ: usize = 4;
const NKV: usize = 2;
const D: usize = 16;

/// A cache as it goes from one run to the next: keys, values, rows.
#[derive(Clone)]
struct State {
    past: Option<(Tensor, Tensor)>,
}

struct Rng(u64);

impl Rng {
    fn floats(&mut self, shape: &[usize]) -> Tensor {
        let n: usize = shape.iter().product();
        let mut next = || {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((self.0 >> 33) % 2001) as f32 / 500.0 - 2.0
        };
        Tensor::from_slice(shape.to_vec(), &(0..n).map(|_| next()).collect::<Vec<_>>()).unwrap()
    }
}

fn i32s(values: &[i32]) -> Tensor {
    Tensor::from_slice([values.len()], values).unwrap()
}

fn caches() -> (Tensor, Tensor) {
    let angle = |i: usize| (i / 8) as f32 * 0.7f32.powi((i % 8) as i32);
    let table = |f: fn(f32) -> f32| {
        Tensor::from_slice([64, 8], &(0..64 * 8).map(|i| f(angle(i))).collect::<Vec<_>>()).unwrap()
    };
    (table(f32::cos), table(f32::sin))
}

fn op(extra: &[(&str, Attr)]) -> Op {
    let mut a = Attrs::default();
    a.set("num_heads", NQ as i64).set("kv_num_heads", NKV as i64).set("do_rotary", 1i64);
    for (name, value) in extra {
        a.set(*name, value.clone());
    }
    Op::parse("com.microsoft", "GroupQueryAttention", 1, &a).unwrap()
}

/// One run on packed or separate heads; `lengths` are the total lengths of the sequences.
fn run(
    op: &Op,
    qkv: [&Tensor; 3],
    state: &State,
    lengths: &[usize],
    total: usize,
    extra: &[(usize, &Tensor)],
) -> Result<(Vec<f32>, State, Vec<Tensor>), OpError> {
    let (cos, sin) = caches();
    let seqlens = i32s(&lengths.iter().map(|&l| l as i32 - 1).collect::<Vec<_>>());
    let total = Tensor::scalar(total as i32);
    let mut inputs: Vec<Option<&Tensor>> = vec![None; 16];
    inputs[..3].copy_from_slice(&qkv.map(Some));
    if let Some((k, v)) = &state.past {
        inputs[input::PAST_KEY] = Some(k);
        inputs[input::PAST_VALUE] = Some(v);
    }
    inputs[input::SEQLENS_K] = Some(&seqlens);
    inputs[input::TOTAL_SEQUENCE_LENGTH] = Some(&total);
    inputs[input::COS_CACHE] = Some(&cos);
    inputs[input::SIN_CACHE] = Some(&sin);
    for (i, t) in extra {
        inputs[*i] = Some(t);
    }
    let out = op.eval(&inputs, 3)?;
    let state = State { past: Some((out[1].clone(), out[2].clone())) };
    Ok((out[0].to_f32()?, state, out))
}

const EMPTY: State = State { past: None };

fn slice(t: &Tensor, from: usize, to: usize) -> Tensor {
    let row = t.shape()[2];
    let v = t.to_f32().unwrap()[from * row..to * row].to_vec();
    Tensor::from_slice([1, to - from, row], &v).unwrap()
}

fn tokens(rng: &mut Rng, n: usize) -> [Tensor; 3] {
    [rng.floats(&[1, n, NQ * D]), rng.floats(&[1, n, NKV * D]), rng.floats(&[1, n, NKV * D])]
}

fn buffer(rows: usize) -> State {
    let zeros = Tensor::from_slice([1, NKV, rows, D], &vec![0f32; NKV * rows * D]).unwrap();
    State { past: Some((zeros.clone(), zeros)) }
}

/// A prompt at once and the same prompt in chunks of these sizes.
fn chunked(op: &Op, t: &[Tensor; 3], cuts: &[usize], mut state: State) -> Vec<f32> {
    let (mut out, mut done) = (Vec::new(), 0);
    for &n in cuts {
        let part = [0, 1, 2].map(|i| slice(&t[i], done, done + n));
        done += n;
        let (y, next, _) = run(op, part.each_ref(), &state, &[done], done, &[]).unwrap();
        out.extend(y);
        state = next;
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Chunks equal the whole prompt bit for bit, with any window, softcap and sinks, in growing caches, in a shared
    /// buffer and, with a window, in window-sized caches.
    #[test]
    fn chunks_equal_the_whole(
        seed in any::<u64>(),
        cuts in proptest::collection::vec(1usize..5, 1..6),
        window in 0i64..5,
        slack in 0usize..4,
        interleaved in any::<bool>(),
    ) {
        let n: usize = cuts.iter().sum();
        let t = tokens(&mut Rng(seed), n);
        let window = if window == 0 { -1 } else { window };
        let attrs = [
            ("local_window_size", Attr::Int(window)),
            ("softcap", Attr::Float(3.0)),
            ("smooth_softmax", Attr::Int(1)),
            ("rotary_interleaved", Attr::Int(i64::from(interleaved))),
        ];
        let o = op(&attrs);
        let whole = run(&o, t.each_ref(), &EMPTY, &[n], n, &[]).unwrap().0;
        prop_assert_eq!(&chunked(&o, &t, &cuts, EMPTY), &whole);
        prop_assert_eq!(&chunked(&o, &t, &cuts, buffer(n + slack)), &whole);
        if window > 0 {
            let mut attrs = attrs.to_vec();
            attrs.push(("sliding_window_cache", Attr::Int(1)));
            let small = buffer(window as usize + slack);
            prop_assert_eq!(&chunked(&op(&attrs), &t, &cuts, small), &whole);
        }
    }

    /// Rows of a ragged decode equal the same sequences alone.
    #[test]
    fn ragged_equals_single(seed in any::<u64>(), lengths in proptest::collection::vec(1usize..9, 1..4)) {
        let mut rng = Rng(seed);
        let o = op(&[("local_window_size", Attr::Int(4))]);
        let b = lengths.len();
        let cap = lengths.iter().max().unwrap() + 1;
        let (k, v) = (rng.floats(&[b, NKV, cap, D]), rng.floats(&[b, NKV, cap, D]));
        let new = [rng.floats(&[b, 1, NQ * D]), rng.floats(&[b, 1, NKV * D]), rng.floats(&[b, 1, NKV * D])];
        let state = State { past: Some((k.clone(), v.clone())) };
        let totals: Vec<usize> = lengths.iter().map(|l| l + 1).collect();
        let all = run(&o, new.each_ref(), &state, &totals, cap, &[]).unwrap().0;
        for (i, &total) in totals.iter().enumerate() {
            let one = |t: &Tensor| t.outer_slice(i, i + 1).unwrap();
            let state = State { past: Some((one(&k), one(&v))) };
            let part = [0, 1, 2].map(|j| one(&new[j]));
            let y = run(&o, part.each_ref(), &state, &[total], total, &[]).unwrap().0;
            prop_assert_eq!(&all[i * NQ * D..(i + 1) * NQ * D], &y[..]);
        }
    }

    /// No lengths, positions or totals make the operator panic or reserve what the inputs do not justify.
    #[test]
    fn hostile_lengths(
        last in any::<i32>(), total in any::<i32>(), near in -3i32..12, near_total in -3i32..12,
        id in any::<i64>(), rows in 0usize..6, s in 1usize..4, mode in 0usize..3,
    ) {
        let o = match mode {
            0 => op(&[("local_window_size", Attr::Int(2)), ("sliding_window_cache", Attr::Int(1))]),
            1 => op(&[("causal", Attr::Int(0))]),
            _ => op(&[]),
        };
        let t = tokens(&mut Rng(1), s);
        let (cos, sin) = caches();
        let ids = Tensor::from_slice([1, s], &vec![id; s]).unwrap();
        let state = buffer(rows);
        let (pk, pv) = state.past.as_ref().unwrap();
        for (last, total) in [(last, total), (near, total), (last, near_total), (near, near_total)] {
            let (seqlens, total) = (i32s(&[last]), Tensor::scalar(total));
            let mut inputs: Vec<Option<&Tensor>> =
                vec![Some(&t[0]), Some(&t[1]), Some(&t[2]), Some(pk), Some(pv), Some(&seqlens), Some(&total)];
            inputs.extend([Some(&cos), Some(&sin)]);
            let _ = o.eval(&inputs, 3);
            inputs.push(Some(&ids));
            let _ = o.eval(&inputs, 3);
        }
    }
}

/// Rows kept of a cache of 6 for a window of 4, from the contract.
#[test]
fn window_rows_follow_the_contract() {
    let rows: Vec<usize> = (3..=10).map(|t| window_rows(t, 6, 4)).collect();
    assert_eq!(rows, [3, 4, 5, 6, 4, 5, 6, 4]);
    assert!((0..40).all(|t| window_rows(t, 4, 4) == t.min(4)));
}

#[test]
fn packed_equals_separate() {
    let t = tokens(&mut Rng(3), 3);
    let o = op(&[]);
    let (want, ..) = run(&o, t.each_ref(), &EMPTY, &[3], 3, &[]).unwrap();
    let rows: Vec<Vec<f32>> = t.iter().map(|t| t.to_f32().unwrap()).collect();
    let packed: Vec<f32> = (0..3)
        .flat_map(|i| rows.iter().flat_map(move |r| r[i * r.len() / 3..(i + 1) * r.len() / 3].to_vec()))
        .collect();
    let packed = Tensor::from_slice([1, 3, (NQ + 2 * NKV) * D], &packed).unwrap();
    let (cos, sin) = caches();
    let (seqlens, total) = (i32s(&[2]), Tensor::scalar(3i32));
    let inputs =
        [Some(&packed), None, None, None, None, Some(&seqlens), Some(&total), Some(&cos), Some(&sin)];
    assert_eq!(o.eval(&inputs, 3).unwrap()[0].to_f32().unwrap(), want);
}

/// A first prompt takes its first id only; a continuation takes its ids as they are.
#[test]
fn position_ids() {
    let t = tokens(&mut Rng(4), 5);
    let o = op(&[]);
    let ids = |v: &[i64]| Tensor::from_slice([1, v.len()], v).unwrap();
    let with =
        |v: &[i64]| run(&o, t.each_ref(), &EMPTY, &[5], 5, &[(input::POSITION_IDS, &ids(v))]).unwrap().2;
    assert_eq!(with(&[3, 1, 4, 1, 5]), with(&[3, 4, 5, 6, 7]));
    assert_ne!(with(&[3, 4, 5, 6, 7])[1], with(&[0, 1, 2, 3, 4])[1]);
    let (_, state, _) = run(&o, t.each_ref(), &EMPTY, &[5], 5, &[]).unwrap();
    let one = [0, 1, 2].map(|i| slice(&t[i], 0, 1));
    let step = |id: i64| run(&o, one.each_ref(), &state, &[6], 6, &[(input::POSITION_IDS, &ids(&[id]))]);
    let implicit = run(&o, one.each_ref(), &state, &[6], 6, &[]).unwrap().2;
    assert_eq!(step(5).unwrap().2, implicit);
    assert_ne!(step(2).unwrap().2[1], implicit[1]);
    for bad in [-1, 64, i64::MIN, i64::MAX] {
        assert!(step(bad).err().unwrap().to_string().contains("position_ids"));
    }
}

/// Right-padded prompts: the rows that count are those of the prompt alone.
#[test]
fn padded_prompt() {
    let mut rng = Rng(5);
    let o = op(&[]);
    let t = [rng.floats(&[2, 4, NQ * D]), rng.floats(&[2, 4, NKV * D]), rng.floats(&[2, 4, NKV * D])];
    let (y, ..) = run(&o, t.each_ref(), &EMPTY, &[2, 4], 4, &[]).unwrap();
    let short = [0, 1, 2].map(|i| slice(&t[i].outer_slice(0, 1).unwrap(), 0, 2));
    let (want, ..) = run(&o, short.each_ref(), &EMPTY, &[2], 2, &[]).unwrap();
    assert_eq!(y[..want.len()], want);
}

/// Quantized caches hold `clamp(rint(x / scale))` and attention reads what they hold.
#[test]
fn quantized_caches() {
    for (bits, kind, high) in [(8i64, DType::I8, 127), (4, DType::U8, 7)] {
        let attrs = [
            ("k_quant_type", Attr::Str("PER_TENSOR".into())),
            ("v_quant_type", Attr::Str("PER_CHANNEL".into())),
            ("kv_cache_bit_width", Attr::Int(bits)),
            ("do_rotary", Attr::Int(0)),
        ];
        let t = tokens(&mut Rng(6), 2);
        let k_scale = Tensor::from_slice([1], &[0.25f32]).unwrap();
        let v_scale = Tensor::from_slice([1, NKV, 1, D], &[0.5f32; NKV * D]).unwrap();
        let scales = [(input::K_SCALE, &k_scale), (input::V_SCALE, &v_scale)];
        let o = op(&attrs);
        let (y, _, out) = run(&o, t.each_ref(), &EMPTY, &[2], 2, &scales).unwrap();
        assert_eq!(out[1].dtype(), kind);
        let k = t[1].to_f32().unwrap();
        let code =
            |v: f32, s: f32| (v / s).round_ties_even().clamp(-f32::from(high as u8) - 1.0, high as f32);
        let (head, row, channel) = (1, 1, 3);
        let want = code(k[row * NKV * D + head * D + channel], 0.25);
        let at = (head * 2 + row) * D + channel;
        let got = if bits == 8 {
            out[1].to_vec::<i8>().unwrap()[at] as f32
        } else {
            f32::from((out[1].bytes()[at / 2] >> (4 * (at % 2))) & 15) - 8.0
        };
        assert_eq!(got, want);
        let round = |t: &Tensor, s: f32| {
            let v: Vec<f32> = t.to_f32().unwrap().iter().map(|&v| code(v, s) * s).collect();
            Tensor::from_slice(t.shape().clone(), &v).unwrap()
        };
        let (k, v) = (round(&t[1], 0.25), round(&t[2], 0.5));
        let (want, ..) =
            run(&op(&[("do_rotary", Attr::Int(0))]), [&t[0], &k, &v], &EMPTY, &[2], 2, &[]).unwrap();
        assert_eq!(y, want);
    }
}

#[test]
fn lengths_are_refused_by_name() {
    let o = op(&[]);
    let t = tokens(&mut Rng(7), 1);
    let error = |lengths: &[usize], total: usize, rows: usize| {
        run(&o, t.each_ref(), &buffer(rows), lengths, total, &[]).err().unwrap().to_string()
    };
    assert!(error(&[0], 5, 6).contains("seqlens_k"));
    assert!(error(&[9], 9, 6).contains("total_sequence_length"));
    assert!(error(&[6], 5, 6).contains("seqlens_k"));
    assert!(error(&[2, 3], 3, 6).contains("seqlens_k"));
    assert!(error(&[2], 0, 6).contains("total_sequence_length"));
}

#[test]
fn attributes_are_refused_by_name() {
    let parse = |extra: &[(&str, Attr)]| {
        let mut a = Attrs::default();
        a.set("num_heads", 4i64).set("kv_num_heads", 2i64);
        for (n, v) in extra {
            a.set(*n, v.clone());
        }
        Op::parse("com.microsoft", "GroupQueryAttention", 1, &a)
    };
    for (name, extra) in [
        ("num_heads", vec![("kv_num_heads", Attr::Int(3))]),
        ("num_heads", vec![("num_heads", Attr::Int(0))]),
        ("local_window_size", vec![("causal", Attr::Int(0)), ("local_window_size", Attr::Int(3))]),
        ("window_left", vec![("window_left", Attr::Int(3))]),
        ("kv_cache_bit_width", vec![("kv_cache_bit_width", Attr::Int(8))]),
        ("sliding_window_cache", vec![("sliding_window_cache", Attr::Int(1))]),
        ("qk_output", vec![("qk_output", Attr::Int(3))]),
    ] {
        let e = parse(&extra).unwrap_err().to_string();
        assert!(e.contains(name), "{name}: {e}");
    }
}
