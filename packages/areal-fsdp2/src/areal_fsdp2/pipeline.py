"""Pipeline parallelism: each rank keeps a run of layers, and micro-batches follow each other through the ranks.

The schedules are those of ``torch.distributed.pipelining``. Every stage knows the whole batch and packs it itself, so
what travels is hidden states and their gradients only, each micro-batch's in its own length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from areal.errors import WorkerFailed, first_line

Work = Callable[[int, Tensor | None], Tensor]
"""What a stage computes: from the number of a micro-batch and the hidden states [1, T, H] of the stage before (None on
the first stage) the states [1, T, H] for the next stage; on the last stage its share of the loss (scalar)."""
SILENCE = ("timed out", "timeout", "connection", "closed", "reset by peer")
"""What the collectives' errors say when the other side is not there or does not answer."""


def run_of_layers(stage: int, num_stages: int, num_layers: int) -> range:
    """Return the layers of a stage; of a rest the first stages have one more each: the last has the head."""
    size, more = divmod(num_layers, num_stages)
    first = stage * size + min(stage, more)
    return range(first, first + size + (stage < more))


def keep_stage(module: PreTrainedModel, stage: int, num_stages: int) -> bool:
    """Take out of a decoder, on the meta device or not, all that other stages compute; names stay as they were.

    The first stage keeps the embedding, the last the norm and the head; its `base_model` takes ``inputs_embeds``, the
    states of the stage before, in place of ``input_ids``. Returns whether this stage has one of the two copies of a
    tied embedding: `add_tied` is then due before each update. WorkerFailed for a model with fewer layers than stages,
    or of another structure.
    """
    backbone: Any = module.base_model
    kind, layers = type(module).__name__, getattr(backbone, "layers", None)
    head = module.get_output_embeddings() or getattr(module, "score", None)
    name = next((name for name, part in module.named_children() if part is head), "")
    has_ends = hasattr(backbone, "embed_tokens") and hasattr(backbone, "norm") and isinstance(head, nn.Linear)
    if not isinstance(layers, nn.ModuleList) or not has_ends or not name:
        raise WorkerFailed(
            f"pp is {num_stages} and {kind} is not an embedding, layers, a norm and a head, as Llama and Qwen are; "
            "use pp 1"
        )
    if num_stages > len(layers):
        raise WorkerFailed(f"pp is {num_stages} and {kind} has {len(layers)} layers; use pp {len(layers)}")
    is_tied = getattr(head, "weight", None) is backbone.embed_tokens.weight
    is_first, is_last = stage == 0, stage == num_stages - 1
    mine = run_of_layers(stage, num_stages, len(layers))
    for number in range(len(layers)):
        if number not in mine:
            layers[number] = Absent()
    if not is_first and not (is_last and is_tied):
        backbone.embed_tokens = Absent()
    if not is_last:
        backbone.norm = Absent()
        setattr(module, name, Absent())
    return is_tied and is_first != is_last


class Absent(nn.Module):
    """The place of a part that another stage has. Invariant: holds no weights and gives back what it gets."""

    def forward(self, hidden_states: Tensor, *_args: Any, **_others: Any) -> Tensor:
        """Return the states as they are."""
        return hidden_states


@torch.no_grad()
def add_tied(parameter: Tensor, group: dist.ProcessGroup) -> None:
    """Add the gradient of the other end's copy of a tied parameter, before clipping; the copies then stay equal.

    Called on the first and the last stage of `group`, whose shards of the parameter are alike.
    """
    other = dist.get_global_rank(group, dist.get_world_size(group) - 1 - dist.get_rank(group))
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    mine = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    sent = mine.contiguous()
    theirs = torch.empty_like(sent)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, other, group), dist.P2POp(dist.irecv, theirs, other, group)]
    )
    for work in works:
        work.wait()
    mine.add_(theirs)


