//! `com.microsoft::MatMulNBits`: product with a block-quantized weight (operator contract, section 2.1).

use super::args::{ACTIVATIONS, Want, back, expect, expect_if, expect_rank, floats, same_type, zeros};
use super::experts::{dequantize_row, dot};
use super::quant::{AccuracyLevel, bits, block_size, packed};
use super::util::{at_most, check_type, fact_of, optional, outputs_of, required};
use super::{OpDef, OpError, Trace, Traced};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{
    DType, FloatView, Shape, Tensor,
    format::{Bits, QuantMatrix, ZeroPoints},
};

/// `Y = A * dequant(B)^T + bias`, B stored `[N, ceil(K/block), block*bits/8]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatMulNBits {
    /// Input columns K.
    pub k: usize,
    /// Output rows N.
    pub n: usize,
    /// Code width.
    pub bits: Bits,
    /// Columns of a block; a power of two, at least 16. The last block is stored whole.
    pub block_size: usize,
    /// What the node permits of its activations.
    pub accuracy_level: AccuracyLevel,
}

/// The checked weight operands of one node.
#[derive(Debug, Clone)]
pub struct Operands<'a> {
    /// The weights. With `groups`, the scale of a column is not that of its block.
    pub matrix: QuantMatrix<'a>,
    /// Scale group of every column where `g_idx` says other than `column / block_size`; then there are no zero
    /// points.
    pub groups: Option<Vec<usize>>,
    /// One value a row.
    pub bias: Option<FloatView<'a>>,
}

impl MatMulNBits {
    /// Blocks of a row.
    pub const fn blocks(&self) -> usize {
        self.k.div_ceil(self.block_size)
    }

