"""Chat: replies are taken apart as they were meant, and what was sampled is never tokenized again."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentscope_tuner.algorithms import common_prefix
from agentscope_tuner.chat import ChatRenderer, Conversation, Message, Prompt, Reply, parse_reply, write_reply
from agentscope_tuner.chat.rendering import _SENTINEL
from agentscope_tuner.errors import ConfigError, ModelError, UnsupportedContentError

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
OTHER_TOOLS = [{"type": "function", "function": {"name": "sub", "parameters": {"type": "object", "properties": {}}}}]
END = "<|im_end|>"
WORDS = ["the cat sat on the mat and the dog sat on the cat", "add the numbers and the result is the answer"]


# ------------------------------------------------------------------------------------------------ parsing replies


def calls_of(completion: str) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in parse_reply(completion, tools=True).tool_calls]


def test_text_is_text() -> None:
    reply = parse_reply("  The answer is 4.\n", tools=True)
    assert (reply.text, reply.thinking, reply.tool_calls) == ("The answer is 4.", "", [])


@pytest.mark.parametrize(
    "completion",
    [
        CALL,
        CALL.replace("\n", ""),
        '<tool_call>  \n {"arguments":{"b":2,"a":1} ,"name":"add"}\n\n </tool_call>',
        '<tool_call>{"name": "add",\n "arguments": {\n "a": 1,\n "b": 2}}</tool_call>',
    ],
)
def test_a_tool_call_is_taken_out_however_it_is_spaced(completion: str) -> None:
    reply = parse_reply(completion, tools=True)
    assert reply.text == ""
    (call,) = reply.tool_calls
    assert (call.name, call.arguments) == ("add", {"a": 1, "b": 2})
    assert call.id


@pytest.mark.parametrize(
    "text", ["<tool_call>" + " \n" * 50_000, "<tool_call>" * 50_000, CALL + "<tool_call>" * 50_000]
)
def test_calls_without_an_end_are_no_work(text: str) -> None:
    begun = time.perf_counter()
    reply = parse_reply(text, tools=True)
    assert time.perf_counter() - begun < 0.5
    assert reply.text == text.removeprefix(CALL).strip()
    assert len(reply.tool_calls) == text.startswith(CALL)


def test_several_calls_keep_their_order_and_the_text_around_them() -> None:
    second = '<tool_call>{"name": "now"}</tool_call>'
    reply = parse_reply(f"First\n{CALL}\nthen {second} done", tools=True)
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("add", {"a": 1, "b": 2}), ("now", {})]
    assert reply.text == "First\n\nthen  done"
    assert len({call.id for call in parse_reply(CALL + CALL, tools=True).tool_calls}) == 2


def test_ids_of_calls_are_those_of_their_place() -> None:
    def ids(**where: int) -> list[str]:
        return [call.id for call in parse_reply(CALL * 300, tools=True, **where).tool_calls]

    assert ids(place=7) == ids(place=7)
    places = ({"place": 0}, {"place": 1}, {"place": 99}, {"place": 100_000}, {"place": 0, "speaker": 1}, {}, {})
    said = [call_id for where in places for call_id in ids(**where)]
    assert len(set(said)) == len(places) * 300
    # Templates of the Mistral family refuse all others.
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in said)


def test_nested_json_and_braces_in_strings() -> None:
    arguments = {"plan": {"steps": [{"do": 'say }{ \\ " <b>'}, [1, [2.5, None, True]]]}, "empty": {}, "ä": "日本"}
    assert calls_of(f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>") == [("f", arguments)]


@pytest.mark.parametrize(
    "broken",
    [
        "<tool_call>\nadd(1, 2)\n</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>',
        "<tool_call>{'name': 'add', 'arguments': {}}</tool_call>",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}',
        '{"name": "add", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>["add", {"a": 1}]</tool_call>',
        '<tool_call>"add"</tool_call>',
        '<tool_call>{"arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "1, 2"}</tool_call>',
        "<tool_call></tool_call>",
        f"<tool_call>{'[' * 100_000}</tool_call>",
        f'<tool_call>{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>',
    ],
)
def test_what_is_not_a_call_stays_in_the_text(broken: str) -> None:
    reply = parse_reply(f"{CALL} Let me see.\n{broken}", tools=True)
    assert reply.text == f"Let me see.\n{broken}"
    assert [call.name for call in reply.tool_calls] == ["add"]


def test_a_broken_call_does_not_take_its_neighbours_along() -> None:
    reply = parse_reply(f"{CALL}<tool_call>{{</tool_call>{CALL}", tools=True)
    assert [call.name for call in reply.tool_calls] == ["add", "add"]
    assert reply.text == "<tool_call>{</tool_call>"


def test_without_tools_calls_stay_text() -> None:
    reply = parse_reply(f"Look: {CALL}", tools=False)
    assert (reply.text, reply.tool_calls) == (f"Look: {CALL}", [])


@pytest.mark.parametrize(
    ("completion", "thinking", "text"),
    [
        ("<think>\nhm\n</think>\n\nFour.", "hm", "Four."),
        ("hm, so\n</think>\nFour.", "hm, so", "Four."),  # the template opened the block in the prompt
        ("<think>\n\n</think>\n\nFour.", "", "Four."),
        ("<think>still at it, no en", "still at it, no en", ""),
        (" \n<think>", "", ""),
        ("Four. <think> is a tag", "", "Four. <think> is a tag"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
    ],
)
@pytest.mark.parametrize("tools", [False, True])
def test_thinking_is_kept_apart(completion: str, thinking: str, text: str, tools: bool) -> None:
    reply = parse_reply(completion, tools=tools)
    assert (reply.thinking, reply.text) == (thinking, text)


def test_where_the_prompt_opens_the_thought_all_is_thought_until_it_ends() -> None:
    assert parse_reply(f"Perhaps {CALL}? No", tools=True, thinks=True) == Reply("", thinking=f"Perhaps {CALL}? No")
    assert parse_reply("So.</think>\n4", tools=True, thinks=True) == Reply("4", thinking="So.")
    assert calls_of(f"So.</think>{CALL}") == calls_of(CALL) != []


def test_calls_that_are_only_thought_of_are_not_made() -> None:
    reply = parse_reply(f"<think>I could say {CALL}</think>{CALL}", tools=True)
    assert len(reply.tool_calls) == 1
    assert reply.thinking == f"I could say {CALL}"
    assert parse_reply(f"<think>I will say {CALL}", tools=True).tool_calls == []


TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
TEXTS = st.text() | st.lists(st.sampled_from([*TAGS, "{", '"', "\\", "\n", " ", "a"])).map("".join)
SAID = st.text().map(str.strip).filter(lambda text: not any(tag in text for tag in TAGS))
"""Hypothesis also draws what stands in our source, so it comes upon tags."""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(TEXTS, st.dictionaries(TEXTS, VALUES, max_size=3)), max_size=3)


@given(SAID, CALLS)
@settings(deadline=None)
def test_what_is_written_is_read_back(text: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    completion = write_reply(text, calls)
    reply = parse_reply(completion, tools=True)
    assert reply.text == text
    assert [(call.name, call.arguments) for call in reply.tool_calls] == calls


@given(TEXTS, st.booleans())
@settings(deadline=None)
def test_any_completion_can_be_read(completion: str, tools: bool) -> None:
    reply = parse_reply(completion, tools=tools)
    assert reply.text == reply.text.strip()
    assert reply.tool_calls or reply.text in completion


# --------------------------------------------------------------------------------------------------- conversations


def merging_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer that merges letters, so that one text has many tokenizations."""
    tokenizer = Tokenizer(tokenizer_models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", END]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS * 9, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in ("<tool_call>", "</tool_call>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|endoftext|>")
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def chatml(tiny_model_dir: Path) -> str:
    return str(AutoTokenizer.from_pretrained(tiny_model_dir).chat_template)


@pytest.fixture(scope="module")
def renderer(chatml: str) -> ChatRenderer:
    return ChatRenderer(merging_tokenizer(chatml))


class Episode:
    """A conversation whose completions are spelled letter by letter, as no tokenizer would write them."""

    def __init__(self, renderer: ChatRenderer, tools: list[dict[str, Any]] | None = None) -> None:
        tokenizer = renderer.tokenizer
        self.renderer = renderer
        self.tools = tools
        self.end = tokenizer.convert_tokens_to_ids(END)
        self.conversation = Conversation(renderer, frozenset([self.end, tokenizer.pad_token_id]))
        self.prompts: list[Prompt] = []
        self.completions: list[list[int]] = []

    def render(self, messages: Sequence[Message]) -> Prompt:
        return self.conversation.render(messages, self.tools)

    def spell(self, text: str) -> list[int]:
        return [token for letter in text for token in self.renderer.encode(letter)]

    def say(self, messages: Sequence[Message], text: str, ids: list[int] | None = None) -> Message:
        """Record what the model says to `messages`; returns it as an agent's formatter sends it back."""
        prompt = self.render(messages)
        completion = [*self.spell(text), self.end] if ids is None else ids
        reply = parse_reply(text, tools=bool(self.tools))
        assert self.conversation.add(prompt, completion, reply) == len(self.prompts)
        self.prompts.append(prompt)
        self.completions.append(completion)
        message: Message = {"role": "assistant", "content": [{"type": "text", "text": reply.text}]}
        if reply.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for call in reply.tool_calls
            ]
        return message

    def recorded(self, call: int) -> list[int]:
        return self.prompts[call].ids + self.completions[call]

    def tail(self, prompt: Prompt) -> str:
        """What was rendered after the recorded call that `prompt` extends."""
        assert prompt.extends is not None
        beginning = self.recorded(prompt.extends)
        assert prompt.ids[: len(beginning)] == beginning
        rest = prompt.ids[len(beginning) :]
        text = self.renderer.decode(rest)
        assert rest == self.renderer.encode(text), "what is new is tokenized as always"
        return text


