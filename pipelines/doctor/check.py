"""What a check finds: plain data, for a table or for programs. Knows no check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ...extract.target import TargetInfo
    from ..config import Settings

State = Literal["ok", "unused", "warning", "missing", "broken"]
"""`unused`: makes no difference on this machine. `missing` and `broken`: something needed is not there, or fails."""


@dataclass(frozen=True)
class Check:
    """One row.

    Attributes:
        name: what was looked at.
        found: what is there, or what its absence means.
        remedy: a command or a sentence that puts it right; may be empty.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU. `memory` and `free` in bytes; `capability` is CUDA's compute capability."""

    name: str
    capability: tuple[int, int]
    memory: int
    free: int


@dataclass
class Findings:
    """What later checks need of earlier ones.

    Attributes:
        settings: of the `dflash.toml` in the directory, if it can be read.
        target: of those settings, if its config is on this machine.
    """

    settings: Settings | None = None
    target: TargetInfo | None = None
    gpus: list[Gpu] = field(default_factory=list)

    @property
    def linear_layers(self) -> int | None:
        """Layers of the target that are linear attention; None without a target."""
        return None if self.target is None else (self.target.text.get("layer_types") or []).count("linear_attention")
