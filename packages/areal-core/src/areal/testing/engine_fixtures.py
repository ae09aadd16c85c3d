"""What the cases of the engine kit share: the device, the running engines, the checks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from areal.contracts.accelerator import Accelerator
from areal.contracts.component import Component
from areal.contracts.engine import Engine
from areal.contracts.messages import Completion, GenerateRequest
from areal.contracts.specs import EngineContext, ModelSpec
from areal.testing.models import EOS, tiny_model
from areal.testing.stand import KvPolicy, Stand

# Float32 logprobs of the same weights, computed in another order.
TOLERANCE = 1e-4
VOCAB, POSITIONS = 64, 512
# Moments at which something hits running requests; the first that does ends the case.
DELAYS_S = (0.05, 0.02, 0.1, 0.005, 0.3, 0.01, 0.15)


class HostCpu:
    """The accelerator that engines under test get by default. Invariant: needs no device."""

    name = "cpu"
    collective = "gloo"
    resource = ""

    def is_available(self) -> bool:
        return True

    def count(self) -> int:
        return 1

    def environment(self, devices: int, threads: int) -> dict[str, str]:
        return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}

    def memory(self) -> tuple[int, int]:
        return 0, 1 << 30

    def utilisation(self) -> float:
        return 0.0


class Stands:
    """The engines of one test class. Invariant: one per model, closed when the class is done."""

    def __init__(self) -> None:
        self._stands: dict[str, Stand] = {}

    def get(self, key: str, make: Callable[[], Stand]) -> Stand:
        if key not in self._stands:
            self._stands[key] = make()
            self._stands[key].start()
        return self._stands[key]

    def close(self) -> None:
        for stand in self._stands.values():
            stand.close()


class EngineFixtures:
    """Invariant: one engine per class and model; a case leaves it idle, resumed, and serving the stand's version."""

    kv_on_update: ClassVar[KvPolicy | None] = "keep"
    """What the engine does with running requests' keys and values when weights change; None: it does not say, and
    logprobs of requests that span versions are not compared."""

    @pytest.fixture
    def component(self) -> Component:
        raise NotImplementedError("give the engine's Component in a fixture named 'component'")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """The options as a recipe's table."""
        return {}

    @pytest.fixture
    def accelerator(self) -> Accelerator:
        """The device that the engine runs on."""
        return HostCpu()

    @pytest.fixture
    def make_engine(
        self, component: Component, options: dict[str, Any], accelerator: Accelerator, tmp_path: Any
    ) -> Callable[[str], Engine]:
        """Return the function that makes an engine for a model folder, not started yet."""

        def make(model_path: str) -> Engine:
            context = EngineContext(
                model=ModelSpec(path=model_path, dtype="float32"),
                accelerator=accelerator,
                name="engine-0",
                seed=0,
                log_dir=str(tmp_path),
            )
            return component.load()(component.parse_options(options), context)

        return make

    @pytest.fixture(scope="class")
    @classmethod
    def stands(cls) -> Iterator[Stands]:
        stands = Stands()
        yield stands
        stands.close()

    @pytest.fixture
    def stand(self, stands: Stands, make_engine: Callable[[str], Engine], tmp_path_factory: Any) -> Stand:
        """A running engine with a tied model."""
        return stands.get("tied", lambda: new_stand(make_engine, tmp_path_factory.mktemp("tied"), tied=True))

    @pytest.fixture(params=["tied", "untied"])
    def updated(
        self, request: Any, stands: Stands, make_engine: Callable[[str], Engine], tmp_path_factory: Any
    ) -> Stand:
        """A running engine, with a tied and an untied model in turn."""
        tied = request.param == "tied"
        return stands.get(
            request.param, lambda: new_stand(make_engine, tmp_path_factory.mktemp(request.param), tied=tied)
        )

    def check_logprobs(self, stand: Stand, completions: list[Completion], temperature: float = 1.0) -> None:
        """Every logprob is the one that transformers gives under the weights of the token's version."""
        assert completions
        for completion in completions:
            num_tokens = len(completion.token_ids)
            assert len(completion.logprobs) == len(completion.versions) == num_tokens
            assert set(completion.versions) <= stand.models.keys()
            if num_tokens == 0 or (self.kv_on_update is None and len(set(completion.versions)) > 1):
                continue
            truth = stand.truth(completion, temperature, self.kv_on_update or "keep")
            expected = truth[range(num_tokens), list(completion.token_ids)].tolist()
            assert completion.logprobs == pytest.approx(expected, abs=TOLERANCE, rel=0)

    def check_answers(self, stand: Stand) -> None:
        """The engine answers, with the stand's version."""
        completions = stand.generate(long_requests(stand, 3, max_new_tokens=5))
        assert {version for completion in completions for version in completion.versions} == {stand.version}
        self.check_logprobs(stand, completions)


def new_stand(make_engine: Callable[[str], Engine], folder: Any, *, tied: bool) -> Stand:
    model = tiny_model(folder / "model", tied=tied, vocab=VOCAB, positions=POSITIONS)
    return Stand(make_engine(model), tied=tied, folder=str(folder / "weights"))


def prompts(number: int, longest: int = 12) -> list[list[int]]:
    """Return prompts of 1..longest ordinary tokens, always the same."""
    rng = random.Random(number)
    return [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(number)]


def long_requests(stand: Stand, number: int, *, seed: int = 0, max_new_tokens: int = 300) -> list[GenerateRequest]:
    """Return requests most of which run for many steps."""
    return [
        stand.request(prompt, seed=seed * 1000 + i, max_new_tokens=max_new_tokens)
        for i, prompt in enumerate(prompts(number))
    ]


def check_end(request: GenerateRequest, completion: Completion) -> None:
    limit = request.sampling.max_new_tokens
    assert (completion.uid, completion.prompt_ids) == (request.uid, request.prompt_ids)
    assert EOS not in completion.token_ids[:-1]
    if completion.token_ids[-1] == EOS:
        assert completion.finish_reason == "stop"
    else:
        assert (completion.finish_reason, len(completion.token_ids)) == ("length", limit)
