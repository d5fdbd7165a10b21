//! Contiguous, little-endian, reference-counted tensors.

use crate::dtype::{bf16_from_f64, f16_from_f64};
use crate::{DType, FloatType, FloatView, Shape, TensorError};
use bytes::Bytes;
use half::{bf16, f16};

/// A contiguous row-major tensor. The bytes may be a slice of a mapped file or of the binary; cloning and
/// reshaping never copy them. No alignment is promised: read through the typed accessors.
#[derive(Clone, PartialEq, Eq)]
pub struct Tensor {
    dtype: DType,
    shape: Shape,
    data: Bytes,
}

/// A Rust type that is the in-memory form of a [`DType`].
pub trait Element: Copy + 'static {
    /// The tensor type.
    const DTYPE: DType;
    /// Bytes of one element.
    const SIZE: usize;
    /// Reads one element from exactly `SIZE` little-endian bytes.
    fn read(bytes: &[u8]) -> Self;
    /// Appends the element's little-endian bytes.
    fn write(self, out: &mut Vec<u8>);
}

macro_rules! element {
    ($($ty:ty => $dtype:ident),* $(,)?) => {$(
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;
            const SIZE: usize = size_of::<$ty>();
            #[inline]
            fn read(bytes: &[u8]) -> Self {
                let mut b = [0u8; size_of::<$ty>()];
                b.copy_from_slice(bytes);
                <$ty>::from_le_bytes(b)
            }
            #[inline]
            fn write(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

element!(f32 => F32, f64 => F64, f16 => F16, bf16 => BF16, i8 => I8, i16 => I16, i32 => I32, i64 => I64,
         u8 => U8, u16 => U16, u32 => U32, u64 => U64);

impl Element for bool {
    const DTYPE: DType = DType::Bool;
    const SIZE: usize = 1;
    fn read(bytes: &[u8]) -> Self {
        bytes[0] != 0
    }
    fn write(self, out: &mut Vec<u8>) {
        out.push(u8::from(self));
    }
}

impl Tensor {
    /// A tensor over existing bytes.
    ///
    /// # Errors
    /// When the length is not what type and shape demand, or the shape overflows.
    pub fn from_bytes(dtype: DType, shape: impl Into<Shape>, data: Bytes) -> Result<Self, TensorError> {
        let shape = shape.into();
        let expected = shape.bytes(dtype)?;
        if data.len() != expected {
            return Err(TensorError::Length { dtype, shape, expected, found: data.len() });
        }
        Ok(Self { dtype, shape, data })
    }

    /// A tensor from typed values.
    ///
    /// # Errors
    /// When the number of values is not the shape's.
    pub fn from_slice<T: Element>(shape: impl Into<Shape>, values: &[T]) -> Result<Self, TensorError> {
        let mut out = Vec::with_capacity(values.len() * T::SIZE);
        for v in values {
            v.write(&mut out);
        }
        Self::from_bytes(T::DTYPE, shape, Bytes::from(out))
    }

    /// A rank-0 tensor.
    pub fn scalar<T: Element>(value: T) -> Self {
        let mut out = Vec::with_capacity(T::SIZE);
        value.write(&mut out);
        Self { dtype: T::DTYPE, shape: Shape::default(), data: Bytes::from(out) }
    }

    /// Float values stored as `dtype` (float32, float64, float16 or bfloat16), rounded to nearest.
    ///
    /// # Errors
    /// When `dtype` is not a float type or the number of values is not the shape's.
    pub fn from_f32(dtype: DType, shape: impl Into<Shape>, values: &[f32]) -> Result<Self, TensorError> {
        match dtype {
            DType::F32 => Self::from_slice(shape, values),
            DType::F64 => Self::from_slice(shape, &values.iter().map(|&v| f64::from(v)).collect::<Vec<_>>()),
            DType::F16 => {
                Self::from_slice(shape, &values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>())
            }
            DType::BF16 => {
                Self::from_slice(shape, &values.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>())
            }
            found => Err(TensorError::Type { expected: "float", found }),
        }
    }

    /// Float values stored as `dtype`, rounded once from f64.
    ///
    /// # Errors
    /// As [`Tensor::from_f32`].
    pub fn from_f64(dtype: DType, shape: impl Into<Shape>, values: &[f64]) -> Result<Self, TensorError> {
        match dtype {
            DType::F32 => Self::from_slice(shape, &values.iter().map(|&v| v as f32).collect::<Vec<_>>()),
            DType::F64 => Self::from_slice(shape, values),
            DType::F16 => {
                Self::from_slice(shape, &values.iter().map(|&v| f16_from_f64(v)).collect::<Vec<_>>())
            }
            DType::BF16 => {
                Self::from_slice(shape, &values.iter().map(|&v| bf16_from_f64(v)).collect::<Vec<_>>())
            }
            found => Err(TensorError::Type { expected: "float", found }),
        }
    }

    /// Element type.
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Extents.
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.data
    }

    /// The bytes, shared.
    pub const fn shared_bytes(&self) -> &Bytes {
        &self.data
    }

    /// The same bytes under another shape with the same element count.
    ///
    /// # Errors
    /// When the element counts differ.
    pub fn reshaped(&self, shape: impl Into<Shape>) -> Result<Self, TensorError> {
        Self::from_bytes(self.dtype, shape, self.data.clone())
    }

    /// Rows `start..end` of the outermost axis, sharing the bytes.
    ///
    /// # Errors
    /// When the tensor is a scalar, the range is out of bounds, or a row is not a whole number of bytes.
    pub fn outer_slice(&self, start: usize, end: usize) -> Result<Self, TensorError> {
        let bad = || TensorError::Format(format!("rows {start}..{end} of a tensor of shape {}", self.shape));
        let (&outer, inner) = self.shape.split_first().ok_or_else(bad)?;
        let row_bits = inner.iter().product::<usize>() * self.dtype.bits();
        if start > end || end > outer || !row_bits.is_multiple_of(8) {
            return Err(bad());
        }
        let mut shape = self.shape.to_vec();
        shape[0] = end - start;
        Self::from_bytes(self.dtype, shape, self.data.slice(start * row_bits / 8..end * row_bits / 8))
    }

    /// The elements of exactly type `T`.
    ///
    /// # Errors
    /// When the tensor holds another type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>, TensorError> {
        if self.dtype != T::DTYPE {
            return Err(TensorError::Type { expected: type_name(T::DTYPE), found: self.dtype });
        }
        Ok(self.data.chunks_exact(T::SIZE).map(T::read).collect())
    }

    /// Float elements (float32, float64, float16, bfloat16) widened or rounded to f32.
    ///
    /// # Errors
    /// When the tensor is not of a float type.
    pub fn to_f32(&self) -> Result<Vec<f32>, TensorError> {
        Ok(match self.dtype {
            DType::F32 => self.to_vec()?,
            DType::F64 => self.to_vec::<f64>()?.into_iter().map(|v| v as f32).collect(),
            DType::F16 => self.to_vec::<f16>()?.into_iter().map(f16::to_f32).collect(),
            DType::BF16 => self.to_vec::<bf16>()?.into_iter().map(bf16::to_f32).collect(),
            found => return Err(TensorError::Type { expected: "float", found }),
        })
    }

    /// Float elements widened to f64.
    ///
    /// # Errors
    /// When the tensor is not of a float type.
    pub fn to_f64(&self) -> Result<Vec<f64>, TensorError> {
        Ok(match self.dtype {
            DType::F64 => self.to_vec()?,
            _ => self.to_f32()?.into_iter().map(f64::from).collect(),
        })
    }

    /// Integer or boolean elements widened to i64 (uint64 values above `i64::MAX` are refused).
    ///
    /// # Errors
    /// When the tensor is not of an integer type or a value does not fit.
    pub fn to_i64(&self) -> Result<Vec<i64>, TensorError> {
        fn widen<T: Element + Into<i64>>(t: &Tensor) -> Result<Vec<i64>, TensorError> {
            Ok(t.to_vec::<T>()?.into_iter().map(Into::into).collect())
        }
        match self.dtype {
            DType::I64 => self.to_vec(),
            DType::I32 => widen::<i32>(self),
            DType::I16 => widen::<i16>(self),
            DType::I8 => widen::<i8>(self),
            DType::U8 => widen::<u8>(self),
            DType::U16 => widen::<u16>(self),
            DType::U32 => widen::<u32>(self),
            DType::U64 => self
                .to_vec::<u64>()?
                .into_iter()
                .map(|v| i64::try_from(v).map_err(|_| TensorError::Format(format!("{v} does not fit int64"))))
                .collect(),
            DType::Bool => Ok(self.data.iter().map(|&b| i64::from(b != 0)).collect()),
            found => Err(TensorError::Type { expected: "integer", found }),
        }
    }

    /// The elements as a float view, without copying.
    ///
    /// # Errors
    /// When the type is not float32, float16 or bfloat16.
    pub fn float_view(&self) -> Result<FloatView<'_>, TensorError> {
        let ty = FloatType::from_dtype(self.dtype)
            .ok_or(TensorError::Type { expected: "float32, float16 or bfloat16", found: self.dtype })?;
        FloatView::new(ty, &self.data)
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor({}{})", self.dtype, self.shape)
    }
}

const fn type_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float32",
        DType::F64 => "float64",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        DType::I8 => "int8",
        DType::I16 => "int16",
        DType::I32 => "int32",
        DType::I64 => "int64",
        DType::U8 => "uint8",
        DType::U16 => "uint16",
        DType::U32 => "uint32",
        DType::U64 => "uint64",
        DType::Bool => "bool",
        _ => "sub-byte",
    }
}