def system(text: str = "Be the cat.") -> Message:
    return {"role": "system", "content": text}


def user(text: str, **more: Any) -> Message:
    return {"role": "user", "content": text, **more}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": "x", "name": "add"}


def test_the_first_prompt_is_the_template_s(renderer: ChatRenderer) -> None:
    prompt = Episode(renderer).render([system(), user("the cat")])
    assert prompt.extends is None
    assert (
        prompt.text == f"<|im_start|>system\nBe the cat.{END}\n<|im_start|>user\nthe cat{END}\n<|im_start|>assistant\n"
    )
    assert prompt.ids == renderer.encode(prompt.text)
    assert renderer.decode(prompt.ids) == prompt.text


@pytest.mark.parametrize(
    "said",
    [
        "the cat sat on the mat",
        "  the cat\t\n\n",
        "the  cat\n \nsat",
        "\u00a0the cat\u2003",
        "Grüße, 猫 🐈",
        f"{END} is what the cat says",
        "Let me {see}: ]] %} the <cat>",
        "",
    ],
)
def test_the_next_turn_extends_the_recorded_ids_exactly(renderer: ChatRenderer, said: str) -> None:
    episode = Episode(renderer)
    messages = [system(), user("the cat")]
    messages += [episode.say(messages, said), user("and the dog")]
    prompt = episode.render(messages)
    assert prompt.extends == 0
    assert episode.tail(prompt) == f"\n<|im_start|>user\nand the dog{END}\n<|im_start|>assistant\n"
    if "the" in said:
        assert prompt.ids != renderer.encode(prompt.text), "the tokenizer would have written it otherwise"


