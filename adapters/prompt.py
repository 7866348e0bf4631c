# SPDX-License-Identifier: Apache-2.0
"""Visual prompts: trained tokens in the blocks of a vision transformer."""

import math
import re
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from peft import PeftConfig
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from .added import (
    AdapterConfig,
    AddedLayer,
    AddingModel,
    backbone_modules,
    check_dropout,
    check_last_blocks,
    modules_from_last_blocks,
)


@dataclass
class PromptConfig(AdapterConfig):
    """Configuration of visual prompts: trained tokens (T, D), the same for all images, in a vision transformer.

    They are inserted between the class token and the patches. With ``deep`` each block has its own tokens, which are
    removed after it. Otherwise the tokens of the first block go through all blocks. The head never sees them. Initial
    values are uniform in ±√(6 / (I + D)), where I is the number of values of a patch: Xavier's rule for the patch
    embedding.

    Source: Jia et al., Visual Prompt Tuning (ECCV 2022, arXiv 2203.12119). Tokens enter after timm's
    ``norm_pre`` and register tokens, of which the paper's networks have none. Means over tokens are over the patches'.

    Args:
        tokens: Tokens of a block, T. The paper tries 1 to 200.
        deep: Whether every block has its own tokens (VPT-deep), or only the first (VPT-shallow).
        dropout: Probability of dropout on the tokens, drawn anew for each image.
        last_blocks: Number of blocks with tokens, counted from the end of the network; by default all. Shallow tokens
            are inserted before the first of these. The layers before it are frozen, and run once per image.
        target_modules: Regular expression of the full names of the blocks, in place of ``last_blocks``. Shallow tokens
            are inserted before the first of these blocks and removed after the last.
        modules_to_save: As in :class:`~perada.adapters.ResidualConfig`.

    >>> PromptConfig(tokens=4, deep=False).tokens
    4
    """

    tokens: int = field(default=10, metadata={"help": "Number of tokens per block."})
    deep: bool = field(
        default=True,
        metadata={"help": "Whether every block has its own tokens (VPT-deep), or only the first has tokens."},
    )
    dropout: float = field(default=0.0, metadata={"help": "Probability of dropout on the tokens."})
    last_blocks: int | None = field(
        default=None, metadata={"help": "Number of blocks with tokens, counted from the end of the network."}
    )
    target_modules: str | None = field(
        default=None, metadata={"help": "Regular expression of the names of the blocks, in place of last_blocks."}
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Modules trained in full and saved with the prompts, such as the head."}
    )

    def __post_init__(self) -> None:
        """Check the values; raise a ValueError if one is out of range."""
        super().__post_init__()
        self.peft_type = "PERADA_PROMPT"
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"tokens must be an integer >= 1, got {self.tokens!r}")
        check_dropout(self.dropout)
        check_last_blocks(self.last_blocks)
        try:
            re.compile(self.target_modules or "")
        except (re.error, TypeError) as error:
            raise ValueError(
                "target_modules must be a regular expression of the blocks' full names, got "
                f"{self.target_modules!r} ({error})"
            ) from None


class Prompts(nn.Module):
    """Prompt tokens ``weight`` (T, D).

    They are a separate layer so that perada can run those of many clients as one.
    """

    def __init__(self, tokens: int, width: int, bound: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, width, dtype=dtype).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens (B, T, D) for a batch (B, ...)."""
        # A copy: a view by expand() requires gradients even under torch.no_grad() (torch 2.14).
        return self.weight.repeat(len(x), 1, 1)


class InsertPrompts(nn.Module):
    """Insert prompt tokens into a sequence.

    Args:
        prompts: The tokens.
        dropout: Probability of dropout on the tokens.
        start: Number of tokens of the sequence before them.
    """

    def __init__(self, prompts: Prompts, dropout: float, start: int) -> None:
        super().__init__()
        self.prompts = prompts
        self.dropout = nn.Dropout(dropout)
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, D) to (B, N + T, D)."""
        # The prompts only need the batch size. The input is detached, since a backward hook on them would wait for the
        # gradient of an input that has no influence, and which would never come.
        batch = x[:, :0].detach()
        prompts = self.dropout(self.prompts(batch)).to(x.dtype)
        return torch.cat([x[:, : self.start], prompts, x[:, self.start :]], 1)


