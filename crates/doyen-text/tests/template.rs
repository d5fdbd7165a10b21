//! Chat templates: choice, variables, errors, limits and hostile sources.

use doyen_text::template::render;
use doyen_text::{ChatInput, ChatTemplate, ChatTemplates, NamedTokens, Now, TemplateError};
use proptest::prelude::*;
use serde_json::{Map, Value, json};

fn rendered(template: &str) -> Result<String, TemplateError> {
    render(template.as_bytes(), br#"{"x": [1, 2, 3]}"#, Now::from_unix(0))
}

fn config(template: &Value) -> Vec<u8> {
    json!({ "chat_template": template }).to_string().into_bytes()
}

fn plain(template: &ChatTemplate) -> String {
    let (tokens, extra) = (NamedTokens::default(), Map::new());
    let input = ChatInput {
        messages: &[],
        tools: None,
        documents: None,
        add_generation_prompt: false,
        tokens: &tokens,
        extra: &extra,
        now: Now::from_unix(0),
    };
    template.render(&input).unwrap()
}

#[test]
fn the_jinja_file_comes_before_the_configuration() {
    let templates = ChatTemplates::find(Some(b"file"), Some(&config(&json!("config")))).unwrap().unwrap();
    assert_eq!(plain(templates.pick(true).unwrap()), "file");
    let templates = ChatTemplates::find(None, Some(&config(&json!("config")))).unwrap().unwrap();
    assert_eq!(plain(templates.pick(false).unwrap()), "config");
    for nothing in
        [None, Some(&b"{}"[..]), Some(br#"{"chat_template": null}"#), Some(br#"{"chat_template": []}"#)]
    {
        assert!(ChatTemplates::find(None, nothing).unwrap().is_none());
    }
}

#[test]
fn named_templates_are_picked_as_transformers_does() {
    let list = json!([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}, {"name": "rag", "template": "r"}]);
    for templates in [list, json!({"default": "d", "tool_use": "t", "rag": "r"})] {
        let templates = ChatTemplates::find(None, Some(&config(&templates))).unwrap().unwrap();
        assert_eq!(templates.names().collect::<Vec<_>>(), ["default", "tool_use", "rag"]);
        assert_eq!(plain(templates.pick(false).unwrap()), "d");
        assert_eq!(plain(templates.pick(true).unwrap()), "t");
        assert_eq!(plain(templates.get("rag").unwrap()), "r");
        let missing = templates.get("x").unwrap_err();
        assert_eq!(missing.to_string(), "there is no chat template \"x\"; there are default, tool_use, rag");
    }
    let only = ChatTemplates::find(None, Some(&config(&json!({"odd": "o"})))).unwrap().unwrap();
    assert_eq!(plain(only.pick(true).unwrap()), "o");
}

#[test]
fn errors_say_where_and_why() {
    let find = |bytes: &[u8]| ChatTemplates::find(None, Some(bytes)).unwrap_err().to_string();
    assert!(find(b"{").starts_with("tokenizer_config.json: not valid JSON: EOF"));
    assert!(find(&config(&json!(5))).contains("neither a text nor a list"));
    assert!(find(&config(&json!([{"name": "a"}]))).contains("neither a text nor a list"));
    let syntax = find(&config(&json!([{"name": "default", "template": "ok\n{% if %}"}])));
    assert!(
        syntax.starts_with("tokenizer_config.json, line 2: the chat template is not valid Jinja: "),
        "{syntax}"
    );
    let bytes = ChatTemplates::find(Some(b"ab\xff"), None).unwrap_err();
    assert_eq!(bytes, TemplateError::NotUtf8 { file: "chat_template.jinja".into(), at: 2 });
    let unknown = rendered("\n\n{{ x|nonsense }}").unwrap_err().to_string();
    assert!(unknown.starts_with("template, line 3: the chat template failed: unknown filter"), "{unknown}");
}

#[test]
fn the_templates_own_words_reach_the_user() {
    let nested = "{% macro m() %}{{ raise_exception('roles: ' ~ x) }}{% endmacro %}{% for i in x %}{{ m() }}{% endfor %}";
    assert_eq!(rendered(nested).unwrap_err(), TemplateError::Raised { message: "roles: [1, 2, 3]".into() });
    assert_eq!(
        rendered(nested).unwrap_err().to_string(),
        "the chat template refuses these messages: roles: [1, 2, 3]"
    );
}

#[test]
fn all_variables_arrive_and_extra_ones_win() {
    let tokens = NamedTokens::from_config(
        json!({"bos_token": "<s>", "pad_token": {"content": "<p>"}, "additional_special_tokens": ["<a>"]})
            .as_object()
            .unwrap(),
    );
    let extra = json!({"enable_thinking": false, "pad_token": "other"});
    let template = ChatTemplate::new(
        "{{ bos_token }}{{ pad_token }}{{ eos_token }}{{ additional_special_tokens }}{{ enable_thinking }}\
         {{ add_generation_prompt }}{{ tools is none }}{{ documents[0].title }}{{ messages }}",
        "test",
    )
    .unwrap();
    let text = template
        .render(&ChatInput {
            messages: &[json!({"role": "user", "n": 1.5, "big": u64::MAX, "none": null})],
            tools: None,
            documents: Some(&[json!({"title": "T"})]),
            add_generation_prompt: true,
            tokens: &tokens,
            extra: extra.as_object().unwrap(),
            now: Now::from_unix(0),
        })
        .unwrap();
    assert_eq!(
        text,
        "<s>other['<a>']FalseTrueTrueT[{'role': 'user', 'n': 1.5, 'big': 18446744073709551615, 'none': None}]"
    );
}

#[test]
fn endless_and_exploding_templates_end_with_an_error() {
    for template in [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ 'a' * 1000000000 }}",
        "{{ 'a'.ljust(100000000000) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ '%1000000000d'|format(1) }}",
        "{{ x|slice(100000000)|list }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    ] {
        let error = rendered(template).unwrap_err();
        assert!(matches!(error, TemplateError::Endless { .. }), "{template}: {error}");
    }
    for template in [
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% for a in x recursive %}{{ loop(x) }}{% endfor %}",
        "{% include 'chat_template' %}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ x|tojson(indent=1000000) }}",
        "{{ 'a'|indent(100000000) }}",
        "{{ 2 ** 100000 }}",
    ] {
        assert!(rendered(template).is_err(), "{template}");
    }
    let long = ChatTemplate::new(&" ".repeat(2 << 20), "long").unwrap_err();
    assert!(matches!(long, TemplateError::TooLong { .. }));
}

