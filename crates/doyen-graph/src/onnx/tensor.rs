//! `TensorProto` to and from [`Tensor`].

use super::{
    error::DecodeError,
    external::{ExternalFiles, NoExternalFiles, Ranges},
    proto::{StringStringEntryProto, TensorProto, tensor_proto::DataLocation},
};
use bytes::Bytes;
use doyen_tensor::{DType, Shape, Tensor};
use prost::Message;

/// A tensor from a serialized `TensorProto`, such as a test's `input_0.pb`; with its name.
///
/// # Errors
/// When the bytes are no such message, or the tensor is of an unsupported kind, external or of the wrong length.
pub fn decode_tensor(bytes: Bytes) -> Result<(String, Tensor), DecodeError> {
    let proto = TensorProto::decode(bytes).map_err(|e| DecodeError::Protobuf(e.to_string()))?;
    let tensor = from_proto(&proto, &NoExternalFiles, &mut Ranges::default())?;
    Ok((proto.name().to_owned(), tensor))
}

/// A tensor as a serialized `TensorProto`.
pub fn encode_tensor(name: &str, tensor: &Tensor) -> Vec<u8> {
    to_proto(name, tensor).encode_to_vec()
}

/// The message of a tensor with its bytes inline; they are shared, not copied.
pub(super) fn to_proto(name: &str, tensor: &Tensor) -> TensorProto {
    TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(tensor.dtype().onnx()),
        dims: tensor.shape().iter().map(|&d| d as i64).collect(),
        raw_data: Some(tensor.shared_bytes().clone()),
        ..TensorProto::default()
    }
}

/// The tensor of a message: a view of the model file or of a data file where the bytes are raw, a copy where they are
/// in typed fields.
pub(super) fn from_proto(
    proto: &TensorProto,
    files: &dyn ExternalFiles,
    ranges: &mut Ranges,
) -> Result<Tensor, DecodeError> {
    read(proto, files, ranges).map_err(|reason| DecodeError::Tensor { name: proto.name().to_owned(), reason })
}

fn read(proto: &TensorProto, files: &dyn ExternalFiles, ranges: &mut Ranges) -> Result<Tensor, String> {
    let dtype = element_type(proto.data_type())?;
    let dims = proto
        .dims
        .iter()
        .map(|&d| usize::try_from(d).map_err(|_| format!("dimension {d} is negative")))
        .collect::<Result<Vec<_>, _>>()?;
    let shape = Shape::from(dims);
    let len = shape.bytes(dtype).map_err(|e| e.to_string())?;
    if proto.segment.is_some() {
        return Err("tensors in segments are not supported".into());
    }
    let data = if proto.data_location() == DataLocation::External {
        external(proto, files, ranges, &format!("{dtype}{shape}"), len as u64)?
    } else {
        let typed = typed_count(proto);
        match &proto.raw_data {
            Some(raw) if typed == 0 => raw.clone(),
            Some(raw) if !raw.is_empty() => return Err("it has both raw and typed data".into()),
            _ => typed_data(proto, dtype, shape.numel().map_err(|e| e.to_string())?)?,
        }
    };
    Tensor::from_bytes(dtype, shape, data).map_err(|e| e.to_string())
}

/// The element type of an ONNX type number.
pub(super) fn element_type(number: i32) -> Result<DType, String> {
    DType::from_onnx(number).ok_or_else(|| match number {
        0 => "its element type is missing".into(),
        8 => "elements of type string are not supported".into(),
        14 | 15 => "complex elements are not supported".into(),
        n => format!("element type {n} is not supported"),
    })
}

