"""The engine that generates with servers, whichever of them fail meanwhile."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Protocol

from nemo_edo.config import ServersConfig
from nemo_edo.errors import PartlyGenerated, RunStopped
from nemo_edo.generation.dispatch import Dispatcher
from nemo_edo.generation.replica import Replica
from nemo_edo.generation.server_api import COMPLETIONS, ServerAPI, completion_body, read_answer, read_experts
from nemo_edo.generation.stop_strings import StopStrings
from nemo_edo.interfaces import Arrivals
from nemo_edo.types import GenerationRequest, Rollout, SamplingParams
from nemo_edo.utils.http import Fault, NoAnswer, ServerError
from nemo_edo.utils.status_line import Counter

CHAT_COMPLETIONS = "/v1/chat/completions"
CUT = ("length", "model_length", "max_tokens", "content_filter")  # finish reasons of endpoints, for a part of an answer
Chats = Mapping[str, Sequence[Mapping[str, str]]]  # the messages of each problem, by its id


class ServedWeights(Protocol):
    """The trained weights that an engine's replicas have: a WeightSync of servers."""

    def restore(self, replica: Replica) -> None:
        """Brings a replica to the current weights after its restart, before it gets requests. A server that the run
        does not manage may have been restarted whenever it could not be reached. Raises ServerError where it fails."""

    def require(self, replica: Replica) -> None:
        """Raises ServerError where a replica has other weights than the current ones."""


@dataclass(eq=False, repr=False)
class ServerEngine:
    """A GenerationEngine with ``takes_all`` over replicas of one model."""

    takes_all: ClassVar[bool] = True
    replicas: list[Replica]
    api: type[ServerAPI]
    settings: ServersConfig
    _: KW_ONLY
    stop_ids: Sequence[int]  # the tokens that end a response
    vocab_size: int  # the token ids of responses are below it
    decode: Callable[[Sequence[int]], str]
    keeps_experts: bool = False  # rollouts get ``routed_experts``
    progress: bool = False

    def __post_init__(self) -> None:
        self.replicas, self.stop_ids = list(self.replicas), tuple(self.stop_ids)
        self.excluded: list[Replica] = []  # replicas that did not take the latest weights, and get no requests
        self.policy_version = 0
        self.served_model = self.replicas[0].model_name  # the model that requests name; an adapter has its own name
        self.weights: ServedWeights | None = None  # None: the replicas have the weights that they were started with
        self.path = COMPLETIONS

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, arrivals: Arrivals | None = None
    ) -> list[Rollout]:
        """One rollout for each request, in order; may be called from any thread. Raises PartlyGenerated, with the
        responses so far, where a request is refused for good or has used up its attempts, or no server is left;
        RunStopped soon after the run is asked to stop; and ServerError where, before responses are handed over, a
        healthy replica turns out to have other weights."""
        strings = StopStrings(sampling.stop, self.decode)
        bodies = [self._body(request, sampling) for request in requests]
        rollouts: dict[int, Rollout] = {}
        waiting: list[Rollout] = []
        absent: set[Replica] = set()  # those being restarted, which get no requests until they have the weights
        failure: ServerError | None = None

        def restart(replica: Replica) -> None:
            """One call: when all responses are there, the dispatcher waits for it, and begins no other."""
            absent.add(replica)
            try:
                replica.restart()
                if self.weights is not None:
                    self.weights.restore(replica)
            except ServerError:
                replica.stop()  # it might answer the next generation, with other weights
                raise
            absent.discard(replica)

        require = None if self.weights is None else self.weights.require

        def hand_over() -> None:
            count = len(waiting)  # those that arrive meanwhile may be of weights that come later
            for replica in self.replicas:
                if require is not None and replica not in absent and replica.is_healthy():
                    with contextlib.suppress(NoAnswer):  # it hangs, which the dispatcher sees to
                        require(replica)
            if arrivals is not None and count:
                arrivals.add(waiting[:count])
            del waiting[:count]

        with Counter("generate", len(requests), shown=self.progress) as counter:

            def read(place: int, answer: Any) -> None:
                rollouts[place] = self._rollout(requests[place], answer, strings)
                waiting.append(rollouts[place])
                counter.add()

            dispatcher = Dispatcher(self.replicas, self.settings, restart, require)
            check = None if arrivals is None else arrivals.stop_if_asked
            try:
                dispatcher.post_all(self.path, bodies, read, check, hand_over)
            except ServerError as error:
                failure = error
            except RunStopped:
                hand_over()
                raise
        hand_over()
        if failure is not None:
            answered = [rollouts[place] for place in sorted(rollouts)]
            message = f"{len(answered)} of {len(requests)} responses were generated, then: {failure}"
            raise PartlyGenerated(message, answered) from failure
        return [rollouts[place] for place in range(len(requests))]

    def close(self) -> None:
        """Stops the servers that the run manages."""
        for replica in [*self.replicas, *self.excluded]:
            replica.stop()

    def _body(self, request: GenerationRequest, sampling: SamplingParams) -> dict[str, Any]:
        return completion_body(self.api, self.served_model, request, sampling, self.stop_ids)

    def _read(self, answer: Any) -> tuple[Sequence[int], Sequence[float], str]:
        """Token ids, log-probabilities and finish_reason."""
        return read_answer(answer, self.served_model, self.vocab_size)

    def _rollout(self, request: GenerationRequest, answer: Any, strings: StopStrings) -> Rollout:
        """Looks for stop strings again: a server that knows them as token ids (trtllm) misses those of other tokens.
        Raises Fault for a stop without reason."""
        ids, logprobs, reason = self._read(answer)
        finished = bool(ids) and ids[-1] in self.stop_ids
        spoken = ids[:-1] if finished else ids
        length, stop = strings.cut(spoken)
        if reason == "stop" and not finished and stop is None:
            raise Fault(f"a response that stops with neither a stop token nor a stop string: {self.decode(ids)!r}")
        finished = finished and stop is None
        kept = len(ids) if finished else length
        return Rollout(
            problem_id=request.problem_id,
            sample_index=request.sample_index,
            prompt_ids=request.prompt_ids,
            response_ids=ids[:kept],
            response_logprobs=logprobs[:kept],
            text=self.decode(spoken[:length]),
            finished=finished,
            policy_version=self.policy_version,
            seed=request.seed,
            stop=stop,
            routed_experts=read_experts(answer, len(request.prompt_ids) + kept) if self.keeps_experts else b"",
        )


