//! The floating-point kinds: orientations, worked numbers, and what is refused.

use crate::ir::{Attr, Attrs};
use crate::ops::Op;
use doyen_tensor::{
    DType, Tensor,
    format::mini::{E2M1_DOUBLED, e4m3, e8m0},
};

/// Index of the first input that only these kinds have.
const GLOBAL_1: usize = 15;

fn bytes(dtype: DType, shape: &[usize], values: Vec<u8>) -> Tensor {
    Tensor::from_bytes(dtype, shape.to_vec(), values.into()).unwrap()
}

fn floats(shape: &[usize], values: &[f32]) -> Tensor {
    Tensor::from_slice(shape.to_vec(), values).unwrap()
}

fn random(n: usize, seed: u64) -> impl Iterator<Item = u8> {
    let mut state = seed;
    (0..n).map(move |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as u8
    })
}

/// A node of two experts that are not gated.
struct Case {
    attrs: Attrs,
    inputs: Vec<Option<Tensor>>,
    hidden: usize,
    inter: usize,
    /// FC1 and FC2 codes, `[E, N, K]`, one a number.
    codes: [Vec<u8>; 2],
}

impl Case {
    fn mxfp4(hidden: usize, inter: usize) -> Self {
        let codes = [1, 2].map(|seed| random(2 * hidden * inter, seed).map(|c| c & 15).collect());
        let scales = |n: usize, k: usize, seed| {
            let values = random(2 * n * k / 32, seed).map(|c| 124 + c % 4).collect();
            Some(bytes(DType::F8E8M0, &[2, n, k / 32], values))
        };
        let mut attrs = Attrs::default();
        attrs.set("quant_type", "fp4").set("k", 2i64).set("activation_type", "relu");
        let mut inputs = vec![None; GLOBAL_1 + 2];
        let x: Vec<f32> = random(3 * hidden, 5).map(|c| f32::from(c) / 128.0 - 1.0).collect();
        inputs[0] = Some(floats(&[3, hidden], &x));
        inputs[1] = Some(floats(&[3, 2], &[0.3, 0.1, -0.4, 0.2, 1.0, 0.9]));
        (inputs[3], inputs[6]) = (scales(inter, hidden, 3), scales(hidden, inter, 4));
        for input in &mut inputs[GLOBAL_1..] {
            *input = Some(floats(&[2], &[0.5, 2.0]));
        }
        let mut case = Self { attrs, inputs, hidden, inter, codes };
        case.store(false);
        case
    }

    /// Packs the codes along the columns, or along the rows.
    fn store(&mut self, transposed: bool) {
        let extents = [(self.inter, self.hidden), (self.hidden, self.inter)];
        for ((codes, (n, k)), i) in self.codes.iter().zip(extents).zip([2, 5]) {
            let (lines, len) = if transposed { (k, n) } else { (n, k) };
            let code = |e: usize, line: usize, j: usize| {
                let (n_at, k_at) = if transposed { (j, line) } else { (line, j) };
                codes[(e * n + n_at) * k + k_at]
            };
            let mut packed = Vec::new();
            for e in 0..2 {
                for line in 0..lines {
                    packed.extend((0..len / 2).map(|j| code(e, line, 2 * j) | code(e, line, 2 * j + 1) << 4));
                }
            }
            self.inputs[i] = Some(bytes(DType::U8, &[2, lines, len / 2], packed));
        }
    }

    fn run(&self) -> Result<Vec<f32>, String> {
        let op = Op::parse("com.microsoft", "QMoE", 1, &self.attrs).map_err(|e| e.to_string())?;
        let inputs: Vec<Option<&Tensor>> = self.inputs.iter().map(Option::as_ref).collect();
        let y = op.eval(&inputs, 1).map_err(|e| e.to_string())?;
        Ok(y[0].to_f32().unwrap())
    }
}

#[test]
fn both_orientations_mean_the_same() {
    for (hidden, inter) in [(64, 32), (32, 96)] {
        let mut case = Case::mxfp4(hidden, inter);
        let straight = case.run().unwrap();
        assert!(straight.iter().any(|v| v.abs() > 0.1));
        case.store(true);
        assert_eq!(case.run().unwrap(), straight);
    }
}

/// Square in both projections, nothing tells: the schema's orientation.
#[test]
fn a_square_is_read_as_the_schema_has_it() {
    let mut case = Case::mxfp4(32, 32);
    let straight = case.run().unwrap();
    case.store(true);
    assert_ne!(case.run().unwrap(), straight);
}

#[test]
fn what_a_kind_does_not_have_is_refused_by_name() {
    type Change = fn(&mut Case);
    let changes: [(Change, &str); 10] = [
        (
            |c| {
                c.attrs.set("block_size", 16i64);
            },
            "block_size",
        ),
        (
            |c| {
                c.attrs.set("expert_weight_bits", 8i64);
            },
            "expert_weight_bits",
        ),
        (
            |c| {
                c.attrs.set("fc2_expert_weight_bits", 2i64);
            },
            "fc2_expert_weight_bits",
        ),
        (|c| c.inputs[15] = None, "fc1_global_scale"),
        (|c| c.inputs[16] = Some(floats(&[3], &[1.0; 3])), "fc2_global_scale"),
        (|c| c.inputs[3] = Some(floats(&[2, 32, 2], &[1.0; 128])), "fc1_scales"),
        (|c| c.inputs[12] = Some(bytes(DType::U8, &[2, 64, 1], vec![0; 128])), "fc2_zero_points"),
        (|c| c.inputs.push(Some(floats(&[1], &[1.0]))), "fc1_act_scale"),
        (|c| c.inputs[8] = c.inputs[2].clone(), "fc3_experts_weights"),
        (|c| c.inputs[5] = Some(bytes(DType::U8, &[2, 60, 16], vec![0; 1920])), "fc2_experts_weights"),
    ];
    for (change, name) in changes {
        let mut case = Case::mxfp4(64, 32);
        case.run().unwrap();
        change(&mut case);
        let text = case.run().unwrap_err();
        assert!(text.contains(name), "{text:?} does not say {name:?}");
    }
    let mut case = Case::mxfp4(64, 32);
    case.attrs.set("quant_type", Attr::from("wfp4afp8"));
    let plain = case.run().unwrap();
    case.inputs.push(Some(floats(&[1], &[1.0])));
    assert_eq!(case.run().unwrap(), plain);
}

/// The formats' own decoding against that of Cast.
#[test]
fn codes_mean_what_cast_says() {
    use super::super::minifloat::decode;
    for code in 0..=255u8 {
        let same =
            |a: f32, b: Option<f64>| b.is_some_and(|b| f64::from(a) == b || (a.is_nan() && b.is_nan()));
        assert!(same(e4m3(code), decode(DType::F8E4M3FN, code)), "e4m3 {code}");
        assert!(same(e8m0(code), decode(DType::F8E8M0, code)), "e8m0 {code}");
        let half = f32::from(E2M1_DOUBLED[usize::from(code & 15)]) / 2.0;
        assert!(same(half, decode(DType::F4E2M1, code & 15)), "e2m1 {code}");
    }
}
