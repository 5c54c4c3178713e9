"""Section `[train]`: how a run trains, what it keeps and what it reports. Knows names and ranges only."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class TrainSettings(BaseModel):
    """Section `[train]`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    run: str = Field("runs/drafter", min_length=1, description="folder of checkpoints and metrics; one a variant")
    name: str | None = Field(
        None,
        min_length=1,
        description="what trackers call the run; by default its folder's name and what --set says",
    )
    epochs: int = Field(6, ge=1, description="passes over the training documents")
    steps: int | None = Field(None, ge=1, description="updates in all, in place of epochs")
    tokens: int = Field(3072, ge=2, description="tokens of a packed batch")
    anchors: int = Field(512, ge=1, description="blocks drawn from a packed batch")
    accumulate: int = Field(1, ge=1, description="packed batches an update, on each GPU")
    mixture: dict[str, float] = Field(
        default_factory=dict,
        description="shares of the tokens by tag: {code = 1, chat = 3}; tags left out are left out; {}: as stored",
    )
    init_from: str | None = Field(
        None, min_length=1, description="drafter to begin from: a folder in the published layout, or a name on the hub"
    )
    lr: float = Field(6e-4, gt=0, description="peak learning rate")
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="adamw as published; muon: Muon for matrices, AdamW for the rest"
    )
    muon_lr: float = Field(0.02, gt=0, description="peak learning rate of Muon's matrices")
    warmup: float = Field(0.04, ge=0, le=1, description="share of the updates that warm up; then a cosine to zero")
    clip: float = Field(1.0, gt=0, description="largest global norm of the gradient")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's, on matrices only")
    non_finite: Literal["skip", "stop"] = Field(
        "skip", description="an update whose gradient is not finite is left out, or ends the run; named either way"
    )
    seed: int = Field(0, ge=0, description="of weights, data order and anchors")
    dtype: Literal["auto", "float32", "bfloat16", "fp8"] = Field(
        "auto",
        description="what the drafter computes in; masters are fp32. auto: bfloat16 on a GPU, float32 on the CPU; fp8: "
        "bfloat16 with matrix products in fp8, faster and coarser",
    )
    sync: Literal["gradients", "average"] = Field(
        "gradients",
        description="with several GPUs: gradients are summed at every update; average: each makes updates of its own "
        "and weights are averaged every sync_every updates, for slow links",
    )
    sync_every: int = Field(50, ge=1, description="updates between averages, with sync = average")
    save_every: int = Field(
        200, ge=1, description="updates between checkpoints; each epoch ends with one too, once the store is filled"
    )
    keep: int = Field(2, ge=1, description="last checkpoints kept")
    keep_every: int | None = Field(None, ge=1, description="checkpoints whose step is a multiple of it are kept too")
    keep_best: bool = Field(True, description="keep the checkpoint with the largest accepted length on held-out text")
    log_every: int = Field(10, ge=1, description="updates between lines of metrics")
    validate_every: int | None = Field(
        None, ge=1, description="updates between validations; each epoch ends with one, once the store is filled"
    )
    validate_documents: int = Field(64, ge=0, description="held-out documents of a validation")
    trackers: list[Literal["wandb", "trackio"]] = Field(
        default_factory=list, description="where metrics go beside TensorBoard; each must be installed"
    )
    project: str = Field("dflash", min_length=1, description="the project's name there")

    @model_validator(mode="after")
    def _some_share(self) -> TrainSettings:
        shares = self.mixture.values()
        if any(share < 0 for share in shares) or (shares and not any(shares)):
            raise ValueError("mixture: shares are 0 or more, and one of them is above 0")
        return self


FREE_TO_CHANGE = {
    *("run", "name", "epochs", "steps", "save_every", "keep", "keep_every", "keep_best", "log_every"),
    *("validate_every", "validate_documents", "trackers", "project", "non_finite"),
}
"""Settings that a resumed run may change; any other makes it another run."""
