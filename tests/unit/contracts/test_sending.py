"""The sender that a backend keeps: one, of the newest plan."""

from __future__ import annotations

from typing import Any

from areal.contracts.component import Component
from areal.contracts.sending import KeptSender
from areal.contracts.transfer import Layout, Plan, Transfer

MADE: list[Noted] = []


class Noted:
    """A resharder and its sender in one. Invariant: `log` is what it was asked, in order."""

    def __init__(self, options: Any = None, run_dir: str = "") -> None:
        self.log: list[str] = []
        self.asked: tuple[str, int] = ("", -1)

    def sender(self, plan: Plan, rank: int = 0) -> Noted:
        self.asked = plan.uid, rank
        MADE.append(self)
        return self

    def interrupt(self) -> None:
        self.log.append("interrupt")

    def close(self) -> None:
        self.log.append("close")


def transfer(uid: str, version: int = 1) -> Transfer:
    plan = Plan(uid=uid, source=Layout(host="here"), targets=())
    resharder = Component(name="noted", factory=f"{__name__}:Noted")
    return Transfer(phase="stage", version=version, resharder=resharder, options=None, plan=plan)


def test_a_plans_sender_is_kept_and_another_plans_takes_its_place() -> None:
    MADE.clear()
    kept = KeptSender(rank=3)
    first = kept.of(transfer("a", 1))
    assert kept.of(transfer("a", 2)) is first and len(MADE) == 1
    second = kept.of(transfer("b", 3))
    assert [made.asked for made in MADE] == [("a", 3), ("b", 3)]
    assert MADE[0].log == ["close"] and second is MADE[1] and MADE[1].log == []


def test_closing_is_harmless_without_a_sender_and_twice() -> None:
    MADE.clear()
    kept = KeptSender()
    kept.close()
    kept.interrupt()
    kept.of(transfer("a"))
    kept.interrupt()
    kept.close()
    kept.close()
    kept.interrupt()
    assert MADE[0].log == ["interrupt", "close"]
    assert kept.of(transfer("a")) is not MADE[0]
