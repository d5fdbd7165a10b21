//! Chat templates in the styles of released models, against Python.
//!
//! The templates in `chat/` are written for these tests. The expected texts are those of Jinja2 3.1.6 in the
//! environment of `transformers` (sandboxed, `trim_blocks`, `lstrip_blocks`, loop controls, its `tojson`), at
//! 2024-02-29 12:34:56.

use doyen_text::{ChatInput, ChatTemplate, NamedTokens, Now, TemplateError};
use serde_json::{Value, json};

struct Case {
    template: &'static str,
    /// Key of the conversation in `chat/inputs.json`.
    messages: &'static str,
    tools: bool,
    prompt: bool,
    extra: &'static str,
    /// The text, or the message of `raise_exception`.
    expected: Result<&'static str, &'static str>,
}

fn source(name: &str) -> &'static str {
    match name {
        "chatml" => include_str!("chat/chatml.jinja"),
        "llama3" => include_str!("chat/llama3.jinja"),
        "qwen3" => include_str!("chat/qwen3.jinja"),
        "mistral" => include_str!("chat/mistral.jinja"),
        "gemma" => include_str!("chat/gemma.jinja"),
        "deepseek" => include_str!("chat/deepseek.jinja"),
        "harmony" => include_str!("chat/harmony.jinja"),
        "training" => include_str!("chat/training.jinja"),
        _ => panic!("no template {name}"),
    }
}

#[test]
fn renders_as_python_does() {
    let inputs: Value = serde_json::from_str(include_str!("chat/inputs.json")).unwrap();
    let tokens =
        NamedTokens::from_config(json!({"bos_token": "<s>", "eos_token": "</s>"}).as_object().unwrap());
    for case in CASES {
        let what = format!("{} on {}, tools {}, {}", case.template, case.messages, case.tools, case.extra);
        let template = ChatTemplate::new(source(case.template), case.template).unwrap();
        let extra: Value = serde_json::from_str(case.extra).unwrap();
        let rendered = template.render(&ChatInput {
            messages: inputs[case.messages].as_array().unwrap(),
            tools: case.tools.then(|| inputs["tools"].as_array().unwrap().as_slice()),
            documents: None,
            add_generation_prompt: case.prompt,
            tokens: &tokens,
            extra: extra.as_object().unwrap(),
            now: Now::from_unix(1_709_210_096),
        });
        match case.expected {
            Ok(text) => assert_eq!(rendered.unwrap_or_else(|e| panic!("{what}: {e}")), text, "{what}"),
            Err(message) => {
                assert_eq!(
                    rendered.unwrap_err(),
                    TemplateError::Raised { message: message.to_owned() },
                    "{what}"
                );
            }
        }
    }
}

