"""The Tinker service, driven by the official SDK."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentscope_tuner import TunerModelConfig
from agentscope_tuner.backends.trinity.export import download_model, merge_adapter
from agentscope_tuner.config import EngineConfig
from agentscope_tuner.errors import TrainingStoppedError
from agentscope_tuner.tinker_service import Service, TinkerServer, server
from agentscope_tuner.tinker_service import service as service_module
from agentscope_tuner.tinker_service.protocol import UserError

os.environ["TINKER_TELEMETRY"] = "0"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tinker
    from tinker import types

# The SDK leaves its connections open when a client is dropped.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

KEY = "tml-a-key-of-this-test"
PROMPT = [5, 60, 61, 62, 63, 64, 65]
SGD_LIKE = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-12)


class Served:
    """A service on a thread of its own."""

    def __init__(self, model_dir: Path, folder: Path, **options: Any) -> None:
        model = TunerModelConfig(model_path=str(model_dir), max_model_len=256)
        self.service = Service(model, EngineConfig(device="cpu"), folder, **options)
        self.clients: list[tinker.ServiceClient] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.started = threading.Event()
        self.thread.start()
        self.started.wait()

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            self.task = asyncio.ensure_future(TinkerServer(self.service, KEY).serve(self.listener))
            self.started.set()
            await asyncio.wait({self.task})

        asyncio.run(serve())

    def client(self) -> tinker.ServiceClient:
        self.clients.append(tinker.ServiceClient(base_url=self.url, api_key=KEY))
        return self.clients[-1]

    def stop(self) -> None:
        for client in self.clients:  # each has a thread that would go on asking, and drawing random numbers
            client.close("success").result()
        self.loop.call_soon_threadsafe(self.task.cancel)
        self.thread.join()


@pytest.fixture(scope="module")
def served(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tiny_model_dir, tmp_path_factory.mktemp("tinker"), full_weights=True)
    yield served
    served.stop()


@pytest.fixture
def trainer(served: Served) -> tinker.TrainingClient:
    return served.client().create_lora_training_client(base_model=served.service.directory, rank=8).result()


@pytest.fixture(scope="module")
def plain(tiny_model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()


def plain_logprobs(model: Any, ids: list[int], targets: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([ids])).logits[0].float()
    return torch.log_softmax(logits, -1)[torch.arange(len(ids)), torch.tensor(targets)]


def a_batch(loss: str) -> list[types.Datum]:
    """Sequences that begin alike, as a group of episodes does."""
    torch.manual_seed(3)
    data = []
    for length in (30, 41, 7):
        ids = [*range(20, 50), *torch.randint(3, 250, (length,)).tolist()]
        inputs: dict[str, Any] = {"target_tokens": torch.tensor(ids[1:])}
        if loss == "cross_entropy":
            inputs["weights"] = torch.cat([torch.zeros(29), torch.rand(length)])
        else:
            inputs["logprobs"] = -torch.rand(29 + length) * 6
            inputs["advantages"] = torch.cat([torch.zeros(29), torch.randn(length)])
        data.append(types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs))
    return data


def plain_loss(loss: str, logprobs: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """As written in Tinker's documentation."""
    if loss == "cross_entropy":
        return (-logprobs * given["weights"]).sum()
    ratio, advantages = torch.exp(logprobs - given["logprobs"]), given["advantages"]
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "ppo":
        return -torch.min(ratio * advantages, torch.clamp(ratio, 0.7, 1.3) * advantages).sum()
    if loss == "cispo":
        return -(torch.clamp(ratio, 0.0, 4.0).detach() * logprobs * advantages).sum()
    return -(logprobs * advantages - 0.5 * 0.1 * (logprobs - given["logprobs"]) ** 2).sum()


