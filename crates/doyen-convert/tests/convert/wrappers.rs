//! Text models inside of multimodal ones give the package that they give alone. (`families` compares some with what
//! `transformers` computes.)

use crate::common::{Checkpoint, Place};
use doyen_convert::{Options, Report};
use doyen_tensor::FloatType;
use serde_json::{Value, json};
use std::fs;

/// Every file of a package but the manifest's names, and what was said.
fn converted(place: &Place) -> (Vec<u8>, Vec<u8>, Report) {
    let report = place.convert(&Options::float(FloatType::F32)).unwrap();
    let read = |name: &str| fs::read(place.package().join(name)).unwrap();
    (read("model.onnx.data"), read("model.onnx"), report)
}

/// The checkpoint as the text model of `architecture`, its modules and its head at these places, beside a tower.
fn wrapped(alone: &Checkpoint, architecture: &str, kind: &str, [model, head]: [&str; 2]) -> Checkpoint {
    let mut c = alone.clone();
    let mut text = alone.config.clone();
    let fields = text.as_object_mut().unwrap();
    fields.remove("architectures");
    let eos = fields.remove("eos_token_id");
    fields.insert("model_type".into(), kind.into());
    c.config = json!({
        "architectures": [architecture], "text_config": text, "vision_config": {"hidden_size": 8},
        "eos_token_id": eos, "image_token_id": 63,
    });
    c.tensors.clear();
    for (name, tensor) in &alone.tensors {
        let place = match (name.strip_prefix("model."), name.strip_prefix("lm_head.")) {
            (Some(rest), _) => format!("{model}{rest}"),
            (_, Some(rest)) => format!("{head}{rest}"),
            _ => name.clone(),
        };
        c.tensors.insert(place, tensor.clone());
    }
    for tower in
        ["model.visual.blocks.0.norm1.weight", "vision_tower.layers.0.norm.weight", "projector.weight"]
    {
        c.add(tower, &[8]);
    }
    c
}

#[test]
fn a_text_model_alone_below_another_name() {
    let alone = Checkpoint::llama();
    let (data, model, _) = converted(&alone.write());
    for [above, head] in [
        ["", "lm_head."],
        ["model.language_model.", "lm_head."],
        ["language_model.model.", "language_model.lm_head."],
    ] {
        let mut c = alone.clone();
        c.tensors.clear();
        for (name, tensor) in &alone.tensors {
            let inner = name.strip_prefix("model.").map(|rest| format!("{above}{rest}"));
            let place = inner.unwrap_or_else(|| name.replace("lm_head.", head));
            c.tensors.insert(place, tensor.clone());
        }
        let (inner_data, inner_model, _) = converted(&c.write());
        assert!(inner_data == data && inner_model == model, "{above:?}");
    }
    let mut twice = alone.clone();
    let embedding = twice.tensors.remove("model.embed_tokens.weight").unwrap();
    twice.tensors.insert("embed_tokens.weight".into(), embedding);
    twice.add("layers.0.input_layernorm.weight", &[32]);
    let e = twice.write().refusal(&Options::default());
    assert!(e.contains("\"layers.0.input_layernorm.weight\", too"), "{e}");
}

#[test]
fn wherever_the_text_model_lies() {
    let alone = Checkpoint::llama();
    let (data, model, _) = converted(&alone.write());
    for place in [
        ["language_model.model.", "language_model.lm_head."],
        ["model.language_model.", "lm_head."],
        ["model.text_model.", "lm_head."],
        ["language_model.", "lm_head."],
        ["model.", "lm_head."],
    ] {
        let wrapper = wrapped(&alone, "LlavaForConditionalGeneration", "llama", place);
        let (inner_data, inner_model, report) = converted(&wrapper.write());
        assert!(inner_data == data && inner_model == model, "{place:?}");
        let told = report.notices.join("\n");
        for part in
            ["text model of LlavaForConditionalGeneration", "vision_tower.layers (1)", "model.visual (1)"]
        {
            assert!(told.contains(part), "{place:?}: {told}");
        }
    }
}

