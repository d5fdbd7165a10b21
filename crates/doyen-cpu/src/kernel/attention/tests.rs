//! Attention against an f64 evaluation of the contract, and the bitwise promises: chunks, company, threads.

use super::*;
use crate::{kernel::test_data::noise, pool::Pool};
use doyen_graph::device::{GroupTables, SeqSpan};
use doyen_tensor::PageId;
use proptest::prelude::*;
use std::num::NonZeroUsize;

fn pool(threads: usize) -> Pool {
    Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap()
}

#[derive(Debug, Clone, Copy)]
struct Model {
    params: AttentionParams,
    page_size: usize,
    ty: KvType,
    per_channel: bool,
    sink: u8,
    bias: bool,
}

/// A sequence's rotated queries and keys and its values, for all its positions.
struct Sequence {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    len: usize,
}

impl Model {
    fn sequence(&self, seed: u64, len: usize) -> Sequence {
        let p = &self.params;
        let of = |salt: u64, width: usize| noise(seed.wrapping_add(salt), len * width);
        Sequence {
            q: of(1, p.heads * p.k_head_size).iter().map(|v| 3.0 * v).collect(),
            k: of(2, p.kv_heads * p.k_head_size),
            v: of(3, p.kv_heads * p.v_head_size),
            len,
        }
    }

    fn sinks(&self) -> Vec<f32> {
        noise(99, self.params.heads)
    }

    fn scales(&self, salt: u64, d: usize) -> Vec<f32> {
        let step = match self.ty {
            KvType::Int8 => 0.007,
            KvType::Int4 => 0.12,
            _ => return vec![1.0; self.params.kv_heads * d],
        };
        noise(salt, self.params.kv_heads * d).iter().map(|v| step * (1.0 + 0.3 * v)).collect()
    }

    /// What the cache gives back for `x` at `channel` of `head`.
    fn stored(&self, x: f32, scales: &[f32], at: usize) -> f64 {
        let (lo, hi) = match self.ty {
            KvType::F32 => return f64::from(x),
            KvType::F16 => return half::f16::from_f32(x).to_f64(),
            KvType::BF16 => return half::bf16::from_f32(x).to_f64(),
            KvType::Int8 => (-128.0, 127.0),
            KvType::Int4 => (-8.0, 7.0),
        };
        let scale = scales[if self.per_channel { at } else { 0 }];
        f64::from((x / scale).round_ties_even().clamp(lo, hi)) * f64::from(scale)
    }

    /// Bias of head `h`, query position `i`, key position `j`.
    fn bias_at(h: usize, i: usize, j: usize) -> f32 {
        ((h * 7 + i * 3 + j * 5) % 11) as f32 * 0.1 - 0.5
    }

    /// The contract, literally, for position `i` of a sequence of which the cache holds `total` positions.
    fn reference(&self, s: &Sequence, i: usize, total: usize) -> Vec<f64> {
        let p = &self.params;
        let (dk, dv) = (p.k_head_size, p.v_head_size);
        let (ks, vs) = (self.scales(5, dk), self.scales(6, dv));
        let mut out = Vec::new();
        for h in 0..p.heads {
            let kv = h / (p.heads / p.kv_heads);
            let mut scores = vec![f64::NEG_INFINITY; total];
            for (j, score) in scores.iter_mut().enumerate() {
                if (p.causal && j > i) || p.window.is_some_and(|w| j + w <= i) {
                    continue;
                }
                let dot: f64 = (0..dk)
                    .map(|c| {
                        let k = s.k[(j * p.kv_heads + kv) * dk + c];
                        f64::from(s.q[(i * p.heads + h) * dk + c]) * self.stored(k, &ks, kv * dk + c)
                    })
                    .sum();
                *score = dot * f64::from(p.scale);
                if p.softcap > 0.0 {
                    *score = f64::from(p.softcap) * (*score / f64::from(p.softcap)).tanh();
                }
                if self.bias {
                    *score += f64::from(Self::bias_at(h, i, j));
                }
            }
            let sink = [None, Some(0.0), Some(f64::from(self.sinks()[h]))][self.sink as usize];
            let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
            for c in 0..dv {
                let weighted: f64 = (scores.iter().enumerate())
                    .filter(|(_, s)| s.is_finite())
                    .map(|(j, w)| {
                        let at = kv * dv + c;
                        (w - max).exp() * self.stored(s.v[j * p.kv_heads * dv + at], &vs, at)
                    })
                    .sum();
                out.push(weighted / total);
            }
        }
        out
    }

