//! `TensorProto` to and from [`Tensor`].

use super::proto::TensorProto;
use doyen_tensor::Tensor;

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
