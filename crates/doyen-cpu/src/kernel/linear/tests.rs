//! Every kernel against the f64 reference of the format, and against itself in other company.

use super::*;
use crate::kernel::{
    quantize,
    test_data::{Rng, stored},
};
use doyen_tensor::{
    FloatType,
    format::{Bits, QuantMatrix, ZeroPoints},
};
use proptest::prelude::*;

/// Token counts that meet every way through the tokens and every remainder of the tiles.
const TOKENS: [usize; 8] = [1, 2, 3, 4, 5, 8, 17, 71];

/// Values behind `lead` bytes.
fn store(ty: FloatType, values: &[f32], lead: usize) -> Vec<u8> {
    let mut out = vec![0xFF; lead];
    out.extend(stored(ty, values));
    out
}

#[derive(Debug, Clone, Copy)]
enum Zero {
    Default,
    PerBlock,
    AcrossRows,
    Float(FloatType),
}

#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    cols: usize,
    bits: Bits,
    block: usize,
    scale: FloatType,
    zero: Zero,
    /// Bytes before each tensor, so that nothing is aligned, and between rows of codes.
    lead: usize,
    gap: usize,
    seed: u64,
}

/// Owns the bytes of a random matrix.
struct Stored {
    case: Case,
    codes: Vec<u8>,
    scales: Vec<u8>,
    zeros: Vec<u8>,
}

impl Stored {
    fn new(case: &Case) -> Self {
        let mut rng = Rng(case.seed);
        let blocks = case.cols.div_ceil(case.block);
        let row = case.bits.packed_len(case.cols) + case.gap;
        let codes = rng.bytes(case.lead + case.rows * row);
        let scales = store(case.scale, &rng.floats(case.rows * blocks), case.lead);
        let max = f32::from(case.bits.max_code());
        let zeros = match case.zero {
            Zero::Default => Vec::new(),
            Zero::PerBlock => rng.bytes(case.lead + case.rows * case.bits.packed_len(blocks)),
            Zero::AcrossRows => rng.bytes(case.lead + case.bits.packed_len(case.rows)),
            Zero::Float(ty) => {
                let z: Vec<f32> =
                    rng.floats(case.rows * blocks).iter().map(|v| (v + 1.0) * 0.5 * max).collect();
                store(ty, &z, case.lead)
            }
        };
        Self { case: case.clone(), codes, scales, zeros }
    }

    fn matrix(&self) -> QuantMatrix<'_> {
        let c = &self.case;
        let zeros = self.zeros.get(c.lead..).unwrap_or_default();
        let blocks = c.cols.div_ceil(c.block);
        let m = QuantMatrix {
            rows: c.rows,
            cols: c.cols,
            bits: c.bits,
            block: c.block,
            codes: &self.codes[c.lead..],
            row_bytes: c.bits.packed_len(c.cols) + c.gap,
            scales: FloatView::new(c.scale, &self.scales[c.lead..]).unwrap(),
            zero_points: match c.zero {
                Zero::Default => ZeroPoints::Default,
                Zero::PerBlock => {
                    ZeroPoints::PerBlock { packed: zeros, row_bytes: c.bits.packed_len(blocks) }
                }
                Zero::AcrossRows => ZeroPoints::AcrossRows(zeros),
                Zero::Float(ty) => ZeroPoints::Float(FloatView::new(ty, zeros).unwrap()),
            },
        };
        m.validate().unwrap();
        m
    }
}

fn float_types() -> impl Strategy<Value = FloatType> {
    prop_oneof![Just(FloatType::F32), Just(FloatType::F16), Just(FloatType::BF16)]
}

