//! Constants as views: what folding a Reshape, Transpose, Slice or Concat of an initializer leaves behind.
//!
//! A constant is one or more strided parts laid side by side along one axis. Initializers are one contiguous
//! part over the mapped file. Backends that understand rows and orientations read the parts where they lie;
//! everybody else calls [`Constant::to_tensor`], which copies only when it must.

use bytes::Bytes;
use doyen_tensor::{DType, Shape, Tensor, TensorError};

/// A strided window over bytes. Offsets and strides count elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The bytes of the tensor the window looks into.
    pub bytes: Bytes,
    /// Element at which the window starts.
    pub offset: usize,
    /// Extents of the window.
    pub shape: Shape,
    /// Elements from one index to the next, per axis.
    pub strides: Vec<usize>,
}

impl Part {
    fn is_contiguous(&self) -> bool {
        let expected = self.shape.strides();
        self.shape.iter().zip(self.strides.iter().zip(&expected)).all(|(&d, (&s, &e))| d <= 1 || s == e)
    }
}

/// A constant value: parts side by side along `axis`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constant {
    dtype: DType,
    shape: Shape,
    axis: usize,
    parts: Vec<Part>,
}

impl From<Tensor> for Constant {
    fn from(t: Tensor) -> Self {
        let part = Part {
            bytes: t.shared_bytes().clone(),
            offset: 0,
            shape: t.shape().clone(),
            strides: t.shape().strides(),
        };
        Self { dtype: t.dtype(), shape: t.shape().clone(), axis: 0, parts: vec![part] }
    }
}

impl Constant {
    /// A constant from parts side by side along `axis`.
    ///
    /// # Errors
    /// When there is no part, the parts disagree off the axis, or a part reaches past its bytes.
    pub fn from_parts(dtype: DType, axis: usize, parts: Vec<Part>) -> Result<Self, TensorError> {
        let bad = |why: &str| TensorError::Format(format!("constant view: {why}"));
        let first = parts.first().ok_or_else(|| bad("no parts"))?;
        let mut shape = first.shape.to_vec();
        if parts.len() > 1 {
            if axis >= shape.len() {
                return Err(bad("axis beyond the rank"));
            }
            shape[axis] = 0;
            for p in &parts {
                let agrees = p.shape.len() == shape.len()
                    && p.shape.iter().zip(&shape).enumerate().all(|(i, (a, b))| i == axis || a == b);
                if !agrees {
                    return Err(bad("parts of different extents"));
                }
                shape[axis] =
                    shape[axis].checked_add(p.shape[axis]).ok_or_else(|| bad("extent overflows"))?;
            }
        }
        let shape = Shape::from(shape);
        shape.bytes(dtype)?;
        for p in &parts {
            if p.strides.len() != p.shape.len() {
                return Err(bad("strides of another rank"));
            }
            if p.shape.numel()? == 0 {
                continue;
            }
            let last = p
                .shape
                .iter()
                .zip(&p.strides)
                .try_fold(p.offset, |o, (&d, &s)| o.checked_add((d - 1).checked_mul(s)?))
                .and_then(|o| dtype.bytes_for(o.checked_add(1)?))
                .ok_or_else(|| bad("window overflows"))?;
            if last > p.bytes.len() {
                return Err(bad("window reaches past its bytes"));
            }
        }
        Ok(Self { dtype, shape, axis, parts })
    }

    /// Element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The axis along which the parts lie side by side.
    pub const fn axis(&self) -> usize {
        self.axis
    }

    /// The parts in order.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The constant as a tensor sharing its bytes, when it is one contiguous run of whole bytes.
    pub fn as_tensor(&self) -> Option<Tensor> {
        let [part] = self.parts.as_slice() else { return None };
        let start_bits = part.offset * self.dtype.bits();
        if !part.is_contiguous() || !start_bits.is_multiple_of(8) {
            return None;
        }
        let start = start_bits / 8;
        let len = self.shape.bytes(self.dtype).ok()?;
        let bytes = part.bytes.get(start..start + len).map(|s| part.bytes.slice_ref(s))?;
        Tensor::from_bytes(self.dtype, self.shape.clone(), bytes).ok()
    }

    /// The constant as a contiguous tensor; copies unless [`Constant::as_tensor`] can share.
    ///
    /// # Errors
    /// When a sub-byte type would have to be gathered element by element.
    pub fn to_tensor(&self) -> Result<Tensor, TensorError> {
        if let Some(t) = self.as_tensor() {
            return Ok(t);
        }
        if self.dtype.bits() < 8 {
            return Err(TensorError::Format(format!(
                "cannot gather {} elements of a strided view",
                self.dtype
            )));
        }
        let size = self.dtype.bits() / 8;
        let mut out = vec![0u8; self.shape.bytes(self.dtype)?];
        let out_strides = self.shape.strides();
        let mut base = 0;
        for part in &self.parts {
            copy_part(part, size, &out_strides, base, &mut out);
            if let Some(s) = out_strides.get(self.axis) {
                base += part.shape[self.axis] * s;
            }
        }
        Tensor::from_bytes(self.dtype, self.shape.clone(), Bytes::from(out))
    }
}

fn copy_part(part: &Part, size: usize, out_strides: &[usize], base: usize, out: &mut [u8]) {
    if part.shape.contains(&0) {
        return;
    }
    let rank = part.shape.len();
    let mut index = vec![0usize; rank];
    let (mut src, mut dst) = (part.offset, base);
    loop {
        out[dst * size..(dst + 1) * size].copy_from_slice(&part.bytes[src * size..(src + 1) * size]);
        let mut axis = rank;
        loop {
            if axis == 0 {
                return;
            }
            axis -= 1;
            index[axis] += 1;
            src += part.strides[axis];
            dst += out_strides[axis];
            if index[axis] < part.shape[axis] {
                break;
            }
            src -= part.strides[axis] * index[axis];
            dst -= out_strides[axis] * index[axis];
            index[axis] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposed_concat_materialises() {
        let a = Tensor::from_slice([2, 3], &[0i32, 1, 2, 3, 4, 5]).unwrap();
        let t =
            Part { bytes: a.shared_bytes().clone(), offset: 0, shape: [3, 2].into(), strides: vec![1, 3] };
        let c = Constant::from_parts(DType::I32, 1, vec![t.clone(), t]).unwrap();
        assert!(c.as_tensor().is_none());
        let m = c.to_tensor().unwrap();
        assert_eq!(m.shape().dims(), [3, 4]);
        assert_eq!(m.to_vec::<i32>().unwrap(), [0, 3, 0, 3, 1, 4, 1, 4, 2, 5, 2, 5]);
    }

    #[test]
    fn windows_past_the_bytes_are_refused() {
        let a = Tensor::from_slice([4], &[0u8; 4]).unwrap();
        let p = Part { bytes: a.shared_bytes().clone(), offset: 2, shape: [3].into(), strides: vec![1] };
        assert!(Constant::from_parts(DType::U8, 0, vec![p]).is_err());
    }
}
