//! MatMul and Gemm, with f64 (or wrapping integer) accumulation in the order of K.

use super::strided::{Offsets, broadcast_dims, broadcast_shape, take};
use super::util::{
    MATMUL_TYPES, at_most, broadcast_facts, buffer, check_type, common_type, fact, optional, output_of,
    required,
};
use super::value::{from_floats, from_ints, ints};
use super::{OpDef, OpError, TokenAxis, Trace, Traced};
use crate::ir::{Attrs, Dim, Fact};
use doyen_tensor::{Shape, Tensor};

/// `[m, k] x [k, n]`, adding to `acc`. Rows of `b` are widened one at a time: a weight may be large.
fn product<T: Copy>(
    [m, k, n]: [usize; 3],
    a: &[T],
    b_row: impl Fn(usize) -> Result<Vec<T>, OpError>,
    acc: &mut [T],
    mul_add: impl Fn(T, T, T) -> T,
) -> Result<(), OpError> {
    for p in 0..k {
        let row = b_row(p)?;
        for i in 0..m {
            let x = a[i * k + p];
            for (c, &w) in acc[i * n..(i + 1) * n].iter_mut().zip(&row) {
                *c = mul_add(*c, x, w);
            }
        }
    }
    Ok(())
}

/// A zeroed accumulator for `shape`, refused where it cannot be allocated.
fn accumulator<T: Copy + Default>(shape: &[usize]) -> Result<Vec<T>, OpError> {
    buffer(shape, size_of::<T>())?;
    Ok(vec![T::default(); shape.iter().product()])
}

/// Batched product of `a` `[.., m, k]` and `b` `[.., k, n]`, each at least a matrix; `batch` is what their leading
/// axes broadcast to.
fn batched(a: &Tensor, b: &Tensor, batch: &Shape) -> Result<Products, OpError> {
    let (a_lead, [m, k]) = matrix(a.shape());
    let (b_lead, [_, n]) = matrix(b.shape());
    let rows = b.reshaped([b_lead.iter().product::<usize>() * k, n])?;
    let mut shape = batch.to_vec();
    shape.extend([m, n]);
    let pairs = || Offsets::broadcast(a_lead, batch).zip(Offsets::broadcast(b_lead, batch)).enumerate();
    if a.dtype().is_float() {
        let (wide, mut acc) = (a.to_f64()?, accumulator::<f64>(&shape)?);
        for (c, (i, j)) in pairs() {
            let row = |p: usize| Ok(rows.outer_slice(j * k + p, j * k + p + 1)?.to_f64()?);
            let (a, acc) = (&wide[i * m * k..(i + 1) * m * k], &mut acc[c * m * n..(c + 1) * m * n]);
            product([m, k, n], a, row, acc, |c, x, w| c + x * w)?;
        }
        Ok(Products::Floats(acc))
    } else {
        let (wide, mut acc) = (ints(a)?, accumulator::<i128>(&shape)?);
        for (c, (i, j)) in pairs() {
            let row = |p: usize| ints(&rows.outer_slice(j * k + p, j * k + p + 1)?);
            let (a, acc) = (&wide[i * m * k..(i + 1) * m * k], &mut acc[c * m * n..(c + 1) * m * n]);
            product([m, k, n], a, row, acc, |c, x, w| c.wrapping_add(x.wrapping_mul(w)))?;
        }
        Ok(Products::Ints(acc))
    }
}

/// Products before they are rounded to the output's type.
enum Products {
    Floats(Vec<f64>),
    Ints(Vec<i128>),
}

/// Leading axes and the last two.
fn matrix(shape: &Shape) -> (&[usize], [usize; 2]) {
    let (lead, last) = shape.split_at(shape.len() - 2);
    (lead, [last[0], last[1]])
}

/// numpy's `matmul`: matrices in the last two axes, the others broadcast; a vector is a row on the left and a column on
/// the right.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatMul;

