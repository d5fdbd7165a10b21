//! Transpose and Trilu.

use super::strided::{Offsets, cells, from_cells, strides, take};
use super::util::{at_most, check_type, constant_int, fact, optional, output_of, required};
use super::{OpDef, OpError, TokenAxis, Trace, Traced, token_axis};
use crate::ir::{Attrs, Fact};
use doyen_tensor::{DType, Shape, Tensor};

/// Axis `i` of the output is axis `perm[i]` of the input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transpose {
    /// The permutation; without it the axes are reversed.
    pub perm: Option<Vec<usize>>,
}

impl Transpose {
    /// The permutation for a tensor of this rank.
    ///
    /// # Errors
    /// When the permutation is of another rank.
    pub fn permutation(&self, rank: usize) -> Result<Vec<usize>, OpError> {
        match &self.perm {
            None => Ok((0..rank).rev().collect()),
            Some(p) if p.len() == rank => Ok(p.clone()),
            Some(p) => Err(OpError::attribute("perm", format!("{rank} axes, the rank of data"), p.len())),
        }
    }
}

impl OpDef for Transpose {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        let Some(raw) = attrs.ints("perm")? else { return Ok(Self { perm: None }) };
        let refuse = || OpError::attribute("perm", "a permutation of the axes", format!("{raw:?}"));
        let perm: Vec<usize> =
            raw.iter().map(|&p| usize::try_from(p)).collect::<Result<_, _>>().map_err(|_| refuse())?;
        let mut seen = vec![false; perm.len()];
        for &p in &perm {
            match seen.get_mut(p) {
                Some(s) if !*s => *s = true,
                _ => return Err(refuse()),
            }
        }
        Ok(Self { perm: Some(perm) })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 1)?;
        let x = required(inputs, 0, "data")?;
        let shape = match &x.shape {
            None => None,
            Some(s) => Some(self.permutation(s.len())?.into_iter().map(|p| s[p].clone()).collect()),
        };
        Ok(vec![fact(x.dtype, shape)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (_, shape) = output_of(self, inputs)?;
        let x = required(inputs, 0, "data")?;
        let own = strides(x.shape());
        let permuted = self.permutation(own.len())?.into_iter().map(|p| own[p]).collect();
        let walk = Offsets::new(&shape, permuted, 0);
        Ok(vec![take(x, shape, walk)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], _: &[Shape]) -> Result<Vec<Trace>, String> {
        let Some(Some(Traced { trace: Trace::Tokens(a), shape, .. })) = inputs.first() else {
            return Ok(vec![Trace::Absent]);
        };
        let perm = self.permutation(shape.len()).map_err(|e| e.to_string())?;
        let axis = perm.iter().position(|&p| p == a.axis).ok_or("its token axis is not in perm")?;
        Ok(vec![Trace::Tokens(TokenAxis { axis, inner: a.inner })])
    }
}

/// Keeps the upper or lower triangle of the last two axes, zero elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trilu {
    /// Keeps `column - row >= k`; otherwise `column - row <= k`.
    pub upper: bool,
}

impl OpDef for Trilu {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self { upper: attrs.flag("upper", true)? })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let x = required(inputs, 0, "input")?;
        if x.rank().is_some_and(|r| r < 2) {
            return Err(OpError::input("input", "two axes or more", x.shape_text()));
        }
        if let Some(k) = optional(inputs, 1) {
            check_type("k", k, &[DType::I64])?;
            constant_int("k", k)?;
        }
        Ok(vec![fact(x.dtype, x.shape.clone())])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let x = required(inputs, 0, "input")?;
        let k = match optional(inputs, 1) {
            None => 0,
            Some(k) => i128::from(k.to_i64()?.first().copied().unwrap_or(0)),
        };
        let (bytes, size) = cells(x);
        let mut out = bytes.to_vec();
        let (rows, columns) = (shape[shape.len() - 2], shape[shape.len() - 1]);
        for (i, cell) in out.chunks_exact_mut(size).enumerate() {
            let off = (i % columns) as i128 - (i / columns % rows) as i128;
            if if self.upper { off < k } else { off > k } {
                cell.fill(0);
            }
        }
        Ok(vec![from_cells(dtype, shape, out)?])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        token_axis::none_of(inputs, &[(1, "k")])?;
        let rank = outputs.first().map_or(0, |s| s.len());
        Ok(vec![token_axis::off_axes(
            inputs.first(),
            &[rank.saturating_sub(2), rank.saturating_sub(1)],
            false,
        )?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::test_data::iota;

    #[test]
    fn permutes() {
        let op =
            Transpose::parse("Transpose", 13, &mut Attrs::from([("perm", vec![1, 0, 2].into())])).unwrap();
        let y = op.eval(&[Some(&iota(&[2, 3, 1]))], 1).unwrap().remove(0);
        assert_eq!(y.shape().dims(), [3, 2, 1]);
        assert_eq!(y.to_vec::<i32>().unwrap(), [0, 3, 1, 4, 2, 5]);
        assert!(op.eval(&[Some(&iota(&[2, 3]))], 1).is_err());
        for bad in [vec![0, 0], vec![0, 2], vec![-1, 0]] {
            assert!(Transpose::parse("Transpose", 13, &mut Attrs::from([("perm", bad.into())])).is_err());
        }
        let scalar = Transpose { perm: None }.eval(&[Some(&Tensor::scalar(3i32))], 1).unwrap();
        assert_eq!(scalar[0].to_vec::<i32>().unwrap(), [3]);
    }

    #[test]
    fn triangles() {
        let run = |upper, k: i64, shape: &[usize]| {
            let y = Trilu { upper }.eval(&[Some(&iota(shape)), Some(&Tensor::scalar(k))], 1).unwrap();
            y[0].to_vec::<i32>().unwrap()
        };
        assert_eq!(run(true, 1, &[2, 3]), [0, 1, 2, 0, 0, 5]);
        assert_eq!(run(false, 0, &[2, 3]), [0, 0, 0, 3, 4, 0]);
        assert_eq!(run(true, i64::MIN, &[1, 2]), [0, 1]);
        assert_eq!(run(true, i64::MAX, &[1, 2]), [0, 0]);
        assert!(run(true, 0, &[2, 0]).is_empty());
        assert!(Trilu { upper: true }.eval(&[Some(&iota(&[3]))], 1).is_err());
    }
}
