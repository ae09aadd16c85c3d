"""The inference engine: the only place where tokens are made."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from areal.contracts.messages import Completion, GenerateRequest
from areal.contracts.transfer import Layout, Receipt, Transfer

PauseMode = Literal["keep", "abort"]


@runtime_checkable
class Engine(Protocol):
    """One replica. Made as ``factory(options, EngineContext)``.

    Invariant: a token's version is that of the weights that produced its logits, and outside
    ``pause``/``resume`` every accepted request makes progress.
    """

    async def start(self) -> Layout:
        """Load the model (version 0) and return how its weights lie. Raises WorkerFailed in one sentence."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return the completion of one request; many calls run at the same time and are batched by the engine."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Return once no forward pass is running.

        ``keep``: running requests stay and continue after ``resume``. ``abort``: they return at once with their
        partial tokens, finish reason ``interrupted``. New requests wait in either mode. Idempotent.
        """
        ...

    async def resume(self) -> None:
        """Go on generating; harmless when not paused."""
        ...

    async def receive(self, transfer: Transfer) -> Receipt:
        """Take part in a weight update.

        ``stage``: receive the weights beside the running ones and return their checksums; generation goes on.
        ``commit``: make the staged weights the running ones (the engine is paused); tokens from now on carry the
        new version. ``rollback``: forget what is staged. A failure leaves the running weights as they were and
        raises TransferFailed.
        """
        ...

    async def close(self) -> None:
        """Free everything; running requests return ``interrupted``. Idempotent."""
        ...


@runtime_checkable
class ReportsLoad(Protocol):
    """Optional: an engine that tells how busy it is. Invariant: reading costs no forward pass."""

    def load(self) -> dict[str, float]:
        """Return ``running``, ``waiting`` (requests), ``kv_usage`` (0..1), ``tokens_total``, and more.

        They become the metrics ``engine/...``. Names that end in ``_usage`` or ``_share`` are averaged over the
        replicas; all others are summed, so a figure that does not add up has no place here. ``version`` is left out.
        ``tokens_total`` counts the tokens made since the engine started and gives ``engine/tokens_per_s``.
        """
        ...


@runtime_checkable
class Ends(Protocol):
    """Optional: an engine that can be broken for good while its process lives. Invariant: once ended, it stays so."""

    async def ended(self) -> str:
        """Return why, once the engine can serve no more by itself; never return while it can.

        Awaited from before `start` on. The replica then leaves the fleet, its process is ended without `close`,
        and another takes its place.
        """
        ...


@runtime_checkable
class Offloads(Protocol):
    """Optional (capability `OFFLOAD`): an engine that can do without its device for a while.

    Invariant: whatever is running stays, and goes on after `onload` and `resume` with the tokens it would have made.
    """

    async def offload(self) -> None:
        """Give back the device's memory of weights and caches; what they hold waits in the host's. Idempotent.

        WorkerFailed unless the engine is paused. Meanwhile requests are taken and wait, also after a `resume`, and
        `pause`, `close` and `receive` of the phases ``stage`` and ``rollback`` work.
        """
        ...

    async def onload(self) -> None:
        """Take the memory again, with all that was in it; harmless when it has not been given back."""
        ...
