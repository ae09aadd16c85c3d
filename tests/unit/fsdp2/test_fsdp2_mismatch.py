"""What is said of a checkpoint that is not of the model that is trained."""

from __future__ import annotations

from areal_fsdp2.mismatch import Shapes, mismatch

MODEL: Shapes = {"embed.weight": (60, 16), "norm.weight": (16,)}


def factors(rank: int, *targets: str) -> Shapes:
    return {
        f"base_model.model.layers.0.{target}.lora_{factor}.weight": shape
        for target in targets
        for factor, shape in (("A", (rank, 16)), ("B", (16, rank)))
    }


def test_nothing_is_said_of_the_same() -> None:
    assert mismatch(dict(reversed(MODEL.items())), MODEL, "m") == ""


def test_the_first_tensor_that_differs_is_named_with_both_shapes() -> None:
    saved = {"embed.weight": (64, 16), "norm.weight": (32,)}
    assert mismatch(saved, MODEL, "m") == (
        "has embed.weight of shape 64x16, which is 60x16 in the trainer of 'm'; set model.path back to the model of "
        "the checkpoint, or start a new run"
    )


def test_a_tensor_is_missing_on_one_side() -> None:
    more = {**MODEL, "head.weight": (60, 16)}
    assert mismatch(MODEL, more, "m").startswith("has no tensor head.weight, which the trainer of 'm' has;")
    assert mismatch(more, MODEL, "m").startswith("has a tensor head.weight, which the trainer of 'm' does not have;")


def test_other_target_modules_are_named() -> None:
    assert mismatch(factors(4, "q_proj"), factors(4, "q_proj", "v_proj"), "m") == (
        "has no tensor base_model.model.layers.0.v_proj.lora_A.weight, which the trainer of 'm' has, because the "
        "checkpoint has LoRA of rank 4 on q_proj and the trainer LoRA of rank 4 on q_proj, v_proj; set backend.lora "
        "back to rank 4 and target_modules [q_proj] as in the checkpoint, or start a new run"
    )


def test_factors_of_another_model_are_not_laid_on_lora() -> None:
    wide = {name: tuple(2 * size if size == 16 else size for size in shape) for name, shape in factors(4, "q").items()}
    said = mismatch(wide, factors(4, "q"), "m")
    assert "of shape 4x32, which is 4x16" in said and "set model.path back" in said and "LoRA" not in said
