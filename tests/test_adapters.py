"""An adapter per role: sampled in one batch, trained together, kept, met again as opponents."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_tools import gradients, load, plain_logprobs, play, relative_difference, start
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentscope_tuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask, evaluate, tune
from agentscope_tuner.algorithms import Datum, weigh
from agentscope_tuner.config import (
    AlgorithmConfig,
    EngineConfig,
    LoraConfig,
    OpponentPoolConfig,
    RolesConfig,
    TunerModelConfig,
    parse_config,
)
from agentscope_tuner.engine import fast_forms, native, products
from agentscope_tuner.engine.decoder import ModuleDecoder, NativeDecoder, WholeDecoder
from agentscope_tuner.engine.learner import Learner
from agentscope_tuner.engine.models import (
    LoadedModel,
    adapter_parameters,
    drop_version,
    keep_version,
    load_model,
    save_adapter,
)
from agentscope_tuner.engine.products import OneDnnProducts, WideProducts
from agentscope_tuner.engine.sampler import Sampler
from agentscope_tuner.errors import ConfigError, ModelError, RoleError
from agentscope_tuner.opponents import OpponentPool, plain_cast
from agentscope_tuner.reporting import read_episodes
from agentscope_tuner.testing import ScriptedModel
from agentscope_tuner.types import Cast

ROLES = ("solver", "critic")
LORA = LoraConfig(rank=4)


def with_adapters(directory: Path, roles: Sequence[str] = ROLES) -> LoadedModel:
    """Adapters that say different things; without roles, one for all."""
    loaded = load(directory, lora=LORA, adapters=roles)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in loaded.trainable_parameters().values():
            parameter.normal_(0, 0.3)
    return loaded


def learner_of(loaded: LoadedModel, **algorithm: object) -> Learner:
    return Learner(loaded, AlgorithmConfig(**algorithm), EngineConfig(device="cpu", micro_batch_tokens=1500), 12)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("kind", [WholeDecoder, NativeDecoder, ModuleDecoder])
def test_roles_are_sampled_in_one_batch_with_their_own_adapters(
    tiny_model_dir: Path, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind is NativeDecoder:
        monkeypatch.setattr(fast_forms, "_SMALL_LAYER", 0)
    loaded = with_adapters(tiny_model_dir)
    keep_version(loaded, "critic", "critic@0")
    sampler = start(loaded, fast_decoder=kind is not ModuleDecoder, max_slots=16)
    assert type(sampler._runner.decoder) is kind
    calls = play(loaded, sampler, adapters={"solver": "solver", "critic": "critic@0"})
    ours = learner_of(loaded).logprobs(calls)
    seen = dict.fromkeys(("solver", "critic@0"), 0)
    for call, logprobs in zip(calls, ours, strict=True):
        seen[call.adapter] += 1
        with loaded.speaking_as(call.adapter):
            plain = plain_logprobs(loaded, call)
        recorded = torch.tensor(call.logprobs)
        assert (recorded - plain).abs().max() < 1e-4
        assert (logprobs - plain).abs().max() < 1e-4
    assert min(seen.values()) > 10
    with torch.no_grad(), loaded.speaking_as(""):
        bare = plain_logprobs(loaded, calls[0])
    assert (torch.tensor(calls[0].logprobs) - bare).abs().max() > 1e-2, "the adapters must make a difference"


@pytest.mark.usefixtures("kernels")
def test_too_many_voices_are_computed_beside_the_weights(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = with_adapters(tiny_model_dir)
    layers = [block.state_dict() for block in load(tiny_model_dir).model.get_decoder().layers]
    monkeypatch.setattr(fast_forms, "_VOICES", 3 * sum(weight.nbytes for layer in layers for weight in layer.values()))
    sampler = start(loaded)
    for number, kind in enumerate((WholeDecoder, WholeDecoder, NativeDecoder)):
        critic = "critic" if number == 0 else f"critic@{number}"
        assert type(sampler._runner.decoder) is kind
        calls = play(loaded, sampler, episodes=4, adapters={"solver": "solver", "critic": critic})
        for call in calls:
            with torch.no_grad(), loaded.speaking_as(call.adapter):
                assert (torch.tensor(call.logprobs) - plain_logprobs(loaded, call)).abs().max() < 1e-4
        keep_version(loaded, "critic", f"critic@{number + 1}")
        sampler.weights_changed(number + 1)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("slow", [True, False])
def test_updates_are_multiplied_as_the_weights_beside_them_are(
    slow: bool, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's own products of bfloat16 take many times as long on processors without units for them."""
    monkeypatch.setattr(products, "bfloat16_is_slow", lambda: slow)
    monkeypatch.setattr(fast_forms, "_SMALL_LAYER", 0)
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    loaded = load_model(TunerModelConfig(model_path=str(tiny_model_dir), max_model_len=512, lora=LORA), engine)
    with torch.no_grad():
        for parameter in loaded.trainable_parameters().values():
            parameter.normal_(0, 0.05)
    sampler = Sampler(loaded, engine)
    decoder = sampler._runner.decoder
    assert isinstance(decoder, NativeDecoder)
    assert isinstance(decoder._products, WideProducts if slow else OneDnnProducts)
    plain: list[torch.Size] = []
    linear = torch.nn.functional.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        plain.append(weight.shape)
        return linear(x, weight, bias)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", counted)
        calls = play(loaded, sampler, episodes=8, mixed_params=False)
        assert not plain
    differences = [torch.tensor(call.logprobs) - plain_logprobs(loaded, call).detach() for call in calls]
    assert torch.cat(differences).abs().mean() < 4e-2
    with torch.no_grad(), loaded.without_adapters():
        assert (torch.tensor(calls[0].logprobs) - plain_logprobs(loaded, calls[0])).abs().max() > 0.05