fn cases() -> impl Strategy<Value = Case> {
    let zero = prop_oneof![
        2 => Just(Zero::Default),
        3 => Just(Zero::PerBlock),
        1 => Just(Zero::AcrossRows),
        1 => float_types().prop_map(Zero::Float),
    ];
    // Mostly the sizes vector kernels take; some that only the general path does; a few beyond a segment; some of which rows share an octet.
    let block = prop_oneof![
        8 => (4u32..10).prop_map(|b| Some(1usize << b)),
        3 => Just(None),
        2 => (16usize..200).prop_map(Some),
    ];
    let cols = prop_oneof![
        4 => 1usize..400,
        3 => (1usize..12).prop_map(|c| 32 * c),
        3 => (4u32..10).prop_map(|c| 1usize << c),
        1 => 2000usize..4500
    ];
    let rows = prop_oneof![1usize..9, 8usize..70];
    (rows, cols, 0usize..3, block, float_types(), zero, 0usize..5, 0usize..3, any::<u64>()).prop_map(
        |(rows, cols, bits, block, scale, zero, lead, gap, seed)| {
            let row_wise = matches!(zero, Zero::AcrossRows) || block.is_none();
            let block = if row_wise { cols } else { block.unwrap_or(cols) };
            Case { rows, cols, bits: Bits::ALL[bits], block, scale, zero, lead, gap, seed }
        },
    )
}

/// `sum |scale| (code + |zero|) |x|`: what the rounding of every intermediate value is relative to.
fn magnitude(m: &QuantMatrix<'_>, n: usize, x: &[f64]) -> f64 {
    (0..m.cols)
        .map(|c| {
            let b = c / m.block;
            let code = f64::from(m.bits.code(m.row(n), c)) + f64::from(m.zero_point(n, b)).abs();
            f64::from(m.scale(n, b)).abs() * code * x[c].abs()
        })
        .sum()
}

fn dot_f64(m: &QuantMatrix<'_>, n: usize, x: &[f64]) -> f64 {
    (0..m.cols)
        .map(|c| {
            let b = c / m.block;
            let q = f64::from(m.bits.code(m.row(n), c)) - f64::from(m.zero_point(n, b));
            q * f64::from(m.scale(n, b)) * x[c]
        })
        .sum()
}

/// Roundings an element meets one after the other, at most: a group's products, its groups, the bias.
fn chain(case: &Case) -> f64 {
    let block = case.block.min(case.cols);
    (quantize::WIDE_GROUP + case.cols.div_ceil(block) + case.cols / 16 + 8) as f64 * f64::from(f32::EPSILON)
}

fn product(
    linear: &Linear,
    w: &Weights<'_>,
    x: &[f32],
    tokens: usize,
    bias: Option<FloatView<'_>>,
) -> Vec<f32> {
    let pool = Pool::new(std::num::NonZeroUsize::MIN, false).unwrap();
    let mut y = vec![f32::NAN; tokens * w.rows()];
    let mut scratch = vec![0xA5; linear.scratch_len(tokens).unwrap()];
    let rows = w.rows();
    linear.run(&pool, w, x, bias, &mut Output::new(&mut y, tokens, rows), &mut scratch);
    y
}

/// Activations as a product of int8 activations sees them, in groups of at most `len` columns: codes times scales, in f64.
fn rounded(x: &[f32], block: usize, len: usize) -> (Vec<f64>, Vec<f64>) {
    let (mut value, mut scale) = (Vec::new(), Vec::new());
    for xs in x.chunks(block) {
        for group in xs.chunks(len) {
            let mut codes = [0i8; quantize::WIDE_GROUP];
            let s = quantize::int8_group(group, &mut codes[..group.len()]);
            value.extend(codes[..group.len()].iter().map(|&q| f64::from(q) * f64::from(s)));
            scale.extend(std::iter::repeat_n(f64::from(s), group.len()));
        }
    }
    (value, scale)
}

