//! `com.microsoft::GatherBlockQuantized`: rows of a quantized table (operator contract, section 2.2).

use super::args::{ACTIVATIONS, Want, expect, zeros};
use super::quant::{bits, block_size};
use super::util::{
    INDICES, at_most, check_type, fact, fact_of, normalize_axis, optional, outputs_of, required,
};
use super::{OpDef, OpError, TokenAxis, Trace, Traced};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{
    DType, Shape, Tensor,
    format::{Bits, QuantMatrix, ZeroPoints},
};

/// Gathers along an axis and dequantizes what was gathered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatherBlockQuantized {
    /// Code width; 4 for int4 and uint4 data.
    pub bits: Bits,
    /// Elements along `quantize_axis` that share a scale; a power of two, at least 16.
    pub block_size: usize,
    /// Axis of the data that the indices address, as written (may be negative).
    pub gather_axis: i64,
    /// Axis of the data that is cut into blocks, as written (may be negative).
    pub quantize_axis: i64,
}

const DATA: &[DType] = &[DType::U8, DType::U4, DType::I4];

/// Data, scales and zero points with their extents in elements (not bytes).
struct Table<'a> {
    dims: Vec<usize>,
    axis: usize,
    data: Codes<'a>,
    zero_points: Option<Codes<'a>>,
    default_zero: f64,
    scales: Vec<f64>,
    scale_dims: Vec<usize>,
}

/// Packed codes of some shape.
struct Codes<'a> {
    bytes: &'a [u8],
    bits: Bits,
    signed: bool,
    /// Codes of the last axis, and bytes it takes; nibble types run on across rows instead.
    row: Option<(usize, usize)>,
}

impl Codes<'_> {
    fn get(&self, i: usize) -> f64 {
        let code = match self.row {
            Some((len, bytes)) => self.bits.code(&self.bytes[i / len * bytes..], i % len),
            None => self.bits.code(self.bytes, i),
        };
        if self.signed && code > 7 { f64::from(code) - 16.0 } else { f64::from(code) }
    }
}