@pytest.mark.usefixtures("kernels_each_way")
@pytest.mark.parametrize("roles", [(), ROLES])
def test_small_models_in_bfloat16_have_updates_beside_their_weights(
    roles: tuple[str, ...], tiny_model_dir: Path
) -> None:
    engine = EngineConfig(device="cpu", dtype="bfloat16")
    config = TunerModelConfig(model_path=str(tiny_model_dir), max_model_len=512, lora=LoraConfig(rank=3))
    loaded = load_model(config, engine, roles)
    with torch.no_grad():
        for parameter in loaded.trainable_parameters().values():
            parameter.normal_(0, 0.1)
    sampler = Sampler(loaded, engine)
    assert isinstance(sampler._runner.decoder, WholeDecoder)
    wide = load_model(config, EngineConfig(device="cpu"), roles)
    wide.model.load_state_dict(loaded.model.state_dict())
    calls = play(loaded, sampler, episodes=8, mixed_params=False, adapters={role: role for role in roles})
    differences, bare = [], []
    for call in calls:
        recorded = torch.tensor(call.logprobs)
        with torch.no_grad(), wide.speaking_as(call.adapter):
            differences.append(recorded - plain_logprobs(wide, call))
        with torch.no_grad(), wide.without_adapters():
            bare.append(recorded - plain_logprobs(wide, call))
    assert torch.cat(differences).abs().mean() < 2e-2
    assert torch.cat(bare).abs().mean() > 0.2


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("piece", [1, 5, 64])
def test_a_small_model_has_a_voice_for_each_adapter(
    piece: int, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However rows are cut, those with and without adapters beside one another; and after every change of weights."""
    monkeypatch.setattr(native, "_PIECE", piece)
    loaded = with_adapters(tiny_model_dir)
    sampler = start(loaded, max_slots=16)
    assert isinstance(sampler._runner.decoder, WholeDecoder)
    for critic in ("critic", "", "critic@2"):
        calls = play(loaded, sampler, episodes=12, mixed_params=False, adapters={"solver": "solver", "critic": critic})
        assert {call.adapter for call in calls} == {"solver", critic}
        for call in calls:
            with torch.no_grad(), loaded.speaking_as(call.adapter):
                plain = plain_logprobs(loaded, call)
            assert (torch.tensor(call.logprobs) - plain).abs().max() < 1e-4
        if critic == "":
            keep_version(loaded, "critic", "critic@2")
        with torch.no_grad():
            for parameter in loaded.trainable_parameters().values():
                parameter.add_(0.1 * torch.randn_like(parameter))
        sampler.weights_changed(1)


def test_gradients_are_those_of_separate_policies(tiny_model_dir: Path) -> None:
    loaded = with_adapters(tiny_model_dir)
    calls = play(loaded, start(loaded), episodes=8, mixed_params=False, adapters={role: role for role in ROLES})
    rng = random.Random(0)
    datums = [Datum(call, rng.gauss(0, 1), 0.0, i) for i, call in enumerate(calls)]
    weigh(datums, "token", 12)
    learner_of(loaded).accumulate(datums)
    together = gradients(loaded)
    for role in ROLES:
        own = [datum for datum in datums if datum.call.role == role]
        total = sum(len(datum.call.completion_ids) for datum in own)
        with loaded.speaking_as(role):
            for datum in own:
                (-datum.advantage * plain_logprobs(loaded, datum.call).sum() / total).backward()
    plain = gradients(loaded)
    assert relative_difference(together, plain) < 1e-5
    assert all(gradient.abs().max() > 0 for gradient in plain.values())


def test_the_reference_is_what_was_before_training_adapters_included(tiny_model_dir: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model_dir, tmp_path / "model")
    trained = with_adapters(tiny_model_dir)
    for role in ROLES:
        save_adapter(trained, role, directory / "adapters" / role)
    loaded = load(directory, lora=LORA, adapters=ROLES)
    calls = play(loaded, start(loaded), episodes=8, mixed_params=False, adapters={role: role for role in ROLES})
    learner = learner_of(loaded, kl_coef=0.1, learning_rate=0.01)
    before = learner.logprobs(calls)
    datums = [Datum(call, 1.0 - 2 * (i % 2), 0.0, i) for i, call in enumerate(calls)]
    learner.train([datums])
    assert not torch.allclose(torch.cat(learner.logprobs(calls)), torch.cat(before), atol=1e-3)
    assert torch.allclose(torch.cat(learner._reference_logprobs(datums)), torch.cat(before), atol=1e-5)


@pytest.mark.parametrize("roles", [ROLES, ()])
def test_the_reference_of_new_adapters_is_the_bare_model(roles: tuple[str, ...], tiny_model_dir: Path) -> None:
    loaded, bare = with_adapters(tiny_model_dir, roles), load(tiny_model_dir)
    calls = play(loaded, start(loaded), episodes=4, mixed_params=False, adapters={role: role for role in roles})
    learner = learner_of(loaded, kl_coef=0.1)
    datums = [Datum(call, 1.0, 0.0, 0) for call in calls]
    names = set(loaded.trainable_parameters())
    if roles:
        keep_version(loaded, "solver", "solver@3")
    found = learner._reference_logprobs(datums)
    assert set(loaded.trainable_parameters()) == names
    for call, ours in zip(calls, found, strict=True):
        assert torch.allclose(ours, plain_logprobs(bare, call), atol=1e-4)
    learner.train([datums])


def test_each_policy_has_the_mean_of_its_own_entropies(tiny_model_dir: Path) -> None:
    loaded = with_adapters(tiny_model_dir)
    calls = play(loaded, start(loaded), episodes=8, mixed_params=False, adapters={role: role for role in ROLES})
    learner = learner_of(loaded, entropy_coef=0.5)
    learner.accumulate([Datum(call, 0.0, 0.0, 0) for call in calls])
    together = gradients(loaded)
    for role in ROLES:
        learner.accumulate([Datum(call, 0.0, 0.0, 0) for call in calls if call.role == role])
    assert relative_difference(together, gradients(loaded)) < 1e-5


def test_one_role_learns_and_the_rest_stays(tiny_model_dir: Path) -> None:
    loaded = with_adapters(tiny_model_dir)
    before = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    calls = play(loaded, start(loaded), episodes=8, mixed_params=False, adapters={role: role for role in ROLES})
    datums = [Datum(call, 1.0 - 2 * (i % 2), 0.0, i) for i, call in enumerate(calls) if call.role == "critic"]
    learner_of(loaded, learning_rate=0.01).train([datums])
    changed = {name for name, tensor in loaded.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.endswith(".critic.weight")}


def test_versions_are_kept_and_dropped(tiny_model_dir: Path) -> None:
    loaded = with_adapters(tiny_model_dir)
    names = set(loaded.trainable_parameters())
    keep_version(loaded, "solver", "solver@3")
    kept = {name: tensor.clone() for name, tensor in adapter_parameters(loaded, "solver@3").items()}
    with torch.no_grad():
        for parameter in loaded.trainable_parameters().values():
            parameter.add_(1)
    assert set(loaded.trainable_parameters()) == names, "a version does not learn"
    for name, tensor in adapter_parameters(loaded, "solver").items():
        assert torch.allclose(tensor - 1, kept[name], atol=1e-6)
    drop_version(loaded, "solver@3")
    assert loaded.versions == ()
    assert not any("@" in name for name in loaded.model.state_dict())
    assert set(loaded.trainable_parameters()) == names


# ----------------------------------------------------------------------------------------------------- the pool


def test_the_pool_keeps_versions_spread_over_the_past() -> None:
    cast = Cast({"wolf": "wolf", "seer": "seer"})
    pool = OpponentPool(OpponentPoolConfig(size=4, interval_steps=2), cast, 0)
    dropped = [pool.keep(step) for step in range(0, 40, 2) if pool.due(step)]
    assert dropped[:4] == [None] * 4
    assert len(pool.steps) == 4
    assert pool.steps[0] == 0 and pool.steps[-1] == 38
    assert sorted(set(range(0, 40, 2)) - set(pool.steps)) == sorted(step for step in dropped if step is not None)
    gaps = [after - before for before, after in zip(pool.steps, pool.steps[1:], strict=False)]
    assert max(gaps) <= 20


def test_one_team_learns_while_the_past_plays_the_others() -> None:
    cast = plain_cast(RolesConfig(), ["wolf", "seer", "witch"])
    config = OpponentPoolConfig(probability=0.5, teams=[["wolf"], ["seer", "witch"]])
    pool = OpponentPool(config, cast, 0)
    assert pool.cast_of("train1-0") is cast, "there is no past yet"
    pool.keep(0)
    pool.keep(5)
    drawn = [pool.cast_of(f"train9-{i}") for i in range(400)]
    assert drawn == [pool.cast_of(f"train9-{i}") for i in range(400)]
    past = [one for one in drawn if one.opponents]
    assert 150 < len(past) < 250
    assert {frozenset(one.opponents) for one in past} == {frozenset({"wolf"}), frozenset({"seer", "witch"})}
    for one in past:
        assert len({version.partition("@")[2] for version in one.opponents.values()}) == 1
        assert {role: one.adapters[role] for role in one.opponents} == one.opponents
        assert all(one.adapters[role] == role for role in set(cast.adapters) - set(one.opponents))


def test_teams_must_fit_the_roles() -> None:
    cast = plain_cast(RolesConfig(), ["wolf", "seer"])
    for teams in ([["wolf"]], [["wolf"], ["seer", "owl"]], [["wolf", "wolf"], ["seer"]]):
        with pytest.raises(RoleError, match="every role that learns once"):
            OpponentPool(OpponentPoolConfig(teams=teams), cast, 0)
    with pytest.raises(RoleError, match="`owl`, which is not trained"):
        plain_cast(RolesConfig(initial=["owl"]), ["wolf"])
    with pytest.raises(RoleError, match="nobody is left"):
        plain_cast(RolesConfig(initial=["wolf"]), ["wolf"])


# ------------------------------------------------------------------------------------------------- whole runs


class Duel(Workflow):
    """Two roles that are paid for different letters, and an untrained one."""

    trainable_targets: list[str] | None = ["left", "right"]  # noqa: RUF012

    async def execute(self, task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        model_tuner.register_model("host", default_model=ScriptedModel(["Begin."]))
        for role in ("left", "right"):
            model_tuner.register_model(role)
        begin = await model_tuner.get_model("host")([{"role": "user", "content": "Say something."}])
        rewards = {}
        for role, letters in (("left", "aeiou"), ("right", "nstr")):
            said = await model_tuner.get_model(role)(begin_with(begin.content[0]["text"]))
            text = "".join(block.get("text", "") for block in said.content)
            rewards[role] = sum(map(text.count, letters)) / (len(text) + 1)
        return WorkflowOutput(reward=rewards)


def begin_with(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def settings(model: Path, tmp_path: Path, **more: object) -> dict[str, object]:
    (tmp_path / "tasks.jsonl").write_text("\n".join(json.dumps({"question": f"q{i}"}) for i in range(8)))
    return {
        "experiment_name": "duel",
        "output_dir": str(tmp_path / "runs"),
        "model.model_path": str(model),
        "model.max_model_len": 256,
        "model.max_tokens": 8,
        "model.lora.rank": 4,
        "roles.adapters": "per_role",
        "algorithm.learning_rate": 0.02,
        "algorithm.batch_size": 4,
        "algorithm.group_size": 4,
        "train_dataset.path": str(tmp_path / "tasks.jsonl"),
        "train_dataset.total_steps": 6,
        "monitor_type": "none",
        **more,
    }


POOL = {
    "roles.opponent_pool.probability": 0.7,
    "roles.opponent_pool.interval_steps": 2,
    "roles.opponent_pool.size": 2,
}


def test_roles_with_adapters_learn_each_its_own(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = tune(Duel, overrides=settings(tiny_model_dir, tmp_path, **POOL))
    base = load_file(tiny_model_dir / "model.safetensors")
    after = load_file(result.checkpoint / "model.safetensors")
    assert all(torch.equal(tensor, after[name]) for name, tensor in base.items())
    for role in ("left", "right"):
        tensors = load_file(result.checkpoint / "adapters" / role / "adapter_model.safetensors")
        assert any(tensor.abs().max() > 0 for name, tensor in tensors.items() if "lora_B" in name)
        assert {f"reward_mean/{role}", f"calls/{role}", f"tokens/{role}"} <= result.history[-1].extra.keys()
    assert "calls/host" not in result.history[-1].extra
    met = 0
    for path in (result.run_dir / "episodes").glob("train_*.jsonl"):
        for row in read_episodes(path):
            met += bool(row["opponents"])
            assert set(row["reward"]) == {"left", "right"} - set(row["opponents"])
            assert {call["role"]: call["adapter"] for call in row["calls"]} == {
                role: row["opponents"].get(role, role) for role in ("left", "right")
            }
    assert met > 20


def test_peft_loads_the_adapters_and_says_the_same(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = tune(Duel, overrides=settings(tiny_model_dir, tmp_path))
    with pytest.raises(ModelError, match="holds adapters of left, right, which would not be used"):
        load(result.checkpoint)
    with pytest.raises(ModelError, match=r"has an alpha of \d+, but `model.lora.alpha` is 7"):
        load(result.checkpoint, lora=LORA.model_copy(update={"alpha": 7.0}), adapters=("left", "right"))
    loaded = load(result.checkpoint, lora=LORA, adapters=("left", "right"))
    ids = torch.arange(5, 25)[None]
    base = AutoModelForCausalLM.from_pretrained(result.checkpoint)
    theirs = PeftModel.from_pretrained(base, str(result.checkpoint / "adapters" / "right"))
    loaded.model.set_attn_implementation("sdpa")
    with torch.no_grad(), loaded.speaking_as("right"):
        assert torch.allclose(loaded.model(ids).logits, theirs(ids).logits, atol=1e-5)
    with torch.no_grad(), loaded.speaking_as("left"):
        assert not torch.allclose(loaded.model(ids).logits, theirs(ids).logits, atol=1e-3)


def test_a_run_with_opponents_resumes_bit_for_bit(tiny_model_dir: Path, tmp_path: Path) -> None:
    whole = tune(Duel, overrides=settings(tiny_model_dir, tmp_path, **POOL, experiment_name="whole"))
    halves = settings(tiny_model_dir, tmp_path, **POOL, experiment_name="halves")
    halves["algorithm.save_interval_steps"] = 3
    tune(Duel, overrides={**halves, "train_dataset.total_steps": 3})
    result = tune(Duel, overrides=halves)
    ours, theirs = (load_file(one.checkpoint / "trainer.safetensors") for one in (result, whole))
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("version.left@") for name in ours)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_the_model_before_training_can_play_a_side(tiny_model_dir: Path, tmp_path: Path) -> None:
    plain = settings(tiny_model_dir, tmp_path)
    result = tune(Duel, overrides=plain)
    held_out = {key: value for key, value in plain.items() if key.startswith(("model.", "roles."))}
    held_out |= {"eval_dataset.path": str(tmp_path / "tasks.jsonl"), "model.model_path": str(result.checkpoint)}
    trained = evaluate(Duel, overrides=held_out)["greedy"].metrics
    mixed = evaluate(Duel, overrides=held_out | {"roles.initial": "[right]"})["greedy"].metrics
    assert mixed["reward_mean/left"] == trained["reward_mean/left"]
    assert "reward_mean/right" not in mixed, "what does not learn is not scored"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": {"opponent_pool": {}}}, "`roles.opponent_pool` has no effect"),
        ({"roles": {"initial": ["wolf"]}}, "`roles.initial` has no effect"),
        ({"roles": {"adapters": "per_role"}}, "needs `model.lora`"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config({"experiment_name": "x", "model": {"model_path": "tiny-agent"}, **changes})


def test_roles_must_be_known_beforehand(tiny_model_dir: Path, tmp_path: Path) -> None:
    class Unnamed(Duel):
        trainable_targets: list[str] | None = None

    with pytest.raises(RoleError, match="name them in `trainable_targets`"):
        tune(Unnamed, overrides=settings(tiny_model_dir, tmp_path))


def test_an_adapter_of_another_form_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    result = tune(Duel, overrides=settings(tiny_model_dir, tmp_path, **{"train_dataset.total_steps": 1}))
    with pytest.raises(ModelError, match=r"does not fit `model\.lora`"):
        load(result.checkpoint, lora=LoraConfig(rank=8), adapters=("left",))