impl MatMul {
    fn shape(a: &Fact, b: &Fact) -> Result<Option<Vec<Dim>>, OpError> {
        for (name, f) in [("A", a), ("B", b)] {
            if f.rank() == Some(0) {
                return Err(OpError::input(name, "one axis or more", "a scalar"));
            }
        }
        let (Some(sa), Some(sb)) = (&a.shape, &b.shape) else { return Ok(None) };
        let (inner_a, inner_b) = (&sa[sa.len() - 1], &sb[sb.len().saturating_sub(2)]);
        if !inner_a.compatible(inner_b) {
            let expected = format!("{inner_a} rows, the columns of A {}", a.shape_text());
            return Err(OpError::input("B", expected, b.shape_text()));
        }
        let lead = |s: &[Dim]| s[..s.len().saturating_sub(2)].to_vec();
        let mut out = broadcast_dims(&[&lead(sa), &lead(sb)]).ok_or_else(|| {
            let expected = format!("leading axes that broadcast with A {}", a.shape_text());
            OpError::input("B", expected, b.shape_text())
        })?;
        if sa.len() > 1 {
            out.push(sa[sa.len() - 2].clone());
        }
        if sb.len() > 1 {
            out.push(sb[sb.len() - 1].clone());
        }
        Ok(Some(out))
    }
}

impl OpDef for MatMul {
    fn parse(_: &str, _: i64, _: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self)
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 2)?;
        let (a, b) = (required(inputs, 0, "A")?, required(inputs, 1, "B")?);
        check_type("A", a, MATMUL_TYPES)?;
        check_type("B", b, MATMUL_TYPES)?;
        Ok(vec![fact(common_type([("A", a), ("B", b)])?, Self::shape(a, b)?)])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let (a, b) = (required(inputs, 0, "A")?, required(inputs, 1, "B")?);
        let a = if a.shape().len() == 1 { a.reshaped([1, a.numel()])? } else { a.clone() };
        let b = if b.shape().len() == 1 { b.reshaped([b.numel(), 1])? } else { b.clone() };
        let batch = broadcast_shape(&[matrix(a.shape()).0, matrix(b.shape()).0])
            .ok_or_else(|| OpError::other("the leading axes do not broadcast"))?;
        Ok(vec![match batched(&a, &b, &batch)? {
            Products::Floats(v) => from_floats(dtype, shape, &v)?,
            Products::Ints(v) => from_ints(dtype, shape, &v)?,
        }])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        let out = outputs.first().ok_or("it has no output")?;
        let at = |i: usize| inputs.get(i).copied().flatten().ok_or("an input is missing");
        let (a, b) = (at(0)?, at(1)?);
        // A vector on the right takes the last axis away.
        let rank = out.len() + usize::from(a.shape.len() == 1) + usize::from(b.shape.len() == 1);
        let place = |t: &Traced<'_>, contracted: usize| match t.trace {
            Trace::Absent => Ok(None),
            Trace::Tokens(x) if x.axis == contracted => {
                Err(format!("it sums over axis {}, which counts tokens", x.axis))
            }
            Trace::Tokens(x) => Ok(Some(TokenAxis { axis: x.axis + rank - t.shape.len(), inner: x.inner })),
        };
        let (ra, rb) = (a.shape.len(), b.shape.len());
        let (ta, tb) = (place(&a, ra - 1)?, place(&b, rb.saturating_sub(2))?);
        // The extent that an operand without tokens has where the other one has them.
        let extent = |shape: &Shape, axis: usize| {
            (axis + shape.len()).checked_sub(rank).and_then(|i| shape.get(i)).copied().unwrap_or(1)
        };
        let batch = |x: TokenAxis| x.axis + 2 < rank;
        let found = match (ta, tb) {
            (None, None) => return Ok(vec![Trace::Absent]),
            (Some(x), Some(y))
                if x == y && batch(x) && extent(a.shape, x.axis) == extent(b.shape, x.axis) =>
            {
                x
            }
            (Some(_), Some(_)) => return Err("it multiplies tokens with tokens".into()),
            (Some(x), None) if !batch(x) || extent(b.shape, x.axis) == 1 => x,
            (None, Some(y)) if !batch(y) || extent(a.shape, y.axis) == 1 => y,
            _ => return Err("an operand without tokens varies along the token axis".into()),
        };
        // A column axis moves up when the row axis of a vector on the left is gone.
        let axis = if ra == 1 && found.axis == rank - 1 { found.axis - 1 } else { found.axis };
        Ok(vec![Trace::Tokens(TokenAxis { axis, inner: found.inner })])
    }
}