/// Modules that draft further tokens are left out where a family has them, and refused elsewhere.
#[test]
fn draft_modules_beside_the_layers() {
    let mut c = Checkpoint::llama();
    c.add("model.mtp_block.0.input_layernorm.weight", &[32]);
    assert!(c.write().refusal(&Options::default()).contains("model.mtp_block.0"));
    c.config["architectures"] = json!(["Ernie4_5ForCausalLM"]);
    let (_, _, report) = converted(&c.write());
    assert!(report.notices.iter().any(|n| n.contains("model.mtp_block.0")), "{report:?}");
}

/// A head beside the embedding that it is tied to is read where it is another.
#[test]
fn tied_heads_that_are_stored() {
    let untied = converted(&Checkpoint::llama().write()).0;
    let mut c = Checkpoint::llama();
    c.config["tie_word_embeddings"] = true.into();
    let (data, _, report) = converted(&c.write());
    assert!(
        data == untied && report.notices.iter().any(|n| n.contains("lm_head.weight differs")),
        "{report:?}"
    );
    let embedding = c.tensors["model.embed_tokens.weight"].clone();
    c.tensors.insert("lm_head.weight".into(), embedding);
    let (data, _, report) = converted(&c.write());
    assert!(report.notices.iter().any(|n| n.contains("lm_head.weight holds what")), "{report:?}");
    c.tensors.remove("lm_head.weight");
    assert!(data == converted(&c.write()).0);
}

/// Heads are tied where there is none, whatever classes assume.
#[test]
fn heads_of_their_own_are_read() {
    let mut alone = Checkpoint::llama();
    let tied_in_vain = |c: &Checkpoint| {
        let mut c =
            wrapped(c, "Mistral3ForConditionalGeneration", "llama", ["model.language_model.", "lm_head."]);
        c.config["tie_word_embeddings"] = true.into();
        converted(&c.write()).0
    };
    assert!(tied_in_vain(&alone) == converted(&alone.write()).0);
    alone.tensors.remove("lm_head.weight");
    let tied = tied_in_vain(&alone);
    alone.config["tie_word_embeddings"] = true.into();
    assert!(tied == converted(&alone.write()).0);
}

