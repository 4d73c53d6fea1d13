"""Run in vLLM's environment: holds what the run sends to vLLM's servers against their own routes, request models,
command line and variables. Reads the calls from stdin, prints the violations as JSON."""

import dataclasses
import inspect
import json
import os
import sys
from argparse import Namespace
from unittest.mock import create_autospec

os.environ |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}

import vllm.envs
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.launchers.api_server.routers import register_api_routers
from vllm.entrypoints.openai.completion.protocol import (
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
)
from vllm.entrypoints.pooling.pooling.api_router import router as pooling
from vllm.entrypoints.pooling.pooling.protocol import PoolingCompletionRequest
from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelList
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

MODELS = {
    "/v1/completions": CompletionRequest,
    "/pooling": PoolingCompletionRequest,
    "/v1/load_lora_adapter": LoadLoRAAdapterRequest,
    "/v1/unload_lora_adapter": UnloadLoRAAdapterRequest,
}
"""Of routes whose handlers need a model."""
READ = {"/weight_info": "weight_version", "/reset_prefix_cache": "success", "/get_world_size": "world_size"}
"""What the run reads of their answers."""
ANSWERS = {
    CompletionResponse: {"model", "choices"},
    CompletionResponseChoice: {"token_ids", "logprobs", "finish_reason"},
    CompletionLogProbs: {"token_logprobs"},
    ModelList: {"data"},
    ModelCard: {"id", "max_model_len"},
}
NCCL = {"init_info": NCCLWeightTransferInitInfo, "update_info": NCCLWeightTransferUpdateInfo}


def server() -> tuple[TestClient, set[tuple[str, str]]]:
    """vLLM's own application over an engine that takes its methods' arguments only; its routes."""
    app = FastAPI()
    app.state.args = Namespace()
    register_api_routers(app.state.args, app, ("generate",))
    app.include_router(pooling)  # with any model that pools
    engine = create_autospec(EngineClient, instance=True)
    engine.reset_prefix_cache.return_value = engine.wake_up.return_value = True
    engine.get_weight_version.return_value, engine.collective_rpc.return_value = "run/1", [None]
    engine.vllm_config = Namespace(parallel_config=Namespace(world_size=2, world_size_across_dp=2))
    app.state.engine_client = engine
    routes = {(method, path) for path, methods in app.openapi()["paths"].items() for method in methods}
    return TestClient(app), routes


def violations(calls: list, commands: list, variables: list) -> list[str]:
    client, routes = server()
    found = [f"{model.__name__} lacks {fields - model.model_fields.keys()}" for model, fields in ANSWERS.items()
             if fields - model.model_fields.keys()]  # fmt: skip
    for method, path, body, params in calls:
        if (method.lower(), path) not in routes:
            found.append(f"no route {method} {path}")
        elif path in MODELS:
            model = MODELS[path]
            model.model_validate(body)
            found += [f"{path}: {name} is no field" for name in body if name not in model.model_fields]
        elif path not in ("/v1/models", "/health"):
            answer = client.request(method, path, json=body, params=params)
            if answer.status_code != 200 or READ.get(path, "") not in ("", *answer.json()):
                found.append(f"{method} {path} {body} {params}: {answer.status_code} {answer.text}")
        found += of_workers(path, body or {})
    for command in commands:
        try:
            make_arg_parser(FlexibleArgumentParser()).parse_args(command)
        except SystemExit:
            found.append(f"refused: {command}")
    return found + [f"no variable {name}" for name in variables if name not in vllm.envs.environment_variables]


def of_workers(path: str, body: dict) -> list[str]:
    """What is passed on to the workers."""
    for name, info in NCCL.items():
        if name in body:
            required = {field.name for field in dataclasses.fields(info)}
            if unknown := body[name].keys() - required:
                return [f"{path}: {info.__name__} has no {unknown}"]
            info(**body[name])
    if path == "/collective_rpc" and body["method"] == "reload_weights":  # the other is of our own extension
        inspect.signature(Worker.reload_weights).bind(None, **body["kwargs"])
        inspect.signature(GPUModelRunner.reload_weights).bind(None, **body["kwargs"])
    return []


if __name__ == "__main__":
    print(json.dumps(violations(**json.load(sys.stdin))))