/// Bitwise the same whatever the tokens and the range of rows; gives the bits.
fn same_in_any_company(linear: &Linear, w: &Weights<'_>, x: &[f32], bias: Option<FloatView<'_>>) -> Vec<u32> {
    let (cols, rows) = (w.cols(), w.rows());
    let all = x.len() / cols;
    let alone: Vec<u32> = (0..all)
        .flat_map(|t| product(linear, w, &x[t * cols..(t + 1) * cols], 1, bias))
        .map(f32::to_bits)
        .collect();
    for tokens in TOKENS.into_iter().filter(|&t| t <= all) {
        let y: Vec<u32> =
            product(linear, w, &x[..tokens * cols], tokens, bias).into_iter().map(f32::to_bits).collect();
        assert_eq!(y, alone[..tokens * rows], "{tokens} tokens, {}", linear.kernel());
    }
    let tokens = all.min(5);
    let mut bytes = vec![0; linear.scratch_len(tokens).unwrap()];
    let n = linear.layout().token_bytes();
    for t in 0..tokens {
        linear.layout().prepare(&x[t * cols..(t + 1) * cols], &mut bytes[t * n..(t + 1) * n]);
    }
    let acts = Prepared::new(linear.layout(), tokens, &bytes);
    let mut y = vec![f32::NAN; tokens * rows];
    let out = Output::new(&mut y, tokens, rows);
    for cut in [0, 1, rows / 2, rows] {
        for range in [0..cut, cut..rows] {
            // SAFETY: one part at a time.
            let mut part = unsafe { out.columns(range) };
            linear.rows(w, &acts, bias, &mut part);
        }
        let y: Vec<u32> = (0..tokens)
            // SAFETY: no other part is in use.
            .flat_map(|t| unsafe { out.columns(0..rows) }.row(t, 0..rows).to_vec())
            .map(f32::to_bits)
            .collect();
        assert_eq!(y, alone[..tokens * rows], "rows cut at {cut}");
    }
    alone
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Exact mode: the error is at most the chain of roundings times what they are relative to. Codes are
    /// centred before they are multiplied, so that is `sum |w x|` (and the rounding of a fractional zero point).
    #[test]
    fn exact_matches_the_reference(case in cases()) {
        let stored = Stored::new(&case);
        let m = stored.matrix();
        let x = Rng(case.seed ^ 1).floats(case.cols * 2);
        for isa in Isa::all() {
            let linear = Linear::new(Weights::Int(m).format(), Mode::Exact, isa);
            let y = product(&linear, &Weights::Int(m), &x, 2, None);
            for (t, xs) in x.chunks(case.cols).enumerate() {
                for n in 0..case.rows {
                    let (found, expected) = (f64::from(y[t * case.rows + n]), m.dot_row(n, xs));
                    let x64: Vec<f64> = xs.iter().map(|&v| f64::from(v)).collect();
                    let of_products: f64 = (0..case.cols).map(|c| {
                        let b = c / m.block;
                        let zero = f64::from(m.zero_point(n, b));
                        ((f64::from(m.bits.code(m.row(n), c)) - zero) * f64::from(m.scale(n, b)) * x64[c]).abs()
                    }).sum();
                    let fraction = if matches!(case.zero, Zero::Float(_)) {
                        magnitude(&m, n, &x64) * f64::from(f32::EPSILON)
                    } else {
                        0.0
                    };
                    let bound = chain(&case) * of_products + fraction;
                    prop_assert!((found - expected).abs() <= bound, "{isa}: {found} for {expected}, bound {bound}");
                }
            }
        }
    }

    /// Fast mode equals, to f32 rounding, the product with activations that are quantized the same way; and differs
    /// from the true one by at most half a step of each group's scale times the group's weights.
    #[test]
    fn fast_matches_quantized_activations(case in cases(), wide in any::<bool>()) {
        let stored = Stored::new(&case);
        let m = stored.matrix();
        let x = Rng(case.seed ^ 2).floats(case.cols * 2);
        for isa in Isa::all() {
            let mode = if wide { Mode::Wide } else { Mode::Fast };
            let linear = Linear::new(Weights::Int(m).format(), mode, isa);
            let y = product(&linear, &Weights::Int(m), &x, 2, None);
            for (t, xs) in x.chunks(case.cols).enumerate() {
                let (value, scale) = rounded(xs, case.block.min(case.cols), linear.layout().group());
                for n in 0..case.rows {
                    let found = f64::from(y[t * case.rows + n]);
                    let expected = dot_f64(&m, n, &value);
                    // Zero points are taken off at the end, so rounding is relative to codes and zero points apart.
                    // At 8 bits both are taken relative to 128, which adds at most that much to each.
                    let size = magnitude(&m, n, &value)
                        + if case.bits == Bits::B8 { 2.0 * dot_abs_scale(&m, n, &value) * 128.0 } else { 0.0 };
                    let bound = chain(&case) * size;
                    prop_assert!((found - expected).abs() <= bound, "{isa}: {found} for {expected}, bound {bound}");
                    let step: f64 = (0..case.cols).map(|c| {
                        let b = c / m.block;
                        let w = (f64::from(m.bits.code(m.row(n), c)) - f64::from(m.zero_point(n, b)))
                            * f64::from(m.scale(n, b));
                        0.5001 * scale[c] * w.abs()
                    }).sum();
                    prop_assert!((found - m.dot_row(n, xs)).abs() <= step + bound, "{isa}: beyond half a step");
                }
            }
        }
    }

    /// Fine mode differs from the true product by at most half a step of the second term's scales, which are at most a 254th of the
    /// first's, times the group's weights; and by the roundings of both.
    #[test]
    fn fine_is_good_to_fifteen_bits(case in cases()) {
        let stored = Stored::new(&case);
        let m = stored.matrix();
        let x = Rng(case.seed ^ 4).floats(case.cols);
        let (value, scale) = rounded(&x, case.block.min(case.cols), quantize::GROUP);
        for isa in Isa::all() {
            let linear = Linear::new(Weights::Int(m).format(), Mode::Fine, isa);
            let y = product(&linear, &Weights::Int(m), &x, 1, None);
            for (n, &found) in y.iter().enumerate() {
                let step: f64 = (0..case.cols).map(|c| {
                    let b = c / m.block;
                    let w = (f64::from(m.bits.code(m.row(n), c)) - f64::from(m.zero_point(n, b)))
                        * f64::from(m.scale(n, b));
                    0.5001 * scale[c] / 254.0 * 1.01 * w.abs()
                }).sum();
                // As in fast mode; what the second term multiplies is a hundredth of it.
                let size = 1.1 * (magnitude(&m, n, &value)
                    + if case.bits == Bits::B8 { 2.0 * dot_abs_scale(&m, n, &value) * 128.0 } else { 0.0 });
                let bound = step + 2.0 * chain(&case) * size;
                let (found, expected) = (f64::from(found), m.dot_row(n, &x));
                prop_assert!((found - expected).abs() <= bound, "{isa}: {found} for {expected}, bound {bound}");
            }
        }
    }

    #[test]
    fn canonical_order_of_quantized_weights(case in cases(), with_bias in any::<bool>()) {
        let stored = Stored::new(&case);
        let w = Weights::Int(stored.matrix());
        let mut rng = Rng(case.seed ^ 3);
        let x = rng.floats(case.cols * TOKENS[7]);
        let bias = store(FloatType::F16, &rng.floats(case.rows), 0);
        let bias = FloatView::new(FloatType::F16, &bias).unwrap();
        for mode in [Mode::Exact, Mode::Fast, Mode::Wide, Mode::Fine] {
            let bits = Isa::all().map(|isa| {
                let linear = Linear::new(w.format(), mode, isa);
                (isa, same_in_any_company(&linear, &w, &x, with_bias.then_some(bias)))
            });
            let all: Vec<_> = bits.collect();
            for (isa, bits) in &all[1..] {
                prop_assert_eq!(bits, &all[0].1, "{} and scalar, {:?}", isa, mode);
            }
        }
    }

    /// The loops of instruction sets that this machine may lack, with other instructions in place of theirs.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn stand_ins_give_the_canonical_bits(case in cases(), with_bias in any::<bool>()) {
        let stored = Stored::new(&case);
        let w = Weights::Int(stored.matrix());
        let mut rng = Rng(case.seed ^ 4);
        let x = rng.floats(case.cols * TOKENS[7]);
        let bias = store(FloatType::F16, &rng.floats(case.rows), 0);
        let bias = with_bias.then_some(FloatView::new(FloatType::F16, &bias).unwrap());
        let (bits, block, cols) = (case.bits, case.block, case.cols);
        if quantize::aligned(block, cols) {
            for mode in [Mode::Exact, Mode::Fast, Mode::Wide, Mode::Fine] {
                let scalar = Linear::new(w.format(), mode, Isa::Scalar);
                let expected = same_in_any_company(&scalar, &w, &x, bias);
                for kernel in int::stand_ins(bits, block, cols, mode) {
                    let linear = Linear { kernel, ..scalar };
                    prop_assert_eq!(&same_in_any_company(&linear, &w, &x, bias), &expected, "{}", kernel);
                }
            }
        }
    }

    #[test]
    fn float_weights(
        rows in 1usize..70, cols in 1usize..150, gap in 0usize..3, lead in 0usize..4,
        ty in float_types(), row_major in any::<bool>(), seed in any::<u64>(), with_bias in any::<bool>(),
    ) {
        let mut rng = Rng(seed);
        let orientation = if row_major { Orientation::RowMajor } else { Orientation::ColumnMajor };
        let (outer, inner) = if row_major { (rows, cols) } else { (cols, rows) };
        let bytes = store(ty, &rng.floats(outer * (inner + gap)), lead);
        let values = FloatView::new(ty, &bytes[lead..]).unwrap();
        let m = FloatMatrix { rows, cols, orientation, stride: inner + gap, values };
        let w = Weights::Float(m);
        let x = rng.floats(cols * TOKENS[7]);
        let bias = rng.floats(rows);
        let stored = store(FloatType::F32, &bias, 0);
        let view = with_bias.then_some(FloatView::new(FloatType::F32, &stored).unwrap());
        for isa in Isa::all() {
            let linear = Linear::new(w.format(), Mode::Exact, isa);
            same_in_any_company(&linear, &w, &x, view);
            let y = product(&linear, &w, &x[..cols], 1, view);
            for n in 0..rows {
                let terms = (0..cols).map(|k| f64::from(m.get(n, k)) * f64::from(x[k]));
                let b = if with_bias { f64::from(bias[n]) } else { 0.0 };
                let (expected, size) = terms.fold((b, b.abs()), |(s, a), t| (s + t, a + t.abs()));
                // A chain of at most `cols` roundings, and the bias.
                let bound = (cols + 8) as f64 * f64::from(f32::EPSILON) * size;
                prop_assert!((f64::from(y[n]) - expected).abs() <= bound, "{isa}: {} for {expected}", y[n]);
            }
        }
    }
}

