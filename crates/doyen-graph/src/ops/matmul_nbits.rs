//! `com.microsoft::MatMulNBits`: product with a block-quantized weight (operator contract, section 2.1).

use super::args::{ACTIVATIONS, Want, back, expect, expect_if, expect_rank, fits, floats, same_type, zeros};
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

    /// The error for a `B` that would fit at another width than the attribute says.
    fn other_width(&self, b: &Fact) -> Option<OpError> {
        let bytes = |w: Bits| self.block_size / w.per_byte();
        let fitting = |w: &Bits| fits(b, &[Some(self.n), Some(self.blocks()), Some(bytes(*w))]);
        let width = [Bits::B2, Bits::B4, Bits::B8].into_iter().find(fitting)?;
        let expected =
            format!("{}, as B has {} bytes for a block of {}", width.get(), bytes(width), self.block_size);
        Some(OpError::attribute("bits", expected, self.bits.get()))
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
        expect("B", b, &[n, Some(blocks), Some(blob)], &why).map_err(|e| self.other_width(b).unwrap_or(e))?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Attr;
    use crate::ops::Op;
    use proptest::prelude::*;

    fn op(k: usize, n: usize, block: usize, bits: Bits) -> Op {
        let a = Attrs::from([
            ("K", Attr::Int(k as i64)),
            ("N", Attr::Int(n as i64)),
            ("block_size", Attr::Int(block as i64)),
            ("bits", Attr::Int(bits.get() as i64)),
        ]);
        Op::parse("com.microsoft", "MatMulNBits", 1, &a).unwrap()
    }

    fn f(shape: &[usize], values: &[f32]) -> Tensor {
        Tensor::from_slice(shape.to_vec(), values).unwrap()
    }

    fn u8s(shape: &[usize], values: &[u8]) -> Tensor {
        Tensor::from_slice(shape.to_vec(), values).unwrap()
    }

    fn run(op: &Op, inputs: &[Option<&Tensor>]) -> Result<Vec<f32>, String> {
        op.eval(inputs, 1).map(|o| o[0].to_f32().unwrap()).map_err(|e| e.to_string())
    }

    /// Contract section 0, at every width, pad bits clear and set, with flat and with float zero points.
    #[test]
    fn worked_zero_point_example() {
        for bits in Bits::ALL {
            let op = op(80, 1, 16, bits);
            let b = u8s(&[1, 5, 16 / bits.per_byte()], &bits.pack(&[3; 80]));
            let (a, scales) = (f(&[1, 80], &[1.0; 80]), f(&[1, 5], &[1.0; 5]));
            let mut packed = bits.pack(&[1, 2, 3, 0, 2]);
            let row = packed.len();
            let mut zero_points = vec![u8s(&[1, row], &packed), u8s(&[row], &packed)];
            zero_points.push(f(&[1, 5], &[1.0, 2.0, 3.0, 0.0, 2.0]));
            if bits != Bits::B8 {
                packed[row - 1] |= !bits.max_code();
                zero_points.push(u8s(&[1, row], &packed));
            }
            for z in &zero_points {
                assert_eq!(run(&op, &[Some(&a), Some(&b), Some(&scales), Some(z)]).unwrap(), [112.0]);
            }
        }
    }

    /// Codes past K do not count, the bias does, and float zero points are not rounded.
    #[test]
    fn partial_block_bias_and_float_zero_points() {
        let op = op(18, 2, 16, Bits::B8);
        let mut codes = vec![255u8; 2 * 32];
        codes[..18].fill(3);
        codes[32..50].fill(5);
        let (b, a) = (u8s(&[2, 2, 16], &codes), f(&[18], &[1.0; 18]));
        let (scales, z) = (f(&[4], &[1.0, 2.0, -1.0, 1.0]), f(&[2, 2], &[0.5; 4]));
        let bias = f(&[2], &[0.0, 100.0]);
        let y = run(&op, &[Some(&a), Some(&b), Some(&scales), Some(&z), None, Some(&bias)]).unwrap();
        assert_eq!(y, [16.0 * 2.5 + 2.0 * 5.0, -16.0 * 4.5 + 2.0 * 4.5 + 100.0]);
    }

    #[test]
    fn group_indices() {
        let op = op(32, 1, 16, Bits::B4);
        let (a, b) = (f(&[1, 32], &[1.0; 32]), u8s(&[1, 2, 8], &[0x99; 16]));
        let scales = f(&[1, 2], &[1.0, 10.0]);
        let groups = |g: &[i32]| Tensor::from_slice([32], g).unwrap();
        let swapped: Vec<i32> = (0..32).map(|c| i32::from(c < 16)).collect();
        let mut uneven = vec![0; 32];
        uneven[5] = 1;
        for (g, want) in [(&swapped, 176.0), (&uneven, 41.0)] {
            let y = run(&op, &[Some(&a), Some(&b), Some(&scales), None, Some(&groups(g))]).unwrap();
            assert_eq!(y, [want]);
        }
        let z = u8s(&[1, 1], &[0x88]);
        let e = run(&op, &[Some(&a), Some(&b), Some(&scales), Some(&z), Some(&groups(&swapped))]);
        assert!(e.unwrap_err().contains("g_idx"));
        for bad in [-1, 2, i32::MIN] {
            uneven[7] = bad;
            let e = run(&op, &[Some(&a), Some(&b), Some(&scales), None, Some(&groups(&uneven))]);
            assert!(e.unwrap_err().contains("g_idx"));
        }
    }

    #[test]
    fn refused_by_name() {
        let base = [("K", 32), ("N", 1), ("block_size", 16)];
        let bad = [("bits", 3), ("block_size", 24), ("weight_prepacked", 1), ("group_size", 1), ("K", 0)];
        for (name, value) in bad {
            let mut a = Attrs::default();
            for (n, v) in base.iter().chain([&(name, value)]) {
                a.set(*n, i64::from(*v));
            }
            let e = Op::parse("com.microsoft", "MatMulNBits", 1, &a).unwrap_err().to_string();
            assert!(e.contains(name), "{e}");
        }
        let op = op(32, 1, 16, Bits::B4);
        let (a, b, s) = (f(&[1, 32], &[1.0; 32]), u8s(&[1, 2, 8], &[0; 16]), f(&[1, 2], &[1.0; 2]));
        let short = f(&[1, 31], &[1.0; 31]);
        assert!(run(&op, &[Some(&short), Some(&b), Some(&s)]).unwrap_err().contains("input A:"));
        assert!(run(&op, &[Some(&a), Some(&s), Some(&s)]).unwrap_err().contains("input B:"));
        let one = f(&[1, 1], &[1.0]);
        assert!(run(&op, &[Some(&a), Some(&b), Some(&one)]).unwrap_err().contains("scales"));
        let wide = u8s(&[1, 2], &[0; 2]);
        assert!(run(&op, &[Some(&a), Some(&b), Some(&s), Some(&wide)]).unwrap_err().contains("zero_points"));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Against a product written out from the definition.
        #[test]
        fn equals_the_definition(
            k in 1usize..70, n in 1usize..5, m in 0usize..3, w in 0usize..3, block in 4u32..7, seed in any::<u64>(),
        ) {
            let (bits, block) = (Bits::ALL[w], 1usize << block);
            let blocks = k.div_ceil(block);
            let mut state = seed | 1;
            let mut next = move || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (state >> 40) as u8
            };
            let codes: Vec<u8> = (0..n * blocks * block).map(|_| next() & bits.max_code()).collect();
            let zeros: Vec<u8> = (0..n * blocks).map(|_| next() & bits.max_code()).collect();
            let scales: Vec<f32> = (0..n * blocks).map(|_| f32::from(next()) / 64.0 - 2.0).collect();
            let a: Vec<f32> = (0..m * k).map(|_| f32::from(next()) / 64.0 - 2.0).collect();
            let b = u8s(&[n, blocks, block / bits.per_byte()], &bits.pack(&codes));
            let z: Vec<u8> = zeros.chunks(blocks).flat_map(|r| bits.pack(r)).collect();
            let z = u8s(&[n, bits.packed_len(blocks)], &z);
            let op = op(k, n, block, bits);
            let inputs = [f(&[m, k], &a), b, f(&[n, blocks], &scales), z];
            let got = run(&op, &inputs.each_ref().map(Some)).unwrap();
            prop_assert_eq!(got.len(), m * n);
            for (i, y) in got.iter().enumerate() {
                let (row, out) = (i / n, i % n);
                let want: f64 = (0..k).map(|c| {
                    let g = out * blocks + c / block;
                    let q = f64::from(codes[out * blocks * block + c]) - f64::from(zeros[g]);
                    q * f64::from(scales[g]) * f64::from(a[row * k + c])
                }).sum();
                prop_assert!((f64::from(*y) - want).abs() <= 1e-6 * want.abs().max(1.0));
            }
        }
    }
}
