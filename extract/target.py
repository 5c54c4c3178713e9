"""The target: finding it, reading what its config implies, loading it, and capturing its hidden states.

Safetensors only, no remote code. Knows nothing of stores, plans or drafters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ..store import DflashError

Dtype = Literal["float32", "bfloat16"]


class TargetError(DflashError):
    """A target that cannot be used; the message says what to do."""


class TargetSettings(BaseModel):
    """Section `[target]`."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="folder of the target, or its name on the Hugging Face hub")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="what the target computes in; auto: bfloat16 on a GPU, float32 on the CPU"
    )

    def resolve_dtype(self, device: str) -> Dtype:
        """The dtype on a device ("cpu" or a GPU's number)."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if device == "cpu" else "bfloat16"


@dataclass(frozen=True)
class TargetInfo:
    """What a target's files say, without its weights.

    Attributes:
        path: local folder.
        text: the text model's config, as a plain dictionary (nested multimodal configs are opened).
    """

    path: Path
    text: dict[str, Any]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.text["hidden_size"]

    @property
    def num_layers(self) -> int:
        """Decoder layers, N."""
        return self.text["num_hidden_layers"]

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return self.text["vocab_size"]


def locate(path: str) -> Path:
    """A local folder for `path`, which is one already or a name on the hub, whose files are then downloaded.

    Raises:
        TargetError: there is neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise TargetError(f"there is no target folder {path}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "merges.txt"]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise TargetError(f"target {path} is no local folder and could not be had from the hub ({reason})") from None


def inspect(folder: Path) -> TargetInfo:
    """Read a target's config.

    Raises:
        TargetError: no readable config, or not a causal language model.
    """
    if not (folder / "config.json").is_file():
        raise TargetError(f"{folder} has no config.json: it is not a target's folder")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise TargetError(f"the config of target {folder} cannot be read: {str(error).splitlines()[0]}") from None
    names = config.architectures or []
    if not any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in names):
        said = ", ".join(names) or "no architecture"
        raise TargetError(f"target {folder} is not a causal language model (its config names {said})")
    text = config.get_text_config(decoder=True).to_dict()
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        if not isinstance(text.get(key), int):
            raise TargetError(f"the config of target {folder} does not say {key}")
    return TargetInfo(folder, text)


def slow_layers(info: TargetInfo) -> int:
    """Linear-attention layers that would run in plain PyTorch because their kernels are not installed."""
    kinds = info.text.get("layer_types") or []
    return 0 if find_spec("fla") else kinds.count("linear_attention")


