# SPDX-License-Identifier: Apache-2.0
"""Visual prompts: trained tokens in the blocks of a vision transformer."""

import math
import re
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft import PeftConfig
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from .added import AdapterConfig, AddedLayer, AddingModel, check_dropout, check_last_blocks, own_modules, reached


@dataclass
class PromptConfig(AdapterConfig):
    """Tokens (T, D) before those of the patches, behind the class token: the same for all images, and trained.

    With ``deep`` each block has tokens of its own, whose outputs are left out. Otherwise those of the first block go
    through all blocks. The head never sees them. They start uniform in ±√(6 / (I + D)), I being the numbers of a patch,
    which is Xavier's rule for the patch embedding.

    Source: Jia et al., Visual Prompt Tuning (ECCV 2022, arXiv 2203.12119). Tokens enter behind timm's
    ``norm_pre`` and register tokens, of which the paper's networks have none. Means over tokens are over the patches'.

    Args:
        tokens: Tokens of a block, T. The paper tries 1 to 200.
        deep: Tokens of its own for every block (VPT-deep), or for the first alone (VPT-shallow).
        dropout: Probability of dropout on the tokens, drawn anew for each image.
        last_blocks: Tokens for the last so many blocks only; by default for all. Shallow ones then enter before the
            first of these. What stands before never changes, and runs once an image.
        target_modules: Regular expression of the full names of the blocks, in place of ``last_blocks``. Shallow tokens
            go from the first of them to the last.
        modules_to_save: As of :class:`~perada.adapters.ResidualConfig`.
    """

    tokens: int = 10
    deep: bool = True
    dropout: float = 0.0
    last_blocks: int | None = None
    target_modules: str | None = None
    modules_to_save: list[str] | None = None

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError if one is out of range."""
        super().__post_init__()
        self.peft_type = "PERADA_PROMPT"
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"tokens={self.tokens!r} is not a number of tokens: give 1 or more")
        check_dropout(self.dropout)
        check_last_blocks(self.last_blocks)
        try:
            re.compile(self.target_modules or "")
        except (re.error, TypeError) as error:
            raise ValueError(
                f"target_modules={self.target_modules!r} is no regular expression ({error}): give one of the blocks' "
                "full names"
            ) from None


class Prompts(nn.Module):
    """Tokens, ``weight`` (T, D)."""

    def __init__(self, tokens: int, width: int, bound: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width, dtype=dtype).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens (B, T, D) for a batch (B, ...)."""
        # Not a view: without gradients, one would still say that it requires them.
        return self.weight.repeat(len(x), 1, 1)


class Enter(nn.Module):
    """Put tokens into a sequence."""

    def __init__(self, prompts: Prompts, dropout: float, start: int) -> None:
        super().__init__()
        self.prompts, self.dropout, self.start = prompts, nn.Dropout(dropout), start

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N + T, D)."""
        # Detached: a hook on what gives a layer its gradient waits for that of its input, which would never come.
        added = self.dropout(self.prompts(x[:, :0].detach())).to(x.dtype)
        return torch.cat([x[:, : self.start], added, x[:, self.start :]], 1)


class Leave(nn.Module):
    """Take tokens out of a sequence."""

    def __init__(self, tokens: int, start: int) -> None:
        super().__init__()
        self.tokens, self.start = tokens, start

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N + T, D) to (B, N, D)."""
        return torch.cat([x[:, : self.start], x[:, self.start + self.tokens :]], 1)


@dataclass
class PlacedConfig(PromptConfig):
    """What one block needs to know: the tokens enter before it, leave behind it, or both.

    ``start`` tokens stand before them, ``width`` is D, ``bound`` that of the initial values.
    """

    enter: bool = True
    leave: bool = True
    start: int = 1
    width: int = 1
    bound: float = 0.0


class PromptLayer(AddedLayer[PlacedConfig]):
    """A block on tokens (B, N, D) that sees the prompts of each active PEFT adapter name too."""

    parts = ("perada_prompt_enter", "perada_prompt_leave")
    adapter_layer_names = parts

    def build(self, config: PlacedConfig) -> tuple[nn.Module, ...]:
        """Return what puts tokens in and what takes them out; a module that does nothing where the block does not."""
        enter: nn.Module = nn.Identity()
        if config.enter:
            dtype = next(self.base_layer.parameters()).dtype
            prompts = Prompts(config.tokens, config.width, config.bound, dtype)
            enter = Enter(prompts, config.dropout, config.start)
        return enter, Leave(config.tokens, config.start) if config.leave else nn.Identity()

    def forward(self, x: Tensor, *args: object, **options: object) -> Tensor:
        """Return the block's output; what follows the first argument is handed on."""
        enter, leave = (getattr(self, part) for part in self.parts)
        active = [] if self.disable_adapters else [name for name in self.active_adapters if name in enter]
        active.sort(key=lambda name: isinstance(leave[name], Leave))  # who leaves first stands in front
        for name in active:
            x = enter[name](x)
        x = self.base_layer(x, *args, **options)
        for name in reversed(active):
            x = leave[name](x)
        return x

    def plain(self) -> "Prompted":
        """The same without PEFT."""
        enter, leave = (getattr(self, part)[self.active_adapters[0]] for part in self.parts)
        return Prompted(self.base_layer, enter, leave)