SETTINGS = {"ppo": {"clip_low_threshold": 0.7, "clip_high_threshold": 1.3}, "dro": {"beta": 0.1}}


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"])
def test_gradients_equal_those_of_plain_torch(
    served: Served, trainer: tinker.TrainingClient, tiny_model_dir: Path, loss: str
) -> None:
    data = a_batch(loss)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    expected_logprobs, total = [], torch.zeros(())
    for datum in data:
        inputs = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
        logprobs = plain_logprobs(model, datum.model_input.to_ints(), inputs["target_tokens"].tolist())
        expected_logprobs.append(logprobs.detach())
        total = total + plain_loss(loss, logprobs, inputs)
    total.backward()

    result = trainer.forward_backward(data, loss, SETTINGS.get(loss)).result()
    assert result.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-5)
    assert 0 < result.metrics["packed_tokens:sum"] < sum(len(logprobs) for logprobs in expected_logprobs)
    for output, logprobs in zip(result.loss_fn_outputs, expected_logprobs, strict=True):
        assert torch.allclose(output["logprobs"].to_torch(), logprobs, atol=1e-5)
    grads = {
        name: p.grad for name, p in served.service.training(trainer.model_id).loaded.trainable_parameters().items()
    }
    for name, parameter in model.named_parameters():
        assert (grads[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def test_a_loss_of_the_clients_own(served: Served, trainer: tinker.TrainingClient, tiny_model_dir: Path) -> None:
    data = a_batch("cross_entropy")

    def squares(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((one[-7:] ** 2).sum() for one in logprobs), {"seen": float(len(logprobs))}

    result = trainer.forward_backward_custom(data, squares).result()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    loss = torch.zeros(())
    for datum in data:
        targets = datum.loss_fn_inputs["target_tokens"].to_torch().tolist()
        loss = loss + (plain_logprobs(model, datum.model_input.to_ints(), targets)[-7:] ** 2).sum()
    loss.backward()
    assert result.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics["seen"] == 3
    grads = {
        name: p.grad for name, p in served.service.training(trainer.model_id).loaded.trainable_parameters().items()
    }
    for name, parameter in model.named_parameters():
        assert (grads[name] - parameter.grad).norm() <= 1e-5 * parameter.grad.norm(), name


def test_steps_equal_those_of_torchs_adamw(
    served: Served, trainer: tinker.TrainingClient, tiny_model_dir: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir).eval()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    params = types.AdamParams(learning_rate=1e-3, eps=1e-8, weight_decay=0.1, grad_clip_norm=0.5)
    for _ in range(3):
        data = a_batch("cross_entropy")
        trainer.forward_backward(data, "cross_entropy")
        metrics = trainer.optim_step(params).result().metrics
        adamw.zero_grad()
        loss = torch.zeros(())
        for datum in data:
            inputs = {name: tensor.to_torch() for name, tensor in datum.loss_fn_inputs.items()}
            logprobs = plain_logprobs(model, datum.model_input.to_ints(), inputs["target_tokens"].tolist())
            loss = loss + plain_loss("cross_entropy", logprobs, inputs)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        adamw.step()
    ours = served.service.training(trainer.model_id).loaded.trainable_parameters()
    for name, parameter in model.named_parameters():
        assert torch.allclose(ours[name], parameter, atol=1e-5), name


def test_samples_and_what_they_say_about_themselves(served: Served, plain: Any) -> None:
    sampler = served.client().create_sampling_client(base_model=served.service.directory).result()
    params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=42)
    prompt = types.ModelInput.from_ints(PROMPT)
    response = sampler.sample(
        prompt, num_samples=4, sampling_params=params, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    assert len({tuple(sequence.tokens) for sequence in response.sequences}) == 4
    with torch.no_grad():
        for sequence in response.sequences:
            ids = PROMPT + sequence.tokens
            expected = plain_logprobs(plain, ids[:-1], ids[1:])
            assert torch.allclose(torch.tensor(sequence.logprobs), expected[len(PROMPT) - 1 :], atol=1e-5)
        expected = plain_logprobs(plain, PROMPT[:-1], PROMPT[1:])
        best = torch.log_softmax(plain(torch.tensor([PROMPT])).logits[0], -1)[:-1].topk(3)
    assert response.prompt_logprobs[0] is None
    assert torch.allclose(torch.tensor(response.prompt_logprobs[1:]), expected, atol=1e-5)
    assert [[token for token, _ in row] for row in response.topk_prompt_logprobs[1:]] == best.indices.tolist()
    assert sampler.compute_logprobs(prompt).result()[1:] == pytest.approx(expected.tolist(), abs=1e-5)
    again = sampler.sample(prompt, num_samples=4, sampling_params=params).result()
    assert again.sequences[0].tokens != response.sequences[0].tokens, (
        "one seed for all requests must not make all equal"
    )


def test_others_are_answered_while_a_prompt_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, answered = threading.Event(), threading.Event()
    read = service_module._about_prompt

    def slow(*given: Any) -> Any:
        begun.set()
        assert answered.wait(60)
        return read(*given)

    monkeypatch.setattr(service_module, "_about_prompt", slow)
    sampler = served.client().create_sampling_client(base_model=served.service.directory).result()
    found = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT))
    assert begun.wait(60)
    httpx.get(f"{served.url}/api/v1/healthz", headers={"x-api-key": KEY}, timeout=30).raise_for_status()
    answered.set()
    assert len(found.result()) == len(PROMPT)


def test_greedy_samples_are_those_of_transformers(served: Served, plain: Any) -> None:
    sampler = served.client().create_sampling_client(base_model=served.service.directory).result()
    params = types.SamplingParams(max_tokens=9, temperature=0)
    found = sampler.sample(types.ModelInput.from_ints(PROMPT), num_samples=1, sampling_params=params).result()
    expected = plain.generate(torch.tensor([PROMPT]), max_new_tokens=9, do_sample=False)[0, len(PROMPT) :].tolist()
    assert found.sequences[0].tokens == expected
    assert found.sequences[0].stop_reason == ("stop" if expected[-1] == plain.config.eos_token_id else "length")


def test_what_is_trained_is_what_is_sampled_next(served: Served, trainer: tinker.TrainingClient) -> None:
    before = trainer.save_weights_and_get_sampling_client().result()
    words = [70, 71, 72, 73]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([*PROMPT, *words[:-1]]),
        loss_fn_inputs={
            "target_tokens": torch.tensor([*PROMPT[1:], *words]),
            "weights": torch.tensor([0.0] * (len(PROMPT) - 1) + [1.0] * 4),
        },
    )
    for _ in range(30):
        trainer.forward_backward([datum], "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    after = trainer.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, temperature=0)

    def say(sampler: tinker.SamplingClient) -> list[int]:
        prompt = types.ModelInput.from_ints(PROMPT)
        return sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences[0].tokens

    first, learned = say(before), say(after)
    assert learned == words != first
    # Two models are held, and a third is asked for: the one used least recently makes room, and comes back.
    base = served.client().create_sampling_client(base_model=served.service.directory).result()
    assert say(base) == first
    assert say(after) == words
    assert say(before) == first


def test_training_goes_on_from_a_checkpoint(served: Served, trainer: tinker.TrainingClient) -> None:
    def step(client: tinker.TrainingClient) -> None:
        client.forward_backward(a_batch("cross_entropy"), "cross_entropy")
        client.optim_step(SGD_LIKE).result()

    step(trainer)
    path = trainer.save_state("first").result().path
    files = {file.suffix for file in served.service.checkpoint(path).iterdir()}
    assert ".safetensors" in files
    assert not files & {".pt", ".bin", ".pkl"}
    other = served.client().create_training_client_from_state_with_optimizer(path).result()
    bare = served.client().create_training_client_from_state(path).result()
    for client in (trainer, other, bare):
        step(client)
    weights = [
        served.service.training(client.model_id).loaded.trainable_parameters() for client in (trainer, other, bare)
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    folder = served.service.checkpoint(path)
    AutoModelForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings():  # of a client that is made by itself instead, and cannot be closed
        warnings.simplefilter("ignore")
        rest = served.client().create_rest_client()
    rest.delete_checkpoint(trainer.model_id, "first").result()
    assert not folder.exists()


def test_weights_are_given_away(
    served: Served, trainer: tinker.TrainingClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    trainer.forward_backward(a_batch("cross_entropy"), "cross_entropy")
    trainer.optim_step(SGD_LIKE).result()
    path = trainer.save_state("to-export").result().path
    model = TunerModelConfig(model_path=served.service.directory)
    download_model(served.url, path, model, tmp_path / "step_1")
    assert [file.name for file in tmp_path.iterdir()] == ["step_1"]
    there = served.service.training(trainer.model_id).loaded.trainable_parameters()
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path / "step_1").named_parameters():
        assert torch.equal(parameter, there[name]), name
    AutoTokenizer.from_pretrained(tmp_path / "step_1")
    with pytest.raises(TrainingStoppedError, match="no checkpoint `tinker://nobody/weights/none`"):
        download_model(served.url, "tinker://nobody/weights/none", model, tmp_path / "step_2")


def test_what_a_client_trained_is_let_go_when_it_ends(served: Served) -> None:
    client = served.client()
    model_id = client.create_lora_training_client(base_model=served.service.directory).result().model_id
    assert served.service.training(model_id)
    client.close("success").result()
    with pytest.raises(UserError, match="no model"):
        served.service.training(model_id)


def test_what_a_silent_client_trained_is_let_go(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tiny_model_dir, tmp_path, full_weights=True)

    def post(path: str, **body: Any) -> Any:
        # The SDK's clients say all by themselves that they are there, at times of their own.
        answer = httpx.post(f"{served.url}/api/v1/{path}", json=body, headers={"x-api-key": KEY}, timeout=60)
        return answer.raise_for_status().json()

    def begin() -> str:
        session_id = post("create_session", tags=[], user_metadata={}, sdk_version="0")["session_id"]
        model = {"base_model": served.service.directory, "session_id": session_id, "model_seq_id": 0}
        post("retrieve_future", request_id=post("create_model", **model)["request_id"])
        assert served.service.training(f"{session_id}:train:0")
        return session_id

    try:
        silent, heard = begin(), begin()
        monkeypatch.setattr(server, "_SILENCE_S", 0.1)
        time.sleep(0.2)
        post("session_heartbeat", session_id=heard)
        assert served.service.training(f"{heard}:train:0")
        with pytest.raises(UserError, match="no model"):
            served.service.training(f"{silent}:train:0")
    finally:
        served.stop()


@pytest.mark.parametrize("as_text", [False, True])
def test_stops_are_tokens_or_strings(served: Served, *, as_text: bool) -> None:
    sampler = served.client().create_sampling_client(base_model=served.service.directory).result()
    tokenizer = AutoTokenizer.from_pretrained(served.service.directory)
    ends = set(range(65, 97))  # of some 250 tokens, most of them bytes
    strings = [tokenizer.decode([one]) for one in ends]

    def stops(tokens: list[int]) -> bool:
        if as_text:
            text = tokenizer.decode(tokens)
            return any(string in text for string in strings)
        return bool(ends & {*tokens})

    params = types.SamplingParams(max_tokens=16, seed=1, stop=strings if as_text else list(ends))
    answer = sampler.sample(types.ModelInput.from_ints(PROMPT), num_samples=32, sampling_params=params).result()
    for sequence in answer.sequences:
        assert not stops(sequence.tokens[:-1])
        ended = stops(sequence.tokens) or sequence.tokens[-1] == tokenizer.eos_token_id
        assert sequence.stop_reason == ("stop" if ended else "length")
        assert ended or len(sequence.tokens) == 16
    assert sum(stops(sequence.tokens) for sequence in answer.sequences) > 8


def test_any_whole_number_is_a_seed(served: Served) -> None:
    sampler = served.client().create_sampling_client(base_model=served.service.directory).result()
    for seed in (-1, 2**63 - 1):
        params = types.SamplingParams(max_tokens=2, seed=seed)
        prompt = types.ModelInput.from_ints(PROMPT)
        assert sampler.sample(prompt, num_samples=1, sampling_params=params).result().sequences


def test_only_signed_addresses_are_served_without_the_key(served: Served, trainer: tinker.TrainingClient) -> None:
    path = trainer.save_weights_external("taken").result().path
    listing = f"{served.url}/api/v1/training_runs/{trainer.model_id}/checkpoints/external_weights/taken"
    assert httpx.get(f"{listing}/external_weights_urls").status_code == 401
    signed = httpx.get(f"{listing}/external_weights_urls", headers={"x-api-key": KEY}).json()["urls"]["config.json"]
    assert httpx.get(signed).json()["model_type"]
    assert httpx.get(signed.replace("config.json", "nothing.json")).status_code == 404
    assert httpx.get(signed.replace("config.json", "..%2f..%2f..%2fetc%2fpasswd")).status_code == 404
    assert httpx.get(f"{served.url}/downloads/guessed/config.json").status_code == 403
    assert served.service.checkpoint(path).is_dir()


def test_an_adapter_that_a_service_gave_is_merged(tiny_model_dir: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    form = PeftLoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), form)
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", TunerModelConfig(model_path=str(tiny_model_dir)), tmp_path / "whole")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, adapted.eval()(ids).logits, atol=1e-5)
    AutoTokenizer.from_pretrained(tmp_path / "whole")


def test_adapters_of_the_rank_that_was_asked_for(tiny_model_dir: Path, tmp_path: Path) -> None:
    served = Served(tiny_model_dir, tmp_path, full_weights=False)
    try:
        client = (
            served.client()
            .create_lora_training_client(base_model=served.service.directory, rank=3, train_mlp=False, seed=1)
            .result()
        )
        info = client.get_info()
        assert (info.is_lora, info.lora_rank) == (True, 3)
        names = served.service.training(client.model_id).loaded.trainable_parameters()
        assert all(".self_attn." in name and "lora_" in name for name in names)
        client.forward_backward(a_batch("cross_entropy"), "cross_entropy")
        client.optim_step(SGD_LIKE).result()
        path = client.save_state("one").result().path
        other = served.client().create_training_client_from_state_with_optimizer(path).result()
        for name, parameter in served.service.training(other.model_id).loaded.trainable_parameters().items():
            assert torch.equal(parameter, names[name]), name
    finally:
        served.stop()


def wrong_base(served: Served) -> None:
    served.client().create_sampling_client(base_model="another/model").result()


def too_long(served: Served) -> None:
    sampler = served.client().create_sampling_client(base_model=served.service.directory).result()
    prompt = types.ModelInput.from_ints([7] * 256)
    sampler.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)).result()