/// What nested configurations leave out is what their classes assume: here the extents of Gemma 3.
#[test]
fn extents_that_files_leave_out() {
    let mut c = wrapped(
        &Checkpoint::llama(),
        "Gemma3ForConditionalGeneration",
        "gemma3_text",
        ["language_model.model.", "language_model.lm_head."],
    );
    c.config["text_config"] = json!({"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
        "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024});
    c.config["eos_token_id"] = json!([1, 106]);
    let e = c.write().refusal(&Options::default());
    assert!(e.contains("language_model.model.embed_tokens.weight") && e.contains("[262208, 2560]"), "{e}");
}

/// The fields of early releases of Qwen2.5-VL lie among those of the whole.
#[test]
fn flat_configurations() {
    let alone = Checkpoint::qwen2_plain();
    let mut c = wrapped(&alone, "Qwen2_5_VLForConditionalGeneration", "qwen2", ["model.", "lm_head."]);
    let mut config = alone.config.clone();
    config["architectures"] = json!(["Qwen2_5_VLForConditionalGeneration"]);
    config["rope_scaling"] = json!({"type": "mrope", "mrope_section": [2, 3, 3]});
    config["rope_theta"] = json!(10000.0);
    config["vision_config"] = json!({"depth": 32});
    c.config = config;
    assert!(converted(&c.write()).0 == converted(&alone.write()).0);
}

/// Releases of Qwen3-VL-MoE store experts transposed, newer writers do not.
#[test]
fn experts_of_qwen3_vl_either_way() {
    let mut alone = Checkpoint::qwen3_moe();
    alone.config["norm_topk_prob"] = true.into();
    alone.config["moe_intermediate_size"] = 24.into();
    alone.config["rope_theta"] = json!(5e5);
    let at = "model.layers.1.mlp.experts";
    for e in 0..4 {
        for (name, shape) in [("gate_proj", [24, 32]), ("up_proj", [24, 32]), ("down_proj", [32, 24])] {
            alone.add(&format!("{at}.{e}.{name}.weight"), &shape);
        }
    }
    let expected = converted(&alone.write()).0;
    let mut plain = alone.clone();
    let mut stack = |names: [&str; 2]| -> Vec<f32> {
        (0..4)
            .flat_map(|e| names.map(|n| (e, n)))
            .filter(|(_, n)| !n.is_empty())
            .flat_map(|(e, n)| plain.tensors.remove(&format!("{at}.{e}.{n}.weight")).unwrap().1)
            .collect()
    };
    let (gate_up, down) = (stack(["gate_proj", "up_proj"]), stack(["down_proj", ""]));
    for turned in [false, true] {
        let mut c = plain.clone();
        for (name, values, [rows, cols]) in
            [("gate_up_proj", &gate_up, [48, 32]), ("down_proj", &down, [32, 24])]
        {
            let tensor = if turned {
                (vec![4, cols, rows], transposed(values, rows, cols))
            } else {
                (vec![4, rows, cols], values.clone())
            };
            c.tensors.insert(format!("{at}.{name}"), tensor);
        }
        c.config.as_object_mut().unwrap().remove("norm_topk_prob");
        let place = ["model.language_model.", "lm_head."];
        let c = wrapped(&c, "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", place);
        assert!(converted(&c.write()).0 == expected, "transposed: {turned}");
    }
}

fn transposed(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    values
        .chunks_exact(rows * cols)
        .flat_map(|m| (0..cols).flat_map(move |c| (0..rows).map(move |r| m[r * cols + c])))
        .collect()
}

#[test]
fn text_models_without_a_recipe_are_named() {
    let place = ["language_model.model.", "language_model.lm_head."];
    let refused = |kind: &str| {
        wrapped(&Checkpoint::llama(), "Llama4ForConditionalGeneration", kind, place)
            .write()
            .refusal(&Options::default())
    };
    let e = refused("llama4_text");
    for part in ["text_config.model_type", "llama4_text", "Llama4ForConditionalGeneration", "qwen3_vl_text"] {
        assert!(e.contains(part), "{e}");
    }
    assert!(refused("gemma2").contains("gemma2"), "the text model of PaliGemma sees its prompt both ways");
    let mut c = wrapped(&Checkpoint::llama(), "LlavaForConditionalGeneration", "llama", place);
    c.config["text_config"]["model_type"] = Value::Null;
    assert!(c.write().refusal(&Options::default()).contains("text_config.model_type is absent"));
}

#[test]
fn tensors_that_are_not_there_or_there_twice() {
    let place = ["model.language_model.", "lm_head."];
    let c = wrapped(&Checkpoint::llama(), "LlavaForConditionalGeneration", "llama", place);
    let mut bare = c.clone();
    bare.tensors.remove("model.language_model.embed_tokens.weight");
    let e = bare.write().refusal(&Options::default());
    assert!(e.contains("expected one of") && e.contains("language_model.model.embed_tokens.weight"), "{e}");
    let mut twice = c.clone();
    twice.add("language_model.lm_head.weight", &[64, 32]);
    let e = twice.write().refusal(&Options::default());
    assert!(e.contains("language_model.lm_head.weight") && e.contains("\"lm_head.weight\""), "{e}");
    let mut extra = c.clone();
    extra.add("model.language_model.layers.0.extra.weight", &[8]);
    let e = extra.write().refusal(&Options::default());
    assert!(e.contains("layers.0.extra"), "{e}");
    let mut short = c;
    short.tensors.remove("model.language_model.norm.weight");
    let e = short.write().refusal(&Options::default());
    assert!(e.contains("norm.weight") && e.contains("not in the checkpoint"), "{e}");
}
