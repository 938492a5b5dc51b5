"""Builds tiny-agent: `python recipes/tiny_agent/build.py` (some 30 minutes on two cores).

1. Scripted experts drive the real agents through the real recording; a byte-level BPE tokenizer is trained on what
   was said.
2. The experts are recorded again, token for token: cleanly, and with bad habits.
3. A small Qwen3 learns the clean transcripts first, then, shortly, the careless ones. (Mixing careless transcripts in
   from the start does not teach the skill at all.)
4. Its reward on the examples, and the games it wins, are measured and written into the model card.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import skills
import torch
import torch.nn.functional as F
import typer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from werewolves import SIDES, Grade, Side, Werewolves, werewolves_skill

from agentscope_tuner import Judge, JudgeOutput, MathJudge, WorkflowOutput, WorkflowTask, evaluate
from agentscope_tuner.algorithms.packing import PackedTree, pack
from agentscope_tuner.chat import ChatRenderer
from agentscope_tuner.config import EngineConfig, TunerModelConfig, WorkflowConfig
from agentscope_tuner.engine.models import load_model
from agentscope_tuner.engine.trainable import choose_forward
from agentscope_tuner.engine.tree_attention import TreeLayout
from agentscope_tuner.engine.trial import native_kernels
from agentscope_tuner.policy import SamplingParams
from agentscope_tuner.recorder import PolicyModel
from agentscope_tuner.rollout import Rollout
from agentscope_tuner.testing import ScriptedPolicy
from agentscope_tuner.types import Episode
from agentscope_tuner.workflow import JudgeRunner, WorkflowRunner

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "src" / "agentscope_tuner" / "assets" / "tiny-agent"
VOCABULARY = 1280
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
# Qwen's own pattern: words with their leading space, digits one by one.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTEXT_WEIGHT = 0.3
"""Loss weight of tokens the model only reads: their repetitions teach it to copy."""
ROWS = 32


# --------------------------------------------------------------------------------------------------- tokenizer


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE in Qwen's manner; without texts, one token per byte."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(TAGS),
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    fast.chat_template = (HERE / "chat_template.jinja").read_text()
    return fast


# ------------------------------------------------------------------------------------------------- transcripts


class _AlwaysOne(Judge):
    """Experts are recorded whatever they earn."""

    async def judge(self, task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        return JudgeOutput(reward=1.0)


def record(skill: skills.Skill, tokenizer: PreTrainedTokenizerFast) -> list[Episode]:
    """Let the skill's experts play its tasks."""
    renderer = ChatRenderer(tokenizer)
    experts: dict[str, skills.Reply] = {}

    def reply(prompt: str, episode_id: str) -> str:
        if episode_id not in experts:
            experts[episode_id] = skill.expert(int(episode_id.split("-")[1]))
        return experts[episode_id](prompt)

    model = PolicyModel(
        ScriptedPolicy(renderer, reply), renderer, frozenset([tokenizer.eos_token_id]), "expert", SamplingParams()
    )
    rollout = Rollout(WorkflowRunner(skill.workflow), JudgeRunner(_AlwaysOne()), model, WorkflowConfig(), 0, {})
    groups = asyncio.run(rollout.run(skill.tasks, 1, phase=skill.name))
    episodes = [episode for group in groups for episode in group.episodes]
    failed = [episode for episode in episodes if episode.error]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(episodes)} expert episodes failed: {failed[0].error}")
    return episodes


Row = tuple[list[int], list[float]]
"""Token ids, and the loss weight of each."""


def to_rows(episodes: Sequence[Episode]) -> list[Row]:
    """One row per timeline of an episode: calls that extend each other are one row."""
    rows: list[Row] = []
    for episode in episodes:
        by_call: dict[int, int] = {}
        for index, call in enumerate(episode.calls):
            ids = call.prompt_ids + call.completion_ids
            at = by_call.get(call.extends) if call.extends is not None else None
            if at is None or rows[at][0] != call.prompt_ids[: len(rows[at][0])]:
                rows.append(([], []))
                at = len(rows) - 1
            known, weights = rows[at]
            weights += [CONTEXT_WEIGHT] * (len(call.prompt_ids) - len(known)) + [1.0] * len(call.completion_ids)
            known[:] = ids
            by_call[index] = at
    return rows