/// `sum |scale x|`.
fn dot_abs_scale(m: &QuantMatrix<'_>, n: usize, x: &[f64]) -> f64 {
    (0..m.cols).map(|c| (f64::from(m.scale(n, c / m.block)) * x[c]).abs()).sum()
}

/// Contract section 0: codes 3, scales 1, zero points 1, 2, 3, 0, 2 over blocks of 16, ones: 112 at every width.
#[test]
fn worked_example() {
    let scales = store(FloatType::F32, &[1.0; 5], 0);
    for bits in Bits::ALL {
        let (codes, zeros) = (bits.pack(&[3; 80]), bits.pack(&[1, 2, 3, 0, 2]));
        let w = Weights::Int(QuantMatrix {
            rows: 1,
            cols: 80,
            bits,
            block: 16,
            codes: &codes,
            row_bytes: codes.len(),
            scales: FloatView::new(FloatType::F32, &scales).unwrap(),
            zero_points: ZeroPoints::PerBlock { packed: &zeros, row_bytes: zeros.len() },
        });
        for isa in Isa::all() {
            for (mode, tolerance) in [(Mode::Exact, 0.0), (Mode::Fast, 1e-4)] {
                let y = product(&Linear::new(w.format(), mode, isa), &w, &[1.0; 80], 1, None);
                assert!((y[0] - 112.0).abs() <= tolerance, "{isa} {mode:?}: {}", y[0]);
            }
        }
    }
}