    /// The weight operands as views: the inputs from index 1 on, in the operator's order.
    ///
    /// # Errors
    /// Every check that [`OpDef::infer`] makes of these inputs, and `g_idx` entries beyond the groups.
    pub fn operands<'a>(&self, inputs: &[Option<&'a Tensor>]) -> Result<Operands<'a>, OpError> {
        let facts: Vec<Option<Fact>> =
            [None].into_iter().chain(inputs.iter().map(|t| t.map(fact_of))).collect();
        self.weights(&facts.iter().map(Option::as_ref).collect::<Vec<_>>(), None)?;
        let b = required(inputs, 0, "B")?;
        let scales = required(inputs, 1, "scales")?;
        let zero_points = match optional(inputs, 2) {
            None => ZeroPoints::Default,
            Some(z) if z.dtype() == DType::U8 => {
                ZeroPoints::PerBlock { packed: z.bytes(), row_bytes: self.bits.packed_len(self.blocks()) }
            }
            Some(z) => ZeroPoints::Float(z.float_view()?),
        };
        let matrix = QuantMatrix {
            rows: self.n,
            cols: self.k,
            bits: self.bits,
            block: self.block_size,
            codes: b.bytes(),
            row_bytes: self.blocks() * (self.block_size / self.bits.per_byte()),
            scales: scales.float_view()?,
            zero_points,
        };
        matrix.validate()?;
        let groups = optional(inputs, 3).map(|g| self.groups(&g.to_i64()?)).transpose()?.flatten();
        Ok(Operands { matrix, groups, bias: optional(inputs, 4).map(Tensor::float_view).transpose()? })
    }

    /// `None` when `g_idx` is the order of the blocks.
    fn groups(&self, g_idx: &[i64]) -> Result<Option<Vec<usize>>, OpError> {
        let groups = g_idx
            .iter()
            .map(|&g| {
                usize::try_from(g).ok().filter(|&g| g < self.blocks()).ok_or_else(|| {
                    OpError::input("g_idx", format!("groups below {} (blocks of a row)", self.blocks()), g)
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let ordered = groups.iter().enumerate().all(|(c, &g)| g == c / self.block_size);
        Ok((!ordered).then_some(groups))
    }

    /// Checks the weight inputs (of all inputs, by index).
    fn weights(&self, inputs: &[Option<&Fact>], dtype: Option<DType>) -> Result<(), OpError> {
        let blocks = self.blocks();
        let (n, k) = (Some(self.n), Some(self.k));
        let why =
            format!("N={}, K={}, block_size {}, {} bits", self.n, self.k, self.block_size, self.bits.get());
        let b = required(inputs, 1, "B")?;
        packed("B", b)?;
        let blob = self.block_size / self.bits.per_byte();
        expect("B", b, &[n, Some(blocks), Some(blob)], &why)?;
        let scales = required(inputs, 2, "scales")?;
        check_type("scales", scales, ACTIVATIONS)?;
        same_type("scales", Some(scales), dtype, "A")?;
        let flat: Want = self.n.checked_mul(blocks);
        match scales.rank() {
            Some(1) => expect("scales", scales, &[flat], &why)?,
            _ => expect("scales", scales, &[n, Some(blocks)], &why)?,
        }
        let zero_points = optional(inputs, 3);
        if let Some(z) = zero_points {
            self.zero_points(z, dtype, &why)?;
        }
        if let Some(g) = optional(inputs, 4) {
            if zero_points.is_some() {
                return Err(OpError::input("g_idx", "nothing beside zero_points", "group indices"));
            }
            check_type("g_idx", g, &[DType::I32])?;
            expect("g_idx", g, &[k], &why)?;
            if let Some(c) = &g.constant {
                self.groups(&c.to_tensor()?.to_i64()?)?;
            }
        }
        let bias = optional(inputs, 5);
        if let Some(b) = bias {
            check_type("bias", b, ACTIVATIONS)?;
        }
        same_type("bias", bias, dtype, "A")?;
        expect_if("bias", bias, &[n], &why)
    }

    fn zero_points(&self, z: &Fact, dtype: Option<DType>, why: &str) -> Result<(), OpError> {
        let (n, blocks) = (Some(self.n), self.blocks());
        let types = [DType::U8, DType::F32, DType::F16, DType::BF16];
        let columns = match check_type("zero_points", z, &types)? {
            None => return expect_rank("zero_points", z, &[1, 2]),
            Some(DType::U8) => self.bits.packed_len(blocks),
            Some(_) => {
                same_type("zero_points", Some(z), dtype, "A (or uint8)")?;
                blocks
            }
        };
        match z.rank() {
            Some(1) => expect("zero_points", z, &[self.n.checked_mul(columns)], why),
            _ => expect("zero_points", z, &[n, Some(columns)], why),
        }
    }
}

impl OpDef for MatMulNBits {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let mut size = |name: &'static str| {
            let v = attrs.required_int(name)?;
            usize::try_from(v).ok().filter(|&v| v > 0).ok_or_else(|| OpError::attribute(name, "1 or more", v))
        };
        let (k, n) = (size("K")?, size("N")?);
        let block_size = block_size(attrs.required_int("block_size")?)?;
        match attrs.int("weight_prepacked")?.unwrap_or(0) {
            0 => {}
            v => {
                let expected = "0 (weights in the portable layout; prepacked weights cannot be read)";
                return Err(OpError::attribute("weight_prepacked", expected, v));
            }
        }
        let bits = bits(attrs, "bits")?.unwrap_or(Bits::B4);
        Ok(Self { k, n, bits, block_size, accuracy_level: AccuracyLevel::parse(attrs)? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 6)?;
        let a = required(inputs, 0, "A")?;
        let dtype = check_type("A", a, ACTIVATIONS)?;
        if a.rank() == Some(0) || back(a, 0).is_some_and(|k| k != self.k) {
            return Err(OpError::input("A", format!("shape [..,{}] (K)", self.k), a.shape_text()));
        }
        self.weights(inputs, dtype)?;
        let shape = a.shape.as_ref().map(|s| {
            let mut s = s.clone();
            s.pop();
            s.push(Dim::Known(self.n));
            s
        });
        Ok(vec![Fact { dtype, shape, constant: None }])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let outputs = outputs_of(self, inputs)?;
        let a = floats("A", required(inputs, 0, "A")?)?;
        let w = self.operands(&inputs[1..])?;
        let m = a.len() / self.k;
        let (_, shape) = &outputs[0];
        let mut y = zeros(shape.numel()?)?;
        let mut row = zeros(self.k)?;
        for n in 0..self.n {
            match &w.groups {
                None => dequantize_row(&w.matrix, n, &mut row),
                Some(groups) => grouped_row(&w.matrix, groups, n, &mut row),
            }
            let bias = w.bias.map_or(0.0, |b| f64::from(b.get(n)));
            for i in 0..m {
                y[i * self.n + n] = dot(&row, &a[i * self.k..(i + 1) * self.k]) + bias;
            }
        }
        Ok(vec![Tensor::from_f64(outputs[0].0, shape.clone(), &y)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        trace_rows(inputs, outputs.len())
    }
}

/// Row `n` where `groups` chooses each column's scale.
fn grouped_row(m: &QuantMatrix<'_>, groups: &[usize], n: usize, out: &mut [f64]) {
    let row = m.row(n);
    let zero = f64::from(m.bits.default_zero_point());
    for (c, (o, &g)) in out.iter_mut().zip(groups).enumerate() {
        *o = (f64::from(m.bits.code(row, c)) - zero) * f64::from(m.scale(n, g));
    }
}

/// The token-axis rule of operators that work on the last axis of their first input alone.
pub(super) fn trace_rows(inputs: &[Option<Traced<'_>>], outputs: usize) -> Result<Vec<Trace>, String> {
    if inputs.iter().skip(1).flatten().any(|t| t.trace != Trace::Absent) {
        return Err("its weights depend on the tokens".into());
    }
    match inputs.first().copied().flatten() {
        Some(Traced { trace: Trace::Tokens(a), shape, .. }) if a.axis + 1 >= shape.len() => {
            Err("it sums over the token axis".into())
        }
        Some(t) => Ok(vec![t.trace; outputs]),
        None => Err("it has no input".into()),
    }
}
