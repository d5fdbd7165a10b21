//! Writes the Rust types of the ONNX messages Doyen reads and writes.
//!
//! `bytes` fields become `bytes::Bytes`, so that decoding a mapped file leaves `raw_data` in the mapping.

use std::{error::Error, fs, path::Path};

const HEADER: &str = "\
//! ONNX's protobuf messages. Generated from `tools/onnx-proto/onnx.proto` by `tools/onnx-proto`; do not edit.

#![allow(missing_docs, clippy::pedantic, clippy::enum_variant_names, unused_qualifications)]

";

fn main() -> Result<(), Box<dyn Error>> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let out = tempdir(here)?;
    let descriptors = protox::compile([here.join("onnx.proto")], [here])?;
    prost_build::Config::new().bytes(["."]).out_dir(&out).compile_fds(descriptors)?;
    let code = fs::read_to_string(out.join("onnx.rs"))?;
    // The first line of prost's output is its own "generated" remark.
    let code = code.split_once('\n').map_or("", |(_, rest)| rest);
    fs::write(here.join("../../crates/doyen-graph/src/onnx/proto.rs"), format!("{HEADER}{code}"))?;
    fs::remove_dir_all(out)?;
    Ok(())
}

fn tempdir(here: &Path) -> std::io::Result<std::path::PathBuf> {
    let dir = here.join("target").join("generated");
    fs::create_dir_all(&dir)?;
    Ok(dir)
}