def no_such_token(served: Served) -> None:
    sampler = served.client().create_sampling_client(base_model=served.service.directory).result()
    prompt = types.ModelInput.from_ints([7, 10**6])
    sampler.sample(prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=1)).result()


def a_target_that_is_no_token(served: Served) -> None:
    client = served.client().create_lora_training_client(base_model=served.service.directory).result()
    inputs = {"target_tokens": torch.tensor([60, 200, -100]), "weights": torch.ones(3)}
    datum = types.Datum(model_input=types.ModelInput.from_ints([5, 60, 200]), loss_fn_inputs=inputs)
    client.forward_backward([datum], "cross_entropy").result()


def no_such_checkpoint(served: Served) -> None:
    served.client().create_sampling_client(model_path="tinker://nobody/weights/none").result()


def out_of_the_folder(served: Served) -> None:
    served.client().create_sampling_client(model_path="tinker://../../etc").result()


def a_name_that_leaves_the_folder(served: Served) -> None:
    client = served.client().create_lora_training_client(base_model=served.service.directory).result()
    client.save_state("../outside").result()


def a_loss_nobody_knows(served: Served) -> None:
    client = served.client().create_lora_training_client(base_model=served.service.directory).result()
    client.forward_backward(a_batch("ppo"), "gspo").result()


