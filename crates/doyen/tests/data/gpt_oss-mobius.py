"""Makes gpt_oss-mobius/: a GPT-OSS of two layers and three experts as mobius-onnx 0.1.0 exports it, with the logits and greedy
tokens that ONNX Runtime 1.31.1 computes from it.

    python gpt_oss-mobius.py CHECKPOINT OUT

CHECKPOINT is a tiny random GPT-OSS in the layout of the released ones; its first layers, experts and vocabulary rows are kept.
Needs mobius-onnx, onnxruntime, torch, safetensors.
"""
import json, os, shutil, subprocess, sys

import numpy as np
import onnxruntime as ort
from safetensors.numpy import save_file
from safetensors.torch import load_file, save_file as save_torch

LAYERS, EXPERTS, INTERMEDIATE, VOCAB = 2, 3, 32, 128
source, out = sys.argv[1:3]
small = out + ".checkpoint"
os.makedirs(small)

config = json.load(open(f"{source}/config.json"))
config.update(num_hidden_layers=LAYERS, num_local_experts=EXPERTS, intermediate_size=INTERMEDIATE, vocab_size=VOCAB)
config.update(layer_types=config["layer_types"][:LAYERS], sliding_window=8, max_position_embeddings=256)
json.dump(config, open(f"{small}/config.json", "w"))
kept = {}
for name, t in load_file(f"{source}/model.safetensors").items():
    if ".layers." in name and int(name.split(".")[2]) >= LAYERS:
        continue
    if ".experts." in name or ".router." in name:
        t = t[:EXPERTS]
        if ".gate_up_proj" in name:
            t = t[:, : 2 * INTERMEDIATE]
        elif ".down_proj_blocks" in name or ".down_proj_scales" in name:
            t = t[:, :, : INTERMEDIATE // 32]
    elif t.shape[0] == 1024:
        t = t[:VOCAB]
    kept[name] = t.contiguous()
save_torch(kept, f"{small}/model.safetensors")

build = [sys.executable, "-m", "mobius", "build", "--config", small, out, "--dtype", "f32", "--ep", "cpu", "--runtime", "ort-genai"]
subprocess.run(build, check=False)  # fails after the export: it asks the hub for a tokenizer
shutil.rmtree(small)

session = ort.InferenceSession(f"{out}/model.onnx", providers=["CPUExecutionProvider"])


def run(ids, past, cache):
    feed = {"input_ids": ids[None], "attention_mask": np.ones((1, past + len(ids)), np.int64)}
    feed["position_ids"] = np.arange(past, past + len(ids), dtype=np.int64)[None]
    for port in session.get_inputs():
        if port.name.startswith("past"):
            feed[port.name] = cache[port.name] if cache else np.zeros((1, port.shape[1], 0, port.shape[3]), np.float32)
    results = dict(zip([o.name for o in session.get_outputs()], session.run(None, feed)))
    logits = results.pop("logits")[0]
    return logits, {name.replace("present", "past_key_values"): v for name, v in results.items()}


golden, random = {}, np.random.default_rng(1)
for k, length in enumerate([5, 17, 30]):
    prompt = random.integers(3, VOCAB, length)
    logits, cache = run(prompt, 0, None)
    golden[f"prompt_{k}"], golden[f"ort_logits_{k}"] = prompt, logits
    greedy = [int(logits[-1].argmax())]
    while len(greedy) < 24:
        logits, cache = run(np.array(greedy[-1:]), length + len(greedy) - 1, cache)
        greedy.append(int(logits[-1].argmax()))
    golden[f"ort_greedy_{k}"] = np.array(greedy)
save_file(golden, f"{out}/golden-ort.safetensors")
