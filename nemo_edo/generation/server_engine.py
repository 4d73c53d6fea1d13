"""The engine that generates with servers, whichever of them fail meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from nemo_edo.config import ServersConfig
from nemo_edo.errors import PartlyGenerated, UserError
from nemo_edo.generation.dispatch import Dispatcher
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import COMPLETIONS, Answer, ServerAPI, completion_body, read_answer
from nemo_edo.generation.stop_strings import StopStrings
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams
from nemo_edo.utils.http import Fault, ServerError
from nemo_edo.utils.status_line import Counter


class ServerEngine:
    """A GenerationEngine over replicas of one model."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        api: ServerAPI,
        settings: ServersConfig,
        *,
        stop_ids: Sequence[int],
        vocab_size: int,
        decode: Callable[[Sequence[int]], str],
        model_folder: Path,
        logprobs_after_temperature: bool,
        progress: bool = False,
    ) -> None:
        """stop_ids: the tokens that end a response. vocab_size: the token
        ids of responses are below it. model_folder: what a restarted server loads. logprobs_after_temperature: as for
        ``Launch``."""
        self.replicas = list(replicas)
        self.excluded: list[Replica] = []
        """Replicas that did not take the latest weights, and get no requests."""
        self.policy_version = 0
        self.model_folder = model_folder
        self.served_model = next((replica.model_name for replica in replicas), "")
        """The model that requests name; an adapter has its own name."""
        self.on_restart: Callable[[Replica], None] | None = None
        """Brings a replica to the current weights after its restart, before it gets requests. Where it raises
        ServerError, the restart has failed. A server that the run does not manage may have been restarted whenever it
        could not be reached, so this is called then, too."""
        self.on_generated: Callable[[Replica], None] | None = None
        """Called for each healthy replica after every generation, before the responses are used: raises ServerError
        where its weights are not those of ``policy_version``."""
        self._api = api
        self._settings = settings
        self._stop_ids = tuple(stop_ids)
        self._vocab_size = vocab_size
        self._decode = decode
        self._after_temperature = logprobs_after_temperature
        self._progress = progress

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        """One rollout for each request, in order; raises what ``generate_until`` raises."""
        return self.generate_until(requests, sampling)

    def generate_until(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, stop: Event | None = None
    ) -> list[Rollout]:
        """What ``generate`` returns, from any thread.

        Raises PartlyGenerated, with the responses so far, where a request is refused for good or has used up its
        attempts, or where no server is left; RunStopped soon after ``stop`` is set.
        """
        self._require_supported(sampling)
        rollouts: dict[int, Rollout] = {}
        try:
            self._post_all(requests, sampling, rollouts, stop)
        except ServerError as error:
            self._require_weights()
            answered = [rollouts[place] for place in sorted(rollouts)]
            message = f"{len(answered)} of {len(requests)} responses were generated, then: {error}"
            raise PartlyGenerated(message, answered) from error
        self._require_weights()
        return [rollouts[place] for place in range(len(requests))]

    def close(self) -> None:
        """Stops the servers that the run manages."""
        for replica in [*self.replicas, *self.excluded]:
            replica.stop()

    # --- one generation -------------------------------------------------------------------------------------------

    def _require_weights(self) -> None:
        if self.on_generated is not None:
            for replica in self.replicas:
                if replica.is_healthy():
                    self.on_generated(replica)

    def _require_supported(self, sampling: SamplingParams) -> None:
        """The servers return the kind of log-probabilities that was chosen when they were started."""
        if sampling.temperature == 0:
            return
        if self._after_temperature and sampling.top_p < 1:
            raise UserError(f"top_p is {sampling.top_p}: these servers were started for top_p 1")
        if not self._after_temperature and sampling.temperature != 1:
            raise UserError(
                f"temperature is {sampling.temperature}: these servers return the probabilities of temperature 1"
            )

    def _post_all(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        rollouts: dict[int, Rollout],
        stop: Event | None,
    ) -> None:
        """Fills ``rollouts``, by the requests' places."""
        strings, model, stops = StopStrings(sampling.stop, self._decode), self.served_model, self._stop_ids
        bodies = [completion_body(self._api, model, request, sampling, stops) for request in requests]
        with Counter("generate", len(requests), shown=self._progress) as counter:

            def read(place: int, answer: Any) -> None:
                request = requests[place]
                checked = read_answer(answer, model, request, sampling, stops, self._vocab_size)
                rollouts[place] = self._rollout(request, checked, strings)
                counter.add()

            Dispatcher(self.replicas, self._settings, self._restart).post_all(COMPLETIONS, bodies, read, stop)

    def _restart(self, replica: Replica) -> None:
        """Raises ServerError where the replica does not return."""
        if replica.is_managed:
            replica.restart(self.model_folder)
        else:
            replica.wait_until_ready(self._settings.health_limit_s)
        if self.on_restart is not None:
            self.on_restart(replica)

    def _rollout(self, request: GenerationRequest, answer: Answer, strings: StopStrings) -> Rollout:
        """Looks for stop strings again: a server that knows them as token ids only (trtllm) misses those that other
        tokens make up. Raises Fault where the server stopped at a string that is not in the text."""
        spoken = answer.ids[:-1] if answer.finished else answer.ids
        length, stop = strings.cut(spoken)
        if answer.at_string and stop is None:
            raise Fault(f"a response said to end at a stop string contains none: {self._decode(spoken)!r}")
        finished = answer.finished and stop is None
        kept = len(answer.ids) if finished else length
        return Rollout(
            problem_id=request.problem_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt_ids,
            response_ids=answer.ids[:kept],
            response_logprobs=answer.logprobs[:kept],
            text=self._decode(spoken[:length]),
            finished=finished,
            policy_version=self.policy_version,
            seed=request.seed,
            stop=stop,
        )


class StoppableEngine:
    """A GenerationEngine that generates in the background, until ``stop`` is set. The version of its rollouts is the
    policy's when it was made."""

    def __init__(self, engine: ServerEngine, stop: Event) -> None:
        self.policy_version = engine.policy_version
        self._engine = engine
        self._stop = stop

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        """Errors as for ``ServerEngine.generate_until``."""
        return self._engine.generate_until(requests, sampling, stop=self._stop)