class RemovePrompts(nn.Module):
    """Remove prompt tokens from a sequence.

    Args:
        tokens: Number of prompt tokens, T.
        start: Number of tokens of the sequence before them.
    """

    def __init__(self, tokens: int, start: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N + T, D) to (B, N, D)."""
        end = self.start + self.tokens
        return torch.cat([x[:, : self.start], x[:, end:]], 1)


@dataclass
class BlockPromptConfig(PromptConfig):
    """The configuration of one block, which :class:`PromptModel` derives from that of the network.

    Args:
        insert: Whether tokens are inserted before the block.
        remove: Whether tokens are removed after the block.
        start: Number of tokens before the prompts.
        width: Features of a token, D.
        bound: Bound of the uniform initial values.
    """

    insert: bool = True
    remove: bool = True
    start: int = 1
    width: int = 1
    bound: float = 0.0


class PromptLayer(AddedLayer[BlockPromptConfig]):
    """A block on tokens (B, N, D) that also sees the prompts of each active adapter name."""

    # Saved keys begin with these names.
    parts = ("perada_prompt_enter", "perada_prompt_leave")
    adapter_layer_names = ("perada_prompt_enter", "perada_prompt_leave")

    def build(self, config: BlockPromptConfig) -> tuple[nn.Module, ...]:
        """Return what inserts and what removes tokens, each the identity if the block does not do it."""
        insert: nn.Module = nn.Identity()
        remove: nn.Module = nn.Identity()
        if config.insert:
            dtype = next(self.base_layer.parameters()).dtype
            prompts = Prompts(config.tokens, config.width, config.bound, dtype)
            insert = InsertPrompts(prompts, config.dropout, config.start)
        if config.remove:
            remove = RemovePrompts(config.tokens, config.start)
        return insert, remove

    def forward(self, x: Tensor, *args: object, **options: object) -> Tensor:
        """Return the block's output. Further arguments are passed to the block."""
        if self.disable_adapters:
            out: Tensor = self.base_layer(x, *args, **options)
            return out
        insert = cast(nn.ModuleDict, self.perada_prompt_enter)
        remove = cast(nn.ModuleDict, self.perada_prompt_leave)
        adapter_names = [name for name in self.active_adapters if name in insert]
        # All prompts stand at the same place, so that those inserted last are in front, and must be removed first.
        # Prompts that go on to the next block are inserted before those that are removed after this one.
        adapter_names.sort(key=lambda name: isinstance(remove[name], RemovePrompts))
        for name in adapter_names:
            x = insert[name](x)
        x = self.base_layer(x, *args, **options)
        for name in reversed(adapter_names):
            x = remove[name](x)
        return x

    def plain(self) -> "PromptedBlock":
        """Return the same block without PEFT."""
        adapter_name = self.active_adapters[0]
        insert = cast(nn.ModuleDict, self.perada_prompt_enter)[adapter_name]
        remove = cast(nn.ModuleDict, self.perada_prompt_leave)[adapter_name]
        return PromptedBlock(self.base_layer, insert, remove)


class PromptedBlock(nn.Module):
    """A block with prompts that are a part of the network.

    Args:
        block: The block.
        insert: Module that inserts prompts before it.
        remove: Module that removes prompts after it.
    """

    def __init__(self, block: nn.Module, insert: nn.Module, remove: nn.Module) -> None:
        super().__init__()
        self.base_layer = block
        self.perada_enter = insert
        self.perada_leave = remove

    def forward(self, x: Tensor, *args: object, **options: object) -> Tensor:
        """Return the block's output, like :meth:`PromptLayer.forward`."""
        x = self.perada_enter(x)
        x = self.base_layer(x, *args, **options)
        out: Tensor = self.perada_leave(x)
        return out


TOWER_BLOCKS = {
    "transformers.models.clip.modeling_clip.CLIPEncoderLayer": 1,
    "transformers.models.metaclip_2.modeling_metaclip_2.MetaClip2EncoderLayer": 1,
    "transformers.models.siglip.modeling_siglip.SiglipEncoderLayer": 0,
    "open_clip.transformer.ResidualAttentionBlock": 1,
}
"""Numbers of tokens before those of the patches in image towers, by the class of their blocks."""


@dataclass(frozen=True)
class TransformerLayout:
    """Description of a vision transformer for inserting prompts.

    Attributes:
        blocks: Full names of the blocks, in order.
        start: Number of tokens before those of the patches.
        width: Features of a token, D.
        patch: Values of a patch, over all channels.
    """

    blocks: tuple[str, ...]
    start: int
    width: int
    patch: int


