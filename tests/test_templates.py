"""Chat templates: what is written after an earlier prompt is what the template writes when it writes all of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from agentscope_tuner.chat.templates import _MARK, TurnTemplate

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = [{"type": "function", "id": "a", "function": {"name": "add", "arguments": {"b": 1, "a": [True, None, "é"]}}}]
MESSAGES = st.lists(
    st.one_of(
        st.builds(
            lambda role, content: {"role": role, "content": content},
            st.sampled_from(["user", "assistant", "tool", "system"]),
            st.sampled_from(["", "one", "<b>", " two\n", "<tool_response>x</tool_response>"]),
        ),
        st.just({"role": "assistant", "content": "", "tool_calls": CALL}),
    ),
    min_size=1,
    max_size=9,
)

HEADS = [
    "",
    "{{ bos_token }}",
    "{% if tools %}{{ tools | tojson }}{% endif %}",
    "{% if messages[0].role == 'system' %}S{{ messages[0].content }}{% else %}no system{% endif %}",
    "{{ messages | length }}",
    "{% set last = messages[-1] %}",
    "{% set first = messages[0].content %}",
    "{% set count = messages | length %}",
    "{% set ns = namespace(n=0, user=-1) %}",
    "{% set ns = namespace(n=0, user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=3, user=2) %}{% for m in messages[::-1] %}{% set ns.n = loop.index %}{% endfor %}",
    "{% set messages = messages[1:] %}",
    "{% set others = messages[1:] %}",
    "{% set others = messages[-1:] + messages %}",
    "{% if messages[0].role == 'system' %}{% set others = messages[1:] %}"
    "{% else %}{% set others = messages %}{% endif %}",
    "{% set others = messages | rejectattr('role', 'equalto', 'tool') | list %}",
    "{% macro said(m, plain=true) %}({{ m.content if plain else m.role }}){% endmacro %}",
    "{% macro said(m) %}{{ m.content }}{{ tools | length }}{{ ns.n }}{% endmacro %}",
    "{% macro said(m) %}{{ messages | length }}{% endmacro %}",
    "{% set others = [] %}{% set ns = namespace(n=[]) %}",
]
ROUNDS = [
    "{{ message.role }}:{{ message.content | trim }};",
    "{% if loop.first %}<{% endif %}{% if loop.last %}>{% endif %}",
    "{{ loop.index0 }}/{{ loop.index }}",
    "{{ loop.length }}",
    "{{ loop.revindex }}",
    "{{ loop.previtem.content }}",
    "{% if loop.nextitem is defined %}{{ loop.nextitem.role }}{% endif %}",
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}[{% endif %}",
    "{{ messages[loop.index0 - 1].content }}",
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}]{% endif %}",
    "{{ messages[loop.index0].role }}",
    "{{ messages[0].content }}",
    "{{ messages[2].content }}",
    "{{ messages[-1].content }}",
    "{{ (messages | last).content }}",
    "{{ messages[1:] | length }}",
    "{{ count }}{{ first }}{{ last.content }}",
    "{{ ns.user }}",
    "{% if loop.index0 > ns.user %}new{% endif %}",
    "{% set ns.n = ns.n + 1 %}{{ ns.n }}",
    "{% if message.role == 'user' %}{% set ns.user = loop.index0 %}{% endif %}",
    "{% set my = namespace(k=0) %}{% for c in message.content %}{% set my.k = loop.index0 %}{% endfor %}{{ my.k }}",
    "{% for call in message.tool_calls or [] %}{{ loop.index0 }}{{ call.function.arguments | tojson }}{% endfor %}",
    "{% for call in message.tool_calls or [] if loop.first %}{{ call.id }}{% endfor %}",
    "{% for other in messages %}{{ other.role[0] }}{% endfor %}",
    "{% for c in message.content %}{% if c == 'n' %}{% break %}{% endif %}{{ c }}"
    "{% else %}{{ loop.index0 }}{% endfor %}",
    "{% if message.content == 'one' %}{% continue %}{% endif %}",
    "{% if message.content == '<b>' %}{% break %}{% endif %}",
    "{{ said(message) }}",
    "{{ said(ns) }}",
    "{% set content = message.content ~ content %}{{ content }}",
    "{% set message = messages[0] %}",
    "{{ loop['index0'] }}",
    "{{ loop.cycle('a', 'b') }}{{ loop.changed(message.role) }}",
    "{% if not tools and add_generation_prompt %}{{ eos_token }}{% endif %}",
    "{% if message.role == 'system' and loop.index0 > 3 %}{{ raise_exception('late') }}{% endif %}",
    "{{ others.append(message) }}{{ others | length }}",
]
LOOPS = [
    "messages",
    "messages[1:]",
    "others",
    "messages | list",
    "messages if message.role != 'tool'",
    "messages[::-1]",
]
ENDS = [
    "",
    "{% if add_generation_prompt %}A:{% endif %}",
    "{{ messages[-1].role }}",
    "{{ ns.n }}{{ messages | length }}",
]


def whole(source: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str | None:
    """What transformers writes."""
    try:
        return str(render_jinja_template([messages], chat_template=source, **variables)[0][0])
    except Exception:
        return None


def check(source: str, messages: list[dict[str, Any]], tools: bool, cuts: list[int]) -> int:
    """Write all messages, some more at a time; returns how often what was written before was not written again."""
    variables: dict[str, Any] = {"tools": TOOLS if tools else None, "add_generation_prompt": True}
    variables |= {"bos_token": "<s>", "eos_token": "</s>", "documents": None}
    template = TurnTemplate.of(source)
    if template is None:
        return 0
    went_on = 0
    known, text, parts = 0, "", None
    for now in sorted({min(cut, len(messages)) for cut in cuts} | {len(messages)}):
        expected = whole(source, messages[:now], variables)
        following = None if parts is None else template.write(messages[:now], variables, known, parts)
        if following is not None:
            assert parts is not None
            went_on += 1
            assert text.removesuffix(parts.end) + following[0] == expected
            text, parts = text.removesuffix(parts.end) + following[0], following[1]
        elif (begun := template.write(messages[:now], variables)) is not None:
            text, parts = begun
            assert text == expected
        else:
            parts = None
        known = now
    return went_on


@given(
    st.lists(st.sampled_from(HEADS), max_size=2, unique=True),
    st.sampled_from(LOOPS[:1] * 9 + LOOPS),
    st.lists(st.sampled_from(ROUNDS), min_size=1, max_size=3),
    st.sampled_from(ENDS),
    MESSAGES,
    st.booleans(),
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
)
@settings(deadline=None, max_examples=400)
def test_whatever_a_template_says(
    heads: list[str], looped: str, rounds: list[str], end: str, messages: Any, tools: bool, cuts: list[int]
) -> None:
    source = f"{''.join(heads)}{{% for message in {looped} %}}{''.join(rounds)}{{% endfor %}}{end}"
    check(source, messages, tools, cuts)


CHATML = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\\n{% endif %}"
)
QWEN2 = (
    "{% for message in messages %}{% if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "U{{ message.content }}E{% elif message.role == 'assistant' %}A{{ message.content }}"
    "{% for tool_call in message.tool_calls or [] %}{% if tool_call.function is defined %}"
    "{% set tool_call = tool_call.function %}{% endif %}{{ tool_call.arguments | tojson }}{% endfor %}E"
    "{% elif message.role == 'tool' %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}U{% endif %}"
    "({{ message.content }}){% if loop.last or messages[loop.index0 + 1].role != 'tool' %}E{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}A{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(multi_step_tool=true, last_query_index=messages | length - 1) %}"
    "{% for message in messages[::-1] %}{% set index = (messages | length - 1) - loop.index0 %}"
    "{% if ns.multi_step_tool and message.role == 'user' %}{% set ns.multi_step_tool = false %}"
    "{% set ns.last_query_index = index %}{% endif %}{% endfor %}"
    "{% for message in messages %}{{ message.role }}{% if loop.index0 > ns.last_query_index %}<think>{% endif %}"
    "{{ message.content }}{% endfor %}A"
)
LLAMA3 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system_message = messages[0].content | trim %}"
    "{% set messages = messages[1:] %}{% else %}{% set system_message = '' %}{% endif %}{{ system_message }}"
    "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}{{ eos_token }}{% endfor %}A"
)


@pytest.mark.parametrize("source", [CHATML, QWEN2, QWEN3, LLAMA3])
def test_turns_of_the_usual_families_are_written_once(source: str) -> None:
    """One question, then calls and results: all but the first prompt go on from the one before."""
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    cuts = [2]
    for turn in range(9):
        messages += [{"role": "assistant", "content": f"a{turn}", "tool_calls": CALL}, {"role": "tool", "content": "r"}]
        cuts.append(len(messages))
    assert check(source, messages, True, cuts) == 9


def test_a_question_changes_what_was_written_before_it() -> None:
    said = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a"}]
    assert check(QWEN3, [*said, *said, *said], False, [2, 4]) == 0


@pytest.mark.parametrize(
    ("head", "first_round", "later"),
    [
        pytest.param("", "{{ messages[2].content }}", "", id="a message that comes later"),
        pytest.param("", "{{ messages[loop.index0 - 1].content }}", "", id="the last message, as the one before"),
        pytest.param("", "{{ messages[-1].content }}", "", id="the last message"),
        pytest.param("", "{{ loop.length }}", "", id="how many there are"),
        pytest.param("", "{% for m in messages %}{{ m.role }}{% endfor %}", "", id="all messages"),
        pytest.param("{% set n = messages | length %}", "{{ n }}", "", id="how many there are, told before"),
        pytest.param("{% set n = 1 if messages | length == 2 else 1.0 %}", "{{ n }}", "", id="an equal number"),
        pytest.param(
            "{% macro f() %}{{ messages | length }}{% endmacro %}", "{{ f() }}", "", id="how many, by a macro"
        ),
        pytest.param("{% set ns = namespace(n=0) %}", "{% set ns.n = 7 %}", "{{ ns.n }}", id="what a round sets"),
        pytest.param("", "{{ message.role }}{% break %}", "", id="an early end"),
        pytest.param(
            "{% set message = messages[-1] %}{% macro f() %}{{ message.role }}{% endmacro %}",
            "{{ f() }}",
            "",
            id="the last message, by a macro",
        ),
        pytest.param("{% set all = messages %}", "{{ all[-1].role }}", "", id="messages by another name"),
    ],
)
def test_what_a_round_should_not_depend_on(head: str, first_round: str, later: str) -> None:
    source = (
        f"{head}{{% for message in messages %}}{{% if loop.first %}}{first_round}{{% endif %}}"
        f"{{% if loop.index0 > 3 %}}{later}{{% endif %}}{{% endfor %}}"
    )
    messages = [{"role": f"role {number}", "content": f"{number}"} for number in range(6)]
    assert check(source, messages, False, [2]) == 0


def test_a_message_may_be_the_mark_between_messages() -> None:
    said = [{"role": "user", "content": content} for content in ("a", _MARK, "b", _MARK, "c")]
    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert check(source, said, False, [1, 2, 3, 4]) == 0
    assert check(source, [said[0], said[2], said[4]], False, [1, 2]) == 2


def test_a_template_sees_no_more_than_in_the_sandbox() -> None:
    """Programs of strangers are run where transformers runs them."""
    source = "{% for message in messages %}{{ message.__class__.__mro__ }}{% endfor %}"
    template = TurnTemplate.of(source)
    assert template is not None
    assert template.write([{"role": "user", "content": "Q"}], {}) is None


@pytest.mark.parametrize("name", ["run__", "start__"])
def test_nor_what_is_added_to_it(name: str) -> None:
    assert TurnTemplate.of(f"{{% for message in messages %}}{{{{ {name} }}}}{{% endfor %}}") is None


def test_messages_and_some_more_are_not_the_messages() -> None:
    source = "{% for message in messages[-1:] + messages %}{{ message.content }}{% endfor %}"
    said = [{"role": "user", "content": f"{number}"} for number in range(4)]
    assert check(source, said, False, [1, 2, 3]) == 0


def test_tools_are_those_of_the_call() -> None:
    source = (
        "{% for tool in tools %}{{ tool | tojson }}{{ tool.function | tojson(indent=1) }}{% endfor %}"
        "{% for message in messages %}{{ message | tojson }}{{ message.items() | list | length }}{% endfor %}"
    )
    template = TurnTemplate.of(source)
    assert template is not None
    for number in range(600):  # more than are remembered
        tools = [{"type": "function", "function": {"name": f"add {number}"}}]
        messages = [{"role": "user", "content": f"{number}"}]
        parts = None
        for known in range(2):
            written = template.write(messages, {"tools": tools}, known, parts)
            assert written is not None
            text, parts = written
            expected = whole(source, messages, {"tools": tools})
            assert expected is not None
            assert text == expected if known == 0 else expected.endswith(text)
            messages = [*messages, {"role": "tool", "content": f"{number}"}]


@pytest.mark.parametrize(
    "source", ["{% for", "{{ messages[0].content }}", "", "{% for a, b in messages %}x{% endfor %}"]
)
def test_what_has_no_such_loop_is_written_whole(source: str) -> None:
    assert TurnTemplate.of(source) is None