    /// Runs steps, each a list of (sequence, new tokens), and returns the outputs of every sequence, position by
    /// position. Pages are dealt out in a scattered order and start as garbage.
    fn play(
        &self,
        isa: Isa,
        pool: &Pool,
        sequences: &[Sequence],
        steps: &[Vec<(usize, usize)>],
    ) -> Vec<Vec<f32>> {
        let p = &self.params;
        let kernels = Attention::new(isa);
        let need: Vec<usize> = sequences.iter().map(|s| s.len.div_ceil(self.page_size)).collect();
        let pages = need.iter().sum::<usize>() + 3;
        let stride = (1..pages).rev().find(|s| gcd(*s, pages) == 1).unwrap_or(1);
        let mut deal = (0..pages).map(|i| PageId((i * stride % pages) as u32));
        let tables: Vec<Vec<PageId>> = need.iter().map(|&n| deal.by_ref().take(n).collect()).collect();
        let mut k = Pages::new(self, pages, p.k_head_size, 5);
        let mut v = Pages::new(self, pages, p.v_head_size, 6);
        let mut done = vec![0; sequences.len()];
        let mut outputs = vec![Vec::new(); sequences.len()];
        for step in steps {
            let (mut spans, mut group) = (Vec::new(), GroupTables::default());
            let (mut q, mut new_k, mut new_v) = (Vec::new(), Vec::new(), Vec::new());
            for &(s, len) in step {
                let first = spans.last().map_or(0, |s: &SeqSpan| s.first + s.len);
                spans.push(SeqSpan { first, len, past: done[s] });
                group.push(&tables[s]);
                let rows = |x: &[f32], w: usize| x[done[s] * w..(done[s] + len) * w].to_vec();
                q.extend(rows(&sequences[s].q, p.heads * p.k_head_size));
                new_k.extend(rows(&sequences[s].k, p.kv_heads * p.k_head_size));
                new_v.extend(rows(&sequences[s].v, p.kv_heads * p.v_head_size));
            }
            let batch = Batch::new(&spans, &group, self.page_size, pages, p.window).unwrap();
            k.write().append(&kernels, pool, Rows::new(&new_k, p.kv_heads * p.k_head_size), &batch);
            v.write().append(&kernels, pool, Rows::new(&new_v, p.kv_heads * p.v_head_size), &batch);
            let context = spans.iter().map(|s| s.past + s.len).max().unwrap_or(0);
            let mut scratch = vec![f32::NAN; Attention::scratch_len(p, pool.threads(), context)];
            let mut out = vec![f32::NAN; batch.tokens() * p.heads * p.v_head_size];
            let bias = self.bias_data(&spans, context);
            let sinks = self.sinks();
            let sink = [Sink::None, Sink::Zero, Sink::Heads(&sinks)][self.sink as usize];
            let rows = Rows::new(&q, p.heads * p.k_head_size);
            let stores = (k.read(), v.read());
            let bias = bias.as_ref().map(|(data, strides)| Bias { data, strides: *strides, keys: context });
            kernels.attend(pool, p, rows, stores, &batch, (sink, bias), &mut scratch, &mut out);
            let width = p.heads * p.v_head_size;
            for (&(s, len), span) in step.iter().zip(&spans) {
                outputs[s].extend_from_slice(&out[span.first * width..(span.first + len) * width]);
                done[s] += len;
            }
        }
        outputs
    }

    fn bias_data(&self, spans: &[SeqSpan], context: usize) -> Option<(Vec<f32>, [usize; 4])> {
        let rows = spans.iter().map(|s| s.len).max().unwrap_or(0);
        let heads = self.params.heads;
        self.bias.then(|| {
            let mut data = Vec::new();
            for s in spans {
                for h in 0..heads {
                    for i in 0..rows {
                        data.extend((0..context).map(|j| Self::bias_at(h, s.past + i, j)));
                    }
                }
            }
            (data, [heads * rows * context, rows * context, context, 1])
        })
    }