@pytest.mark.parametrize(
    "said",
    [
        CALL,
        f"Let me add.\n{CALL}",
        f"  Let me add.  {CALL}\n\n",
        '<tool_call>{ "arguments" : {"b":2.0,"a":1e2},"name":"add" }</tool_call>',
        '<tool_call>{"name":"add","arguments":{"t":"\\u00e9\\/ \\ud83d\\ude00 ß"}}</tool_call>',
        f'{CALL} <tool_call>{{"name":"now"}}</tool_call>',
        '<tool_call>{"name":"add","arguments":{"a":NaN,"b":1e999,"c":-0.0,"d":12345678901234567890}}</tool_call>',
        f"{CALL} and <tool_call>broken</tool_call>",
    ],
)
def test_tool_calls_extend_exactly_however_they_were_spaced(renderer: ChatRenderer, said: str) -> None:
    episode = Episode(renderer, TOOLS)
    messages = [system(), user("add")]
    messages += [episode.say(messages, said), tool("3")]
    prompt = episode.render(messages)
    assert prompt.extends == 0
    expected = f"\n<|im_start|>user\n<tool_response>\n3\n</tool_response>{END}\n<|im_start|>assistant\n"
    assert episode.tail(prompt) == expected


def test_white_space_around_a_reply_does_not_hide_it(renderer: ChatRenderer) -> None:
    episode = Episode(renderer)
    messages = [system(), user("the cat")]
    episode.say(messages, "\n sat ")
    for sent in ("sat", "\n sat ", " sat\n\n"):
        prompt = episode.render([*messages, {"role": "assistant", "content": sent}, user("more")])
        assert prompt.extends == 0
        assert episode.tail(prompt) == f"\n<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"


def test_ten_turns_extend_one_another(renderer: ChatRenderer) -> None:
    episode = Episode(renderer, TOOLS)
    messages = [system(), user("go")]
    for turn in range(10):
        messages.append(episode.say(messages, f" turn {turn} \n{CALL if turn % 2 else ''}"))
        messages.append(tool(str(turn)) if turn % 2 else user(f"go on {turn}"))
        prompt = episode.render(messages)
        assert prompt.extends == turn
        episode.tail(prompt)
    assert episode.render(messages[:-2]).ids == episode.prompts[-1].ids, "asking again gives the same prompt"


def test_half_a_character_in_a_call_breaks_nothing(renderer: ChatRenderer) -> None:
    # JSON can write half of a surrogate pair, which is no text; a tool may repeat it, and the prompt be rendered anew.
    half = json.loads('"\\ud83d"')
    episode = Episode(renderer, TOOLS)
    messages = [system(), user("add")]
    messages += [episode.say(messages, '<tool_call>{"name":"add","arguments":{"t":"\\ud83d"}}</tool_call>'), tool(half)]
    prompt = episode.render(messages)
    assert prompt.extends == 0
    beginning = len(episode.recorded(0))
    assert "<tool_response>\n?\n</tool_response>" in renderer.decode(prompt.ids[beginning:])
    assert '{"t": "?"}' in renderer.decode(episode.conversation.render(messages, OTHER_TOOLS).ids)


BYTES = st.lists(st.integers(0, 255), min_size=1, max_size=12)


@given(BYTES)
@settings(deadline=None)
def test_any_bytes_the_model_writes_are_found_again(renderer: ChatRenderer, data: list[int]) -> None:
    # Half a character decodes to U+FFFD, and so comes back as other bytes than were sampled.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    episode = Episode(renderer)
    ids = [*renderer.tokenizer.convert_tokens_to_ids([alphabet[byte] for byte in data]), episode.end]
    messages = [system(), user("the cat")]
    messages += [episode.say(messages, renderer.decode(ids[:-1]), ids), user("more")]
    prompt = episode.render(messages)
    assert prompt.extends == 0
    assert episode.tail(prompt) == f"\n<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"


