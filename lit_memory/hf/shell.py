"""Our models inside Hugging Face's: ``AutoConfig`` and ``AutoModelForCausalLM`` load the folders of
``save_pretrained``.

``import lit_memory`` is enough for that: see ``autoclasses.py``.

Shape suffixes: B batch, T tokens, D width, V vocabulary.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from lit_memory.hf.autoclasses import LitMemoryConfig
from lit_memory.hf.interop import some
from lit_memory.hf.pretrained import shared_weights
from lit_memory.recurrence import pack, unroll
from lit_memory.registry import build


class LitMemoryForCausalLM(PreTrainedModel, GenerationMixin):
    """Any of our models, ``.model``, with the interface of a Hugging Face causal language model.

    ``generate`` is Hugging Face's and computes every step from scratch; ``.model.generate`` is ours and keeps the
    memory.
    """

    config_class = LitMemoryConfig
    base_model_prefix = "model"

    def __init__(self, config: LitMemoryConfig) -> None:
        super().__init__(config)
        self.model = build("model", {"name": config.arch, **config.settings})
        self._tied_weights_keys = {
            f"model.{name}": f"model.{kept}" for name, kept in shared_weights(self.model).items()
        }
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **options: Any) -> Any:
        """Hugging Face's, but a weight that is missing or left over is a ValueError, not a warning."""
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **options)
        model, info = loaded
        for problem in ("missing_keys", "unexpected_keys"):
            if info[problem]:
                raise ValueError(
                    f"{model.name_or_path}: {problem}: {some(info[problem])}; expected the weights that config.json asks for"
                )
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the model has done it, and none may be missing from a folder."""

    def get_input_embeddings(self) -> nn.Module:
        return self.model.decoder.tokens

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        segment_len: int | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutput | tuple[Tensor, ...]:
        """Logits (B, T, V), and with ``labels`` (B, T; -100 is ignored) the mean cross-entropy of predicting label t+1
        at token t.

        attention_mask: (B, T), nonzero at real tokens; a padded sample gives what it gives alone, wherever its padding
            is.
        segment_len: default ``config.segment_len``.
        """
        prompts = pack(input_ids, attention_mask)
        hidden_BTD = unroll(
            self.model, prompts.ids_BT, segment_len or self.config.segment_len, mask_BT=prompts.mask()
        ).hidden_BTD
        logits = self.model.logits(hidden_BTD.take_along_dim(prompts.order_BT.argsort(dim=1)[:, :, None], dim=1))
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        out = CausalLMOutput(loss=loss, logits=logits)
        return out.to_tuple() if return_dict is False else out

    def generate(self, *args: Any, **options: Any) -> Any:
        """Hugging Face's, without its cache of keys and values: the memory is ours."""
        return super().generate(*args, **{"use_cache": False, **options})  # type: ignore[misc]

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, segment_len: int | None = None, **_: Any
    ) -> dict[str, Any]:
        """Arguments of ``forward`` for the next token: always the whole sequence."""
        return {"input_ids": input_ids, "attention_mask": attention_mask, "segment_len": segment_len}


AutoModelForCausalLM.register(LitMemoryConfig, LitMemoryForCausalLM, exist_ok=True)
