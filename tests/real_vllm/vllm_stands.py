"""Running vLLM engines for the tests: a stand for a model and options, with everything at hand that tests look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal.contracts.messages import Completion
from areal.contracts.specs import EngineContext, ModelSpec
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import tiny_model, tiny_module
from areal.testing.stand import KvPolicy, Stand
from areal_vllm.engine import VllmEngine
from areal_vllm.options import VllmOptions

TOLERANCE = 1e-4
"""Of float32 logprobs of the same weights, computed in another order."""
SMALL: dict[str, Any] = {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 32}


class VllmStand(Stand):
    """Invariant: as `Stand`'s; the model may be wider, so that tensor parallel ranks have a head each."""

    engine: VllmEngine

    def __init__(self, folder: Path, *, tied: bool, hidden: int, **options: Any) -> None:
        model = tiny_model(folder / "model", tied=tied, hidden=hidden)
        engine = make_engine(model, log_dir=str(folder), **options)
        super().__init__(engine, tied=tied, folder=str(folder / "weights"))
        self._hidden = hidden
        self.models = {0: self.made(0)}

    def made(self, seed: int) -> Any:
        return tiny_module(seed=seed, tied=self._tied, hidden=self._hidden)

    def new_version(self) -> int:
        version = next(self._versions)
        self.models[version] = self.made(version)
        return version

    def check(self, completions: list[Completion], kv: KvPolicy = "keep", temperature: float = 1.0) -> None:
        """Every logprob is the one that transformers gives under the weights of the token's version."""
        assert completions
        for completion in completions:
            if completion.token_ids:
                truth = self.truth(completion, temperature, kv)
                expected = truth[range(len(completion.token_ids)), list(completion.token_ids)]
                assert float((expected - expected.new_tensor(completion.logprobs)).abs().max()) < TOLERANCE


def make_engine(model: str, log_dir: str = "", **options: Any) -> VllmEngine:
    context = EngineContext(
        model=ModelSpec(path=model, dtype="float32"), accelerator=HostCpu(), name="engine-0", seed=0, log_dir=log_dir
    )
    return VllmEngine(VllmOptions.model_validate({**SMALL, **options}), context)


@contextmanager
def vllm_stand(folder: Path, *, tied: bool = True, hidden: int = 64, **options: Any) -> Iterator[VllmStand]:
    """Start an engine in this process and close it at the end."""
    stand = VllmStand(folder, tied=tied, hidden=hidden, **options)
    try:
        stand.start()
        yield stand
    finally:
        stand.close()