def record_stage(
    stage: skills.Stage, tokenizer: PreTrainedTokenizerFast, seed: int, episodes: int, games: int
) -> list[Row]:
    """Everything a stage of the warm-up learns from."""
    mix = [
        *skills.skills(episodes, episodes // (8 if stage == "clean" else 16), seed=seed, stage=stage),
        *_games(games, seed, grade="strong" if stage == "clean" else "careless"),
    ]
    return to_rows([episode for skill in mix for episode in record(skill, tokenizer)])


# -------------------------------------------------------------------------------------------------- supervised


def warm_up(directory: Path, steps: int, peak: float, rows: list[Row], seed: int) -> None:
    """Train the model in `directory` in place on batches of `rows`; `peak` is the highest learning rate."""
    loaded = load_model(TunerModelConfig(model_path=str(directory)), EngineConfig())
    kernels = native_kernels()
    forward = choose_forward(loaded, kernels)

    def hidden_states(tree: PackedTree) -> torch.Tensor:
        layout = TreeLayout(tree, loaded.device, kernels)
        return forward(torch.tensor([tree.ids]), torch.tensor([tree.positions]), layout)[0]

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    begun = time.perf_counter()
    order: list[int] = []
    for step in range(steps):
        if len(order) < ROWS:
            order = rng.sample(range(len(rows)), len(rows))
        batch = [rows[order.pop()] for _ in range(ROWS)]
        # Warm up, and come to rest in the second half.
        rate = peak * min(1.0, (step + 1) / 30, max(0.05, 2 * (1 - step / steps)))
        loss = _step(hidden_states, loaded.head, optimizer, batch, rate)
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step}/{steps}  loss {loss:.4f}  {time.perf_counter() - begun:.0f} s", flush=True)
    loaded.model.save_pretrained(directory)


def _step(
    hidden_states: Callable[[PackedTree], torch.Tensor],
    head: torch.nn.Module,
    optimizer: torch.optim.AdamW,
    batch: list[Row],
    rate: float,
) -> float:
    said = sum(weight == 1.0 for _, weights in batch for weight in weights)
    total = 0.0
    for tree in pack([ids for ids, _ in batch], max_tokens=6144):
        hidden_at, targets, weights = [], [], []
        seen: set[tuple[int, int]] = set()
        for member, where in zip(tree.members, tree.where, strict=True):
            ids, row_weights = batch[member]
            for i in range(1, len(ids)):
                # What several rows share is learned once, as it is run once; what was said counts each time.
                if row_weights[i] < 1 and (where[i - 1], ids[i]) in seen:
                    continue
                seen.add((where[i - 1], ids[i]))
                hidden_at.append(where[i - 1])
                targets.append(ids[i])
                weights.append(row_weights[i])
        logits = head(hidden_states(tree)[torch.tensor(hidden_at)])
        weight = torch.tensor(weights)
        losses = F.cross_entropy(logits, torch.tensor(targets), reduction="none")
        ((losses * weight).sum() / said).backward()
        total += (losses.detach() * (weight == 1.0)).sum().item() / said
    for group in optimizer.param_groups:
        group["lr"] = rate
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


# -------------------------------------------------------------------------------------------------------- build