fn external(
    proto: &TensorProto,
    files: &dyn ExternalFiles,
    ranges: &mut Ranges,
    what: &str,
    needed: u64,
) -> Result<Bytes, String> {
    let get =
        |key: &str| proto.external_data.iter().find(|e| e.key() == key).map(StringStringEntryProto::value);
    let number = |key: &str| {
        get(key)
            .map(|v| v.parse::<u64>().map_err(|_| format!("external data: {key} {v:?} is no size")))
            .transpose()
    };
    let location = get("location").ok_or("external data without a location")?;
    let offset = number("offset")?.unwrap_or(0);
    let length = number("length")?.unwrap_or(needed);
    if length != needed {
        return Err(format!(
            "external data in {location:?}: {what} needs {needed} bytes, its length says {length}"
        ));
    }
    if proto.raw_data.is_some() || typed_count(proto) > 0 {
        return Err(format!("it has data in the model file and in {location:?}"));
    }
    let end = offset.checked_add(length).ok_or_else(|| {
        format!("external data in {location:?}: offset {offset} and length {length} overflow")
    })?;
    let file = files.file(location)?;
    if end > file.len() as u64 {
        return Err(format!(
            "external data in {location:?}: bytes {offset}..{end} are needed, the file has {}; is it truncated?",
            file.len()
        ));
    }
    ranges.insert(location, offset, end, proto.name());
    Ok(file.slice(offset as usize..end as usize))
}

fn typed_count(proto: &TensorProto) -> usize {
    proto.float_data.len()
        + proto.int32_data.len()
        + proto.int64_data.len()
        + proto.double_data.len()
        + proto.uint64_data.len()
        + proto.string_data.len()
}

/// The bytes of a tensor in typed fields. Types without a field of their own travel in `int32_data`, a number per
/// element, or per byte for 4-bit types.
fn typed_data(proto: &TensorProto, dtype: DType, numel: usize) -> Result<Bytes, String> {
    let (field, entries) = match dtype {
        DType::F32 => ("float_data", proto.float_data.len()),
        DType::F64 => ("double_data", proto.double_data.len()),
        DType::I64 => ("int64_data", proto.int64_data.len()),
        DType::U32 | DType::U64 => ("uint64_data", proto.uint64_data.len()),
        _ => ("int32_data", proto.int32_data.len()),
    };
    let expected = if dtype.bits() < 8 { dtype.bytes_for(numel).unwrap_or(usize::MAX) } else { numel };
    if entries != expected || typed_count(proto) != entries {
        return Err(format!(
            "{expected} entries of {field} are needed, found {entries} (and {} in other fields)",
            typed_count(proto) - entries
        ));
    }
    let out_of_range = |v: &dyn std::fmt::Display| format!("{v} in {field} does not fit {dtype}");
    let mut out = Vec::with_capacity(expected.saturating_mul(dtype.bits().div_ceil(8)));
    match dtype {
        DType::F32 => proto.float_data.iter().for_each(|v| out.extend(v.to_le_bytes())),
        DType::F64 => proto.double_data.iter().for_each(|v| out.extend(v.to_le_bytes())),
        DType::I64 => proto.int64_data.iter().for_each(|v| out.extend(v.to_le_bytes())),
        DType::U64 => proto.uint64_data.iter().for_each(|v| out.extend(v.to_le_bytes())),
        DType::U32 => {
            for v in &proto.uint64_data {
                out.extend(u32::try_from(*v).map_err(|_| out_of_range(v))?.to_le_bytes());
            }
        }
        _ => {
            for &v in &proto.int32_data {
                match dtype {
                    DType::I32 => out.extend(v.to_le_bytes()),
                    DType::I16 => out.extend(i16::try_from(v).map_err(|_| out_of_range(&v))?.to_le_bytes()),
                    DType::U16 | DType::F16 | DType::BF16 => {
                        out.extend(u16::try_from(v).map_err(|_| out_of_range(&v))?.to_le_bytes());
                    }
                    DType::I8 => out.extend(i8::try_from(v).map_err(|_| out_of_range(&v))?.to_le_bytes()),
                    DType::Bool if v > 1 => return Err(out_of_range(&v)),
                    _ => out.push(u8::try_from(v).map_err(|_| out_of_range(&v))?),
                }
            }
        }
    }
    Ok(Bytes::from(out))
}