const CASES: &[Case] = &[
    Case {
        template: "chatml",
        messages: "chat",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi, who's there? <b>é</b><|im_end|>\n<|im_start|>assistant\n Me.\n<|im_end|>\n<|im_start|>user\nGood.<|im_end|>\n<|im_start|>assistant\n",
        ),
    },
    Case {
        template: "chatml",
        messages: "plain",
        tools: false,
        prompt: false,
        extra: "{}",
        expected: Ok(
            "<|im_start|>user\nHi, who's there? <b>é</b><|im_end|>\n<|im_start|>assistant\n Me.\n<|im_end|>\n<|im_start|>user\nGood.<|im_end|>\n",
        ),
    },
    Case {
        template: "llama3",
        messages: "chat",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<s><|start_header_id|>system<|end_header_id|>\n\nDate: 29 Feb 2024\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi, who's there? <b>é</b><|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nMe.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nGood.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    },
    Case {
        template: "llama3",
        messages: "plain",
        tools: true,
        prompt: true,
        extra: "{\"date_string\": \"26 Jul 2024\"}",
        expected: Ok(
            "<s><|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nDate: 26 Jul 2024\n\n{\n    \"type\": \"function\",\n    \"function\": {\n        \"name\": \"get_weather\",\n        \"description\": \"Weather <now> & later\",\n        \"parameters\": {\n            \"type\": \"object\",\n            \"properties\": {\n                \"city\": {\n                    \"type\": \"string\",\n                    \"description\": \"The city\"\n                },\n                \"unit\": {\n                    \"type\": \"string\",\n                    \"enum\": [\n                        \"C\",\n                        \"F\"\n                    ],\n                    \"default\": \"C\"\n                },\n                \"days\": {\n                    \"type\": \"array\",\n                    \"items\": {\n                        \"type\": \"integer\"\n                    }\n                },\n                \"when\": {\n                    \"oneOf\": [\n                        {\n                            \"type\": \"string\"\n                        },\n                        {\n                            \"type\": \"number\"\n                        }\n                    ],\n                    \"default\": \"now\"\n                },\n                \"detail\": {\n                    \"type\": [\n                        \"boolean\",\n                        \"null\"\n                    ],\n                    \"default\": true\n                }\n            },\n            \"required\": [\n                \"city\"\n            ]\n        }\n    }\n}\n\n{\n    \"type\": \"function\",\n    \"function\": {\n        \"name\": \"time\",\n        \"description\": \"Time of day\"\n    }\n}\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi, who's there? <b>é</b><|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nMe.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nGood.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    },
    Case {
        template: "llama3",
        messages: "tooled",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<s><|start_header_id|>system<|end_header_id|>\n\nDate: 29 Feb 2024\n\n<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWeather?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Zürich\", \"days\": [1, 2]}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n\"{\\\"t\\\": 21.5}\"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    },
    Case {
        template: "qwen3",
        messages: "chat",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\nHi, who's there? <b>é</b><|im_end|>\n<|im_start|>assistant\n Me.\n<|im_end|>\n<|im_start|>user\nGood.<|im_end|>\n<|im_start|>assistant\n",
        ),
    },
    Case {
        template: "qwen3",
        messages: "chat",
        tools: true,
        prompt: true,
        extra: "{\"enable_thinking\": false}",
        expected: Ok(
            "<|im_start|>system\n Be brief. \n\n# Tools\n<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \"description\": \"Weather <now> & later\", \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\", \"description\": \"The city\"}, \"unit\": {\"type\": \"string\", \"enum\": [\"C\", \"F\"], \"default\": \"C\"}, \"days\": {\"type\": \"array\", \"items\": {\"type\": \"integer\"}}, \"when\": {\"oneOf\": [{\"type\": \"string\"}, {\"type\": \"number\"}], \"default\": \"now\"}, \"detail\": {\"type\": [\"boolean\", \"null\"], \"default\": true}}, \"required\": [\"city\"]}}}\n{\"type\": \"function\", \"function\": {\"name\": \"time\", \"description\": \"Time of day\"}}\n</tools>\nAnswer: <tool_call>\n{\"name\": \"NAME\", \"arguments\": {}}\n</tool_call><|im_end|>\n<|im_start|>user\nHi, who's there? <b>é</b><|im_end|>\n<|im_start|>assistant\n Me.\n<|im_end|>\n<|im_start|>user\nGood.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
    },
    Case {
        template: "qwen3",
        messages: "thought",
        tools: false,
        prompt: false,
        extra: "{}",
        expected: Ok(
            "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n3+3?<|im_end|>\n<|im_start|>assistant\n<think>\nAlso easy.\n</think>\n\n6<|im_end|>\n",
        ),
    },
    Case {
        template: "qwen3",
        messages: "answered",
        tools: true,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<|im_start|>system\n# Tools\n<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \"description\": \"Weather <now> & later\", \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\", \"description\": \"The city\"}, \"unit\": {\"type\": \"string\", \"enum\": [\"C\", \"F\"], \"default\": \"C\"}, \"days\": {\"type\": \"array\", \"items\": {\"type\": \"integer\"}}, \"when\": {\"oneOf\": [{\"type\": \"string\"}, {\"type\": \"number\"}], \"default\": \"now\"}, \"detail\": {\"type\": [\"boolean\", \"null\"], \"default\": true}}, \"required\": [\"city\"]}}}\n{\"type\": \"function\", \"function\": {\"name\": \"time\", \"description\": \"Time of day\"}}\n</tools>\nAnswer: <tool_call>\n{\"name\": \"NAME\", \"arguments\": {}}\n</tool_call><|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": [1, 2]}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n{\"t\": 21.5}\n</tool_response><|im_end|>\n<|im_start|>assistant\nWarm.<|im_end|>\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n",
        ),
    },
    Case {
        template: "qwen3",
        messages: "tooled",
        tools: false,
        prompt: true,
        extra: "{\"enable_thinking\": true}",
        expected: Ok(
            "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": [1, 2]}}\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n{\"t\": 21.5}\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
    },
    Case {
        template: "qwen3",
        messages: "parts",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n look <|im_end|>\n<|im_start|>assistant\n",
        ),
    },
    Case {
        template: "mistral",
        messages: "chat",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok("<s>[INST] Hi, who's there? <b>é</b>[/INST] Me.</s>[INST]  Be brief. \n\nGood.[/INST]"),
    },
    Case {
        template: "mistral",
        messages: "tooled",
        tools: true,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<s>[AVAILABLE_TOOLS] [{\"type\": \"function\", \"function\": {\"name\": \"get_weather\", \"description\": \"Weather <now> & later\", \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\", \"description\": \"The city\"}, \"unit\": {\"type\": \"string\", \"enum\": [\"C\", \"F\"], \"default\": \"C\"}, \"days\": {\"type\": \"array\", \"items\": {\"type\": \"integer\"}}, \"when\": {\"oneOf\": [{\"type\": \"string\"}, {\"type\": \"number\"}], \"default\": \"now\"}, \"detail\": {\"type\": [\"boolean\", \"null\"], \"default\": true}}, \"required\": [\"city\"]}}}, {\"type\": \"function\", \"function\": {\"name\": \"time\", \"description\": \"Time of day\"}}][/AVAILABLE_TOOLS][INST] Weather?[/INST][TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": [1, 2]}, \"id\": \"abcdefghi\"}]</s>[TOOL_RESULTS] {\"content\": {\"t\": 21.5}, \"call_id\": \"abcdefghi\"}[/TOOL_RESULTS]",
        ),
    },
    Case {
        template: "mistral",
        messages: "bad",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Err("Roles must take turns: turn 2 is user, not assistant"),
    },
    Case {
        template: "mistral",
        messages: "answered",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<s>[INST] Weather?[/INST][TOOL_CALLS] [{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Zürich\", \"days\": [1, 2]}, \"id\": \"abcdefghi\"}]</s>[TOOL_RESULTS] {\"content\": {\"t\": 21.5}, \"call_id\": \"abcdefghi\"}[/TOOL_RESULTS] Warm.</s>[INST] Thanks[/INST]",
        ),
    },
    Case {
        template: "gemma",
        messages: "chat",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<s><start_of_turn>user\n Be brief. \n\nHi, who's there? <b>é</b><end_of_turn>\n<start_of_turn>model\nMe.<end_of_turn>\n<start_of_turn>user\nGood.<end_of_turn>\n<start_of_turn>model\n",
        ),
    },
    Case {
        template: "gemma",
        messages: "parts",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<s><start_of_turn>user\nS\n\n<start_of_image>look<end_of_turn>\n<start_of_turn>model\n",
        ),
    },
    Case {
        template: "gemma",
        messages: "bad",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Err("turns must alternate"),
    },
    Case {
        template: "deepseek",
        messages: "chat",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<s> Be brief. <｜User｜>Hi, who's there? <b>é</b><｜Assistant｜> Me.\n</s><｜User｜>Good.<｜Assistant｜><think>\n",
        ),
    },
    Case {
        template: "deepseek",
        messages: "answered",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<s><｜User｜>Weather?<｜Assistant｜><｜calls｜><｜call｜>function<｜sep｜>get_weather\n```json\n{\"city\": \"Zürich\", \"days\": [1, 2]}\n```<｜calls end｜></s><｜outputs｜><｜output｜>{\"t\": 21.5}<｜output end｜><｜outputs end｜>Warm.</s><｜User｜>Thanks<｜Assistant｜><think>\n 1/0.5/0",
        ),
    },
    Case {
        template: "deepseek",
        messages: "tooled",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<s><｜User｜>Weather?<｜Assistant｜><｜calls｜><｜call｜>function<｜sep｜>get_weather\n```json\n{\"city\": \"Zürich\", \"days\": [1, 2]}\n```<｜calls end｜></s><｜outputs｜><｜output｜>{\"t\": 21.5}<｜output end｜><｜outputs end｜> 1/0.5/0",
        ),
    },
    Case {
        template: "deepseek",
        messages: "thought",
        tools: false,
        prompt: false,
        extra: "{}",
        expected: Ok("<s><｜User｜>2+2?<｜Assistant｜>\n\n4</s><｜User｜>3+3?<｜Assistant｜>\n\n6</s>"),
    },
    Case {
        template: "harmony",
        messages: "chat",
        tools: true,
        prompt: true,
        extra: "{\"reasoning_effort\": \"high\"}",
        expected: Ok(
            "<|start|>system<|message|>An assistant.\nCurrent date: 2024-02-29\nReasoning: high<|end|><|start|>developer<|message|># Instructions\n Be brief. \n# Tools\nnamespace functions {\n// Weather <now> & later\ntype get_weather = (_: {\n// The city\ncity: string,\nunit?: \"C\" | \"F\", // default: \"C\"\ndays?: number[],\nwhen?: string | number, // default: \"now\"\ndetail?: boolean | null, // default: true\n}) => any;\n// Time of day\ntype time = () => any;\n}<|end|><|start|>user<|message|>Hi, who's there? <b>é</b><|end|><|start|>assistant<|channel|>final<|message|> Me.\n<|end|><|start|>user<|message|>Good.<|end|><|start|>assistant",
        ),
    },
    Case {
        template: "harmony",
        messages: "tooled",
        tools: true,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<|start|>system<|message|>An assistant.\nCurrent date: 2024-02-29\nReasoning: medium<|end|><|start|>developer<|message|># Tools\nnamespace functions {\n// Weather <now> & later\ntype get_weather = (_: {\n// The city\ncity: string,\nunit?: \"C\" | \"F\", // default: \"C\"\ndays?: number[],\nwhen?: string | number, // default: \"now\"\ndetail?: boolean | null, // default: true\n}) => any;\n// Time of day\ntype time = () => any;\n}<|end|><|start|>user<|message|>Weather?<|end|><|start|>assistant<|channel|>analysis<|message|>ask<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{\"city\":\"Zürich\",\"days\":[1,2]}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>\"{\\\"t\\\": 21.5}\"<|end|><|start|>assistant",
        ),
    },
    Case {
        template: "harmony",
        messages: "answered",
        tools: false,
        prompt: false,
        extra: "{\"model_identity\": \"X.\"}",
        expected: Ok(
            "<|start|>system<|message|>X.\nCurrent date: 2024-02-29\nReasoning: medium<|end|><|start|>user<|message|>Weather?<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{\"city\":\"Zürich\",\"days\":[1,2]}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>\"{\\\"t\\\": 21.5}\"<|end|><|start|>assistant<|channel|>final<|message|>Warm.<|end|><|start|>user<|message|>Thanks<|end|>",
        ),
    },
    Case {
        template: "harmony",
        messages: "plain",
        tools: false,
        prompt: false,
        extra: "{}",
        expected: Ok(
            "<|start|>system<|message|>An assistant.\nCurrent date: 2024-02-29\nReasoning: medium<|end|><|start|>user<|message|>Hi, who's there? <b>é</b><|end|><|start|>assistant<|channel|>final<|message|> Me.\n<|end|><|start|>user<|message|>Good.<|end|>",
        ),
    },
    Case {
        template: "training",
        messages: "thought",
        tools: false,
        prompt: false,
        extra: "{}",
        expected: Ok(
            "<user>2+2?\n<a><think>\nEasy.\n</think>\n\n4</a></s>\n<user>3+3?\n<a><think>\nAlso easy.\n</think>\n\n6</a></s>\nFalse",
        ),
    },
    Case {
        template: "training",
        messages: "chat",
        tools: false,
        prompt: true,
        extra: "{}",
        expected: Ok(
            "<system> Be brief. \n<user>Hi, who's there? <b>é</b>\n<a>Me.</a></s>\n<user>Good.\nFalse",
        ),
    },
];