def test_a_removed_hint_branches_and_shares_what_it_can(renderer: ChatRenderer) -> None:
    episode = Episode(renderer)
    messages = [system(), user("the cat")]
    messages += [episode.say(messages, " sat "), user("and then")]
    hint = user("<system-hint>the mat</system-hint>")
    second = episode.say([*messages, hint], "on the mat")
    assert episode.prompts[1].extends == 0
    prompt = episode.render([*messages, second, user("and the dog")])
    assert prompt.extends == 0
    assert episode.tail(prompt) == (
        f"\n<|im_start|>user\nand then{END}\n<|im_start|>assistant\non the mat{END}\n"
        f"<|im_start|>user\nand the dog{END}\n<|im_start|>assistant\n"
    )
    shared = common_prefix(prompt.ids, episode.prompts[1].ids)
    assert renderer.decode(episode.prompts[1].ids[shared:]).startswith("user\n<system-hint>")


def test_a_hint_removed_before_anything_else_leaves_the_beginning_shared(renderer: ChatRenderer) -> None:
    episode = Episode(renderer)
    messages = [system(), user("the cat")]
    first = episode.say([*messages, user("<system-hint>")], "sat")
    prompt = episode.render([*messages, first, user("more")])
    assert prompt.extends is None
    assert prompt.ids == renderer.encode(prompt.text)
    shared = common_prefix(prompt.ids, episode.prompts[0].ids)
    assert renderer.decode(prompt.ids[:shared]).endswith(f"the cat{END}\n<|im_start|>")


def test_of_two_recorded_beginnings_the_longer_is_extended(renderer: ChatRenderer) -> None:
    episode = Episode(renderer)
    first = [system(), user("one")]
    first += [episode.say(first, "a"), user("two")]
    second = [*first, episode.say(first, "b"), user("three")]
    other = [*first[:2], {"role": "assistant", "content": "not what was said"}, user("two")]
    assert episode.render(second).extends == 1
    assert episode.render([*first, {"role": "assistant", "content": "edited"}, user("three")]).extends == 0
    assert episode.render(other).extends is None
    assert episode.render([system("Be the dog."), *second[1:]]).extends is None


def test_two_replies_to_one_prompt_are_told_apart(renderer: ChatRenderer) -> None:
    episode = Episode(renderer)
    messages = [system(), user("one")]
    a = episode.say(messages, "a")
    b = episode.say(messages, "b")
    assert episode.prompts[0].ids == episode.prompts[1].ids
    assert episode.render([*messages, a, user("two")]).extends == 0
    assert episode.render([*messages, b, user("two")]).extends == 1


def test_changed_tools_are_a_fresh_start(renderer: ChatRenderer) -> None:
    episode = Episode(renderer, TOOLS)
    messages = [system(), user("add")]
    messages += [episode.say(messages, f" {CALL}"), tool("3")]
    for tools in (OTHER_TOOLS, [*TOOLS, *OTHER_TOOLS], None, []):
        prompt = episode.conversation.render(messages, tools)
        assert prompt.extends is None
        assert prompt.ids == renderer.encode(prompt.text)
        assert ('"sub"' in prompt.text) == bool(tools)
    assert episode.render(messages).extends == 0
    assert episode.conversation.render(messages, json.loads(json.dumps(TOOLS))).extends == 0
    episode.tools = OTHER_TOOLS
    episode.say(messages[:2], f" {CALL}")
    assert episode.render(messages).extends == 1, "the same words under other tools are another call"
    episode.tools = TOOLS
    assert episode.render(messages).extends == 0


def test_no_tools_and_an_empty_list_are_the_same(renderer: ChatRenderer) -> None:
    episode = Episode(renderer, [])
    messages = [system(), user("the cat")]
    messages += [episode.say(messages, "sat"), user("more")]
    assert episode.conversation.render(messages, None).extends == 0


def test_a_reply_that_was_cut_off_is_closed(renderer: ChatRenderer) -> None:
    episode = Episode(renderer)
    messages = [system(), user("the cat")]
    messages += [episode.say(messages, "sat on", episode.spell("sat on")), user("more")]
    prompt = episode.render(messages)
    assert prompt.extends == 0
    assert episode.tail(prompt) == f"{END}\n<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"


def test_an_end_that_the_template_does_not_write_is_not_kept(renderer: ChatRenderer) -> None:
    episode = Episode(renderer)
    messages = [system(), user("the cat")]
    ids = [*episode.spell("sat"), renderer.tokenizer.pad_token_id]  # ends a turn too, but is not ChatML's
    messages += [episode.say(messages, "sat", ids), user("more")]
    prompt = episode.render(messages)
    assert prompt.extends is None
    assert prompt.ids == renderer.encode(prompt.text)
    assert "<|endoftext|>" not in renderer.decode(prompt.ids)


