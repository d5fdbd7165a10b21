//! The tokenizer against known ids, and against files that are not what they should be.

mod fixtures;

use doyen_tensor::TokenId;
use doyen_text::{Specials, Tokenizer, TokenizerError, TokenizerFiles};
use fixtures::{all, byte_fallback, byte_level, load, shared, special};
use proptest::prelude::*;
use serde_json::{Value, json};

fn ids(raw: &[u32]) -> Vec<TokenId> {
    raw.iter().copied().map(TokenId).collect()
}

fn error(document: &Value) -> String {
    Tokenizer::from_bytes(document.to_string().as_bytes(), None).unwrap_err().to_string()
}

#[test]
fn byte_level_encodes_decodes_and_finds_special_tokens_in_text() {
    let tokenizer = load(&byte_level());
    let encoded = tokenizer.encode("hello world<|end|>").unwrap();
    assert_eq!(encoded[..2], ids(&[259, 260]));
    assert_eq!(encoded.last(), Some(&TokenId(263)));
    assert_eq!(tokenizer.decode(&encoded, Specials::Skip).unwrap(), "hello world");
    assert_eq!(tokenizer.decode(&encoded, Specials::Keep).unwrap(), "hello world<|end|>");
    assert_eq!(tokenizer.vocab_size(), 266);
    assert_eq!(tokenizer.token_to_id("Ġw"), Some(TokenId(260)));
    assert_eq!(tokenizer.token_to_id("<|start|>"), Some(TokenId(264)));
    assert_eq!(tokenizer.token_to_id("absent"), None);
    assert_eq!(tokenizer.id_to_token(TokenId(260)).as_deref(), Some("Ġw"));
    assert_eq!(tokenizer.id_to_token(TokenId(266)), None);
    assert!(tokenizer.is_special(TokenId(263)) && !tokenizer.is_special(TokenId(265)));
}

#[test]
fn framing_is_added_only_when_asked_for() {
    let tokenizer = load(&byte_fallback());
    let plain = tokenizer.encode("hi").unwrap();
    assert_eq!(plain, [tokenizer.token_to_id("▁hi").unwrap()]);
    assert_eq!(tokenizer.encode_with_special("hi").unwrap(), [TokenId(1), plain[0]]);
    assert_eq!(tokenizer.decode(&plain, Specials::Skip).unwrap(), "hi");
}