impl GatherBlockQuantized {
    /// The table as a matrix `[rows, columns]` in its stored layout: the inputs are data, indices, scales and zero
    /// points. For uint8 data of rank 2 gathered by row and quantized along the columns, the form of embeddings.
    ///
    /// # Errors
    /// On any other form, and on every check that [`OpDef::infer`] makes of these inputs.
    pub fn matrix<'a>(&self, inputs: &[Option<&'a Tensor>]) -> Result<QuantMatrix<'a>, OpError> {
        let facts: Vec<Option<Fact>> = inputs.iter().map(|t| t.map(fact_of)).collect();
        let facts: Vec<Option<&Fact>> = facts.iter().map(Option::as_ref).collect();
        let form = self.check(&facts)?;
        let data = required(inputs, 0, "data")?;
        if data.dtype() != DType::U8 || data.shape().len() != 2 || form.axes != Some((0, 1)) {
            let expected = "a uint8 table of rank 2 with quantize_axis 1";
            return Err(OpError::input("data", expected, format!("{}{}", data.dtype(), data.shape())));
        }
        let (rows, row_bytes) = (data.shape()[0], data.shape()[1]);
        let cols = row_bytes.checked_mul(self.bits.per_byte());
        let cols = cols.ok_or_else(|| OpError::input("data", "columns that fit", data.shape()))?;
        let zero_points = optional(inputs, 3).map_or(ZeroPoints::Default, |z| ZeroPoints::PerBlock {
            packed: z.bytes(),
            row_bytes: self.bits.packed_len(cols.div_ceil(self.block_size)),
        });
        let matrix = QuantMatrix {
            rows,
            cols,
            bits: self.bits,
            block: self.block_size,
            codes: data.bytes(),
            row_bytes,
            scales: required(inputs, 2, "scales")?.float_view()?,
            zero_points,
        };
        matrix.validate()?;
        Ok(matrix)
    }

    /// Checks everything but the indices.
    fn check(&self, inputs: &[Option<&Fact>]) -> Result<Form, OpError> {
        let data = required(inputs, 0, "data")?;
        let dtype = check_type("data", data, DATA)?;
        let scales = required(inputs, 2, "scales")?;
        check_type("scales", scales, ACTIVATIONS)?;
        let zero_points = optional(inputs, 3);
        if let (Some(t), Some(z)) = (dtype, zero_points) {
            check_type("zero_points", z, &[t])?;
        }
        if dtype.is_some_and(|t| t != DType::U8) && self.bits != Bits::B4 {
            return Err(OpError::attribute("bits", "4 with int4 and uint4 data", self.bits.get()));
        }
        let Some(shape) = &data.shape else { return Ok(Form { axes: None, dims: None }) };
        if shape.is_empty() {
            return Err(OpError::input("data", "rank 1 or more", data.shape_text()));
        }
        let gather = normalize_axis("gather_axis", self.gather_axis, shape.len())?;
        let quantize = normalize_axis("quantize_axis", self.quantize_axis, shape.len())?;
        if dtype == Some(DType::U8) && gather != 0 {
            return Err(OpError::attribute("gather_axis", "0 with uint8 data", self.gather_axis));
        }
        let per_byte = if dtype == Some(DType::U8) { self.bits.per_byte() } else { 1 };
        let last = shape.len() - 1;
        let mut dims: Vec<Want> = shape.iter().map(Dim::known).collect();
        if let Some(d) = dims[last] {
            let codes = d.checked_mul(per_byte);
            dims[last] =
                Some(codes.ok_or_else(|| OpError::input("data", "columns that fit", data.shape_text()))?);
        }
        if dtype.is_none() {
            dims[last] = None;
        }
        let mut blocks = dims.clone();
        blocks[quantize] = dims[quantize].map(|d| d.div_ceil(self.block_size));
        let why = format!("blocks of {} along axis {quantize}", self.block_size);
        expect("scales", scales, &blocks, &why)?;
        if let Some(z) = zero_points {
            let mut want = blocks;
            if dtype == Some(DType::U8) {
                want[last] = want[last].map(|n| self.bits.packed_len(n));
            }
            expect("zero_points", z, &want, &format!("{why}, packed along the last axis"))?;
        }
        Ok(Form { axes: Some((gather, quantize)), dims: Some(dims) })
    }

    fn table<'a>(&self, inputs: &[Option<&'a Tensor>], axis: usize) -> Result<Table<'a>, OpError> {
        let data = required(inputs, 0, "data")?;
        let scales = required(inputs, 2, "scales")?;
        let bytes_packed = data.dtype() == DType::U8;
        let codes = |t: &'a Tensor, len: usize| Codes {
            bytes: t.bytes(),
            bits: self.bits,
            signed: t.dtype() == DType::I4,
            row: bytes_packed.then(|| (len.max(1), self.bits.packed_len(len))),
        };
        let mut dims = data.shape().to_vec();
        let last = dims.len() - 1;
        if bytes_packed {
            dims[last] *= self.bits.per_byte();
        }
        let scale_dims = scales.shape().to_vec();
        Ok(Table {
            axis,
            data: codes(data, dims[last]),
            zero_points: optional(inputs, 3).map(|z| codes(z, scale_dims[last])),
            default_zero: if bytes_packed { f64::from(self.bits.default_zero_point()) } else { 0.0 },
            scales: scales.to_f64()?,
            dims,
            scale_dims,
        })
    }
}

struct Form {
    /// Gather and quantize axis, from the front.
    axes: Option<(usize, usize)>,
    /// Extents of the data in elements.
    dims: Option<Vec<Want>>,
}

impl Table<'_> {
    /// The element at this index, dequantized.
    fn get(&self, index: &[usize], block: usize) -> f64 {
        let (mut element, mut scale) = (0, 0);
        for (a, &i) in index.iter().enumerate() {
            element = element * self.dims[a] + i;
            scale = scale * self.scale_dims[a] + if a == self.axis { i / block } else { i };
        }
        let zero = self.zero_points.as_ref().map_or(self.default_zero, |z| z.get(scale));
        (self.data.get(element) - zero) * self.scales[scale]
    }
}