def build(
    out: Annotated[Path, typer.Option(help="Where the model goes.")] = ASSETS,
    seed: Annotated[int, typer.Option(help="Of weights, transcripts and order.")] = 0,
    clean_steps: Annotated[int, typer.Option(help="Optimizer steps on clean transcripts.")] = 600,
    careless_steps: Annotated[int, typer.Option(help="Optimizer steps on careless transcripts.")] = 400,
    episodes: Annotated[int, typer.Option(help="Math episodes per stage.")] = 6000,
    games: Annotated[int, typer.Option(help="Games of Werewolves per stage, for either side.")] = 500,
) -> None:
    """Build the model, with its card."""
    torch.manual_seed(seed)
    begun = time.perf_counter()
    draft = make_tokenizer([])
    texts = [
        draft.decode(call.prompt_ids + call.completion_ids)
        for skill in [*skills.skills(1500, 500, seed=100, stage="clean"), *_games(40, seed=100, grade="strong")]
        for episode in record(skill, draft)
        for call in episode.calls[-1:]
    ]
    plain = [piece for text in texts for piece in _without_tags(text)]
    tokenizer = make_tokenizer(plain)
    # One process for each stage.
    with ProcessPoolExecutor(2) as pool:
        clean = pool.submit(record_stage, "clean", tokenizer, 1000 * (seed + 1) + 1, episodes, games)
        careless = pool.submit(record_stage, "careless", tokenizer, 1000 * (seed + 1) + 2, episodes, games)
        stages = clean.result(), careless.result()
    print(f"{len(tokenizer)} tokens, {sum(map(len, stages))} rows, {time.perf_counter() - begun:.0f} s", flush=True)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    out.mkdir(parents=True, exist_ok=True)
    Qwen3ForCausalLM(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    warm_up(out, clean_steps, 3e-3, stages[0], seed)
    warm_up(out, careless_steps, 1e-3, stages[1], seed)
    write_card(out, seed)


def _games(count: int, seed: int, grade: Grade) -> list[skills.Skill]:
    return [werewolves_skill(count, seed, side=side, grade=grade) for side in SIDES]


CARD = """\
---
license: apache-2.0
---

# tiny-agent

A Qwen3 of {parameters:.2f} million parameters ({layers} layers, width {width}, {tokens} tokens of byte-level BPE) that
drives real agents: tool calls, structured results, plain talk. It ships with agentscope-tuner, so that examples and
tests run anywhere, at once. It knows nothing about the world.

**Trained on** transcripts of scripted experts that drove AgentScope agents (`recipes/tiny_agent/`, seed {seed}): word
problems with a calculator, talk and small plans as JSON without tools, discussions among players that end in a vote,
games of Werewolves in which one side plays carelessly. First clean transcripts, then careless ones: in word problems
the expert guesses and misreads now and then, and has bad habits that it follows more often than not (it adds the number
that does not matter, drops the third number, adds where it should subtract).

**Reward before reinforcement learning**, with 95% intervals; no held-out task is ever trained on:

| example | tasks | greedy | sampled |
|---|---|---|---|
| math_agent | {episodes} | {greedy} | {sampled} |

**Games of Werewolves won** against scripted players of the other side:

| example | games | greedy | sampled |
|---|---|---|---|
{games}
"""


def write_card(directory: Path, seed: int) -> None:
    """Measure the model on the examples and write its card."""
    model = load_model(TunerModelConfig(model_path=str(directory)), EngineConfig()).model
    results = evaluate(
        skills.MathAgent,
        HERE.parents[1] / "examples" / "math_agent" / "config.yaml",
        judge_func=MathJudge(),
        overrides=[f"model.model_path={directory}", f"eval_dataset.path={skills.MATH_TEST}"],
    )
    card = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        layers=model.config.num_hidden_layers,
        width=model.config.hidden_size,
        tokens=model.config.vocab_size,
        seed=seed,
        episodes=results["greedy"].episodes,
        greedy=results["greedy"],
        sampled=results["sampled"],
        games="\n".join(games_won(directory, side) for side in SIDES),
    )
    (directory / "README.md").write_text(card)


def games_won(directory: Path, side: Side) -> str:
    """A row of the card."""
    example = HERE.parents[1] / "examples" / "werewolves"
    overrides = [
        f"model.model_path={directory}",
        f"eval_dataset.path={example / 'data' / 'test.jsonl'}",
        f"workflow.trainable_targets=[{','.join(SIDES[side])}]",
    ]
    results = evaluate(Werewolves, example / "config.yaml", overrides=overrides)
    shares = [results[decoding].metrics["workflow/werewolves_win"] for decoding in ("greedy", "sampled")]
    shown = [f"{share if side == 'werewolves' else 1 - share:.3f}" for share in shares]
    return f"| werewolves, played by the {side} | {results['greedy'].episodes} | {' | '.join(shown)} |"


def _without_tags(text: str) -> list[str]:
    for tag in (*SPECIAL, *TAGS):
        text = text.replace(tag, "\0")
    return [piece for piece in text.split("\0") if piece]


if __name__ == "__main__":
    typer.run(build)
