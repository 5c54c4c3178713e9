"""Sections `[target]`, `[data]` and `[extract]`: what stage one works on, and how. Knows names and ranges only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ..store.format import Encoding

Dtype = Literal["float32", "bfloat16", "fp8"]
"""What a target computes in; fp8: bfloat16, with matrix products in e4m3."""


class TargetSettings(BaseModel):
    """Section `[target]`."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="folder of the target, or its name on the Hugging Face hub")
    dtype: Literal["auto", "float32", "bfloat16", "fp8"] = Field(
        "auto",
        description="what the target computes in; auto: bfloat16 on a GPU, float32 on the CPU; fp8: products in e4m3",
    )
    gpus: int = Field(default=1, ge=1, description="GPUs that one target is spread over, when it is wider than one")


class DataSettings(BaseModel):
    """Section `[data]`."""

    model_config = ConfigDict(extra="forbid")

    files: list[str] = Field(
        description="conversations: JSONL or Parquet files, folders of them, or folders written by save_to_disk"
    )
    thinking: bool = Field(False, description="what the chat template gets as enable_thinking; serve with the same")
    max_length: int = Field(3072, ge=2, description="tokens kept of a document; what is longer is cut")
    heldout: float = Field(
        0.02,
        ge=0,
        lt=1,
        description="share of documents held out, by content hash; lines with a 'split' say it themselves",
    )
    tags: list[str] | None = Field(None, description="take only documents of these tags of origin")
    limit: int | None = Field(None, ge=1, description="take only the first so many training documents")
    limit_heldout: int | None = Field(None, ge=1, description="take only the first so many held-out documents")


class ExtractSettings(BaseModel):
    """Section `[extract]`."""

    model_config = ConfigDict(extra="forbid")

    layer_ids: list[int] = Field(description="target layers whose output is stored, in this order")
    last_layer: Literal["pre", "post"] | None = Field(
        None,
        description="needed only if layer_ids has the target's last layer: before or after the final norm",
    )
    final: bool = Field(True, description="store the input of the LM head too (soft losses need it)")
    encoding: Encoding = Field(
        "bf16", description="how states are kept: bf16, or fp8 (e4m3, a scale a token and layer) for half the bytes"
    )
    unit_tokens: int = Field(32768, ge=1, description="tokens of one unit of work, which is one part of the store")
    batch_tokens: int = Field(16384, ge=1, description="padded tokens of one forward pass")
    allow_slow: bool = Field(
        default=False, description="run a hybrid target on a GPU without flash-linear-attention, many times slower"
    )
