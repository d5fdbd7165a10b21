//! The floating-point kinds (operator contract, section 1.12): what their attributes and inputs must be.
//!
//! FP4 codes come in two orientations, `[E,N,K/2]` as the schema prints it and `[E,K,N/2]` as CUDA exports hold it. The
//! shape tells which; where a projection is square in this sense, the other one does, and the schema where both are.

use super::super::OpError;
use super::super::args::{
    ACTIVATIONS, Want, dim_of, expect, expect_if, expect_rank, fits, product, same_type,
};
use super::super::quant::Block;
use super::super::util::{check_type, optional, required};
use super::check::{Sizes, factor, fc3_present};
use super::{Projection, QMoe};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, format::Element};

/// What the codes of a node are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Integers with scales and zero points.
    Int,
    /// E2M1 with E8M0 scales of 32 columns. `wfp4afp8` is this with a permission to quantize activations.
    Mxfp4 {
        /// Whether scales of quantized activations may be there; they are not used.
        activation_scales: bool,
    },
    /// E2M1 with E4M3FN scales of 16 columns.
    Nvfp4,
    /// E4M3FN, with one scale an expert, or with float scales of square tiles.
    Fp8,
}

impl Kind {
    /// Reads `quant_type`.
    ///
    /// # Errors
    /// On an unknown kind.
    pub(super) fn parse(attrs: &mut Attrs) -> Result<Self, OpError> {
        match attrs.string("quant_type")?.as_deref() {
            None | Some("int") => Ok(Self::Int),
            Some("fp4") => Ok(Self::Mxfp4 { activation_scales: false }),
            Some("wfp4afp8") => Ok(Self::Mxfp4 { activation_scales: true }),
            Some("nvfp4") => Ok(Self::Nvfp4),
            Some("fp8") => Ok(Self::Fp8),
            Some(other) => {
                let expected = "\"int\", \"fp4\", \"nvfp4\", \"fp8\" or \"wfp4afp8\"";
                Err(OpError::attribute("quant_type", expected, format!("{other:?}")))
            }
        }
    }

    /// The element of a floating-point kind.
    pub const fn element(self) -> Option<Element> {
        match self {
            Self::Int => None,
            Self::Mxfp4 { .. } | Self::Nvfp4 => Some(Element::E2M1),
            Self::Fp8 => Some(Element::E4M3),
        }
    }

    /// The name of the attribute's value.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int => "int",
            Self::Mxfp4 { activation_scales: false } => "fp4",
            Self::Mxfp4 { activation_scales: true } => "wfp4afp8",
            Self::Nvfp4 => "nvfp4",
            Self::Fp8 => "fp8",
        }
    }

    /// Columns of a block, where the kind fixes them.
    const fn fixed_block(self) -> Option<usize> {
        match self {
            Self::Mxfp4 { .. } => Some(32),
            Self::Nvfp4 => Some(16),
            Self::Int | Self::Fp8 => None,
        }
    }

    /// The blocks in effect, from the attribute.
    ///
    /// # Errors
    /// When the kind has blocks of another size.
    pub(super) fn block(self, attribute: Option<i64>) -> Result<Block, OpError> {
        match (self.fixed_block(), attribute.filter(|&n| n > 0)) {
            (Some(fixed), Some(n)) if n != fixed as i64 => {
                let expected = format!("{fixed} or nothing with quant_type {:?}", self.name());
                Err(OpError::attribute("block_size", expected, n))
            }
            (Some(fixed), _) => Ok(Block::Blocks(fixed)),
            (None, Some(n)) => super::super::quant::block_size(n).map(Block::Blocks),
            (None, None) => Ok(Block::RowWise),
        }
    }

    /// Refuses code widths that are not the kind's.
    ///
    /// # Errors
    /// Names the attribute.
    pub(super) fn check_width(self, name: &str, bits: usize) -> Result<(), OpError> {
        let want = match self.element() {
            None => return Ok(()),
            Some(element) => 8 / element.per_byte(),
        };
        if bits == want {
            return Ok(());
        }
        Err(OpError::attribute(name, format!("{want} with quant_type {:?}", self.name()), bits))
    }
}

/// The inputs that only floating-point kinds have, besides `fc1_global_scale` (15) and `fc2_global_scale` (16).
const ACTIVATION_SCALES: [(usize, &str); 4] =
    [(17, "fc1_act_scale"), (18, "fc2_act_scale"), (19, "fc1_act_block_scale"), (20, "fc2_act_block_scale")];

/// Index and name of a projection's global scale.
pub(super) const fn global_scale(p: Projection) -> Option<(usize, &'static str)> {
    match p {
        Projection::Fc1 => Some((15, "fc1_global_scale")),
        Projection::Fc2 => Some((16, "fc2_global_scale")),
        Projection::Fc3 => None,
    }
}

