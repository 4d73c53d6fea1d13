"""What vLLM is told about its weights: their name, and what to forget.

These are its development endpoints (VLLM_SERVER_DEV_MODE=1): nothing but the run may reach them.
"""

from __future__ import annotations

import time

from nemo_edo.generation.replica import Replica
from nemo_edo.utils.http import ServerError

CACHE_RESETS = 20
"""Attempts: while a request that was given up still holds blocks, the cache stays."""
CACHE_WAIT_S = 0.25


def reset_prefix_cache(replica: Replica) -> None:
    """Drops keys and values of earlier weights. Raises ServerError where the server keeps some."""
    for _ in range(CACHE_RESETS):
        if replica.request("POST", "/reset_prefix_cache")["success"]:
            return
        time.sleep(CACHE_WAIT_S)
    raise ServerError(f"{replica}: its prefix cache cannot be reset: requests still hold blocks of it")


def name_weights(replica: Replica, name: str) -> None:
    """Names the server's weights, and reads the name back."""
    replica.request("POST", "/update_weight_version", json={"new_version": name})
    require_weights(replica, name)


def name_of_weights(replica: Replica) -> str:
    return replica.request("GET", "/weight_info")["weight_version"]


def require_weights(replica: Replica, name: str) -> None:
    """Raises ServerError unless the server's weights have this name: otherwise it was restarted, or given others."""
    found = name_of_weights(replica)
    if found != name:
        raise ServerError(
            f"{replica} has the weights {found!r} where {name!r} are expected: it was restarted, or something else "
            "has given it weights; its answers are not used"
        )
