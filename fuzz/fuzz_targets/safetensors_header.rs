//! A safetensors file of any bytes: its header, and the elements of every tensor that the header promises.
#![no_main]

use bytes::Bytes;
use doyen_convert::source::Checkpoint;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    let Ok(mut checkpoint) = Checkpoint::from_bytes(&Bytes::copy_from_slice(data), Path::new("fuzz")) else {
        return;
    };
    let shapes: Vec<(String, Vec<usize>)> =
        checkpoint.shapes().map(|(name, shape)| (name.to_owned(), shape.to_vec())).collect();
    for (name, shape) in shapes {
        if let Ok(weight) = checkpoint.take(&name, &shape) {
            let rows = shape.first().copied().unwrap_or(1);
            let _ = weight.read_rows(0..rows, &mut Vec::new());
        }
    }
});
