"""One round of onnxruntime-genai, as a process of its own: python -m bench_peers.genai PACKAGE THREADS PROMPT GEN REPS.

Prints one JSON object. Prompts are random tokens, as in `doyen bench` and llama-bench, and generation is greedy; a minimal
length keeps the end of sequence from ending it.
"""

import json
import resource
import sys
import time

import numpy as np


def main(package, threads, prompt, generate, repetitions):
    start = time.perf_counter()
    import onnxruntime_genai as og

    config = og.Config(package)
    options = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model = og.Model(config)
    params = og.GeneratorParams(model)
    total = prompt + generate + 1
    params.set_search_options(min_length=total, max_length=total, do_sample=False)
    rng = np.random.default_rng(0)

    def repetition(prompt, generate):
        generator = og.Generator(model, params)
        begin = time.perf_counter()
        generator.append_tokens(rng.integers(100, 8000, prompt).astype(np.int32))
        generator.generate_next_token()
        middle = time.perf_counter()
        for _ in range(generate):
            generator.generate_next_token()
        return prompt / (middle - begin), generate / (time.perf_counter() - middle)

    repetition(1, 0)
    first_token = time.perf_counter() - start
    repetition(prompt, generate)
    rates = [repetition(prompt, generate) for _ in range(repetitions)]
    prefill, decode = np.median(rates, axis=0)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        json.dumps({"prefill": float(prefill), "decode": float(decode), "first_token": first_token, "peak_bytes": peak})
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