    fn check(&self, sequences: &[Sequence], outputs: &[Vec<f32>], tolerance: f64) {
        let width = self.params.heads * self.params.v_head_size;
        for (s, out) in sequences.iter().zip(outputs) {
            assert_eq!(out.len(), s.len * width);
            for i in 0..s.len {
                for (g, e) in out[i * width..].iter().zip(self.reference(s, i, s.len)) {
                    assert!((f64::from(*g) - e).abs() < tolerance, "{self:?} position {i}: {g} {e}");
                }
            }
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Storage of one layer's keys or values.
struct Pages {
    layout: KvLayout,
    ty: KvType,
    data: Vec<u8>,
    scales: Vec<f32>,
    per_channel: bool,
}

impl Pages {
    fn new(model: &Model, pages: usize, head_size: usize, salt: u64) -> Self {
        let layout =
            KvLayout { pages, kv_heads: model.params.kv_heads, page_size: model.page_size, head_size };
        // NaN in every float type.
        let data = vec![0xff; layout.rows() * model.ty.row_bytes(head_size)];
        let (ty, per_channel) = (model.ty, model.per_channel);
        Self { layout, ty, data, scales: model.scales(salt, head_size), per_channel }
    }

    fn read(&self) -> KvStore<'_> {
        KvStore::new(self.layout, self.ty, &self.data, scales(&self.scales, self.per_channel)).unwrap()
    }

    fn write(&mut self) -> KvStoreMut<'_> {
        let scales = scales(&self.scales, self.per_channel);
        KvStoreMut::new(self.layout, self.ty, &mut self.data, scales).unwrap()
    }
}

fn scales(all: &[f32], per_channel: bool) -> KvScales<'_> {
    if per_channel { KvScales::Channel(all) } else { KvScales::Tensor(all[0]) }
}

fn params(heads: usize, kv_heads: usize, dk: usize, dv: usize) -> AttentionParams {
    AttentionParams {
        heads,
        kv_heads,
        k_head_size: dk,
        v_head_size: dv,
        scale: 1.0 / (dk as f32).sqrt(),
        softcap: 0.0,
        window: None,
        causal: true,
    }
}

