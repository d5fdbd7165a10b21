//! The model embedded in the binary: the files of a package as aligned slices.

/// Bytes at an address that is a multiple of a cache line, so that kernels read rows as they would from a mapped file.
#[repr(C, align(64))]
struct Aligned<T: ?Sized>(T);

macro_rules! embed {
    ($($name:literal),* $(,)?) => {
        &[$(($name, {
            static FILE: &Aligned<[u8]> = &Aligned(*include_bytes!(concat!("../builtin/", $name)));
            &FILE.0
        })),*]
    };
}

/// What the built-in model is called.
pub const NAME: &str = "docmoe";

/// Name and bytes of every file of the built-in package.
pub static FILES: &[(&str, &[u8])] =
    embed!["chat_template.jinja", "genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json",];
