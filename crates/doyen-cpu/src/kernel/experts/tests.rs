//! The grouped feed-forward against a naive f64 one, and against itself in other company.

use super::*;
use crate::kernel::{
    linear::{FloatMatrix, Orientation},
    test_data::{Rng, stored},
};
use doyen_tensor::{
    FloatType,
    format::{Bits, QuantMatrix, ZeroPoints},
};
use proptest::prelude::*;
use std::num::NonZeroUsize;

/// How a test projection is stored.
#[derive(Debug, Clone, Copy)]
enum Store {
    Int { bits: Bits, block: usize, zero: bool },
    Float,
}

struct Matrices {
    rows: usize,
    cols: usize,
    store: Store,
    /// Per expert: codes (or numbers), scales, zero points, bias.
    parts: Vec<[Vec<u8>; 4]>,
}

impl Matrices {
    fn new(rng: &mut Rng, experts: usize, rows: usize, cols: usize, store: Store) -> Self {
        let parts = (0..experts)
            .map(|_| {
                let bias = stored(FloatType::F32, &rng.floats(rows));
                match store {
                    Store::Float => {
                        [stored(FloatType::F32, &rng.floats(rows * cols)), Vec::new(), Vec::new(), bias]
                    }
                    Store::Int { bits, block, zero } => {
                        let blocks = cols.div_ceil(block);
                        let mut bytes = |n: usize| -> Vec<u8> { (0..n).map(|_| rng.next() as u8).collect() };
                        let codes = bytes(rows * bits.packed_len(cols));
                        let zeros = if zero { bytes(rows * bits.packed_len(blocks)) } else { Vec::new() };
                        let unit = 1.0 / f32::from(bits.max_code());
                        let scales =
                            rng.floats(rows * blocks).iter().flat_map(|v| (v * unit).to_le_bytes()).collect();
                        [codes, scales, zeros, bias]
                    }
                }
            })
            .collect();
        Self { rows, cols, store, parts }
    }

    fn get(&self, expert: usize) -> Weights<'_> {
        let [codes, scales, zeros, _] = &self.parts[expert];
        let view = |bytes| FloatView::new(FloatType::F32, bytes).unwrap();
        match self.store {
            Store::Float => Weights::Float(FloatMatrix {
                rows: self.rows,
                cols: self.cols,
                orientation: Orientation::RowMajor,
                stride: self.cols,
                values: view(codes),
            }),
            Store::Int { bits, block, zero } => Weights::Int(QuantMatrix {
                rows: self.rows,
                cols: self.cols,
                bits,
                block,
                codes,
                row_bytes: bits.packed_len(self.cols),
                scales: view(scales),
                zero_points: if zero {
                    ZeroPoints::PerBlock {
                        packed: zeros,
                        row_bytes: bits.packed_len(self.cols.div_ceil(block)),
                    }
                } else {
                    ZeroPoints::Default
                },
            }),
        }
    }

    fn bias(&self, expert: usize) -> FloatView<'_> {
        FloatView::new(FloatType::F32, &self.parts[expert][3]).unwrap()
    }

    /// `W x + b` in f64.
    fn product(&self, expert: usize, x: &[f64], with_bias: bool) -> Vec<f64> {
        (0..self.rows)
            .map(|n| {
                let sum: f64 = match self.get(expert) {
                    Weights::Mini(_) => unreachable!("no bank here has such weights"),
                    Weights::Float(m) => (0..self.cols).map(|k| f64::from(m.get(n, k)) * x[k]).sum(),
                    Weights::Int(m) => {
                        let mut w = vec![0.0; self.cols];
                        m.dequantize_row(n, &mut w);
                        w.iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum()
                    }
                };
                sum + if with_bias { f64::from(self.bias(expert).get(n)) } else { 0.0 }
            })
            .collect()
    }
}

struct TestBank {
    fc1: Matrices,
    fc2: Matrices,
    fc3: Option<Matrices>,
    with_bias: bool,
}

impl TestBank {
    fn matrices(&self, p: Projection) -> &Matrices {
        match p {
            Projection::Fc1 => &self.fc1,
            Projection::Fc2 => &self.fc2,
            Projection::Fc3 => self.fc3.as_ref().unwrap(),
        }
    }
}

impl Bank for TestBank {
    fn weights(&self, p: Projection, expert: usize) -> Weights<'_> {
        self.matrices(p).get(expert)
    }
    fn bias(&self, p: Projection, expert: usize) -> Option<FloatView<'_>> {
        self.with_bias.then(|| self.matrices(p).bias(expert))
    }
}

#[derive(Debug, Clone)]
struct Case {
    shape: Shape,
    stores: [Store; 3],
    activation: Activation,
    gate: Gate,
    with_bias: bool,
    k: usize,
    seed: u64,
}

