"""A scenario's requests, replayed at their arrival times: text becomes tokens in `recv`."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from importlib.resources import files

from stepscope.engine.request import Request, Sampling
from stepscope.errors import StepscopeError
from stepscope.models.tokenizer import Detokenizer, TextTokenizer
from stepscope.records import RequestRecord
from stepscope.scenario import RequestSpec


@cache
def passages() -> str:
    return files("stepscope").joinpath("data/passages.txt").read_text(encoding="utf-8")


class Replay:
    """The engine's inbox. `records` holds every request of the workload, arrived or not."""

    def __init__(
        self, requests: Sequence[RequestSpec], tokenizer: TextTokenizer | None, vocab: int
    ) -> None:
        self._left = deque(requests)
        self._tokenizer = tokenizer
        self._vocab = vocab
        self.records: list[RequestRecord] = []
        self.prompts: dict[int, str] = {}
        self._prose = tokenizer.encode(passages()) if tokenizer else []

    def poll(self, now_ns: int) -> list[Request]:
        arrived = []
        while self._left and self._left[0].arrival_ns <= now_ns:
            arrived.append(self._request(self._left.popleft()))
        return arrived

    def next_arrival(self) -> int | None:
        return self._left[0].arrival_ns if self._left else None

    def drop_rest(self) -> int:
        """Forget those that have not arrived (the run was interrupted); how many there were."""
        count = len(self._left)
        self._left.clear()
        return count

    def _request(self, spec: RequestSpec) -> Request:
        record = RequestRecord(
            id=spec.id,
            arrival_ns=spec.arrival_ns,
            prompt_tokens=0,
            client=spec.client,
            priority=spec.priority,
        )
        tokens = self._tokens(spec, record)
        record.prompt_tokens = len(tokens)
        self.records.append(record)
        sampling = Sampling(**{f.name: getattr(spec, f.name) for f in fields(Sampling)})
        record.error = record.error or self._refusal(spec)
        return Request(record, tokens, sampling)

    def _refusal(self, spec: RequestSpec) -> str | None:
        """Why its way to draw and stop cannot be had with this model; None if it can."""
        if spec.stop and self._tokenizer is None:
            return (
                f"request {spec.id}: this model has no tokenizer, so it makes no text that could "
                "meet a stop string; give stop_ids in place of stop"
            )
        for name, ids in (
            ("logit_bias", [token for token, _ in spec.logit_bias]),
            ("stop_ids", spec.stop_ids),
        ):
            beyond = [token for token in ids if token >= self._vocab]
            if beyond:
                return (
                    f"request {spec.id}: {name} names token {beyond[0]:,} and the vocabulary has "
                    f"{self._vocab:,}; correct the id"
                )
        return None

    def _tokens(self, spec: RequestSpec, record: RequestRecord) -> list[int]:
        if spec.prompt is None:
            return self._synthetic(spec)
        self.prompts[spec.id] = spec.prompt
        if self._tokenizer is None:
            record.error = (
                f"request {spec.id}: this model has no tokenizer; "
                "give prompt_tokens in place of a prompt"
            )
            return []
        try:
            return (
                self._tokenizer.chat(spec.prompt)
                if spec.chat
                else self._tokenizer.encode(spec.prompt)
            )
        except StepscopeError as error:  # this request fails; the others do not
            hint = "; set workload.chat=false" if spec.chat else ""
            record.error = f"request {spec.id}: {str(error).rstrip('.')}{hint}"
            return []

    def _synthetic(self, spec: RequestSpec) -> list[int]:
        """Exactly so many tokens, the shared ones first."""
        own = (spec.prompt_tokens or 0) - spec.shared_tokens
        shared = self._prose_of(spec.shared_tokens, seed=0) if spec.shared_tokens else []
        return shared + self._prose_of(own, spec.seed)

    def _prose_of(self, count: int, seed: int) -> list[int]:
        """Prose from a seeded place on, or seeded ids where there is no tokenizer."""
        rng = random.Random(seed)
        if not self._prose:
            return [rng.randrange(self._vocab) for _ in range(count)]
        begin = rng.randrange(len(self._prose))
        copies = -(-(begin + count) // len(self._prose))
        return (self._prose * copies)[begin : begin + count]


class TokenText:
    """Detokenizes each request incrementally; without a tokenizer every piece is empty."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._open: dict[int, Detokenizer] = {}

    def push(self, request: int, token: int) -> str:
        if self._tokenizer is None:
            return ""
        stream = self._open.get(request)
        if stream is None:
            stream = self._open[request] = Detokenizer(self._tokenizer)
        return stream.push(token)

    def flush(self, request: int) -> str:
        stream = self._open.pop(request, None)
        return stream.flush() if stream else ""
