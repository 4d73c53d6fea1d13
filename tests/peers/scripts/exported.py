"""Log-probabilities and greedy tokens of an exported policy in lm-eval and PEFT. Arguments: the merged policy's folder,
its adapters' folder, a JSON file with pairs of texts, and the JSON file to write."""

import json
import sys

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer

merged, adapters, given, out = sys.argv[1:]
pairs = json.load(open(given))
model = HFLM(pretrained=merged, device="cpu", dtype="float32", batch_size=2)
asked = [Instance(request_type="loglikelihood", doc={}, arguments=tuple(pair), idx=n) for n, pair in enumerate(pairs)]
scored = model.loglikelihood(asked)
stop = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
asked = [Instance(request_type="generate_until", doc={}, arguments=(first, stop), idx=n)
         for n, (first, _) in enumerate(pairs)]
generated = model.generate_until(asked)

peft, tokenizer = AutoPeftModelForCausalLM.from_pretrained(adapters), AutoTokenizer.from_pretrained(merged)
ids = [tokenizer("".join(pair), return_tensors="pt")["input_ids"] for pair in pairs]
with torch.no_grad():
    gaps = [(peft(one).logits - model.model(one).logits).abs().max().item() for one in ids]
json.dump({"scored": scored, "generated": generated, "adapter_gaps": gaps}, open(out, "w"))
