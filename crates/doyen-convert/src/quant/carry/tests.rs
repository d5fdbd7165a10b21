//! Carried codes dequantize to the source's values: exactly, or within the rounding of what is stored.

use super::*;
use crate::gguf::{GgmlType, unpack};
use doyen_tensor::{
    FloatType, FloatView,
    format::{QuantMatrix, ZeroPoints},
};
use proptest::prelude::*;

const ROWS: usize = 3;
const COLS: usize = 512;

fn spec(codes: Codes, scale_type: FloatType) -> QuantSpec {
    let (bits, block, zero_points) = form(codes);
    QuantSpec { bits, block, zero_points, scale_type }
}

/// Rows of random blocks; float16 fields have random bits too, infinite and NaN ones are zeroed.
fn rows(ty: GgmlType, seed: &[u8]) -> CodeRows {
    let len = ROWS * ty.row_bytes(COLS).unwrap();
    let mut state = 1u64;
    let bytes: Vec<u8> = (0..len)
        .map(|i| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(u64::from(seed[i % seed.len()]) | 1);
            (state >> 40) as u8
        })
        .collect();
    let mut unpacked = Unpacked::default();
    unpack(ty, &bytes, &mut unpacked);
    for v in unpacked.scales.iter_mut().chain(&mut unpacked.mins) {
        *v = if v.is_finite() { *v } else { 0.0 };
    }
    CodeRows { kind: ty.codes().unwrap(), cols: COLS, unpacked }
}

fn dequantize(p: &Packed, spec: &QuantSpec) -> Vec<f64> {
    let view = |bytes| FloatView::new(spec.scale_type, bytes).unwrap();
    let m = QuantMatrix {
        rows: ROWS,
        cols: COLS,
        bits: spec.bits,
        block: spec.block,
        codes: &p.codes,
        row_bytes: spec.code_row_bytes(COLS, Layout::PaddedBlocks),
        scales: view(&p.scales),
        zero_points: match spec.zero_points {
            ZeroPointKind::Float => ZeroPoints::Float(view(&p.zero_points)),
            ZeroPointKind::Implied | ZeroPointKind::Packed => ZeroPoints::Default,
        },
    };
    m.validate().unwrap();
    let code = |n: usize, c: usize| f64::from(m.bits.code(m.row(n), c));
    (0..ROWS * COLS)
        .map(|i| {
            let (n, c) = (i / COLS, i % COLS);
            let b = c / spec.block;
            (code(n, c) - f64::from(m.zero_point(n, b))) * f64::from(m.scale(n, b))
        })
        .collect()
}

/// Source values in f64, each with its minimum and scale.
fn exact(rows: &CodeRows) -> Vec<(f64, f64, f64)> {
    let group = rows.kind.group;
    let value = |(i, &q): (usize, &i8)| {
        let min = f64::from(rows.unpacked.mins.get(i / group).copied().unwrap_or(0.0));
        let scale = f64::from(rows.unpacked.scales[i / group]);
        (scale * f64::from(q) + min, min, scale)
    };
    rows.unpacked.codes.iter().enumerate().map(value).collect()
}

proptest! {
    #[test]
    fn every_type_in_float32(seed in proptest::collection::vec(any::<u8>(), 32)) {
        for ty in GgmlType::read().filter(|t| t.codes().is_some()) {
            let rows = rows(ty, &seed);
            let spec = spec(rows.kind, FloatType::F32);
            let mut deviation = Deviation::default();
            let packed = spec.carry(&rows, Layout::PaddedBlocks, &mut deviation).unwrap();
            for (found, (want, min, _)) in dequantize(&packed, &spec).into_iter().zip(exact(&rows)) {
                // Half a unit in the last place of the zero point, which stands for the minimum, and what the
                // comparison itself rounds.
                let bound = min.abs() * 2f64.powi(-24) + want.abs() * 1e-14;
                prop_assert!((found - want).abs() <= bound, "{ty}: {found} for {want}");
            }
            if !rows.kind.minimum {
                prop_assert_eq!(deviation.error, 0.0, "{}", ty);
            }
            prop_assert!(deviation.relative() < 1e-7, "{ty}: {}", deviation.relative());
        }
    }

    #[test]
    fn minimums_in_float16(seed in proptest::collection::vec(any::<u8>(), 32)) {
        for ty in GgmlType::read().filter(|t| t.codes().is_some() && t.has_f16_scales()) {
            let rows = rows(ty, &seed);
            let spec = spec(rows.kind, FloatType::F16);
            let packed = spec.carry(&rows, Layout::PaddedBlocks, &mut Deviation::default()).unwrap();
            for (found, (want, min, scale)) in dequantize(&packed, &spec).into_iter().zip(exact(&rows)) {
                // Half a unit in the last place of the zero point, which may be a subnormal number.
                let bound = min.abs() * 2f64.powi(-11) * 1.0001 + scale.abs() * 2f64.powi(-25);
                prop_assert!((found - want).abs() <= bound, "{ty}: {found} for {want}");
            }
        }
    }

    #[test]
    fn wider_codes_and_smaller_blocks_change_nothing(seed in proptest::collection::vec(any::<u8>(), 32)) {
        let rows = rows(GgmlType::Q4_0, &seed);
        let kinds = [rows.kind, GgmlType::Q6K.codes().unwrap(), GgmlType::Q4K.codes().unwrap()];
        let (bits, block, zero_points) = common_form(&kinds).unwrap();
        prop_assert_eq!((bits, block, zero_points), (Bits::B8, 16, ZeroPointKind::Float));
        let spec = QuantSpec { bits, block, zero_points, scale_type: FloatType::F16 };
        let packed = spec.carry(&rows, Layout::PaddedBlocks, &mut Deviation::default()).unwrap();
        for (found, (want, ..)) in dequantize(&packed, &spec).into_iter().zip(exact(&rows)) {
            prop_assert_eq!(found, want);
        }
    }
}

#[test]
fn blocks_without_steps_keep_their_minimum() {
    let kind = GgmlType::Q4_1.codes().unwrap();
    for (scale, min) in [(0.0, -0.375f32), (0.0, 2.5), (0.0, 0.0), (6e-8, 60000.0)] {
        let unpacked =
            Unpacked { codes: vec![5; 32], scales: vec![scale], mins: vec![min], ..Unpacked::default() };
        let rows = CodeRows { kind, cols: 32, unpacked };
        let spec = spec(kind, FloatType::F16);
        let p = spec.carry(&rows, Layout::PaddedBlocks, &mut Deviation::default()).unwrap();
        let read = |b: &[u8]| FloatView::new(FloatType::F16, b).unwrap().get(0);
        let value = (f32::from(p.codes[0] & 15) - read(&p.zero_points)) * read(&p.scales);
        assert!((value - min).abs() <= min.abs() * 2f32.powi(-11), "{scale} {min}: {value}");
    }
}

#[test]
fn scales_beyond_their_type_are_refused() {
    let kind = GgmlType::Q6K.codes().unwrap();
    let unpacked = Unpacked { codes: vec![1; 32], scales: vec![1.0, 1e6], ..Unpacked::default() };
    let rows = CodeRows { kind, cols: 16, unpacked };
    let found = spec(kind, FloatType::F16).carry(&rows, Layout::PaddedBlocks, &mut Deviation::default());
    assert_eq!(found, Err(ScaleOverflow { row: 1, scale: 1e6 }));
}