/// All codes at an end of their range, so that integer sums are as large as they can be, under scales and activations that are
/// extreme, denormal, infinite or NaN: the same as in scalar code, which has room for any sum.
#[test]
fn extremes_are_the_same_everywhere() {
    let (rows, cols, most) = (19, 288, 17);
    let scales = [1.0, -65504.0, 6e-8, f32::INFINITY, f32::NAN, 0.0, -1.0];
    let inputs = [1.0, -1.0, 3e38, 1e-40, 1e-37, f32::NAN, f32::INFINITY];
    // One kind a token, and one odd number among ones.
    let x: Vec<f32> = (0..most * cols)
        .map(|i| match (i / cols, i % cols) {
            (t, _) if t < 5 => inputs[t],
            (t, 100) => inputs[t % inputs.len()],
            (t, c) => {
                if t % 2 == 0 || c % 2 == 0 {
                    1.0
                } else {
                    -1.0
                }
            }
        })
        .collect();
    for (bits, block, code, zero) in Bits::ALL.into_iter().flat_map(|bits| {
        [16, 32, 128, cols]
            .into_iter()
            .flat_map(move |block| [0x00, 0xFF].into_iter().map(move |code| (bits, block, code)))
            .flat_map(|(bits, block, code)| {
                [None, Some(0x00), Some(0xFF)].map(|zero| (bits, block, code, zero))
            })
    }) {
        let blocks = cols.div_ceil(block);
        let codes = vec![code; rows * bits.packed_len(cols)];
        let zeros = vec![zero.unwrap_or(0); rows * bits.packed_len(blocks)];
        let values: Vec<f32> = (0..rows * blocks).map(|i| scales[(i / 3) % scales.len()]).collect();
        let stored = store(FloatType::F16, &values, 0);
        let w = Weights::Int(QuantMatrix {
            rows,
            cols,
            bits,
            block,
            codes: &codes,
            row_bytes: bits.packed_len(cols),
            scales: FloatView::new(FloatType::F16, &stored).unwrap(),
            zero_points: match zero {
                None => ZeroPoints::Default,
                Some(_) => ZeroPoints::PerBlock { packed: &zeros, row_bytes: bits.packed_len(blocks) },
            },
        });
        for mode in [Mode::Exact, Mode::Fast, Mode::Wide, Mode::Fine] {
            for tokens in [1, 4, 5, most] {
                let bits_of = |isa| -> Vec<u32> {
                    let y =
                        product(&Linear::new(w.format(), mode, isa), &w, &x[..tokens * cols], tokens, None);
                    y.into_iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
                };
                let expected = bits_of(Isa::Scalar);
                for isa in Isa::all() {
                    assert_eq!(
                        bits_of(isa),
                        expected,
                        "{isa}, {bits:?}, block {block}, code {code}, zero {zero:?}, {mode:?}, {tokens} tokens"
                    );
                }
            }
        }
    }
}