def _class_path(module: nn.Module) -> str:
    """Return the name of a module's class with its Python module."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def transformer_layout(model: nn.Module) -> TransformerLayout:
    """Describe a VisionTransformer of timm, a ViT of transformers, or the image tower of a CLIP or SigLIP.

    A VisionTransformer may be a part of the network.

    Raises:
        ValueError: If it is neither, or if prompts already go through its blocks.
    """
    timm_networks = {name: module for name, module in backbone_modules(model) if isinstance(module, VisionTransformer)}
    tower_blocks = {name: module for name, module in backbone_modules(model) if _class_path(module) in TOWER_BLOCKS}
    if timm_networks:
        # Its name is empty unless it is the tower of a larger network, such as OpenCLIP's BiomedCLIP.
        path, timm_network = next(iter(timm_networks.items()))
        network = cast(Any, timm_network)
        blocks = [f"{path}.blocks.{number}".lstrip(".") for number in range(len(network.blocks))]
        start = network.num_prefix_tokens
        width = network.embed_dim
        patch_embedding = network.patch_embed
    # The class is found by name, since importing transformers' module for networks of timm takes seconds.
    elif type(model).__module__ == "transformers.models.vit.modeling_vit":
        blocks = [name for name, module in backbone_modules(model) if type(module).__name__ == "ViTLayer"]
        start = 1
        width = cast(Any, model).config.hidden_size
        patch_embedding = model
    elif tower_blocks:
        blocks = list(tower_blocks)
        first_block = next(iter(tower_blocks.values()))
        start = TOWER_BLOCKS[_class_path(first_block)]
        first_norm = next(module for module in first_block.modules() if isinstance(module, nn.LayerNorm))
        width = first_norm.normalized_shape[0]
        patch_embedding = model
    else:
        raise ValueError(
            "the prompt adapter fits VisionTransformers of timm (ViTs and DeiTs), and ViTs, CLIP and SigLIP of "
            f"transformers and OpenCLIP, not {type(model).__name__}; choose a different adapter, such as 'lora' or "
            "'bias_norm'"
        )
    for name, module in backbone_modules(model):
        if not isinstance(module, PromptedBlock):
            continue
        # Shallow prompts: they are inserted before one block and removed after another.
        if isinstance(module.perada_enter, nn.Identity) or isinstance(module.perada_leave, nn.Identity):
            raise ValueError(
                f"the network holds prompts that go through its blocks, from another run ({name!r} is one of them); "
                "choose a different adapter, or use deep prompts in that run"
            )
    patch = width
    for module in patch_embedding.modules():
        if isinstance(module, nn.Conv2d):
            patch = module.weight[0].numel()
    return TransformerLayout(tuple(blocks), start, width, patch)


class PromptModel(AddingModel[PromptConfig]):
    """Put prompts into each targeted block, or from the first to the last of them."""

    prefix = "perada_prompt_"
    tuner_layer_cls = PromptLayer

    def targets(self, config: PromptConfig) -> list[str]:
        """Return the blocks that prompts are inserted before or removed after."""
        blocks = transformer_layout(self.model).blocks
        if config.target_modules is None:
            allowed = modules_from_last_blocks(self.model, config.last_blocks)
            names = [name for name in blocks if name in allowed]
        else:
            names = [name for name in blocks if re.fullmatch(config.target_modules, name)]
        if not names:
            raise ValueError(
                f"target_modules={config.target_modules!r} matches no block; use an expression for some of "
                f"{blocks[0]!r} to {blocks[-1]!r}"
            )
        if config.deep:
            return names
        # One block only may be both the first and the last.
        return list(dict.fromkeys([names[0], names[-1]]))

    def fits(self, target: nn.Module) -> bool:
        """Return True: only blocks are targeted."""
        return True

    def _prepare_adapter_config(self, peft_config: PeftConfig, model_config: dict[str, Any]) -> PeftConfig:
        """Fill in the blocks as a regular expression.

        PEFT shortens a long list of names to ends of names, which would match other modules too.
        """
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
        parameter_name: str | None = None,
    ) -> None:
        """Wrap a block with the configuration for its place in the network."""
        config = cast(PromptConfig, peft_config)
        names = self.targets(config)
        layout = transformer_layout(self.model)
        block_config = BlockPromptConfig(
            inference_mode=config.inference_mode,
            tokens=config.tokens,
            dropout=config.dropout,
            insert=config.deep or current_key == names[0],
            remove=config.deep or current_key == names[-1],
            start=layout.start,
            width=layout.width,
            bound=math.sqrt(6 / (layout.patch + layout.width)),
        )
        super()._create_and_replace(block_config, adapter_name, target, target_name, parent, current_key)