#[test]
fn padding_and_truncation_settings_never_change_a_prompt() {
    let mut document = byte_level();
    document["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    document["padding"] = json!({"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": null,
                                 "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
    let tokenizer = load(&document);
    assert_eq!(tokenizer.encode("abcdef").unwrap().len(), 6);
    assert_eq!(tokenizer.encode_with_special("abcdef").unwrap().len(), 6);
}

#[test]
fn named_tokens_come_from_either_file() {
    let document = byte_level().to_string();
    let tokenizer = Tokenizer::from_files(&TokenizerFiles {
        tokenizer: document.as_bytes(),
        config: Some(br#"{"eos_token": {"content": "<|end|>"}}"#),
        special_tokens_map: Some(br#"{"bos_token": "<|start|>", "eos_token": "x"}"#),
    })
    .unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(TokenId(264)), Some(TokenId(263))));
    assert_eq!(load(&byte_level()).eos(), None);
}

#[test]
fn docmoe_prompts_encode_to_the_golden_ids() {
    let tokenizer = Tokenizer::from_bytes(&shared("models/docmoe-hf/tokenizer.json"), None).unwrap();
    let golden = shared("goldens/docmoe/golden.safetensors");
    let golden = safetensors::SafeTensors::deserialize(&golden).unwrap();
    let tensor = |name: &str| -> Vec<TokenId> {
        let bytes = golden.tensor(name).unwrap().data().to_vec();
        bytes
            .chunks_exact(8)
            .map(|b| TokenId(u32::try_from(i64::from_le_bytes(b.try_into().unwrap())).unwrap()))
            .collect()
    };
    let texts = [
        (
            "The client sends a request to the server, and",
            " then sends a reply.\nThe client sends a reply to the client, sending the reply to the client. The reply is sent by the client, and the reply is sent.\nThe reply is sent by",
        ),
        (
            "```python\nimport os\n\ndef main():\n",
            "\ndef main():\n    return os.path.abspath(os.path.dirname(__file__), 'rb')\n\nif __name__ == '__main__':\n    main()\n```\nThe main module",
        ),
        (
            "# Getting started\n\nThis guide explains how to create a new project. Before you begin, make sure that you have installed",
            " the new project. Before you start the new project, you'll need to create a new directory called \"projects\".\n## Installing a new project\nTo create a new project, use the following command:\n```\n$",
        ),
    ];
    for (k, (prompt, answer)) in texts.into_iter().enumerate() {
        assert_eq!(tokenizer.encode(prompt).unwrap(), tensor(&format!("prompt_{k}")), "prompt {k}");
        let greedy = tensor(&format!("greedy_{k}"));
        assert_eq!(tokenizer.decode(&greedy, Specials::Skip).unwrap(), answer, "answer {k}");
    }
    assert_eq!(tokenizer.vocab_size(), 8192);
}

/// The held-out text is the subject of a golden likelihood, whose README counts its tokens.
#[test]
fn docmoe_heldout_has_the_documented_number_of_tokens() {
    let tokenizer = Tokenizer::from_bytes(&shared("models/docmoe-hf/tokenizer.json"), None).unwrap();
    let text = String::from_utf8(shared("models/docmoe-hf/heldout.txt")).unwrap();
    assert_eq!(tokenizer.encode(&text).unwrap().len(), 117_359);
}

/// Ids by Hugging Face `tokenizers` 0.23.3 for one text through the checkpoint layouts of several families.
#[test]
fn released_layouts_agree_with_the_python_library() {
    let text = "Hello, wörld! 12345 don't\n\n  indented\t😀 日本語 <|im_end|>";
    for (family, expected) in PYTHON_IDS {
        let tokenizer =
            Tokenizer::from_bytes(&shared(&format!("goldens/{family}/checkpoint/tokenizer.json")), None)
                .unwrap();
        assert_eq!(tokenizer.encode_with_special(text).unwrap(), ids(expected), "{family}");
    }
}

const PYTHON_IDS: &[(&str, &[u32])] = &[
    (
        "qwen3_moe",
        &[
            42, 607, 318, 14, 286, 130, 117, 84, 78, 70, 3, 223, 19, 20, 21, 22, 23, 281, 263, 9, 86, 201,
            201, 223, 617, 311, 278, 200, 175, 256, 249, 225, 223, 165, 248, 101, 165, 253, 108, 167, 106,
            255, 223, 2,
        ],
    ),
    (
        "llama",
        &[
            1, 42, 608, 318, 14, 286, 130, 117, 84, 78, 70, 3, 223, 788, 21, 22, 23, 281, 263, 9, 86, 201,
            201, 223, 618, 311, 278, 200, 175, 256, 249, 225, 223, 165, 248, 101, 165, 253, 108, 167, 106,
            255, 223, 30, 94, 309, 65, 276, 70, 94, 32,
        ],
    ),
    (
        "gemma3",
        &[
            2, 299, 580, 421, 372, 346, 199, 186, 341, 335, 327, 260, 362, 276, 277, 278, 279, 280, 362, 327,
            370, 266, 343, 14, 14, 369, 972, 445, 484, 13, 244, 163, 156, 132, 362, 234, 155, 169, 234, 160,
            176, 236, 174, 162, 362, 287, 351, 573, 322, 693, 351, 289,
        ],
    ),
    (
        "glm4_moe",
        &[
            42, 607, 318, 14, 286, 130, 117, 84, 78, 70, 3, 223, 19, 20, 21, 22, 23, 281, 263, 9, 86, 201,
            201, 223, 617, 311, 278, 200, 175, 256, 249, 225, 223, 165, 248, 101, 165, 253, 108, 167, 106,
            255, 223, 2,
        ],
    ),
];

/// Splits by several regular expressions of a model's own, in the manner of DeepSeek-V2; ids as above.
#[test]
fn any_regular_expression_may_split() {
    let split = |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let mut document: Value =
        serde_json::from_slice(&shared("goldens/llama/checkpoint/tokenizer.json")).unwrap();
    document["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        split("[\r\n]"), split("\\s?[\\p{L}]+"), split("\\s?\\p{P}+"), split("[一-龥ࠀ-一가-\u{d7ff}]+"),
        {"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]});
    let text = "Hello, wörld! 12345 don't\n\n  indented\t😀 日本語 <|im_end|>";
    let expected = [
        1, 42, 608, 318, 14, 286, 130, 117, 84, 78, 70, 3, 223, 19, 20, 21, 22, 23, 281, 263, 9, 86, 201,
        201, 223, 618, 311, 278, 200, 175, 256, 249, 225, 223, 165, 248, 101, 165, 253, 108, 167, 106, 255,
        223, 30, 94, 309, 65, 276, 70, 94, 32,
    ];
    assert_eq!(load(&document).encode_with_special(text).unwrap(), ids(&expected));
}

#[test]
fn errors_name_the_file_and_the_reason() {
    let not_json = Tokenizer::from_bytes(b"{\"model\": ", None).unwrap_err();
    assert!(matches!(not_json, TokenizerError::NotJson { .. }));
    assert!(not_json.to_string().starts_with("tokenizer.json is not valid JSON: EOF"), "{not_json}");
    let config = Tokenizer::from_bytes(byte_level().to_string().as_bytes(), Some(b"[]")).unwrap_err();
    assert_eq!(config.to_string(), "tokenizer_config.json: the document is not a JSON object");

    let mut document = byte_level();
    document["model"]["type"] = json!("Quantum");
    assert_eq!(
        error(&document),
        "tokenizer.json: the model type \"Quantum\" is unknown; known are BPE, Unigram, WordPiece, WordLevel"
    );
    for (bytes, part) in [
        (&b""[..], "the file is empty"),
        (b"[]", "not a JSON object"),
        (b"{}", "no \"model\" object"),
        (b"{\"model\": {\"type\": \"BPE\"}}", "no \"vocab\""),
        (b"{\"model\": {\"type\": \"BPE\", \"vocab\": {}}}", "vocabulary is empty"),
        (b"\xff\xfe", "not valid JSON"),
    ] {
        let said = Tokenizer::from_bytes(bytes, None).unwrap_err().to_string();
        assert!(said.contains(part), "{said}");
    }
}

#[test]
fn hostile_files_are_refused() {
    let refused = |change: &dyn Fn(&mut Value), part: &str| {
        let mut document = byte_level();
        change(&mut document);
        let said = error(&document);
        assert!(said.starts_with("tokenizer.json") && said.contains(part), "{said}");
    };
    refused(&|d| d["model"]["vocab"]["hello"] = json!(u32::MAX), "too large");
    refused(&|d| d["model"]["vocab"]["hello"] = json!(-1), "has the id -1");
    refused(&|d| d["model"]["vocab"][&"x".repeat(70_000)] = json!(300), "the limit is 65535");
    refused(&|d| d["model"]["merges"] = json!([["h", "q"]]), "");
    refused(&|d| d["model"]["merges"] = json!([["h"]]), "");
    refused(&|d| d["model"]["continuing_subword_prefix"] = json!("##"), "continuation prefix");
    refused(&|d| d["added_tokens"][0]["id"] = json!(1_000_000_000u64), "too large");
    refused(&|d| d["added_tokens"][0]["id"] = json!(300), "declared with id 300");
    refused(&|d| d["added_tokens"][0]["content"] = json!(""), "is empty");
    refused(&|d| d["version"] = json!("9.0"), "9.0");
    refused(&|d| d["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0}), "length 0");
    refused(
        &|d| {
            d["pre_tokenizer"] =
                json!({"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": false});
        },
        "",
    );
    refused(
        &|d| d["normalizer"] = json!({"type": "Nonsense"}),
        "the normalizer has the unknown type \"Nonsense\"; known are BertNormalizer,",
    );
    let doubling = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
    refused(
        &|d| d["normalizer"] = json!({"type": "Sequence", "normalizers": vec![doubling.clone(); 60]}),
        "times longer",
    );
    let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(
        Tokenizer::from_bytes(nested.as_bytes(), None).unwrap_err().to_string().contains("recursion limit")
    );

    let mut document = byte_fallback();
    document["decoder"]["decoders"][3]["stop"] = json!(1);
    assert!(error(&document).contains("is not supported"));
    document = byte_fallback();
    document["post_processor"]["special_tokens"]["<s>"]["ids"] = json!([4_000_000_000u32]);
    assert!(error(&document).contains("4000000000"), "{}", error(&document));
    document = fixtures::metaspace();
    document["model"]["unk_id"] = json!(99);
    assert!(error(&document).contains("unk_id 99"));
}

fn json_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,6}".prop_map(Value::from),
        Just(json!([])),
        Just(json!({})),
        Just(json!({"type": "Sequence"})),
        Just(json!([["a", "b"], "c d", 1])),
        Just(special(3, "<z>")),
    ]
}

/// Places in a document, as JSON pointers; only the first few entries of a vocabulary.
fn places(value: &Value, at: &str, out: &mut Vec<String>) {
    out.push(at.to_owned());
    let escape = |key: &str| key.replace('~', "~0").replace('/', "~1");
    match value {
        Value::Object(map) => {
            map.iter().take(20).for_each(|(key, v)| places(v, &format!("{at}/{}", escape(key)), out));
        }
        Value::Array(list) => {
            list.iter().enumerate().take(20).for_each(|(i, v)| places(v, &format!("{at}/{i}"), out));
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// One value of a good file replaced by something else: an error or a tokenizer that works, never a panic.
    #[test]
    fn damaged_files_do_not_panic(which in 0usize..5, place in any::<prop::sample::Index>(), value in json_value()) {
        let mut document = vec![byte_level(), byte_fallback(), fixtures::metaspace(), fixtures::word_piece(), fixtures::word_level()]
            .swap_remove(which);
        let mut found: Vec<String> = Vec::new();
        places(&document, "", &mut found);
        let pointer: &String = place.get(&found);
        *document.pointer_mut(pointer).unwrap() = value;
        if let Ok(tokenizer) = Tokenizer::from_bytes(document.to_string().as_bytes(), None) {
            let text = "hello <s> world é 😀\n";
            if let Ok(ids) = tokenizer.encode_with_special(text) {
                prop_assert!(ids.iter().all(|id| id.index() < tokenizer.vocab_size().max(1 << 20)));
                let _ = tokenizer.decode(&ids, Specials::Keep);
            }
        }
    }

    #[test]
    fn bytes_that_are_no_tokenizer_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(Tokenizer::from_bytes(&bytes, Some(&bytes)).is_err());
    }

    #[test]
    fn byte_level_text_survives_the_round_trip(text in ".{0,40}") {
        let tokenizer = load(&byte_level());
        let encoded = tokenizer.encode(&text).unwrap();
        prop_assert_eq!(tokenizer.decode(&encoded, Specials::Keep).unwrap(), text);
    }
}

#[test]
fn every_kind_of_tokenizer_loads_and_encodes() {
    for (name, tokenizer) in all() {
        assert!(!tokenizer.encode("hello").unwrap().is_empty(), "{name}");
    }
}