class Prompted(nn.Module):
    """A block whose prompts are a part of the network."""

    def __init__(self, base: nn.Module, enter: nn.Module, leave: nn.Module) -> None:
        super().__init__()
        self.base_layer, self.perada_enter, self.perada_leave = base, enter, leave

    def forward(self, x: Tensor, *args: object, **options: object) -> Tensor:
        """As :meth:`PromptLayer.forward`."""
        out: Tensor = self.perada_leave(self.base_layer(self.perada_enter(x), *args, **options))
        return out


@dataclass(frozen=True)
class Transformer:
    """Names of the blocks in order, tokens before those of the patches, features D, and numbers of a patch."""

    blocks: tuple[str, ...]
    start: int
    width: int
    patch: int


def transformer(model: nn.Module) -> Transformer:
    """Describe a VisionTransformer of timm or a ViT of transformers.

    Raises:
        ValueError: If it is neither, or if tokens go through all of its blocks already.
    """
    network = cast(Any, model)
    if isinstance(model, VisionTransformer):
        blocks = [f"blocks.{number}" for number in range(len(network.blocks))]
        start, width, embedding = network.num_prefix_tokens, network.embed_dim, network.patch_embed
    elif type(model).__module__ == "transformers.models.vit.modeling_vit":
        blocks = [name for name, module in own_modules(model) if type(module).__name__ == "ViTLayer"]
        start, width, embedding = 1, network.config.hidden_size, model
    else:
        raise ValueError(
            "the prompt adapter fits VisionTransformers of timm (ViTs and DeiTs) and ViTs of transformers, not "
            f"{type(model).__name__}: choose another adapter, such as 'lora' or 'bias_norm'"
        )
    for name, module in own_modules(model):
        if isinstance(module, Prompted) and nn.Identity in (type(module.perada_enter), type(module.perada_leave)):
            raise ValueError(
                f"the network holds prompts that go through its blocks, from another run ({name!r} is one of them): "
                "choose another adapter, or give that run deep prompts"
            )
    sizes = [conv.weight[0].numel() for conv in embedding.modules() if isinstance(conv, nn.Conv2d)]
    return Transformer(tuple(blocks), start, width, (sizes or [width])[-1])


class PromptModel(AddingModel[PromptConfig]):
    """Put prompts into each targeted block, or from the first to the last of them."""

    prefix = "perada_prompt_"
    tuner_layer_cls = PromptLayer

    def targets(self, config: PromptConfig) -> list[str]:
        """Return the blocks that tokens enter or leave."""
        blocks = transformer(self.model).blocks
        if config.target_modules is None:
            within = reached(self.model, config.last_blocks)
            names = [name for name in blocks if name in within]
        else:
            names = [name for name in blocks if re.fullmatch(config.target_modules, name)]
        if not names:
            raise ValueError(
                f"target_modules={config.target_modules!r} names no block: give an expression for some of "
                f"{blocks[0]!r} to {blocks[-1]!r}"
            )
        return names if config.deep else list(dict.fromkeys([names[0], names[-1]]))

    def fits(self, target: nn.Module) -> bool:
        """Blocks are all that is targeted."""
        return True

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: dict[str, Any]) -> PeftConfig:
        """Fill in the blocks, as an expression: PEFT makes ends of names of a long list, which would fit others too."""
        config = cast(PromptConfig, peft_config)
        config.target_modules = "|".join(map(re.escape, self.targets(config)))
        return config

    def _create_and_replace(
        self,
        peft_config: PeftConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        *_: object,
        **__: object,
    ) -> None:
        config = cast(PromptConfig, peft_config)
        names, found = self.targets(config), transformer(self.model)
        placed = PlacedConfig(
            inference_mode=config.inference_mode,
            tokens=config.tokens,
            dropout=config.dropout,
            enter=config.deep or current_key == names[0],
            leave=config.deep or current_key == names[-1],
            start=found.start,
            width=found.width,
            bound=math.sqrt(6 / (found.patch + found.width)),
        )
        super()._create_and_replace(placed, adapter_name, target, target_name, parent, current_key)
