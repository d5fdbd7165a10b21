//! A manifest of any bytes.
#![no_main]

use doyen_graph::package::Manifest;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = Manifest::parse(data);
});
