"""The target's files: finding them, reading what the config implies, tokenizer, hashes, embedding and head.

Safetensors only, no remote code. Loads no model (`capture.py` does); knows nothing of stores, plans or drafters.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from ..store import DflashError
from .settings import Dtype, TargetSettings


class TargetError(DflashError):
    """A target that cannot be used; the message says what to do."""


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


def resolve_dtype(settings: TargetSettings, device: str) -> Dtype:
    """What a target computes in on a device ("cpu" or a GPU's number).

    Raises:
        TargetError: fp8 on a CPU.
    """
    if settings.dtype == "fp8" and device == "cpu":
        raise TargetError("target.dtype fp8 needs a GPU: choose bfloat16 or float32 on the CPU")
    if settings.dtype != "auto":
        return settings.dtype
    return "float32" if device == "cpu" else "bfloat16"


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


def check_fast(info: TargetInfo, allow_slow: bool) -> None:
    """Refuse a hybrid target on a GPU without the kernels for its linear attention.

    Raises:
        TargetError: they are not installed and `allow_slow` is not said.
    """
    if (slow := slow_layers(info)) and not allow_slow:
        raise TargetError(
            f"{slow} of the target's {info.num_layers} layers would run many times slower than they could: "
            "`pip install flash-linear-attention` where the GPUs are, or pass --allow-slow"
        )


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
