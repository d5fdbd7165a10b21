//! Every type against the values that another reader makes of the same bytes.

use super::{
    super::{file::GgufFile, types::GgmlType},
    *,
};
use crate::source::Data;
use std::path::Path;

/// Made by `scripts/ggml-blocks.py`: tensors `TYPE` of random blocks, and their values as `TYPE.values`.
const FILE: &[u8] = include_bytes!("../../../tests/data/ggml-blocks.gguf");

fn bytes(file: &GgufFile, name: &str) -> Vec<u8> {
    let t = file.tensors.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
    t.data.range(t.offset, t.bytes as usize).unwrap().to_vec()
}

#[test]
fn every_quantized_type_gives_the_same_values() {
    let bytes_of_file = bytes::Bytes::from_static(FILE);
    let data = Data::memory(&bytes_of_file, Path::new("ggml-blocks.gguf"));
    let file = GgufFile::parse(&data).unwrap();
    for ty in GgmlType::read() {
        let Some(codes) = ty.codes() else { continue };
        let mut unpacked = Unpacked::default();
        unpack(ty, &bytes(&file, ty.name()), &mut unpacked);
        let found: Vec<f32> = unpacked.values(codes.group).collect();
        let values = bytes(&file, &format!("{ty}.values"));
        let expected: Vec<f32> = values.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        assert_eq!(found, expected, "{ty}");
        let (low, high) = codes.range;
        assert!(unpacked.codes.iter().all(|q| (low..=high).contains(q)), "{ty}");
        assert_eq!(unpacked.scales.len(), 256 / codes.group, "{ty}");
        assert_eq!(unpacked.mins.len(), if codes.minimum { unpacked.scales.len() } else { 0 }, "{ty}");
    }
}

#[test]
fn rows_are_interleaved_with_their_groups() {
    let one = |at: i8| Unpacked { codes: vec![at; 4], scales: vec![f32::from(at); 2], ..Unpacked::default() };
    let both = one(1).interleaved(&one(2), (2, 1));
    assert_eq!(both.codes, [1, 1, 2, 2, 1, 1, 2, 2]);
    assert_eq!(both.scales, [1.0, 2.0, 1.0, 2.0]);
    assert!(both.mins.is_empty());
}
