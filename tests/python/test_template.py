"""Chat templates: rendering as transformers does it, sources, refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pykestrel import ChatTemplate, FormatError, InvalidArgument, TemplateError
from pykestrel._ffi import Isa
from pykestrel._guard import Guard

USER = [{"role": "user", "content": "hi"}]


def render(source, messages=USER, **options):
    return ChatTemplate(source, origin="test").render(messages, **options).text


def test_messages_and_generation_prompt():
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert render(source) == "<user>hi\n<assistant>"
    assert render(source, add_generation_prompt=False) == "<user>hi\n"


def test_blocks_are_trimmed_as_transformers_trims_them():
    assert render("{% if true %}\n    {% if true %}\nx\n    {% endif %}\n{% endif %}\ny") == "x\ny"


def test_loop_controls_and_generation_block():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}"
    assert render(source + "{% endfor %}", [*USER, *USER]) == "hi"


def test_what_a_generation_block_sets_stays_inside():
    source = "{% set a = 1 %}{% generation %}{% set a = 2 %}{% endgeneration %}{{ a }}"
    assert render(source) == "1"


def test_tojson_keeps_characters_and_order():
    tools = [{"name": "z<&>é", "a": 1}]
    assert render("{{ tools[0] | tojson }}", tools=tools) == '{"name": "z<&>é", "a": 1}'
    indented = render("{{ tools[0] | tojson(indent=2) }}", tools=tools)
    assert indented == json.dumps(tools[0], indent=2, ensure_ascii=False)


def test_template_arguments():
    source = "{{ enable_thinking is defined and enable_thinking is false }}"
    assert render(source, enable_thinking=False) == "True"
    assert render(source) == "False"


def test_none_valued_keys_are_dropped():
    messages = [{"role": "user", "content": "x", "tool_calls": None}]
    assert render("{{ 'tool_calls' in messages[0] }}", messages) == "False"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_known_under_all_its_names(name):
    messages = [{"role": "assistant", "content": "", name: "because"}]
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    assert render(source, messages) == "becausebecause"


def test_the_callers_messages_are_not_touched():
    messages = [{"role": "assistant", "content": None, "thinking": "t"}]
    render("{{ messages[0].role }}", messages)
    assert messages == [{"role": "assistant", "content": None, "thinking": "t"}]


def test_date_and_raise():
    assert render("{{ strftime_now('%Y') | int > 2000 }}") == "True"
    with pytest.raises(TemplateError, match="test: no tools please"):
        render("{{ raise_exception('no tools please') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set n = namespace(_x=1) %}",
        "{% set n = namespace(a=1) %}{% set n._x = 1 %}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ 'a' * messages }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_misbehaves_is_one_error(source):
    with pytest.raises(TemplateError, match=r"^test: "):
        render(source)


def test_what_a_template_must_not_see_is_undefined_to_it():
    assert render("{{ ''.__class__ }}{{ messages.__class__ is defined }}") == "False"


def test_syntax_errors_name_origin_and_line():
    with pytest.raises(TemplateError, match=r"some\.jinja: line 2: "):
        ChatTemplate("\n{% endfor %}", origin="some.jinja")


@pytest.mark.parametrize(
    "messages",
    [["hi"], [{"content": "x"}], [{"role": 1}], [{"role": "user", "content": object()}]],
)
def test_wrong_messages(messages):
    with pytest.raises(InvalidArgument):
        render("x", messages)


def test_scalars_with_methods_are_stripped_of_them(tmp_path):
    """numpy's float64 is a float, and can write files."""
    messages = [{"role": "user", "content": [np.float64(0.5), Isa.AVX2]}]
    assert render("{{ messages[0].content }}", messages) == "[0.5, 2]"
    target = tmp_path / "written"
    source = "{% set x = messages[0].content[0] %}{% if x.tofile %}{{ x.tofile(path) }}{% endif %}"
    render(source, messages, path=str(target))
    assert not target.exists()


def test_messages_that_contain_themselves():
    message = {"role": "user", "content": []}
    message["content"].append(message)
    with pytest.raises(InvalidArgument, match="nested"):
        render("x", [message])


# -- sources ---------------------------------------------------------------------------------------


def test_sources_in_order(tmp_path):
    with pytest.raises(TemplateError, match="no chat template"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert ChatTemplate.load(tmp_path).source == "from json"
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "from config", "bos_token": {"content": "<s>"}}')
    assert ChatTemplate.load(tmp_path).source == "from config"
    (tmp_path / "chat_template.jinja").write_text("from jinja {{ bos_token }}")
    template = ChatTemplate.load(tmp_path)
    assert template.render(USER).text == "from jinja <s>"
    (tmp_path / "mine").write_text("mine")
    assert ChatTemplate.load(tmp_path, file=tmp_path / "mine").source == "mine"


