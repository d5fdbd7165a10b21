//! Load-time checks of QMoE's inputs: every shape follows from the experts E, the hidden size H, the intermediate
//! size I and the projection's own width.

use super::super::OpError;
use super::super::args::{
    ACTIVATIONS, Want, back, dim_of, expect, expect_if, expect_rank, product, same_type,
};
use super::super::quant::{Block, columns, packed};
use super::super::util::{at_most, check_type, optional, required};
use super::{Projection, QMoe, float};
use crate::ir::Fact;
use doyen_tensor::{DType, format::Bits};

/// Names of a projection's inputs and their indices.
pub(super) struct Names {
    pub(super) weights: (&'static str, usize),
    pub(super) scales: (&'static str, usize),
    pub(super) bias: (&'static str, usize),
    pub(super) zero_points: (&'static str, usize),
}

impl Projection {
    const fn width_attribute(self) -> &'static str {
        match self {
            Self::Fc1 => "fc1_expert_weight_bits",
            Self::Fc2 => "fc2_expert_weight_bits",
            Self::Fc3 => "fc3_expert_weight_bits",
        }
    }

    pub(super) const fn names(self) -> Names {
        match self {
            Self::Fc1 => Names {
                weights: ("fc1_experts_weights", 2),
                scales: ("fc1_scales", 3),
                bias: ("fc1_experts_bias", 4),
                zero_points: ("fc1_zero_points", 11),
            },
            Self::Fc2 => Names {
                weights: ("fc2_experts_weights", 5),
                scales: ("fc2_scales", 6),
                bias: ("fc2_experts_bias", 7),
                zero_points: ("fc2_zero_points", 12),
            },
            Self::Fc3 => Names {
                weights: ("fc3_experts_weights", 8),
                scales: ("fc3_scales", 9),
                bias: ("fc3_experts_bias", 10),
                zero_points: ("fc3_zero_points", 13),
            },
        }
    }
}

/// Inputs that integer kinds do not have.
const FLOAT_KIND_INPUTS: [(usize, &str); 6] = [
    (15, "fc1_global_scale"),
    (16, "fc2_global_scale"),
    (17, "fc1_act_scale"),
    (18, "fc2_act_scale"),
    (19, "fc1_act_block_scale"),
    (20, "fc2_act_block_scale"),
];

/// What is known of the sizes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) experts: Want,
    pub(super) hidden: Want,
    pub(super) inter: Want,
}

/// All inputs; the output is the input's fact.
pub(super) fn inputs(op: &QMoe, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
    at_most(inputs, 21)?;
    let x = required(inputs, 0, "input")?;
    let probs = required(inputs, 1, "router_probs")?;
    let dtype = check_type("input", x, ACTIVATIONS)?;
    expect_rank("input", x, &[2, 3])?;
    let given = optional(inputs, 14);
    for (name, fact) in [("router_probs", Some(probs)), ("router_weights", given)] {
        same_type(name, fact, dtype, "input")?;
    }
    let sizes = weights(op, inputs, back(x, 0), dtype)?;
    let rows: Vec<Want> =
        x.shape.as_ref().map_or(vec![None], |s| s[..s.len() - 1].iter().map(crate::ir::Dim::known).collect());
    op.routing.check(probs, given, product("input", &rows)?, sizes.experts)?;
    Ok(vec![Fact { constant: None, ..x.clone() }])
}

/// The weight inputs (of all inputs, by index), given the input's hidden size and type where they are known.
pub(super) fn weights(
    op: &QMoe,
    inputs: &[Option<&Fact>],
    hidden: Want,
    dtype: Option<DType>,
) -> Result<Sizes, OpError> {
    if let Some(element) = op.kind.element() {
        return float::weights(op, element, inputs, hidden, dtype);
    }
    for (i, name) in FLOAT_KIND_INPUTS {
        if let Some(f) = optional(inputs, i) {
            return Err(OpError::input(name, "nothing with quant_type \"int\"", f.shape_text()));
        }
    }
    let fc3 = fc3_present(op, inputs)?;
    let projections: &[Projection] = if fc3 { &Projection::ALL } else { &[Projection::Fc1, Projection::Fc2] };
    for &p in projections {
        let names = p.names();
        let w = required(inputs, names.weights.1, names.weights.0)?;
        packed(names.weights.0, w)?;
        expect_rank(names.weights.0, w, &[3])?;
        check_type(names.scales.0, required(inputs, names.scales.1, names.scales.0)?, ACTIVATIONS)?;
        if let Some(b) = optional(inputs, names.bias.1) {
            check_type(names.bias.0, b, ACTIVATIONS)?;
            same_type(names.bias.0, Some(b), dtype, "input")?;
        }
        if let Some(z) = optional(inputs, names.zero_points.1) {
            packed(names.zero_points.0, z)?;
        }
    }
    let sizes = sizes(op, inputs, hidden)?;
    let rows1 = product("fc1_experts_weights", &[sizes.inter, Some(factor(op, fc3))])?;
    for &p in projections {
        let (n, k) = match p {
            Projection::Fc1 => (rows1, sizes.hidden),
            Projection::Fc2 => (sizes.hidden, sizes.inter),
            Projection::Fc3 => (sizes.inter, sizes.hidden),
        };
        projection(op, inputs, p, sizes, (n, k))?;
    }
    Ok(sizes)
}

pub(super) const fn factor(op: &QMoe, fc3: bool) -> usize {
    op.activation.fusion(fc3).rows_per_value()
}

/// Whether FC3 is there; its other inputs and a fused FC1 must agree with that.
pub(super) fn fc3_present(op: &QMoe, inputs: &[Option<&Fact>]) -> Result<bool, OpError> {
    let names = Projection::Fc3.names();
    let present = optional(inputs, names.weights.1).is_some();
    if present && op.activation.is_fused(true) {
        let expected = "nothing: with swiglu_fusion 1 or 2 the linear rows are in FC1";
        return Err(OpError::input(names.weights.0, expected, "FC3 weights"));
    }
    for (name, i) in [names.scales, names.bias, names.zero_points] {
        if !present && optional(inputs, i).is_some() {
            return Err(OpError::input(name, "nothing without fc3_experts_weights", "a value"));
        }
    }
    Ok(present)
}

/// E, H and I from whatever says them first: the input, then the weights.
fn sizes(op: &QMoe, inputs: &[Option<&Fact>], hidden: Want) -> Result<Sizes, OpError> {
    let (fc1, fc2) = (Projection::Fc1.names().weights, Projection::Fc2.names().weights);
    let (w1, w2) = (optional(inputs, fc1.1), optional(inputs, fc2.1));
    let fc3 = optional(inputs, Projection::Fc3.names().weights.1).is_some();
    let from_fc2 = columns(fc2.0, w2, 2, op.fc2_bits)?;
    let from_fc1 = columns(fc1.0, w1, 2, op.fc1_bits)?;
    let factor = factor(op, fc3);
    let sizes = Sizes {
        experts: dim_of(w1, 0).or(dim_of(w2, 0)),
        hidden: hidden.or(dim_of(w2, 1)).or(from_fc1),
        inter: from_fc2.or(dim_of(w1, 1).map(|n| n / factor)),
    };
    if sizes.hidden == Some(0) {
        return Err(OpError::input(fc2.0, "a hidden size of at least 1", "0 rows"));
    }
    if sizes.inter == Some(0) {
        return Err(OpError::input(fc2.0, "an intermediate size of at least 1", "0 columns"));
    }
    Ok(sizes)
}

/// One projection of `n` rows and `k` columns.
fn projection(
    op: &QMoe,
    inputs: &[Option<&Fact>],
    p: Projection,
    sizes: Sizes,
    (n, k): (Want, Want),
) -> Result<(), OpError> {
    let names = p.names();
    let bits = op.bits(p);
    let e = sizes.experts;
    let get = |i: usize| optional(inputs, i);
    let show = |w: Want| w.map_or_else(|| "?".to_owned(), |v| v.to_string());
    let why =
        format!("E={}, H={}, I={}, {} bits", show(e), show(sizes.hidden), show(sizes.inter), bits.get());
    let whole = |k: usize| {
        if k.is_multiple_of(bits.per_byte()) {
            Ok(k / bits.per_byte())
        } else {
            let expected = format!("rows of whole bytes, a multiple of {} columns", bits.per_byte());
            Err(OpError::input(names.weights.0, expected, format!("{k} columns at {} bits", bits.get())))
        }
    };
    let row_bytes = k.map(whole).transpose()?;
    let weights = get(names.weights.1);
    if let Err(error) = expect_if(names.weights.0, weights, &[e, n, row_bytes], &why) {
        let other = || k.zip(weights).and_then(|(k, w)| other_width(names.weights.0, p, w, k, bits));
        return Err(legacy(op, inputs, sizes).or_else(other).unwrap_or(error));
    }
    scales_and_zero_points(op, inputs, p, (e, n, k), &why)?;
    expect_if(names.bias.0, get(names.bias.1), &[e, n], &why)
}

/// Block-wise or row-wise is decided by `block_size`, never by the shape of the scales.
fn scales_and_zero_points(
    op: &QMoe,
    inputs: &[Option<&Fact>],
    p: Projection,
    (e, n, k): (Want, Want, Want),
    why: &str,
) -> Result<(), OpError> {
    let names = p.names();
    let bits = op.bits(p);
    let scales = required(inputs, names.scales.1, names.scales.0)?;
    let zero_points = optional(inputs, names.zero_points.1);
    let blocks = match op.block {
        Block::RowWise => Some(1),
        Block::Blocks(_) => k.map(|k| op.block.count(k)),
    };
    expect_rank(names.scales.0, scales, &[2, 3])?;
    let (name, layout) = (names.scales.0, names.zero_points.0);
    match op.block {
        Block::RowWise if scales.rank() == Some(3) => {
            expect(name, scales, &[e, n, Some(1)], &format!("{why}, row-wise without block_size"))?;
        }
        Block::RowWise => expect(name, scales, &[e, n], &format!("{why}, row-wise without block_size"))?,
        Block::Blocks(_) if scales.rank() == Some(2) && blocks.is_none_or(|b| b == 1) => {
            expect(name, scales, &[e, n], why)?;
        }
        Block::Blocks(size) => {
            expect(name, scales, &[e, n, blocks], &format!("{why}, block_size {size}"))?;
        }
    }
    let packed_len = |len: Want| len.map(|len| bits.packed_len(len));
    match op.block {
        Block::RowWise => {
            let want = [e, packed_len(n)];
            expect_if(layout, zero_points, &want, &format!("{why}, packed across rows"))
        }
        Block::Blocks(_) => {
            let want = [e, n, packed_len(blocks)];
            expect_if(layout, zero_points, &want, &format!("{why}, packed along the blocks of a row"))
        }
    }
}

/// The error for weights whose rows are those of `k` columns at another width than the attribute says.
fn other_width(name: &str, p: Projection, weights: &Fact, k: usize, bits: Bits) -> Option<OpError> {
    let bytes = dim_of(Some(weights), 2)?;
    let width =
        [Bits::B2, Bits::B4, Bits::B8].into_iter().find(|b| *b != bits && b.packed_len(k) == bytes)?;
    let expected = format!("{}, as {name} has {bytes} bytes for the {k} columns of a row", width.get());
    let found = format!("{} (an absent attribute inherits expert_weight_bits)", bits.get());
    Some(OpError::attribute(p.width_attribute(), expected, found))
}

/// The error for weights in the transposed layout that older releases accept and compute wrongly:
/// fc1 `[E,H,F*I/p]`, fc2 `[E,I,H/p]`.
fn legacy(op: &QMoe, inputs: &[Option<&Fact>], sizes: Sizes) -> Option<OpError> {
    let concrete = |i: usize| optional(inputs, i).and_then(Fact::concrete_shape);
    let (fc1, fc2) = (concrete(2)?, concrete(5)?);
    let hidden = sizes.hidden?;
    let factor = factor(op, optional(inputs, 8).is_some());
    let p = |b: Bits| b.per_byte();
    let inter = fc2[1];
    let transposed = fc1[1] == hidden
        && fc1[2].checked_mul(p(op.fc1_bits)) == inter.checked_mul(factor)
        && fc2[2].checked_mul(p(op.fc2_bits)) == Some(hidden);
    transposed.then(|| {
        OpError::input(
            "fc1_experts_weights",
            format!("output rows first, [E, {factor}*I, H/{}]", p(op.fc1_bits)),
            format!("the legacy transposed layout {fc1} (fc2_experts_weights {fc2}), which is never read"),
        )
    })
}