/// Group sizes of one register tile and of several; head sizes of whole vectors of 8, of 16, and others.
fn models() -> impl Strategy<Value = Model> {
    let heads = (1usize..3, prop_oneof![1usize..6, Just(9)]);
    let size = || prop_oneof![1usize..20, Just(32), Just(64), Just(72), Just(100)];
    let window = prop_oneof![Just(None), (1usize..40).prop_map(Some), (250usize..300).prop_map(Some)];
    let ty = prop_oneof![
        2 => Just(KvType::F32),
        1 => Just(KvType::F16),
        1 => Just(KvType::BF16),
        1 => Just(KvType::Int8),
        1 => Just(KvType::Int4),
    ];
    (heads, (size(), size()), window, ty, 0u32..7, 0u8..3, any::<[bool; 3]>()).prop_map(
        |((kv_heads, group), (dk, dv), window, ty, page, sink, [softcap, bias, per_channel])| {
            let even = |d: usize| if ty == KvType::Int4 { d.next_multiple_of(2) } else { d };
            let mut params = params(kv_heads * group, kv_heads, even(dk), even(dv));
            params.window = window;
            params.softcap = if softcap { 1.5 } else { 0.0 };
            Model { params, page_size: 1 << page, ty, per_channel, sink, bias }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn agrees_with_the_contract(
        model in models(), seed: u64, lens in prop::collection::vec(prop_oneof![0usize..9, 20usize..70], 1..4),
        long: bool, threads in 1usize..4,
    ) {
        let mut sequences: Vec<_> =
            lens.iter().enumerate().map(|(i, &n)| model.sequence(seed.wrapping_add(i as u64), n)).collect();
        if long {
            sequences[0] = model.sequence(seed, 300);
        }
        let step: Vec<_> = sequences.iter().enumerate().map(|(i, s)| (i, s.len)).collect();
        let pool = pool(threads);
        for isa in Isa::all() {
            let out = model.play(isa, &pool, &sequences, std::slice::from_ref(&step));
            model.check(&sequences, &out, 2e-5);
        }
    }

}

proptest! {
    // Each case decodes hundreds of tokens ten times over.
    #![proptest_config(ProptestConfig::with_cases(6))]
    /// Whole, token by token, in odd chunks, and in company, on one and several threads: the same bits.
    #[test]
    fn bits_do_not_depend_on_chunks_company_or_threads(
        mut model in models(), seed: u64, len in prop_oneof![1usize..40, 250usize..300, 500usize..600], cut in 1usize..120,
    ) {
        model.bias = false;
        let one = [model.sequence(seed, len)];
        let crowd = [model.sequence(seed, len), model.sequence(seed ^ 8, 70), model.sequence(seed ^ 9, 290)];
        let chunks: Vec<_> = (0..len).step_by(cut).map(|at| vec![(0, cut.min(len - at))]).collect();
        let mut crowded: Vec<Vec<(usize, usize)>> = vec![vec![(2, 280)]];
        crowded.extend(chunks.iter().enumerate().map(|(i, c)| {
            let mut step = c.clone();
            step.push((1, usize::from(i < 70)));
            step.insert(0, (2, usize::from(i < 10)));
            step
        }));
        let (single, several) = (pool(1), pool(3));
        for isa in Isa::all() {
            let whole = model.play(isa, &single, &one, &[vec![(0, len)]]);
            let bits = |out: &[f32]| out.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let expected = bits(&whole[0]);
            prop_assert!(whole[0].iter().all(|v| v.is_finite()));
            let tokens = vec![vec![(0, 1)]; len];
            for pool in [&single, &several] {
                prop_assert_eq!(&bits(&model.play(isa, pool, &one, &[vec![(0, len)]])[0]), &expected);
                prop_assert_eq!(&bits(&model.play(isa, pool, &one, &chunks)[0]), &expected);
                prop_assert_eq!(&bits(&model.play(isa, pool, &one, &tokens)[0]), &expected);
                prop_assert_eq!(&bits(&model.play(isa, pool, &crowd, &crowded)[0]), &expected);
            }
        }
    }
}

/// Every plan of the scheduler, on work large enough to reach the pool.
#[test]
fn bits_do_not_depend_on_the_plan() {
    let model = Model {
        params: params(8, 2, 64, 48),
        page_size: 32,
        ty: KvType::F32,
        per_channel: false,
        sink: 2,
        bias: false,
    };
    let sequences = [model.sequence(1, 600), model.sequence(2, 300)];
    let steps: Vec<Vec<(usize, usize)>> = vec![
        vec![(0, 590), (1, 250)],
        vec![(0, 1), (1, 41)],
        vec![(0, 3)],
        vec![(0, 1), (1, 1)],
        vec![(0, 5), (1, 8)],
    ];
    for isa in Isa::all() {
        let alone = model.play(isa, &pool(1), &sequences, &steps);
        for threads in [2, 3, 9] {
            assert_eq!(model.play(isa, &pool(threads), &sequences, &steps), alone, "{threads} threads");
        }
        let whole = model.play(isa, &pool(1), &sequences, &[vec![(1, 300), (0, 600)]]);
        assert_eq!(whole, alone);
        model.check(&sequences[1..], &alone[1..], 2e-5);
    }
}

#[test]
fn without_causality_every_query_sees_the_whole_sequence() {
    let mut params = params(4, 2, 16, 16);
    params.causal = false;
    let model = Model { params, page_size: 8, ty: KvType::F16, per_channel: false, sink: 0, bias: true };
    let sequences = [model.sequence(3, 40), model.sequence(4, 300)];
    for isa in Isa::all() {
        let out = model.play(isa, &pool(2), &sequences, &[vec![(0, 40), (1, 300)]]);
        model.check(&sequences, &out, 2e-5);
        // In two steps, the first ones see what is there by then.
        let out = model.play(isa, &pool(2), &sequences, &[vec![(1, 100)], vec![(1, 200)]]);
        for (i, total) in [(0, 100), (99, 100), (100, 300), (299, 300)] {
            for (g, e) in out[1][i * 64..].iter().zip(model.reference(&sequences[1], i, total)) {
                assert!((f64::from(*g) - e).abs() < 2e-5);
            }
        }
    }
}

#[test]
fn codes_are_those_of_the_contract() {
    let layout = KvLayout { pages: 1, kv_heads: 1, page_size: 1, head_size: 4 };
    let (spans, mut tables) = ([SeqSpan { first: 0, len: 1, past: 0 }], GroupTables::default());
    tables.push(&[PageId(0)]);
    let batch = Batch::new(&spans, &tables, 1, 1, None).unwrap();
    let x = [0.25, -0.75, 9.0, -9.0];
    for isa in Isa::all() {
        let kernels = Attention::new(isa);
        let mut codes = [0; 4];
        let scales = KvScales::Channel(&[0.5, 0.5, 0.01, 0.01]);
        let mut store = KvStoreMut::new(layout, KvType::Int8, &mut codes, scales).unwrap();
        store.append(&kernels, &pool(1), Rows::new(&x, 4), &batch);
        // 0.5 and -1.5 round to even.
        assert_eq!(codes.map(|c| c as i8), [0, -2, 127, -128]);
        let mut codes = [0; 2];
        let mut store = KvStoreMut::new(layout, KvType::Int4, &mut codes, KvScales::Tensor(0.25)).unwrap();
        store.append(&kernels, &pool(1), Rows::new(&x, 4), &batch);
        // 1, -3, 7, -8, plus 8; the even channel in the low nibble.
        assert_eq!(codes, [0x59, 0x0f]);
    }
}

#[test]
fn wrong_batches_are_refused() {
    let span = |first, len, past| SeqSpan { first, len, past };
    let table = |pages: &[&[u32]]| {
        let mut t = GroupTables::default();
        for p in pages {
            t.push(&p.iter().map(|&p| PageId(p)).collect::<Vec<_>>());
        }
        t
    };
    let check = |spans: &[SeqSpan], pages: &[&[u32]], window| {
        Batch::new(spans, &table(pages), 4, 10, window).map(|b| b.tokens())
    };
    assert_eq!(check(&[span(0, 2, 3), span(2, 0, 9)], &[&[1, 2], &[]], None), Ok(2));
    assert_eq!(
        check(&[span(0, 1, 4)], &[&[1]], None),
        Err(AttentionError::NoPage { sequence: 0, position: 4 })
    );
    assert_eq!(
        check(&[span(0, 1, 4)], &[&[1, 10]], None),
        Err(AttentionError::PageRange { sequence: 0, page: PageId(10), pages: 10 })
    );
    // A page that has left the window may be gone.
    assert_eq!(check(&[span(0, 1, 8)], &[&[77, 1, 2]], Some(5)), Ok(1));
    assert!(check(&[span(0, 1, 8)], &[&[77, 1, 2]], Some(6)).is_err());
    assert_eq!(
        check(&[span(0, 1, 0), span(2, 1, 0)], &[&[1], &[2]], None),
        Err(AttentionError::Spans { sequence: 1, found: 2, expected: 1 })
    );
    assert_eq!(check(&[span(0, 1, 0)], &[], None), Err(AttentionError::Tables { tables: 0, sequences: 1 }));
    assert_eq!(Batch::new(&[], &table(&[]), 3, 1, None).unwrap_err(), AttentionError::PageSize(3));
    assert_eq!(params(3, 2, 4, 4).group(), Err(AttentionError::Heads { heads: 3, kv_heads: 2 }));
    let layout = KvLayout { pages: 1, kv_heads: 1, page_size: 1, head_size: 3 };
    let store = |ty, bytes, scales| KvStore::new(layout, ty, &[0; 16][..bytes], scales).map(|s| s.ty());
    assert_eq!(store(KvType::F32, 12, KvScales::Tensor(1.0)), Ok(KvType::F32));
    assert!(store(KvType::F32, 16, KvScales::Tensor(1.0)).is_err());
    assert_eq!(store(KvType::Int4, 1, KvScales::Tensor(1.0)), Err(AttentionError::OddHead(3)));
    assert!(store(KvType::Int8, 3, KvScales::Channel(&[1.0])).is_err());
}

/// What a later token brings, NaN and infinities included, does not reach the queries before it; what is out of the
/// window does not come back.
#[test]
fn hostile_tokens_stay_where_they_are_seen() {
    let mut params = params(6, 2, 48, 40);
    params.window = Some(30);
    for ty in [KvType::F32, KvType::F16, KvType::BF16] {
        let model = Model { params, page_size: 16, ty, per_channel: false, sink: 1, bias: false };
        let clean = [model.sequence(5, 300)];
        let mut hostile = [model.sequence(5, 300)];
        let at = 150;
        for (x, width) in [(&mut hostile[0].k, 2 * 48), (&mut hostile[0].v, 2 * 40)] {
            x[at * width..(at + 1) * width].fill(f32::NAN);
            x[at * width] = f32::INFINITY;
        }
        for isa in Isa::all() {
            let steps = [vec![(0, 170)], vec![(0, 130)]];
            let play = |s: &[Sequence; 1]| model.play(isa, &pool(2), s, &steps).remove(0);
            let (good, bad) = (play(&clean), play(&hostile));
            let width = 6 * 40;
            assert_eq!(good[..at * width], bad[..at * width]);
            assert!(bad[at * width..(at + 30) * width].iter().any(|v| v.is_nan()));
            assert_eq!(good[(at + 30) * width..], bad[(at + 30) * width..]);
        }
    }
}
