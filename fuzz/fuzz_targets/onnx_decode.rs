//! A model file of any bytes: decoding, checking, finding its ports and writing it again end in a value or an error.
#![no_main]

use bytes::Bytes;
use doyen_graph::{
    check::check,
    onnx::{ExternalFiles, ExternalPlan, decode, encode},
    package::{Manifest, derive_ports},
};
use libfuzzer_sys::fuzz_target;

/// A data file that is there under every name.
struct AnyFile;

impl ExternalFiles for AnyFile {
    fn file(&self, _: &str) -> Result<Bytes, String> {
        Ok(Bytes::from(vec![0x5a; 1 << 16]))
    }
}

fuzz_target!(|data: &[u8]| {
    let Ok(mut graph) = decode(Bytes::copy_from_slice(data), &AnyFile) else { return };
    if let Ok(bytes) = encode(&graph, &ExternalPlan::new()) {
        decode(Bytes::from(bytes), &AnyFile).expect("what was written can be read");
    }
    if check(&mut graph).is_ok() {
        let _ = derive_ports(&graph, &Manifest::default());
    }
});