/// Whether a node's scales are of square tiles.
pub(super) const fn tiled(op: &QMoe) -> Option<usize> {
    match (op.kind, op.block) {
        (Kind::Fp8, Block::Blocks(tile)) => Some(tile),
        _ => None,
    }
}

/// Rows and columns of a projection.
fn extents(op: &QMoe, p: Projection, sizes: Sizes, fc3: bool) -> Result<(Want, Want), OpError> {
    Ok(match p {
        Projection::Fc1 => {
            (product("fc1_experts_weights", &[sizes.inter, Some(factor(op, fc3))])?, sizes.hidden)
        }
        Projection::Fc2 => (sizes.hidden, sizes.inter),
        Projection::Fc3 => (sizes.inter, sizes.hidden),
    })
}

/// The weight inputs of a floating-point kind; as [`super::check::weights`].
pub(super) fn weights(
    op: &QMoe,
    element: Element,
    inputs: &[Option<&Fact>],
    hidden: Want,
    dtype: Option<DType>,
) -> Result<Sizes, OpError> {
    let fc3 = fc3_present(op, inputs)?;
    if fc3 && tiled(op).is_none() {
        let expected = "nothing: with a floating-point quant_type only fp8 with blocks has FC3";
        return Err(OpError::input("fc3_experts_weights", expected, "FC3 weights"));
    }
    for (i, name) in ACTIVATION_SCALES {
        if let Some(f) = optional(inputs, i)
            && !matches!(op.kind, Kind::Mxfp4 { activation_scales: true })
        {
            let expected = format!("nothing with quant_type {:?}", op.kind.name());
            return Err(OpError::input(name, expected, f.shape_text()));
        }
    }
    for &p in projections(fc3) {
        types(op, element, inputs, p, dtype)?;
    }
    let sizes = sizes(op, element, inputs, hidden, fc3)?;
    for &p in projections(fc3) {
        projection(op, element, inputs, p, sizes, fc3)?;
    }
    Ok(sizes)
}

const fn projections(fc3: bool) -> &'static [Projection] {
    if fc3 { &Projection::ALL } else { &[Projection::Fc1, Projection::Fc2] }
}

/// Presence, types and ranks of a projection's inputs.
fn types(
    op: &QMoe,
    element: Element,
    inputs: &[Option<&Fact>],
    p: Projection,
    dtype: Option<DType>,
) -> Result<(), OpError> {
    let names = p.names();
    let w = required(inputs, names.weights.1, names.weights.0)?;
    expect_rank(names.weights.0, w, &[3])?;
    check_type(
        names.weights.0,
        w,
        match element {
            Element::E2M1 => &[DType::U8],
            Element::E4M3 => &[DType::F8E4M3FN],
        },
    )?;
    if let Some(z) = optional(inputs, names.zero_points.1) {
        let expected = format!("nothing with quant_type {:?}", op.kind.name());
        return Err(OpError::input(names.zero_points.0, expected, z.shape_text()));
    }
    let scales = names.scales;
    let types: &[DType] = match (op.kind, tiled(op)) {
        (Kind::Mxfp4 { .. }, _) => &[DType::F8E8M0],
        (Kind::Nvfp4, _) => &[DType::F8E4M3FN],
        (_, Some(_)) => ACTIVATIONS,
        (_, None) => &[],
    };
    if types.is_empty() {
        if let Some(f) = optional(inputs, scales.1) {
            let expected = "nothing with quant_type \"fp8\" without block_size: one scale an expert";
            return Err(OpError::input(scales.0, expected, f.shape_text()));
        }
    } else {
        check_type(scales.0, required(inputs, scales.1, scales.0)?, types)?;
    }
    if let Some((i, name)) = global_scale(p) {
        match (optional(inputs, i), tiled(op)) {
            (Some(f), Some(_)) => {
                let expected = "nothing with quant_type \"fp8\" and block_size";
                return Err(OpError::input(name, expected, f.shape_text()));
            }
            (None, Some(_)) => {}
            (found, None) => {
                check_type(name, found.map_or_else(|| required(inputs, i, name), Ok)?, &[DType::F32])?;
            }
        }
    }
    if let Some(b) = optional(inputs, names.bias.1) {
        check_type(names.bias.0, b, ACTIVATIONS)?;
        same_type(names.bias.0, Some(b), dtype, "input")?;
    }
    Ok(())
}