@pytest.mark.parametrize("said", ["<think>hm</think>sat", "hm</think>\n\nsat", "<think>hm, cut o"])
def test_thinking_is_not_shown_again(renderer: ChatRenderer, said: str) -> None:
    episode = Episode(renderer)
    messages = [system(), user("the cat")]
    messages += [episode.say(messages, "first"), user("and")]
    messages += [episode.say(messages, said), user("more")]
    prompt = episode.render(messages)
    assert prompt.extends == 0, "what came before the thinking is still shared"
    assert "hm" not in renderer.decode(prompt.ids)
    messages += [episode.say(messages, "and then"), user("go on")]
    assert episode.render(messages).extends == 2, "a reply without thinking can be extended again"


def test_an_empty_thinking_block_is_kept_as_it_was_sampled(renderer: ChatRenderer) -> None:
    episode = Episode(renderer)
    messages = [system(), user("the cat")]
    messages += [episode.say(messages, "<think>\n\n</think>\n\nsat"), user("more")]
    assert episode.render(messages).extends == 0


def test_two_agents_take_turns_in_one_episode(renderer: ChatRenderer) -> None:
    episode = Episode(renderer, TOOLS)
    histories = {name: [system(f"Be the {name}."), user("begin")] for name in ("cat", "dog")}
    last: dict[str, int] = {}
    for turn in range(6):
        name = "cat" if turn in (0, 1, 4) else "dog"
        history = histories[name]
        history.append(episode.say(history, f" {name} {turn} {CALL if turn == 3 else ''}"))
        assert episode.prompts[turn].extends == last.get(name)
        last[name] = turn
        history.append(tool("3") if turn == 3 else user(f"turn {turn}"))
    for name, history in histories.items():
        prompt = episode.render(history)
        assert prompt.extends == last[name]
        assert renderer.decode(prompt.ids[: len(episode.prompts[last[name]].ids)]).count(f"Be the {name}") == 1


def test_an_agent_s_name_comes_back_with_its_replies(renderer: ChatRenderer) -> None:
    episode = Episode(renderer)
    messages = [system() | {"name": "system"}, user("the cat", name="Ann")]
    reply = episode.say(messages, " sat ") | {"name": "Friday"}
    messages += [reply, user("more", name="Ann")]
    assert episode.render(messages).extends == 0
    messages.append(episode.say(messages, "on the mat") | {"name": "Friday"})
    assert episode.render([*messages, user("and")]).extends == 1
    assert [message.get("name") for message in episode.render(messages).messages] == [
        "system", "Ann", "Friday", "Ann", "Friday",
    ]  # fmt: skip


def test_the_same_words_of_another_speaker_are_another_message(chatml: str) -> None:
    named = chatml.replace("message.role + '\\n' +", "message.role + '\\n' + (message.name or '?') + ': ' +")
    assert named != chatml
    renderer = ChatRenderer(merging_tokenizer(named))
    episode = Episode(renderer)
    messages = [user("the cat", name="Ann")]
    messages += [episode.say(messages, " sat "), user("more", name="Bob")]
    prompt = episode.render(messages)
    assert prompt.extends == 0
    assert "user\nAnn: the cat" in renderer.decode(prompt.ids)
    assert episode.tail(prompt) == f"\n<|im_start|>user\nBob: more{END}\n<|im_start|>assistant\n"
    renamed = episode.render([messages[0] | {"name": "Bob"}, *messages[1:]])
    assert renamed.extends is None
    assert "user\nBob: the cat" in renderer.decode(renamed.ids)


@pytest.mark.parametrize(
    "content",
    ["one\ntwo", [{"type": "text", "text": "one\ntwo"}], [{"text": "one"}, {"type": "text", "text": "two"}]],
)
def test_openai_s_and_dashscope_s_forms_of_content(renderer: ChatRenderer, content: Any) -> None:
    messages = [{"role": "system", "content": content}, {"role": "user", "content": content}]
    prompt = Episode(renderer).render(messages)
    assert prompt.messages == [{"role": "system", "content": "one\ntwo"}, {"role": "user", "content": "one\ntwo"}]
    assert f"<|im_start|>user\none\ntwo{END}\n" in prompt.text


def test_dashscope_s_form_of_a_reply_is_found_again(renderer: ChatRenderer) -> None:
    episode = Episode(renderer, TOOLS)
    messages = [{"role": "system", "content": "Be the cat."}, {"role": "user", "content": [{"text": "add"}]}]
    said = episode.say(messages, f"  {CALL}")
    messages += [{"role": "assistant", "content": [], "tool_calls": said["tool_calls"]}, tool("3")]
    messages += [episode.say(messages, " Three. "), {"role": "user", "content": [{"text": "more"}]}]
    assert episode.prompts[1].extends == 0
    assert episode.render([*messages[:-2], {"role": "assistant", "content": [{"text": "Three."}]}]).extends == 1


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
        {"type": "function", "function": {"name": "add", "arguments": '{"a":1,"b":2}'}},
        {"name": "add", "arguments": {"a": 1, "b": 2}},
    ],
)
def test_forms_of_a_tool_call(renderer: ChatRenderer, call: dict[str, Any]) -> None:
    messages = [user("add"), {"role": "assistant", "content": None, "tool_calls": [call]}, tool("3")]
    text = Episode(renderer, TOOLS).render(messages).text
    assert f"<|im_start|>assistant\n{CALL}{END}\n" in text


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image_url"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "input_audio"),
        ({"image": "file:///cat.png"}, "image"),
        ({"video": "file:///cat.mp4"}, "video"),
        ({"type": "image", "text": "a caption"}, "image"),
        ("bare text in a list", "str"),
    ],
)
@pytest.mark.parametrize("role", ["user", "system"])
def test_what_a_text_policy_cannot_read_is_named(renderer: ChatRenderer, block: Any, kind: str, role: str) -> None:
    messages = [{"role": role, "content": [{"type": "text", "text": "What is this?"}, block]}]
    with pytest.raises(UnsupportedContentError) as caught:
        Episode(renderer).render(messages)
    assert f"a `{role}` message holds a block of type `{kind}`" in str(caught.value)