def no_advantages(served: Served) -> None:
    client = served.client().create_lora_training_client(base_model=served.service.directory).result()
    client.forward_backward(a_batch("cross_entropy"), "ppo").result()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (wrong_base, "not `another/model`"),
        (too_long, "256"),
        (no_such_token, "vocabulary"),
        (a_target_that_is_no_token, "token -100"),
        (no_such_checkpoint, "no checkpoint"),
        (out_of_the_folder, "tinker://"),
        (a_name_that_leaves_the_folder, "cannot be called"),
        (a_loss_nobody_knows, "gspo"),
        (no_advantages, "`logprobs`"),
    ],
)
def test_mistakes_are_told_and_the_service_goes_on(
    served: Served, mistake: Callable[[Served], None], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        mistake(served)
    sampler = served.client().create_sampling_client(base_model=served.service.directory).result()
    params = types.SamplingParams(max_tokens=2)
    assert sampler.sample(types.ModelInput.from_ints(PROMPT), num_samples=1, sampling_params=params).result().sequences


@pytest.mark.parametrize("headers", [{}, {"x-api-key": "tml-wrong"}, {"authorization": f"Bearer {KEY}"}])
def test_without_the_key_nothing_is_answered(served: Served, headers: dict[str, str]) -> None:
    for path in ("get_server_capabilities", "healthz"):
        assert httpx.get(f"{served.url}/api/v1/{path}", headers=headers).status_code == 401
    answer = httpx.post(f"{served.url}/api/v1/create_session", json={}, headers=headers)
    assert answer.status_code == 401
    assert KEY not in answer.text