def test_named_templates(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).source == "d"
    assert ChatTemplate.load(tmp_path, name="tool_use").source == "t"
    template = ChatTemplate.load(tmp_path)
    assert template.render(USER).text == "d"
    assert template.render(USER, tools=[{"name": "f"}]).text == "t"
    with pytest.raises(TemplateError, match="'rag' among default, tool_use"):
        ChatTemplate.load(tmp_path, name="rag")


def test_additional_templates(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("d")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("t {{ x }}")
    template = ChatTemplate.load(tmp_path)
    assert template.render(USER).text == "d"
    assert template.render(USER, tools=[{"name": "f"}], x=1).text == "t 1"


@pytest.mark.parametrize("found", [3, [3], [{"name": "a"}], [{"name": "a", "template": 3}]])
def test_named_templates_that_are_none(tmp_path, found):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
    with pytest.raises(FormatError, match=r"tokenizer_config\.json: chat_template"):
        ChatTemplate.load(tmp_path)


def test_unreadable_sources(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": 3}')
    with pytest.raises(FormatError, match=str(config)):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(FormatError, match=r"not UTF-8 \(byte 2\)"):
        ChatTemplate.load(tmp_path)


# -- control tokens in the input -------------------------------------------------------------------

GUARD = Guard(["<|im_start|>", "<|im_end|>"], ["<think>"])
SOURCE = "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|im_end|>{% endfor %}"


def marked(content, role="user", source=SOURCE):
    template = ChatTemplate(source, origin="test")
    return template.render([{"role": role, "content": content}], guard=GUARD)


def test_only_the_input_is_marked():
    rendered = marked("<|im_end|>")
    inside = rendered.marked.removeprefix("<|im_start|>").removesuffix("<|im_end|>")
    assert inside == f"<{rendered.mark}|im_end|>"
    assert rendered.text == "<|im_start|><|im_end|><|im_end|>"


def test_harmless_input_is_not_marked():
    assert not marked("a < b |im_end|> c").has_marks


def test_a_token_cannot_be_joined_from_parts():
    source = "{% for part in messages[0].content %}{{ part.text | trim }}{% endfor %}"
    for cut in range(1, len("<|im_end|>")):
        parts = [{"text": "<|im_end|>"[:cut] + " "}, {"text": "<|im_end|>"[cut:]}]
        rendered = marked(parts, source=source)
        assert rendered.text == "<|im_end|>"
        assert "<|im_end|>" not in rendered.marked


def test_a_mark_that_occurs_in_the_input_is_not_used():
    rendered = marked("\ufdd0<|im_end|>")
    assert rendered.mark != "\ufdd0"
    assert "\ufdd0<|im_end|>" in rendered.text
    with pytest.raises(InvalidArgument, match="noncharacters"):
        marked("".join(map(chr, range(0xFDD0, 0xFDF0))))


def test_tools_and_arguments_are_marked_too():
    template = ChatTemplate("{{ tools | tojson }}{{ x }}", origin="test")
    rendered = template.render(
        USER, tools=[{"<|im_end|>": ["<|im_start|>"]}], x="<|im_end|>", guard=GUARD
    )
    assert "<|im_end|>" not in rendered.marked
    assert "<|im_start|>" not in rendered.marked
    assert rendered.text == '[{"<|im_end|>": ["<|im_start|>"]}]<|im_end|>'


def test_a_models_own_tokens_stay_tokens():
    assert not marked("<think>x", role="assistant").has_marks
    assert marked("<think>x", role="user").has_marks
    assert marked("<|im_end|>", role="assistant").has_marks
    assert not marked("<tool_response><think></tool_response>").has_marks


def test_overlapping_tokens_are_all_marked():
    template = ChatTemplate("{{ messages[0].content }}", origin="test")
    rendered = template.render([{"role": "user", "content": "<a<b>"}], guard=Guard(["<a<", "<b>"]))
    assert "<a<" not in rendered.marked
    assert "<b>" not in rendered.marked


def test_a_message_full_of_control_tokens():
    content = "<|im_end|>" * 50_000
    rendered = marked(content)
    assert rendered.text == f"<|im_start|>{content}<|im_end|>"
    assert rendered.marked.count("<|im_end|>") == 1
