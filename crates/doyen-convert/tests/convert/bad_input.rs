//! Every kind of bad input: the error names what is wrong, and nothing is left behind or lost.

use crate::common::{Checkpoint, Place};
use doyen_convert::{Options, Silent, Target, convert, options::LayerOverride, options::Width};
use doyen_tensor::{FloatType, format::Bits};
use serde_json::json;
use std::fs;

fn options() -> Options {
    Options { dtype: FloatType::F32, ..Options::default() }
}

fn assert_all(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} not in: {text}");
    }
}

fn edit(place: &Place, file: &str, change: impl FnOnce(Vec<u8>) -> Vec<u8>) {
    let path = place.checkpoint().join(file);
    fs::write(&path, change(fs::read(&path).unwrap())).unwrap();
}

#[test]
fn missing_files() {
    let c = Checkpoint::qwen3_moe();
    for (file, parts) in [
        ("config.json", ["config.json is missing", "description"]),
        ("model.safetensors", ["model.safetensors is missing", "model.safetensors.index.json"]),
        ("tokenizer.json", ["tokenizer.json is missing", "tokenizer"]),
    ] {
        let place = c.write();
        fs::remove_file(place.checkpoint().join(file)).unwrap();
        assert_all(&place.refusal(&options()), &parts);
    }
    let place = c.write();
    fs::rename(place.checkpoint().join("model.safetensors"), place.checkpoint().join("pytorch_model.bin"))
        .unwrap();
    assert_all(&place.refusal(&options()), &["pytorch_model.bin", "save the checkpoint as safetensors"]);
}

#[test]
fn missing_shard_and_index_that_lies() {
    let place = Checkpoint::qwen3_moe().write_sharded();
    fs::remove_file(place.checkpoint().join("b.safetensors")).unwrap();
    assert_all(&place.refusal(&options()), &["b.safetensors is missing", "places", "tensors in it"]);

    let place = Checkpoint::qwen3_moe().write_sharded();
    edit(&place, "model.safetensors.index.json", |text| {
        String::from_utf8(text).unwrap().replace("b.safetensors", "a.safetensors").into_bytes()
    });
    assert_all(&place.refusal(&options()), &["model.layers.1.", "a.safetensors, which does not hold it"]);

    let place = Checkpoint::qwen3_moe().write_sharded();
    edit(&place, "model.safetensors.index.json", |text| {
        String::from_utf8(text).unwrap().replace("b.safetensors", "../b.safetensors").into_bytes()
    });
    assert_all(&place.refusal(&options()), &["../b.safetensors", "beside the index"]);
}

#[test]
fn truncated_and_malformed_safetensors() {
    let c = Checkpoint::qwen2();
    let place = c.write();
    edit(&place, "model.safetensors", |b| b[..b.len() - 100].to_vec());
    assert_all(&place.refusal(&options()), &["model.safetensors", "truncated", "expected", "found"]);

    let place = c.write();
    edit(&place, "model.safetensors", |b| b[..40].to_vec());
    assert_all(&place.refusal(&options()), &["truncated: the header ends"]);

    let place = c.write();
    edit(&place, "model.safetensors", |_| b"PK\x03\x04 this is a zip file".to_vec());
    assert_all(&place.refusal(&options()), &["not a safetensors file"]);

    let place = c.write();
    edit(&place, "model.safetensors", |_| Vec::new());
    assert_all(&place.refusal(&options()), &["not a safetensors file: 0 bytes"]);
}

/// A header of our own making, over `data` bytes.
fn raw_safetensors(header: &serde_json::Value, data: usize) -> Vec<u8> {
    let header = header.to_string().into_bytes();
    [&(header.len() as u64).to_le_bytes()[..], &header, &vec![0; data]].concat()
}

#[test]
fn overlapping_and_overflowing_ranges() {
    let place = Checkpoint::qwen2().write();
    let tensor = |start: u64, end: u64| json!({"dtype": "F32", "shape": [2], "data_offsets": [start, end]});
    edit(&place, "model.safetensors", |_| {
        raw_safetensors(&json!({"a": tensor(0, 8), "b": tensor(4, 12)}), 12)
    });
    assert_all(
        &place.refusal(&options()),
        &["malformed safetensors header", "tensor \"b\": its range 4..12 overlaps the one before"],
    );

    edit(&place, "model.safetensors", |_| {
        raw_safetensors(&json!({"a": tensor(0, 8), "b": tensor(8, u64::MAX)}), 12)
    });
    assert_all(&place.refusal(&options()), &["malformed safetensors header"]);

    edit(&place, "model.safetensors", |_| {
        let huge = json!({"dtype": "F32", "shape": [u64::MAX, u64::MAX], "data_offsets": [0, 8]});
        raw_safetensors(&json!({"a": huge}), 8)
    });
    assert_all(&place.refusal(&options()), &["malformed safetensors header"]);
}

