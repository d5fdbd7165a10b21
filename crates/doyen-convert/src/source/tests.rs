//! Reading of rows, and files made of nonsense.

use super::*;
use half::{bf16, f16};
use proptest::prelude::*;
use safetensors::{Dtype, serialize, tensor::TensorView};

const NAME: &str = "model.safetensors";

fn file(tensors: &[(&str, Dtype, &[usize], Vec<u8>)]) -> Bytes {
    let views = tensors.iter().map(|(n, d, s, b)| (*n, TensorView::new(*d, s.to_vec(), b).unwrap()));
    serialize(views, None).unwrap().into()
}

fn parse(bytes: &Bytes) -> Result<Checkpoint, ConvertError> {
    Checkpoint::from_bytes(bytes, Path::new(NAME))
}

#[test]
fn every_type_widens_exactly() {
    let values = [0.0f32, 1.0, -2.5, 0.15625, 384.0, -0.0078125];
    let bytes: [(Dtype, Vec<u8>); 4] = [
        (Dtype::F32, values.iter().flat_map(|v| v.to_le_bytes()).collect()),
        (Dtype::F16, values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect()),
        (Dtype::BF16, values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect()),
        (Dtype::F64, values.iter().flat_map(|&v| f64::from(v).to_le_bytes()).collect()),
    ];
    for (dtype, bytes) in bytes {
        let mut c = parse(&file(&[("w", dtype, &[3, 2], bytes)])).unwrap();
        let w = c.take("w", &[3, 2]).unwrap();
        let mut out = vec![9.0];
        w.read_rows(1..3, &mut out).unwrap();
        assert_eq!(out, [9.0, -2.5, 0.15625, 384.0, -0.0078125]);
    }
}

#[test]
fn values_beyond_f32_are_named() {
    let bytes = [1.0f64, 1e300].iter().flat_map(|v| v.to_le_bytes()).collect();
    let mut c = parse(&file(&[("w", Dtype::F64, &[2], bytes)])).unwrap();
    let e = c.take("w", &[2]).unwrap().read_rows(0..1, &mut Vec::new()).unwrap_err().to_string();
    assert!(e.contains("\"w\"") && e.contains("range of float32 at [1]"), "{e}");
}

#[test]
fn taken_tensors_are_remembered() {
    let one = vec![0, 0, 128, 63];
    let mut c = parse(&file(&[("a", Dtype::F32, &[1], one.clone()), ("b", Dtype::F32, &[1], one)])).unwrap();
    c.take("b", &[1]).unwrap();
    assert_eq!(c.untaken().collect::<Vec<_>>(), ["a"]);
}

proptest! {
    /// A damaged file is an error or a file whose tensors can all be read; nothing panics.
    #[test]
    fn damaged_files_never_panic(
        edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<proptest::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let mut bytes = file(&[
            ("a", Dtype::F32, &[2, 3], vec![0; 24]),
            ("b", Dtype::BF16, &[4], vec![0; 8]),
        ])
        .to_vec();
        for (at, value) in edits {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        if truncate {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(mut c) = parse(&bytes.into()) {
            let shapes: Vec<(String, Vec<usize>)> =
                c.shapes().map(|(n, s)| (n.to_owned(), s.to_vec())).collect();
            for (name, shape) in shapes {
                if let Ok(w) = c.take(&name, &shape) {
                    let _ = w.read_rows(0..w.rows(), &mut Vec::new());
                }
            }
        }
    }
}