class Pipeline:
    """One stage among those that share a data rank's work.

    Invariant: a call ends on every stage, with its work done, with an error of its work, or with WorkerFailed once the
    group's deadline has passed; all stages make the same calls with the same lengths.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, width: int, dtype: torch.dtype) -> None:
        """The ranks of `group` are the stages, in order; `width` and `dtype`: of the hidden states that travel."""
        self.stage, self.num_stages = dist.get_rank(group), dist.get_world_size(group)
        self.group, self.device, self.width, self.dtype = group, device, width, dtype

    @property
    def is_last(self) -> bool:
        """Whether this stage computes the loss."""
        return self.stage == self.num_stages - 1

    def train(self, lengths: Sequence[int], work: Work, before_backward: Callable[[bool], None]) -> None:
        """Add the gradients of micro-batches of `lengths` tokens to this stage's parameters.

        `before_backward` is called before each micro-batch's backward pass, with whether it is the last one. One
        forward, one backward (1F1B): a stage holds the activations of no more micro-batches than there are stages
        from it to the end. Fewer micro-batches than stages go through as GPipe does it.
        """
        gpipe = len(lengths) < self.num_stages
        self._run(ScheduleGPipe if gpipe else Schedule1F1B, lengths, work, before_backward)

    @torch.no_grad()
    def evaluate(self, lengths: Sequence[int], work: Work) -> None:
        """Pass micro-batches of `lengths` tokens forward; what `work` returns on the last stage is not looked at."""
        self._run(ScheduleGPipe, lengths, work, None)

    def _run(
        self, kind: Any, lengths: Sequence[int], work: Work, before_backward: Callable[[bool], None] | None
    ) -> None:
        if not lengths:
            return
        numbers = torch.arange(len(lengths))
        stage = _Stage(self, lengths, work, before_backward)
        schedule = kind(stage, len(lengths), loss_fn=lambda loss, _number: loss, scale_grads=False)
        run = schedule.eval if before_backward is None else schedule.step
        first = (numbers,) if self.stage == 0 else ()
        try:
            run(*first, number=numbers, target=numbers if self.is_last else None, return_outputs=False)
        except RuntimeError as error:
            raise self._named(error) from error

    def _named(self, error: RuntimeError) -> BaseException:
        """Return an error of the stage's own work as it was; one of the exchange says who was waited for."""
        if error.__cause__ is not None:  # the schedule wraps what a forward pass raises
            return error.__cause__
        said = first_line(error)
        if not any(word in said.lower() for word in SILENCE):
            return error
        neighbours = [n for n in (self.stage - 1, self.stage + 1) if 0 <= n < self.num_stages]
        ranks = " or ".join(f"stage {n} (trainer rank {dist.get_global_rank(self.group, n)})" for n in neighbours)
        return WorkerFailed(f"pipeline stage {self.stage} of {self.num_stages} did not hear from {ranks} ({said})")


class _Stage(PipelineStage):
    """torch's stage, for micro-batches of different lengths.

    torch's own wants one shape for all that it receives before the first micro-batch comes, and keeps a buffer of it
    for each. Invariant: a buffer has its micro-batch's length, and exists from the receiving to the computing.
    """

    def __init__(
        self, pipeline: Pipeline, lengths: Sequence[int], work: Work, before_backward: Callable[[bool], None] | None
    ) -> None:
        self._lengths, self._before_backward = lengths, before_backward
        self._like = torch.empty(1, 1, pipeline.width, dtype=pipeline.dtype, device="meta", requires_grad=True)
        super().__init__(
            _Part(work),
            pipeline.stage,
            pipeline.num_stages,
            pipeline.device,
            input_args=self._like if pipeline.stage else torch.zeros(1, dtype=torch.int64),
            output_args=self._like,
            group=pipeline.group,
        )
        self._runtime_validate = False  # under TORCH_DISTRIBUTED_DEBUG=DETAIL it would miss the one shape

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._make_buffers(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            self._make_buffers(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **others: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **others)
        self._drop_buffers(self.args_recv_info[fwd_chunk_id])
        if not self.has_backward:
            self.fwd_cache.pop(fwd_chunk_id - 1, None)  # only the newest is still to be sent
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, last_backward: bool = False, **others: Any) -> None:
        if self.has_backward and self._before_backward is not None:
            self._before_backward(last_backward)
        super().backward_one_chunk(bwd_chunk_id, *args, last_backward=last_backward, **others)
        if self.has_backward:
            self._drop_buffers(self.grad_recv_info[bwd_chunk_id])

    def _make_buffers(self, infos: Sequence[Any], number: int) -> None:
        for info in infos:
            if not info.is_root_arg:
                shape = (1, self._lengths[number], self._like.shape[2])
                info.buffer = torch.empty(shape, dtype=self._like.dtype, device=self.device)

    def _drop_buffers(self, infos: Sequence[Any]) -> None:
        for info in infos:
            info.buffer = None


class _Part(nn.Module):
    """A stage's work as the module that a schedule runs. Invariant: holds no parameters; they stay the model's."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._work = work

    def forward(self, received: Tensor, *, number: Tensor) -> Tensor:
        """`received`: states [1, T, H]; on the first stage the number once more, as there must be something."""
        return self._work(int(number), received if received.is_floating_point() else None).contiguous()