fn cases() -> impl Strategy<Value = Case> {
    let store = prop_oneof![
        4 => (0usize..3, 4u32..8, any::<bool>())
            .prop_map(|(b, block, zero)| Store::Int { bits: Bits::ALL[b], block: 1 << block, zero }),
        1 => Just(Store::Float),
    ];
    let shape = (1usize..7, 1usize..5, 1usize..9).prop_map(|(experts, h, i)| Shape {
        experts,
        hidden: 24 * h,
        inter: 12 * i,
    });
    let swiglu = Activation::SwiGlu { alpha: 1.702, beta: 1.0, limit: 2.0 };
    let how = prop_oneof![
        Just((Gate::None, Activation::Silu)),
        Just((Gate::None, Activation::Relu)),
        Just((Gate::None, Activation::Gelu)),
        Just((Gate::None, Activation::Identity)),
        Just((Gate::Interleaved, swiglu)),
        Just((Gate::Concatenated, swiglu)),
        Just((Gate::Separate, swiglu)),
        Just((Gate::Separate, Activation::Silu)),
    ];
    (shape, [store.clone(), store.clone(), store], how, any::<bool>(), 1usize..4, any::<u64>()).prop_map(
        |(shape, stores, (gate, activation), with_bias, k, seed)| {
            let k = k.min(shape.experts);
            Case { shape, stores, activation, gate, with_bias, k, seed }
        },
    )
}

fn build(case: &Case) -> TestBank {
    let mut rng = Rng(case.seed);
    let Shape { experts, hidden, inter } = case.shape;
    let fused = matches!(case.gate, Gate::Interleaved | Gate::Concatenated);
    let rows = if fused { 2 * inter } else { inter };
    TestBank {
        fc1: Matrices::new(&mut rng, experts, rows, hidden, case.stores[0]),
        fc2: Matrices::new(&mut rng, experts, hidden, inter, case.stores[1]),
        fc3: (case.gate == Gate::Separate)
            .then(|| Matrices::new(&mut rng, experts, inter, hidden, case.stores[2])),
        with_bias: case.with_bias,
    }
}

fn bind(case: &Case, bank: &TestBank, mode: Mode, isa: Isa) -> Experts {
    let format = |m: &Matrices| m.get(0).format();
    let formats =
        Formats { fc1: format(&bank.fc1), fc2: format(&bank.fc2), fc3: bank.fc3.as_ref().map(format) };
    let experts = Experts::new(case.shape, formats, case.activation, case.gate, mode, isa).unwrap();
    experts.check(bank).unwrap();
    experts
}

/// Distinct experts per token, weights of both signs and zero.
fn routes(case: &Case, tokens: usize) -> (Vec<u32>, Vec<f32>) {
    let mut rng = Rng(case.seed ^ 7);
    let mut ids = Vec::new();
    for _ in 0..tokens {
        let first = rng.next() as usize;
        ids.extend((0..case.k).map(|j| ((first + j) % case.shape.experts) as u32));
    }
    let weights = (0..ids.len()).map(|_| (rng.next() % 5) as f32 * 0.25 - 0.5).collect();
    (ids, weights)
}

fn run(
    experts: &Experts,
    bank: &TestBank,
    x: &[f32],
    ids: &[u32],
    weights: &[f32],
    k: usize,
    threads: usize,
) -> Vec<f32> {
    let pool = Pool::new(NonZeroUsize::new(threads).unwrap(), false).unwrap();
    let tokens = x.len() / experts.shape().hidden;
    let mut scratch = vec![0xA5; experts.scratch_len(tokens, k).unwrap()];
    let mut out = vec![f32::NAN; x.len()];
    experts.run(&pool, bank, x, Routes { k, experts: ids, weights }, &mut out, &mut scratch);
    out
}

fn activate(case: &Case, g: f64, l: f64) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let plain = |x: f64| match case.activation {
        Activation::Identity => x,
        Activation::Relu => x.max(0.0),
        Activation::Gelu => {
            0.5 * x * (1.0 + (f64::sqrt(2.0 / std::f64::consts::PI) * (x + 0.044715 * x * x * x)).tanh())
        }
        _ => x * sigmoid(x),
    };
    match (case.activation, case.gate) {
        (Activation::SwiGlu { alpha, beta, limit }, _) => {
            let (alpha, beta, limit) = (f64::from(alpha), f64::from(beta), f64::from(limit));
            let (g, l) = (g.min(limit), l.clamp(-limit, limit));
            g * sigmoid(alpha * g) * (l + beta)
        }
        (_, Gate::None) => plain(g),
        _ => plain(g) * l,
    }
}

