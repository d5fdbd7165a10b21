//! A GGUF file of any bytes: header, metadata, directory, configuration, tokenizer, and the elements of every tensor that
//! the directory promises.
#![no_main]

use bytes::Bytes;
use doyen_convert::gguf::try_read;
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fuzz_target!(|data: &[u8]| {
    let _ = try_read(&Bytes::copy_from_slice(data), Path::new("fuzz"));
});
