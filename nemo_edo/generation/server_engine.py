"""Responses from servers, however many fail on the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
from tqdm import tqdm

from nemo_edo.config import ServersConfig
from nemo_edo.errors import PartlyDrawn, RunStopped, UserError
from nemo_edo.generation.dispatch import Dispatcher
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import COMPLETIONS, Answer, ServerAPI, completion_body, read_answer
from nemo_edo.generation.stop_strings import StopStrings
from nemo_edo.http_client import Fault, ServerError, parsed, require_status
from nemo_edo.parallel.main_rank import on_main_for_long
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams

PROGRESS_DELAY_S = 2.0
"""A shorter generation shows no bar of its own."""
STOP_EVERY_S = 0.2
"""Between two looks whether the generation is asked to stop."""


class ServerEngine:
    """A GenerationEngine over replicas of one model. The first rank alone talks to them; all ranks get what it drew."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        api: ServerAPI,
        settings: ServersConfig,
        *,
        stop_id: int,
        vocab_size: int,
        decode: Callable[[Sequence[int]], str],
        model_folder: Path,
        logprobs_after_temperature: bool,
        progress: bool = False,
    ) -> None:
        """replicas: empty on every rank but the first. stop_id: the token that ends a response. vocab_size: token ids
        of responses lie below it. model_folder: what a server that is started again loads.
        logprobs_after_temperature: as of ``Launch``."""
        self.replicas = list(replicas)
        self.left_out: list[Replica] = []
        """Those that have not taken the last weights, and are given no requests."""
        self.policy_version = 0
        self.model_folder = model_folder
        self.served_model = next((replica.model_name for replica in replicas), "")
        """The name that requests give; another one for an adapter beside the model."""
        self.on_restart: Callable[[Replica], None] | None = None
        """Called once a replica is back, before it is given requests: brings it to the current weights. Where it raises
        ServerError, the replica counts as not back. Of a server that the run does not start nobody can tell whether it
        was down or started again: it is called for these whenever they were not to be reached for a while."""
        self.on_drawn: Callable[[Replica], None] | None = None
        """Called of each healthy replica once responses are drawn, before anyone has them: raises ServerError where it
        has other weights than those of ``policy_version``."""
        self._api = api
        self._settings = settings
        self._stop_id = stop_id
        self._vocab_size = vocab_size
        self._decode = decode
        self._after_temperature = logprobs_after_temperature
        self._progress = progress

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> list[Rollout]:
        """One rollout for each request, in order, the same list on every rank; errors, too, are those of ``draw``."""
        return on_main_for_long(lambda: self.draw(requests, sampling))

    def draw(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, *, stop: threading.Event | None = None
    ) -> list[Rollout]:
        """What ``generate`` returns, for this process alone, from any thread.

        Raises PartlyDrawn, with what there is, where a request is refused for good, has failed too often, or no server
        is left; RunStopped soon after ``stop`` was set.
        """
        self._require_fitting(sampling)
        drawn: dict[int, Rollout] = {}
        try:
            asyncio.run(self._draw_all(requests, sampling, drawn, stop or threading.Event()))
        except ServerError as error:
            self._require_current_weights()
            answered = [drawn[place] for place in sorted(drawn)]
            raise PartlyDrawn(
                f"{len(answered)} of {len(requests)} responses were drawn, then: {error}", answered
            ) from error
        self._require_current_weights()
        return [drawn[place] for place in range(len(requests))]

    def close(self) -> None:
        """Ends the servers that the run has started."""
        for replica in [*self.replicas, *self.left_out]:
            replica.stop()

    # --- one drawing ----------------------------------------------------------------------------------------------

    def _require_current_weights(self) -> None:
        if self.on_drawn is not None:
            for replica in self.replicas:
                if replica.is_healthy():
                    self.on_drawn(replica)

    def _require_fitting(self, sampling: SamplingParams) -> None:
        """The servers' kind of log-probabilities was chosen when they were started."""
        if sampling.temperature == 0:
            return
        if self._after_temperature and sampling.top_p < 1:
            raise UserError(f"top_p is {sampling.top_p}: servers that were started for top_p 1 cut their probabilities")
        if not self._after_temperature and sampling.temperature != 1:
            raise UserError(
                f"temperature is {sampling.temperature}: these servers tell the probabilities of temperature 1"
            )

    async def _draw_all(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParams,
        drawn: dict[int, Rollout],
        stop: threading.Event,
    ) -> None:
        """Fills ``drawn``, by the requests' places; the first error ends it, and what is under way with it."""
        quiet, strings = not self._progress, StopStrings(sampling.stop, self._decode)
        with tqdm(total=len(requests), desc="generate", disable=quiet, leave=False, delay=PROGRESS_DELAY_S) as bar:
            async with Dispatcher(self.replicas, self._settings, self._bring_back) as servers:

                async def one(place: int, request: GenerationRequest) -> None:
                    drawn[place] = await servers.ask(
                        lambda replica, session: self._ask(replica, session, request, sampling, strings)
                    )
                    bar.update()

                tasks = [asyncio.create_task(one(place, request)) for place, request in enumerate(requests)]
                await _all_or_none(tasks, [asyncio.create_task(_until(stop)), servers.broken])

    async def _ask(
        self,
        replica: Replica,
        session: aiohttp.ClientSession,
        request: GenerationRequest,
        sampling: SamplingParams,
        strings: StopStrings,
    ) -> Rollout:
        body = completion_body(self._api, self.served_model, request, sampling, self._stop_id)
        async with session.post(replica.url + COMPLETIONS, json=body, allow_redirects=False) as response:
            answer = await response.read()
        require_status(response.status, "POST", COMPLETIONS, answer, str(replica))
        read = read_answer(parsed(answer, COMPLETIONS), request, sampling, self._stop_id, self._vocab_size)
        return self._rollout(request, read, strings)

    def _bring_back(self, replica: Replica) -> None:
        """Raises ServerError where it does not come back."""
        if replica.is_local:
            replica.restart(self.model_folder)
        else:
            replica.wait_until_ready(self._settings.health_limit_s)
        if self.on_restart is not None:
            self.on_restart(replica)

    def _rollout(self, request: GenerationRequest, answer: Answer, strings: StopStrings) -> Rollout:
        """Stop strings are looked for here as well: a server that knows them as token ids only (trtllm) goes on where
        other tokens make up the text. Raises Fault where it ended at a string that is not in the text."""
        spoken = answer.ids[:-1] if answer.finished else answer.ids
        length, stop = strings.cut(spoken)
        if answer.at_string and stop is None:
            raise Fault(f"a response that is said to end at a stop string, and contains none: {self._decode(spoken)!r}")
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


async def _until(stop: threading.Event) -> None:
    while not stop.is_set():
        await asyncio.sleep(STOP_EVERY_S)
    raise RunStopped("asked to stop: what was being drawn is given up")


async def _all_or_none(tasks: Sequence[asyncio.Task], watching: Sequence[asyncio.Future]) -> None:
    """Waits for the tasks. Their first error, or that of something watched, is raised once nothing goes on."""
    everything = asyncio.gather(*tasks)
    try:
        done, _ = await asyncio.wait([everything, *watching], return_when=asyncio.FIRST_COMPLETED)
        for finished in done:
            finished.result()
    finally:
        for future in (*tasks, *watching):
            future.cancel()
        await asyncio.gather(everything, *tasks, *watching, return_exceptions=True)