# --------------------------------------------------------------------------------------- templates of another kind

NO_THINK = "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"


def with_generation_prompt(chatml: str, prompt: str) -> str:
    changed = chatml.replace("{{- '<|im_start|>assistant\\n' }}", prompt)
    assert changed != chatml
    return changed


def test_a_template_that_rewrites_its_own_prompt_gets_a_fresh_one(chatml: str) -> None:
    # Qwen3 without thinking: the prompt ends in an empty thinking block, which history does not show.
    renderer = ChatRenderer(merging_tokenizer(with_generation_prompt(chatml, NO_THINK)))
    episode = Episode(renderer)
    messages = [system(), user("the cat")]
    messages += [episode.say(messages, "sat"), user("and")]
    assert episode.prompts[0].text.endswith("<think>\n\n</think>\n\n")
    prompt = episode.render(messages)
    assert prompt.extends is None
    assert prompt.ids == renderer.encode(prompt.text)
    shared = common_prefix(prompt.ids, episode.recorded(0))
    assert renderer.decode(prompt.ids[:shared]).endswith(f"the cat{END}\n<|im_start|>assistant\n")
    assert prompt.text.count("<think>") == 1


def test_a_template_that_forgets_gets_a_fresh_prompt(renderer: ChatRenderer) -> None:
    template = (
        "{%- for m in messages[-3:] %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{{- '<|im_start|>assistant\\n' }}"
    )
    forgetful = ChatRenderer(merging_tokenizer(template))
    episode = Episode(forgetful)
    messages = [user("one")]
    messages += [episode.say(messages, " a "), user("two")]
    messages += [episode.say(messages, " b "), user("three")]
    assert episode.prompts[1].extends == 0
    prompt = episode.render(messages)
    assert prompt.extends is None
    assert "one" not in prompt.text
    assert forgetful.decode(prompt.ids) == prompt.text


def test_a_template_that_insists_on_calls_before_results_gets_a_fresh_prompt(chatml: str) -> None:
    strict = chatml.replace(
        "{%- elif message.role == 'tool' %}",
        "{%- elif message.role == 'tool' %}{%- if not messages[loop.index0 - 1].tool_calls %}"
        "{{ raise_exception('no call to answer') }}{%- endif %}",
    )
    assert strict != chatml
    episode = Episode(ChatRenderer(merging_tokenizer(strict)), TOOLS)
    messages = [system(), user("add")]
    messages += [episode.say(messages, f" {CALL}"), tool("3")]
    prompt = episode.render(messages)
    assert prompt.extends is None
    assert episode.renderer.decode(prompt.ids) == prompt.text


def test_a_template_that_trims_still_finds_replies(chatml: str) -> None:
    trimming = chatml.replace("message.content + '<|im_end|>", "message.content | trim + '<|im_end|>")
    renderer = ChatRenderer(
        merging_tokenizer(trimming.replace("'\\n' + message.content }}", "'\\n' + message.content | trim }}"))
    )
    episode = Episode(renderer)
    messages = [system(), user("  the cat ")]
    messages += [episode.say(messages, " sat\n"), user(" more ")]
    assert episode.tail(episode.render(messages)) == f"\n<|im_start|>user\nmore{END}\n<|im_start|>assistant\n"


@pytest.mark.parametrize("ended", [True, False])
def test_white_space_that_a_template_puts_around_replies_is_not_sampled(ended: bool) -> None:
    # As those of Llama 2 and of Mistral do, whose prompts end without any.
    spaced = ChatRenderer(
        merging_tokenizer(
            "{%- for m in messages %}{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}{%- else %}"
            "{{- ' ' + m.content + ' <|im_end|>' }}{%- endif %}{%- endfor %}"
        )
    )
    episode = Episode(spaced)
    messages = [user("the cat")]
    said = [*episode.spell("sat"), *([episode.end] if ended else [])]
    messages += [episode.say(messages, "sat", said), user("and")]
    prompt = episode.render(messages)
    assert episode.tail(prompt) == ("" if ended else f" {END}") + "[INST] and [/INST]"
    messages += [episode.say(messages, " so"), user("on")]
    assert episode.tail(episode.render(messages)) == "[INST] on [/INST]"


