//! Data for operators' tests.

use doyen_tensor::Tensor;

/// 0, 1, 2, ... in a shape, as int32.
pub(super) fn iota(shape: &[usize]) -> Tensor {
    let n: usize = shape.iter().product();
    Tensor::from_slice(shape, &(0..n as i32).collect::<Vec<_>>()).unwrap()
}
