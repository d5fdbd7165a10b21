//! `genai_config.json` in the form of ONNX Runtime GenAI, the model's metadata, and the files copied as they are.

use crate::{
    ConvertError,
    config::{Ffn, Mixer, ModelConfig},
    options::{ExpertWidths, LayerFormats, Options, TABLE_WIDTH, Width},
};
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, path::Path};

/// Files that say how text becomes tokens and back, copied when the checkpoint has them.
const COPIED: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
];

/// The manifest's bytes.
pub(crate) fn genai_config(config: &ModelConfig) -> Vec<u8> {
    let tokens = &config.tokens;
    let eos: Vec<u32> = tokens.eos.iter().map(|t| t.0).collect();
    // The form has one place for all layers.
    let of_layer = |mixer: &Mixer| match mixer {
        Mixer::Attention(a) => Some((a.heads, a.kv_heads, a.head_dim)),
        Mixer::Latent(a) => Some((a.heads, a.heads, a.head_dim())),
        Mixer::DeltaNet(_) | Mixer::ShortConv(_) => None,
    };
    let (heads, kv_heads, head_dim) =
        config.layers.iter().find_map(|l| of_layer(&l.mixer)).unwrap_or_default();
    let mut inputs = json!({
        "input_ids": "input_ids",
        "attention_mask": "attention_mask",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    });
    let mut outputs = json!({
        "logits": "logits",
        "present_key_names": "present.%d.key",
        "present_value_names": "present.%d.value",
    });
    for (kind, has) in recurrent_states(config) {
        if has {
            inputs[format!("past_{kind}_names")] = format!("past.%d.{kind}").into();
            outputs[format!("present_{kind}_names")] = format!("present.%d.{kind}").into();
        }
    }
    let mut model = Map::new();
    if let Some(bos) = tokens.bos {
        model.insert("bos_token_id".into(), bos.0.into());
    }
    model.insert("context_length".into(), config.max_positions.into());
    model.insert(
        "decoder".into(),
        json!({
            "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
            "filename": "model.onnx",
            "head_size": head_dim,
            "hidden_size": config.hidden,
            "inputs": inputs,
            "outputs": outputs,
            "num_attention_heads": heads,
            "num_hidden_layers": config.layers.len(),
            "num_key_value_heads": kv_heads,
        }),
    );
    match eos.as_slice() {
        [] => None,
        [one] => model.insert("eos_token_id".into(), (*one).into()),
        many => model.insert("eos_token_id".into(), many.into()),
    };
    // As the builder of ONNX Runtime GenAI does where a model has no padding token.
    if let Some(pad) = tokens.pad.map(|t| t.0).or(eos.first().copied()) {
        model.insert("pad_token_id".into(), pad.into());
    }
    model.insert("type".into(), config.genai_type.into());
    model.insert("vocab_size".into(), config.vocab.into());
    let mut search = json!({
        "diversity_penalty": 0.0,
        "do_sample": false,
        "early_stopping": true,
        "length_penalty": 1.0,
        "max_length": config.max_positions,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "past_present_share_buffer": true,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 1.0,
    });
    for (name, value) in &tokens.sampling {
        search[name] = value.clone();
    }
    let mut out = format!("{:#}", json!({"model": model, "search": search})).into_bytes();
    out.push(b'\n');
    out
}