/// `alpha A' B' + beta C`, each of A and B possibly transposed, C broadcast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gemm {
    /// Scales the product.
    pub alpha: f32,
    /// Scales C.
    pub beta: f32,
    /// A is `[k, m]`.
    pub trans_a: bool,
    /// B is `[n, k]`.
    pub trans_b: bool,
}

impl Gemm {
    fn shape(self, a: &Fact, b: &Fact) -> Result<Option<[Dim; 2]>, OpError> {
        for (name, f) in [("A", a), ("B", b)] {
            if f.rank().is_some_and(|r| r != 2) {
                return Err(OpError::input(name, "a matrix", f.shape_text()));
            }
        }
        let side = |f: &Fact, transposed: bool| {
            let (r, c) = (f.dim(0), f.dim(1));
            if transposed { (c, r) } else { (r, c) }
        };
        let ((m, ka), (kb, n)) = (side(a, self.trans_a), side(b, self.trans_b));
        if !ka.compatible(&kb) {
            let expected = format!("an inner extent of {ka}, that of A {}", a.shape_text());
            return Err(OpError::input("B", expected, b.shape_text()));
        }
        Ok((a.shape.is_some() && b.shape.is_some()).then_some([m, n]))
    }
}

impl OpDef for Gemm {
    fn parse(_: &str, _: i64, attrs: &mut Attrs) -> Result<Self, OpError> {
        Ok(Self {
            alpha: attrs.float("alpha")?.unwrap_or(1.0),
            beta: attrs.float("beta")?.unwrap_or(1.0),
            trans_a: attrs.flag("transA", false)?,
            trans_b: attrs.flag("transB", false)?,
        })
    }

    fn infer(&self, inputs: &[Option<&Fact>]) -> Result<Vec<Fact>, OpError> {
        at_most(inputs, 3)?;
        let (a, b) = (required(inputs, 0, "A")?, required(inputs, 1, "B")?);
        let named: Vec<(&str, &Fact)> = [("A", Some(a)), ("B", Some(b)), ("C", optional(inputs, 2))]
            .into_iter()
            .filter_map(|(n, f)| Some((n, f?)))
            .collect();
        for (name, f) in &named {
            check_type(name, f, MATMUL_TYPES)?;
        }
        let dtype = common_type(named.iter().copied())?;
        let shape = self.shape(a, b)?;
        if let (Some(shape), Some(c)) = (&shape, optional(inputs, 2)) {
            let product = fact(dtype, Some(shape.to_vec()));
            let both = broadcast_facts(&[("A", &product), ("C", c)])?;
            let grows =
                |both: Vec<Dim>| both.len() > 2 || both.iter().zip(shape).any(|(o, d)| !o.compatible(d));
            if both.is_some_and(grows) {
                let expected = format!("a shape that broadcasts to {}", product.shape_text());
                return Err(OpError::input("C", expected, c.shape_text()));
            }
        }
        Ok(vec![fact(dtype, Some(shape.map_or(vec![Dim::Unknown; 2], Vec::from)))])
    }

