//! `inference_metadata.yaml`, which mobius writes for onnx-genai, as a [`Manifest`].
//!
//! What is read: the architecture, the longest sequence, head counts, the decoder's model file of a pipeline, and the
//! names of the ports that the io block singles out. Its lists of inputs, outputs and state pairs say nothing that the
//! graph does not, may be thin or missing, and are not read: [`super::ports`] derives them. Which tokens end a text is
//! not in it; `generation_config.json` or the tokenizer say so.

use super::manifest::{Decoder, Keys, Manifest, ManifestError};
use super::yaml;

/// Name of the file.
pub const INFERENCE_METADATA: &str = "inference_metadata.yaml";

/// Reads the file's bytes.
///
/// # Errors
/// When they are no YAML object within bounds, a value has the wrong type (named by its path), or a pipeline has no model
/// that is its decoder.
pub(super) fn parse(bytes: &[u8]) -> Result<Manifest, ManifestError> {
    let value =
        yaml::read(bytes).map_err(|message| ManifestError::Syntax { file: INFERENCE_METADATA, message })?;
    let root = Keys::new(&value, INFERENCE_METADATA, String::new())?;
    let model = root.object("model")?;
    let attention = model.object("attention")?;
    let io = model.object("io")?;
    let names = |pairs: &[(&str, &str)]| {
        let mut out = std::collections::BTreeMap::new();
        for (theirs, ours) in pairs {
            out.extend(io.string(theirs)?.map(|name| ((*ours).to_owned(), name)));
        }
        Ok::<_, ManifestError>(out)
    };
    Ok(Manifest {
        model_type: model.string("architecture")?,
        context_length: model.size("max_sequence_length")?,
        decoder: Decoder {
            filename: decoder_file(&root.object("pipeline")?.object("models")?)?,
            head_size: attention.size("head_dim")?,
            num_attention_heads: attention.size("num_attention_heads")?,
            num_key_value_heads: attention.size("num_kv_heads")?,
            inputs: names(&[
                ("token_input", "input_ids"),
                ("attention_mask_input", "attention_mask"),
                ("position_ids_input", "position_ids"),
            ])?,
            outputs: names(&[("logits_output", "logits")])?,
            ..Decoder::default()
        },
        ..Manifest::default()
    })
}

/// The model file of a pipeline's decoder: the model of that type or name, or the only one there is.
fn decoder_file(models: &Keys<'_>) -> Result<Option<String>, ManifestError> {
    let mut decoders = Vec::new();
    let mut others = Vec::new();
    for name in models.names() {
        let model = models.object(name)?;
        let is_decoder = name == "decoder" || model.string("type")?.as_deref() == Some("decoder");
        if is_decoder { &mut decoders } else { &mut others }.push((name, model.string("filename")?));
    }
    match (decoders.as_slice(), others.as_slice()) {
        ([], []) => Ok(None),
        // A decoder without a file among models that have one: theirs is not its.
        ([(name, None)], others) if others.iter().any(|(_, file)| file.is_some()) => {
            Err(ManifestError::Value {
                file: INFERENCE_METADATA,
                path: format!("pipeline.models.{name}.filename"),
                expected: "the decoder's file",
                found: "none".into(),
            })
        }
        ([(_, file)], _) | ([], [(_, file)]) => Ok(file.clone()),
        (several, _) => Err(ManifestError::Value {
            file: INFERENCE_METADATA,
            path: "pipeline.models".into(),
            expected: "one model of type \"decoder\"",
            found: format!("{} of {}", several.len(), several.len() + others.len()),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_and_what_may_be_missing() {
        let text = "model:\n  architecture: llama\n  max_sequence_length: 2048\n  attention: {num_kv_heads: 2, head_dim: 32}\n  \
                    io: {token_input: ids, logits_output: scores, kv_inputs: [a.0.key]}\n";
        let m = parse(text.as_bytes()).unwrap();
        assert_eq!((m.model_type.as_deref(), m.context_length), (Some("llama"), Some(2048)));
        assert_eq!((m.decoder.num_key_value_heads, m.decoder.head_size), (Some(2), Some(32)));
        assert_eq!(m.decoder.inputs.get("input_ids").map(String::as_str), Some("ids"));
        assert_eq!(m.decoder.outputs.get("logits").map(String::as_str), Some("scores"));
        assert_eq!(parse(b"").unwrap(), Manifest::default());
        assert_eq!(parse(b"model: {}\npipeline: {models: {}}").unwrap(), Manifest::default());
    }

    #[test]
    fn the_decoder_of_a_pipeline() {
        let file = |text: &str| parse(text.as_bytes()).map(|m| m.decoder.filename);
        let two = "pipeline:\n  models:\n    vision: {filename: v.onnx, type: encoder}\n    text: {filename: d.onnx, type: decoder}\n";
        assert_eq!(file(two).unwrap().as_deref(), Some("d.onnx"));
        let e =
            file("pipeline: {models: {d: {type: decoder}, v: {filename: v.onnx}}}").unwrap_err().to_string();
        assert!(e.contains("pipeline.models.d.filename"), "{e}");
        assert_eq!(file("pipeline: {models: {m: {filename: a.onnx}}}").unwrap().as_deref(), Some("a.onnx"));
        let e = file("pipeline: {models: {m: {filename: a.onnx}, n: {filename: b.onnx}}}")
            .unwrap_err()
            .to_string();
        assert!(
            e.contains(INFERENCE_METADATA) && e.contains("pipeline.models") && e.contains("0 of 2"),
            "{e}"
        );
    }

    #[test]
    fn wrong_types_are_named_by_file_and_path() {
        for (text, path) in [
            ("- 1", "the file"),
            ("model: 3", "model"),
            ("model: {max_sequence_length: many}", "model.max_sequence_length"),
            ("model: {io: {token_input: [a]}}", "model.io.token_input"),
        ] {
            let e = parse(text.as_bytes()).unwrap_err().to_string();
            assert!(e.starts_with(&format!("{INFERENCE_METADATA}: {path}: expected")), "{e}");
        }
        assert!(parse(b"a: [").unwrap_err().to_string().starts_with(INFERENCE_METADATA));
    }
}
