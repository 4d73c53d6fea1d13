"""Greedy texts of an exported policy in vLLM. Arguments: its folder, a JSON file with pairs of texts, of which each
first one is a prompt, and the JSON file to write."""

import json
import os
import sys

# In one process, small, and without a function of the sampler that takes a compiler.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
               "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    folder, given, out = sys.argv[1:]
    llm = LLM(folder, dtype="float32", enforce_eager=True, max_num_seqs=2, max_model_len=64,
              distributed_executor_backend="uni")
    found = llm.generate([first for first, _ in json.load(open(given))], SamplingParams(temperature=0, max_tokens=8))
    json.dump([one.outputs[0].text for one in found], open(out, "w"))
