"""What the cases of the backend kit share: the model, the batches, the reference, and how weights are looked at."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest

from areal.contracts.accelerator import Accelerator
from areal.contracts.backend import Backend, SendsInBackground
from areal.contracts.component import Component
from areal.contracts.messages import Batch, Row
from areal.contracts.specs import BackendContext, ModelSpec, TrainingSpec
from areal.contracts.transfer import Layout, Receipt, Transfer
from areal.testing.engine_fixtures import HostCpu
from areal.testing.models import BOS, tiny_model
from areal.testing.transfer import FOLDER_RESHARDER, FolderOptions, FolderResharder

if TYPE_CHECKING:
    from torch import Tensor

BackendFactory = Callable[[BackendContext], Backend]

# Float32 logprobs of the same weights, computed in another order.
TOLERANCE = 1e-4
VOCAB = 64
DEADLINE_S = 60.0


class Published:
    """Weights as engines would get them. Invariant: `tensors` is what arrived, `receipt` what the backend says."""

    def __init__(self, layout: Layout, receipt: Receipt, tensors: dict[str, Tensor]) -> None:
        self.layout = layout
        self.receipt = receipt
        self.tensors = tensors


class BackendFixtures:
    """Invariant: every case starts backends of its own, on a model folder that no case changes."""

    @pytest.fixture
    def component(self) -> Component:
        raise NotImplementedError("give the backend's Component in a fixture named 'component'")

    @pytest.fixture
    def options(self) -> dict[str, Any]:
        """The options as a recipe's table."""
        return {}

    @pytest.fixture
    def accelerator(self) -> Accelerator:
        """The device that the backend runs on."""
        return HostCpu()

    @pytest.fixture
    def backend_factory(self, component: Component, options: dict[str, Any]) -> BackendFactory:
        """Return the function that makes a backend, not started yet."""
        return lambda context: component.load()(component.parse_options(options), context)

    hidden: ClassVar[int] = 64
    """Width of the models, a multiple of 64; there is a key-value head for each 64."""

    @pytest.fixture(scope="class")
    @classmethod
    def model_path(cls, tmp_path_factory: Any) -> str:
        return tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB, hidden=cls.hidden)

    @pytest.fixture
    def start(
        self, backend_factory: BackendFactory, accelerator: Accelerator, model_path: str
    ) -> Callable[..., Backend]:
        """Return the function that starts a backend: ``start(learning_rate=...)`` and other numbers of training."""

        def started(
            path: str = model_path, dtype: Any = "float32", role: Literal["actor", "critic"] = "actor", **training: Any
        ) -> Backend:
            context = BackendContext(
                model=ModelSpec(path=path, dtype=dtype),
                training=TrainingSpec(**training),
                accelerator=accelerator,
                seed=0,
                role=role,
            )
            backend = backend_factory(context)
            backend.start()
            return backend

        return started

    @pytest.fixture
    def publish(self, tmp_path: Path) -> Callable[..., Published]:
        """Return the function that sends a backend's weights through a folder and reads what arrived.

        With `meanwhile` the send is begun before, and finished after that is called.
        """
        options = FolderOptions(folder=str(tmp_path / "published"))
        versions = count(1)

        def published(backend: Backend, meanwhile: Callable[[], object] | None = None) -> Published:
            layout, version = backend.layout(), next(versions)
            resharder = FolderResharder(options, "")
            # This resharder takes whole tensors only.
            plan = resharder.plan(replace(layout, pieces=()), [layout])
            transfer = Transfer(
                phase="stage",
                version=version,
                resharder=FOLDER_RESHARDER,
                options=options,
                plan=plan,
                deadline_s=DEADLINE_S,
            )
            if meanwhile is None:
                receipt = backend.send(transfer)
            else:
                assert isinstance(backend, SendsInBackground)
                backend.begin_send(transfer)
                meanwhile()
                receipt = backend.finish_send()
            return Published(layout, receipt, dict(resharder.receiver(plan, 0).receive(version, DEADLINE_S)))

        return published


def row(prompt: Sequence[int], answer: Sequence[int], advantage: float = 1.0, logprob: float = -4.0) -> Row:
    """Return a row in which every token of the answer is trained."""
    silent, said = len(prompt), len(answer)
    return Row(
        token_ids=(*prompt, *answer),
        loss_mask=(False,) * silent + (True,) * said,
        logprobs=(0.0,) * silent + (logprob,) * said,
        versions=(-1,) * silent + (0,) * said,
        advantages=(0.0,) * silent + (advantage,) * said,
    )


def sample_rows(seed: int = 0, num_prompts: int = 4, num_samples: int = 3) -> list[Row]:
    """Return rows of 3 to 40 tokens, several for each prompt, with advantages and behaviour logprobs that differ."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for _ in range(num_prompts):
        prompt = [BOS, *(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9)))]
        for _ in range(num_samples):
            answer = [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 2, 7, 30]))]
            rows.append(row(prompt, answer, rng.uniform(-1, 1), rng.uniform(-6, -3)))
    # A turn of the environment in the middle, which is not trained, and a tail that is not either.
    first = max(rows, key=lambda r: len(r.token_ids))
    mask = tuple(trained and t % 5 > 0 for t, trained in enumerate(first.loss_mask))
    rows.append(replace(first, loss_mask=(*mask[:-1], False)))
    return rows


def batch_of(rows: Iterable[Row], **totals: Any) -> Batch:
    rows = tuple(rows)
    sums = {"num_tokens": sum(r.num_loss_tokens for r in rows), "num_sequences": len(rows)}
    return Batch(rows=rows, **{**sums, **totals})


def truth(path: str, batch: Batch) -> list[tuple[float, ...]]:
    """Return the logprobs that transformers gives, row by row without packing; 0 where the mask is False."""
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        return [tuple(_row_truth(module, row, batch.temperature).tolist()) for row in batch.rows]


def true_gradient_norm(path: str, batch: Batch) -> float:
    """Return the global norm of the gradient of the mean negative log-likelihood, row by row, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    for row in batch.rows:
        (-_row_truth(module, row, batch.temperature).sum() / batch.num_tokens).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))


def _row_truth(module: Any, row: Row, temperature: float) -> Tensor:
    import torch

    ids = torch.tensor([row.token_ids])
    table = (module(input_ids=ids, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    values = table[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
    return torch.cat([values.new_zeros(1), values]) * torch.tensor(row.loss_mask)