def default_layer_ids(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """The layers DFlash takes by default: round(1 + j (N - 4) / (n - 1)), j = 0..n-1, and N // 2 for one layer.

    Raises:
        TargetError: the target has too few layers for so many different ones.
    """
    if count == 1:
        return (num_layers // 2,)
    ids = [round(1 + j * (num_layers - 4) / (count - 1)) for j in range(count)]
    if num_layers < 4 or len(set(ids)) != count:
        raise TargetError(f"a target of {num_layers} layers has no {count} default layers: name extract.layer_ids")
    return tuple(ids)


def check_layer_ids(layer_ids: Sequence[int], num_layers: int, last_layer: str | None) -> None:
    """Refuse layer ids that the target cannot give.

    Raises:
        TargetError: none, a duplicate, one out of range, or the last layer without `last_layer` said.
    """
    if not layer_ids:
        raise TargetError("extract.layer_ids is empty: name at least one layer of the target")
    if len(set(layer_ids)) != len(layer_ids):
        raise TargetError(f"extract.layer_ids names a layer twice: {list(layer_ids)}")
    for layer in layer_ids:
        if not 0 <= layer < num_layers:
            raise TargetError(f"layer id {layer} is out of range: the target has layers 0 to {num_layers - 1}")
    if num_layers - 1 in layer_ids and last_layer is None:
        raise TargetError(
            f"layer {num_layers - 1} is the target's last: set extract.last_layer to 'pre' or 'post' "
            "(its state before or after the final norm)"
        )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The target's tokenizer.

    Raises:
        TargetError: there is none.
    """
    if not (folder / "tokenizer.json").is_file():
        # transformers would make up an empty tokenizer.
        raise TargetError(f"target {folder} has no tokenizer.json: export its tokenizer as one (a fast tokenizer)")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (ValueError, OSError, KeyError) as error:
        raise TargetError(f"the tokenizer of {folder} cannot be loaded: {str(error).splitlines()[0]}") from None


def weight_files(folder: Path) -> list[Path]:
    """The target's safetensors files, by name.

    Raises:
        TargetError: there is none.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TargetError(f"target {folder} has no safetensors weights: convert it first (pickled weights are refused)")
    return files


def weights_hash(folder: Path) -> str:
    """sha256 over the content of all weight files, several at a time."""

    def one(path: Path) -> str:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return text_hash(" ".join(pool.map(one, weight_files(folder))))


def config_hash(info: TargetInfo) -> str:
    """sha256 of what the text config says of the model; library versions, dtype and paths are left out."""
    raw = json.loads((info.path / "config.json").read_text())  # as written: defaults differ between library versions
    text = raw.get("text_config", raw)
    passing = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache"}
    return text_hash(json.dumps({key: value for key, value in text.items() if key not in passing}, sort_keys=True))


def text_hash(text: str) -> str:
    """sha256 of a text, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def load_ends(folder: Path) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The target's embedding and LM head `[vocabulary, H]`, read from its files alone; None for a tied head.

    Raises:
        TargetError: no file has an embedding.
    """
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dictionary)
                    end = next((end for end in ("embed_tokens.weight", "lm_head.weight") if key.endswith(end)), None)
                    if end and "visual" not in key and not key.startswith("mtp"):
                        found[end] = file.get_tensor(key)
        except SafetensorError as error:
            raise TargetError(f"{path} is not a whole safetensors file ({error}): fetch it again") from None
    if "embed_tokens.weight" not in found:
        raise TargetError(f"the weights of {folder} hold no embed_tokens.weight")
    return found["embed_tokens.weight"], found.get("lm_head.weight")


def load_model(folder: Path, dtype: Dtype, device: str) -> Any:
    """The whole target, in evaluation mode on a device.

    Raises:
        TargetError: its weights are not safetensors or do not fit its config.
    """
    weight_files(folder)
    transformers_logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            attn_implementation="sdpa",
        )
    except (ValueError, OSError, KeyError, RuntimeError, SafetensorError) as error:
        raise TargetError(f"target {folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    return model.requires_grad_(False).eval().to(device)


class StateCapture:
    """Runs a target's decoder and keeps the outputs of the chosen layers; the vocabulary projection is never computed.

    Args:
        model: a causal LM from transformers.
        layer_ids: layers whose output is kept; id i is the output of decoder layer i.
        last_layer: for the last layer, "pre" or "post" the final norm.
    """

    last_final: torch.Tensor
    """`[b, n, H]`, the input of the LM head in the last call, in the target's own dtype."""

    def __init__(self, model: Any, layer_ids: Sequence[int], last_layer: str | None) -> None:
        self._decoder = model.get_decoder()
        self._layer_ids = tuple(layer_ids)
        last = len(self._decoder.layers) - 1
        self._from_final = {last} if last_layer == "post" else set()
        self._kept: dict[int, torch.Tensor] = {}
        self._handles = [
            self._decoder.layers[i].register_forward_hook(self._keeper(i))
            for i in self._layer_ids
            if i not in self._from_final
        ]

    @torch.inference_mode()
    def __call__(self, input_ids: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """States of a batch of token ids `[b, n]`: hidden `[b, n, layers, H]` and final `[b, n, H]`, both bfloat16.

        `final` is the input of the LM head. No attention mask is passed: with right padding, later positions cannot
        reach earlier ones.
        """
        final = self._decoder(input_ids=input_ids, **options).last_hidden_state
        self.last_final = final
        states = [final if i in self._from_final else self._kept[i] for i in self._layer_ids]
        hidden = torch.stack([state.to(torch.bfloat16) for state in states], dim=2)
        self._kept.clear()
        return hidden, final.to(torch.bfloat16)

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _keeper(self, index: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            self._kept[index] = output[0] if isinstance(output, tuple) else output

        return keep