/// E, H and I: from the scales where the orientation of the codes is open, else from the codes.
fn sizes(
    op: &QMoe,
    element: Element,
    inputs: &[Option<&Fact>],
    hidden: Want,
    fc3: bool,
) -> Result<Sizes, OpError> {
    let (fc1, fc2) = (Projection::Fc1.names(), Projection::Fc2.names());
    let get = |i: usize| optional(inputs, i);
    let (w1, w2) = (get(fc1.weights.1), get(fc2.weights.1));
    let factor = factor(op, fc3);
    let (rows1, rows2) = match element {
        Element::E2M1 => (dim_of(get(fc1.scales.1), 1), dim_of(get(fc2.scales.1), 1)),
        Element::E4M3 => (dim_of(w1, 1), dim_of(w2, 1)),
    };
    let columns2 = match (element, op.block) {
        (Element::E4M3, _) => dim_of(w2, 2),
        (_, Block::Blocks(n)) => product(fc2.scales.0, &[dim_of(get(fc2.scales.1), 2), Some(n)])?,
        _ => None,
    };
    let sizes = Sizes {
        experts: dim_of(w1, 0).or(dim_of(w2, 0)),
        hidden: hidden.or(rows2),
        inter: columns2.or(rows1.map(|n| n / factor)),
    };
    for (name, size) in [("a hidden size", sizes.hidden), ("an intermediate size", sizes.inter)] {
        let multiple = op.kind.fixed_block().unwrap_or(1);
        if size.is_some_and(|n| n == 0 || !n.is_multiple_of(multiple)) {
            let expected = format!("{name} that is a multiple of {multiple}");
            return Err(OpError::input(fc2.weights.0, expected, size.unwrap_or(0)));
        }
    }
    Ok(sizes)
}

/// One projection's shapes.
fn projection(
    op: &QMoe,
    element: Element,
    inputs: &[Option<&Fact>],
    p: Projection,
    sizes: Sizes,
    fc3: bool,
) -> Result<(), OpError> {
    let names = p.names();
    let (n, k) = extents(op, p, sizes, fc3)?;
    let e = sizes.experts;
    let get = |i: usize| optional(inputs, i);
    let show = |w: Want| w.map_or_else(|| "?".to_owned(), |v| v.to_string());
    let why = format!(
        "E={}, H={}, I={}, quant_type {:?}",
        show(e),
        show(sizes.hidden),
        show(sizes.inter),
        op.kind.name()
    );
    let weights = required(inputs, names.weights.1, names.weights.0)?;
    let [straight, transposed] = shapes(element, (e, n, k));
    if transposed.is_none_or(|t| !fits(weights, &t)) {
        let or = if transposed.is_some() { ", or the transposed [E,K,N/2]" } else { "" };
        expect(names.weights.0, weights, &straight.unwrap_or([None; 3]), &format!("{why}{or}"))?;
    }
    let scales = get(names.scales.1);
    match (op.block, tiled(op)) {
        (_, Some(tile)) => {
            let tiles = |w: Want| w.map(|w| w.div_ceil(tile));
            expect_if(names.scales.0, scales, &[e, tiles(n), tiles(k)], &format!("{why}, tiles of {tile}"))?;
        }
        (Block::Blocks(block), None) => {
            let want = [e, n, k.map(|k| k / block)];
            expect_if(names.scales.0, scales, &want, &format!("{why}, blocks of {block}"))?;
        }
        (Block::RowWise, None) => {}
    }
    if let Some((i, name)) = global_scale(p) {
        expect_if(name, get(i), &[e], "one an expert")?;
    }
    expect_if(names.bias.0, get(names.bias.1), &[e, n], &why)
}

/// The shapes that codes of `[n, k]` may have: straight, and transposed where there is that.
fn shapes(element: Element, (e, n, k): (Want, Want, Want)) -> [Option<[Want; 3]>; 2] {
    let half = |w: Want| w.map(|w| w / 2);
    match element {
        Element::E2M1 => [Some([e, n, half(k)]), Some([e, k, half(n)])],
        Element::E4M3 => [Some([e, n, k]), None],
    }
}

/// Whether the codes of the node's matrices are transposed. Shapes have been checked.
pub(super) fn transposed(
    op: &QMoe,
    element: Element,
    inputs: &[Option<&Fact>],
    sizes: Sizes,
) -> Result<bool, OpError> {
    for p in [Projection::Fc1, Projection::Fc2] {
        let names = p.names();
        let weights = required(inputs, names.weights.1, names.weights.0)?;
        let (n, k) = extents(op, p, sizes, false)?;
        let [straight, transposed] = shapes(element, (sizes.experts, n, k));
        let is = |shape: Option<[Want; 3]>| shape.is_some_and(|s| fits(weights, &s));
        match (is(straight), is(transposed)) {
            (true, true) => {}
            (_, transposed) => return Ok(transposed),
        }
    }
    Ok(false)
}