fn naive(case: &Case, bank: &TestBank, x: &[f32], ids: &[u32], weights: &[f32]) -> Vec<f64> {
    let inter = case.shape.inter;
    x.chunks(case.shape.hidden)
        .enumerate()
        .flat_map(|(t, x)| {
            let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
            let mut out = vec![0.0; x.len()];
            for j in t * case.k..(t + 1) * case.k {
                let e = ids[j] as usize;
                let h = bank.fc1.product(e, &x, case.with_bias);
                let l = bank.fc3.as_ref().map(|m| m.product(e, &x, case.with_bias));
                let a: Vec<f64> = (0..inter)
                    .map(|i| match case.gate {
                        Gate::None => activate(case, h[i], 0.0),
                        Gate::Interleaved => activate(case, h[2 * i], h[2 * i + 1]),
                        Gate::Concatenated => activate(case, h[i], h[inter + i]),
                        Gate::Separate => activate(case, h[i], l.as_ref().unwrap()[i]),
                    })
                    .collect();
                for (o, y) in out.iter_mut().zip(bank.fc2.product(e, &a, case.with_bias)) {
                    *o += f64::from(weights[j]) * y;
                }
            }
            out
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Values here are of the order of 1 to 100; rounding in f32 stays below 1e-5 of the largest, int8 activations
    /// below 3 %.
    #[test]
    fn matches_the_naive_computation(case in cases()) {
        let bank = build(&case);
        let tokens = 6;
        let x = Rng(case.seed ^ 5).floats(tokens * case.shape.hidden);
        let (ids, weights) = routes(&case, tokens);
        let expected = naive(&case, &bank, &x, &ids, &weights);
        let size = expected.iter().fold(1.0f64, |m, v| m.max(v.abs()));
        for isa in Isa::all() {
            for (mode, tolerance) in [(Mode::Exact, 1e-5), (Mode::Fast, 3e-2)] {
                let experts = bind(&case, &bank, mode, isa);
                let found = run(&experts, &bank, &x, &ids, &weights, case.k, 1);
                for (f, e) in found.iter().zip(&expected) {
                    prop_assert!((f64::from(*f) - e).abs() <= tolerance * size, "{isa} {mode:?}: {f} for {e} ({size})");
                }
            }
        }
    }

    /// Bitwise the same for a token alone, in a batch, and with other numbers of threads.
    #[test]
    fn same_in_any_company(case in cases()) {
        let bank = build(&case);
        let (h, tokens) = (case.shape.hidden, 19);
        let x = Rng(case.seed ^ 6).floats(tokens * h);
        let (ids, weights) = routes(&case, tokens);
        let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        for isa in Isa::all() {
            for mode in [Mode::Exact, Mode::Fast] {
                let experts = bind(&case, &bank, mode, isa);
                let together = bits(run(&experts, &bank, &x, &ids, &weights, case.k, 1));
                prop_assert_eq!(&together, &bits(run(&experts, &bank, &x, &ids, &weights, case.k, 3)));
                for t in [0, 7, 18] {
                    let r = t * case.k..(t + 1) * case.k;
                    let alone = run(&experts, &bank, &x[t * h..(t + 1) * h], &ids[r.clone()], &weights[r], case.k, 1);
                    prop_assert_eq!(&together[t * h..(t + 1) * h], &bits(alone), "token {}", t);
                }
            }
        }
    }
}

#[test]
fn wrong_banks_are_named() {
    let case = Case {
        shape: Shape { experts: 2, hidden: 32, inter: 16 },
        stores: [Store::Int { bits: Bits::B4, block: 16, zero: false }; 3],
        activation: Activation::Silu,
        gate: Gate::None,
        with_bias: true,
        k: 1,
        seed: 1,
    };
    let mut bank = build(&case);
    let experts = bind(&case, &bank, Mode::Fast, Isa::detect());
    bank.fc2.parts[1][3].truncate(8);
    let e = experts.check(&bank).unwrap_err().to_string();
    assert_eq!(e, "Fc2 of expert 1: expected a bias of 32 numbers, found 2");
    let formats = Formats { fc1: bank.fc1.get(0).format(), fc2: bank.fc1.get(0).format(), fc3: None };
    let make =
        |activation, gate| Experts::new(case.shape, formats, activation, gate, Mode::Fast, Isa::Scalar);
    assert!(
        make(Activation::Silu, Gate::None).unwrap_err().to_string().contains("FC2 of experts: expected 16")
    );
    assert!(make(Activation::Silu, Gate::Separate).is_err());
    assert!(make(Activation::SwiGlu { alpha: 1.0, beta: 0.0, limit: 1.0 }, Gate::None).is_err());
}