    fn eval(&self, inputs: &[Option<&Tensor>], _: usize) -> Result<Vec<Tensor>, OpError> {
        let (dtype, shape) = output_of(self, inputs)?;
        let a = oriented(required(inputs, 0, "A")?, self.trans_a)?;
        let b = oriented(required(inputs, 1, "B")?, self.trans_b)?;
        let c = optional(inputs, 2);
        let (alpha, beta) = (f64::from(self.alpha), f64::from(self.beta));
        Ok(vec![match batched(&a, &b, &Shape::default())? {
            Products::Floats(mut v) => {
                for x in &mut v {
                    *x *= alpha;
                }
                if let Some(c) = c {
                    let wide = c.to_f64()?;
                    for (x, o) in v.iter_mut().zip(Offsets::broadcast(c.shape(), &shape)) {
                        *x += beta * wide[o];
                    }
                }
                from_floats(dtype, shape, &v)?
            }
            Products::Ints(mut v) => {
                for x in &mut v {
                    *x = scaled(*x, self.alpha);
                }
                if let Some(c) = c {
                    let wide = ints(c)?;
                    for (x, o) in v.iter_mut().zip(Offsets::broadcast(c.shape(), &shape)) {
                        *x = x.wrapping_add(scaled(wide[o], self.beta));
                    }
                }
                from_ints(dtype, shape, &v)?
            }
        }])
    }