/// A NaN or an infinity in the input is not turned into a plausible number.
#[test]
fn damage_shows() {
    let case = Case {
        rows: 2,
        cols: 96,
        bits: Bits::B4,
        block: 32,
        scale: FloatType::F32,
        zero: Zero::Default,
        lead: 0,
        gap: 0,
        seed: 5,
    };
    let stored = Stored::new(&case);
    let w = Weights::Int(stored.matrix());
    for isa in Isa::all() {
        for mode in [Mode::Exact, Mode::Fast, Mode::Wide] {
            for bad in [f32::NAN, f32::INFINITY] {
                let mut x = vec![1.0; 96];
                x[40] = bad;
                let y = product(&Linear::new(w.format(), mode, isa), &w, &x, 1, None);
                assert!(y.iter().all(|v| !v.is_finite()), "{isa} {mode:?}: {y:?}");
            }
        }
    }
}

#[test]
fn wrong_formats_are_named() {
    let case = Case {
        rows: 2,
        cols: 64,
        bits: Bits::B4,
        block: 32,
        scale: FloatType::F16,
        zero: Zero::PerBlock,
        lead: 0,
        gap: 0,
        seed: 9,
    };
    let stored = Stored::new(&case);
    let m = stored.matrix();
    let linear =
        Linear::new(Weights::Int(QuantMatrix { block: 16, ..m }).format(), Mode::Fast, Isa::detect());
    let e = linear.check(&Weights::Int(m)).unwrap_err().to_string();
    assert_eq!(e, "kernel for int4 block 16 over 64 columns given int4 block 32 over 64 columns");
    let short = QuantMatrix { rows: 3, ..m };
    assert!(linear.check(&Weights::Int(short)).is_err());
}
