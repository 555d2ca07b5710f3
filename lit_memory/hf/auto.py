"""Our models as Hugging Face's: the configuration and the model that the Auto classes of transformers load from the
folders of ``save_pretrained``.

Shape suffixes: B batch, T tokens, D width, V vocabulary.
"""

from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from lit_memory.hf.adapters import MemoryTokens
from lit_memory.hf.cache import CACHE, SegmentCache, the_cache
from lit_memory.hf.card import write_card
from lit_memory.hf.pretrained import AUTO_CODE, AUTO_FILE, AUTO_MAP, MODEL_TYPE, read_settings, shared_weights
from lit_memory.recurrence import Prompts, logits_loss, pack, read_on, read_prompts, reorder, unroll
from lit_memory.registry import MODELS, load_class
from lit_memory.util import files
from lit_memory.util.checks import preview

SIZES = {"num_hidden_layers": "layers", "hidden_size": "width", "num_attention_heads": "heads"}
"""Hugging Face's names of the sizes that its tools ask for -> ours; None for what an architecture does not have."""


class LitMemoryConfig(PreTrainedConfig):
    """The content of config.json.

    arch: registered name of the architecture. settings: fields of its ``Config``. segment_len: tokens per segment where
        a call gives none; default: one segment for all.
    """

    model_type = MODEL_TYPE

    def __init__(
        self, arch: str = "armt", settings: dict[str, Any] | None = None, segment_len: int | None = None, **others: Any
    ) -> None:
        self.arch, self.settings, self.segment_len = arch, settings or {}, segment_len
        known = {f.name: f.default for f in fields(load_class("model", arch).Config)} if arch in [*MODELS] else {}
        known |= self.settings
        self.vocab_size = self.settings.get("vocab_size")
        sizes = {theirs: known.get(ours) for theirs, ours in SIZES.items()}
        super().__init__(**{**others, **sizes, "auto_map": AUTO_MAP})

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """``PreTrainedConfig.save_pretrained``, with the file that ``auto_map`` names."""
        files.write(Path(save_directory) / AUTO_FILE, AUTO_CODE.encode())
        super().save_pretrained(save_directory, *args, **options)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Does nothing: folders name this class, and need no copy of its code."""


class LitMemoryForCausalLM(PreTrainedModel, GenerationMixin):
    """Any of our models, as ``.model``, behind the interface of a Hugging Face causal language model.

    ``generate`` is Hugging Face's, with a ``SegmentCache``; ``.model.generate`` is ours. A call takes:

    attention_mask: (B, T), nonzero at real tokens. Padding, on either side, does not change a sample's results. With
        ``cache`` its last T columns count, and all of them must be real.
    labels: (B, T); label t+1 is predicted at token t, and -100 is ignored. The loss is the mean cross-entropy.
    segment_len: tokens per segment; default: ``config.segment_len``, or with ``cache`` that of it.
    cache: from ``use_cache`` of an earlier call, to go on after its tokens; it is used up.
    past_key_values: the name of ``cache`` before transformers 5.24.
    use_cache: also return what further tokens need. Default: only if ``cache`` is given.
    logits_to_keep: only the logits of so many last columns, or of these columns; 0: all.
    output_hidden_states: also return what the logits are computed from, (B, T, D), as the one of ``hidden_states``.
    num_items_in_batch: the loss is the sum of the cross-entropies divided by this, for a batch in several parts.
    inputs_embeds, output_attentions: None, as our models have neither. Raises ValueError for others.
    """

    config_class = LitMemoryConfig
    base_model_prefix = "model"
    _is_stateful = True  # no assisted decoding, which takes tokens back
    _supports_sdpa = True  # attention is torch's, whatever is asked for
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # the Trainer gives the number of labels of all batches that it accumulates

    def __init__(self, config: LitMemoryConfig) -> None:
        super().__init__(config)
        cls, settings = read_settings(config.arch, config.settings)
        self.model = cls(cls.Config(**settings))
        self._tied_weights_keys = {
            f"model.{name}": f"model.{kept}" for name, kept in shared_weights(self.model).items()
        }
        config.tie_word_embeddings = bool(self._tied_weights_keys)  # without it, transformers ties nothing
        self.memory_tokens: Any = MemoryTokens(self)
        self.gradient_checkpointing = False
        self.post_init()

    def __setattr__(self, name: str, value: Any) -> None:
        """peft puts a module of its own in the place of ``memory_tokens``, and in the end what an adapter has."""
        super().__setattr__(name, value.settled() if isinstance(value, MemoryTokens) else value)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """``PreTrainedModel.from_pretrained``, but a missing or surplus weight is a ValueError, not a warning, and so
        is one that ``device_map`` offloads. No Python code of a folder is run, whatever ``options`` say: our models
        have none."""
        options.pop("trust_remote_code", None)
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, trust_remote_code=False, **options)
        model, info = loaded
        for problem in ("missing_keys", "unexpected_keys"):
            if info[problem]:
                names = preview(info[problem])
                raise ValueError(
                    f"{model.name_or_path}: {problem}: {names}; expected the weights that config.json asks for"
                )
        if offloaded := [name for name, weight in model.named_parameters() if weight.is_meta]:
            raise ValueError(
                f"{model.name_or_path}: device_map offloads {preview(offloaded)}: expected all weights on devices, as "
                "a memory is read outside of the modules for which they would be fetched"
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **options: Any) -> None:
        """``PreTrainedModel.save_pretrained``, with a model card."""
        super().save_pretrained(save_directory, is_main_process, *args, **options)
        if is_main_process:
            write_card(self.model, self.config.arch, Path(save_directory), self.config.segment_len)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Does nothing: folders name this class, and need no copy of its code."""

    def _init_weights(self, module: nn.Module) -> None:
        """Does nothing: the model is initialised when it is built, and no weight may be missing from a folder."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.decoder.tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.decoder.tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.model.decoder.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.decoder.head = new_embeddings

    def resize_token_embeddings(self, *args: Any, **options: Any) -> Any:
        """``PreTrainedModel.resize_token_embeddings``. Raises ValueError for a model that reads tokens with more than
        the embedding and the head of its decoder."""
        others = [
            name for name in self.vocabulary_weights() if not name.startswith(("decoder.tokens.", "decoder.head."))
        ]
        if others:
            raise ValueError(f"{preview(others)} depend on vocab_size as well: build a new model of the other size")
        table = super().resize_token_embeddings(*args, **options)
        self.model.config.vocab_size = self.config.settings["vocab_size"] = self.config.vocab_size
        return table

    def vocabulary_weights(self) -> list[str]:
        """Names of the model's weights whose shapes depend on the vocabulary."""
        kind, settings = type(self.model), asdict(self.model.config)
        with torch.device("meta"):
            larger = kind(kind.Config(**{**settings, "vocab_size": settings["vocab_size"] + 1})).state_dict()
        return [name for name, tensor in self.model.state_dict().items() if tensor.shape != larger[name].shape]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        segment_len: int | None = None,
        cache: SegmentCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        inputs_embeds: None = None,
        output_attentions: None = None,
        past_key_values: SegmentCache | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B, T, V), and with ``labels`` the loss; see the class."""
        check_options(input_ids, inputs_embeds, output_attentions)
        assert input_ids is not None
        wants = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        self.memory_tokens()
        cache = the_cache(cache, past_key_values, use_cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if cache is not None:
            last = isinstance(logits_to_keep, int) and logits_to_keep == 1
            hidden_BTD = self.read(cache, input_ids, attention_mask, segment_len, last)
        else:
            hidden_BTD = self.read_all(input_ids, attention_mask, segment_len)
        logits = self.model.logits(hidden_BTD[:, kept])
        named: dict[str, Any] = {CACHE: cache}
        out = CausalLMOutputWithPast(
            loss=None if labels is None else token_loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=(hidden_BTD,) if wants else None,
            **named,
        )
        return out if (self.config.return_dict if return_dict is None else return_dict) else out.to_tuple()

    def read_all(self, input_ids: Tensor, attention_mask: Tensor | None, segment_len: int | None) -> Tensor:
        """Hidden states (B, T, D) of samples from their beginning."""
        read = partial(
            unroll,
            self.model,
            segment_len=segment_len or self.config.segment_len,
            checkpoint_segments=1 if self.gradient_checkpointing and self.training else None,
        )
        if attention_mask is None:
            return read(input_ids).hidden_BTD
        prompts = pack(input_ids, attention_mask)
        return unpacked(read(prompts.ids_BT, mask_BT=prompts.mask()).hidden_BTD, prompts)

    def read(
        self,
        cache: SegmentCache,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        segment_len: int | None,
        last: bool,
    ) -> Tensor:
        """Hidden states (B, T, D) of tokens, which enter the cache; of the last ones, at least, if ``last``.

        Raises TypeError for another cache, and ValueError for padding in a cache that is not empty.
        """
        if not isinstance(cache, SegmentCache):
            raise TypeError(f"the cache is a {type(cache).__name__}: expected a SegmentCache, as use_cache returns")
        padded = attention_mask is not None and not bool(attention_mask[:, -input_ids.shape[1] :].all())
        if cache.position is not None and padded:
            raise ValueError("attention_mask: expected no padding in tokens after a cache; read samples apart")
        cache.seen += input_ids.shape[1]
        if cache.position is None:
            prompts, segment_len = pack(input_ids, attention_mask), segment_len or self.config.segment_len
            hidden_BTD, cache.position = read_prompts(self.model, prompts, segment_len, last=last)
            return hidden_BTD if last else unpacked(hidden_BTD, prompts)
        hidden_BTD, cache.position = read_on(self.model, cache.position, input_ids)
        return hidden_BTD

    def _reorder_cache(self, cache: SegmentCache, beam_idx: Tensor) -> SegmentCache:
        """The cache of the samples ``beam_idx``, for beam search."""
        assert cache.position is not None
        return SegmentCache(reorder(self.model, cache.position, beam_idx), cache.seen)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """No: ``forward`` makes the cache, which is a ``SegmentCache``."""
        return False


def unpacked(hidden_BTD: Tensor, prompts: Prompts) -> Tensor:
    """Hidden states in the columns that the tokens had before ``pack``."""
    return hidden_BTD.take_along_dim(prompts.order_BT.argsort(dim=1)[:, :, None], dim=1)


def token_loss(logits_BTV: Tensor, labels_BT: Tensor, count: Tensor | int | None) -> Tensor:
    """Cross-entropy of predicting label t+1 at token t: the mean over labels but -100, or the sum over ``count``.

    See ``logits_loss`` for its precision.
    """
    logits_NV, labels_N = logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten()
    return logits_loss(logits_NV, labels_N) if count is None else logits_loss(logits_NV, labels_N, "sum") / count


def check_options(input_ids: Tensor | None, inputs_embeds: Any, output_attentions: Any) -> None:
    """Raise ValueError for arguments of Hugging Face's models that ours do not have, and for no tokens."""
    if inputs_embeds is not None or input_ids is None:
        raise ValueError("inputs_embeds: our models read tokens, some of them more than once; give input_ids")
    if not input_ids.numel():
        raise ValueError(f"input_ids of shape {tuple(input_ids.shape)}: expected at least one token in every sample")
    if output_attentions:
        raise ValueError("output_attentions=True: no attention weights are kept; leave it out")