    fn trace(&self, inputs: &[Option<Traced<'_>>], outputs: &[Shape]) -> Result<Vec<Trace>, String> {
        let turned = |i: usize, transposed: bool| {
            let t = inputs.get(i).copied().flatten().ok_or("an input is missing")?;
            let mut dims = t.shape.to_vec();
            let mut trace = t.trace;
            if transposed {
                dims.reverse();
                if let Trace::Tokens(x) = &mut trace {
                    x.axis = 1 - x.axis;
                }
            }
            Ok::<_, String>((trace, Shape::from(dims)))
        };
        let (a, b) = (turned(0, self.trans_a)?, turned(1, self.trans_b)?);
        let both = [&a, &b].map(|(trace, shape)| Some(Traced { trace: *trace, shape, constant: None }));
        let product = MatMul.trace(&both, outputs)?;
        let out = outputs.first().ok_or("it has no output")?;
        let of_product = product.first().map(|&trace| Traced { trace, shape: out, constant: None });
        let c = inputs.get(2).copied().flatten();
        Ok(vec![super::token_axis::pointwise(&[of_product, c], out)?])
    }
}

/// An integer times an attribute; exact for the default of 1.
fn scaled(x: i128, by: f32) -> i128 {
    if by == 1.0 { x } else { (x as f64 * f64::from(by)) as i128 }
}

fn oriented(t: &Tensor, transposed: bool) -> Result<Tensor, OpError> {
    if !transposed {
        return Ok(t.clone());
    }
    let (rows, columns) = (t.shape()[0], t.shape()[1]);
    let shape = Shape::from([columns, rows]);
    let walk = Offsets::new(&shape, vec![1, columns as isize], 0);
    take(t, shape, walk)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iota(shape: &[usize]) -> Tensor {
        let n: usize = shape.iter().product();
        Tensor::from_slice(shape, &(0..n).map(|i| i as f32).collect::<Vec<_>>()).unwrap()
    }
    fn run(a: &[usize], b: &[usize]) -> Result<(Vec<usize>, Vec<f32>), String> {
        let y = MatMul.eval(&[Some(&iota(a)), Some(&iota(b))], 1).map_err(|e| e.to_string())?;
        Ok((y[0].shape().to_vec(), y[0].to_f32().unwrap()))
    }

    #[test]
    fn ranks_follow_numpy() {
        assert_eq!(run(&[2, 2], &[2, 2]).unwrap(), (vec![2, 2], vec![2.0, 3.0, 6.0, 11.0]));
        assert_eq!(run(&[3], &[3]).unwrap(), (vec![], vec![5.0]));
        assert_eq!(run(&[2], &[2, 3]).unwrap(), (vec![3], vec![3.0, 4.0, 5.0]));
        assert_eq!(run(&[2, 1, 2], &[2]).unwrap(), (vec![2, 1], vec![1.0, 3.0]));
        assert_eq!(run(&[2, 1, 1, 2], &[3, 2, 1]).unwrap().0, [2, 3, 1, 1]);
        assert_eq!(run(&[2, 0], &[0, 2]).unwrap(), (vec![2, 2], vec![0.0; 4]));
        assert_eq!(run(&[0, 2], &[2, 2]).unwrap().0, [0, 2]);
        assert_eq!(
            run(&[2, 3], &[2, 3]).unwrap_err(),
            "input B: expected 3 rows, the columns of A [2,3], found [2,3]"
        );
        assert!(run(&[2, 1, 2], &[3, 2, 1]).is_err());
        assert!(run(&[], &[1]).is_err());
    }

    #[test]
    fn integers_wrap() {
        let a = Tensor::from_slice([1, 2], &[u32::MAX, 1]).unwrap();
        let b = Tensor::from_slice([2, 1], &[2u32, 3]).unwrap();
        assert_eq!(MatMul.eval(&[Some(&a), Some(&b)], 1).unwrap()[0].to_vec::<u32>().unwrap(), [1]);
    }

    #[test]
    fn gemm_transposes_and_scales() {
        let op = Gemm { alpha: 0.5, beta: 2.0, trans_a: true, trans_b: true };
        let (a, b, c) = (iota(&[2, 1]), iota(&[3, 2]), iota(&[3]));
        let y = op.eval(&[Some(&a), Some(&b), Some(&c)], 1).unwrap();
        assert_eq!(y[0].to_f32().unwrap(), [0.5, 3.5, 6.5]);
        assert!(op.eval(&[Some(&a), Some(&b), Some(&iota(&[2, 3]))], 1).is_err());
        assert!(op.eval(&[Some(&a), Some(&iota(&[3, 1]))], 1).is_err());
    }

    #[test]
    fn token_axes() {
        let at = |axis, inner| Trace::Tokens(TokenAxis { axis, inner });
        let rule = |a: &[usize], ta: Option<usize>, b: &[usize], tb: Option<usize>, out: &[usize]| {
            let (a, b, out) = (Shape::from(a), Shape::from(b), Shape::from(out));
            let t = |axis: Option<usize>| axis.map_or(Trace::Absent, |axis| at(axis, 1));
            let ins = [
                Some(Traced { trace: t(ta), shape: &a, constant: None }),
                Some(Traced { trace: t(tb), shape: &b, constant: None }),
            ];
            MatMul.trace(&ins, &[out]).map(|v| v[0])
        };
        assert_eq!(rule(&[1, 5, 8], Some(1), &[8, 4], None, &[1, 5, 4]).unwrap(), at(1, 1));
        assert_eq!(rule(&[5, 1, 8], Some(0), &[5, 8, 4], Some(0), &[5, 1, 4]).unwrap(), at(0, 1));
        assert_eq!(rule(&[5, 1, 8], Some(0), &[1, 8, 4], None, &[5, 1, 4]).unwrap(), at(0, 1));
        assert_eq!(rule(&[4, 8], None, &[8, 5], Some(1), &[4, 5]).unwrap(), at(1, 1));
        assert_eq!(rule(&[8], None, &[8, 5], Some(1), &[5]).unwrap(), at(0, 1));
        assert_eq!(rule(&[5, 8], Some(0), &[8], None, &[5]).unwrap(), at(0, 1));
        assert!(rule(&[5, 8], Some(0), &[8, 5], Some(1), &[5, 5]).is_err());
        assert!(rule(&[5, 1, 8], Some(0), &[5, 8, 4], None, &[5, 1, 4]).is_err());
        assert!(rule(&[4, 5], Some(1), &[5, 4], Some(0), &[4, 4]).is_err());
    }
}
