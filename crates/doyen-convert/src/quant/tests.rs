//! The quantizer against the scalar reference of `doyen_tensor::format`: every value within half a step.

use super::*;
use doyen_tensor::{
    FloatView,
    format::{QuantMatrix, ZeroPoints},
};
use proptest::prelude::*;

const TYPES: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::BF16];

fn matrix<'a>(p: &'a Packed, spec: &QuantSpec, rows: usize, cols: usize, layout: Layout) -> QuantMatrix<'a> {
    let zero_points = match layout {
        _ if spec.zero_points == ZeroPointKind::Implied => ZeroPoints::Default,
        Layout::RowWise => ZeroPoints::AcrossRows(&p.zero_points),
        Layout::PaddedBlocks | Layout::TightRows => ZeroPoints::PerBlock {
            packed: &p.zero_points,
            row_bytes: spec.bits.packed_len(spec.blocks(cols)),
        },
    };
    QuantMatrix {
        rows,
        cols,
        bits: spec.bits,
        block: spec.block,
        codes: &p.codes,
        row_bytes: spec.code_row_bytes(cols, layout),
        scales: FloatView::new(spec.scale_type, &p.scales).unwrap(),
        zero_points,
    }
}

/// Quantizes, checks every size the layout promises, and returns the dequantized values with each one's step.
fn round_trip(values: &[f32], cols: usize, spec: &QuantSpec, layout: Layout) -> Vec<(f32, f32)> {
    let rows = values.len() / cols;
    let packed = spec.pack(values, cols, layout, None).unwrap();
    assert_eq!(packed.codes.len(), rows * spec.code_row_bytes(cols, layout));
    assert_eq!(packed.scales.len(), rows * spec.blocks(cols) * spec.scale_type.size());
    let zp_bytes = match spec.zero_points {
        ZeroPointKind::Implied => 0,
        _ => spec.zero_point_bytes(rows, cols, layout),
    };
    assert_eq!(packed.zero_points.len(), zp_bytes);
    let m = matrix(&packed, spec, rows, cols, layout);
    m.validate().unwrap();
    let mut out = Vec::new();
    let mut row = vec![0.0; cols];
    for n in 0..rows {
        m.dequantize_row(n, &mut row);
        out.extend(row.iter().enumerate().map(|(c, &v)| (v, m.scale(n, c / spec.block).abs())));
    }
    out
}

fn assert_half_step(values: &[f32], cols: usize, spec: &QuantSpec, layout: Layout) {
    for (i, (&v, (q, step))) in values.iter().zip(round_trip(values, cols, spec, layout)).enumerate() {
        // The slack covers the f32 roundings of the quotient, of the shift and of the dequantization.
        let bound = step * 0.5001 + v.abs() * 1e-6;
        assert!((v - q).abs() <= bound, "value {i}: {v} became {q} with step {step} ({spec:?}, {layout:?})");
    }
}

fn spec(bits: Bits, block: usize, zero_points: bool, scale_type: FloatType) -> QuantSpec {
    QuantSpec { bits, block, zero_points: ZeroPointKind::rounded(zero_points), scale_type }
}

fn any_spec() -> impl Strategy<Value = (QuantSpec, Layout, usize)> {
    (0usize..3, 0usize..6, any::<bool>(), 0usize..3, 1usize..300).prop_map(|(b, block, zp, ty, cols)| {
        let row_wise = block == 5;
        let block = if row_wise { cols } else { 16 << block };
        let layout = if row_wise {
            Layout::RowWise
        } else if cols % 2 == 0 {
            Layout::PaddedBlocks
        } else {
            Layout::TightRows
        };
        (spec(Bits::ALL[b], block, zp, TYPES[ty]), layout, cols)
    })
}