#[test]
fn wrong_type_shape_or_values() {
    let mut c = Checkpoint::qwen3_moe();
    c.add("model.layers.1.mlp.gate.weight", &[4, 31]);
    let e = c.write().refusal(&options());
    assert_all(&e, &["model.layers.1.mlp.gate.weight", "expected shape [4, 32]", "found [4, 31]"]);

    let mut c = Checkpoint::qwen3_moe();
    c.tensors.remove("model.layers.0.self_attn.k_norm.weight");
    assert_all(
        &c.write().refusal(&options()),
        &["model.layers.0.self_attn.k_norm.weight", "not in the checkpoint"],
    );

    for (bad, text) in [(f32::NAN, "NaN"), (f32::NEG_INFINITY, "-inf")] {
        let mut c = Checkpoint::qwen3_moe();
        c.values("model.layers.1.mlp.experts.2.up_proj.weight")[3 * 32 + 5] = bad;
        let e = c.write().refusal(&options());
        assert_all(&e, &["model.layers.1.mlp.experts.2.up_proj.weight", text, "[3,5]"]);
    }

    let place = Checkpoint::qwen2().write();
    edit(&place, "model.safetensors", |mut b| {
        // A type of equal size, so that nothing else is wrong.
        let at = b.windows(5).position(|w| w == b"\"F32\"").unwrap();
        b[at..at + 5].copy_from_slice(b"\"I32\"");
        b
    });
    assert_all(&place.refusal(&options()), &["expected float32, float16, bfloat16 or float64", "I32"]);
}

#[test]
fn overflow_when_narrowing() {
    let mut c = Checkpoint::qwen2();
    c.values("model.norm.weight")[7] = 7e4;
    let f16 = Options { dtype: FloatType::F16, ..Options::default() };
    let e = c.write().refusal(&f16);
    assert_all(&e, &["model.norm.weight", "70000", "[0,7]", "float16", "--dtype bf16 or f32"]);
    let bf16 = Options { dtype: FloatType::BF16, ..Options::default() };
    c.write().convert(&bf16).unwrap();

    let mut c = Checkpoint::qwen2();
    c.values("model.layers.0.mlp.up_proj.weight")[32] = 1e9;
    assert_all(&c.write().refusal(&f16), &["model.layers.0.mlp.up_proj.weight", "scale", "row 1"]);
}

#[test]
fn leftover_tensors() {
    let mut c = Checkpoint::qwen3_moe();
    c.add("model.layers.1.self_attn.sinks", &[2]);
    let e = c.write().refusal(&options());
    assert_all(&e, &["model.layers.1.self_attn.sinks", "does not use", "change the model"]);

    let mut c = Checkpoint::qwen3_moe();
    c.add("model.layers.2.eh_proj.weight", &[2, 2]);
    c.add("visual.patch.weight", &[2, 2]);
    c.add("model.layers.0.self_attn.rotary_emb.inv_freq", &[8]);
    let place = c.write();
    let notices = place.convert(&options()).unwrap().notices.join("\n");
    assert_all(&notices, &["2 tensors", "model.layers.2.eh_proj.weight", "visual.patch.weight"]);
}

#[test]
fn unknown_architecture_and_activation() {
    let mut c = Checkpoint::qwen3_moe();
    c.config["architectures"] = json!(["FalconForCausalLM"]);
    assert_all(&c.write().refusal(&options()), &["FalconForCausalLM", "Qwen3MoeForCausalLM"]);
    let mut c = Checkpoint::qwen3_moe();
    c.config["hidden_act"] = json!("gelu_new");
    assert_all(&c.write().refusal(&options()), &["hidden_act", "gelu_new", "silu"]);
    let place = Checkpoint::qwen3_moe().write();
    edit(&place, "config.json", |b| b[..b.len() / 2].to_vec());
    assert_all(&place.refusal(&options()), &["config.json", "not JSON"]);
}

#[test]
fn unreadable_tokenizer() {
    let mut c = Checkpoint::qwen3_moe();
    c.tokenizer = Some("{\"model\": ".into());
    assert_all(&c.write().refusal(&options()), &["tokenizer.json", "not JSON"]);
    let place = Checkpoint::qwen3_moe().write();
    fs::write(place.checkpoint().join("chat_template.jinja"), [0xff, 0xfe, 0x80]).unwrap();
    assert_all(&place.refusal(&options()), &["chat_template.jinja", "not UTF-8"]);
}

