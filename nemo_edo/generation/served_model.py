"""A model behind servers that nobody trains, as an evaluation sees it."""

from __future__ import annotations

from nemo_edo.generation.server_engine import ServerEngine
from nemo_edo.refit.in_process import InProcessSync


class ServedModel:
    """The engine and the weight sync of a model: its weights are the servers' own, and stay. It tells no probabilities
    but those of what it draws."""

    def __init__(self, engine: ServerEngine) -> None:
        self.engine = engine
        self.weight_sync = InProcessSync(engine)