@dataclass(eq=False, repr=False)
class PlainEngine(ServerEngine):
    """An engine for endpoints of OpenAI's API that return text alone, without token ids and log-probabilities: for
    evaluations, votes, best-of-N and search of a model that is not trained. Its tokens are those that the tokenizer of
    ``model.path`` makes of the text, so lengths and n-grams are in that tokenizer's tokens."""

    _: KW_ONLY
    encode: Callable[[str], Sequence[int]]  # a response's text to token ids
    prompt_text: Callable[[Sequence[int]], str]  # a prompt's token ids to the text that an endpoint reads as these
    chats: Chats | None  # those to send to the chat endpoint; None: prompts go to the completions endpoint

    def __post_init__(self) -> None:
        super().__post_init__()
        self.path = COMPLETIONS if self.chats is None else CHAT_COMPLETIONS

    def _body(self, request: GenerationRequest, sampling: SamplingParams) -> dict[str, Any]:
        """Without stop strings: an endpoint does not tell them from the end of a response, and cuts them off."""
        asked: dict[str, Any] = {"prompt": self.prompt_text(request.prompt_ids)}
        if self.chats is not None:
            asked = {"messages": list(self.chats[request.problem_id])}
        return {
            "model": self.served_model,
            **asked,
            self.settings.token_limit: request.limit(sampling),
            "temperature": sampling.temperature,
            "top_p": 1.0 if sampling.temperature == 0 else sampling.top_p,
            "seed": request.seed % 2**31,  # some endpoints take no more bits
        }

    def _read(self, answer: Any) -> tuple[Sequence[int], Sequence[float], str]:
        try:
            [choice] = answer["choices"]
            text = choice["text"] if self.chats is None else choice["message"]["content"]
            reason, text = choice["finish_reason"], text or ""
            ids = tuple(self.encode(text))
        except (KeyError, TypeError, ValueError) as error:
            raise Fault(f"an answer without a choice's text and finish_reason: {error!r}") from None
        if reason in ("abort", "error"):
            raise Fault(f"an answer that ended by {reason!r}")
        return (ids, (), "length") if reason in CUT else ((*ids, self.stop_ids[0]), (), "stop")