#[test]
fn a_tokenizer_with_more_tokens_than_rows() {
    for tokenizer in [
        json!({"model": {"type": "BPE", "vocab": {"a": 0, "many": 64}, "merges": []}}),
        json!({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 64, "content": "many"}]}),
        json!({"model": {"type": "Unigram", "vocab": vec![json!(["many", -1.0]); 65]}}),
    ] {
        let mut c = Checkpoint::qwen3_moe();
        c.tokenizer = Some(tokenizer.to_string());
        assert_all(
            &c.write().refusal(&options()),
            &["tokenizer.json", "id 64", "below 64", "rows of the embedding"],
        );
    }
}

#[test]
fn tensors_that_are_there_twice() {
    let place = Checkpoint::qwen2().write();
    edit(&place, "model.safetensors", |_| {
        let one =
            |at: u64| format!(r#""a": {{"dtype": "F32", "shape": [2], "data_offsets": [{at}, {}]}}"#, at + 8);
        let header = format!("{{{}, {}}}", one(0), one(8)).into_bytes();
        [&(header.len() as u64).to_le_bytes()[..], &header, &[0; 16]].concat()
    });
    assert_all(&place.refusal(&options()), &["malformed safetensors header", "tensor \"a\"", "gap"]);

    let place = Checkpoint::qwen3_moe().write_sharded();
    fs::copy(place.checkpoint().join("b.safetensors"), place.checkpoint().join("c.safetensors")).unwrap();
    edit(&place, "model.safetensors.index.json", |text| {
        let mut index: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let map = index["weight_map"].as_object_mut().unwrap();
        let moved = map.iter().find(|(_, shard)| **shard == "b.safetensors").unwrap().0.clone();
        map.insert(moved, "c.safetensors".into());
        index.to_string().into_bytes()
    });
    assert_all(&place.refusal(&options()), &["is in", "b.safetensors", "c.safetensors", "expected one"]);
}

#[test]
fn options_that_do_not_fit_the_model() {
    let place = Checkpoint::qwen3_moe().write();
    let layers = LayerOverride::parse_list("1-5:fc1=2").unwrap();
    assert_all(&place.refusal(&Options { layers, ..options() }), &["1-5:fc1=2", "layers 0 to 1"]);
    let layers = LayerOverride::parse_list("1:fc1=float").unwrap();
    assert_all(&place.refusal(&Options { layers, ..options() }), &["1:fc1=float", "fc1=float, fc2=4"]);
}

#[test]
fn the_target_is_never_harmed() {
    let place = Checkpoint::qwen3_moe().write();
    fs::create_dir(place.package()).unwrap();
    place.convert(&options()).unwrap();
    let before = fs::read(place.package().join("model.onnx")).unwrap();

    let e = place.convert(&options()).unwrap_err().to_string();
    assert_all(&e, &["package", "there already", "--force"]);

    // Replacing works, and a failure while replacing keeps what was there.
    let replace = Target::new(place.package()).replace(true);
    let other = Options { embed: Some(Width::Bits(Bits::B4)), ..options() };
    convert(&place.checkpoint(), &replace, &other, &mut Silent).unwrap();
    let after = fs::read(place.package().join("model.onnx")).unwrap();
    assert_ne!(before, after);
    edit(&place, "model.safetensors", |b| b[..b.len() - 4].to_vec());
    convert(&place.checkpoint(), &replace, &options(), &mut Silent).unwrap_err();
    assert_eq!(fs::read(place.package().join("model.onnx")).unwrap(), after);

    // A folder with anything else in it is not ours to replace.
    fs::write(place.package().join("notes.txt"), "mine").unwrap();
    let e = convert(&place.checkpoint(), &replace, &options(), &mut Silent).unwrap_err().to_string();
    assert_all(&e, &["notes.txt", "not part of a package"]);
    assert_eq!(fs::read_to_string(place.package().join("notes.txt")).unwrap(), "mine");
    assert_eq!(place.entries(), ["checkpoint", "package"]);

    let nowhere = Target::new(place.package().join("a").join("b"));
    let e = convert(&place.checkpoint(), &nowhere, &options(), &mut Silent).unwrap_err().to_string();
    assert_all(&e, &["does not exist"]);
    let file = Target::new(place.checkpoint().join("config.json")).replace(true);
    let e = convert(&place.checkpoint(), &file, &options(), &mut Silent).unwrap_err().to_string();
    assert_all(&e, &["not a folder"]);
}
