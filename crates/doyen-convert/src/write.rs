//! The package on disk: whole or not at all.
//!
//! Everything is written into a temporary folder beside the target and renamed at the end. A killed run leaves at most a
//! hidden folder without `model.onnx`, which is written last; an interrupted one removes it.

mod blocks;
mod data;
mod target;

pub use target::Target;

use crate::{
    ConvertError, Input, Options, Progress, Report,
    graph::{self, Plan},
    manifest,
    store::DATA_FILE,
};
use std::{
    fs::File,
    io::{self, Write},
    path::Path,
};

/// Converts the checkpoint folder or GGUF file at `source` to a package at `target`.
///
/// # Errors
/// When the source cannot be read or holds something that no recipe implements, the options do not fit the model, or the
/// package cannot be written. Nothing is left at the target then, and what was there before stays.
pub fn convert(
    source: &Path,
    target: &Target,
    options: &Options,
    progress: &mut dyn Progress,
) -> Result<Report, ConvertError> {
    target.check()?;
    convert_input(Input::open(source)?, target, options, progress)
}

/// As [`convert`], of an input that is open already.
///
/// # Errors
/// As [`convert`].
pub fn convert_input(
    input: Input,
    target: &Target,
    options: &Options,
    progress: &mut dyn Progress,
) -> Result<Report, ConvertError> {
    target.check()?;
    let path = input.path.clone();
    write(input, target, options, progress).map_err(|e| match e {
        // Of a folder of tensors the name is enough; GGUF files have the same names in every one.
        ConvertError::Tensor { name, message } if path.is_file() => {
            ConvertError::file(&path, format!("tensor {name:?}: {message}"))
        }
        e => e,
    })
}

fn write(
    input: Input,
    target: &Target,
    options: &Options,
    progress: &mut dyn Progress,
) -> Result<Report, ConvertError> {
    let Input { mut config, mut checkpoint, files, mut notices, .. } = input;
    config.choose_context(options.long_context)?;
    let kept = checkpoint.is_quantized();
    let Plan { mut graph, store, mut report } = graph::assemble(&config, &mut checkpoint, options)?;
    graph.metadata = manifest::metadata(&config, options, &options.resolve(config.layers.len())?, kept);
    let model = doyen_graph::onnx::encode(&graph, &store.externals)?;
    notices.append(&mut report.notices);
    report.notices = notices;

    let staging = target.stage()?;
    let needed = store.file_bytes() + model.len() as u64;
    let data_path = staging.path().join(DATA_FILE);
    let failed = |path: &Path, e| write_error(path, needed, e);
    let create = |path: &Path| File::create_new(path).map_err(|e| failed(path, e));

    let mut data = create(&data_path)?;
    let fates = data::write(&store, &mut data, progress).map_err(|e| match e {
        data::Failure::Convert(e) => e,
        data::Failure::Io(e) => failed(&data_path, e),
    })?;
    data.sync_all().map_err(|e| failed(&data_path, e))?;
    let put = |name: &str, bytes: &[u8]| {
        let path = staging.path().join(name);
        let mut file = create(&path)?;
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(|e| failed(&path, e))
    };
    for (name, bytes) in &files {
        put(name, bytes)?;
    }
    put("genai_config.json", &manifest::genai_config(&config))?;
    put("model.onnx", &model)?;
    if progress.is_interrupted() {
        return Err(ConvertError::Interrupted);
    }
    target.publish(staging)?;
    report.notices.extend(target.left_over());
    report.fates = fates.finish();
    Ok(report)
}

fn write_error(path: &Path, needed: u64, source: io::Error) -> ConvertError {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            ConvertError::DiskFull { path: path.to_owned(), needed }
        }
        io::ErrorKind::FileTooLarge => ConvertError::FileLimit { path: path.to_owned(), needed },
        _ => ConvertError::io("write", path)(source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_says_so() {
        let path = Path::new("model.onnx.data");
        let e = write_error(path, 123, io::ErrorKind::StorageFull.into()).to_string();
        assert!(e.contains("no space left") && e.contains("123 bytes") && e.contains("-o"), "{e}");
        let e = write_error(path, 123, io::ErrorKind::FileTooLarge.into()).to_string();
        assert!(e.contains("file size") && e.contains("123 bytes") && e.contains("ulimit -f"), "{e}");
        let e = write_error(path, 123, io::ErrorKind::PermissionDenied.into()).to_string();
        assert!(e.starts_with("cannot write model.onnx.data"), "{e}");
    }
}
