//! A manifest of any bytes, as JSON and as YAML.
#![no_main]

use doyen_graph::package::Manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = Manifest::parse(data);
    let _ = Manifest::parse_inference_metadata(data);
});
