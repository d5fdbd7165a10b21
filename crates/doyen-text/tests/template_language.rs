//! The template language, line by line, against Python.
//!
//! Expected texts are those of Jinja2 3.1.6 in the environment of `transformers`, with the variables below.

use doyen_text::{Now, TemplateError, template::render};

const VARIABLES: &str = r#"{"m": {"role": "user", "content": "Hi\nthere\n\nyou", "tags": ["x", "y"], "inner": {"deep": {"er": 5}}}, "s": "a.b.c", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}"#;

fn rendered(template: &str) -> Result<String, TemplateError> {
    render(template.as_bytes(), VARIABLES.as_bytes(), Now::from_unix(1_709_210_096))
}

#[test]
fn evaluates_as_python_does() {
    for (template, expected) in SAME {
        assert_eq!(rendered(template).as_deref(), Ok(*expected), "{template}");
    }
}

#[test]
fn refuses_what_python_refuses() {
    for template in REFUSED {
        assert!(rendered(template).is_err(), "{template}");
    }
}

const SAME: &[(&str, &str)] = &[
    (
        "{{ true }} {{ false }} {{ none }} {{ 1 }} {{ 1.0 }} {{ 1.5 }} {{ -3 }}",
        "True False None 1 1.0 1.5 -3",
    ),
    (
        "{{ [1, 'a', none, true, 2.5] }} {{ {'a': 1, 'b': [2]} }} {{ (1, 2) }} {{ (1,) }}",
        "[1, 'a', None, True, 2.5] {'a': 1, 'b': [2]} (1, 2) (1,)",
    ),
    (
        r#"{{ ["it's", 'say "x"', 'both \' "', 'tab\t', 'é', '日本'] }}"#,
        "[\"it's\", 'say \"x\"', 'both \\' \"', 'tab\\t', 'é', '日本']",
    ),
    ("{{ undefined_thing }}|{{ undefined_thing|default('d') }}|{{ undefined_thing is defined }}", "|d|False"),
    (
        "{{ m.absent }}|{{ m.absent is defined }}|{{ m['absent'] is undefined }}|{{ m.get('absent') }}|{{ m.get('absent', 3) }}",
        "|False|True|None|3",
    ),
    ("{{ m.role }} {{ m['role'] }} {{ m.get('role') }}", "user user user"),
    (
        "{% for k, v in m.items() %}{{ k }}={{ v }};{% endfor %}",
        "role=user;content=Hi\nthere\n\nyou;tags=['x', 'y'];inner={'deep': {'er': 5}};",
    ),
    (
        "{{ m.keys()|list }} {{ m.values()|list }}",
        "['role', 'content', 'tags', 'inner'] ['user', 'Hi\\nthere\\n\\nyou', ['x', 'y'], {'deep': {'er': 5}}]",
    ),
    (
        "{{ m }}",
        "{'role': 'user', 'content': 'Hi\\nthere\\n\\nyou', 'tags': ['x', 'y'], 'inner': {'deep': {'er': 5}}}",
    ),
    (
        "{{ s.split('.') }} {{ s.split('.', 1) }} {{ ' a  b '.split() }} {{ 'a,b'.split(',')[-1] }}",
        "['a', 'b', 'c'] ['a', 'b.c'] ['a', 'b'] b",
    ),
    (
        "{{ 'a.b.c'.rsplit('.', 1) }} {{ ' a  b c '.rsplit(None, 1) }} {{ 'abc'.rsplit('.') }}",
        "['a.b', 'c'] [' a  b', 'c'] ['abc']",
    ),
    (
        r"{{ ' xx '.strip() }}|{{ 'xxaxx'.strip('x') }}|{{ 'xxaxx'.lstrip('x') }}|{{ 'xxaxx'.rstrip('x') }}|{{ '\n\na\n'.strip('\n') }}",
        "xx|a|axx|xxa|a",
    ),
    (
        "{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abc'.startswith(('x', 'y')) }}",
        "True True False",
    ),
    ("{{ 'a-b'.replace('-', '+') }} {{ 'aaa'.replace('a', 'b', 2) }}", "a+b bba"),
    (
        r#"{{ 'heLLo wORLD'.title() }} {{ "they're bill's".title() }} {{ 'heLLo'.capitalize() }} {{ 'heLLo'.upper() }} {{ 'heLLo'.lower() }} {{ 'heLLo'.swapcase() }}"#,
        "Hello World They'Re Bill'S Hello HELLO hello HEllO",
    ),
    (
        r"{{ 'a\nb\r\nc\rd'.splitlines() }} {{ 'a\nb\n'.splitlines(true) }} {{ 'a\nb'.splitlines(keepends=true) }} {{ ''.splitlines() }}",
        "['a', 'b', 'c', 'd'] ['a\\n', 'b\\n'] ['a\\n', 'b'] []",
    ),
    (
        "{{ 'abcabc'.find('c') }} {{ 'abcabc'.rfind('c') }} {{ 'abc'.find('x') }} {{ 'abcabc'.count('bc') }} {{ 'abcabc'.index('c') }}",
        "2 5 -1 2 2",
    ),
    (
        "{{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ 'a=b=c'.partition('=') }} {{ 'a=b=c'.rpartition('=') }} {{ 'abc'.partition('=') }}",
        "bc ab ('a', '=', 'b=c') ('a=b', '=', 'c') ('abc', '', '')",
    ),
    (
        "{{ '7'.zfill(3) }} {{ '-7'.zfill(4) }} {{ 'a'.ljust(3) }}| {{ 'a'.rjust(3, '.') }} {{ 'a'.center(4, '-') }} {{ 'ab'.center(5, '-') }}",
        "007 -007 a  | ..a -a-- --ab-",
    ),
    (
        "{{ '12'.isdigit() }} {{ 'a1'.isalnum() }} {{ 'ab'.isalpha() }} {{ ' '.isspace() }} {{ 'AB'.isupper() }} {{ 'ab'.islower() }} {{ '1.5'.isnumeric() }} {{ '12'.isdecimal() }}",
        "True True True True True True False True",
    ),
    ("{{ ', '.join(['a', 'b']) }} {{ ['a', 'b']|join('-') }} {{ [1, 2, 3]|join }}", "a, b a-b 123"),
    (
        "{{ '{} and {}'.format('x', 1) }} {{ '{0}{1}{0}'.format('a', 'b') }} {{ '{a}'.format(a=3) }} {{ '%s=%d'|format('x', 5) }}",
        "x and 1 aba 3 x=5",
    ),
    (
        "{{ 'abc'[0] }} {{ 'abc'[-1] }} {{ 'abc'[1:] }} {{ 'abc'[::-1] }} {{ 'abcdef'[1:5:2] }} {{ 'abc'[5:] }}",
        "a c bc cba bd ",
    ),
    (
        "{{ [1,2,3][0] }} {{ [1,2,3][-1] }} {{ [1,2,3][1:] }} {{ [1,2,3][::-1] }} {{ [1,2,3][:-1] }}",
        "1 3 [2, 3] [3, 2, 1] [1, 2]",
    ),
    ("{{ [1,2,3][7] is defined }} {{ 'abc'[7] is defined }}", "False False"),
    (
        "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 4 / 2 }} {{ 2 ** 10 }} {{ 2 ** 0.5 }} {{ 1 + 2.0 }}",
        "3 -4 1 2 3.5 2.0 1024 1.4142135623730951 3.0",
    ),
    (
        "{{ 'a' ~ 1 ~ none ~ true ~ 1.5 }} {{ 'a' + 'b' }} {{ 'ab' * 3 }} {{ [1] * 2 }} {{ [1] + [2] }}",
        "a1NoneTrue1.5 ab ababab [1, 1] [1, 2]",
    ),
    (
        "{{ 1 == 1.0 }} {{ 1 == true }} {{ '1' == 1 }} {{ none == false }} {{ [1] == [1] }} {{ {'a': 1} == {'a': 1.0} }}",
        "True True False False True True",
    ),
    (
        "{{ 1 < 2 < 3 }} {{ 'a' < 'b' }} {{ not 1 }} {{ 1 and 2 }} {{ 0 or 'x' }} {{ none or [] or 'z' }} {{ '' and 1 }}|",
        "True True False 2 x z |",
    ),
    (
        "{{ 'a' in 'abc' }} {{ 'z' not in 'abc' }} {{ 1 in [1, 2] }} {{ 'role' in m }} {{ 'user' in m }} {{ '' in 'abc' }}",
        "True True True True False True",
    ),
    ("{{ 'yes' if 1 else 'no' }} {{ 'yes' if 0 }}|", "yes |"),
    (
        "{{ 'a' is string }} {{ 1 is number }} {{ 1.0 is float }} {{ 1 is integer }} {{ true is boolean }} {{ true is number }} {{ true is integer }} {{ 1 is true }} {{ true is true }}",
        "True True True True True True False False True",
    ),
    (
        "{{ m is mapping }} {{ [] is mapping }} {{ [] is sequence }} {{ 'a' is sequence }} {{ m is sequence }} {{ 1 is sequence }} {{ (1,) is sequence }}",
        "True False True True True False True",
    ),
    (
        "{{ 'a' is iterable }} {{ m is iterable }} {{ [] is iterable }} {{ 1 is iterable }} {{ none is iterable }} {{ nope is iterable }}",
        "True True True False False True",
    ),
    (
        "{{ none is none }} {{ nope is none }} {{ nope is undefined }} {{ 3 is odd }} {{ 4 is even }} {{ 4 is divisibleby(2) }} {{ 4 is divisibleby 3 }}",
        "True False True True True True False",
    ),
    (
        "{{ 1 is eq 1 }} {{ 1 is ne 2 }} {{ 1 is lt 2 }} {{ 'a' is in 'abc' }} {{ 1 is in [1] }} {{ 'abc' is lower }} {{ 'ABC' is upper }} {{ none is sameas none }} {{ m is sameas(m) }}",
        "True True True True True True True True True",
    ),
    (
        "{{ raise_exception is callable }} {{ 1 is callable }} {{ nope is not defined }} {{ m.role is not string }}",
        "True False True False",
    ),
    ("{{ 'abc'|length }} {{ m|length }} {{ [1,2]|count }} {{ nope|length }}", "3 4 2 0"),
    ("{{ ' a '|trim }}| {{ '  ab'|trim('a ') }} {{ 'xay'|trim('xy') }}", "a| b a"),
    (
        "{{ 'a b'|upper }} {{ 'A'|lower }} {{ 'hello world-x'|title }} {{ 'hELLO'|capitalize }} {{ 'aXa'|replace('a', 'b') }} {{ 'aaa'|replace('a', 'b', 1) }}",
        "A B a Hello World-X Hello bXb baa",
    ),
    (
        "{{ [3,1,2]|sort }} {{ [3,1,2]|sort(reverse=true) }} {{ ['b','A']|sort }} {{ [1,1,2]|unique|list }} {{ [1,2,3]|reverse|list }} {{ 'abc'|reverse }}",
        "[1, 2, 3] [3, 2, 1] ['A', 'b'] [1, 2] [3, 2, 1] cba",
    ),
    (
        "{{ [1,2,3]|first }} {{ [1,2,3]|last }} {{ [1,2,3]|max }} {{ [1,2,3]|min }} {{ [1,2,3]|sum }} {{ -3|abs }} {{ 2.567|round(1) }} {{ 2.5|round }} {{ 2.1|round(0, 'ceil') }}",
        "1 3 3 1 6 3 2.6 2.0 3.0",
    ),
    (
        "{{ '3'|int + 1 }} {{ 'x'|int(7) }} {{ '2.5'|float }} {{ 3|string + 'a' }} {{ 3.0|string }} {{ 'abc'|list }} {{ m|list }}",
        "4 7 2.5 3a 3.0 ['a', 'b', 'c'] ['role', 'content', 'tags', 'inner']",
    ),
    (
        "{{ [{'a': 1, 'b': 2}, {'a': 3}]|map(attribute='a')|list }} {{ ['a','b']|map('upper')|list }} {{ [{'a': 1}, {}]|map(attribute='a', default=0)|list }}",
        "[1, 3] ['A', 'B'] [1, 0]",
    ),
    (
        "{{ [1,2,3,4]|select('even')|list }} {{ [1,2,3]|reject('odd')|list }} {{ [0,1]|select|list }}",
        "[2, 4] [2] [1]",
    ),
    (
        "{{ [{'r': 'u', 'x': 1}, {'r': 'a'}]|selectattr('r', 'equalto', 'u')|list }} {{ [{'r': 1}, {'r': 0}]|selectattr('r')|list }} {{ [{'r': 'u'}, {'r': 'a'}]|rejectattr('r', '==', 'u')|list }} {{ [{'r': 'u'}, {'q': 'a'}]|selectattr('r', 'defined')|list }}",
        "[{'r': 'u', 'x': 1}] [{'r': 1}] [{'r': 'a'}] [{'r': 'u'}]",
    ),
    (
        "{{ [{'g': 'x', 'v': 1}, {'g': 'y', 'v': 2}, {'g': 'x', 'v': 3}]|groupby('g')|length }} {% for g, l in [{'g': 'x', 'v': 1}, {'g': 'y', 'v': 2}]|groupby('g') %}{{ g }}:{{ l }};{% endfor %}",
        "2 x:[{'g': 'x', 'v': 1}];y:[{'g': 'y', 'v': 2}];",
    ),
    (
        "{{ {'b': 1, 'a': 2}|dictsort }} {{ {'b': 1, 'a': 2}|items|list }} {{ [1,2,3,4,5]|batch(2)|list }} {{ [1,2,3]|slice(2)|list }}",
        "[('a', 2), ('b', 1)] [('b', 1), ('a', 2)] [[1, 2], [3, 4], [5]] [[1, 2], [3]]",
    ),
    (
        r"{{ 'a\nb'|indent }} {{ 'a\nb'|indent(2, true) }} {{ 'a\n\nb'|indent(2, first=true, blank=true) }} {{ 'a\nb'|indent('> ') }}",
        "a\n    b   a\n  b   a\n  \n  b a\n> b",
    ),
    (
        "{{ '<a>'|e }} {{ '<a>'|safe }} {{ '<a>' }} {{ 'a b'|wordcount }} {{ 'x'|default('d') }} {{ ''|default('d', true) }} {{ none|default('d') }} {{ none|d('d', true) }}",
        "&lt;a&gt; <a> <a> 2 x d None d",
    ),
    (
        r#"{{ m|tojson }} {{ 'é<>&\'"\n\u2028'|tojson }} {{ [1.0, 1e20, 1.5e-7, none, true]|tojson }} {{ {1: 2, none: 3, true: 4}|tojson }} {{ {}|tojson }} {{ []|tojson }} {{ (1, 2)|tojson }}"#,
        "{\"role\": \"user\", \"content\": \"Hi\\nthere\\n\\nyou\", \"tags\": [\"x\", \"y\"], \"inner\": {\"deep\": {\"er\": 5}}} \"é<>&'\\\"\\n\u{2028}\" [1.0, 1e+20, 1.5e-07, null, true] {\"1\": 4, \"null\": 3} {} [] [1, 2]",
    ),
    (
        r"{{ {'b': [1, {'c': []}], 'a': {}}|tojson(indent=2) }} {{ [1]|tojson(indent=0) }} {{ {'b': 1, 'a': 2}|tojson(sort_keys=true) }} {{ {'a': [1, 2]}|tojson(separators=(',', ':')) }} {{ 'é\x7f😀'|tojson(ensure_ascii=true) }} {{ {'a': 1}|tojson(indent=1, separators=(';', '=')) }} {{ [1]|tojson(indent='\t') }}",
        "{\n  \"b\": [\n    1,\n    {\n      \"c\": []\n    }\n  ],\n  \"a\": {}\n} [\n1\n] {\"a\": 2, \"b\": 1} {\"a\":[1,2]} \"\\u00e9\\u007f\\ud83d\\ude00\" {\n \"a\"=1\n} [\n\t1\n]",
    ),
    ("{% set x = 1 %}{% for i in [1,2] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}", "231"),
    (
        "{% set ns = namespace(x=1, y='a') %}{% for i in [1,2] %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}{{ ns.y }}",
        "4a",
    ),
    ("{% set t %}block {{ 1 }}{% endset %}{{ t }} {% set u | upper %}abc{% endset %}{{ u }}", "block 1 ABC"),
    (
        "{% for i in range(5) if i is odd %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.first }}{{ loop.last }}{{ loop.length }} {% else %}none{% endfor %}",
        "102TrueFalse2 211FalseTrue2 ",
    ),
    (
        "{% for i in [] %}x{% else %}empty{% endfor %} {% for i in nope %}x{% else %}undef{% endfor %}",
        "empty undef",
    ),
    (
        "{% for i in [1,2,3] %}{{ loop.previtem|default('-') }}{{ i }}{{ loop.nextitem|default('-') }}{{ loop.cycle('a','b') }}{{ loop.changed(i) }} {% endfor %}",
        "-12aTrue 123bTrue 23-aTrue ",
    ),
    (
        "{% for i in range(10) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "0134",
    ),
    (
        "{% for a, b in [[1,2],[3,4]] %}{{ a }}-{{ b }};{% endfor %}{% for k in {'x': 1, 'y': 2} %}{{ k }}{% endfor %}{% for c in 'abc' %}{{ c }}.{% endfor %}",
        "1-2;3-4;xya.b.c.",
    ),
    (
        "{% for x in [[1,[2]],[3]] recursive %}{% if x is iterable %}[{{ loop(x) }}]{% else %}{{ x }}{% endif %}{% endfor %}",
        "[1[2]][3]",
    ),
    (
        "{% macro f(a, b=2, c='d') %}{{ a }}{{ b }}{{ c }}{% endmacro %}{{ f(1) }} {{ f(1, c=5) }} {{ f(b=1, a=2) }}",
        "12d 125 21d",
    ),
    (
        "{% macro g(x) %}<{{ caller() if caller else x }}>{% endmacro %}{{ g(1) }}{% call g(2) %}in{% endcall %} {% macro h() %}{{ caller(5) }}{% endmacro %}{% call(n) h() %}n={{ n }}{% endcall %}",
        "<1><in> n=5",
    ),
    ("{% macro rec(n) %}{{ n }}{% if n > 0 %}{{ rec(n - 1) }}{% endif %}{% endmacro %}{{ rec(3) }}", "3210"),
    ("{% with a = 1, b = 2 %}{{ a }}{{ b }}{% endwith %}{{ a }}", "12"),
    (
        "{% filter upper %}abc{{ 'd' }}{% endfilter %} {% raw %}{{ x }}{% endraw %} {# comment #}",
        "ABCD {{ x }} ",
    ),
    (
        "{% if nope %}a{% elif m %}b{% else %}c{% endif %} {% if not nope and m.role == 'user' %}d{% endif %}",
        "b d",
    ),
    ("a {%- if true -%} b {%- endif -%} c {{- 'd' -}} e", "abcde"),
    (
        "{{ range(3)|list }} {{ range(1, 6, 2)|list }} {{ range(3, 0, -1)|list }} {{ dict(a=1, b='x') }} {{ dict(m, z=1)|length }}",
        "[0, 1, 2] [1, 3, 5] [3, 2, 1] {'a': 1, 'b': 'x'} 5",
    ),
    (
        "{% set l = [1, 2] %}{{ l + [3] }} {{ l|length }} {{ l.index(2) }} {{ l.count(1) }} {{ l.copy() }}",
        "[1, 2, 3] 2 1 1 [1, 2]",
    ),
    (
        "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now is defined }} {{ raise_exception is defined }}",
        "2024-02-29 True True",
    ),
    ("{% set j = joiner('|') %}{{ j() }}a{{ j() }}b", "a|b"),
    (
        r#"{{ 1_000 }} {{ 0x1f }} {{ 1e3 }} {{ 'a' 'b' }} {{ "\u00e9\x41\101" }} {{ 'it\'s' }} {{ "a\\n" }}"#,
        "1000 31 1000.0 ab éAA it's a\\n",
    ),
    (
        "{{ m['ro' ~ 'le'] }} {{ m.tags[0] }} {{ m.tags.0 }} {{ m.inner.deep.er }} {{ m['inner']['deep'].get('er') }}",
        "user x x 5 5",
    ),
    (
        "{{ messages[0].content[:3] + '...' }} {{ (messages|last).role }} {{ messages|map(attribute='role')|join(',') }} {{ messages|length - 1 }}",
        "Be ... user system,user 1",
    ),
    (
        "{{ 'Ünïcode'.lower() }} {{ 'straße'.upper() }} {{ 'É'|lower }} {{ 'é'|length }} {{ '😀x'[0] }}",
        "ünïcode STRASSE é 1 😀",
    ),
    (
        "{{ ('a', 'b')[1] }} {{ ['x', 'y']|join(', ') if true }} {{ none|string }} {{ true|string }} {{ [true]|string }}",
        "b x, y None True [True]",
    ),
    (
        "{{ 1 if m.absent is undefined else 2 }} {{ m.absent or 'fallback' }} {{ (m.absent or {}).get('x', 'y') }} {{ m.absent|default({})|length }}",
        "1 fallback y 0",
    ),
    (
        "{{ messages[1:]|length }} {{ messages[-1:][0].role }} {{ messages[:0] }} {{ (messages + [m])|length }}",
        "1 user [] 3",
    ),
    (
        "{{ 'x' * 0 }}| {{ 3 * 'ab' }} {{ 2 * [0] }} {{ 10 // 3 * 3 + 10 % 3 }} {{ -2 ** 2 }} {{ 7.5 // 2 }} {{ 1 / 3 }}",
        "| ababab [0, 0] 10 4 3.0 0.3333333333333333",
    ),
    (
        "{{ 1000000 * 1000000 }} {{ 9007199254740993 }} {{ 123456789012345678901234567890 }} {{ 0.1 + 0.2 }} {{ 100.0 }} {{ 1e15 }}",
        "1000000000000 9007199254740993 123456789012345678901234567890 0.30000000000000004 100.0 1000000000000000.0",
    ),
    (
        r#"{{ m is eq m }} {{ [1, 2] is sameas [1, 2] }} {{ 'a,b;c'|replace(',', ' ')|replace(';', ' ')|trim }} {{ "a"|default }}"#,
        "True False a b c a",
    ),
    (
        "{{ nope is defined and nope.x }} {{ not nope }} {{ nope == none }} {{ nope|list }} {{ nope|join }} {{ nope|string }} {{ nope in [1] }} {{ nope|trim }}",
        "False True False []   False ",
    ),
    (
        "{{ 'abc'|first }} {{ 'abc'|last }} {{ {'a': 1}|first }} {{ []|first is defined }} {{ [[1, 2], [3]]|sum(start=[]) }} {{ ['a']|join('x') }}",
        "a c a False [1, 2, 3] a",
    ),
    (
        r"{{ m.content is string and m.content|trim != '' }} {{ m.content.split('\n')|length }} {{ m.content.split('\n\n')[0] }}",
        "True 4 Hi\nthere",
    ),
    ("{{ none.x }}|{{ none['x'] }}|{{ 5.x }}", "||"),
    (
        "{{ {'a': 1}.a }} {{ {'a': {'b': 2}}['a']['b'] }} {{ {'items': 3}['items'] }} {{ {'items': 3}.items() | list }} {{ {'get': 1, 'keys': 2}.get('get') }}",
        "1 2 3 [('items', 3)] 1",
    ),
];

const REFUSED: &[&str] = &[
    "{% set a, b = 1, 2 %}{{ a }}{{ b }} {% set a = b = 3 if false else 4 %}",
    "{%- set x = {'a': 1} -%}{%- set _ = x.update({'b': 2}) -%}{{ x }}",
    "{%- set l = [] -%}{%- set _ = l.append(1) -%}{{ l }}",
    "{{ raise_exception('no: ' ~ 1) }}",
    "{{ m.absent.deeper }}",
    "{{ 'a' + 1 }}",
    "{{ nope() }}",
    "{{ 1 / 0 }}",
    "{{ m.nosuchmethod() }}",
    "{{ nope + 'a' }}",
    "{{ 'a'|nosuchfilter }}",
    "{{ nope|tojson }}",
    "{{ 'x'.index('y') }}",
    "{% for i in 5 %}{% endfor %}",
    "{{ none.get('x') }}",
    "{% if messages[0]['role'] == 'user' and (messages|length) > 1 %}ok{% endif %} {{ (1 if 0 else 2) + 3 }} {{ [i for i in []] if false }}",
];