/// Kinds of states of fixed size, and whether a layer has one.
fn recurrent_states(config: &ModelConfig) -> [(&'static str, bool); 2] {
    let any = |is: fn(&Mixer) -> bool| config.layers.iter().any(|l| is(&l.mixer));
    [
        ("conv", any(|m| matches!(m, Mixer::DeltaNet(_) | Mixer::ShortConv(_)))),
        ("recurrent", any(|m| matches!(m, Mixer::DeltaNet(_)))),
    ]
}

/// What the manifest's form has no place for, as properties of the model: where it comes from and how it is stored.
/// `kept`: weights without a chosen width are as the source holds them.
pub(crate) fn metadata(
    config: &ModelConfig,
    options: &Options,
    layers: &[LayerFormats],
    kept: bool,
) -> BTreeMap<String, String> {
    let mut out = BTreeMap::new();
    let mut set = |key: &str, value: String| out.insert(format!("doyen.{key}"), value);
    set("producer_version", env!("CARGO_PKG_VERSION").into());
    set("source.architecture", config.architecture.clone());
    set("dtype", options.dtype.dtype().to_string());
    let table = |width: Option<Width>| match width {
        None if kept => KEPT.to_owned(),
        w => w.unwrap_or(TABLE_WIDTH).to_string(),
    };
    set("embed", table(options.embed));
    set("lm_head", table(options.lm_head));
    set("layers", runs(config, layers, kept));
    out
}

/// Stands for a width that nobody chose, of weights that the source holds quantized.
const KEPT: &str = "kept";

/// Formats of all layers as `--layers` takes them, equal neighbours in one range.
fn runs(config: &ModelConfig, layers: &[LayerFormats], kept: bool) -> String {
    let one = |i: usize| {
        let l = &layers[i];
        let width = |w: Width, asked: bool| if kept && !asked { KEPT.to_owned() } else { w.to_string() };
        let ffn = if matches!(config.layers[i].ffn, Ffn::Moe(_)) {
            let experts = match l.experts {
                _ if kept && !l.asked.experts => format!("experts={KEPT}"),
                ExpertWidths::Bits { fc1, fc2 } => format!("fc1={},fc2={}", fc1.get(), fc2.get()),
                ExpertWidths::Float => "experts=float".into(),
            };
            format!("{experts},router={}", width(l.router, l.asked.router))
        } else {
            format!("mlp={}", width(l.mlp, l.asked.mlp))
        };
        let zero_points = if l.zero_points { "on" } else { "off" };
        let attention = width(l.attention, l.asked.attention);
        format!("{ffn},attention={attention},block={},zero-points={zero_points}", l.block)
    };
    let mut out: Vec<String> = Vec::new();
    let mut start = 0;
    for end in 1..=layers.len() {
        let text = one(start);
        if end == layers.len() || one(end) != text {
            let range = if end - start == 1 { start.to_string() } else { format!("{start}-{}", end - 1) };
            out.push(format!("{range}:{text}"));
            start = end;
        }
    }
    out.join(";")
}

/// Reads the files to copy, so that an unreadable one is known before any weight is converted.
pub(crate) fn copied_files(
    checkpoint: &Path,
    vocab: usize,
    notices: &mut Vec<String>,
) -> Result<Vec<(&'static str, Vec<u8>)>, ConvertError> {
    let mut out = Vec::new();
    for name in COPIED {
        let path = checkpoint.join(name);
        if !path.exists() {
            match name {
                "tokenizer.json" => {
                    let needed = "a package holds its tokenizer; save the checkpoint with its fast tokenizer";
                    return Err(ConvertError::Missing { path, needed: needed.into() });
                }
                "tokenizer_config.json" => notices.push(format!(
                    "the checkpoint has no {name}: the package has no chat template unless {} is there, and other \
                     runtimes may want the file",
                    COPIED[3]
                )),
                _ => {}
            }
            continue;
        }
        let bytes = std::fs::read(&path).map_err(ConvertError::read(&path))?;
        let wrong = if path.extension().is_some_and(|e| e == "json") {
            match serde_json::from_slice::<Value>(&bytes) {
                Ok(Value::Object(o)) if name == COPIED[0] => beyond(&o, vocab),
                Ok(Value::Object(_)) => None,
                Ok(_) => Some("expected a JSON object".to_owned()),
                Err(e) => Some(format!("not JSON: {e}")),
            }
        } else {
            std::str::from_utf8(&bytes).err().map(|e| format!("not UTF-8 text: {e}"))
        };
        if let Some(message) = wrong {
            return Err(ConvertError::file(&path, message));
        }
        out.push((name, bytes));
    }
    Ok(out)
}

/// What is wrong with a tokenizer that has a token for which the embedding has no row. (Fewer tokens than rows are usual:
/// rows are padded.)
fn beyond(tokenizer: &Map<String, Value>, vocab: usize) -> Option<String> {
    let added = tokenizer.get("added_tokens").and_then(Value::as_array).into_iter().flatten();
    let added =
        added.map(|t| (t.get("content").and_then(Value::as_str), t.get("id").and_then(Value::as_u64)));
    let words = match tokenizer.get("model").and_then(|m| m.get("vocab")) {
        Some(Value::Object(words)) => {
            words.iter().map(|(word, id)| (Some(word.as_str()), id.as_u64())).max_by_key(|(_, id)| *id)
        }
        // Pieces with scores, the id being the place.
        Some(Value::Array(pieces)) => Some((None, (pieces.len() as u64).checked_sub(1))),
        _ => None,
    };
    let (token, id) = added.chain(words).max_by_key(|(_, id)| *id)?;
    let id = id.filter(|id| *id >= vocab as u64)?;
    let token = token.map_or_else(String::new, |t| format!(" {t:?}"));
    Some(format!(
        "token{token} has id {id}, expected ids below {vocab}, the rows of the embedding (vocab_size)"
    ))
}