proptest! {
    #[test]
    fn every_value_is_within_half_a_step(
        (spec, layout, cols) in any_spec(),
        rows in 1usize..6,
        seed in proptest::collection::vec(-1f32..1f32, 64),
        offset in -1f32..1f32,
        exponent in -12i32..3,
    ) {
        let gain = 10f32.powi(exponent);
        let values: Vec<f32> = (0..rows * cols)
            .map(|i| (seed[i % seed.len()] * seed[(i * 7 + 3) % seed.len()] + offset) * gain)
            .collect();
        assert_half_step(&values, cols, &spec, layout);
    }

    #[test]
    fn packing_agrees_with_the_reference(codes in proptest::collection::vec(any::<u8>(), 0..70), w in 0usize..3) {
        let bits = Bits::ALL[w];
        let codes: Vec<u8> = codes.into_iter().map(|c| c & bits.max_code()).collect();
        let mut out = Vec::new();
        pack_into(bits, &codes, &mut out);
        prop_assert_eq!(out, bits.pack(&codes));
    }
}

#[test]
fn zeros_and_constant_rows() {
    for bits in Bits::ALL {
        for ty in TYPES {
            for zero_points in [false, true] {
                let s = spec(bits, 32, zero_points, ty);
                for (q, _) in round_trip(&[0.0; 96], 48, &s, Layout::PaddedBlocks) {
                    assert_eq!(q, 0.0);
                }
                for c in [-0.37f32, 1e-5, 250.0] {
                    assert_half_step(&[c; 96], 48, &s, Layout::TightRows);
                }
            }
        }
    }
}

/// A block whose values are exact multiples of a power of two comes back exactly.
#[test]
fn representable_ranges_are_exact() {
    let values: Vec<f32> = (0..16).map(|i| (i as f32 - 5.0) * 0.125).collect();
    let s = spec(Bits::B4, 16, true, FloatType::F16);
    for (v, (q, step)) in values.iter().zip(round_trip(&values, 16, &s, Layout::PaddedBlocks)) {
        assert_eq!((*v, 0.125), (q, step));
    }
}

#[test]
fn symmetric_scales_take_the_sign_of_the_shorter_arm() {
    let s = spec(Bits::B2, 16, false, FloatType::F32);
    let mut values = [0f32; 16];
    values[3] = 2.0;
    values[4] = -0.5;
    let packed = s.pack(&values, 16, Layout::TightRows, None).unwrap();
    assert_eq!(f32::from_le_bytes(packed.scales[..4].try_into().unwrap()), -1.0);
    assert_eq!(round_trip(&values, 16, &s, Layout::TightRows)[3].0, 2.0);
}

#[test]
fn scales_beyond_their_type_are_refused() {
    let s = spec(Bits::B4, 16, true, FloatType::F16);
    let mut values = [0f32; 32];
    values[20] = 3e6;
    assert_eq!(s.pack(&values, 16, Layout::TightRows, None), Err(ScaleOverflow { row: 1, scale: 2e5 }));
    assert!(spec(Bits::B8, 16, true, FloatType::F16).pack(&values, 16, Layout::TightRows, None).is_ok());
    let wide = [f32::MAX, f32::MIN];
    assert_half_step(&wide, 2, &spec(Bits::B8, 16, true, FloatType::F32), Layout::TightRows);
    assert_half_step(&wide, 2, &spec(Bits::B8, 16, false, FloatType::BF16), Layout::TightRows);
}

#[test]
fn row_wise_zero_points_pack_across_rows() {
    let values = [-1.0, 2.0, -2.0, 1.0, 0.0, 3.0, -3.0, 0.0, -1.0, 2.0];
    let s = spec(Bits::B2, 2, true, FloatType::F32);
    let packed = s.pack(&values, 2, Layout::RowWise, None).unwrap();
    assert_eq!(packed.zero_points, Bits::B2.pack(&[1, 2, 0, 3, 1]));
}

#[test]
fn narrowing_reports_the_first_overflow() {
    let mut out = Vec::new();
    assert_eq!(narrow(FloatType::F16, &[1.0, 65504.0, 65519.0, 65520.0], &mut out), Err(3));
    out.clear();
    assert_eq!(narrow(FloatType::BF16, &[1.0, -2.5], &mut out), Ok(()));
    assert_eq!(out, [0x80, 0x3f, 0x20, 0xc0]);
    assert_eq!(narrow(FloatType::BF16, &[f32::MAX], &mut out), Err(0));
}
