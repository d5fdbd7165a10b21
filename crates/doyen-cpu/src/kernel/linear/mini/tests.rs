//! Against the f64 reference of the format, and every kernel against the scalar one, bit for bit.

use super::super::{Format, Linear, Output, Weights};
use crate::{
    detect::Isa,
    kernel::{linear::Mode, test_data::noise},
    pool::Pool,
};
use doyen_tensor::{
    FloatType, FloatView,
    format::{Element, MiniMatrix, MiniScales},
};
use proptest::prelude::*;

fn pool(threads: usize) -> Pool {
    Pool::new(std::num::NonZeroUsize::new(threads).unwrap(), false).unwrap()
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Mxfp4,
    Nvfp4,
    Fp8,
    Fp8Tiles(usize),
}

struct Stored {
    kind: Kind,
    rows: usize,
    cols: usize,
    transposed: bool,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl Stored {
    fn new(kind: Kind, rows: usize, cols: usize, transposed: bool, seed: u64) -> Self {
        let element = Self::element(kind);
        let (lines, line) = if transposed { (cols, rows) } else { (rows, cols) };
        let bytes = lines * line.div_ceil(element.per_byte());
        let random = |n: usize, seed: u64| noise(seed, n).into_iter().map(|v| (v * 128.0) as i8 as u8);
        let codes: Vec<u8> = match kind {
            // No NaN.
            Kind::Fp8 | Kind::Fp8Tiles(_) => random(bytes, seed).map(|b| b & 0xbf).collect(),
            _ => random(bytes, seed).collect(),
        };
        let scales = match kind {
            Kind::Fp8 => Vec::new(),
            Kind::Mxfp4 => random(rows * cols.div_ceil(32), seed + 1)
                .map(|b| if b % 32 == 0 { 0 } else { 120 + b % 10 })
                .collect(),
            Kind::Nvfp4 => random(rows * cols.div_ceil(16), seed + 1).map(|b| b & 0xbf).collect(),
            Kind::Fp8Tiles(tile) => {
                let n = rows.div_ceil(tile) * cols.div_ceil(tile);
                noise(seed + 1, n).iter().flat_map(|v| v.to_le_bytes()).collect()
            }
        };
        Self { kind, rows, cols, transposed, codes, scales }
    }

    const fn element(kind: Kind) -> Element {
        match kind {
            Kind::Mxfp4 | Kind::Nvfp4 => Element::E2M1,
            Kind::Fp8 | Kind::Fp8Tiles(_) => Element::E4M3,
        }
    }

    fn matrix(&self) -> MiniMatrix<'_> {
        let m = MiniMatrix {
            rows: self.rows,
            cols: self.cols,
            element: Self::element(self.kind),
            codes: &self.codes,
            transposed: self.transposed,
            scales: match self.kind {
                Kind::Mxfp4 => MiniScales::E8M0(&self.scales),
                Kind::Nvfp4 => MiniScales::E4M3(&self.scales),
                Kind::Fp8 => MiniScales::None,
                Kind::Fp8Tiles(tile) => {
                    MiniScales::Tiles { values: FloatView::new(FloatType::F32, &self.scales).unwrap(), tile }
                }
            },
            global: 0.75,
        };
        m.validate().unwrap();
        m
    }
}

fn product(m: &MiniMatrix<'_>, x: &[f32], bias: &[f32], mode: Mode, isa: Isa, pool: &Pool) -> Vec<f32> {
    let weights = Weights::Mini(*m);
    let linear = Linear::new(weights.format(), mode, isa);
    let tokens = x.len() / m.cols;
    let mut y = vec![f32::NAN; tokens * m.rows];
    let mut scratch = vec![0u8; linear.scratch_len(tokens).unwrap()];
    let bias: Vec<u8> = bias.iter().flat_map(|v| v.to_le_bytes()).collect();
    let bias = FloatView::new(FloatType::F32, &bias).unwrap();
    let mut out = Output::new(&mut y, tokens, m.rows);
    linear.run(pool, &weights, x, Some(bias), &mut out, &mut scratch);
    y
}