impl OpDef for GatherBlockQuantized {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let block_size = block_size(attrs.int("block_size")?.unwrap_or(128))?;
        Ok(Self {
            bits: bits(attrs, "bits")?.unwrap_or(Bits::B4),
            block_size,
            gather_axis: attrs.int("gather_axis")?.unwrap_or(0),
            quantize_axis: attrs.int("quantize_axis")?.unwrap_or(1),
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 4)?;
        let form = self.check(inputs)?;
        let indices = required(inputs, 1, "indices")?;
        check_type("indices", indices, INDICES)?;
        let shape = match (form.axes, form.dims, &indices.shape) {
            (Some((gather, _)), Some(dims), Some(at)) => {
                let mut out: Vec<Dim> = dims.iter().map(|&d| super::args::dim(d)).collect();
                out.splice(gather..=gather, at.iter().cloned());
                Some(out)
            }
            _ => None,
        };
        Ok(vec![fact(required(inputs, 2, "scales")?.dtype, shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let outputs = outputs_of(self, inputs)?;
        let (dtype, shape) = &outputs[0];
        let rank = required(inputs, 0, "data")?.shape().len();
        let gather = normalize_axis("gather_axis", self.gather_axis, rank)?;
        let quantize = normalize_axis("quantize_axis", self.quantize_axis, rank)?;
        let table = self.table(inputs, quantize)?;
        let indices = required(inputs, 1, "indices")?.to_i64()?;
        let extent = table.dims[gather];
        if extent == 0 && !indices.is_empty() {
            return Err(OpError::input(
                "data",
                "entries to gather from",
                required(inputs, 0, "data")?.shape(),
            ));
        }
        let outer: usize = table.dims[..gather].iter().product();
        let inner_dims = &table.dims[gather + 1..];
        let inner: usize = inner_dims.iter().product();
        let mut y = zeros(shape.numel()?)?;
        let mut index = vec![0; rank];
        for o in 0..if inner == 0 { 0 } else { outer } {
            split(o, &table.dims[..gather], &mut index[..gather]);
            for (n, &i) in indices.iter().enumerate() {
                let wrapped = if i < 0 { i.checked_add_unsigned(extent as u64) } else { Some(i) };
                let Some(row) = wrapped.and_then(|i| usize::try_from(i).ok()).filter(|&r| r < extent) else {
                    continue;
                };
                index[gather] = row;
                for j in 0..inner {
                    split(j, inner_dims, &mut index[gather + 1..]);
                    y[(o * indices.len() + n) * inner + j] = table.get(&index, self.block_size);
                }
            }
        }
        Ok(vec![Tensor::from_f64(*dtype, shape.clone(), &y)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        let get = |i: usize| inputs.get(i).copied().flatten();
        if [0, 2, 3].into_iter().filter_map(get).any(|t| t.trace != Trace::Absent) {
            return Err("its table depends on the tokens".into());
        }
        let (Some(data), Some(indices)) = (get(0), get(1)) else { return Err("it lacks an input".into()) };
        let gather = super::util::wrap_axis(self.gather_axis, data.shape.len());
        match (indices.trace, gather) {
            (Trace::Absent, _) => Ok(vec![Trace::Absent]),
            (Trace::Tokens(a), Some(g)) => Ok(vec![Trace::Tokens(TokenAxis { axis: a.axis + g, ..a })]),
            (_, None) => Err("its gather axis is out of range".into()),
        }
    }
}

/// The index of row-major element `i` of `dims`.
fn split(mut i: usize, dims: &[usize], out: &mut [usize]) {
    for (o, &d) in out.iter_mut().zip(dims).rev() {
        (*o, i) = (i % d, i / d);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Attr;
    use crate::ops::Op;
    use bytes::Bytes;

    fn op(attrs: &[(&str, i64)]) -> Op {
        let mut a = Attrs::default();
        for (n, v) in attrs {
            a.set(*n, Attr::Int(*v));
        }
        Op::parse("com.microsoft", "GatherBlockQuantized", 1, &a).unwrap()
    }

    fn ids(values: &[i64]) -> Tensor {
        Tensor::from_slice([values.len()], values).unwrap()
    }

    fn run(op: &Op, inputs: &[&Tensor]) -> Vec<f32> {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(|t| Some(*t)).collect();
        op.eval(&inputs, 1).unwrap()[0].to_f32().unwrap()
    }

    /// Rows wrap from the back, rows out of range are zero, zero points lie along the blocks of a row; and the view
    /// for backends holds the same numbers.
    #[test]
    fn rows_of_a_byte_table() {
        for bits in Bits::ALL {
            let codes: Vec<u8> = (0..3 * 40u8).map(|i| i.wrapping_mul(7) & bits.max_code()).collect();
            let data: Vec<u8> = codes.chunks(40).flat_map(|r| bits.pack(r)).collect();
            let data = Tensor::from_slice([3, 40 / bits.per_byte()], &data).unwrap();
            let scales: Vec<f32> = (0..9u8).map(|i| f32::from(i) - 4.0).collect();
            let zeros: Vec<u8> = (0..9u8).map(|i| i & bits.max_code()).collect();
            let packed: Vec<u8> = zeros.chunks(3).flat_map(|r| bits.pack(r)).collect();
            let zp = Tensor::from_slice([3, bits.packed_len(3)], &packed).unwrap();
            let scales_t = Tensor::from_slice([3, 3], &scales).unwrap();
            let o = op(&[("bits", bits.get() as i64), ("block_size", 16)]);
            let at = ids(&[1, -1, 3, i64::MIN]);
            let got = run(&o, &[&data, &at, &scales_t, &zp]);
            for (r, row) in [1usize, 2].into_iter().enumerate() {
                for c in 0..40 {
                    let b = row * 3 + c / 16;
                    let want = (f32::from(codes[row * 40 + c]) - f32::from(zeros[b])) * scales[b];
                    assert_eq!(got[r * 40 + c], want);
                }
            }
            assert!(got[80..].iter().all(|&v| v == 0.0));
            let Op::GatherBlockQuantized(g) = &o else { panic!() };
            let m = g.matrix(&[Some(&data), None, Some(&scales_t), Some(&zp)]).unwrap();
            let mut row = vec![0.0; 40];
            m.dequantize_row(1, &mut row);
            assert_eq!(row, got[..40]);
        }
    }

    /// 4-bit element types: signed or not, no default zero point, any axes; their nibbles run on across rows.
    #[test]
    fn nibble_types() {
        let data = |t: DType| Tensor::from_bytes(t, [2, 3], Bytes::from(vec![0x21, 0x83, 0xF9])).unwrap();
        let scales = Tensor::from_slice([1, 3], &[1f32, 10.0, 100.0]).unwrap();
        let o = op(&[("block_size", 16), ("gather_axis", 1), ("quantize_axis", 0)]);
        let got = |t| run(&o, &[&data(t), &ids(&[2, 0]), &scales]);
        assert_eq!(got(DType::U4), [300.0, 1.0, 1500.0, 8.0]);
        assert_eq!(got(DType::I4), [300.0, 1.0, -100.0, -8.0]);
    }

    #[test]
    fn refused_by_name() {
        let data = Tensor::from_slice([2, 16], &[0u8; 32]).unwrap();
        let scales = Tensor::from_slice([2, 2], &[1f32; 4]).unwrap();
        let error = |attrs: &[(&str, i64)], scales: &Tensor| {
            op(attrs).eval(&[Some(&data), Some(&ids(&[0])), Some(scales)], 1).unwrap_err().to_string()
        };
        assert!(error(&[("block_size", 16), ("gather_axis", 1)], &scales).contains("gather_axis"));
        assert!(error(&[("block_size", 16), ("quantize_axis", 2)], &scales).contains("quantize_axis"));
        let one = Tensor::from_slice([2, 1], &[1f32; 2]).unwrap();
        assert!(error(&[("block_size", 16)], &one).contains("scales"));
        let bits = Attrs::from([("bits", Attr::Int(3))]);
        let e = Op::parse("com.microsoft", "GatherBlockQuantized", 1, &bits).unwrap_err();
        assert!(e.to_string().contains("bits"));
    }
}