def test_other_words_before_a_reply_are_another_beginning(chatml: str) -> None:
    changed = chatml.replace("assistant\\n' + message.content", "assistant\\n Well, ' + message.content")
    assert changed != chatml
    episode = Episode(ChatRenderer(merging_tokenizer(changed)))
    messages = [user("the cat")]
    messages += [episode.say(messages, "sat"), user("and")]
    assert episode.render(messages).extends is None


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
LLAMA_2 = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
KINDS: dict[str, tuple[bool, Any, Any, dict[str, Any]]] = {
    # Whether pieces are independent, the normalizer, what splits words, of the special tokens.
    "bytes": (True, None, BYTES, {}),
    "bytes after a space": (True, None, pre_tokenizers.ByteLevel(add_prefix_space=True), {}),
    "bytes, composed": (True, normalizers.NFC(), BYTES, {}),
    "words": (True, None, pre_tokenizers.Metaspace(prepend_scheme="always"), {}),
    "words, but for a text's first one": (False, None, pre_tokenizers.Metaspace(prepend_scheme="first"), {}),
    "Llama 2": (True, LLAMA_2, None, {}),
    "marks that take the space before them": (False, None, BYTES, {"lstrip": True}),
    "marks that take the space after them": (False, None, BYTES, {"rstrip": True}),
    "marks that are words": (False, None, BYTES, {"single_word": True}),
    "marks in a normalized text": (False, LLAMA_2, None, {"normalized": True}),
}
MARKS = ("<s>", "<s>more", "<end>", "[end]")


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> ChatRenderer:
    independent, normalizer, pre_tokenizer, of_marks = KINDS[request.param]
    tokenizer = Tokenizer(tokenizer_models.BPE())
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "\u2581"]
    trainer = trainers.BpeTrainer(vocab_size=350, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(WORDS * 9, trainer)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_tokens([AddedToken(mark, **{"normalized": False, **of_marks}) for mark in MARKS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{# writes " + " ".join(MARKS) + " #}{{ messages[0].content }}"
    renderer = ChatRenderer(fast)
    assert (renderer._marks is not None) == independent
    return renderer


@given(st.lists(st.sampled_from([*MARKS, "the cat", " ", "\n", "a", "<", "s>", "1", "é"]), max_size=9).map("".join))
@settings(deadline=None, max_examples=40)
def test_pieces_are_tokenized_as_the_whole_is(kind: ChatRenderer, text: str) -> None:
    assert kind.encode(text) == kind.tokenizer.encode(text, add_special_tokens=False)


def test_a_length_set_elsewhere_cuts_no_prompt(chatml: str) -> None:
    renderer = ChatRenderer(merging_tokenizer(chatml))
    whole = renderer.encode("the cat sat on the mat")
    renderer._encode.cache_clear()
    renderer.tokenizer.backend_tokenizer.enable_truncation(3)
    assert renderer.encode("the cat sat on the mat") == whole


def test_earlier_turns_are_not_tokenized_again(chatml: str) -> None:
    tokenized: list[str] = []

    class Watched(ChatRenderer):
        def _tokenize(self, text: str) -> tuple[int, ...]:
            tokenized.append(text)
            return super()._tokenize(text)

    renderer = Watched(merging_tokenizer(chatml))
    history = [system(), *(user(f"the cat said {turn}") for turn in range(20))]
    renderer.encode(renderer.text(history, None))
    tokenized.clear()
    renderer.encode(renderer.text([*history, user("the dog said so")], None))
    assert tokenized == ["user\nthe dog said so"]


@given(st.lists(st.integers(0, 329), min_size=1, max_size=40))
@settings(deadline=None)
def test_tokens_that_come_one_by_one_are_the_text_they_are_together(chatml: str, ids: list[int]) -> None:
    renderer = ChatRenderer(merging_tokenizer(chatml))
    text_after = renderer.decoding()
    texts = [text_after(token) for token in ids]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    whole = renderer.decode(ids)
    # At most half a character is not told.
    assert whole.startswith(texts[-1])
    assert not whole.removeprefix(texts[-1]).strip("\ufffd")


def test_a_text_that_grows_is_not_decoded_from_its_beginning(chatml: str) -> None:
    class Watched(ChatRenderer):
        def decode(self, ids: Sequence[int]) -> str:
            raise AssertionError("the time for a long text would be that of its square")

    renderer = Watched(merging_tokenizer(chatml))
    text_after = renderer.decoding()
    text = "the cat sat on the mat \N{GRINNING FACE} \u6f22\u5b57 " * 9
    assert [text_after(token) for token in renderer.encode(text)][-1] == text


def test_bytes_that_are_no_character_change_the_text_before(chatml: str) -> None:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "a": 257}
    tokenizer = Tokenizer(tokenizer_models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = chatml
    renderer = ChatRenderer(fast)
    text_after = renderer.decoding()
    ids = [256, 257, 0xC3, 0xA9, 0xC3, 257, 256, 0xC3, 0xA9, 257]
    texts = [text_after(token) for token in ids]
    assert texts[1:4] == ["a", "a", "aé"]
    assert texts[-1] == renderer.decode(ids) == "a\ufffd\ufffd\ufffda éa"


def test_where_the_template_rewrites_history_a_turn_is_not_tried_with_every_earlier_one(chatml: str) -> None:
    written: list[str] = []
    tokenized: list[str] = []

    class Watched(ChatRenderer):
        def _apply_template(self, messages: tuple[bytes, ...], tools: bytes) -> str:
            written.append(super()._apply_template(messages, tools))
            return written[-1]

        def _tokenize(self, text: str) -> tuple[int, ...]:
            tokenized.append(text)
            return super()._tokenize(text)

    # As templates do that open and close a block of thinking where none is wanted.
    changed = chatml.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant\\nno thinking, ' }}")
    assert changed != chatml
    renderer = Watched(merging_tokenizer(changed))
    renderer._encode = lru_cache(maxsize=1)(renderer._tokenize)  # other episodes have filled what is kept for all
    episode = Episode(renderer)
    tokenized.clear()
    messages = [system()]
    turns = 12
    for turn in range(turns):
        messages += [user(f"the cat said {turn}")]
        messages += [episode.say(messages, f"sat {turn}")]
    assert all(prompt.extends is None for prompt in episode.prompts)
    assert len(written) == turns, "each as it is sent back; with the reply as it was recorded, what follows that"
    pieces = [text for text in tokenized if len(text) > 1]  # letters are the episode's spelling
    assert len(pieces) == len(set(pieces)), "of each turn, what is new"


class Kind(StrEnum):
    """How some frameworks write what a schema says."""

    OBJECT = "object"


def test_what_is_written_once_is_found_by_all_that_it_was_made_of(chatml: str) -> None:
    renderer = ChatRenderer(merging_tokenizer(chatml))

    def tool(default: Any, kind: str = "object") -> dict[str, Any]:
        parameters = {"type": kind, "properties": {"n": {"default": default}}}
        return {"type": "function", "function": {"name": "f", "parameters": parameters}}

    defaults = [1, True, 1.0, "1", None, [1], {"1": 1}]
    texts = [renderer.text([user("hi")], [tool(default)]) for default in defaults]
    assert len(set(texts)) == len(defaults)
    before = renderer.written.cache_info().misses
    assert [renderer.text([user("hi")], [tool(json.loads(json.dumps(default)))]) for default in defaults] == texts
    assert renderer.text([user("hi")], [tool(1, Kind.OBJECT)]) == texts[0]
    assert renderer.written.cache_info().misses == before


def test_a_tokenizer_without_a_template_is_refused(chatml: str) -> None:
    tokenizer = merging_tokenizer(chatml)
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match="has no chat template"):
        ChatRenderer(tokenizer)


def test_enable_thinking_reaches_templates_that_know_it(chatml: str) -> None:
    with pytest.raises(ConfigError, match=r"`model.enable_thinking` has no effect"):
        ChatRenderer(merging_tokenizer(chatml), enable_thinking=False)
    switch = (
        "{{- '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}"
        "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    )
    tokenizer = merging_tokenizer(with_generation_prompt(chatml, switch))
    for enable, shown in ((None, False), (True, False), (False, True)):
        renderer = ChatRenderer(tokenizer, enable_thinking=enable)
        assert renderer.text([user("hi")], None).endswith("</think>\n\n") is shown


# ---------------------------------------------------------------------------------------------------- everything

STEP = st.tuples(
    st.sampled_from(["cat", "dog"]),
    st.sampled_from(["the cat", "add the numbers", "x", f"Look.\n{CALL}", CALL]),
    st.booleans(),  # whether the model ended its turn
    st.booleans(),  # whether a hint is shown, and removed afterwards
    st.sampled_from([None, TOOLS, OTHER_TOOLS]),
)


@given(st.lists(STEP, max_size=8))
@settings(deadline=None, max_examples=60)
def test_every_prompt_says_what_the_template_says(renderer: ChatRenderer, steps: list[Any]) -> None:
    """Whatever is recorded, forgotten or interleaved: the ids spell the template's text, and begin as recorded."""
    episode = Episode(renderer)
    histories = {name: [system(f"Be the {name}."), user("begin")] for name in ("cat", "dog")}
    for name, said, ended, hinted, tools in steps:
        history = histories[name]
        episode.tools = tools
        messages = [*history, user("<hint>")] if hinted else history
        ids = [*episode.spell(said), *([episode.end] if ended else [])]
        reply = episode.say(messages, said, ids)
        prompt = episode.prompts[-1]
        assert renderer.decode(prompt.ids) == renderer.text(prompt.messages, tools)
        marked = [*prompt.messages]
        for place in prompt.replies:
            marked[place] = {"role": "assistant", "content": _SENTINEL}
        assert prompt.text == renderer.text(marked, tools)
        assert bool(prompt.replies) is (prompt.extends is not None)
        if prompt.extends is None:
            assert prompt.ids == renderer.encode(prompt.text)
        else:
            episode.tail(prompt)
        history += [reply, tool("3") if reply.get("tool_calls") else user("go on")]