#[test]
fn deep_values_and_deep_sources_do_not_overflow_the_stack() {
    let nested =
        "{% set ns = namespace(x=[]) %}{% for i in range(100000) %}{% set ns.x = [ns.x] %}{% endfor %}";
    assert_eq!(rendered(&format!("{nested}done")).as_deref(), Ok("done"));
    assert_eq!(rendered(&format!("{nested}{{{{ ns.x == [ns.x] }}}}")).as_deref(), Ok("False"));
    assert_eq!(rendered(&format!("{nested}{{{{ (ns.x ~ '')|length }}}}")).as_deref(), Ok("200002"));
    assert!(
        rendered(&format!("{nested}{{{{ ns.x|tojson }}}}"))
            .unwrap_err()
            .to_string()
            .contains("nested more than 200")
    );
    assert_eq!(rendered(&format!("{{{{ 1{} }}}}", " + 1".repeat(100_000))).as_deref(), Ok("100001"));
    assert_eq!(rendered(&format!("{{{{ {}1 }}}}", "not ".repeat(100_000))).as_deref(), Ok("True"));
    let (open, close) = ("(".repeat(100_000), ")".repeat(100_000));
    assert!(matches!(rendered(&format!("{{{{ {open}1{close} }}}}")), Err(TemplateError::Syntax { .. })));
}

#[test]
fn a_long_conversation_stays_within_the_limits() {
    let template = ChatTemplate::new(include_str!("chat/qwen3.jinja"), "qwen3").unwrap();
    let turn = |i: usize| json!({"role": if i.is_multiple_of(2) { "user" } else { "assistant" }, "content": "words ".repeat(2000)});
    let messages: Vec<Value> = (0..400).map(turn).collect();
    let (tokens, extra) = (NamedTokens::default(), Map::new());
    let text = template
        .render(&ChatInput {
            messages: &messages,
            tools: None,
            documents: None,
            add_generation_prompt: true,
            tokens: &tokens,
            extra: &extra,
            now: Now::from_unix(0),
        })
        .unwrap();
    assert!(text.len() > 400 * 12_000);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_source_panics(
        source in "(\\{\\{|\\}\\}|\\{%|%\\}|\\{#|#\\}|if |for |in |endif|endfor|set |macro |endmacro|generation|x|ns\\.x|loop|messages|'|\"|\\[|\\]|\\(|\\)|\\||tojson|join|range|[0-9]|[-+*/~.,:= é\n]){0,40}",
        variables in prop_oneof![Just("{\"x\": [1, {\"a\": \"b\"}], \"messages\": []}"), Just("{}"), Just("[]"), Just("x")],
    ) {
        let _ = render(source.as_bytes(), variables.as_bytes(), Now::from_unix(0));
    }

    #[test]
    fn no_bytes_panic(source in prop::collection::vec(any::<u8>(), 0..60)) {
        let _ = render(&source, b"{}", Now::from_unix(0));
    }
}
