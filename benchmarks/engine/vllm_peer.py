"""vLLM on CPU as a peer. Runs in the environment it is installed in: `vllm_peer FOLDER DTYPE WINDOW
THREADS`."""

from __future__ import annotations

import json
import os
import random
import sys
from importlib import import_module
from time import perf_counter
from typing import Any


def main() -> None:
    folder, dtype, window_tokens, threads = sys.argv[1:]
    os.environ.update(
        {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": threads,
        }
    )
    # vLLM writes to standard output, which is ours for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    # Not in our own environment.
    vllm: Any = import_module("vllm")
    engine = vllm.LLM(
        folder,
        dtype=dtype,
        max_model_len=int(window_tokens),
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    draw = random.Random("vllm")
    tell({})
    for line in sys.stdin:
        batch, prompt_tokens, new_tokens, first_id, last_id = map(int, line.split())
        prompts: list[Any] = [
            {"prompt_token_ids": [draw.randrange(first_id, last_id) for _ in range(prompt_tokens)]}
            for _ in range(batch)
        ]
        greedy = vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        start = perf_counter()
        for number, prompt in enumerate(prompts):
            engine.llm_engine.add_request(str(number), prompt, greedy)
        tokens = [0] * batch
        arrivals_s: list[float] = []
        while engine.llm_engine.has_unfinished_requests():
            for out in engine.llm_engine.step():
                tokens[int(out.request_id)] = len(out.outputs[0].token_ids)
            if min(tokens) > len(arrivals_s):
                arrivals_s.append(perf_counter() - start)
        tell({"arrivals_s": arrivals_s})


if __name__ == "__main__":
    main()