fn reference(m: &MiniMatrix<'_>, x: &[f32], bias: &[f32]) -> (Vec<f64>, f64) {
    let (mut y, mut largest) = (Vec::new(), 0f64);
    let mut row = vec![0f64; m.cols];
    for x in x.chunks(m.cols) {
        #[allow(clippy::needless_range_loop, reason = "n counts rows of several things")]
        for n in 0..m.rows {
            m.dequantize_row(n, &mut row);
            let products = row.iter().zip(x).map(|(w, &x)| w * f64::from(x));
            largest = largest.max(products.clone().map(f64::abs).sum());
            y.push(products.sum::<f64>() + f64::from(bias[n]));
        }
    }
    (y, largest)
}

fn kinds() -> impl Strategy<Value = (Kind, usize, bool)> {
    prop_oneof![
        (1usize..80, any::<bool>()).prop_map(|(n, t)| (Kind::Mxfp4, 32 * n, t)),
        (1usize..160, any::<bool>()).prop_map(|(n, t)| (Kind::Nvfp4, 16 * n, t)),
        (1usize..2500).prop_map(|n| (Kind::Fp8, n, false)),
        (1usize..2500, 4usize..13).prop_map(|(n, log)| (Kind::Fp8Tiles(1 << log), n, false)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn products_are_the_references((kind, cols, transposed) in kinds(), rows in 1usize..40, tokens in 1usize..11, seed in 0u64..1000) {
        let rows = if transposed { 2 * rows } else { rows };
        let stored = Stored::new(kind, rows, cols, transposed, seed);
        let m = stored.matrix();
        let (x, bias) = (noise(seed + 2, tokens * cols), noise(seed + 3, rows));
        let (want, largest) = reference(&m, &x, &bias);
        let pool = pool(2);
        let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
        for isa in Isa::all() {
            let exact = product(&m, &x, &bias, Mode::Exact, isa, &pool);
            let fast = product(&m, &x, &bias, Mode::Fast, isa, &pool);
            let fine = product(&m, &x, &bias, Mode::Fine, isa, &pool);
            for (i, &want) in want.iter().enumerate() {
                let off = |got: f32| (f64::from(got) - want).abs() / largest.max(1e-9);
                prop_assert!(off(exact[i]) < 1e-6, "exact {} {want} {isa:?}", exact[i]);
                prop_assert!(off(fast[i]) < 1e-2, "fast {} {want} {isa:?}", fast[i]);
                prop_assert!(off(fine[i]) < 1e-4, "fine {} {want} {isa:?}", fine[i]);
            }
            // Fewer tokens, and fast numerics on every instruction set.
            for tokens in 1..tokens.min(5) {
                let some = product(&m, &x[..tokens * cols], &bias, Mode::Fast, isa, &pool);
                prop_assert_eq!(&some[..], &fast[..tokens * rows]);
            }
            let alone = product(&m, &x[..cols], &bias, Mode::Exact, isa, &pool);
            prop_assert_eq!(&alone[..], &exact[..rows]);
            if let Some((e, f)) = &first {
                prop_assert_eq!(e, &exact);
                prop_assert_eq!(f, &fast);
            } else {
                first = Some((exact, fast));
            }
        }
    }
}

#[test]
fn a_scale_that_is_no_number_shows() {
    let mut stored = Stored::new(Kind::Mxfp4, 4, 64, false, 3);
    stored.scales[2] = 255;
    let pool = pool(1);
    for isa in Isa::all() {
        for mode in [Mode::Exact, Mode::Fast] {
            let y = product(&stored.matrix(), &noise(1, 64), &[0.0; 4], mode, isa, &pool);
            assert_eq!(y.iter().map(|v| v.is_nan()).collect::<Vec<_>>(), [false, true, false, false]);
        }
    }
    assert!(matches!(Weights::Mini(stored.matrix()).format(), Format::Mini { .. }));
}
