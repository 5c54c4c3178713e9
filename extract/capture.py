"""Loading a target and capturing its hidden states: the outputs of some layers, and the input of the LM head.

On a GPU by fused kernels (`fused.py`), else by transformers' own forward pass with hooks. Knows nothing of stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from .fused import FusedTarget, not_fusable
from .kernels.delta_rule import pin_configurations
from .settings import Dtype
from .target import TargetError, inspect, weight_files


class Capture(Protocol):
    """A target that gives its states for token ids."""

    def __call__(self, input_ids: Tensor) -> tuple[list[Tensor], Tensor]:
        """For a batch `[b, n]`: each chosen layer's output `[b, n, H]` and final `[b, n, H]`, in the target's dtype."""
        ...


@dataclass(frozen=True)
class Wanted:
    """Which states a store keeps.

    Attributes:
        layer_ids: id i is the output of decoder layer i.
        last_layer: for the last layer, "pre" or "post" the final norm.
        final: whether the input of the LM head is kept too.
        num_layers: decoder layers of the target, N.
    """

    layer_ids: tuple[int, ...]
    last_layer: str | None
    final: bool
    num_layers: int

    @property
    def layers(self) -> int:
        """Decoder layers that must run: all of them, or up to the last one kept."""
        to_the_end = self.final or (self.last_layer == "post" and self.num_layers - 1 in self.layer_ids)
        return self.num_layers if to_the_end else max(self.layer_ids) + 1


@dataclass(frozen=True)
class Loaded:
    """A target ready to run.

    Attributes:
        capture: gives its states.
        device: where its last layers run, and where its states are packed.
        path: "fused" or "transformers", whichever runs.
        notes: lines that a person should see.
        fp8_errors: with fp8, ||fp8 - bf16|| / ||bf16|| of each kept layer and of final on the sample; else empty.
    """

    capture: Capture
    device: torch.device
    path: str
    notes: list[str]
    fp8_errors: list[float]


def load_capture(folder: Path, dtype: Dtype, device: str, gpus: int, wanted: Wanted, sample: Tensor) -> Loaded:
    """Load a target to capture states.

    Args:
        device: "cpu" or "cuda".
        gpus: GPUs to spread it over.
        sample: token ids `[1, n]`: a first pass over them makes a GPU's kernels ready, and measures the errors of fp8.

    Raises:
        TargetError: it cannot be loaded, or there are no kernels for fp8.
    """
    text = inspect(folder).text
    notes: list[str] = []
    if device != "cpu" and dtype != "float32" and "linear_attention" in (text.get("layer_types") or []):
        # Before the target's module imports the library.
        unpinned = pin_configurations(max(text["linear_key_head_dim"], text["linear_value_head_dim"]))
        notes += [unpinned] if unpinned else []
    model = load_model(folder, dtype, device, gpus, wanted.layers)
    last = wanted.last_layer if wanted.layers == wanted.num_layers else None
    end = model.get_decoder().norm.weight.device
    reason = "the fused kernels are for bfloat16" if dtype == "float32" else not_fusable(model)
    if reason and dtype == "fp8":
        raise TargetError(f"target.dtype fp8: {reason}; use bfloat16")
    if device == "cpu" or reason:
        if device != "cpu":
            notes.append(f"{reason}: the target runs as transformers has it, more slowly")
        return Loaded(StateCapture(model, wanted.layer_ids, last), end, "transformers", notes, [])
    try:
        capture = FusedTarget(model, wanted.layer_ids, last)
        exact = states_of(capture, sample)
        if dtype != "fp8":
            return Loaded(capture, end, "fused", notes, [])
        del capture  # its joined weights go as the quantised ones are made
        capture = FusedTarget(model, wanted.layer_ids, last, fp8=True)
        errors = [relative_error(ours, theirs) for ours, theirs in zip(states_of(capture, sample), exact, strict=True)]
    except RuntimeError as error:  # running out of memory is among them
        raise TargetError(f"target {folder} cannot be run here: {str(error).splitlines()[0]}") from None
    if any(hasattr(layer.mlp, "experts") for layer in model.get_decoder().layers):
        notes.append("the experts stay in bfloat16: other products are in fp8")
    return Loaded(capture, end, "fused", notes, errors if wanted.final else errors[:-1])


def load_model(folder: Path, dtype: Dtype, device: str, gpus: int = 1, layers: int | None = None) -> Any:
    """A target in evaluation mode, read from its safetensors straight to where it runs.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        gpus: spread it over so many GPUs, layer by layer.
        layers: load only so many decoder layers, from the first.

    Raises:
        TargetError: its weights are not safetensors, are not all there, do not fit its config or into the GPUs.
    """
    weight_files(folder)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    place: dict[str, Any] = {} if device == "cpu" else {"device_map": {"": device} if gpus == 1 else "balanced"}
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        text = config.get_text_config(decoder=True)
        if layers is not None and layers < text.num_hidden_layers:
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:layers]
            text.num_hidden_layers = layers
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=torch.bfloat16 if dtype == "fp8" else getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation="sdpa",
            ignore_mismatched_sizes=True,  # which the check below names, where transformers points to a log
            output_loading_info=True,
            **place,
        )
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise TargetError(f"target {folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    model, said = loaded
    _check_loaded(folder, model, said)
    return model.requires_grad_(False).eval()


def _check_loaded(folder: Path, model: Any, said: dict[str, Any]) -> None:
    """Refuse what transformers only warns of: it would run with random numbers, or on the CPU."""
    wrong = {"missing": said["missing_keys"], "of another shape": said["mismatched_keys"]}
    for how, keys in wrong.items():
        named = sorted(key if isinstance(key, str) else key[0] for key in keys)
        if named:
            raise TargetError(
                f"target {folder}: {len(named)} of its weights are {how} in its files ({named[0]}): fetch them again"
            )
    outside = {str(where) for where in (getattr(model, "hf_device_map", None) or {}).values()} & {"cpu", "disk"}
    if outside and model.device.type != "cpu":
        raise TargetError(f"target {folder} does not fit into the memory of its GPUs: spread it over more, target.gpus")


class StateCapture:
    """Runs a target's decoder and keeps the outputs of the chosen layers; the vocabulary projection is never computed.

    Args:
        model: a causal LM from transformers.
        layer_ids: layers whose output is kept; id i is the output of decoder layer i.
        last_layer: for the last layer, "pre" or "post" the final norm.
    """

    def __init__(self, model: Any, layer_ids: Sequence[int], last_layer: str | None) -> None:
        self._decoder = model.get_decoder()
        self._layer_ids = tuple(layer_ids)
        last = len(self._decoder.layers) - 1
        self._from_final = {last} if last_layer == "post" else set()
        self._kept: dict[int, Tensor] = {}
        for i in self._layer_ids:
            if i not in self._from_final:
                self._decoder.layers[i].register_forward_hook(self._keeper(i))

    @torch.inference_mode()
    def __call__(self, input_ids: Tensor, **options: Any) -> tuple[list[Tensor], Tensor]:
        """States of a batch of token ids `[b, n]`: for each chosen layer `[b, n, H]`, and final `[b, n, H]`, in the
        target's dtype.

        `final` is the input of the LM head. No attention mask is passed: with right padding, later positions cannot
        reach earlier ones.
        """
        input_ids = input_ids.to(self._decoder.embed_tokens.weight.device, non_blocking=True)
        final = self._decoder(input_ids=input_ids, **{"use_cache": False, **options}).last_hidden_state
        hidden = [final if i in self._from_final else self._kept[i] for i in self._layer_ids]
        self._kept.clear()
        return hidden, final

    def _keeper(self, index: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            self._kept[index] = output[0] if isinstance(output, tuple) else output

        return keep


def states_of(capture: Capture, ids: Tensor) -> list[Tensor]:
    """The kept layers' states and final, in one list."""
    hidden, final = capture(ids)
    return [*hidden, final]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """||ours - theirs|| / ||theirs||, in float32."""
    exact = theirs.float()
    return ((ours.float() - exact).norm() / exact.norm()).item()
